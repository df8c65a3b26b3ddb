"""The pass over queries: dQ of a block of rows, where the pass over keys does not sum it, and gradients of slopes."""

from __future__ import annotations

import triton
import triton.language as tl

from flashkernels.attention.triton.backward_parts import empty, finite, load_rows, logit_gradient, place, weights
from flashkernels.attention.triton.dropout import kept
from flashkernels.attention.triton.parts import (
    LOG2E,
    accumulate,
    load_parts,
    scores,
    split_block,
    store_parts,
    visible_keys,
)


@triton.jit
def slope_gradient(sums, norm, delta, dlse, sunk, before):
    """What each row gives to its slope's gradient, -sum(dS * distance), from the sums of dS, P * far and dS * far.

    A distance is `far`, counted from the row's nearest key, and `before`, how far that key is. delta comes from the
    output, which is rounded: it is not quite the mean of dP under this P, and the difference would count with the mean
    distance of all rows. But the dS of a row add up to dL less what its sink (of weight `sunk`) takes, so the
    difference is known, and taken back.
    """
    off = norm * sums[0] - dlse - delta * sunk
    return norm * (off * sums[1] - sums[2]) - before * (dlse + (delta + off) * sunk)


@triton.jit
def dq_step(
    dq, sums, total, q, do, level, delta, m, n, k_ptr, v_ptr, mask_ptr, stride_ks, stride_kd, stride_vs,
    stride_vd, stride_mm, stride_mn, seq_q, seq_k, shift, left, right, scale, softcap, slope, drop, keep_scale,
    DIM: tl.constexpr, DIM_V: tl.constexpr, PARTS: tl.constexpr, PARTS_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, HIDING: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr, UNIT: tl.constexpr, WANT_SLOPE: tl.constexpr,
    WANT_NORM: tl.constexpr,
):  # fmt: skip
    """Adds what BLOCK_N keys from `n` on give to dQ, and of each row to the sums of the slope and to the sum of P."""
    offs_m = m + tl.arange(0, BLOCK_M)
    offs_n = n + tl.arange(0, BLOCK_N)
    rows = None
    if HIDING:
        rows = seq_k - n
    k = load_parts(k_ptr + n * stride_ks, None, 0, 0, 0, rows, stride_ks, stride_kd, DIM, PARTS, BLOCK_N, False)
    p, t = weights(
        scores(q, k, PRECISION), level[:, None], offs_m[:, None], offs_n[None, :], seq_q, seq_k, shift, left, right,
        scale, softcap, slope, mask_ptr, stride_mm, stride_mn, HIDING, LEFT, RIGHT, SOFTCAP, ALIBI, MASK, UNIT,
    )  # fmt: skip
    if WANT_NORM:
        total += tl.sum(p, 1)
    v = load_parts(v_ptr + n * stride_vs, None, 0, 0, 0, rows, stride_vs, stride_vd, DIM_V, PARTS_V, BLOCK_N, False)
    dp = scores(do, v, PRECISION)
    if drop is not None:
        dp = tl.where(kept(drop, m, n, BLOCK_M, BLOCK_N, False), dp * keep_scale, 0.0)
    ds = logit_gradient(p, dp, delta[:, None], HIDING)
    if WANT_SLOPE:
        far = tl.abs(tl.maximum(offs_m + shift, 0)[:, None] - offs_n[None, :]).to(tl.float32)
        sums = (sums[0] + tl.sum(ds, 1), sums[1] + tl.sum(p * far, 1), sums[2] + tl.sum(ds * far, 1))
    if SOFTCAP:
        ds *= 1 - t * t
    if HIDING:
        k = finite(k)
    return accumulate(dq, ds, k, PRECISION, APART=True), sums, total


@triton.jit(
    do_not_specialize=["seq_q", "seq_k", "blocks", "section", "total_heads", "left", "right", "heads", "threshold"]
)
def dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, level_ptr, delta_ptr, norm_ptr, dq_ptr, dslope_ptr, dlse_ptr, mask_ptr, slopes_ptr,
    sinks_ptr, cu_q_ptr, cu_k_ptr, seed_ptr,
    stride_qb: tl.int64, stride_qs: tl.int64, stride_qh: tl.int64, stride_qd,
    stride_kb: tl.int64, stride_ks: tl.int64, stride_kh: tl.int64, stride_kd,
    stride_vb: tl.int64, stride_vs: tl.int64, stride_vh: tl.int64, stride_vd,
    stride_gb: tl.int64, stride_gs: tl.int64, stride_gh: tl.int64, stride_gd,
    stride_xb: tl.int64, stride_xs: tl.int64, stride_xh: tl.int64,
    stride_lb: tl.int64, stride_lh: tl.int64,
    stride_mb: tl.int64, stride_mh: tl.int64, stride_mm: tl.int64, stride_mn,
    stride_ab: tl.int64, stride_ah: tl.int64, stride_sh: tl.int64,
    seq_q, seq_k, heads, group, blocks, section, total_heads, left, right, scale, softcap, grad_scale,
    threshold, keep_scale,
    DIM: tl.constexpr, DIM_V: tl.constexpr, PARTS: tl.constexpr, PARTS_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """dQ of one block of rows, and (None: not asked for) what it gives to the gradient of its ALiBi slope.

    With `norm` it also finds what the weights of a row must be multiplied by to add up to 1, and does so: they come
    from a log-sum-exp that is rounded, which costs fp32 some of its digits.
    """
    VARLEN: tl.constexpr = cu_q_ptr is not None
    ALIBI: tl.constexpr = slopes_ptr is not None
    WANT_SLOPE: tl.constexpr = dslope_ptr is not None
    WANT_NORM: tl.constexpr = norm_ptr is not None
    rank, bh = place(blocks, section, total_heads)
    block_m = blocks - 1 - rank  # under a causal mask the last rows have the most keys
    batch = bh // heads
    head = bh - batch * heads
    head_k = head // group

    q_row = tl.zeros((), tl.int32)
    k_row = tl.zeros((), tl.int32)
    if VARLEN:
        q_row = tl.load(cu_q_ptr + batch)
        k_row = tl.load(cu_k_ptr + batch)
        seq_q = tl.load(cu_q_ptr + batch + 1) - q_row
        seq_k = tl.load(cu_k_ptr + batch + 1) - k_row
    row0 = block_m * BLOCK_M
    if row0 >= seq_q:
        return
    shift = seq_k - seq_q
    offs_m = row0 + tl.arange(0, BLOCK_M)
    inside = offs_m < seq_q
    q_ptr += batch * stride_qb + (q_row + row0) * stride_qs + head * stride_qh
    do_ptr += batch * stride_gb + (q_row + row0) * stride_gs + head * stride_gh
    k_ptr += batch * stride_kb + k_row * stride_ks + head_k * stride_kh
    v_ptr += batch * stride_vb + k_row * stride_vs + head_k * stride_vh
    level_ptr += batch * stride_lb + head * stride_lh + q_row
    delta_ptr += batch * stride_lb + head * stride_lh + q_row
    if MASK != "none":
        mask_ptr += batch * stride_mb + head * stride_mh
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes_ptr + batch * stride_ab + head * stride_ah).to(tl.float32) * UNIT
    drop = (tl.load(seed_ptr), threshold, batch, head) if seed_ptr is not None else None
    q = load_parts(q_ptr, None, 0, 0, 0, seq_q - row0, stride_qs, stride_qd, DIM, PARTS, BLOCK_M, False)
    do = load_parts(do_ptr, None, 0, 0, 0, seq_q - row0, stride_gs, stride_gd, DIM_V, PARTS_V, BLOCK_M, False)
    level = load_rows(level_ptr, None, 0, offs_m, seq_q, True)
    delta = load_rows(delta_ptr, None, 0, offs_m, seq_q, True)

    start, full, edge, end = visible_keys(row0, seq_q, seq_k, shift, left, right, BLOCK_M, BLOCK_N, LEFT, RIGHT, MASK)
    edge_blocks = (end - edge + BLOCK_N - 1) // BLOCK_N
    masked_blocks = edge_blocks + (full - start) // BLOCK_N

    dq = empty(PARTS, BLOCK_M)
    total = tl.zeros((BLOCK_M,), tl.float32)
    sums = (total, total, total)  # of the slope
    for b in tl.range(0, masked_blocks, num_stages=STAGES):
        n = split_block(b, edge, edge_blocks, start, BLOCK_N)
        dq, sums, total = dq_step(
            dq, sums, total, q, do, level, delta, row0, n, k_ptr, v_ptr, mask_ptr, stride_ks, stride_kd,
            stride_vs, stride_vd, stride_mm, stride_mn, seq_q, seq_k, shift, left, right, scale, softcap, slope,
            drop, keep_scale, DIM, DIM_V, PARTS, PARTS_V, BLOCK_M, BLOCK_N, True, LEFT, RIGHT, SOFTCAP, ALIBI, MASK,
            PRECISION, UNIT, WANT_SLOPE, WANT_NORM,
        )  # fmt: skip
    if MASK == "none":
        for n in tl.range(full, edge, BLOCK_N, num_stages=STAGES):
            dq, sums, total = dq_step(
                dq, sums, total, q, do, level, delta, row0, n, k_ptr, v_ptr, mask_ptr, stride_ks, stride_kd,
                stride_vs, stride_vd, stride_mm, stride_mn, seq_q, seq_k, shift, left, right, scale, softcap, slope,
                drop, keep_scale, DIM, DIM_V, PARTS, PARTS_V, BLOCK_M, BLOCK_N, False, LEFT, RIGHT, SOFTCAP, ALIBI,
                MASK, PRECISION, UNIT, WANT_SLOPE, WANT_NORM,
            )  # fmt: skip

    dq_ptr += batch * stride_xb + (q_row + row0) * stride_xs + head * stride_xh
    norm = tl.full((BLOCK_M,), 1.0, tl.float32)
    sunk = tl.zeros((BLOCK_M,), tl.float32)  # the sink's weight
    if sinks_ptr is not None and (WANT_NORM or WANT_SLOPE):
        sink = tl.load(sinks_ptr + head * stride_sh).to(tl.float32) * UNIT
        sunk = tl.exp2((sink - level) * (LOG2E / UNIT))
    if WANT_NORM:
        if sinks_ptr is not None:
            total += sunk
        norm = 1 / tl.where(total == 0, 1.0, total)
        tl.store(norm_ptr + batch * stride_lb + head * stride_lh + q_row + offs_m, norm, mask=inside)
    factor = norm * grad_scale
    store_parts(dq_ptr + tl.arange(0, BLOCK_M)[:, None] * stride_xs, dq, factor, inside, DIM, PARTS)
    if WANT_SLOPE:
        dlse = tl.zeros((BLOCK_M,), tl.float32)
        if dlse_ptr is not None:
            dlse = load_rows(dlse_ptr + batch * stride_lb + head * stride_lh + q_row, None, 0, offs_m, seq_q, True)
        before = tl.maximum(-(offs_m + shift), 0).to(tl.float32)
        dslope = slope_gradient(sums, norm, delta, dlse, norm * sunk, before)
        sees = inside & (level != float("inf"))
        tl.store(dslope_ptr + bh.to(tl.int64) * blocks + block_m, tl.sum(tl.where(sees, dslope, 0.0)))
