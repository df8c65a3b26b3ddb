"""A fixed list of variants that between them have every flag, size and layout of the kernel: what the gates compile."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from flashkernels.attention.hopper.source import HopperTile, Variant
from flashkernels.attention.hopper.tiles import FOUR, by_dimension, four_warpgroups, fp8_tile

DIMS = tuple(range(16, 257, 8))
MIXED = ((192, 128), (128, 192), (64, 256), (256, 64), (16, 256), (256, 16), (72, 104), (40, 136), (136, 40))
FLAGS: tuple[dict[str, Any], ...] = (
    {"left": True}, {"left": True, "right": True}, {"softcap": True}, {"alibi": True}, {"sinks": True},
    {"negative": True}, {"varlen": True}, {"varlen": True, "paged": True}, {"fp16": True},
    {"right": True, "fp16": True}, {"right": True, "softcap": True}, {"right": True, "varlen": True},
    {"right": True, "varlen": True, "paged": True},
    {"left": True, "softcap": True, "sinks": True}, {"alibi": True, "negative": True, "fp16": True},
)  # fmt: skip
LOGITS: dict[str, Any] = dict.fromkeys(("left", "right", "softcap", "alibi", "sinks", "negative"), True)
EVERYTHING = (LOGITS, LOGITS | {"fp16": True}, LOGITS | {"varlen": True}, LOGITS | {"varlen": True, "paged": True})
PACKS = (3, 4, 7, 8, 64)


def variant(dim: int, dim_v: int = 0, tile: HopperTile | None = None, pack: int = 1, **flags: bool) -> Variant:
    """A variant with, unless another is given, the tile that problems of many rows take."""
    band, alone = any(flags.get(name) for name in ("left", "right", "varlen")), pack > 1
    alone |= any(flags.get(name) for name in ("left", "varlen", "split"))
    if flags.get("fp8"):
        chosen = tile or fp8_tile(max(dim, dim_v))
    elif tile is None and flags.get("right") and not alone and max(dim, dim_v) <= max(FOUR):
        chosen = four_warpgroups(dim, dim_v or dim, True)
    else:
        chosen = tile or by_dimension(dim, dim_v or dim, band, clusters=band and not alone)
    if alone:
        chosen = replace(chosen, cluster=1)
    flags.setdefault("split", not band)  # as `tiles.choose` has it
    return Variant(dim, dim_v or dim, chosen, pack=pack, **flags)


def label(one: Variant) -> str:
    """A short name: sizes, tile and flags.

    >>> label(variant(72, 104, right=True, pack=4))
    'd72-v104-192x96-s3-pingpong-wide_v-wide_k-late4-right-pack4'
    """
    flags = ("fp16", "fp8", "left", "right", "softcap", "alibi", "sinks", "negative", "varlen", "paged", "split")
    dims = [f"d{one.head_dim}"] + [f"v{one.head_dim_v}"] * (one.head_dim_v != one.head_dim)
    packed = [f"pack{one.pack}"] * (one.pack > 1)
    return "-".join([*dims, one.tile.name, *(flag for flag in flags if getattr(one, flag)), *packed])


def _all() -> Iterator[Variant]:
    for dim in DIMS:
        yield variant(dim)
        yield variant(dim, right=True)
    for dim, dim_v in MIXED:
        yield variant(dim, dim_v, right=dim > dim_v)
    for dim in (32, 48, 64):  # four warpgroups without a mask, where 256 rows fill the sequences
        yield variant(dim, tile=four_warpgroups(dim, dim, False))
    for flags in FLAGS:
        yield variant(64, **flags)
    for flags in (*EVERYTHING, {"varlen": True, "paged": True}, {"left": True}, {"softcap": True}):
        yield variant(128, **flags)
    for dim in (72, 256):
        yield variant(dim, **EVERYTHING[-1])
    # chunks of V that fit exactly where the fastest tile takes wider ones, and the other way round for K
    for dim in range(16, 257, 32):
        yield variant(dim, tile=replace(by_dimension(dim, dim, True), wide_v=False))
    for dim in (16, 72, 96):
        yield variant(dim, tile=HopperTile(2, 96, wide_k=True, wide_v=True))
    # few rows: fewer warpgroups, packed heads, keys in parts
    for dim in (64, 72, 128, 192, 256):
        one = replace(by_dimension(dim, dim, True), groups=1, pingpong=False)
        yield variant(dim, tile=one)
        yield variant(dim, tile=one, right=True, pack=PACKS[dim % 5])
    two = replace(by_dimension(64, 64, True), groups=2)
    yield variant(64, tile=two, right=True, split=True)
    yield variant(64, tile=replace(two, groups=3), left=True, split=True, sinks=True)
    yield variant(64, tile=replace(two, groups=1, pingpong=False), pack=8)
    yield variant(64, tile=replace(two, groups=1, pingpong=False), varlen=True, paged=True, right=True, pack=4)
    yield variant(128, tile=HopperTile(1, 128, wide_v=True), split=True, pack=8, **LOGITS)
    for pack in PACKS:
        yield variant(64, right=True, pack=pack)
    yield variant(224, varlen=True, pack=7)
    yield from _fp8()
    # the knobs of a tile
    for tile in (
        HopperTile(2, 128, q_in_registers=True), HopperTile(2, 64, cluster=2), HopperTile(2, 176, pingpong=True),
        HopperTile(3, 64, q_stages=2, pingpong=True),
    ):  # fmt: skip
        yield variant(64, tile=tile, right=tile.cluster == 1)
    yield variant(128, tile=HopperTile(2, 176, late=8), **LOGITS)


def _fp8() -> Iterator[Variant]:
    for dim in (16, 64, 96, 128, 192, 256):
        yield variant(dim, fp8=True, right=dim in (64, 192))
    yield variant(128, fp8=True, left=True, sinks=True)
    yield variant(128, fp8=True, right=True, softcap=True)
    yield variant(128, fp8=True, alibi=True)
    yield variant(192, 128, fp8=True, right=True)
    yield variant(64, fp8=True, right=True, pack=4)
    yield variant(64, tile=HopperTile(2, 32, q_in_registers=True), fp8=True)
    yield variant(128, tile=HopperTile(1, 128), fp8=True, pack=8)
    yield variant(128, tile=HopperTile(2, 128, 3, late=3), fp8=True, right=True)
    yield variant(128, tile=HopperTile(1, 64, 3), fp8=True, split=True, **LOGITS)


VARIANTS = tuple(dict.fromkeys(_all()))
