"""The Hopper grouped GEMM: compiles a variant of `gemm.cu`, fills in its parameters and launches it."""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from typing import Any

import torch
from torch import Tensor

from flashkernels.hardware import Gpu
from flashkernels.jit import driver, nvrtc
from flashkernels.jit.block import ParameterBlock
from flashkernels.jit.counters import counters
from flashkernels.jit.eager import Run, room
from flashkernels.moe.gemm import Gemm
from flashkernels.moe.hopper import gemm_source as source, gemm_tiles, rounding
from flashkernels.moe.hopper.gemm_source import THREADS, GemmVariant
from flashkernels.moe.hopper.gemm_tiles import ROW_BYTES, WEIGHT_ROWS, HopperGemmTile
from flashkernels.moe.problem import GemmProblem
from flashkernels.moe.weights import DTYPES as SMALL_DTYPES

BOX_ROWS = 16  # of x, that one load brings
GATHER_ROWS, GATHER_THREADS = 8, 256  # of a block that copies
POINTERS = (
    "out", "tokens", "gathered", "offsets", "permutation", "inverse", "bias", "row_weights", "token_scales", "x_scales",
    "w_scales", "counters",
)  # fmt: skip
NUMBERS = ("experts", "width", "depth", "of_token", "features", "step", "half", "token_count", "row_warps")


class Params(ctypes.Structure):
    """`Params` of gemm_params.cuh, field by field."""

    _fields_ = (
        *((name, ctypes.c_uint64 * 16) for name in ("w", "x")),
        *((name, ctypes.c_void_p) for name in POINTERS),
        ("stride_tokens", ctypes.c_int64),
        *((name, ctypes.c_int) for name in NUMBERS),
    )


ADDRESSES = struct.Struct(f"{len(POINTERS)}Q")
MAPS = struct.Struct(f"{2 * driver.MAP_BYTES}s")  # `w` and `x`


@functools.cache
def library(variant: GemmVariant) -> driver.Library:
    """The variant's machine code, compiled once in a process and once on a machine."""
    return driver.Library(nvrtc.compile(*source.program(variant)))


def gemm_plan(problem: GemmProblem, gpu: Gpu | None, tensors: tuple[Any, ...], call: Gemm) -> Run:
    """Chooses the variant, compiles it, and lays out all of a launch that the signature decides."""
    assert gpu is not None
    x, _, bias, row_weights = tensors[:4]
    tile = gemm_tiles.choose(problem, call.tile)
    fused = tile.fused and problem.gather
    variant = GemmVariant(
        tile.rows, tile.stages, call.out == "fp16", problem.gated, bias is not None, row_weights is not None, fused,
        tile.cluster, problem.weights, problem.wide, loads_ahead(problem, tile, call),
    )  # fmt: skip
    copied = problem.gather and not fused
    code = library(variant)
    multiply = driver.Kernel(code, "gemm", variant.shared, early=True)
    gather = driver.Kernel(code, "round_and_gather" if problem.wide else "gather", 0, early=True)
    device = x.device.index
    features = -(-problem.n // (WEIGHT_ROWS * tile.cluster))
    grid = gpu.sms // tile.cluster * tile.cluster
    mixed = call.interleaved and problem.gated
    warps = rounding.row_warps(problem.depth)
    numbers = (
        problem.experts, problem.width, problem.depth, tensors[9].shape[1], features, 2 if mixed else 1,
        1 if mixed else problem.width, x.shape[0], warps,
    )  # fmt: skip
    stride_tokens = x.stride(0) * x.element_size()
    block = ParameterBlock(Params(stride_tokens=stride_tokens, **dict(zip(NUMBERS, numbers, strict=True))))
    address = block.address
    write_maps, write_addresses = block.writer("w", MAPS), block.writer("out", ADDRESSES)
    lock = threading.Lock()
    output = room((problem.rows, problem.width), call.out_dtype, x.device)
    scales_at = problem.rows * problem.depth  # behind the gathered rows, whose elements are bytes then
    gathered_shape = (problem.rows + (-(-4 * problem.rows // problem.depth) if problem.weights else 0), problem.depth)
    copies, threads = -(-problem.rows // GATHER_ROWS), GATHER_THREADS
    if problem.wide:
        threads = 32 * rounding.block_warps(warps)
        copies = -(-x.shape[0] // (rounding.block_warps(warps) // warps))
    small = SMALL_DTYPES.get(problem.dtype, x.dtype)  # of gathered rows
    box_rows = 1 if fused else BOX_ROWS
    mapped = (0, 0)
    known = driver.Kept()

    def run(
        x: Tensor, w: Tensor, bias: Tensor | None, row_weights: Tensor | None, x_scale: Tensor | None,
        w_scale: Tensor | None, counts: Tensor, offsets: Tensor, permutation: Tensor, inverse: Tensor, tiles: Tensor,
        tile_offsets: Tensor,
    ) -> Tensor:  # fmt: skip
        nonlocal mapped
        out = output()
        if copies == 0:
            return out
        rows = x.new_empty(gathered_shape, dtype=small) if copied else x
        bias, row_weights, x_scale, w_scale = (
            None if y is None else y.to(torch.float32).contiguous() for y in (bias, row_weights, x_scale, w_scale)
        )
        stream = torch._C._cuda_getCurrentRawStream(device)
        count = counters(device, stream)
        pointers = (w.data_ptr(), rows.data_ptr())
        given = (out, x, rows, offsets, permutation, inverse, bias, row_weights, x_scale)
        scales = pointers[1] + scales_at if copied and w_scale is not None else 0
        if x_scale is not None and not copied:
            scales = x_scale.data_ptr()
        with lock:
            if mapped != pointers:
                found = known.get(pointers)
                if found is None:
                    found = weight_map(w, problem, call.interleaved) + row_map(rows, problem.dtype, box_rows)
                    known[pointers] = found
                write_maps(found)
                mapped = pointers
            addresses = (0 if y is None else y.data_ptr() for y in given)
            write_addresses(*addresses, scales, 0 if w_scale is None else w_scale.data_ptr(), count)
            if copied:
                gather.launch(copies, threads, stream, address)
            multiply.launch(grid, THREADS, stream, address)
        return out

    return run


def loads_ahead(problem: GemmProblem, tile: HopperGemmTile, call: Gemm) -> bool:
    """Whether the kernel ahead of the product, which is running still, can have written neither weights nor plan: it is
    the copy of the rows, or what makes the rows of a layer's second product."""
    return not tile.fused if problem.gather else call.splittable


def weight_map(w: Tensor, problem: GemmProblem, interleaved: bool) -> bytes:
    """(depth, feature, half, expert): a box is what one consumer multiplies, 64 of gate and of up, or 128 features."""
    expert, row = w.stride(0) * w.element_size(), w.stride(1) * w.element_size()
    width, halves, features = problem.width, problem.n // problem.width, WEIGHT_ROWS // 2
    strides = (2 * row, row, expert) if interleaved and halves == 2 else (row, width * row, expert)
    sizes = (problem.depth, width, halves, problem.experts)
    return encoded(w, problem.dtype, sizes, strides, (features // halves, halves, 1))


def row_map(x: Tensor, dtype: str, rows: int) -> bytes:
    """(depth, row, 1, 1)."""
    row = x.stride(0) * x.element_size()
    return encoded(x, dtype, (x.shape[1], x.shape[0], 1, 1), (row, row, row), (rows, 1, 1))


def encoded(x: Tensor, dtype: str, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]) -> bytes:
    """Boxes of 128 bytes along the depth. INT8 travels as FP8 does, as bytes."""
    kind = "fp8" if dtype == "int8" else dtype
    box = (ROW_BYTES // x.element_size(), *box)
    return driver.tensor_map(x.data_ptr(), kind, sizes, strides, box, ROW_BYTES)
