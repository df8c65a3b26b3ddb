"""Accepting drafts in Triton: one program a sequence, which reads a whole row of the target only where it refuses.

Of logits, `scan_kernel` (that of sampling) first leaves the maxima and sums of all rows, so that the probability of a
draft is one number more. Refusing a draft is a walk over the row: what is left of p goes to memory, and the sum of each
segment too, from which the last token is drawn as from any other row.

Where the host knows that the largest tokens alone are accepted, `greedy_kernel` does it all: every program leaves the
largest token of a part of a row, and the last of a sequence compares.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashkernels.fused.draws import MOST_TOKENS, segment_of
from flashkernels.fused.rows import RowProblem
from flashkernels.fused.sampling import GREEDY_BELOW
from flashkernels.fused.speculative import Accept, Accepted
from flashkernels.fused.triton.blocks import Launch
from flashkernels.fused.triton.draws import (
    ACCEPT,
    LEAST,
    NEW_SEGMENT,
    NEW_TOKEN,
    NONE,
    drawn,
    first_largest,
    key_of,
    uniform,
)
from flashkernels.fused.triton.sampling import GREEDY, Scan, numbers_at, row_settings, scanned, setting
from flashkernels.hardware import Gpu
from flashkernels.jit.counters import zeros
from flashkernels.jit.eager import Run, room

TILE = 8192  # tokens at a time of a walk over a row
WARPS = 16
GREEDY_WARPS = 4
HALF = tl.constexpr(0x80000000)
EMPTY = tl.constexpr(0x800000)  # the key of -inf, one more, and HALF
IDS = tl.constexpr(MOST_TOKENS)


@triton.jit
def probabilities(target_row, left_row, cols, inside, fresh, how, top, total, LOGITS: tl.constexpr):
    """p of tokens: of the target's row, or what refusals have left of it. `top` is the largest logit of the row, and
    `total` the sum of exp(x - top): the sum of top and a logarithm would lose digits, or all of them at 3e38."""
    if fresh:
        if LOGITS:
            p = tl.exp(numbers_at(target_row, None, cols, inside, how) - top) / total
        else:
            p = tl.load(target_row + cols, mask=inside, other=0.0).to(tl.float32)
    else:
        p = tl.load(left_row + cols, mask=inside, other=0.0)
    return tl.where(p > 0, p, 0.0)


@triton.jit
def drafts(draft_row, left_row, cols, inside, fresh):
    """q of tokens, of the draft's row or without those that were refused."""
    if fresh:
        q = tl.load(draft_row + cols, mask=inside, other=0.0).to(tl.float32)
    else:
        q = tl.load(left_row + cols, mask=inside, other=0.0)
    return tl.where(q > 0, q, 0.0)


@triton.jit
def weigh(
    target_row, draft_row, left_row, weights_row, token, p_total, q_total, fresh, how, top, total, width,
    segments, WIDTH: tl.constexpr, ROWS: tl.constexpr, LOGITS: tl.constexpr, REFUSED: tl.constexpr, DRAWN: tl.constexpr,
):  # fmt: skip
    """The sum of each segment of p. Where REFUSED, p is first what refusing `token` leaves, kept in `left_row`, and q
    loses the token, kept behind it. Returns the totals of p and q."""
    p_sum = tl.zeros((ROWS,), tl.float32)
    q_sum = tl.zeros((ROWS,), tl.float32)
    tl.debug_barrier()  # what is left from the last time is read
    for first in tl.range(0, segments, ROWS):
        segment = first + tl.arange(0, ROWS)
        cols = segment[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        inside = cols < width
        p = probabilities(target_row, left_row, cols, inside, fresh, how, top, total, LOGITS)
        if REFUSED:
            if DRAWN:
                q = drafts(draft_row, left_row + width, cols, inside, fresh)
                p = tl.maximum(p / p_total - q / q_total, 0.0)
                q = tl.where(cols == token, 0.0, q)
                tl.store(left_row + width + cols, q, mask=inside)
                q_sum += tl.sum(q, 1)
            else:
                p = tl.where(cols == token, 0.0, p)
            tl.store(left_row + cols, p, mask=inside)
        sums = tl.sum(p, 1)
        tl.store(weights_row + segment, sums, mask=segment < segments)
        p_sum += sums
    tl.debug_barrier()
    return tl.sum(p_sum, 0), tl.sum(q_sum, 0)


@triton.jit(do_not_specialize=["seed", "offset", "segments", "nodes"])
def accept_kernel(
    ids_ptr, parents_ptr, target_ptr, scanned_ptr, draft_ptr, temperature_ptr, seed_ptr, offset_ptr,
    left_ptr, counts_ptr, out_ptr, last_ptr, nodes_ptr,
    nodes, width, segments, stride_ib: tl.int64, stride_in: tl.int64, stride_pb: tl.int64, stride_pn: tl.int64,
    stride_db: tl.int64, stride_dn: tl.int64, seed: tl.int64, offset: tl.int64, temperature,
    NODES: tl.constexpr, WIDTH: tl.constexpr, SEGMENTS: tl.constexpr, ROWS: tl.constexpr, LOGITS: tl.constexpr,
):  # fmt: skip
    DRAWN: tl.constexpr = draft_ptr is not None
    row = tl.program_id(0).to(tl.int64)
    seed = setting(seed_ptr, row, seed + row).to(tl.int64)
    offset = setting(offset_ptr, row, offset).to(tl.int64)
    heat = setting(temperature_ptr, row, temperature)
    greedy = LOGITS & ~(heat >= GREEDY)
    how = row_settings(temperature_ptr, None, None, None, row, temperature, 1.0, 0.0, 0.0)
    each = tl.arange(0, NODES)
    at = tl.arange(0, SEGMENTS)
    ids = tl.load(ids_ptr + row * stride_ib + each * stride_in, mask=each < nodes, other=-1).to(tl.int64)
    parents = each - 1
    if parents_ptr is not None:
        parents = tl.load(parents_ptr + row * stride_pb + each * stride_pn, mask=each < nodes, other=-2)
    real = (ids >= 0) & (ids < width)
    outputs = row * (nodes + 1)
    tl.store(out_ptr + outputs + each, -1, mask=each <= nodes)
    tl.store(nodes_ptr + outputs + each, -1, mask=each <= nodes)
    tl.debug_barrier()

    left_row = left_ptr + row * width * (2 if DRAWN else 1)  # of p, and of q
    every = tl.num_programs(0).to(tl.int64) * width * (2 if DRAWN else 1)
    weights_row = left_ptr + every + row * segments  # after what is left in all rows, which stay aligned
    draft_row = draft_ptr + row * stride_db if DRAWN else None
    node = tl.full((), -1, tl.int32)
    tried = tl.full((), -1, tl.int32)
    count = tl.zeros((), tl.int32)
    fresh = tl.full((), 1, tl.int1)  # no child of the node was refused
    p_total = tl.full((), 1.0, tl.float32)
    q_total = tl.full((), 1.0, tl.float32)
    top = tl.full((), 0.0, tl.float32)
    total = tl.full((), 1.0, tl.float32)
    best = tl.full((), -1, tl.int32)
    more = tl.full((), 1, tl.int1)
    while more:
        place = row * (nodes + 1) + node + 1
        target_row = target_ptr + place * width
        if LOGITS:
            tops, sums = scanned(scanned_ptr, place, segments, SEGMENTS)
            top = tl.max(tops, 0)
            total = tl.sum(sums * tl.exp(tops - top), 0)
            if greedy:
                cols = first_largest(tops, at) * WIDTH + tl.arange(0, WIDTH)
                best = first_largest(numbers_at(target_row, None, cols, cols < width, how), cols)
                best = tl.where(top == LEAST, -1, best)  # nothing to accept
        child = tl.min(tl.where(real & (parents == node) & (each > tried), each, NONE), 0)
        more = child < nodes
        if more:
            token = tl.sum(tl.where(each == child, ids, 0), 0).to(tl.int32)
            here = token < width
            p = probabilities(target_row, left_row, token, here, fresh, how, top, total, LOGITS) / p_total
            q = tl.full((), 1.0, tl.float32)
            if DRAWN:
                q = drafts(draft_row + child * stride_dn, left_row + width, token, here, fresh) / q_total
            taken = tl.where(greedy, token == best, uniform(seed, offset, child, ACCEPT) * q < p)
            if taken:
                tl.store(out_ptr + outputs + count, token)
                tl.store(nodes_ptr + outputs + count, child)
                count += 1
                node = child
                fresh = tl.full((), 1, tl.int1)
                p_total = tl.full((), 1.0, tl.float32)
                q_total = tl.full((), 1.0, tl.float32)
            elif not greedy:
                refused_row = draft_row + child * stride_dn if DRAWN else None
                p_total, q_total = weigh(
                    target_row, refused_row, left_row, weights_row, token, p_total, q_total, fresh, how, top, total,
                    width, segments, WIDTH, ROWS, LOGITS, True, DRAWN,
                )  # fmt: skip
                fresh = tl.full((), 0, tl.int1)
                q_total = tl.where(q_total > 0, q_total, 1.0)
                p_total = tl.where(p_total > 0, p_total, 1.0)
            tried = child

    target_row = target_ptr + (row * (nodes + 1) + node + 1) * width
    last = best
    if not greedy:
        if not fresh:  # rounding may have left nothing
            weights = tl.load(weights_row + at, mask=at < segments, other=0.0)
            fresh = tl.sum(weights, 0) == 0
        if fresh:
            weigh(target_row, None, left_row, weights_row, 0, 1.0, 1.0, fresh, how, top, total, width,
                  segments, WIDTH, ROWS, LOGITS, False, DRAWN)  # fmt: skip
        weights = tl.load(weights_row + at, mask=at < segments, other=0.0)
        segment = drawn(tl.log(weights), at, seed, offset, NEW_SEGMENT)
        cols = tl.minimum(segment, segments - 1) * WIDTH + tl.arange(0, WIDTH)
        p = probabilities(target_row, left_row, cols, cols < width, fresh, how, top, total, LOGITS)
        last = drawn(tl.log(p), cols, seed, offset, NEW_TOKEN)
        last = tl.where(tl.sum(weights, 0) > 0, last, 0)
    last = tl.where((last >= 0) & (last < width), last, 0)
    tl.store(out_ptr + outputs + count, last)
    tl.store(last_ptr + row, last)
    tl.store(counts_ptr + row, count)


@triton.jit(do_not_specialize=["nodes", "blocks"])
def greedy_kernel(
    ids_ptr, parents_ptr, target_ptr, zeros_ptr, counts_ptr, out_ptr, last_ptr, nodes_ptr,
    nodes, width, blocks, stride_ib: tl.int64, stride_in: tl.int64, stride_pb: tl.int64, stride_pn: tl.int64,
    NODES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """TILE tokens of one of the target's rows; `blocks` programs have one, and the last of a sequence accepts. `zeros`
    has the largest token of each row, then how many programs of each sequence are done."""
    pid = tl.program_id(0).to(tl.int64)
    place = pid // blocks
    row = place // (nodes + 1)
    cols = (pid % blocks).to(tl.int32) * TILE + tl.arange(0, TILE)
    x = numbers_at(target_ptr + place * width, None, cols, cols < width, (1.0, 1.0, 0.0, 0.0))
    # Above 0: the order of the number, and below it that of the id, lower ones first.
    packed = ((key_of(tl.max(x, 0)).to(tl.int64) + HALF) * IDS) | (IDS - 1 - first_largest(x, cols))
    tl.atomic_max(zeros_ptr + place, packed, sem="relaxed")
    done_ptr = zeros_ptr + tl.num_programs(0) // blocks + row
    done = tl.atomic_add(done_ptr, 1, sem="acq_rel")
    if done == blocks * (nodes + 1) - 1:
        each = tl.arange(0, NODES)
        inside = each <= nodes
        first = row * (nodes + 1)
        most = tl.load(zeros_ptr + first + each, mask=inside, other=0, cache_modifier=".cg")  # other programs' too
        tl.debug_barrier()  # every warp has loaded them
        tl.store(done_ptr, 0)  # as the next launch wants to find it
        tl.store(zeros_ptr + first + each, 0, mask=inside)
        largest = tl.where(most >= EMPTY * IDS, IDS - 1 - (most & (IDS - 1)), -1)  # -1: nothing is above -inf
        ids = tl.load(ids_ptr + row * stride_ib + each * stride_in, mask=each < nodes, other=-1).to(tl.int64)
        parents = each - 1
        if parents_ptr is not None:
            parents_at = parents_ptr + row * stride_pb + each * stride_pn
            parents = tl.load(parents_at, mask=each < nodes, other=-2)
        found = tl.full((NODES,), -1, tl.int64)
        path = tl.full((NODES,), -1, tl.int64)
        node = tl.full((), -1, tl.int32)
        count = tl.zeros((), tl.int32)
        more = tl.full((), 1, tl.int1)
        while more:
            best = tl.sum(tl.where(each == node + 1, largest, 0), 0)
            found = tl.where(each == count, tl.maximum(best, 0), found)
            right = (ids == best) & (best >= 0)
            child = tl.min(tl.where(right & (parents == node) & (each > node), each, NONE), 0)
            more = child < nodes
            if more:
                path = tl.where(each == count, child, path)
                count += 1
                node = child
        tl.store(out_ptr + first + each, found, mask=inside)
        tl.store(nodes_ptr + first + each, path, mask=inside)
        tl.store(last_ptr + row, tl.sum(tl.where(each == count, found, 0), 0))
        tl.store(counts_ptr + row, count)


def constants(width: int, nodes: int, logits: bool) -> dict[str, Any]:
    """The compile-time values of `accept_kernel`, in its order."""
    segment = segment_of(width)
    return {
        "NODES": max(16, triton.next_power_of_2(nodes + 1)), "WIDTH": segment,
        "SEGMENTS": max(16, triton.next_power_of_2(-(-width // segment))), "ROWS": max(1, TILE // segment),
        "LOGITS": logits,
    }  # fmt: skip


def plan(problem: RowProblem, gpu: Gpu | None, tensors: tuple[Any, ...], call: Accept) -> Run:
    draft_ids, target, draft, parents, *rest = tensors
    (rows, nodes), width = draft_ids.shape, target.shape[2]
    scan = Scan(rows * (nodes + 1), width, gpu, target.device)
    fixed = constants(width, nodes, call.logits)
    launch = Launch(accept_kernel, fixed, WARPS, target.device)
    of_greedy = {"NODES": fixed["NODES"], "TILE": scan.tile * scan.segment}
    greedy = Launch(greedy_kernel, of_greedy, GREEDY_WARPS, target.device)
    greedily = call.logits and rest[0] is None  # where the number is 0
    copied = draft is not None and draft.stride(2) != 1
    spread = not target.is_contiguous()
    scattered = not all(x is None or x.is_contiguous() for x in rest)  # what is one number for each row
    steps = (0, 0) if parents is None else parents.expand(rows, nodes).stride()
    draft_steps = (0, 0) if draft is None else (nodes * width, width) if copied else draft.stride()[:2]
    sizes = (nodes, width, scan.segments, *draft_ids.stride(), *steps, *draft_steps)
    greedy_sizes = (nodes, width, scan.blocks, *draft_ids.stride(), *steps)
    like = Accepted.empty(draft_ids.to("meta"))
    counts, ids, last, taken = (room(x.shape, x.dtype, target.device) for x in like)
    left = room((rows * (width * (1 if draft is None else 2) + scan.segments),), torch.float32, target.device)
    device, marks, grid = target.device.index, rows * (nodes + 2), scan.grid
    new: Any = tuple.__new__  # half the time of the class's own

    def run(
        numbers: tuple[float, int, int], draft_ids: Tensor, target: Tensor, draft: Tensor | None,
        parents: Tensor | None, heats: Tensor | None, seeds: Tensor | None, offsets: Tensor | None,
    ) -> Accepted:  # fmt: skip
        out: Accepted = new(Accepted, (counts(), ids(), last(), taken()))
        if rows == 0:
            return out
        if spread:
            target = target.contiguous()
        heat = numbers[0]
        if greedily and heat < GREEDY_BELOW:
            done = zeros(marks, torch.int64, device)
            greedy(grid, (draft_ids, parents, target, done, *out), greedy_sizes)
            return out
        found = None
        if call.logits:
            every = None if heats is None else heats[:, None].expand(rows, nodes + 1).contiguous().view(-1)
            found = scan(target, None, (every, None, None, None), (width, 0, heat, 1.0, 0.0, 0.0))
        if copied and draft is not None:
            draft = draft.contiguous()
        if scattered:
            heats, seeds, offsets = (None if x is None else x.contiguous() for x in (heats, seeds, offsets))
        tensors = (draft_ids, parents, target, found, draft, heats, seeds, offsets, left(), *out)
        launch(rows, tensors, (*sizes, *numbers[1:], heat))
        return out

    return run
