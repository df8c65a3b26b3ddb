"""A tile: how one kernel cuts its problem, as a value."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from itertools import combinations_with_replacement
from typing import Protocol

STRATEGIES = ("exact", "standard", "split_d", "register")
SMALLEST_PART = 16  # the k extent of one 16-bit matrix instruction
LARGEST_PART = 256  # a TMA box and a wgmma's N both end there
MOST_PARTS = 3


class TilingError(ValueError):
    """No tile fits: the message names the dimension and what limits it."""


@dataclass(frozen=True)
class Tile:
    """Rows and keys per block, the parts the head dimensions are cut into, and the threads and stages that work on it.

    >>> Tile("exact", 128, 128, (64, 16), (64, 16), warps=8, stages=2, tma=True).name
    'exact-128x128-d64+16-v64+16-w8-s2-tma'
    """

    strategy: str
    block_m: int
    block_n: int
    parts: tuple[int, ...]
    parts_v: tuple[int, ...]
    warps: int
    stages: int
    tma: bool
    registers: int = 0  # most registers a thread may use, so that more blocks share a multiprocessor; 0: no cap
    lazy: bool = False  # the maximum of a row's last keys serves for all of them, and overflow is caught
    early: bool = False  # with `lazy`: the first part of the next scores is computed beside the exponentials of these
    late: bool = False  # of a backward: what a block adds to dQ is added in the next one
    turned: bool = False  # of a backward: dQ of a block is made on its side, columns by rows

    @property
    def name(self) -> str:
        d, v = ("+".join(map(str, parts)) for parts in (self.parts, self.parts_v))
        loads = "tma" if self.tma else "pointer"
        cap = f"-r{self.registers}" if self.registers else ""
        how = "-lazy" * self.lazy + "-early" * self.early + "-late" * self.late + "-turned" * self.turned
        blocks = f"{self.block_m}x{self.block_n}"
        return f"{self.strategy}-{blocks}-d{d}-v{v}-w{self.warps}-s{self.stages}-{loads}{cap}{how}"


def waste(dim: int, parts: tuple[int, ...]) -> float:
    """Share of the computed head dimension that is padding.

    >>> waste(72, (128,)), waste(96, (128,)), waste(72, (64, 16))
    (0.4375, 0.25, 0.1)
    """
    return (sum(parts) - dim) / sum(parts)


def padded(dim: int) -> tuple[int, ...]:
    """The next power of two, as one part.

    >>> padded(72), padded(5), padded(512)
    ((128,), (16,), (512,))
    """
    return (max(SMALLEST_PART, 1 << (dim - 1).bit_length()),)


@cache
def decomposed(dim: int) -> tuple[int, ...]:
    """The sum of at most three powers of two that covers `dim` with the least padding, then with the fewest parts.

    >>> [decomposed(d) for d in (40, 56, 72, 80, 96, 112, 120, 160, 512)]
    [(32, 16), (64,), (64, 16), (64, 16), (64, 32), (64, 32, 16), (128,), (128, 32), (256, 256)]
    """
    sizes = [1 << e for e in range(SMALLEST_PART.bit_length() - 1, LARGEST_PART.bit_length())]
    sums = (c for n in range(1, MOST_PARTS + 1) for c in combinations_with_replacement(sizes[::-1], n) if sum(c) >= dim)
    return min(sums, key=lambda c: (sum(c), len(c)))


class Named(Protocol):
    """Any kernel's tile: a hashable value with a name."""

    @property
    def name(self) -> str: ...


_override: ContextVar[str | Named | None] = ContextVar("flashkernels_tile", default=None)


@contextmanager
def use_tile(strategy: str | None = None, *, tile: Named | None = None) -> Iterator[None]:
    """Within this scope, kernels take the given strategy, or exactly the given tile, instead of choosing their own.

    >>> with use_tile("standard"):
    ...     override()
    'standard'
    """
    if (strategy is None) == (tile is None):
        raise ValueError("use_tile takes either a strategy or a tile")
    if strategy is not None and strategy not in STRATEGIES:
        raise ValueError(f"strategy={strategy!r} is not one of {', '.join(STRATEGIES)}")
    token = _override.set(strategy or tile)
    try:
        yield
    finally:
        _override.reset(token)


def override() -> str | Named | None:
    """The strategy or tile that `use_tile` has put in force, or None."""
    return _override.get()
