"""What kernels of the backward share: device functions."""

from __future__ import annotations

import triton
import triton.language as tl

from flashkernels.attention.triton.parts import LOG2E, logits


@triton.jit
def within(i, j, seq_q, seq_k, shift, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Whether row i and key j are there, and the row may see the key by causal and window."""
    seen = (i < seq_q) & (j < seq_k)
    if RIGHT:
        seen = seen & (j <= i + (shift + right))
    if LEFT:
        seen = seen & (j >= i + (shift - left))
    return seen


@triton.jit
def weights(
    raw, level, i, j, seq_q, seq_k, shift, left, right, scale, softcap, slope, mask_ptr, stride_mm, stride_mn,
    HIDING: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    MASK: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """P of the rows i and keys j from Q·Kᵀ, and tanh of the scores (where there is a softcap).

    i and j are a row and a column, or a column and a row: P is made either way round.
    """
    s = logits(raw, scale, softcap, 0.0, None, None, 0, SOFTCAP, False)
    t = s
    if SOFTCAP:
        t = s / softcap
    if ALIBI:
        s -= slope * tl.abs(i + shift - j).to(tl.float32)
    if HIDING:
        seen = within(i, j, seq_q, seq_k, shift, left, right, LEFT, RIGHT)
        if MASK != "none":
            value = tl.load(mask_ptr + i * stride_mm + j.to(tl.int64) * stride_mn, mask=seen, other=0)
            if MASK == "bool":
                seen = seen & (value != 0)
            else:
                bias = value.to(tl.float32)
                seen = seen & (bias != float("-inf"))
                s += tl.maximum(bias, -1e38) * UNIT
        p = tl.where(seen, tl.exp2((s - level) * (LOG2E / UNIT)), 0.0)  # not exp2 of -inf: the level may be NaN
        if SOFTCAP:
            t = tl.where(seen, t, 0.0)
    else:
        p = tl.exp2((s - level) * (LOG2E / UNIT))
    return p, t


@triton.jit
def logit_gradient(p, dp, delta, HIDING: tl.constexpr):
    """dS. A hidden key's V may be NaN, and must not count."""
    ds = p * (dp - delta)
    if HIDING:
        ds = tl.where(p == 0, 0.0, ds)
    return ds


@triton.jit
def packed_gradient(p, dp, delta):
    """dS in bf16 of P in bf16. What P is multiplied by is rounded first: one instruction then makes two elements, and P
    in fp32 takes no registers. fp16 has not the range for that. sm_90 and later; the interpreter has no bf16."""
    x = (dp - delta).to(tl.bfloat16)
    return tl.inline_asm_elementwise(
        "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [p, x], dtype=tl.bfloat16, is_pure=True, pack=2
    )


@triton.jit
def load_rows(ptr, desc, at, offs_m, seq_q, HIDING: tl.constexpr):
    """One number of each row: by TMA from the `at`th on, or where there is no descriptor from `ptr`."""
    if desc is not None:
        return desc.load([at])
    if HIDING:
        return tl.load(ptr + offs_m, mask=offs_m < seq_q, other=0.0)
    return tl.load(ptr + offs_m)


@triton.jit
def finite(tiles):
    """Zeros for NaN and Inf: a weight of 0 does not take them away."""
    out = ()
    for i in tl.static_range(len(tiles)):
        out = out + (tl.where(tiles[i] - tiles[i] == 0, tiles[i], 0.0).to(tiles[i].dtype),)
    return out


@triton.jit
def has_spoiled(tiles):
    """Whether there is any NaN or Inf."""
    found = tl.zeros((), tl.int32)
    for i in tl.static_range(len(tiles)):
        found |= tl.max(tl.max((tiles[i] - tiles[i] != 0).to(tl.int32), 1), 0)
    return found != 0


@triton.jit
def empty(PARTS: tl.constexpr, BLOCK: tl.constexpr):
    acc = ()
    for i in tl.static_range(len(PARTS)):
        acc = acc + (tl.zeros((BLOCK, tl.constexpr(PARTS[i])), tl.float32),)
    return acc


@triton.jit
def place(blocks, section, total_heads):
    """Which block of which head this program has: sections of heads that share the L2, in them block by block."""
    pid = tl.program_id(0)
    first = pid // (section * blocks) * section
    in_section = tl.minimum(section, total_heads - first)
    rank = pid - first * blocks
    return rank // in_section, first + rank % in_section
