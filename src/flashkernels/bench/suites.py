"""What can be benchmarked: the suites of each op, and how each is timed unless the user says otherwise."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from flashkernels.attention import cases as attention
from flashkernels.bench.timing import L2, Launch
from flashkernels.decode import cases as decode
from flashkernels.fused import cases as fused
from flashkernels.moe import cases as moe

OPS: dict[str, Any] = {
    "attention": attention, "attention_backward": attention, "decode": decode, "moe": moe, "fused": fused,
}  # fmt: skip

FIRST = {"decode": "formats", "moe": "layer", "fused": "rows"}  # the suite of those that do not name one; else headdims

# Small problems are launch-bound in eager mode, so these replay graphs. The weights of a layer do not fit the L2.
LAUNCH: dict[str, tuple[Launch, L2]] = {
    "scaling": ("graph", "warm"),
    "route": ("graph", "warm"),
    "layer": ("graph", "warm"),
    "formats": ("graph", "cold"),
    "rows": ("graph", "cold"),
}


@dataclass(frozen=True)
class Suite:
    """The cases to run, and how."""

    op: str
    name: str
    cases: tuple[Any, ...]
    device: str  # "cuda" or "cpu"
    launch: Launch
    l2: L2


def suite(
    op: str, name: str, *, device: str = "cuda", quick: bool = False, launch: Launch | None = None, l2: L2 | None = None
) -> Suite:
    """A suite by name. A CPU has no graphs and its caches are left alone, so it takes "eager" and "warm" only.

    >>> scaling = suite("attention", "scaling")
    >>> len(scaling.cases), scaling.launch, scaling.l2
    (13, 'graph', 'warm')
    """
    if op not in OPS:
        raise ValueError(f"op={op!r} is not one of {', '.join(map(repr, OPS))}")
    if device == "cpu":
        if launch == "graph" or l2 == "cold":
            raise ValueError(f"launch={launch!r}, l2={l2!r}: on the CPU only 'eager' and 'warm' are possible")
        default: tuple[Launch, L2] = ("eager", "warm")
    elif op == "attention_backward":
        if launch == "graph":
            raise ValueError("launch='graph': gradients run on the stream of their forward, which is not captured")
        default = ("eager", "cold")
    else:
        default = LAUNCH.get(name, ("eager", "cold"))
    if op in ("moe", "fused") and launch is not None:
        raise ValueError(f"launch={launch!r}: the cases of {op} say how they are launched; choose by their names")
    chosen = OPS[op].suite(name, device=device, quick=quick)
    return Suite(op, name, chosen, device, launch or default[0], l2 or default[1])


def only(whole: Suite, patterns: str) -> Suite:
    """The cases whose name matches one of the comma-separated patterns, in the order of the suite.

    >>> [case.name for case in only(suite("attention", "headdims"), "d72-*,d96-full").cases]
    ['d72-full', 'd72-causal', 'd96-full']
    """
    wanted = [pattern.strip() for pattern in patterns.split(",")]
    for pattern in wanted:
        if not any(fnmatchcase(case.name, pattern) for case in whole.cases):
            raise ValueError(f"cases={pattern!r} matches no case of the suite {whole.name!r}")
    found = (case for case in whole.cases if any(fnmatchcase(case.name, pattern) for pattern in wanted))
    return replace(whole, cases=tuple(found))
