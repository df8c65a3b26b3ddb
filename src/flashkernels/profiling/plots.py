"""The drawings of a report: speed by head dimension, time by sequence length, and ours against the best peer."""

from __future__ import annotations

import io
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from flashkernels.bench.results import Results, Row, speedup
from flashkernels.profiling.drawing import COLOURS
from flashkernels.profiling.roofline import STUDY, study

# Matplotlib writes plain colours; these stand for the page's own, which follow the reader's light or dark mode.
INK, GRID = "#0000f0", "#0000f1"
BY_LENGTH = ("seqlens", "scaling")  # suites that walk over sequence lengths


@dataclass(frozen=True)
class Plot:
    """A drawing with its words; `impls` are the contestants its legend lists."""

    title: str
    caption: str
    svg: str
    impls: tuple[str, ...] = ()


def plots(results: Results) -> Iterator[Plot]:
    """The drawings that these results allow."""
    headdims = [row for row in results.rows if row.suite == "headdims" and row.ok]
    for op, causal in itertools.product(dict.fromkeys(row.op for row in headdims), (False, True)):
        rows = [row for row in headdims if row.op == op and row.params["causal"] == causal]
        if len({row.params["head_dim"] for row in rows}) > 1:
            yield _by_head_dim(rows, results, "causal" if causal else "full")
    for rows in _series(results):
        yield _by_seqlen(rows, results)
    for suite in dict.fromkeys(row.group for row in results.rows):
        ratios = {case: speedup(rows) for (s, case), rows in results.cases().items() if s == suite}
        measured = {case: ratio for case, ratio in ratios.items() if ratio is not None}
        if measured and results.meta["gpu"]:  # at the tiny sizes of the CPU a ratio says nothing
            yield _speedups(measured, suite)


def _series(results: Results) -> Iterator[list[Row]]:
    """Rows that differ in their sequence length only (and in the batch that makes up for it, in `seqlens`)."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in results.rows:
        if row.ok and row.op == "attention" and row.suite in BY_LENGTH:
            batch = row.params["batch"] if row.suite == "scaling" else None
            key = (row.suite, row.params["head_dim"], row.params["heads"], batch)
            groups.setdefault(key, []).append(row)
    for rows in groups.values():
        if len({row.params["seq"] for row in rows}) > 1:
            yield rows


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

    what = f"{kind} attention by head dimension".capitalize()
    title = f"{what}, gradients" if rows[0].op == "attention_backward" else what
    caption = f"{unit}, counted at the true head dimension; higher is better."
    return Plot(title, caption, _svg(draw, f"{rows[0].op}-{kind}"), _names(results, rows))


def _by_seqlen(rows: list[Row], results: Results) -> Plot:
    first = rows[0].params
    scaling = rows[0].suite == "scaling"
    where = f"b{first['batch']}-h{first['heads']}-s"
    laptop = [
        p for p in study() if scaling and p.case.startswith(where) and p.case.endswith(f"-d{first['head_dim']} fused")
    ]

    def draw(axes: Any) -> None:
        for impl, style in _styles(results, rows):
            points = sorted((row.params["seq"], row.ms_p50) for row in rows if row.impl == impl)
            axes.plot([seq for seq, _ in points], [ms for _, ms in points], marker="o", markersize=3, **style)
        if laptop and results.meta["gpu"]:
            lengths = [int(point.case.split("-s")[1].split("-")[0]) for point in laptop]
            axes.plot(lengths, [1e3 * p.seconds for p in laptop], color=INK, linestyle=":", linewidth=1.3)
            end = (lengths[-1], 1e3 * laptop[-1].seconds)
            above = {"textcoords": "offset points", "ha": "right", "va": "center", "fontsize": 8}
            axes.annotate(f"{STUDY}, fused", end, (-10, 1), **above)
        lengths = sorted({row.params["seq"] for row in rows})
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(lengths, [str(n) for n in lengths])
        axes.set_xlabel("sequence length" if scaling else "sequence length, tokens of the batch constant")
        axes.set_ylabel("ms")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")

    shape = f"B={first['batch']}, H={first['heads']}, D={first['head_dim']}" if scaling else f"D={first['head_dim']}"
    caption = "Milliseconds of one call, both axes logarithmic; lower is better."
    name = f"{rows[0].suite}-{shape}"
    return Plot(f"Time by sequence length, {shape}", caption, _svg(draw, name), _names(results, rows))


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
