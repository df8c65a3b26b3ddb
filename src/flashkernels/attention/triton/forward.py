"""The portable attention forward: one Triton kernel for every GPU from sm_80 on.

The head dimension is a sum of powers of two (72 = 64 + 16), because a Triton tile must be one: each *part* has its
own K and V tile and its own accumulator. Keys are walked twice. First come the blocks in which something is hidden
(the causal or window edge, the ragged end, all of them under a mask tensor), then the interior, which needs no mask
at all. See `README.md` beside this package for the mathematics.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashkernels.attention import dropout
from flashkernels.attention.problem import AttentionProblem, heads_together
from flashkernels.attention.tensors import Run, Tensors, empty_output, lse_shape, strides_of, unaddressable
from flashkernels.attention.triton import tiles
from flashkernels.attention.triton.dropout import kept
from flashkernels.attention.triton.parts import (
    LN2,
    LOG2E,
    accumulate,
    has_nan,
    hide,
    keep_rows,
    load_parts,
    logits,
    rescale,
    scores,
    split_block,
    start_of,
    steps_of,
    store_parts,
    visible_keys,
    visible_poison,
)
from flashkernels.hardware import GPUS, Gpu
from flashkernels.jit.eager import room
from flashkernels.jit.launch import Box, Descriptor, Launcher, compile_options
from flashkernels.tiling import Tile, override

FAR = 1 << 30  # a window wider than any sequence; keeps positions inside 32 bits
# Of K and V of the heads that are worked on side by side: half of an L2, as the Hopper kernel has it (H200, 2026-11-15:
# 607 TFLOPS for 573 there, D=256 causal). In this kernel no other size was timed.
SECTION_BYTES = 32e6
CAREFUL = tl.constexpr(16)  # keys and columns at a time where V holds NaN or Inf


@triton.jit
def first_part(k_descs, batch, row, head, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    return k_descs[0].load([batch, row, head, 0]).reshape(BLOCK, tl.constexpr(PARTS[0]))


@triton.jit
def other_scores(early, q, k_descs, batch, row, head, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Q·Kᵀ whose first part is `early`."""
    start: tl.constexpr = PARTS[0]
    for i in tl.static_range(1, len(PARTS)):
        k = k_descs[i].load([batch, row, head, start]).reshape(BLOCK, tl.constexpr(PARTS[i]))
        early = tl.dot(q[i], k.T, early)
        start = start + PARTS[i]
    return early  # [BLOCK_M, BLOCK_N]


@triton.jit
def store_careful(
    o_rows, q, m, inverse, k_ptr, v_ptr, mask_ptr, start, end, seq_q, seq_k, shift, left, right, scale, softcap, slope,
    drop, row0, offs_m, table, stride_kb, stride_ks, stride_kd, stride_vb, stride_vs, stride_vd, stride_mm, stride_mn,
    DIM: tl.constexpr, DIM_V: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, MASK: tl.constexpr, PAGE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The output where V holds NaN or Inf: finite values as usual, the others only for the rows that see them.

    Works in small blocks, so that this rare path does not cost the kernel its registers.
    """
    m_safe = tl.where(m == float("-inf"), 0.0, m)
    for d in tl.range(0, DIM_V, CAREFUL):
        offs_d = d + tl.arange(0, CAREFUL)
        out = tl.zeros((BLOCK_M, CAREFUL), tl.float32)
        for n in tl.range(start, end, CAREFUL, num_stages=1):
            offs_n = n + tl.arange(0, CAREFUL)
            k = load_parts(start_of(k_ptr, n, stride_ks, PAGE), None, 0, n, 0, seq_k - n, stride_ks, stride_kd,
                           DIM, PARTS, CAREFUL, False, table, stride_kb, PAGE)  # fmt: skip
            s = logits(scores(q, k, PRECISION), scale, softcap, slope, offs_m, offs_n, shift, SOFTCAP, ALIBI)
            s, seen = hide(s, offs_m, offs_n, seq_q, seq_k, shift, left, right, mask_ptr, stride_mm, stride_mn,
                           LEFT, RIGHT, MASK)  # fmt: skip
            p = tl.exp2(s - m_safe[:, None])
            if drop is not None:
                stays = kept(drop, row0, n, BLOCK_M, CAREFUL, False)
                p = tl.where(stays, p, 0.0)
                seen = seen & stays
            if PAGE:
                at = v_ptr + steps_of(n, seq_k - n, table, stride_vb, stride_vs, CAREFUL, PAGE)[:, None]
            else:
                at = v_ptr + offs_n[:, None] * stride_vs
            v = tl.load(at + offs_d.to(tl.int64)[None, :] * stride_vd,
                        mask=(offs_n < seq_k)[:, None] & (offs_d < DIM_V)[None, :], other=0.0)  # fmt: skip
            out = tl.dot(p.to(v.dtype), tl.where(v - v == 0, v, 0.0).to(v.dtype), out, input_precision=PRECISION)
            out += visible_poison(seen, v)
        tl.store(o_rows + offs_d[None, :], (out * inverse[:, None]).to(o_rows.dtype.element_ty),
                 mask=(offs_m < seq_q)[:, None] & (offs_d < DIM_V)[None, :])  # fmt: skip


@triton.jit
def walk_masked(
    q, k_ptr, v_ptr, k_descs, v_descs, mask_ptr, start, edge, edge_blocks, blocks, k_row, tma_batch, head_k, seq_q,
    seq_k, shift, left, right, scale, softcap, slope, drop, row0, offs_m, table,
    stride_kb, stride_ks, stride_kd, stride_vb, stride_vs, stride_vd, stride_mm, stride_mn,
    DIM: tl.constexpr, DIM_V: tl.constexpr, PARTS: tl.constexpr, PARTS_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, MASK: tl.constexpr, PAGE: tl.constexpr, VARLEN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Maximum, sum and accumulators over blocks with hidden keys: `edge_blocks` from `edge` on, others from `start`."""
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)  # running maximum, log2 units
    total = tl.zeros((BLOCK_M,), tl.float32)  # running sum
    acc = ()
    for i in tl.static_range(len(PARTS_V)):
        acc = acc + (tl.zeros((BLOCK_M, tl.constexpr(PARTS_V[i])), tl.float32),)
    for i in tl.range(0, blocks, num_stages=STAGES):
        n = split_block(i, edge, edge_blocks, start, BLOCK_N)
        offs_n = n + tl.arange(0, BLOCK_N)
        k = load_parts(start_of(k_ptr, n, stride_ks, PAGE), k_descs, tma_batch, k_row + n, head_k, seq_k - n,
                       stride_ks, stride_kd, DIM, PARTS, BLOCK_N, TMA, table, stride_kb, PAGE)  # fmt: skip
        s = logits(scores(q, k, PRECISION), scale, softcap, slope, offs_m, offs_n, shift, SOFTCAP, ALIBI)
        s, _ = hide(s, offs_m, offs_n, seq_q, seq_k, shift, left, right, mask_ptr, stride_mm, stride_mn,
                    LEFT, RIGHT, MASK)  # fmt: skip
        m_new = tl.maximum(m, tl.max(s, 1))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen no key yet
        alpha = tl.exp2(m - m_safe)
        p = tl.exp2(s - m_safe[:, None])
        total = total * alpha + tl.sum(p, 1)
        m = m_new
        if drop is not None:
            p = tl.where(kept(drop, row0, n, BLOCK_M, BLOCK_N, False), p, 0.0)
        v = load_parts(start_of(v_ptr, n, stride_vs, PAGE), v_descs, tma_batch, k_row + n, head_k, seq_k - n,
                       stride_vs, stride_vd, DIM_V, PARTS_V, BLOCK_N, TMA, table, stride_vb, PAGE)  # fmt: skip
        if VARLEN and TMA:  # the block may reach into the next sequence, whatever is there
            v = keep_rows(v, offs_n < seq_k)
        acc = accumulate(rescale(acc, alpha), p, v, PRECISION)
    return m, total, acc


@triton.jit
def lane_sums(p, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Sums over every eighth column: on a matrix unit's result each thread adds up its own, without a shuffle."""
    return tl.sum(tl.reshape(p, (BLOCK_M, BLOCK_N // 8, 8)), 1)  # [BLOCK_M, 8]


@triton.jit
def overflown(total, acc, LIMIT: tl.constexpr):
    """Whether a sum of probabilities reached LIMIT, or an accumulator is Inf or NaN."""
    bad = (total < LIMIT) == 0
    for i in tl.static_range(len(acc)):
        row = tl.sum(acc[i], 1)
        bad = bad | (row - row != 0)
    return tl.max(bad.to(tl.int32)) > 0


# Strides are 64 bits wide, except along the last dimension: there a stride of 1 must become a constant, because
# only then are loads vectors. (As a runtime value it cost a fifth of the speed: H200, 2026-11-15, D=128.)
@triton.jit(
    do_not_specialize=[
        "seq_q", "seq_k", "blocks_m", "section", "total_heads", "left", "right", "heads", "max_pages", "threshold"
    ]
)  # fmt: skip
def forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr,
    k_desc0, k_desc1, k_desc2, v_desc0, v_desc1, v_desc2,
    mask_ptr, slopes_ptr, sinks_ptr, cu_q_ptr, cu_k_ptr, table_ptr, seed_ptr,
    stride_qb: tl.int64, stride_qs: tl.int64, stride_qh: tl.int64, stride_qd,
    stride_kb: tl.int64, stride_ks: tl.int64, stride_kh: tl.int64, stride_kd,
    stride_vb: tl.int64, stride_vs: tl.int64, stride_vh: tl.int64, stride_vd,
    stride_ob: tl.int64, stride_os: tl.int64, stride_oh: tl.int64,
    stride_lb: tl.int64, stride_lh: tl.int64,
    stride_mb: tl.int64, stride_mh: tl.int64, stride_mm: tl.int64, stride_mn,
    stride_ab: tl.int64, stride_ah: tl.int64, stride_sh: tl.int64,
    seq_q, seq_k, heads, group, blocks_m, section, total_heads, left, right, max_pages, scale, softcap, threshold,
    keep_scale,
    DIM: tl.constexpr, DIM_V: tl.constexpr, PARTS: tl.constexpr, PARTS_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr,
    LAZY: tl.constexpr, EARLY: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, NEGATIVE: tl.constexpr, MASK: tl.constexpr,
    PAGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    VARLEN: tl.constexpr = cu_q_ptr is not None
    ALIBI: tl.constexpr = slopes_ptr is not None
    # Logits are scale * s with scale >= 0: the scale commutes with the maximum and folds into the exponential.
    PLAIN: tl.constexpr = not (SOFTCAP or ALIBI or NEGATIVE)

    # Tile order: sections of heads whose K and V fit the L2; in a section the last rows (the heaviest under a causal
    # mask) of every head come first.
    pid = tl.program_id(0)
    first = pid // (section * blocks_m) * section
    in_section = tl.minimum(section, total_heads - first)
    rank = pid - first * blocks_m
    block_m = blocks_m - 1 - rank // in_section
    bh = first + rank % in_section
    batch = bh // heads
    head = bh - batch * heads
    head_k = head // group

    q_row = tl.zeros((), tl.int32)
    k_row = tl.zeros((), tl.int32)
    tma_batch = batch
    if VARLEN:
        q_row = tl.load(cu_q_ptr + batch)
        k_row = tl.load(cu_k_ptr + batch)
        seq_q = tl.load(cu_q_ptr + batch + 1) - q_row
        seq_k = tl.load(cu_k_ptr + batch + 1) - k_row
        tma_batch = 0
    row0 = block_m * BLOCK_M
    if row0 >= seq_q:
        return
    shift = seq_k - seq_q

    q_ptr += batch * stride_qb + (q_row + row0) * stride_qs + head * stride_qh
    table = None
    if PAGE:  # keys and values are pages, stride_kb and stride_vb apart, in the table's order
        table = table_ptr + batch.to(tl.int64) * max_pages
        k_row = tl.zeros((), tl.int32)
        k_ptr += head_k * stride_kh
        v_ptr += head_k * stride_vh
    else:
        k_ptr += batch * stride_kb + k_row * stride_ks + head_k * stride_kh
        v_ptr += batch * stride_vb + k_row * stride_vs + head_k * stride_vh
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes_ptr + batch * stride_ab + head * stride_ah).to(tl.float32) * LOG2E
    if MASK != "none":
        mask_ptr += batch * stride_mb + head * stride_mh
    drop = (tl.load(seed_ptr), threshold, batch, head) if seed_ptr is not None else None
    k_descs = (k_desc0, k_desc1, k_desc2)
    v_descs = (v_desc0, v_desc1, v_desc2)

    offs_m = row0 + tl.arange(0, BLOCK_M)
    q = load_parts(q_ptr, None, 0, 0, 0, seq_q - row0, stride_qs, stride_qd, DIM, PARTS, BLOCK_M, False)

    start, full, edge, end = visible_keys(row0, seq_q, seq_k, shift, left, right, BLOCK_M, BLOCK_N, LEFT, RIGHT, MASK,
                                          LAZY)  # fmt: skip
    edge_blocks = (end - edge + BLOCK_N - 1) // BLOCK_N
    masked_blocks = edge_blocks + (full - start) // BLOCK_N
    m, total, acc = walk_masked(
        q, k_ptr, v_ptr, k_descs, v_descs, mask_ptr, start, edge, edge_blocks, masked_blocks, k_row, tma_batch, head_k,
        seq_q, seq_k, shift, left, right, scale, softcap, slope, drop, row0, offs_m, table,
        stride_kb, stride_ks, stride_kd, stride_vb, stride_vs, stride_vd, stride_mm, stride_mn,
        DIM, DIM_V, PARTS, PARTS_V, BLOCK_M, BLOCK_N, STAGES, TMA, LEFT, RIGHT, SOFTCAP, ALIBI, MASK, PAGE, VARLEN,
        PRECISION,
    )  # fmt: skip

    if MASK == "none":  # under a mask every block is a masked one (and ptxas 12.8 crashes on the empty loop)
        sums = tl.zeros((BLOCK_M, 8), tl.float32)
        if EARLY:
            tl.static_assert(LAZY and TMA and len(PARTS) > 1)
            early = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            # A loop over one block: ptxas takes products of a loop in flight only if such products enter it.
            for n in tl.range(full, tl.minimum(full + BLOCK_N, edge), BLOCK_N, num_stages=STAGES):
                early = tl.dot(q[0], first_part(k_descs, tma_batch, k_row + n, head_k, PARTS, BLOCK_N).T, early)
        for n in tl.range(full, edge, BLOCK_N, num_stages=STAGES):
            if EARLY:
                s = other_scores(early, q, k_descs, tma_batch, k_row + n, head_k, PARTS, BLOCK_N)
            else:
                k = load_parts(start_of(k_ptr, n, stride_ks, PAGE), k_descs, tma_batch, k_row + n, head_k, None,
                               stride_ks, stride_kd, DIM, PARTS, BLOCK_N, TMA, table, stride_kb, PAGE)  # fmt: skip
                s = scores(q, k, PRECISION)
            unit = scale if PLAIN else 1.0  # of the scores, in log2 units
            if not PLAIN:
                offs_n = n + tl.arange(0, BLOCK_N)
                s = logits(s, scale, softcap, slope, offs_m, offs_n, shift, SOFTCAP, ALIBI)
            if LAZY:
                x = s * unit - m[:, None]
                if EARLY:  # for the next block, while this one's exponentials are computed
                    ahead = first_part(k_descs, tma_batch, k_row + n + BLOCK_N, head_k, PARTS, BLOCK_N)
                    early = tl.dot(q[0], ahead.T)
                p = tl.exp2(x)
                sums += lane_sums(p, BLOCK_M, BLOCK_N)
            else:
                m_new = tl.maximum(m, tl.max(s, 1) * unit)
                p = tl.exp2(s * unit - m_new[:, None])
                alpha = tl.exp2(m - m_new)
                total = total * alpha + tl.sum(p, 1)
                acc = rescale(acc, alpha)
                m = m_new
            if drop is not None:
                p = tl.where(kept(drop, row0, n, BLOCK_M, BLOCK_N, False), p, 0.0)
            v = load_parts(start_of(v_ptr, n, stride_vs, PAGE), v_descs, tma_batch, k_row + n, head_k, None,
                           stride_vs, stride_vd, DIM_V, PARTS_V, BLOCK_N, TMA, table, stride_vb, PAGE)  # fmt: skip
            acc = accumulate(acc, p, v, PRECISION)
        if LAZY:
            total += tl.sum(sums, 1)
            if overflown(total, acc, 2.0**15 if q_ptr.dtype.element_ty == tl.float16 else 2.0**100):
                blocks = (end - start + BLOCK_N - 1) // BLOCK_N
                m, total, acc = walk_masked(
                    q, k_ptr, v_ptr, k_descs, v_descs, mask_ptr, start, start, blocks, blocks, k_row, tma_batch, head_k,
                    seq_q, seq_k, shift, left, right, scale, softcap, slope, drop, row0, offs_m, table,
                    stride_kb, stride_ks, stride_kd, stride_vb, stride_vs, stride_vd, stride_mm, stride_mn,
                    DIM, DIM_V, PARTS, PARTS_V, BLOCK_M, BLOCK_N, STAGES, TMA, LEFT, RIGHT, SOFTCAP, ALIBI, MASK, PAGE,
                    VARLEN, PRECISION,
                )  # fmt: skip

    if sinks_ptr is not None:  # one more logit per head, without a value
        sink = tl.load(sinks_ptr + head * stride_sh).to(tl.float32) * LOG2E
        m_new = tl.maximum(m, sink)
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m - m_safe)
        total = total * alpha + tl.exp2(sink - m_safe)
        acc = rescale(acc, alpha)
        m = m_new

    inside = offs_m < seq_q
    if lse_ptr is not None:
        lse = tl.where(total == 0, float("-inf"), (m + tl.log2(total)) * LN2)
        lse_ptr += batch * stride_lb + head * stride_lh + q_row
        tl.store(lse_ptr + offs_m, lse, mask=inside)
    inverse = 1 / tl.where(total == 0, 1.0, total)
    hiding = masked_blocks > 0
    if drop is not None:
        inverse *= keep_scale
        hiding = end > start  # a dropped key is as good as hidden
    o_ptr += batch * stride_ob + (q_row + row0) * stride_os + head * stride_oh
    o_rows = o_ptr + tl.arange(0, BLOCK_M)[:, None] * stride_os
    # A hidden key has p = 0, but 0 * Inf and 0 * NaN are NaN: a NaN or Inf in a hidden row of V would reach rows that
    # may not see it. That is rare and shows as NaN here. The maximum and the sum do not depend on V, so the output
    # is then made again with care, a few columns at a time.
    if hiding & has_nan(acc):
        store_careful(
            o_rows, q, m, inverse, k_ptr, v_ptr, mask_ptr, start, end, seq_q, seq_k, shift, left, right, scale, softcap,
            slope, drop, row0, offs_m, table, stride_kb, stride_ks, stride_kd, stride_vb, stride_vs, stride_vd,
            stride_mm, stride_mn, DIM, DIM_V, PARTS, BLOCK_M, LEFT, RIGHT, SOFTCAP, ALIBI, MASK, PAGE, PRECISION,
        )  # fmt: skip
    else:
        store_parts(o_rows, acc, inverse, inside, DIM_V, PARTS_V)


def plan(problem: AttentionProblem, gpu: Gpu | None, tensors: Tensors) -> Run:
    """Chooses the tile and lays out all of a launch that the signature decides; returns what is left to run."""
    gpu = gpu or GPUS["h200"]  # the interpreter takes the tiles of a real GPU
    q, k, v, slopes, sinks, mask = tensors[:6]
    tile = chosen_tile(problem, gpu, not (problem.page_size or unaddressable(k) or unaddressable(v)))
    options = compile_options(tile.warps, tile.stages, tile.registers)
    box_rows = tile.block_n if tile.tma else 0
    boxes = [*boxes_of(k, tile.parts, box_rows), *boxes_of(v, tile.parts_v, box_rows)]
    launcher = Launcher(forward_kernel, constants(problem, tile), options, q.device.index, dict(enumerate(boxes, 5)))

    blocks_m = -(-problem.seq_q // tile.block_m)
    total_heads = problem.batch * problem.heads
    grid = blocks_m * total_heads
    left, right = problem.band
    sizes = (problem.seq_q, problem.seq_k, problem.heads, problem.heads // problem.kv_heads, blocks_m,
             heads_per_section(problem), total_heads, *(min(max(side, 0), FAR) for side in (left, right)),
             0 if tensors.block_table is None else tensors.block_table.shape[1])  # fmt: skip
    inputs = (*strides_of(q), *strides_of(k), *strides_of(v))
    lse_strides = (0, q.shape[0]) if problem.varlen else (problem.heads * problem.seq_q, problem.seq_q)
    full = (problem.batch, problem.heads, problem.seq_q, problem.seq_k)
    mask_strides = (0, 0, 0, 0) if mask is None else mask.expand(full).stride()
    slope_strides = (0, 0) if slopes is None else (0, *slopes.stride())[-2:]
    sink_stride = 0 if sinks is None else sinks.stride(0)
    like = empty_output(q.to("meta"), problem.head_dim_v, problem.layout)
    output = room(like.shape, like.dtype, q.device, like.stride())
    logs = room(lse_shape(q), torch.float32, q.device) if problem.need_lse else None
    fixed = (*inputs, *strides_of(like)[:3], *lse_strides, *mask_strides, *slope_strides, sink_stride, *sizes)
    drop = dropout.numbers(problem.dropout_p)

    @functools.lru_cache(maxsize=16)
    def numbers(softmax_scale: float, softcap: float) -> tuple[Any, ...]:
        return (*fixed, softmax_scale * LOG2E.value, softcap * LOG2E.value, *drop)

    def run(tensors: tuple[Any, ...], softmax_scale: float, softcap: float) -> tuple[Tensor, Tensor | None]:
        """With the tensors' device as the current one."""
        q, k, v, slopes, sinks, mask, cu_q, cu_k, table, _, _, _, seed = tensors
        out, lse = output(), logs() if logs else None
        if grid:
            arguments = (q, k, v, out, lse, k, k, k, v, v, v, mask, slopes, sinks, cu_q, cu_k, table, seed)
            launcher(grid, arguments, numbers(softmax_scale, softcap))
        return out, lse

    return run


def chosen_tile(problem: AttentionProblem, gpu: Gpu, tma: bool) -> Tile:
    """The tile in force: the one `use_tile` names, or the cheapest (of the strategy it names)."""
    forced = override()
    if isinstance(forced, Tile):
        return forced
    return tiles.choose(problem, gpu, tma, forced if isinstance(forced, str) else None).tile


def constants(problem: AttentionProblem, tile: Tile) -> dict[str, Any]:
    """The kernel's compile-time arguments, in its order."""
    left, right = problem.band
    return {
        "DIM": problem.head_dim, "DIM_V": problem.head_dim_v, "PARTS": tile.parts, "PARTS_V": tile.parts_v,
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "STAGES": tile.stages, "TMA": tile.tma,
        "LAZY": tile.lazy, "EARLY": tile.early,
        "LEFT": left >= 0, "RIGHT": right >= 0, "SOFTCAP": problem.softcap, "NEGATIVE": not problem.positive_scale,
        "MASK": problem.mask or "none", "PAGE": problem.page_size, "PRECISION": "ieee",
    }  # fmt: skip


def heads_per_section(problem: AttentionProblem) -> int:
    """How many heads are worked on side by side.

    Only a band makes rows unequal; without one, a head at a time keeps K and V of the fewest heads in the L2.
    """
    if problem.band == (-1, -1):
        return 1
    return heads_together(problem.batch * problem.heads, problem.kv_bytes, SECTION_BYTES)


def boxes_of(x: Tensor, parts: tuple[int, ...], rows: int) -> list[Box | None]:
    """Shape, strides and block shape of a TMA descriptor for `rows` rows of every part of x (0: without TMA)."""
    if not rows:
        return [None] * 3
    shape = tuple(x.shape) if x.dim() == 4 else (1, *x.shape)
    row = 16 // x.element_size()
    # a dimension of size 1 is never stepped over, so its stride may be any that TMA accepts
    strides = tuple(step if n > 1 else -(-shape[-1] // row) * row for n, step in zip(shape, strides_of(x), strict=True))
    boxes: list[Box | None] = [(shape, (*strides[:-1], 1), [1, rows, 1, part]) for part in parts]
    return boxes + [None] * (3 - len(parts))


def descriptors(x: Tensor, boxes: list[Box | None]) -> list[Descriptor | None]:
    return [None if box is None else Descriptor(x, *box) for box in boxes]
