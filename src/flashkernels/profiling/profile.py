"""A profile: what a trace says of each kernel against the roofs, and what to do about it."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from flashkernels.hardware import GPUS, Gpu
from flashkernels.profiling.bounds import Gap, bound_of, gaps
from flashkernels.profiling.costs import Cost, cost_of, is_ours
from flashkernels.profiling.latency import Latency, latency_of
from flashkernels.profiling.roofs import Roofs, roofs_of
from flashkernels.profiling.trace import Kernel, Trace, cpu_kernels

if TYPE_CHECKING:
    from flashkernels.profiling.diagnosis import Finding

# Names of cuBLAS and CUTLASS kernels that multiply fp32 on tensor cores; nvjet has no others.
TF32 = re.compile(r"tf32|s1688gemm|tensorop_s\d|nvjet_s", re.IGNORECASE)


@dataclass(frozen=True)
class Row:
    """All kernels of one name that one op launched. Times are in µs; a figure that cannot be known is None."""

    name: str
    op: str
    kind: str
    count: int
    time: float
    share: float  # of the time of all kernels
    cost: Cost | None
    roofs: Roofs | None
    bound: str | None
    gap: float  # idle time of the GPU before them
    graph: bool
    occupancy: float | None = None  # share of the warps that fit: counted, else estimated by the profiler
    counters: Mapping[str, float] = field(default_factory=dict)

    @property
    def compute(self) -> float | None:
        """Share of the compute roof that is reached."""
        return self.roofs.compute / self.time if self.roofs and self.time else None

    @property
    def memory(self) -> float | None:
        return self.roofs.memory / self.time if self.roofs and self.time else None

    def as_dict(self) -> dict[str, Any]:
        cost = {"flops": self.cost.flops, "bytes": self.cost.bytes, "dtype": self.cost.dtype} if self.cost else {}
        return {
            "name": self.name, "op": self.op, "kind": self.kind, "count": self.count, "us": self.time,
            "share": self.share, "compute": self.compute, "memory": self.memory, "bound": self.bound,
            "gap_us": self.gap, "graph": self.graph, "counters": dict(self.counters), **cost,
        }  # fmt: skip


@dataclass(frozen=True)
class Profile:
    """A trace on a GPU. `gpu` is None where there is none, or where nobody knows its figures."""

    trace: Trace
    gpu: Gpu | None = None

    @property
    def wall(self) -> float:
        """µs from the first work to the last."""
        return self.trace.window.length

    @property
    def device(self) -> str:
        """Its name, as far as it is known."""
        return self.gpu.name if self.gpu else self.trace.gpu or ("a GPU" if self.trace.on_gpu else "the CPU")

    @cached_property
    def gaps(self) -> list[Gap]:
        return gaps(self.trace)

    @cached_property
    def latency(self) -> Latency:
        return latency_of(self.trace)

    @cached_property
    def op_costs(self) -> list[Cost | None]:
        """The cost of each op of the trace; calls with the same arguments are counted once."""
        known: dict[Any, Cost | None] = {}
        costs = []
        for op in self.trace.ops:
            key = (op.name, repr(op.dims), op.types, op.values)
            if key not in known:
                known[key] = cost_of(op)
            costs.append(known[key])
        return costs

    @cached_property
    def owners(self) -> list[int | None]:
        """For each kernel the op whose cost it is a part of: ours where one is around it, else the innermost with a
        formula."""
        return [self._owner(kernel) for kernel in self.trace.kernels]

    def _owner(self, kernel: Kernel) -> int | None:
        index, found = kernel.op, None
        while index is not None:
            op = self.trace.ops[index]
            if self.op_costs[index] is not None:
                if is_ours(op):
                    return index
                found = index if found is None else found
            index = op.parent
        return found

    @cached_property
    def costs(self) -> list[Cost | None]:
        """What each kernel computes and moves: its part of the cost of its op, by time."""
        together: dict[int, float] = defaultdict(float)
        runs: dict[int, set[int]] = defaultdict(set)  # an op captured in a graph was recorded once and runs many times
        for kernel, owner in zip(self.trace.kernels, self.owners, strict=True):
            if owner is not None:
                together[owner] += kernel.duration
                runs[owner].add(kernel.correlation if kernel.graph else 0)
        costs: list[Cost | None] = []
        for kernel, owner in zip(self.trace.kernels, self.owners, strict=True):
            cost = _moved(kernel) if kernel.kind in ("copy", "fill") else None
            if kernel.kind in ("kernel", "cpu") and owner is not None and together[owner]:
                whole = self.op_costs[owner]
                assert whole is not None  # that makes it an owner
                cost = whole * (kernel.duration * len(runs[owner]) / together[owner])
                if cost.dtype == "fp32" and TF32.search(kernel.name):
                    cost = replace(cost, dtype="tf32")
            costs.append(cost)
        return costs

    @cached_property
    def rows(self) -> list[Row]:
        """Kernels by name and op, the longest first."""
        idle: dict[int, Gap] = {id(gap.kernel): gap for gap in self.gaps}
        groups: dict[tuple[str, str, str], list[int]] = defaultdict(list)
        for i, kernel in enumerate(self.trace.kernels):
            owner = kernel.op if self.owners[i] is None else self.owners[i]
            groups[kernel.name, "" if owner is None else self.trace.ops[owner].name, kernel.kind].append(i)
        total = sum(kernel.duration for kernel in self.trace.kernels) or 1.0
        rows = [self._row(*key, members, idle, total) for key, members in groups.items()]
        return sorted(rows, key=lambda row: -row.time)

    def _row(self, name: str, op: str, kind: str, members: list[int], idle: Mapping[int, Gap], total: float) -> Row:
        kernels = [self.trace.kernels[i] for i in members]
        time = sum(k.duration for k in kernels)
        known = [cost for i in members if (cost := self.costs[i]) is not None]
        cost = sum(known[1:], known[0]) if len(known) == len(members) else None
        causes: dict[str, float] = defaultdict(float)
        for kernel in kernels:
            if gap := idle.get(id(kernel)):
                causes[gap.cause] += gap.length
        counters = _mean([k.counters for k in kernels if k.counters])
        roofs = roofs_of(cost, self.gpu)
        bound = bound_of(time, roofs, causes, counters) if kind != "cpu" else None
        estimated = [k.occupancy for k in kernels if k.occupancy is not None]
        occupancy = sum(estimated) / len(estimated) if estimated else None
        if "occupancy" in counters:
            occupancy = counters["occupancy"] / 100
        return Row(
            name, op, kind, len(kernels), time, time / total, cost, roofs, bound, sum(causes.values()),
            any(k.graph for k in kernels), occupancy, counters,
        )  # fmt: skip

    @cached_property
    def findings(self) -> list[Finding]:
        from flashkernels.profiling.diagnosis import diagnose

        return diagnose(self)

    def as_dict(self) -> dict[str, Any]:
        """The profile as JSON takes it."""
        latency = self.latency
        steps = [
            {"name": s.name, "count": len(s.times), "items": s.items, "per_second": s.throughput,
             **{f"us_p{q}": s.percentile(q) for q in (50, 90, 99)}}
            for s in latency.steps
        ]  # fmt: skip
        return {
            "meta": {"gpu": self.gpu.name if self.gpu else None, "device": self.device, "wall_us": self.wall,
                     "busy": latency.busy, "bound": latency.bound},
            "steps": steps,
            "split": latency.split(),
            "kernels": [row.as_dict() for row in self.rows],
            "findings": [finding.as_dict() for finding in self.findings],
        }  # fmt: skip

    def __str__(self) -> str:
        from flashkernels.profiling.words import describe

        return describe(self)


def profile_of(trace: Trace, gpu: Gpu | None = None) -> Profile:
    """The profile of a trace: on `gpu`, else on the one that the trace names, else on this machine's."""
    if gpu is None and trace.on_gpu:
        gpu = next((known for known in GPUS.values() if known.name.lower() == trace.gpu.lower()), None)
        if gpu is None:
            from flashkernels.hardware import detect

            here = detect()
            gpu = here if here and trace.gpu in ("", here.name) else None
    if not trace.on_gpu:  # an op whose cost is known is one piece of work, whatever it calls
        known = [cost is not None for cost in Profile(trace).op_costs]
        trace = replace(trace, kernels=cpu_kernels(trace.ops, known))
    return Profile(trace, gpu)


def _moved(kernel: Kernel) -> Cost | None:
    """The traffic of a copy or fill inside the GPU's memory; a copy to the host has other roofs."""
    if kernel.kind == "fill":
        return Cost(0, kernel.bytes, "fp32")
    local = "DtoD" in kernel.name or "Device-to-Device" in kernel.name
    return Cost(0, 2 * kernel.bytes, "fp32") if local else None


def _mean(counters: list[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for one in counters for name in one)
    found = {name: [one[name] for one in counters if name in one] for name in names}
    return {name: sum(values) / len(values) for name, values in found.items()}
