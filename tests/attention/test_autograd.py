"""Gradients of attention against autograd through the oracle in fp64."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

import flashkernels as fk

from . import oracle
from .cases import FEATURES, NO_MASK, Shape, float_mask, interpreter, keywords, qkv, ragged
from .gradients import check, check_varlen, leaves

INF = float("inf")
SMALL = Shape(b=2, sq=9, sk=14, h=4, hkv=2, d=8, dv=5)
LENGTHS = ([5, 0, 12], [9, 3, 7])

impls = pytest.mark.parametrize("impl", ["torch", pytest.param("triton", marks=interpreter)])


# The chunked recompute is exact


@pytest.mark.parametrize("feature", FEATURES)
def test_gradcheck(feature: str) -> None:
    shape = Shape(b=1, sq=4, sk=5, h=2, hkv=1, d=3, dv=2)
    features = keywords(feature, shape)
    also = [name for name in ("sinks", "mask") if name in features and features[name].is_floating_point()]
    inputs = leaves(*qkv(shape, torch.float64), *(features[name].double() for name in also))

    def function(q: Tensor, k: Tensor, v: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        named = {**features, **dict(zip(also, others, strict=True))}
        out, lse = fk.attention(q, k, v, return_lse=True, impl="torch", **named)
        return out, lse.masked_fill(lse == -INF, 0.0)

    if "mask" in also:  # finite differences of -inf are NaN: gradcheck a mask without them
        inputs[-1] = torch.randn(features["mask"].shape, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize("feature", ["causal", "left", "alibi2d", "sinks", "floatmask"])
def test_rows_computed_in_many_chunks(feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("flashkernels.attention.recompute"), "SCORES_PER_CHUNK", 150)
    features = keywords(feature, SMALL)
    check(*qkv(SMALL), impl="torch", also=tuple(set(features) & {"sinks", "mask"}), **features)


# Every feature


@impls
@pytest.mark.parametrize("feature", FEATURES)
def test_feature(feature: str, impl: str) -> None:
    features = keywords(feature, SMALL)
    also = tuple(name for name in ("sinks", "mask") if name in features and features[name].is_floating_point())
    check(*qkv(SMALL), impl=impl, also=also, **features)


@impls
@pytest.mark.parametrize("mask", ["boolmask", "floatmask"])
def test_every_feature_at_once(mask: str, impl: str) -> None:
    features = keywords(["scale", "causal", "left", "softcap", "alibi", "sinks", mask], SMALL)
    check(*qkv(SMALL), impl=impl, also=("sinks",) if mask == "boolmask" else ("sinks", "mask"), **features)


@impls
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_layout(layout: str, impl: str) -> None:
    check(*qkv(SMALL, layout=layout), impl=impl, layout=layout, causal=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_dtype(dtype: torch.dtype) -> None:
    check(*qkv(SMALL, dtype), impl="torch", causal=True)


@pytest.mark.parametrize("heads", [(6, 2), (7, 1), (3, 3)], ids=lambda h: f"{h[0]}:{h[1]}")
def test_gradients_of_k_and_v_sum_over_their_query_heads(heads: tuple[int, int]) -> None:
    check(*qkv(SMALL.but(h=heads[0], hkv=heads[1])), impl="torch", causal=True)


@pytest.mark.parametrize(
    "sizes",
    [
        (2, 4, 9, 14),
        (1, 4, 9, 14),
        (2, 1, 9, 14),
        (2, 4, 1, 14),
        (2, 4, 9, 1),
        (1, 1, 1, 14),
        (4, 9, 14),
        (9, 14),
        (14,),
        (),
    ],
    ids=str,
)
def test_mask_gradient_sums_over_broadcast_dimensions(sizes: tuple[int, ...]) -> None:
    check(*qkv(SMALL), impl="torch", also=("mask",), mask=float_mask(sizes, drop=0.0))


def test_mask_gradient_of_an_expanded_view_reaches_its_base() -> None:
    q, k, v = qkv(SMALL)
    base = float_mask((1, 1, 9, 14), drop=0.0).requires_grad_()
    fk.attention(q, k, v, mask=base.expand(2, 4, 9, 14), impl="torch").sum().backward()
    assert base.grad is not None and base.grad.shape == (1, 1, 9, 14)


@pytest.mark.parametrize("name", ["sinks", "mask"])
def test_side_gradient_has_the_dtype_of_its_input(name: str) -> None:
    q, k, v = qkv(SMALL, torch.float16)
    side = {"sinks": torch.zeros(4, dtype=torch.float64), "mask": torch.zeros(14, dtype=torch.bfloat16)}[name]
    (grad,) = torch.autograd.grad(fk.attention(q, k, v, **{name: side.requires_grad_()}, impl="torch").sum(), side)
    assert grad.dtype == side.dtype and grad.shape == side.shape


# What gets a gradient


@impls
@pytest.mark.parametrize("wanted", ["q", "k", "v", "qv", "kv"])
def test_only_inputs_that_require_grad_get_one(wanted: str, impl: str) -> None:
    inputs = dict(zip("qkv", qkv(SMALL), strict=True))
    for name in wanted:
        inputs[name].requires_grad_()
    fk.attention(**inputs, impl=impl).sum().backward()
    assert {name for name, x in inputs.items() if x.grad is not None} == set(wanted)


@impls
def test_output_requires_no_grad_when_no_input_does(impl: str) -> None:
    out, lse = fk.attention(*qkv(SMALL), return_lse=True, impl=impl)
    assert not out.requires_grad and not lse.requires_grad


@impls
def test_no_grad_mode_records_nothing(impl: str) -> None:
    inputs = leaves(*qkv(SMALL))
    with torch.no_grad():
        assert not fk.attention(*inputs, impl=impl).requires_grad
    with torch.inference_mode():
        assert not fk.attention(*inputs, impl=impl).requires_grad


@pytest.mark.parametrize("impl", ["auto", "torch"])
def test_auto_has_gradients_too(impl: str) -> None:
    inputs = leaves(*qkv(Shape(sq=12, sk=12, d=8)))
    got = torch.autograd.grad(fk.attention(*inputs, causal=True, impl=impl).square().sum(), inputs)
    exact = leaves(*(x.double() for x in inputs))
    want = torch.autograd.grad(oracle.attention(*exact, causal=True).out.square().sum(), exact)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g.double(), w, rtol=1e-4, atol=1e-5)


@impls
def test_gradient_flows_through_lse_alone(impl: str) -> None:
    inputs = leaves(*qkv(SMALL))
    _, lse = fk.attention(*inputs, return_lse=True, impl=impl)
    got = torch.autograd.grad(lse.sum(), inputs, allow_unused=True)
    exact = leaves(*(x.double() for x in inputs))
    want = torch.autograd.grad(oracle.attention(*exact).lse.sum(), exact, allow_unused=True)
    torch.testing.assert_close(got[0].double(), want[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got[1].double(), want[1], rtol=1e-4, atol=1e-5)
    assert got[2] is None or (got[2] == 0).all()


@impls
def test_output_used_twice_adds_its_gradients(impl: str) -> None:
    inputs = leaves(*qkv(SMALL))
    out = fk.attention(*inputs, causal=True, impl=impl)
    once = torch.autograd.grad(out.sum(), inputs, retain_graph=True)
    twice = torch.autograd.grad(out.sum() + out.sum(), inputs)
    for a, b in zip(once, twice, strict=True):
        torch.testing.assert_close(2 * a, b)


@impls
def test_retain_graph_gives_the_same_gradients_again(impl: str) -> None:
    inputs = leaves(*qkv(SMALL))
    out = fk.attention(*inputs, causal=True, impl=impl)
    first = torch.autograd.grad(out.sum(), inputs, retain_graph=True)
    second = torch.autograd.grad(out.sum(), inputs)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@impls
def test_gradients_of_strided_inputs_and_expanded_grad(impl: str) -> None:
    packed = torch.randn(2, 9, 3, 4, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    out = fk.attention(*packed.unbind(2), causal=True, impl=impl)
    out.sum().backward()  # the gradient of a sum is one number, expanded
    exact = packed.detach().double().requires_grad_()
    oracle.attention(*exact.unbind(2), causal=True).out.sum().backward()
    torch.testing.assert_close(packed.grad.double(), exact.grad, rtol=1e-4, atol=1e-5)


@impls
def test_one_tensor_as_q_k_and_v(impl: str) -> None:
    (x,) = leaves(torch.randn(2, 9, 4, 8, generator=torch.Generator().manual_seed(0)))
    fk.attention(x, x, x, causal=True, impl=impl).square().sum().backward()
    exact = x.detach().double().requires_grad_()
    oracle.attention(exact, exact, exact, causal=True).out.square().sum().backward()
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-4, atol=1e-5)


def test_checkpointing_recomputes_the_same_gradients() -> None:
    inputs = leaves(*qkv(SMALL))
    attend = partial(fk.attention, causal=True)
    want = torch.autograd.grad(attend(*inputs).square().sum(), inputs)
    out = torch.utils.checkpoint.checkpoint(attend, *inputs, use_reentrant=False)
    for g, w in zip(torch.autograd.grad(out.square().sum(), inputs), want, strict=True):
        torch.testing.assert_close(g, w)


@impls
def test_changing_an_input_before_backward_is_an_error(impl: str) -> None:
    q, k, v = qkv(SMALL)
    k.requires_grad_()
    out = fk.attention(q, k, v, impl=impl)
    q.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# Rows that see nothing, sizes of nothing, numbers that are not finite


@impls
@pytest.mark.parametrize("case", ["causal", "window", "bool", "float"])
@pytest.mark.parametrize("sinks", [False, True], ids=["no-sinks", "sinks"])
def test_rows_that_see_nothing_have_zero_gradients(case: str, sinks: bool, impl: str) -> None:
    shape = Shape(b=1, sq=12, sk=5, h=2, hkv=2, d=8)
    q, k, v = leaves(*qkv(shape))
    features: dict[str, Any] = {"sinks": torch.zeros(2)} if sinks else {}
    if case == "causal":
        features["causal"] = True
    elif case == "window":
        features["window"] = (3, 0)
    else:
        keep = torch.zeros(12, 5, dtype=torch.bool)
        keep[7:] = True
        features["mask"] = keep if case == "bool" else torch.zeros(12, 5).masked_fill(~keep, -INF).requires_grad_()
    out, lse = fk.attention(q, k, v, return_lse=True, impl=impl, **features)
    (out.sum() + lse[lse != -INF].sum()).backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))
    assert (q.grad[:, :7] == 0).all() and (q.grad[:, 7:] != 0).any()
    if case == "float":
        assert (features["mask"].grad[:7] == 0).all() and features["mask"].grad.isfinite().all()


@impls
def test_unmasked_lse_gradient_of_a_row_that_sees_nothing_is_zero(impl: str) -> None:
    """Also when the caller sends a gradient into the -inf."""
    q, k, v = leaves(*qkv(Shape(b=1, sq=12, sk=5, h=2, hkv=2, d=8)))
    out, lse = fk.attention(q, k, v, causal=True, return_lse=True, impl=impl)
    grads = torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), torch.ones_like(lse)))
    assert all(g.isfinite().all() for g in grads) and (grads[0][:, :7] == 0).all()


@impls
@pytest.mark.parametrize("shape", [SMALL.but(b=0), SMALL.but(sq=0), SMALL.but(sk=0), SMALL.but(sq=1, sk=1)], ids=str)
def test_sizes_of_nothing(shape: Shape, impl: str) -> None:
    inputs = leaves(*qkv(shape))
    grads = torch.autograd.grad(fk.attention(*inputs, causal=True, impl=impl).sum(), inputs)
    assert all(g.shape == x.shape and g.isfinite().all() for g, x in zip(grads, inputs, strict=True))


@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_poison_that_nobody_sees_reaches_no_gradient(kind: str, which: str) -> None:
    shape = SMALL.but(dv=8)
    keep = torch.ones(shape.sk, dtype=torch.bool)
    keep[10:] = False
    mask = keep if kind == "bool" else torch.zeros(shape.sk).masked_fill(~keep, -INF)
    q, k, v = qkv(shape)
    want = torch.autograd.grad(fk.attention(*(clean := leaves(q, k, v)), mask=mask, impl="torch").sum(), clean)
    {"k": k, "v": v}[which][:, 10:] = float("nan")
    inputs = leaves(q, k, v)
    got = torch.autograd.grad(fk.attention(*inputs, mask=mask, impl="torch").sum(), inputs)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w)


# Ragged batches


@impls
@pytest.mark.parametrize("feature", NO_MASK)
def test_varlen(feature: str, impl: str) -> None:
    shape = SMALL.but(b=3)
    features = keywords(feature, shape)
    check_varlen(ragged(*LENGTHS, shape), impl=impl, also=("sinks",) if "sinks" in features else (), **features)


@pytest.mark.parametrize("lengths", [([], []), ([0, 0], [0, 0]), ([3], [0]), ([0], [3])], ids=str)
def test_varlen_of_nothing(lengths: tuple[list[int], list[int]]) -> None:
    batch = ragged(*lengths, SMALL)
    inputs = leaves(batch.q, batch.k, batch.v)
    out = fk.attention_varlen(*inputs, *batch.args[3:], causal=True, impl="torch")
    grads = torch.autograd.grad(out.sum(), inputs)
    assert all((g == 0).all() for g in grads)


def test_training_a_module_lowers_the_loss() -> None:
    attend = fk.Attention(causal=True)
    project = torch.nn.Linear(8, 3 * 8)
    x, target = torch.randn(2, 16, 8), torch.randn(2, 16, 8)
    optimizer = torch.optim.SGD(project.parameters(), lr=1.0)
    losses = []
    for _ in range(5):
        q, k, v = (y.unflatten(-1, (2, 4)) for y in project(x).chunk(3, -1))
        loss = (attend(q, k, v).flatten(2) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
