"""Tiles of the Triton forward: the candidates of each strategy, what they need, and what they are predicted to cost."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import NamedTuple

from flashkernels.attention.problem import AttentionProblem
from flashkernels.hardware import GPUS, Gpu
from flashkernels.tiling import (
    STRATEGIES,
    Candidate,
    Choice,
    Footprint,
    Tile,
    best_of,
    cheapest,
    decomposed,
    footprint,
    padded,
)

LARGEST_DIM = 512
TENSOR_COLUMNS = 512  # of an sm_100 multiprocessor's tensor memory
SPLIT_ABOVE = 256  # from here on the head dimension is read in chunks


class Shape(NamedTuple):
    """A tile without its head dimension."""

    block_m: int
    block_n: int
    warps: int
    registers: int = 0
    lazy: bool = False
    early: bool = False


SHAPES = (
    Shape(128, 128, 8), Shape(128, 64, 8, 128), Shape(128, 64, 8), Shape(128, 64, 4), Shape(64, 128, 4, 168),
    Shape(64, 64, 4, 128), Shape(64, 64, 4), Shape(128, 32, 8), Shape(64, 32, 4), Shape(64, 32, 8), Shape(32, 64, 4),
    Shape(32, 32, 4), Shape(16, 32, 4), Shape(32, 16, 4), Shape(16, 16, 4),
)  # fmt: skip
# IEEE fp32 runs on the plain FMA units, where Triton keeps whole rows of Q in registers: few rows, narrow parts.
SHAPES_FP32 = (Shape(64, 32, 8), Shape(16, 32, 4), Shape(16, 16, 4))
PART_FP32 = 32
WIDEST_ROWS_FP32 = 96  # 64 rows spill over this head dimension


class Rule(NamedTuple):
    """The measured best shape for computed head dimensions up to `width` on Hopper, and the TFLOPS it reaches there."""

    width: int
    shape: Shape
    stages: int
    tflops: float
    unmasked: bool = False  # for calls without a causal mask or window alone


# H200, 2026-11-15, bf16, B=4, S=4096, heated, full attention, counted at the computed width: on average 4 % ahead of
# what `seconds` would pick among the same tiles. Three parts over 128 are slow: 200 to 224 are better padded to 256.
# With a running maximum: what fp16, softcap, ALiBi and ragged batches take.
ALIGNED = (
    Rule(48, Shape(64, 128, 4, 168), 2, 318),
    Rule(64, Shape(64, 128, 4, 168), 2, 432),
    Rule(80, Shape(64, 64, 4, 128), 2, 406),
    Rule(96, Shape(128, 64, 8, 128), 3, 453),
    Rule(112, Shape(128, 64, 4), 3, 441),
    Rule(128, Shape(128, 128, 8), 3, 481),
    Rule(160, Shape(64, 64, 4), 2, 428),
    Rule(176, Shape(128, 64, 8), 3, 367),
    Rule(192, Shape(128, 64, 8), 3, 477),
    Rule(208, Shape(128, 64, 8), 2, 363),
    Rule(224, Shape(128, 64, 8), 2, 379),
    Rule(256, Shape(128, 64, 8), 2, 497),
)
# Heads that start between two 32-byte sectors (D = 8 mod 16) cost TMA more: more query rows share a load of K and V.
MISALIGNED = (
    Rule(48, Shape(128, 64, 4), 3, 290),
    Rule(64, Shape(128, 64, 4), 3, 405),
    Rule(96, Shape(128, 64, 8, 128), 3, 374),
    Rule(112, Shape(128, 64, 4), 3, 406),
    Rule(128, Shape(128, 128, 8), 3, 460),
    Rule(160, Shape(64, 64, 4), 2, 355),
    *(rule for rule in ALIGNED if rule.width > 160),
)
# The same with a lazy maximum, from a later run of the same day, scaled by cuDNN's TFLOPS in both.
LAZY_ALIGNED = (
    Rule(48, Shape(64, 128, 4, 168, lazy=True), 2, 338),
    Rule(64, Shape(128, 64, 8, 128, lazy=True), 3, 470),
    Rule(80, Shape(64, 64, 4, 128, lazy=True), 2, 431),
    Rule(96, Shape(64, 64, 4, 168, lazy=True, early=True), 2, 454),
    Rule(112, Shape(128, 64, 4, lazy=True), 3, 464),
    Rule(128, Shape(128, 64, 8, 128, lazy=True), 2, 482),
    Rule(160, Shape(64, 64, 4, lazy=True, early=True), 2, 486),
    *(rule for rule in ALIGNED if rule.width > 160),
)
LAZY_MISALIGNED = (
    *(rule for rule in MISALIGNED if rule.width == 48),
    Rule(64, Shape(128, 64, 8, 128, lazy=True), 3, 445),
    Rule(80, Shape(128, 64, 8, 128, lazy=True), 3, 391),
    # H200, 2026-11-16, D=88, lazy: causal 402 TFLOPS for 346, full 437 for 369, but full it spills outside of its loops
    Rule(96, Shape(128, 64, 8, 128), 3, 374, unmasked=True),
    Rule(96, Shape(128, 64, 8, 128, lazy=True), 3, 477),
    *(rule for rule in MISALIGNED if 96 < rule.width < 128),  # lazy, D=104 is faster but spills in its loops
    Rule(128, Shape(128, 128, 8, lazy=True), 3, 463, unmasked=True),
    Rule(128, Shape(128, 64, 8, 128, lazy=True), 2, 423),
    *(rule for rule in MISALIGNED if rule.width > 128),
)
NARROWEST_RULE = 48
CAUSAL_SHARE = 0.92  # of those TFLOPS that a causal mask leaves


def choose(problem: AttentionProblem, gpu: Gpu, tma: bool, strategy: str | None = None) -> Candidate:
    """The cheapest tile for a problem; `tma` says whether K and V can be read by TMA."""
    return cheapest(
        [choice for choice in compare(problem, gpu, tma) if strategy in (None, choice.strategy)],
        f"head_dim={problem.head_dim}, head_dim_v={problem.head_dim_v}, {problem.dtype} on {gpu.name}",
    )


@lru_cache(maxsize=1024)
def compare(problem: AttentionProblem, gpu: Gpu, tma: bool) -> tuple[Choice, ...]:
    """The best tile of every strategy, or why it has none."""
    tma = tma and gpu.has_tma and problem.element_bytes == 2
    return tuple(_best(strategy, problem, gpu, tma) for strategy in STRATEGIES)


def _best(strategy: str, problem: AttentionProblem, gpu: Gpu, tma: bool) -> Choice:
    largest = max(problem.head_dim, problem.head_dim_v)
    if largest > LARGEST_DIM:
        return Choice(strategy, None, f"head_dim={largest} is over {LARGEST_DIM}")
    if strategy == "register":
        return Choice(strategy, None, "Q resident in registers is for the Hopper kernel alone")
    if strategy == "split_d" and largest <= SPLIT_ABOVE:
        return Choice(strategy, None, f"head_dim={largest} fits one pass; chunks pay over {SPLIT_ABOVE}")
    if strategy != "split_d" and largest > SPLIT_ABOVE:
        return Choice(strategy, None, f"head_dim={largest} is over {SPLIT_ABOVE}: a tile that wide does not fit")
    known = ruled(strategy, problem, gpu, tma)
    if known is not None and known.footprint.exceeds(gpu) is None:
        return Choice(strategy, known)
    return best_of(strategy, gpu, candidates(strategy, problem, gpu, tma), partial(predicted, problem, gpu))


def parts_of(strategy: str, problem: AttentionProblem) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """How a strategy cuts the two head dimensions."""
    cut = padded if strategy == "standard" else decomposed
    parts, parts_v = cut(problem.head_dim), cut(problem.head_dim_v)
    if problem.element_bytes == 2:
        return parts, parts_v
    return (PART_FP32,) * -(-sum(parts) // PART_FP32), (PART_FP32,) * -(-sum(parts_v) // PART_FP32)


def candidates(strategy: str, problem: AttentionProblem, gpu: Gpu, tma: bool) -> Iterator[Tile]:
    """Every tile worth comparing."""
    parts, parts_v = parts_of(strategy, problem)
    for shape in SHAPES if problem.element_bytes == 2 else SHAPES_FP32:
        if shape.registers and (problem.dropout_p or not gpu.has_wgmma):
            continue  # register caps are measured on Hopper only, and leave dropout too few
        if gpu.has_wgmma and problem.element_bytes == 2 and shape.block_m < 64 and max(sum(parts), sum(parts_v)) <= 256:
            continue  # wgmma computes 64 rows at a time
        if gpu.capability[0] == 10 and tensor_columns(shape, parts_v) > TENSOR_COLUMNS:
            continue
        if problem.mask and shape.block_m * shape.block_n > 64 * 64:
            continue  # a mask's addresses and values take registers and shared memory of their own
        if problem.element_bytes > 2 and shape.block_m > 16 and max(sum(parts), sum(parts_v)) > WIDEST_ROWS_FP32:
            continue
        for stages in (3, 2, 1):
            yield Tile(strategy, *shape[:2], parts, parts_v, shape.warps, stages, tma, shape.registers)


def tensor_columns(shape: Shape, parts_v: tuple[int, ...]) -> float:
    """Columns of tensor memory that tcgen05 takes on sm_100: the accumulators, and as compiled 3.5 tiles of scores."""
    if shape.block_m < 64:
        return 0  # mma.sync
    return sum(parts_v) + 3.5 * shape.block_n * shape.block_m / 128


def ruled(strategy: str, problem: AttentionProblem, gpu: Gpu, tma: bool) -> Candidate | None:
    """The tile that measurement names: 16-bit inputs on Hopper, by TMA, with enough rows to fill the machine."""
    fills = problem.batch * problem.heads * problem.seq_q >= 128 * gpu.sms
    measured = problem.mask is None and not problem.dropout_p
    parts, parts_v = parts_of(strategy, problem)
    width = max(sum(parts), sum(parts_v))
    if not (gpu.has_wgmma and tma and fills and measured and problem.element_bytes == 2 and width >= NARROWEST_RULE):
        return None
    aligned = problem.head_dim % 16 == 0 and problem.head_dim_v % 16 == 0
    # Probabilities of fp16 overflow early, and a block that overflows is computed twice. Ragged rows leave capped tiles
    # too few registers: as compiled, 80 spills and 96 waits for every single product.
    lazy = problem.dtype == "bf16" and not (problem.softcap or problem.alibi or problem.varlen)
    rules = (LAZY_ALIGNED if aligned else LAZY_MISALIGNED) if lazy else ALIGNED if aligned else MISALIGNED
    masked = problem.band != (-1, -1)
    rule = next((rule for rule in rules if width <= rule.width and not (rule.unmasked and masked)), None)
    if rule is None:
        return None
    block_m, block_n, warps, cap, lazy, early = rule.shape
    early = early and len(parts) > 1  # Q·Kᵀ may be narrower than the rule
    tile = Tile(strategy, block_m, block_n, parts, parts_v, warps, rule.stages, tma, cap, lazy, early)
    flops = 2 * problem.heads * problem.pairs() * (sum(parts) + sum(parts_v))
    rate = rule.tflops * 1e12 * gpu.peak[problem.dtype] / GPUS["h200"].peak[problem.dtype]
    rate *= CAUSAL_SHARE if masked else 1.0
    return Candidate(tile, needs(tile, problem, gpu), LAUNCH + flops / rate)


def predicted(problem: AttentionProblem, gpu: Gpu, tile: Tile) -> Candidate:
    need = needs(tile, problem, gpu)
    return Candidate(tile, need, seconds(tile, problem, gpu, need))


def needs(tile: Tile, problem: AttentionProblem, gpu: Gpu) -> Footprint:
    return footprint(tile, gpu, shared_bytes(tile, problem), registers(tile, problem, gpu))


def shared_bytes(tile: Tile, problem: AttentionProblem) -> int:
    """Q once, K and V in every stage, and barriers and the scratch of reductions.

    A mask has a tile in every stage too, and scratch through which its layout is turned into that of the scores; so is
    what dropout keeps (on sm_100).
    """
    width, width_v = sum(tile.parts), sum(tile.parts_v)
    scores = tile.block_m * tile.block_n
    stage = tile.block_n * (width + width_v) * problem.element_bytes
    stage += {None: 0, "bool": 1, "float": 4}[problem.mask] * scores
    scratch = 2048 + (5 * scores if problem.mask else 0) + (scores if problem.dropout_p else 0)
    in_registers = problem.element_bytes > 2 and tile.block_m <= 16  # where fp32 keeps the few rows of Q
    q = 0 if in_registers else tile.block_m * width * problem.element_bytes
    return q + tile.stages * stage + scratch


def registers(tile: Tile, problem: AttentionProblem, gpu: Gpu) -> int:
    """Accumulators, scores in fp32, probabilities in the input type, and addresses and row statistics."""
    threads = 32 * tile.warps
    per_row = sum(tile.parts_v) + tile.block_n + tile.block_n * problem.element_bytes // 4
    addresses = 0 if tile.tma else 64
    if gpu.capability[0] in (8, 12):  # mma.sync takes Q from registers; wgmma and tcgen05 from shared memory
        addresses = 64
        per_row += sum(tile.parts) * problem.element_bytes // 4
    extras = 24 * (problem.softcap or problem.alibi) + 24 * (problem.mask is not None) + 8 * (problem.window[0] >= 0)
    extras += 48 * (problem.dropout_p > 0) + 24 * (problem.page_size > 0)  # as compiled
    statistics = 8 if tile.lazy else 32  # as compiled: a lazy maximum has no second one beside it, and no factors
    return tile.block_m * per_row // threads + statistics + extras + (addresses if problem.element_bytes == 2 else 0)


# Constants of the cost below, fitted to 412 timings of tiles on an H200 (2026-11-15, cycles at 1.6 to 1.7 GHz): 15 %
# RMS error, and its pick is on average 4 % (at worst 20 %) behind the best one timed. `seconds` counts at the nominal
# clock, so it is about 15 % too fast on a heated chip. The penalty of a single stage is a guess.
CYCLES_PER_LANE = 8.0  # instructions of the softmax for one score, of the kind that 128 lanes issue together
DROPOUT_CYCLES_PER_LANE = 17.0  # more of them, as compiled for sm_90
LOOP_INSTRUCTIONS = 72.0  # bookkeeping of one key block, in every warp
LOAD_BYTES_PER_CYCLE = 42.0  # K and V into one multiprocessor's shared memory, from the L2
MISALIGNED_LOAD = 1.25
WAIT_CYCLES = 126.0  # until a matrix product's result can be read
EXPOSED = (1.2, 0.56, 0.45, 0.3)  # share of the shorter pipe's time not hidden, with 1, 2, 3, 4 blocks on an SM
STAGE_PENALTY = {1: 1.5, 2: 1.08, 3: 1.0, 4: 1.0}
# Seconds to start the kernel, fill the machine and empty it: the best of 0 to 5 µs for the suite `scaling` (H200,
# 2026-11-15, commit d98b3c4: within 20 % are 12 of 13 cases instead of 6).
LAUNCH = 3e-6


def seconds(tile: Tile, problem: AttentionProblem, gpu: Gpu, need: Footprint) -> float:
    """Predicted time: a launch, and a tile's time on one multiprocessor times the waves of tiles."""
    rows = -(-problem.seq_q // tile.block_m)
    tiles = max(1, problem.batch * problem.heads * rows)
    pairs = max(1, problem.heads * problem.pairs()) / tiles
    if need.blocks_per_sm == 0:
        return math.inf
    width, width_v = sum(tile.parts), sum(tile.parts_v)
    lanes = 64 if gpu.capability == (8, 0) else 128
    clock = gpu.peak["fp32"] / gpu.sms / lanes / 2
    matrix = 2 * (width + width_v) / (gpu.peak[problem.dtype] / gpu.sms / clock)
    per_lane = tile.block_m * tile.block_n / (32 * tile.warps)
    each = CYCLES_PER_LANE + DROPOUT_CYCLES_PER_LANE * (problem.dropout_p > 0)
    vector = (each + width_v / tile.block_n + LOOP_INSTRUCTIONS / per_lane) / lanes
    softmax = max(vector, 1 / 16)  # 16 exponentials a cycle
    load = (width + width_v) * problem.element_bytes / tile.block_m / LOAD_BYTES_PER_CYCLE
    if problem.head_dim % 16 or problem.head_dim_v % 16:
        load *= MISALIGNED_LOAD
    wait = WAIT_CYCLES * (len(tile.parts) + 1) / (tile.block_m * tile.block_n)
    exposed = EXPOSED[min(need.blocks_per_sm, len(EXPOSED)) - 1]
    cycles = max(matrix, softmax, load) + exposed * (min(matrix, softmax) + wait)
    waves = -(-tiles // (gpu.sms * need.blocks_per_sm)) * need.blocks_per_sm
    return LAUNCH + waves * pairs * cycles * STAGE_PENALTY[tile.stages] / clock
