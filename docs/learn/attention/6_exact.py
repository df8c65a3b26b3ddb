"""A head of 72 columns: Triton's tiles are powers of two, so 72 is 128 with padding, or 64 and 16 in two parts."""

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

HEAD_DIM = 72
BLOCK_M, BLOCK_N = lesson.pick(128, 32), lesson.pick(64, 16)


@triton.jit
def part(ptr, offs_rows, seq, D: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr):
    """Columns START to START + WIDTH of some rows; zeros beyond the head's end, which change no product."""
    offs_d = START + tl.arange(0, WIDTH)
    inside = (offs_rows[:, None] < seq) & (offs_d < D)
    return tl.load(ptr + offs_rows[:, None] * D + offs_d, mask=inside, other=0.0)


@triton.jit
def store(ptr, x, offs_rows, seq, D: tl.constexpr, START: tl.constexpr, WIDTH: tl.constexpr):
    offs_d = START + tl.arange(0, WIDTH)
    inside = (offs_rows[:, None] < seq) & (offs_d < D)
    tl.store(ptr + offs_rows[:, None] * D + offs_d, x.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def kernel(q_ptr, k_ptr, v_ptr, out_ptr, seq, scale, D: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
           BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    base = tl.program_id(1).to(tl.int64) * seq * D
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    q = part(q_ptr + base, offs_m, seq, D, 0, FIRST)  # [BM, FIRST]
    acc = tl.zeros([BLOCK_M, FIRST], tl.float32)
    if REST:
        q_rest = part(q_ptr + base, offs_m, seq, D, FIRST, REST)  # [BM, REST]
        acc_rest = tl.zeros([BLOCK_M, REST], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, seq, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        s = tl.dot(q, part(k_ptr + base, offs_n, seq, D, 0, FIRST).T)  # [BM, BN]
        if REST:
            s = tl.dot(q_rest, part(k_ptr + base, offs_n, seq, D, FIRST, REST).T, s)
        s = tl.where(offs_n < seq, s * scale, float("-inf"))
        larger = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - larger[:, None])
        shrink = tl.exp2(m - larger)
        total = total * shrink + tl.sum(p, 1)
        m = larger
        p = p.to(v_ptr.dtype.element_ty)
        acc = tl.dot(p, part(v_ptr + base, offs_n, seq, D, 0, FIRST), acc * shrink[:, None])
        if REST:
            acc_rest = tl.dot(p, part(v_ptr + base, offs_n, seq, D, FIRST, REST), acc_rest * shrink[:, None])
    store(out_ptr + base, acc / total[:, None], offs_m, seq, D, 0, FIRST)
    if REST:
        store(out_ptr + base, acc_rest / total[:, None], offs_m, seq, D, FIRST, REST)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, parts: tuple[int, int]) -> torch.Tensor:
    """`parts` are two powers of two that together hold the head; 0: the first one holds it alone."""
    heads, seq, d = q.shape
    out = torch.empty_like(q)
    kernel[triton.cdiv(seq, BLOCK_M), heads](
        q, k, v, out, seq, LOG2E / d**0.5, D=d, FIRST=parts[0], REST=parts[1], BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N,
        num_warps=8, num_stages=3,
    )  # fmt: skip
    return out


def cases() -> Iterator[lesson.Case]:
    tensors = inputs(head_dim=HEAD_DIM)
    yield case("64 + 16", attention, *tensors, parts=(64, 16))
    yield case("padded to 128", attention, *tensors, parts=(128, 0))


if __name__ == "__main__":
    lesson.main(__file__, cases)
