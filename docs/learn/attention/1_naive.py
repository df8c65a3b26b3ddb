"""The formula, line by line, in torch: every line reads its input from memory and writes its output there."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import lesson
from plain import SCORES, case, inputs


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = q @ k.transpose(1, 2)  # [H, S, S]: written
    scores = scores * q.shape[-1] ** -0.5  # read, written
    weights = scores.softmax(-1)  # read, written
    return weights @ v  # read


def cases() -> Iterator[lesson.Case]:
    yield case("naive", attention, *inputs(), beyond=6 * SCORES)


if __name__ == "__main__":
    lesson.main(__file__, cases)
