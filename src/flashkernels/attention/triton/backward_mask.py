"""The gradient of a float mask: dS, summed over the dimensions that the mask is broadcast over.

dS[b, h, i, j] is large, so how the sum is made depends on the mask's shape. Every form gives the same bits in every
run, and none has a buffer larger than the mask but for a few blocks.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashkernels.attention.problem import AttentionProblem
from flashkernels.attention.triton.backward_parts import load_rows, logit_gradient, within
from flashkernels.attention.triton.dropout import kept
from flashkernels.attention.triton.parts import LOG2E, load_parts, logits, scores
from flashkernels.hardware import Gpu
from flashkernels.jit.launch import Launcher, compile_options
from flashkernels.tiling import Tile

PROGRAMS = 2  # a multiprocessor: where blocks of the mask are fewer, the heads that share them are dealt out in parts

# rows: (.., .., .., 1). The dS of a row add up to dL + delta * P_sink, so no score is made.
# columns: (.., .., 1, S_k). The pass over keys adds up what it walks by: one number a key, head and batch.
# scores: (B, H, S_q, S_k). The pass over keys stores each block as it comes by.
# shared: (.., .., S_q, S_k), by batches or heads or both. A pass of its own: a program has a block of the mask, and
#     walks the heads that share it. That makes S and dP once more, and moves fewer bytes than additions in memory.
Form = Literal["none", "rows", "columns", "scores", "shared"]


def form_of(problem: AttentionProblem, mask: Tensor | None) -> Form:
    """How the gradient of this mask is made."""
    if mask is None:
        return "none"
    batch, heads, rows, keys = sizes_of(mask)
    if keys == 1:
        return "rows"
    if rows == 1:
        return "columns"
    return "scores" if (batch, heads) == (problem.batch, problem.heads) else "shared"


def sizes_of(mask: Tensor) -> tuple[int, ...]:
    """All four."""
    return (*(1,) * (4 - mask.dim()), *mask.shape)


def buffer_of(form: Form, problem: AttentionProblem, mask: Tensor) -> Tensor | None:
    """What the pass over keys writes."""
    if form == "columns":
        return mask.new_empty((problem.batch, problem.heads, 1, problem.seq_k), dtype=torch.float32)
    if form == "scores":  # blocks that nobody sees are not walked by
        fresh = torch.empty if problem.band == (-1, -1) else torch.zeros
        return fresh(sizes_of(mask), dtype=mask.dtype, device=mask.device)
    return None


def sums_of_rows(delta: Tensor, level: Tensor, sunk: Tensor | None, grad_lse: Tensor | None) -> Tensor:
    """What the dS of each row add up to, (B, H, S_q, 1); `sunk` is the weight of the row's sink. Not known from P:
    sum(P * dP) = delta + dL, and the weights add up to 1 - P_sink. A NaN in delta stays one."""
    rows = delta * (0.0 if sunk is None else sunk)
    if grad_lse is not None:
        rows = rows + grad_lse
    return rows.masked_fill(level == math.inf, 0.0)[..., None]


def summed(parts: Tensor, mask: Tensor) -> Tensor:
    """(B, H, S_q, S_k), where broadcast sizes may be 1 already, to the mask's shape and dtype."""
    return parts.sum_to_size(sizes_of(mask)).reshape(mask.shape).to(mask.dtype)


def step_of(walk: int, blocks: int, gpu: Gpu) -> int:
    """How many of the `walk` heads that share a block one program walks over: all, if there are blocks enough."""
    programs = -(-PROGRAMS * gpu.sms // max(1, blocks))
    return max(1, -(-walk // programs))


class SharedPass:
    """The launch of `dmask_kernel` for one kind of call; constants, strides and band are those of the other passes."""

    def __init__(
        self, problem: AttentionProblem, gpu: Gpu, tile: Tile, mask: Tensor, constants: dict[str, Any],
        strides: tuple[int, ...], band: tuple[int, ...],
    ) -> None:  # fmt: skip
        batch, heads = sizes_of(mask)[:2]
        blocks_m, blocks_n = -(-problem.seq_q // tile.block_m), -(-problem.seq_k // tile.block_n)
        blocks = batch * heads * blocks_m * blocks_n
        shared_batches = problem.batch if batch == 1 else 1
        shared_heads = problem.heads if heads == 1 else 1
        walk = shared_batches * shared_heads
        step = step_of(walk, blocks, gpu)
        self.parts = max(1, -(-walk // step))
        self.grid = blocks * self.parts
        options = compile_options(tile.warps, tile.stages, 0)
        self.launcher = Launcher(dmask_kernel, constants, options, mask.device.index)
        self.numbers = (*strides, problem.seq_k, problem.seq_q, problem.seq_k, problem.heads // problem.kv_heads,
                        blocks_m, blocks_n, heads, batch * heads, shared_heads, walk, step, *band)  # fmt: skip

    def __call__(
        self, stats: tuple[Tensor | None, ...], mask: Tensor, others: tuple[Tensor | None, ...],
        numbers: tuple[Any, ...],
    ) -> Tensor:  # fmt: skip
        """The gradient: in the mask's dtype, or of parts that are added up in fp32."""
        made = mask.new_empty(
            (self.parts, *sizes_of(mask)), dtype=mask.dtype if self.parts == 1 else torch.float32
        )  # fmt: skip
        if self.grid:
            self.launcher(self.grid, (*stats, mask, *others, made), (*self.numbers, *numbers))
        return made[0] if self.parts == 1 else made.sum(0)


@triton.jit(
    do_not_specialize=[
        "seq_q", "seq_k", "blocks_m", "blocks_n", "heads", "owners", "shared_heads", "walk", "step", "left", "right",
        "threshold",
    ]
)  # fmt: skip
def dmask_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, level_ptr, delta_ptr, norm_ptr, mask_ptr, slopes_ptr, seed_ptr, dmask_ptr,
    stride_qb: tl.int64, stride_qs: tl.int64, stride_qh: tl.int64, stride_qd,
    stride_kb: tl.int64, stride_ks: tl.int64, stride_kh: tl.int64, stride_kd,
    stride_vb: tl.int64, stride_vs: tl.int64, stride_vh: tl.int64, stride_vd,
    stride_gb: tl.int64, stride_gs: tl.int64, stride_gh: tl.int64, stride_gd,
    stride_lb: tl.int64, stride_lh: tl.int64,
    stride_mb: tl.int64, stride_mh: tl.int64, stride_mm: tl.int64, stride_mn,
    stride_ab: tl.int64, stride_ah: tl.int64, stride_dm,
    seq_q, seq_k, group, blocks_m, blocks_n, heads, owners, shared_heads, walk, step, left, right, scale, softcap,
    threshold, keep_scale,
    DIM: tl.constexpr, DIM_V: tl.constexpr, PARTS: tl.constexpr, PARTS_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """One block of the mask's gradient, over `step` of the `walk` heads that share it.

    The mask has `owners` heads of its own, `heads` of them in a batch (1: its heads are shared). The result is
    (parts, owners, S_q, S_k), with rows `stride_dm` apart.
    """
    pid = tl.program_id(0)  # neighbours read the same rows and keys of the same head at about the same time
    block_n = pid % blocks_n
    block_m = pid // blocks_n % blocks_m
    rest = pid // (blocks_n * blocks_m)
    owner = rest % owners
    m = block_m * BLOCK_M
    n = block_n * BLOCK_N
    shift = seq_k - seq_q
    offs_m = m + tl.arange(0, BLOCK_M)
    offs_n = n + tl.arange(0, BLOCK_N)
    i = offs_m[:, None]
    j = offs_n[None, :]
    first_batch = owner // heads
    first_head = owner % heads

    # the mask is the same for all of them; -inf hides
    seen = within(i, j, seq_q, seq_k, shift, left, right, LEFT, RIGHT)
    mask_ptr += first_batch * stride_mb + first_head * stride_mh
    bias = tl.load(mask_ptr + i * stride_mm + j.to(tl.int64) * stride_mn, mask=seen, other=float("-inf"))
    bias = bias.to(tl.float32)
    seen = bias != float("-inf")
    bias = tl.maximum(bias, -1e38) * UNIT

    first = rest // owners * step
    end = tl.minimum(first + step, walk)
    if RIGHT:
        end = tl.where(n > tl.minimum(m + BLOCK_M, seq_q) - 1 + shift + right, first, end)
    if LEFT:
        end = tl.where(n + BLOCK_N - 1 < m + shift - left, first, end)
    dmask = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for at in tl.range(first, end, num_stages=STAGES):
        batch = first_batch + at // shared_heads
        head = first_head + at % shared_heads
        head_k = head // group
        q_head = q_ptr + batch * stride_qb + m * stride_qs + head * stride_qh
        do_head = do_ptr + batch * stride_gb + m * stride_gs + head * stride_gh
        k_head = k_ptr + batch * stride_kb + n * stride_ks + head_k * stride_kh
        v_head = v_ptr + batch * stride_vb + n * stride_vs + head_k * stride_vh
        rows = batch * stride_lb + head * stride_lh
        q = load_parts(q_head, None, 0, 0, 0, seq_q - m, stride_qs, stride_qd, DIM, PARTS, BLOCK_M, False)
        k = load_parts(k_head, None, 0, 0, 0, seq_k - n, stride_ks, stride_kd, DIM, PARTS, BLOCK_N, False)
        s = logits(scores(q, k, PRECISION), scale, softcap, 0.0, None, None, 0, SOFTCAP, False)
        if slopes_ptr is not None:
            slope = tl.load(slopes_ptr + batch * stride_ab + head * stride_ah).to(tl.float32) * UNIT
            s -= slope * tl.abs(i + shift - j).to(tl.float32)
        level = load_rows(level_ptr + rows, None, 0, offs_m, seq_q, True)
        p = tl.where(seen, tl.exp2((s + bias - level[:, None]) * (LOG2E / UNIT)), 0.0)
        if norm_ptr is not None:
            p *= load_rows(norm_ptr + rows, None, 0, offs_m, seq_q, True)[:, None]
        do = load_parts(do_head, None, 0, 0, 0, seq_q - m, stride_gs, stride_gd, DIM_V, PARTS_V, BLOCK_M, False)
        v = load_parts(v_head, None, 0, 0, 0, seq_k - n, stride_vs, stride_vd, DIM_V, PARTS_V, BLOCK_N, False)
        dp = scores(do, v, PRECISION)
        if seed_ptr is not None:
            drop = (tl.load(seed_ptr), threshold, batch, head)
            dp = tl.where(kept(drop, m, n, BLOCK_M, BLOCK_N, False), dp * keep_scale, 0.0)
        delta = load_rows(delta_ptr + rows, None, 0, offs_m, seq_q, True)
        dmask += logit_gradient(p, dp, delta[:, None], True)

    to = dmask_ptr + (rest.to(tl.int64) * seq_q + offs_m)[:, None] * stride_dm + j
    tl.store(to, dmask.to(dmask_ptr.dtype.element_ty), mask=(i < seq_q) & (j < stride_dm))
