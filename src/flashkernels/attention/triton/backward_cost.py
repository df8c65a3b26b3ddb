"""What the Triton backward is predicted to take where dQ is added up in memory."""

from __future__ import annotations

from flashkernels.attention.problem import BackwardProblem
from flashkernels.attention.triton.backward_tiles import BackwardTiles
from flashkernels.hardware import Gpu

# Fitted to committed times of an H200 (2026-11-16, B=4, S=4096, head dimensions 48 to 256).
NARROW, WIDE = 0.2, 0.355  # cycles of a multiprocessor for a score, beside its products: to 64 columns, and over
APART = 0.0044  # the same a column, where dV has a pass of its own
CAUSAL = 1.1  # blocks on the diagonal count whole
LAUNCHES = 12e-6
REACHED = 0.88  # of the datasheet's bandwidth, by the kernels before and after
CLOCK = 1.755e9  # of an H200 under load


def seconds(problem: BackwardProblem, tiles: BackwardTiles, gpu: Gpu) -> float | None:
    """Predicted time; None where nothing like it was measured: two passes, more than a band, other GPUs than Hopper."""
    call, tile = problem.call, tiles.dkdv
    if tiles.dq or call.softcap or call.alibi or call.dropout_p or gpu.capability != (9, 0):
        return None
    columns = (4 if tiles.dv else 3) * sum(tile.parts) + 2 * sum(tile.parts_v)
    rows = call.total_q * call.heads
    moved = rows * (4 * call.head_dim_v + 10 * sum(tile.parts))
    scores = call.heads * call.pairs() * (CAUSAL if call.band != (-1, -1) else 1)
    products = 2 * scores * columns / gpu.peak[call.dtype]
    beside = APART * sum(tile.parts) if tiles.dv else NARROW if sum(tile.parts) <= 64 else WIDE
    return LAUNCHES + moved / (REACHED * gpu.bandwidth) + products + beside * scores / gpu.sms / CLOCK
