"""Routing by torch's own ops: softmax, top-k, a stable sort, a search for the offsets."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import lesson
from plain import EXPERTS, FLOOR, TOKENS, K, Routed, logits, verify


def choose(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The K best experts of each token and their weights."""
    scores, ids = x.softmax(-1).topk(K)
    return scores / scores.sum(-1, keepdim=True), ids


def regroup(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Items in the order of their experts, and where each expert begins."""
    experts, permutation = torch.sort(ids.flatten(), stable=True)
    return permutation, torch.searchsorted(experts, torch.arange(EXPERTS + 1, device=ids.device))


def moved(regrouped: bool) -> int:
    """Bytes, op by op: softmax, top-k, sum and division; sort and search."""
    scores, items = 4 * TOKENS * EXPERTS, TOKENS * K
    chosen = 3 * scores + 12 * items + 4 * (items + TOKENS) + 4 * (2 * items + TOKENS)
    return chosen + (8 * items + 16 * items + 8 * items + 16 * (EXPERTS + 1) if regrouped else 0)


def cases() -> Iterator[lesson.Case]:
    x = logits()
    weights, ids = choose(x)
    want = verify(Routed(weights, ids, *regroup(ids)), x)

    def both() -> torch.Tensor:
        return regroup(choose(x)[1])[0]

    yield lesson.Case(
        "choose and regroup", both, lambda dtype: want.permutation.to(lesson.DEVICE, dtype), flops=0, floor=FLOOR,
        moved=moved(True), dtype="fp32", plain=torch.float32,
    )  # fmt: skip
    yield lesson.Case(
        "choose alone", lambda: choose(x)[1], lambda dtype: want.ids.to(lesson.DEVICE, dtype), flops=0,
        floor=FLOOR - 8 * (TOKENS * K + EXPERTS + 1), moved=moved(False), dtype="fp32", plain=torch.float32,
    )  # fmt: skip


if __name__ == "__main__":
    lesson.main(__file__, cases)
