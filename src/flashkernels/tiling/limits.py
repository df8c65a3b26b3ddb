"""What an architecture lets one block have, derived from the GPU's facts."""

from __future__ import annotations

from dataclasses import dataclass

from flashkernels.hardware import Gpu
from flashkernels.tiling.tile import Tile

REGISTERS_PER_THREAD = 255
MOST_BLOCKS_PER_SM = 32


@dataclass(frozen=True)
class Footprint:
    """What a tile needs of a multiprocessor: bytes of shared memory, registers a thread; how many blocks then fit."""

    shared: int
    registers: int
    register_cap: int
    blocks_per_sm: int

    def exceeds(self, gpu: Gpu) -> str | None:
        """The limit this footprint breaks, in words, or None."""
        if self.shared > gpu.shared_per_block:
            return f"needs {self.shared} B of shared memory, {gpu.name} has {gpu.shared_per_block} B a block"
        if self.registers > self.register_cap:
            return f"needs about {self.registers} registers a thread, the limit is {self.register_cap}"
        return None


def footprint(tile: Tile, gpu: Gpu, shared: int, registers: int) -> Footprint:
    """Occupancy from the shared memory and registers a kernel says it needs."""
    threads = 32 * tile.warps
    cap = tile.registers or REGISTERS_PER_THREAD
    # the hardware hands out registers in units of 8 per thread, and reserves 1 KiB of shared memory a block
    by_registers = gpu.registers_per_sm // (threads * -(-min(max(registers, 32), cap) // 8) * 8)
    by_shared = gpu.shared_per_sm // (shared + 1024)
    by_threads = gpu.threads_per_sm // threads
    return Footprint(shared, registers, cap, min(by_registers, by_shared, by_threads, MOST_BLOCKS_PER_SM))
