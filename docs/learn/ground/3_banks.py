"""Bank conflicts: shared memory has 32 banks, and gives one word of each at a time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import lesson
from counting import LANES, bank_conflicts
from kernels import Kernel, multiprocessors, whole_numbers

SIDE = lesson.pick(8192, 64)  # of the matrix that is transposed
TILE = 32
STRIDES = (1, 2, 8, 32, 33)
STEPS, THREADS = lesson.pick(2048, 64), lesson.pick(1024, 64)


def source() -> str:
    return r"""
// A matrix of n x n, 32 x 32 numbers a block: rows come in, columns go out, and both are rows for the memory.
extern "C" __global__ void transpose(const float* x, float* out, int n) {
  __shared__ float tile[32][32 + PAD];
  int lane = threadIdx.x % 32, row = threadIdx.x / 32;
  int top = blockIdx.x / (n / 32) * 32, left = blockIdx.x % (n / 32) * 32;
  for (int r = row; r < 32; r += 8) tile[r][lane] = x[(top + r) * n + left + lane];
  __syncthreads();
  for (int r = row; r < 32; r += 8) out[(left + r) * n + top + lane] = tile[lane][r];
}

// Nothing but loads from shared memory, the lanes of a warp STRIDE words apart.
extern "C" __global__ void reads(const float* x, float* out) {
  __shared__ float tile[4096];
  for (int i = threadIdx.x; i < 4096; i += blockDim.x) tile[i] = x[i];
  __syncthreads();
  const volatile float* mine = tile + threadIdx.x % 32 * STRIDE;  // volatile: each load is one instruction
  float sum = 0;
#pragma unroll 16
  for (int i = 0; i < STEPS; ++i) sum += mine[i];
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
"""


def emulate_transpose(grid: int, block: int, x: torch.Tensor, out: torch.Tensor, n: int, pad: int, **_: int) -> None:
    """Block by block, through a tile whose rows are `pad` words longer than they need to be."""
    for at in range(grid):
        top, left = at // (n // TILE) * TILE, at % (n // TILE) * TILE
        tile = torch.zeros(TILE, TILE + pad)
        tile[:, :TILE] = x[top : top + TILE, left : left + TILE]
        out[left : left + TILE, top : top + TILE] = tile[:, :TILE].T


def emulate_reads(grid: int, block: int, x: torch.Tensor, out: torch.Tensor, stride: int, steps: int, **_: int) -> None:
    mine = torch.arange(block) % LANES * stride
    total = sum(x[mine + i] for i in range(steps))
    out.view(grid, block)[:] = total


def column(pad: int) -> int:
    """Conflicts where a warp reads column 0 of the tile."""
    return bank_conflicts(4 * lane * (TILE + pad) for lane in range(LANES))


def strided(stride: int) -> int:
    return bank_conflicts(4 * lane * stride for lane in range(LANES))


def counts() -> Iterator[str]:
    for pad in (0, 1):
        yield f"a column of 32 x {TILE + pad}: {column(pad)} accesses for one load"
    for stride in STRIDES:
        yield f"stride {stride}: {strided(stride)} accesses for one load"


def cases() -> Iterator[lesson.Case]:
    x, table = lesson.normal(SIDE, SIDE, dtype=torch.float32), whole_numbers(4096)
    turned, blocks = torch.empty_like(x), 2 * multiprocessors()
    sums = table.new_empty(blocks * THREADS)

    def transposed(kernel: Kernel) -> torch.Tensor:
        kernel((SIDE // TILE) ** 2, 256, x, turned, SIDE)
        return turned

    def read(kernel: Kernel) -> torch.Tensor:
        kernel(blocks, THREADS, table, sums)
        return sums

    def summed(dtype: torch.dtype, stride: int) -> torch.Tensor:
        lanes = torch.arange(LANES, device=table.device)[:, None] * stride
        steps = torch.arange(STEPS, device=table.device)
        return table.to(dtype)[lanes + steps].sum(1).repeat(blocks * THREADS // LANES)

    fixed = {"stride": 1, "steps": STEPS}
    for pad in (1, 0):
        kernel = Kernel(source(), "transpose", emulate_transpose, pad=pad, **fixed)
        yield lesson.Case(
            f"transpose, 32 x {TILE + pad}", lambda kernel=kernel: transposed(kernel), lambda dtype: x.to(dtype).T,
            flops=0, floor=8 * SIDE**2, moved=8 * SIDE**2, dtype="fp32", plain=torch.float32,
        )  # fmt: skip
    for stride in STRIDES:
        kernel = Kernel(source(), "reads", emulate_reads, pad=0, stride=stride, steps=STEPS)
        yield lesson.Case(
            f"stride {stride}", lambda kernel=kernel: read(kernel), lambda dtype, stride=stride: summed(dtype, stride),
            flops=blocks * THREADS * STEPS, floor=4 * (4096 + blocks * THREADS), moved=4 * (4096 + blocks * THREADS),
            dtype="fp32", plain=torch.float32,
        )  # fmt: skip


if __name__ == "__main__":
    print(*counts(), sep="\n")
    lesson.main(__file__, cases)
