"""End to end: how long marked steps take, how many a second, how busy the GPU is, and who waits for whom."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from dataclasses import dataclass

import numpy as np

from flashkernels.profiling.bounds import gaps
from flashkernels.profiling.trace import Mark, Trace

STEP = re.compile(r"fk:step (?P<name>[\w-]+) x(?P<items>\d+)")
GPU_BOUND = 0.85  # of the time that the GPU works


@dataclass(frozen=True)
class Steps:
    """All steps of one name: from the host's start to the end of the last kernel launched inside."""

    name: str
    times: tuple[float, ...]  # µs
    items: int  # of all steps together: tokens, images, requests
    span: float  # µs from the start of the first to the end of the last

    def percentile(self, q: float) -> float:
        return float(np.percentile(self.times, q))

    @property
    def total(self) -> float:
        return sum(self.times)

    @property
    def throughput(self) -> float:
        """Items a second."""
        return 1e6 * self.items / self.span if self.span else 0.0


@dataclass(frozen=True)
class Latency:
    wall: float  # µs
    busy: float | None  # share of it that the GPU works; None without a GPU
    bound: str  # "GPU-bound", "CPU-bound", "CPU only", or "unknown" where there is no timeline
    steps: tuple[Steps, ...]

    def split(self) -> dict[str, float]:
        """Prefill against decode, as shares of their time together; empty unless both are marked."""
        totals = {steps.name: steps.total for steps in self.steps if steps.name in ("prefill", "decode")}
        whole = sum(totals.values())
        return {name: total / whole for name, total in totals.items()} if len(totals) == 2 and whole else {}


def latency_of(trace: Trace) -> Latency:
    wall = trace.window.length
    if not trace.on_gpu or not trace.timeline:
        return Latency(wall, None, "unknown" if trace.on_gpu else "CPU only", _steps(trace))
    busy = sum(span.length for span in trace.busy) / wall if wall else 0.0
    waited = sum(gap.length for gap in gaps(trace)) / wall if wall else 0.0
    bound = "GPU-bound" if busy >= GPU_BOUND or waited <= 1 - GPU_BOUND else "CPU-bound"
    return Latency(wall, busy, bound, _steps(trace))


def _named(mark: Mark) -> tuple[str, int] | None:
    """Name and items of a mark that is a step: ours, torch's `ProfilerStep#3`, or just called prefill or decode."""
    if found := STEP.fullmatch(mark.name):
        return found["name"], int(found["items"])
    if mark.name.startswith("ProfilerStep#"):
        return "step", 1
    return (mark.name, 1) if mark.name in ("prefill", "decode", "step") else None


def _steps(trace: Trace) -> tuple[Steps, ...]:
    launched = sorted(
        (trace.launch_of[k.correlation].start, k.end) for k in trace.kernels if k.correlation in trace.launch_of
    )
    spans: dict[str, list[tuple[float, float]]] = {}
    items: dict[str, int] = {}
    for mark in trace.marks:
        if (found := _named(mark)) is None:
            continue
        name, count = found
        first = bisect_left(launched, mark.start, key=lambda x: x[0])
        last = bisect_right(launched, mark.end, key=lambda x: x[0])
        end = max([mark.end, *(x[1] for x in launched[first:last])])
        spans.setdefault(name, []).append((mark.start, end))
        items[name] = items.get(name, 0) + count
    return tuple(
        Steps(name, tuple(b - a for a, b in found), items[name], max(b for _, b in found) - min(a for a, _ in found))
        for name, found in spans.items()
    )
