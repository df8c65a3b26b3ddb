"""The generic search: the cheapest that fits, the earlier of equals, and words where nothing fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from flashkernels.hardware import lookup
from flashkernels.tiling import Candidate, Choice, Tile, TilingError, best_of, cheapest, footprint

H200 = lookup("h200")
TILE = Tile("exact", 64, 64, (64,), (64,), warps=4, stages=1, tma=False)


def tiles(count: int) -> list[Tile]:
    """Tiles told apart by their stages, 0, 1, 2 ..."""
    return [replace(TILE, stages=i) for i in range(count)]


def measure(costs: list[float], shared: Callable[[int], int] = lambda i: 0) -> Callable[[Tile], Candidate]:
    return lambda tile: Candidate(tile, footprint(tile, H200, shared(tile.stages), 32), costs[tile.stages])


@given(st.lists(st.sampled_from([1.0, 2.0, 3.0]), min_size=1, max_size=8))
def test_the_cheapest_wins_and_of_equals_the_first(costs: list[float]) -> None:
    choice = best_of("exact", H200, tiles(len(costs)), measure(costs))
    assert choice.best is not None and choice.reason is None
    assert choice.best.tile.stages == costs.index(min(costs))
    assert choice == best_of("exact", H200, tiles(len(costs)), measure(costs))


def test_a_cheaper_tile_that_does_not_fit_is_passed_over() -> None:
    choice = best_of("exact", H200, tiles(2), measure([1.0, 9.0], lambda i: 0 if i else 10**6))
    assert choice.best is not None and choice.best.tile.stages == 1


def test_where_nothing_fits_the_reason_names_the_last_tile_and_its_limit() -> None:
    choice = best_of("exact", H200, tiles(2), measure([1.0, 2.0], lambda i: 300_000 - i))
    assert choice.best is None
    assert choice.reason == f"{tiles(2)[1].name} needs 299999 B of shared memory, NVIDIA H200 has 232448 B a block"


def test_without_candidates_the_reason_says_so() -> None:
    assert best_of("exact", H200, [], measure([])) == Choice("exact", None, "has no candidate tile")


@given(st.lists(st.none() | st.sampled_from([1.0, 2.0, 3.0]), min_size=1, max_size=6))
def test_the_cheapest_strategy_wins_and_of_equals_the_first(costs: list[float | None]) -> None:
    choices = [
        Choice(str(i), None if cost is None else Candidate(replace(TILE, stages=i), footprint(TILE, H200, 0, 32), cost))
        for i, cost in enumerate(costs)
    ]
    served = [cost for cost in costs if cost is not None]
    if served:
        assert cheapest(choices, "it").tile.stages == costs.index(min(served))
    else:
        with pytest.raises(TilingError):
            cheapest(choices, "it")


def test_where_no_strategy_serves_the_error_has_the_dimension_and_every_reason() -> None:
    choices = (Choice("exact", None, "is too wide"), Choice("split_d", None, "is too small"))
    with pytest.raises(
        TilingError, match=r"^no tile fits head_dim=513 on X: exact: is too wide; split_d: is too small$"
    ):
        cheapest(iter(choices), "head_dim=513 on X")
