"""How a grouped GEMM is cut into tiles: what is known about which is fast, as rules.

Two ways. *Decode*: few rows an expert, so its weights are the traffic. The weights are the first operand (their
features are the tall side, 64 or 128), the rows the narrow second one, 16 to 64: no padding of rows to 128, and every
tile streams its part of the weights once. *Large*: rows are the tall side, tiles of 128 x 256 go through all
multiprocessors in an order that keeps a few row tiles and a few column tiles in the L2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashkernels.hardware import Gpu
from flashkernels.moe.plan import most_tiles
from flashkernels.moe.problem import BYTES, FORMATS, GemmProblem
from flashkernels.tiling import TilingError, override

SPARE = 2048  # bytes of shared memory for what is not an operand
MOST_SPLIT = 8


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

    @property
    def name(self) -> str:
        way = "decode" if self.swap else "large"
        flags = [("persistent", self.persistent), ("tma", self.tma), ("copied", self.copied)]
        words = [f"split{self.split}"] * (self.split > 1) + [word for word, flag in flags if flag]
        size = f"{self.block_m}x{self.block_n}x{self.block_k}-w{self.warps}-s{self.stages}"
        return "-".join([way, size, *words])


def shared_bytes(tile: GemmTile, problem: GemmProblem) -> int:
    """Of the operands of all stages."""
    x = BYTES[problem.dtype] * tile.block_m
    w = FORMATS.get(problem.weights, 8 * BYTES[problem.dtype]) * tile.block_n * (2 if problem.gated else 1) // 8
    return tile.stages * tile.block_k * (x + w)


def fitted(tile: GemmTile, problem: GemmProblem, gpu: Gpu) -> GemmTile:
    """The tile with fewer stages, then a smaller depth, then fewer columns, until it fits the GPU."""
    while shared_bytes(tile, problem) > gpu.shared_per_block - SPARE:
        if tile.stages > 2:
            tile = replace(tile, stages=tile.stages - 1)
        elif tile.block_k > 64 and not problem.weights:
            tile = replace(tile, block_k=tile.block_k // 2)
        elif tile.block_n > 32:
            tile = replace(tile, block_n=tile.block_n // 2)
        else:
            raise TilingError(f"no tile of {tile.block_m} rows fits {gpu.name}: {tile.name}")
    return tile


def in_pairs(tile: GemmTile, problem: GemmProblem, gpu: Gpu) -> GemmTile:
    """The tile with so few stages that two programs share a multiprocessor: while one finds out which expert it has,
    which takes four loads after one another, the other keeps the memory busy. With less than three stages the depth of
    each is halved instead, where the format allows that."""
    room = gpu.shared_per_sm // 2 - SPARE
    deep = next((n for n in (4, 3) if shared_bytes(replace(tile, stages=n), problem) <= room), 0)
    if deep or problem.weights or tile.block_k <= 64:
        return replace(tile, stages=deep or 3)
    return in_pairs(replace(tile, block_k=tile.block_k // 2), problem, gpu)


def forced_tile() -> GemmTile | None:
    """The tile of a grouped GEMM that `use_tile` has put in force."""
    forced = override()
    return forced if isinstance(forced, GemmTile) else None


def choose(
    problem: GemmProblem, gpu: Gpu, tma: bool, splittable: bool = False, forced: GemmTile | None = None
) -> GemmTile:
    """The tile that is forced, or the rules'. Its rows are those of the plan's schedule."""
    if forced is not None:
        if forced.block_m != problem.block:
            raise TilingError(f"the tile {forced.name} has other rows than the plan's tiles, {problem.block}")
        return forced if splittable else replace(forced, split=1)
    tma = tma and gpu.has_tma
    # 4-bit weights are packed by 128, blocks of fp8 share a scale, and groups of w8 do
    deep = min(128, problem.group or 128) if problem.weights == "w8" else 128
    columns = 64 if problem.gated else 128
    if problem.dtype == "fp32":
        depth = deep if problem.weights else 32
        tile = GemmTile(problem.block < 128, problem.block, 32, depth, warps=4, stages=2)
    elif problem.block < 128:
        # Many small programs: what one waits for, the others load. 64 features are the least that wgmma takes.
        shallow = problem.block == 64 and not gpu.has_wgmma and not problem.weights  # operands are in registers there
        tile = GemmTile(True, problem.block, 64, 64 if shallow else deep, warps=4, stages=4, tma=tma)
        tile = in_pairs(tile, problem, gpu)
        tile = replace(tile, split=split_of(problem, gpu, tile) if splittable else 1)
    elif problem.weights in ("fp8_block", "w8", "w4"):  # a second accumulator, for the sum of a block: half the columns
        tile = GemmTile(False, problem.block, columns, deep, warps=8, stages=3, persistent=True, tma=tma)
    else:
        depth = 128 if BYTES[problem.dtype] == 1 else 64
        tile = GemmTile(False, problem.block, 2 * columns, depth, warps=8, stages=4, persistent=True, tma=tma)
    if problem.gather and tile.tma and not tile.swap:
        tile = replace(tile, copied=True)
    return fitted(tile, problem, gpu)


def split_of(problem: GemmProblem, gpu: Gpu, tile: GemmTile) -> int:
    """Parts of the depth that bring four programs to each multiprocessor, each with a few steps to do.

    >>> from flashkernels.hardware import lookup
    >>> problem = GemmProblem(2, 8, 4096, 14336, "bf16", "cuda", block=16)
    >>> split_of(problem, lookup("h200"), GemmTile(True, 16, 64, 128, 4, 4))
    8
    """
    tiles = most_tiles(problem.rows, problem.experts, tile.block_m) * -(-problem.width // tile.block_n)
    steps = -(-problem.depth // tile.block_k)
    split = 1
    while split < MOST_SPLIT and tiles * split < 4 * gpu.sms and steps // (2 * split) >= 4:
        split *= 2
    return split


def reason(problem: GemmProblem, tile: GemmTile) -> str:
    """Why this way, in words."""
    mean = problem.rows / max(1, problem.experts)
    if tile.swap:
        return f"{mean:.1f} rows an expert: weights are the traffic, rows are the narrow side ({tile.block_m})"
    return f"{mean:.0f} rows an expert: tensor cores are the limit, tiles of {tile.block_m} rows"
