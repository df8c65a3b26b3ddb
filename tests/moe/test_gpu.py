"""The mixture of experts on a real GPU: bf16 and FP8, large sizes, graphs, streams, and everything an interpreter
cannot show."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashkernels as fk
from flashkernels.moe.hopper.route_tiles import HopperRouteTile
from flashkernels.moe.problem import ACTIVATIONS, FORMATS, GATED, PHASES, GemmProblem
from flashkernels.moe.triton import tiles

from . import oracle
from .test_gemm import expected
from .test_layer import weights_of
from .test_route import VARIANTS
from .test_route_hopper import other_nans

pytestmark = pytest.mark.gpu
SIZES = [
    (1, 128, 8), (1, 8, 2), (7, 8, 2), (64, 128, 8), (128, 128, 8), (129, 128, 8), (1024, 64, 1), (4096, 256, 8),
    (32768, 64, 2), (32768, 128, 8), (3001, 100, 3), (2000, 1024, 16), (70000, 60, 4),
]  # fmt: skip
each_impl = pytest.mark.parametrize("impl", ["triton", "hopper"])
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@pytest.fixture(autouse=True)
def _served(request: pytest.FixtureRequest) -> None:
    asked = getattr(request.node, "callspec", None)
    if asked and asked.params.get("impl") == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")


def same(a: fk.moe.Routing, b: fk.moe.Routing) -> None:
    assert torch.equal(a.ids, b.ids)
    torch.testing.assert_close(a.weights, b.weights, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert a.plan is not None and b.plan is not None
    for name, x, y in zip(a.plan._fields, a.plan[:6], b.plan[:6], strict=False):
        assert torch.equal(x, y), name


@each_impl
@each_dtype
@pytest.mark.parametrize(("tokens", "experts", "k"), SIZES)
def test_route(tokens: int, experts: int, k: int, dtype: torch.dtype, impl: str) -> None:
    logits = torch.randn(tokens, experts, device="cuda").to(dtype)
    same(fk.moe.route(logits, k, impl=impl), fk.moe.route(logits, k, impl="torch"))
    chosen = fk.moe.route(logits, k, plan=False, impl=impl)
    assert torch.equal(chosen.ids, fk.moe.route(logits, k, impl=impl).ids)


@each_impl
@each_dtype
@pytest.mark.parametrize("variant", [name for name in VARIANTS if "bias" not in VARIANTS[name]])
@pytest.mark.parametrize("tokens", [9, 3000])
def test_route_variants(variant: str, tokens: int, dtype: torch.dtype, impl: str) -> None:
    logits = torch.randn(tokens, 64, device="cuda").to(dtype)
    kwargs = VARIANTS[variant]
    if impl == "hopper" and "groups" in kwargs:
        with pytest.raises(fk.UnsupportedError, match="groups=4"):
            fk.moe.route(logits, 6, impl=impl, **kwargs)
        return
    found, want = (fk.moe.route(logits, 6, impl=name, **kwargs) for name in (impl, "torch"))
    if kwargs.get("groups", 1) == 1 or kwargs.get("group_score") == "max":
        same(found, want)
    else:  # sums of two scores may round to a tie or out of one
        assert (found.ids != want.ids).any(-1).float().mean() < 1e-3


@each_impl
@each_dtype
@pytest.mark.parametrize("score", ["sigmoid", "softmax"])
@pytest.mark.parametrize("tokens", [9, 3000])
def test_route_with_a_bias(tokens: int, score: str, dtype: torch.dtype, impl: str) -> None:
    """The scores' last bit may turn two nearly equal experts around, and nothing else."""
    logits, bias = torch.randn(tokens, 64, device="cuda").to(dtype), torch.randn(64, device="cuda").to(dtype) / 4
    found, want = (fk.moe.route(logits, 6, score=score, bias=bias, impl=name) for name in (impl, "torch"))
    choice = (torch.sigmoid(logits.float()) if score == "sigmoid" else logits.float().softmax(-1)) + bias.float()
    a, b = (choice.gather(1, routing.ids.long()) for routing in (found, want))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    assert (found.ids != want.ids).any(-1).float().mean() < 1e-3


@each_impl
@each_dtype
def test_route_ties_nan_and_infinities(dtype: torch.dtype, impl: str) -> None:
    logits = (torch.randint(-3, 4, (5000, 24), device="cuda") / 2).to(dtype)
    logits[::7, 3], logits[::11], logits[::13, 5] = torch.nan, -torch.inf, -torch.inf
    logits[::17, 2], logits[::19], logits[::23, 4] = torch.inf, torch.nan, -0.0
    other_nans(logits)
    for kwargs in ({}, {"score": "sigmoid"}, {"renormalise": False}):
        same(*(fk.moe.route(logits, 4, impl=name, **kwargs) for name in (impl, "torch")))


@each_impl
@pytest.mark.parametrize(("tokens", "span"), [(100, (8, 24)), (5000, (8, 24)), (5000, (63, 64))])
def test_route_span(tokens: int, span: tuple[int, int], impl: str) -> None:
    logits = torch.randn(tokens, 64, device="cuda")
    same(*(fk.moe.route(logits, 2, span=span, impl=name) for name in (impl, "torch")))


@each_impl
@pytest.mark.parametrize("layout", ["odd", "padded", "transposed"])
def test_route_strides(layout: str, impl: str) -> None:
    logits = torch.randn(3000, 96, device="cuda").bfloat16()
    wide = torch.randn(3000, 101 if layout == "odd" else 104, device="cuda").bfloat16()
    strided = logits.T.contiguous().T if layout == "transposed" else wide[:, 1:97].copy_(logits)
    same(fk.moe.route(strided, 4, impl=impl), fk.moe.route(logits, 4, impl="torch"))


@pytest.mark.parametrize("way", ["cluster", "grid"])
@pytest.mark.parametrize(("tokens", "experts", "k"), [(300, 128, 8), (5000, 40, 3)])
def test_route_by_any_way_is_the_same(tokens: int, experts: int, k: int, way: str) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    logits = torch.randn(tokens, experts, device="cuda")
    with fk.use_tile(tile=HopperRouteTile(warps=8, per_sm=2, ahead=2, way=way)):
        found = fk.moe.route(logits, k, impl="hopper")
    same(found, fk.moe.route(logits, k, impl="torch"))


@each_impl
@pytest.mark.parametrize("tokens", [100, 5000], ids=["small", "large"])
def test_a_graph_serves_any_count_and_logits(tokens: int, impl: str) -> None:
    logits, used = torch.randn(tokens, 64, device="cuda"), torch.tensor([tokens], dtype=torch.int32, device="cuda")
    fk.moe.route(logits, 2, used=used, impl=impl)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = fk.moe.route(logits, 2, used=used, impl=impl)
    for n in (tokens, 17, 0, tokens - 1, 1):
        logits.normal_()
        used.fill_(n)
        graph.replay()
        same(found, fk.moe.route(logits, 2, used=used, impl="torch"))


@each_impl
@pytest.mark.parametrize(("tokens", "experts", "k"), [(128, 128, 8), (32768, 64, 2)])
def test_route_is_the_same_in_every_run(tokens: int, experts: int, k: int, impl: str) -> None:
    logits = torch.randn(tokens, experts, device="cuda")
    first = fk.moe.route(logits, k, impl=impl)
    for _ in range(20):
        again = fk.moe.route(logits, k, impl=impl)
        assert torch.equal(again.weights, first.weights) and again.plan is not None and first.plan is not None
        assert all(torch.equal(a, b) for a, b in zip(again.plan[:6], first.plan[:6], strict=True))


@each_impl
@pytest.mark.parametrize("tokens", [128, 3000])
def test_routes_on_two_streams_do_not_disturb_each_other(tokens: int, impl: str) -> None:
    logits = [torch.randn(tokens, 128, device="cuda") for _ in range(2)]
    wants = [fk.moe.route(x, 8, impl="torch") for x in logits]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    found: list[list[fk.moe.Routing]] = [[], []]
    for _ in range(50):
        for i in range(2):
            with torch.cuda.stream(streams[i]):
                found[i].append(fk.moe.route(logits[i], 8, impl=impl))
    torch.cuda.synchronize()
    for routings, want in zip(found, wants, strict=True):
        for routing in routings:
            same(routing, want)


def test_nothing_waits_for_the_device() -> None:
    x, router = torch.randn(300, 256, device="cuda").bfloat16(), torch.randn(8, 256, device="cuda").bfloat16()
    w_gate_up, w_down = (w.cuda() for w in weights_of(8, 256, 128, torch.bfloat16))
    fk.moe.layer(x, router, w_gate_up, w_down)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        fk.moe.layer(x, router, w_gate_up, w_down)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Grouped GEMM


def check_gemm(
    tokens: int, experts: int, k: int, n: int, depth: int, kind: str = "none", dtype: torch.dtype = torch.bfloat16,
    skew: float = 0.0, block: int | None = None, interleaved: bool = False, impl: str = "triton",
) -> None:  # fmt: skip
    logits = torch.randn(tokens, experts, device="cuda") - skew * torch.arange(experts, device="cuda")
    routing = fk.moe.route(logits, k, block=block)
    plan = routing.plan
    assert plan is not None
    x = torch.randn(tokens, depth, device="cuda").to(dtype)
    w = (torch.randn(experts, n, depth, device="cuda") / depth**0.5).to(dtype)
    found = fk.moe.grouped_gemm(x, w, plan, activation=kind, interleaved=interleaved, impl=impl)
    want = fk.moe.grouped_gemm(x.double(), w.double(), plan, activation=kind, interleaved=interleaved, impl="torch")
    # plain torch: the product rounded to the dtype, then the activation
    plain = fk.moe.grouped_gemm(x.float(), w.float(), plan, impl="torch").to(dtype)
    plain = oracle.activate(plain, kind, interleaved)
    oracle.assert_close(found, plain, want, dtype)


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("block", [16, 32, 64, 128])
def test_epilogue(kind: str, interleaved: bool, block: int) -> None:
    if interleaved and kind not in GATED:
        pytest.skip("nothing to interleave")
    check_gemm(100, 8, 2, 512, 256, kind, block=block, interleaved=interleaved)


@pytest.mark.parametrize(("n", "depth"), [(8, 8), (130, 72), (1000, 1000), (264, 2056), (33, 31), (512, 257)])
@pytest.mark.parametrize("block", [16, 128])
@each_dtype
def test_sizes(n: int, depth: int, block: int, dtype: torch.dtype) -> None:
    check_gemm(60, 5, 2, n, depth, dtype=dtype, block=block)


@pytest.mark.parametrize("skew", [0.0, 0.3, 100.0], ids=["even", "skewed", "one expert"])
@pytest.mark.parametrize("tokens", [1, 16, 300, 3000])
def test_loads(tokens: int, skew: float) -> None:
    check_gemm(tokens, 37, 2, 384, 512, "swiglu", skew=skew)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("block", [16, 32, 64, 128])
@pytest.mark.parametrize("kind", ["none", "swiglu"])
@pytest.mark.parametrize("depth", [512, 528])
def test_format(format: str, block: int, kind: str, depth: int) -> None:
    routing = fk.moe.route(torch.randn(100, 6, device="cuda"), 2, block=block)
    plan = routing.plan
    assert plan is not None
    small = fk.moe.quantise(torch.randn(6, 320, depth, device="cuda") / depth**0.5, format)
    x = torch.randn(100, depth, device="cuda").bfloat16()
    found = fk.moe.grouped_gemm(x, small, plan, activation=kind, impl="triton")
    wide: Tensor = x.double()
    if format in ("fp8", "fp8_block", "int8"):
        rounded, scale = fk.moe.round_rows(x, format, impl="triton")
        each = scale[:, None] if scale.dim() == 1 else scale.repeat_interleave(128, 1)[:, :depth]
        wide = rounded.double() * each
    w = fk.moe.dequantise(small).double()
    if format in PHASES and block >= 64:  # scaled in the type of x
        w = w.bfloat16().double()
    want = fk.moe.grouped_gemm(wide, w, plan, activation=kind, impl="torch")
    plain = fk.moe.grouped_gemm(wide.float(), w.float(), plan, impl="torch").bfloat16()
    oracle.assert_close(found, oracle.activate(plain, kind), want, torch.bfloat16)


@pytest.mark.parametrize("format", ["w8", "w4"])
@pytest.mark.parametrize("depth", [512, 528])
@pytest.mark.parametrize("kind", ["none", "swiglu"])
def test_many_rows_unpack_the_weights_first(kind: str, depth: int, format: str) -> None:
    plan = fk.moe.route(torch.randn(800, 2, device="cuda"), 2).plan
    assert plan is not None
    small = fk.moe.quantise(torch.randn(2, 320, depth, device="cuda") / depth**0.5, format)
    x = torch.randn(800, depth, device="cuda").bfloat16()
    assert tiles.widens(GemmProblem(1600, 2, 320, depth, "bf16", "cuda", format, group=128))
    found = fk.moe.grouped_gemm(x, small, plan, activation=kind, impl="triton")
    w = fk.moe.dequantise(small).bfloat16()
    want = fk.moe.grouped_gemm(x.double(), w.double(), plan, activation=kind, impl="torch")
    plain = fk.moe.grouped_gemm(x.float(), w.float(), plan, impl="torch").bfloat16()
    oracle.assert_close(found, oracle.activate(plain, kind), want, torch.bfloat16)


@pytest.mark.parametrize("format", ["", "w4", "int8"])
def test_a_prepared_layer_is_captured(format: str) -> None:
    """The third call is a graph's, with other numbers."""
    x, router = torch.randn(40, 256, device="cuda").bfloat16(), torch.randn(8, 256, device="cuda").bfloat16()
    weights = [torch.randn(*s, device="cuda").bfloat16() / 16 for s in ((8, 512, 256), (8, 256, 256))]
    stored: Any = [fk.moe.quantise(w, format) if format else w for w in weights]
    with torch.no_grad():
        first, second = (fk.moe.layer(x, router, *stored, k=2) for _ in range(2))
        assert torch.equal(first, second)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = fk.moe.layer(x, router, *stored, k=2)
        x.normal_()
        graph.replay()
        assert torch.equal(out, fk.moe.layer(x, router, *stored, k=2))


def test_more_elements_than_32_bits_count() -> None:
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of GPU memory")
    tokens, n = 160_000, 14336
    routing = fk.moe.route(torch.randn(tokens, 8, device="cuda"), 1)
    plan = routing.plan
    assert plan is not None
    x, w = torch.randn(tokens, 16, device="cuda").bfloat16(), torch.randn(8, n, 16, device="cuda").bfloat16()
    out = fk.moe.grouped_gemm(x, w, plan)
    last = plan.permutation[-3:].long()
    want = torch.stack([x[i].float() @ w[int(routing.ids[i, 0])].float().T for i in last])
    torch.testing.assert_close(out[-3:].float(), want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("gather", [True, False], ids=["gathered", "sorted"])
@pytest.mark.parametrize(("tokens", "n", "depth"), [(20, 64, 72), (1000, 384, 512), (300, 130, 264)])
def test_gradients(gather: bool, tokens: int, n: int, depth: int) -> None:
    plan = fk.moe.route(torch.randn(tokens, 8, device="cuda"), 2).plan
    assert plan is not None
    x = torch.randn(tokens if gather else 2 * tokens, depth, device="cuda").bfloat16().requires_grad_()
    w = (torch.randn(8, n, depth, device="cuda") / depth**0.5).bfloat16().requires_grad_()
    dy = torch.randn(2 * tokens, n, device="cuda").bfloat16()
    found = torch.autograd.grad(fk.moe.grouped_gemm(x, w, plan, gather=gather, impl="triton"), (x, w), dy)
    results = []
    for dtype in (torch.bfloat16, torch.float64):
        leaves = [y.detach().to(dtype).requires_grad_() for y in (x, w)]
        out = fk.moe.grouped_gemm(leaves[0], leaves[1], plan, gather=gather, impl="torch")
        results.append(torch.autograd.grad(out, leaves, dy.to(dtype)))
    for a, b, c, name in zip(found, *results, ("dx", "dw"), strict=True):
        oracle.assert_close(a, b, c, torch.bfloat16, name)


# The layer


def check_layer(x: Tensor, router: Tensor, w_gate_up: Tensor, w_down: Tensor, *, k: int) -> None:
    """Against a loop over the experts, and 20 times the same."""
    found = fk.moe.layer(x, router, w_gate_up, w_down, k=k, return_routing=True)
    assert isinstance(found, fk.moe.Layered)
    weights, ids, _ = found.routing
    want, plain = (
        oracle.experts(x.to(t), weights, ids, w_gate_up.to(t), w_down.to(t)) for t in (torch.float64, torch.bfloat16)
    )
    oracle.assert_close(found.out, plain, want, torch.bfloat16)
    for _ in range(20):
        again = fk.moe.layer(x, router, w_gate_up, w_down, k=k)
        assert isinstance(again, Tensor) and torch.equal(again, found.out)


@pytest.mark.parametrize("tokens", [1, 16, 64, 300, 2000])
@pytest.mark.parametrize(("experts", "k", "hidden", "inner"), [(8, 2, 512, 1024), (64, 6, 256, 200)])
def test_layer(tokens: int, experts: int, k: int, hidden: int, inner: int) -> None:
    x = torch.randn(tokens, hidden, device="cuda").bfloat16()
    router = torch.randn(experts, hidden, device="cuda").bfloat16()
    check_layer(x, router, *(w.cuda() for w in weights_of(experts, hidden, inner, torch.bfloat16)), k=k)


@pytest.mark.parametrize("tokens", [500, 900])
def test_layer_in_a_graph_with_a_changing_count(tokens: int) -> None:
    x, router = torch.randn(tokens, 256, device="cuda").bfloat16(), torch.randn(8, 256, device="cuda").bfloat16()
    w_gate_up, w_down = (w.cuda() for w in weights_of(8, 256, 128, torch.bfloat16))
    used = torch.tensor([tokens], dtype=torch.int32, device="cuda")
    fk.moe.layer(x, router, w_gate_up, w_down, used=used)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fk.moe.layer(x, router, w_gate_up, w_down, used=used)
    assert isinstance(out, Tensor)
    for n in (tokens, 3, 0, tokens - 1):
        x.normal_()
        used.fill_(n)
        graph.replay()
        want = fk.moe.layer(x, router, w_gate_up, w_down, used=used)
        assert torch.equal(out, want) and (out[n:] == 0).all()


@pytest.mark.parametrize("kind", ["swiglu", "clamped_swiglu", "relu2"])
def test_layer_trains(kind: str) -> None:
    names = ("x", "w_gate_up", "w_down")
    wide = [y.bfloat16().cuda() for y in (torch.randn(200, 256), *weights_of(8, 256, 128, torch.float32, kind))]
    routing = fk.moe.route(torch.randn(200, 8, device="cuda"), 2)
    dy = torch.randn(200, 256, device="cuda")
    results = []
    for dtype, impl in ((torch.bfloat16, "triton"), (torch.bfloat16, "torch"), (torch.float64, "torch")):
        x, w_gate_up, w_down = (y.to(dtype).requires_grad_() for y in wide)
        out = fk.moe.layer(x, None, w_gate_up, w_down, routing=routing, activation=kind, impl=impl)
        assert isinstance(out, Tensor)
        results.append(torch.autograd.grad(out, (x, w_gate_up, w_down), dy.to(dtype)))
    for a, b, c, name in zip(*results, names, strict=True):
        oracle.assert_close(a, b, c, torch.bfloat16, name)


def test_a_device_that_is_not_current() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x, router = torch.randn(9, 64, device="cuda:1"), torch.randn(4, 64, device="cuda:1")
    w_gate_up, w_down = (w.to("cuda:1") for w in weights_of(4, 64, 32, torch.float32))
    out, want = (fk.moe.layer(x, router, w_gate_up, w_down, impl=impl) for impl in ("triton", "torch"))
    torch.testing.assert_close(out, want)


def test_the_oracle_of_these_tests_agrees_with_a_loop() -> None:
    routing = fk.moe.route(torch.randn(9, 4, device="cuda"), 2)
    assert routing.plan is not None
    x, w = torch.randn(9, 16, device="cuda", dtype=torch.float64), torch.randn(4, 8, 16, device="cuda").double()
    want = expected(x, w, routing.ids, routing.plan, True, "swiglu")
    torch.testing.assert_close(fk.moe.grouped_gemm(x, w, routing.plan, activation="swiglu", impl="torch"), want)
