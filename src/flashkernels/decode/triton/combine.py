"""Joins the parts that decode programs leave of a unit: states with their own maximum, sum and weighted values."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from flashkernels.attention.triton.parts import LN2, LOG2E
from flashkernels.decode.problem import DecodeProblem
from flashkernels.decode.triton.schedule import find, range_start, shape_of, total_items
from flashkernels.decode.triton.tiles import DecodeTile
from flashkernels.jit.launch import Launcher, compile_options

PARTS = 16  # read together
WARPS = 4


@triton.jit
def part_of(p, item0, total, working, INVARIANT: tl.constexpr):
    """First item of part p, and where program p left the part of a unit that begins at `item0`."""
    if INVARIANT:
        start = p
        place = p
    else:
        start = range_start(p, total, working)
        place = 2 * p + (start < item0).to(tl.int32)
    return start, place


@triton.jit(do_not_specialize=["batch", "tokens", "group", "kv_heads", "left", "programs"])
def combine_kernel(
    part_ptr, state_ptr, length_ptr, cu_ptr, sinks_ptr, out_ptr, lse_ptr,
    stride_ob: tl.int64, stride_ot: tl.int64, stride_oh: tl.int64, stride_lb: tl.int64, stride_lh: tl.int64,
    stride_sh: tl.int64, batch, tokens, group, kv_heads, left, programs,
    DIM_V: tl.constexpr, WIDTH: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    GRAIN: tl.constexpr, LEFT: tl.constexpr, INVARIANT: tl.constexpr, EARLY: tl.constexpr, SEARCH: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """One row of a unit that lies in several ranges. Of these, the second one's program number names this program."""
    p = tl.program_id(0) // ROWS
    row = tl.program_id(0) % ROWS
    total = total_items(batch, length_ptr, cu_ptr, tokens, group, kv_heads, left, BLOCK_M, BLOCK_N, GRAIN, LEFT, SEARCH)
    working = total if INVARIANT else tl.minimum(programs, total)
    working = tl.maximum(working, 1)
    start, _ = part_of(p, 0, total, working, INVARIANT)
    before, _ = part_of(p - 1, 0, total, working, INVARIANT)
    b, base = find(
        start, batch, length_ptr, cu_ptr, tokens, group, kv_heads, left, BLOCK_M, BLOCK_N, GRAIN, LEFT, SEARCH
    )
    _, count, _, blocks, items = shape_of(
        b, b < batch, length_ptr, cu_ptr, tokens, group, left, BLOCK_M, BLOCK_N, GRAIN, LEFT
    )  # fmt: skip
    unit = (start - base) // tl.maximum(items, 1)
    item0 = base + unit * items
    row += unit % tl.maximum(blocks, 1) * BLOCK_M
    if EARLY:
        gdc_wait()  # until here it runs while the last programs of the decode do; each must wait, also to do nothing
    if (p == 0) | (p >= working) | (row >= count * group):
        return
    if (start == item0) | (before > item0):
        return  # the unit begins here, or an earlier boundary is in it
    at_m = row % BLOCK_M

    cols = tl.arange(0, WIDTH)
    m = tl.full((), float("-inf"), tl.float32)
    weight = tl.zeros((), tl.float32)
    acc = tl.zeros((WIDTH,), tl.float32)
    head = (unit // blocks) * group + row % group
    if sinks_ptr is not None:  # it enters once, here
        m = tl.load(sinks_ptr + head * stride_sh).to(tl.float32) * LOG2E
        weight = tl.where(m == float("-inf"), 0.0, 1.0)
    first = p - 1
    more = True
    while more:
        part = first + tl.arange(0, PARTS)
        begins, place = part_of(part, item0, total, working, INVARIANT)
        there = (part < working) & (begins < item0 + items)
        at = place.to(tl.int64) * BLOCK_M + at_m
        ms = tl.load(state_ptr + 2 * at, mask=there, other=float("-inf"))
        ws = tl.load(state_ptr + 2 * at + 1, mask=there, other=0.0)
        values = tl.load(
            part_ptr + at[:, None] * DIM_V + cols[None, :], mask=there[:, None] & (cols < DIM_V)[None, :], other=0.0
        )  # fmt: skip
        m_new = tl.maximum(m, tl.max(ms, 0))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m - m_safe)
        shares = tl.where(ws == 0, 0.0, tl.exp2(ms - m_safe))  # a part in which the row sees nothing
        weight = weight * alpha + tl.sum(ws * shares, 0)
        acc = acc * alpha + tl.sum(values * shares[:, None], 0)
        m = m_new
        first += PARTS
        more = tl.max(there.to(tl.int32) * (part == first - 1).to(tl.int32), 0) > 0

    wide_b = b.to(tl.int64)
    token = (row // group).to(tl.int64)
    if cu_ptr is not None:
        token += tl.load(cu_ptr + b)
        wide_b = wide_b * 0
    out = acc / tl.where(weight == 0, 1.0, weight)
    to = out_ptr + wide_b * stride_ob + token * stride_ot + head * stride_oh + cols
    tl.store(to, out.to(out_ptr.dtype.element_ty), mask=cols < DIM_V)
    if lse_ptr is not None:
        lse = tl.where(weight == 0, float("-inf"), (m + tl.log2(weight)) * LN2)
        tl.store(lse_ptr + wide_b * stride_lb + head * stride_lh + token, lse)


class Combine:
    """The second launch, with the room that parts need."""

    def __init__(
        self, problem: DecodeProblem, tile: DecodeTile, fixed: dict[str, Any], programs: int, device: int | None
    ) -> None:
        rows = tile.block_m if problem.ragged else min(tile.block_m, problem.group * problem.tokens)
        if problem.batch_invariant:
            blocks = -(-problem.total * problem.group // tile.block_m) + problem.batch * problem.ragged
            if not problem.ragged:
                blocks = problem.batch * -(-problem.group * problem.tokens // tile.block_m)
            self.parts = blocks * problem.kv_heads * -(-problem.context // fixed["GRAIN"])
            self.grid = self.parts * rows
        else:
            self.parts, self.grid = 2 * programs, programs * rows
        self.block_m, self.dim_v = tile.block_m, problem.head_dim_v
        early = {"launch_pdl": True} if fixed["EARLY"] else {}
        options = compile_options(WARPS, 3, 0) | early
        self.launcher = Launcher(combine_kernel, constants(problem, tile, fixed, rows), options, device)

    def workspace(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """Room for parts, fp32: weighted values, and maximum and sum of each row."""
        rows = self.parts * self.block_m
        return (q.new_empty((rows, self.dim_v), dtype=torch.float32), q.new_empty((rows, 2), dtype=torch.float32))

    def __call__(self, tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> None:
        self.launcher(self.grid, tensors, numbers)


def constants(problem: DecodeProblem, tile: DecodeTile, fixed: dict[str, Any], rows: int) -> dict[str, Any]:
    """The kernel's compile-time arguments, in its order."""
    return {
        "DIM_V": problem.head_dim_v, "WIDTH": max(16, triton.next_power_of_2(problem.head_dim_v)),
        "BLOCK_M": tile.block_m, "ROWS": rows, "BLOCK_N": tile.block_n, "GRAIN": fixed["GRAIN"], "LEFT": fixed["LEFT"],
        "INVARIANT": problem.batch_invariant, "EARLY": fixed["EARLY"], "SEARCH": fixed["SEARCH"], "PARTS": PARTS,
    }  # fmt: skip
