"""Who works on what, decided on the device from the lengths, so that a captured graph follows them.

A *unit* is one block of query rows of one KV head of one sequence; its keys are cut into *items*: steps of BLOCK_N
keys, or fixed chunks where the result must not depend on the batch. The items of all units, in the order sequence,
head, row block, key, are dealt out to the programs in equal contiguous ranges. A range may begin and end inside a unit:
such a unit is left in parts, for `combine.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def shape_of(
    b, there, length_ptr, cu_ptr, tokens, group, left,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GRAIN: tl.constexpr, LEFT: tl.constexpr,
):  # fmt: skip
    """Of sequences b (a number or a vector, `there` says which exist): keys, queries, where the keys begin that any of
    them sees (a multiple of BLOCK_N), row blocks, and items of a unit."""
    length = tl.maximum(tl.load(length_ptr + b, mask=there, other=0), 0)
    count = tl.where(there, tokens, 0)
    if cu_ptr is not None:
        count = tl.load(cu_ptr + b + 1, mask=there, other=0) - tl.load(cu_ptr + b, mask=there, other=0)
    first = tl.zeros_like(length)
    if LEFT:
        first = tl.maximum(length - count - left, 0) // BLOCK_N * BLOCK_N
    blocks = (count * group + BLOCK_M - 1) // BLOCK_M
    items = (length - first + GRAIN - 1) // GRAIN
    return length, count, first, blocks, items


@triton.jit
def total_items(
    batch, length_ptr, cu_ptr, tokens, group, kv_heads, left,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GRAIN: tl.constexpr, LEFT: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    total = tl.zeros((), tl.int32)
    for start in tl.range(0, batch, SEARCH):
        b = start + tl.arange(0, SEARCH)
        _, _, _, blocks, items = shape_of(
            b, b < batch, length_ptr, cu_ptr, tokens, group, left, BLOCK_M, BLOCK_N, GRAIN, LEFT
        )  # fmt: skip
        total += tl.sum(items * blocks * kv_heads)
    return total


@triton.jit
def find(
    item, batch, length_ptr, cu_ptr, tokens, group, kv_heads, left,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GRAIN: tl.constexpr, LEFT: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """The sequence that an item belongs to, and that sequence's first item."""
    found = tl.zeros((), tl.int32)
    base = tl.zeros((), tl.int32)
    before = tl.zeros((), tl.int32)
    for start in tl.range(0, batch, SEARCH):
        b = start + tl.arange(0, SEARCH)
        _, _, _, blocks, items = shape_of(
            b, b < batch, length_ptr, cu_ptr, tokens, group, left, BLOCK_M, BLOCK_N, GRAIN, LEFT
        )  # fmt: skip
        work = items * blocks * kv_heads
        ends = before + tl.cumsum(work, 0)
        passed = (ends <= item) & (b < batch)
        found += tl.sum(passed.to(tl.int32))
        base = tl.maximum(base, tl.max(tl.where(passed, ends, 0)))
        before += tl.sum(work)
    return found, base


@triton.jit
def range_start(p, total, programs):
    """The first item of program p."""
    return (p.to(tl.int64) * total // programs).to(tl.int32)
