"""How far FP8 is from the exact result, inputs included: by their distribution, without and with a rotation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

import flashkernels as fk
from flashkernels.bench.check import relative_error

OUTLIERS, OUTLIER_SIZE = 1e-3, 20.0  # the share of entries that are so many times as large
HEADS, HEAD_DIM = 8, 128


def errors(device: str, *, seq: int = 0) -> dict[str, dict[str, float]]:
    """Relative errors against fp32 on the numbers before they were quantised, by distribution and way of rounding.

    The same numbers in bf16 show what 16 bits cost.
    """
    seq = seq or (256 if device == "cpu" else 4096)
    found = {}
    for name, draw in DISTRIBUTIONS.items():
        random = torch.Generator(device).manual_seed(0)
        q, k, v = (draw((1, seq, HEADS, HEAD_DIM), random, device).bfloat16() for _ in range(3))
        exact = _attention(q.float(), k.float(), v.float(), impl="torch")
        figures = {"bf16": relative_error(_attention(q, k, v), exact)}
        for rotate in (False, True):
            small = fk.quantise_qkv(q, k, v, rotate=rotate)
            out = _attention(*small[:3], **small.scales)
            figures["fp8, rotated" if rotate else "fp8"] = relative_error(out, exact)
        found[name] = {way: float(f"{error:.4g}") for way, error in figures.items()}
    return found


def _uniform(sizes: tuple[int, ...], random: torch.Generator, device: str) -> torch.Tensor:
    return 2 * torch.rand(sizes, generator=random, device=device) - 1


def _normal(sizes: tuple[int, ...], random: torch.Generator, device: str) -> torch.Tensor:
    return torch.randn(sizes, generator=random, device=device)


def _with_outliers(sizes: tuple[int, ...], random: torch.Generator, device: str) -> torch.Tensor:
    large = torch.rand(sizes, generator=random, device=device) < OUTLIERS
    return _normal(sizes, random, device) * torch.where(large, OUTLIER_SIZE, 1.0)


Draw = Callable[[tuple[int, ...], torch.Generator, str], torch.Tensor]
DISTRIBUTIONS: dict[str, Draw] = {"uniform": _uniform, "normal": _normal, "outliers": _with_outliers}


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **named: Any) -> torch.Tensor:
    return cast(torch.Tensor, fk.attention(q, k, v, **named))
