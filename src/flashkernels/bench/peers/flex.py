"""FlexAttention, compiled. Compiling takes a while for every case."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from flashkernels.attention.cases import Case
from flashkernels.bench.peers import require
from flashkernels.bench.timing import Call


def prepare(case: Case, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    p = case.problem
    require(p.dtype != "fp8", "has no FP8")
    require(not p.varlen, "takes dense batches only (document masks are not tried)")
    require(not p.sinks, "has no sinks")
    # Without a reset the recompilation limit is reached after a few cases, and the slow eager path would be timed.
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False)

    q, k, v = (x.transpose(1, 2) for x in args[:3])
    block_mask, score_mod = _block_mask(case, q, kwargs), _score_mod(case, kwargs)

    def run() -> torch.Tensor:
        out = compiled(q, k, v, score_mod=score_mod, block_mask=block_mask, enable_gqa=p.heads != p.kv_heads)
        return out.transpose(1, 2)

    return Call(run)


def _block_mask(case: Case, q: torch.Tensor, kwargs: dict[str, Any]) -> Any:
    """Causal, window and a boolean mask, so that FlexAttention skips the blocks that nobody sees."""
    p = case.problem
    left, right = p.band
    mask = kwargs.get("mask") if p.mask == "bool" else None
    if left < 0 and right < 0 and mask is None:
        return None
    shift = p.seq_k - p.seq_q

    def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
        seen = j >= 0
        if right >= 0:
            seen = seen & (j - i - shift <= right)
        if left >= 0:
            seen = seen & (j - i - shift >= -left)
        return seen if mask is None else seen & mask[b, 0, i, j]

    return create_block_mask(visible, p.batch if mask is not None else None, None, p.seq_q, p.seq_k, device=q.device)


def _score_mod(case: Case, kwargs: dict[str, Any]) -> Any:
    p = case.problem
    softcap, slopes = case.softcap, kwargs.get("alibi_slopes")
    mask = kwargs.get("mask") if p.mask == "float" else None
    if not softcap and slopes is None and mask is None:
        return None
    shift = p.seq_k - p.seq_q

    def modified(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        if slopes is not None:
            score = score - slopes[h] * (i + shift - j).abs()
        return score if mask is None else score + mask[b, 0, i, j]

    return modified
