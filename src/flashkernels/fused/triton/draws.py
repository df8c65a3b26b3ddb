"""Random numbers and draws as `fused/draws.py` defines them, and numbers in their order, for kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from flashkernels.fused import draws

TOKEN = tl.constexpr(draws.TOKEN)
SEGMENT = tl.constexpr(draws.SEGMENT)
ACCEPT = tl.constexpr(draws.ACCEPT)
NEW_TOKEN = tl.constexpr(draws.NEW_TOKEN)
NEW_SEGMENT = tl.constexpr(draws.NEW_SEGMENT)
SERIES = tl.constexpr(draws.SERIES)
LEAST = tl.constexpr(float("-inf"))
FLIP = tl.constexpr(0x7FFFFFFF)
NONE = tl.constexpr(0x7FFFFFFF)  # above every index


@triton.jit
def key_of(x):
    """fp32 without NaN as an int32 of the same order; -0 equals 0."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & FLIP)


@triton.jit
def number_of(key):
    return (key ^ ((key >> 31) & FLIP)).to(tl.float32, bitcast=True)


@triton.jit
def uniform(seed, offset, index, STREAM: tl.constexpr):
    """Above 0 and below 1, for each of `index`."""
    zero = tl.zeros_like(index)
    low, high = zero + offset.to(tl.int32), zero + (offset >> 32).to(tl.int32)
    word, _, _, _ = tl.philox(seed, index, low, zero + STREAM, high)
    u = (word.to(tl.uint32, bitcast=True).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2^-32
    return tl.minimum(u, 1 - 5.960464477539063e-08)  # 2^-24


@triton.jit
def gumbel(seed, offset, index, STREAM: tl.constexpr):
    u = uniform(seed, offset, index, STREAM)
    series = u * (1 + u * (0.5 + u * (1 / 3 + u * 0.25)))
    return -tl.log(tl.where(u < SERIES, series, -tl.log(1 - u)))


@triton.jit
def first_largest(score, index):
    """The index of the largest score, ties by the lower index."""
    return tl.min(tl.where(score == tl.max(score, 0), index, NONE), 0)


@triton.jit
def segment_sums(x):
    """Of segments [ROWS, SEGMENT]: their maxima, and the sums of exp(x - maximum)."""
    top = tl.max(x, 1)
    return top, tl.sum(tl.exp(x - tl.where(top == LEAST, 0.0, top)[:, None]), 1)


@triton.jit
def drawn(log_weights, index, seed, offset, STREAM: tl.constexpr):
    """One of `index`, by weights of which these are the logarithms."""
    return first_largest(log_weights + gumbel(seed, offset, index, STREAM), index)
