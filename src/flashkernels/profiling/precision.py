"""What fewer bits give and cost: the same call in several formats."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from flashkernels.bench.results import Results, Row, fastest
from flashkernels.profiling.drawing import Dot, Line, Scene, Text, text_size, ticks
from flashkernels.profiling.labels import Box, Label, place

FORMATS = ("dtype", "kv", "weights")  # parameters that name a number format
WIDE = ("fp32", "bf16", "fp16")  # what others are measured against, if it is there; the last one found counts
WIDTH, HEIGHT = 900.0, 380.0
FRAME = Box(60, 16, 880, 330)


@dataclass(frozen=True)
class Trade:
    """Ours on one problem in one format, and in the wide one."""

    what: str
    format: str
    row: Row
    wide: Row

    @property
    def speedup(self) -> float:
        return self.wide.seconds / self.row.seconds


def trades(results: Results) -> list[Trade]:
    """Problems that were timed in more than one format, each format beside the wide one."""
    found: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for row in results.rows:
        for name in FORMATS:
            if name in row.params and row.ok and not row.peer:
                rest = {k: v for k, v in row.params.items() if k != name}
                group = found.setdefault((f"{row.op} {row.suite}", name + json.dumps(rest, sort_keys=True)), {})
                group.setdefault(str(row.params[name]), []).append(row)
    lines: list[Trade] = []
    for by_format in found.values():
        wide = next((name for name in reversed(WIDE) if name in by_format), None)
        if wide is None or len(by_format) < 2:
            continue
        best = {name: one for name, rows in by_format.items() if (one := fastest(rows, peer=False))}
        if wide in best:
            lines += [Trade(_without(one.case, name), name, one, best[wide]) for name, one in best.items()]
    return lines


def _without(case: str, form: str) -> str:
    """
    >>> _without("d128-full-fp8", "fp8"), _without("int4-b1-s4096", "int4")
    ('d128-full', 'b1-s4096')
    """
    return case.removesuffix(f"-{form}").removeprefix(f"{form}-")


def shown(lines: list[Trade]) -> list[Trade]:
    """Those that a picture has a place for: narrow, with an error in both formats."""
    return [trade for trade in lines if trade.row is not trade.wide and trade.row.error and trade.wide.error]


def draw(lines: list[Trade]) -> Scene:
    """Speed over error, one line from the wide format to each narrow one."""
    narrow = shown(lines)
    if not narrow:
        raise ValueError("no call was timed in two formats with an error for each")
    errors = [e for trade in narrow for e in (trade.row.error or 0, trade.wide.error or 0)]
    low, high = min(errors) / 1.6, max(errors) * 2.5
    top = 1.1 * max(1.0, *(trade.speedup for trade in narrow))
    bottom = min(0.8, *(0.9 * trade.speedup for trade in narrow))
    scene = Scene(WIDTH, HEIGHT)

    def x(error: float) -> float:
        return FRAME.left + (FRAME.right - FRAME.left) * math.log(error / low) / math.log(high / low)

    def y(speed: float) -> float:
        return FRAME.bottom - (FRAME.bottom - FRAME.top) * (speed - bottom) / (top - bottom)

    for value in ticks(low, high):
        scene.add(Line(((x(value), FRAME.top), (x(value), FRAME.bottom)), "grid"))
        scene.add(Text(x(value), FRAME.bottom + 18, f"{value:g}", "quiet", anchor="middle"))
    step = 0.25 if top - bottom < 2 else 0.5 if top - bottom < 4 else 1.0
    for i in range(math.ceil(bottom / step), int(top / step) + 1):
        scene.add(Line(((FRAME.left, y(i * step)), (FRAME.right, y(i * step))), "ink" if i * step == 1 else "grid"))
        scene.add(Text(FRAME.left - 8, y(i * step) + 4, f"{i * step:g}x", "quiet", anchor="end"))
    scene.add(Text((FRAME.left + FRAME.right) / 2, HEIGHT - 12, "relative error against the oracle", anchor="middle"))
    taken, labels = [], []
    for trade in narrow:
        a, b = (x(trade.wide.error or 0), y(1.0)), (x(trade.row.error or 0), y(trade.speedup))
        scene.add(Line((a, b), "quiet", 0.8, "3 3"))
        for (px, py), row, speed in ((a, trade.wide, 1.0), (b, trade.row, trade.speedup)):
            told = f"{row.case}: {row.ms_p50:.4g} ms, {speed:.2f}x, error {row.error:.2g}"
            scene.add(Dot(px, py, "c0" if speed >= 1 else "c1", told))
            taken.append(Box(px - 3, py - 3, px + 3, py + 3))
        labels.append(Label(*b, *text_size(f"{trade.what} {trade.format}", 11)))
    for trade, box in zip(narrow, place(labels, taken, FRAME), strict=True):
        if box:
            scene.add(Text(box.left, box.bottom - 3, f"{trade.what} {trade.format}", "ink", 11))
    return scene
