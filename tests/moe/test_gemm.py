"""The grouped GEMM: every epilogue, format and tile, skewed loads, odd sizes, gradients."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import flashkernels as fk
from flashkernels.hardware import lookup
from flashkernels.moe.plan import block_rows
from flashkernels.moe.problem import ACTIVATIONS, FORMATS, GATED, PHASES, GemmProblem
from flashkernels.moe.triton import tiles
from flashkernels.moe.triton.gemm import lies_in_pairs
from flashkernels.moe.triton.tiles import GemmTile
from flashkernels.moe.weights import ROUNDED

from . import oracle
from .test_route import each_impl, interpreter

LOADS = {
    "even": lambda t, e: torch.randn(t, e),
    "zipf": lambda t, e: torch.randn(t, e) - 3 * torch.log(torch.arange(1, e + 1)),
    "one expert": lambda t, e: torch.randn(t, e) + 100 * (torch.arange(e) == 2),
}


def expected(
    x: Tensor, w: Tensor, ids: Tensor, plan: fk.moe.Plan, gather: bool, kind: str, interleaved: bool = False,
    bias: Tensor | None = None, row_weights: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Of each place that there is, in x's dtype, by a loop."""
    rows = []
    for place, item in enumerate(plan.permutation.tolist()):
        if item < 0:
            break
        e = int(ids.reshape(-1)[item])
        y = x[item // plan.k if gather else place] @ w[e].T
        y = y if bias is None else y + bias[e].to(y.dtype)
        y = oracle.activate(y, kind, interleaved)
        rows.append(y if row_weights is None else y * row_weights.reshape(-1)[item].to(y.dtype))
    return torch.stack(rows) if rows else x.new_zeros(0, w.shape[1])


def check(
    x: Tensor, w: Tensor, routing: fk.moe.Routing, impl: str, kind: str = "none", gather: bool = True, **kw: Any
) -> None:
    plan = routing.plan
    assert plan is not None
    found = fk.moe.grouped_gemm(x, w, plan, activation=kind, gather=gather, impl=impl, **kw)
    assert found.dtype == x.dtype and found.shape == (plan.rows, w.shape[1] // 2 if kind in GATED else w.shape[1])
    wide = {name: y.double() if isinstance(y, Tensor) else y for name, y in kw.items()}
    want = expected(x.double(), w.double(), routing.ids, plan, gather, kind, **wide)
    plain = expected(x, w, routing.ids, plan, gather, kind, **kw)
    oracle.assert_close(found[: want.shape[0]], plain, want, x.dtype)


@each_impl
@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("block", [16, 128], ids=["decode", "large"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_epilogue(kind: str, interleaved: bool, block: int, impl: str) -> None:
    if interleaved and kind not in GATED:
        pytest.skip("nothing to interleave")
    routing = fk.moe.route(torch.randn(9, 4), 2, block=block)
    x, w = torch.randn(9, 40).half(), (torch.randn(4, 24, 40) / 3).half()
    extra = {"bias": torch.randn(4, 24), "row_weights": routing.weights}
    check(x, w, routing, impl, kind, interleaved=interleaved, **extra)


@each_impl
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_load(load: str, block: int, impl: str) -> None:
    routing = fk.moe.route(LOADS[load](40, 5), 2, block=block)
    check(torch.randn(40, 16), torch.randn(5, 17, 16), routing, impl)


@each_impl
@pytest.mark.parametrize(("n", "depth"), [(1, 1), (65, 33), (130, 100), (64, 256)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_size(n: int, depth: int, dtype: torch.dtype, impl: str) -> None:
    routing = fk.moe.route(torch.randn(6, 3), 2)
    check(torch.randn(6, depth, dtype=dtype), torch.randn(3, n, depth, dtype=dtype), routing, impl)


@each_impl
def test_rows_that_are_sorted_already(impl: str) -> None:
    plan = fk.moe.presorted(torch.tensor([3, 0, 7]), 12, block=16)
    ids = torch.tensor([0] * 3 + [2] * 7 + [-1] * 2, dtype=torch.int32)[:, None]
    routing = fk.moe.Routing(torch.ones(12, 1), ids, plan)
    check(torch.randn(12, 20), torch.randn(3, 8, 20), routing, impl, gather=False)


@each_impl
def test_an_expert_range_and_tokens_in_use(impl: str) -> None:
    used = torch.tensor([11], dtype=torch.int32)
    _, ids, plan = fk.moe.route(torch.randn(20, 6), 3, span=(2, 5), used=used, block=16)
    assert plan is not None
    local = torch.where((ids >= 2) & (ids < 5), ids - 2, -1)
    check(torch.randn(20, 16), torch.randn(3, 8, 16), fk.moe.Routing(torch.ones(20, 3), local, plan), impl)


@each_impl
def test_nothing_to_do(impl: str) -> None:
    for tokens in (0, 5):
        routing = fk.moe.route(torch.randn(tokens, 4), 2, used=torch.zeros(1, dtype=torch.int32))
        assert routing.plan is not None
        out = fk.moe.grouped_gemm(torch.randn(tokens, 16), torch.randn(4, 8, 16), routing.plan, impl=impl)
        assert out.shape == (tokens * 2, 8)


@interpreter
@pytest.mark.parametrize(
    "tile",
    [
        GemmTile(True, 16, 64, 64, 4, 2, split=1),
        GemmTile(True, 32, 128, 32, 4, 2, tma=True),
        GemmTile(False, 64, 32, 32, 4, 3, persistent=True, tma=True, copied=True, group=2),
        GemmTile(False, 64, 64, 64, 4, 2, tma=True, group=3),
        GemmTile(False, 128, 32, 64, 8, 2),
    ],
    ids=lambda tile: tile.name,
)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_any_tile_gives_the_same(tile: GemmTile, interleaved: bool) -> None:
    routing = fk.moe.route(torch.randn(70, 3), 2, block=tile.block_m)
    with fk.use_tile(tile=tile):
        x, w = torch.randn(70, 96).half(), (torch.randn(3, 144, 96) / 9).half()
        check(x, w, routing, "triton", "swiglu", interleaved=interleaved)


@interpreter
def test_a_tile_of_other_rows_than_the_plan_is_refused() -> None:
    routing = fk.moe.route(torch.randn(4, 3), 2, block=16)
    assert routing.plan is not None
    with pytest.raises(fk.TilingError, match="16"), fk.use_tile(tile=GemmTile(True, 32, 64, 64, 4, 2)):
        fk.moe.grouped_gemm(torch.randn(4, 8), torch.randn(3, 8, 8), routing.plan, impl="triton")


# Tensors that are not contiguous

LAID = {
    "w": lambda: {"w": torch.randn(4, 16, 24).mT},
    "a part of w": lambda: {"w": torch.randn(4, 24, 40)[:, :, 8:24]},
    "a column of w": lambda: {"x": torch.randn(5, 1), "w": torch.randn(4, 1, 24).mT},
    "one bias for all": lambda: {"bias": torch.randn(24).expand(4, 24)},
    "bias": lambda: {"bias": torch.randn(24, 4).T},
    "row_weights": lambda: {"row_weights": torch.randn(5, 4)[:, :2]},
    "x": lambda: {"x": torch.randn(16, 5).T, "w": torch.randn(4, 16, 24).mT, "row_weights": torch.randn(2, 5).T},
}


@interpreter
@pytest.mark.parametrize("laid", LAID)
@pytest.mark.parametrize("kind", ["none", "swiglu"])
@pytest.mark.parametrize("tma", [False, True], ids=["plain", "tma"])
def test_any_strides(laid: str, kind: str, tma: bool) -> None:
    plan = fk.moe.route(torch.randn(5, 4), 2, block=64).plan
    given: dict[str, Any] = {"x": torch.randn(5, 16), "w": torch.randn(4, 24, 16), **LAID[laid]()}
    if tma and laid == "a column of w":
        pytest.skip("TMA reads 16 bytes at least")
    with fk.use_tile(tile=GemmTile(False, 64, 16, 16, 4, 2, tma=tma)):
        found = fk.moe.grouped_gemm(**given, plan=plan, activation=kind, impl="triton")
    lying = {name: y.contiguous() for name, y in given.items()}
    want = fk.moe.grouped_gemm(**lying, plan=plan, activation=kind, impl="torch")
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)


@interpreter
def test_strides_of_one_row_say_nothing() -> None:
    """They are multiples of 16 bytes here, but not the length of the row."""
    plan = fk.moe.route(torch.randn(5, 1), 1).plan
    assert plan is not None
    x, w = torch.randn(5, 129).half(), torch.randn(1, 1, 256).half()[:, :, :129]
    found = fk.moe.grouped_gemm(x, w, plan, impl="triton")
    torch.testing.assert_close(found, fk.moe.grouped_gemm(x, w, plan, impl="torch"))


@interpreter
@pytest.mark.parametrize("format", ["int8", "w8", "w4"])
@pytest.mark.parametrize("what", ["data", "scale", "x_scale"])
def test_any_strides_of_quantised_weights(format: str, what: str) -> None:
    plan = fk.moe.route(torch.randn(5, 4), 2).plan
    assert plan is not None
    small, x, scale = fk.moe.quantise(torch.randn(4, 24, 256), format, group=64), torch.randn(5, 256), None
    if format == "int8":
        x, scale = fk.moe.round_rows(x, format, impl="torch")
    kwargs: dict[str, Any] = {"out_dtype": torch.float32, "impl": "triton"}
    want = fk.moe.grouped_gemm(x, small, plan, x_scale=scale, **kwargs)
    if what == "x_scale":
        scale = None if scale is None else torch.stack([scale, scale + 1], 1)[:, 0]
    else:
        small = small._replace(**{what: getattr(small, what).mT.contiguous().mT})
    assert torch.equal(fk.moe.grouped_gemm(x, small, plan, x_scale=scale, **kwargs), want)


# Quantised weights


@each_impl
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("block", [16, 128], ids=["decode", "large"])
@pytest.mark.parametrize("kind", ["none", "swiglu"])
@pytest.mark.parametrize("depth", [256, 300])
def test_format(format: str, block: int, kind: str, depth: int, impl: str) -> None:
    """Exactly the product of the rounded numbers; how well those stand for the weights is `test_weights`' matter. With
    many rows w8 and w4 are scaled in the type of x."""
    group = 64 if depth == 300 else 128
    small = fk.moe.quantise(torch.randn(3, 80, depth), format, group=group, scale_dtype=torch.float16)
    routing = fk.moe.route(torch.randn(12, 3), 2, block=block)
    x, scale = torch.randn(12, depth).half(), None
    wide = x
    if format in ROUNDED:
        x, scale = fk.moe.round_rows(x, format, impl="torch")
        wide = x.float() * (scale[:, None] if scale.dim() == 1 else scale.repeat_interleave(128, 1)[:, :depth])
    assert routing.plan is not None
    found = fk.moe.grouped_gemm(
        x, small, routing.plan, activation=kind, x_scale=scale, out_dtype=torch.float32, impl=impl
    )
    w = fk.moe.dequantise(small)
    if impl == "triton" and format in PHASES and block >= 64:
        w = w.half().float()
    want = expected(wide.double(), w.double(), routing.ids, routing.plan, True, kind)
    plain = expected(wide.float(), w, routing.ids, routing.plan, True, kind)
    oracle.assert_close(found, plain, want, torch.float32)


@each_impl
@pytest.mark.parametrize(("format", "depth"), [("w4", 128), ("w8", 64)])
def test_a_step_may_take_half_of_the_words_of_a_pack(format: str, depth: int, impl: str) -> None:
    small = fk.moe.quantise(torch.randn(3, 64, 300), format, group=64)
    x, routing = torch.randn(12, 300), fk.moe.route(torch.randn(12, 3), 2, block=16)
    assert routing.plan is not None
    with fk.use_tile(tile=tiles.GemmTile(True, 16, 32, depth, warps=4, stages=2)):
        found = fk.moe.grouped_gemm(x, small, routing.plan, impl=impl)
    w = fk.moe.dequantise(small)
    want = expected(x.double(), w.double(), routing.ids, routing.plan, True, "none")
    plain = expected(x, w, routing.ids, routing.plan, True, "none")
    oracle.assert_close(found, plain, want, torch.float32)


@interpreter
@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("format", "group", "depth"), [("w4", 128, 768), ("w4", 128, 640), ("w4", 64, 512), ("w8", 64, 384)]
)
@pytest.mark.parametrize("kind", ["none", "swiglu"])
def test_scales_in_pairs_give_the_same(format: str, group: int, depth: int, scales: torch.dtype, kind: str) -> None:
    """Where they lie so: with a whole number of steps of two groups, in 16 bits."""
    small = fk.moe.quantise(torch.randn(3, 48, depth), format, group=group, scale_dtype=scales)
    routing = fk.moe.route(torch.randn(20, 3), 2, block=16)
    x = torch.randn(20, depth).half()
    assert routing.plan is not None
    found = []
    for paired in (False, True):
        tile = GemmTile(True, 16, 32, 64 * PHASES[format], warps=4, stages=2, paired=paired)
        with fk.use_tile(tile=tile):
            found.append(fk.moe.grouped_gemm(x, small, routing.plan, activation=kind, impl="triton"))
    assert torch.equal(*found)


def test_scales_that_do_not_lie_in_pairs() -> None:
    scale = torch.zeros(2, 8, 6, dtype=torch.bfloat16)
    assert lies_in_pairs(scale) and lies_in_pairs(scale[:, 1::2]) and lies_in_pairs(scale[:, :, 2:])
    apart = torch.zeros(2, 8, 5, dtype=torch.bfloat16)  # every second row begins within a word
    odd = [scale[:, :, 1:5], scale[:, :, ::2], apart, scale.float(), scale[0], None]
    assert not any(map(lies_in_pairs, odd))


@each_impl
@pytest.mark.parametrize("format", ["w8", "w4"])
@pytest.mark.parametrize("kind", ["none", "swiglu"])
def test_many_rows_unpack_the_weights_first(format: str, kind: str, impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if impl == "triton":
        monkeypatch.setattr(tiles, "MANY", 4)
    small = fk.moe.quantise(torch.randn(3, 40, 300), format, group=64, scale_dtype=torch.float16)
    routing = fk.moe.route(torch.randn(7, 3), 2, block=16)  # a kind of call that nobody else makes
    x = torch.randn(7, 300).half()
    assert routing.plan is not None
    found = fk.moe.grouped_gemm(x, small, routing.plan, activation=kind, out_dtype=torch.float32, impl=impl)
    w = fk.moe.dequantise(small)
    w = w.half().float() if impl == "triton" else w
    want = expected(x.double(), w.double(), routing.ids, routing.plan, True, kind)
    plain = expected(x.float(), w, routing.ids, routing.plan, True, kind)
    oracle.assert_close(found, plain, want, torch.float32)


@pytest.mark.parametrize("format", ROUNDED)
def test_wide_activations_are_rounded_on_the_way(format: str) -> None:
    small = fk.moe.quantise(torch.randn(3, 8, 128), format)
    plan = fk.moe.route(torch.randn(5, 3), 2).plan
    assert plan is not None
    x = torch.randn(5, 128)
    rounded, scale = fk.moe.round_rows(x, format)
    a = fk.moe.grouped_gemm(x, small, plan)
    b = fk.moe.grouped_gemm(rounded, small, plan, x_scale=scale, out_dtype=torch.float32)
    assert torch.equal(a, b)


# Gradients


def test_gradcheck_of_the_reference() -> None:
    routing = fk.moe.route(torch.randn(3, 3), 2)
    plan = routing.plan
    assert plan is not None
    x, w, bias = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 4), (3, 2, 4), (3, 2)))

    def function(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return fk.moe.grouped_gemm(x, w, plan, bias=bias, impl="torch")

    assert torch.autograd.gradcheck(function, (x, w, bias))


@each_impl
@pytest.mark.parametrize("gather", [True, False], ids=["gathered", "sorted"])
@pytest.mark.parametrize("block", [16, 128])
@pytest.mark.parametrize("load", LOADS)
def test_gradients(load: str, block: int, gather: bool, impl: str) -> None:
    routing = fk.moe.route(LOADS[load](30, 4), 2, block=block)
    plan = routing.plan
    assert plan is not None
    shapes = ((30 if gather else 60, 33), (4, 20, 33), (4, 20))
    tensors = [torch.randn(shape, requires_grad=True) for shape in shapes]
    dy = torch.randn(60, 20)
    out = fk.moe.grouped_gemm(tensors[0], tensors[1], plan, bias=tensors[2], gather=gather, impl=impl)
    found = torch.autograd.grad(out, tensors, dy)
    results = []
    for dtype in (torch.float32, torch.float64):
        leaves = [x.detach().to(dtype).requires_grad_() for x in tensors]
        want = expected(leaves[0], leaves[1], routing.ids, plan, gather, "none", bias=leaves[2])
        results.append(torch.autograd.grad(want, leaves, dy.to(dtype)))
    for a, b, c, name in zip(found, *results, ("dx", "dw", "dbias"), strict=True):
        oracle.assert_close(a, b, c, torch.float32, name)


@each_impl
def test_rows_past_the_last_place_have_no_gradients(impl: str) -> None:
    """Memory that nobody writes is filled with NaN."""
    plan = fk.moe.presorted(torch.tensor([2, 0, 19]), 40, block=16)
    x, w = torch.randn(40, 300, requires_grad=True), torch.randn(3, 8, 300)
    torch.use_deterministic_algorithms(True)
    try:
        fk.moe.grouped_gemm(x, w, plan, gather=False, impl=impl).backward(torch.ones(40, 8))
    finally:
        torch.use_deterministic_algorithms(False)
    assert x.grad is not None
    assert (x.grad[21:] == 0).all()
    torch.testing.assert_close(x.grad[:21], w.sum(1)[[0] * 2 + [2] * 19])


@each_impl
def test_a_nan_stays_in_the_bias_of_its_expert(impl: str) -> None:
    plan = fk.moe.presorted(torch.tensor([2, 0, 1]), 5)
    bias = torch.zeros(3, 8, requires_grad=True)
    dy = torch.ones(5, 8)
    dy[2:] = torch.nan
    fk.moe.grouped_gemm(torch.randn(5, 16), torch.randn(3, 8, 16), plan, bias=bias, impl=impl).backward(dy)
    assert bias.grad is not None
    assert bias.grad[:, 0].tolist()[:2] == [2.0, 0.0] and bias.grad[2].isnan().all()


@each_impl
@pytest.mark.parametrize("gather", [True, False], ids=["gathered", "sorted"])
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_that_fp16_has_not_lead_to_some_that_it_has(out: torch.dtype, gather: bool, impl: str) -> None:
    plan = fk.moe.presorted(torch.tensor([1, 2]), 4)
    x = torch.full((4, 16), 1e-3).half().requires_grad_()
    w = torch.full((2, 32, 16), 2.0**-14).half().requires_grad_()
    dy = torch.full((4, 32), 2.0**20)
    dy[2], dy[3] = torch.inf, 1e30
    found = fk.moe.grouped_gemm(x, w, plan, gather=gather, out_dtype=out, impl=impl)
    found.backward(dy.to(out))
    assert x.grad is not None and w.grad is not None
    assert x.grad[:, 0].tolist() == [2048.0, 2048.0, torch.inf, 0.0]
    torch.testing.assert_close(w.grad[0], (x[0] * 2.0**20).expand(32, 16))
    assert w.grad[1].isinf().all()


def test_a_bias_learns_in_compiled_code() -> None:
    plan = fk.moe.route(torch.randn(5, 3), 2).plan
    assert plan is not None
    x, w, bias = torch.randn(5, 16), torch.randn(3, 8, 16), torch.randn(3, 8, requires_grad=True)

    def function(x: Tensor, bias: Tensor) -> Tensor:
        return fk.moe.grouped_gemm(x, w, plan, bias=bias)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    found, want = (torch.autograd.grad(f(x, bias).square().sum(), bias) for f in (compiled, function))
    torch.testing.assert_close(found, want)


@each_impl
def test_only_some_gradients_are_wanted(impl: str) -> None:
    plan = fk.moe.route(torch.randn(5, 3), 2).plan
    assert plan is not None
    x, w = torch.randn(5, 16), torch.randn(3, 8, 16, requires_grad=True)
    fk.moe.grouped_gemm(x, w, plan, impl=impl).sum().backward()
    assert w.grad is not None and x.grad is None
    x.requires_grad_()
    fk.moe.grouped_gemm(x, w.detach(), plan, impl=impl).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("what", ["activation", "row_weights", "quantised"])
def test_what_has_no_gradients_says_so(what: str) -> None:
    routing = fk.moe.route(torch.randn(5, 3), 2)
    assert routing.plan is not None
    x, w = torch.randn(5, 128, requires_grad=True), torch.randn(3, 8, 128)
    extra = {"activation": {"activation": "swiglu"}, "row_weights": {"row_weights": routing.weights}}
    kwargs: dict[str, Any] = extra.get(what, {})
    with pytest.raises(fk.UnsupportedError, match="no gradients"):
        fk.moe.grouped_gemm(x, fk.moe.quantise(w, "w8") if what == "quantised" else w, routing.plan, **kwargs)


def test_is_a_proper_op() -> None:
    plan = fk.moe.route(torch.randn(5, 3), 2).plan
    assert plan is not None
    x, w = torch.randn(5, 16, requires_grad=True), torch.randn(3, 8, 16, requires_grad=True)
    call = (True, "none", False, 1.0, 1.0, "", 0, 16, plan.block, "fp32", False, "torch")
    torch.library.opcheck(torch.ops.flashkernels.moe_gemm, (x, w, None, None, None, None, *plan[:6], *call))


# Tiles


@pytest.mark.parametrize("gpu", ["a100", "rtx4090", "h200", "b200", "rtx5090"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp8"])
@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_tiles_fit(gpu: str, dtype: str, block: int) -> None:
    for weights in {"bf16": ("", "w8", "w4"), "fp32": ("",), "fp8": ("fp8", "fp8_block")}[dtype]:
        for activation in ("none", "swiglu"):
            group = 128 if weights in ("w8", "w4") else 0
            problem = GemmProblem(64, 8, 1024, 1024, dtype, "cuda", weights, activation, True, block, group)
            tile = tiles.choose(problem, lookup(gpu), True)
            assert tile.block_m == block and tiles.shared_bytes(tile, problem) <= lookup(gpu).shared_per_block


def test_few_rows_take_the_decode_way_and_many_the_large_one() -> None:
    h200 = lookup("h200")
    for tokens, swap in ((1, True), (16, True), (64, True), (1024, False), (16384, False)):
        problem = GemmProblem(tokens * 2, 8, 28672, 4096, "bf16", "cuda", "", "swiglu", True, block_rows(tokens * 2, 8))
        tile = tiles.choose(problem, h200, True)
        assert tile.swap == swap
        assert ("weights are the traffic" in tiles.reason(problem, tile)) == swap


# Bad input


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.randn(6, 16)}, ValueError, "x has 6 rows; the plan has 5 tokens"),
        ({"x": torch.randn(5, 15)}, ValueError, r"w has shape \(3, 8, 16\)"),
        ({"w": torch.randn(4, 8, 16)}, ValueError, r"w has shape \(4, 8, 16\)"),
        ({"w": torch.randn(3, 7, 16), "activation": "swiglu"}, ValueError, "even n"),
        ({"w": torch.randn(3, 8, 16).half()}, TypeError, "torch.float16"),
        ({"bias": torch.randn(3, 7)}, ValueError, r"bias has shape \(3, 7\)"),
        ({"row_weights": torch.randn(5, 3)}, ValueError, r"row_weights has shape \(5, 3\)"),
        ({"activation": "silu"}, ValueError, "activation='silu'"),
        ({"x_scale": torch.ones(5)}, ValueError, "x_scale"),
        ({"gather": False}, ValueError, "x has 5 rows; the plan has 10 places"),
        ({"limit": float("nan")}, ValueError, "limit=nan"),
    ],
)
def test_bad_values_are_named(change: dict[str, Any], error: type[Exception], message: str) -> None:
    plan = fk.moe.route(torch.randn(5, 3), 2).plan
    arguments: dict[str, Any] = {"x": torch.randn(5, 16), "w": torch.randn(3, 8, 16), "plan": plan} | change
    with pytest.raises(error, match=message):
        fk.moe.grouped_gemm(**arguments)


SMALL = torch.ones(5, 256, dtype=torch.int8)
BYTES = SMALL.to(torch.float8_e4m3fn)


@each_impl
@pytest.mark.parametrize(
    ("format", "x", "x_scale", "error", "message"),
    [
        ("int8", SMALL, torch.ones(5, 1), ValueError, r"x_scale has shape \(5, 1\); expected \(5,\)"),
        ("int8", SMALL, torch.ones(1), ValueError, r"x_scale has shape \(1,\); expected \(5,\)"),
        ("int8", SMALL, torch.ones(()), ValueError, r"x_scale has shape \(\); expected \(5,\)"),
        ("fp8_block", BYTES, torch.ones(5), ValueError, r"x_scale has shape \(5,\); expected \(5, 2\)"),
        ("int8", SMALL, torch.ones(5).half(), TypeError, "x_scale.dtype=torch.float16"),
        ("int8", SMALL, torch.ones(5, device="meta"), ValueError, "x_scale.device=meta"),
        ("int8", SMALL, 1.0, TypeError, "x_scale must be a torch.Tensor or None, got float"),
        ("int8", SMALL.float(), torch.ones(5), ValueError, "x_scale .* x.dtype=torch.float32"),
        ("int8", BYTES, torch.ones(5), TypeError, "x.dtype=torch.float8_e4m3fn: weights in 'int8'"),
        ("fp8", SMALL, torch.ones(5), TypeError, "x.dtype=torch.int8: weights in 'fp8'"),
        ("fp8", SMALL.to(torch.float8_e5m2), torch.ones(5), TypeError, "x.dtype=torch.float8_e5m2"),
        ("w8", SMALL.float(), torch.ones(5), ValueError, "x_scale goes with x in 8 bits"),
    ],
)
def test_scales_of_x_must_fit(
    format: str, x: Tensor, x_scale: Any, error: type[Exception], message: str, impl: str
) -> None:
    plan = fk.moe.route(torch.randn(5, 3), 2).plan
    assert plan is not None
    small = fk.moe.quantise(torch.randn(3, 8, 256), format)
    with pytest.raises(error, match=message):
        fk.moe.grouped_gemm(x, small, plan, x_scale=x_scale, impl=impl)


@each_impl
def test_a_call_that_was_valid_makes_no_other_valid(impl: str) -> None:
    plan = fk.moe.route(torch.randn(5, 3), 2).plan
    assert plan is not None
    x, w = torch.randn(5, 16), torch.randn(3, 8, 16)
    kwargs: dict[str, Any] = {"activation": "clamped_swiglu", "impl": impl}
    fk.moe.grouped_gemm(x, w, plan, alpha=1.0, **kwargs)
    with pytest.raises(TypeError, match="alpha=True must be a number"):
        fk.moe.grouped_gemm(x, w, plan, alpha=True, **kwargs)
    with pytest.raises(TypeError, match=r"alpha=\[1\] must be a number, got list"):
        fk.moe.grouped_gemm(x, w, plan, alpha=[1], **kwargs)


@each_impl
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("field", ["data", "scale"])
def test_quantised_weights_must_fit_their_format(field: str, format: str, impl: str) -> None:
    plan = fk.moe.route(torch.randn(5, 3), 2).plan
    assert plan is not None
    small = fk.moe.quantise(torch.randn(3, 200, 256), format)
    short = getattr(small, field)[..., :1]
    x, scale = torch.randn(5, 256), None
    if format in ROUNDED:
        x, scale = fk.moe.round_rows(x, format, impl="torch")
    with pytest.raises(ValueError, match=rf"w\.{field} has shape {re.escape(str(tuple(short.shape)))}"):
        fk.moe.grouped_gemm(x, small._replace(**{field: short}), plan, x_scale=scale, impl=impl)
