"""How a head dimension is cut into parts, what that wastes, and the scope of `use_tile`."""

from __future__ import annotations

import contextvars
import threading
from itertools import combinations_with_replacement

import pytest
from hypothesis import given, strategies as st

from flashkernels.tiling import STRATEGIES, Tile, TilingError, decomposed, override, padded, use_tile, waste
from flashkernels.tiling.tile import LARGEST_PART, MOST_PARTS, SMALLEST_PART

POWERS = (16, 32, 64, 128, 256)
TILE = Tile("exact", 128, 64, (64, 16), (64, 16), warps=8, stages=3, tma=True)
dims = st.integers(1, MOST_PARTS * LARGEST_PART)


@given(dims)
def test_parts_cover_the_dimension_with_at_most_three_powers_of_two(dim: int) -> None:
    parts = decomposed(dim)
    assert sum(parts) >= dim
    assert 1 <= len(parts) <= MOST_PARTS == 3
    assert set(parts) <= set(POWERS)
    assert list(parts) == sorted(parts, reverse=True)


@given(dims)
def test_no_other_cover_is_tighter_or_as_tight_with_fewer_parts(dim: int) -> None:
    parts = decomposed(dim)
    covers = [c for n in (1, 2, 3) for c in combinations_with_replacement(POWERS, n) if sum(c) >= dim]
    assert (sum(parts), len(parts)) == min((sum(c), len(c)) for c in covers)


@pytest.mark.parametrize(
    ("dim", "parts"),
    [
        (1, (16,)), (16, (16,)), (17, (32,)), (33, (32, 16)), (40, (32, 16)), (48, (32, 16)), (64, (64,)),
        (72, (64, 16)), (80, (64, 16)), (96, (64, 32)), (97, (64, 32, 16)), (112, (64, 32, 16)),
        (120, (128,)), (128, (128,)), (160, (128, 32)), (192, (128, 64)), (255, (256,)), (256, (256,)),
        (257, (256, 16)), (512, (256, 256)),
    ],
)  # fmt: skip
def test_the_promised_sums(dim: int, parts: tuple[int, ...]) -> None:
    assert decomposed(dim) == parts


@given(dims)
def test_padding_gives_the_next_power_of_two(dim: int) -> None:
    (part,) = padded(dim)
    assert part >= max(dim, SMALLEST_PART)
    assert part & (part - 1) == 0
    assert part == SMALLEST_PART or part // 2 < dim


@given(dims)
def test_a_sum_never_wastes_more_than_padding(dim: int) -> None:
    assert 0 <= waste(dim, decomposed(dim)) <= waste(dim, padded(dim)) < 1


@pytest.mark.parametrize(
    ("dim", "parts", "share"),
    [(72, (128,), 0.4375), (96, (128,), 0.25), (72, (64, 16), 0.1), (96, (64, 32), 0), (8, (16,), 0.5)],
)
def test_waste_is_the_share_of_padding(dim: int, parts: tuple[int, ...], share: float) -> None:
    assert waste(dim, parts) == pytest.approx(share)


def test_a_tiles_name_says_everything() -> None:
    assert TILE.name == "exact-128x64-d64+16-v64+16-w8-s3-tma"
    capped = Tile("standard", 64, 32, (128,), (256,), warps=4, stages=2, tma=False, registers=168)
    assert capped.name == "standard-64x32-d128-v256-w4-s2-pointer-r168"


def test_a_tiling_error_is_a_value_error() -> None:
    assert issubclass(TilingError, ValueError)


# --- use_tile


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_use_tile_puts_a_strategy_in_force_within_its_scope(strategy: str) -> None:
    assert override() is None
    with use_tile(strategy):
        assert override() == strategy
    assert override() is None


def test_use_tile_takes_a_whole_tile() -> None:
    with use_tile(tile=TILE):
        assert override() is TILE
    assert override() is None


def test_scopes_nest_and_the_inner_one_wins() -> None:
    with use_tile("standard"):
        with use_tile(tile=TILE):
            assert override() is TILE
        assert override() == "standard"


def test_an_exception_ends_the_scope() -> None:
    with pytest.raises(KeyError), use_tile("exact"):
        raise KeyError
    assert override() is None


def test_another_thread_is_not_affected() -> None:
    seen: list[object] = []

    def look() -> None:
        seen.append(override())
        with use_tile("split_d"):
            seen.append(override())

    with use_tile("standard"):
        thread = threading.Thread(target=look, daemon=True)
        contextvars.Context().run(thread.start)  # as on a Python whose threads inherit their starter's context
        thread.join()
        assert override() == "standard"
    assert seen == [None, "split_d"]


@pytest.mark.parametrize("arguments", [{}, {"strategy": "exact", "tile": TILE}], ids=["neither", "both"])
def test_use_tile_takes_exactly_one_of_strategy_and_tile(arguments: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="either a strategy or a tile"), use_tile(**arguments):
        pass
    assert override() is None


@pytest.mark.parametrize("strategy", ["fastest", "EXACT", ""])
def test_an_unknown_strategy_is_refused_with_the_known_ones(strategy: str) -> None:
    with (
        pytest.raises(ValueError, match=f"strategy='{strategy}' is not one of exact, standard, split_d, register"),
        use_tile(strategy),
    ):
        pass
    assert override() is None
