"""Grouped GEMM in Triton: tiles from the plan's schedule, rows gathered by the loads, all the rest in the epilogue."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashkernels.fused.triton.activation import activated
from flashkernels.fused.triton.blocks import Launch
from flashkernels.fused.triton.operands import across, load_part, load_rows
from flashkernels.hardware import GPUS, Gpu
from flashkernels.jit.eager import Run, room
from flashkernels.jit.launch import Descriptor, Launcher, compile_options
from flashkernels.jit.mode import interpreting
from flashkernels.moe import weights
from flashkernels.moe.gemm import Gemm
from flashkernels.moe.plan import MOST_EXPERTS, most_tiles
from flashkernels.moe.problem import PHASES, GemmProblem
from flashkernels.moe.triton import tiles
from flashkernels.moe.triton.early import launched_early, starts_early
from flashkernels.moe.triton.tiles import GemmTile
from flashkernels.moe.triton.widen import Widen
from flashkernels.moe.triton.words import phases

TILE = tl.constexpr(MOST_EXPERTS)
SCALES = tl.constexpr(128)  # weights that share a scale in fp8_block
WORDS = tl.constexpr(weights.WORDS)  # of w8 and w4 that are packed together


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
def load_weights(
    w_ptr, w_desc, rows, expert, n0, half, k0, depth, stride_wn,
    WIDE: tl.constexpr, K: tl.constexpr, INTERLEAVED: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """[WIDE, K] of the weights; K counts elements of memory: words in w8 and w4."""
    if w_desc is not None:
        w = w_desc.load([expert, n0, half, k0] if INTERLEAVED else [expert, half, n0, k0]).reshape(WIDE, K)
    else:
        offs_k = k0 + tl.arange(0, K)
        at = w_ptr + rows.to(tl.int64)[:, None] * stride_wn + offs_k[None, :]
        w = tl.load(at) if EVEN else load_part(at, (offs_k < depth)[None, :])
    return w


@triton.jit
def add_product(acc, x, w, SWAP: tl.constexpr):
    if x.dtype == tl.float32:
        # The sum of a block, then added: one chain over the depth rounds worse than torch does. Triton would fold a
        # plain addition back into the chain; it leaves a multiplication by 1 with addition alone.
        if SWAP:
            acc = tl.fma(tl.dot(w, x.T, input_precision="ieee"), 1.0, acc)
        else:
            acc = tl.fma(tl.dot(x, w.T, input_precision="ieee"), 1.0, acc)
    elif SWAP:
        acc = tl.dot(w, x.T, acc, input_precision="ieee", out_dtype=acc.dtype)
    else:
        acc = tl.dot(x, w.T, acc, input_precision="ieee", out_dtype=acc.dtype)
    return acc


@triton.jit
def load_pair(pair_ptr, rows, i, last, stride_sn):
    """The scales of both groups of step i, in one register. Past the last step, its own."""
    return tl.load(pair_ptr + rows * (stride_sn // 2) + tl.minimum(i, last))


@triton.jit
def of_pair(pair, second: tl.constexpr, DTYPE: tl.constexpr):
    """One of two scales of 16 bits, in fp32."""
    if tl.bfloat16 == DTYPE:
        scale = (pair & -65536 if second else pair << 16).to(tl.float32, bitcast=True)
    else:
        half = (pair >> 16 if second else pair).to(tl.int16)
        scale = half.to(DTYPE, bitcast=True).to(tl.float32)
    return scale


@triton.jit
def step(
    acc, xs, w, rows, scale_ptr, x_scales, k0, depth, stride_sn, pair,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, SWAP: tl.constexpr, SCALED: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """One block of the depth: acc + x · wᵀ, x in as many parts as a word of w holds weights. Scales that change along
    the depth are applied to the sum over what shares them; where SCALED, to the weights, which are rounded then. Those
    of both groups are in `pair`, unless it is None."""
    COUNT: tl.constexpr = 4 if FORMAT == "w4" else 2
    if FORMAT == "" or FORMAT == "fp8" or FORMAT == "int8":
        acc = add_product(acc, xs[0], w, SWAP)
    elif FORMAT == "fp8_block":
        part = add_product(tl.zeros_like(acc), xs[0], w, SWAP)
        scale = tl.load(scale_ptr + (rows // SCALES) * stride_sn + k0 // SCALES)
        down, right = across(x_scales, scale, SWAP)
        acc += part * down * right
    elif SCALED:
        scales = ()
        for p in tl.static_range(COUNT):
            group = tl.minimum(k0 + p * WORDS, depth - 1) // GROUP
            scales = scales + (tl.load(scale_ptr + rows * stride_sn + group)[:, None],)
        ws = phases(w, scales, FORMAT, xs[0].dtype, True, NATIVE)
        for p in tl.static_range(COUNT):
            acc = add_product(acc, xs[p], ws[p], SWAP)
    else:
        ws = phases(w, (), FORMAT, xs[0].dtype, False, NATIVE)
        SHARED: tl.constexpr = GROUP // WORDS if GROUP < COUNT * WORDS else COUNT  # phases of one scale
        for first in tl.static_range(0, COUNT, SHARED):
            part = tl.zeros_like(acc)
            for p in tl.static_range(first, first + SHARED):
                part = add_product(part, xs[p], ws[p], SWAP)
            if pair is not None:
                scale = of_pair(pair, first > 0, scale_ptr.dtype.element_ty)
            else:
                group = tl.minimum(k0 + first * WORDS, depth - 1) // GROUP  # words may go on where the depth ends
                scale = tl.load(scale_ptr + rows * stride_sn + group).to(tl.float32)
            _, right = across(scale, scale, SWAP)
            acc += part * right
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
def halves(y, M: tl.constexpr, N: tl.constexpr, SWAP: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Gate and up: registers of the same thread, or, of a swapped product, near ones."""
    if SWAP and INTERLEAVED:
        gate, up = tl.split(y.reshape(N, 2, M).permute(0, 2, 1))
    elif SWAP:
        gate, up = tl.split(y.reshape(2, N, M).permute(1, 2, 0))
    elif INTERLEAVED:
        gate, up = tl.split(y.reshape(M, N, 2))
    else:
        gate, up = tl.split(y.reshape(M, 2, N).permute(0, 2, 1))
    return gate, up


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
    EARLY: tl.constexpr, SETTLED: tl.constexpr, SCALED: tl.constexpr, NATIVE: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    # Of a swapped product, gate and up are rows of different threads: two accumulators. But words are unpacked in
    # registers, and there one long product waits less than two short ones.
    TWO: tl.constexpr = GATED and SWAP and FORMAT != "w8" and FORMAT != "w4"
    BOTH: tl.constexpr = GATED and not TWO
    WIDE: tl.constexpr = 2 * BLOCK_N if BOTH else BLOCK_N
    PHASES: tl.constexpr = 4 if FORMAT == "w4" else 2 if FORMAT == "w8" else 1
    X_K: tl.constexpr = BLOCK_K // PHASES
    SUM: tl.constexpr = tl.int32 if FORMAT == "int8" else tl.float32
    inter: tl.constexpr = INTERLEAVED and GATED

    if EARLY and not SETTLED:
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
        if SETTLED:  # the plan was there before the kernel ahead began: four loads, each of which needs the one before
            gdc_wait()
            gdc_launch_dependents()
        w_expert = w_ptr + expert.to(tl.int64) * stride_we
        s_expert = scale_ptr
        if FORMAT != "":
            s_expert = scale_ptr + expert.to(tl.int64) * stride_se
        w_rows = weight_rows(n0, 0, width, GATED, BOTH, INTERLEAVED, BLOCK_N)
        up_rows = weight_rows(n0, 1, width, GATED, BOTH, INTERLEAVED, BLOCK_N)
        x_scales = tl.full((BLOCK_M,), 1.0, tl.float32)
        if FORMAT == "fp8" or FORMAT == "int8":
            x_scales = tl.load(x_scale_ptr + token)

        acc = tl.zeros((WIDE, BLOCK_M) if SWAP else (BLOCK_M, WIDE), SUM)
        acc2 = acc
        steps = tl.cdiv(packed_depth, X_K)
        pair = None
        pair_ptr = None
        if PAIRED:
            pair_ptr = s_expert.to(tl.pointer_type(tl.int32), bitcast=True)
            pair = load_pair(pair_ptr, w_rows, steps * part // SPLIT, steps - 1, stride_sn)
        for i in tl.range(steps * part // SPLIT, steps * (part + 1) // SPLIT):
            w0 = i * X_K
            k0 = i * BLOCK_K
            if X_K < WORDS and PHASES > 1:  # a part of the words that are packed together
                k0 = w0 // WORDS * (WORDS * PHASES) + w0 % WORDS
            xs = (load_rows(x_desc, x_rows, start, k0, depth, X_K, EVEN),)
            for p in tl.static_range(1, PHASES):
                xs = xs + (load_rows(x_desc, x_rows, start, k0 + p * WORDS, depth, X_K, EVEN),)
            if FORMAT == "fp8_block":
                x_scales = tl.load(x_scale_ptr + token * stride_xs + k0 // SCALES)
            w = load_weights(w_expert, w_desc, w_rows, expert, n0, 0, w0, packed_depth, stride_wn, WIDE, X_K, inter,
                             EVEN)  # fmt: skip
            acc = step(acc, xs, w, w_rows, s_expert, x_scales, k0, depth, stride_sn, pair, FORMAT, GROUP, SWAP,
                       SCALED, NATIVE)  # fmt: skip
            if PAIRED:  # behind their use: in the same register, and with a step until they are wanted
                pair = load_pair(pair_ptr, w_rows, i + 1, steps - 1, stride_sn)
            if TWO:
                w = load_weights(w_expert, w_desc, up_rows, expert, n0, 1, w0, packed_depth, stride_wn, WIDE, X_K,
                                 inter, EVEN)  # fmt: skip
                acc2 = step(acc2, xs, w, up_rows, s_expert, x_scales, k0, depth, stride_sn, None, FORMAT, GROUP, SWAP,
                            SCALED, NATIVE)  # fmt: skip

        b_expert = bias_ptr
        if bias_ptr is not None:
            b_expert = bias_ptr + expert * (2 * width if GATED else width)
        y = dressed(acc, w_rows, x_scales, s_expert, b_expert, stride_sn, part == 0, FORMAT, SWAP)
        if TWO:
            up = dressed(acc2, up_rows, x_scales, s_expert, b_expert, stride_sn, part == 0, FORMAT, SWAP)
            y = gated(y, up, alpha, limit, KIND)
        elif GATED:
            gate, up = halves(y, BLOCK_M, BLOCK_N, SWAP, INTERLEAVED)
            y = gated(gate, up, alpha, limit, KIND)
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
    if SETTLED:  # a program without a tile: what follows waits for this kernel alone
        gdc_wait()


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

    def __init__(self, x: Tensor, rows: int, of_token: int, experts: int, early: bool) -> None:
        self.shape = rows, x.shape[1]
        self.numbers = (of_token, experts, x.shape[1], x.stride(0) if x.stride(1) == 1 else x.shape[1])
        self.launch = Launch(gather_kernel, {"ROWS": self.ROWS, "BLOCK": self.BLOCK, "EARLY": early}, 4, x.device)
        launched_early(self.launch, early)

    def __call__(self, x: Tensor, permutation: Tensor, offsets: Tensor) -> Tensor:
        out = x.new_empty(self.shape)
        self.launch(-(-self.shape[0] // self.ROWS), (x, permutation, offsets, out), self.numbers)
        return out


def constants(problem: GemmProblem, tile: GemmTile, call: Gemm, early: bool, scaled: bool) -> dict[str, Any]:
    """The compile-time values of `gemm_kernel`, in its order. Loads of the next tile begin before a tile ends only
    where all of them are TMA's: with gathered rows Triton would give up its pipeline."""
    by_tma = tile.tma and rows_by_tma(problem, tile)
    return {
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k, "GROUP_M": tile.group,
        "SWAP": tile.swap, "GATHER": problem.gather, "COPIED": tile.copied, "KIND": call.activation,
        "GATED": problem.gated, "INTERLEAVED": call.interleaved, "FORMAT": problem.weights, "GROUP": call.group,
        "SPLIT": tile.split,
        "EVEN": problem.depth % max(tile.block_k, weights.WORDS * PHASES.get(problem.weights, 0)) == 0,
        "FLATTEN": tile.persistent and by_tma, "EARLY": early,
        # Of a layer's second product, whose kernel ahead makes its rows. Persistent tiles wait once.
        "SETTLED": early and call.splittable and not problem.gather and not tile.persistent,
        "SCALED": scaled, "NATIVE": not interpreting(),
        "PAIRED": tile.paired and not scaled and tiles.pairs(problem, tile),
    }  # fmt: skip


def scales_weights(tile: GemmTile, dtype: torch.dtype, scale: Tensor | None) -> bool:
    """Whether scales of groups multiply the weights, as in a layer that was dequantised before. It spares a second
    accumulator, which many rows have no room for, but takes scales in the type of x."""
    return tile.swap and tile.block_m >= 64 and scale is not None and scale.dtype == dtype


def lies_in_pairs(scale: Tensor | None) -> bool:
    """Whether the scales of two neighbouring groups are one word of 32 bits."""
    if scale is None or scale.dim() != 3 or scale.element_size() != 2 or scale.stride(2) != 1:
        return False
    return scale.data_ptr() % 4 == 0 and scale.stride(0) % 2 == 0 and scale.stride(1) % 2 == 0


def rows_by_tma(problem: GemmProblem, tile: GemmTile) -> bool:
    """Whether TMA may load the rows: it cannot gather, and the few rows that go with words come in too small pieces."""
    return (tile.copied or not problem.gather) and (tile.block_m >= 128 or problem.weights not in PHASES)


def weight_box(problem: GemmProblem, tile: GemmTile, call: Gemm, columns: int) -> tuple[Any, ...]:
    """Shape, strides and block of the weights as TMA reads them: (E, 2, I, K), or (E, I, 2, K) where interleaved."""
    n, depth = problem.n, tile.block_k // PHASES.get(problem.weights, 1)
    if not problem.gated:
        return (problem.experts, 1, n, columns), (n * columns, n * columns, columns, 1), [1, 1, tile.block_n, depth]
    halves = 1 if tile.swap and problem.weights not in PHASES else 2
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
    if call.tile is None and tiles.widens(problem) and tensors[5].dtype == tensors[0].dtype:
        return wide_plan(problem, gpu, tensors, call)
    return tile_plan(problem, gpu, tensors, call)


def wide_plan(problem: GemmProblem, gpu: Gpu | None, tensors: tuple[Any, ...], call: Gemm) -> Run:
    """The weights are unpacked first, in the type of x, which their scales must have."""
    x, w, bias, row_weights, _, w_scale = tensors[:6]
    widen = Widen(problem, w, w_scale, gpu)
    like = torch.empty(widen.shape, dtype=x.dtype, device="meta")
    plain, asked = replace(problem, weights="", group=0), call._replace(weights="", group=0)
    run = tile_plan(plain, gpu, (x, like, bias, row_weights, None, None, *tensors[6:]), asked)

    def wide_run(
        x: Tensor, w: Tensor, bias: Tensor | None, row_weights: Tensor | None, x_scale: Tensor | None, w_scale: Tensor,
        *plan: Tensor,
    ) -> Tensor:  # fmt: skip
        found: Tensor = run(x, widen(w, w_scale), bias, row_weights, None, None, *plan)
        return found

    return wide_run


def tile_plan(problem: GemmProblem, gpu: Gpu | None, tensors: tuple[Any, ...], call: Gemm) -> Run:
    x, w, bias, row_weights, x_scale, w_scale = tensors[:6]
    lies = w.stride(2) != 1 or (w.is_contiguous() and w.data_ptr() % 16 == 0)  # a copy is made, or none is needed
    by_box = lies and w.shape[2] * w.element_size() % 16 == 0
    tile = tiles.choose(problem, gpu or GPUS["h200"], by_box, call.splittable, call.tile)
    tile = replace(tile, paired=tile.paired and lies_in_pairs(w_scale))
    copied_w = w.stride(2) != 1 or (tile.tma and not w.is_contiguous())  # a forced tile may ask for TMA
    strides_w = (w.shape[1] * w.shape[2], w.shape[2]) if copied_w else (w.stride(0), w.stride(1))
    copied = tile.copied and problem.gather
    by_tma = tile.tma and addressable(x) and rows_by_tma(problem, tile)
    early = starts_early(gpu)
    gather = Gather(x, problem.rows, tensors[9].shape[1], problem.experts, early) if copied else None
    n_tiles = -(-problem.width // tile.block_n)
    most = most_tiles(problem.rows, problem.experts, problem.block) * n_tiles * tile.split
    programs = min(most, gpu.sms) if tile.persistent and gpu else most
    fixed = constants(problem, tile, call, early, scales_weights(tile, x.dtype, w_scale))
    options = compile_options(tile.warps, tile.stages, tile.registers)
    launcher = launched_early(Launcher(gemm_kernel, fixed, options, x.device.index), early)
    box = weight_box(problem, tile, call, w.shape[2]) if tile.tma else None
    x_depth = tile.block_k // PHASES.get(problem.weights, 1)
    copied_scale = w_scale is not None and w_scale.dim() == 3 and w_scale.stride(2) != 1
    scale_strides = (0, 0) if w_scale is None else (w_scale.stride(0), w_scale.stride(1))
    if copied_scale:
        scale_strides = (w_scale.shape[1] * w_scale.shape[2], w_scale.shape[2])
    scattered = any(y is not None and not y.is_contiguous() for y in (bias, row_weights, x_scale))
    copied_x = x.stride(1) != 1
    stride_x = x.shape[1] if copied or copied_x else x.stride(0)
    x_box = ((problem.rows if copied else x.shape[0], x.shape[1]), (stride_x, 1), [tile.block_m, x_depth])
    shape = (problem.rows, problem.width) if tile.split == 1 else (tile.split, problem.rows, problem.width)
    output = room(shape, call.out_dtype if tile.split == 1 else torch.float32, x.device)
    numbers = (
        problem.rows, tensors[9].shape[1], problem.experts, n_tiles, programs, problem.width, problem.depth, w.shape[2],
        stride_x, *strides_w, *scale_strides, 0 if x_scale is None else x_scale.shape[1] if x_scale.dim() == 2 else 1,
        call.alpha, call.limit,
    )  # fmt: skip

    def run(
        x: Tensor, w: Tensor, bias: Tensor | None, row_weights: Tensor | None, x_scale: Tensor | None,
        w_scale: Tensor | None, counts: Tensor, offsets: Tensor, permutation: Tensor, inverse: Tensor, tiles: Tensor,
        tile_offsets: Tensor,
    ) -> Tensor:  # fmt: skip
        out = output()
        if most == 0:
            return out
        x = x.contiguous() if copied_x else x
        w = w.contiguous() if copied_w else w
        w_scale = w_scale.contiguous() if w_scale is not None and copied_scale else w_scale
        if scattered:
            bias, row_weights, x_scale = (None if y is None else y.contiguous() for y in (bias, row_weights, x_scale))
        x = gather(x, permutation, offsets) if gather else x
        arguments = (
            x, Descriptor(x, *x_box) if by_tma else None, w, Descriptor(w, *box) if box else None, bias, x_scale,
            w_scale, row_weights, permutation, offsets, tiles, tile_offsets, out,
        )  # fmt: skip
        launcher(programs, arguments, numbers)
        return out

    return run
