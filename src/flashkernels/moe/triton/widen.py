"""Words as weights of 16 bits, for products of so many rows that unpacking them once is cheaper than in every tile."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flashkernels.fused.triton.blocks import Launch
from flashkernels.hardware import Gpu
from flashkernels.jit.mode import interpreting
from flashkernels.moe.problem import GemmProblem
from flashkernels.moe.triton.early import launched_early, starts_early
from flashkernels.moe.triton.words import phases
from flashkernels.moe.weights import WORDS as PACKED

WORDS = tl.constexpr(PACKED)
ROWS, WARPS = 32, 4


@triton.jit
def widen_kernel(
    w_ptr, scale_ptr, out_ptr, depth, packs, groups, rows: tl.int64,
    ROWS: tl.constexpr, FORMAT: tl.constexpr, GROUP: tl.constexpr, EARLY: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """The words of one pack of a few rows."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    COUNT: tl.constexpr = 4 if FORMAT == "w4" else 2
    pid = tl.program_id(0)
    pack = pid % packs
    row = (pid // packs).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = row < rows
    offs = tl.arange(0, WORDS)
    at = w_ptr + row[:, None] * (packs * WORDS) + (pack * WORDS + offs)[None, :]
    words = tl.load(at, mask=here[:, None], other=0)
    scales = ()
    for p in tl.static_range(COUNT):
        group = tl.minimum(pack * COUNT * WORDS + p * WORDS, depth - 1) // GROUP
        scales = scales + (tl.load(scale_ptr + row * groups + group, mask=here, other=0.0)[:, None],)
    numbers = phases(words, scales, FORMAT, out_ptr.dtype.element_ty, True, NATIVE)
    for p in tl.static_range(COUNT):
        cols = pack * COUNT * WORDS + p * WORDS + offs
        at = out_ptr + row[:, None] * depth + cols[None, :]
        tl.store(at, numbers[p], mask=here[:, None] & (cols < depth)[None, :])


class Widen:
    """Makes (E, N, K) of x's type from contiguous words and scales."""

    def __init__(self, problem: GemmProblem, w: Tensor, scale: Tensor, gpu: Gpu | None) -> None:
        self.shape = (problem.experts, problem.n, problem.depth)
        rows, packs = problem.experts * problem.n, w.shape[2] // PACKED
        self.grid = -(-rows // ROWS) * packs
        self.numbers = (problem.depth, packs, scale.shape[2], rows)
        early = starts_early(gpu)
        fixed = {
            "ROWS": ROWS, "FORMAT": problem.weights, "GROUP": problem.group, "EARLY": early,
            "NATIVE": not interpreting(),
        }  # fmt: skip
        self.launch = Launch(widen_kernel, fixed, WARPS, w.device)
        launched_early(self.launch, early)

    def __call__(self, w: Tensor, scale: Tensor) -> Tensor:
        out = scale.new_empty(self.shape)
        if self.grid:
            self.launch(self.grid, (w.contiguous(), scale.contiguous(), out), self.numbers)
        return out
