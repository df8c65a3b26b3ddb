"""Gradients of the grouped GEMM in Triton: dX by the forward's tiles, dW by a walk over the rows of an expert."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashkernels.fused.rows import nothing
from flashkernels.fused.triton.blocks import Launch
from flashkernels.hardware import Gpu
from flashkernels.jit.eager import Run
from flashkernels.moe import reference
from flashkernels.moe.combine import Combine, combined
from flashkernels.moe.gemm import GemmBackward
from flashkernels.moe.plan import MOST_EXPERTS, most_tiles, plan_of
from flashkernels.moe.problem import GemmProblem

TILE = tl.constexpr(MOST_EXPERTS)


@triton.jit(do_not_specialize=["experts", "k_tiles"])
def dx_kernel(
    grad_ptr, w_ptr, offsets_ptr, tiles_ptr, tile_offsets_ptr, out_ptr, experts, k_tiles, width, depth,
    stride_we: tl.int64, stride_wn: tl.int64,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """out[p] = grad[p] @ w[e]: BLOCK_N columns of x, a sum over the columns of the output, BLOCK_K at a time."""
    row_tiles = tl.load(tile_offsets_ptr + experts)
    tile = tl.program_id(0)
    if tile >= row_tiles * k_tiles:
        return
    first = tile // (GROUP_M * k_tiles) * GROUP_M
    together = tl.minimum(GROUP_M, row_tiles - first)
    rest = tile - first * k_tiles
    entry = tl.load(tiles_ptr + first + rest % together)
    expert = entry % TILE
    start = tl.load(offsets_ptr + expert) + entry // TILE * BLOCK_M
    end = tl.load(offsets_ptr + expert + 1)
    place = start + tl.arange(0, BLOCK_M)
    column = rest // together * BLOCK_N + tl.arange(0, BLOCK_N)
    grad_rows = grad_ptr + tl.minimum(place, end - 1).to(tl.int64) * width
    w_columns = w_ptr + expert.to(tl.int64) * stride_we + tl.minimum(column, depth - 1)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for n0 in tl.range(0, width, BLOCK_K):
        offs_n = n0 + tl.arange(0, BLOCK_K)
        at = w_columns[None, :] + offs_n.to(tl.int64)[:, None] * stride_wn
        if EVEN:
            dy = tl.load(grad_rows[:, None] + offs_n[None, :])
            w = tl.load(at)
        else:
            dy = tl.load(grad_rows[:, None] + offs_n[None, :], mask=(offs_n < width)[None, :], other=0.0)
            w = tl.load(at, mask=(offs_n < width)[:, None], other=0.0)
        acc = tl.dot(dy, w, acc, input_precision="ieee")
    at = out_ptr + place.to(tl.int64)[:, None] * depth + column[None, :]
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=(place < end)[:, None] & (column < depth)[None, :])


@triton.jit(do_not_specialize=["n_tiles", "k_tiles", "of_token"])
def dw_kernel(
    grad_ptr, x_ptr, permutation_ptr, offsets_ptr, out_ptr, n_tiles, k_tiles, of_token, width, depth,
    stride_x: tl.int64,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_N: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    """out[e] = Σ grad[p]ᵀ x[p] over the places of an expert, BLOCK_M at a time; 0 for one that has none."""
    pid = tl.program_id(0)
    expert = pid // (n_tiles * k_tiles)
    tile = pid % (n_tiles * k_tiles)
    first = tile // (GROUP_N * k_tiles) * GROUP_N
    together = tl.minimum(GROUP_N, n_tiles - first)
    rest = tile - first * k_tiles
    row = (first + rest % together) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = rest // together * BLOCK_K + tl.arange(0, BLOCK_K)
    start = tl.load(offsets_ptr + expert)
    end = tl.load(offsets_ptr + expert + 1)
    rows = tl.minimum(row, width - 1)
    columns = tl.minimum(column, depth - 1)
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for p in tl.range(start, end, BLOCK_M):
        place = p + tl.arange(0, BLOCK_M)
        here = place < end
        source = place
        if GATHER:
            source = tl.load(permutation_ptr + place, mask=here, other=0) // of_token
        dy = tl.load(grad_ptr + place.to(tl.int64)[:, None] * width + rows[None, :], mask=here[:, None], other=0.0)
        x = tl.load(x_ptr + source.to(tl.int64)[:, None] * stride_x + columns[None, :], mask=here[:, None], other=0.0)
        acc = tl.dot(dy.T, x, acc, input_precision="ieee")
    at = out_ptr + (expert.to(tl.int64) * width + row.to(tl.int64))[:, None] * depth + column[None, :]
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=(row < width)[:, None] & (column < depth)[None, :])


@triton.jit(do_not_specialize=["experts", "rows"])
def clear_kernel(out_ptr, offsets_ptr, experts, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """0 in the rows past the last place."""
    first = tl.program_id(0) * ROWS
    end = tl.load(offsets_ptr + experts)
    if first + ROWS <= end:
        return
    place = first + tl.arange(0, ROWS)
    past = (place >= end) & (place < rows)
    for start in tl.range(0, width, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        at = out_ptr + place.to(tl.int64)[:, None] * width + cols[None, :]
        zero = tl.zeros((ROWS, BLOCK), out_ptr.dtype.element_ty)
        tl.store(at, zero, mask=past[:, None] & (cols < width)[None, :])


def fitted(grad: Tensor, permutation: Tensor) -> tuple[Tensor, Tensor]:
    """fp16 of gradients with a wider range, and the power of two they were divided by: 1 unless the largest of them
    would overflow. Neither Inf nor NaN, nor what is past the last place, has a say in it."""
    grad = reference.wide(grad)
    counts = grad.isfinite() & (permutation >= 0)[:, None]
    largest = torch.where(counts, grad, 0.0).abs().amax() if grad.numel() else grad.new_zeros(())
    scale = torch.exp2((torch.frexp(largest).exponent - 15).clamp(min=0).to(grad.dtype))
    return (grad / scale).half(), scale


def backward_plan(problem: GemmProblem, gpu: Gpu | None, tensors: tuple[Any, ...], call: GemmBackward) -> Run:
    grad, x = tensors[:2]
    n, depth, block = problem.n, problem.depth, problem.block
    wide = problem.dtype == "fp32"
    stages = 2 if wide else 3  # rows, then what they lead to, then the product
    warps = 4 if wide or block < 128 else 8
    columns = 32 if wide else 128
    step = 32 if wide else 64
    of_x = {"BLOCK_M": block, "BLOCK_N": columns, "BLOCK_K": step, "GROUP_M": 8, "EVEN": n % step == 0}
    # without wgmma both operands go through registers, and 128 x 128 spill
    tall = columns if gpu is None or gpu.has_wgmma else columns // 2
    of_w = {"BLOCK_M": step, "BLOCK_N": tall, "BLOCK_K": columns, "GROUP_N": 8, "GATHER": call.gemm.gather}
    dx_launch = Launch(dx_kernel, of_x, warps, x.device, stages)
    dw_launch = Launch(dw_kernel, of_w, 4 if wide else 8, x.device, stages)
    k_tiles, n_tiles = -(-depth // columns), -(-n // tall)
    dx_grid = most_tiles(problem.rows, problem.experts, block) * k_tiles
    clear = Launch(clear_kernel, {"ROWS": 16, "BLOCK": 256}, 4, x.device)
    scales = problem.dtype == "fp16" and grad.dtype != x.dtype

    def run(grad: Tensor, x: Tensor, w: Tensor, *plan_tensors: Tensor) -> tuple[Tensor, Tensor]:
        plan = plan_of(plan_tensors, block)
        scale, made = None, x.dtype
        if scales:  # what overflows fp16 may lead to gradients that do not: these are made in fp32
            (grad, scale), made = fitted(grad, plan.permutation), torch.float32
        grad, x = grad.to(x.dtype).contiguous(), x if x.stride(1) == 1 else x.contiguous()
        w = w if w.stride(2) == 1 else w.contiguous()
        dx, dw = nothing(x), nothing(w)
        if call.need_x:
            dx = grad.new_empty((problem.rows, depth), dtype=made)
            if dx_grid:
                dx_launch(
                    dx_grid, (grad, w, plan.offsets, plan.tiles, plan.tile_offsets, dx),
                    (problem.experts, k_tiles, n, depth, w.stride(0), w.stride(1)),
                )  # fmt: skip
            dx = dx if scale is None else dx.mul_(scale)
            if not call.gemm.gather and dx.numel():  # whose places are the rows of x
                clear(-(-problem.rows // 16), (dx, plan.offsets), (problem.experts, problem.rows, depth))
            if call.gemm.gather:
                impl = "triton" if call.gemm.impl == "hopper" else call.gemm.impl  # whose gradients are Triton's
                dx = combined(dx, None, None, plan, Combine(problem.dtype, impl))
        if call.need_w:
            dw = w.new_empty(w.shape, dtype=made)
            if dw.numel():
                dw_launch(
                    problem.experts * n_tiles * k_tiles, (grad, x, plan.permutation, plan.offsets, dw),
                    (n_tiles, k_tiles, plan.k, n, depth, x.stride(0)),
                )  # fmt: skip
            dw = dw if scale is None else dw.mul_(scale)
        return dx.to(x.dtype), dw.to(w.dtype)

    return run
