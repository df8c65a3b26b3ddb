"""How a grouped GEMM is cut into tiles: what is known about which is fast, as rules.

Two ways. *Decode*: few rows an expert, so its weights are the traffic. The weights are the first operand (their
features are the tall side, 64 or 128), the rows the narrow second one, 16 to 64: no padding of rows to 128, and every
tile streams its part of the weights once. *Large*: rows are the tall side, tiles of 128 x 256 go through all
multiprocessors in an order that keeps a few row tiles and a few column tiles in the L2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from flashkernels.hardware import Gpu
from flashkernels.moe.plan import most_tiles
from flashkernels.moe.problem import BYTES, FORMATS, PHASES, GemmProblem
from flashkernels.tiling import TilingError

SPARE = 2048  # bytes of shared memory for what is not an operand
MOST_SPLIT = 8
# Unpacking words in every tile takes a quarter of the tensor cores' time, unpacking them once 2.5 bytes of traffic for
# a weight: the same at about 600 rows an expert (predicted for an H200, 2026-11).
MANY = 768
LARGEST = 2 << 30  # bytes of unpacked weights that a call may take for a while: those of Mixtral's first product
REACHED = 0.64  # of the peak, by full large tiles (H200, 2026-11: bf16, 16384 tokens)


@dataclass(frozen=True)
class GemmTile:
    """Rows, output columns and depth of a tile; `swap`: the weights are the first operand.

    >>> GemmTile(True, 16, 64, 128, warps=4, stages=4).name
    'decode-16x64x128-w4-s4'
    """

    swap: bool
    block_m: int  # rows
    block_n: int  # columns of the output; the weights of gated ones are twice as many
    block_k: int
    warps: int
    stages: int
    persistent: bool = False  # as many programs as multiprocessors, each takes tile after tile
    group: int = 8  # row tiles that walk over the columns together
    tma: bool = False
    split: int = 1  # parts of the depth; their sums are added by whoever reads the output
    copied: bool = False  # rows are gathered by a copy first, so that TMA can load them
    registers: int = 0  # most of a thread; 0: as many as the compiler likes
    paired: bool = False  # scales of a step's two groups are loaded together, a step before they are wanted

    @property
    def name(self) -> str:
        way = ("decode" if self.block_m < 128 else "turned") if self.swap else "large"
        flags = [("persistent", self.persistent), ("tma", self.tma), ("copied", self.copied), ("paired", self.paired)]
        words = [f"split{self.split}"] * (self.split > 1) + [word for word, flag in flags if flag]
        words += [f"r{self.registers}"] * (self.registers > 0)
        size = f"{self.block_m}x{self.block_n}x{self.block_k}-w{self.warps}-s{self.stages}"
        return "-".join([way, size, *words])


def shared_bytes(tile: GemmTile, problem: GemmProblem) -> int:
    """Of the operands of all stages."""
    x = BYTES[problem.dtype] * tile.block_m
    w = FORMATS.get(problem.weights, 8 * BYTES[problem.dtype]) * tile.block_n * (2 if problem.gated else 1) // 8
    return tile.stages * tile.block_k * (x + w)


def fitted(tile: GemmTile, problem: GemmProblem, gpu: Gpu) -> GemmTile:
    """The tile with fewer stages, then a smaller depth, then fewer columns, until it fits the GPU. A GPU with so little
    shared memory has no wgmma, either: numbers that words become are then better half as many (registers)."""
    words = problem.weights in PHASES
    shallow = 32 * PHASES[problem.weights] if words else 128 if problem.weights else 64  # fp8_block: a scale for 128
    while shared_bytes(tile, problem) > gpu.shared_per_block - SPARE:
        if tile.stages > 2:
            tile = replace(tile, stages=tile.stages - 1)
        elif words and tile.block_k > shallow:
            tile = replace(tile, block_k=tile.block_k // 2, block_n=tile.block_n // 2)
        elif tile.block_k > shallow:
            tile = replace(tile, block_k=tile.block_k // 2)
        elif tile.block_n > 32:
            tile = replace(tile, block_n=tile.block_n // 2)
        elif tile.stages > 1:
            tile = replace(tile, stages=1)
        else:
            raise TilingError(f"no tile of {tile.block_m} rows fits {gpu.name}: {tile.name}")
    return tile


def widens(problem: GemmProblem) -> bool:
    """Whether words are better unpacked into memory first, for a product of 16-bit weights.

    >>> [widens(GemmProblem(t * 2, 8, 28672, 4096, "bf16", "cuda", "w4", group=128)) for t in (1024, 4096)]
    [False, True]
    """
    large = 2 * problem.experts * problem.n * problem.depth > LARGEST
    many = problem.rows >= MANY * problem.experts
    return problem.weights in PHASES and problem.dtype != "fp32" and many and not large


def pairs(problem: GemmProblem, tile: GemmTile) -> bool:
    """Whether each step has whole groups of weights, two of them, whose scales of 16 bits lie side by side.

    >>> tile = GemmTile(True, 16, 64, 256, 4, 3)
    >>> [pairs(GemmProblem(8, 8, 64, d, "bf16", "cuda", "w4", group=128), tile) for d in (2048, 1920)]
    [True, False]
    """
    whole = 64 * PHASES.get(problem.weights, 0)  # weights of words that are packed together
    return tile.block_k == whole == 2 * problem.group and problem.depth % whole == 0


def in_pairs(tile: GemmTile, problem: GemmProblem, gpu: Gpu) -> GemmTile:
    """The tile with so few stages that two programs share a multiprocessor: while one finds out which expert it has,
    which takes four loads after one another, the other keeps the memory busy. With less than three stages the depth of
    each is halved instead, where the format allows that."""
    room = gpu.shared_per_sm // 2 - SPARE
    deep = next((n for n in (4, 3) if shared_bytes(replace(tile, stages=n), problem) <= room), 0)
    if deep or problem.weights or tile.block_k <= 64:
        return replace(tile, stages=deep or 3)
    return in_pairs(replace(tile, block_k=tile.block_k // 2), problem, gpu)


def choose(problem: GemmProblem, gpu: Gpu, tma: bool, splittable: bool = False, forced: object = None) -> GemmTile:
    """The tile that is forced, or the rules'. Its rows are those of the plan's schedule."""
    if isinstance(forced, GemmTile):
        if forced.block_m != problem.block:
            raise TilingError(f"the tile {forced.name} has other rows than the plan's tiles, {problem.block}")
        return forced if splittable else replace(forced, split=1)
    tma = tma and gpu.has_tma
    deep = 64 * PHASES.get(problem.weights, 2)  # words are packed by 64; 128 weights of fp8_block share a scale
    columns = 64 if problem.gated else 128
    if problem.dtype == "fp32":
        depth = deep if problem.weights else 32
        tile = GemmTile(problem.block < 128, problem.block, 32, depth, warps=4, stages=2)
    elif problem.block < 128:
        # Many small programs: what one waits for, the others load. 64 features are the least that wgmma takes.
        shallow = problem.block == 64 and not gpu.has_wgmma and not problem.weights  # operands are in registers there
        tile = GemmTile(True, problem.block, 64, 64 if shallow else deep, warps=4, stages=4, tma=tma)
        if problem.weights in PHASES:
            # Half of what reaches a multiprocessor are rows: 128 rows of weights share them. More warps with more rows:
            # weights as numbers, sums of a group and sums of all must fit a thread's registers.
            tile = replace(tile, block_n=columns, warps=4 if problem.block == 16 else 8, stages=3)
            if problem.block == 32 and gpu.has_wgmma:  # two programs on a multiprocessor: 128 of 141 registers
                tile = replace(tile, registers=128)
            # Scales in pairs, and with 16 rows three programs: 168 of up to 221 registers. Of an INT4 layer's time 4 to
            # 8 % (H200, 2026-11-17: Qwen3 at 16, 64 and 256 tokens, Mixtral at 16 and 64).
            if problem.block <= 32 and gpu.has_wgmma and pairs(problem, tile):
                tile = replace(tile, paired=True, registers=tile.registers or 168)
        else:
            tile = in_pairs(tile, problem, gpu)
        tile = replace(tile, split=split_of(problem, gpu, tile) if splittable else 1)
    elif problem.weights in PHASES:  # words become numbers in registers, where only the first operand may be
        tile = GemmTile(True, problem.block, columns, deep, warps=8, stages=3, tma=tma)
    elif problem.weights == "fp8_block":  # a second accumulator, for the sum of a block: half the columns
        tile = GemmTile(False, problem.block, columns, deep, warps=8, stages=3, persistent=True, tma=tma)
    else:
        depth = 128 if BYTES[problem.dtype] == 1 else 64
        tile = GemmTile(False, problem.block, 2 * columns, depth, warps=8, stages=4, persistent=True, tma=tma)
        tile = replace(tile, split=rounds_split(problem, gpu, tile) if splittable else 1)
    if problem.gather and tile.tma and tile.block_m >= 128:
        tile = replace(tile, copied=True)
    return fitted(tile, problem, gpu)


def split_of(problem: GemmProblem, gpu: Gpu, tile: GemmTile) -> int:
    """Parts of the depth that bring four programs to each multiprocessor, each with a few steps to do; six where three
    of them share one, which those of words with 16 rows do.

    >>> from flashkernels.hardware import lookup
    >>> problem = GemmProblem(2, 8, 4096, 14336, "bf16", "cuda", block=16)
    >>> split_of(problem, lookup("h200"), GemmTile(True, 16, 64, 128, 4, 4))
    8

    Words with 32 rows are not cut where a tile for each expert nearly fills the two programs of all multiprocessors.

    >>> shapes = [(8, 4096), (8, 3072), (16, 4096)]
    >>> problems = [GemmProblem(16 * e, e, n, 14336, "bf16", "cuda", "w4", block=32) for e, n in shapes]
    >>> [split_of(problem, lookup("h200"), GemmTile(True, 32, 128, 256, 8, 3)) for problem in problems]
    [1, 2, 1]
    """
    columns = -(-problem.width // tile.block_n)
    # Mixtral at 64 tokens has 256 programs for 264 places. Whole, they save the sums of parts: 2.4 % of the layer, with
    # scales in pairs 0.7 % (H200, 2026-11-17).
    if problem.weights in PHASES and tile.block_m == 32 and gpu.has_wgmma:
        full = min(problem.rows, problem.experts) * columns / (2 * gpu.sms)
        if 0.95 <= full <= 1:
            return 1
    tiles = most_tiles(problem.rows, problem.experts, tile.block_m) * columns
    steps = -(-problem.depth // tile.block_k)
    wanted = (6 if problem.weights in PHASES and tile.block_m == 16 else 4) * gpu.sms
    split = 1
    while split < MOST_SPLIT and tiles * split < wanted and steps // (2 * split) >= 4:
        split *= 2
    return split


def rounds_split(problem: GemmProblem, gpu: Gpu, tile: GemmTile) -> int:
    """Parts of the depth with which a few rounds of large tiles leave fewer multiprocessors idle in the last one, where
    that gains more than it costs to write and read sums of parts. An expert's last tile is half empty on average.

    >>> from flashkernels.hardware import lookup
    >>> tile = GemmTile(False, 128, 256, 64, 8, 4)
    >>> [rounds_split(GemmProblem(t * 2, 8, 4096, 14336, "bf16", "cuda"), lookup("h200"), tile) for t in (1024, 4096)]
    [2, 1]
    """
    tiles = (problem.rows / tile.block_m + problem.experts / 2) * -(-problem.width // tile.block_n)
    of_tile = 2 * tile.block_m * tile.block_n * problem.depth / (REACHED * gpu.peak[problem.dtype] / gpu.sms)

    def seconds(split: int) -> float:
        moved = 2 * problem.rows * problem.width * (4 * split if split > 1 else 2)
        return math.ceil(tiles * split / gpu.sms) / split * of_tile + moved / gpu.bandwidth

    best = min((2, 3, 4), key=seconds)
    return best if seconds(best) < 0.95 * seconds(1) else 1  # parts end the loads ahead of the next tile


def reason(problem: GemmProblem, tile: GemmTile) -> str:
    """Why this way, in words."""
    mean = problem.rows / max(1, problem.experts)
    if tile.block_m < 128:
        return f"{mean:.1f} rows an expert: weights are the traffic, rows are the narrow side ({tile.block_m})"
    return f"{mean:.0f} rows an expert: tensor cores are the limit, tiles of {tile.block_m} rows"
