"""Three kernels of our own: each works on tiles that fit on the chip, and leaves its result in memory for the next."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import lesson  # before triton: it decides whether kernels are compiled or interpreted
import triton
import triton.language as tl
from plain import LOG2E, SCORES, case, inputs

BLOCK_M, BLOCK_N = lesson.pick(128, 32), lesson.pick(128, 16)


@triton.jit
def scores(q_ptr, k_ptr, s_ptr, seq, scale, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """One tile of Q·Kᵀ: BLOCK_M rows and BLOCK_N columns of S."""
    head = tl.program_id(2).to(tl.int64)
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, D)
    q = tl.load(q_ptr + head * seq * D + offs_m[:, None] * D + offs_d, mask=offs_m[:, None] < seq, other=0.0)  # [BM, D]
    k = tl.load(k_ptr + head * seq * D + offs_n[:, None] * D + offs_d, mask=offs_n[:, None] < seq, other=0.0)  # [BN, D]
    s = tl.dot(q, k.T) * scale  # [BM, BN]
    inside = (offs_m[:, None] < seq) & (offs_n < seq)
    tl.store(s_ptr + head * seq * seq + offs_m[:, None] * seq + offs_n, s.to(s_ptr.dtype.element_ty), mask=inside)


@triton.jit
def softmax(s_ptr, seq, BLOCK: tl.constexpr):
    """One row of S, in its place; it must fit on the chip."""
    row = s_ptr + tl.program_id(0).to(tl.int64) * seq
    offs = tl.arange(0, BLOCK)
    s = tl.load(row + offs, mask=offs < seq, other=float("-inf")).to(tl.float32)
    p = tl.exp2(s - tl.max(s, 0))
    tl.store(row + offs, (p / tl.sum(p, 0)).to(s_ptr.dtype.element_ty), mask=offs < seq)


@triton.jit
def values(p_ptr, v_ptr, out_ptr, seq, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """BLOCK_M rows of P·V, a tile of P after the other."""
    head = tl.program_id(1).to(tl.int64)
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, D)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    for start in range(0, seq, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        inside = (offs_m[:, None] < seq) & (offs_n < seq)
        p = tl.load(p_ptr + head * seq * seq + offs_m[:, None] * seq + offs_n, mask=inside, other=0.0)  # [BM, BN]
        v = tl.load(v_ptr + head * seq * D + offs_n[:, None] * D + offs_d, mask=offs_n[:, None] < seq, other=0.0)
        acc = tl.dot(p, v, acc)
    rows = head * seq * D + offs_m[:, None] * D + offs_d
    tl.store(out_ptr + rows, acc.to(out_ptr.dtype.element_ty), mask=offs_m[:, None] < seq)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    heads, seq, d = q.shape
    s, out = q.new_empty(heads, seq, seq), torch.empty_like(q)
    tile = {"D": d, "BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N, "num_warps": 8}
    scores[triton.cdiv(seq, BLOCK_M), triton.cdiv(seq, BLOCK_N), heads](q, k, s, seq, LOG2E / d**0.5, **tile)
    softmax[(heads * seq,)](s, seq, BLOCK=triton.next_power_of_2(seq))
    values[triton.cdiv(seq, BLOCK_M), heads](s, v, out, seq, **tile)
    return out


def cases() -> Iterator[lesson.Case]:
    yield case("tiled", attention, *inputs(), beyond=4 * SCORES)  # S written, read; P written, read


if __name__ == "__main__":
    lesson.main(__file__, cases)
