"""What differs in the CUDA source of a backward variant with wide heads (`backward_wide.cu`): sizes, shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from flashkernels.attention.hopper.source import SHARED_LIMIT
from flashkernels.attention.hopper.wide_source import CHUNK, WIDEST as WIDEST, columns as columns

if TYPE_CHECKING:
    from flashkernels.attention.hopper.backward_source import BackwardVariant

ROWS = 64  # of a gradient, that a block makes
QUERIES = 128  # that pass by in a step, or keys
GRADIENTS = ("q", "k", "v")
BOX = 16  # rows that one load brings


class Rings(NamedTuple):
    """The slots that the operands which pass by go through, of one gradient."""

    grain: int  # of a slot, in chunks of 64 rows and columns
    stages: int  # slots of each of the two warpgroups
    shared: int  # bytes of shared memory that all of it takes; backward_wide_layout.cuh asserts the same


def rings(variant: BackwardVariant, name: str) -> Rings:
    """Large slots where there is room for three of them, as many slots as there is room for.

    >>> from flashkernels.attention.hopper.backward_source import BackwardTile, BackwardVariant
    >>> wide = BackwardVariant(512, 512, BackwardTile(wide=True), own_dq=True)
    >>> rings(wide, "k"), rings(wide, "v")
    (Rings(grain=1, stages=5, shared=231672), Rings(grain=2, stages=4, shared=215240))
    """
    chunks = [-(-dim // 64) for dim in (variant.head_dim, variant.head_dim_v)]
    own = CHUNK * ((chunks[0] if name == "v" else sum(chunks)) + 2)  # operands of the rows, and both W
    own += 8 + (0 if name == "q" else 4 * 512)  # a barrier, and statistics

    def most(grain: int) -> int:
        return min(8 // grain, (SHARED_LIMIT - own) // (2 * (CHUNK * grain + 3 * 8)))

    grain = 2 if most(2) > 2 else 1
    return Rings(grain, most(grain), own + 2 * most(grain) * (CHUNK * grain + 3 * 8))


def step_bytes(variant: BackwardVariant, name: str) -> int:
    """Traffic of shared memory in a step of one gradient, which is what binds it: a product of 64 x 64 scores
    reads 4 KB for 16 columns, in 32 cycles of the tensor cores.

    >>> from flashkernels.attention.hopper.backward_source import BackwardTile, BackwardVariant
    >>> one = BackwardVariant(512, 512, BackwardTile(wide=True), own_dq=True)
    >>> step_bytes(one, "k") / 128, step_bytes(one, "v") / 128  # cycles; the tensor cores take 6144 and 4096
    (8576.0, 5504.0)
    """
    dims = (variant.head_dim,) if name == "v" else (variant.head_dim, variant.head_dim_v)
    half = columns(variant.head_dim_v if name == "v" else variant.head_dim)
    scores = sum(2 * -(-dim // 16) * 4096 for dim in dims)
    sums = 2 * QUERIES // 16 * (2048 + 32 * half)
    passing = sum(QUERIES * 128 * -(-dim // 64) for dim in dims) + 2 * QUERIES * 128 * -(-half // 64)
    return scores + sums + passing + 2 * ROWS * ROWS * 2  # and both W are written


def numbers(variant: BackwardVariant) -> dict[str, int]:
    """Constants of `config.cuh` that only wide heads have."""
    found = {}
    for name in GRADIENTS:
        for what, value in rings(variant, name)._asdict().items():
            found[f"{name}_{what}".upper()] = value
    return found


def products(variant: BackwardVariant) -> list[tuple[str, int, bool, str, bool]]:
    """Of `mma.cuh`: name, N, A in registers, which operands are reduced along their columns, whether it is a first."""
    return [
        ("mma_scores", ROWS, False, "", True), ("mma_scores", ROWS, False, "", False),
        ("mma_dk", columns(variant.head_dim), False, "b", False),
        ("mma_dv", columns(variant.head_dim_v), False, "b", False),
    ]  # fmt: skip
