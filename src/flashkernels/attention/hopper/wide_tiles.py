"""Which tile the Hopper kernel of wide heads (256 < D <= 512) takes."""

from __future__ import annotations

from dataclasses import replace

from flashkernels.attention.hopper.source import HopperTile, Variant
from flashkernels.attention.hopper.wide_source import GRAIN
from flashkernels.attention.problem import AttentionProblem
from flashkernels.tiling import TilingError


def wide_tile(problem: AttentionProblem, limit: int, forced: object = None, pack: int = 1) -> HopperTile:
    """64 rows, and 128 keys at a time; two blocks share their loads unless one has all rows. `pack`: query heads that
    share a row block.

    The rings take all of the shared memory, `limit` bytes, that Q and P leave.
    """
    if isinstance(forced, HopperTile):
        return checked(forced, problem, limit)
    if forced not in (None, "exact"):
        raise TilingError(
            f"use_tile asks for {getattr(forced, 'name', forced)}, which the Hopper kernel of wide heads does not have"
        )
    tile = HopperTile(1, 128, cluster=2 if problem.seq_q > 64 // pack else 1)
    return filled(tile, problem.head_dim, problem.head_dim_v, limit)


def filled(tile: HopperTile, dim: int, dim_v: int, limit: int) -> HopperTile:
    """The tile with as many slots as there is room for."""
    none, one = (Variant(dim, dim_v, replace(tile, stages=n)).shared for n in (0, 1))
    return replace(tile, stages=(limit - none) // (one - none))


def checked(tile: HopperTile, problem: AttentionProblem, limit: int) -> HopperTile:
    """A tile that somebody made; raises where the kernel cannot have it."""
    if tile != HopperTile(1, 128, tile.stages, cluster=tile.cluster) or tile.cluster not in (1, 2):
        raise TilingError(f"{tile.name}: wide heads take 64 rows, 128 keys and clusters of 1 or 2")
    least, size = 4 // GRAIN + 1, Variant(problem.head_dim, problem.head_dim_v, tile).shared
    if tile.stages < least:
        raise TilingError(f"{tile.name}: needs at least {least} stages")
    if size > limit:
        raise TilingError(f"{tile.name} at head_dim={problem.head_dim} takes {size} bytes of shared memory")
    return tile
