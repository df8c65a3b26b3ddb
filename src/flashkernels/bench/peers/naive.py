"""Plain PyTorch: matmul, softmax, matmul, in the dtype of the inputs, with the whole score matrix in memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from flashkernels.attention.cases import Case
from flashkernels.bench.peers import require
from flashkernels.bench.timing import Call

SCORE_LIMIT = 16 * 1024**3


def prepare(case: Case, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Masks and biases are made here, outside the clock. A ragged batch is a loop over its sequences."""
    q, k, v = args[:3]
    p = case.problem
    require(p.dtype != "fp8", "torch has no products of FP8 tensors of four dimensions")
    scores = sum(n * n for n in case.lengths) or p.batch * p.seq_q * p.seq_k
    score_bytes = p.heads * scores * p.element_bytes
    require(score_bytes < SCORE_LIMIT, f"the score matrix takes {score_bytes / 1024**3:.0f} GiB, the limit is 16 GiB")

    softcap, sinks = case.softcap, kwargs.get("sinks")
    sinks = None if sinks is None else sinks.to(q.dtype)
    if not case.lengths:
        bias = score_bias(p.seq_q, p.seq_k, q, kwargs)
        return Call(lambda: plain(q, k, v, bias, softcap, sinks))
    parts = list(zip(*(x[None].split(case.lengths, dim=1) for x in (q, k, v)), strict=True))
    biases = [score_bias(n, n, q, kwargs) for n in case.lengths]

    def ragged() -> torch.Tensor:
        outs = [plain(qs, ks, vs, bias, softcap, sinks) for (qs, ks, vs), bias in zip(parts, biases, strict=True)]
        return torch.cat(outs, dim=1)[0]

    return Call(ragged)


softmax = partial(torch.softmax, dim=-1)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *,
    weigh: Callable[[torch.Tensor], torch.Tensor] = softmax, **kwargs: Any,
) -> torch.Tensor:  # fmt: skip
    """Dense attention by the plain formula, keywords as in `fk.attention`: the error that plain torch makes."""
    sinks = kwargs.get("sinks")
    bias = score_bias(q.shape[1], k.shape[1], q, kwargs)
    return plain(q, k, v, bias, kwargs.get("softcap", 0.0), None if sinks is None else sinks.to(q.dtype), weigh)


def plain(
    q: torch.Tensor,  # (B, S_q, H, D)
    k: torch.Tensor,  # (B, S_k, H_kv, D)
    v: torch.Tensor,  # (B, S_k, H_kv, D_v)
    bias: torch.Tensor | None,
    softcap: float,
    sinks: torch.Tensor | None,
    weigh: Callable[[torch.Tensor], torch.Tensor] = softmax,
) -> torch.Tensor:
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores.masked_fill(~bias, float("-inf")) if bias.dtype == torch.bool else scores + bias
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    weights = weigh(scores)[..., : k.shape[2]]
    return (weights @ v).transpose(1, 2)


def score_bias(seq_q: int, seq_k: int, q: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Causal, window, ALiBi and mask as one tensor that broadcasts to (B, H, S_q, S_k): bool where that is enough."""
    mask, slopes = kwargs.get("mask"), kwargs.get("alibi_slopes")
    left, right = kwargs.get("window", (-1, -1))
    right = 0 if kwargs.get("causal") else right
    # Position of each key relative to the query's own, on the diagonal that ends bottom-right.
    rows = torch.arange(seq_q, device=q.device)[:, None] + seq_k - seq_q
    distance = torch.arange(seq_k, device=q.device) - rows
    visible = None
    if right >= 0:
        visible = distance <= right
    if left >= 0:
        visible = distance >= -left if visible is None else visible & (distance >= -left)
    bias = None
    if slopes is not None:
        bias = (-slopes.float()[..., None, None] * distance.abs()).to(q.dtype)
    if mask is not None and mask.dtype == torch.bool:
        visible = mask if visible is None else visible & mask
    elif mask is not None:
        bias = mask.to(q.dtype) if bias is None else bias + mask.to(q.dtype)
    if bias is None or visible is None:
        return visible if bias is None else bias
    return bias.masked_fill(~visible, float("-inf"))
