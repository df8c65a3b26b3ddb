"""How a linear layer is cut into tiles: what is known about which is fast, as rules.

Two ways. *Decode*: few rows, so the weight is the traffic. It is the first operand (its rows are the tall side, 64),
the rows of x are the narrow second one, 16 to 64, and many small programs stream it once. *Large*: rows are the tall
side, and tiles go through all multiprocessors in an order that keeps a few row tiles and a few column tiles in the L2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flashkernels.fused.problem import BYTES, LinearProblem
from flashkernels.hardware import Gpu
from flashkernels.tiling import TilingError, override

SPARE = 2048  # bytes of shared memory for what is not an operand
NARROW = 64  # rows of the decode way, at most
SMALLER = 1.15  # cost of an element of a tile of half the size: each operand is used half as often


@dataclass(frozen=True)
class LinearTile:
    """Rows, output columns and depth of a tile; `swap`: the weight is the first operand.

    >>> LinearTile(True, 16, 64, 128, warps=4, stages=4).name
    'decode-16x64x128-w4-s4'
    """

    swap: bool
    block_m: int  # rows
    block_n: int  # columns of the output; the weight has twice as many rows where it is gated
    block_k: int
    warps: int
    stages: int
    persistent: bool = False  # as many programs as multiprocessors, each takes tile after tile
    group: int = 8  # row tiles that walk over the columns together
    tma: bool = False

    @property
    def name(self) -> str:
        flags = "".join(f"-{word}" for word, flag in (("persistent", self.persistent), ("tma", self.tma)) if flag)
        way = "decode" if self.swap else "large"
        return f"{way}-{self.block_m}x{self.block_n}x{self.block_k}-w{self.warps}-s{self.stages}{flags}"


def shared_bytes(tile: LinearTile, problem: LinearProblem, gpu: Gpu) -> int:
    """Of the operands of all stages (without wgmma, the one in use is in registers), of a tile of the output on its way
    to TMA, and of one of the pre-activations, where they are kept, on its way to whole vectors."""
    size, buffers = BYTES[problem.dtype], tile.stages - (0 if gpu.has_wgmma else 1)
    columns = tile.block_n * (2 if problem.gated else 1)
    found = buffers * tile.block_k * (tile.block_m + columns) * size
    found += columns * tile.block_m * size if problem.saved and not tile.swap else 0
    return found + (stored_columns(tile, problem) * tile.block_m * size if tile.tma and not tile.swap else 0)


def stored_columns(tile: LinearTile, problem: LinearProblem) -> int:
    """Columns that one TMA store takes: a wide tile goes out in two halves, to leave shared memory to the operands. One
    with operands swapped goes out without TMA, whole."""
    return tile.block_n // 2 if tile.block_n == 256 and not (problem.gated or tile.swap) else tile.block_n


def fitted(tile: LinearTile, problem: LinearProblem, gpu: Gpu, room: int) -> LinearTile:
    """The tile with fewer stages, a smaller depth, then fewer columns, until it fits. Three stages are better than a
    depth of 128: with two, nothing is on its way while one is used."""
    while tile.block_n >= 32:
        for depth, stages in ((tile.block_k, 4), (tile.block_k, 3), (64, 4), (64, 3), (64, 2)):
            found = replace(tile, block_k=depth, stages=stages)
            if shared_bytes(found, problem, gpu) <= room:
                return found
        tile = replace(tile, block_n=tile.block_n // 2)
    raise TilingError(f"no tile of {tile.block_m} rows fits {room} bytes of shared memory of {gpu.name}")


def forced_tile() -> LinearTile | None:
    """The tile of a linear layer that `use_tile` has put in force."""
    forced = override()
    return forced if isinstance(forced, LinearTile) else None


def choose(problem: LinearProblem, gpu: Gpu, tma: bool) -> LinearTile:
    """The rules' tile; `tma`: TMA could address the tensors."""
    tma = tma and gpu.has_tma
    narrow = max(16, 1 << max(0, problem.rows - 1).bit_length())
    if problem.dtype == "fp32":
        return LinearTile(False, min(64, narrow), 32, 32, warps=4, stages=2)
    if narrow <= NARROW:
        deep = 128 if narrow < 64 or gpu.has_wgmma else 64
        tile = LinearTile(True, narrow, 64, deep, warps=4, stages=4, tma=tma)
        # Two programs on a multiprocessor: what one waits for, the other loads.
        return fitted(tile, problem, gpu, gpu.shared_per_sm // 2 - SPARE)
    columns = 64 if problem.gated else 128
    half = LinearTile(False, 128, columns, 64, warps=8, stages=4, persistent=True, tma=tma)
    whole = replace(half, block_n=2 * columns)
    wide = gpu.has_wgmma and not problem.normed  # a folded norm needs the registers
    best = whole if wide and _time(whole, problem, gpu) <= SMALLER * _time(half, problem, gpu) else half
    return fitted(best, problem, gpu, gpu.shared_per_block - SPARE)


def cut(problem: LinearProblem, gpu: Gpu) -> tuple[LinearTile, tuple[str, ...]]:
    """The tile of contiguous tensors, and what it means."""
    tile = forced_tile() or choose(problem, gpu, tma=problem.depth * BYTES[problem.dtype] % 16 == 0)
    shape = f"{tile.block_m} rows x {tile.block_n} columns, {tile.block_k} deep"
    count = -(-problem.rows // tile.block_m) * -(-problem.width // tile.block_n)
    order = f"by {min(count, gpu.sms)} programs" if tile.persistent else "a program each"
    first = "the weight" if tile.swap else "x"
    return tile, (
        f"{shape}, {tile.warps} warps, {tile.stages} stages, {first} is the tall operand",
        f"{count} tiles, {order}, loaded by {'TMA' if tile.tma else 'pointers'}",
    )


def _time(tile: LinearTile, problem: LinearProblem, gpu: Gpu) -> int:
    """Waves of tiles over the GPU, in elements."""
    tiles = -(-problem.rows // tile.block_m) * -(-problem.width // tile.block_n)
    return -(-tiles // gpu.sms) * tile.block_n
