"""What one pass takes: sums of dQ in memory, fp32, which the pass over keys adds to and `sums_kernel` makes dQ of."""

from __future__ import annotations

import triton
import triton.language as tl


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
def add_parts(sums_ptr, dq, m, FIRST: tl.constexpr, DIM: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr):
    """Adds dQ of ROWS rows from `m` on to their sums: of the parts from FIRST on, as many as `dq` has."""
    COLUMNS: tl.constexpr = (DIM + 7) // 8
    at = sums_ptr + m * tl.full((), 8 * COLUMNS, tl.int64)
    column: tl.constexpr = 0
    for i in tl.static_range(len(PARTS)):
        if i >= FIRST and i < FIRST + len(dq):
            add_rows(at, dq[i - FIRST], column, COLUMNS, ROWS, PARTS[i])
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
