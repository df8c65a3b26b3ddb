"""The report of a benchmark: one HTML file with tables and plots that needs nothing from the network."""

from __future__ import annotations

import importlib.util
import io
import itertools
import re
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from flashkernels.bench.results import Results, Row, fastest, speedup, worst_error

COLOURS = 12  # the template has as many, each in a light and a dark shade
# Matplotlib writes plain colours; these stand for the page's own, which follow the reader's light or dark mode.
INK, GRID = "#0000f0", "#0000f1"


@dataclass(frozen=True)
class Plot:
    """A drawing with its words; `impls` are the contestants its legend lists."""

    title: str
    caption: str
    svg: str
    impls: tuple[str, ...] = ()


def require_extra() -> None:
    """Raises when the packages that draw the report are missing, and names the extra that brings them."""
    for module in ("jinja2", "matplotlib"):
        if importlib.util.find_spec(module) is None:
            raise ValueError(f"the report needs {module}: pip install 'flashkernels[report]'")


def render(results: Results) -> str:
    """The whole page as text."""
    require_extra()
    import jinja2

    pages = jinja2.Environment(
        loader=jinja2.PackageLoader("flashkernels", "bench"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    impls = results.impls()
    return pages.get_template("report.html.j2").render(
        meta=results.meta,
        headline=headline(results),
        suites=list(dict.fromkeys(f"{row.op} {row.suite}" for row in results.rows)),
        impls=impls,
        colours={impl: f"{i % COLOURS:x}" for i, impl in enumerate(impls)},
        unit="ms" if _by_time(results) else "TFLOPS",
        table=list(_table(results, impls)),
        rows=results.rows,
        failed=[row for row in results.rows if not row.ok and not row.peer],
        plots=list(plots(results)),
        facts=facts(results),
        older=results.commits()[1:],
    )


def headline(results: Results) -> str:
    """The result in one sentence."""
    machine = results.meta["gpu"] or "the CPU"
    mine = [row for row in results.rows if not row.peer]
    wrong = [row for row in mine if not row.ok]
    if wrong:
        return f"{len(wrong)} of {len(mine)} checks failed on {machine}"
    ratios = _ratios(results)
    if not ratios or not results.meta["gpu"]:
        return f"All {len(mine)} checks against the oracle passed on {machine}"
    wins = sum(ratio >= 1 for ratio in ratios)
    return f"As fast as the best rival or faster in {wins} of {len(ratios)} cases on {machine}"


def facts(results: Results) -> list[tuple[str, str]]:
    """The figures to read first: (value, what it is)."""
    mine = [row for row in results.rows if not row.peer]
    found = [(f"{sum(row.ok for row in mine)} / {len(mine)}", "checks against the oracle passed")]
    if error := worst_error(results.rows):
        found.append((f"{error:.2f}x", "plain torch's error, at most (2x is allowed)"))
    ratios = _ratios(results)
    if ratios and results.meta["gpu"]:
        found.append((f"{statistics.geometric_mean(ratios):.2f}x", "the best peer's speed, geometric mean"))
        found.append((f"{max(ratios):.2f}x", "in the best case"))
    timed = [row.tflops for row in mine if row.ok and row.tflops is not None]
    if timed and results.meta["gpu"]:
        found.append((f"{max(timed):.0f}", "TFLOPS at most"))
    if "launch_us" in results.meta:
        costs = results.meta.get("launch_us_by_impl", {})
        each = f" ({', '.join(f'{impl} {cost:.0f}' for impl, cost in costs.items())})" if len(costs) > 1 else ""
        found.append((f"{results.meta['launch_us']:.0f} µs", f"of CPU time for one small call{each}"))
    return found


def plots(results: Results) -> Iterator[Plot]:
    """The drawings that these results allow."""
    headdims = [row for row in results.rows if row.suite == "headdims" and row.ok]
    for causal in (False, True):
        rows = [row for row in headdims if row.params["causal"] == causal]
        if len({row.params["head_dim"] for row in rows}) > 1:
            yield _by_head_dim(rows, results, "causal" if causal else "full")
    seqlens = [row for row in results.rows if row.suite == "seqlens" and row.ok]
    for d in sorted({row.params["head_dim"] for row in seqlens}):
        yield _by_seqlen([row for row in seqlens if row.params["head_dim"] == d], results, d)
    for suite in dict.fromkeys(row.suite for row in results.rows):
        ratios = {case: speedup(rows) for (s, case), rows in results.cases().items() if s == suite}
        measured = {case: ratio for case, ratio in ratios.items() if ratio is not None}
        if measured and results.meta["gpu"]:  # at the tiny sizes of the CPU a ratio says nothing
            yield _speedups(measured, suite)


def _ratios(results: Results) -> list[float]:
    return [ratio for rows in results.cases().values() if (ratio := speedup(rows)) is not None]


def _by_time(results: Results) -> bool:
    return results.meta["gpu"] is None or all(row.suite == "scaling" for row in results.rows)


def _table(results: Results, impls: list[str]) -> Iterator[dict[str, Any]]:
    """One line a case: a cell for each contestant, ours against the best peer, and our share of the roofline."""
    for (suite, case), rows in results.cases().items():
        by_impl = {row.impl: row for row in rows}
        best = min((row for row in rows if row.ok), key=lambda row: row.seconds, default=None)
        mine = fastest(rows, peer=False)
        cells = [{"row": by_impl.get(impl), "best": best is not None and impl == best.impl} for impl in impls]
        yield {
            "suite": suite,
            "case": case,
            "cells": cells,
            "speedup": speedup(rows),
            "error": worst_error(rows),
            "mine": mine,
        }


def _by_head_dim(rows: list[Row], results: Results, kind: str) -> Plot:
    dims = sorted({row.params["head_dim"] for row in rows})
    places = {dims[0]: 0.0}  # steps of 8 side by side; a longer jump, as to 512, is cut short
    for before, d in itertools.pairwise(dims):
        places[d] = places[before] + min(3, (d - before) / 8)
    top = max(row.tflops or 0 for row in rows)
    unit, scale = ("TFLOPS", 1.0) if top >= 1 else ("GFLOPS", 1e3)

    def draw(axes: Any) -> None:
        for impl, style in _styles(results, rows):
            of_impl = {row.params["head_dim"]: scale * (row.tflops or 0) for row in rows if row.impl == impl}
            found = [d for d in dims if d in of_impl]
            axes.plot([places[d] for d in found], [of_impl[d] for d in found], marker="o", markersize=3, **style)
        shown = [d for d in dims if d % 32 == 0 or len(dims) <= 12]
        axes.set_xticks([places[d] for d in shown], [str(d) for d in shown])
        axes.set_xticks(list(places.values()), minor=True)
        axes.set_xlabel("head dimension")
        axes.set_ylabel(unit)
        axes.set_ylim(bottom=0)

    title = "Causal attention by head dimension" if kind == "causal" else "Full attention by head dimension"
    caption = f"{unit}, counted at the true head dimension; higher is better."
    return Plot(title, caption, _svg(draw, f"headdims-{kind}"), _names(results, rows))


def _by_seqlen(rows: list[Row], results: Results, d: int) -> Plot:
    def draw(axes: Any) -> None:
        for impl, style in _styles(results, rows):
            points = sorted((row.params["seq"], row.ms_p50) for row in rows if row.impl == impl)
            axes.plot([seq for seq, _ in points], [ms for _, ms in points], marker="o", markersize=3, **style)
        lengths = sorted({row.params["seq"] for row in rows})
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(lengths, [str(n) for n in lengths])
        axes.set_xlabel("sequence length, tokens of the batch constant")
        axes.set_ylabel("ms")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")

    caption = "Milliseconds of one call, both axes logarithmic; lower is better."
    return Plot(f"Time by sequence length, D={d}", caption, _svg(draw, f"seqlens-{d}"), _names(results, rows))


def _speedups(ratios: dict[str, float], suite: str) -> Plot:
    cases = list(ratios)

    def draw(axes: Any) -> None:
        places = range(len(cases))
        for wins in (True, False):
            chosen = [i for i in places if (ratios[cases[i]] >= 1) == wins]
            lengths = [ratios[cases[i]] - 1 for i in chosen]
            axes.barh(chosen, lengths, left=1, height=0.7, color=_colour(0 if wins else 1))
        for i in places:
            ratio = ratios[cases[i]]
            beside = {"xytext": (4, 0), "ha": "left"} if ratio >= 1 else {"xytext": (-4, 0), "ha": "right"}
            axes.annotate(f"{ratio:.2f}x", (ratio, i), textcoords="offset points", va="center", fontsize=8, **beside)
        axes.axvline(1, color=INK, linewidth=1)
        low, high = min(0.8, *ratios.values()), max(1.2, *ratios.values())
        if high > 4 * low:
            axes.set_xscale("log", base=2)
            axes.set_xlim(low / (high / low) ** 0.12, high * (high / low) ** 0.12)  # room for the figures
        else:
            room = 0.1 * (high - low) + 0.02
            axes.set_xlim(low - room, high + room)
        axes.set_yticks(places, cases)
        axes.set_ylim(len(cases) - 0.4, -0.6)
        axes.grid(False, axis="y")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
        axes.xaxis.set_minor_formatter(lambda value, _: "")

    caption = "Time of the best peer over ours, case by case; to the right of the line we are faster."
    svg = _svg(draw, f"speedup-{suite}", height=0.6 + 0.21 * len(cases))
    return Plot(f"Against the best peer: {suite}", caption, svg)


def _names(results: Results, rows: list[Row]) -> tuple[str, ...]:
    return tuple(impl for impl in results.impls() if any(row.impl == impl for row in rows))


def _styles(results: Results, rows: list[Row]) -> Iterator[tuple[str, dict[str, Any]]]:
    """How to draw each contestant: ours thick and on top, our baseline dashed, peers thin."""
    impls = results.impls()
    peers = {row.impl for row in rows if row.peer}
    for impl in _names(results, rows):
        style: dict[str, Any] = {"color": _colour(impls.index(impl) % COLOURS), "linewidth": 1.3, "zorder": 2}
        if impl.endswith("-standard"):
            style["linestyle"] = (0, (4, 2))
        elif impl not in peers:
            style |= {"linewidth": 2.6, "zorder": 3}
        yield impl, style


def _colour(i: int) -> str:
    return f"#0000{0xA0 + i:02x}"


def _svg(draw: Callable[[Any], None], name: str, height: float = 3.6) -> str:
    """Draws on one pair of axes; text stays text, and colours become the page's variables."""
    import matplotlib
    from matplotlib.figure import Figure

    look: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": name,  # ids must differ between the drawings of one page, and not from run to run
        "font.size": 9,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": GRID,
        "axes.axisbelow": True,
        "axes.grid": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": GRID,
        "xtick.color": INK,
        "ytick.color": INK,
    }
    with matplotlib.rc_context(look):
        figure = Figure(figsize=(8, height), layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    start, end = svg.index("<svg"), svg.index(">", svg.index("<svg"))
    tag = re.sub(r' (width|height)="[^"]*"', "", svg[start:end])  # the page scales the drawing by its viewBox
    svg = (tag + svg[end:]).replace("'DejaVu Sans'", "system-ui")
    svg = svg.replace(INK, "var(--ink)").replace(GRID, "var(--grid)")
    return re.sub(r"#0000a(.)", r"var(--c\1)", svg)
