"""Correctness before speed: the oracle in fp32, and the error that plain torch makes on the same inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import torch

import flashkernels as fk
from flashkernels.attention.cases import Case
from flashkernels.attention.reference import dequantised
from flashkernels.attention.tensors import Tensors
from flashkernels.bench.peers import naive

SCORE_LIMIT = 2 * 1024**3  # bytes of fp32 scores that one step may hold
ROUNDING = 1e-5  # what two right answers may differ by when plain torch makes no error at all


def tolerance(reference_error: float) -> float:
    """The largest error that passes: twice what plain torch makes in the same dtype."""
    return 2 * reference_error + ROUNDING


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """Norm of the difference over the norm of the reference; NaN when the output has one."""
    if out.shape != reference.shape:
        raise ValueError(f"the output has shape {tuple(out.shape)}, the reference {tuple(reference.shape)}")
    return float((out.to(reference.dtype) - reference).norm() / reference.norm())


def oracle(case: Case, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """What the case should give: the `torch` implementation on the inputs widened to fp32."""
    args, kwargs = _without_scales(args, kwargs)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **piece: Any) -> torch.Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        return cast(torch.Tensor, fk.attention(q.to(wide), k.to(wide), v.to(wide), impl="torch", **piece))

    return _assembled(attend, case, args, kwargs, torch.promote_types(args[0].dtype, torch.float32))


def plain(case: Case, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """What plain torch gives in the dtype of the inputs. Of FP8, which it cannot multiply: see `eight_bits`."""
    if args[0].dtype == torch.float8_e4m3fn:
        attend = partial(naive.attention, weigh=eight_bits)
        return _assembled(attend, case, *_without_scales(args, kwargs), torch.bfloat16)
    return _assembled(naive.attention, case, args, kwargs, args[0].dtype)


def eight_bits(scores: torch.Tensor) -> torch.Tensor:
    """The softmax of fp32 scores with weights that are rounded to FP8, as P must be for the tensor cores; their sum is
    not rounded. The largest weight of a row is between 8 and 16: FP8 has few bits below 1, and ends at 448."""
    logits = scores * math.log2(math.e)
    top = logits.amax(-1, keepdim=True)
    weights = torch.exp2(logits - (top.ceil() - 4))
    return weights.to(torch.float8_e4m3fn).to(scores.dtype) / weights.sum(-1, keepdim=True)


def _without_scales(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """FP8 inputs multiplied by their scales, in fp32; others as they are."""
    if args[0].dtype != torch.float8_e4m3fn:
        return args, kwargs
    names = ("q_scale", "k_scale", "v_scale")
    q_scale, k_scale, v_scale = map(kwargs.get, names)
    q, k, v = args
    tensors = Tensors(q, k, v, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)
    return dequantised(tensors), {name: value for name, value in kwargs.items() if name not in names}


def _assembled(
    attend: Callable[..., torch.Tensor], case: Case, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> torch.Tensor:
    out = args[0].new_empty(*args[0].shape[:-1], case.problem.head_dim_v, dtype=dtype)
    for place, qkv, piece in pieces(case, args, kwargs):
        result = attend(*qkv, **piece)
        out[place] = result[0] if case.lengths else result
    return out


def pieces(case: Case, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any, dict[str, Any]]]:
    """Dense parts of the case whose scores fit into the limit: where each goes, its q, k, v, and its keywords."""
    q, k, v = args[:3]
    p = case.problem
    group = p.heads // p.kv_heads
    scores = 4 * p.seq_q * p.seq_k * group  # bytes of one KV head
    step = max(1, min(p.kv_heads, SCORE_LIMIT // scores))
    # A batch that fits whole is one part; else each sequence is its own.
    whole = not case.lengths and p.batch * p.kv_heads * scores <= SCORE_LIMIT
    ends = [sum(case.lengths[:i]) for i in range(len(case.lengths) + 1)]
    for b in [slice(None)] if whole else [slice(b, b + 1) for b in range(p.batch)]:
        rows = (slice(ends[b.start], ends[b.stop]),) if case.lengths else (b, slice(None))
        for first in range(0, p.kv_heads, step):
            kv = slice(first, first + step)
            heads = slice(kv.start * group, kv.stop * group)
            piece = dict(kwargs)
            for name in ("alibi_slopes", "sinks"):
                if name in piece:
                    piece[name] = piece[name][heads]
            if "mask" in piece:
                piece["mask"] = piece["mask"].expand(p.batch, p.heads, p.seq_q, p.seq_k)[b, heads]
            parts = q[(*rows, heads)], k[(*rows, kv)], v[(*rows, kv)]
            yield (*rows, heads), tuple(x[None] for x in parts) if case.lengths else parts, piece
