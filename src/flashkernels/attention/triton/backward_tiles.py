"""Tiles of the Triton backward, by a rule: the first shape of a list that is meant for the head dimension and fits.

The lists come from what the compiler says (registers and spills in the loops) and, of the pass that adds, from timings
on an H200: `docs/notes/triton_backward.md`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache
from typing import NamedTuple

from flashkernels.attention.problem import AttentionProblem, BackwardProblem
from flashkernels.attention.triton.tiles import parts_of
from flashkernels.hardware import Gpu
from flashkernels.tiling import Tile, TilingError
from flashkernels.tiling.tile import LARGEST_PART, SMALLEST_PART

SCRATCH = 3072  # bytes of shared memory for barriers, reductions, row statistics and changes of layout


class Rule(NamedTuple):
    """A shape for computed head dimensions (the mean of those of Q and V) up to `width`."""

    width: int
    block_m: int
    block_n: int
    warps: int
    late: bool = False
    lean: bool = False  # only where `is_lean`
    full: bool = False  # only where every row sees every key
    turned: bool = False


class BackwardTiles(NamedTuple):
    """One tile for each pass over the scores."""

    dkdv: Tile  # one block of keys, all query rows that see it
    dq: Tile | None  # one block of query rows, all keys that it sees; None: the other pass adds up dQ in memory
    dmask: Tile | None = None  # one block of a mask, all heads that share it; None: nobody wants the mask's gradient
    dv: Tile | None = None  # as `dkdv`, which then makes no dV; None: it does

    def unpipelined(self) -> BackwardTiles:
        """Where some operands of a loop are copied asynchronously and some are not, Triton 3.6 lets a wgmma read what
        is already being overwritten (seen at head_dim=16 with head_dim_v=40): one stage waits for each product."""
        others = (tile and replace(tile, stages=1) for tile in self[1:])
        return BackwardTiles(replace(self.dkdv, stages=1), *others)


# dK and dV are two accumulators of block_n rows, so registers run out early. wgmma takes K and V from shared memory,
# mma.sync from registers: there the blocks are smaller.
DKDV_WGMMA = (Rule(64, 64, 128, 8), Rule(128, 32, 128, 8), Rule(256, 32, 64, 8), Rule(512, 16, 32, 8))
DKDV_MMA = (
    Rule(64, 64, 128, 8), Rule(96, 32, 128, 8), Rule(128, 64, 64, 8), Rule(256, 16, 64, 8), Rule(512, 16, 32, 8),
)  # fmt: skip
DQ_WGMMA = (Rule(128, 128, 64, 8), Rule(256, 64, 64, 8), Rule(256, 64, 32, 8), Rule(512, 32, 32, 8))
DQ_MMA = (Rule(128, 128, 64, 8), Rule(128, 64, 32, 4), Rule(256, 64, 32, 8), Rule(512, 32, 32, 8))
# IEEE fp32 runs on the plain FMA units.
DKDV_FP32 = (Rule(64, 32, 32, 8), Rule(128, 16, 32, 8))
DQ_FP32 = (Rule(64, 32, 32, 8), Rule(128, 32, 16, 8))
# dQ is made of 64 rows at least. Two programs of 64 keys on a multiprocessor beat one of 128, where registers allow
# two (H200, 2026-11-15, D=64: 405 TFLOPS against 344; D=128: 272 against 419). Over 64 dQ of a block can stay in them
# until the next one only without a mask: that is 6 % faster at 72 and 5 % at 80; under a causal mask 29 registers of a
# block spill. At 96 they allow two programs where P is all that a block has (H200, 2026-11-16, 64 keys against 128: 399
# TFLOPS against 347; under a causal mask 345 against 320, with the interior first, and 336 with it last).
ROOMY = 80  # columns to which few registers spill with 64 keys, whichever loop comes first
ADDING = (
    Rule(64, 64, 64, 4, late=True), Rule(ROOMY, 64, 64, 4, late=True, lean=True, full=True), Rule(ROOMY, 64, 64, 4),
    Rule(96, 64, 64, 4, lean=True), Rule(128, 64, 128, 8),
)  # fmt: skip
# Over 128 columns dK, dV and dQ leave registers for 64 keys only, which two warpgroups then share. dV by a pass of its
# own computes the scores once more: six products, where a pass for dQ makes them seven. H200, 2026-11-16, TFLOPS: D=160
# 302, one pass of 64 keys 224, a pass for dQ 141; D=192 328 and 242. Over 192 columns 128 keys leave room for 32 rows,
# of which wgmma makes dQ on its side: D=256 325, 64 keys 226; D=192 297.
DK = (Rule(192, 64, 128, 8), Rule(256, 32, 128, 8, turned=True), Rule(256, 64, 64, 8))
DV = (Rule(256, 64, 128, 8),)
# Both operands of both products come in anew in every step; the block of the mask and its gradient stay in registers.
DMASK_WGMMA = (Rule(64, 128, 64, 8), Rule(128, 64, 64, 8), Rule(512, 64, 32, 8))
DMASK_MMA = (Rule(128, 64, 32, 8), Rule(512, 32, 32, 8))
DMASK_FP32 = (Rule(128, 32, 32, 8),)
SMALLEST = (Rule(512, 16, 16, 8),)
MASKED = 32 * 64  # most scores of a block under a mask tensor, whose addresses and values take registers


@lru_cache(maxsize=1024)
def choose(problem: BackwardProblem, gpu: Gpu, by_tma: bool = True) -> BackwardTiles:
    """The tiles of both passes, or of the one that makes all gradients; it wants TMA to read Q and dO."""
    by = in_one_pass if by_tma and adds_dq(problem, gpu) else in_two_passes
    tiles = by(problem.call, gpu)
    return tiles._replace(dmask=for_a_mask(problem.call, gpu)) if "mask" in problem.wanted else tiles


def adds_dq(problem: BackwardProblem, gpu: Gpu) -> bool:
    """Whether the pass over keys adds up dQ in memory: five products instead of seven, in an order that varies.

    Not where dQ is wanted alone, or with the gradient of the slopes, which needs the sums of whole rows; fp32 needs
    their sums first. A block of queries has at least the 64 rows of a wgmma: beside dK and dV there are registers for
    that up to 256 columns, and under a mask tensor for none. Additions of four numbers at a time come with wgmma.
    """
    call, wanted = problem.call, problem.wanted
    if problem.deterministic or "q" not in wanted or not {"k", "v"} & {*wanted} or "alibi_slopes" in wanted:
        return False
    fits = call.element_bytes == 2 and not call.mask and max(call.head_dim, call.head_dim_v) <= DK[-1].width
    return is_even(call) and gpu.has_wgmma and fits


def is_even(call: AttentionProblem) -> bool:
    """Whether rows of all operands of the loop lie alike. One pass was wrong where they do not (H200, Triton 3.6.0,
    2026-11-15: NaN in dQ of a ragged batch, whose dO is cleaned on the way; dK at 16 and 40 columns): see
    `BackwardTiles.unpipelined`. Nor have three stages of two passes run there."""
    return not call.varlen and call.head_dim == call.head_dim_v


def is_lean(call: AttentionProblem) -> bool:
    """Whether dS is packed (`backward_keys`), and nothing else takes registers."""
    return call.dtype == "bf16" and not (call.softcap or call.alibi or call.dropout_p)


def in_one_pass(problem: AttentionProblem, gpu: Gpu) -> BackwardTiles:
    """All gradients by a pass over the keys, dV over 128 columns by another."""
    if max(problem.head_dim, problem.head_dim_v) <= ADDING[-1].width:
        return BackwardTiles(_first("adding", ADDING, problem, gpu), None)
    # the generator takes registers too, and tanh more than dQ on its side leaves
    rules = DK[-1:] if problem.dropout_p else (DK[0], DK[-1]) if problem.softcap else DK
    dk, dv = (_first(name, by, problem, gpu, smallest=()) for name, by in (("dk", rules), ("dv", DV)))
    return BackwardTiles(dk, None, dv=dv)


def in_two_passes(problem: AttentionProblem, gpu: Gpu) -> BackwardTiles:
    """dK and dV by one pass, dQ by another: each gradient is summed by one program."""
    if problem.element_bytes > 2:
        dkdv, dq = DKDV_FP32, DQ_FP32
    else:
        dkdv, dq = (DKDV_WGMMA, DQ_WGMMA) if gpu.has_wgmma else (DKDV_MMA, DQ_MMA)
        if problem.dropout_p and not gpu.has_wgmma:
            dkdv = dkdv[1:]  # the generator takes registers too
    return BackwardTiles(_first("dkdv", dkdv, problem, gpu), _first("dq", dq, problem, gpu))


def for_a_mask(problem: AttentionProblem, gpu: Gpu) -> Tile:
    """Of the pass that makes the gradient of a mask, where heads share it. Its traffic is that of the blocks' sides, so
    a stage less is better than the smallest block."""
    rules = DMASK_FP32 if problem.element_bytes > 2 else DMASK_WGMMA if gpu.has_wgmma else DMASK_MMA
    try:
        return _first("dmask", rules, problem, gpu, smallest=())
    except TilingError:
        return _first("dmask", (), problem, gpu)


def _first(
    name: str, rules: tuple[Rule, ...], problem: AttentionProblem, gpu: Gpu, smallest: tuple[Rule, ...] = SMALLEST
) -> Tile:
    adding = name in ("adding", "dk", "dv")
    if problem.element_bytes == 2:
        # Two warpgroups halve 16 columns of 64 rows, and Triton 3.6 gives a wgmma of 8 columns wrong addresses. One
        # warpgroup does not; below 64 columns fewer products are worth more than narrow ones.
        whole = adding and 64 < max(problem.head_dim, problem.head_dim_v) <= 80
        least = 2 * SMALLEST_PART if gpu.has_wgmma and not whole else SMALLEST_PART
        parts, parts_v = in_two(problem.head_dim, least), in_two(problem.head_dim_v, least)
    else:
        parts, parts_v = parts_of("exact", problem)
    mean = (sum(parts) + sum(parts_v)) // 2
    # on Hopper a load that is two blocks ahead gave 20 to 24 % at 64 and 128 (H200, 2026-11-15)
    stages = (3, 2, 1) if adding or (gpu.has_wgmma and mean <= 128 and is_even(problem)) else (2, 1)
    candidates = [(rule, n) for n in stages for rule in rules + smallest]
    if name == "dk":  # more keys before more stages: 64 would be shared, see DK
        candidates.sort(key=lambda one: rules.index(one[0]))
    for (width, block_m, block_n, warps, late, lean, full, turned), n in candidates:
        if mean > width or (lean and not is_lean(problem)) or (full and problem.band != (-1, -1)):
            continue
        if problem.mask and name != "dmask" and block_m * block_n > MASKED:
            continue
        # dQ on its side is made of one part after the other, as is the copy of K
        split = (128, 128) if turned and parts == (256,) else parts
        tile = Tile("exact", block_m, block_n, split, parts_v, warps, n, tma=adding, late=late, turned=turned)
        if shared_bytes(name, tile, problem) <= gpu.shared_per_block:
            return tile
    dims = f"head_dim={problem.head_dim}, head_dim_v={problem.head_dim_v}"
    raise TilingError(f"no backward tile fits {dims}, {problem.dtype} on {gpu.name}")


@cache
def in_two(dim: int, least: int = SMALLEST_PART) -> tuple[int, ...]:
    """The sum of at most two powers of two, none below `least`, that covers `dim` with the least padding.

    Three parts spill, everywhere; so does a second part of less than a quarter of the first.

    >>> [in_two(dim) for dim in (8, 72, 112, 144, 176, 208, 272, 512)]
    [(16,), (64, 16), (128,), (128, 32), (128, 64), (256,), (256, 64), (256, 256)]
    """
    sizes = [1 << e for e in range(least.bit_length() - 1, LARGEST_PART.bit_length())]
    sums = [(a,) for a in sizes] + [(a, b) for a in sizes for b in sizes if a >= b >= a // 4]
    return min((parts for parts in sums if sum(parts) >= dim), key=lambda parts: (sum(parts), len(parts)))


def shared_bytes(name: str, tile: Tile, problem: AttentionProblem) -> int:
    """Both operands of the block itself once, those of the loop in every stage; a mask has its tile there too. The pass
    for a mask's gradient has all four in the loop, and its mask once.

    A single stage has no room to spare for the copy without NaN and Inf. The pass that adds has dS, and where something
    is hidden two stages of dO, one of Q, and K again, as it comes and without NaN and Inf; where it makes no dV, one
    stage of dO and one copy of K.
    """
    width, width_v = sum(tile.parts), sum(tile.parts_v)
    if name == "dmask":
        operands = tile.stages * (tile.block_m + tile.block_n) * (width + width_v)
        return operands * problem.element_bytes + 4 * tile.block_m * tile.block_n + SCRATCH
    own, walked = (tile.block_m, tile.block_n) if name == "dq" else (tile.block_n, tile.block_m)
    copy = walked * width if tile.stages == 1 else 0
    loop = tile.stages * walked * (width + width_v) + copy
    if name in ("adding", "dk"):
        hiding = 2 if name == "adding" else 1
        again = max(tile.parts) if tile.turned else width
        loop = max(loop, walked * (width + hiding * width_v) + hiding * own * again) + tile.block_m * tile.block_n
    operands = own * (width if name == "dv" else width + width_v) + loop
    mask = {None: 0, "bool": 1, "float": 4}[problem.mask] * tile.stages + 4 * (problem.mask is not None)
    return operands * problem.element_bytes + mask * tile.block_m * tile.block_n + SCRATCH
