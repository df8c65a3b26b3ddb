"""Which calls the Hopper decode takes, and how it cuts them."""

from __future__ import annotations

from dataclasses import replace

from flashkernels.decode.hopper.source import KINDS, MOST_SEQUENCES, ROW, DecodeVariant, HopperDecodeTile, stored_bytes
from flashkernels.decode.problem import DecodeProblem
from flashkernels.hardware import Gpu
from flashkernels.tiling import TilingError, override

SHARED_LIMIT = 232448  # bytes a block may have on sm_90
MOST_ROWS = 16  # query heads of a KV head

# Where rows of several heads are copied together (rows.cu): H200, 2026-11-15, 32 query heads over 8 KV heads. A border
# lies between two sizes that were measured; the figures are µs of decode.cu and of rows.cu.
LEAST_BATCH = 16  # B=1, 32768 keys 40.9 and 43.9: many parts for each unit
# By format, the bytes of a row and the least that a cache holds. bf16: 256 bytes are as fast by warps for themselves
# (1074 MB 253 and 258). FP8 and INT8: 136 MB 44.5 and 49.0, 545 MB 154 and 150. INT4: 75 MB 34.8 and 35.3, 302 MB 125
# and 106. Other rows were not measured.
TOGETHER: dict[str, tuple[range, float]] = {
    "bf16": (range(128, 256), 200e6), "fp16": (range(128, 256), 200e6), "fp8": (range(128, 129), 300e6),
    "int8": (range(128, 129), 300e6), "int4": (range(64, 65), 150e6),
}  # fmt: skip
MOST_TOGETHER_ROWS = 8  # query heads of a KV head: with 16 the 128 registers of 12 warps spill 152 bytes
MOST_GROUPS = 6  # of heads, for which blocks are divided: at most 2 of 132 have nothing to do


def rejects(problem: DecodeProblem, gpu: Gpu | None) -> str | None:
    """Why the Hopper decode cannot serve, or None."""
    if problem.device != "cuda" or gpu is None:
        return f"needs a Hopper GPU, the tensors are on {problem.device}"
    if gpu.capability != (9, 0):
        return f"needs compute capability 9.0, {gpu.name} has {gpu.capability[0]}.{gpu.capability[1]}"
    if problem.dtype not in ("fp16", "bf16") or problem.format not in KINDS:
        return f"has no kernel for {problem.dtype} queries over {problem.format} pages"
    if problem.ragged or problem.tokens != 1:
        return f"takes one query token a sequence, not {'ragged ones' if problem.ragged else problem.tokens}"
    if problem.tree:
        return "takes no tree mask"
    if problem.batch_invariant:
        return "balances keys over the whole batch: its sums are not batch invariant"
    if problem.shared:
        return "would read values that are columns of the keys twice"
    if problem.group > MOST_ROWS:
        return f"{problem.group} query heads of a KV head are over {MOST_ROWS}"
    if problem.kv_heads > MOST_SEQUENCES:
        return f"kv_heads={problem.kv_heads} is over {MOST_SEQUENCES}"
    if problem.batch > MOST_SEQUENCES:
        return f"batch={problem.batch} is over {MOST_SEQUENCES}"
    if problem.page_size % 16:
        return f"page_size={problem.page_size} is not a multiple of 16"
    for name, dim in (("head_dim", problem.head_dim), ("head_dim of v", problem.head_dim_v)):
        if not 16 <= dim <= 256:
            return f"{name}={dim} is not in 16 to 256"
        if stored_bytes(problem.format, dim) % 16:
            return f"{name}={dim} in {problem.format} is not a multiple of 16 bytes, which are copied at a time"
    grouped = problem.format == "int4" and problem.scales == "token"
    if grouped and (problem.head_dim != problem.head_dim_v or problem.head_dim not in (64, 128, 256)):
        return f"INT4 scales of head_dim={problem.head_dim}, {problem.head_dim_v} are not 4, 8 or 16 bytes a key"
    if problem.unaddressable:
        return f"cannot copy {problem.unaddressable}"
    return None


def variant_of(problem: DecodeProblem, k_slot: int, v_slot: int, *, together: bool = True) -> DecodeVariant:
    """The variant to compile: with the tile that `use_tile` names, or by the rule below.

    Slots are strides in bytes; `together`: the rows of all heads of a token lie side by side, and scales of a page.
    """
    forced = override()
    tiles = (forced,) if isinstance(forced, HopperDecodeTile) else candidates(problem)
    for tile in tiles:
        if tile.heads and (reason := unfit(problem, tile, together)):
            if tile is forced:
                raise TilingError(f"{tile.name} {reason}")
            continue
        found = DecodeVariant(
            problem.head_dim, problem.head_dim_v, problem.group, problem.format, tile, k_slot, v_slot,
            q_fp16=problem.dtype == "fp16", scales=problem.scales, left=problem.window[0] >= 0, softcap=problem.softcap,
            alibi=problem.alibi, scale_heads=problem.kv_heads if tile.heads and problem.scales == "token" else 0,
        )  # fmt: skip
        if found.shared * tile.per_sm <= SHARED_LIMIT:
            return found
    raise TilingError(f"no tile fits head_dim={problem.head_dim}, {problem.head_dim_v}, {problem.format}")


def unfit(problem: DecodeProblem, tile: HopperDecodeTile, together: bool) -> str | None:
    """Why the rows of `tile.heads` heads cannot be copied together, or None."""
    if tile.per_sm != 1:
        return f"has per_sm={tile.per_sm}: the workspace has room for one block an SM"
    if problem.kv_heads % tile.heads or tile.warps % tile.heads:
        return f"takes {tile.heads} heads at a time of kv_heads={problem.kv_heads}, with {tile.warps} warps: no divisor"
    if tile.stages % (tile.warps // tile.heads):
        return f"has {tile.warps // tile.heads} warps for each head: stages={tile.stages} is no multiple"
    if not together:
        return "copies rows of heads and scales together, which do not lie side by side"
    return None


def candidates(problem: DecodeProblem) -> tuple[HopperDecodeTile, ...]:
    """Best first, of those that were timed (H200, 2026-11-15, B=1 to 128, 4096 and 32768 keys, D=72 to 256)."""
    return alone(problem) if apart(problem) else (*side_by_side(problem), *alone(problem))


def forms(problem: DecodeProblem) -> tuple[DecodeProblem, DecodeProblem]:
    """The problem as the least and as the largest that its kernels may be asked for: each may have one of its own."""
    return replace(problem, batch=1), replace(problem, batch=MOST_SEQUENCES, context=1 << 24)


def apart(problem: DecodeProblem) -> str | None:
    """Why every warp copies for itself, 16 bytes a lane, or None: rows of several heads are copied together.

    What is read is counted with every sequence as long as its row of the table: lengths are on the device.
    """
    rows = [stored_bytes(problem.format, dim) for dim in (problem.head_dim, problem.head_dim_v)]
    heads, read = side_by_side(problem)[0].heads, problem.cache_bytes()
    wanted, least = TOGETHER[problem.format]
    if problem.batch < LEAST_BATCH:
        return f"batch={problem.batch} is less than {LEAST_BATCH}"
    if problem.group > MOST_TOGETHER_ROWS:
        return f"{problem.group} query heads of a KV head are over {MOST_TOGETHER_ROWS}"
    if not all(row in wanted for row in rows):
        return f"rows of {rows[0]} and {rows[1]} bytes in {problem.format} are as fast alone, or were not measured"
    if problem.kv_heads % heads:
        return f"kv_heads={problem.kv_heads} is no multiple of {heads}, of which a copy has the rows"
    if problem.kv_heads // heads > MOST_GROUPS:
        return f"kv_heads={problem.kv_heads} are over {MOST_GROUPS} groups of {heads}"
    if read < least:
        return f"a full cache is {read / 1e6:.4g} MB, less than {least / 1e6:.4g}"
    return None


def side_by_side(problem: DecodeProblem) -> tuple[HopperDecodeTile, ...]:
    """For copies of several heads.

    A copy takes an SM about 15 ns whatever its bytes: of less than 490 they would be slower than memory.
    """
    of_four = tuple(HopperDecodeTile(12, 1, keys, stages, 4) for keys, stages in ((2, 3), (1, 6), (1, 3)))
    if problem.format == "int4":
        return (HopperDecodeTile(8, 1, 2, 5, 8),)
    if problem.format in ("bf16", "fp16") or problem.kv_heads % 8:
        return of_four
    return (HopperDecodeTile(8, 1, 2, 3, 8), *of_four)


def alone(problem: DecodeProblem) -> tuple[HopperDecodeTile, ...]:
    """For warps that copy for themselves.

    Warps that each wait for their own step did better than few that load ahead: at D=128 in bf16 8 warps of 32 keys
    read 4.25 TB/s where 8 of three stages of 16 read 4.08 (B=64, 4096 keys; one sequence of 32768: 3.35 and 3.18).
    Small numbers take more keys a step.
    """
    key = stored_bytes(problem.format, problem.head_dim) + stored_bytes(problem.format, problem.head_dim_v)
    sizes: tuple[tuple[int, int, int], ...]  # warps, sixteens of keys, stages
    if key > 4 * ROW:
        sizes = ((6, 1, 2), (8, 1, 1), (4, 1, 1))
    elif key > 2 * ROW:
        sizes = ((8, 2, 1), (16, 1, 1), (8, 1, 1), (4, 1, 1))
    elif key > ROW:
        sizes = ((8, 4, 1), (8, 2, 1), (8, 1, 1), (4, 1, 1))
    else:
        sizes = ((16, 2, 1), (8, 2, 1), (8, 1, 1), (4, 1, 1))
    most = 8 if problem.group > 8 else 16  # warps whose registers hold 16 query rows
    return tuple(HopperDecodeTile(warps, 1, keys, stages) for warps, keys, stages in sizes if warps <= most)
