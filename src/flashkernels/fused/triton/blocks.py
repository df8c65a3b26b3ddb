"""How row-wise kernels are cut into programs, and how they are launched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flashkernels.hardware import Gpu
from flashkernels.jit.launch import Box, Launcher, compile_options

ELEMENTS = 2048  # of a program, where rows are short
PER_THREAD = 16
STEP = 4096  # elements at a time of a row that does not fit the registers


class Blocks(NamedTuple):
    """One program works on `rows` rows, `width` elements of each at a time; `whole` if that is all of a row."""

    rows: int
    width: int
    whole: bool
    warps: int

    @property
    def sizes(self) -> dict[str, Any]:
        return {"ROWS": self.rows, "BLOCK": self.width}

    @property
    def constants(self) -> dict[str, Any]:
        return {**self.sizes, "WHOLE": self.whole}

    def grid(self, rows: int, width: int) -> int:
        """Programs, where each takes one piece of rows of this width."""
        return -(-rows // self.rows) * -(-width // self.width)


def blocks(width: int, widest: int) -> Blocks:
    """Programs for rows of `width` elements, of which one keeps `widest` in registers.

    >>> blocks(128, 16384), blocks(5120, 16384)
    (Blocks(rows=16, width=128, whole=True, warps=4), Blocks(rows=1, width=8192, whole=True, warps=16))
    >>> blocks(200_000, 16384)
    Blocks(rows=1, width=4096, whole=False, warps=8)
    """
    block = max(16, triton.next_power_of_2(width))
    if block > widest:
        return Blocks(1, STEP, False, STEP // (32 * PER_THREAD))
    rows = max(1, ELEMENTS // block)
    return Blocks(rows, block, True, min(16, max(1, rows * block // (32 * PER_THREAD))))


def pieces(width: int) -> Blocks:
    """Programs for elementwise work: rows side by side where they are short, a part of one where it is long.

    >>> pieces(11008), pieces(40)
    (Blocks(rows=1, width=2048, whole=False, warps=4), Blocks(rows=32, width=64, whole=True, warps=4))
    """
    block = min(ELEMENTS, max(16, triton.next_power_of_2(width)))
    return Blocks(ELEMENTS // block, block, block >= width, ELEMENTS // (32 * PER_THREAD))


def resident(gpu: Gpu | None, warps: int) -> int:
    """Programs that fill the GPU, for kernels that walk over the rows. The interpreter gets a few."""
    return 3 if gpu is None else gpu.sms * max(1, 32 // warps)


class Launch(Launcher):
    """A kernel with its compile-time values, launched on the device of its tensors."""

    def __init__(
        self, kernel: Any, constants: dict[str, Any], warps: int, device: torch.device, stages: int = 3,
        boxes: Mapping[int, Box | None] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(kernel, constants, compile_options(warps, stages, 0), device.index, boxes)


@triton.jit
def row_starts(at, inner, outer_stride, inner_stride):
    """Offsets of the rows `at`, int64: see `flashkernels.fused.rows.RowView`."""
    return at // inner * outer_stride + at % inner * inner_stride


@triton.jit
def piece(rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows and columns of this program, and which of them are there."""
    pid = tl.program_id(0).to(tl.int64)
    across = tl.cdiv(width, BLOCK)
    at = pid // across * ROWS + tl.arange(0, ROWS)
    cols = pid % across * BLOCK + tl.arange(0, BLOCK)
    return at, cols[None, :], (at < rows)[:, None] & (cols < width)[None, :]
