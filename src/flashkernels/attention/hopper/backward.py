"""The Hopper backward: compiles a variant of `backward.cu`, or of `backward_wide.cu` for heads over 256, fills in its
parameters and launches its kernels.

Where dQ is summed by additions in memory, their order is not fixed, and dQ is not the same to the bit in every run. All
other gradients are, and so is dQ where a kernel of its own makes it: `deterministic` problems.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from flashkernels.attention import sinks as sunk
from flashkernels.attention.hopper import backward_source as source, backward_tiles as tiles
from flashkernels.attention.hopper.backward_source import OWN_KEYS, THREADS, BackwardVariant
from flashkernels.attention.hopper.forward import FAR, LOG2E, SECTION_BYTES, spaced
from flashkernels.attention.problem import AttentionProblem, BackwardProblem, heads_together
from flashkernels.attention.tensors import Given, RunBackward, Tensors, strides_of, unaddressable
from flashkernels.hardware import Gpu
from flashkernels.jit import driver, nvrtc
from flashkernels.jit.block import ParameterBlock
from flashkernels.jit.counters import counters
from flashkernels.jit.eager import room

POINTERS = (
    "q_data", "k_data", "v_data", "out", "grad_out_data", "lse", "grad_lse", "dq", "dk", "dv", "row_delta", "level",
    "delta", "sums", "poisoned", "bad_keys", "counters", "slopes", "cu_q", "cu_k", "order",
)  # fmt: skip


class Params(ctypes.Structure):
    """`Params` of backward_params.cuh, field by field."""

    _fields_ = (
        *((name, ctypes.c_uint64 * 16) for name in ("q", "k", "v", "grad_out", "dk_rows", "dv_rows")),
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((f"{name}_strides", ctypes.c_int64 * 3) for name in ("q", "k", "v", "out", "grad_out", "dq", "dk", "dv")),
        *((name, ctypes.c_int64) for name in (
            "lse_batch", "lse_head", "slope_batch", "grad_lse_batch", "grad_lse_head", "grad_lse_seq",
        )),
        *((name, ctypes.c_float) for name in ("scale", "softcap", "grad_scale")),
        *((name, ctypes.c_int) for name in (
            "batch", "heads", "group", "kv_heads", "seq_q", "seq_k", "total_q", "total_k_rows", "left", "right",
            "blocks", "key_blocks", "places", "tiles", "section", "own_blocks", "bad_blocks", "has_sinks",
        )),
    )  # fmt: skip


# Parts of Params: from `q` to `grad_out`; `dk_rows` and `dv_rows`; all pointers; `scale`, `softcap` and `grad_scale`.
MAPS, GRADIENT_MAPS = (struct.Struct(f"{count * driver.MAP_BYTES}s") for count in (4, 2))
ADDRESSES = struct.Struct(f"{len(POINTERS)}Q")
SCALES = struct.Struct("3f")


@functools.cache
def library(variant: BackwardVariant) -> driver.Library:
    """The variant's machine code, compiled once in a process and once on a machine."""
    return driver.Library(nvrtc.compile(*source.program(variant)))


def plan(problem: BackwardProblem, gpu: Gpu, tensors: Tensors, given: Given) -> RunBackward:
    """Chooses the variant, compiles it, and lays out all of the launches that the signature decides."""
    call, wanted = problem.call, problem.wanted
    variant = tiles.choose(problem)
    device, size = tensors.q.device.index, variant.tile.queries
    code = library(variant)
    # TMA and 16-byte loads want aligned rows; a gradient may come with any strides, also expanded from one number
    copied = [bool(unaddressable(x)) for x in (given.grad_out, _given(given.out))]
    params = described(call, variant, tensors, given, copied)
    places, bad_blocks = params.places, blocks_to_look_through(call, variant, params)
    blocks = places // size
    launches = launches_of(call, variant, params, gpu, code)
    block = ParameterBlock(params)
    address, write_maps = block.address, block.writer("q", MAPS)
    write_gradient_maps = block.writer("dk_rows", GRADIENT_MAPS)
    write_addresses, write_scales = block.writer("q_data", ADDRESSES), block.writer("scale", SCALES)
    lock = threading.Lock()
    mapped, known, known_gradients = (0, 0, 0, 0), driver.Kept(), driver.Kept()
    outputs = [output(x, call.varlen) if name in wanted else None for name, x in zip("qkv", tensors[:3], strict=True)]
    # Level, delta and a note for each block. dQ's own memory has them where `queries` writes all of it in the end.
    noted = 2 * places + blocks
    in_dq = variant.adds_dq and not call.varlen and 2 * noted <= call.total_q * call.heads * call.head_dim

    def run(tensors: Tensors, given: Given, softmax_scale: float, softcap: float) -> list[Tensor | None]:
        """With the tensors' device as the current one."""
        nonlocal mapped
        q, k, v, slopes, sinks, _, cu_q, cu_k = tensors[:8]
        grad_out, out = (
            x.clone(memory_format=torch.contiguous_format) if copy else x  # contiguous() leaves it where it is
            for x, copy in zip((given.grad_out, _given(given.out)), copied, strict=True)
        )
        lse, grad_lse = _given(given.lse).contiguous(), given.grad_lse
        grads = [None if fresh is None else fresh() for fresh in outputs]
        statistics = grads[0] if in_dq and grads[0] is not None else lse.new_empty(noted)
        level = statistics.data_ptr()
        delta, notes = level + 4 * places, level + 8 * places
        sums = lse.new_empty(blocks * variant.sums) if variant.adds_dq else None
        bad = lse.new_empty(2 * bad_blocks, dtype=torch.int64) if bad_blocks else None
        row_delta = torch.zeros_like(lse) if "sinks" in wanted else None
        ordered = lse.new_empty(2 * call.batch + 1, dtype=torch.int32) if call.varlen else None
        slopes = None if slopes is None else slopes.to(torch.float32).contiguous()
        stream = torch._C._cuda_getCurrentRawStream(device)
        count = counters(device, stream)
        pointers = (q.data_ptr(), k.data_ptr(), v.data_ptr(), grad_out.data_ptr())
        with lock:
            if mapped != pointers:
                found = known.get(pointers)
                if found is None:
                    rows_of = (variant.query_box, variant.key_box, variant.key_box, variant.query_box)
                    maps = (boxes(x, n, call.dtype) for x, n in zip((q, k, v, grad_out), rows_of, strict=True))
                    found = known[pointers] = b"".join(maps)
                write_maps(found)
                mapped = pointers
            if variant.tile.sends:
                written = tuple(map(_address, grads[1:]))
                found = known_gradients.get(written)
                if found is None:
                    found = known_gradients[written] = b"".join(
                        bytes(driver.MAP_BYTES) if x is None else boxes(x, 16, call.dtype) for x in grads[1:]
                    )
                write_gradient_maps(found)
            write_addresses(
                *pointers[:3], out.data_ptr(), pointers[3], lse.data_ptr(),
                *map(_address, (grad_lse, *grads, row_delta)), level, delta, _address(sums), notes, _address(bad),
                count, *map(_address, (slopes, cu_q, cu_k, ordered)),
            )  # fmt: skip
            scale = softmax_scale / softcap if softcap else softmax_scale * LOG2E
            write_scales(scale, softcap * LOG2E, softmax_scale)
            for kernel, grid, threads in launches:
                kernel.launch(grid, threads, stream, address)
        dsinks = None
        if row_delta is not None and sinks is not None:
            blind = sunk.unseeing(lse, cu_q)
            dsinks = sunk.gradient(sinks, sunk.weights(sinks, lse, blind), row_delta, blind)
        return [*grads, None, dsinks, None]

    return run


def launches_of(
    call: AttentionProblem, variant: BackwardVariant, params: Params, gpu: Gpu, code: driver.Library
) -> list[tuple[driver.Kernel, int, int]]:
    """The kernels, in turn, with the blocks and threads of each."""
    found: list[tuple[driver.Kernel, int, int]] = []
    copies = 1 if call.varlen else call.batch
    own = params.own_blocks * call.heads * copies if variant.own_dq and variant.want_q else 0

    def then(name: str, blocks: int, threads: int = THREADS) -> None:
        if blocks:
            found.append((driver.Kernel(code, name, variant.kernels.get(name, 0), early=True), blocks, threads))

    then("rows", params.places // variant.tile.queries, 256)
    if variant.tile.wide:
        then("keys", blocks_to_look_through(call, variant, params), 128)
        keys = params.key_blocks * call.kv_heads * copies
        then("backward", variant.tile.cluster * (own + keys * (variant.want_k + variant.want_v)))
        return found
    then("order", -(-call.batch // 128) if call.varlen else 0, 128)
    if variant.adds_dq or variant.want_k or variant.want_v:
        cluster = variant.tile.cluster
        then("backward", min(gpu.sms // cluster, tiles.most_tiles(call, variant)) * cluster)
    then("keys", blocks_to_look_through(call, variant, params), 128)
    then("gradient_of_queries", own)
    then("queries", params.places // variant.tile.queries if variant.adds_dq else 0, 2 * variant.tile.queries)
    return found


def blocks_to_look_through(call: AttentionProblem, variant: BackwardVariant, params: Params) -> int:
    """Blocks of 64 keys in which a kernel that makes dQ alone has to know of NaN: those of all heads, or none."""
    hides = call.band != (-1, -1) or call.varlen
    if not (hides and variant.own_dq and variant.want_q):
        return 0
    return params.bad_blocks * call.kv_heads * (1 if call.varlen else call.batch)


def output(x: Tensor, ragged: bool) -> Callable[[], Tensor]:
    """What makes room for the gradient of x. Of a ragged batch, keys that no query could see and rows that belong to no
    sequence are nobody's to write."""
    if ragged:
        return functools.partial(torch.zeros, x.shape, dtype=x.dtype, device=x.device)
    return room(x.shape, x.dtype, x.device)


def described(
    call: AttentionProblem, variant: BackwardVariant, tensors: Tensors, given: Given, copied: list[bool]
) -> Params:
    """The parameters that the signature decides."""
    q, k, v, slopes = tensors[:4]
    grad_out, out = (
        x.to("meta").contiguous() if copy else x
        for x, copy in zip((given.grad_out, _given(given.out)), copied, strict=True)
    )
    rows = call.total_q if call.varlen else call.seq_q

    def cut(seq: int, total: int, size: int) -> int:
        """Blocks of a head; in a ragged batch each sequence may have one that is not full."""
        return total // size + call.batch if call.varlen else -(-seq // size)

    three = ctypes.c_int64 * 3
    grad_lse = (0, 0, 0) if given.grad_lse is None else (0, *given.grad_lse.stride())[-3:]
    left, right = (FAR if side < 0 else min(side, FAR) for side in call.band)
    section = heads_together(call.batch * call.kv_heads, call.walked_bytes, SECTION_BYTES)
    return Params(
        q_strides=three(*strides_of(q)[:3]), k_strides=three(*strides_of(k)[:3]), v_strides=three(*strides_of(v)[:3]),
        out_strides=three(*strides_of(out)[:3]),
        grad_out_strides=three(*strides_of(grad_out)[:3]), dq_strides=three(*contiguous(q)),
        dk_strides=three(*contiguous(k)), dv_strides=three(*contiguous(v)),
        lse_batch=0 if call.varlen else call.heads * rows, lse_head=rows,
        slope_batch=call.heads if slopes is not None and slopes.dim() == 2 else 0,
        grad_lse_batch=grad_lse[0], grad_lse_head=grad_lse[1], grad_lse_seq=grad_lse[2],
        batch=call.batch, heads=call.heads, group=call.heads // call.kv_heads, kv_heads=call.kv_heads,
        seq_q=call.seq_q, seq_k=call.seq_k, total_q=call.total_q,
        total_k_rows=call.total_k if call.varlen else call.seq_k, left=left, right=right,
        blocks=cut(call.seq_q, call.total_q, variant.tile.queries), places=tiles.places(call, variant.tile.queries),
        own_blocks=cut(call.seq_q, call.total_q, variant.own_queries),
        bad_blocks=cut(call.seq_k, call.total_k, OWN_KEYS),
        key_blocks=cut(call.seq_k, call.total_k, variant.tile.keys * variant.tile.cluster),
        tiles=0 if call.varlen else tiles.most_tiles(call, variant),
        section=section, has_sinks=call.sinks,
    )  # fmt: skip


def boxes(x: Tensor, rows: int, dtype: str) -> bytes:
    """The map of x as (column, row, head, batch), in boxes of 64 columns; what lies outside arrives as zeros."""
    batch, seq, heads, dim = (1, *x.shape)[-4:]
    steps = [step * x.element_size() for step in spaced(x)]
    return driver.tensor_map(
        x.data_ptr(), dtype, (dim, seq, heads, batch), (steps[1], steps[2], steps[0]), (64, rows, 1, 1), 128
    )


def contiguous(x: Tensor) -> tuple[int, int, int]:
    """(batch, seq, head) strides of a contiguous tensor of x's shape."""
    heads, dim = x.shape[-2:]
    return (0 if x.dim() == 3 else x.shape[1] * heads * dim, heads * dim, dim)


def _given(x: Tensor | None) -> Tensor:
    """What every problem that this implementation takes has."""
    assert x is not None
    return x


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
