"""What holds a kernel back: compute, memory, latency, launch or host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flashkernels.profiling.roofs import Roofs
from flashkernels.profiling.trace import Kernel, Span, Trace

LAUNCH_US = 50.0  # an eager op of torch takes the host 5 to 30 µs; a longer pause is the program's own
NEAR = 0.3  # of a roof: below it neither arithmetic nor traffic explains the time
BUSY = 60.0  # percent of a unit, by Nsight's own rule of thumb


@dataclass(frozen=True)
class Gap:
    """Time in which the GPU had nothing to do, before `kernel`."""

    span: Span
    kernel: Kernel
    cause: str  # launch or host

    @property
    def length(self) -> float:
        return self.span.length


def gaps(trace: Trace) -> list[Gap]:
    """The pauses of the GPU. Short ones are the price of a launch, long ones are the host doing something else.

    A kernel that was already queued when the GPU fell idle waited for the GPU's own front end: a launch too.
    """
    firsts: dict[float, Kernel] = {}
    for kernel in trace.kernels:
        if kernel.kind != "cpu":
            firsts.setdefault(kernel.start, kernel)
    found = []
    for before, after in zip(trace.busy, trace.busy[1:], strict=False):
        kernel, span = firsts[after.start], Span(before.end, after.start)
        call = trace.launch_of.get(kernel.correlation)
        queued = call is not None and call.start <= before.end
        cause = "launch" if queued or span.length <= LAUNCH_US else "host"
        found.append(Gap(span, kernel, cause))
    return found


def bound_of(
    time: float, roofs: Roofs | None, idle: Mapping[str, float], counters: Mapping[str, float] | None = None
) -> str | None:
    """What bounds kernels that took `time` µs in all, with `idle` µs of pauses before them by cause.

    Pauses as long as the work itself come first: no faster kernel would help. Then measured counters, then the roofs.
    None where nothing is known.
    """
    cause = max(idle, key=lambda name: idle[name], default=None)
    if cause is not None and sum(idle.values()) >= time:
        return cause
    if counters and {"dram", "sm"} <= counters.keys():
        memory, compute = counters["dram"], max(counters["sm"], counters.get("tensor", 0.0))
        if max(memory, compute) < BUSY:
            return "latency"
        return "memory" if memory >= compute else "compute"
    if roofs is None or time <= 0:
        return None
    if roofs.floor / time < NEAR:
        return "latency"
    return "compute" if roofs.compute >= roofs.memory else "memory"
