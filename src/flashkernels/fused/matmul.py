"""A linear layer in steps: torch's own product (cuBLAS on a GPU), and row-wise kernels for what surrounds it."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn.functional import linear

from flashkernels.fused.activation import Activation, forward as activate
from flashkernels.fused.linear import Linear, Product, as_matrix, forward as multiply, packed
from flashkernels.fused.norm import Norm, forward as normalise
from flashkernels.fused.problem import LinearProblem
from flashkernels.hardware import Gpu
from flashkernels.jit.eager import Run


def forward_plan(problem: LinearProblem, gpu: Gpu | None, tensors: tuple[Any, ...], call: Linear) -> Run:
    return _apart(call) if problem.normed else _product(problem, call)


def _product(problem: LinearProblem, call: Linear) -> Run:
    """`matmul`: the product with its bias, then the activation."""
    after = Activation(problem.kind, problem.gated, "auto")

    def run(x: Tensor, norm_weight: Tensor | None, weight: Tensor, bias: Tensor | None) -> Product:
        flat = x.dim() == 2  # of more dimensions, torch may round before it adds the bias
        y = packed(linear(x if flat else as_matrix(x), weight, bias), call)
        y = y if flat else y.view(*x.shape[:-1], weight.shape[0])
        if not call.activation:
            return Product(y, None, None)
        return Product(activate((y,), after), y if call.saved else None, None)

    return run


def _apart(call: Linear) -> Run:
    """`apart`: the norm, then a linear layer, however it is served."""
    before = Norm(False, call.eps, call.rounded, "", call.saved, "auto")
    after = call._replace(normed=False, eps=0.0, rounded=False, impl="auto")

    def run(x: Tensor, norm_weight: Tensor | None, weight: Tensor, bias: Tensor | None) -> Product:
        normed, _, _, _, rstd = normalise((x, norm_weight, None, None), before)
        out, pre, _ = multiply((normed, None, weight, bias), after)
        return Product(out, pre, rstd)

    return run
