"""Which calls the Hopper decode takes, and how it cuts them."""

from __future__ import annotations

from flashkernels.decode.hopper.source import KINDS, MOST_SEQUENCES, ROW, DecodeVariant, HopperDecodeTile, stored_bytes
from flashkernels.decode.problem import DecodeProblem
from flashkernels.hardware import Gpu
from flashkernels.tiling import TilingError, override

SHARED_LIMIT = 232448  # bytes a block may have on sm_90
MOST_ROWS = 16  # query heads of a KV head


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


def variant_of(problem: DecodeProblem, k_slot: int, v_slot: int) -> DecodeVariant:
    """The variant to compile: with the tile that `use_tile` names, or by the rule below. Slots are strides in bytes."""
    forced = override()
    tiles = (forced,) if isinstance(forced, HopperDecodeTile) else candidates(problem)
    for tile in tiles:
        found = DecodeVariant(
            problem.head_dim, problem.head_dim_v, problem.group, problem.format, tile, k_slot, v_slot,
            q_fp16=problem.dtype == "fp16", scales=problem.scales, left=problem.window[0] >= 0, softcap=problem.softcap,
            alibi=problem.alibi,
        )  # fmt: skip
        if found.shared * tile.per_sm <= SHARED_LIMIT:
            return found
    raise TilingError(f"no tile fits head_dim={problem.head_dim}, {problem.head_dim_v}, {problem.format}")


def candidates(problem: DecodeProblem) -> tuple[HopperDecodeTile, ...]:
    """Best first, of those that were timed (H200, 2026-11-15, B=1 to 128, 4096 and 32768 keys, D=72 to 256).

    Many warps that each wait for their own step did better than few that load ahead: at D=128 in bf16 16 warps of one
    stage read 3.9 TB/s where 8 of three read 3.6 (B=64, 4096 keys). Small numbers take more keys a step.
    """
    key = stored_bytes(problem.format, problem.head_dim) + stored_bytes(problem.format, problem.head_dim_v)
    sizes: tuple[tuple[int, int, int], ...]  # warps, sixteens of keys, stages
    if key > 4 * ROW:
        sizes = ((6, 1, 2), (8, 1, 1), (4, 1, 1))
    elif key > 2 * ROW:
        sizes = ((16, 1, 1), (12, 1, 1), (8, 1, 1), (4, 1, 1))
    elif key > ROW:
        sizes = ((8, 4, 1), (8, 2, 1), (8, 1, 1), (4, 1, 1))
    else:
        sizes = ((16, 2, 1), (8, 2, 1), (8, 1, 1), (4, 1, 1))
    most = 8 if problem.group > 8 else 16  # warps whose registers hold 16 query rows
    return tuple(HopperDecodeTile(warps, 1, keys, stages) for warps, keys, stages in sizes if warps <= most)
