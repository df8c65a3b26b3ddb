"""No row of scores is kept: maximum and sum are held while the scores pass by. Two passes over the keys."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import lesson  # before triton: it decides whether kernels are compiled or interpreted
import triton
import triton.language as tl
from plain import LOG2E, case, inputs

BLOCK_M, BLOCK_N = lesson.pick(128, 32), lesson.pick(64, 16)


@triton.jit
def tile_of_scores(q, k_ptr, start, seq, scale, D: tl.constexpr, BLOCK_N: tl.constexpr):
    offs_n = start + tl.arange(0, BLOCK_N)
    k = tl.load(k_ptr + offs_n[:, None] * D + tl.arange(0, D), mask=offs_n[:, None] < seq, other=0.0)  # [BN, D]
    return tl.where(offs_n < seq, tl.dot(q, k.T) * scale, float("-inf"))  # [BM, BN]


@triton.jit
def statistics(q_ptr, k_ptr, lse_ptr, seq, scale, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """First pass: log2 of the sum of the exponentials of each row, with one look at each score."""
    head = tl.program_id(1).to(tl.int64)
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = head * seq * D + offs_m[:, None] * D + tl.arange(0, D)
    q = tl.load(q_ptr + rows, mask=offs_m[:, None] < seq, other=0.0)  # [BM, D]
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)  # the largest score so far
    total = tl.zeros([BLOCK_M], tl.float32)  # the sum of exp2(score - m) so far
    for start in range(0, seq, BLOCK_N):
        s = tile_of_scores(q, k_ptr + head * seq * D, start, seq, scale, D, BLOCK_N)
        larger = tl.maximum(m, tl.max(s, 1))
        total = total * tl.exp2(m - larger) + tl.sum(tl.exp2(s - larger[:, None]), 1)
        m = larger
    tl.store(lse_ptr + head * seq + offs_m, m + tl.log2(total), mask=offs_m < seq)


@triton.jit
def output(q_ptr, k_ptr, v_ptr, lse_ptr, out_ptr, seq, scale,
           D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """Second pass: the scores again, now that their softmax is a single exponential, and P·V."""
    head = tl.program_id(1).to(tl.int64)
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, D)
    rows = head * seq * D + offs_m[:, None] * D + offs_d
    q = tl.load(q_ptr + rows, mask=offs_m[:, None] < seq, other=0.0)  # [BM, D]
    lse = tl.load(lse_ptr + head * seq + offs_m, mask=offs_m < seq, other=0.0)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    for start in range(0, seq, BLOCK_N):
        p = tl.exp2(tile_of_scores(q, k_ptr + head * seq * D, start, seq, scale, D, BLOCK_N) - lse[:, None])
        offs_n = start + tl.arange(0, BLOCK_N)
        v = tl.load(v_ptr + head * seq * D + offs_n[:, None] * D + offs_d, mask=offs_n[:, None] < seq, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc)
    tl.store(out_ptr + rows, acc.to(out_ptr.dtype.element_ty), mask=offs_m[:, None] < seq)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    heads, seq, d = q.shape
    lse, out = q.new_empty(heads, seq, dtype=torch.float32), torch.empty_like(q)
    grid, scale = (triton.cdiv(seq, BLOCK_M), heads), LOG2E / d**0.5
    tile = {"D": d, "BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "num_warps": 8, "num_stages": 3}
    statistics[grid](q, k, lse, seq, scale, **tile)
    output[grid](q, k, v, lse, out, seq, scale, **tile)
    return out


def cases() -> Iterator[lesson.Case]:
    q, k, v = inputs()
    again = (q.numel() + k.numel()) * q.element_size()
    yield case("online", attention, q, k, v, beyond=again + 2 * 4 * q.shape[0] * q.shape[1])  # lse written and read


if __name__ == "__main__":
    lesson.main(__file__, cases)
