"""A profile as text: the run in two lines, the kernels as a table, the findings in sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flashkernels.profiling.profile import Profile, Row

TOP = 20  # kernels that are shown
COUNTERS = {
    "dram": "DRAM %", "l2_hit": "L2 hit %", "sm": "SM %", "tensor": "tensor %", "occupancy": "occupancy %",
    "bank_conflicts": "bank conflicts",
}  # fmt: skip


def describe(profile: Profile, top: int = TOP) -> str:
    if not profile.rows:
        return "nothing was recorded: no op of torch ran"
    return "\n".join([*_run(profile), "", *_kernels(profile, top), "", *_findings(profile)])


def _run(profile: Profile) -> list[str]:
    latency, trace = profile.latency, profile.trace
    busy = "" if latency.busy is None else f", GPU busy {latency.busy:.0%}: {latency.bound}"
    lines = [f"{_time(latency.wall)} on {profile.device}{busy if trace.timeline else ', kernels measured one by one'}"]
    for steps in latency.steps:
        times = ", ".join(f"p{q} {_time(steps.percentile(q))}" for q in (50, 90, 99))
        items = f", {steps.items} items" if len(steps.times) != steps.items else ""
        lines.append(f"{steps.name}: {len(steps.times)} x{items}: {times}, {steps.throughput:.4g} a second")
    if split := latency.split():
        lines.append("split: " + ", ".join(f"{name} {share:.0%}" for name, share in split.items()))
    return lines


def _kernels(profile: Profile, top: int) -> list[str]:
    from flashkernels.profiling.diagnosis import short

    rows = profile.rows[:top]
    on_gpu = profile.trace.on_gpu
    columns = [name for name in COUNTERS if any(name in row.counters for row in rows)]
    rates = ["compute", "memory", "bound"] if on_gpu else ["GFLOP/s", "GB/s"]
    table = [[*(["kernel", "from"] if on_gpu else ["op"]), "calls", "time", "share", *rates]]
    table[0] += [COUNTERS[name] for name in columns]
    if any("stall" in name for row in rows for name in row.counters):
        table[0].append("waits for")
    for row in rows:
        names = [short(row.name, 48), row.op] if on_gpu else [short(row.name, 48)]
        cells = [*names, str(row.count), _time(row.time), f"{row.share:.1%}"]
        cells += [_share(row.compute), _share(row.memory), row.bound or "-"] if on_gpu else _rates(row)
        cells += [counted(row.counters, name) for name in columns]
        if table[0][-1] == "waits for":
            cells.append(stall_of(row) or "-")
        table.append(cells)
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    words = 2 if on_gpu else 1  # the first columns; numbers follow
    padded = ([c.ljust(w) if i < words else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))]
              for line in table)  # fmt: skip
    lines = ["  ".join(cells) for cells in padded]
    if len(profile.rows) > top:
        rest = profile.rows[top:]
        lines.append(f"and {len(rest)} more, {sum(row.share for row in rest):.1%} of the time")
    return [line.rstrip() for line in lines]


def stall_of(row: Row) -> str | None:
    """What the warps of a kernel wait for most."""
    stalls = {name.removeprefix("stall_"): value for name, value in row.counters.items() if name.startswith("stall_")}
    return max(stalls, key=lambda name: stalls[name]).replace("_", " ") if stalls else None


def _findings(profile: Profile) -> list[str]:
    if not profile.findings:
        return ["diagnosis: nothing stands out"]
    lines = ["diagnosis:"]
    for finding in profile.findings:
        lines.append(f"- {finding.words}")
        lines.append(f"  next: {finding.step}")
        if finding.speedup >= 1.005:
            lines.append(f"  the whole run would be up to {finding.speedup:.2f}x as fast")
    return lines


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _rates(row: Row) -> list[str]:
    if row.cost is None or not row.time:
        return ["-", "-"]
    return [f"{row.cost.flops / row.time / 1e3:.3g}", f"{row.cost.bytes / row.time / 1e3:.3g}"]


def counted(counters: Mapping[str, float], name: str) -> str:
    """
    >>> counted({"dram": 88.1}, "dram"), counted({"bank_conflicts": 0.3}, "bank_conflicts"), counted({}, "dram")
    ('88', '30%', '-')
    """
    if name not in counters:
        return "-"
    return f"{counters[name]:.0%}" if name == "bank_conflicts" else f"{counters[name]:.0f}"


def _time(us: float) -> str:
    """
    >>> _time(3.25), _time(12345), _time(2.5e6)
    ('3.2 µs', '12.3 ms', '2.50 s')
    """
    if us < 1e3:
        return f"{us:.1f} µs"
    return f"{us / 1e3:.1f} ms" if us < 1e6 else f"{us / 1e6:.2f} s"
