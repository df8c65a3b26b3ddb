"""The predicted time of routings and layers: its terms at sizes that are easy to count, and larger for more work."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from flashkernels import moe
from flashkernels.hardware import lookup
from flashkernels.moe import cost
from flashkernels.moe.cases import MODELS, TOKENS, WEIGHTS
from flashkernels.moe.hopper.gemm_tiles import HopperGemmTile
from flashkernels.moe.problem import GemmProblem, LayerProblem, RouteProblem
from flashkernels.moe.triton.tiles import GemmTile

H200 = lookup("h200")
LARGE = GemmTile(False, 128, 256, 64, warps=8, stages=4)


def test_experts_in_use_and_tiles_of_rows() -> None:
    assert cost.spread(1, 2, 8, 16) == pytest.approx((2, 2))  # one token, two experts
    assert cost.spread(2, 1, 2, 16) == pytest.approx((1.5, 1.5))  # both tokens choose the same one every second time
    assert cost.spread(0, 2, 8, 16) == (0, 0)
    used, tiles = cost.spread(1024, 2, 8, 128)  # 256 rows an expert: every second one needs a third tile
    assert used == pytest.approx(8) and tiles == pytest.approx(20, abs=0.3)


def test_a_product_of_full_rounds_takes_its_arithmetic_and_a_share_of_its_traffic() -> None:
    rows, n, depth = 128 * 132, 512, 8192  # two column tiles for each row tile: two rounds
    problem = GemmProblem(rows, 1, n, depth, "bf16", "cuda")
    multiply = 2 * rows * n * depth / (cost.PRODUCTS * H200.peak["bf16"])
    traffic = 2 * (n * depth + rows * (depth + n)) / (cost.BANDWIDTH * H200.bandwidth)
    found = cost.product_seconds(problem, LARGE, 1, 132, H200)
    assert traffic < multiply and found == pytest.approx(multiply + cost.EXPOSED * traffic)
    three = cost.product_seconds(replace(problem, rows=rows + 1), LARGE, 1, 133, H200)  # one more tile: a third round
    assert three == pytest.approx(1.5 * multiply + cost.EXPOSED * traffic, rel=1e-3)


def test_few_rows_take_the_traffic_of_the_weights_in_use() -> None:
    problem = GemmProblem(2, 8, 4096, 14336, "bf16", "cuda", block=16)
    tile = GemmTile(True, 16, 64, 128, warps=4, stages=4)
    weights = 2 * 4096 * 14336 * 2 / (cost.BANDWIDTH * H200.bandwidth)
    assert weights < cost.product_seconds(problem, tile, 2, 2, H200) < 1.1 * weights
    assert cost.product_seconds(problem, tile, 4, 4, H200) > 1.9 * weights


def test_weights_of_4_bits_are_unpacked_in_every_tile_or_once() -> None:
    plain = GemmProblem(132 * 128, 132, 256, 4096, "bf16", "cuda")  # a tile on each multiprocessor
    words = replace(plain, weights="w4", group=128)
    tile = GemmTile(True, 128, 128, 256, warps=8, stages=2)
    two_rounds = 2 * 2 * 128 * 128 * 4096 / (cost.PRODUCTS * H200.peak["bf16"] / 132)
    unpacking = 2 * cost.UNPACK * 128 * 4096
    assert cost.product_seconds(words, tile, 132, 132, H200) > two_rounds + unpacking
    many = replace(words, rows=8 * words.rows)  # 1024 rows an expert: 16-bit weights are multiplied
    same = cost.product_seconds(replace(plain, rows=many.rows), LARGE, 132, 1056, H200)
    assert cost.product_seconds(many, LARGE, 132, 1056, H200) == same


def test_the_choice_alone_and_its_regrouping() -> None:
    chosen = RouteProblem(1, 128, 8, "fp32", "cuda", planned=False)
    assert cost.route_seconds(chosen, H200) == pytest.approx(cost.ROUTE + cost.CHOOSE * 128 * 10)
    planned = replace(chosen, planned=True)
    more = cost.route_seconds(planned, H200) - cost.route_seconds(chosen, H200)
    assert more == pytest.approx(cost.ROUTE + cost.RANK * 128)
    large = replace(planned, tokens=32768, experts=64, k=2)
    table = 264 * 264 * 64 * 4 / (cost.BANDWIDTH * H200.bandwidth)  # each of 264 programs reads the counts of all
    logits = 32768 * 64 / 132
    assert cost.route_seconds(large, H200) == pytest.approx(cost.ROUTE + logits * (4 * cost.CHOOSE + cost.RANK) + table)


@pytest.mark.parametrize("impl", cost.ROUTES)
@pytest.mark.parametrize("planned", [True, False], ids=["planned", "choice"])
def test_more_tokens_take_longer_to_route(planned: bool, impl: str) -> None:
    times = [
        cost.ROUTES[impl](RouteProblem(t, 128, 8, "fp32", "cuda", planned), H200) for t in (1, 16, 512, 4096, 32768)
    ]
    assert all(a <= b for a, b in pairwise(times)) and times[0] < times[-1]


# Microseconds on an H200, 2026-11-15, CUDA graphs: the choice, and all. Of products the first has its gather.
ROUTED = {(32768, 64, 2): (5.4, 9.7), (32768, 128, 8): (11.3, 20.9), (4096, 256, 8): (5.1, 9.8),
          (128, 128, 8): (2.5, 4.6), (1, 128, 8): (1.9, 3.1)}  # fmt: skip
MULTIPLIED = {("mixtral-8x7b", 1024): (745, 399), ("mixtral-8x7b", 4096): (2768, 1406),
              ("mixtral-8x7b", 16384): (11057, 5605), ("qwen3-30b-a3b", 1024): (208, 113),
              ("qwen3-30b-a3b", 4096): (389, 201), ("qwen3-30b-a3b", 16384): (1351, 696)}  # fmt: skip
FP8_MULTIPLIED = {("mixtral-8x7b", 1024): (475, 238), ("mixtral-8x7b", 4096): (1572, 755),
                  ("mixtral-8x7b", 16384): (5976, 2980), ("qwen3-30b-a3b", 1024): (120, 69),
                  ("qwen3-30b-a3b", 4096): (248, 146), ("qwen3-30b-a3b", 16384): (841, 473)}  # fmt: skip
# Mixtral's when rounding and copy were two kernels, 2026-11-15; Qwen3's with one for both, 2026-11-16.
FP8_LAYERS = {("mixtral-8x7b", 1024): 746, ("mixtral-8x7b", 4096): 2499, ("mixtral-8x7b", 16384): 9693,
              ("qwen3-30b-a3b", 1024): 226, ("qwen3-30b-a3b", 4096): 436, ("qwen3-30b-a3b", 16384): 1505}  # fmt: skip


@pytest.mark.parametrize("size", ROUTED, ids=str)
def test_routings_on_hopper_are_near_what_was_measured(size: tuple[int, int, int]) -> None:
    for planned, measured in zip((False, True), ROUTED[size], strict=True):
        found = cost.hopper_route_seconds(RouteProblem(*size, "fp32", "cuda", planned), H200)
        assert found * 1e6 == pytest.approx(measured, rel=0.12)


@pytest.mark.parametrize("weights", ["", "fp8"], ids=["bf16", "fp8"])
@pytest.mark.parametrize(("model", "tokens"), MULTIPLIED)
def test_products_on_hopper_are_near_what_was_measured(model: str, tokens: int, weights: str) -> None:
    experts, k, hidden, inner = MODELS[model]
    why = moe.explain(tokens, hidden, inner, experts, k, weights=weights, gpu="h200")
    times = (FP8_MULTIPLIED if weights else MULTIPLIED)[model, tokens]
    for part, measured in zip(why.parts, times, strict=True):
        assert part.impl == "hopper" and isinstance(part.tile, HopperGemmTile)
        found = cost.even_seconds(part.problem, part.tile, H200) + cost.LAUNCH
        if part.problem.gather and not part.tile.fused:
            each = 1 if weights else 2  # bytes: FP8 was rounded before, which is not in the figures
            found += cost.LAUNCH + 2 * each * part.problem.rows * hidden / (cost.BANDWIDTH * H200.bandwidth)
        assert found * 1e6 == pytest.approx(measured, rel=0.11)


@pytest.mark.parametrize(("model", "tokens"), FP8_LAYERS)
def test_layers_in_fp8_on_hopper_are_near_what_was_measured(model: str, tokens: int) -> None:
    experts, k, hidden, inner = MODELS[model]
    why = moe.explain(tokens, hidden, inner, experts, k, weights="fp8", gpu="h200")
    assert [part.impl for part in why.parts] == ["hopper", "hopper"] and why.predicted
    assert why.predicted * 1e6 == pytest.approx(FP8_LAYERS[model, tokens], rel=0.08)


def _before(tokens: int, weights: str, impl: str = "auto") -> list[tuple[int, float]]:
    """Kernels before each product of a layer of Qwen3, and bytes that they move."""
    experts, k, hidden, inner = MODELS["qwen3-30b-a3b"]
    why = moe.explain(tokens, hidden, inner, experts, k, weights=weights, gpu="h200", impl=impl)
    return [cost.passes(why.problem, part.problem, part.tile, H200) for part in why.parts if part.tile]


@pytest.mark.parametrize("weights", ["fp8", "int8"])
def test_the_copy_of_rows_rounds_them_on_hopper(weights: str) -> None:
    """k = 8 copies of 2048 columns; the inner rows, of 768, are rounded by a kernel of their own."""
    inner = (1, 3 * 8 * 4096 * 768)
    assert _before(4096, weights) == [(1, 4096 * 2048 * (2 + 8)), inner]
    assert _before(4096, weights, "triton") == [(2, 4096 * 2048 * (3 + 2 * 8)), inner]


def test_rows_that_the_loads_gather_are_rounded_alone() -> None:
    assert _before(1024, "fp8") == [(1, 3 * 1024 * 2048), (1, 3 * 8 * 1024 * 768)]
    assert _before(1024, "") == [(0, 0), (0, 0)]
    assert _before(4096, "") == [(1, 2 * 2 * 8 * 4096 * 2048), (0, 0)]


def test_rows_too_wide_for_the_copy_are_rounded_before_it() -> None:
    layer = LayerProblem(4096, 32768, 64, 8, 2, "bf16", "cuda", "fp8")
    product = GemmProblem(8192, 8, 128, 32768, "fp8", "cuda", "fp8", "swiglu", gather=True, out="bf16")
    assert cost.passes(layer, product, HopperGemmTile(192, 4), H200) == (2, 32768 * (3 * 4096 + 2 * 8192))


def test_a_product_in_8_bits_stores_16() -> None:
    """Of so little depth that this traffic decides."""
    product = GemmProblem(8192, 1, 4096, 16, "fp8", "cuda", "fp8", out="bf16")
    least = 2 * 8192 * 4096 / (cost.BANDWIDTH * H200.bandwidth)
    assert least < cost.even_seconds(product, HopperGemmTile(192, 4), H200) < 1.3 * least


def test_a_layer_of_one_implementation_is_explained_too() -> None:
    auto, triton = (moe.explain(1024, 4096, 14336, 8, 2, gpu="h200", impl=impl) for impl in ("auto", "triton"))
    assert (auto.routing, triton.routing, auto.launches, triton.launches) == ("hopper", "triton", 1, 2)
    assert [part.impl for part in (*auto.parts, *triton.parts)] == ["hopper"] * 2 + ["triton"] * 2
    assert auto.predicted and triton.predicted and auto.predicted < triton.predicted


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("model", MODELS)
def test_more_tokens_take_a_layer_longer_and_none_beats_the_roofline(model: str, weights: str) -> None:
    experts, k, hidden, inner = MODELS[model]
    whys = [moe.explain(t, hidden, inner, experts, k, weights=weights, gpu="h200") for t in TOKENS]
    times = [why.predicted or 0 for why in whys]
    assert all(a < b for a, b in pairwise(times))
    assert all(why.floor and why.floor < time for why, time in zip(whys, times, strict=True))


def test_each_kernel_of_a_layer_is_launched() -> None:
    parts = [(GemmProblem(0, 8, 64, 64, "bf16", "cuda", gather=first), LARGE) for first in (True, False)]
    empty = LayerProblem(0, 64, 32, 8, 2, "bf16", "cuda")
    route = cost.route_seconds(RouteProblem(0, 8, 2, "bf16", "cuda"), H200)
    assert cost.layer_seconds(empty, parts, H200) == pytest.approx(route + 3 * cost.LAUNCH)
    copied = [(parts[0][0], replace(LARGE, copied=True)), parts[1]]
    assert cost.layer_seconds(empty, copied, H200) == pytest.approx(route + 4 * cost.LAUNCH)


@pytest.mark.parametrize("arguments", [{"weights": "w8"}, {"weights": "fp8_block"}, {"dtype": "fp32"}], ids=str)
def test_what_was_not_measured_is_not_predicted(arguments: dict[str, str]) -> None:
    why = moe.explain(64, 4096, 14336, 8, 2, gpu="h200", **arguments)
    assert why.predicted is None and "of the roofline" not in str(why)


def test_explain_shows_the_time_of_the_layer_and_of_its_routing() -> None:
    why = moe.explain(64, 4096, 14336, 8, 2, gpu="h200")
    assert why.predicted and why.route_predicted and why.route_predicted < why.predicted
    assert f"predicted: {why.predicted * 1e6:.1f} µs" in str(why)
    assert f"route: hopper, 1 launch, predicted {why.route_predicted * 1e6:.1f} µs" in str(why)
