"""The pass over keys: dK and dV of a block of keys, with the sums of dQ where it is the only pass."""

from __future__ import annotations

import triton
import triton.language as tl

from flashkernels.attention.triton.backward_parts import (
    empty,
    finite,
    has_spoiled,
    load_rows,
    logit_gradient,
    packed_gradient,
    place,
    weights,
)
from flashkernels.attention.triton.backward_sums import add_parts, first_sum, products, products_by_rows
from flashkernels.attention.triton.backward_tiles import ADDING, ROOMY
from flashkernels.attention.triton.dropout import kept
from flashkernels.attention.triton.parts import accumulate, keep_rows, load_parts, scores, split_block, store_parts

WIDEST = tl.constexpr(ADDING[-1].width)  # rows of which one pass makes all gradients
NARROW = tl.constexpr(ROOMY)


@triton.jit
def load_now(ptr, there, rows, HIDING: tl.constexpr, BLOCK: tl.constexpr):
    """One number of each of BLOCK rows from `ptr` on, of which there are `rows`.

    `there` is always true. In a branch Triton leaves a load alone; elsewhere in the loop every thread would copy all
    that it needs to shared memory ahead of time.
    """
    offs = tl.arange(0, BLOCK)
    x = tl.zeros((BLOCK,), tl.float32)
    if there:
        x = tl.load(ptr + offs, mask=offs < rows, other=0.0) if HIDING else tl.load(ptr + offs)
    return x


@triton.jit
def dkdv_step(
    dk, dv, dq, column, k, v, m, n, full, descs, origin, q_ptr, k_ptr, do_ptr, level_ptr, delta_ptr, norm_ptr, sums_ptr,
    dmask_ptr, mask_ptr, stride_qs, stride_qd, stride_ks, stride_kd, stride_gs, stride_gd, stride_mm, stride_mn,
    stride_dm, seq_q, seq_k, shift, left, right, scale, softcap, slope, drop, keep_scale,
    DIM: tl.constexpr, DIM_V: tl.constexpr, PARTS: tl.constexpr, PARTS_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, HIDING: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr, UNIT: tl.constexpr, VARLEN: tl.constexpr,
    TMA: tl.constexpr, WANT_K: tl.constexpr, WANT_V: tl.constexpr, WANT_COLUMN: tl.constexpr, LATE: tl.constexpr,
    TURNED: tl.constexpr,
):  # fmt: skip
    """Adds what BLOCK_M query rows from `m` on give to dK and dV, and (with sums) what they get in dQ. Of the mask's
    gradient it adds to `column`, the sum of each key's dS, or stores the block of dS.

    Scores lie on their side: keys by rows. TMA reads by `descs`, of Q, dO, level and delta, from `origin` on: batch,
    row and head, and the head's first number of level and delta. Where nothing is hidden, dQ is returned and the next
    step, or after the last one the caller, adds it: so its product runs on into that step's scores. The first step,
    at row `full`, gets zeros. Of two parts that are added at once, the last is added before the first is made: a
    product of dK runs under each (H200, 2026-11-16, D=72: 4 % faster, under a causal mask 1 %).

    HIDING: 0 where every key sees every row; 1 where not; 2 where not, and K has neither NaN nor Inf.
    """
    tma_batch, tma_row, tma_head, first = origin
    SPLIT: tl.constexpr = (sums_ptr is not None and WANT_K and len(PARTS) == 2 and (BLOCK_N <= 64 or TURNED)
                           and not (LATE or HIDING))  # fmt: skip
    WANT_DS: tl.constexpr = WANT_K or WANT_COLUMN or sums_ptr is not None or dmask_ptr is not None
    # in one pass, which is bound by instructions, and where P and dS are used as they come
    PACKED: tl.constexpr = (sums_ptr is not None and drop is None and not (HIDING or SOFTCAP)
                            and q_ptr.dtype.element_ty == tl.bfloat16)  # fmt: skip
    offs_m = m + tl.arange(0, BLOCK_M)
    offs_n = n + tl.arange(0, BLOCK_N)
    rows = None
    if HIDING:
        rows = seq_q - m
    q = load_parts(q_ptr + m * stride_qs, descs[0], tma_batch, tma_row + m, tma_head, rows, stride_qs, stride_qd, DIM,
                   PARTS, BLOCK_M, TMA)  # fmt: skip
    # level and delta by every thread for itself take registers: up to 64 columns there are enough
    NOW: tl.constexpr = sums_ptr is not None and descs[2] is None and len(PARTS) == 1 and PARTS[0] <= 64
    if NOW:
        level = load_now(level_ptr + m, m < seq_q, seq_q - m, HIDING, BLOCK_M)
    else:
        level = load_rows(level_ptr, descs[2], first + m, offs_m, seq_q, HIDING)
    raw = scores(k, q, PRECISION)
    if LATE and not HIDING:
        add_parts(sums_ptr, dq, tl.maximum(m - BLOCK_M, full), 0, DIM, PARTS, BLOCK_M, TURNED)
    p, t = weights(
        raw, level[None, :], offs_m[None, :], offs_n[:, None], seq_q, seq_k, shift, left, right,
        scale, softcap, slope, mask_ptr, stride_mm, stride_mn, HIDING, LEFT, RIGHT, SOFTCAP, ALIBI, MASK, UNIT,
    )  # fmt: skip
    if norm_ptr is not None:
        p *= load_rows(norm_ptr, None, 0, offs_m, seq_q, HIDING)[None, :]
    do = load_parts(do_ptr + m * stride_gs, descs[1], tma_batch, tma_row + m, tma_head, rows, stride_gs, stride_gd,
                    DIM_V, PARTS_V, BLOCK_M, TMA)  # fmt: skip
    if VARLEN and TMA and HIDING:  # the block may reach into the next sequence, whatever is there
        do = keep_rows(do, offs_m < seq_q)
    if PACKED:
        p = p.to(tl.bfloat16)
    stays = None
    if drop is not None:
        stays = kept(drop, m, n, BLOCK_M, BLOCK_N, True)
    if WANT_V:
        thinned = p
        if drop is not None:
            thinned = tl.where(stays, p, 0.0)
        dv = accumulate(dv, thinned, do, PRECISION, APART=True)
    if WANT_DS:
        dp = scores(v, do, PRECISION)
        # only now: before the product it would take registers beside P, dP, dK and dV
        if NOW:
            delta = load_now(delta_ptr + m, n < seq_k, seq_q - m, HIDING, BLOCK_M)
        else:
            delta = load_rows(delta_ptr, descs[3], first + m, offs_m, seq_q, HIDING)
        if drop is not None:
            dp = tl.where(stays, dp * keep_scale, 0.0)
        less = delta[None, :]
        ds = packed_gradient(p, dp, less) if PACKED else logit_gradient(p, dp, less, HIDING)
        if WANT_COLUMN:
            column += tl.sum(ds, 1)
        if dmask_ptr is not None:
            # rows are as long as they are apart; of the stride Triton knows whether it is a multiple of 16
            inside = (offs_m < seq_q)[None, :] & (offs_n < stride_dm)[:, None]
            at = dmask_ptr + offs_m.to(tl.int64)[None, :] * stride_dm + offs_n[:, None]
            tl.store(at, ds.to(dmask_ptr.dtype.element_ty), mask=inside)
        if SOFTCAP:
            ds *= 1 - t * t
        if sums_ptr is not None:
            if HIDING == 1:  # K again: a copy beside the one of the products would take shared memory all the time
                clean = load_parts(k_ptr, None, 0, 0, 0, seq_k - n, stride_ks, stride_kd, DIM, PARTS, BLOCK_N, False)
                now = products_by_rows(ds, finite(clean), TURNED)
            elif LATE and not HIDING:
                dq = products(ds, k, TURNED)
            elif SPLIT:
                last = products(ds, (k[1],), TURNED)
                dk_first = accumulate((dk[0],), ds, (q[0],), PRECISION, APART=True)
                add_parts(sums_ptr, last, m, 1, DIM, PARTS, BLOCK_M, TURNED)
                now = products(ds, (k[0],), TURNED)
                dk = dk_first + accumulate((dk[1],), ds, (q[1],), PRECISION, APART=True)
                add_parts(sums_ptr, now, m, 0, DIM, PARTS, BLOCK_M, TURNED)
            else:
                now = products(ds, k, TURNED)
        if WANT_K and not SPLIT:
            if HIDING:
                q = finite(q)
            dk = accumulate(dk, ds, q, PRECISION, APART=True)
        if sums_ptr is not None and (HIDING or not (LATE or SPLIT)):
            add_parts(sums_ptr, now, m, 0, DIM, PARTS, BLOCK_M, TURNED)
    return dk, dv, dq, column


@triton.jit(
    do_not_specialize=["seq_q", "seq_k", "blocks", "section", "total_heads", "left", "right", "kv_heads", "threshold"]
)
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, level_ptr, delta_ptr, norm_ptr, dk_ptr, dv_ptr, sums_ptr, dmask_ptr, dcolumn_ptr,
    mask_ptr, slopes_ptr, cu_q_ptr, cu_k_ptr, seed_ptr, q_desc0, q_desc1, do_desc0, do_desc1, level_desc, delta_desc,
    stride_qb: tl.int64, stride_qs: tl.int64, stride_qh: tl.int64, stride_qd,
    stride_kb: tl.int64, stride_ks: tl.int64, stride_kh: tl.int64, stride_kd,
    stride_vb: tl.int64, stride_vs: tl.int64, stride_vh: tl.int64, stride_vd,
    stride_gb: tl.int64, stride_gs: tl.int64, stride_gh: tl.int64, stride_gd,
    stride_xb: tl.int64, stride_xs: tl.int64, stride_xh: tl.int64,
    stride_yb: tl.int64, stride_ys: tl.int64, stride_yh: tl.int64,
    stride_zb: tl.int64, stride_zh: tl.int64,
    stride_lb: tl.int64, stride_lh: tl.int64,
    stride_mb: tl.int64, stride_mh: tl.int64, stride_mm: tl.int64, stride_mn,
    stride_ab: tl.int64, stride_ah: tl.int64, stride_dm,
    seq_q, seq_k, kv_heads, group, blocks, section, total_heads, left, right, scale, softcap, grad_scale,
    threshold, keep_scale,
    DIM: tl.constexpr, DIM_V: tl.constexpr, PARTS: tl.constexpr, PARTS_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
    UNIT: tl.constexpr, LATE: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """dK and dV (each None: not asked for) of one block of keys, over all rows of all its query heads.

    And of the mask's gradient, where asked for: dS, (B, H, S_q, S_k) with rows `stride_dm` apart, or what each key's
    add up to, (B, H, S_k). Without the first, the stride is 1: Triton drops such arguments.
    """
    VARLEN: tl.constexpr = cu_q_ptr is not None
    ALIBI: tl.constexpr = slopes_ptr is not None
    WANT_K: tl.constexpr = dk_ptr is not None
    WANT_V: tl.constexpr = dv_ptr is not None
    WANT_COLUMN: tl.constexpr = dcolumn_ptr is not None
    TMA: tl.constexpr = q_desc0 is not None
    # a pass that leaves dV to another has wide rows, and shared memory for one stage
    STAGES_HIDING: tl.constexpr = min(STAGES, 2 if WANT_V else 1) if sums_ptr is not None else STAGES
    # With the interior first fewer registers spill. Where few do anyway it is 1 to 6 % slower (H200, 2026-11-16).
    WIDE: tl.constexpr = (DIM > WIDEST and not WANT_V) or (DIM > NARROW and BLOCK_N <= 64 and (LEFT or RIGHT))
    CROWDED: tl.constexpr = sums_ptr is not None and (WIDE or TURNED)
    FIRST: tl.constexpr = 0 if CROWDED else 1
    LAST: tl.constexpr = (3 if TURNED else 2) if CROWDED else -1
    block_n, bh = place(blocks, section, total_heads)  # under a causal mask the first keys have the most rows
    batch = bh // kv_heads
    head_k = bh - batch * kv_heads

    q_row = tl.zeros((), tl.int32)
    k_row = tl.zeros((), tl.int32)
    tma_batch = batch
    if VARLEN:
        q_row = tl.load(cu_q_ptr + batch)
        k_row = tl.load(cu_k_ptr + batch)
        tma_batch = 0
        seq_q = tl.load(cu_q_ptr + batch + 1) - q_row
        seq_k = tl.load(cu_k_ptr + batch + 1) - k_row
    n = block_n * BLOCK_N
    if n >= seq_k:
        return
    shift = seq_k - seq_q
    offs_n = n + tl.arange(0, BLOCK_N)
    k_ptr += batch * stride_kb + (k_row + n) * stride_ks + head_k * stride_kh
    v_ptr += batch * stride_vb + (k_row + n) * stride_vs + head_k * stride_vh
    k = load_parts(k_ptr, None, 0, 0, 0, seq_k - n, stride_ks, stride_kd, DIM, PARTS, BLOCK_N, False)
    v = load_parts(v_ptr, None, 0, 0, 0, seq_k - n, stride_vs, stride_vd, DIM_V, PARTS_V, BLOCK_N, False)

    # Query rows: [start, full) and [edge, end) are hidden from some key, [full, edge) from none. Keys past the end
    # spoil only their own rows, which are not stored; but for dQ a weight of theirs that overflows is not to be there.
    last = tl.minimum(n + BLOCK_N, seq_k) - 1
    start = tl.zeros((), tl.int32)
    full = tl.zeros((), tl.int32)
    end = seq_q
    edge = seq_q // BLOCK_M * BLOCK_M
    if RIGHT:
        start = tl.maximum(0, n - shift - right) // BLOCK_M * BLOCK_M
        full = (tl.maximum(0, last - shift - right) + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    if LEFT:
        end = tl.minimum(seq_q, tl.maximum(0, last - shift + left + 1))
        edge = tl.minimum(edge, tl.maximum(0, n - shift + left + 1) // BLOCK_M * BLOCK_M)
    if MASK != "none":
        edge = start
    if sums_ptr is not None:
        edge = tl.where(n + BLOCK_N > seq_k, start, edge)
    end = tl.maximum(end, start)
    edge = tl.maximum(edge, start)
    full = tl.minimum(tl.maximum(full, start), edge)
    edge_blocks = (end - edge + BLOCK_M - 1) // BLOCK_M
    masked_blocks = edge_blocks + (full - start) // BLOCK_M
    spoiled = has_spoiled(k).to(tl.int32) * masked_blocks if TURNED else masked_blocks

    descs = ((q_desc0, q_desc1), (do_desc0, do_desc1), level_desc, delta_desc)
    dk = empty(PARTS, BLOCK_N)
    dv = empty(PARTS_V, BLOCK_N)
    for head in range(head_k * group, head_k * group + group):
        q_head = q_ptr + batch * stride_qb + q_row * stride_qs + head * stride_qh
        do_head = do_ptr + batch * stride_gb + q_row * stride_gs + head * stride_gh
        level_head = level_ptr + batch * stride_lb + head * stride_lh + q_row
        delta_head = delta_ptr + batch * stride_lb + head * stride_lh + q_row
        norm_head = norm_ptr
        if norm_ptr is not None:
            norm_head = norm_ptr + batch * stride_lb + head * stride_lh + q_row
        sums_head = sums_ptr
        if sums_ptr is not None:
            sums_head = sums_ptr + batch * stride_zb + head * stride_zh
            if VARLEN:
                sums_head += first_sum(q_row, batch, DIM, BLOCK_M, TURNED)
        mask_head = mask_ptr
        if MASK != "none":
            mask_head = mask_ptr + batch * stride_mb + head * stride_mh
        slope = 0.0
        if ALIBI:
            slope = tl.load(slopes_ptr + batch * stride_ab + head * stride_ah).to(tl.float32) * UNIT
        dmask_head = dmask_ptr
        if dmask_ptr is not None:
            dmask_head = dmask_ptr + (batch * (kv_heads * group) + head).to(tl.int64) * seq_q * stride_dm
        drop = (tl.load(seed_ptr), threshold, batch, head) if seed_ptr is not None else None
        column = tl.zeros((BLOCK_N,), tl.float32)
        origin = (tma_batch, q_row, head, (batch * stride_lb + head * stride_lh + q_row).to(tl.int32))
        dq = empty(PARTS, BLOCK_M) if LATE else ()
        for hiding in tl.static_range(FIRST, LAST, 1 - 2 * FIRST):
            if hiding or MASK == "none":
                since, until, step = (
                    (full, edge, BLOCK_M) if hiding == 0
                    else (0, spoiled, 1) if hiding == 1 else (spoiled, masked_blocks, 1)
                )  # fmt: skip
                for i in tl.range(since, until, step, num_stages=STAGES_HIDING if hiding == 1 else STAGES):
                    m = split_block(i, edge, edge_blocks, start, BLOCK_M) if hiding else i
                    dk, dv, dq, column = dkdv_step(
                        dk, dv, dq, column, k, v, m, n, full, descs, origin, q_head, k_ptr, do_head, level_head,
                        delta_head, norm_head, sums_head, dmask_head, mask_head, stride_qs, stride_qd, stride_ks,
                        stride_kd, stride_gs, stride_gd, stride_mm, stride_mn, stride_dm, seq_q, seq_k, shift, left,
                        right, scale, softcap, slope, drop, keep_scale, DIM, DIM_V, PARTS, PARTS_V, BLOCK_M, BLOCK_N,
                        hiding, LEFT, RIGHT, SOFTCAP, ALIBI, MASK, PRECISION, UNIT, VARLEN, TMA, WANT_K, WANT_V,
                        WANT_COLUMN, LATE, TURNED,
                    )  # fmt: skip
                if LATE and not hiding and edge > full:
                    add_parts(sums_head, dq, edge - BLOCK_M, 0, DIM, PARTS, BLOCK_M, TURNED)
        if WANT_COLUMN:
            at = dcolumn_ptr + (batch * (kv_heads * group) + head).to(tl.int64) * seq_k + offs_n
            tl.store(at, column, mask=offs_n < seq_k)

    inside = offs_n < seq_k
    by_row = tl.arange(0, BLOCK_N)[:, None]
    if WANT_K:
        dk_ptr += batch * stride_xb + (k_row + n) * stride_xs + head_k * stride_xh
        factor = tl.zeros((BLOCK_N,), tl.float32) + grad_scale
        store_parts(dk_ptr + by_row * stride_xs, dk, factor, inside, DIM, PARTS)
    if WANT_V:
        dv_ptr += batch * stride_yb + (k_row + n) * stride_ys + head_k * stride_yh
        factor = tl.full((BLOCK_N,), 1.0, tl.float32)
        if seed_ptr is not None:
            factor *= keep_scale
        store_parts(dv_ptr + by_row * stride_ys, dv, factor, inside, DIM_V, PARTS_V)
