"""What the lessons on attention share: the formula in plain torch, the inputs, and the counts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import lesson

HEADS, SEQ = lesson.pick(32, 2), lesson.pick(4096, 72)  # 72: not a multiple of any tile
SCORES = HEADS * SEQ * SEQ * 2  # bytes of all scores in fp16
LOG2E = 1.4426950408889634  # exponentials are exp2 on a GPU


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool = False) -> torch.Tensor:
    """softmax(Q·Kᵀ / √D)·V of (H, S, D) tensors, in their own dtype, head by head: S² numbers are many."""
    out = torch.empty_like(q)
    hidden = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).triu(k.shape[1] - q.shape[1] + 1)
    for h in range(q.shape[0]):
        scores = q[h] @ k[h].T / q.shape[-1] ** 0.5
        if causal:
            scores = scores.masked_fill(hidden, float("-inf"))
        out[h] = scores.softmax(-1).nan_to_num(0.0) @ v[h]  # a row that sees nothing is 0
    return out


def inputs(head_dim: int = 64, heads: int = HEADS, seq: int = SEQ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q, K and V, (heads, seq, head_dim) in fp16."""
    q, k, v = (lesson.normal(heads, seq, head_dim, seed=i) for i in range(3))
    return q, k, v


def case(
    name: str, attention: Callable[..., torch.Tensor], *tensors: torch.Tensor, beyond: float = 0, causal: bool = False,
    **options: Any,
) -> lesson.Case:  # fmt: skip
    """A case of self-attention; `beyond` are the bytes that this version moves beyond the floor."""
    q, k, v = tensors
    heads, seq, d = q.shape
    pairs = seq * (seq + 1) // 2 if causal else seq * seq
    floor = 4 * q.numel() * q.element_size()  # Q, K, V and the output
    return lesson.Case(
        name,
        lambda: attention(q, k, v, **options),
        lambda dtype: plain(q.to(dtype), k.to(dtype), v.to(dtype), causal),
        flops=4 * heads * pairs * d,
        floor=floor,
        moved=floor + beyond,
    )
