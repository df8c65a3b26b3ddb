"""Which sums at the end of a layer the Hopper kernel takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flashkernels.hardware import Gpu

if TYPE_CHECKING:
    from flashkernels.moe.combine import CombineProblem

MOST_TERMS = 16  # of a token: 16 bytes of each are in the registers of a thread
PIECE = 8  # numbers of 16 bytes


def refuses(problem: CombineProblem, gpu: Gpu | None) -> str | None:
    """Why the Hopper kernel cannot serve, or None."""
    if problem.device != "cuda" or gpu is None:
        return f"needs a Hopper GPU, the tensors are on {problem.device}"
    if not gpu.has_wgmma:
        return f"needs compute capability 9.0, {gpu.name} has {gpu.capability[0]}.{gpu.capability[1]}"
    if problem.dtype not in ("fp16", "bf16") or problem.parts > 1 or problem.out != problem.dtype:
        return f"adds fp16 and bf16, not {problem.parts} of {problem.dtype} to {problem.out}"
    if problem.k > MOST_TERMS:
        return f"k={problem.k} is over {MOST_TERMS}"
    if problem.width % PIECE or problem.width == 0:
        return f"width={problem.width} is not a multiple of {PIECE}: rows would not lie in steps of 16 bytes"
    if not 0 < problem.rows * problem.width // PIECE < 1 << 31:
        return f"{problem.rows} tokens are none, or more than 32 bits count in pieces of 16 bytes"
    return None if problem.regular else "y and shared lie in one dtype at steps of 16 bytes, weights in fp32"
