"""What a warp costs, counted from addresses and conditions: sectors, bank conflicts, passes, resident blocks.

The counts are those that the hardware makes for one instruction of one warp; a lesson predicts its time from them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable

from flashkernels.hardware import Gpu

LANES = 32
SECTOR = 32  # bytes: the unit in which global memory is read and written
BANKS, WORD = 32, 4  # shared memory: a word of 4 bytes lies in bank (address / 4) mod 32
MOST_BLOCKS = 32  # on a multiprocessor


def warps(threads: int) -> int:
    """Warps of a block; the last one may have idle lanes.

    >>> warps(256), warps(33)
    (8, 2)
    """
    return -(-threads // LANES)


def busy_lanes(threads: int) -> float:
    """Share of the lanes of a block's warps that have a thread.

    >>> busy_lanes(256), busy_lanes(33)
    (1.0, 0.515625)
    """
    return threads / (warps(threads) * LANES)


def sectors(addresses: Iterable[int], size: int = 4) -> int:
    """Sectors of 32 bytes that one access of a warp touches; `addresses` are in bytes, each lane takes `size` of them.

    >>> sectors(4 * lane for lane in range(32)), sectors(128 * lane for lane in range(32))
    (4, 32)
    """
    return len({byte // SECTOR for start in addresses for byte in (start, start + size - 1)})


def bank_conflicts(addresses: Iterable[int]) -> int:
    """How often shared memory must be accessed for one load of 4 bytes by each lane: 1 is the best.

    Lanes that want the same word get it together; different words of one bank come one after the other.

    >>> [bank_conflicts(4 * stride * lane for lane in range(32)) for stride in (0, 1, 2, 32, 33)]
    [1, 1, 2, 32, 1]
    """
    words: dict[int, set[int]] = defaultdict(set)
    for address in addresses:
        words[address // WORD % BANKS].add(address // WORD)
    return max(map(len, words.values()))


def passes(branches: Iterable[Hashable]) -> int:
    """How often a warp goes through a piece of code with branches: once for each one that a lane takes.

    >>> passes(lane % 2 for lane in range(32)), passes(0 for lane in range(32))
    (2, 1)
    """
    return len(set(branches))


def resident(threads: int, registers: int, shared: int, gpu: Gpu) -> int:
    """Blocks that a multiprocessor holds at once.

    Registers are handed out in units of 8 a thread; a block reserves 1 KiB of shared memory for itself.

    >>> from flashkernels.hardware import lookup
    >>> h200 = lookup("h200")
    >>> resident(256, 32, 0, h200), resident(256, 128, 0, h200), resident(256, 32, 99_000, h200)
    (8, 2, 2)
    """
    lanes = warps(threads) * LANES
    by_registers = gpu.registers_per_sm // (lanes * -(-registers // 8) * 8)
    by_shared = gpu.shared_per_sm // (shared + 1024)
    return min(gpu.threads_per_sm // lanes, by_registers, by_shared, MOST_BLOCKS)


def pipelined(copy: float, compute: float, chunks: int) -> float:
    """Time of chunks that are copied and computed on, where the copy of one overlaps the computing of another.

    >>> pipelined(2.0, 1.0, 4), 4 * (2.0 + 1.0)
    (9.0, 12.0)
    """
    return copy + compute + (chunks - 1) * max(copy, compute)
