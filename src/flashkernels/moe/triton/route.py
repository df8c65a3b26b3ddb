"""Routing in Triton: the k best experts by k rounds of a maximum, and a stable counting sort without atomics.

Tokens are cut into *parts*, one program each. `choose_kernel` takes a part a few tokens at a time: which experts a
token chose is a row of zeros and ones, a running sum down the rows is the rank of each choice within the part, and
their total is the part's row of a table (parts x experts). Ranks wait where the inverse permutation will be.
`place_kernel` adds up the table (the rows before its part, and all of them) and then knows the place of every item.

A small batch needs no second launch: the program that finishes last, whichever it is, does that work for all of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashkernels.fused.triton.blocks import Launch
from flashkernels.hardware import Gpu
from flashkernels.jit.counters import zeros
from flashkernels.jit.eager import Run
from flashkernels.moe.plan import MOST_EXPERTS, Cutter, Plan, most_tiles
from flashkernels.moe.problem import RouteProblem
from flashkernels.moe.route import Call, Regroup
from flashkernels.moe.triton.early import launched_early, starts_early

SMALL = 1024  # items that one program places
ELEMENTS = 4096  # logits that a program has in registers at a time
NAN = tl.constexpr(0x7FFFFFFF)
CHOSEN = tl.constexpr(-0x80000000)  # keys below that of -inf
HIDDEN = tl.constexpr(-0x7FFF0000)
TILE = tl.constexpr(MOST_EXPERTS)


@triton.jit
def key_of(x):
    """fp32 as an int32 of the same order; -0 equals 0, and NaN is above all."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x == x, bits ^ ((bits >> 31) & NAN), NAN)


@triton.jit
def number_of(key, PACKED: tl.constexpr):
    """The number of a key. One of bf16 has only the upper half; below it is the column, or what flipping left."""
    bits = key ^ ((key >> 31) & NAN)
    if PACKED:
        bits = bits & -0x10000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def score_of(x, top, total, SIGMOID: tl.constexpr):
    """Of logits x in a row with this maximum and sum of powers."""
    if SIGMOID:
        y = 1 / (1 + tl.exp(-x))
    else:
        y = tl.where(top == float("-inf"), 0.0, tl.exp(x - tl.where(top == float("-inf"), 0.0, top)) / total)
    return y


@triton.jit
def largest(key, cols, E: tl.constexpr):
    """The largest key of each row and where it is, ties by the lower column."""
    best = tl.max(key, 1)
    return best, tl.min(tl.where(key == best[:, None], cols, E), 1)


@triton.jit
def within_groups(
    key, cols, top, total, EXPERTS: tl.constexpr, E: tl.constexpr, GROUPS: tl.constexpr, GROUPS2: tl.constexpr,
    TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr, SIGMOID: tl.constexpr, BIAS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The keys, hidden where an expert's group is not among the best."""
    SIZE: tl.constexpr = EXPERTS // GROUPS
    group = tl.arange(0, GROUPS2)[None, :]
    worth = tl.full((key.shape[0], GROUPS2), HIDDEN, tl.int32)
    for g in tl.static_range(GROUPS):
        mine = tl.where(cols // SIZE == g, key, HIDDEN)
        best, at = largest(mine, cols, E)
        value = number_of(best, PACKED)
        if not BIAS:
            value = score_of(value, top, total, SIGMOID)
        if TOP2 and SIZE > 1:
            second = number_of(tl.max(tl.where(cols == at[:, None], HIDDEN, mine), 1), PACKED)
            if not BIAS:
                second = score_of(second, top, total, SIGMOID)
            value += second
        worth = tl.where(group == g, key_of(value)[:, None], worth)
    for _ in tl.static_range(TOP_GROUPS):
        _, at = largest(worth, group, GROUPS2)
        worth = tl.where(group == at[:, None], CHOSEN, worth)
    for g in tl.static_range(GROUPS):
        kept = tl.sum(tl.where(group == g, (worth == CHOSEN).to(tl.int32), 0), 1)
        key = tl.where((cols // SIZE == g) & (kept == 0)[:, None], HIDDEN, key)
    return key


@triton.jit
def choose(
    logits_ptr, bias_ptr, stride_t, at, here, scale,
    EXPERTS: tl.constexpr, E: tl.constexpr, K: tl.constexpr, K2: tl.constexpr, GROUPS: tl.constexpr,
    GROUPS2: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr, SIGMOID: tl.constexpr,
    RENORMALISE: tl.constexpr,
):  # fmt: skip
    """Of the tokens `at`: weights and ids [ROWS, K2], and 1 where an expert was chosen [ROWS, E]."""
    BIAS: tl.constexpr = bias_ptr is not None
    # 16 bits of value and 16 of column make one key: a round is then one maximum
    PACKED: tl.constexpr = (logits_ptr.dtype.element_ty == tl.bfloat16) and not BIAS
    cols = tl.arange(0, E)[None, :]
    inside = here[:, None] & (cols < EXPERTS)
    x = tl.load(logits_ptr + at.to(tl.int64)[:, None] * stride_t + cols, mask=inside, other=float("-inf"))
    x = x.to(tl.float32)
    key = tl.where(cols < EXPERTS, key_of(x), HIDDEN)
    if PACKED:
        key = (key & -0x10000) | (0xFFFF - cols)
    top = tl.zeros((at.shape[0],), tl.float32)
    total = tl.full((at.shape[0],), 1.0, tl.float32)
    if not SIGMOID:
        top = number_of(tl.max(key, 1), PACKED)  # unlike a maximum of floats it may be NaN
        if BIAS or GROUPS > 1 or not RENORMALISE:  # else the sum of the chosen ones takes its place
            powers = tl.exp(x - tl.where(top == float("-inf"), 0.0, top)[:, None])
            total = tl.sum(powers, 1)
    score = x
    if BIAS:
        score = score_of(x, top[:, None], total[:, None], SIGMOID)
        bias = tl.load(bias_ptr + cols, mask=cols < EXPERTS, other=0.0).to(tl.float32)
        key = tl.where(cols < EXPERTS, key_of(score + bias), HIDDEN)
    if GROUPS > 1:
        key = within_groups(
            key, cols, top, total, EXPERTS, E, GROUPS, GROUPS2, TOP_GROUPS, TOP2, SIGMOID, BIAS, PACKED
        )  # fmt: skip

    place = tl.arange(0, K2)[None, :]
    ids = tl.zeros((at.shape[0], K2), tl.int32)
    weights = tl.zeros((at.shape[0], K2), tl.float32)
    for j in tl.static_range(K):
        if PACKED:
            best = tl.max(key, 1)
            expert = 0xFFFF - (best & 0xFFFF)
        else:
            best, expert = largest(key, cols, E)
        value = number_of(best, PACKED)
        hit = cols == expert[:, None]
        value = tl.sum(tl.where(hit, score, 0.0), 1) if BIAS else score_of(value, top, total, SIGMOID)
        key = tl.where(hit, CHOSEN, key)
        ids = tl.where(place == j, expert[:, None], ids)
        weights = tl.where(place == j, value[:, None], weights)
    if RENORMALISE:
        chosen = tl.sum(weights, 1)
        weights = weights / tl.where(chosen == 0, 1.0, chosen)[:, None]
    return weights * scale, ids, (key == CHOSEN).to(tl.int32)


@triton.jit
def publish(
    counts, counts_ptr, offsets_ptr, tile_offsets_ptr, tiles_ptr, worker, workers, most, first, last,
    E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The share of one of `workers` programs in the schedule; the first also writes counts and offsets.

    Experts write their own tiles, all of them at once: the j-th of each, and there are few j. What is past the last
    tile becomes -1.
    """
    cols = tl.arange(0, E)
    need = (counts + (BLOCK - 1)) // BLOCK
    begin = tl.cumsum(need, 0) - need
    tiles = tl.sum(need, 0)
    if worker == 0:
        mine = (cols >= first) & (cols < last)
        tl.store(counts_ptr + cols - first, counts, mask=mine)
        tl.store(offsets_ptr + cols - first, tl.cumsum(counts, 0) - counts, mask=mine)
        tl.store(tile_offsets_ptr + cols - first, begin, mask=mine)
        tl.store(offsets_ptr + last - first, tl.sum(counts, 0))
        tl.store(tile_offsets_ptr + last - first, tiles)
    for j in tl.range(worker, tl.max(need, 0), workers):
        tl.store(tiles_ptr + begin + j, cols - first + TILE * j, mask=j < need)
    for i in tl.range(tiles + worker * E, most, workers * E):
        tl.store(tiles_ptr + i + cols, tl.full((E,), -1, tl.int32), mask=i + cols < most)


@triton.jit
def place_all(
    ids_ptr, inverse_ptr, table_ptr, counts_ptr, offsets_ptr, permutation_ptr, tiles_ptr, tile_offsets_ptr,
    items, used_items, tokens_of_part, most, parts, first, last,
    K: tl.constexpr, E: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, ITEMS: tl.constexpr,
):  # fmt: skip
    """All items of a small batch, by one program."""
    part = tl.arange(0, PARTS)
    cols = tl.arange(0, E)
    table = tl.load(table_ptr + part[:, None] * E + cols[None, :], mask=(part < parts)[:, None], other=0,
                    cache_modifier=".cg")  # fmt: skip
    counts = tl.sum(table, 0)
    starts = tl.cumsum(counts, 0) - counts
    base = (tl.cumsum(table, 0) - table + starts[None, :]).reshape(PARTS * E)
    item = tl.arange(0, ITEMS)
    here = item < used_items
    expert = tl.load(ids_ptr + item, mask=here, other=-1, cache_modifier=".cg")  # 64 bits where the caller's ids have
    rank = tl.load(inverse_ptr + item, mask=here, other=0, cache_modifier=".cg")
    kept = here & (expert >= first) & (expert < last)
    at = tl.where(kept, item // K // tokens_of_part * E + expert.to(tl.int32), 0)
    place = tl.gather(base, at, 0) + rank
    tl.store(permutation_ptr + place, item, mask=kept)
    tl.store(permutation_ptr + item, -1, mask=(item < items) & (item >= tl.sum(counts, 0)))
    tl.store(inverse_ptr + item, tl.where(kept, place, -1), mask=item < items)
    publish(counts, counts_ptr, offsets_ptr, tile_offsets_ptr, tiles_ptr, 0, 1, most, first, last, E, BLOCK)


@triton.jit
def finish(
    ids_ptr, inverse_ptr, table_ptr, counts_ptr, offsets_ptr, permutation_ptr, tiles_ptr, tile_offsets_ptr, done_ptr,
    tokens, used, tokens_of_part, most, parts, first, last,
    K: tl.constexpr, E: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, ITEMS: tl.constexpr,
):  # fmt: skip
    """Ends a program of a small batch: the last one of all places the items."""
    tl.debug_barrier()  # what other threads of this program have stored comes before
    done = parts - 1
    if PARTS > 1:
        done = tl.atomic_add(done_ptr, 1, sem="acq_rel")
    if done == parts - 1:
        if PARTS > 1:
            tl.store(done_ptr, 0)  # as the next launch wants to find it
        place_all(
            ids_ptr, inverse_ptr, table_ptr, counts_ptr, offsets_ptr, permutation_ptr, tiles_ptr, tile_offsets_ptr,
            tokens * K, used * K, tokens_of_part, most, parts, first, last, K, E, PARTS, BLOCK, ITEMS,
        )  # fmt: skip


@triton.jit
def tokens_used(used_ptr, tokens):
    used = tokens
    if used_ptr is not None:
        used = tl.minimum(tl.maximum(tl.load(used_ptr), 0), tokens)
    return used


@triton.jit(do_not_specialize=["tokens", "steps", "most", "parts", "first", "last"])
def choose_kernel(
    logits_ptr, bias_ptr, used_ptr, weights_ptr, ids_ptr, inverse_ptr, table_ptr, counts_ptr, offsets_ptr,
    permutation_ptr, tiles_ptr, tile_offsets_ptr, done_ptr,
    tokens, steps, most, parts, first, last, stride_t: tl.int64, scale,
    EXPERTS: tl.constexpr, E: tl.constexpr, K: tl.constexpr, K2: tl.constexpr, ROWS: tl.constexpr,
    GROUPS: tl.constexpr, GROUPS2: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr, SIGMOID: tl.constexpr,
    RENORMALISE: tl.constexpr, SMALL: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, ITEMS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    PLANNED: tl.constexpr = inverse_ptr is not None
    if EARLY:
        gdc_launch_dependents()
    pid = tl.program_id(0)
    used = tokens_used(used_ptr, tokens)
    cols = tl.arange(0, E)
    mine = ((cols >= first) & (cols < last)).to(tl.int32)
    slot = tl.arange(0, K2)[None, :]
    running = tl.zeros((E,), tl.int32)
    for step in tl.range(0, steps):
        at = (pid * steps + step) * ROWS + tl.arange(0, ROWS)
        here = at < used
        weights, ids, chosen = choose(
            logits_ptr, bias_ptr, stride_t, at, here, scale,
            EXPERTS, E, K, K2, GROUPS, GROUPS2, TOP_GROUPS, TOP2, SIGMOID, RENORMALISE,
        )  # fmt: skip
        item = at[:, None] * K + slot
        inside = (at < tokens)[:, None] & (slot < K)
        tl.store(weights_ptr + item, tl.where(here[:, None], weights, 0.0), mask=inside)
        tl.store(ids_ptr + item, tl.where(here[:, None], ids, -1), mask=inside)
        if PLANNED:
            chosen = chosen * mine[None, :] * here.to(tl.int32)[:, None]
            rank = tl.cumsum(chosen, 0) - chosen + running[None, :]
            tl.store(inverse_ptr + item, tl.gather(rank, ids, 1), mask=inside)
            running += tl.sum(chosen, 0)
    if PLANNED:
        tl.store(table_ptr + pid * E + cols, running)
        if SMALL:
            finish(
                ids_ptr, inverse_ptr, table_ptr, counts_ptr, offsets_ptr, permutation_ptr, tiles_ptr, tile_offsets_ptr,
                done_ptr, tokens, used, steps * ROWS, most, parts, first, last, K, E, PARTS, BLOCK, ITEMS,
            )  # fmt: skip


@triton.jit(do_not_specialize=["tokens", "steps", "most", "parts", "first", "last"])
def count_kernel(
    given_ptr, used_ptr, inverse_ptr, table_ptr, counts_ptr, offsets_ptr,
    permutation_ptr, tiles_ptr, tile_offsets_ptr, done_ptr,
    tokens, steps, most, parts, first, last, stride_t: tl.int64, stride_j,
    E: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, SMALL: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr, ITEMS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """As `choose_kernel`, for ids (T, K) that are given. A token may name an expert twice."""
    if EARLY:
        gdc_launch_dependents()
    pid = tl.program_id(0)
    used = tokens_used(used_ptr, tokens)
    cols = tl.arange(0, E)
    running = tl.zeros((E,), tl.int32)
    for step in tl.range(0, steps):
        at = (pid * steps + step) * ROWS + tl.arange(0, ROWS)
        here = at < used
        chosen = tl.zeros((ROWS, E), tl.int32)
        for j in tl.static_range(K):
            expert = local_id(given_ptr, at, j, here, stride_t, stride_j, first, last)
            chosen += (cols[None, :] == expert[:, None]).to(tl.int32)
        rank = tl.cumsum(chosen, 0) - chosen + running[None, :]
        for j in tl.static_range(K):
            expert = local_id(given_ptr, at, j, here, stride_t, stride_j, first, last)
            hit = cols[None, :] == expert[:, None]
            tl.store(inverse_ptr + at * K + j, tl.sum(tl.where(hit, rank, 0), 1), mask=at < tokens)
            rank += hit.to(tl.int32)
        running += tl.sum(chosen, 0)
    tl.store(table_ptr + pid * E + cols, running)
    if SMALL:
        finish(
            given_ptr, inverse_ptr, table_ptr, counts_ptr, offsets_ptr, permutation_ptr, tiles_ptr, tile_offsets_ptr,
            done_ptr, tokens, used, steps * ROWS, most, parts, first, last, K, E, PARTS, BLOCK, ITEMS,
        )  # fmt: skip


@triton.jit
def local_id(given_ptr, at, j, here, stride_t, stride_j, first, last):
    """The j-th expert of the tokens `at`, or -1 where the plan does not have it."""
    expert = tl.load(given_ptr + at.to(tl.int64) * stride_t + j * stride_j, mask=here, other=-1)
    return tl.where((expert >= first) & (expert < last), expert, -1).to(tl.int32)


@triton.jit(do_not_specialize=["tokens", "of_part", "most", "parts", "first", "last"])
def place_kernel(
    ids_ptr, used_ptr, inverse_ptr, table_ptr, counts_ptr, offsets_ptr, permutation_ptr, tiles_ptr, tile_offsets_ptr,
    tokens, of_part, most, parts, first, last,
    K: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, ITEMS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """The items of one part: `of_part` tokens. Where EARLY, it is launched before the first kernel has ended."""
    if EARLY:
        gdc_wait()
    pid = tl.program_id(0)
    used = tokens_used(used_ptr, tokens)
    cols = tl.arange(0, E)
    # summed row by row first and across threads once: each sum over rows meets at a barrier
    all_rows = tl.zeros((ROWS, E), tl.int32)
    rows_before = tl.zeros((ROWS, E), tl.int32)
    for row in tl.range(0, parts, ROWS):
        part = row + tl.arange(0, ROWS)
        table = tl.load(table_ptr + part[:, None] * E + cols[None, :], mask=(part < parts)[:, None], other=0)
        all_rows += table
        rows_before += tl.where((part < pid)[:, None], table, 0)
    counts = tl.sum(all_rows, 0)
    base = tl.cumsum(counts, 0) - counts + tl.sum(rows_before, 0)
    placed = tl.sum(counts, 0)
    end = tl.minimum((pid + 1) * of_part, tokens) * K
    for i in tl.range(pid * of_part * K, end, ITEMS):
        item = i + tl.arange(0, ITEMS)
        inside = item < end
        here = inside & (item < used * K)
        expert = tl.load(ids_ptr + item, mask=here, other=-1)  # 64 bits where the caller's ids have
        kept = (expert >= first) & (expert < last)
        rank = tl.load(inverse_ptr + item, mask=kept, other=0)
        place = tl.gather(base, tl.where(kept, expert.to(tl.int32), 0), 0) + rank
        tl.store(permutation_ptr + place, item, mask=kept)
        tl.store(permutation_ptr + item, -1, mask=inside & (item >= placed))
        tl.store(inverse_ptr + item, tl.where(kept, place, -1), mask=inside)
    publish(counts, counts_ptr, offsets_ptr, tile_offsets_ptr, tiles_ptr, pid, parts, most, first, last, E, BLOCK)


# --- how a routing is cut


class Cut(NamedTuple):
    """Tokens that a program has at a time, the parts that all of them are cut into, and warps."""

    rows: int
    parts: int
    steps: int  # of `rows` tokens, a part
    warps: int

    @property
    def tokens(self) -> int:
        return self.rows * self.steps


def cut(tokens: int, experts: int, k: int, sms: int) -> Cut:
    """How a routing is cut: into one or two parts for each multiprocessor, or as many as a small batch has tokens for.

    >>> cut(32768, 64, 2, 132), cut(128, 128, 8, 132)
    (Cut(rows=64, parts=256, steps=2, warps=8), Cut(rows=8, parts=16, steps=1, warps=4))
    """
    wide = triton.next_power_of_2(max(16, experts))
    if tokens * k <= SMALL:
        rows = max(1, triton.next_power_of_2(tokens) // 16)
        return Cut(rows, -(-tokens // rows), 1, max(1, min(8, rows * wide // 256)))
    rows = max(4, ELEMENTS // wide)
    steps = max(1, -(-tokens // (rows * 2 * sms)))
    return Cut(rows, -(-tokens // (rows * steps)), steps, 8)


def plan_constants(problem: RouteProblem, whole: Cut, block: int, gpu: Gpu | None) -> dict[str, Any]:
    """The compile-time values of placing, in the kernels' order."""
    small = problem.tokens * problem.k <= SMALL
    return {
        "SMALL": small, "PARTS": triton.next_power_of_2(whole.parts) if small else 1, "BLOCK": block or 1,
        "ITEMS": triton.next_power_of_2(max(1, problem.tokens * problem.k)) if small else 1,
        "EARLY": starts_early(gpu) and block > 0 and not small,
    }  # fmt: skip


def route_plan(problem: RouteProblem, gpu: Gpu | None, tensors: tuple[Any, ...], call: Call) -> Run:
    logits, _, _ = tensors
    tokens, experts, k = problem.tokens, problem.experts, problem.k
    whole = cut(tokens, experts, k, gpu.sms if gpu else 2)
    launch = Launch(choose_kernel, constants(problem, whole, call, gpu), whole.warps, logits.device)
    finisher = Finisher(problem, whole, call, logits.device, gpu)
    copied = logits.stride(1) != 1
    stride = experts if copied else logits.stride(0)
    scale = float(call.scale)
    wide = triton.next_power_of_2(max(16, experts))
    local = call.last - call.first
    cutter = Cutter(tokens, k, local, call.block, whole.parts * wide, call.apart) if call.block else None

    def run(logits: Tensor, bias: Tensor | None, used: Tensor | None) -> tuple[Tensor, ...]:
        weights = logits.new_empty((tokens, k), dtype=torch.float32)
        ids = logits.new_empty((tokens, k), dtype=torch.int32)
        plan, table = cutter(logits) if cutter else (None, None)
        if tokens == 0:
            return (weights, ids, *(x.zero_() for x in plan[:6])) if plan else (weights, ids)
        logits = logits.contiguous() if copied else logits
        bias = None if bias is None else bias.contiguous()
        done = zeros(1, torch.int32, logits.device.index) if plan and finisher.counted else None
        outputs = finisher.outputs(plan) if plan else (None,) * 5
        inverse = plan.inverse if plan else None
        launch(whole.parts, (logits, bias, used, weights, ids, inverse, table, *outputs, done),
               (*finisher.numbers, stride, scale))  # fmt: skip
        if plan is None:
            return weights, ids
        finisher(ids, used, plan, table)
        return weights, ids, *plan[:6]

    return run


def constants(problem: RouteProblem, whole: Cut, call: Call, gpu: Gpu | None) -> dict[str, Any]:
    """The compile-time values of `choose_kernel`, in its order."""
    return {
        "EXPERTS": problem.experts, "E": triton.next_power_of_2(max(16, problem.experts)), "K": problem.k,
        "K2": triton.next_power_of_2(problem.k), "ROWS": whole.rows, "GROUPS": call.groups,
        "GROUPS2": triton.next_power_of_2(call.groups), "TOP_GROUPS": call.top_groups, "TOP2": call.top2,
        "SIGMOID": call.sigmoid, "RENORMALISE": call.renormalise,
    } | plan_constants(problem, whole, call.block, gpu)  # fmt: skip


class Finisher:
    """The second launch, where there is one."""

    def __init__(self, problem: RouteProblem, whole: Cut, call: Any, device: torch.device, gpu: Gpu | None) -> None:
        small = problem.tokens * problem.k <= SMALL
        self.counted = small and whole.parts > 1
        self.whole = whole
        wide = triton.next_power_of_2(max(16, problem.experts))
        tiles = most_tiles(problem.tokens * problem.k, call.last - call.first, call.block or 16)
        self.numbers = (problem.tokens, whole.steps, tiles, whole.parts, call.first, call.last)
        fixed = plan_constants(problem, whole, call.block, gpu)
        items = min(2048, triton.next_power_of_2(max(1, whole.tokens * problem.k)))
        constants = {
            "K": problem.k, "E": wide, "ROWS": max(1, 8192 // wide), "BLOCK": fixed["BLOCK"],
            "ITEMS": items, "EARLY": fixed["EARLY"],
        }  # fmt: skip
        self.launch = None if small else Launch(place_kernel, constants, 8, device)
        if self.launch is not None:
            launched_early(self.launch, fixed["EARLY"])

    @staticmethod
    def outputs(plan: Plan) -> tuple[Tensor, ...]:
        return plan.counts, plan.offsets, plan.permutation, plan.tiles, plan.tile_offsets

    def __call__(self, ids: Tensor, used: Tensor | None, plan: Plan, table: Any) -> None:
        if self.launch is not None:
            tokens, _, *rest = self.numbers
            tensors = (ids, used, plan.inverse, table, *self.outputs(plan))
            self.launch(self.whole.parts, tensors, (tokens, self.whole.tokens, *rest))


def regroup_plan(problem: RouteProblem, gpu: Gpu | None, tensors: tuple[Any, ...], call: Regroup) -> Run:
    ids, _ = tensors
    tokens, k = problem.tokens, problem.k
    whole = cut(tokens, problem.experts, k, gpu.sms if gpu else 2)
    wide = triton.next_power_of_2(max(16, problem.experts))
    fixed = {"E": wide, "K": k, "ROWS": whole.rows} | plan_constants(problem, whole, call.block, gpu)
    launch = Launch(count_kernel, fixed, whole.warps, ids.device)
    finisher = Finisher(problem, whole, call, ids.device, gpu)
    cutter = Cutter(tokens, k, call.last - call.first, call.block, whole.parts * wide, call.apart)

    def run(ids: Tensor, used: Tensor | None) -> tuple[Tensor, ...]:
        plan, table = cutter(ids)
        if tokens == 0:
            return tuple(x.zero_() for x in plan[:6])
        ids = ids.contiguous()
        done = zeros(1, torch.int32, ids.device.index) if finisher.counted else None
        launch(whole.parts, (ids, used, plan.inverse, table, *finisher.outputs(plan), done), (*finisher.numbers, k, 1))
        finisher(ids, used, plan, table)
        return plan[:6]

    return run
