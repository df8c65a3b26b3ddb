"""Rounding to 8 bits: what a scale belongs to decides the error, and how often the numbers are read."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import lesson  # before triton: it decides whether kernels are compiled or interpreted
import triton
import triton.language as tl

ROWS, WIDTH = lesson.pick(16384, 24), lesson.pick(4096, 64)
GROUP = 32  # numbers of a row that share a scale, in the finest case
MOST = 127.0


@triton.jit
def rounded(x, scale):
    """x / scale to the nearest whole number, ties to even: what is left of 1.5 * 2^23 + y has no fraction."""
    return (tl.div_rn(x, scale) + 12582912.0) - 12582912.0


@triton.jit
def rows_kernel(x_ptr, out_ptr, scale_ptr, WIDTH: tl.constexpr, GROUP: tl.constexpr, MOST: tl.constexpr):
    """One row: the largest of each group, then the division, while the row is in registers. GROUP may be the row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]  # [groups, GROUP]
    x = tl.load(x_ptr + row * WIDTH + at).to(tl.float32)
    scale = tl.div_rn(tl.max(tl.abs(x), 1), MOST)  # [groups]
    tl.store(scale_ptr + row * (WIDTH // GROUP) + tl.arange(0, WIDTH // GROUP), scale)
    tl.store(out_ptr + row * WIDTH + at, rounded(x, scale[:, None]).to(tl.int8))


@triton.jit
def tensor_kernel(x_ptr, out_ptr, scale_ptr, WIDTH: tl.constexpr):
    """One row by a scale that is known: somebody has read all numbers before."""
    at = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    x = tl.load(x_ptr + at).to(tl.float32)
    tl.store(out_ptr + at, rounded(x, tl.load(scale_ptr)).to(tl.int8))


def by_group(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty_like(x, dtype=torch.int8)
    scale = x.new_empty(x.shape[0], x.shape[1] // group, dtype=torch.float32)
    rows_kernel[x.shape[0],](x, out, scale, WIDTH=x.shape[1], GROUP=group, MOST=MOST, num_warps=8)
    return out, scale


def by_tensor(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = over_most(x.abs().amax().float())
    out = torch.empty_like(x, dtype=torch.int8)
    tensor_kernel[x.shape[0],](x, out, scale, WIDTH=x.shape[1], num_warps=8)
    return out, scale.view(1, 1)


def over_most(largest: torch.Tensor) -> torch.Tensor:
    """A real division: by a plain number torch multiplies with the reciprocal on a GPU, which rounds twice."""
    return largest / torch.full_like(largest, MOST)


def plain(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers and scales (..., groups), in x's dtype; group 0: one scale for all."""
    parts = x.reshape(1, 1, -1) if group == 0 else x.unflatten(-1, (-1, group))
    scale = over_most(parts.abs().amax(-1))
    return (parts / scale[..., None]).round().view(x.shape), scale


def error(x: torch.Tensor, group: int) -> float:
    """Root of the mean square of what rounding changes, over that of x."""
    whole, scale = plain(x.double(), group)
    back = (whole.reshape(1, 1, -1) if group == 0 else whole.unflatten(-1, (-1, group))) * scale[..., None]
    return float((back.view(x.shape) - x.double()).norm() / x.double().norm())


def expected(x: torch.Tensor, group: int) -> float:
    """The same from theory: an error that is uniform within half a step has the mean square step² / 12."""
    _, scale = plain(x.double(), group)
    return float(scale.square().mean().div(12).sqrt() / x.double().square().mean().sqrt())


def samples() -> dict[str, torch.Tensor]:
    """Normal numbers, and the same with 1 % of the columns 20 times as large."""
    x = lesson.normal(64, 4096).cpu().float()
    wild = x.clone()
    wild[:, ::100] *= 20
    return {"normal": x, "with outliers": wild}


def counts() -> Iterator[str]:
    for name, x in samples().items():
        for what, group in (("tensor", 0), ("row", x.shape[1]), (f"group of {GROUP}", GROUP)):
            found, theory = error(x, group), expected(x, group)
            yield f"{name}, a scale for each {what}: error {found:.2%}, by theory {theory:.2%}"


def cases() -> Iterator[lesson.Case]:
    x = lesson.normal(ROWS, WIDTH)
    size = x.numel()
    for name, run, group, more in (  # bytes a number beyond the floor: |x| written, read; x read again
        ("a scale for each row", lambda: by_group(x, WIDTH), WIDTH, 0),
        (f"a scale for {GROUP} numbers", lambda: by_group(x, GROUP), GROUP, 0),
        ("a scale for all", lambda: by_tensor(x), 0, 6),
    ):
        floor = 3 * size + 4 * run()[1].numel()
        (_, found), (_, want) = run(), plain(x.float(), group)
        if not torch.equal(found.flatten(), want.flatten()):
            raise SystemExit(f"{name}: the scales are off by {float((found.flatten() - want.flatten()).abs().max())}")
        yield lesson.Case(
            name, lambda run=run: run()[0], lambda dtype, group=group: plain(x.to(dtype), group)[0], flops=2 * size,
            floor=floor, moved=floor + more * size, dtype="fp32", plain=torch.float32,
        )  # fmt: skip


if __name__ == "__main__":
    print(*counts(), sep="\n")
    lesson.main(__file__, cases)
