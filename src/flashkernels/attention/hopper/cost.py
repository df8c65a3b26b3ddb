"""What the Hopper kernel is predicted to take: products, exponentials that nothing hides, and the ends of tiles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil

from flashkernels.attention.hopper.tiles import Choice
from flashkernels.attention.problem import AttentionProblem
from flashkernels.hardware import Gpu

CLOCK = 1.755e9  # of an H200 under load
FLOPS_A_CYCLE, EXPONENTIALS_A_CYCLE = 4096, 16  # of a multiprocessor; twice the FLOPs in FP8

# Fitted to the committed results of an H200 (2026-11-15: head dimensions, scaling grid, FP8, and the wide heads of
# docs/notes/hopper_forward.md), least squares of the relative error; TAIL again on 2026-11-18, when blocks came to draw
# their tiles later. The 15 rows of `shapes` had no part in it and are predicted within 15 %.
PRODUCTS, WIDE_PRODUCTS = 0.98, 1.42  # time over that of tensor cores always busy; wide heads keep P in shared memory
# Share of the exponentials' time that products do not hide, by warpgroups; four: 62 rows of 2026-11-19, within 19 %.
EXPOSED = {1: 1.19, 2: 0.69, 3: 0.62, 4: 0.66}
EXPOSED_FP8 = 0.81
TILE, TILE_COLUMNS = 1.53e-6, 0.33e-6  # seconds at the ends of a tile, and for each 64 columns of a warpgroup's output
LAUNCH = 2.2e-6
TAIL = 1.0  # products of an average tile: how long the last blocks of unequal tiles run on
COMBINE = 2.5e-6  # adding up split keys (docs/notes/hopper_forward.md: 2 to 3 µs)
REACHED = 0.92  # of the datasheet's bandwidth (4.4 of 4.8 TB/s)


def seconds(problem: AttentionProblem, choice: Choice, gpu: Gpu, lengths: Sequence[int] = ()) -> float:
    """Predicted time of one call. `lengths` are those of a ragged batch, which a problem does not know: without them
    its rows are spread evenly."""
    if problem.batch == 0 or problem.total_q == 0:
        return LAUNCH
    variant, tile = choice.variant, choice.variant.tile
    walks = [steps for n, m in _sequences(problem, lengths) for steps in _walks(problem, choice, n, m)]
    mean, share = sum(walks) / len(walks), choice.cut / choice.shares if choice.cut else 0.0
    longest = max(walks) * (share if choice.whole == 0 else 1)
    equal = min(walks) == max(walks)
    copies = problem.heads // variant.pack * (1 if problem.varlen else problem.batch)
    rounds = (len(walks) * copies / tile.cluster - choice.cut) / (gpu.sms // tile.cluster)
    # heavy tiles come first: unequal ones fill the last round
    whole = ceil(rounds - 1e-9) if equal or 0 < rounds < 1 else max(0.0, rounds)

    depth = 32 if variant.fp8 else 16
    columns = -(-problem.head_dim // depth) * depth + -(-problem.head_dim_v // 8) * 8
    scores = 64 * tile.groups * tile.block_n  # of one step
    products = scores * 2 * columns / (FLOPS_A_CYCLE * (2 if variant.fp8 else 1)) / CLOCK
    if variant.wide:
        step = WIDE_PRODUCTS * products
    else:
        exponentials = scores * (2 if problem.softcap else 1) / EXPONENTIALS_A_CYCLE / CLOCK
        step = PRODUCTS * products + (EXPOSED_FP8 if variant.fp8 else EXPOSED[tile.groups]) * exponentials
    ends = TILE + TILE_COLUMNS * tile.groups * problem.head_dim_v / 64
    compute = max((whole + share) * mean, longest) * step + (whole + ceil(share)) * ends
    compute += 0 if equal else TAIL * mean * min(1.0, whole + share) * products
    memory = problem.bytes() / (REACHED * gpu.bandwidth)
    return LAUNCH + max(compute, memory) + (COMBINE if choice.cut else 0)


def _sequences(problem: AttentionProblem, lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Queries and keys of each sequence; of a dense batch, whose sequences are alike, of one."""
    if not problem.varlen:
        return [(problem.seq_q, problem.seq_k)]
    if lengths:
        return [(n, n) for n in lengths if n]
    even = (max(1, problem.total_q // problem.batch), problem.total_k // problem.batch)
    return [even] * problem.batch


def _walks(problem: AttentionProblem, choice: Choice, seq_q: int, seq_k: int) -> Iterator[float]:
    """Key tiles that each query tile of one sequence and head walks, on average over its warpgroups."""
    tile = choice.variant.tile
    left, right = problem.band
    rows, shift, every = 64 // choice.variant.pack, seq_k - seq_q, -(-seq_k // tile.block_n)
    for start in range(0, seq_q, rows * tile.groups):
        walked = 0
        for first in range(start, start + rows * tile.groups, rows):
            first = min(first, seq_q - 1)
            last = min(first + rows, seq_q) - 1
            end = every if right < 0 else min(every, -(-max(0, last + shift + right + 1) // tile.block_n))
            begin = 0 if left < 0 else max(0, first + shift - left) // tile.block_n
            walked += max(1, end - begin)
        yield walked / tile.groups
