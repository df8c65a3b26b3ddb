"""Norms in Triton: a program takes a few rows whole, or one very wide row by blocks, several times over.

Gradients of weight and bias are sums over all rows. Programs walk over the rows and each keeps its own sum; torch adds
these in a fixed order, so the result is the same bit for bit in every run.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from flashkernels.fused.norm import LEAST_SCALE, QUANTISE, Norm, NormBackward, Normed, empty, without_numbers
from flashkernels.fused.rows import RowProblem, like, nothing, row_view
from flashkernels.fused.triton.blocks import Blocks, Launch, blocks, resident, row_starts
from flashkernels.hardware import Gpu
from flashkernels.jit.eager import Run, room

WIDEST, WIDEST_BACKWARD = 16384, 8192  # elements of a row that the registers of one program hold
COLUMNS = Blocks(4, 512, False, 4)  # of the sums over the rows that are wider
RESERVED, REDUCTION = 1024, 1024  # bytes of shared memory: what the system takes of each block, what sums pass through
LEAST = tl.constexpr(LEAST_SCALE)
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it leaves no bits for a fraction, so fp32 rounds to even


@triton.jit
def load_total(x_rows, r_rows, cols, inside, HAS_RESIDUAL: tl.constexpr):
    """x + residual of these columns, in x's dtype, and 0 outside."""
    x = tl.load(x_rows + cols[None, :], mask=inside, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(r_rows + cols[None, :], mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    return x


@triton.jit
def scaled(x, mean, rstd, weight_ptr, bias_ptr, cols, width, ROUNDED: tl.constexpr, DTYPE: tl.constexpr):
    """The norm of x in fp32, with weight and bias."""
    y = (x.to(tl.float32) - mean[:, None]) * rstd[:, None]
    if ROUNDED:
        y = y.to(DTYPE).to(tl.float32)
    if weight_ptr is not None:
        y *= tl.load(weight_ptr + cols, mask=cols < width, other=0.0).to(tl.float32)[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + cols, mask=cols < width, other=0.0).to(tl.float32)[None, :]
    return y


@triton.jit
def quantised(y, scale, dtype: tl.constexpr):
    """y over its row's scale, divided as torch divides. Where the scale has few bits, many quotients lie between two
    numbers, and a reciprocal would turn them another way."""
    y = tl.div_rn(y, scale[:, None] + tl.zeros_like(y))
    if dtype == tl.int8:
        y = (y + ROUND) - ROUND
        y = tl.where(y == y, tl.minimum(tl.maximum(y, -127.0), 127.0), 0.0)
    return y.to(dtype)


@triton.jit
def scale_of(largest, poison, MOST: tl.constexpr):
    """Of a row: its largest number over the largest there is. `poison` is NaN where the row has NaN or Inf, else 0."""
    scale = tl.maximum(tl.div_rn(largest, tl.full(largest.shape, MOST, tl.float32)), LEAST)
    return tl.where(largest == 0, 1.0, scale) + poison


@triton.jit(do_not_specialize=["rows"])
def forward_kernel(
    x_ptr, weight_ptr, bias_ptr, residual_ptr, out_ptr, total_ptr, scale_ptr, mean_ptr, rstd_ptr,
    rows: tl.int64, width: tl.int64, x_inner, x_outer_stride: tl.int64, x_inner_stride: tl.int64,
    r_inner, r_outer_stride: tl.int64, r_inner_stride: tl.int64, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, CENTRED: tl.constexpr, ROUNDED: tl.constexpr,
    MOST: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    OUT: tl.constexpr = out_ptr.dtype.element_ty
    SUM: tl.constexpr = residual_ptr is not None
    at = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = at < rows
    x_rows = x_ptr + row_starts(at, x_inner, x_outer_stride, x_inner_stride)[:, None]
    r_rows = None
    if SUM:
        r_rows = residual_ptr + row_starts(at, r_inner, r_outer_stride, r_inner_stride)[:, None]
    out_rows = out_ptr + (at * width)[:, None]
    mean = tl.zeros((ROWS,), tl.float32)
    cols = tl.arange(0, BLOCK)

    if WHOLE:
        inside = here[:, None] & (cols < width)[None, :]
        x = load_total(x_rows, r_rows, cols, inside, SUM)
        if SUM:
            tl.store(total_ptr + (at * width)[:, None] + cols[None, :], x, mask=inside)
        wide = x.to(tl.float32)
        if CENTRED:
            mean = tl.sum(wide, 1) / width
            wide = tl.where(inside, wide - mean[:, None], 0.0)
        variance = tl.sum(wide * wide, 1) / width
    else:
        if CENTRED:
            part = tl.zeros((ROWS, BLOCK), tl.float32)
            for start in tl.range(0, width, BLOCK):
                inside = here[:, None] & (start + cols < width)[None, :]
                part += load_total(x_rows, r_rows, start + cols, inside, SUM).to(tl.float32)
            mean = tl.sum(part, 1) / width
        part = tl.zeros((ROWS, BLOCK), tl.float32)
        for start in tl.range(0, width, BLOCK):
            inside = here[:, None] & (start + cols < width)[None, :]
            x = load_total(x_rows, r_rows, start + cols, inside, SUM)
            if SUM:
                tl.store(total_ptr + (at * width)[:, None] + (start + cols)[None, :], x, mask=inside)
            wide = tl.where(inside, x.to(tl.float32) - mean[:, None], 0.0)
            part += wide * wide
        variance = tl.sum(part, 1) / width

    rstd = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.sqrt_rn(variance + eps))
    if rstd_ptr is not None:
        tl.store(rstd_ptr + at, rstd, mask=here)
        if CENTRED:
            tl.store(mean_ptr + at, mean, mask=here)

    if WHOLE:
        y = scaled(x, mean, rstd, weight_ptr, bias_ptr, cols, width, ROUNDED, DTYPE)
        if MOST:
            if ROUNDED:
                y = y.to(DTYPE).to(tl.float32)
            y = tl.where(inside, y, 0.0)
            scale = scale_of(tl.max(tl.abs(y), 1), tl.sum(y - y, 1), MOST)
            tl.store(scale_ptr + at, scale, mask=here)
            tl.store(out_rows + cols[None, :], quantised(y, scale, OUT), mask=inside)
        else:
            tl.store(out_rows + cols[None, :], y.to(OUT), mask=inside)
    else:
        scale = tl.zeros((ROWS,), tl.float32)
        if MOST:
            largest = tl.zeros((ROWS, BLOCK), tl.float32)
            poison = tl.zeros((ROWS, BLOCK), tl.float32)
            for start in tl.range(0, width, BLOCK):
                inside = here[:, None] & (start + cols < width)[None, :]
                x = load_total(x_rows, r_rows, start + cols, inside, SUM)
                y = scaled(x, mean, rstd, weight_ptr, bias_ptr, start + cols, width, ROUNDED, DTYPE)
                if ROUNDED:
                    y = y.to(DTYPE).to(tl.float32)
                y = tl.where(inside, y, 0.0)
                largest = tl.maximum(largest, tl.abs(y))
                poison += y - y
            scale = scale_of(tl.max(largest, 1), tl.sum(poison, 1), MOST)
            tl.store(scale_ptr + at, scale, mask=here)
        for start in tl.range(0, width, BLOCK):
            inside = here[:, None] & (start + cols < width)[None, :]
            x = load_total(x_rows, r_rows, start + cols, inside, SUM)
            y = scaled(x, mean, rstd, weight_ptr, bias_ptr, start + cols, width, ROUNDED, DTYPE)
            if MOST:
                if ROUNDED:
                    y = y.to(DTYPE).to(tl.float32)
                tl.store(out_rows + (start + cols)[None, :], quantised(y, scale, OUT), mask=inside)
            else:
                tl.store(out_rows + (start + cols)[None, :], y.to(OUT), mask=inside)


@triton.jit
def load_normed(x_rows, cols, inside, mean, rstd):
    """The normalised x in fp32, 0 outside."""
    x = tl.load(x_rows + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, (x - mean[:, None]) * rstd[:, None], 0.0)


@triton.jit
def load_product(dy_rows, weight_ptr, cols, width, inside):
    """dy, and dy times the weight, in fp32, 0 outside."""
    dy = tl.load(dy_rows + cols[None, :], mask=inside, other=0.0).to(tl.float32)
    product = dy
    if weight_ptr is not None:  # an early return would not keep Triton from compiling what follows it
        product *= tl.load(weight_ptr + cols, mask=cols < width, other=0.0).to(tl.float32)[None, :]
    return dy, product


@triton.jit(do_not_specialize=["rows", "programs"])
def backward_kernel(
    dy_ptr, dtotal_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dweight_ptr, dbias_ptr,
    rows: tl.int64, programs: tl.int64, width: tl.int64,
    g_inner, g_outer_stride: tl.int64, g_inner_stride: tl.int64,
    t_inner, t_outer_stride: tl.int64, t_inner_stride: tl.int64,
    x_inner, x_outer_stride: tl.int64, x_inner_stride: tl.int64,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr, CENTRED: tl.constexpr, ROUNDED: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """dx of every row; where a row fits, also this program's sums for weight and bias (PROGRAMS, width) fp32."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    pid = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    dweight = tl.zeros((ROWS, BLOCK), tl.float32)  # summed over the rows at the end
    dbias = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in tl.range(pid * ROWS, rows, programs * ROWS, num_stages=STAGES):
        at = first + tl.arange(0, ROWS)
        here = at < rows
        x_rows = x_ptr + row_starts(at, x_inner, x_outer_stride, x_inner_stride)[:, None]
        dy_rows = dy_ptr + row_starts(at, g_inner, g_outer_stride, g_inner_stride)[:, None]
        dx_rows = dx_ptr + (at * width)[:, None]
        rstd = tl.load(rstd_ptr + at, mask=here, other=0.0)
        mean = tl.zeros((ROWS,), tl.float32)
        if CENTRED:
            mean = tl.load(mean_ptr + at, mask=here, other=0.0)
        level = tl.zeros((ROWS,), tl.float32)
        if WHOLE:
            inside = here[:, None] & (cols < width)[None, :]
            y = load_normed(x_rows, cols, inside, mean, rstd)
            dy, dx = load_product(dy_rows, weight_ptr, cols, width, inside)
            along = tl.sum(dx * y, 1) / width
            if CENTRED:
                level = tl.sum(dx, 1) / width
            dx = (dx - y * along[:, None] - level[:, None]) * rstd[:, None]
            if dtotal_ptr is not None:
                t_rows = dtotal_ptr + row_starts(at, t_inner, t_outer_stride, t_inner_stride)[:, None]
                dx += tl.load(t_rows + cols[None, :], mask=inside, other=0.0).to(tl.float32)
            tl.store(dx_rows + cols[None, :], dx.to(DTYPE), mask=inside)
            if dweight_ptr is not None:
                if ROUNDED:
                    y = y.to(DTYPE).to(tl.float32)
                dweight += dy * y
            if dbias_ptr is not None:
                dbias += dy
        else:
            part = tl.zeros((ROWS, BLOCK), tl.float32)
            flat = tl.zeros((ROWS, BLOCK), tl.float32)
            for start in tl.range(0, width, BLOCK):
                inside = here[:, None] & (start + cols < width)[None, :]
                y = load_normed(x_rows, start + cols, inside, mean, rstd)
                _, dx = load_product(dy_rows, weight_ptr, start + cols, width, inside)
                part += dx * y
                if CENTRED:
                    flat += dx
            along = tl.sum(part, 1) / width
            level = tl.sum(flat, 1) / width
            for start in tl.range(0, width, BLOCK):
                inside = here[:, None] & (start + cols < width)[None, :]
                y = load_normed(x_rows, start + cols, inside, mean, rstd)
                _, dx = load_product(dy_rows, weight_ptr, start + cols, width, inside)
                dx = (dx - y * along[:, None] - level[:, None]) * rstd[:, None]
                if dtotal_ptr is not None:
                    t_rows = dtotal_ptr + row_starts(at, t_inner, t_outer_stride, t_inner_stride)[:, None]
                    dx += tl.load(t_rows + (start + cols)[None, :], mask=inside, other=0.0).to(tl.float32)
                tl.store(dx_rows + (start + cols)[None, :], dx.to(DTYPE), mask=inside)
    if WHOLE:
        if dweight_ptr is not None:
            tl.store(dweight_ptr + pid * width + cols, tl.sum(dweight, 0), mask=cols < width)
        if dbias_ptr is not None:
            tl.store(dbias_ptr + pid * width + cols, tl.sum(dbias, 0), mask=cols < width)


@triton.jit(do_not_specialize=["rows", "chunks"])
def column_kernel(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, dweight_ptr, dbias_ptr, rows: tl.int64, chunks: tl.int64, width: tl.int64,
    g_inner, g_outer_stride: tl.int64, g_inner_stride: tl.int64,
    x_inner, x_outer_stride: tl.int64, x_inner_stride: tl.int64,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, CENTRED: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """Sums for weight and bias of rows too wide for `backward_kernel`: BLOCK columns of every so many rows."""
    pid = tl.program_id(0).to(tl.int64)
    chunk = pid % chunks
    cols = pid // chunks * BLOCK + tl.arange(0, BLOCK)
    dweight = tl.zeros((ROWS, BLOCK), tl.float32)  # summed over the rows at the end
    dbias = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in tl.range(chunk * ROWS, rows, chunks * ROWS):
        at = first + tl.arange(0, ROWS)
        inside = (at < rows)[:, None] & (cols < width)[None, :]
        dy_rows = dy_ptr + row_starts(at, g_inner, g_outer_stride, g_inner_stride)[:, None]
        dy = tl.load(dy_rows + cols[None, :], mask=inside, other=0.0).to(tl.float32)
        if dweight_ptr is not None:
            x_rows = x_ptr + row_starts(at, x_inner, x_outer_stride, x_inner_stride)[:, None]
            rstd = tl.load(rstd_ptr + at, mask=at < rows, other=0.0)
            mean = tl.zeros((ROWS,), tl.float32)
            if CENTRED:
                mean = tl.load(mean_ptr + at, mask=at < rows, other=0.0)
            y = load_normed(x_rows, cols, inside, mean, rstd)
            if ROUNDED:
                y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
            dweight += dy * y
        if dbias_ptr is not None:
            dbias += dy
    if dweight_ptr is not None:
        tl.store(dweight_ptr + chunk * width + cols, tl.sum(dweight, 0), mask=cols < width)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + chunk * width + cols, tl.sum(dbias, 0), mask=cols < width)


def forward_plan(problem: RowProblem, gpu: Gpu | None, tensors: tuple[Any, ...], call: Norm) -> Run:
    x, weight, bias, residual = tensors
    block = blocks(problem.width, WIDEST)
    view = row_view(x)
    other = view if residual is None else row_view(residual)
    launch = Launch(forward_kernel, forward_constants(block.constants, call), block.warps, x.device)
    grid = -(-problem.rows // block.rows) if problem.width else 0
    numbers = (problem.rows, problem.width, *view.numbers, *other.numbers, float(call.eps))
    like = empty(call, x.to("meta"), residual)
    out, total, scale, mean, rstd = (None if y is None else room(y.shape, y.dtype, x.device) for y in like)
    assert out is not None
    copied = view.copied or other.copied or any(y is not None and not y.is_contiguous() for y in (weight, bias))

    def run(x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None) -> tuple[Any, ...]:
        """The fields of a `Normed`."""
        found = out(), total and total(), scale and scale(), mean and mean(), rstd and rstd()
        if grid == 0:
            return without_numbers(Normed(*found))
        if copied:
            residual = None if residual is None else other.of(residual)
            x, weight, bias = view.of(x), dense(weight), dense(bias)
        launch(grid, (x, weight, bias, residual, *found), numbers)
        return found

    return run


def forward_constants(block: dict[str, Any], call: Norm) -> dict[str, Any]:
    most = QUANTISE[call.quantise][1] if call.quantise else 0
    return block | {"CENTRED": call.centred, "ROUNDED": call.rounded, "MOST": most}


def walk(gpu: Gpu | None, block: Blocks, element_bytes: int, total: bool, aligned: bool = True) -> tuple[int, int]:
    """Stages of the walk over rows, and the programs that fill the GPU. `total`: the sum's gradient is read as well.

    Loads that run ahead keep the memory busy with 8 warps a multiprocessor, and few programs leave few sums to add up
    (H200, 2026-11-15, 16384 x 4096, bf16: 103 us; without them, 32 warps, 137). Where less than 4 stages fit, other
    programs hide a program's loads.
    """
    if gpu is None or not block.whole or not aligned:
        return 1, resident(gpu, block.warps)
    each = max(1, 8 // block.warps)
    space = min(gpu.shared_per_block, gpu.shared_per_sm // each - RESERVED) - REDUCTION
    step = block.rows * block.width * element_bytes
    stages = min(5, space // (3 * step) if total else space // (2 * step) - 1)  # as the compiler lays them out
    return (stages, gpu.sms * each) if stages >= 4 else (1, resident(gpu, block.warps))


def backward_plan(problem: RowProblem, gpu: Gpu | None, tensors: tuple[Any, ...], call: NormBackward) -> Run:
    grad, grad_total, x, *_ = tensors
    block = blocks(problem.width, WIDEST_BACKWARD)
    views = [row_view(x if y is None else y) for y in (grad, grad_total, x)]
    flags = {"CENTRED": call.centred, "ROUNDED": call.rounded}
    # Triton copies ahead what it knows to be aligned; by multiples of 16 elements it was timed
    aligned = not any(n % 16 for view in views for n in (problem.width, *view.numbers[1:]))
    stages, most = walk(gpu, block, x.element_size(), grad_total is not None, aligned)
    launch = Launch(backward_kernel, block.constants | flags | {"STAGES": stages}, block.warps, x.device)
    programs = max(1, min(-(-problem.rows // block.rows), most))
    numbers = (problem.rows, programs, problem.width, *(n for view in views for n in view.numbers))
    columns = Launch(column_kernel, COLUMNS.sizes | flags, COLUMNS.warps, x.device)
    parts = -(-problem.width // COLUMNS.width)
    chunks = max(1, min(-(-problem.rows // COLUMNS.rows), resident(gpu, COLUMNS.warps) // max(1, parts)))
    partials = programs if block.whole else chunks

    def run(
        grad: Tensor, grad_total: Tensor | None, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        dx = like(x)
        dweight = rstd.new_empty(partials, problem.width) if call.need_weight else None
        dbias = rstd.new_empty(partials, problem.width) if call.need_bias else None
        if problem.width:
            grad, x = views[0].of(grad), views[2].of(x)
            total = None if grad_total is None else views[1].of(grad_total)
            centre = mean if call.centred else None
            sums = (dweight, dbias) if block.whole else (None, None)
            launch(programs, (grad, total, x, dense(weight), centre, rstd, dx, *sums), numbers)
            if not block.whole and (call.need_weight or call.need_bias):
                sizes = (problem.rows, chunks, problem.width, *views[0].numbers, *views[2].numbers)
                columns(parts * chunks, (grad, x, centre, rstd, dweight, dbias), sizes)
        weights, biases = (nothing(rstd) if part is None else part.sum(0) for part in (dweight, dbias))
        return dx, weights, biases

    return run


def dense(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()
