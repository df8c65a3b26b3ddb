"""Softmax and its logarithm over the last dimension, of any width."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashkernels.dispatch import Impl, check_impl, leaves_the_cpu, serving
from flashkernels.fused.rows import RowProblem, check_rows, gpu_of, needs_triton, row_problem
from flashkernels.hardware import Gpu
from flashkernels.jit.eager import Plans, Run

# Best first. "auto" takes the first row that does not reject the problem. `torch` is in this file.
IMPLS = (
    Impl("triton", "flashkernels.fused.triton.softmax", rejects=needs_triton, defers=leaves_the_cpu),
    Impl("torch", "flashkernels.fused.softmax"),
)


class Softmax(NamedTuple):
    """What a call asks for, beside its tensor."""

    log: bool
    impl: str


def softmax(x: Tensor, *, impl: str = "auto") -> Tensor:
    """`exp(x - max(x)) / sum(exp(x - max(x)))` over the last dimension, in fp32.

    Args:
        x: (..., N), fp16, bf16, fp32 (fp64 on the `torch` implementation). Rows may be anywhere two strides lead; other
            tensors are copied first.
        impl: "auto", or the name of the one implementation that must serve.

    Returns:
        Like x. A row that is -inf all over, or has +inf or NaN in it, is NaN, as in torch; other rows are not.

    >>> import torch, flashkernels as fk
    >>> fk.softmax(torch.tensor([[0.0, 0.0], [float("-inf"), 5.0]]))
    tensor([[0.5000, 0.5000],
            [0.0000, 1.0000]])
    """
    return _call(x, (False, impl))


def log_softmax(x: Tensor, *, impl: str = "auto") -> Tensor:
    """The natural logarithm of `softmax(x)`, without the loss of small ones.

    >>> import torch, flashkernels as fk
    >>> fk.log_softmax(torch.tensor([[0.0, 1000.0]]))
    tensor([[-1000.,     0.]])
    """
    return _call(x, (True, impl))


def _call(x: Tensor, settings: tuple[bool, str]) -> Tensor:
    """`settings` are those of `Softmax`, which takes longer to make."""
    run = _forward.ready((x,), settings)
    if run is not None:
        found: Tensor = run(x)
        return found
    check_rows("x", x)  # the same errors as eager
    check_impl(settings[1], IMPLS)
    return softmax_op(x, *settings)


def _plan(tensors: tuple[Any, ...], settings: tuple[Any, ...]) -> Run:
    (x,), call = tensors, Softmax(*settings)
    check_rows("x", x)
    problem, gpu = row_problem("log_softmax" if call.log else "softmax", x, 2), gpu_of(x)
    return serving(IMPLS, problem, gpu, call.impl).forward_plan(problem, gpu, tensors, call)


def _plan_backward(tensors: tuple[Any, ...], call: Any) -> Run:
    y = tensors[1]
    problem, gpu = row_problem("log_softmax_backward" if call.log else "softmax_backward", y, 3), gpu_of(y)
    return serving(IMPLS, problem, gpu, call.impl).backward_plan(problem, gpu, tensors, call)


_forward, _backward = Plans(_plan), Plans(_plan_backward)


# --- the `torch` implementation


def forward_plan(problem: RowProblem, gpu: Gpu | None, tensors: tuple[Any, ...], call: Softmax) -> Run:
    def run(x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        return x.new_empty(x.shape).copy_(wide.log_softmax(-1) if call.log else wide.softmax(-1))

    return run


def backward_plan(problem: RowProblem, gpu: Gpu | None, tensors: tuple[Any, ...], call: Softmax) -> Run:
    def run(grad: Tensor, y: Tensor) -> Tensor:
        out = y.new_empty(y.shape)
        y, dy = (x if x.dtype == torch.float64 else x.float() for x in (y, grad))
        if call.log:
            return out.copy_(dy - y.exp() * dy.sum(-1, keepdim=True))
        return out.copy_(y * (dy - (dy * y).sum(-1, keepdim=True)))

    return run


# --- the registered ops: schema, fake and autograd, for torch.compile, torch.export and training


@torch.library.custom_op("flashkernels::softmax", mutates_args=())
def softmax_op(x: Tensor, log: bool, impl: str) -> Tensor:
    return _forward((x,), (log, impl))


@softmax_op.register_fake
def _fake(x: Tensor, log: bool, impl: str) -> Tensor:
    return x.new_empty(x.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *ctx.settings = inputs
    ctx.save_for_backward(output)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return softmax_backward_op(grad, *ctx.saved_tensors, *ctx.settings), None, None


softmax_op.register_autograd(_gradients, setup_context=_setup)


@torch.library.custom_op("flashkernels::softmax_backward", mutates_args=())
def softmax_backward_op(grad: Tensor, y: Tensor, log: bool, impl: str) -> Tensor:
    """The gradient of x, from the output y."""
    return _backward((grad, y), Softmax(log, impl))


@softmax_backward_op.register_fake
def _fake_backward(grad: Tensor, y: Tensor, log: bool, impl: str) -> Tensor:
    return y.new_empty(y.shape)
