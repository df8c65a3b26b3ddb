"""The whole layer against every expert on every token; shared experts, gradients, expert parallelism, the module."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import flashkernels as fk
from flashkernels.moe.problem import FORMATS, GATED, LayerProblem

from . import oracle
from .test_gemm import LOADS
from .test_route import each_impl


def weights_of(experts: int, hidden: int, inner: int, dtype: torch.dtype, kind: str = "swiglu") -> list[Tensor]:
    halves = 2 if kind in GATED else 1
    return [
        (torch.randn(experts, halves * inner, hidden) / hidden**0.5).to(dtype),
        (torch.randn(experts, hidden, inner) / inner**0.5).to(dtype),
    ]


@each_impl
@pytest.mark.parametrize("kind", ["swiglu", "geglu", "clamped_swiglu", "relu2"])
@pytest.mark.parametrize("tokens", [1, 9, 70])
def test_against_dense_experts(kind: str, tokens: int, impl: str) -> None:
    x, router = torch.randn(tokens, 48).half(), torch.randn(5, 48).half()
    w_gate_up, w_down = weights_of(5, 48, 24, torch.float16, kind)
    with torch.no_grad():
        found = fk.moe.layer(x, router, w_gate_up, w_down, k=2, activation=kind, return_routing=True, impl=impl)
    assert isinstance(found, fk.moe.Layered)
    routing = found.routing
    torch.testing.assert_close(found.logits, x @ router.T)
    want, plain = (
        oracle.experts(x.to(t), routing.weights, routing.ids, w_gate_up.to(t), w_down.to(t), kind)
        for t in (torch.float64, torch.float16)
    )
    oracle.assert_close(found.out, plain, want, torch.float16)


@each_impl
@pytest.mark.parametrize("load", LOADS)
def test_skewed_loads(load: str, impl: str) -> None:
    x = torch.randn(60, 32)
    w_gate_up, w_down = weights_of(4, 32, 16, torch.float32)
    weights, ids, plan = fk.moe.route(LOADS[load](60, 4), 2)
    with torch.no_grad():
        out = fk.moe.layer(x, None, w_gate_up, w_down, routing=fk.moe.Routing(weights, ids, plan), impl=impl)
    want, plain = (
        oracle.experts(x.to(t), weights, ids, w_gate_up.to(t), w_down.to(t)) for t in (torch.float64, torch.float32)
    )
    assert isinstance(out, Tensor)
    oracle.assert_close(out, plain, want, torch.float32)


def everything(dtype: torch.dtype) -> dict[str, Tensor]:
    w_gate_up, w_down = weights_of(4, 16, 12, torch.float64)
    tensors = {
        "x": torch.randn(2, 5, 16), "router": torch.randn(4, 16), "w_gate_up": w_gate_up, "w_down": w_down,
        "bias_gate_up": torch.randn(4, 24), "bias_down": torch.randn(4, 16), "router_bias": torch.randn(4),
        "shared_gate_up": torch.randn(12, 16) / 4, "shared_down": torch.randn(16, 6) / 2, "gate": torch.randn(16),
    }  # fmt: skip
    return {name: y.to(dtype).requires_grad_() for name, y in tensors.items()}


def layer(t: dict[str, Tensor], impl: str, **kwargs: Any) -> Tensor:
    out = fk.moe.layer(
        t["x"], t["router"], t["w_gate_up"], t["w_down"], bias_gate_up=t["bias_gate_up"], bias_down=t["bias_down"],
        router_bias=t["router_bias"], shared=(t["shared_gate_up"], t["shared_down"]), shared_gate=t["gate"], impl=impl,
        **kwargs,
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out


def dense(t: dict[str, Tensor]) -> Tensor:
    """The same in plain torch, with autograd."""
    x = t["x"].reshape(-1, 16)
    top, ids = (x @ t["router"].T + t["router_bias"]).softmax(-1).topk(2)
    out = oracle.experts(
        x, top / top.sum(-1, keepdim=True), ids, t["w_gate_up"], t["w_down"], "swiglu", False, t["bias_gate_up"],
        t["bias_down"],
    )  # fmt: skip
    shared = oracle.activate(x @ t["shared_gate_up"].T, "swiglu") @ t["shared_down"].T
    return (out + shared * torch.sigmoid(x @ t["gate"])[:, None]).view(t["x"].shape)


@each_impl
def test_gradients_of_everything(impl: str) -> None:
    tensors = everything(torch.float32)
    wide = {name: y.detach().double().requires_grad_() for name, y in tensors.items()}
    dy = torch.randn(2, 5, 16)
    results = []
    for out, leaves in ((layer(tensors, impl), tensors), (dense(tensors), tensors), (dense(wide), wide)):
        results.append((out, *torch.autograd.grad(out, [*leaves.values()], dy.to(out.dtype))))
    for a, b, c, name in zip(*results, ("out", *tensors), strict=True):
        oracle.assert_close(a, b, c, torch.float32, name)


def test_gradcheck_of_the_reference() -> None:
    tensors = everything(torch.float64)
    names = ("x", "w_gate_up", "w_down", "router")
    leaves = {name: y.detach()[:1, :2] if name == "x" else y.detach() for name, y in tensors.items()}

    def function(*some: Tensor) -> Tensor:
        return layer(leaves | dict(zip(names, some, strict=True)), "torch")

    assert torch.autograd.gradcheck(function, [leaves[name].requires_grad_() for name in names], fast_mode=True)


@each_impl
@pytest.mark.parametrize("kind", ["swiglu", "clamped_swiglu", "relu2"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
def test_training_and_inference_agree(kind: str, interleaved: bool, impl: str) -> None:
    x, router = torch.randn(7, 16), torch.randn(3, 16)
    w_gate_up, w_down = weights_of(3, 16, 8, torch.float32, kind)
    kwargs: dict[str, Any] = {"activation": kind, "interleaved": interleaved, "impl": impl}
    with torch.no_grad():
        inference = fk.moe.layer(x, router, w_gate_up, w_down, **kwargs)
    training = fk.moe.layer(x, router, w_gate_up.requires_grad_(), w_down, **kwargs)
    torch.testing.assert_close(training, inference)


@each_impl
def test_shares_of_expert_ranges_add_up(impl: str) -> None:
    """What all-to-all systems do: each device has some of the experts, and an all-reduce adds their shares."""
    x, router, shared = torch.randn(30, 16), torch.randn(6, 16), (torch.randn(8, 16), torch.randn(16, 4))
    w_gate_up, w_down = weights_of(6, 16, 8, torch.float32)
    with torch.no_grad():
        whole = fk.moe.layer(x, router, w_gate_up, w_down, k=3, shared=shared, impl=impl)
        parts = [
            fk.moe.layer(x, router, w_gate_up[a:b], w_down[a:b], k=3, span=(a, b), shared=shared, impl=impl)
            for a, b in ((0, 2), (2, 3), (3, 6))
        ]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-5, atol=1e-5)


@each_impl
def test_tokens_that_an_all_to_all_delivers(impl: str) -> None:
    """Rows that come sorted by expert go through the two products, and leave in the same order."""
    counts = torch.tensor([5, 0, 9])
    plan = fk.moe.presorted(counts, 20)
    x = torch.randn(20, 16)
    w_gate_up, w_down = weights_of(3, 16, 8, torch.float32)
    h = fk.moe.grouped_gemm(x, w_gate_up, plan, gather=False, activation="swiglu", impl=impl)
    y = fk.moe.grouped_gemm(h, w_down, plan, gather=False, impl=impl)
    start = 0
    for e, n in enumerate(counts.tolist()):
        rows = x[start : start + n]
        want = oracle.activate(rows @ w_gate_up[e].T, "swiglu") @ w_down[e].T
        torch.testing.assert_close(y[start : start + n], want, rtol=1e-5, atol=1e-5)
        start += n


@each_impl
@pytest.mark.parametrize("format", FORMATS)
def test_quantised_weights(format: str, impl: str) -> None:
    if impl == "triton" and format.startswith("fp8"):
        pytest.skip("Triton's interpreter rounds FP8 wrongly")
    x, router = torch.randn(12, 128).half(), torch.randn(4, 128).half()
    w_gate_up, w_down = weights_of(4, 128, 128, torch.float16)
    kwargs: dict[str, Any] = {"scale_dtype": torch.float16}
    small = [fk.moe.quantise(w, format, **kwargs) for w in (w_gate_up, w_down)]
    out = fk.moe.layer(x, router, *small, impl=impl)
    exact = fk.moe.layer(x, router, *(fk.moe.dequantise(w).half() for w in small), impl="torch")
    rounding = {"int8": 2.0**-5, "fp8": 2.0**-3, "fp8_block": 2.0**-3}.get(format, 2.0**-8)  # of activations, by norm
    assert isinstance(out, Tensor) and isinstance(exact, Tensor)
    assert (out - exact).norm() <= rounding * exact.norm()


@each_impl
def test_tokens_not_in_use_get_nothing(impl: str) -> None:
    x, router = torch.randn(9, 16), torch.randn(3, 16)
    w_gate_up, w_down = weights_of(3, 16, 8, torch.float32)
    used = torch.tensor([4], dtype=torch.int32)
    with torch.no_grad():
        out = fk.moe.layer(x, router, w_gate_up, w_down, used=used, impl=impl)
        want = fk.moe.layer(x[:4], router, w_gate_up, w_down, impl=impl)
    assert isinstance(out, Tensor)
    torch.testing.assert_close(out[:4], want)
    assert (out[4:] == 0).all()


@each_impl
def test_a_nan_stays_in_its_token(impl: str) -> None:
    x, router = torch.randn(9, 16), torch.randn(3, 16)
    w_gate_up, w_down = weights_of(3, 16, 8, torch.float32)
    with torch.no_grad():
        clean = fk.moe.layer(x, router, w_gate_up, w_down, impl=impl)
        x[4, 3] = torch.nan
        out = fk.moe.layer(x, router, w_gate_up, w_down, impl=impl)
    assert isinstance(out, Tensor) and isinstance(clean, Tensor)
    assert out[4].isnan().all()
    keep = torch.arange(9) != 4
    torch.testing.assert_close(out[keep], clean[keep])


@each_impl
def test_the_same_in_every_run(impl: str) -> None:
    tensors = everything(torch.float32)
    first = layer(tensors, impl)
    for _ in range(20 if impl == "torch" else 2):
        assert torch.equal(layer(tensors, impl), first)


@each_impl
@pytest.mark.parametrize("weighted", [True, False])
def test_combine(weighted: bool, impl: str) -> None:
    plan = fk.moe.route(torch.randn(20, 6), 3, span=(1, 4)).plan
    assert plan is not None
    y = torch.randn(60, 33, dtype=torch.float32, requires_grad=True)
    weights = torch.randn(20, 3, requires_grad=True) if weighted else None
    shared = torch.randn(20, 33, requires_grad=True)
    leaves = [y, shared, *([weights] if weights is not None else [])]
    dy = torch.randn(20, 33)
    found = fk.moe.combine(y, weights, plan, shared=shared, impl=impl)
    want = shared.clone()
    for t in range(20):
        for j in range(3):
            place = int(plan.inverse[t, j])
            if place >= 0:
                want[t] = want[t] + y[place] * (1 if weights is None else weights[t, j])
    torch.testing.assert_close(found, want)
    for a, b in zip(*(torch.autograd.grad(out, leaves, dy) for out in (found, want)), strict=True):
        torch.testing.assert_close(a, b)


@each_impl
def test_combine_adds_parts_of_a_sum(impl: str) -> None:
    plan = fk.moe.route(torch.randn(3, 2), 2).plan
    assert plan is not None
    y = torch.randn(2, 6, 4)
    results = []
    for part in (y, y.sum(0)):
        weights = torch.full((3, 2), 0.5, requires_grad=True)
        out = fk.moe.combine(part, weights, plan, impl=impl)
        results.append((out, *torch.autograd.grad(out.square().sum(), weights)))
    torch.testing.assert_close(*results)


@each_impl
@pytest.mark.parametrize("format", ["", "w4"])
def test_only_the_router_learns(format: str, impl: str) -> None:
    """Then the second product may be in parts."""
    x, router = torch.randn(3, 256).half(), torch.randn(2, 256).half() / 16
    experts: Any = weights_of(2, 256, 2048, torch.float16)
    if format:
        experts = [fk.moe.quantise(w, format, scale_dtype=torch.float16) for w in experts]
    wide: Any = [(fk.moe.dequantise(w) if format else w).double() for w in experts]
    results = []
    for dtype, weights, way in ((torch.float16, experts, impl), (torch.float64, wide, "torch")):
        leaf = router.to(dtype, copy=True).requires_grad_()
        out = fk.moe.layer(x.to(dtype), leaf, *weights, k=2, impl=way)
        assert isinstance(out, Tensor)
        results.append(torch.autograd.grad(out.double().square().sum(), leaf)[0].double())
    assert (results[0] - results[1]).norm() <= 2.0**-7 * results[1].norm()


def test_combine_needs_a_plan() -> None:
    bare = fk.moe.route(torch.randn(3, 2), 2, plan=False)
    with pytest.raises(TypeError, match=r"plan must be a flashkernels\.moe\.Plan, got NoneType"):
        fk.moe.combine(torch.randn(6, 4), bare.weights, bare.plan)  # type: ignore[arg-type]


def test_module_has_the_parameters_of_a_checkpoint() -> None:
    moe = fk.moe.MoE(16, 24, 4, 2, bias=True, choice_bias=True, score="sigmoid", shared_inner=8, shared_gate=True)
    shapes = {name: tuple(p.shape) for name, p in moe.state_dict().items()}
    assert shapes == {
        "router": (4, 16), "w_gate_up": (4, 48, 16), "w_down": (4, 16, 24), "bias_gate_up": (4, 48),
        "bias_down": (4, 16), "shared_gate_up": (16, 16), "shared_down": (16, 8), "shared_gate": (16,),
        "choice_bias": (4,),
    }  # fmt: skip
    x = torch.randn(2, 3, 16)
    out = moe(x, return_routing=True)
    assert out.out.shape == x.shape
    (out.out.sum() + fk.moe.balance_loss(out.logits, out.routing.ids, score="sigmoid")).backward()
    assert all(p.grad is not None for p in moe.parameters())
    assert "experts=4" in repr(moe)
    again = moe(x, routing=out.routing)
    torch.testing.assert_close(again, out.out)


def test_compiles_whole() -> None:
    moe = fk.moe.MoE(16, 8, 4, 2)
    compiled = torch.compile(moe, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (3, 5):
        x = torch.randn(tokens, 16)
        torch.testing.assert_close(compiled(x), moe(x))
    compiled(x).sum().backward()
    assert moe.w_down.grad is not None


def test_autocast_computes_in_16_bits() -> None:
    moe = fk.moe.MoE(16, 8, 4, 2)
    x = torch.randn(5, 16)
    with torch.autocast("cpu", torch.bfloat16):
        out = moe(x)
        plan = fk.moe.route(torch.randn(5, 4), 2).plan
        assert plan is not None
        assert fk.moe.grouped_gemm(x, moe.w_gate_up, plan).dtype == torch.bfloat16
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), moe(x), rtol=0.05, atol=0.02)
    out.sum().backward()
    assert moe.w_down.grad is not None and moe.w_down.grad.dtype == torch.float32


def test_compiled_inference_has_the_activation_in_the_first_product() -> None:
    moe = fk.moe.MoE(16, 8, 4, 2).requires_grad_(False)
    graphs = []

    def backend(graph: torch.fx.GraphModule, example: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    x = torch.randn(5, 16)
    torch.testing.assert_close(torch.compile(moe, fullgraph=True, backend=backend)(x), moe(x))
    names = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert sum("moe_gemm" in name for name in names) == 2 and not any("activation" in name for name in names)


def test_the_cpu_needs_no_triton() -> None:
    program = """
import sys
sys.modules["triton"] = None
import torch
import flashkernels as fk
moe = fk.moe.MoE(16, 8, 4, 2)
moe(torch.randn(3, 16)).sum().backward()
print(tuple(moe.w_down.grad.shape))
"""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "(4, 16, 8)", done.stderr


@each_impl
def test_a_prepared_layer_is_the_same_layer(impl: str) -> None:
    """The second call of a kind runs what the first one found: other numbers, the same sizes."""
    w_gate_up, w_down = weights_of(5, 48, 24, torch.float16)
    router = torch.randn(5, 48).half()
    for _ in range(3):
        x = torch.randn(2, 4, 48).half()
        with torch.no_grad():
            found = fk.moe.layer(x, router, w_gate_up, w_down, k=2, return_routing=True, impl=impl)
            assert isinstance(found, fk.moe.Layered)
            want = fk.moe.layer(x, None, w_gate_up, w_down, routing=found.routing, impl=impl)
        assert found.out.shape == x.shape and torch.equal(found.out, want)
    with pytest.raises(ValueError, match=r"k=2\.0"), torch.no_grad():
        fk.moe.layer(x, router, w_gate_up, w_down, k=2.0, impl=impl)


def test_a_layer_needs_a_router_or_a_routing() -> None:
    w_gate_up, w_down = weights_of(3, 16, 8, torch.float32)
    with pytest.raises(ValueError, match="either router_weight or routing"):
        fk.moe.layer(torch.randn(2, 16), None, w_gate_up, w_down)
    with pytest.raises(ValueError, match="router_weight has shape"):
        fk.moe.layer(torch.randn(2, 16), torch.randn(3, 15), w_gate_up, w_down)
    bare = fk.moe.route(torch.randn(2, 3), 1, plan=False)
    with pytest.raises(ValueError, match="no plan"):
        fk.moe.layer(torch.randn(2, 16), None, w_gate_up, w_down, routing=bare)


def test_bytes_count_the_experts_that_are_used() -> None:
    one = LayerProblem(1, 4096, 14336, 8, 2, "bf16", "cuda")
    assert one.bytes() == pytest.approx(2 * 3 * 4096 * 14336 * 2, rel=1e-3)
    many = LayerProblem(1000, 4096, 14336, 8, 2, "bf16", "cuda")
    assert many.bytes() == pytest.approx(8 * 3 * 4096 * 14336 * 2 + 2 * 1000 * 4096 * 2, rel=1e-3)


@pytest.mark.parametrize("span", [3, (0,), (0.0, 2), "ab", (0, 9)], ids=repr)
def test_a_wrong_span_is_named(span: Any) -> None:
    x, router, up, down = (torch.randn(shape) for shape in ((3, 16), (4, 16), (4, 8, 16), (4, 16, 4)))
    with pytest.raises(ValueError, match=r"span="):
        fk.moe.layer(x, router, up, down, k=2, span=span)
