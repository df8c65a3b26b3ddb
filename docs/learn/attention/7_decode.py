"""Decode: one query, many keys. The keys are cut into parts, so that every multiprocessor reads some, and merged."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import lesson  # before triton: it decides whether kernels are compiled or interpreted
import triton
import triton.language as tl
from plain import LOG2E, plain

HEADS, KV_HEADS, HEAD_DIM = lesson.pick(32, 4), lesson.pick(8, 2), lesson.pick(128, 32)
CONTEXT, PARTS = lesson.pick(32768, 200), lesson.pick(32, 8)
BLOCK_N = lesson.pick(64, 16)
GROUP = 16  # rows of a product: the query heads of one key head, and zeros


@triton.jit
def partial(q_ptr, k_ptr, v_ptr, acc_ptr, lse_ptr, seq, length, group, scale,
            D: tl.constexpr, GROUP: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """Attention of one key head's queries over one part of the keys, and its log-sum-exp."""
    head, piece, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    offs_g, offs_d = tl.arange(0, GROUP), tl.arange(0, D)
    heads = head * group + offs_g
    there = offs_g < group
    q = tl.load(q_ptr + heads[:, None] * D + offs_d, mask=there[:, None], other=0.0)  # [G, D]
    m = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    acc = tl.zeros([GROUP, D], tl.float32)
    end = tl.minimum(seq, (piece + 1) * length)
    for start in range(piece * length, end, BLOCK_N):
        offs_n = start + tl.arange(0, BLOCK_N)
        offs = head * seq * D + offs_n[:, None] * D + offs_d
        k = tl.load(k_ptr + offs, mask=offs_n[:, None] < end, other=0.0)  # [BN, D]
        s = tl.where(offs_n < end, tl.dot(q, k.T) * scale, float("-inf"))  # [G, BN]
        larger = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - larger[:, None])
        shrink = tl.exp2(m - larger)
        v = tl.load(v_ptr + offs, mask=offs_n[:, None] < end, other=0.0)  # [BN, D]
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        total = total * shrink + tl.sum(p, 1)
        m = larger
    at = heads * parts + piece
    tl.store(acc_ptr + at[:, None] * D + offs_d, acc / total[:, None], mask=there[:, None])
    tl.store(lse_ptr + at, m + tl.log2(total), mask=there)


@triton.jit
def combine(acc_ptr, lse_ptr, out_ptr, D: tl.constexpr, PARTS: tl.constexpr):
    """The parts of one query head, weighted by exp2 of their log-sum-exps."""
    head = tl.program_id(0)
    offs_p, offs_d = tl.arange(0, PARTS), tl.arange(0, D)
    lse = tl.load(lse_ptr + head * PARTS + offs_p)
    weight = tl.exp2(lse - tl.max(lse, 0))
    acc = tl.load(acc_ptr + (head * PARTS + offs_p)[:, None] * D + offs_d)  # [P, D]
    out = tl.sum(acc * (weight / tl.sum(weight, 0))[:, None], 0)
    tl.store(out_ptr + head * D + offs_d, out.to(out_ptr.dtype.element_ty))


def decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, parts: int) -> torch.Tensor:
    """q: (heads, D); k and v: (kv_heads, S, D). `parts` is a power of two, and no part is empty."""
    (heads, d), (kv_heads, seq, _) = q.shape, k.shape
    length = triton.cdiv(seq, parts)
    if parts & (parts - 1) or (parts - 1) * length >= seq:
        raise ValueError(f"parts={parts} must be a power of two that leaves no part of {seq} keys empty")
    acc, lse = q.new_empty(heads, parts, d, dtype=torch.float32), q.new_empty(heads, parts, dtype=torch.float32)
    out = torch.empty_like(q)
    partial[kv_heads, parts](
        q, k, v, acc, lse, seq, length, heads // kv_heads, LOG2E / d**0.5,
        D=d, GROUP=GROUP, BLOCK_N=BLOCK_N, num_warps=4, num_stages=4,
    )  # fmt: skip
    combine[(heads,)](acc, lse, out, D=d, PARTS=parts)
    return out


def case(parts: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> lesson.Case:
    def oracle(dtype: torch.dtype) -> torch.Tensor:
        wide = (x.to(dtype).repeat_interleave(HEADS // KV_HEADS, 0) for x in (k, v))
        return plain(q.to(dtype)[:, None], *wide)[:, 0]

    floor = 2 * (2 * q.numel() + k.numel() + v.numel())
    between = 2 * 4 * HEADS * parts * (HEAD_DIM + 1)  # partial results, written and read
    flops = 4 * HEADS * CONTEXT * HEAD_DIM
    name = "1 part" if parts == 1 else f"{parts} parts"
    return lesson.Case(name, lambda: decode(q, k, v, parts), oracle, flops, floor, floor + between)


def cases() -> Iterator[lesson.Case]:
    q = lesson.normal(HEADS, HEAD_DIM, seed=0)
    k, v = (lesson.normal(KV_HEADS, CONTEXT, HEAD_DIM, seed=i) for i in (1, 2))
    for parts in (PARTS, PARTS // 4, 1):
        yield case(parts, q, k, v)


if __name__ == "__main__":
    lesson.main(__file__, cases)
