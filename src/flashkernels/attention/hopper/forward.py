"""The Hopper forward: compiles a variant of `forward.cu` or `wide.cu`, fills in its parameters and launches it."""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from typing import Any

import torch
from torch import Tensor

from flashkernels.attention.hopper import source, tiles, wide_source
from flashkernels.attention.hopper.source import Variant
from flashkernels.attention.problem import AttentionProblem, heads_together
from flashkernels.attention.tensors import Run, Tensors, empty_output, lse_shape, strides_of
from flashkernels.hardware import Gpu
from flashkernels.jit import driver, nvrtc
from flashkernels.jit.block import ParameterBlock
from flashkernels.jit.counters import counters
from flashkernels.jit.eager import room
from flashkernels.tiling import override

LOG2E = 1.4426950408889634
FAR = 1 << 30  # a window wider than any sequence; keeps positions inside 32 bits
# Of K and V worked on side by side: about half of an L2, in equal sections (H200, 2026-11-15: causal D=256 573 to
# 607 TFLOPS over sections that leave a small one at the end).
SECTION_BYTES = 32e6


class Params(ctypes.Structure):
    """`Params` of params.cuh, field by field."""

    _fields_ = (
        *((name, ctypes.c_uint64 * 16) for name in ("q", "q_rest", "k", "k_rest", "v", "o")),
        *((name, ctypes.c_void_p) for name in (
            "out", "lse", "counters", "q_data", "k_data", "v_data", "slopes", "sinks", "cu_q", "cu_k", "order", "pages",
            "partial", "q_scale", "k_scale", "v_scale", "values",
        )),
        *((name, ctypes.c_int64 * 3) for name in ("q_strides", "k_strides", "v_strides", "out_strides")),
        *((name, ctypes.c_int64) for name in ("lse_batch", "lse_head", "slope_batch")),
        *((name, ctypes.c_int) for name in ("q_blocks", "k_blocks", "values_row")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
        *((name, ctypes.c_int) for name in (
            "batch", "heads", "group", "seq_q", "seq_k", "left", "right", "blocks", "tiles", "section", "whole",
            "cut", "shares", "page_size", "max_pages",
        )),
    )  # fmt: skip


@functools.cache
def library(variant: Variant) -> driver.Library:
    """The variant's machine code, compiled once in a process and once on a machine."""
    return driver.Library(nvrtc.compile(*source.program(variant)))


def plan(problem: AttentionProblem, gpu: Gpu, tensors: Tensors) -> Run:
    """Chooses the variant, compiles it, and lays out all of a launch that the signature decides."""
    choice = tiles.choose(problem, gpu.sms, override())
    variant, tile = choice.variant, choice.variant.tile
    device = tensors.q.device.index
    code = library(variant)
    params = described(problem, choice, tensors)
    grid = min(gpu.sms // tile.cluster, params.tiles) * tile.cluster
    # floats that a cut tile's parts leave, two parts for each share: epilogue.cuh
    parts = 2 * choice.shares * tile.cluster * tile.groups * 128 * (problem.head_dim_v // 2 + 4)
    maps, known, known_out = Maps(problem, variant), driver.Kept(), driver.Kept()
    block = ParameterBlock(params)
    write_maps, write_out_map = block.writer("q", MAPS), block.writer("o", MAP)
    write_common, write_data = block.writer("out", COMMON), block.writer("q_data", COMMON)
    write_special, write_scales = block.writer("slopes", SPECIAL), block.writer("scale", SCALES)
    forward = driver.Kernel(code, "forward", variant.shared).starter(variant.threads, [block.address])
    order = driver.Kernel(code, "order", 0).starter(128, [block.address])
    turn = driver.Kernel(code, "values", 0).starter(128, [block.address]) if variant.fp8 else None
    like = empty_output(tensors.q.to("meta"), problem.head_dim_v, problem.layout)
    output = room(like.shape, like.dtype, tensors.q.device, like.stride())
    logs = room(lse_shape(tensors.q), torch.float32, tensors.q.device) if problem.need_lse else None
    lock = threading.Lock()
    mapped, mapped_out, scaled = (0, 0, 0, 0), (0,), (0.0, 0.0)  # what the block has
    plain = not (problem.alibi or problem.sinks or problem.varlen or parts or variant.fp8)
    order_blocks = -(-problem.batch // 128) if problem.varlen else 0
    sends = choice.sent(gpu.sms) > 0
    value_blocks = problem.batch * problem.kv_heads * -(-problem.head_dim_v // 64) * params.values_row // 128

    def run(tensors: tuple[Any, ...], softmax_scale: float, softcap: float) -> tuple[Tensor, Tensor | None]:
        """With the tensors' device as the current one."""
        nonlocal mapped, mapped_out, scaled
        q, k, v = tensors[:3]
        out, lse = output(), logs() if logs else None
        special = () if plain else special_tensors(tensors)
        turned = special[-1] if special else None  # V transposed, of FP8
        stream = torch._C._cuda_getCurrentRawStream(device)
        count = counters(device, stream)
        # (V as well as V transposed: a new V may meet the same room for it.)
        pointers = q.data_ptr(), k.data_ptr(), v.data_ptr(), 0 if turned is None else turned.data_ptr()
        scales = softmax_scale, softcap
        lock.acquire()  # `with` takes twice the time
        try:
            if mapped != pointers:
                found = known.get(pointers)
                if found is None:
                    found = known[pointers] = maps.of(q, k, v if turned is None else turned)
                write_maps(found)
                write_data(*pointers[:3])
                mapped = pointers
            if sends and mapped_out != (at := (out.data_ptr(),)):
                found = known_out.get(at)
                if found is None:
                    found = known_out[at] = maps.outputs(out)
                write_out_map(found)
                mapped_out = at
            write_common(out.data_ptr(), 0 if lse is None else lse.data_ptr(), count)
            if special:
                write_special(*(0 if x is None else x.data_ptr() for x in special))
            if scaled != scales:
                write_scales(softmax_scale / softcap if softcap else softmax_scale * LOG2E, softcap * LOG2E)
                scaled = scales
            if order_blocks:
                order(order_blocks, stream)
            if turn:
                turn(value_blocks, stream)
            forward(grid, stream)
        finally:
            lock.release()
        return out, lse

    def special_tensors(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
        """What SPECIAL holds, in its order; made afresh for each call where it is not an argument."""
        q, _, v, slopes, sinks, _, cu_q, cu_k, table, *scales = tensors[:12]
        ordered = q.new_empty(2 * problem.batch + 1, dtype=torch.int32) if problem.varlen else None
        partial = q.new_empty(parts, dtype=torch.float32) if parts else None
        turned = None
        if variant.fp8:
            heads = (problem.heads, problem.kv_heads, problem.kv_heads)
            scales = [q.new_ones(problem.batch, n, dtype=torch.float32) if scale is None else scale
                      for n, scale in zip(heads, scales, strict=True)]  # fmt: skip
            turned = v.new_empty(problem.batch, problem.kv_heads, problem.head_dim_v, params.values_row)
        return (_float32(slopes), _float32(sinks), cu_q, cu_k, ordered, table, partial, *scales, turned)

    return run


# Parts of Params: from `q` to `v`, `o`; from `out` to `counters` and from `q_data` to `v_data`, from `slopes` to
# `values`; both scales.
MAPS, MAP = (struct.Struct(f"{count * driver.MAP_BYTES}s") for count in (5, 1))
COMMON, SPECIAL, SCALES = struct.Struct("3Q"), struct.Struct("11Q"), struct.Struct("2f")


def _blocks(scale: Tensor | None) -> int:
    """Scales of one head; 0: one for all its rows."""
    return scale.shape[2] if scale is not None and scale.dim() == 3 else 0


def _float32(x: Tensor | None) -> Tensor | None:
    return x if x is None else x.to(torch.float32).contiguous()


def described(problem: AttentionProblem, choice: tiles.Choice, tensors: Tensors) -> Params:
    """The parameters that the signature decides."""
    variant = choice.variant
    q, k, v = tensors[:3]
    pack, rows = variant.pack, variant.queries * variant.tile.cluster
    left, right = (min(max(side, 0), FAR) for side in problem.band)
    blocks = -(-problem.seq_q // rows)
    heads = problem.heads // pack
    out = empty_output(q.to("meta"), problem.head_dim_v, problem.layout)  # for its strides
    slopes = tensors.alibi_slopes
    three = ctypes.c_int64 * 3
    return Params(
        q_strides=three(*strides_of(q)[:3]), k_strides=three(*strides_of(k)[:3]), v_strides=three(*strides_of(v)[:3]),
        out_strides=three(*strides_of(out)[:3]),
        lse_batch=0 if problem.varlen else problem.heads * problem.seq_q,
        lse_head=problem.total_q if problem.varlen else problem.seq_q,
        slope_batch=problem.heads if slopes is not None and slopes.dim() == 2 else 0,
        q_blocks=_blocks(tensors.q_scale), k_blocks=_blocks(tensors.k_scale),
        values_row=-(-problem.seq_k // 128) * 128 if variant.fp8 else 0,
        batch=problem.batch, heads=heads, group=problem.heads // problem.kv_heads // pack,
        seq_q=problem.seq_q, seq_k=problem.seq_k, left=left, right=right, blocks=blocks,
        section=heads_together(problem.batch * heads, problem.kv_bytes, SECTION_BYTES),
        tiles=choice.whole + choice.shares, whole=choice.whole, cut=choice.cut, shares=choice.shares,
        page_size=problem.page_size, max_pages=0 if tensors.block_table is None else tensors.block_table.shape[1],
    )  # fmt: skip


class Maps:
    """The tensor maps of a signature."""

    def __init__(self, problem: AttentionProblem, variant: Variant) -> None:
        self.problem, self.variant = problem, variant

    def of(self, q: Tensor, k: Tensor, v: Tensor) -> bytes:
        """Those that `Params` starts with, of these inputs."""
        variant = self.variant
        k_width, _, k_rest, v_width, _ = variant.chunks
        rows = v_rows = variant.tile.block_n // variant.tile.cluster
        if variant.wide:
            rows, v_rows = wide_source.box_rows(variant)
        elif variant.paged:
            rows = v_rows = tiles.page_rows(variant.tile.block_n)
        none = bytes(driver.MAP_BYTES)
        return b"".join((
            self.queries(q, k_width), self.queries(q, k_rest) if k_rest else none,
            self.keys(k, k_width, rows), self.keys(k, k_rest, rows) if k_rest else none,
            self.turned(v, v_width) if variant.fp8 else self.keys(v, v_width, v_rows),
        ))  # fmt: skip

    def queries(self, x: Tensor, width: int) -> bytes:
        """(column, head of a pack, query, pack, batch): the rows of a box are the heads of 64 / pack queries."""
        batch, seq, heads, dim = (1, *x.shape)[-4:]
        pack = self.variant.pack
        steps = spaced(x)
        if pack == 1:
            return self.keys(x, width, 64)
        sizes = (dim, pack, seq, heads // pack, batch)
        strides = (steps[2], steps[1], steps[2] * pack, steps[0])
        return self.encoded(x, sizes, strides, (width // x.element_size(), pack, 64 // pack, 1, 1))

    def keys(self, x: Tensor, width: int, rows: int) -> bytes:
        """(column, key, head, batch), or a page in the place of the batch. `width` is in bytes."""
        batch, seq, heads, dim = (1, *x.shape)[-4:]
        steps = spaced(x)
        columns = width // x.element_size()
        return self.encoded(x, (dim, seq, heads, batch), (steps[1], steps[2], steps[0]), (columns, rows, 1, 1))

    def outputs(self, x: Tensor) -> bytes:
        """(column, query, head, batch): what one warp writes."""
        return self.keys(x, 128, 16)

    def turned(self, x: Tensor, width: int) -> bytes:
        """(key, column, head, batch) of V transposed, (B, H_kv, D_v, keys)."""
        batch, heads, dim, keys = x.shape
        strides = (keys, keys * dim, keys * dim * heads)
        return self.encoded(x, (keys, dim, heads, batch), strides, (width, dim, 1, 1))

    def encoded(self, x: Tensor, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]) -> bytes:
        # A box may be larger than the tensor: what lies outside arrives as zeros.
        size = x.element_size()
        in_bytes = tuple(step * size for step in strides)
        dtype = self.problem.dtype if size == self.problem.element_bytes else "bf16"  # outputs of FP8
        return driver.tensor_map(x.data_ptr(), dtype, sizes, in_bytes, box, box[0] * size)


def spaced(x: Tensor) -> list[int]:
    """(batch, seq, head) strides; a dimension of size 1 is never stepped over, so any stride that TMA takes will do."""
    shape = (1, *x.shape)[-4:]
    row = -(-shape[-1] // 16) * 16
    return [step if n > 1 else row for n, step in zip(shape[:3], strides_of(x)[:3], strict=True)]
