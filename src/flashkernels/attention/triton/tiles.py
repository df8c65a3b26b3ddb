"""Tiles of the Triton forward: the candidates of each strategy, what they need, and what they are predicted to cost."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial

from flashkernels.attention.problem import AttentionProblem
from flashkernels.hardware import Gpu
from flashkernels.tiling import (
    STRATEGIES,
    Candidate,
    Choice,
    Tile,
    TilingError,
    best_of,
    cheapest,
    decomposed,
    footprint,
    padded,
)

LARGEST_DIM = 512
SPLIT_ABOVE = 256  # from here on the head dimension is read in chunks


def choose(problem: AttentionProblem, gpu: Gpu, tma: bool, strategy: str | None = None) -> Candidate:
    """The cheapest tile for a problem; `tma` says whether K and V can be read by TMA."""
    return cheapest(
        [choice for choice in compare(problem, gpu, tma) if strategy in (None, choice.strategy)],
        f"head_dim={problem.head_dim}, head_dim_v={problem.head_dim_v}, {problem.dtype} on {gpu.name}",
    )


@lru_cache(maxsize=1024)
def compare(problem: AttentionProblem, gpu: Gpu, tma: bool) -> tuple[Choice, ...]:
    """The best tile of every strategy, or why it has none."""
    return tuple(_best(strategy, problem, gpu, tma) for strategy in STRATEGIES)


def _best(strategy: str, problem: AttentionProblem, gpu: Gpu, tma: bool) -> Choice:
    largest = max(problem.head_dim, problem.head_dim_v)
    if largest > LARGEST_DIM:
        return Choice(strategy, None, f"head_dim={largest} is over {LARGEST_DIM}")
    if strategy == "register":
        return Choice(strategy, None, "keeping Q in registers needs the Hopper kernel; Triton keeps it where it likes")
    if strategy == "split_d" and largest <= SPLIT_ABOVE:
        return Choice(strategy, None, f"head_dim={largest} fits one pass; chunks pay over {SPLIT_ABOVE}")
    if strategy != "split_d" and largest > SPLIT_ABOVE:
        return Choice(strategy, None, f"head_dim={largest} is over {SPLIT_ABOVE}: a tile that wide does not fit")
    return best_of(strategy, gpu, candidates(strategy, problem, gpu, tma), partial(measured, problem, gpu))


def candidates(strategy: str, problem: AttentionProblem, gpu: Gpu, tma: bool) -> Iterator[Tile]:
    """Every tile worth comparing, the preferred ones first."""
    cut = padded if strategy == "standard" else decomposed
    parts, parts_v = cut(problem.head_dim), cut(problem.head_dim_v)
    for block_m, warps in ((128, 8), (64, 4), (64, 8), (32, 4), (16, 4)):
        for block_n in (128, 64, 32, 16):
            for stages in (4, 3, 2, 1):
                yield Tile(strategy, block_m, block_n, parts, parts_v, warps, stages, tma and gpu.has_tma)


def measured(problem: AttentionProblem, gpu: Gpu, tile: Tile) -> Candidate:
    need = footprint(tile, gpu, shared_bytes(tile, problem), registers(tile, problem))
    return Candidate(tile, need, 1.0 / (tile.block_m * tile.block_n * tile.stages))


def shared_bytes(tile: Tile, problem: AttentionProblem) -> int:
    """Q once, K and V in every stage, a mask tile in every stage, and the barriers."""
    width, width_v = sum(tile.parts), sum(tile.parts_v)
    mask = {None: 0, "bool": 1, "float": 4}[problem.mask] * tile.block_m * tile.block_n
    stage = tile.block_n * (width + width_v) * problem.element_bytes + mask
    return tile.block_m * width * problem.element_bytes + tile.stages * stage + 256


def registers(tile: Tile, problem: AttentionProblem) -> int:
    """Accumulators, scores in fp32, probabilities in the input type, and addresses and row statistics."""
    threads = 32 * tile.warps
    per_row = sum(tile.parts_v) + tile.block_n + tile.block_n * problem.element_bytes // 4
    return tile.block_m * per_row // threads + 48


__all__ = ["TilingError", "candidates", "choose", "compare", "measured", "registers", "shared_bytes"]
