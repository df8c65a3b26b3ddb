"""The first kernel of the backward: delta and the level of each row, and zeros where dQ will be summed."""

from __future__ import annotations

import triton
import triton.language as tl

LOST = tl.constexpr(-1e6)  # so low that fp32 has no digits left for the sum of a row
CLEARED = tl.constexpr(2048)  # sums of dQ that a program clears at a time


@triton.jit(do_not_specialize=["seq_q", "heads", "blocks"])
def rows_kernel(
    o_ptr, do_ptr, dlse_ptr, lse_ptr, level_ptr, delta_ptr, sums_ptr,
    stride_ob: tl.int64, stride_os: tl.int64, stride_oh: tl.int64, stride_od,
    stride_gb: tl.int64, stride_gs: tl.int64, stride_gh: tl.int64, stride_gd,
    stride_eb: tl.int64, stride_eh: tl.int64, stride_es: tl.int64,
    seq_q, heads, blocks, sums: tl.int64,
    DIM_V: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BIASED: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Of BLOCK rows: delta = rowsum(dO * O) - dL, and the level, which is L in the unit of the logits.

    A row that sees nothing has the level +inf: all its weights are 0. So has one whose every key a float mask pushed
    so low that fp32 keeps no digits of the sum. A ragged batch is one sequence here. Every program also clears its
    share of the `sums` numbers that dQ will be added to, where it is (None: it is not).
    """
    pid = tl.program_id(0)
    if sums_ptr is not None:
        share = tl.cdiv(tl.cdiv(sums, tl.num_programs(0)), CLEARED) * CLEARED
        first = pid.to(tl.int64) * share
        for i in tl.range(first, tl.minimum(first + share, sums), CLEARED):
            at = i + tl.arange(0, CLEARED)
            tl.store(sums_ptr + at, tl.zeros((CLEARED,), tl.float32), mask=at < sums)
    bh = pid // blocks
    batch = bh // heads
    head = bh - batch * heads
    offs_m = (pid - bh * blocks) * BLOCK + tl.arange(0, BLOCK)
    offs_d = tl.arange(0, WIDTH)
    inside = offs_m < seq_q
    rows = inside[:, None] & (offs_d < DIM_V)[None, :]
    at = o_ptr + batch * stride_ob + head * stride_oh
    at_g = do_ptr + batch * stride_gb + head * stride_gh
    o = tl.load(at + offs_m[:, None] * stride_os + offs_d.to(tl.int64)[None, :] * stride_od, mask=rows, other=0.0)
    do = tl.load(at_g + offs_m[:, None] * stride_gs + offs_d.to(tl.int64)[None, :] * stride_gd, mask=rows, other=0.0)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + batch * stride_eb + head * stride_eh + offs_m * stride_es, mask=inside, other=0.0)
    at = bh.to(tl.int64) * seq_q + offs_m
    level = tl.load(lse_ptr + at, mask=inside, other=0.0) * UNIT
    hidden = level == float("-inf")
    if BIASED:
        hidden = level < LOST
    tl.store(level_ptr + at, tl.where(hidden, float("inf"), level), mask=inside)
    tl.store(delta_ptr + at, delta, mask=inside)
