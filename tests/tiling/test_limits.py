"""Occupancy and the limits of a GPU, by arithmetic that a reader can repeat."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashkernels.hardware import lookup
from flashkernels.tiling import Footprint, Tile, footprint

H200, RTX5090 = lookup("h200"), lookup("rtx5090")  # 228 and 100 KiB, 2048 and 1536 threads, 65536 registers an SM
TILE = Tile("exact", 64, 64, (64,), (64,), warps=4, stages=2, tma=False)


@pytest.mark.parametrize(
    ("warps", "shared", "registers", "blocks", "because"),
    [
        (4, 1024, 128, 4, "65536 registers / (128 threads x 128)"),
        (4, 1024, 97, 4, "registers come in units of 8: 97 counts as 104, 65536 / (128 x 104) = 4.92"),
        (4, 1024, 120, 4, "65536 / (128 x 120) = 4.27"),
        (4, 1024, 96, 5, "65536 / (128 x 96) = 5.33"),
        (8, 1024, 128, 2, "twice the threads"),
        (4, 75 * 1024, 64, 3, "228 KiB / (75 + 1 reserved)"),
        (4, 76 * 1024, 64, 2, "228 KiB / (76 + 1 reserved)"),
        (4, 0, 8, 16, "2048 threads / 128, and no block has fewer than 32 registers a thread"),
        (1, 0, 8, 32, "no more than 32 blocks an SM"),
    ],
)
def test_occupancy_is_what_the_scarcest_resource_allows(
    warps: int, shared: int, registers: int, blocks: int, because: str
) -> None:
    assert footprint(replace(TILE, warps=warps), H200, shared, registers).blocks_per_sm == blocks, because


def test_a_smaller_gpu_holds_fewer_blocks() -> None:
    assert footprint(TILE, RTX5090, 32 * 1024, 64).blocks_per_sm == 3  # 100 KiB / 33
    assert footprint(TILE, RTX5090, 0, 32).blocks_per_sm == 12  # 1536 threads / 128


def test_a_register_cap_raises_the_occupancy_and_is_the_limit() -> None:
    free, capped = footprint(TILE, H200, 1024, 200), footprint(replace(TILE, registers=128), H200, 1024, 200)
    assert (free.register_cap, free.blocks_per_sm) == (255, 2)
    assert (capped.register_cap, capped.blocks_per_sm) == (128, 4)
    assert free.exceeds(H200) is None
    assert capped.exceeds(H200) == "needs about 200 registers a thread, the limit is 128"


def test_what_fits_to_the_last_byte_fits() -> None:
    assert footprint(TILE, RTX5090, 99 * 1024, 255).exceeds(RTX5090) is None


def test_one_byte_too_much_shared_memory_is_named_with_the_gpu() -> None:
    need = footprint(TILE, RTX5090, 99 * 1024 + 1, 255)
    assert need.exceeds(RTX5090) == ("needs 101377 B of shared memory, NVIDIA GeForce RTX 5090 has 101376 B a block")
    assert need.exceeds(H200) is None


def test_one_register_too_many_is_named() -> None:
    assert Footprint(0, 256, 255, 1).exceeds(H200) == "needs about 256 registers a thread, the limit is 255"
