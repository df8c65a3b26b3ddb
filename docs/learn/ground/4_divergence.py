"""Divergence: a warp has one instruction at a time, so lanes that branch apart wait for one another."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import lesson
from counting import LANES, passes
from kernels import Kernel

COUNT, STEPS = lesson.pick(1 << 22, 2048), lesson.pick(256, 4)
THREADS = 256
KINDS = ((2, 0), (2, 1), (8, 0), (8, 1), (32, 1))  # ways, and whether the lanes of a warp differ


def source() -> str:
    return r"""
// Each number is of one of WAYS kinds, and each kind has a chain of its own. Numbers of a kind are 32 neighbours, or,
// BY_LANE, every WAYS-th number.
extern "C" __global__ void kinds(const float* x, float* out, int steps) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  int mine = (BY_LANE ? i : i / 32) % WAYS;
  float y = x[i];
  for (int way = 0; way < WAYS; ++way) {
    if (way == mine) {
      float add = way + 1;
      for (int s = 0; s < steps; ++s) y = y * 0.5f + add;
    }
  }
  out[i] = y;
}
"""


def kind(thread: int | torch.Tensor, ways: int, by_lane: int) -> int | torch.Tensor:
    return (thread if by_lane else thread // LANES) % ways


def chained(x: torch.Tensor, mine: torch.Tensor, steps: int) -> torch.Tensor:
    for _ in range(steps):
        x = x * 0.5 + (mine + 1)
    return x


def emulate(grid: int, block: int, x: torch.Tensor, out: torch.Tensor, steps: int, ways: int, by_lane: int) -> None:
    """As a warp does it: through every way, with the lanes of the other ways switched off."""
    mine = kind(torch.arange(grid * block), ways, by_lane)
    y = x.clone()
    for way in range(ways):
        on = mine == way
        y[on] = chained(y[on], mine[on], steps)
    out.copy_(y)


def ways_of_a_warp(ways: int, by_lane: int) -> int:
    return passes(kind(lane, ways, by_lane) for lane in range(LANES))


def name_of(ways: int, by_lane: int) -> str:
    return f"{ways} ways by {'lane' if by_lane else 'warp'}"


def counts() -> Iterator[str]:
    for ways, by_lane in KINDS:
        yield f"{name_of(ways, by_lane)}: a warp goes through {ways_of_a_warp(ways, by_lane)} of them"


def cases() -> Iterator[lesson.Case]:
    x = lesson.normal(COUNT, dtype=torch.float32)
    out = torch.empty_like(x)

    def run(kernel: Kernel) -> torch.Tensor:
        kernel(COUNT // THREADS, THREADS, x, out, STEPS)
        return out

    def oracle(dtype: torch.dtype, ways: int, by_lane: int) -> torch.Tensor:
        return chained(x.to(dtype), kind(torch.arange(COUNT, device=x.device), ways, by_lane).to(dtype), STEPS)

    for ways, by_lane in KINDS:
        kernel = Kernel(source(), "kinds", emulate, ways=ways, by_lane=by_lane)
        yield lesson.Case(
            name_of(ways, by_lane), lambda kernel=kernel: run(kernel),
            lambda dtype, ways=ways, by_lane=by_lane: oracle(dtype, ways, by_lane), flops=2 * COUNT * STEPS,
            floor=8 * COUNT, moved=8 * COUNT, dtype="fp32", plain=torch.float32,
        )  # fmt: skip


if __name__ == "__main__":
    print(*counts(), sep="\n")
    lesson.main(__file__, cases)
