"""The portable attention backward, without an S x S buffer: tiles, launches and what is left to torch.

P is made again from the saved log-sum-exp L: P = exp(S - L). First `rows_kernel` makes delta = rowsum(dO * O) - dL of
every row, and L as the others want it. Then there are two forms, and `backward_tiles.choose` decides:

- One pass: `dkdv_kernel` takes one block of keys and walks the query rows that see it, of every query head that shares
  the keys. It makes dK and dV, and adds dS·K of each block of rows to sums in memory, fp32; `sums_kernel` turns them
  into dQ. The order of the additions varies, so dQ is not the same to the bit in every run. Wide rows leave too few
  registers for all three: there dV has a launch of its own.
- Two passes: `dkdv_kernel` without sums, and `dq_kernel`, which takes one block of query rows and walks the keys that
  it sees. Scores are computed twice, so that each gradient is summed by one program.

The gradient of a float mask is dS itself, summed over what the mask is broadcast over: `backward_mask` has its forms.

The walk is the forward's: blocks in which something is hidden first, then the interior; where
registers are short (`dkdv_kernel`), the other way round. See `README.md` beside this package for the mathematics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from flashkernels.attention import dropout
from flashkernels.attention.problem import AttentionProblem, BackwardProblem, heads_together
from flashkernels.attention.sinks import gradient, unseeing, weights
from flashkernels.attention.tensors import Given, RunBackward, Tensors, alignment, strides_of, unaddressable
from flashkernels.attention.triton import backward_tiles
from flashkernels.attention.triton.backward_keys import dkdv_kernel
from flashkernels.attention.triton.backward_mask import SharedPass, buffer_of, form_of, summed, sums_of_rows
from flashkernels.attention.triton.backward_queries import dq_kernel
from flashkernels.attention.triton.backward_rows import rows_kernel
from flashkernels.attention.triton.backward_sums import sums_kernel, sums_of_row
from flashkernels.attention.triton.forward import FAR, boxes_of, descriptors, heads_per_section
from flashkernels.attention.triton.parts import LOG2E
from flashkernels.hardware import GPUS, Gpu
from flashkernels.jit.launch import Descriptor, Launcher, compile_options
from flashkernels.tiling import Tile

ELEMENTS = 8192  # of dO that one program of the first kernel reads
# Of Q, dO and the sums of dQ of the heads that are worked on side by side, in equal sections: about an L2. H200,
# 2026-11-16, causal, 268 MB in 6 sections against 8 and 4: 160 286 TFLOPS, 271 and 286; to 128 columns all within 2 %.
SECTION_BYTES = 48e6


def plan(problem: BackwardProblem, gpu: Gpu | None, tensors: Tensors, given: Given) -> RunBackward:
    """Chooses the tiles and lays out all of the launches that the signature decides; returns what is left to run."""
    call, wanted = problem.call, problem.wanted
    gpu = gpu or GPUS["h200"]  # the interpreter takes the tiles of a real GPU
    q, k, v, slopes, sinks, mask = tensors[:6]
    # expanded for example, as that of a sum is; contiguous() would leave one at an odd address where it is
    copied = call.element_bytes == 2 and alignment(given.grad_out) == 1
    grad_out = torch.empty(given.grad_out.shape, device="meta") if copied else given.grad_out
    # a ragged batch is one sequence to the first kernel
    batch, rows = (1, q.shape[0]) if call.varlen else (call.batch, call.seq_q)
    by_tma = not (unaddressable(q) or unaddressable(grad_out)) and batch * call.heads * rows < 1 << 31
    tiles = backward_tiles.choose(problem, gpu, by_tma)
    if len({alignment(x) for x in (q, k, v, grad_out)}) > 1:
        tiles = tiles.unpipelined()
    tile, adds = tiles.dkdv, tiles.dq is None
    normalise = call.element_bytes > 2
    form = form_of(call, mask) if "mask" in wanted else "none"
    want_dq = normalise or "q" in wanted or "alibi_slopes" in wanted
    want_dkdv = "k" in wanted or "v" in wanted or form in ("columns", "scores")
    want_sunk = "sinks" in wanted or form == "rows"
    group = call.heads // call.kv_heads
    rows_fixed = rows_constants(call)
    rows_blocks = -(-rows // rows_fixed["BLOCK"])
    rows_launcher = Launcher(rows_kernel, rows_fixed, compile_options(4, 1, 0), q.device.index)
    assert given.out is not None
    sums_blocks = -(-call.seq_q // tile.block_m)
    sums_head = (rows // tile.block_m + call.batch if call.varlen else sums_blocks) * sums_block(call, tile)
    sums_strides = (0 if call.varlen else call.heads * sums_head, sums_head)
    sums_size = batch * call.heads * sums_head if adds else 0
    sums_launcher = Launcher(sums_kernel, sums_constants(call, tile), compile_options(8, 1, 0), q.device.index)
    rows_numbers = (*strides_of(given.out), *strides_of(grad_out), *_lse_strides(given.grad_lse), rows, call.heads,
                     rows_blocks, sums_size)  # fmt: skip
    dkdv_launcher, dq_launcher, dv_launcher = (
        Launcher(kernel, made(call, tile), compile_options(tile.warps, tile.stages, tile.registers), q.device.index)
        for kernel, made, tile in (
            (dkdv_kernel, dkdv_constants, tiles.dkdv), (dq_kernel, constants, tiles.dq or tiles.dkdv),
            (dkdv_kernel, dkdv_constants, tiles.dv or tiles.dkdv),
        )
    )  # fmt: skip
    dkdv_blocks, dv_blocks = (-(-call.seq_k // x.block_n) for x in (tile, tiles.dv or tile))
    dq_blocks = 0 if tiles.dq is None else -(-call.seq_q // tiles.dq.block_m)
    heads_k, heads_q = call.batch * call.kv_heads, call.batch * call.heads
    section = heads_per_section(call)
    section_k = -(-(heads_summed_together(call) if adds else section) // group)
    boxes, dv_boxes = (_boxes(call, x, q, grad_out, batch * call.heads * rows) for x in (tile, tiles.dv or tile))

    inputs = (*strides_of(q), *strides_of(k), *strides_of(v), *strides_of(grad_out))
    full = (call.batch, call.heads, call.seq_q, call.seq_k)
    mask_strides = (0, 0, 0, 0) if mask is None else mask.expand(full).stride()
    slope_strides = (0, 0) if slopes is None else (0, *slopes.stride())[-2:]
    lse_strides = (0, rows) if call.varlen else (call.heads * rows, rows)
    sides = (*lse_strides, *mask_strides, *slope_strides)
    sink_stride = 0 if sinks is None else sinks.stride(0)
    band = tuple(min(max(side, 0), FAR) for side in call.band)
    dkdv_numbers, dv_numbers = (
        (*inputs, *_contiguous(k), *_contiguous(v), *sums_strides, *sides, call.seq_k if form == "scores" else 1,
         call.seq_q, call.seq_k, call.kv_heads, group, blocks, section_k, heads_k, *band)
        for blocks in (dkdv_blocks, dv_blocks)
    )  # fmt: skip
    dq_numbers = (*inputs, *_contiguous(q), *sides, sink_stride, call.seq_q, call.seq_k, call.heads, group, dq_blocks,
                  section, heads_q, *band)  # fmt: skip
    sums_numbers = (*sums_strides, *_contiguous(q), call.seq_q, call.heads, sums_blocks)
    shared = None
    if form == "shared" and mask is not None and tiles.dmask is not None:
        shared = SharedPass(call, gpu, tiles.dmask, mask, constants(call, tiles.dmask), (*inputs, *sides), band)
    unit, drop = unit_of(call), dropout.numbers(call.dropout_p)
    # rows of a ragged batch that belong to no sequence are nobody's to write
    fresh = torch.zeros if call.varlen else torch.empty

    def run(tensors: Tensors, given: Given, softmax_scale: float, softcap: float) -> list[Tensor | None]:
        q, k, v, slopes, sinks, mask, cu_q, cu_k = tensors[:8]
        grad_out, grad_lse, out, lse = given
        assert lse is not None
        grad_out = grad_out.clone(memory_format=torch.contiguous_format) if copied else grad_out
        numbers = (softmax_scale * unit, softcap * unit, softmax_scale, *drop)
        seed = tensors.dropout_seed
        grads: list[Tensor | None] = [
            fresh(x.shape, dtype=x.dtype, device=x.device) if name in wanted else None
            for name, x in zip(("q", "k", "v"), (q, k, v), strict=True)
        ]
        level, delta = torch.empty_like(lse), torch.empty_like(lse)
        sums = lse.new_empty(sums_size) if adds else None
        if heads_q and rows:
            pointers = (out, grad_out, grad_lse, lse, level, delta, sums)
            rows_launcher(batch * call.heads * rows_blocks, pointers, rows_numbers)
        norm = torch.ones_like(lse) if normalise else None
        dslope = lse.new_zeros(call.batch, call.heads, dq_blocks) if "alibi_slopes" in wanted else None
        stats = (q, k, v, grad_out, level, delta, norm)
        if want_dq and heads_q * dq_blocks:
            dq = torch.empty_like(q, memory_format=torch.contiguous_format) if grads[0] is None else grads[0]
            # as the level lies in memory
            dlse = None if dslope is None or grad_lse is None else grad_lse.contiguous()
            others = (dq, dslope, dlse, mask, slopes, sinks, cu_q, cu_k, seed)
            dq_launcher(heads_q * dq_blocks, (*stats, *others), (*dq_numbers, *numbers))
        dmask = None if mask is None else buffer_of(form, call, mask)
        if want_dkdv and heads_k * dkdv_blocks:
            of_mask = (dmask, None) if form == "scores" else (None, dmask)
            rest = (mask, slopes, cu_q, cu_k, seed)
            dk, dv = grads[1:3]
            if tiles.dv is not None and dv is not None:
                pointers = (*stats, None, dv, *[None] * 3, *rest, *dv_boxes(q, grad_out, level, delta))
                dv_launcher(heads_k * dv_blocks, pointers, (*dv_numbers, *numbers))
                dv = None
            pointers = (*stats, dk, dv, sums, *of_mask, *rest, *boxes(q, grad_out, level, delta))
            dkdv_launcher(heads_k * dkdv_blocks, pointers, (*dkdv_numbers, *numbers))
        if sums is not None and heads_q * sums_blocks:
            sums_launcher(heads_q * sums_blocks, (sums, grads[0], cu_q), (*sums_numbers, softmax_scale))
        grads.append(None if dslope is None or slopes is None else _slopes_gradient(dslope, slopes))
        sunk = dsinks = None
        if sinks is not None and want_sunk:
            blind = unseeing(lse, cu_q)
            sunk = weights(sinks, lse, blind)
            sunk = sunk if norm is None else sunk * norm
            dsinks = gradient(sinks, sunk, delta, blind) if "sinks" in wanted else None
        grads.append(dsinks)
        if form == "rows":
            dmask = sums_of_rows(delta, level, sunk, grad_lse)
        if shared is not None and mask is not None:
            dmask = shared(stats, mask, (slopes, seed), (*numbers[:2], *drop))
        return [*grads, None if dmask is None or mask is None else summed(dmask, mask)]

    return run


def heads_summed_together(problem: AttentionProblem) -> int:
    """How many query heads are worked on side by side where dQ is added up. Only a band makes blocks of keys unequal:
    without one it is a head at a time.

    All sections have as many where that is near what fits: a short one at the end leaves multiprocessors idle (H200,
    2026-11-16, 32 heads of 256 columns: 319 TFLOPS by fours, 307 by eights, 285 by sixes)."""
    if problem.band == (-1, -1):
        return 1
    heads = problem.batch * problem.heads
    most = heads_together(heads, problem.walked_bytes, SECTION_BYTES)
    near = (*range(most, (2 * most - 1) // 3, -1), *range(most + 1, 3 * most // 2 + 1))
    return next((n for n in near if heads % n == 0), most)


def rows_by_box(problem: AttentionProblem, tile: Tile) -> bool:
    """Whether TMA reads level and delta: it wants every head's to start at a multiple of 16 bytes."""
    return tile.tma and not problem.varlen and problem.seq_q % 4 == 0


def _boxes(
    problem: AttentionProblem, tile: Tile, q: Tensor, grad_out: Tensor, rows: int
) -> Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Descriptor | None, ...]]:
    """What makes the descriptors of the pass over keys, of Q and dO and of level and delta, of `rows` in all heads."""
    box_rows = tile.block_m if tile.tma else 0
    q_boxes, do_boxes = boxes_of(q, tile.parts, box_rows)[:2], boxes_of(grad_out, tile.parts_v, box_rows)[:2]
    row_box = ((rows,), (1,), [tile.block_m]) if rows_by_box(problem, tile) else None

    def made(q: Tensor, grad_out: Tensor, *of_rows: Tensor) -> tuple[Descriptor | None, ...]:
        by_row = (None if row_box is None else Descriptor(x, *row_box) for x in of_rows)
        return (*descriptors(q, q_boxes), *descriptors(grad_out, do_boxes), *by_row)

    return made


def unit_of(problem: AttentionProblem) -> float:
    """What logits are multiplied by: log2(e) saves a multiplication of each; fp32 has no digits to lose by it."""
    return LOG2E.value if problem.element_bytes == 2 else 1.0


def constants(problem: AttentionProblem, tile: Tile) -> dict[str, Any]:
    """The compile-time arguments of the passes over scores, in their order."""
    left, right = problem.band
    return {
        "DIM": problem.head_dim, "DIM_V": problem.head_dim_v, "PARTS": tile.parts, "PARTS_V": tile.parts_v,
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "STAGES": tile.stages, "LEFT": left >= 0, "RIGHT": right >= 0,
        "SOFTCAP": problem.softcap, "MASK": problem.mask or "none", "PRECISION": "ieee",
        "UNIT": unit_of(problem),
    }  # fmt: skip


def dkdv_constants(problem: AttentionProblem, tile: Tile) -> dict[str, Any]:
    return constants(problem, tile) | {"LATE": tile.late, "TURNED": tile.turned}


def rows_constants(problem: AttentionProblem) -> dict[str, Any]:
    width = max(16, triton.next_power_of_2(problem.head_dim_v))
    return {"DIM_V": problem.head_dim_v, "WIDTH": width, "BLOCK": ELEMENTS // width,
            "BIASED": problem.mask == "float", "UNIT": unit_of(problem)}  # fmt: skip


def sums_constants(problem: AttentionProblem, tile: Tile) -> dict[str, Any]:
    width = max(16, triton.next_power_of_2(problem.head_dim))
    return {"DIM": problem.head_dim, "WIDTH": width, "BLOCK": tile.block_m, "TURNED": tile.turned}


def sums_block(problem: AttentionProblem, tile: Tile) -> int:
    """How many sums a block of rows has: of all columns of its squares."""
    return tile.block_m * sums_of_row(problem.head_dim, tile.turned)


def _contiguous(x: Tensor) -> tuple[int, int, int]:
    """(batch, seq, head) strides of a contiguous tensor of x's shape."""
    heads, dim = x.shape[-2:]
    return (0 if x.dim() == 3 else x.shape[1] * heads * dim, heads * dim, dim)


def _lse_strides(grad: Tensor | None) -> tuple[int, ...]:
    """(batch, head, seq) strides."""
    return (0, 0, 0) if grad is None else (0, *grad.stride())[-3:]


def _slopes_gradient(parts: Tensor, slopes: Tensor) -> Tensor:
    """Sums what the blocks of rows give, (B, H, blocks), to the shape of the slopes, (H,) or (B, H)."""
    return parts.sum(-1).sum_to_size(slopes.shape).to(slopes.dtype)
