"""Grid, block, warp: how many threads there are decides how much of the chip works."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import lesson
from counting import busy_lanes, resident, warps
from kernels import Kernel, multiprocessors

from flashkernels.hardware import detect, lookup

COUNT, STEPS = lesson.pick(1 << 22, 4096), lesson.pick(256, 16)
THREADS = 256  # of a block


def source() -> str:
    return r"""
// Every thread takes every n-th number, n the threads of the whole grid, through a chain of products and sums.
extern "C" __global__ void chain(const float* x, float* out, int count, int steps) {
  int threads = gridDim.x * blockDim.x;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += threads) {
    float y = x[i];
    for (int s = 0; s < steps; ++s) y = y * 0.9990234375f + 0.0009765625f;  // 1 - 2^-10 and 2^-10
    out[i] = y;
  }
}
"""


def emulate(grid: int, block: int, x: torch.Tensor, out: torch.Tensor, count: int, steps: int) -> None:
    """The same, all threads of the grid at a time."""
    for start in range(0, count, grid * block):
        mine = slice(start, min(start + grid * block, count))
        out[mine] = chained(x[mine], steps)


def chained(x: torch.Tensor, steps: int) -> torch.Tensor:
    for _ in range(steps):
        x = x * (1 - 2**-10) + 2**-10
    return x


def grids() -> dict[str, tuple[int, int]]:
    """Blocks and threads of a block of each case."""
    gpu = (detect() if lesson.GPU else None) or lookup("h200")
    sms = multiprocessors()
    full = sms * resident(THREADS, 32, 0, gpu)
    return {
        "whole chip": (full, THREADS),
        "one block": (1, THREADS),
        "one block a multiprocessor": (sms, THREADS),
        "one block too many": (full + 1, THREADS),
        "blocks of 33 threads": (full * THREADS // 33, 33),
    }


def counts() -> Iterator[str]:
    for name, (blocks, threads) in grids().items():
        yield f"{name}: {blocks} blocks of {warps(threads)} warps, {busy_lanes(threads):.0%} of their lanes busy"


def cases() -> Iterator[lesson.Case]:
    kernel = Kernel(source(), "chain", emulate)
    x = lesson.normal(COUNT, dtype=torch.float32)
    out = torch.empty_like(x)

    def run(blocks: int, threads: int) -> torch.Tensor:
        kernel(blocks, threads, x, out, COUNT, STEPS)
        return out

    for name, grid in grids().items():
        yield lesson.Case(
            name, lambda grid=grid: run(*grid), lambda dtype: chained(x.to(dtype), STEPS), flops=2 * COUNT * STEPS,
            floor=8 * COUNT, moved=8 * COUNT, dtype="fp32", plain=torch.float32,
        )  # fmt: skip


if __name__ == "__main__":
    print(*counts(), sep="\n")
    lesson.main(__file__, cases)
