"""Calls that cannot be served say which argument is wrong, and those at the edge of what can be are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashkernels as fk

moe = fk.moe
X, ROUTER = torch.randn(5, 16), torch.randn(4, 16)
UP, DOWN = torch.randn(4, 24, 16), torch.randn(4, 16, 12)
LOGITS, Y = torch.randn(5, 4), torch.randn(10, 16)
ROUTING = moe.route(LOGITS, 2)
PLAN, IDS, WORDS = ROUTING.plan, ROUTING.ids, moe.quantise(UP, "w8")
ONE = torch.tensor(1, dtype=torch.int32)


def given(**named: Any) -> Any:
    return moe.layer(X, None, UP, DOWN, routing=ROUTING, **named)


def routed(**named: Any) -> Any:
    return moe.layer(X, ROUTER, UP, DOWN, **named)


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "used beside a routing": (lambda: given(used=ONE), "used belongs to a router"),
    "choice_bias beside a routing": (lambda: given(choice_bias=torch.zeros(4)), "choice_bias belongs to a router"),
    "span beside a routing": (lambda: given(span=(7, 3)), r"span=\(7, 3\)"),
    "routing": (lambda: moe.layer(X, None, UP, DOWN, routing=tuple(ROUTING)), "routing must be .*, got tuple"),
    "plan": (lambda: moe.layer(X, None, UP, DOWN, routing=ROUTING._replace(plan=())), "routing.plan must be a Plan"),
    "w_down": (lambda: moe.layer(X, ROUTER, UP, DOWN[:, :15]), r"w_down has shape \(4, 15, 12\)"),
    "w_down with gradients": (
        lambda: moe.layer(X, ROUTER.clone().requires_grad_(), UP, DOWN[:, :15]), r"w_down has shape \(4, 15, 12\)",
    ),
    "w_gate_up": (lambda: moe.layer(X, ROUTER, None, DOWN), "w_gate_up must be"),
    "x": (lambda: moe.layer(torch.tensor(1.0), ROUTER, UP, DOWN), "x has no dimension"),
    "router": (lambda: moe.layer(X, ROUTER.int(), UP, DOWN), "router_weight must be .* got torch.int32"),
    "router_bias of one": (lambda: routed(router_bias=torch.zeros(1)), r"router_bias has shape \(1,\)"),
    "router_bias a token": (lambda: routed(router_bias=torch.zeros(5, 4)), r"router_bias has shape \(5, 4\)"),
    "one shared": (lambda: routed(shared=(UP[0],)), "shared must be two matrices"),
    "shared no pair": (lambda: routed(shared=UP[0]), "shared must be two matrices"),
    "shared sizes": (lambda: routed(shared=(UP[0][:, :15], DOWN[0])), r"shared has shapes \(24, 15\)"),
    "shared dtype": (lambda: routed(shared=(UP[0].double(), DOWN[0])), r"shared\[0\].dtype=torch.float64"),
    "shared_gate": (lambda: routed(shared=(UP[0], DOWN[0]), shared_gate=torch.zeros(15)), r"shared_gate .*\(15,\)"),
    "shared_gate alone": (lambda: routed(shared_gate=torch.zeros(16)), "shared_gate goes with shared"),
    "rows": (lambda: moe.presorted(torch.tensor([2, 0, 1]), 2.5), "rows=2.5"),
    "rows below 0": (lambda: moe.presorted(torch.tensor([2, 0, 1]), -1), "rows=-1"),
    "block": (lambda: moe.route(LOGITS, 2, block=16.0), "block=16.0"),
    "renormalise": (lambda: moe.route(LOGITS, 2, renormalise="no"), "renormalise='no'"),
    "impl": (lambda: moe.route(LOGITS.clone().requires_grad_(), 2, impl=None), "impl=None"),
    "gather": (lambda: moe.grouped_gemm(X, UP, PLAN, gather="no"), "gather='no'"),
    "x of words": (lambda: moe.grouped_gemm(X.int(), WORDS, PLAN), "x.dtype=torch.int32"),
    "x of no size": (lambda: moe.grouped_gemm(torch.tensor(1.0), UP, PLAN), r"x has shape \(\)"),
    "scale": (lambda: moe.grouped_gemm(X, WORDS._replace(scale=None), PLAN), "w.scale must be"),
    "scale of ints": (lambda: moe.grouped_gemm(X, WORDS._replace(scale=WORDS.scale.int()), PLAN), "w.scale.dtype"),
    "shape": (lambda: moe.grouped_gemm(X, WORDS._replace(shape=(4, 24)), PLAN), r"w.shape=\(4, 24\)"),
    "bias": (lambda: moe.grouped_gemm(X, UP, PLAN, bias=torch.zeros(4, 24).int()), "bias.dtype=torch.int32"),
    "weights": (lambda: moe.combine(Y, [1], PLAN), "weights must be"),
    "logits of a loss": (lambda: moe.balance_loss(LOGITS[:, 0], IDS), r"logits has shape \(5,\)"),
    "ids of a loss": (lambda: moe.balance_loss(LOGITS, IDS.float()), "ids must be"),
    "used of a loss": (lambda: moe.z_loss(LOGITS, used=3), "used must be"),
    "w": (lambda: moe.quantise([1], "w8"), "w must be .* got list"),
    "scale_dtype": (lambda: moe.quantise(UP, "w8", scale_dtype=torch.int8), "scale_dtype=torch.int8"),
    "scales past fp16": (lambda: moe.quantise(UP * 1e8, "w8", scale_dtype=torch.float16), "ends at 65504"),
    "no Quantised": (lambda: moe.dequantise(UP), "got Tensor"),
    "inner": (lambda: moe.MoE(16, 0, 4, 2), "inner=0"),
    "gate of nobody": (lambda: moe.MoE(16, 12, 4, 2, shared_gate=True), "shared_inner=0"),
    "k of explain": (lambda: moe.explain(4, 16, 12, 4, 5, gpu="h200"), "k=5"),
    "weights of explain": (lambda: moe.explain(4, 16, 12, 4, 2, weights="zz"), "weights='zz'"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "words"), BAD.values(), ids=BAD)
def test_bad_input_is_named(call: Callable[[], Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        call()


def test_gradients_of_gradients_of_a_routing() -> None:
    """A penalty on the router's gradient is not lost without a word."""
    logits = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    for named in ({}, {"score": "sigmoid", "renormalise": False}):
        assert torch.autograd.gradgradcheck(lambda x, n=named: moe.route(x, 2, **n).weights, (logits,))


def test_nan_of_tokens_not_in_use_reaches_no_gradient() -> None:
    x = torch.randn(4, 6)
    x[2:] = float("nan")
    leaves = [x.requires_grad_(), *(torch.randn(*s, requires_grad=True) for s in ((4, 6), (4, 8, 6), (4, 6, 4)))]
    out = moe.layer(*leaves, used=torch.tensor([2], dtype=torch.int32))
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), leaves))


def test_counts_below_0_count_as_0() -> None:
    plan = moe.presorted(torch.tensor([2, -1, 2]), 4)
    assert plan.counts.tolist() == [2, 0, 2] and plan.offsets.tolist() == [0, 2, 2, 4]
    assert moe.presorted(torch.tensor([-5, 3]), 4).offsets.tolist() == [0, 0, 3]


@pytest.mark.parametrize("format", ["w8", "w4"])
def test_fp64_by_words(format: str) -> None:
    w = moe.quantise(UP, format)
    want = moe.grouped_gemm(X.double(), moe.dequantise(w).double(), PLAN)
    torch.testing.assert_close(moe.grouped_gemm(X.double(), w, PLAN), want)


def test_a_bias_has_the_precision_of_scores() -> None:
    bias = torch.tensor([0.0, 1e-12, 0.0, 0.0], dtype=torch.float64)
    assert moe.route(torch.zeros(1, 4), 1, bias=bias).ids.item() == 0
    assert moe.route(torch.zeros(1, 4).double(), 1, bias=bias).ids.item() == 1


def test_weights_and_tokens_without_columns() -> None:
    assert moe.quantise(torch.randn(2, 8, 0), "fp8").scale.shape == (2, 8)
    empty = moe.layer(torch.randn(2, 3, 0), torch.randn(4, 0), torch.randn(4, 24, 0), torch.randn(4, 0, 12))
    assert empty.shape == (2, 3, 0)


def test_ids_out_of_range_do_not_count() -> None:
    ids = torch.tensor([[0], [1], [7], [-1]])
    torch.testing.assert_close(moe.balance_loss(torch.zeros(4, 2), ids), torch.tensor(1.0))
