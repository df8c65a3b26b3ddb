"""Activations, and gated ones on a packed projection: one pass over memory instead of three."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashkernels.dispatch import Impl, check_impl, leaves_the_cpu, serving
from flashkernels.fused.rows import RowProblem, check_choice, check_rows, gpu_of, like, needs_triton, row_problem
from flashkernels.hardware import Gpu
from flashkernels.jit.eager import Plans, Run

APPROXIMATE = {"none": "gelu", "tanh": "gelu_tanh"}
APPROXIMATIONS = tuple(APPROXIMATE)
FAR = 12.0  # beyond it the slope of both GELUs is 0 or 1 in fp32; their formulas overflow far out

# Best first. "auto" takes the first row that does not reject the problem. `torch` is in this file.
IMPLS = (
    Impl("triton", "flashkernels.fused.triton.activation", rejects=needs_triton, defers=leaves_the_cpu),
    Impl("torch", "flashkernels.fused.activation"),
)


class Activation(NamedTuple):
    """What a call asks for: f(x), or f(gate) * up where x is both of them, packed."""

    kind: str  # "silu", "gelu", "gelu_tanh", "relu" or "relu2"
    packed: bool
    impl: str


def swiglu(gate_up: Tensor, *, impl: str = "auto") -> Tensor:
    """`silu(gate) * up`, in fp32.

    Args:
        gate_up: (..., 2 * I), the gate first; fp16, bf16, fp32 (fp64 on the `torch` implementation). Rows may be
            anywhere two strides lead; other tensors are copied first.
        impl: "auto", or the name of the one implementation that must serve.

    Returns:
        (..., I), like gate_up.

    >>> import torch, flashkernels as fk
    >>> fk.swiglu(torch.randn(2, 5, 2 * 11008)).shape
    torch.Size([2, 5, 11008])
    """
    return _call("gate_up", gate_up, ("silu", True, impl))


def geglu(gate_up: Tensor, *, approximate: str = "tanh", impl: str = "auto") -> Tensor:
    """`gelu(gate) * up`; the arguments are those of `swiglu`, and `approximate`: "tanh", or "none" for the exact one.

    >>> import torch, flashkernels as fk
    >>> fk.geglu(torch.tensor([[2.0, 3.0]]), approximate="none")
    tensor([[5.8635]])
    """
    check_choice("approximate", approximate, APPROXIMATIONS)
    return _call("gate_up", gate_up, (APPROXIMATE[approximate], True, impl))


def relu2_glu(gate_up: Tensor, *, impl: str = "auto") -> Tensor:
    """`relu(gate)² * up`; the arguments are those of `swiglu`.

    >>> import torch, flashkernels as fk
    >>> fk.relu2_glu(torch.tensor([[2.0, -1.0, 3.0, 3.0]]))
    tensor([[12.,  0.]])
    """
    return _call("gate_up", gate_up, ("relu2", True, impl))


def gelu(x: Tensor, *, approximate: str = "none", impl: str = "auto") -> Tensor:
    """GELU of every element of x (..., N), in fp32: `x * Φ(x)`, or its approximation by "tanh".

    >>> import torch, flashkernels as fk
    >>> fk.gelu(torch.tensor([-1.0, 0.0, 2.0]))
    tensor([-0.1587,  0.0000,  1.9545])
    """
    check_choice("approximate", approximate, APPROXIMATIONS)
    return _call("x", x, (APPROXIMATE[approximate], False, impl))


def _call(name: str, x: Tensor, settings: tuple[str, bool, str]) -> Tensor:
    """`settings` are those of `Activation`, which takes longer to make."""
    run = forward.ready((x,), settings)
    if run is not None:
        found: Tensor = run(x)
        return found
    _check(name, x, settings[1])  # the same errors as eager
    check_impl(settings[2], IMPLS)
    return activation_op(x, *settings)


def _check(name: str, x: Tensor, packed: bool) -> None:
    check_rows(name, x)
    if packed and x.shape[-1] % 2:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; its last size must be even, gate and up side by side")


def _plan(tensors: tuple[Any, ...], settings: tuple[Any, ...]) -> Run:
    (x,), call = tensors, Activation(*settings)
    _check("gate_up" if call.packed else "x", x, call.packed)
    problem, gpu = row_problem(call.kind, x, 1.5 if call.packed else 2), gpu_of(x)
    return serving(IMPLS, problem, gpu, call.impl).forward_plan(problem, gpu, tensors, call)


def _plan_backward(tensors: tuple[Any, ...], call: Any) -> Run:
    x = tensors[1]
    problem, gpu = row_problem(f"{call.kind}_backward", x, 2.5 if call.packed else 3), gpu_of(x)
    return serving(IMPLS, problem, gpu, call.impl).backward_plan(problem, gpu, tensors, call)


forward, _backward = Plans(_plan), Plans(_plan_backward)


def empty(x: Tensor, packed: bool) -> Tensor:
    """The output, to be filled, contiguous."""
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2)) if packed else like(x)


# --- the `torch` implementation


def forward_plan(problem: RowProblem, gpu: Gpu | None, tensors: tuple[Any, ...], call: Activation) -> Run:
    def run(x: Tensor) -> Tensor:
        wide = _wide(x)
        if not call.packed:
            return empty(x, False).copy_(activated(wide, call.kind)[0])
        gate, up = wide.chunk(2, -1)
        return empty(x, True).copy_(activated(gate, call.kind)[0] * up)

    return run


def backward_plan(problem: RowProblem, gpu: Gpu | None, tensors: tuple[Any, ...], call: Activation) -> Run:
    def run(grad: Tensor, x: Tensor) -> Tensor:
        wide, dy = _wide(x), _wide(grad)
        if not call.packed:
            return x.new_empty(x.shape).copy_(dy * activated(wide, call.kind)[1])
        gate, up = wide.chunk(2, -1)
        value, slope = activated(gate, call.kind)
        return x.new_empty(x.shape).copy_(torch.cat((dy * up * slope, dy * value), -1))

    return run


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def activated(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """f(x) and its slope."""
    if kind == "silu":
        part = torch.sigmoid(x)
        return x * part, part * (1 + x.clamp(-700, 700) * torch.sigmoid(-x))
    if kind == "relu":
        return torch.relu(x), (~(x <= 0)).to(x.dtype)
    if kind == "relu2":
        positive = torch.relu(x)
        return positive * positive, 2 * positive
    near = x.clamp(-FAR, FAR) if x.dtype != torch.float64 else x
    if kind == "gelu":
        part = 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
        return x * part, part + near * torch.exp(-0.5 * near * near) / math.sqrt(2 * math.pi)
    rate = math.sqrt(8 / math.pi)  # 0.5 * (1 + tanh(z / 2)) is sigmoid(z)
    z = rate * (x + 0.044715 * x * x * x)
    part = torch.sigmoid(z)
    return x * part, part + near * part * torch.sigmoid(-z) * rate * (1 + 3 * 0.044715 * near * near)


# --- the registered ops: schema, fake and autograd, for torch.compile, torch.export and training


@torch.library.custom_op("flashkernels::activation", mutates_args=())
def activation_op(x: Tensor, kind: str, packed: bool, impl: str) -> Tensor:
    return forward((x,), (kind, packed, impl))


@activation_op.register_fake
def _fake(x: Tensor, kind: str, packed: bool, impl: str) -> Tensor:
    return empty(x, packed)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *ctx.settings = inputs
    ctx.save_for_backward(x)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return activation_backward_op(grad, *ctx.saved_tensors, *ctx.settings), None, None, None


activation_op.register_autograd(_gradients, setup_context=_setup)


@torch.library.custom_op("flashkernels::activation_backward", mutates_args=())
def activation_backward_op(grad: Tensor, x: Tensor, kind: str, packed: bool, impl: str) -> Tensor:
    return _backward((grad, x), Activation(kind, packed, impl))


@activation_backward_op.register_fake
def _fake_backward(grad: Tensor, x: Tensor, kind: str, packed: bool, impl: str) -> Tensor:
    return x.new_empty(x.shape)
