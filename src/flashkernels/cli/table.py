"""`flashkernels table`: writes the measured tables of a Markdown file from committed results, never by hand."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from flashkernels.bench.results import COPY, Results, Row, fastest, joined, read, write

BLOCK = re.compile(r"<!-- table:(\w+) -->\n.*?<!-- /table -->", re.DOTALL)
KINDS = ("full", "causal")
STANDARD = "triton-standard"
TITLES = {
    "sdpa-cudnn": "cuDNN", "sdpa-flash": "SDPA flash", "fa4": "FA4", STANDARD: "padding (`standard`)",
    "cudnn-dense": "cuDNN, dense", "torch-moe": "torch",
    "eager": "torch eager", "compile": "torch.compile", "liger": "Liger",
}  # fmt: skip
PADDED = "triton"  # the kernel that can also pad
CALIBRATION = "calibration"  # of all files


def table(
    results: Annotated[list[Path], typer.Argument(help="JSON files of `flashkernels bench`.")],
    into: Annotated[Path, typer.Option(help="The Markdown file with the markers.")],
    check: Annotated[bool, typer.Option("--check", help="Change nothing; exit 1 if the file is out of date.")] = False,
) -> None:
    """Regenerate the tables between `<!-- table:SUITE -->` and `<!-- /table -->`.

    A suite is headdims, odd, formats, route, layer or rows; or calibration, predicted against measured times of all
    files.
    """
    files = [(path, read(path)) for path in results]
    text = into.read_text(encoding="utf-8")
    updated = fill(text, files, into)
    if check and updated != text:
        typer.echo(f"{into} is out of date: run this command without --check", err=True)
        raise typer.Exit(1)
    if updated != text:
        write(into, updated)
    typer.echo(f"{into} is up to date")


def fill(text: str, files: list[tuple[Path, Results]], where: Path) -> str:
    """The text with each block replaced by the table of its suite."""
    suites = [{row.suite for row in one.rows} for _, one in files]

    def block(match: re.Match[str]) -> str:
        suite = match[1]
        if suite not in TABLES:
            raise ValueError(f"{where}: table:{suite} is not one of {', '.join(TABLES)}")
        having = [file for file, found in zip(files, suites, strict=True) if suite in (CALIBRATION, *found)]
        if not having:
            raise ValueError(f"{where} has a block table:{suite}, but no results file has that suite")
        if suite != CALIBRATION and len(having) > 1:
            raise ValueError(f"{having[1][0]}: the suite {suite!r} is in another of the files too")
        return f"<!-- table:{suite} -->\n{TABLES[suite](joined(having))}\n<!-- /table -->"

    updated, blocks = BLOCK.subn(block, text)
    if not blocks:
        raise ValueError(f"{where} has no block between '<!-- table:SUITE -->' and '<!-- /table -->'")
    return updated


def headdims(results: Results) -> str:
    """TFLOPS by head dimension, full / causal, and what ours are over the rivals' and over padding to a power of two.

    Where several implementations of ours were timed each has a column, and the ratios take the fastest of them; that
    over padding is the Triton kernel over itself.
    """
    rows: dict[tuple[int, str], list[Row]] = {}
    for row in results.rows:
        if row.suite == "headdims":
            kind = "causal" if row.params["causal"] else "full"
            rows.setdefault((row.params["head_dim"], kind), []).append(row)

    timed = {row.impl: row.peer for group in rows.values() for row in group if row.ok}
    mine = [impl for impl in results.impls() if timed.get(impl) is False and impl != STANDARD]
    fa4 = ["fa4"] if "fa4" in timed else []
    shown = [*(mine if len(mine) > 1 else ["ours"]), "sdpa-cudnn", *fa4, "sdpa-flash"]
    over = ["sdpa-cudnn", *fa4, STANDARD]
    ratios = [f"{PADDED if impl == STANDARD else 'ours'} over {TITLES[impl]}" for impl in over]
    titles = ["D", *(TITLES.get(impl, impl) for impl in shown), *ratios]
    lines = [f"| {' | '.join(titles)} |", "|" + " ---: |" * len(titles)]
    for d in sorted({d for d, _ in rows}):
        pair = [rows.get((d, kind), []) for kind in KINDS]
        found = {impl: [_named(group, impl) for group in pair] for impl in (PADDED, *shown, *over)}
        ours = [fastest(group, peer=False) for group in pair]
        cells = [_figures(ours if impl == "ours" else found[impl]) for impl in shown]
        cells += [_ratios(found[PADDED] if impl == STANDARD else ours, found[impl]) for impl in over]
        lines.append(f"| {d} | {' | '.join(cells)} |")
    meta, params = results.meta, next(iter(rows.values()))[0].params
    commits = ", ".join(commit[:10] for commit in results.commits())
    which = f" Ours is the fastest of {', '.join(mine)}." if len(mine) > 1 else ""
    caption = (
        f"TFLOPS, full / causal.{which} {params['dtype']}, B={params['batch']}, S={params['seq']}, H=round(2048/D), "
        f"{params['launch']} launches, {params['l2']} L2. {meta['gpu'] or meta['cpu']}, {meta['date'][:10]}, "
        f"commit {commits}, torch {meta['torch']}."
    )
    return "\n".join([*lines, "", caption])


def by_case(suite: str, figure: str, show: Callable[[Row, list[Row]], str]) -> Callable[[Results], str]:
    """A table maker: a line for each case of `suite`, a column for everyone who was timed. `show` gets a row, and all
    those of its case."""

    def made(results: Results) -> str:
        rows: dict[str, list[Row]] = {}
        for row in results.rows:
            if row.suite == suite:
                rows.setdefault(row.case, []).append(row)
        timed = {row.impl for group in rows.values() for row in group if row.ok}
        shown = [impl for impl in results.impls() if impl in timed]
        lines = [
            f"| case | {' | '.join(TITLES.get(impl, impl) for impl in shown)} |",
            "| --- |" + " ---: |" * len(shown),
        ]
        for case, group in rows.items():
            found = [_named(group, impl) for impl in shown]
            lines.append(f"| {case} | {' | '.join('-' if row is None else show(row, group) for row in found)} |")
        meta, commits = results.meta, ", ".join(commit[:10] for commit in results.commits())
        caption = (
            f"{figure}. {meta['gpu'] or meta['cpu']}, {meta['date'][:10]}, commit {commits}, torch {meta['torch']}."
        )
        return "\n".join([*lines, "", caption])

    return made


def calibrated(results: Results) -> str:
    """How near predictions are, a line for each kernel and suite, and what has none."""
    from flashkernels.profiling import calibration

    found = calibration.predictions(results)
    lines = ["| kernel | suite | within 20 % | median error | worst |", "| --- | --- | ---: | ---: | --- |"]
    for one in calibration.summaries(found):
        near, worst = f"{one.near} of {len(one.predictions)}", f"{one.worst.row.case}, {one.worst.error:+.0%}"
        lines.append(f"| {one.impl} | {one.suite} | {near} | {one.typical:.1%} | {worst} |")
    missing = [f"{name} ({count})" for name, count in calibration.unpredicted(results, found).items()]
    return "\n".join([*lines, "", f"Without a prediction: {', '.join(missing) or 'none'}."])


def _timed(row: Row) -> str:
    return f"{1e3 * row.seconds:.3f} ({row.tflops:.0f})"


def _moved(row: Row, case: list[Row]) -> str:
    """Time, and the speed over that of a copy; of what is not compared with one the memory."""
    text = f"{1e6 * row.seconds:.1f} µs"
    if copy := _named(case, COPY):
        return f"{text}, {row.tbps:.2f} TB/s ({copy.seconds / row.seconds:.0%})"
    return text if row.peak_gb is None else f"{text}, {row.peak_gb:.2f} GB"


TABLES = {
    "headdims": headdims,
    "formats": by_case(
        "formats", "TB/s of the cache's own bytes, CUDA graph, cold L2", lambda row, _: f"{row.tbps:.2f}"
    ),
    "route": by_case("route", "Microseconds", lambda row, _: f"{1e6 * row.seconds:.1f}"),
    "layer": by_case("layer", "Milliseconds (TFLOPS), CUDA graph", lambda row, _: _timed(row)),
    "odd": by_case("odd", "Milliseconds (TFLOPS), eager launches, cold L2", lambda row, _: _timed(row)),
    "rows": by_case(
        "rows", "Time, TB/s of the bytes that must move (of a copy's); GB allocated beyond inputs and results", _moved
    ),
    CALIBRATION: calibrated,
}


def _named(rows: list[Row], impl: str) -> Row | None:
    return next((row for row in rows if row.impl == impl and row.ok), None)


def _figures(pair: list[Row | None]) -> str:
    return " / ".join("-" if row is None else f"{row.tflops:.0f}" for row in pair)


def _ratios(ours: list[Row | None], theirs: list[Row | None]) -> str:
    ratios = [b.seconds / a.seconds if a and b else None for a, b in zip(ours, theirs, strict=True)]
    return "-" if ratios == [None, None] else " / ".join("-" if r is None else f"{r:.2f}x" for r in ratios)
