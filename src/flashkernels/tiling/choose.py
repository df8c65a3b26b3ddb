"""The generic search: every kernel brings its candidates and their cost, this picks the cheapest that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from flashkernels.hardware import Gpu
from flashkernels.tiling.limits import Footprint
from flashkernels.tiling.tile import Tile, TilingError


@dataclass(frozen=True)
class Candidate:
    """A tile with its footprint and the kernel's predicted cost (seconds)."""

    tile: Tile
    footprint: Footprint
    cost: float


@dataclass(frozen=True)
class Choice:
    """The best tile of one strategy, or the reason it has none."""

    strategy: str
    best: Candidate | None
    reason: str | None = None


def best_of(strategy: str, gpu: Gpu, tiles: Iterable[Tile], measure: Callable[[Tile], Candidate]) -> Choice:
    """The cheapest tile that fits the GPU. Ties go to the earlier candidate, so the choice is deterministic."""
    best: Candidate | None = None
    reason = "has no candidate tile"
    for tile in tiles:
        candidate = measure(tile)
        limit = candidate.footprint.exceeds(gpu)
        if limit is not None:
            reason = f"{tile.name} {limit}"
        elif best is None or candidate.cost < best.cost:
            best = candidate
    return Choice(strategy, best, None if best else reason)


def cheapest(choices: Iterable[Choice], what: str) -> Candidate:
    """The best candidate over all strategies; raises with every strategy's reason when there is none."""
    choices = list(choices)
    served = [c.best for c in choices if c.best]
    if not served:
        raise TilingError(f"no tile fits {what}: " + "; ".join(f"{c.strategy}: {c.reason}" for c in choices))
    return min(served, key=lambda candidate: candidate.cost)
