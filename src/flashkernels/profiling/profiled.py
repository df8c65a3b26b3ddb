"""Files of `flashkernels profile --json`, as a report reads them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashkernels.bench.results import ResultsError
from flashkernels.profiling.words import COUNTERS, counted

PARTS = {"meta": dict, "steps": list, "kernels": list, "findings": list}
KERNEL = ("name", "op", "count", "us", "share", "compute", "memory", "bound")
FINDING = ("words", "step", "share", "speedup")


@dataclass(frozen=True)
class Profiled:
    """One profile: what ran how long, and what stands out."""

    name: str
    meta: dict[str, Any]
    steps: list[dict[str, Any]]
    kernels: list[dict[str, Any]]
    findings: list[dict[str, Any]]
    split: dict[str, float] | None = None  # prefill and decode, where both were marked

    def columns(self) -> dict[str, list[str | None]]:
        """What a table says of each kernel beside its name, by heading; what is known of no kernel is left out."""
        columns: dict[str, list[str | None]] = {
            "op": [one["op"] if one["op"] != one["name"] else None for one in self.kernels],
            "calls": [str(one["count"]) for one in self.kernels],
            "µs": [f"{one['us']:.1f}" for one in self.kernels],
            "share": [f"{one['share']:.1%}" for one in self.kernels],
            "% of compute": [_percent(one["compute"]) for one in self.kernels],
            "% of bandwidth": [_percent(one["memory"]) for one in self.kernels],
        }
        if not any(columns["% of compute"]):  # nobody knows the roofs: of a CPU, say
            columns["GFLOP/s"] = [_rate(one, "flops") for one in self.kernels]
            columns["GB/s"] = [_rate(one, "bytes") for one in self.kernels]
        columns["bound"] = [one["bound"] for one in self.kernels]
        for name, heading in COUNTERS.items():
            values = [one.get("counters", {}) for one in self.kernels]
            columns[heading] = [counted(one, name) if name in one else None for one in values]
        return {heading: cells for heading, cells in columns.items() if any(cells)}


def _percent(share: float | None) -> str | None:
    return None if share is None else f"{share:.0%}"


def _rate(kernel: dict[str, Any], work: str) -> str | None:
    """Of a kernel's FLOPs or bytes, in thousands of millions a second."""
    return f"{kernel[work] / kernel['us'] / 1e3:.3g}" if kernel.get(work) and kernel["us"] else None


def holds_profile(path: Path) -> bool:
    """Whether a file is a profile, not results of a benchmark."""
    return "kernels" in _object(path)


def holds_launch_costs(path: Path) -> bool:
    """Whether a file is one of `flashkernels bench launch`, which has no rows."""
    return "launch" in _object(path)


def _object(path: Path) -> dict[str, Any]:
    """The object in a file; an empty one where there is something else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ResultsError(f"{path}: not JSON: {error}") from error
    return data if isinstance(data, dict) else {}


def read_profile(path: Path) -> Profiled:
    """Reads a profile; raises `ResultsError` naming the file and what it lacks."""
    data = json.loads(path.read_text(encoding="utf-8"))
    for name, kind in PARTS.items():
        if not isinstance(data.get(name), kind):
            raise ResultsError(f"{path}: {name!r} is missing or not a {kind.__name__}")
    for part, wanted in (("kernels", KERNEL), ("findings", FINDING)):
        for i, one in enumerate(data[part]):
            if lacking := [name for name in wanted if name not in one]:
                raise ResultsError(f"{path}: {part} {i} has no {lacking[0]!r}")
    if "wall_us" not in data["meta"]:
        raise ResultsError(f"{path}: meta has no 'wall_us'")
    meta, steps, kernels, findings = (data[name] for name in PARTS)
    return Profiled(path.name, meta, steps, kernels, findings, data.get("split"))
