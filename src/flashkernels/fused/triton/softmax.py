"""Softmax in Triton: a program takes a few rows whole, or reads one very wide row twice: for its maximum and sum, which
it keeps up to date together, and for its result."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from flashkernels.fused.rows import RowProblem, like, row_view
from flashkernels.fused.softmax import Softmax
from flashkernels.fused.triton.blocks import Launch, blocks, row_starts
from flashkernels.hardware import Gpu
from flashkernels.jit.eager import Run, room

WIDEST = 16384  # elements of a row that the registers of one program hold
LEAST = tl.constexpr(float("-inf"))


@triton.jit
def softmax_of(x, top, total, LOG: tl.constexpr):
    y = x - top[:, None]
    if LOG:
        return y - tl.log(total)[:, None]
    return tl.exp(y) / total[:, None]


@triton.jit(do_not_specialize=["rows"])
def forward_kernel(
    x_ptr, out_ptr, rows: tl.int64, width: tl.int64, x_inner, x_outer_stride: tl.int64, x_inner_stride: tl.int64,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = at < rows
    x_rows = x_ptr + row_starts(at, x_inner, x_outer_stride, x_inner_stride)[:, None]
    out_rows = out_ptr + (at * width)[:, None]
    cols = tl.arange(0, BLOCK)
    if WHOLE:
        inside = here[:, None] & (cols < width)[None, :]
        x = tl.load(x_rows + cols[None, :], mask=inside, other=LEAST).to(tl.float32)
        top = tl.max(x, 1)
        total = tl.sum(tl.exp(x - top[:, None]), 1)
        tl.store(out_rows + cols[None, :], softmax_of(x, top, total, LOG).to(DTYPE), mask=inside)
    else:
        # Each lane has its own maximum and sum; they meet once, at the end.
        tops = tl.full((ROWS, BLOCK), LEAST, tl.float32)
        sums = tl.zeros((ROWS, BLOCK), tl.float32)
        for start in tl.range(0, width, BLOCK):
            inside = here[:, None] & (start + cols < width)[None, :]
            x = tl.load(x_rows + (start + cols)[None, :], mask=inside, other=LEAST).to(tl.float32)
            higher = tl.maximum(tops, x)
            safe = tl.where(higher == LEAST, 0.0, higher)  # a lane that has seen nothing but -inf
            sums = sums * tl.exp(tops - safe) + tl.exp(x - safe)
            tops = higher
        top = tl.max(tops, 1)
        total = tl.sum(sums * tl.exp(tops - top[:, None]), 1)
        for start in tl.range(0, width, BLOCK):
            inside = here[:, None] & (start + cols < width)[None, :]
            x = tl.load(x_rows + (start + cols)[None, :], mask=inside, other=LEAST).to(tl.float32)
            tl.store(out_rows + (start + cols)[None, :], softmax_of(x, top, total, LOG).to(DTYPE), mask=inside)


@triton.jit
def gradient(y, dy, total, LOG: tl.constexpr):
    if LOG:
        return dy - tl.exp(y) * total[:, None]
    return y * (dy - total[:, None])


@triton.jit(do_not_specialize=["rows"])
def backward_kernel(
    dy_ptr, y_ptr, dx_ptr, rows: tl.int64, width: tl.int64,
    g_inner, g_outer_stride: tl.int64, g_inner_stride: tl.int64,
    y_inner, y_outer_stride: tl.int64, y_inner_stride: tl.int64,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, LOG: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = dx_ptr.dtype.element_ty
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = at < rows
    dy_rows = dy_ptr + row_starts(at, g_inner, g_outer_stride, g_inner_stride)[:, None]
    y_rows = y_ptr + row_starts(at, y_inner, y_outer_stride, y_inner_stride)[:, None]
    dx_rows = dx_ptr + (at * width)[:, None]
    cols = tl.arange(0, BLOCK)
    if WHOLE:
        inside = here[:, None] & (cols < width)[None, :]
        y = tl.load(y_rows + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_rows + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        total = tl.sum(dy if LOG else dy * y, 1)
        tl.store(dx_rows + cols[None, :], gradient(y, dy, total, LOG).to(DTYPE), mask=inside)
    else:
        part = tl.zeros((ROWS, BLOCK), tl.float32)
        for start in tl.range(0, width, BLOCK):
            inside = here[:, None] & (start + cols < width)[None, :]
            dy = tl.load(dy_rows + (start + cols)[None, :], mask=inside, other=0.0).to(tl.float32)
            if not LOG:
                dy *= tl.load(y_rows + (start + cols)[None, :], mask=inside, other=0.0).to(tl.float32)
            part += dy
        total = tl.sum(part, 1)
        for start in tl.range(0, width, BLOCK):
            inside = here[:, None] & (start + cols < width)[None, :]
            y = tl.load(y_rows + (start + cols)[None, :], mask=inside, other=0.0).to(tl.float32)
            dy = tl.load(dy_rows + (start + cols)[None, :], mask=inside, other=0.0).to(tl.float32)
            tl.store(dx_rows + (start + cols)[None, :], gradient(y, dy, total, LOG).to(DTYPE), mask=inside)


def forward_plan(problem: RowProblem, gpu: Gpu | None, tensors: tuple[Any, ...], call: Softmax) -> Run:
    (x,) = tensors
    block, view = blocks(problem.width, WIDEST), row_view(x)
    launch = Launch(forward_kernel, block.constants | {"LOG": call.log}, block.warps, x.device)
    grid = -(-problem.rows // block.rows) if problem.width else 0
    numbers = (problem.rows, problem.width, *view.numbers)
    output = room(x.shape, x.dtype, x.device)

    def run(x: Tensor) -> Tensor:
        out = output()
        if grid:
            launch(grid, (view.of(x), out), numbers)
        return out

    return run


def backward_plan(problem: RowProblem, gpu: Gpu | None, tensors: tuple[Any, ...], call: Softmax) -> Run:
    grad, y = tensors
    block, views = blocks(problem.width, WIDEST), (row_view(grad), row_view(y))
    launch = Launch(backward_kernel, block.constants | {"LOG": call.log}, block.warps, y.device)
    grid = -(-problem.rows // block.rows) if problem.width else 0
    numbers = (problem.rows, problem.width, *views[0].numbers, *views[1].numbers)

    def run(grad: Tensor, y: Tensor) -> Tensor:
        dx = like(y)
        if grid:
            launch(grid, (views[0].of(grad), views[1].of(y), dx), numbers)
        return dx

    return run
