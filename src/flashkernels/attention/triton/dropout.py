"""Which weights dropout keeps, as `attention/dropout.py` defines it, for blocks of scores in kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def squares(start, BLOCK: tl.constexpr):
    """i' or j' of BLOCK rows or keys from `start` on: both are multiples of 16."""
    return start // 2 + tl.arange(0, BLOCK // 2)


@triton.jit
def side_by_side(upper, lower, A: tl.constexpr, B: tl.constexpr):
    """Two (A, B // 2) blocks, each half of the same squares, as one (A, B): 8 columns of one, 8 of the other."""
    both = tl.join(upper, lower).reshape(A, B // 16, 8, 2)
    return both.trans(0, 1, 3, 2).reshape(A, B)


@triton.jit
def kept(drop, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TURNED: tl.constexpr):
    """Where weights of the rows from `m` and keys from `n` on stay: (BLOCK_M, BLOCK_N), or TURNED the other way.

    `drop` is (seed, threshold, batch, head).
    """
    seed, threshold, batch, head = drop
    i = squares(m, BLOCK_M)
    j = squares(n, BLOCK_N)
    A: tl.constexpr = BLOCK_N if TURNED else BLOCK_M
    B: tl.constexpr = BLOCK_M if TURNED else BLOCK_N
    if TURNED:
        i, j = i[None, :], j[:, None]
    else:
        i, j = i[:, None], j[None, :]
    none = tl.zeros((A // 2, B // 2), tl.int32)
    w0, w1, w2, w3 = tl.philox(seed, none + j, none + i, none + head, none + batch)
    if TURNED:
        w1, w2 = w2, w1
    bound = threshold.to(tl.uint32, bitcast=True)
    top = side_by_side(w0 >= bound, w1 >= bound, A // 2, B)
    bottom = side_by_side(w2 >= bound, w3 >= bound, A // 2, B)
    both = tl.join(top, bottom).reshape(A // 16, 8, B, 2)
    return both.trans(0, 3, 1, 2).reshape(A, B)
