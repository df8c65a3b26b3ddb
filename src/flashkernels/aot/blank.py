"""Tensors without memory: they pose a call, so that its plan can be asked what it would compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Recipe = Callable[[], Any]  # plans and runs one call

DTYPES = {
    "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn,
}  # fmt: skip
ROWS = 4096  # of the tensors that stand for those of row-wise ops, which are compiled alike for any number of them


def empty(*shape: int, dtype: str | torch.dtype = torch.float32) -> Tensor:
    """A tensor without memory; its address counts as aligned."""
    return torch.empty(shape, dtype=DTYPES[dtype] if isinstance(dtype, str) else dtype, device="meta")
