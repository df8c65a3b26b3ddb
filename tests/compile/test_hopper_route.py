"""The Hopper routing, compiled for sm_90a without a GPU: nothing spills, and a round of the choice is one reduction."""

from __future__ import annotations

import ctypes

import pytest

from flashkernels.jit import nvrtc
from flashkernels.jit.offline import Resources, resources
from flashkernels.moe.hopper.route import Params, RouteVariant, program, vector_of
from flashkernels.moe.hopper.route_tiles import HopperRouteTile, tile_of
from flashkernels.moe.problem import RouteProblem

from .structs import BYTES, declared

PLAIN = ("", False, True)  # softmax, renormalised
SIZES = [(32768, 8, 2), (32768, 64, 2), (32768, 128, 8), (4096, 256, 8), (4096, 1024, 16), (128, 128, 8), (1, 128, 8)]


pytestmark = pytest.mark.usefixtures("compiler")


def build(
    tokens: int, experts: int, k: int, dtype: str = "fp32", kind: tuple[str, bool, bool] = PLAIN, way: str = ""
) -> Resources:  # fmt: skip
    tile = tile_of(RouteProblem(tokens, experts, k, dtype, "cuda"))
    variant = RouteVariant(experts, k, dtype, vector_of(dtype, experts, experts, 0), *kind, tile, way or tile.way)
    made = nvrtc.compiled(*program(variant))
    found = resources(made.cubin, 0, entry="route_tokens")
    assert found.registers <= min(255, 65536 // (32 * tile.warps))
    return found


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("tokens", "experts", "k"), SIZES)
def test_nothing_spills(tokens: int, experts: int, k: int, dtype: str) -> None:
    assert build(tokens, experts, k, dtype).spills == 0


@pytest.mark.parametrize("kind", [("", False, False), ("", True, True), ("fp32", True, True), ("bf16", False, True)])
@pytest.mark.parametrize(("tokens", "experts", "k"), [(32768, 64, 6), (4096, 256, 8)])
def test_other_scores_do_not_spill(tokens: int, experts: int, k: int, kind: tuple[str, bool, bool]) -> None:
    assert build(tokens, experts, k, "fp32", kind).spills == 0


@pytest.mark.parametrize("way", ["alone", "cluster"])
def test_other_ways_do_not_spill(way: str) -> None:
    assert build(32768, 128, 8, way=way).spills == 0


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_round_is_one_reduction_and_at_most_one_vote(dtype: str) -> None:
    found = build(32768, 128, 8, dtype, way="alone")
    together = 2 if dtype == "fp32" else 4  # tokens that are loaded at once
    rounds = 2 * 8 * together  # a second copy is for warps that are not together
    assert found.count("REDUX.MAX.S32") == rounds
    assert found.count("VOTE.ANY") == (rounds if dtype == "fp32" else 0)  # 16-bit keys have the column in them
    assert f"LDG.E.NA.{128 if dtype == 'fp32' else 64}.CONSTANT" in found.sass  # a lane's 4 logits, not kept in the L1


def test_blocks_wait_for_one_another_as_the_way_says() -> None:
    assert "UCGABAR" in build(128, 128, 8).sass  # of a cluster
    grid = build(32768, 64, 2).sass
    assert "UCGABAR" not in grid and ("LD.E.STRONG.GPU" in grid or "LDG.E.STRONG.GPU" in grid)


def test_both_have_the_same_fields_in_the_same_order() -> None:
    tile = HopperRouteTile(4, 1, 1, "cluster")
    _, text, _ = program(RouteVariant(8, 2, "fp32", 1, *PLAIN, tile, "cluster"))
    fields = [(name, ctypes.sizeof(kind)) for name, kind in Params._fields_]
    assert declared(text) == fields and set(BYTES.values()) >= {4, 8}
