"""Grouped GEMM in Triton: tiles from the plan's schedule, rows gathered by the loads, all the rest in the epilogue."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashkernels.fused.rows import Run
from flashkernels.fused.triton.activation import activated
from flashkernels.fused.triton.blocks import Launch
from flashkernels.hardware import GPUS, Gpu
from flashkernels.jit.launch import Descriptor, Launcher, compile_options
from flashkernels.moe.gemm import Gemm
from flashkernels.moe.plan import MOST_EXPERTS, Plan, most_tiles, plan_of
from flashkernels.moe.problem import GemmProblem
from flashkernels.moe.triton import tiles
from flashkernels.moe.triton.early import launched_early, starts_early
from flashkernels.moe.triton.tiles import GemmTile

TILE = tl.constexpr(MOST_EXPERTS)
SCALES = tl.constexpr(128)  # weights that share a scale in fp8_block


@triton.jit
def weight_rows(n0, half, inner, GATED: tl.constexpr, BOTH: tl.constexpr, INTERLEAVED: tl.constexpr, N: tl.constexpr):
    """Rows of the weights that make N columns of the output from n0 on: of one half of gated ones, or of both."""
    if BOTH:
        index = tl.arange(0, 2 * N)
        if INTERLEAVED:
            rows = tl.minimum(2 * n0 + index, 2 * inner - 1)
        else:
            rows = tl.minimum(n0 + index % N, inner - 1) + index // N * inner
    else:
        rows = tl.minimum(n0 + tl.arange(0, N), inner - 1)
        if GATED:
            if INTERLEAVED:
                rows = 2 * rows + half
            else:
                rows += half * inner
    return rows


@triton.jit
def load_part(at, inside):
    """A masked load, 0 outside; of FP8 by its bits, as Triton's interpreter cannot make an FP8 zero."""
    if at.dtype.element_ty == tl.float8e4nv:
        x = tl.load(at.to(tl.pointer_type(tl.uint8), bitcast=True), mask=inside, other=0)
        x = x.to(tl.float8e4nv, bitcast=True)
    else:
        x = tl.load(at, mask=inside, other=0)
    return x


@triton.jit
def load_weights(
    w_ptr, w_desc, rows, expert, n0, half, k0, depth, stride_wn,
    N: tl.constexpr, K: tl.constexpr, BOTH: tl.constexpr, INTERLEAVED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """[N or 2 N, K] of the weights; K counts elements of memory, which hold two weights in w4."""
    if w_desc is not None:
        WIDE: tl.constexpr = 2 * N if BOTH else N
        w = w_desc.load([expert, n0, half, k0] if INTERLEAVED else [expert, half, n0, k0]).reshape(WIDE, K)
    else:
        offs_k = k0 + tl.arange(0, K)
        at = w_ptr + rows.to(tl.int64)[:, None] * stride_wn + offs_k[None, :]
        w = tl.load(at) if EVEN else load_part(at, (offs_k < depth)[None, :])
    return w


@triton.jit
def load_rows(x_ptr, x_desc, x_rows, start, k0, depth, K: tl.constexpr, EVEN: tl.constexpr):
    """[BLOCK_M, K] of x."""
    if x_desc is not None:
        x = x_desc.load([start, k0])
    else:
        offs_k = k0 + tl.arange(0, K)
        if EVEN:
            x = tl.load(x_rows[:, None] + offs_k[None, :])
        else:
            x = load_part(x_rows[:, None] + offs_k[None, :], (offs_k < depth)[None, :])
    return x


@triton.jit
def add_product(acc, x, w, SWAP: tl.constexpr):
    if SWAP:
        acc = tl.dot(w, x.T, acc, input_precision="ieee", out_dtype=acc.dtype)
    else:
        acc = tl.dot(x, w.T, acc, input_precision="ieee", out_dtype=acc.dtype)
    return acc


@triton.jit
def across(row_values, column_values, SWAP: tl.constexpr):
    """The two vectors as they lie beside an accumulator."""
    down = row_values[None, :] if SWAP else row_values[:, None]
    right = column_values[:, None] if SWAP else column_values[None, :]
    return down, right


@triton.jit
def nibbles(packed, dtype: tl.constexpr):
    """The low and the high halves of bytes, less 8: set into the fraction of a number whose exponent is known."""
    low = packed & 15
    high = packed >> 4
    if dtype == tl.float16:  # 1024 + n
        low = (low.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - 1032.0
        high = (high.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - 1032.0
    elif dtype == tl.bfloat16:  # 128 + n
        low = (low.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True) - 136.0
        high = (high.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True) - 136.0
    else:
        low = low.to(dtype) - 8.0
        high = high.to(dtype) - 8.0
    return low.to(dtype), high.to(dtype)


@triton.jit
def step(
    acc, x, x2, w, rows, scale_ptr, x_scales, k0, stride_sn,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, K: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """One block of the depth: acc + x · wᵀ. Scales that change along the depth are applied to the block's sum."""
    if FORMAT == "" or FORMAT == "fp8" or FORMAT == "int8":
        acc = add_product(acc, x, w, SWAP)
    elif FORMAT == "fp8_block":
        part = add_product(tl.zeros_like(acc), x, w, SWAP)
        scale = tl.load(scale_ptr + (rows // SCALES) * stride_sn + k0 // SCALES)
        down, right = across(x_scales, scale, SWAP)
        acc += part * down * right
    else:
        if FORMAT == "w4":
            low, high = nibbles(w, x.dtype)
            part = add_product(tl.zeros_like(acc), x, low, SWAP)
            if GROUP >= K:
                part = add_product(part, x2, high, SWAP)
        else:
            part = add_product(tl.zeros_like(acc), x, w.to(x.dtype), SWAP)
        scale = tl.load(scale_ptr + rows * stride_sn + k0 // GROUP).to(tl.float32)
        _, right = across(scale, scale, SWAP)
        acc += part * right
        if FORMAT == "w4" and GROUP < K:
            scale = tl.load(scale_ptr + rows * stride_sn + (k0 + K // 2) // GROUP).to(tl.float32)
            _, right = across(scale, scale, SWAP)
            acc += add_product(tl.zeros_like(acc), x2, high, SWAP) * right
    return acc


@triton.jit
def dressed(
    acc, rows, x_scales, scale_ptr, bias_ptr, stride_sn, with_bias, FORMAT: tl.constexpr, SWAP: tl.constexpr
):  # fmt: skip
    """The sum in fp32, with the scales of whole rows and the bias."""
    y = acc.to(tl.float32)
    if FORMAT == "fp8" or FORMAT == "int8":
        down, right = across(x_scales, tl.load(scale_ptr + rows * stride_sn), SWAP)
        y = y * down * right
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + rows).to(tl.float32)
        _, right = across(bias, bias, SWAP)
        y += tl.where(with_bias, right, 0.0)
    return y


@triton.jit
def gated(gate, up, alpha, limit, KIND: tl.constexpr):
    if KIND == "clamped_swiglu":
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL), limit,
                        propagate_nan=tl.PropagateNan.ALL)  # fmt: skip
        y = (up + 1) * gate / (1 + tl.exp(-alpha * gate))
    elif KIND == "swiglu":
        y = activated(gate, "silu") * up
    elif KIND == "geglu":
        y = activated(gate, "gelu_tanh") * up
    else:
        y = activated(gate, "relu2") * up
    return y


@triton.jit(do_not_specialize=["rows", "of_token", "experts", "n_tiles", "programs"])
def gemm_kernel(
    x_ptr, x_desc, w_ptr, w_desc, bias_ptr, x_scale_ptr, scale_ptr, row_weight_ptr, permutation_ptr, offsets_ptr,
    tiles_ptr, tile_offsets_ptr, out_ptr,
    rows, of_token, experts, n_tiles, programs, width, depth, packed_depth,
    stride_x: tl.int64, stride_we: tl.int64, stride_wn: tl.int64, stride_se: tl.int64, stride_sn, stride_xs, alpha,
    limit,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SWAP: tl.constexpr,
    GATHER: tl.constexpr, COPIED: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr, EVEN: tl.constexpr, FLATTEN: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    BOTH: tl.constexpr = GATED and not SWAP
    TWO: tl.constexpr = GATED and SWAP  # accumulators: gate and up are rows of other threads
    WIDE: tl.constexpr = 2 * BLOCK_N if BOTH else BLOCK_N
    HALVES: tl.constexpr = FORMAT == "w4"
    X_K: tl.constexpr = BLOCK_K // 2 if HALVES else BLOCK_K
    SUM: tl.constexpr = tl.int32 if FORMAT == "int8" else tl.float32
    inter: tl.constexpr = INTERLEAVED and GATED

    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    row_tiles = tl.load(tile_offsets_ptr + experts)
    for index in tl.range(tl.program_id(0), row_tiles * n_tiles * SPLIT, programs, flatten=FLATTEN):
        part = index % SPLIT
        tile = index // SPLIT
        first = tile // (GROUP_M * n_tiles) * GROUP_M
        together = tl.minimum(GROUP_M, row_tiles - first)
        rest = tile - first * n_tiles
        entry = tl.load(tiles_ptr + first + rest % together)
        n0 = rest // together * BLOCK_N
        expert = entry % TILE
        start = tl.load(offsets_ptr + expert) + entry // TILE * BLOCK_M
        end = tl.load(offsets_ptr + expert + 1)

        place = start + tl.arange(0, BLOCK_M)
        inside = place < end
        # Of rows that are not there, the last one that is: nothing is stored of them.
        row = tl.minimum(place, end - 1)
        token = row
        if GATHER:
            token = tl.load(permutation_ptr + row) // of_token
            if not COPIED:
                row = token
        x_rows = x_ptr + row.to(tl.int64) * stride_x
        w_expert = w_ptr + expert.to(tl.int64) * stride_we
        s_expert = scale_ptr
        if FORMAT != "":
            s_expert = scale_ptr + expert.to(tl.int64) * stride_se
        gate_rows = weight_rows(n0, 0, width, GATED, BOTH, INTERLEAVED, BLOCK_N)
        up_rows = weight_rows(n0, 1, width, GATED, BOTH, INTERLEAVED, BLOCK_N)
        x_scales = tl.full((BLOCK_M,), 1.0, tl.float32)
        if FORMAT == "fp8" or FORMAT == "int8":
            x_scales = tl.load(x_scale_ptr + token)

        acc = tl.zeros((WIDE, BLOCK_M) if SWAP else (BLOCK_M, WIDE), SUM)
        acc2 = acc
        steps = tl.cdiv(depth, BLOCK_K)
        for i in tl.range(steps * part // SPLIT, steps * (part + 1) // SPLIT):
            k0 = i * BLOCK_K
            w0 = k0 // 2 if HALVES else k0
            x = load_rows(x_ptr, x_desc, x_rows, start, k0, depth, X_K, EVEN)
            x2 = x
            if HALVES:
                x2 = load_rows(x_ptr, x_desc, x_rows, start, k0 + X_K, depth, X_K, EVEN)
            if FORMAT == "fp8_block":
                x_scales = tl.load(x_scale_ptr + token * stride_xs + k0 // SCALES)
            w = load_weights(w_expert, w_desc, gate_rows, expert, n0, 0, w0, packed_depth, stride_wn,
                             BLOCK_N, X_K, BOTH, inter, EVEN)  # fmt: skip
            acc = step(acc, x, x2, w, gate_rows, s_expert, x_scales, k0, stride_sn, FORMAT, GROUP, BLOCK_K, SWAP)
            if TWO:
                w = load_weights(w_expert, w_desc, up_rows, expert, n0, 1, w0, packed_depth, stride_wn,
                                 BLOCK_N, X_K, BOTH, inter, EVEN)  # fmt: skip
                acc2 = step(acc2, x, x2, w, up_rows, s_expert, x_scales, k0, stride_sn, FORMAT, GROUP, BLOCK_K, SWAP)

        b_expert = bias_ptr
        if bias_ptr is not None:
            b_expert = bias_ptr + expert * (2 * width if GATED else width)
        y = dressed(acc, gate_rows, x_scales, s_expert, b_expert, stride_sn, part == 0, FORMAT, SWAP)
        if GATED:
            if TWO:
                up = dressed(acc2, up_rows, x_scales, s_expert, b_expert, stride_sn, part == 0, FORMAT, SWAP)
            elif INTERLEAVED:
                y, up = tl.split(y.reshape(BLOCK_M, BLOCK_N, 2))
            else:
                y, up = tl.split(y.reshape(BLOCK_M, 2, BLOCK_N).permute(0, 2, 1))
            y = gated(y, up, alpha, limit, KIND)
        elif KIND == "relu2":
            y = activated(y, "relu2")
        column = n0 + tl.arange(0, BLOCK_N)
        if row_weight_ptr is not None:
            item = tl.load(permutation_ptr + tl.minimum(place, end - 1))
            weight = tl.load(row_weight_ptr + item).to(tl.float32)
            down, _ = across(weight, column, SWAP)
            y = y * down
        here, there = across(inside, column < width, SWAP)
        down, right = across((part * rows + place).to(tl.int64) * width, column, SWAP)
        tl.store(out_ptr + down + right, y.to(out_ptr.dtype.element_ty), mask=here & there)


@triton.jit(do_not_specialize=["of_token"])
def gather_kernel(
    x_ptr, permutation_ptr, offsets_ptr, out_ptr, of_token, experts, width, stride_x: tl.int64,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out[p] = x[token of place p], for the places that there are."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = place < tl.load(offsets_ptr + experts)
    token = tl.load(permutation_ptr + place, mask=here, other=0) // of_token
    for start in tl.range(0, width, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        mask = here[:, None] & (cols < width)[None, :]
        x = tl.load(x_ptr + token.to(tl.int64)[:, None] * stride_x + cols[None, :], mask=mask)
        tl.store(out_ptr + place.to(tl.int64)[:, None] * width + cols[None, :], x, mask=mask)


class Gather:
    """Copies rows to their places."""

    ROWS, BLOCK = 4, 1024

    def __init__(self, x: Tensor, plan_rows: int, early: bool) -> None:
        self.rows = plan_rows
        self.launch = Launch(gather_kernel, {"ROWS": self.ROWS, "BLOCK": self.BLOCK, "EARLY": early}, 4, x.device)
        launched_early(self.launch.launcher, early)

    def __call__(self, x: Tensor, plan: Plan) -> Tensor:
        out = x.new_empty(self.rows, x.shape[1])
        numbers = (plan.k, plan.experts, x.shape[1], x.stride(0))
        self.launch(-(-self.rows // self.ROWS), (x, plan.permutation, plan.offsets, out), numbers)
        return out


def constants(problem: GemmProblem, tile: GemmTile, call: Gemm, early: bool) -> dict[str, Any]:
    """The compile-time values of `gemm_kernel`, in its order. Loads of the next tile begin before a tile ends only
    where all of them are TMA's: with gathered rows Triton would give up its pipeline."""
    by_tma = tile.tma and (tile.copied or not problem.gather)
    return {
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "GROUP_M": tile.group,
        "SWAP": tile.swap, "GATHER": problem.gather, "COPIED": tile.copied, "KIND": call.activation,
        "GATED": problem.gated, "INTERLEAVED": call.interleaved, "FORMAT": problem.weights, "GROUP": call.group,
        "SPLIT": tile.split,
        "EVEN": problem.depth % tile.block_k == 0, "FLATTEN": tile.persistent and by_tma, "EARLY": early,
    }  # fmt: skip


def weight_box(problem: GemmProblem, tile: GemmTile, call: Gemm, columns: int) -> tuple[Any, ...]:
    """Shape, strides and block of the weights as TMA reads them: (E, 2, I, K), or (E, I, 2, K) where interleaved."""
    n, depth = problem.n, tile.block_k // 2 if problem.weights == "w4" else tile.block_k
    if not problem.gated:
        return (problem.experts, 1, n, columns), (n * columns, n * columns, columns, 1), [1, 1, tile.block_n, depth]
    halves = 1 if tile.swap else 2
    if call.interleaved:
        strides = (n * columns, 2 * columns, columns, 1)
        return (problem.experts, n // 2, 2, columns), strides, [1, tile.block_n, halves, depth]
    strides = (n * columns, n // 2 * columns, columns, 1)
    return (problem.experts, 2, n // 2, columns), strides, [1, halves, tile.block_n, depth]


def addressable(x: Tensor) -> bool:
    """Whether TMA can read x: contiguous rows, 16-byte steps."""
    aligned = x.data_ptr() % 16 == 0 and all(step * x.element_size() % 16 == 0 for step in x.stride()[:-1])
    return x.stride(-1) == 1 and aligned


def gemm_plan(problem: GemmProblem, gpu: Gpu | None, tensors: tuple[Any, ...], call: Gemm) -> Run:
    x, w, _, _, _, w_scale = tensors[:6]
    tile = tiles.choose(problem, gpu or GPUS["h200"], w.is_contiguous() and addressable(w), call.splittable, call.tile)
    copied = tile.copied and problem.gather
    by_tma = tile.tma and addressable(x) and (copied or not problem.gather)
    early = starts_early(gpu)
    gather = Gather(x, problem.rows, early) if copied else None
    n_tiles = -(-problem.width // tile.block_n)
    most = most_tiles(problem.rows, problem.experts, problem.block) * n_tiles * tile.split
    programs = min(most, gpu.sms) if tile.persistent and gpu else most
    fixed = constants(problem, tile, call, early)
    launcher = launched_early(Launcher(gemm_kernel, fixed, compile_options(tile.warps, tile.stages, 0)), early)
    box = weight_box(problem, tile, call, w.shape[2]) if tile.tma else None
    x_depth = tile.block_k // 2 if problem.weights == "w4" else tile.block_k
    scale_strides = (0, 0) if w_scale is None else (w_scale.stride(0), w_scale.stride(1))
    device, dtype = x.device.index, call.out_dtype
    copied_x, stride_x = x.stride(1) != 1, x.shape[1] if copied or x.stride(1) != 1 else x.stride(0)

    def run(
        x: Tensor, w: Tensor, bias: Tensor | None, row_weights: Tensor | None, x_scale: Tensor | None,
        w_scale: Tensor | None, *plan_tensors: Tensor,
    ) -> Tensor:  # fmt: skip
        plan = plan_of(plan_tensors, call.block)
        shape = (problem.rows, problem.width) if tile.split == 1 else (tile.split, problem.rows, problem.width)
        out = x.new_empty(shape, dtype=dtype if tile.split == 1 else torch.float32)
        if most == 0:
            return out
        x = x.contiguous() if copied_x else x
        x = gather(x, plan) if gather else x
        x_desc = Descriptor(x, tuple(x.shape), (x.stride(0), 1), [tile.block_m, x_depth]) if by_tma else None
        w_desc = Descriptor(w, *box) if box else None
        arguments = (
            x, x_desc, w, w_desc, bias, x_scale, w_scale, row_weights, plan.permutation, plan.offsets, plan.tiles,
            plan.tile_offsets, out,
        )  # fmt: skip
        numbers = (
            problem.rows, plan.k, problem.experts, n_tiles, programs, problem.width, problem.depth, w.shape[2],
            stride_x, w.stride(0), w.stride(1), *scale_strides,
            x_scale.stride(0) if x_scale is not None else 0, call.alpha, call.limit,
        )  # fmt: skip
        if device is None or device == torch.cuda.current_device():
            launcher(programs, device, arguments, numbers)
        else:
            with torch.cuda.device(device):
                launcher(programs, device, arguments, numbers)
        return out

    return run
