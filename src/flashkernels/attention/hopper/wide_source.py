"""What differs in the CUDA source of a variant with wide heads (`wide.cu`): sizes, constants, instructions."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashkernels.attention.hopper.source import Variant

WIDEST = 512  # columns: of O, two warpgroups hold 256 each
THREADS = 384  # a producer warpgroup and two consumers
CHUNK = 64 * 128  # bytes: 64 rows of 64 columns
GRAIN = 2  # of a ring's slot, in chunks of K or 16 keys of V; 1: 559 instead of 633 TFLOPS (D=512, H200, 2026-11-15)


def columns(dim_v: int) -> int:
    """Columns of O that each of the two warpgroups has; the second's may be 8 more than there are.

    >>> columns(512), columns(264)
    (256, 136)
    """
    return -(-dim_v // 16) * 8


def chunks(variant: Variant) -> tuple[int, int, int, int, int]:
    """`Variant.chunks`: all are 64 columns wide. Those of V are one warpgroup's."""
    return 128, -(-variant.head_dim // 64), 0, 128, -(-columns(variant.head_dim_v) // 64)


def shared(variant: Variant) -> int:
    """Bytes of shared memory; wide_layout.cuh asserts the same."""
    tile = variant.tile
    size = CHUNK * (chunks(variant)[1] + 2 + 2 * tile.stages * GRAIN)  # Q, P and the rings
    size += 8 * (2 + 2 * 2 * tile.stages) + 32  # barriers
    return size + 64 + 2 * 2 * 256 + 2 * 16


def box_rows(variant: Variant) -> tuple[int, int]:
    """Keys that one load brings: of K a part of a tile's, which the blocks of a cluster share; of V those of a slot."""
    return variant.tile.block_n // 2 // variant.tile.cluster, 16 * GRAIN


def numbers(variant: Variant) -> dict[str, int]:
    """Constants of `config.cuh`."""
    return {
        "BLOCK_N": variant.tile.block_n // 2, "O_COLUMNS": columns(variant.head_dim_v), "GRAIN": GRAIN,
        "PRODUCER_REGISTERS": 24, "CONSUMER_REGISTERS": 240,
    }  # fmt: skip
