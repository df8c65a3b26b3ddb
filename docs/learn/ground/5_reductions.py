"""Atomics and reductions: many threads, one sum. The fewer of them meet at one address, the better."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import lesson
from counting import LANES, warps
from kernels import Kernel, multiprocessors, whole_numbers

COUNT, THREADS = lesson.pick(1 << 24, 4096), 256
PARTS = 8 * multiprocessors()  # blocks where each walks over the numbers


def source() -> str:
    return r"""
__device__ float sum_of_warp(float x) {  // in lane 0
  for (int apart = 16; apart > 0; apart /= 2) x += __shfl_down_sync(0xffffffff, x, apart);
  return x;
}

__device__ float sum_of_block(float x) {  // in thread 0
  __shared__ float sums[32];
  x = sum_of_warp(x);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
  __syncthreads();
  return threadIdx.x < 32 ? sum_of_warp(threadIdx.x < blockDim.x / 32 ? sums[threadIdx.x] : 0) : 0;
}

__device__ int me() { return blockIdx.x * blockDim.x + threadIdx.x; }

extern "C" __global__ void by_thread(const float* x, float* out) { atomicAdd(out, x[me()]); }

extern "C" __global__ void by_warp(const float* x, float* out) {
  float sum = sum_of_warp(x[me()]);
  if (threadIdx.x % 32 == 0) atomicAdd(out, sum);
}

extern "C" __global__ void by_block(const float* x, float* out) {
  float sum = sum_of_block(x[me()]);
  if (threadIdx.x == 0) atomicAdd(out, sum);
}

// No atomics: one number a block, for a second launch of one block to add up. The same bits in every run.
extern "C" __global__ void parts(const float* x, float* out, int count) {
  float sum = 0;
  for (int i = me(); i < count; i += gridDim.x * blockDim.x) sum += x[i];
  sum = sum_of_block(sum);
  if (threadIdx.x == 0) out[blockIdx.x] = sum;
}
"""


def emulate(grid: int, block: int, x: torch.Tensor, out: torch.Tensor, each: int) -> None:
    """`each` numbers are added up before they are added to the result, one after the other."""
    for group in x.view(-1, each).sum(1):
        out += group


def emulate_parts(grid: int, block: int, x: torch.Tensor, out: torch.Tensor, count: int) -> None:
    threads = torch.zeros(-(-count // (grid * block)), grid * block)
    threads.view(-1)[:count] = x[:count]
    out[:grid] = threads.sum(0).view(grid, block).sum(1)


def atomics(count: int, each: int) -> int:
    return count // each


def counts() -> Iterator[str]:
    for name, each in (("a thread", 1), ("a warp", LANES), ("a block", THREADS)):
        yield f"one {name}: {atomics(COUNT, each)} atomics at one address"
    yield f"no atomics: {PARTS} numbers between two launches, {warps(THREADS)} warps a block"


def cases() -> Iterator[lesson.Case]:
    x = whole_numbers(COUNT)
    out, between = x.new_zeros(1), x.new_zeros(PARTS)

    def added(kernel: Kernel) -> torch.Tensor:
        out.zero_()
        kernel(COUNT // THREADS, THREADS, x, out)
        return out

    def twice() -> torch.Tensor:
        parts(PARTS, THREADS, x, between, COUNT)
        parts(1, THREADS, between, out, PARTS)
        return out

    runs = {"no atomics": twice}
    parts = Kernel(source(), "parts", emulate_parts)
    for name, each in (("block", THREADS), ("warp", LANES), ("thread", 1)):
        kernel = Kernel(source(), f"by_{name}", lambda *arguments, each=each: emulate(*arguments, each))
        runs[f"one a {name}"] = lambda kernel=kernel: added(kernel)
    for name, run in runs.items():
        yield lesson.Case(
            name, run, lambda dtype: x.to(dtype).sum().view(1), flops=COUNT, floor=4 * COUNT, moved=4 * COUNT,
            dtype="fp32", plain=torch.float32,
        )  # fmt: skip


if __name__ == "__main__":
    print(*counts(), sep="\n")
    lesson.main(__file__, cases)
