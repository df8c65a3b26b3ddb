"""Files of `flashkernels profile --json`, as a report reads them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashkernels.bench.results import ResultsError

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


def holds_profile(path: Path) -> bool:
    """Whether a file is a profile, not results of a benchmark."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ResultsError(f"{path}: not JSON: {error}") from error
    return isinstance(data, dict) and "kernels" in data


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
    return Profiled(path.name, *(data[name] for name in PARTS))
