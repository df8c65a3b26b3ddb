"""Sampling in Triton: one read of the logits, and then little more than the few that can be drawn.

`scan_kernel` reads everything once, by as many programs as there is room for, and leaves the maximum and the sum of
powers of every segment of consecutive tokens: at most 1024 pairs a row. `finish_kernel` has one program a row. Of a
greedy one it takes the first largest token of the first segment that has the largest maximum. Of any other, the
n-th largest maximum is a bound that at least n tokens reach, so it goes back to the segments whose maximum reaches it,
about n of them, for the tokens that do, sorts those (some dozens) and cuts them by top-k, top-p and min-p.

A row without any cut needs no candidates: it draws a segment, then a token in it. Where the host knows that all rows
are such, or that one token stays in each, `settled_kernel` does it all: the program that ends the scan of a row draws.

Where the candidates cannot tell (more than a thousand tokens stay, or are equal), `search_kernel` finds the bits of the
last one that stays: eleven walks over the row, of three bits each. Its programs have nothing to do for other rows.
Nothing depends on how many rows there are, so neither does any result.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashkernels.fused.draws import MOST_SEGMENTS, segment_of
from flashkernels.fused.rows import RowProblem
from flashkernels.fused.sampling import GREEDY_BELOW, MOST_NUMBER, Numbers, Sample, Sampled
from flashkernels.fused.triton.blocks import Launch
from flashkernels.fused.triton.counts import Counter
from flashkernels.fused.triton.draws import (
    LEAST,
    NONE,
    SEGMENT,
    TOKEN,
    drawn,
    first_largest,
    gumbel,
    key_of,
    number_of,
    segment_sums,
)
from flashkernels.hardware import Gpu
from flashkernels.jit.counters import zeros
from flashkernels.jit.eager import Run, room

TILE = 4096  # tokens that a program of the scan has
SMALL_TILE = 2048  # where there are few rows: more programs
WALK = 1024  # tokens at a time of a walk over a row
GATHERED = 4096  # tokens at a time of segments that have candidates
SCAN_WARPS, FINISH_WARPS, SEARCH_WARPS = 4, 8, 16
MOST = tl.constexpr(MOST_NUMBER)
GREEDY = tl.constexpr(GREEDY_BELOW)
LOWEST = tl.constexpr(-0x80000000)  # below every key
FLIPPED = tl.constexpr(0x7FFFFFFF)  # above every key
NOTHING = tl.constexpr(-0x8000000000000000)
AHEAD = tl.constexpr(4)  # tiles of a walk that are on their way
PADDING = tl.constexpr(16)  # of a row of lists: one number, and rows that stay aligned
BITS = tl.constexpr(20)  # of the bound on candidates; all 32 would only spare a few of them


@triton.jit
def setting(ptr, row, number):
    """Of one row: from its tensor, or the number that all rows have."""
    if ptr is not None:
        number = tl.load(ptr + row)
    return number


@triton.jit
def row_settings(
    temperature_ptr, repetition_ptr, presence_ptr, frequency_ptr, row, temperature, repetition, presence, frequency
):
    """How the logits of a row become the numbers that tokens are compared by."""
    heat = setting(temperature_ptr, row, temperature)
    inverse = tl.div_rn(1.0, tl.where(heat >= GREEDY, heat, 1.0))
    return (
        inverse, setting(repetition_ptr, row, repetition), setting(presence_ptr, row, presence),
        setting(frequency_ptr, row, frequency),
    )  # fmt: skip


@triton.jit
def numbers_at(logits_row, counts_row, cols, inside, how):
    """Logits of the tokens `cols`, after penalties and temperature; NaN is -inf, +inf the largest number."""
    inverse, repetition, presence, frequency = how
    x = tl.load(logits_row + cols, mask=inside, other=LEAST).to(tl.float32)
    if counts_row is not None:
        count = tl.load(counts_row + cols, mask=inside, other=0).to(tl.float32)
        less = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition) - frequency * count - presence
        x = tl.where(count > 0, less, x)
    x *= inverse
    return tl.minimum(tl.where(x == x, x, LEAST), MOST)


@triton.jit
def scan_part(logits_row, counts_row, part, width, how, WIDTH: tl.constexpr, ROWS: tl.constexpr):
    """ROWS segments of a row, of WIDTH tokens each: which they are, their maxima and sums."""
    segment = part.to(tl.int32) * ROWS + tl.arange(0, ROWS)
    cols = segment[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tops, sums = segment_sums(numbers_at(logits_row, counts_row, cols, cols < width, how))
    return segment, tops, sums


@triton.jit
def store_part(scanned_ptr, row, segment, tops, sums, segments):
    here = scanned_ptr + row * 2 * segments + segment
    tl.store(here, tops, mask=segment < segments)
    tl.store(here + segments, sums, mask=segment < segments)


@triton.jit(do_not_specialize=["blocks", "segments"])
def scan_kernel(
    logits_ptr, counts_ptr, temperature_ptr, repetition_ptr, presence_ptr, frequency_ptr, scanned_ptr,
    width, segments, blocks, stride_row: tl.int64, stride_count: tl.int64,
    temperature, repetition, presence, frequency,
    WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A part of a row; `blocks` programs have one. `scanned` is (rows, 2, segments)."""
    pid = tl.program_id(0).to(tl.int64)
    row = pid // blocks
    how = row_settings(temperature_ptr, repetition_ptr, presence_ptr, frequency_ptr, row,
                       temperature, repetition, presence, frequency)  # fmt: skip
    counts_row = counts_ptr + row * stride_count if counts_ptr is not None else None
    logits_row = logits_ptr + row * stride_row
    segment, tops, sums = scan_part(logits_row, counts_row, pid % blocks, width, how, WIDTH, ROWS)
    store_part(scanned_ptr, row, segment, tops, sums, segments)


@triton.jit
def scanned(scanned_ptr, row, segments, SEGMENTS: tl.constexpr):
    """What the scan has left of a row: the maxima of its segments, and their sums."""
    at = tl.arange(0, SEGMENTS)
    here = scanned_ptr + row * 2 * segments + at  # from the L2: other programs of the same launch may have written
    tops = tl.load(here, mask=at < segments, other=LEAST, cache_modifier=".cg")
    return tops, tl.load(here + segments, mask=at < segments, other=0.0, cache_modifier=".cg")


@triton.jit
def largest(logits_row, counts_row, tops, width, how, WIDTH: tl.constexpr):
    """The first of the largest tokens."""
    cols = first_largest(tops, tl.arange(0, tops.shape[0])) * WIDTH + tl.arange(0, WIDTH)
    return first_largest(numbers_at(logits_row, counts_row, cols, cols < width, how), cols)


@triton.jit
def drawn_whole(logits_row, counts_row, tops, sums, top, seed, offset, width, how, WIDTH: tl.constexpr):
    """A token of a row without any cut: a segment first, then one in it."""
    at = tl.arange(0, tops.shape[0])
    segment = drawn(tl.log(sums) + (tops - top), at, seed, offset, SEGMENT)
    cols = segment * WIDTH + tl.arange(0, WIDTH)
    x = numbers_at(logits_row, counts_row, cols, cols < width, how)
    return drawn(x - top, cols, seed, offset, TOKEN)


@triton.jit(do_not_specialize=["segments", "blocks", "seed", "offset", "one"])
def settled_kernel(
    logits_ptr, counts_ptr, seed_ptr, offset_ptr, repetition_ptr, presence_ptr, frequency_ptr, scanned_ptr, done_ptr,
    ids_ptr, logprobs_ptr,
    width, segments, blocks, stride_row: tl.int64, stride_count: tl.int64, seed: tl.int64, offset: tl.int64, one,
    temperature, repetition, presence, frequency,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """A part of the scan of a row, and for the last program of a row its token: the largest where `one` is not 0, else
    any. `done` counts the programs of each row; None, as `scanned`, if one has all of it."""
    pid = tl.program_id(0).to(tl.int64)
    row = pid // blocks
    how = row_settings(None, repetition_ptr, presence_ptr, frequency_ptr, row,
                       temperature, repetition, presence, frequency)  # fmt: skip
    logits_row = logits_ptr + row * stride_row
    counts_row = counts_ptr + row * stride_count if counts_ptr is not None else None
    segment, part_tops, part_sums = scan_part(logits_row, counts_row, pid % blocks, width, how, WIDTH, ROWS)
    done = blocks - 1
    if done_ptr is not None:
        store_part(scanned_ptr, row, segment, part_tops, part_sums, segments)
        tl.debug_barrier()  # what other threads of this program have stored comes before
        done = tl.atomic_add(done_ptr + row, 1, sem="acq_rel")
    if done == blocks - 1:
        if done_ptr is not None:
            tl.store(done_ptr + row, 0)  # as the next launch wants to find it
            tops, sums = scanned(scanned_ptr, row, segments, SEGMENTS)
        else:
            tops, sums = part_tops, part_sums
        top = tl.max(tops, 0)
        if top == LEAST:  # nothing to draw from
            tl.store(ids_ptr + row, 0)
            tl.store(logprobs_ptr + row, float("nan"))
        else:
            rest = tl.log(tl.sum(sums * tl.exp(tops - top), 0))
            if one != 0:
                token = largest(logits_row, counts_row, tops, width, how, WIDTH)
            else:
                seed = setting(seed_ptr, row, seed + row).to(tl.int64)
                offset = setting(offset_ptr, row, offset).to(tl.int64)
                token = drawn_whole(logits_row, counts_row, tops, sums, top, seed, offset, width, how, WIDTH)
            token = tl.minimum(token, width - 1)
            tl.store(ids_ptr + row, token)
            chosen = numbers_at(logits_row, counts_row, token, token < width, how)
            tl.store(logprobs_ptr + row, chosen - top - rest)  # top + rest would lose digits


@triton.jit
def reaches(key, cols, cut, last):
    """Whether tokens are among those that stay: above the key `cut`, or equal and with an id up to `last`."""
    return (key > cut) | ((key == cut) & (cols <= last))


@triton.jit
def bound(keys, want):
    """A key that at least `want` of `keys` reach, nearly the largest."""
    low = tl.full((), LOWEST, tl.int64)
    step = tl.full((), 0x80000000, tl.int64)
    for _ in tl.range(0, BITS):
        enough = tl.sum((keys >= (low + step).to(tl.int32)).to(tl.int32), 0) >= want
        low = tl.where(enough, low + step, low)
        step = step >> 1
    return low.to(tl.int32)


@triton.jit
def collect(
    logits_row, counts_row, keys, listed_row, found_row, cut, last, width, how,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """How many tokens reach the cut, and CAPACITY of them, largest first: the key above, the flipped id below."""
    at = tl.arange(0, keys.shape[0])
    chosen = (keys >= cut).to(tl.int32)
    tl.debug_barrier()  # an earlier list is read
    tl.store(listed_row + tl.cumsum(chosen, 0) - 1, at, mask=chosen > 0)
    tl.debug_barrier()
    many = tl.sum(chosen, 0)
    count = tl.zeros((), tl.int32)
    for first in tl.range(0, many, ROWS):
        which = first + tl.arange(0, ROWS)
        segment = tl.load(listed_row + which, mask=which < many, other=0)
        cols = segment[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        inside = (which < many)[:, None] & (cols < width)
        key = key_of(numbers_at(logits_row, counts_row, cols, inside, how))
        hit = (inside & reaches(key, cols, cut, last)).to(tl.int32)
        each = tl.sum(hit, 1)
        place = count + (tl.cumsum(each, 0) - each)[:, None] + tl.cumsum(hit, 1) - 1
        tl.store(found_row + place, cols, mask=(hit > 0) & (place < CAPACITY))
        count += tl.sum(each, 0)
    tl.debug_barrier()
    there = tl.arange(0, CAPACITY) < count
    ids = tl.load(found_row + tl.arange(0, CAPACITY), mask=there, other=0)
    key = key_of(numbers_at(logits_row, counts_row, ids, there, how))
    packed = (key.to(tl.int64) << 32) | (ids ^ FLIPPED).to(tl.int64)
    return count, tl.sort(tl.where(there, packed, NOTHING), descending=True)


@triton.jit
def walked(logits_row, counts_row, start, width, how, WALK: tl.constexpr):
    """The next tokens of a walk over a row: numbers, keys and ids."""
    cols = start + tl.arange(0, WALK)
    x = numbers_at(logits_row, counts_row, cols, cols < width, how)
    return x, tl.where(cols < width, key_of(x), LOWEST), cols


@triton.jit
def search(logits_row, counts_row, top, goal, by_count, width, how, WALK: tl.constexpr):
    """The cut (key, last id) of the fewest largest tokens that together reach `goal`: in number, or else in weight."""
    low = tl.full((), LOWEST, tl.int64)
    step = tl.full((), 0x40000000, tl.int64)
    part = tl.arange(0, 8)
    for _ in tl.range(0, 11):
        pivots = tl.minimum(low + part * step, FLIPPED).to(tl.int32)
        reached = tl.zeros((WALK, 8), tl.float32)
        for start in tl.range(0, width, WALK, num_stages=AHEAD):
            x, key, cols = walked(logits_row, counts_row, start, width, how, WALK)
            weight = tl.where(cols < width, tl.where(by_count, 1.0, tl.exp(x - top)), 0.0)
            reached += tl.where(key[:, None] >= pivots[None, :], weight[:, None], 0.0)
        enough = (tl.sum(reached, 0) >= goal) & (part > 0)
        low += tl.sum(enough.to(tl.int64), 0) * step
        step = step >> 3
    cut = low.to(tl.int32)

    above = tl.zeros((WALK,), tl.float32)
    equal = tl.zeros((WALK,), tl.int32)
    for start in tl.range(0, width, WALK, num_stages=AHEAD):
        x, key, cols = walked(logits_row, counts_row, start, width, how, WALK)
        above += tl.where(key > cut, tl.where(by_count, 1.0, tl.exp(x - top)), 0.0)
        equal += ((key == cut) & (cols < width)).to(tl.int32)
    each = tl.where(by_count, 1.0, tl.exp(number_of(cut) - top))
    stay = tl.maximum(tl.ceil((goal - tl.sum(above, 0)) / each), 1.0)
    last = tl.full((), NONE, tl.int32)
    if stay < tl.sum(equal, 0).to(tl.float32):
        before = tl.zeros((), tl.int32)
        for start in tl.range(0, width, WALK, num_stages=AHEAD):
            x, key, cols = walked(logits_row, counts_row, start, width, how, WALK)
            tie = ((key == cut) & (cols < width)).to(tl.int32)
            rank = before + tl.cumsum(tie, 0)
            last = tl.minimum(last, tl.min(tl.where((tie > 0) & (rank >= stay.to(tl.int32)), cols, NONE), 0))
            before += tl.sum(tie, 0)
    return cut, last


@triton.jit
def weight_above(logits_row, counts_row, top, cut, last, width, how, WALK: tl.constexpr):
    total = tl.zeros((WALK,), tl.float32)
    for start in tl.range(0, width, WALK, num_stages=AHEAD):
        x, key, cols = walked(logits_row, counts_row, start, width, how, WALK)
        total += tl.where((cols < width) & reaches(key, cols, cut, last), tl.exp(x - top), 0.0)
    return tl.sum(total, 0)


@triton.jit
def search_and_draw(
    logits_row, counts_row, top, total, k, p, floor, seed, offset, width, how, WALK: tl.constexpr
):  # fmt: skip
    """The token of a row of which so many stay that they do not fit."""
    cut = tl.full((), LOWEST, tl.int32)
    last = tl.full((), NONE, tl.int32)
    if k < width:
        cut, last = search(logits_row, counts_row, top, k.to(tl.float32), True, width, how, WALK)
        total = weight_above(logits_row, counts_row, top, cut, last, width, how, WALK)
    if p < 1:
        share = tl.maximum(p * total, 1e-30)  # of top_p=0 too the largest stays
        higher, until = search(logits_row, counts_row, top, share, False, width, how, WALK)
        closer = (higher > cut) | ((higher == cut) & (until < last))
        cut, last = tl.where(closer, higher, cut), tl.where(closer, until, last)
    least = key_of(floor)
    cut, last = tl.maximum(cut, least), tl.where(least > cut, NONE, last)
    best = tl.full((WALK,), LEAST, tl.float32)
    ids = tl.full((WALK,), NONE, tl.int32)
    for start in tl.range(0, width, WALK, num_stages=AHEAD):
        x, key, cols = walked(logits_row, counts_row, start, width, how, WALK)
        stays = (cols < width) & reaches(key, cols, cut, last)
        score = tl.where(stays, x - top + gumbel(seed, offset, cols, TOKEN), LEAST)
        ids = tl.where(score > best, cols, ids)
        best = tl.maximum(best, score)
    return first_largest(best, ids)


@triton.jit
def cuts(top_k_ptr, top_p_ptr, min_p_ptr, temperature_ptr, row, top, width, top_k, top_p, min_p, temperature):
    """Of a row: how many stay, of which share, above which number, and whether none of that cuts anything."""
    k = setting(top_k_ptr, row, top_k)  # of 64 bits, it may be
    k = tl.where((k <= 0) | (k > width), width, k).to(tl.int32)
    k = tl.where(setting(temperature_ptr, row, temperature) >= GREEDY, k, 1)
    p = setting(top_p_ptr, row, top_p)
    p = tl.where(p < 1, p, 1.0)  # NaN too cuts nothing
    least = setting(min_p_ptr, row, min_p)
    floor = tl.where(least > 0, top + tl.log(tl.where(least < 1, least, 1.0)), LEAST)
    return k, p, floor, (k == width) & (p >= 1) & (floor == LEAST)


@triton.jit
def store_top(top_ids_ptr, top_logprobs_ptr, row, packed, top, total, TOP: tl.constexpr):
    rank = tl.arange(0, packed.shape[0])
    x = number_of((packed >> 32).to(tl.int32))
    tl.store(top_ids_ptr + row * TOP + rank, (packed & FLIPPED).to(tl.int32) ^ FLIPPED, mask=rank < TOP)
    tl.store(top_logprobs_ptr + row * TOP + rank, x - top - tl.log(total), mask=rank < TOP)


@triton.jit(do_not_specialize=["seed", "offset", "top_k", "segments"])
def finish_kernel(
    logits_ptr, counts_ptr, seed_ptr, offset_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    repetition_ptr, presence_ptr, frequency_ptr, scanned_ptr, lists_ptr, ids_ptr, logprobs_ptr, top_ids_ptr,
    top_logprobs_ptr,
    width, segments, stride_row: tl.int64, stride_count: tl.int64, seed: tl.int64, offset: tl.int64,
    temperature, top_k, top_p, min_p, repetition, presence, frequency,
    WIDTH: tl.constexpr, SEGMENTS: tl.constexpr, ROWS: tl.constexpr, CAPACITY: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    """A row. Its part of `lists` has segments, then tokens, then whether the row is left to `search_kernel`."""
    row = tl.program_id(0).to(tl.int64)
    listed_row = lists_ptr + row * (SEGMENTS + CAPACITY + PADDING)
    tops, sums = scanned(scanned_ptr, row, segments, SEGMENTS)
    top = tl.max(tops, 0)
    rank = tl.arange(0, CAPACITY)
    left = tl.zeros((), tl.int1)
    if top == LEAST:  # nothing to draw from
        tl.store(ids_ptr + row, 0)
        tl.store(logprobs_ptr + row, float("nan"))
        if TOP:
            tl.store(top_ids_ptr + row * TOP + rank, rank, mask=rank < TOP)
            tl.store(top_logprobs_ptr + row * TOP + rank, float("nan"), mask=rank < TOP)
    else:
        how = row_settings(temperature_ptr, repetition_ptr, presence_ptr, frequency_ptr, row,
                           temperature, repetition, presence, frequency)  # fmt: skip
        logits_row = logits_ptr + row * stride_row
        counts_row = counts_ptr + row * stride_count if counts_ptr is not None else None
        seed = setting(seed_ptr, row, seed + row).to(tl.int64)
        offset = setting(offset_ptr, row, offset).to(tl.int64)
        k, p, floor, whole = cuts(top_k_ptr, top_p_ptr, min_p_ptr, temperature_ptr, row, top, width,
                                  top_k, top_p, min_p, temperature)  # fmt: skip
        total = tl.sum(sums * tl.exp(tops - top), 0)
        token = tl.zeros((), tl.int32)
        if (k == 1) & (TOP == 0):
            token = largest(logits_row, counts_row, tops, width, how, WIDTH)
        elif (not whole) | (TOP > 0):
            some = tl.minimum(CAPACITY // 4, segments // 4 + 1)  # where it is not known how many stay
            want = tl.where((k <= CAPACITY) & (k < width), k, some)
            want = tl.minimum(tl.maximum(want, TOP), width)
            keys = key_of(tops)
            cut = bound(keys, want)
            count, packed = collect(
                logits_row, counts_row, keys, listed_row, listed_row + SEGMENTS, cut, NONE, width, how,
                WIDTH, ROWS, CAPACITY,
            )  # fmt: skip
            x = number_of((packed >> 32).to(tl.int32))
            ids = (packed & FLIPPED).to(tl.int32) ^ FLIPPED
            if TOP:
                store_top(top_ids_ptr, top_logprobs_ptr, row, packed, top, total, TOP)
            weight = tl.where(rank < count, tl.exp(x - top), 0.0)
            kept_by_k = tl.sum(tl.where(rank < k, weight, 0.0), 0)
            goal = tl.where(p < 1, p * tl.where(k < width, kept_by_k, total), float("inf"))
            stay = (rank < count) & (rank < k) & (x >= floor) & (tl.cumsum(weight, 0) - weight < goal)
            stay = stay | (rank == 0)
            known = (k <= count) | (count >= width) | ((k == width) & (tl.sum(weight, 0) >= goal))
            known = known | ((key_of(floor) > cut) & ((p >= 1) | (k == width)))
            left = (count > CAPACITY) | ((not known) & (not whole))
            token = drawn(tl.where(stay, x - top, LEAST), ids, seed, offset, TOKEN)
        if whole:
            token = drawn_whole(logits_row, counts_row, tops, sums, top, seed, offset, width, how, WIDTH)
        token = tl.minimum(token, width - 1)
        chosen = numbers_at(logits_row, counts_row, token, token < width, how)
        tl.store(ids_ptr + row, token)
        tl.store(logprobs_ptr + row, chosen - top - tl.log(total))
    tl.store(listed_row + SEGMENTS + CAPACITY, left.to(tl.int32))


@triton.jit(do_not_specialize=["seed", "offset", "top_k", "segments"])
def search_kernel(
    logits_ptr, counts_ptr, seed_ptr, offset_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    repetition_ptr, presence_ptr, frequency_ptr, scanned_ptr, lists_ptr, ids_ptr, logprobs_ptr, top_ids_ptr,
    top_logprobs_ptr,
    width, segments, stride_row: tl.int64, stride_count: tl.int64, seed: tl.int64, offset: tl.int64,
    temperature, top_k, top_p, min_p, repetition, presence, frequency,
    WIDTH: tl.constexpr, SEGMENTS: tl.constexpr, ROWS: tl.constexpr, CAPACITY: tl.constexpr, TOP: tl.constexpr,
    WALK: tl.constexpr,
):  # fmt: skip
    """A row that `finish_kernel` left open: too many tokens stay, or are equal."""
    row = tl.program_id(0).to(tl.int64)
    listed_row = lists_ptr + row * (SEGMENTS + CAPACITY + PADDING)
    if tl.load(listed_row + SEGMENTS + CAPACITY) != 0:
        tops, sums = scanned(scanned_ptr, row, segments, SEGMENTS)
        top = tl.max(tops, 0)
        total = tl.sum(sums * tl.exp(tops - top), 0)
        how = row_settings(temperature_ptr, repetition_ptr, presence_ptr, frequency_ptr, row,
                           temperature, repetition, presence, frequency)  # fmt: skip
        logits_row = logits_ptr + row * stride_row
        counts_row = counts_ptr + row * stride_count if counts_ptr is not None else None
        k, p, floor, whole = cuts(top_k_ptr, top_p_ptr, min_p_ptr, temperature_ptr, row, top, width,
                                  top_k, top_p, min_p, temperature)  # fmt: skip
        if TOP:
            cut, last = search(logits_row, counts_row, top, float(TOP), True, width, how, WALK)
            _, packed = collect(
                logits_row, counts_row, key_of(tops), listed_row, listed_row + SEGMENTS, cut, last, width, how,
                WIDTH, ROWS, CAPACITY,
            )  # fmt: skip
            store_top(top_ids_ptr, top_logprobs_ptr, row, packed, top, total, TOP)
        if not whole:
            seed = setting(seed_ptr, row, seed + row).to(tl.int64)
            offset = setting(offset_ptr, row, offset).to(tl.int64)
            token = search_and_draw(logits_row, counts_row, top, total, k, p, floor, seed, offset, width, how, WALK)
            token = tl.minimum(token, width - 1)
            chosen = numbers_at(logits_row, counts_row, token, token < width, how)
            tl.store(ids_ptr + row, token)
            tl.store(logprobs_ptr + row, chosen - top - tl.log(total))


# --- how a call is cut


def scan_rows(rows: int, width: int, segment: int, gpu: Gpu | None) -> int:
    """Segments that a program of the scan has: fewer where there are too few programs to fill the GPU.

    >>> from flashkernels.hardware import lookup
    >>> scan_rows(256, 128_256, 128, lookup("h200")), scan_rows(1, 128_256, 128, lookup("h200"))
    (32, 16)
    """
    full = max(1, TILE // segment)
    programs = rows * -(-width // (full * segment))
    return full if gpu is None or programs >= 4 * gpu.sms else max(1, SMALL_TILE // segment)


class Scan:
    """The launch of `scan_kernel` for rows of logits, with room for what it finds."""

    def __init__(self, rows: int, width: int, gpu: Gpu | None, device: torch.device) -> None:
        self.rows, self.width = rows, width
        self.segment = segment_of(width)
        self.segments = -(-width // self.segment)
        tile = scan_rows(rows, width, self.segment, gpu)
        self.tile, self.blocks = tile, -(-self.segments // tile)
        self.launch = Launch(scan_kernel, {"WIDTH": self.segment, "ROWS": tile}, SCAN_WARPS, device)
        self.output = room((rows, 2, self.segments), torch.float32, device)
        self.grid, self.sizes = rows * self.blocks, (width, self.segments, self.blocks)

    def __call__(
        self, logits: Tensor, counts: Tensor | None, settings: tuple[Tensor | None, ...], numbers: tuple[float, ...]
    ) -> Tensor:
        """(rows, 2, segments): maxima and sums. `settings` are temperature, repetition, presence and frequency;
        `numbers` are the steps from row to row of logits and counts, and these four."""
        found = self.output()
        self.launch(self.grid, (logits, counts, *settings, found), (*self.sizes, *numbers))
        return found


def finish_constants(width: int, capacity: int, top_n: int) -> dict[str, Any]:
    """The compile-time values of `finish_kernel`, in its order."""
    segment = segment_of(width)
    return {
        "WIDTH": segment, "SEGMENTS": max(16, triton.next_power_of_2(-(-width // segment))),
        "ROWS": max(1, GATHERED // segment), "CAPACITY": capacity, "TOP": top_n,
    }  # fmt: skip


def plan(problem: RowProblem, gpu: Gpu | None, tensors: tuple[Any, ...], call: Sample) -> Run:
    logits, previous, counts, *_ = tensors
    rows, width = logits.shape
    assert -(-width // segment_of(width)) <= MOST_SEGMENTS
    scan = Scan(rows, width, gpu, logits.device)
    counter = None if previous is None else Counter(previous, width)
    fixed = finish_constants(width, call.capacity, call.top_n)
    finish = Launch(finish_kernel, fixed, FINISH_WARPS, logits.device)
    search = Launch(search_kernel, fixed | {"WALK": WALK}, SEARCH_WARPS, logits.device)
    copied = logits.stride(1) != 1 and width > 1
    searched = bool(call.top_n) or any(x is not None for x in tensors[5:9])  # else the numbers decide
    # Where a program has a row, nothing goes through memory. However many rows there are: sums must not depend on that.
    whole_rows, segments = width <= SMALL_TILE, fixed["SEGMENTS"]
    constants = {"WIDTH": scan.segment, "ROWS": segments if whole_rows else scan.tile, "SEGMENTS": segments}
    settled = Launch(settled_kernel, constants, SCAN_WARPS, logits.device)
    like = Sampled.empty(logits.to("meta"), call.top_n)
    ids, logprobs, top_ids, top_logprobs = (room(x.shape, x.dtype, logits.device) for x in like)
    lists = room((rows, segments + call.capacity + PADDING.value), torch.int32, logits.device)
    row_step = width if copied else logits.stride(0)
    count_step = 0 if counts is None else counts.stride(0) if counts.stride(1) == 1 else width  # then it is copied
    count_step = counter.width if counter else count_step
    sizes, steps = (width, scan.segments, row_step, count_step), (row_step, count_step)
    grid, output, device = scan.grid, scan.output, logits.device.index

    @functools.lru_cache(maxsize=16)
    def stays(settings: tuple[Any, ...]) -> int | None:
        """1 where one token stays and 0 where all do, in every row; None where that is to be found out."""
        named = Numbers._make((*settings, 0, 0))
        return int(named.one) if not searched and named.settled(width) else None

    def laid_out(numbers: tuple[Any, ...]) -> tuple[Any, ...]:
        """Of a call with these numbers: them, whether `settled_kernel` serves, and what the kernels take."""
        one, (heat, _, _, _, *penalties, seed, offset) = stays(numbers[:7]), numbers
        if one is not None:
            return numbers, True, (*scan.sizes, *steps, seed, offset, one, heat, *penalties), ()
        return numbers, False, (*steps, heat, *penalties), (*sizes, seed, offset, *numbers[:7])

    last: tuple[Any, ...] = (None,)  # what `laid_out` gave
    new: Any = tuple.__new__  # half the time of the class's own

    def run(
        numbers: tuple[Any, ...], logits: Tensor, previous: Tensor | None, counts: Tensor | None, seeds: Tensor | None,
        offsets: Tensor | None, temperature: Tensor | None, top_k: Tensor | None, top_p: Tensor | None,
        min_p: Tensor | None, repetition: Tensor | None, presence: Tensor | None, frequency: Tensor | None,
    ) -> Sampled:  # fmt: skip
        nonlocal last
        token, logprob = ids(), logprobs()
        out = new(Sampled, (token, logprob, top_ids(), top_logprobs()))
        if rows == 0:
            return out
        if copied:
            logits = logits.contiguous()
        if counter is not None and previous is not None:
            counts = counter(previous)
        known = last
        if known[0] != numbers:
            known = last = laid_out(numbers)
        _, at_once, first, values = known
        if at_once:
            found, done = (None, None) if whole_rows else (output(), zeros(rows, torch.int32, device))
            given = (logits, counts, seeds, offsets, repetition, presence, frequency, found, done, token, logprob)
            settled(grid, given, first)
            return out
        found = scan(logits, counts, (temperature, repetition, presence, frequency), first)
        given = (
            logits, counts, seeds, offsets, temperature, top_k, top_p, min_p, repetition, presence, frequency, found,
            lists(), token, logprob, *(out[2:] if call.top_n else (None, None)),
        )  # fmt: skip
        finish(rows, given, values)
        search(rows, given, values)
        return out

    return run
