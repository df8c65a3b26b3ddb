"""The Hopper decode: compiles a variant of `decode.cu` or `rows.cu`, fills in its parameters and launches it."""

from __future__ import annotations

import ctypes
import functools
import struct
import threading

import torch
from torch import Tensor

from flashkernels.decode.hopper import source, tiles
from flashkernels.decode.hopper.source import DecodeVariant
from flashkernels.decode.problem import DecodeProblem
from flashkernels.decode.tensors import Call, Run, empty_lse, empty_output
from flashkernels.hardware import Gpu
from flashkernels.jit import driver, nvrtc
from flashkernels.jit.block import ParameterBlock
from flashkernels.jit.counters import counters
from flashkernels.kvcache import PagedCache

LOG2E = 1.4426950408889634
POINTERS = (
    "k", "v", "q", "k_scale", "v_scale", "table", "lengths", "slopes", "sinks", "out", "lse", "parts", "counters",
)  # fmt: skip
STRIDES = (
    "k_page", "k_head", "v_page", "v_head", "q_batch", "q_head", "out_batch", "out_head", "k_scale_page",
    "k_scale_slot", "k_scale_head", "v_scale_page", "v_scale_slot", "v_scale_head", "table_batch", "slope_batch",
)  # fmt: skip


class Params(ctypes.Structure):
    """`Params` of decode_params.cuh, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_int64) for name in STRIDES),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
        *((name, ctypes.c_int) for name in ("batch", "kv_heads", "page_size", "left", "most_pieces", "table_width")),
    )


ADDRESSES, SCALES = struct.Struct(f"{len(POINTERS)}Q"), struct.Struct("2f")


@functools.cache
def kernel(variant: DecodeVariant) -> driver.Kernel:
    """The variant's machine code, compiled once in a process and once on a machine."""
    return driver.Kernel(nvrtc.compile(*source.program(variant)), "decode", variant.shared, early=True)


def plan(problem: DecodeProblem, gpu: Gpu | None, call: Call) -> Run:
    """Chooses the variant, compiles it, and lays out all of a launch that the signature decides."""
    assert gpu is not None
    k_page, k_slot, k_head = bytes_between(call.cache.k)
    v_page, v_slot, v_head = bytes_between(call.cache.v)
    variant = tiles.variant_of(problem, k_slot, v_slot, together=together(call.cache))
    code = kernel(variant)
    grid = gpu.sms * variant.tile.per_sm
    threads = variant.tile.threads
    most_pieces = variant.tile.pieces(gpu.sms, problem.kv_heads)
    # queries are read 8 bytes at a time; `contiguous` would leave those at an odd place where they are
    copied = call.q.stride(-1) != 1 or any(step % 4 for step in call.q.stride()[:3]) or call.q.data_ptr() % 8 != 0
    q = call.q.clone(memory_format=torch.contiguous_format) if copied else call.q
    device = q.device.index
    empty = problem.batch == 0
    out = empty_output(q, problem.head_dim_v)
    slopes = call.alibi_slopes
    none = (0, 0, 0)
    numbers = (
        k_page, k_head, v_page, v_head, q.stride(0), q.stride(2), out.stride(0), out.stride(2),
        *(none if problem.scales != "token" else _three(call.cache.k_scale)),
        *(none if problem.scales != "token" else _three(call.cache.v_scale)),
        call.cache.block_table.stride(0), problem.heads if slopes is not None and slopes.dim() == 2 else 0,
    )  # fmt: skip
    block = ParameterBlock(Params(
        **dict(zip(STRIDES, numbers, strict=True)), batch=problem.batch, kv_heads=problem.kv_heads,
        page_size=problem.page_size, left=min(max(problem.window[0], 0), 1 << 30), most_pieces=most_pieces,
        table_width=call.cache.block_table.shape[1],
    ))  # fmt: skip
    address = block.address
    write_addresses, write_scales = block.writer("k", ADDRESSES), block.writer("scale", SCALES)
    lock = threading.Lock()
    part_floats = most_pieces * 2 * variant.part_floats

    def run(call: Call, softmax_scale: float, softcap: float) -> tuple[Tensor, Tensor | None]:
        if device != torch.cuda.current_device():
            with torch.cuda.device(device):
                return run(call, softmax_scale, softcap)
        q, cache, _, slopes, sinks, _ = call
        if copied:
            q = q.clone(memory_format=torch.contiguous_format)
        out = empty_output(q, problem.head_dim_v)
        lse = empty_lse(q) if problem.need_lse else None
        if empty:
            return out, lse
        parts = q.new_empty(part_floats, dtype=torch.float32)
        slopes, sinks = (None if x is None else x.to(torch.float32).contiguous() for x in (slopes, sinks))
        stream = torch._C._cuda_getCurrentRawStream(device)
        count = counters(device, stream)
        with lock:
            own = (cache.k_scale, cache.v_scale, cache.block_table, cache.lengths)
            tensors = (cache.k, cache.v, q, *own, slopes, sinks, out, lse, parts)
            write_addresses(*(0 if x is None else x.data_ptr() for x in tensors), count)
            write_scales(softmax_scale / softcap if softcap else softmax_scale * LOG2E, softcap * LOG2E)
            code.launch(grid, threads, stream, address)
        return out, lse

    return run


def bytes_between(pages: Tensor) -> tuple[int, ...]:
    """From one page, slot and head to the next. Of one alone it does not matter."""
    sizes = zip(pages.shape[:3], pages.stride()[:3], strict=True)
    return tuple(step * pages.element_size() if n > 1 else 16 for n, step in sizes)


def together(cache: PagedCache) -> bool:
    """Whether the rows of a page lie side by side, those of all heads of a token first, and so do its scales."""
    scales = [x for x in (cache.k_scale, cache.v_scale) if x is not None and x.dim() > 1]
    aligned = all(x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0 for x in scales)
    return aligned and all(x[:1].is_contiguous() for x in (cache.k, cache.v, *scales))


def _three(scales: Tensor | None) -> tuple[int, ...]:
    """(page, slot, head) strides of the scales of tokens."""
    assert scales is not None
    return scales.stride()[:3]
