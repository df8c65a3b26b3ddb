"""Routing on Hopper: compiles a variant of `route.cu`, cuts one allocation into its outputs and launches it."""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import struct
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashkernels.fused.rows import DTYPES
from flashkernels.hardware import Gpu
from flashkernels.jit import driver, nvrtc
from flashkernels.jit.block import ParameterBlock
from flashkernels.jit.counters import counters
from flashkernels.jit.eager import Run, compiled, room
from flashkernels.jit.headers import constants, texts
from flashkernels.moe.hopper.route_tiles import Cut, HopperRouteTile, cut, own_experts, tile_of
from flashkernels.moe.plan import most_tiles, sizes
from flashkernels.moe.problem import RouteProblem
from flashkernels.moe.route import Call

POINTERS = (
    "logits", "bias", "used", "weights", "ids", "counts", "offsets", "permutation", "inverse", "tiles", "tile_offsets",
    "table", "arrivals",
)  # fmt: skip
TYPES = {"fp32": 0, "bf16": 1, "fp16": 2, "fp64": 3}
WAYS = {"alone": 0, "cluster": 1, "grid": 2}  # alone: there is no plan
ADDRESSES = struct.Struct(f"{len(POINTERS)}Q")
view = compiled._reinterpret_tensor  # `as_strided` in half the time; autograd sees no view in it


class Params(ctypes.Structure):
    """`Params` of route.cu, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in POINTERS),
        ("stride", ctypes.c_int64),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("tokens", "of_warp", "first", "last", "shift", "most")),
    )


@dataclass(frozen=True)
class RouteVariant:
    """All that the compiler sees of a problem."""

    experts: int
    k: int
    dtype: str
    vector: int  # logits that one load brings
    bias: str  # its dtype, or ""
    sigmoid: bool
    renormalise: bool
    tile: HopperRouteTile
    way: str

    @property
    def config(self) -> str:
        """`config.cuh`: the variant as constants."""
        numbers = {
            "EXPERTS": self.experts, "OWN": own_experts(self.experts), "K": self.k,
            "K2": 1 << (self.k - 1).bit_length(), "SIZE": 4 if self.dtype == "fp32" else 2, "TYPE": TYPES[self.dtype],
            "VECTOR": self.vector, "BIAS": TYPES[self.bias] + 1 if self.bias else 0, "WARPS": self.tile.warps,
            "PER_SM": self.tile.per_sm, "TOKENS": self.tile.ahead, "WAY": WAYS[self.way],
        }  # fmt: skip
        flags = {"SIGMOID": self.sigmoid, "RENORMALISE": self.renormalise}
        return constants(numbers, flags)


def program(variant: RouteVariant) -> tuple[str, str, dict[str, str]]:
    """Name, text and headers, as `jit.nvrtc.compile` takes them."""
    here = Path(__file__).parent
    return "route.cu", (here / "route.cu").read_text(), {**texts(here, ["route_machine"]), "config.cuh": variant.config}


@functools.cache
def library(variant: RouteVariant) -> driver.Library:
    """The variant's machine code, compiled once in a process and once on a machine."""
    return driver.Library(nvrtc.compile(*program(variant)))


def vector_of(dtype: str, experts: int, stride: int, address: int) -> int:
    """Logits of a lane that one load may bring: all of them in the row or none, and 16 bytes at most.

    >>> vector_of("fp32", 128, 128, 0), vector_of("bf16", 128, 128, 0), vector_of("fp32", 100, 101, 0)
    (4, 4, 1)
    """
    size = 4 if dtype == "fp32" else 2
    vector = min(own_experts(experts), 16 // size)
    while experts % vector or stride % vector or address % (vector * size):
        vector //= 2
    return vector


class Outputs:
    """Makes weights, ids and the six tensors of a plan, with a table of 16-bit counts beside them. Unless they must be
    apart, what is int32 is one allocation: views of it cost less."""

    def __init__(self, tokens: int, k: int, call: Call, table: int, device: torch.device) -> None:
        plan = sizes(tokens, k, call.last - call.first, call.block).values() if call.block else ()
        self.shapes = [(tokens, k), *plan]
        self.weights = room((tokens, k), torch.float32, device)
        self.strides = [(shape[1], 1) if len(shape) == 2 else (1,) for shape in self.shapes]
        all_shapes = (*self.shapes, (-(-table // 2),))
        starts, length = [], 0
        for shape in all_shapes:
            starts.append(length)
            length += -(-math.prod(shape) // 4) * 4  # 16 bytes apart, for vector accesses
        self.starts = starts[:-1]
        self.steps = [4 * start for start in (starts if call.block else starts[:1])]
        self.whole = room((length,), torch.int32, device)
        self.apart = [room(shape, torch.int32, device) for shape in all_shapes] if call.apart else None

    def __call__(self) -> tuple[tuple[Tensor, ...], list[int], Tensor]:
        """The tensors, the addresses of all but the weights (the table's is the last), and what must live until the
        launch."""
        weights = self.weights()
        if self.apart is not None:
            parts = [make() for make in self.apart]
            addresses = [part.data_ptr() for part in parts][: len(self.steps)]
            return (weights, *parts[:-1]), addresses, parts[-1]
        whole = self.whole()
        base = whole.data_ptr()
        views = map(view, itertools.repeat(whole), self.shapes, self.strides, self.starts)
        return (weights, *views), [base + step for step in self.steps], whole


def route_plan(problem: RouteProblem, gpu: Gpu | None, tensors: tuple[Any, ...], call: Call) -> Run:
    """Chooses the variant, compiles it, and lays out all of a launch that the signature decides."""
    assert gpu is not None
    logits, bias, _ = tensors
    tokens, experts, k = problem.tokens, problem.experts, problem.k
    whole = cut(call.tile or tile_of(problem), tokens, experts, k, gpu.sms)
    copied = logits.stride(1) != 1
    stride = experts if copied else logits.stride(0)
    vector = vector_of(problem.dtype, experts, stride, 0 if copied or logits.is_meta else logits.data_ptr())
    kind = "" if bias is None else DTYPES[bias.dtype]
    way = whole.way if call.block else "alone"
    variant = RouteVariant(experts, k, problem.dtype, vector, kind, call.sigmoid, call.renormalise, whole.tile, way)
    kernel = entry(library(variant), way, whole)
    blocks, threads = whole.blocks, 32 * whole.tile.warps
    outputs = Outputs(tokens, k, call, blocks * whole.columns if call.block else 0, logits.device)
    device = logits.device.index
    grid_wide = way == "grid"
    block = ParameterBlock(Params(
        stride=stride, scale=call.scale, tokens=tokens, of_warp=whole.of_warp, first=call.first, last=call.last,
        shift=max(1, call.block).bit_length() - 1,
        most=most_tiles(tokens * k, call.last - call.first, call.block) if call.block else 0,
    ))  # fmt: skip
    address, write_addresses = block.address, block.writer("logits", ADDRESSES)
    without_plan = () if call.block else (0,) * 7  # and without a table
    lock = threading.Lock()

    def run(logits: Tensor, bias: Tensor | None, used: Tensor | None) -> tuple[Tensor, ...]:
        found, addresses, _alive = outputs()
        if tokens == 0:
            return (found[0], *(x.zero_() for x in found[1:]))
        logits = logits.contiguous() if copied else logits
        bias = None if bias is None else bias.contiguous()
        stream = torch._C._cuda_getCurrentRawStream(device)
        arrivals = counters(device, stream) if grid_wide else 0
        with lock:
            write_addresses(
                logits.data_ptr(), 0 if bias is None else bias.data_ptr(), 0 if used is None else used.data_ptr(),
                found[0].data_ptr(), *addresses, *without_plan, arrivals,
            )  # fmt: skip
            kernel.launch(blocks, threads, stream, address)
        return found

    return run


def entry(code: driver.Library, way: str, whole: Cut) -> driver.Kernel:
    """The kernel, launched as its way asks for."""
    shared = 0 if way == "alone" else whole.shared
    cluster = whole.blocks if way == "cluster" and whole.blocks > 1 else 0
    return driver.Kernel(code, "route_tokens", shared, cooperative=way == "grid", cluster=cluster)
