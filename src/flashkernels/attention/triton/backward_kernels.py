"""The portable attention backward: Triton kernels without an S x S buffer.

P is made again from the saved log-sum-exp L: P = exp(S - L). First `rows_kernel` makes delta = rowsum(dO * O) - dL of
every row, and L as the others want it. Then there are two forms, and `backward_tiles.choose` decides:

- One pass: `dkdv_kernel` takes one block of keys and walks the query rows that see it, of every query head that shares
  the keys. It makes dK and dV, and adds dS·K of each block of rows to sums in memory, fp32; `sums_kernel` turns them
  into dQ. The order of the additions varies, so dQ is not the same to the bit in every run.
- Two passes: `dkdv_kernel` without sums, and `dq_kernel`, which takes one block of query rows and walks the keys that
  it sees. Scores are computed twice, so that each gradient is summed by one program.

The gradient of a float mask is dS itself, summed over what the mask is broadcast over: `backward_mask` has its forms.

The walk is the forward's: blocks in which something is hidden first, then the interior. See `README.md` beside this
package for the mathematics.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flashkernels.attention.triton.dropout import kept
from flashkernels.attention.triton.parts import (
    LOG2E,
    accumulate,
    keep_rows,
    load_parts,
    logits,
    scores,
    split_block,
    store_parts,
    visible_keys,
)

LOST = tl.constexpr(-1e6)  # so low that fp32 has no digits left for the sum of a row
CLEARED = tl.constexpr(2048)  # sums of dQ that a program of the first kernel clears at a time


@triton.jit(do_not_specialize=["seq_q", "heads", "blocks", "sums"])
def rows_kernel(
    o_ptr, do_ptr, dlse_ptr, lse_ptr, level_ptr, delta_ptr, sums_ptr,
    stride_ob: tl.int64, stride_os: tl.int64, stride_oh: tl.int64, stride_od,
    stride_gb: tl.int64, stride_gs: tl.int64, stride_gh: tl.int64, stride_gd,
    stride_eb: tl.int64, stride_eh: tl.int64, stride_es: tl.int64,
    seq_q, heads, blocks, sums: tl.int64,
    DIM_V: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BIASED: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Of BLOCK rows: delta = rowsum(dO * O) - dL, and the level, which is L in the unit of the logits.

    A row that sees nothing has the level +inf: all its weights are 0. So has one whose every key a float mask pushed
    so low that fp32 keeps no digits of the sum. A ragged batch is one sequence here. Every program also clears its
    share of the `sums` numbers that dQ will be added to, where it is (None: it is not).
    """
    pid = tl.program_id(0)
    if sums_ptr is not None:
        share = tl.cdiv(tl.cdiv(sums, tl.num_programs(0)), CLEARED) * CLEARED
        first = pid.to(tl.int64) * share
        for i in tl.range(first, tl.minimum(first + share, sums), CLEARED):
            at = i + tl.arange(0, CLEARED)
            tl.store(sums_ptr + at, tl.zeros((CLEARED,), tl.float32), mask=at < sums)
    bh = pid // blocks
    batch = bh // heads
    head = bh - batch * heads
    offs_m = (pid - bh * blocks) * BLOCK + tl.arange(0, BLOCK)
    offs_d = tl.arange(0, WIDTH)
    inside = offs_m < seq_q
    rows = inside[:, None] & (offs_d < DIM_V)[None, :]
    at = o_ptr + batch * stride_ob + head * stride_oh
    at_g = do_ptr + batch * stride_gb + head * stride_gh
    o = tl.load(at + offs_m[:, None] * stride_os + offs_d.to(tl.int64)[None, :] * stride_od, mask=rows, other=0.0)
    do = tl.load(at_g + offs_m[:, None] * stride_gs + offs_d.to(tl.int64)[None, :] * stride_gd, mask=rows, other=0.0)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + batch * stride_eb + head * stride_eh + offs_m * stride_es, mask=inside, other=0.0)
    at = bh.to(tl.int64) * seq_q + offs_m
    level = tl.load(lse_ptr + at, mask=inside, other=0.0) * UNIT
    hidden = level == float("-inf")
    if BIASED:
        hidden = level < LOST
    tl.store(level_ptr + at, tl.where(hidden, float("inf"), level), mask=inside)
    tl.store(delta_ptr + at, delta, mask=inside)


@triton.jit
def within(i, j, seq_q, seq_k, shift, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Whether row i and key j are there, and the row may see the key by causal and window."""
    seen = (i < seq_q) & (j < seq_k)
    if RIGHT:
        seen = seen & (j <= i + (shift + right))
    if LEFT:
        seen = seen & (j >= i + (shift - left))
    return seen


@triton.jit
def weights(
    raw, level, i, j, seq_q, seq_k, shift, left, right, scale, softcap, slope, mask_ptr, stride_mm, stride_mn,
    HIDING: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    MASK: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """P of the rows i and keys j from Q·Kᵀ, and tanh of the scores (where there is a softcap).

    i and j are a row and a column, or a column and a row: P is made either way round.
    """
    s = logits(raw, scale, softcap, 0.0, None, None, 0, SOFTCAP, False)
    t = s
    if SOFTCAP:
        t = s / softcap
    if ALIBI:
        s -= slope * tl.abs(i + shift - j).to(tl.float32)
    if HIDING:
        seen = within(i, j, seq_q, seq_k, shift, left, right, LEFT, RIGHT)
        if MASK != "none":
            value = tl.load(mask_ptr + i * stride_mm + j.to(tl.int64) * stride_mn, mask=seen, other=0)
            if MASK == "bool":
                seen = seen & (value != 0)
            else:
                bias = value.to(tl.float32)
                seen = seen & (bias != float("-inf"))
                s += tl.maximum(bias, -1e38) * UNIT
        p = tl.where(seen, tl.exp2((s - level) * (LOG2E / UNIT)), 0.0)  # not exp2 of -inf: the level may be NaN
        if SOFTCAP:
            t = tl.where(seen, t, 0.0)
    else:
        p = tl.exp2((s - level) * (LOG2E / UNIT))
    return p, t


@triton.jit
def logit_gradient(p, dp, delta, HIDING: tl.constexpr):
    """dS. A hidden key's V may be NaN, and must not count."""
    ds = p * (dp - delta)
    if HIDING:
        ds = tl.where(p == 0, 0.0, ds)
    return ds


@triton.jit
def load_rows(ptr, desc, at, offs_m, seq_q, HIDING: tl.constexpr):
    """One number of each row: by TMA from the `at`th on, or where there is no descriptor from `ptr`."""
    if desc is not None:
        return desc.load([at])
    if HIDING:
        return tl.load(ptr + offs_m, mask=offs_m < seq_q, other=0.0)
    return tl.load(ptr + offs_m)


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
def finite(tiles):
    """Zeros for NaN and Inf: a weight of 0 does not take them away."""
    out = ()
    for i in tl.static_range(len(tiles)):
        out = out + (tl.where(tiles[i] - tiles[i] == 0, tiles[i], 0.0).to(tiles[i].dtype),)
    return out


@triton.jit
def empty(PARTS: tl.constexpr, BLOCK: tl.constexpr):
    acc = ()
    for i in tl.static_range(len(PARTS)):
        acc = acc + (tl.zeros((BLOCK, tl.constexpr(PARTS[i])), tl.float32),)
    return acc


@triton.jit
def first_sum(q_row, batch, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Where the sums of a sequence of a ragged batch start: so far apart that each may end with half a block."""
    return (q_row // BLOCK + batch).to(tl.int64) * (BLOCK * ((DIM + 7) // 8 * 8))


@triton.jit
def products(ds, k):
    """dS·K of each part; `ds` is keys by rows."""
    out = ()
    for i in tl.static_range(len(k)):
        out = out + (tl.dot(ds.to(k[i].dtype).T, k[i]),)
    return out


@triton.jit
def add_parts(sums_ptr, dq, m, DIM: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr):
    """Adds dQ of ROWS rows from `m` on to their sums."""
    COLUMNS: tl.constexpr = (DIM + 7) // 8
    at = sums_ptr + m * tl.full((), 8 * COLUMNS, tl.int64)
    column: tl.constexpr = 0
    for i in tl.static_range(len(PARTS)):
        add_rows(at, dq[i], column, COLUMNS, ROWS, PARTS[i])
        column = column + PARTS[i]


@triton.jit
def add_rows(sums_ptr, dq, column, COLUMNS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Adds WIDTH columns of dQ to the sums of ROWS rows: those from `column` on, of 8 * COLUMNS.

    The sums lie as a matrix instruction leaves them in a warp: by squares of 16 rows and 8 columns, in which a thread
    has columns 2i and 2i + 1 of the rows j and j + 8. So a thread's four sums are neighbours, a warp's are 512 bytes in
    a row, and none goes through shared memory. Squares come in the order of warps: by rows, then by half the columns.
    """
    HIGH: tl.constexpr = ROWS // 16
    HALF: tl.constexpr = WIDTH // 16
    dq = dq.reshape(HIGH, 2, 8, 2, HALF, 4, 2).trans(4, 3, 0, 2, 5, 1, 6).reshape(HIGH * HALF * 2, 128)
    square = tl.arange(0, HIGH * HALF * 2)
    right = column // 8 + square // HIGH % 2 * HALF + square // (2 * HIGH)
    at = sums_ptr + (square % HIGH * COLUMNS + right)[:, None] * 128 + tl.arange(0, 128)[None, :]
    if column + WIDTH > 8 * COLUMNS:
        tl.atomic_add(at, dq, mask=(right < COLUMNS)[:, None], sem="relaxed")
    else:
        tl.atomic_add(at, dq, sem="relaxed")


@triton.jit
def place(blocks, section, total_heads):
    """Which block of which head this program has: sections of heads that share the L2, in them block by block."""
    pid = tl.program_id(0)
    first = pid // (section * blocks) * section
    in_section = tl.minimum(section, total_heads - first)
    rank = pid - first * blocks
    return rank // in_section, first + rank % in_section


@triton.jit
def dkdv_step(
    dk, dv, dq, column, k, v, m, n, full, descs, origin, q_ptr, k_ptr, do_ptr, level_ptr, delta_ptr, norm_ptr, sums_ptr,
    dmask_ptr, mask_ptr, stride_qs, stride_qd, stride_ks, stride_kd, stride_gs, stride_gd, stride_mm, stride_mn,
    stride_dm, seq_q, seq_k, shift, left, right, scale, softcap, slope, drop, keep_scale,
    DIM: tl.constexpr, DIM_V: tl.constexpr, PARTS: tl.constexpr, PARTS_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, HIDING: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr, UNIT: tl.constexpr, VARLEN: tl.constexpr,
    TMA: tl.constexpr, WANT_K: tl.constexpr, WANT_V: tl.constexpr, WANT_COLUMN: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """Adds what BLOCK_M query rows from `m` on give to dK and dV, and (with sums) what they get in dQ. Of the mask's
    gradient it adds to `column`, the sum of each key's dS, or stores the block of dS.

    Scores lie on their side: keys by rows. TMA reads by `descs`, of Q, dO, level and delta, from `origin` on: batch,
    row and head, and the head's first number of level and delta. Where nothing is hidden, dQ is returned and the next
    step, or after the last one the caller, adds it: so its product runs on into that step's scores. The first step,
    at row `full`, gets zeros.
    """
    tma_batch, tma_row, tma_head, first = origin
    WANT_DS: tl.constexpr = WANT_K or WANT_COLUMN or sums_ptr is not None or dmask_ptr is not None
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
        add_parts(sums_ptr, dq, tl.maximum(m - BLOCK_M, full), DIM, PARTS, BLOCK_M)
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
    stays = None
    if drop is not None:
        stays = kept(drop, m, n, BLOCK_M, BLOCK_N, True)
    if WANT_V:
        thinned = p
        if drop is not None:
            thinned = tl.where(stays, p, 0.0)
        dv = accumulate(dv, thinned, do, PRECISION)
    if WANT_DS:
        dp = scores(v, do, PRECISION)
        # only now: before the product it would take registers beside P, dP, dK and dV
        if NOW:
            delta = load_now(delta_ptr + m, n < seq_k, seq_q - m, HIDING, BLOCK_M)
        else:
            delta = load_rows(delta_ptr, descs[3], first + m, offs_m, seq_q, HIDING)
        if drop is not None:
            dp = tl.where(stays, dp * keep_scale, 0.0)
        ds = logit_gradient(p, dp, delta[None, :], HIDING)
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
            if HIDING:  # K again: a copy of it beside the one of the products would take shared memory all the time
                clean = load_parts(k_ptr, None, 0, 0, 0, seq_k - n, stride_ks, stride_kd, DIM, PARTS, BLOCK_N, False)
                now = products(ds, finite(clean))
            elif LATE:
                dq = products(ds, k)
            else:
                now = products(ds, k)
        if WANT_K:
            if HIDING:
                q = finite(q)
            dk = accumulate(dk, ds, q, PRECISION)
        if sums_ptr is not None and (HIDING or not LATE):
            add_parts(sums_ptr, now, m, DIM, PARTS, BLOCK_M)
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
    UNIT: tl.constexpr, LATE: tl.constexpr,
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
    STAGES_HIDING: tl.constexpr = min(STAGES, 2) if sums_ptr is not None else STAGES
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
                sums_head += first_sum(q_row, batch, DIM, BLOCK_M)
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
        for b in tl.range(0, masked_blocks, num_stages=STAGES_HIDING):
            m = split_block(b, edge, edge_blocks, start, BLOCK_M)
            dk, dv, dq, column = dkdv_step(
                dk, dv, dq, column, k, v, m, n, full, descs, origin, q_head, k_ptr, do_head, level_head, delta_head,
                norm_head, sums_head, dmask_head, mask_head, stride_qs, stride_qd, stride_ks, stride_kd, stride_gs,
                stride_gd, stride_mm, stride_mn, stride_dm, seq_q, seq_k, shift, left, right, scale, softcap, slope,
                drop, keep_scale, DIM, DIM_V, PARTS, PARTS_V, BLOCK_M, BLOCK_N, True, LEFT, RIGHT, SOFTCAP, ALIBI, MASK,
                PRECISION, UNIT, VARLEN, TMA, WANT_K, WANT_V, WANT_COLUMN, LATE,
            )  # fmt: skip
        if MASK == "none":
            for m in tl.range(full, edge, BLOCK_M, num_stages=STAGES):
                dk, dv, dq, column = dkdv_step(
                    dk, dv, dq, column, k, v, m, n, full, descs, origin, q_head, k_ptr, do_head, level_head, delta_head,
                    norm_head, sums_head, dmask_head, mask_head, stride_qs, stride_qd, stride_ks, stride_kd, stride_gs,
                    stride_gd, stride_mm, stride_mn, stride_dm, seq_q, seq_k, shift, left, right, scale, softcap, slope,
                    drop, keep_scale, DIM, DIM_V, PARTS, PARTS_V, BLOCK_M, BLOCK_N, False, LEFT, RIGHT, SOFTCAP, ALIBI,
                    MASK, PRECISION, UNIT, VARLEN, TMA, WANT_K, WANT_V, WANT_COLUMN, LATE,
                )  # fmt: skip
            if LATE and edge > full:
                add_parts(sums_head, dq, edge - BLOCK_M, DIM, PARTS, BLOCK_M)
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
    return accumulate(dq, ds, k, PRECISION), sums, total


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


@triton.jit(do_not_specialize=["seq_q", "heads", "blocks"])
def sums_kernel(
    sums_ptr, dq_ptr, cu_q_ptr, stride_zb: tl.int64, stride_zh: tl.int64,
    stride_xb: tl.int64, stride_xs: tl.int64, stride_xh: tl.int64,
    seq_q, heads, blocks, grad_scale,
    DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dQ of BLOCK rows from their sums."""
    pid = tl.program_id(0)
    bh = pid // blocks
    row0 = (pid - bh * blocks) * BLOCK
    batch = bh // heads
    head = bh - batch * heads
    q_row = tl.zeros((), tl.int32)
    if cu_q_ptr is not None:
        q_row = tl.load(cu_q_ptr + batch)
        seq_q = tl.load(cu_q_ptr + batch + 1) - q_row
        sums_ptr += first_sum(q_row, batch, DIM, BLOCK)
    if row0 >= seq_q:
        return
    COLUMNS: tl.constexpr = (DIM + 7) // 8
    i = tl.arange(0, BLOCK)[:, None]
    j = tl.arange(0, WIDTH)[None, :]
    square = i // 16 * COLUMNS + j // 8
    at = square * 128 + i % 8 * 16 + j % 8 // 2 * 4 + i // 8 % 2 * 2 + j % 2
    inside = (row0 + i < seq_q) & (j < DIM)
    sums_ptr += batch * stride_zb + head * stride_zh + row0.to(tl.int64) * (8 * COLUMNS)
    dq_ptr += batch * stride_xb + (q_row + row0) * stride_xs + head * stride_xh
    dq = tl.load(sums_ptr + at, mask=inside, other=0.0) * grad_scale
    tl.store(dq_ptr + i * stride_xs + j, dq.to(dq_ptr.dtype.element_ty), mask=inside)
