"""The tiles of the Triton forward: for every GPU and head dimension one that fits, the same one every time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from flashkernels.attention.problem import AttentionProblem
from flashkernels.attention.tensors import Tensors
from flashkernels.attention.triton import tiles
from flashkernels.attention.triton.build import LARGE, SMALL, every_tile
from flashkernels.hardware import GPUS, Gpu, lookup
from flashkernels.tiling import STRATEGIES, Tile, TilingError, decomposed, padded, use_tile

H200 = lookup("h200")
TINY = replace(H200, key="tiny", name="Tiny", shared_per_block=16 * 1024, shared_per_sm=17 * 1024)
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything-but-mask": {"causal": True, "window": (64, 0), "softcap": True, "alibi": True, "sinks": True},
    "bool-mask": {"mask": "bool"},
    "float-mask": {"mask": "float", "causal": True},
}


def problem_of(head_dim: int, **features: Any) -> AttentionProblem:
    return replace(LARGE, **{"head_dim": head_dim, "head_dim_v": head_dim} | features)


def limits_of(tile: Tile, problem: AttentionProblem, gpu: Gpu) -> None:
    need = tiles.needs(tile, problem, gpu)
    assert need.exceeds(gpu) is None
    assert need.blocks_per_sm >= 1
    assert sum(tile.parts) >= problem.head_dim and sum(tile.parts_v) >= problem.head_dim_v
    # Triton's tiles are powers of two, and a matrix instruction has at least 16 rows and 16 of the head dimension
    for size in (tile.block_m, tile.block_n, *tile.parts, *tile.parts_v):
        assert size >= 16 and size & (size - 1) == 0
    if tile.tma:
        assert gpu.has_tma and problem.element_bytes == 2 and max(len(tile.parts), len(tile.parts_v)) <= 3


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)
def test_every_head_dimension_has_a_tile_that_fits(gpu: Gpu, dtype: str, features: dict[str, Any]) -> None:
    for head_dim in range(1, 513):
        for size in (LARGE, SMALL):
            problem = replace(size, head_dim=head_dim, head_dim_v=head_dim, dtype=dtype, **features)
            limits_of(tiles.choose(problem, gpu, tma=head_dim % 8 == 0).tile, problem, gpu)


@given(
    st.sampled_from(sorted(GPUS)), st.integers(1, 512), st.integers(1, 512), st.sampled_from(["fp16", "bf16", "fp32"]),
    st.sampled_from(sorted(FEATURES)), st.booleans(),
)  # fmt: skip
def test_unequal_head_dimensions_have_a_tile_too_and_it_is_always_the_same(
    key: str, head_dim: int, head_dim_v: int, dtype: str, features: str, tma: bool
) -> None:
    problem, gpu = problem_of(head_dim, head_dim_v=head_dim_v, dtype=dtype, **FEATURES[features]), lookup(key)
    first = tiles.choose(problem, gpu, tma)
    limits_of(first.tile, problem, gpu)
    tiles.compare.cache_clear()
    assert tiles.choose(problem, gpu, tma) == first


@pytest.mark.parametrize(("dim", "dim_v"), [(513, 513), (64, 513), (513, 64)])
def test_a_head_dimension_over_512_is_named_with_its_limit(dim: int, dim_v: int) -> None:
    with pytest.raises(TilingError, match=f"head_dim={dim}, head_dim_v={dim_v}.*head_dim=513 is over 512"):
        tiles.choose(problem_of(dim, head_dim_v=dim_v), H200, tma=True)


def test_a_gpu_with_little_shared_memory_is_refused_before_any_launch() -> None:
    problem = problem_of(128)
    what = r"no tile fits head_dim=128, .* on Tiny: .*needs \d+ B of shared memory, Tiny has 16384 B a block"
    with pytest.raises(TilingError, match=what):
        tiles.choose(problem, TINY, tma=False)
    from flashkernels.attention.triton import forward

    q = torch.empty(4, 4096, 16, 128, dtype=torch.bfloat16, device="meta")
    with pytest.raises(TilingError, match=what):
        forward.plan(problem, TINY, Tensors(q, q, q, None, None, None, None, None))


def test_a_smaller_head_dimension_still_fits_a_small_gpu() -> None:
    problem = problem_of(16)
    limits_of(tiles.choose(problem, TINY, tma=False).tile, problem, TINY)


# --- strategies


@pytest.mark.parametrize("head_dim", [1, 72, 256, 257, 512])
def test_the_register_strategy_is_rejected_with_its_reason(head_dim: int) -> None:
    (choice,) = (c for c in tiles.compare(problem_of(head_dim), H200, True) if c.strategy == "register")
    assert choice.best is None
    assert choice.reason == "Q resident in registers is for the Hopper kernel alone"
    with pytest.raises(TilingError, match=r"register: Q resident in registers is for the Hopper kernel"):
        tiles.choose(problem_of(head_dim), H200, True, "register")


@pytest.mark.parametrize("head_dim", [1, 40, 64, 72, 96, 129, 200, 256])
def test_standard_pads_to_a_power_of_two_and_exact_to_a_sum_of_them(head_dim: int) -> None:
    problem = problem_of(head_dim, head_dim_v=72)
    standard = tiles.choose(problem, H200, True, "standard").tile
    exact = tiles.choose(problem, H200, True, "exact").tile
    assert (standard.strategy, standard.parts, standard.parts_v) == ("standard", padded(head_dim), (128,))
    assert (exact.strategy, exact.parts, exact.parts_v) == ("exact", decomposed(head_dim), (64, 16))


def test_split_d_serves_exactly_257_to_512() -> None:
    for head_dim in range(1, 515):
        served = {c.strategy for c in tiles.compare(problem_of(head_dim), H200, True) if c.best}
        expected = {"exact", "standard"} if head_dim <= 256 else {"split_d"} if head_dim <= 512 else set()
        assert served == expected, head_dim


@pytest.mark.parametrize("strategy", ["exact", "standard"])
def test_a_strategy_that_cannot_serve_says_why(strategy: str) -> None:
    with pytest.raises(TilingError, match=f"{strategy}: head_dim=300 is over 256: a tile that wide does not fit"):
        tiles.choose(problem_of(300), H200, True, strategy)
    with pytest.raises(TilingError, match="split_d: head_dim=72 fits one pass; chunks pay over 256"):
        tiles.choose(problem_of(72), H200, True, "split_d")


def test_every_strategy_has_a_tile_or_a_reason() -> None:
    for head_dim in (1, 72, 300, 600):
        choices = tiles.compare(problem_of(head_dim), H200, True)
        assert tuple(c.strategy for c in choices) == STRATEGIES
        assert all((c.best is None) == bool(c.reason) for c in choices)


@pytest.mark.parametrize("head_dim", [72, 80, 96, 112, 160, 192])
def test_the_true_dimension_is_predicted_to_beat_the_padded_one(head_dim: int) -> None:
    problem = problem_of(head_dim)
    assert tiles.choose(problem, H200, True).tile.strategy == "exact"
    costs = {c.strategy: c.best.cost for c in tiles.compare(problem, H200, True) if c.best}
    assert costs["exact"] < costs["standard"]


@pytest.mark.parametrize("head_dim", [40, 48, 56])
def test_narrow_heads_are_padded_to_64(head_dim: int) -> None:
    assert tiles.choose(problem_of(head_dim), H200, True).tile.parts == (64,)


@pytest.mark.parametrize("head_dim", [64, 72, 96, 128, 160])
@pytest.mark.parametrize(
    ("features", "lazy"),
    [
        ({}, True),
        ({"causal": True, "window": (64, 0), "sinks": True}, True),
        ({"dtype": "fp16"}, False),
        ({"softcap": True}, False),
        ({"alibi": True}, False),
        ({"varlen": True, "total_q": 9000, "total_k": 9000}, False),
        ({"mask": "bool"}, False),
        ({"dropout_p": 0.1}, False),
    ],
    ids=["plain", "window", "fp16", "softcap", "alibi", "varlen", "mask", "dropout"],
)
def test_which_calls_take_a_lazy_maximum(head_dim: int, features: dict[str, Any], lazy: bool) -> None:
    assert tiles.choose(problem_of(head_dim, **features), H200, True).tile.lazy == lazy


def test_only_scores_of_several_parts_are_early() -> None:
    assert tiles.choose(problem_of(96), H200, True).tile.early
    assert not tiles.choose(problem_of(16, head_dim_v=96), H200, True).tile.early


def test_use_tile_decides_what_the_plan_takes() -> None:
    from flashkernels.attention.triton.forward import chosen_tile

    problem, mine = problem_of(72), Tile("exact", 16, 16, (64, 16), (64, 16), warps=4, stages=1, tma=False)
    assert chosen_tile(problem, H200, True).parts == (64, 16)
    with use_tile("standard"):
        assert chosen_tile(problem, H200, True).parts == (128,)
    with use_tile(tile=mine):
        assert chosen_tile(problem, H200, True) is mine
    with use_tile("register"), pytest.raises(TilingError, match="register"):
        chosen_tile(problem, H200, True)


# --- what a tile needs

parts = st.lists(st.sampled_from([16, 32, 64, 128, 256]), min_size=1, max_size=2).map(tuple)


@given(
    parts, parts, st.sampled_from([16, 64, 256]), st.sampled_from(["bf16", "fp32"]),
    st.sampled_from([None, "bool", "float"]), st.integers(1, 3), st.booleans(),
)  # fmt: skip
def test_shared_memory_grows_with_every_part_stage_row_and_key(
    parts: tuple[int, ...], parts_v: tuple[int, ...], more: int, dtype: str, mask: str | None, stages: int, tma: bool
) -> None:
    problem = problem_of(sum(parts), head_dim_v=sum(parts_v), dtype=dtype, mask=mask)
    tile = Tile("exact", 64, 32, parts, parts_v, warps=4, stages=stages, tma=tma)
    small = tiles.shared_bytes(tile, problem)
    for change in (
        {"parts": (*parts, more)}, {"parts_v": (*parts_v, more)}, {"stages": stages + 1}, {"block_m": 128},
        {"block_n": 64},
    ):  # fmt: skip
        assert tiles.shared_bytes(replace(tile, **change), problem) > small


@given(parts, st.sampled_from([16, 64, 256]), st.sampled_from(sorted(GPUS)))
def test_registers_never_shrink_with_a_part(parts_v: tuple[int, ...], more: int, key: str) -> None:
    problem, gpu = problem_of(64, head_dim_v=sum(parts_v)), lookup(key)
    tile = Tile("exact", 64, 32, (64,), parts_v, warps=4, stages=2, tma=False)
    assert tiles.registers(replace(tile, parts_v=(*parts_v, more)), problem, gpu) > tiles.registers(tile, problem, gpu)


@pytest.mark.parametrize("gpu", [lookup("a100"), H200, lookup("rtx5090")], ids=lambda gpu: gpu.key)
def test_the_listed_tiles_are_those_that_are_returned_each_once(gpu: Gpu) -> None:
    listed = list(every_tile(gpu, range(60, 100)))
    keys = [(tile, problem.dtype, problem.mask, problem.softcap) for tile, problem in listed]
    assert len(set(keys)) == len(keys) > 10
    for tile, problem in listed:
        limits_of(tile, problem, gpu)
        assert tile in {tiles.choose(problem, gpu, tma).tile for tma in (True, False)}
