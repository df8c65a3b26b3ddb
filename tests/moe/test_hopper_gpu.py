"""The Hopper grouped GEMM on a Hopper GPU: all numbers of rows, ragged and empty experts, tails, layers, graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashkernels as fk
from flashkernels.hardware import detect
from flashkernels.moe.hopper.gemm_tiles import HopperGemmTile
from flashkernels.moe.hopper.route_tiles import HopperRouteTile
from flashkernels.tiling import use_tile

from . import oracle
from .test_gemm import expected
from .test_gpu import check_gemm, check_layer
from .test_layer import weights_of

pytestmark = pytest.mark.gpu
TILES = (
    HopperGemmTile(192, 4), HopperGemmTile(96, 5, fused=True), HopperGemmTile(192, 4, fused=True),
    HopperGemmTile(192, 4, cluster=2), HopperGemmTile(96, 5, cluster=2),
)  # fmt: skip
each_tile = pytest.mark.parametrize("tile", TILES, ids=lambda tile: tile.name)


@pytest.fixture(autouse=True)
def _hopper() -> None:
    gpu = detect()
    if gpu is None or not gpu.has_wgmma:
        pytest.skip("needs a Hopper GPU")


@each_tile
@pytest.mark.parametrize(("kind", "interleaved"), [("none", False), ("swiglu", False), ("swiglu", True)])
def test_epilogue(kind: str, interleaved: bool, tile: HopperGemmTile) -> None:
    with use_tile(tile=tile):
        check_gemm(500, 8, 2, 512, 256, kind, interleaved=interleaved, impl="hopper")


@pytest.mark.parametrize("kind", ["none", "swiglu"])
@pytest.mark.parametrize("tokens", [500, 2000], ids=["fused", "cluster"])
def test_fp16(tokens: int, kind: str) -> None:
    check_gemm(tokens, 8, 2, 512, 256, kind, torch.float16, impl="hopper")


@pytest.mark.parametrize(("n", "depth"), [(8, 8), (136, 72), (1000, 1000), (264, 2056)])
@pytest.mark.parametrize("kind", ["none", "swiglu"])
def test_sizes(n: int, depth: int, kind: str) -> None:
    check_gemm(300, 5, 2, n if kind == "none" else 2 * n, depth, kind, impl="hopper")


@each_tile
@pytest.mark.parametrize("skew", [0.0, 0.3, 100.0], ids=["even", "skewed", "one expert"])
@pytest.mark.parametrize("tokens", [1, 16, 300, 3000])
def test_loads(tokens: int, skew: float, tile: HopperGemmTile) -> None:
    with use_tile(tile=tile):
        check_gemm(tokens, 37, 2, 384, 512, "swiglu", skew=skew, impl="hopper")


@pytest.mark.parametrize("rows", [*range(8, 193, 8), 193, 385, 1000])
def test_every_number_of_rows(rows: int) -> None:
    """As many features as fill an H200 once: then a second tile of rows costs more than a larger one."""
    for tile in (HopperGemmTile(192, 4, cluster=2), HopperGemmTile(96, 5, fused=True)):
        with use_tile(tile=tile):
            check_gemm(rows, 1, 1, 256 * 132, 192, impl="hopper")


def test_many_experts() -> None:
    check_gemm(3000, 512, 4, 256, 128, impl="hopper")


@pytest.mark.parametrize(("kind", "interleaved"), [("none", False), ("swiglu", False), ("swiglu", True)])
@pytest.mark.parametrize("gather", [True, False], ids=["gathered", "sorted"])
def test_bias_and_row_weights(gather: bool, kind: str, interleaved: bool) -> None:
    routing = fk.moe.route(torch.randn(250, 6, device="cuda"), 2)
    plan = routing.plan
    assert plan is not None
    x = torch.randn(250 if gather else 500, 136, device="cuda").bfloat16()
    w = (torch.randn(6, 272, 136, device="cuda") / 12).bfloat16()
    extra: dict[str, Any] = {"bias": torch.randn(6, 272, device="cuda"), "row_weights": routing.weights}
    found = fk.moe.grouped_gemm(
        x, w, plan, gather=gather, activation=kind, interleaved=interleaved, impl="hopper", **extra
    )  # fmt: skip
    wide = {name: y.double() for name, y in extra.items()}
    want = expected(x.double(), w.double(), routing.ids, plan, gather, kind, interleaved, **wide)
    plain = expected(x, w, routing.ids, plan, gather, kind, interleaved, **extra)
    oracle.assert_close(found, plain, want, torch.bfloat16)


def test_rows_of_other_experts_do_not_reach_a_tile() -> None:
    """A tile of 8 rows multiplies some of the next expert's, too, and stores nothing of them."""
    plan = fk.moe.presorted(torch.tensor([3, 0, 9, 1], device="cuda"), 20)
    x = torch.randn(20, 64, device="cuda").bfloat16()
    x[3:12], x[13:] = torch.nan, torch.nan
    w = torch.randn(4, 128, 64, device="cuda").bfloat16()
    found = fk.moe.grouped_gemm(x, w, plan, gather=False, impl="hopper")
    for rows, expert in ((slice(0, 3), 0), (slice(12, 13), 3)):
        want = x[rows].double() @ w[expert].double().T
        oracle.assert_close(found[rows], want.bfloat16(), want, torch.bfloat16)
    assert found[3:12].isnan().all()


# 8 bits


def check_small(
    format: str, tokens: int, experts: int, k: int, n: int, depth: int, kind: str = "none", *, skew: float = 0.0,
    gather: bool = True, interleaved: bool = False, dtype: torch.dtype = torch.bfloat16, extras: bool = False,
) -> None:  # fmt: skip
    """Against the product of what the rounded numbers stand for, in fp64, as Triton's is tested."""
    logits = torch.randn(tokens, experts, device="cuda") - skew * torch.arange(experts, device="cuda")
    routing = fk.moe.route(logits, k)
    plan = routing.plan
    assert plan is not None
    small = fk.moe.quantise(torch.randn(experts, n, depth, device="cuda") / depth**0.5, format)
    rows = tokens if gather else tokens * k
    x, x_scale = fk.moe.round_rows(torch.randn(rows, depth, device="cuda").to(dtype), format)
    extra: dict[str, Any] = {}
    if extras:
        extra = {"bias": torch.randn(experts, n, device="cuda"), "row_weights": routing.weights}
    found = fk.moe.grouped_gemm(
        x, small, plan, gather=gather, activation=kind, interleaved=interleaved, x_scale=x_scale, out_dtype=dtype,
        impl="hopper", **extra,
    )  # fmt: skip
    assert found.dtype == dtype
    wide, w = x.double() * x_scale.double()[:, None], fk.moe.dequantise(small).double()
    double = {name: y.double() for name, y in extra.items()}
    want = fk.moe.grouped_gemm(
        wide, w, plan, gather=gather, activation=kind, interleaved=interleaved, impl="torch", **double
    )
    bias = extra.get("bias")
    plain = fk.moe.grouped_gemm(wide.float(), w.float(), plan, gather=gather, bias=bias, impl="torch").to(dtype)
    plain = oracle.activate(plain, kind, interleaved)
    if extras:
        plain = plain * routing.weights.reshape(-1)[plan.permutation.long()][:, None].to(dtype)
    oracle.assert_close(found, plain, want, dtype)


each_format = pytest.mark.parametrize("format", ["fp8", "int8"])
SMALL_TILES = (HopperGemmTile(192, 4, cluster=2), HopperGemmTile(96, 5, fused=True), HopperGemmTile(96, 5, cluster=2))
each_small_tile = pytest.mark.parametrize("tile", SMALL_TILES, ids=lambda tile: tile.name)


@each_format
@each_small_tile
@pytest.mark.parametrize(("kind", "interleaved"), [("none", False), ("swiglu", False), ("swiglu", True)])
@pytest.mark.parametrize("gather", [True, False], ids=["gathered", "sorted"])
def test_small_epilogue(format: str, gather: bool, kind: str, interleaved: bool, tile: HopperGemmTile) -> None:
    with use_tile(tile=tile):
        check_small(format, 500, 8, 2, 512, 256, kind, interleaved=interleaved, gather=gather)


@each_format
@pytest.mark.parametrize(("n", "depth"), [(8, 16), (136, 80), (1000, 1008), (264, 2064), (512, 14336)])
@pytest.mark.parametrize("kind", ["none", "swiglu"])
@pytest.mark.parametrize("tokens", [100, 1500], ids=["few", "many"])
def test_small_sizes(format: str, tokens: int, kind: str, n: int, depth: int) -> None:
    check_small(format, tokens, 5, 2, n if kind == "none" else 2 * n, depth, kind)


@each_format
@each_small_tile
@pytest.mark.parametrize("skew", [0.0, 0.3, 100.0], ids=["even", "skewed", "one expert"])
@pytest.mark.parametrize("tokens", [1, 16, 300, 3000])
def test_small_loads(format: str, tokens: int, skew: float, tile: HopperGemmTile) -> None:
    with use_tile(tile=tile):
        check_small(format, tokens, 37, 2, 384, 512, "swiglu", skew=skew)


@each_format
def test_small_every_number_of_rows(format: str) -> None:
    for rows in (*range(8, 193, 8), 193, 385, 1000):
        for tile in (HopperGemmTile(192, 4, cluster=2), HopperGemmTile(96, 5, fused=True)):
            with use_tile(tile=tile):
                check_small(format, rows, 1, 1, 256 * 132, 256)


@each_format
@pytest.mark.parametrize("kind", ["none", "swiglu"])
@pytest.mark.parametrize("gather", [True, False], ids=["gathered", "sorted"])
@pytest.mark.parametrize(
    ("tokens", "dtype"), [(250, torch.bfloat16), (250, torch.float16), (1500, torch.bfloat16)], ids=str
)
def test_small_bias_and_row_weights(format: str, tokens: int, dtype: torch.dtype, gather: bool, kind: str) -> None:
    check_small(format, tokens, 6, 2, 272, 144, kind, gather=gather, dtype=dtype, extras=True)


def test_int8_is_exact_and_like_triton_s() -> None:
    """Sums of whole numbers: only the scales round, and nearly in the same order."""
    plan = fk.moe.route(torch.randn(2000, 8, device="cuda"), 2).plan
    assert plan is not None
    small = fk.moe.quantise(torch.randn(8, 512, 4096, device="cuda") / 64, "int8")
    x, scale = fk.moe.round_rows(torch.randn(2000, 4096, device="cuda").bfloat16(), "int8")
    found, want = (fk.moe.grouped_gemm(x, small, plan, x_scale=scale, impl=impl) for impl in ("hopper", "triton"))
    torch.testing.assert_close(found, want, rtol=2.0**-7, atol=0)


@each_format
def test_a_row_that_is_not_finite_stays_alone(format: str) -> None:
    plan = fk.moe.presorted(torch.tensor([3, 0, 9, 1], device="cuda"), 13)
    x = torch.randn(13, 64, device="cuda").bfloat16()
    x[4, 7], x[12, 0] = torch.nan, torch.inf
    small = fk.moe.quantise(torch.randn(4, 128, 64, device="cuda"), format)
    found = fk.moe.grouped_gemm(x, small, plan, gather=False, impl="hopper")
    bad = torch.zeros(13, dtype=torch.bool, device="cuda")
    bad[4] = bad[12] = True
    assert torch.equal(found.isnan().all(1), bad) and found[~bad].isfinite().all()


@each_format
@pytest.mark.parametrize(("tokens", "experts", "k"), [(2000, 8, 2), (1000, 64, 6), (700, 8, 2)])
def test_small_layer(format: str, tokens: int, experts: int, k: int) -> None:
    """Against experts in fp64 that round nothing: the error is that of the rounding, which torch makes, too."""
    x = torch.randn(tokens, 512, device="cuda").bfloat16()
    router = torch.randn(experts, 512, device="cuda").bfloat16()
    up, down = (fk.moe.quantise(w.cuda(), format) for w in weights_of(experts, 512, 272, torch.bfloat16))
    parts = fk.moe.explain(tokens, 512, 272, experts, k, weights=format, gpu="h200").parts
    assert [part.impl for part in parts] == ["hopper"] * 2
    with torch.no_grad():
        found = fk.moe.layer(x, router, up, down, k=k, return_routing=True)
        assert isinstance(found, fk.moe.Layered)
        weights, ids, _ = found.routing
        w_gate_up, w_down = (fk.moe.dequantise(w).double() for w in (up, down))
        want = oracle.experts(x.double(), weights, ids, w_gate_up, w_down)
        plain = fk.moe.layer(x, None, up, down, routing=found.routing, impl="torch")
        assert isinstance(plain, Tensor)
        oracle.assert_close(found.out, plain, want, torch.bfloat16)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = fk.moe.layer(x, router, up, down, k=k)
        graph.replay()
        assert isinstance(again, Tensor) and torch.equal(again, found.out)


def test_gradients_are_triton_s() -> None:
    plan = fk.moe.route(torch.randn(1000, 8, device="cuda"), 2).plan
    assert plan is not None
    x = torch.randn(1000, 512, device="cuda").bfloat16().requires_grad_()
    w = (torch.randn(8, 384, 512, device="cuda") / 22).bfloat16().requires_grad_()
    dy = torch.randn(2000, 384, device="cuda").bfloat16()
    found, want = (
        torch.autograd.grad(fk.moe.grouped_gemm(x, w, plan, impl=impl), (x, w), dy) for impl in ("hopper", "triton")
    )
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize(("tokens", "experts", "k"), [(2000, 8, 2), (1000, 64, 6), (700, 8, 2)])
def test_layer(tokens: int, experts: int, k: int) -> None:
    x = torch.randn(tokens, 512, device="cuda").bfloat16()
    router = torch.randn(experts, 512, device="cuda").bfloat16()
    assert [part.impl for part in fk.moe.explain(tokens, 512, 264, experts, k, gpu="h200").parts] == ["hopper"] * 2
    check_layer(x, router, *(w.cuda() for w in weights_of(experts, 512, 264, torch.bfloat16)), k=k)


def test_layer_gradients() -> None:
    """Forward by the Hopper kernels, the activation between them on its own."""
    routing = fk.moe.route(torch.randn(2000, 8, device="cuda"), 2)
    made = (torch.randn(2000, 512), *weights_of(8, 512, 264, torch.bfloat16))
    dy = torch.randn(2000, 512, device="cuda").bfloat16()

    def gradients(dtype: torch.dtype, impl: str) -> tuple[Tensor, ...]:
        leaves = [y.bfloat16().cuda().to(dtype).requires_grad_() for y in made]
        out = fk.moe.layer(leaves[0], None, *leaves[1:], routing=routing, impl=impl)
        assert isinstance(out, Tensor)
        return out.detach(), *torch.autograd.grad(out, leaves, dy.to(dtype))

    found, plain = gradients(torch.bfloat16, "auto"), gradients(torch.bfloat16, "torch")
    for got, rounded, want in zip(found, plain, gradients(torch.float64, "torch"), strict=True):
        oracle.assert_close(got, rounded, want, torch.bfloat16)


@pytest.mark.parametrize("tokens", [200, 2000])
def test_a_tile_in_force_reaches_a_layer_that_was_prepared_without(tokens: int) -> None:
    x, router = torch.randn(tokens, 256, device="cuda").bfloat16(), torch.randn(8, 256, device="cuda").bfloat16()
    w_gate_up, w_down = (w.cuda() for w in weights_of(8, 256, 128, torch.bfloat16))
    with torch.no_grad():
        want = fk.moe.layer(x, router, w_gate_up, w_down)
        for tile in (*TILES, HopperRouteTile(8, 1, 2, "grid")):
            with use_tile(tile=tile):
                found = fk.moe.layer(x, router, w_gate_up, w_down)
            assert isinstance(found, Tensor) and isinstance(want, Tensor)
            torch.testing.assert_close(found, want, rtol=2e-2, atol=2e-2)
