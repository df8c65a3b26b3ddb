"""The end of the layer: a token's k results, weighted and added in a fixed order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashkernels.dispatch import Impl, leaves_the_cpu, serving
from flashkernels.fused.rows import DTYPES, RowProblem, gpu_of, needs_triton, nothing
from flashkernels.hardware import Gpu
from flashkernels.jit.eager import Plans, Run, unwatched
from flashkernels.moe import reference
from flashkernels.moe.hopper import combine_tiles as hopper
from flashkernels.moe.plan import Plan

# Best first. "auto" takes the first row that does not reject the problem. `torch` is in this file.
IMPLS = (
    Impl("hopper", "flashkernels.moe.hopper.combine", rejects=hopper.refuses),
    Impl("triton", "flashkernels.moe.triton.combine", rejects=needs_triton, defers=leaves_the_cpu),
    Impl("torch", "flashkernels.moe.combine"),
)
BACKWARD = tuple(impl for impl in IMPLS if impl.name != "hopper")
NAMES = {name: dtype for dtype, name in DTYPES.items()}


@dataclass(frozen=True)
class CombineProblem(RowProblem):
    k: int = 1
    parts: int = 1  # sums over parts of the depth, to be added up
    out: str = ""
    regular: bool = True  # contiguous, steps of 16 bytes; shared like y, and weights in fp32


class Combine(NamedTuple):
    """What a call asks for, beside its tensors."""

    out: str  # dtype
    impl: str
    settled: bool = False  # the kernel ahead, which may still run, has written neither weights nor plan

    @property
    def dtype(self) -> torch.dtype:
        return NAMES[self.out]


def combine(
    y: Tensor, weights: Tensor | None, plan: Plan, *, shared: Tensor | None = None, impl: str = "auto"
) -> Tensor:
    """`out[t] = shared[t] + Σ_j weights[t, j] * y[inverse[t, j]]`, in fp32, j from 0 on; dropped items add nothing.

    Args:
        y: (R, H), results by place, or (parts, R, H), whose sum over the parts they are; fp16, bf16, fp32 (fp64 on the
            `torch` implementation).
        weights: (T, k) fp32, or None for ones.
        plan: of the routing.
        shared: (T, H) like y, what all tokens get, or None.
        impl: "auto", or the name of the one implementation that must serve.

    Returns:
        (T, H), like y. Deterministic bit for bit; gradients flow to y, weights and shared.

    >>> import torch, flashkernels as fk
    >>> plan = fk.moe.regroup(torch.tensor([[1, 0]]), 2)
    >>> fk.moe.combine(torch.tensor([[1.0], [10.0]]), torch.tensor([[0.5, 0.25]]), plan)
    tensor([[5.2500]])
    """
    if not isinstance(y, Tensor) or y.dtype not in DTYPES:
        got = getattr(y, "dtype", type(y).__name__)
        raise TypeError(f"y must be a tensor of {', '.join(map(str, DTYPES))}, got {got}")
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must be a flashkernels.moe.Plan, got {type(plan).__name__}")
    return combined(y, weights, shared, plan, Combine(DTYPES[y.dtype], impl))


def combined(y: Tensor, weights: Tensor | None, shared: Tensor | None, plan: Plan, call: Combine) -> Tensor:
    """As `combine`; y may be (parts, R, H), which are added up, too."""
    tensors = (y, weights, shared, plan.permutation, plan.inverse)
    if unwatched(tensors):
        return forward(tensors, call)
    _check(*tensors)  # the same errors as eager
    whole = y if y.dim() == 2 else y.sum(0)  # gradients know no parts
    return combine_op(whole, *tensors[1:], call.out, call.impl)


def _check(y: Tensor, weights: Tensor | None, shared: Tensor | None, permutation: Tensor, inverse: Tensor) -> None:
    if y.dim() not in (2, 3) or y.shape[-2] != permutation.shape[0]:
        raise ValueError(f"y has shape {tuple(y.shape)}; expected ({permutation.shape[0]}, width), the plan's places")
    for name, other in (("weights", weights), ("shared", shared)):
        if other is not None and (not isinstance(other, Tensor) or other.dtype not in DTYPES):
            got = getattr(other, "dtype", type(other).__name__)
            raise TypeError(f"{name} must be a tensor of {', '.join(map(str, DTYPES))} or None, got {got}")
    if weights is not None and weights.shape != inverse.shape:
        raise ValueError(f"weights has shape {tuple(weights.shape)}; expected {tuple(inverse.shape)}")
    if shared is not None and shared.shape != (inverse.shape[0], y.shape[-1]):
        raise ValueError(f"shared has shape {tuple(shared.shape)}; expected {(inverse.shape[0], y.shape[-1])}")
    for name, other in (("weights", weights), ("shared", shared), ("plan", inverse)):
        if other is not None and other.device != y.device:
            raise ValueError(f"{name}.device={other.device} differs from y.device={y.device}")


def combine_problem(
    y: Tensor, weights: Tensor | None, shared: Tensor | None, inverse: Tensor, call: Combine
) -> CombineProblem:  # fmt: skip
    moved = (y.numel() + inverse.shape[0] * y.shape[-1]) * y.element_size()
    regular = weights is None or (weights.dtype == torch.float32 and weights.is_contiguous())
    for x in (y, shared):
        if x is not None:
            regular = regular and x.dtype == y.dtype and x.is_contiguous() and (x.is_meta or x.data_ptr() % 16 == 0)
    return CombineProblem(
        "combine", inverse.shape[0], y.shape[-1], DTYPES[y.dtype], y.device.type, moved, "", inverse.shape[1],
        y.shape[0] if y.dim() == 3 else 1, call.out, regular and inverse.is_contiguous(),
    )  # fmt: skip


def _plan(tensors: tuple[Any, ...], call: Any) -> Run:
    _check(*tensors)
    y, weights, shared, _, inverse = tensors
    problem, gpu = combine_problem(y, weights, shared, inverse, call), gpu_of(y)
    return serving(IMPLS, problem, gpu, call.impl).combine_plan(problem, gpu, tensors, call)


def _plan_backward(tensors: tuple[Any, ...], call: Any) -> Run:
    _, y, weights, _, inverse = tensors
    problem, gpu = combine_problem(y, weights, None, inverse, call), gpu_of(y)
    impl = "triton" if call.impl == "hopper" else call.impl  # which has no gradients of its own
    return serving(BACKWARD, problem, gpu, impl).backward_plan(problem, gpu, tensors, call)


forward, _backward = Plans(_plan), Plans(_plan_backward)


# --- the `torch` implementation


def combine_plan(problem: RowProblem, gpu: Gpu | None, tensors: tuple[Any, ...], call: Combine) -> Run:
    def run(y: Tensor, weights: Tensor | None, shared: Tensor | None, permutation: Tensor, inverse: Tensor) -> Tensor:
        out = reference.combine(y if y.dim() == 2 else y.sum(0), weights, inverse)
        return (out if shared is None else out + reference.wide(shared)).to(call.dtype)

    return run


def backward_plan(problem: RowProblem, gpu: Gpu | None, tensors: tuple[Any, ...], call: Combine) -> Run:
    def run(
        grad: Tensor, y: Tensor, weights: Tensor | None, permutation: Tensor, inverse: Tensor
    ) -> tuple[Tensor, Tensor]:
        wide, k = reference.wide(grad), inverse.shape[1]
        there = (permutation >= 0)[:, None]
        item = permutation.clamp(min=0).long()
        dy = torch.where(there, wide[item // k], 0.0)
        if weights is None:
            return dy.to(y.dtype), nothing(y)
        dweights = (wide[:, None] * reference.wide(y)[inverse.clamp(min=0).long()]).sum(-1)
        dy = dy * torch.where(there, reference.wide(weights).reshape(-1)[item][:, None], 0.0)
        return dy.to(y.dtype), torch.where(inverse >= 0, dweights, 0.0).to(weights.dtype)

    return run


# --- the registered ops: schema, fake and autograd, for torch.compile, torch.export and training


@torch.library.custom_op("flashkernels::moe_combine", mutates_args=())
def combine_op(
    y: Tensor, weights: Tensor | None, shared: Tensor | None, permutation: Tensor, inverse: Tensor, out: str, impl: str
) -> Tensor:
    return forward((y, weights, shared, permutation, inverse), Combine(out, impl))


@combine_op.register_fake
def _fake(
    y: Tensor, weights: Tensor | None, shared: Tensor | None, permutation: Tensor, inverse: Tensor, out: str, impl: str
) -> Tensor:
    return y.new_empty((inverse.shape[0], y.shape[-1]), dtype=NAMES[out])


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y, weights, shared, permutation, inverse, ctx.out, ctx.impl = inputs
    ctx.shared = None if shared is None else shared.dtype
    ctx.save_for_backward(y, weights, permutation, inverse)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    dy, dweights = combine_backward_op(grad.contiguous(), *ctx.saved_tensors, ctx.out, ctx.impl)
    weighted = ctx.saved_tensors[1] is not None
    return dy, dweights if weighted else None, None if ctx.shared is None else grad.to(ctx.shared), *(None,) * 4


combine_op.register_autograd(_gradients, setup_context=_setup)


@torch.library.custom_op("flashkernels::moe_combine_backward", mutates_args=())
def combine_backward_op(
    grad: Tensor, y: Tensor, weights: Tensor | None, permutation: Tensor, inverse: Tensor, out: str, impl: str
) -> tuple[Tensor, Tensor]:
    """Gradients of y and of the weights."""
    return _backward((grad, y, weights, permutation, inverse), Combine(out, impl))


@combine_backward_op.register_fake
def _fake_backward(
    grad: Tensor, y: Tensor, weights: Tensor | None, permutation: Tensor, inverse: Tensor, out: str, impl: str
) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape), y.new_empty(0) if weights is None else weights.new_empty(weights.shape)
