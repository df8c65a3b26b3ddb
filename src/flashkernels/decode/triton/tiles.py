"""How the decode kernel cuts its work: rows of queries, keys of a step, and how many programs share the machine."""

from __future__ import annotations

from dataclasses import dataclass

from flashkernels.decode.problem import DecodeProblem
from flashkernels.formats import FORMATS
from flashkernels.hardware import Gpu
from flashkernels.tiling import decomposed, override
from flashkernels.tiling.tile import LARGEST_PART

INTERPRETED_PROGRAMS = 3  # enough for ranges that start and end inside a sequence
SCRATCH = 12 * 1024  # bytes of shared memory beside the stages: layouts change there
ROOMY = 160 * 1024  # shared memory of a block that holds 64 rows of wide queries
CHAIN = 32  # products of fp32 in one sum: a longer chain of roundings is worse than torch's
MOST_ROWS = 64  # of a tile
CHUNK = 2048  # keys of one part where the result must not depend on the batch


@dataclass(frozen=True)
class DecodeTile:
    """Rows (query heads of one KV head, times tokens) and keys of a step, threads, pipeline stages, programs of an SM.

    >>> DecodeTile(16, 64, warps=4, stages=3, per_sm=2).name
    'decode-16x64-w4-s3-p2'
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    per_sm: int

    @property
    def name(self) -> str:
        return f"decode-{self.block_m}x{self.block_n}-w{self.warps}-s{self.stages}-p{self.per_sm}"


def choose(problem: DecodeProblem, gpu: Gpu) -> DecodeTile:
    """The tile in force: the one `use_tile` names, or the rule below."""
    forced = override()
    return forced if isinstance(forced, DecodeTile) else ruled(problem, gpu)


def ruled(problem: DecodeProblem, gpu: Gpu) -> DecodeTile:
    """About 32 KB of keys and values a step, and as many programs on an SM as their stages leave room for.

    It depends on nothing but the sizes of a head and its rows, so `batch_invariant` may rely on it.
    """
    block_m = rows_of(problem)
    wide = max(problem.head_dim, problem.head_dim_v)
    row = max(64, problem.row_bits // 8)
    if wide > 256:  # 64 rows of converted numbers spill
        block_m = 16 if gpu.shared_per_block < ROOMY else min(block_m, 32) if problem.scales else block_m
    if problem.dtype == "fp32":
        block_n = 32 if wide <= 256 else 16
    else:
        block_n = 128 if row <= 288 and block_m <= 32 else 64 if row <= 1024 and wide <= 256 else 32
    warps = 8 if block_m * wide > 64 * 128 else 4
    queries = block_m * problem.head_dim * (4 if problem.dtype == "fp32" else 2)
    stages = 3 if wide <= 256 else 2
    while (need := (stages - 1) * block_n * row + queries + SCRATCH) > gpu.shared_per_block and block_n > 16:
        stages, block_n = (2, block_n) if stages > 2 else (3, block_n // 2)
    # Programs that do not fit at once would begin when the others end: by registers (about 168 a thread, 250 where
    # numbers are converted or wide) 12 or 8 warps fit an SM.
    warps_fit = 8 if problem.scales or wide > 128 or block_m > 16 else 12
    return DecodeTile(block_m, block_n, warps, stages, max(1, min(warps_fit // warps, gpu.shared_per_sm // need)))


def rows_of(problem: DecodeProblem) -> int:
    """Query heads of one KV head times tokens, as a matrix instruction takes them; more than 64 are cut.

    The tokens of a ragged batch are the most of any of its sequences: `batch_invariant` may not look at them.
    """
    rows = problem.group * max(1, problem.tokens)
    if problem.ragged and problem.batch_invariant:
        rows = MOST_ROWS
    block = 16 if rows <= 16 else 32 if rows <= 32 else MOST_ROWS
    return min(block, 16 if problem.dtype == "fp32" else MOST_ROWS)


def packed(problem: DecodeProblem, *strides: tuple[int, ...]) -> int:
    """Numbers in one element that the kernel reads: quantised bytes come in words where sizes and strides allow it."""
    form = FORMATS[problem.format]
    dims = (form.stored(problem.head_dim), form.stored(problem.head_dim_v))
    even = not any(n % 2 for n in (*dims, *(step for steps in strides for step in steps[:3])))
    return 2 * form.packed if form.quantised and even else form.packed


def chunks(dim: int, packed: int, least: int = 16, most: int = LARGEST_PART) -> tuple[int, ...]:
    """The powers of two, from `least` to `most`, that a row is cut into, counted in elements of `packed` numbers.

    >>> chunks(72, 1), chunks(72, 1, 32), chunks(128, 4), chunks(576, 1), chunks(72, 1, most=32)
    ((64, 16), (64, 32), (32,), (256, 256, 64), (32, 32, 16))
    """
    sizes = decomposed(-(-dim // packed // least) * least)
    return tuple(piece for size in sizes for piece in (min(size, most),) * max(1, size // most))


def narrowest(block_m: int) -> int:
    """Columns of the narrowest chunk of values. Of a product that is not wider than high, Triton splits the rows among
    the warps, which 16 rows do not have: all would compute everything. From 64 rows on they have."""
    return 2 * block_m if block_m < 64 else 16


def programs(tile: DecodeTile, gpu: Gpu | None) -> int:
    return INTERPRETED_PROGRAMS if gpu is None else gpu.sms * tile.per_sm
