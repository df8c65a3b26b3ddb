"""Results beside earlier ones: what became faster, what slower, and what no longer runs."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashkernels.bench.results import Results, ResultsError, Row

NOISE = 0.03  # a median moves so much from run to run on a heated GPU


@dataclass(frozen=True)
class Change:
    """One contestant on one case, before and now."""

    old: Row
    new: Row

    @property
    def ratio(self) -> float:
        """Speed now over speed before: under 1 is slower, 0 where it no longer runs."""
        return self.old.seconds / self.new.seconds if self.new.ok else 0.0


def compare(new: Results, old: Results, where: Path) -> list[Change]:
    """Contestants that were timed before on the same case with the same parameters, and that took part now too.

    Raises where the two were not measured on the same device or have nothing in common; `where` is the old file.
    """
    require_same_device(old.meta, new.meta, where)
    before = {_key(row): row for row in old.rows if row.ok}
    changes = [Change(before[_key(row)], row) for row in new.rows if _key(row) in before]
    if not changes:
        raise ResultsError(f"{where} has no row of the same case, contestant and parameters as the new results")
    return changes


def require_same_device(old: dict[str, Any], new: dict[str, Any], where: Path) -> None:
    """Raises where two `meta` are of different devices: their times say nothing about a change."""
    for name in ("gpu", "cpu"):
        if old.get(name) != new.get(name):
            message = f"{where} was measured on {name}={old.get(name)!r}, the new results on {new.get(name)!r}"
            raise ResultsError(f"{message}: times of two devices say nothing about a change")


def regressions(changes: Sequence[Change], below: float) -> list[Change]:
    """Ours that run at less than `below` of their earlier speed, the worst first. Peers show what the machine changed,
    not what we did: see `mood`."""
    return sorted((c for c in changes if not c.new.peer and c.ratio < below), key=lambda change: change.ratio)


def mood(changes: Sequence[Change]) -> float | None:
    """Speed of the peers over their earlier speed, geometric mean: far from 1, the machine changed and not the code."""
    ratios = [c.ratio for c in changes if c.new.peer and c.ratio]
    return statistics.geometric_mean(ratios) if ratios else None


def _key(row: Row) -> tuple[str, ...]:
    return row.op, row.suite, row.case, row.impl, json.dumps(row.params, sort_keys=True)
