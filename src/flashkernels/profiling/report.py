"""The report of benchmark results: one HTML file with tables and plots that needs nothing from the network."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flashkernels.bench.against import NOISE, Change, compare, mood
from flashkernels.bench.results import Results, Row, fastest, figure, speedup, unit_of, worst_error
from flashkernels.profiling import calibration, drawing, precision, roofline
from flashkernels.profiling.ceilings import Ceilings
from flashkernels.profiling.drawing import COLOURS
from flashkernels.profiling.heat import heats
from flashkernels.profiling.plots import plots
from flashkernels.profiling.profiled import Profiled

Earlier = tuple[Path, Results]  # a file of earlier results


def require_extra() -> None:
    """Raises when the packages that draw the report are missing, and names the extra that brings them."""
    for module in ("jinja2", "matplotlib"):
        if importlib.util.find_spec(module) is None:
            raise ValueError(f"the report needs {module}: pip install 'flashkernels[report]'")


def render(
    results: Results,
    *,
    profiles: Sequence[Profiled] = (),
    against: Earlier | None = None,
    ceilings: Ceilings | None = None,
) -> str:
    """The whole page as text. `ceilings` are the measured roofs of the device, if there are some."""
    require_extra()
    if not results.rows and not profiles:
        raise ValueError("the results have no rows and there is no profile: there is nothing to report")
    results = in_order(results)
    impls = results.impls()
    changes = compare(results, against[1], against[0]) if against else []
    found = calibration.predictions(results)
    return _template("report.html.j2").render(
        meta=results.meta,
        headline=headline(results) if results.rows else profile_headline(profiles),
        suites=[*dict.fromkeys(row.group for row in results.rows), *(one.name for one in profiles)],
        profiles=profiles,
        colours={impl: f"{i % COLOURS:x}" for i, impl in enumerate(impls)},
        tables=_tables(results, impls),
        rows=results.rows,
        failed=[row for row in results.rows if not row.ok and not row.peer],
        plots=list(plots(results)),
        heats=list(heats(results)) if results.meta["gpu"] else [],
        roof=_roofline(results, ceilings),
        precision=_precision(results),
        calibration=calibration.summaries(found),
        unpredicted=calibration.unpredicted(results, found),
        far=sorted((p for p in found if not p.near), key=lambda p: -abs(p.error)),
        changes=sorted(changes, key=lambda change: change.ratio),
        changed=_changed(changes, against) if against else "",
        facts=facts(results) if results.rows else [],
        older=results.commits()[1:],
    )


def render_roofline(roofs: Sequence[roofline.Roof], points: Sequence[roofline.Point], title: str) -> str:
    """The roofline on a page of its own."""
    require_extra()
    return _template("roofline.html.j2").render(title=title, roofs=roofs, roof=_drawn(roofs, points))


def in_order(results: Results) -> Results:
    """The results with head dimensions as they grow, full before causal: files that were updated have new ones last.
    Other suites keep their order."""
    groups = list(dict.fromkeys(row.group for row in results.rows))

    def place(row: Row) -> tuple[int, ...]:
        sizes = (row.params["head_dim"], row.params["causal"]) if row.suite == "headdims" else ()
        return (groups.index(row.group), *sizes)

    return replace(results, rows=sorted(results.rows, key=place))


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


def profile_headline(profiles: Sequence[Profiled]) -> str:
    """What to mend first."""
    found = [finding for one in profiles for finding in one.findings]
    if not found:
        return "Nothing stands out in the profile" if len(profiles) == 1 else "Nothing stands out in the profiles"
    best = max(found, key=lambda finding: finding["speedup"])
    return f"{best['words']}: mended, {best['speedup']:.2f}x as fast"


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


def _template(name: str) -> Any:
    import jinja2

    loader = jinja2.PackageLoader("flashkernels.profiling", "page")
    return jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True).get_template(name)


def _changed(changes: Sequence[Change], against: Earlier) -> str:
    """What became of the earlier results, in one sentence."""
    mine = [change for change in changes if not change.new.peer]
    slower, faster = (sum(test) for test in ([c.ratio < 1 - NOISE for c in mine], [c.ratio > 1 + NOISE for c in mine]))
    peers = mood(changes)
    told = f" The peers run at {peers:.2f}x of theirs: what the machine itself changed." if peers else ""
    commit, date = against[1].meta["commit"] or "an unknown commit", str(against[1].meta["date"])[:10]
    return (
        f"Of {len(mine)} rows of ours, {slower} became slower and {faster} faster than {commit[:10]} ({date}) by more "
        f"than {NOISE:.0%}.{told}"
    )


def _roofline(results: Results, ceilings: Ceilings | None) -> dict[str, Any] | None:
    points = roofline.points_of(results)
    dtypes = list(dict.fromkeys(point.dtype for point in points))
    roofs = roofline.roofs_for(results.meta["gpu"], ceilings, dtypes)
    return _drawn(roofs, points) if roofs and points else None


def _drawn(roofs: Sequence[roofline.Roof], points: Sequence[roofline.Point]) -> dict[str, Any]:
    """The picture, and its contestants with their colours and shapes: what the page can show and hide."""
    styles = roofline.styles_of([*points, *roofline.study()])
    scene = roofline.draw(roofs, points)
    return {"svg": drawing.svg(scene, "Roofline"), "groups": styles, "names": [roof.name for roof in roofs]}


def _precision(results: Results) -> list[tuple[str, list[precision.Trade], str]]:
    """By suite: calls that were timed in several formats, and their picture."""
    found: dict[str, list[precision.Trade]] = {}
    for trade in precision.trades(results):
        found.setdefault(trade.row.group, []).append(trade)
    drawn = ((suite, trades, precision.draw(trades)) for suite, trades in found.items() if precision.shown(trades))
    return [(suite, trades, drawing.svg(scene, f"Speed over error, {suite}")) for suite, trades, scene in drawn]


def _ratios(results: Results) -> list[float]:
    return [ratio for rows in results.cases().values() if (ratio := speedup(rows)) is not None]


def _tables(results: Results, impls: list[str]) -> list[dict[str, Any]]:
    """A table for each suite, with those who were timed in it."""
    tables: dict[str, dict[str, Any]] = {}
    for (suite, _), rows in results.cases().items():
        if suite not in tables:
            timed = {row.impl for row in results.rows if row.ok and row.group == suite}
            here, unit = [impl for impl in impls if impl in timed], unit_of(rows[0], results.meta["gpu"])
            tables[suite] = {"suite": suite, "unit": unit, "impls": here, "lines": []}
        table = tables[suite]
        table["lines"].append(_line(rows, table["impls"], table["unit"]))
    return list(tables.values())


def _line(rows: list[Row], impls: list[str], unit: str) -> dict[str, Any]:
    """A case: a cell for each contestant, ours against the best peer, and our share of the roofline."""
    by_impl = {row.impl: row for row in rows}
    best = min((row for row in rows if row.ok), key=lambda row: row.seconds, default=None)
    cells = []
    for impl in impls:
        row = by_impl.get(impl)
        text = figure(row, unit) if row and row.ok else None
        cells.append({"text": text, "reason": row.reason if row else None, "best": best and impl == best.impl})
    mine = fastest(rows, peer=False)
    return {"case": rows[0].case, "cells": cells, "speedup": speedup(rows), "error": worst_error(rows), "mine": mine}
