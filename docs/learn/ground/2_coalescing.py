"""Coalescing: memory moves in sectors of 32 bytes, whether a warp wants all of a sector or four bytes of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import lesson
from counting import LANES, SECTOR, sectors
from kernels import Kernel

ROWS, COLUMNS = lesson.pick(1 << 22, 256), 16  # a column of sectors is more than the L2 holds
THREADS = 256


def source() -> str:
    return r"""
// out = 2 x, one thread a number. Lanes of a warp are neighbours in a row, or, BY_COLUMN, in a column.
extern "C" __global__ void twice(const float* x, float* out, int rows, int columns) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  int at = BY_COLUMN ? i % rows * columns + i / rows : i;
  out[at] = 2 * x[at];
}

// The same, four neighbours a thread.
extern "C" __global__ void twice4(const float4* x, float4* out) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  float4 v = x[i];
  out[i] = {2 * v.x, 2 * v.y, 2 * v.z, 2 * v.w};
}
"""


def place(thread: int | torch.Tensor, rows: int, columns: int, by_column: int) -> int | torch.Tensor:
    """Where a thread reads and writes."""
    return thread % rows * columns + thread // rows if by_column else thread


def emulate(grid: int, block: int, x: torch.Tensor, out: torch.Tensor, rows: int, columns: int, by_column: int) -> None:
    at = place(torch.arange(grid * block, device=x.device), rows, columns, by_column)
    out.view(-1)[at] = 2 * x.view(-1)[at]


def emulate4(grid: int, block: int, x: torch.Tensor, out: torch.Tensor, by_column: int) -> None:
    at = 4 * torch.arange(grid * block, device=x.device)[:, None] + torch.arange(4, device=x.device)
    out.view(-1)[at] = 2 * x.view(-1)[at]


def touched(by_column: int, size: int = 4) -> int:
    """Sectors that one load of a warp touches, with `size` bytes a lane."""
    return sectors((place(lane, ROWS, COLUMNS, by_column) * size for lane in range(LANES)), size)


def counts() -> Iterator[str]:
    for name, found, wanted in (
        ("rows", touched(0), 4 * LANES), ("rows, 16 bytes a thread", touched(0, 16), 16 * LANES),
        ("columns", touched(1), 4 * LANES),
    ):  # fmt: skip
        yield f"{name}: {found} sectors a load, {wanted / (found * SECTOR):.1%} of their bytes used"


def cases() -> Iterator[lesson.Case]:
    x = lesson.normal(ROWS, COLUMNS, dtype=torch.float32)
    out = torch.empty_like(x)
    count = ROWS * COLUMNS
    whole, columns = (Kernel(source(), "twice", emulate, by_column=flag) for flag in (0, 1))
    four = Kernel(source(), "twice4", emulate4, by_column=0)

    def launched(kernel: Kernel, *sizes: int, each: int = 1) -> torch.Tensor:
        kernel(count // THREADS // each, THREADS, x, out, *sizes)
        return out

    for name, run, moved in (
        ("rows", lambda: launched(whole, ROWS, COLUMNS), 8 * count),
        ("rows, 16 bytes a thread", lambda: launched(four, each=4), 8 * count),
        ("columns", lambda: launched(columns, ROWS, COLUMNS), 2 * SECTOR * touched(1) * count // LANES),
    ):
        yield lesson.Case(
            name, run, lambda dtype: 2 * x.to(dtype), flops=count, floor=8 * count, moved=moved, dtype="fp32",
            plain=torch.float32,
        )  # fmt: skip


if __name__ == "__main__":
    print(*counts(), sep="\n")
    lesson.main(__file__, cases)
