"""Heat maps: our speed over each peer's, by two sizes at once."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from flashkernels.bench.results import Results, Row, fastest

FULL = 2.0  # the ratio, or its inverse, from which on a cell has its full colour
ATTENTION = ("attention", "attention_backward")  # their suites are made of the same cases


@dataclass(frozen=True)
class Cell:
    """Time of a peer over our best time; over 1 we are faster."""

    ratio: float

    @property
    def strength(self) -> float:
        """
        >>> Cell(2.0).strength, Cell(1.0).strength, Cell(0.25).strength
        (1.0, 0.0, 1.0)
        """
        return round(min(1.0, abs(math.log(self.ratio) / math.log(FULL))), 2)


@dataclass(frozen=True)
class Heat:
    """A table: columns in groups, one for each peer; a cell is None where that peer has no time."""

    suite: str  # with its op
    axis: str  # what the lines are
    groups: tuple[tuple[str, tuple[str, ...]], ...]  # peer and the names of its columns
    lines: tuple[tuple[str, tuple[Cell | None, ...]], ...]


def heats(results: Results) -> Iterator[Heat]:
    """One map for each suite that has a peer."""
    for suite in dict.fromkeys(row.group for row in results.rows):
        cases = [rows for (s, _), rows in results.cases().items() if s == suite]
        peers = [i for i in results.impls() if any(r.peer and r.ok and r.impl == i for rows in cases for r in rows)]
        if peers:
            yield _heat(suite, cases, peers)


def _heat(suite: str, cases: list[list[Row]], peers: list[str]) -> Heat:
    cells: dict[tuple[str, str, str], Cell] = {}
    for rows in cases:
        line, column = _place(rows[0])
        ours = fastest(rows, peer=False)
        for row in rows:
            if ours and row.peer and row.ok:
                cells[line, row.impl, column] = Cell(row.seconds / ours.seconds)
    lines = list(dict.fromkeys(_place(rows[0])[0] for rows in cases))
    columns = list(dict.fromkeys(_place(rows[0])[1] for rows in cases))
    used = {peer: tuple(c for c in columns if any((line, peer, c) in cells for line in lines)) for peer in peers}
    every = tuple((line, tuple(cells.get((line, peer, c)) for peer in peers for c in used[peer])) for line in lines)
    return Heat(suite, _axis(cases[0][0]), tuple(used.items()), tuple(one for one in every if any(one[1])))


def _place(row: Row) -> tuple[str, str]:
    """Line and column of a case."""
    p = row.params
    if row.op in ATTENTION and row.suite == "headdims":
        return str(p["head_dim"]), "causal" if p["causal"] else "full"
    if row.op in ATTENTION and row.suite == "seqlens":
        return str(p["head_dim"]), str(p["seq"])
    if row.op in ATTENTION and row.suite == "scaling":
        return f"B={p['batch']} H={p['heads']} D={p['head_dim']}", str(p["seq"])
    return row.case, ""


def _axis(row: Row) -> str:
    return "head_dim" if row.op in ATTENTION and row.suite in ("headdims", "seqlens") else "case"
