"""Which rows the Hopper kernels round to 8 bits, and how many warps share one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashkernels.hardware import Gpu

if TYPE_CHECKING:
    from flashkernels.moe.rows import RoundingProblem

LANES, PIECES = 32, 4  # pieces of 16 bytes that a lane keeps in its registers (rounding.cuh)
MOST_WARPS = 16
WIDEST = MOST_WARPS * LANES * PIECES * 8  # numbers of a row
# Rows that "auto" leaves to Triton: a launch is most of what they take. 4096 rows of 2048 took 7.9 µs for Triton's 8.3,
# 32768 of 768 21.8 for 28.5 (H200, 2026-11-16); fewer were not timed.
FEW = 2048


def row_warps(width: int) -> int:
    """A power of two.

    >>> [row_warps(n) for n in (8, 768, 1024, 2048, 4096, 14336)]
    [1, 1, 1, 2, 4, 16]
    """
    return 1 << (-(-width // (LANES * PIECES * 8)) - 1).bit_length()


def block_warps(warps: int) -> int:
    """Of a block whose rows take so many each: 8, or as many as one row."""
    return max(8, warps)


def refuses(problem: RoundingProblem, gpu: Gpu | None) -> str | None:
    """Why the Hopper kernel cannot serve, or None."""
    if problem.device != "cuda" or gpu is None:
        return f"needs a Hopper GPU, the tensors are on {problem.device}"
    if not gpu.has_wgmma:
        return f"needs compute capability 9.0, {gpu.name} has {gpu.capability[0]}.{gpu.capability[1]}"
    if problem.dtype not in ("fp16", "bf16"):
        return f"rounds fp16 and bf16, not {problem.dtype}"
    if problem.width % 16 or not 0 < problem.width <= WIDEST:
        return f"width={problem.width} is not a multiple of 16 up to {WIDEST}"
    if problem.by_block:
        return "has one scale for a whole row, not one for 128 numbers"
    if problem.rows == 0:
        return "there are no rows"
    return None if problem.aligned else "x does not lie in steps of 16 bytes"


def defers(problem: RoundingProblem, gpu: Gpu | None) -> str | None:
    """Why "auto" leaves a problem to Triton, or None."""
    return f"{problem.rows} rows are under {FEW}: a launch is all that they take" if problem.rows < FEW else None
