"""Activations in Triton: a program takes a few rows, and of wide ones a part."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from flashkernels.fused import activation
from flashkernels.fused.activation import Activation
from flashkernels.fused.rows import RowProblem, like, row_view
from flashkernels.fused.triton.blocks import Launch, piece, pieces, row_starts
from flashkernels.hardware import Gpu
from flashkernels.jit.eager import Run, room

FAR = tl.constexpr(activation.FAR)
ROOT_HALF = tl.constexpr(0.7071067811865476)
DENSITY = tl.constexpr(0.3989422804014327)  # 1 / sqrt(2 π)
RATE = tl.constexpr(1.5957691216057308)  # sqrt(8 / π)
CUBIC = tl.constexpr(0.044715)


@triton.jit
def activated(x, KIND: tl.constexpr):
    """f(x) in fp32."""
    if KIND == "silu":
        y = x / (1 + tl.exp(-x))
    elif KIND == "relu":
        y = tl.where(x < 0, 0.0, x)  # NaN stays
    elif KIND == "relu2":
        y = tl.where(x < 0, 0.0, x * x)
    elif KIND == "gelu":
        y = 0.5 * x * (1 + tl.erf(x * ROOT_HALF))
    else:
        y = x / (1 + tl.exp((x + CUBIC * x * x * x) * -RATE))
    return y


@triton.jit
def kept(x, FAREST: tl.constexpr):
    """x between -FAREST and FAREST; NaN stays."""
    x = tl.maximum(x, -FAREST, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(x, FAREST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def sigmoids(z):
    """sigmoid(z) and sigmoid(-z); 1 - sigmoid(z) would lose the second."""
    power = tl.exp(-kept(z, 87.0))  # further out it overflows
    part = 1 / (1 + power)
    return part, power * part


@triton.jit
def slope(x, KIND: tl.constexpr):
    """The derivative of f at x."""
    if KIND == "silu":
        part, other = sigmoids(x)
        y = part * (1 + kept(x, 87.0) * other)
    elif KIND == "relu":
        y = tl.where(x <= 0, 0.0, 1.0)
    elif KIND == "relu2":
        y = tl.where(x < 0, 0.0, 2 * x)
    else:
        near = kept(x, FAR)
        if KIND == "gelu":
            y = 0.5 * (1 + tl.erf(x * ROOT_HALF)) + near * tl.exp(-0.5 * near * near) * DENSITY
        else:
            part, other = sigmoids(RATE * (near + CUBIC * near * near * near))
            y = part + near * part * other * RATE * (1 + 3 * CUBIC * near * near)
    return y


@triton.jit(do_not_specialize=["rows"])
def forward_kernel(
    x_ptr, out_ptr, rows: tl.int64, width: tl.int64, x_inner, x_outer_stride: tl.int64, x_inner_stride: tl.int64,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    at, cols, inside = piece(rows, width, ROWS, BLOCK)
    x_at = x_ptr + row_starts(at, x_inner, x_outer_stride, x_inner_stride)[:, None] + cols
    y = activated(tl.load(x_at, mask=inside, other=0.0).to(tl.float32), KIND)
    if PACKED:
        y *= tl.load(x_at + width, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + (at * width)[:, None] + cols, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def backward_kernel(
    dy_ptr, x_ptr, dx_ptr, rows: tl.int64, width: tl.int64, g_inner, g_outer_stride: tl.int64, g_inner_stride: tl.int64,
    x_inner, x_outer_stride: tl.int64, x_inner_stride: tl.int64,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    at, cols, inside = piece(rows, width, ROWS, BLOCK)
    x_at = x_ptr + row_starts(at, x_inner, x_outer_stride, x_inner_stride)[:, None] + cols
    dy_at = dy_ptr + row_starts(at, g_inner, g_outer_stride, g_inner_stride)[:, None] + cols
    x = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dy_at, mask=inside, other=0.0).to(tl.float32)
    dx = dy * slope(x, KIND)
    dx_at = dx_ptr + (at * (2 * width if PACKED else width))[:, None] + cols
    if PACKED:
        dx *= tl.load(x_at + width, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_at + width, (dy * activated(x, KIND)).to(dx_ptr.dtype.element_ty), mask=inside)
    tl.store(dx_at, dx.to(dx_ptr.dtype.element_ty), mask=inside)


def forward_plan(problem: RowProblem, gpu: Gpu | None, tensors: tuple[Any, ...], call: Activation) -> Run:
    (x,) = tensors
    width, view = problem.width // 2 if call.packed else problem.width, row_view(x)
    block = pieces(width)
    launch = Launch(forward_kernel, constants(block.sizes, call), block.warps, x.device)
    grid, numbers = block.grid(problem.rows, width), (problem.rows, width, *view.numbers)
    output = room((*x.shape[:-1], width), x.dtype, x.device)

    def run(x: Tensor) -> Tensor:
        out = output()
        if grid:
            launch(grid, (view.of(x), out), numbers)
        return out

    return run


def backward_plan(problem: RowProblem, gpu: Gpu | None, tensors: tuple[Any, ...], call: Activation) -> Run:
    grad, x = tensors
    width, views = problem.width // 2 if call.packed else problem.width, (row_view(grad), row_view(x))
    block = pieces(width)
    launch = Launch(backward_kernel, constants(block.sizes, call), block.warps, x.device)
    grid = block.grid(problem.rows, width)
    numbers = (problem.rows, width, *views[0].numbers, *views[1].numbers)

    def run(grad: Tensor, x: Tensor) -> Tensor:
        dx = like(x)
        if grid:
            launch(grid, (views[0].of(grad), views[1].of(x), dx), numbers)
        return dx

    return run


def constants(sizes: dict[str, Any], call: Activation) -> dict[str, Any]:
    return sizes | {"KIND": call.kind, "PACKED": call.packed}
