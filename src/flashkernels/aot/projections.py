"""Calls of linear layers with what stands around them: one kernel, or torch's product between row-wise ones."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from flashkernels.aot.blank import Recipe, empty
from flashkernels.dispatch import select
from flashkernels.fused import activation, norm
from flashkernels.fused.linear import IMPLS, NORM_IMPLS, Linear, linear_problem
from flashkernels.fused.problem import ACTIVATIONS
from flashkernels.fused.rows import row_problem
from flashkernels.hardware import Gpu


@dataclass(frozen=True)
class Projection:
    """A call of `linear` on x (rows, depth), or with `normed` one of `norm_linear`. The rows decide its tile;
    `wanted.counts` has those that stand for all. Weights are of x's dtype."""

    rows: int
    width: int  # of the output
    depth: int
    dtype: str = "bf16"
    activation: str = ""
    interleaved: bool = False
    bias: bool = False
    normed: bool = False
    backward: bool = False  # the gradients too

    def __post_init__(self) -> None:
        for name in ("rows", "width", "depth"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.activation and self.activation not in ACTIVATIONS:
            raise ValueError(f"activation={self.activation!r} is not one of '', {', '.join(map(repr, ACTIVATIONS))}")


def projection_recipes(work: Projection, gpu: Gpu) -> list[Recipe]:
    kind, gated = ACTIVATIONS.get(work.activation, ("", False))
    n = 2 * work.width if gated else work.width
    x, weight = empty(work.rows, work.depth, dtype=work.dtype), empty(n, work.depth, dtype=work.dtype)
    scale = empty(work.depth, dtype=work.dtype) if work.normed else None
    tensors = (x, scale, weight, empty(n, dtype=work.dtype) if work.bias else None)
    call = Linear(work.activation, work.interleaved, work.normed, 1e-6, False, False, "auto")
    found = _forward(tensors, call, gpu)
    if not work.backward:
        return found
    found += _forward(tensors, call._replace(saved=True), gpu)
    if kind:
        wide, made = empty(work.rows, n, dtype=work.dtype), empty(work.rows, work.width, dtype=work.dtype)
        found += _row(activation, "backward_plan", wide, (made, wide), _activation(call), gpu)
    if work.normed:
        found += _norm(x, scale, True, gpu)  # computed again, for the gradient of the weight
        stats = empty(work.rows)
        kept = (x, None, x, scale, stats.new_empty(0), stats)
        backward = norm.NormBackward(False, False, True, False, "auto")
        found += _row(norm, "backward_plan", x, kept, backward, gpu)
    return found


def _forward(tensors: tuple[Any, ...], call: Linear, gpu: Gpu) -> list[Recipe]:
    """As `fused.matmul` has the steps, where no kernel does all of it."""
    x, scale, weight, bias = tensors
    problem = replace(linear_problem(x, weight, call), device="cuda")
    impl = select(NORM_IMPLS if call.normed else IMPLS, problem, gpu)
    if impl.name == "triton":
        return [lambda: impl.load().forward_plan(problem, gpu, tensors, call)(*tensors)]
    if impl.name == "apart":
        apart = call._replace(normed=False, eps=0.0)
        return _norm(x, scale, call.saved, gpu) + _forward((x, None, weight, bias), apart, gpu)
    if impl.name == "matmul" and call.activation:
        made = empty(x.shape[0], weight.shape[0], dtype=x.dtype)
        return _row(activation, "forward_plan", made, (made,), _activation(call), gpu)
    return []


def _activation(call: Linear) -> activation.Activation:
    return activation.Activation(*ACTIVATIONS[call.activation], "auto")


def _norm(x: Tensor, scale: Tensor | None, stats: bool, gpu: Gpu) -> list[Recipe]:
    call = norm.Norm(False, 1e-6, False, "", stats, "auto")
    return _row(norm, "forward_plan", x, (x, scale, None, None), call, gpu)


def _row(op: Any, plan: str, x: Tensor, tensors: tuple[Any, ...], call: Any, gpu: Gpu) -> list[Recipe]:
    """A step that is a row-wise op over x."""
    problem = replace(row_problem(plan, x, 2), device="cuda")
    impl = select(op.IMPLS, problem, gpu)
    if impl.name != "triton":
        return []
    return [functools.partial(_run, getattr(impl.load(), plan), problem, gpu, tensors, call)]


def _run(plan: Any, problem: Any, gpu: Gpu, tensors: tuple[Any, ...], call: Any) -> None:
    plan(problem, gpu, tensors, call)(*tensors)
