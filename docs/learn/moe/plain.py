"""What the lessons on experts share: the sizes, the inputs, and what any routing must give, in plain torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import lesson

from flashkernels.moe.problem import RouteProblem

TOKENS, EXPERTS, K = lesson.pick(32768, 60), lesson.pick(64, 8), 2
FLOOR = RouteProblem(TOKENS, EXPERTS, K, "fp32", lesson.DEVICE).bytes()


class Routed(NamedTuple):
    """Item t * K + j is token t with its j-th expert."""

    weights: torch.Tensor  # (T, K) of each token's experts, sum 1
    ids: torch.Tensor  # (T, K)
    permutation: torch.Tensor  # (T * K,) items in the order of their experts; within an expert in their own
    offsets: torch.Tensor  # (E + 1,) where each expert's items begin


def logits() -> torch.Tensor:
    return lesson.normal(TOKENS, EXPERTS, dtype=torch.float32)


def exact(x: torch.Tensor) -> Routed:
    """From the definitions, in fp64 on the CPU."""
    values, ids = x.cpu().double().topk(K)
    order = torch.tensor(sorted(range(ids.numel()), key=ids.flatten().tolist().__getitem__))  # Python's sort is stable
    counts = torch.bincount(ids.flatten(), minlength=EXPERTS)
    return Routed(values.softmax(-1), ids, order, torch.nn.functional.pad(counts.cumsum(0), (1, 0)))


def verify(found: Routed, x: torch.Tensor) -> Routed:
    """Raises where a routing of these logits is not what it must be."""
    want = exact(x)
    for name, a, b in zip(Routed._fields, found, want, strict=True):
        off = float((a.cpu().double() - b.double()).abs().max())
        if not off <= (1e-6 if name == "weights" else 0.0):  # a few roundings of numbers up to 1
            raise SystemExit(f"{name} is off by {off}")
    return want
