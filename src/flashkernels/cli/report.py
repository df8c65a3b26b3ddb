"""`flashkernels report`: one page from the results of benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from flashkernels.bench.results import Results
    from flashkernels.profiling.calibration import Summary

WIDTH = 160  # columns of the table where the output is a file or a pipe


def report(
    results: Annotated[
        list[Path], typer.Argument(help="JSON files of `flashkernels bench` (of one device) and `profile`.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The HTML file to write.")] = Path("report.html"),
    against: Annotated[
        list[Path] | None, typer.Option(help="Earlier results to compare with; may be repeated.")
    ] = None,
    ceilings: Annotated[
        Path | None, typer.Option(help="Measured roofs of the device; by default those that `roofline` has kept.")
    ] = None,
) -> None:
    """Write one HTML page about benchmark results (tables, heat maps, curves, roofline, precision, regressions) and
    profiles (findings, kernels).

    It needs nothing from the network.
    """
    from flashkernels.bench.results import Results, joined, write
    from flashkernels.profiling import calibration, ceilings as roofs, report as page
    from flashkernels.profiling.profiled import holds_profile, read_profile

    page.require_extra()
    profiles = [read_profile(path) for path in results if holds_profile(_there(path))]
    timed = [(path, _read(path)) for path in results if not holds_profile(path)]
    if against and not timed:
        raise ValueError("against= compares results of `flashkernels bench`, of which none was given")
    new = joined(timed) if timed else Results({"gpu": None, "date": "", "commit": None})
    old = joined([(path, _read(_there(path))) for path in against]) if against else None
    device = str(new.meta["gpu"] or new.meta.get("cpu"))
    measured = roofs.read(_there(ceilings)) if ceilings else roofs.kept(device)
    if measured and measured.device != device:
        raise ValueError(f"{ceilings} has the ceilings of {measured.device}, the results are from {device}")
    earlier = (against[0], old) if against and old else None
    write(output, page.render(new, profiles=profiles, against=earlier, ceilings=measured))
    found = calibration.predictions(new)
    if summaries := calibration.summaries(found):
        Console(width=None if Console().is_terminal else WIDTH).print(_calibration(summaries))
        if missing := calibration.unpredicted(new, found):
            each = ", ".join(f"{name} ({count})" for name, count in missing.items())
            typer.echo(f"without a prediction: {each}")
    typer.echo(f"wrote {output}: {page.headline(new) if timed else page.profile_headline(profiles)}")


def _calibration(summaries: list[Summary]) -> Table:
    """How near `explain` was, one line for each kernel and suite."""
    grid = Table(title="predicted against measured times", title_justify="left")
    for name in ("kernel", "suite"):
        grid.add_column(name)
    for name in ("within 20 %", "median error", "worst error"):
        grid.add_column(name, justify="right")
    for one in summaries:
        worst = f"{one.worst.error:+.0%} ({one.worst.row.case})"
        grid.add_row(one.impl, one.suite, f"{one.near} of {len(one.predictions)}", f"{one.typical:.1%}", worst)
    return grid


def _read(path: Path) -> Results:
    from flashkernels.bench.results import ResultsError, read
    from flashkernels.profiling.profiled import holds_launch_costs

    if holds_launch_costs(path):
        raise ResultsError(f"{path} is a file of `flashkernels bench launch`, which the report does not show")
    return read(path)


def _there(path: Path) -> Path:
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file")
    return path
