"""Times callables so that their figures can be compared.

A warm chip is slower than a cold one and a shared machine has moods. So the chip is heated first, the contestants take
turns in several rounds, each in another order, and a figure is the median over all calls of all rounds.
"""

from __future__ import annotations

import gc
import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

L2 = Literal["cold", "warm"]
Launch = Literal["eager", "graph"]
Sampler = Callable[[], list[float]]  # one round of a contestant: milliseconds of each call

GPU_ROUND_MS, CPU_ROUND_MS = 60.0, 4.0
GRAPH_MS = 2.0  # calls captured in one graph fill about this long, so that the replay's own cost vanishes


@dataclass(frozen=True)
class Call:
    """What is timed: a function without arguments, and the scope it runs in, entered once a round, off the clock."""

    run: Callable[[], Any]
    scope: Callable[[], AbstractContextManager[Any]] = nullcontext


def in_turns(calls: Sequence[Call]) -> Call:
    """The next one of these calls, each time."""
    ring = itertools.cycle([call.run for call in calls])
    return Call(lambda: next(ring)(), calls[0].scope)


@dataclass(frozen=True)
class Times:
    """Milliseconds of each call; where a graph holds many calls, each figure is the mean over those of one graph."""

    ms: tuple[float, ...]

    @property
    def p50(self) -> float:
        return float(np.percentile(self.ms, 50))

    @property
    def p99(self) -> float:
        return float(np.percentile(self.ms, 99))


def interleave(samplers: Mapping[str, Sampler], rounds: int) -> dict[str, Times | Exception]:
    """Lets the contestants take turns, in a new order each round: who follows whom matters. One that raises is out.

    (To and fro, the first would always follow itself and the second, on a chip that has not cooled: 7 % for a layer of
    INT4 experts at the power limit; H200, 2026-11-18.)
    """
    ms: dict[str, list[float]] = {name: [] for name in samplers}
    failed: dict[str, Times | Exception] = {}
    draw = random.Random(0)
    for _ in range(rounds):
        for name in draw.sample(list(samplers), len(samplers)):
            if name in failed:
                continue
            try:
                ms[name] += samplers[name]()
            except Exception as error:  # such as out of memory, beside the others
                failed[name] = error
    return {name: Times(tuple(values)) for name, values in ms.items()} | failed


def sampler(call: Call, *, device: str, l2: L2, launch: Launch, turns: int = 0) -> Sampler:
    """A function that times one round of `call`; warm-up, the estimate and the capture of a graph happen here.

    `turns`: of a call whose memory repeats only after so many calls, and by then has left the L2. A graph then holds
    many of them, and nothing is flushed in between.
    """
    if device == "cpu":
        return _cpu_sampler(call)
    return _gpu_sampler(call, l2, launch, turns)


def repetitions(budget_ms: float, call_ms: float) -> int:
    """How often a call fits into the budget: at least once, at most 1000 times.

    >>> repetitions(60, 0.5), repetitions(60, 200), repetitions(60, 0.0)
    (120, 1, 1000)
    """
    return max(1, min(1000, round(budget_ms / max(call_ms, 1e-6))))


def heat(seconds: float) -> None:
    """Loads the GPU with matrix products, so that the clocks have settled when timing starts."""
    import torch

    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for _ in range(8):
            a @ a
        torch.cuda.synchronize()


def launch_cost(run: Callable[[], Any], *, device: str, calls: int = 50, batches: int = 25) -> float:
    """CPU microseconds of one eager call: the least of some bursts, as `timeit` has it. See `burst`."""
    return min([burst(run, device=device, calls=calls) for _ in range(1 + batches)][1:])  # the first may compile


def burst(run: Callable[[], Any], *, device: str, calls: int = 50) -> float:
    """CPU microseconds of one eager call: the mean of a burst of calls on a GPU that had nothing to do.

    A burst is short: while the GPU's queue, 1024 launches, has room for all of it, nothing waits for the GPU, however
    long the kernels take. All that belongs to a call is in it, also freeing what the last one returned; a collection of
    garbage is not, as its cost is that of all objects of a program. What differs between bursts is the machine: on that
    of the H200 the same call took 1.4 times as long a moment later (2026-11-15).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        for _ in range(3):
            run()
        _synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            run()
        return (time.perf_counter() - start) / calls * 1e6
    finally:
        if collects:
            gc.enable()
        _synchronize(device)


def _cpu_sampler(call: Call) -> Sampler:
    def once() -> float:
        start = time.perf_counter()
        call.run()
        return (time.perf_counter() - start) * 1e3

    with call.scope():
        once()
        calls = repetitions(CPU_ROUND_MS, once())

    def sample() -> list[float]:
        with call.scope():
            return [once() for _ in range(calls)]

    return sample


def _gpu_sampler(call: Call, l2: L2, launch: Launch, turns: int) -> Sampler:
    import torch

    def timed(work: Callable[[], Any], times: int, before: Callable[[], Any]) -> list[float]:
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(times)]
        for start, end in events:
            before()
            start.record()
            work()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in events]

    def nothing() -> None:
        pass

    flushed = l2 == "cold" and not turns
    with call.scope():
        call.run()
        call_ms = min(timed(call.run, 3, nothing))
        if launch == "graph":
            # One call a graph when the cache is flushed between calls; else many, as one replay costs microseconds.
            inside = 1 if flushed else min(100, repetitions(GRAPH_MS, call_ms))
            inside = -(-inside // max(1, turns)) * max(1, turns)
            work, outside = _capture(call.run, inside).replay, repetitions(GPU_ROUND_MS, call_ms * inside)
        else:
            inside, work, outside = 1, call.run, repetitions(GPU_ROUND_MS, call_ms)
    flush: Callable[[], Any] = nothing
    if flushed:
        # By reading: what is written stays in the L2, and goes to memory while, and at the cost of, what is timed.
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        other = torch.zeros(2 * properties.L2_cache_size // 4, device="cuda")
        flush = partial(torch.amax, other, 0, out=torch.empty((), device="cuda"))

    def sample() -> list[float]:
        with call.scope():
            return [ms / inside for ms in timed(work, outside, flush)]

    return sample


def _capture(run: Callable[[], Any], calls: int) -> Any:
    """A CUDA graph of `calls` calls, captured on a side stream after a warm-up on it."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            run()
    return graph


def _synchronize(device: str) -> None:
    if device != "cpu":
        import torch

        torch.cuda.synchronize()
