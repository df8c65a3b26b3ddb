"""A linear layer in Triton: one product, before it a folded norm, after it bias and activation on the accumulator."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from flashkernels.fused.linear import Linear, as_matrix, empty
from flashkernels.fused.problem import LinearProblem
from flashkernels.fused.triton import linear_tiles as tiles
from flashkernels.fused.triton.activation import activated
from flashkernels.fused.triton.blocks import Launch
from flashkernels.fused.triton.linear_tiles import LinearTile
from flashkernels.fused.triton.operands import across, load_part, load_rows
from flashkernels.hardware import GPUS, Gpu
from flashkernels.jit.eager import Run, room


@triton.jit
def weight_rows(n0, half, width, BOTH: tl.constexpr, INTERLEAVED: tl.constexpr, N: tl.constexpr):
    """Rows of the weight that make N columns of the output from n0 on: of one half (0 the gate, 1 up), or of both."""
    if BOTH:
        index = tl.arange(0, 2 * N)
        if INTERLEAVED:
            rows = tl.minimum(2 * n0 + index, 2 * width - 1)
        else:
            rows = tl.minimum(n0 + index % N, width - 1) + index // N * width
    else:
        rows = tl.minimum(n0 + tl.arange(0, N), width - 1)
        rows = 2 * rows + half if INTERLEAVED else rows + half * width
    return rows


@triton.jit
def load_weight(
    w_ptr, w_desc, rows, n0, half, k0, depth, stride_w,
    WIDE: tl.constexpr, K: tl.constexpr, INTERLEAVED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """[WIDE, K] of the weight."""
    if w_desc is not None:
        w = w_desc.load([n0, half, k0] if INTERLEAVED else [half, n0, k0]).reshape(WIDE, K)
    else:
        offs_k = k0 + tl.arange(0, K)
        at = w_ptr + rows.to(tl.int64)[:, None] * stride_w + offs_k[None, :]
        w = tl.load(at) if EVEN else load_part(at, (offs_k < depth)[None, :])
    return w


@triton.jit
def add_product(acc, x, w, SWAP: tl.constexpr):
    return tl.dot(w if SWAP else x, x.T if SWAP else w.T, acc, input_precision="ieee")


@triton.jit
def dressed(acc, scale, weight_row, bias_ptr, NORMED: tl.constexpr, SWAP: tl.constexpr):
    """The sum with the norm's scale and the bias."""
    if NORMED:
        down, _ = across(scale, scale, SWAP)
        acc *= down
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + weight_row).to(tl.float32)
        _, right = across(bias, bias, SWAP)
        acc += right
    return acc


@triton.jit
def store_part(y, ptr, row, column, rows, width, stride, SWAP: tl.constexpr):
    down, right = across(row.to(tl.int64) * stride, column, SWAP)
    here, there = across(row < rows, column < width, SWAP)
    tl.store(ptr + down + right, y.to(ptr.dtype.element_ty), mask=here & there)


@triton.jit
def store_out(y, out_ptr, out_desc, row, column, m0, n0, rows, width, SWAP: tl.constexpr):
    if out_desc is None:
        store_part(y, out_ptr, row, column, rows, width, width, SWAP)
    else:
        out_desc.store([m0, n0], y.to(out_ptr.dtype.element_ty))


@triton.jit
def finish(
    acc, rstd, bias_ptr, out_ptr, out_desc, pre_ptr, row, m0, n0, rows, width,
    N: tl.constexpr, KIND: tl.constexpr, NORMED: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """What is not gated: N columns from n0 on."""
    column = n0 + tl.arange(0, N)
    y = dressed(acc, rstd, tl.minimum(column, width - 1), bias_ptr, NORMED, SWAP)
    if pre_ptr is not None:
        store_part(y, pre_ptr, row, column, rows, width, width, SWAP)
    if KIND != "":
        y = activated(y, KIND)
    store_out(y, out_ptr, out_desc, row, column, m0, n0, rows, width, SWAP)


@triton.jit(do_not_specialize=["rows", "tiles_m", "tiles_n", "programs"])
def linear_kernel(
    x_ptr, x_desc, norm_ptr, w_ptr, w_desc, bias_ptr, out_ptr, out_desc, pre_ptr, rstd_ptr,
    rows, width, depth, tiles_m, tiles_n, programs, stride_x: tl.int64, stride_w: tl.int64, eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SWAP: tl.constexpr,
    KIND: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, NORMED: tl.constexpr, EVEN: tl.constexpr,
    HALVED: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    BOTH: tl.constexpr = GATED and not SWAP
    TWO: tl.constexpr = GATED and SWAP  # accumulators: gate and up are rows of other threads
    WIDE: tl.constexpr = 2 * BLOCK_N if BOTH else BLOCK_N
    for index in tl.range(tl.program_id(0), tiles_m * tiles_n, programs, flatten=FLATTEN):
        first = index // (GROUP_M * tiles_n) * GROUP_M
        together = tl.minimum(GROUP_M, tiles_m - first)
        rest = index - first * tiles_n
        m0 = (first + rest % together) * BLOCK_M
        n0 = rest // together * BLOCK_N

        row = m0 + tl.arange(0, BLOCK_M)
        # Of rows and columns that are not there, the last one that is: nothing is stored of them.
        x_rows = x_ptr + tl.minimum(row, rows - 1).to(tl.int64) * stride_x
        gate_rows = weight_rows(n0, 0, width, BOTH, INTERLEAVED, BLOCK_N)
        up_rows = weight_rows(n0, 1, width, BOTH, INTERLEAVED, BLOCK_N)

        acc = tl.zeros((WIDE, BLOCK_M) if SWAP else (BLOCK_M, WIDE), tl.float32)
        acc2 = acc
        squares = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
        for i in tl.range(tl.cdiv(depth, BLOCK_K)):
            k0 = i * BLOCK_K
            x = load_rows(x_desc, x_rows, m0, k0, depth, BLOCK_K, EVEN)
            if NORMED:
                exact = x.to(tl.float32)
                squares += exact * exact
                if norm_ptr is not None:
                    offs_k = k0 + tl.arange(0, BLOCK_K)
                    scale = tl.load(norm_ptr + offs_k, mask=offs_k < depth, other=0.0).to(tl.float32)
                    x = (exact * scale[None, :]).to(x.dtype)
            w = load_weight(w_ptr, w_desc, gate_rows, n0, 0, k0, depth, stride_w, WIDE, BLOCK_K, INTERLEAVED, EVEN)
            acc = add_product(acc, x, w, SWAP)
            if TWO:
                w = load_weight(w_ptr, w_desc, up_rows, n0, 1, k0, depth, stride_w, WIDE, BLOCK_K, INTERLEAVED, EVEN)
                acc2 = add_product(acc2, x, w, SWAP)

        rstd = tl.full((BLOCK_M,), 1.0, tl.float32)
        if NORMED:
            rstd = tl.div_rn(rstd, tl.sqrt_rn(tl.sum(squares, 1) / depth + eps))
            if rstd_ptr is not None and n0 == 0:
                tl.store(rstd_ptr + row, rstd, mask=row < rows)
        if GATED:
            y = dressed(acc, rstd, gate_rows, bias_ptr, NORMED, SWAP)
            if TWO:
                up = dressed(acc2, rstd, up_rows, bias_ptr, NORMED, SWAP)
            elif INTERLEAVED:
                y, up = tl.split(y.reshape(BLOCK_M, BLOCK_N, 2))
            else:
                y, up = tl.split(y.reshape(BLOCK_M, 2, BLOCK_N).permute(0, 2, 1))
            column = n0 + tl.arange(0, BLOCK_N)
            if pre_ptr is not None:
                store_part(y, pre_ptr, row, column, rows, width, 2 * width, SWAP)
                store_part(up, pre_ptr + width, row, column, rows, width, 2 * width, SWAP)
            store_out(activated(y, KIND) * up, out_ptr, out_desc, row, column, m0, n0, rows, width, SWAP)
        elif HALVED:
            left, right = tl.split(acc.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1))
            finish(left, rstd, bias_ptr, out_ptr, out_desc, pre_ptr, row, m0, n0, rows, width,
                   BLOCK_N // 2, KIND, NORMED, SWAP)  # fmt: skip
            finish(right, rstd, bias_ptr, out_ptr, out_desc, pre_ptr, row, m0, n0 + BLOCK_N // 2, rows, width,
                   BLOCK_N // 2, KIND, NORMED, SWAP)  # fmt: skip
        else:
            finish(acc, rstd, bias_ptr, out_ptr, out_desc, pre_ptr, row, m0, n0, rows, width,
                   BLOCK_N, KIND, NORMED, SWAP)  # fmt: skip


def constants(problem: LinearProblem, tile: LinearTile, call: Linear, flatten: bool) -> dict[str, Any]:
    """The compile-time values of `linear_kernel`, in its order. `flatten`: loads of the next tile begin before a tile
    ends, which needs all of them to be TMA's."""
    return {
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "GROUP_M": tile.group,
        "SWAP": tile.swap, "KIND": problem.kind, "GATED": problem.gated,
        "INTERLEAVED": call.interleaved and problem.gated, "NORMED": problem.normed,
        "EVEN": problem.depth % tile.block_k == 0, "HALVED": tiles.stored_columns(tile, problem) < tile.block_n,
        "FLATTEN": flatten,
    }  # fmt: skip


def weight_box(problem: LinearProblem, tile: LinearTile, call: Linear, step: int) -> tuple[Any, ...]:
    """Shape, strides and block of the weight as TMA reads it: (2, I, K), or (I, 2, K) where interleaved; (1, N, K)."""
    n, depth = problem.width, problem.depth
    if not problem.gated:
        return (1, n, depth), (n * step, step, 1), [1, tile.block_n, tile.block_k]
    halves = 1 if tile.swap else 2
    if call.interleaved:
        return (n, 2, depth), (2 * step, step, 1), [tile.block_n, halves, tile.block_k]
    return (2, n, depth), (n * step, step, 1), [halves, tile.block_n, tile.block_k]


def addressable(x: Tensor) -> bool:
    """Whether TMA can read x: it is not empty, and rows are contiguous, in steps of 16 bytes."""
    aligned = x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0
    return x.numel() > 0 and x.stride(1) == 1 and aligned and x.stride(0) >= x.shape[1]


def lies_in_rows(x: Tensor) -> bool:
    """Whether x needs neither a copy nor another shape: one stride leads to every row."""
    return x.is_contiguous() or (x.dim() == 2 and x.stride(1) == 1)


def dense(x: Tensor) -> Tensor:
    """x as a matrix with contiguous rows."""
    x = as_matrix(x)
    return x if x.stride(1) == 1 or x.shape[1] <= 1 else x.contiguous()


def forward_plan(problem: LinearProblem, gpu: Gpu | None, tensors: tuple[Any, ...], call: Linear) -> Run:
    as_they_are = all(lies_in_rows(y) for y in (tensors[0], tensors[2]))
    x, weight = dense(tensors[0]), dense(tensors[2])
    by_tma = addressable(x) and addressable(weight)
    tile = call.tile or tiles.choose(problem, gpu or GPUS["h200"], by_tma)
    by_tma = by_tma and tile.tma
    out_by_tma = by_tma and not tile.swap and problem.width * x.element_size() % 16 == 0
    fixed = constants(problem, tile, call, tile.persistent and by_tma)
    weight_seen = weight_box(problem, tile, call, weight.stride(0))
    x_seen = (problem.rows, problem.depth), (x.stride(0), 1), [tile.block_m, tile.block_k]
    stored = [tile.block_m, tiles.stored_columns(tile, problem)]
    out_seen = (problem.rows, problem.width), (problem.width, 1), stored
    boxes = {1: x_seen if by_tma else None, 4: weight_seen if by_tma else None, 7: out_seen if out_by_tma else None}
    launch = Launch(linear_kernel, fixed, tile.warps, x.device, tile.stages, boxes)
    tiles_m, tiles_n = -(-problem.rows // tile.block_m), -(-problem.width // tile.block_n)
    programs = min(tiles_m * tiles_n, gpu.sms) if tile.persistent and gpu else tiles_m * tiles_n
    numbers = (
        problem.rows, problem.width, problem.depth, tiles_m, tiles_n, programs, x.stride(0), weight.stride(0),
        float(call.eps),
    )  # fmt: skip

    like = empty(tensors[0].to("meta"), weight, call)
    make_out, make_pre, make_rstd = (None if y is None else room(y.shape, y.dtype, x.device) for y in like)
    assert make_out is not None

    def run(x: Tensor, norm_weight: Tensor | None, weight: Tensor, bias: Tensor | None) -> tuple[Any, ...]:
        """The fields of a `Product`."""
        out, pre, rstd = make_out(), make_pre and make_pre(), make_rstd and make_rstd()
        if programs == 0:
            return out, pre, rstd
        if not as_they_are:
            x, weight = dense(x), dense(weight)
        if norm_weight is not None:
            norm_weight = norm_weight.contiguous()
        if bias is not None:
            bias = bias.contiguous()
        launch(programs, (x, x, norm_weight, weight, weight, bias, out, out, pre, rstd), numbers)
        return out, pre, rstd

    return run
