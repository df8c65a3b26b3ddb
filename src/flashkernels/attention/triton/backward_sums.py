"""What one pass takes: sums of dQ in memory, fp32, which the pass over keys adds to and `sums_kernel` makes dQ of."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def sums_of_row(dim, turned):
    """How many sums a row has: squares are 8 columns wide, and on their side 16."""
    step = 16 if turned else 8
    return -(-dim // step) * step


@triton.jit
def first_sum(q_row, batch, DIM: tl.constexpr, BLOCK: tl.constexpr, TURNED: tl.constexpr):
    """Where the sums of a sequence of a ragged batch start: so far apart that each may end with half a block."""
    return (q_row // BLOCK + batch).to(tl.int64) * (BLOCK * sums_of_row(DIM, TURNED))


@triton.jit
def products(ds, k, TURNED: tl.constexpr):
    """dS·K of each part; `ds` is keys by rows. TURNED: columns by rows, as a wgmma has 64 rows at least."""
    out = ()
    for i in tl.static_range(len(k)):
        x = ds.to(k[i].dtype)
        out = out + (tl.dot(k[i].T, x) if TURNED else tl.dot(x.T, k[i]),)
    return out


@triton.jit
def products_by_rows(ds, k, TURNED: tl.constexpr):
    """The same, by rows at first. Of K that comes out of registers Triton 3.6 gives wgmma a wrong one on its side."""
    made = products(ds, k, False)
    out = ()
    for i in tl.static_range(len(made)):
        out = out + (made[i].T if TURNED else made[i],)
    return out


@triton.jit
def add_parts(
    sums_ptr, dq, m, FIRST: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
    TURNED: tl.constexpr,
):  # fmt: skip
    """Adds dQ of ROWS rows from `m` on to their sums: of the parts from FIRST on, as many as `dq` has."""
    SUMS: tl.constexpr = sums_of_row(DIM, TURNED)
    at = sums_ptr + m * tl.full((), SUMS, tl.int64)
    column: tl.constexpr = 0
    for i in tl.static_range(len(PARTS)):
        if i >= FIRST and i < FIRST + len(dq):
            if TURNED:
                add_squares(at + column * ROWS, dq[i - FIRST], 0, SUMS - column, ROWS)
            else:
                add_squares(at, dq[i - FIRST], column, ROWS, SUMS)
        column = column + PARTS[i]


@triton.jit
def add_squares(sums_ptr, dq, column, TALL: tl.constexpr, WIDE: tl.constexpr):
    """Adds `dq` to sums of TALL rows and WIDE columns, from `column` on; what is past them is left out.

    The sums lie as a matrix instruction leaves them in a warp: by squares of 16 rows and 8 columns, in which a thread
    has columns 2i and 2i + 1 of the rows j and j + 8. So a thread's four sums are neighbours, a warp's are 512 bytes in
    a row, and none goes through shared memory. Squares come in the order of warps: by rows, then by half the columns.
    """
    HIGH: tl.constexpr = dq.shape[0] // 16
    HALF: tl.constexpr = dq.shape[1] // 16
    ACROSS: tl.constexpr = WIDE // 8
    squares = dq.reshape(HIGH, 2, 8, 2, HALF, 4, 2).trans(4, 3, 0, 2, 5, 1, 6).reshape(HIGH * HALF * 2, 128)
    square = tl.arange(0, HIGH * HALF * 2)
    down = square % HIGH
    right = column // 8 + square // HIGH % 2 * HALF + square // (2 * HIGH)
    at = sums_ptr + (down * ACROSS + right)[:, None] * 128 + tl.arange(0, 128)[None, :]
    if column + dq.shape[1] > WIDE:
        tl.atomic_add(at, squares, mask=(right < ACROSS)[:, None], sem="relaxed")
    elif dq.shape[0] > TALL:
        tl.atomic_add(at, squares, mask=(down < TALL // 16)[:, None], sem="relaxed")
    else:
        tl.atomic_add(at, squares, sem="relaxed")


@triton.jit(do_not_specialize=["seq_q", "heads", "blocks"])
def sums_kernel(
    sums_ptr, dq_ptr, cu_q_ptr, stride_zb: tl.int64, stride_zh: tl.int64,
    stride_xb: tl.int64, stride_xs: tl.int64, stride_xh: tl.int64,
    seq_q, heads, blocks, grad_scale,
    DIM: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TURNED: tl.constexpr,
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
        sums_ptr += first_sum(q_row, batch, DIM, BLOCK, TURNED)
    if row0 >= seq_q:
        return
    SUMS: tl.constexpr = sums_of_row(DIM, TURNED)
    i = tl.arange(0, BLOCK)[:, None]
    j = tl.arange(0, WIDTH)[None, :]
    down, right, wide = (j, i, BLOCK) if TURNED else (i, j, SUMS)
    square = down // 16 * (wide // 8) + right // 8
    at = square * 128 + down % 8 * 16 + right % 8 // 2 * 4 + down // 8 % 2 * 2 + right % 2
    inside = (row0 + i < seq_q) & (j < DIM)
    sums_ptr += batch * stride_zb + head * stride_zh + row0.to(tl.int64) * SUMS
    dq_ptr += batch * stride_xb + (q_row + row0) * stride_xs + head * stride_xh
    dq = tl.load(sums_ptr + at, mask=inside, other=0.0) * grad_scale
    tl.store(dq_ptr + i * stride_xs + j, dq.to(dq_ptr.dtype.element_ty), mask=inside)
