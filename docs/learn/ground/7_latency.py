"""Occupancy and latency: a multiprocessor hides a wait by having other loads under way."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import lesson
from counting import LANES, resident, warps
from kernels import Kernel, multiprocessors, whole_numbers

from flashkernels.hardware import Gpu, detect, lookup

THREADS = 128
BLOCKS = (16, 4, 1)  # of a multiprocessor
COUNT = multiprocessors() * BLOCKS[0] * THREADS * lesson.pick(256, 8)
CHAIN, LINKS = lesson.pick(1 << 24, 1 << 10), lesson.pick(4096, 100)


def source() -> str:
    return r"""
// Every thread adds up every n-th number, n the threads of the grid, with LOADS of them under way at a time.
extern "C" __global__ void sums(const float* x, float* out, int rounds) {
  int threads = gridDim.x * blockDim.x, me = blockIdx.x * blockDim.x + threadIdx.x;
  float sum[LOADS] = {}, total = 0;
#pragma unroll 1
  for (int r = 0; r < rounds; ++r)
#pragma unroll
    for (int j = 0; j < LOADS; ++j) sum[j] += x[(r * LOADS + j) * threads + me];
  for (int j = 0; j < LOADS; ++j) total += sum[j];
  out[me] = total;
}

// One thread, one load at a time: where to read next is what was read.
extern "C" __global__ void chase(const int* next, int* out, int links) {
  int at = 0;
  for (int i = 0; i < links; ++i) at = next[at];
  *out = at;
}
"""


def emulate(grid: int, block: int, x: torch.Tensor, out: torch.Tensor, rounds: int, loads: int) -> None:
    total = x.new_zeros(grid * block)
    for step in x.view(rounds, loads, grid * block):
        total += step.sum(0)
    out[: grid * block] = total


def emulate_chase(grid: int, block: int, following: torch.Tensor, out: torch.Tensor, links: int, loads: int) -> None:
    at = 0
    for _ in range(links):
        at = int(following[at])
    out[0] = at


def claim(gpu: Gpu, blocks: int) -> int:
    """Dynamic shared memory of a block, so that no more than so many fit on a multiprocessor."""
    return min(gpu.shared_per_block, gpu.shared_per_sm // blocks // 1024 * 1024 - 1024)


def in_flight(blocks: int, loads: int) -> int:
    """Bytes that a multiprocessor has under way: one load of 4 bytes a lane, `loads` of them."""
    return blocks * warps(THREADS) * LANES * 4 * loads


def here() -> Gpu:
    return (detect() if lesson.GPU else None) or lookup("h200")


def counts() -> Iterator[str]:
    for loads in (1, 8):
        for blocks in BLOCKS:
            held = resident(THREADS, 32, claim(here(), blocks), here())
            yield f"{held * warps(THREADS)} warps, {loads} loads each: {in_flight(held, loads)} bytes under way"


def cases() -> Iterator[lesson.Case]:
    x, following = whole_numbers(COUNT), cycle(CHAIN)
    out, last = x.new_empty(multiprocessors() * BLOCKS[0] * THREADS), following.new_empty(1)

    def summed(kernel: Kernel, blocks: int, loads: int) -> torch.Tensor:
        threads = multiprocessors() * blocks * THREADS
        kernel(threads // THREADS, THREADS, x, out, COUNT // threads // loads, shared=claim(here(), blocks))
        return out[:threads]

    for loads in (8, 1):
        kernel = Kernel(source(), "sums", emulate, loads=loads)
        for blocks in BLOCKS:
            threads = multiprocessors() * blocks * THREADS
            yield lesson.Case(
                f"{blocks * warps(THREADS)} warps, {loads} load{'s' if loads > 1 else ''} each",
                lambda kernel=kernel, blocks=blocks, loads=loads: summed(kernel, blocks, loads),
                lambda dtype, threads=threads: x.to(dtype).view(-1, threads).sum(0), flops=COUNT, floor=4 * COUNT,
                moved=4 * COUNT, dtype="fp32", plain=torch.float32,
            )  # fmt: skip
    kernel = Kernel(source(), "chase", emulate_chase, loads=1)

    def chased() -> torch.Tensor:
        kernel(1, 1, following, last, LINKS)
        return last

    yield lesson.Case(
        f"a chain of {LINKS}", chased, lambda dtype: walked(following).to(dtype), flops=0, floor=32 * LINKS,
        moved=32 * LINKS, dtype="fp32", plain=torch.float32,
    )  # fmt: skip


def cycle(length: int) -> torch.Tensor:
    """Where to go from each place, on a walk that visits all of them in no order."""
    generator = torch.Generator().manual_seed(0)
    walk = torch.randperm(length, generator=generator)
    return torch.empty_like(walk).scatter_(0, walk, walk.roll(-1)).to(lesson.DEVICE, torch.int32)


def walked(following: torch.Tensor) -> torch.Tensor:
    """Where LINKS steps from 0 lead."""
    steps, at = following.tolist(), 0
    for _ in range(LINKS):
        at = steps[at]
    return following.new_tensor([at])


if __name__ == "__main__":
    print(*counts(), sep="\n")
    lesson.main(__file__, cases)
