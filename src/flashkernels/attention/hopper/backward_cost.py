"""What the Hopper backward is predicted to take: traffic before and after, products, what hides under none of them, and
the ends of tiles."""

from __future__ import annotations

from math import ceil

from flashkernels.attention.hopper import backward_wide_source as wide
from flashkernels.attention.hopper.backward_source import OWN_KEYS, OWN_QUERIES, BackwardVariant
from flashkernels.attention.hopper.backward_tiles import most_tiles
from flashkernels.attention.hopper.cost import CLOCK, EXPONENTIALS_A_CYCLE, FLOPS_A_CYCLE, LAUNCH
from flashkernels.attention.problem import AttentionProblem, BackwardProblem
from flashkernels.hardware import Gpu

# Fitted to an H200 (2026-11-16, B=4, S=4096: those candidates of docs/notes/hopper_backward.md that serve, and heads
# over 128 by the bench), least squares of the relative error. The 26 times are met within 6.1 %.
EXPOSED = 1.79  # exponentials' times that products do not hide: they and all else that is done with a score
ODD = 0.51  # more where rows are not aligned to 32 bytes
TILE = 8.2e-6  # seconds at the ends of a tile of keys
# of pairs of warpgroups, with the kernel that makes dQ
EXPOSED_PAIRED, TILE_PAIRED = 1.73, 21.6e-6
REACHED = 0.88  # of the datasheet's bandwidth, by the kernels before and after
# Of wide heads. Their forward takes so much longer than the traffic of its shared memory, which binds them, too: 349
# and 327 TFLOPS were predicted so at 512 columns, and 347 and 323 measured (docs/notes/hopper_backward_wide.md).
WIDE_STEP, SHARED_BYTES_A_CYCLE, TILE_WIDE = 1.14, 128, 5e-6


def seconds(problem: BackwardProblem, variant: BackwardVariant, gpu: Gpu) -> float:
    """Predicted time of all launches. A ragged batch is taken as sequences of one length: theirs are on the device."""
    call, tile = problem.call, variant.tile
    if tile.wide:
        return _wide_seconds(problem, variant, gpu)
    rows, key_rows = call.total_q * call.heads, call.total_k * call.kv_heads
    moved = rows * (4 * call.head_dim_v + 12)  # O, dO and their statistics
    moved += rows * 10 * call.head_dim if variant.adds_dq else 0  # sums set to 0, read, and dQ in 16 bits
    walks = [steps * call.heads // call.kv_heads for steps in query_blocks(call, variant)]
    mean = sum(walks) / len(walks)
    rounds = most_tiles(call, variant) * tile.cluster / gpu.sms
    if min(walks) == max(walks) or rounds < 1:  # unequal ones, heavy ones first, fill the last round
        rounds = ceil(rounds)
    deep, deep_v = (-(-dim // 16) * 16 for dim in (call.head_dim, call.head_dim_v))
    made = call.head_dim * (variant.want_k + variant.adds_dq) + call.head_dim_v * variant.want_v
    scores = tile.queries * tile.keys
    exposed = EXPOSED_PAIRED if tile.paired else EXPOSED + (ODD if call.head_dim % 16 else 0)
    main = rounds * (mean * _step(scores, deep + deep_v + made, exposed) + (TILE_PAIRED if tile.paired else TILE))
    if variant.want_q and variant.own_dq:
        seen = call.heads * call.pairs() / gpu.sms + OWN_QUERIES * OWN_KEYS
        main += _step(seen, deep + deep_v + call.head_dim, EXPOSED_PAIRED)
    least = 4 * key_rows * (call.head_dim + call.head_dim_v) + 2 * rows * (call.head_dim + call.head_dim_v)
    reached = REACHED * gpu.bandwidth
    return 4 * LAUNCH + moved / reached + max(main, least / reached)


def _wide_seconds(problem: BackwardProblem, variant: BackwardVariant, gpu: Gpu) -> float:
    """A kernel for each gradient. Its blocks take 64 rows each, as many at a time as there are multiprocessors."""
    call, size = problem.call, wide.ROWS * variant.tile.cluster
    heads, keys = call.total_q * call.heads, call.total_k * call.kv_heads
    total = 4 * LAUNCH + 4 * heads * call.head_dim_v / (REACHED * gpu.bandwidth)  # of O and dO
    for name in (name for name in wide.GRADIENTS if getattr(variant, f"want_{name}")):
        blocks = max(1.0, (heads if name == "q" else keys) / wide.ROWS)
        # pairs of a query and a key that its blocks look at: of each about half a step more at either end of a band
        ends = blocks * wide.ROWS * (size + wide.QUERIES) / 2 * sum(side >= 0 for side in call.band)
        seen = call.heads * call.pairs() + ends
        rounds = ceil(blocks / gpu.sms) if call.band == (-1, -1) or blocks < gpu.sms else blocks / gpu.sms
        steps = seen / blocks / (wide.ROWS * wide.QUERIES)
        cycles = WIDE_STEP * wide.step_bytes(variant, name) / SHARED_BYTES_A_CYCLE
        total += LAUNCH + rounds * (steps * cycles / CLOCK + TILE_WIDE)
    return total


def _step(scores: float, columns: int, exposed: float) -> float:
    """Seconds of a multiprocessor for so many scores, with so many columns in all products of each."""
    return (scores * 2 * columns / FLOPS_A_CYCLE + exposed * scores / EXPONENTIALS_A_CYCLE) / CLOCK


def query_blocks(call: AttentionProblem, variant: BackwardVariant) -> list[int]:
    """Blocks of queries that each tile of keys of one sequence and query head looks at: `queries_of` of the kernel.

    >>> from flashkernels.attention.hopper.backward_source import BackwardTile
    >>> call = AttentionProblem(batch=1, seq_q=256, seq_k=256, heads=1, kv_heads=1, head_dim=64, causal=True)
    >>> query_blocks(call, BackwardVariant(64, 64, BackwardTile()))
    [4, 2]
    """
    queries, keys, (left, right) = variant.tile.queries, variant.tile.keys, call.band
    sizes = (call.total_q, call.total_k) if call.varlen else (call.seq_q * call.batch, call.seq_k * call.batch)
    seq_q, seq_k = (max(1, size // max(1, call.batch)) for size in sizes)
    shift = seq_k - seq_q
    counts = []
    for key in range(0, seq_k, keys):
        last = min(key + keys, seq_k) - 1
        first = 0 if right < 0 else min(seq_q - 1, max(0, key - shift - right)) // 16 * 16
        end = seq_q if left < 0 else min(seq_q, last - shift + left + 1)
        counts.append(max(1, -(-(end - first) // queries)))
    return counts
