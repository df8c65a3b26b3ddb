"""The sum at the end of a layer on Hopper: compiles `combine.cu`, fills in its parameters and launches it."""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashkernels.hardware import Gpu
from flashkernels.jit import driver, nvrtc
from flashkernels.jit.block import ParameterBlock
from flashkernels.jit.eager import Run, room
from flashkernels.jit.headers import constants, texts
from flashkernels.moe.combine import Combine, CombineProblem
from flashkernels.moe.hopper.combine_tiles import PIECE

POINTERS = ("y", "weights", "shared", "inverse", "out")
ADDRESSES = struct.Struct(f"{len(POINTERS)}Q")
THREADS = 256


class Params(ctypes.Structure):
    """`Params` of combine.cu, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int) for name in ("tokens", "pieces", "settled")),
    )


def program(k: int, dtype: str, weighted: bool, shared: bool) -> tuple[str, str, dict[str, str]]:
    """Name, text and headers, as `jit.nvrtc.compile` takes them."""
    here = Path(__file__).parent
    flags = {"FP16": dtype == "fp16", "FP8": False, "WEIGHTED": weighted, "SHARED": shared}
    headers = texts(here.parents[1] / "attention" / "hopper", ["prelude"])
    return "combine.cu", (here / "combine.cu").read_text(), {**headers, "config.cuh": constants({"K": k}, flags)}


@functools.cache
def library(k: int, dtype: str, weighted: bool, shared: bool) -> driver.Library:
    return driver.Library(nvrtc.compile(*program(k, dtype, weighted, shared)))


def combine_plan(problem: CombineProblem, gpu: Gpu | None, tensors: tuple[Any, ...], call: Combine) -> Run:
    y, weights, shared = tensors[:3]
    weighted, added = weights is not None, shared is not None
    kernel = driver.Kernel(library(problem.k, problem.dtype, weighted, added), "combine", 0, early=True)
    pieces = problem.width // PIECE
    grid = -(-problem.rows * pieces // THREADS)
    device = y.device.index
    block = ParameterBlock(Params(tokens=problem.rows, pieces=pieces, settled=call.settled))
    address, write_addresses = block.address, block.writer("y", ADDRESSES)
    lock = threading.Lock()
    output = room((problem.rows, problem.width), call.dtype, y.device)

    def run(y: Tensor, weights: Tensor | None, shared: Tensor | None, permutation: Tensor, inverse: Tensor) -> Tensor:
        out = output()
        stream = torch._C._cuda_getCurrentRawStream(device)
        with lock:
            write_addresses(
                y.data_ptr(), 0 if weights is None else weights.data_ptr(), 0 if shared is None else shared.data_ptr(),
                inverse.data_ptr(), out.data_ptr(),
            )  # fmt: skip
            kernel.launch(grid, THREADS, stream, address)
        return out

    return run
