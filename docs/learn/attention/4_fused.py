"""One pass: maximum, sum and output of a row grow together, and nothing of size S² leaves the chip."""

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
def kernel(q_ptr, k_ptr, v_ptr, out_ptr, seq, scale, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    base = tl.program_id(1).to(tl.int64) * seq * D
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, D)
    rows = base + offs_m[:, None] * D + offs_d
    q = tl.load(q_ptr + rows, mask=offs_m[:, None] < seq, other=0.0)  # [BM, D]
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)  # the largest score so far, in units of log2
    total = tl.zeros([BLOCK_M], tl.float32)  # the sum of exponentials so far, relative to m
    acc = tl.zeros([BLOCK_M, D], tl.float32)  # the weighted sum of V so far, relative to m
    for start in range(0, seq, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        there = offs_n < seq
        columns = base + offs_n[:, None] * D + offs_d
        k = tl.load(k_ptr + columns, mask=there[:, None], other=0.0)  # [BN, D]
        s = tl.where(there, tl.dot(q, k.T) * scale, float("-inf"))  # [BM, BN]
        larger = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - larger[:, None])
        shrink = tl.exp2(m - larger)  # what was summed relative to m, relative to the larger one
        v = tl.load(v_ptr + columns, mask=there[:, None], other=0.0)  # [BN, D]
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        total = total * shrink + tl.sum(p, 1)
        m = larger
    tl.store(out_ptr + rows, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=offs_m[:, None] < seq)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    heads, seq, d = q.shape
    out = torch.empty_like(q)
    kernel[triton.cdiv(seq, BLOCK_M), heads](
        q, k, v, out, seq, LOG2E / d**0.5, D=d, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, num_warps=8, num_stages=3
    )
    return out


def cases() -> Iterator[lesson.Case]:
    yield case("fused", attention, *inputs())


if __name__ == "__main__":
    lesson.main(__file__, cases)
