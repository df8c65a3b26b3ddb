"""The predicted time of a call over a cache: what every call costs, and beside it the traffic or the work on the keys.

Fitted to the suite `formats` on an H200 (2026-11-15, commit 9262a8e): one query of a sequence, heads of up to 256
columns, those of quantised caches of 128. For another GPU the bandwidth and the number of multiprocessors scale it.
"""

from __future__ import annotations

from flashkernels.decode.problem import DecodeProblem
from flashkernels.hardware import Gpu

ENDS = {"hopper": 8e-6, "triton": 16e-6}  # seconds: schedule, first loads, combination of the pieces
REACHED = {"hopper": 0.92, "triton": 0.61}  # of the datasheet's bandwidth
BITS = {"bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "int4": 4}
# Seconds that a multiprocessor takes for one key of one head, by the bits of its numbers: products, and widening them.
KEY = {
    "hopper": {16: 8.9e-9, 8: 8.6e-9, 4: 5.9e-9},
    "triton": {16: 23.0e-9, 8: 18.5e-9, 4: 19.1e-9},
}
MOST_ROWS = 16  # query rows of a KV head: one product takes as many for the time of the 4 that were measured
MOST_COLUMNS = 256  # of a head: no more were measured


def seconds(problem: DecodeProblem, impl: str, gpu: Gpu) -> float | None:
    """None where nothing like it was measured."""
    if impl not in ENDS or problem.format not in BITS or problem.ragged:
        return None
    if problem.tokens * problem.group > MOST_ROWS or max(problem.head_dim, problem.head_dim_v) > MOST_COLUMNS:
        return None
    memory = problem.bytes() / (REACHED[impl] * gpu.bandwidth)
    work = problem.keys() * problem.kv_heads * KEY[impl][BITS[problem.format]] / gpu.sms
    return ENDS[impl] + max(memory, work)
