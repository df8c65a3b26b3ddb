"""What the row-wise ops share: a call as a problem, checks of its tensors, rows by their strides, prepared launches.

A row is the last dimension of a tensor: x (2, 5, 4096) has 10 rows of width 4096. Ops take rows as they lie, as long as
the elements of a row are next to each other and two strides lead to every row; any other tensor is copied first.
The result has the dtype of the input, also under autocast: inside, everything is fp32 anyway.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashkernels.arguments import check_strided
from flashkernels.dispatch import lacks_triton
from flashkernels.hardware import Gpu, detect

DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}


@dataclass(frozen=True)
class RowProblem:
    """What one call of a row-wise op has to do. `traffic` is the least it can move, in bytes.

    >>> x = torch.zeros(2, 5, 64, dtype=torch.float16)
    >>> row_problem("softmax", x, streams=2)
    RowProblem(op='softmax', rows=10, width=64, dtype='fp16', device='cpu', traffic=2560, quantise='')
    """

    op: str
    rows: int
    width: int
    dtype: str
    device: str
    traffic: int
    quantise: str = ""  # "fp8" or "int8" where the output is quantised

    def flops(self) -> int:
        """None that count: memory decides."""
        return 0

    def bytes(self) -> int:
        return self.traffic


def row_problem(op: str, x: Tensor, streams: float, quantise: str = "") -> RowProblem:
    """The problem of an op that reads and writes tensors like x, `streams` of them in all."""
    width = x.shape[-1]
    moved = int(streams * x.numel()) * x.element_size()
    return RowProblem(op, math.prod(x.shape[:-1]), width, DTYPES[x.dtype], x.device.type, moved, quantise)


def gpu_of(x: Tensor) -> Gpu | None:
    return detect(x.device) if x.is_cuda else None


def needs_triton(problem: RowProblem, gpu: Gpu | None) -> str | None:
    """Why the Triton kernels of row-wise ops cannot serve, or None."""
    if reason := lacks_triton(problem.device, problem.dtype, gpu):
        return reason
    if problem.quantise == "fp8" and gpu is None:
        return "Triton's interpreter rounds FP8 wrongly"
    if problem.quantise == "fp8" and gpu is not None and not gpu.has_fp8:
        return f"FP8 needs compute capability 8.9, {gpu.name} has {gpu.capability[0]}.{gpu.capability[1]}"
    return None


# --- checks


def check_rows(name: str, x: Tensor) -> None:
    """x is a tensor (..., N) of a dtype that row-wise ops take."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    check_strided(name, x)
    if x.dtype not in DTYPES:
        raise TypeError(f"{name}.dtype={x.dtype} is not supported; allowed: {', '.join(map(str, DTYPES))}")
    if x.dim() == 0:
        raise ValueError(f"{name} has no dimensions; it must have a last one, (..., N)")


def check_like(name: str, y: Tensor, x: Tensor, of: str = "x") -> None:
    """y has the shape, dtype and device of x, which the caller calls `of`."""
    if not isinstance(y, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(y).__name__}")
    if y.dtype != x.dtype:
        raise TypeError(f"{name}.dtype={y.dtype} differs from {of}.dtype={x.dtype}")
    if y.shape != x.shape:
        raise ValueError(f"{name} has shape {tuple(y.shape)}, {of} has {tuple(x.shape)}")
    if y.device != x.device:
        raise ValueError(f"{name}.device={y.device} differs from {of}.device={x.device}")


def check_choice(name: str, value: Any, allowed: Sequence[Any]) -> None:
    if not isinstance(value, (str, int, type(None))) or value not in allowed:  # an array would answer for each number
        raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, allowed))}")


def check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"{name}={value!r} must be a number, got {type(value).__name__}")
    if isinstance(value, (int, float)) and not -math.inf < value < math.inf:
        raise ValueError(f"{name}={value} must be finite")
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        raise ValueError(f"{name}={value} does not fit a float")


# --- prepared launches


def signature(x: Tensor) -> tuple[Any, ...]:
    """What a prepared launch depends on."""
    return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16


class RowView(NamedTuple):
    """Where the rows of a tensor are: row r at (r // inner) * outer_stride + (r % inner) * inner_stride."""

    copied: bool  # two strides do not reach every row: a copy is made
    inner: int
    outer_stride: int
    inner_stride: int

    def of(self, x: Tensor) -> Tensor:
        return x.contiguous() if self.copied else x

    @property
    def numbers(self) -> tuple[int, int, int]:
        """As the kernels take them."""
        return self.inner, self.outer_stride, self.inner_stride


def row_view(x: Tensor) -> RowView:
    """How to read x by rows, without a copy where two strides are enough.

    >>> qkv = torch.zeros(2, 5, 3, 8, 64)  # (B, S, 3, H, D)
    >>> row_view(qkv[:, :, 0])
    RowView(copied=False, inner=8, outer_stride=1536, inner_stride=64)
    >>> row_view(qkv.transpose(1, 3)).copied, row_view(qkv).numbers
    (True, (1, 64, 0))
    """
    if x.stride(-1) != 1 and x.shape[-1] != 1:
        return RowView(True, 1, x.shape[-1], 0)
    steps: list[tuple[int, int]] = []  # (size, stride) of dimensions that cannot be joined
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size == 1:
            continue
        if steps and steps[-1][1] == size * stride:
            steps[-1] = (steps[-1][0] * size, stride)
        else:
            steps.append((size, stride))
    if len(steps) > 2:
        return RowView(True, 1, x.shape[-1], 0)
    if len(steps) == 2:
        return RowView(False, steps[1][0], steps[0][1], steps[1][1])
    return RowView(False, 1, steps[0][1] if steps else 0, 0)


def like(x: Tensor) -> Tensor:
    """An output as x is, contiguous, to be filled; half the time of `x.new_empty(x.shape)`."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def nothing(x: Tensor) -> Tensor:
    """Stands for an output that a call does not have: registered ops always return the same number of tensors."""
    return x.new_empty(0)


def registered(outputs: Sequence[Tensor | None], x: Tensor) -> Any:
    """What implementations return, as a tuple of tensors, as registered ops do."""
    return tuple([nothing(x) if y is None else y for y in outputs])
