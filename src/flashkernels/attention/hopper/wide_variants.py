"""Variants of the kernel of wide heads that between them have every flag and size: what the gates compile."""

from __future__ import annotations

from collections.abc import Iterator

from flashkernels.attention.hopper.source import HopperTile, Variant
from flashkernels.attention.hopper.tiles import SHARED_LIMIT
from flashkernels.attention.hopper.variants import EVERYTHING, FLAGS
from flashkernels.attention.hopper.wide_tiles import filled

DIMS = tuple(range(264, 513, 8))
MIXED = ((512, 64), (64, 512), (16, 264), (264, 16), (320, 256), (256, 320), (512, 448), (272, 504), (128, 392))
PAIR, ALONE = HopperTile(1, 128, cluster=2), HopperTile(1, 128)


def wide_variant(dim: int, dim_v: int = 0, tile: HopperTile = PAIR, pack: int = 1, **flags: bool) -> Variant:
    """A variant with as many slots as there is room for."""
    return Variant(dim, dim_v or dim, filled(tile, dim, dim_v or dim, SHARED_LIMIT), pack=pack, **flags)


def _all() -> Iterator[Variant]:
    for dim in DIMS:
        yield wide_variant(dim, right=dim % 16 == 0)
    for dim, dim_v in MIXED:
        yield wide_variant(dim, dim_v, right=dim > dim_v)
    for dim in (320, 512):
        for flags in (*FLAGS, *EVERYTHING):
            yield wide_variant(dim, **flags)
        yield wide_variant(dim, right=dim == 320)
    for dim, dim_v in ((512, 512), (264, 264), (328, 512)):
        yield wide_variant(dim, dim_v, ALONE, right=dim > 264)
    for pack in (3, 4, 64):  # 3 leaves rows of nobody
        yield wide_variant(512, varlen=True, paged=True, right=True, pack=pack)
    yield wide_variant(320, 0, ALONE, pack=8)


WIDE = tuple(dict.fromkeys(_all()))
