"""Warming up a process: what a list of calls needs is compiled and loaded before the first of them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from flashkernels import hardware
from flashkernels.aot.build import require_compiler
from flashkernels.aot.wanted import parse, wanted
from flashkernels.aot.work import Work, preload, programs
from flashkernels.jit import strict


@dataclass(frozen=True)
class Warmed:
    """What `warmup` did: kernels that the calls need, how many of them it had to compile, and for how long it ran."""

    kernels: int
    compiled: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.kernels} kernels, {self.compiled} compiled, {self.seconds:.2f} s"


def warmup(*work: Work | str, device: int | str | torch.device | None = None, **sizes: Any) -> Warmed:
    """Compiles and loads what these calls need, so that none of them waits for a compiler.

    Args:
        work: problems (`AttentionProblem`, `BackwardProblem`, `DecodeProblem`, or `Rows`, `Rotation`, `Appending`,
            `Sampling`, `Accepting`, `Loss`, `Projection`, `Experts` of aot.work), or names of ops: attention,
            attention_backward, attention_varlen, attention_paged, decode, append, rope, rms_norm, layer_norm, swiglu,
            geglu, relu2_glu, gelu, softmax, log_softmax, linear, norm_linear, sample, speculative_accept,
            cross_entropy, linear_cross_entropy, moe.
        device: the CUDA device; default: the current one.
        sizes: of the ops that were named, fields of `aot.wanted.Sizes`: head_dims, heads, kv_heads, dtypes, batches,
            seqs, causal, window, widths, page_sizes, hidden, inner, activations, drafts, experts, tokens, ...

    Returns:
        A `Warmed`. What is compiled goes into FLASHKERNELS_CACHE, so the next process only loads it. In strict mode
        this may still compile. Without a CUDA device there is nothing to compile, and nothing happens.

    >>> import flashkernels as fk
    >>> from flashkernels.attention.problem import AttentionProblem
    >>> call = AttentionProblem(batch=1, seq_q=1, seq_k=4096, heads=32, kv_heads=8, head_dim=128, causal=True)
    >>> done = fk.warmup(call, "rms_norm", widths=[4096])
    >>> done.compiled <= done.kernels
    True
    """
    start = time.perf_counter()
    calls: list[Work] = []
    for one in work:
        if not isinstance(one, (str, Work)):
            raise TypeError(f"work={one!r} must be a problem or the name of an op, got {type(one).__name__}")
        calls += wanted([one], parse(**sizes)) if isinstance(one, str) else [one]
    if sizes and not any(isinstance(one, str) for one in work):
        raise TypeError(f"sizes={sorted(sizes)} go with names of ops; none was given")
    if not torch.cuda.is_available():
        return Warmed(0, 0, time.perf_counter() - start)
    require_compiler()
    where = torch.device("cuda", torch.cuda.current_device()) if device is None else torch.device(device)
    gpu = hardware.detect(where)
    if gpu is None:
        raise ValueError(f"device={device!r} is not a CUDA device")
    torch.cuda.synchronize(where)  # its context is there now
    seen: set[str] = set()
    compiled = 0
    with torch.cuda.device(where), strict.allowed():
        for call in calls:
            for program in programs(call, gpu):
                if program.key not in seen:
                    seen.add(program.key)
                    if not program.cached():
                        program.build()
                        compiled += 1
            preload(call, gpu)
    return Warmed(len(seen), compiled, time.perf_counter() - start)
