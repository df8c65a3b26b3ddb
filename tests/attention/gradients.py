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


def assert_same_gradients(
    got: tuple[Tensor, ...], plain: tuple[Tensor, ...], want: tuple[Tensor, ...], dtype: torch.dtype
) -> None:
    """At most twice the error that autograd makes through plain torch in the same dtype, and a few roundings."""
    for i, (g, p, w) in enumerate(zip(got, plain, want, strict=True)):
        oracle.assert_close(g, p, w, w.abs().max().expand_as(w) if w.numel() else w, dtype, name=f"gradient {i}")


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

    def run(function: Callable[..., Any], dtype: torch.dtype | None) -> tuple[Tensor, ...]:
        inputs = leaves(*(x if dtype is None else x.to(dtype) for x in tensors))
        out, lse = function(*inputs[:3], **{**features, **dict(zip(also, inputs[3:], strict=True))})[:2]
        return gradients((out, lse) if with_lse else (out,), inputs)

    got = run(ours, None)
    assert_same_gradients(got, run(plain, None), run(exact, torch.float64), qkv[0].dtype)
    assert all(g.dtype == x.dtype and g.shape == x.shape for g, x in zip(got, tensors, strict=True))
    return got
