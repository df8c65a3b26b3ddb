"""The fast CPU path: torch's own fused attention, where it computes exactly what was asked."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flashkernels.attention.problem import AttentionProblem
from flashkernels.attention.tensors import Run, Tensors, laid_out
from flashkernels.hardware import Gpu

FEWEST_KEYS = 16  # a vector of fp32 with AVX-512; fewer take another way (torch 2.13 on a CPU, 2026-11-16)


def rejects(problem: AttentionProblem, gpu: Gpu | None) -> str | None:
    if problem.device != "cpu":
        return "runs on the CPU only"
    if problem.varlen:
        return "torch's fused attention takes no ragged batch"
    if problem.need_lse:
        return "torch's fused attention returns no log-sum-exp"
    if problem.softcap or problem.alibi or problem.sinks:
        return "torch's fused attention has no softcap, ALiBi or sinks"
    if problem.dropout_p:
        return "torch's fused attention drops other weights than ours would"
    if problem.mask:
        return "torch's fused attention gives NaN for rows that a mask hides completely"
    if problem.window[0] >= 0 or (problem.window[1] >= 0 and not problem.causal):
        return "torch's fused attention has no window"
    if not problem.positive_scale:
        return "torch's fused causal attention gives NaN unless softmax_scale is positive"
    if problem.causal and problem.seq_q != problem.seq_k:
        return "torch aligns causal top-left, ours is bottom-right: they differ when S_q != S_k"
    if problem.head_dim != problem.head_dim_v:
        return "torch's fused CPU attention needs D_v = D"
    if min(problem.batch, problem.seq_q, problem.seq_k, problem.heads) == 0:
        return "an empty problem has nothing to fuse"
    if problem.dtype == "fp8":
        return "torch's fused attention has no FP8"
    if problem.seq_k < FEWEST_KEYS:
        return f"torch's fused CPU attention loses NaN where there are fewer than {FEWEST_KEYS} keys"
    if problem.dtype == "fp16":
        return "torch's fused CPU attention is slow in fp16"
    return None


def plan(problem: AttentionProblem, gpu: Gpu | None, tensors: Tensors) -> Run:
    return partial(forward, problem)


def forward(
    problem: AttentionProblem, tensors: tuple[Any, ...], softmax_scale: float, softcap: float
) -> tuple[Tensor, Tensor | None]:
    q, k, v = (x.transpose(1, 2) for x in tensors[:3])
    clean = v
    if problem.causal and not v.isfinite().all():
        clean = torch.where(v.isfinite(), v, 0.0).to(v.dtype)
    out = F.scaled_dot_product_attention(
        q, k, clean, is_causal=problem.causal, scale=softmax_scale, enable_gqa=problem.heads != problem.kv_heads
    )
    if clean is not v:
        out = out + _causal_poison(v).repeat_interleave(problem.heads // problem.kv_heads, 1)
    return laid_out(problem, tensors[0], out.transpose(1, 2)), None


def _causal_poison(v: Tensor) -> Tensor:
    """What Inf and NaN in V (B, H, S, D) add to the rows at and after them; torch would let them reach earlier rows."""
    up = (v.isnan() | (v == float("inf"))).cumsum(-2) > 0
    down = (v.isnan() | (v == float("-inf"))).cumsum(-2) > 0
    zero = torch.zeros_like(v)
    return torch.where(up, float("inf"), zero) + torch.where(down, float("-inf"), zero)
