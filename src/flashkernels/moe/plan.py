"""The regrouped plan: which item goes where, when tokens are sorted by expert.

Token t with its j-th expert is *item* t * k + j. Items are sorted by expert; within an expert they keep their order.
The sorted rows of an expert are cut into tiles of `block` rows, which never cross into the next expert.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

MOST_EXPERTS = 1024
MOST_K = 16
MOST_ITEMS = 2**31 - 1  # places are int32
BLOCKS = (16, 32, 64, 128)  # rows of a tile


class Plan(NamedTuple):
    """Everything is int32 and on the device of the routing; nothing in it depends on the order of atomics.

    Items whose expert is outside of the plan's range, or whose token is not in use, are dropped: they have no place.
    """

    counts: Tensor  # (E,) items of each expert
    offsets: Tensor  # (E + 1,) place of each expert's first item; the last is the number of items that have a place
    permutation: Tensor  # (T * k,) the item at each place, and -1 past the last
    inverse: Tensor  # (T, k) the place of each item, and -1 for a dropped one
    tiles: Tensor  # (M,) expert + 1024 * (tile of that expert), and -1 past the last
    tile_offsets: Tensor  # (E + 1,) each expert's first tile; the last is the number of tiles
    block: int  # rows of a tile

    @property
    def experts(self) -> int:
        return self.counts.shape[0]

    @property
    def rows(self) -> int:
        """The most items there can be."""
        return self.permutation.shape[0]

    @property
    def k(self) -> int:
        return self.inverse.shape[1]


def plan_of(tensors: Iterable[Tensor], block: int) -> Plan:
    """A plan from its tensors, in the order of its fields."""
    counts, offsets, permutation, inverse, tiles, tile_offsets = tensors
    return Plan(counts, offsets, permutation, inverse, tiles, tile_offsets, block)


def most_tiles(rows: int, experts: int, block: int) -> int:
    """How many tiles any distribution of so many rows may need.

    >>> most_tiles(2, 8, 16), most_tiles(65536, 64, 128)
    (2, 575)
    """
    return (rows + min(rows, experts) * (block - 1)) // block


def block_rows(rows: int, experts: int) -> int:
    """Rows of a tile: twice an expert's average share, so that most experts need one tile and their weights are read
    once; 128 where there is enough for the tensor cores.

    >>> [block_rows(tokens * 2, 8) for tokens in (1, 16, 64, 256, 4096)]
    [16, 16, 32, 128, 128]
    """
    return next((block for block in BLOCKS if block >= 2 * rows / max(1, experts)), BLOCKS[-1])


def sizes(tokens: int, k: int, experts: int, block: int) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a plan."""
    return {
        "counts": (experts,), "offsets": (experts + 1,), "permutation": (tokens * k,), "inverse": (tokens, k),
        "tiles": (most_tiles(tokens * k, experts, block),), "tile_offsets": (experts + 1,),
    }  # fmt: skip


class Cutter:
    """Makes plans to be filled, with a table of `table` integers beside them. Unless its tensors must be `apart`, all
    is one allocation: views of it cost less than seven of them."""

    def __init__(self, tokens: int, k: int, experts: int, block: int, table: int = 0, apart: bool = False) -> None:
        self.block, self.apart = block, apart
        self.shapes = [*sizes(tokens, k, experts, block).values(), (table,)]
        self.cuts: list[tuple[tuple[int, ...], tuple[int, ...], int]] = []
        self.length = 0
        for shape in self.shapes:
            self.cuts.append((shape, (shape[1], 1) if len(shape) == 2 else (1,), self.length))
            self.length += -(-math.prod(shape) // 4) * 4  # 16 bytes apart, for vector accesses

    def __call__(self, like: Tensor) -> tuple[Plan, Tensor]:
        if self.apart:
            *parts, table = [like.new_empty(shape, dtype=torch.int32) for shape in self.shapes]
        else:
            whole = like.new_empty(self.length, dtype=torch.int32)
            *parts, table = [whole.as_strided(*cut) for cut in self.cuts]
        return plan_of(parts, self.block), table
