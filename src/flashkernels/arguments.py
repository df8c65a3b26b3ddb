"""Checks of single arguments that ops of every kind have: what is wrong is named, with its value."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} must be a bool, got {type(value).__name__}")


def check_count(name: str, value: Any, least: int = 0) -> None:
    """A whole number, also one that torch.compile leaves open."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name}={value!r} must be an int, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name}={value} must {f'be at least {least}' if least else 'not be negative'}")


def check_strided(name: str, x: Tensor) -> None:
    """Sparse and nested tensors have no address that a kernel could read from."""
    if x.layout != torch.strided:
        raise TypeError(f"{name}.layout={x.layout}; it must be torch.strided")
