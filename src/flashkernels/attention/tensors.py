"""The tensors of one attention call, as every implementation receives them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashkernels.attention.problem import AttentionProblem


class Tensors(NamedTuple):
    """Dense (B, S, H, D) or ragged (total, H, D). A mask broadcasts to (B, H, S_q, S_k)."""

    q: Tensor
    k: Tensor
    v: Tensor
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    mask: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    block_table: Tensor | None = None  # (B, pages) int32; then k and v are (pages, page_size, H_kv, D)
    q_scale: Tensor | None = None  # of FP8, to multiply by: (B, H), or (B, H, ceil(S_q / 128))
    k_scale: Tensor | None = None  # (B, H_kv), or (B, H_kv, ceil(S_k / 128))
    v_scale: Tensor | None = None  # (B, H_kv)
    dropout_seed: Tensor | None = None  # (1,) int64, where there is dropout


# What an implementation's `plan` returns: run(tensors, softmax_scale, softcap) -> output, log-sum-exp or None. The
# tensors are those of `Tensors`, as a tuple: to name them takes a twentieth of the time of a launch.
Run = Callable[[tuple[Any, ...], float, float], "tuple[Tensor, Tensor | None]"]


class Given(NamedTuple):
    """What a backward gets beside the inputs of the call."""

    grad_out: Tensor
    grad_lse: Tensor | None
    out: Tensor | None  # what the forward returned, where it kept it
    lse: Tensor | None


# What a backward's `plan` returns: run(tensors, given, softmax_scale, softcap) -> the gradients of q, k, v,
# alibi_slopes, sinks and mask; None for those that were not asked for.
RunBackward = Callable[[Tensors, Given, float, float], "list[Tensor | None]"]


def strides_of(x: Tensor) -> tuple[int, ...]:
    """(batch, seq, head, dim) strides; a ragged tensor has no batch."""
    return x.stride() if x.dim() == 4 else (0, *x.stride())


def unaddressable(x: Tensor) -> str:
    """Why TMA cannot read x, or nothing: it wants aligned rows of contiguous elements, none empty or repeated."""
    steps = [s * x.element_size() for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n > 1]
    if x.numel() == 0:
        return f"shape {tuple(x.shape)} is empty"
    if x.data_ptr() % 16:
        return f"its address is a multiple of {x.data_ptr() & -x.data_ptr()} bytes, not of 16"
    if x.stride(-1) != 1 and x.shape[-1] != 1:
        return f"its last dimension has stride {x.stride(-1)}, not 1"
    if any(step <= 0 or step % 16 for step in steps):
        return f"its strides {x.stride()} are not all multiples of 16 bytes above 0"
    return ""


def alignment(x: Tensor) -> int:
    """What its compiler knows strides of x to be multiples of, if it reads 16 bytes of a row at a time at all: else 1.
    That of Triton's own JIT, which launches while a profiler listens, knows of 16 alone (`specialised.specialise`)."""
    if x.data_ptr() % 16 or x.stride(-1) != 1:
        return 1
    return next((n for n in (16, 8) if not any(step % n for step in x.stride()[:-1])), 1)


def addressed(problem: AttentionProblem, tensors: Tensors) -> AttentionProblem:
    """The problem with what TMA has against its tensors, and Triton, if anything."""
    if problem.device != "cuda":
        return problem
    named = dict(zip("qkv", tensors[:3], strict=True))
    against = next((f"{name}: {why}" for name, x in named.items() if (why := unaddressable(x))), "")
    odd = (f"{name}: the address or the strides {x.stride()}" for name, x in named.items() if alignment(x) == 1)
    misaligned = next((f"{one} are no multiples of 16 bytes" for one in odd), "")
    return replace(problem, unaddressable=against, misaligned=misaligned if problem.element_bytes == 2 else "")


def output_dtype(q: Tensor) -> torch.dtype:
    """q's own, and bf16 for FP8."""
    return torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype


def empty_output(q: Tensor, head_dim_v: int, layout: str) -> Tensor:
    """An output for q, indexed like q, contiguous in the memory order of `layout`."""
    if q.dim() == 3 or layout == "bshd":
        return q.new_empty((*q.shape[:-1], head_dim_v), dtype=output_dtype(q))
    batch, seq, heads, _ = q.shape
    return q.new_empty((batch, heads, seq, head_dim_v), dtype=output_dtype(q)).transpose(1, 2)


def lse_shape(q: Tensor) -> tuple[int, ...]:
    """(B, H, S_q), or (H, total_q) for a ragged batch."""
    return (q.shape[1], q.shape[0]) if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1])


def lse_dtype(q: Tensor) -> torch.dtype:
    """fp32, and fp64 for the fp64 inputs that only the reference takes."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def laid_out(problem: AttentionProblem, q: Tensor, out: Tensor) -> Tensor:
    """`out` in the memory order the problem asks for; copied only if it is in another."""
    target = empty_output(q, problem.head_dim_v, problem.layout)
    return out if out.stride() == target.stride() else target.copy_(out)
