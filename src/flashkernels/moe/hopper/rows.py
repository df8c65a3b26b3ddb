"""Rows rounded to 8 bits on Hopper: compiles `rows.cu`, fills in its parameters and launches it."""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashkernels.fused.rows import RowProblem
from flashkernels.hardware import Gpu
from flashkernels.jit import driver, nvrtc
from flashkernels.jit.block import ParameterBlock
from flashkernels.jit.eager import Run, room
from flashkernels.jit.headers import constants, texts
from flashkernels.moe.hopper.rounding import block_warps, row_warps
from flashkernels.moe.rows import Rounding
from flashkernels.moe.weights import DTYPES

POINTERS = ("x", "out", "scales")
ADDRESSES = struct.Struct(f"{len(POINTERS)}Q")


class Params(ctypes.Structure):
    """`Params` of rows.cu, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in POINTERS),
        ("stride", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("rows", "width", "warps")),
    )


def program(format: str, dtype: str) -> tuple[str, str, dict[str, str]]:
    """Name, text and headers, as `jit.nvrtc.compile` takes them: rows of `dtype` become "fp8" or "int8"."""
    here = Path(__file__).parent
    flags = {"FP16": False, "FP8": format == "fp8", "INT8": format == "int8", "WIDE_FP16": dtype == "fp16"}
    headers = texts(here, ["rounding"]) | texts(here.parents[1] / "attention" / "hopper", ["prelude"])
    return "rows.cu", (here / "rows.cu").read_text(), {**headers, "config.cuh": constants({}, flags)}


@functools.cache
def library(format: str, dtype: str) -> driver.Library:
    return driver.Library(nvrtc.compile(*program(format, dtype)))


def rounding_plan(problem: RowProblem, gpu: Gpu | None, tensors: tuple[Any, ...], call: Rounding) -> Run:
    (x,) = tensors
    rows, width = problem.rows, problem.width
    warps = row_warps(width)
    threads = 32 * block_warps(warps)
    grid = -(-rows // (threads // 32 // warps))
    kernel = driver.Kernel(library(call.format, problem.dtype), "round_rows", 0, early=True)
    device = x.device.index
    block = ParameterBlock(Params(stride=x.stride(0) * x.element_size(), rows=rows, width=width, warps=warps))
    address, write_addresses = block.address, block.writer("x", ADDRESSES)
    lock = threading.Lock()
    output = room((rows, width), DTYPES[call.format], x.device)
    scales = room((rows,), torch.float32, x.device)

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        out, scale = output(), scales()
        stream = torch._C._cuda_getCurrentRawStream(device)
        with lock:
            write_addresses(x.data_ptr(), out.data_ptr(), scale.data_ptr())
            kernel.launch(grid, threads, stream, address)
        return out, scale

    return run
