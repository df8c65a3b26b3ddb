"""The predicted time of a row-wise op or a loss: its launches, what it moves at the memory's speed, and its products.

What it moves is not always the least that it could: softmax reads rows that do not fit the registers twice, and the
loss reads logits once more for their gradient. A copy of 65.7 MB in the same suite takes 21 µs and one of 268 MB 66, so
launches count beside it.

Fitted to the suite `rows` on an H200 (2026-11-15, commits 9262a8e, eca2290 and b467240 of benchmarks/results/h200/
fused-rows.json; 268 MB to 6.3 GB, cold L2). `REACHED` alone is fitted, least squares of the logarithm of predicted over
measured in 10 cases: nine are within 9 %, the backward pass of layer_norm is 16 % too low. The other two come from
elsewhere, and with them linear_cross_entropy is within 1 %. For another GPU bandwidth and peak scale it.

Of softmax one case was measured, and a copy of as many bytes was slow beside it, 2.7 TB/s where others reach 4.2: it
may be its size, 512 MiB from and to, that takes the time, and not the second read.

Sampling has no prediction. Its two cases have one size and take 2.5 times a copy: a constant for that would say nothing
of other sizes, and the greedy one was measured with kernels that are gone. Neither have linear layers, outputs in 8
bits, rows wider than registers hold but for softmax, and fewer rows than multiprocessors: none of them was measured.
"""

from __future__ import annotations

from typing import NamedTuple

from flashkernels.fused.linear import REACHED as CUBLAS
from flashkernels.fused.problem import BYTES, LossProblem
from flashkernels.fused.rows import RowProblem
from flashkernels.hardware import Gpu

REACHED = 0.85  # of the datasheet's bandwidth
LAUNCH = 3.5e-6  # seconds of each kernel, as moe/cost.py has it: these cases are too large to tell
WIDE = ("bf16", "fp16")  # what tensor cores multiply at the share that CUBLAS is


class Way(NamedTuple):
    """How an op is done."""

    kernels: int
    widest: int = 0  # elements of a row that are read once; 0: any
    again: float = 0  # of the least traffic, what wider rows add; 0: those were not measured


ROW, SUMMED = Way(1), 8192
# By the name that the problem has: of swiglu that is "silu" in a call, and "swiglu" in a case of the suite. The last
# kernels of a norm's backward pass add up the gradients of weight and bias.
WAYS = {
    "rms_norm": Way(1, 16384), "layer_norm": Way(1, 16384), "rope": ROW, "silu": ROW, "swiglu": ROW, "relu2": ROW,
    "gelu_tanh": ROW, "softmax": Way(1, 16384, 0.5), "log_softmax": Way(1, 16384, 0.5),
    "rms_norm_backward": Way(2, SUMMED), "layer_norm_backward": Way(3, SUMMED),
}  # fmt: skip


def seconds(problem: RowProblem | LossProblem, impl: str, gpu: Gpu) -> float | None:
    """On the GPU, with nothing in the L2; None where nothing like it was measured.

    >>> from flashkernels.hardware import lookup
    >>> problem = RowProblem("rms_norm", 16384, 4096, "bf16", "cuda", 2 * 16384 * 4096 * 2)
    >>> f"{1e6 * seconds(problem, 'triton', lookup('h200')):.1f} µs"  # measured: 64.8
    '69.3 µs'
    """
    if impl != "triton":
        return None
    return loss_seconds(problem, gpu) if isinstance(problem, LossProblem) else row_seconds(problem, gpu)


def row_seconds(problem: RowProblem, gpu: Gpu) -> float | None:
    """Of a row-wise op in Triton."""
    way = WAYS.get(problem.op)
    if way is None or problem.quantise or problem.rows < gpu.sms:
        return None
    wide = bool(way.widest) and problem.width > way.widest
    if wide and not way.again:
        return None
    moved = problem.bytes() * (1 + way.again if wide else 1)
    return way.kernels * LAUNCH + moved / (REACHED * gpu.bandwidth)


def loss_seconds(problem: LossProblem, gpu: Gpu) -> float | None:
    """Of a loss in Triton, without torch's sum over its rows; with its gradients where those are wanted: logits are
    read by the loss, read by their gradient, and written. Products, where there are any, are cuBLAS's."""
    if problem.tokens < gpu.sms or (problem.depth and problem.dtype not in WIDE):
        return None
    logits = problem.tokens * problem.vocab * BYTES[problem.dtype]
    kernels, passes = (2, 3) if problem.grads else (1, 1)
    time = kernels * LAUNCH + passes * logits / (REACHED * gpu.bandwidth)
    return time + problem.flops() / (CUBLAS * gpu.peak[problem.dtype]) if problem.depth else time
