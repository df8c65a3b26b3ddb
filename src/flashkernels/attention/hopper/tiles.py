"""Which tile the Hopper kernel takes for a problem, whether it packs query heads, and which tiles it cuts by keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

from flashkernels.attention.hopper.source import SHARED_LIMIT as SHARED_LIMIT, HopperTile, Variant
from flashkernels.attention.hopper.wide_tiles import wide_tile
from flashkernels.attention.problem import AttentionProblem
from flashkernels.tiling import TilingError

MOST_PARTS = 32  # of a tile; the last one reads what all the others left
KEYS_OF_A_PART = 1024  # at least: combining takes 2 to 3 µs (H200, 2026-11-15)
KEYS_SAVED = 512  # at least, that a block need not walk when tiles are cut (H200, 2026-11-16: 1365 gained 0 to 2 %)
CUT_TILES = 500  # counters that a launch has for the warpgroups of cut tiles
MOST_LATE = 12  # steps, two to a group: a wait counts 7 groups in flight, and one is of the other steps


@dataclass(frozen=True)
class Choice:
    """The variant to compile, and how its tiles (of clusters, where there are any) are spread over the machine."""

    variant: Variant
    whole: int  # tiles that one block makes; of a ragged batch at most so many
    cut: int = 0  # tiles that are cut along their keys,
    shares: int = 0  # and blocks that share them evenly

    @property
    def tiles(self) -> int:
        return self.whole + self.cut

    def sent(self, multiprocessors: int) -> int:
        """Columns of the outputs that the copy engine writes. What a block makes last it stores by itself, so there are
        none where it makes nothing before."""
        several = self.whole + self.shares > multiprocessors // self.variant.tile.cluster
        return min(64 * self.variant.out_chunks, self.variant.head_dim_v) if several else 0


def choose(problem: AttentionProblem, multiprocessors: int, forced: object = None) -> Choice:
    """The tile by head dimension; then, where there are few tiles, smaller ones and parts.

    `forced` is what `use_tile` asks for: a HopperTile, or "register" for one that keeps Q in registers.
    """
    if max(problem.head_dim, problem.head_dim_v) > 256:
        pack = packs(problem, HopperTile(1, 128))
        tile = wide_tile(problem, SHARED_LIMIT, forced, pack)
        return Choice(variant_of(problem, tile, pack), query_tiles(problem, tile, pack))
    right, band = problem.band[1], problem.band != (-1, -1)
    if isinstance(forced, HopperTile):
        tile = checked(forced, problem.dtype == "fp8")
    elif forced in (None, "exact", "register"):
        tile = measured(problem, multiprocessors, forced == "register")
    else:
        raise TilingError(f"use_tile asks for {getattr(forced, 'name', forced)}, which the Hopper kernel does not have")
    pack = packs(problem, tile)
    if not shares_loads(problem) or pack > 1:
        tile = replace(tile, cluster=1)
    if right >= 0 and too_short(tile):
        raise TilingError(f"{tile.name}: under a causal mask the ring of K would run dry, it has too few stages")
    variant = variant_of(problem, tile, pack)
    if variant.shared > SHARED_LIMIT:
        raise TilingError(f"{tile.name} at head_dim={problem.head_dim} takes {variant.shared} bytes of shared memory")
    whole, cut, shares = shared_out(problem, tile, pack, multiprocessors)
    # Which tiles are cut depends on all sizes, so dense attention without a band always can: no second program for it.
    return Choice(replace(variant, split=cut > 0 or not (band or problem.varlen)), whole, cut, shares)


def measured(problem: AttentionProblem, multiprocessors: int, register: bool = False) -> HopperTile:
    """The fastest tile of the head dimension, or where tiles are few, or rows would not fill it, a smaller one.
    `register`: with Q in registers."""
    dims = problem.head_dim, problem.head_dim_v
    right, band, fp8 = problem.band[1] >= 0, problem.band != (-1, -1), problem.dtype == "fp8"
    if fp8:
        tile = fp8_tile(max(dims))
        if tile.groups == 4 and (register or worse_filled(problem, 256, 192)):  # Q in registers would not fit
            tile = replace(tile, groups=3)
    else:
        tile = by_dimension(*dims, band or problem.varlen)
    if register:
        tile = replace(tile, q_in_registers=True)
    alone = replace(tile, cluster=1)
    # Beyond four rounds of tiles the last, unfilled one no longer matters (the scaling grid: H200, 2026-11-15).
    if query_tiles(problem, alone, 1) < 4 * multiprocessors:
        return fitted(alone, problem, multiprocessors)
    if fp8:
        return tile
    if takes_four(problem) and not register:
        return four_warpgroups(*dims, right)
    if tile.groups == 3 and worse_filled(problem, 192, 128):
        masked = by_dimension(*dims, True)  # it has 128 rows from 96 columns on
        if masked.groups == 2:
            return replace(masked, q_in_registers=masked.q_in_registers or register)
        return replace(alone, groups=2, block_n=128, stages=3, q_in_registers=True, q_stages=1, late=0)
    if right and not register and shares_loads(problem) and packs(problem, tile) == 1:
        tile = by_dimension(*dims, band, clusters=True)
    return alone if worse_filled(problem, 64 * tile.groups * tile.cluster, 64 * tile.groups) else tile


def checked(tile: HopperTile, fp8: bool) -> HopperTile:
    """A tile that somebody made; raises where the kernel cannot have it."""
    if not (1 <= tile.groups <= 4 and 16 <= tile.block_n <= 256 and tile.block_n % 16 == 0):
        raise TilingError(f"{tile.name}: a block has 1 to 4 warpgroups, and 16 to 256 keys in steps of 16")
    if fp8 and tile.block_n not in (32, 64, 128):
        raise TilingError(f"{tile.name}: FP8 takes 32 keys at a time and has a scale for each 128: 32, 64 or 128 keys")
    if not (tile.stages >= 2 and tile.q_stages in (1, 2) and tile.cluster in (1, 2)):
        raise TilingError(f"{tile.name}: needs at least 2 stages, 1 or 2 of Q, and clusters of 1 or 2")
    steps = tile.block_n // (32 if fp8 else 16)
    most = min(steps - 1, MOST_LATE)
    if not 0 <= tile.late <= most:
        raise TilingError(f"{tile.name}: of {steps} steps of P·V, 0 to {most} can have one set of P")
    if tile.pingpong and tile.groups == 1:
        raise TilingError(f"{tile.name}: one warpgroup has nobody to take turns with")
    return tile


# The fastest tile measured at each head dimension, without a band (full attention) and with one (H200, 2026-11-15, B=4,
# S=4096, bf16; about 800 tiles timed: docs/notes/hopper_forward.md). Neighbours are within 1 to 3 %; the wrong number
# of warpgroups costs 10 to 20 %. Those with late steps gave 1 to 6 % (2026-11-17), clusters at 88, 104, 112, 120 and
# 160 1 to 6 %; 256 has one for its neighbours 232 and 248, which it gave 15 and 7 %; seven late steps for five at 48
# 2 %; two stages for three at 112 with a band, which leave outputs room, 2 %, and at 104 below 2 to 3 % (2026-11-18).
_T = HopperTile
MEASURED = {
    32: (_T(3, 112, 4, pingpong=True), _T(3, 96, 4, pingpong=True, q_in_registers=True, wide_v=True)),
    40: (_T(3, 128, 3, pingpong=True, q_in_registers=True, wide_v=True, late=7),
         _T(3, 96, 3, pingpong=True, q_in_registers=True, wide_v=True)),
    48: (_T(3, 128, 3, pingpong=True, wide_v=True, late=7),
         _T(3, 96, 3, pingpong=True, q_in_registers=True, wide_v=True)),
    56: (_T(3, 128, 3, pingpong=True, wide_v=True, late=6), _T(3, 128, 3, pingpong=True, wide_v=True, late=6)),
    64: (_T(3, 128, 3, pingpong=True, late=7), _T(3, 96, 3, pingpong=True, q_stages=2)),
    72: (_T(3, 96, 4, pingpong=True, wide_v=True, cluster=2), _T(3, 96, 4, pingpong=True, wide_v=True)),
    80: (_T(3, 112, 3, pingpong=True, wide_v=True, late=5), _T(3, 96, 4, pingpong=True, wide_v=True, late=1)),
    88: (_T(3, 96, 3, pingpong=True, wide_v=True, late=2, cluster=2), _T(3, 96, 3, pingpong=True, wide_v=True, late=2)),
    96: (_T(3, 80, 3, pingpong=True, wide_v=True), _T(2, 128, 3, pingpong=True, q_in_registers=True)),
    104: (_T(3, 96, 3, pingpong=True, wide_v=True, wide_k=True, late=4, cluster=2),
          _T(3, 96, 3, pingpong=True, wide_v=True, wide_k=True, late=4)),
    112: (_T(3, 64, 4, pingpong=True, wide_v=True, wide_k=True, cluster=2),
          _T(2, 128, 2, pingpong=True, q_in_registers=True, wide_v=True, wide_k=True)),
    120: (_T(3, 64, 3, pingpong=True, wide_v=True, cluster=2), _T(2, 128, 3, pingpong=True, wide_v=True)),
    128: (_T(2, 128, 3, pingpong=True, cluster=2), _T(2, 128, 3, pingpong=True)),
    160: (_T(2, 128, 2, pingpong=True, cluster=2), _T(2, 128, 2, pingpong=True)),
    192: (_T(2, 64, 3, q_in_registers=True, cluster=2), _T(2, 64, 3, pingpong=True, q_in_registers=True)),
    224: (_T(2, 80, 2, pingpong=True, wide_v=True, cluster=2), _T(2, 64, 2, pingpong=True, wide_k=True)),
    256: (_T(2, 64, 2, pingpong=True, cluster=2), _T(2, 64, 2)),
}  # fmt: skip
# Four warpgroups, of 64 keys. A tile ends for all of its warpgroups at about the same time, which costs as much as
# three or four steps; of 64 keys fewer lie behind the diagonal than of 128. Over the tiles of MEASURED and
# CAUSAL_CLUSTERS (H200, 2026-11-19, 16384 rows in all) they gave, under a causal mask, 19 to 31 % with S=512 and 1024,
# 9 to 13 % with 2048, 5 to 8 % with 4096, -2 to 8 % with more; without one 19 to 36 % with 512 and 1024, which 192 rows
# do not fill, and else nothing, but for 32 columns: 9, 5 and 1 % with 2048, 4096 and 8192. Turns are worth -4 to 3 %.
FOUR = {
    32: _T(4, 64, 4, wide_v=True),
    40: _T(4, 64, 4, wide_v=True, late=2),
    48: _T(4, 64, 4, pingpong=True, wide_v=True, late=2),
    56: _T(4, 64, 4, pingpong=True, wide_v=True, late=2),
    64: _T(4, 64, 4, wide_v=True, late=3),
}
# Under a causal mask alone, in a dense batch of many tiles. The chip is at its power limit, and loads that two blocks
# share leave it 6 % more clock (D=128: 1530 MHz for 1440), of which their waits for each other take some. Gains: 64
# 4 %, 104 2 %, 120 2 to 8 %, 128 1 to 3 %, 160 and 192 1 %, 224 2 %, 256 none. At odd multiples of 8 over 128, whose
# rows start between two sectors, 1 to 18 % (H200, 2026-11-18; docs/notes/hopper_forward.md).
CAUSAL_CLUSTERS = {
    64: _T(3, 128, 4, pingpong=True, late=7, cluster=2),
    104: _T(2, 128, 2, pingpong=True, q_in_registers=True, wide_v=True, wide_k=True, late=1, cluster=2),
    120: _T(2, 128, 3, pingpong=True, q_in_registers=True, wide_v=True, late=2, cluster=2),
    128: _T(2, 128, 3, pingpong=True, cluster=2),
    160: _T(2, 128, 2, pingpong=True, cluster=2),
    192: _T(2, 64, 3, q_in_registers=True, cluster=2),
    224: _T(2, 80, 2, pingpong=True, wide_v=True, cluster=2),
    256: _T(2, 64, 2, pingpong=True, cluster=2),
}


def by_dimension(dim: int, dim_v: int, band: bool, *, clusters: bool = False) -> HopperTile:
    """The tile measured at this head dimension, or at the next larger one. `clusters`: of those in clusters under a
    causal mask, where there is one; multiples of 16 in between are better without."""
    wide = max(dim, dim_v)
    at = min(d for d in MEASURED if d >= wide)
    clusters = clusters and at in CAUSAL_CLUSTERS and (wide == at or wide % 16 == 8)
    tile = CAUSAL_CLUSTERS[at] if clusters else MEASURED[at][band]
    return tile if wide in MEASURED and dim == dim_v else replace(tile, wide_v=True)


def takes_four(problem: AttentionProblem) -> bool:
    """Whether narrow heads have four warpgroups: dense, without a left end, and where 256 rows fill the sequence."""
    wide = max(problem.head_dim, problem.head_dim_v)
    if wide > max(FOUR) or not shares_loads(problem) or packs(problem, FOUR[64]) > 1 or worse_filled(problem, 256, 128):
        return False
    return problem.band[1] >= 0 or wide <= 32 or worse_filled(problem, 192, 256)


def four_warpgroups(dim: int, dim_v: int, right: bool) -> HopperTile:
    tile = FOUR[min(d for d in FOUR if d >= max(dim, dim_v))]
    return tile if right else replace(tile, pingpong=True)  # without a mask no other was timed


def shares_loads(problem: AttentionProblem) -> bool:
    """Whether blocks may be in clusters: their tiles then have (nearly) the same keys to see."""
    return not problem.varlen and problem.band[0] < 0


def too_short(tile: HopperTile) -> bool:
    """Whether warpgroups of a causal block may have more key tiles to pass over than the ring has stages, and one."""
    return -(-(tile.groups * tile.cluster - 1) * 64 // tile.block_n) > tile.stages + 1


def fp8_tile(dim: int) -> HopperTile:
    """Key tiles divide 128, so that one has one scale; P takes half the registers of 16-bit types.

    The fastest of about 30 at D = 64 and 128, of 6 at D = 256 (H200, 2026-11-18, B=1, S=16384). At 128, three
    warpgroups with 64 keys gave 4 to 11 % over two with 128; at 64, 64 keys gave 3 to 5 % over 128 without a mask, and
    nothing with one. Four warpgroups there gave 4 and 5 % more, with S=4096 6 and 8 % (2026-11-19).
    """
    if dim <= 64:
        return HopperTile(4, 64, 4)
    if dim <= 128:
        return HopperTile(3, 64, 4, q_stages=2)
    return HopperTile(2, 128 if dim <= 192 else 64, 3)


def worse_filled(problem: AttentionProblem, rows: int, fewer: int) -> bool:
    """Whether tiles of so many rows fill a sequence worse than those of fewer.

    B=16, S=1024, D=64, 128 rows for 192: 413 to 443 TFLOPS full, 304 to 341 causal (H200, 2026-11-15).
    """
    of_many, of_few = (-(-problem.seq_q // n) * n for n in (rows, fewer))
    return not problem.varlen and of_many > 1.05 * of_few


# What a multiprocessor does with 1, 2 or 3 consumer warpgroups, of what it can do: one alone waits for its own results.
# (H200, 2026-11-15, D=64: the scaling grid with each.)
SHARE_BUSY = {1: 0.5, 2: 0.85, 3: 1.0, 4: 1.0}


def fitted(tile: HopperTile, problem: AttentionProblem, multiprocessors: int) -> HopperTile:
    """The tile with as many warpgroups as finish first: with few rows, smaller tiles keep more of the machine busy."""
    # registers become free
    fewer = replace(tile, block_n=128, stages=2, q_stages=1, late=0) if tile.groups > 2 else tile
    options = [tile, *(replace(fewer, groups=n, pingpong=n > 1) for n in range(min(tile.groups - 1, 2), 0, -1))]

    def rounds(option: HopperTile) -> float:
        pack = packs(problem, option)
        whole, cut, shares = shared_out(problem, option, pack, multiprocessors)
        waves = whole / multiprocessors if cut or whole > 8 * multiprocessors else -(-whole // multiprocessors)
        if cut:
            waves += cut / shares + KEYS_SAVED / problem.seq_k  # at most what combining takes
        return waves * option.groups / SHARE_BUSY[option.groups]

    return min(options, key=rounds)


def packs(problem: AttentionProblem, tile: HopperTile) -> int:
    """Query heads of one key head that share a block's rows: worth it where the rows would not be filled otherwise."""
    group = problem.heads // problem.kv_heads
    pack = max(n for n in range(1, 65) if group % n == 0)
    return pack if 1.1 * query_tiles(problem, tile, pack) <= query_tiles(problem, tile, 1) else 1


def query_tiles(problem: AttentionProblem, tile: HopperTile, pack: int) -> int:
    """Tiles of all sequences and heads; of a ragged batch at most as many."""
    rows = 64 // pack * tile.groups * tile.cluster
    heads = problem.heads // pack
    if problem.varlen:
        return (problem.total_q // rows + problem.batch) * heads
    return -(-problem.seq_q // rows) * problem.batch * heads


def shared_out(problem: AttentionProblem, tile: HopperTile, pack: int, multiprocessors: int) -> tuple[int, int, int]:
    """Tiles that stay whole, tiles that are cut along their keys, and the blocks that share these.

    Few tiles are all cut, so that they fill the machine; of many, those that are left behind the last full round.
    (With a band those are the lightest, and fill it well enough.)
    """
    tiles, blocks = query_tiles(problem, tile, pack), multiprocessors // tile.cluster
    cut, band = tiles % blocks, problem.band != (-1, -1)
    left, right = problem.band
    rows = 64 // pack * tile.groups
    seen = problem.seq_k if left < 0 else min(problem.seq_k, left + max(right, 0) + rows)
    shares = min(blocks, cut * min(seen // KEYS_OF_A_PART, MOST_PARTS))
    saved = (shares - cut) * seen  # of what a block walks, times `shares`
    if problem.varlen or (band and tiles > blocks) or cut * tile.cluster * tile.groups > CUT_TILES:
        return tiles, 0, 0
    return (tiles - cut, cut, shares) if shares > cut and saved >= KEYS_SAVED * shares else (tiles, 0, 0)


def variant_of(problem: AttentionProblem, tile: HopperTile, pack: int) -> Variant:
    left, right = problem.band
    return Variant(
        problem.head_dim, problem.head_dim_v, tile, fp16=problem.dtype == "fp16", fp8=problem.dtype == "fp8",
        left=left >= 0, right=right >= 0,
        softcap=problem.softcap, alibi=problem.alibi, sinks=problem.sinks, negative=not problem.positive_scale,
        varlen=problem.varlen, paged=problem.page_size > 0, pack=pack,
    )  # fmt: skip


def page_rows(block_n: int) -> int:
    """Keys that one load of a paged cache brings: they must lie in one page."""
    return gcd(block_n, 64)
