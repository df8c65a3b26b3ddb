"""Calls of a layer of experts: the plans of its parts run after one another, as `moe.layer` has them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flashkernels.aot.blank import Recipe, empty
from flashkernels.dispatch import Impl, select
from flashkernels.hardware import Gpu
from flashkernels.jit.notes import Noted
from flashkernels.moe.combine import BACKWARD as COMBINE_BACKWARD, IMPLS as COMBINE, Combine, combine_problem
from flashkernels.moe.gemm import ALPHA, BACKWARD, IMPLS as GEMM, LIMIT, Gemm, GemmBackward, gemm_problem, rounds_itself
from flashkernels.moe.plan import MOST_EXPERTS, MOST_K, Plan, block_rows, plan_of, sizes
from flashkernels.moe.problem import ACTIVATIONS, FORMATS, GATED, RouteProblem
from flashkernels.moe.route import IMPLS as ROUTE, SCORES, Call
from flashkernels.moe.rows import IMPLS as ROUND, Rounding, rounding_problem
from flashkernels.moe.weights import ROUNDED, quantise, rounded_rows


@dataclass(frozen=True)
class Experts:
    """A call of `moe.layer` on so many tokens, which decide its tiles; `wanted.counts` has those that stand for all."""

    tokens: int
    hidden: int
    inner: int
    experts: int
    k: int
    dtype: str = "bf16"  # of tokens, weights and router
    weights: str = ""  # a format of `moe.quantise`
    activation: str = "swiglu"
    interleaved: bool = False
    bias: bool = False  # of both products
    score: str = "softmax"
    renormalise: bool = True
    choice_bias: bool = False
    groups: int = 1
    top_groups: int = 1
    shared: bool = False  # experts that see every token
    backward: bool = False  # the gradients too

    def __post_init__(self) -> None:
        for name in ("tokens", "hidden", "inner", "experts", "k"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.experts > MOST_EXPERTS:
            raise ValueError(f"experts={self.experts} is over {MOST_EXPERTS}")
        if self.k > min(self.experts, MOST_K):
            raise ValueError(f"k={self.k} is over {min(self.experts, MOST_K)} with {self.experts} experts")
        for name, allowed in (("activation", ACTIVATIONS), ("weights", ("", *FORMATS)), ("score", SCORES)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {', '.join(map(repr, allowed))}")
        if self.weights and self.backward:
            raise ValueError(f"backward=True: weights={self.weights!r} have no gradients")


def expert_recipes(work: Experts, gpu: Gpu) -> list[Recipe]:
    layer = Layer(work, gpu)
    if select(ROUTE, layer.routing, gpu).name == "torch":
        return []
    return [layer.infer, *([layer.train] if work.backward else [])]


class Layer:
    """The layer on tensors without memory. What torch computes in it is passed over: its result has the same shape."""

    def __init__(self, work: Experts, gpu: Gpu) -> None:
        self.work, self.gpu = work, gpu
        wide = work.inner * (2 if work.activation in GATED else 1)
        self.x = empty(work.tokens, work.hidden, dtype=work.dtype)
        self.w_up = empty(work.experts, wide, work.hidden, dtype=work.dtype)
        self.w_down = empty(work.experts, work.hidden, work.inner, dtype=work.dtype)
        self.routing = RouteProblem(work.tokens, work.experts, work.k, work.dtype, "cuda", groups=work.groups)

    def infer(self) -> None:
        plan, shares = self.route(apart=False)
        h = self.product(self.x, self.w_up, plan, True, self.work.activation, False)
        y = self.product(h, self.w_down, plan, False, "none", True)
        self.combine(y, shares, plan, self.work.shared, settled=True)

    def train(self) -> None:
        """As autograd goes through it: products are not split, and the activation between them is a call of its own."""
        plan, shares = self.route(apart=True)
        work = self.work
        pre = self.product(self.x, self.w_up, plan, True, "none", False)
        h = empty(plan.rows, work.inner, dtype=work.dtype)
        y = self.product(h, self.w_down, plan, False, "none", False)
        self.combine(y, shares, plan, work.shared)
        tensors = (self.x, y, shares, plan.permutation, plan.inverse)
        call = Combine(work.dtype, "auto")
        problem = replace(combine_problem(y, shares, None, plan.inverse, call), device="cuda")
        self.run(COMBINE_BACKWARD, problem, "backward_plan", tensors, call)
        self.gradients(y, h, self.w_down, plan, False)
        self.gradients(pre, self.x, self.w_up, plan, True)
        self.combine(empty(plan.rows, work.hidden, dtype=work.dtype), None, plan, False)  # gradients of x, by token

    def route(self, apart: bool) -> tuple[Plan, Tensor]:
        work = self.work
        block = block_rows(work.tokens * work.k, work.experts)
        call = Call(
            work.k, work.score == "sigmoid", work.renormalise, work.groups, work.top_groups, True, 1.0, 0, work.experts,
            block, "auto", apart,
        )  # fmt: skip
        logits = empty(work.tokens, work.experts, dtype=work.dtype)
        tensors = (logits, empty(work.experts) if work.choice_bias else None, None)
        found = self.run(ROUTE, self.routing, "route_plan", tensors, call)
        if found is None:
            shapes = sizes(work.tokens, work.k, work.experts, block).values()
            parts = [empty(*shape, dtype=torch.int32) for shape in shapes]
            return plan_of(parts, block), empty(work.tokens, work.k)
        shares, _, *parts = found
        return plan_of(parts, block), shares

    def product(self, x: Tensor, w: Tensor, plan: Plan, gather: bool, activation: str, splittable: bool) -> Tensor:
        form, group, scale = self.work.weights, 0, None
        bias = empty(*w.shape[:2], dtype=self.work.dtype) if self.work.bias else None
        depth = w.shape[2]
        if form:
            w, scale, _, _, group = quantise(w, form)
        call = self.gemm(plan, gather, activation, depth, splittable)._replace(weights=form, group=group)
        tensors: tuple[Any, ...] = (x, w, bias, None, None, scale, *plan[:6])
        problem = replace(gemm_problem(tensors, call), device="cuda")
        if form in ROUNDED and not rounds_itself(problem, self.gpu, call):
            small = replace(rounding_problem(x, form), device="cuda")
            rounded = self.run(ROUND, small, "rounding_plan", (x,), Rounding(form, "auto"))
            x, x_scale = rounded_rows(x, form) if rounded is None else rounded
            tensors = (x, w, bias, None, x_scale, scale, *plan[:6])
            problem = replace(gemm_problem(tensors, call), device="cuda")
        out = self.run(GEMM, problem, "gemm_plan", tensors, call)
        return empty(problem.rows, problem.width, dtype=self.work.dtype) if out is None else out

    def gradients(self, grad: Tensor, x: Tensor, w: Tensor, plan: Plan, gather: bool) -> None:
        call = self.gemm(plan, gather, "none", w.shape[2], False)
        problem = replace(gemm_problem((x, w, None, None, None, None, *plan[:6]), call), device="cuda")
        tensors = (grad, x, w, *plan[:6])
        self.run(BACKWARD, problem, "backward_plan", tensors, GemmBackward(call, True, True))

    def combine(self, y: Tensor, shares: Tensor | None, plan: Plan, shared: bool, settled: bool = False) -> None:
        tensors = (y, shares, self.x if shared else None, plan.permutation, plan.inverse)
        call = Combine(self.work.dtype, "auto", settled)
        problem = replace(combine_problem(*tensors[:3], plan.inverse, call), device="cuda")
        self.run(COMBINE, problem, "combine_plan", tensors, call)

    def gemm(self, plan: Plan, gather: bool, activation: str, depth: int, splittable: bool) -> Gemm:
        mixed = self.work.interleaved and gather
        numbers = (ALPHA, LIMIT, "", 0, depth, plan.block, self.work.dtype, splittable, "auto")
        return Gemm(gather, activation, mixed, *numbers)

    def run(self, impls: Sequence[Impl], problem: Any, plan: str, tensors: tuple[Any, ...], call: Any) -> Any:
        """What one part returns, or None where torch or CUDA C++ serves it, which compiles in the plan."""
        impl = select(impls, problem, self.gpu)
        if impl.name == "torch":
            return None
        with contextlib.suppress(Noted):
            run = getattr(impl.load(), plan)(problem, self.gpu, tensors, call)
            return None if impl.name == "hopper" else run(*tensors)
        return None
