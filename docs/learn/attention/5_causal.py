"""Causal: row i sees the keys up to i. Hidden tiles are skipped, the diagonal is masked, and an empty row is no NaN."""

from __future__ import annotations

import sys
import warnings
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
def step(acc, total, m, q, k_ptr, v_ptr, start, last, seq, scale,
         D: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, SAFE: tl.constexpr):  # fmt: skip
    """One key tile; `last` is the last key that each row sees."""
    offs_n = start + tl.arange(0, BLOCK_N)
    offs = offs_n[:, None] * D + tl.arange(0, D)
    k = tl.load(k_ptr + offs, mask=offs_n[:, None] < seq, other=0.0)  # [BN, D]
    v = tl.load(v_ptr + offs, mask=offs_n[:, None] < seq, other=0.0)  # [BN, D]
    s = tl.dot(q, k.T) * scale  # [BM, BN]
    if MASKED:
        s = tl.where((offs_n <= last[:, None]) & (offs_n < seq), s, float("-inf"))
    larger = tl.maximum(m, tl.max(s, 1))
    reference = larger
    if SAFE:  # a row that has seen nothing yet has m = -inf, and -inf - -inf is NaN: measure it from 0
        reference = tl.where(larger == float("-inf"), 0.0, larger)
    p = tl.exp2(s - reference[:, None])
    shrink = tl.exp2(m - reference)
    return tl.dot(p.to(v.dtype), v, acc * shrink[:, None]), total * shrink + tl.sum(p, 1), larger


@triton.jit
def kernel(q_ptr, k_ptr, v_ptr, out_ptr, seq_q, seq_k, scale, D: tl.constexpr, BLOCK_M: tl.constexpr,
           BLOCK_N: tl.constexpr, SKIP: tl.constexpr, SPLIT: tl.constexpr, SAFE: tl.constexpr):  # fmt: skip
    head = tl.program_id(1).to(tl.int64)
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M  # the longest rows start first
    offs_m = first + tl.arange(0, BLOCK_M)
    last = offs_m + seq_k - seq_q  # the diagonal ends in the lower right corner
    rows = head * seq_q * D + offs_m[:, None] * D + tl.arange(0, D)
    q = tl.load(q_ptr + rows, mask=offs_m[:, None] < seq_q, other=0.0)  # [BM, D]
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    k_ptr += head * seq_k * D
    v_ptr += head * seq_k * D
    end = seq_k  # keys from here on are hidden from all rows
    if SKIP:
        end = tl.maximum(tl.minimum(seq_k, first + BLOCK_M + seq_k - seq_q), 0)
    tiles = tl.cdiv(end, BLOCK_N)
    whole = 0  # tiles before this one are seen by all rows
    if SPLIT:
        whole = tl.maximum(tl.minimum(seq_k, first + 1 + seq_k - seq_q), 0) // BLOCK_N
    for i in range(tiles - whole):  # from the diagonal backwards
        start = (tiles - 1 - i) * BLOCK_N
        acc, total, m = step(acc, total, m, q, k_ptr, v_ptr, start, last, seq_k, scale, D, BLOCK_N, True, SAFE)
    for i in range(whole):
        acc, total, m = step(acc, total, m, q, k_ptr, v_ptr, i * BLOCK_N, last, seq_k, scale, D, BLOCK_N, False, SAFE)
    if SAFE:
        total = tl.where(total == 0, 1.0, total)  # a row that sees no key at all is 0
    tl.store(out_ptr + rows, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=offs_m[:, None] < seq_q)


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, tile: tuple[int, int] = (BLOCK_M, BLOCK_N), skip: bool = True,
    split: bool = True, safe: bool = True,
) -> torch.Tensor:  # fmt: skip
    heads, seq_q, d = q.shape
    out = torch.empty_like(q)
    kernel[triton.cdiv(seq_q, tile[0]), heads](
        q, k, v, out, seq_q, k.shape[1], LOG2E / d**0.5, D=d, BLOCK_M=tile[0], BLOCK_N=tile[1],
        SKIP=skip, SPLIT=split, SAFE=safe, num_warps=8, num_stages=3,
    )  # fmt: skip
    return out


def trap() -> None:
    """Counts NaNs without the guard, for tiles of equal sides and others."""
    q, k, v = inputs(heads=1, seq=64)
    for tile in ((16, 16), (32, 16), (16, 32), (64, 16)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the interpreter, about -inf - -inf
            bare, guarded = (attention(q, k, v, tile=tile, safe=safe) for safe in (False, True))
        rows = [int(out.isnan().any(-1).sum()) for out in (bare, guarded)]
        print(f"tile {tile[0]}x{tile[1]}: NaN in {rows[0]} of 64 rows without the guard, in {rows[1]} with it")


def cases() -> Iterator[lesson.Case]:
    tensors = inputs()
    yield case("causal", attention, *tensors, causal=True)
    yield case("a mask on every tile", attention, *tensors, causal=True, split=False)
    yield case("no tile skipped", attention, *tensors, causal=True, split=False, skip=False)


if __name__ == "__main__":
    trap()
    lesson.main(__file__, cases)
