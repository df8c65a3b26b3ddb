"""Gradients of attention against autograd through the oracle: in fp64 the truth, in plain torch the tolerance."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

import flashkernels as fk

from . import oracle
from .cases import Ragged

INF = float("inf")


def leaves(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in tensors]


def weights_like(*tensors: Tensor) -> list[Tensor]:
    """Fixed gradients of the outputs; a -inf log-sum-exp has none."""
    gen = torch.Generator().manual_seed(9)
    return [
        torch.randn(x.shape, generator=gen, dtype=torch.float64).masked_fill(x.detach().cpu() == -INF, 0.0)
        for x in tensors
    ]


def gradients(outputs: tuple[Tensor, ...], inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """Of a weighted sum of the outputs. Of an empty batch the oracle has no graph, or none of the log-sum-exp: there
    they are zeros."""
    weights = [w.to(x) for w, x in zip(weights_like(*outputs), outputs, strict=True)]
    assert all(x.requires_grad or x.numel() == 0 or x.isneginf().all() for x in outputs)
    graph = [(x, w) for x, w in zip(outputs, weights, strict=True) if x.requires_grad]
    if not graph:
        return tuple(map(torch.zeros_like, inputs))
    made, weighted = zip(*graph, strict=True)
    return torch.autograd.grad(made, inputs, weighted, materialize_grads=True)


def delta_noise(out: Tensor, lse: Tensor, inputs: list[Tensor], layout: str) -> tuple[Tensor, ...]:
    """What roundings of delta = rowsum(dO * O) do to the gradients, in units of the rounding.

    dS = P (dP - delta). Plain torch makes delta of the very P and dP that it is subtracted from, so that where a row
    sees one key (or almost only one) the roundings cancel. A fused backward makes it of the output. Its error in a row
    is that of a sum of the terms dO * O, of either sign; and as delta also has -dL in it, an error of delta does to
    the gradients what a dL of that size does.
    """
    if not lse.requires_grad:
        return tuple(map(torch.zeros_like, inputs))
    terms = (weights_like(out)[0].to(out) * out.detach()).norm(dim=-1)
    if layout == "bshd":
        terms = terms.transpose(-1, -2)
    signs = torch.randint(0, 2, terms.shape, generator=torch.Generator().manual_seed(3)) * 2 - 1
    return torch.autograd.grad(lse, inputs, terms * signs.to(terms), retain_graph=True, materialize_grads=True)


def assert_same_gradients(
    got: tuple[Tensor, ...], plain: tuple[Tensor, ...], want: tuple[Tensor, ...], noise: tuple[Tensor, ...],
    dtype: torch.dtype,
) -> None:  # fmt: skip
    """At most twice the error that autograd makes through plain torch in the same dtype, and a few roundings."""
    for i, (g, p, w, n) in enumerate(zip(got, plain, want, noise, strict=True)):
        scale = w.abs().max() + n.abs() if w.numel() else w
        oracle.assert_close(g, p, w, scale, dtype, name=f"gradient {i}")


def check(
    q: Tensor, k: Tensor, v: Tensor, *, impl: str, with_lse: bool = True, also: tuple[str, ...] = (), **features: Any
) -> tuple[Tensor, ...]:
    """Gradients of q, k, v and of the features named in `also`."""
    ours = partial(fk.attention, return_lse=True, impl=impl)
    return _compare((q, k, v), ours, oracle.naive, oracle.attention, with_lse, also, features)


def check_varlen(
    batch: Ragged, *, impl: str, with_lse: bool = True, also: tuple[str, ...] = (), **features: Any
) -> tuple[Tensor, ...]:
    """The same of a ragged batch."""
    lengths = batch.args[3:]

    def ours(*qkv: Tensor, **features: Any) -> Any:
        return fk.attention_varlen(*qkv, *lengths, return_lse=True, impl=impl, **features)

    def plain(*qkv: Tensor, **features: Any) -> Any:
        return oracle.naive_varlen(*qkv, *lengths[:2], **features)

    def exact(*qkv: Tensor, **features: Any) -> Any:
        return oracle.attention_varlen(*qkv, *lengths[:2], **features)

    return _compare(batch.args[:3], ours, plain, exact, with_lse, also, features)


def _compare(
    qkv: tuple[Tensor, ...], ours: Callable[..., Any], plain: Callable[..., Any], exact: Callable[..., Any],
    with_lse: bool, also: tuple[str, ...], features: dict[str, Any],
) -> tuple[Tensor, ...]:  # fmt: skip
    tensors = (*qkv, *(features[name] for name in also))
    out, lse, inputs = _call(ours, tensors, None, also, features)
    got = gradients((out, lse) if with_lse else (out,), inputs)
    assert_same_gradients(got, *expected(qkv, plain, exact, with_lse, also, features), qkv[0].dtype)
    assert all(g.dtype == x.dtype and g.shape == x.shape for g, x in zip(got, tensors, strict=True))
    return got


def expected(
    qkv: tuple[Tensor, ...], plain: Callable[..., Any] = oracle.naive, exact: Callable[..., Any] = oracle.attention,
    with_lse: bool = True, also: tuple[str, ...] = (), features: dict[str, Any] | None = None,
) -> tuple[tuple[Tensor, ...], ...]:  # fmt: skip
    """Of the gradients: what plain torch makes of them, the truth, and their noise."""
    features = features or {}
    tensors = (*qkv, *(features[name] for name in also))
    near, truth = (_call(f, tensors, dtype, also, features) for f, dtype in ((plain, None), (exact, torch.float64)))
    # the slopes have none: the fused backward takes delta's error back there, where distances would multiply it
    noise = tuple(
        torch.zeros_like(n) if name == "alibi_slopes" else n
        for name, n in zip(("q", "k", "v", *also), delta_noise(*truth, features.get("layout", "bshd")), strict=True)
    )
    made = (gradients((out, lse) if with_lse else (out,), inputs) for out, lse, inputs in (near, truth))
    return *made, noise


def _call(
    function: Callable[..., Any], tensors: tuple[Tensor, ...], dtype: torch.dtype | None, also: tuple[str, ...],
    features: dict[str, Any],
) -> tuple[Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """Output, log-sum-exp, and the leaves that they were made of."""
    inputs = leaves(*(x if dtype is None else x.to(dtype) for x in tensors))
    out, lse = function(*inputs[:3], **{**features, **dict(zip(also, inputs[3:], strict=True))})[:2]
    return out, lse, inputs
