"""Rows rounded to 8 bits in Triton."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashkernels.fused.rows import RowProblem
from flashkernels.fused.triton.blocks import Launch
from flashkernels.fused.triton.norm import quantised, scale_of
from flashkernels.hardware import Gpu
from flashkernels.jit.eager import Run
from flashkernels.moe.rows import Rounding
from flashkernels.moe.triton.early import launched_early, starts_early
from flashkernels.moe.weights import BLOCK, DTYPES, MOST

WIDEST = 16384  # elements of a row that the registers of one program hold


@triton.jit(do_not_specialize=["rows"])
def block_kernel(
    x_ptr, out_ptr, scale_ptr, rows, width, blocks, stride_x: tl.int64,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, MOST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of a few rows, each with its own scale: 128 of "fp8_block", or a whole row."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    pid = tl.program_id(0)
    row = pid // blocks * ROWS + tl.arange(0, ROWS)
    cols = pid % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (cols < width)[None, :]
    x = tl.load(x_ptr + row.to(tl.int64)[:, None] * stride_x + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = scale_of(tl.max(tl.abs(x), 1), tl.sum(x - x, 1), MOST)
    tl.store(scale_ptr + row.to(tl.int64) * blocks + pid % blocks, scale, mask=row < rows)
    at = out_ptr + row.to(tl.int64)[:, None] * width + cols[None, :]
    tl.store(at, quantised(x, scale, out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def wide_kernel(
    x_ptr, out_ptr, scale_ptr, rows, width, stride_x: tl.int64, BLOCK: tl.constexpr, MOST: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One row that does not fit the registers, twice over."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros((1, BLOCK), tl.float32)
    poison = tl.zeros((1, BLOCK), tl.float32)
    for start in tl.range(0, width, BLOCK):
        cols = (start + tl.arange(0, BLOCK))[None, :]
        x = tl.load(x_ptr + row * stride_x + cols, mask=cols < width, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(x))
        poison += x - x
    scale = scale_of(tl.max(largest, 1), tl.sum(poison, 1), MOST)
    tl.store(scale_ptr + row + tl.arange(0, 1), scale)
    for start in tl.range(0, width, BLOCK):
        cols = (start + tl.arange(0, BLOCK))[None, :]
        x = tl.load(x_ptr + row * stride_x + cols, mask=cols < width, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * width + cols, quantised(x, scale, out_ptr.dtype.element_ty), mask=cols < width)


def rounding_plan(problem: RowProblem, gpu: Gpu | None, tensors: tuple[Any, ...], call: Rounding) -> Run:
    (x,) = tensors
    rows, width = problem.rows, problem.width
    most = MOST[call.format]
    by_block = call.format == "fp8_block"
    whole = triton.next_power_of_2(max(16, width))
    wide = not by_block and whole > WIDEST
    block = BLOCK if by_block else 4096 if wide else whole
    tall = max(1, 2048 // block)
    blocks = -(-width // BLOCK) if by_block else 1
    early = starts_early(gpu)
    fixed = ({} if wide else {"ROWS": tall}) | {"BLOCK": block, "MOST": most, "EARLY": early}
    warps = max(1, min(16, tall * block // 512))
    launch = Launch(wide_kernel if wide else block_kernel, fixed, warps, x.device)
    launched_early(launch, early)
    grid = rows if wide else -(-rows // tall) * blocks

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        out = x.new_empty(x.shape, dtype=DTYPES[call.format])
        scale = x.new_empty((rows, blocks) if by_block else rows, dtype=torch.float32)
        if width == 0:
            return out, scale.fill_(1.0)
        x = x if x.stride(1) == 1 else x.contiguous()
        if grid:
            launch(grid, (x, out, scale), (rows, width, *(() if wide else (blocks,)), x.stride(0)))
        return out, scale

    return run
