"""`flashkernels roofline`: what this machine allows, and how near kernels come."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from flashkernels.profiling.ceilings import Ceilings


def roofline(
    results: Annotated[list[Path] | None, typer.Argument(help="JSON files of `flashkernels bench`, to draw.")] = None,
    png: Annotated[Path | None, typer.Option(help="Draw a PNG; needs the extra 'report'.")] = None,
    html: Annotated[Path | None, typer.Option(help="Draw an interactive page; needs the extra 'report'.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the measured ceilings into this file too.")] = None,
    ceilings: Annotated[Path | None, typer.Option(help="Take the ceilings from a file; nothing is measured.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure again, although it was done before.")] = False,
) -> None:
    """Measure this machine's ceilings once (copy, read, L2, matrix products by dtype), keep them, draw the roofline.

    Results from another machine are drawn under the roofs of that machine's datasheet, and under its measured ceilings
    where a file has them or they were kept.
    """
    import torch

    from flashkernels.bench.results import describe, joined, read, write
    from flashkernels.profiling import ceilings as roofs, drawing, report as page, roofline as picture

    if again and ceilings:
        raise ValueError(f"again=True measures, ceilings={str(ceilings)!r} does not: choose one")
    if png or html:
        page.require_extra()
    for path in (*(results or ()), *([ceilings] if ceilings else ())):
        if not path.is_file():
            raise ValueError(f"{path}: there is no such file")
    measured_rows = joined([(path, read(path)) for path in results]) if results else None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    about = describe(device, quick=False)
    here = str(about["gpu"] or about["cpu"])
    meta = measured_rows.meta if measured_rows else about
    name = str(meta["gpu"] or meta.get("cpu"))
    if ceilings:
        found: Ceilings | None = roofs.read(ceilings)
        if found and found.device != name:
            raise ValueError(f"{ceilings} has the ceilings of {found.device}, the results are from {name}")
    else:
        found = None if again else roofs.kept(name)
        if found is None and name == here:
            found = roofs.measure(device)
            try:
                typer.echo(f"measured, kept in {roofs.keep(found)}")
            except OSError as error:
                typer.echo(f"measured, but not kept in {roofs.path_of(name)}: {error.strerror}", err=True)
        elif found is None and again:
            raise ValueError(f"again=True measures this machine ({here}), but the results are from {name}")
    if json:
        if found is None:
            raise ValueError(f"json={str(json)!r}: there are no measured ceilings of {name}")
        roofs.keep(found, json)
    points = picture.points_of(measured_rows) if measured_rows else []
    dtypes = list(dict.fromkeys(point.dtype for point in points)) or list(roofs.COMPUTE)
    drawn = picture.roofs_for(meta["gpu"], found, dtypes)
    Console().print(_table(found) if found else f"no measured ceilings of {name}: its datasheet alone")
    title = f"Roofline of {name}"
    if png:
        drawing.png(picture.with_legend(picture.draw(drawn, points), points, title), png)
    if html:
        write(html, page.render_roofline(drawn, points, title))
    for path in (json, png, html):
        if path:
            typer.echo(f"wrote {path}")


def _table(found: Ceilings) -> Table:
    """The ceilings, one line each."""
    grid = Table(title=f"ceilings of {found.device}, {found.date[:10]}, torch {found.torch}", title_justify="left")
    grid.add_column("what")
    grid.add_column("rate", justify="right")
    for kind, rate in found.bandwidth.items():
        grid.add_row(kind, f"{rate / 1e9:,.0f} GB/s")
    for dtype, rate in found.compute.items():
        unit = "OPS" if dtype == "int8" else "FLOPS"
        grid.add_row(
            f"{dtype} product", f"{rate / 1e12:,.3g} T{unit}" if rate >= 1e12 else f"{rate / 1e9:,.3g} G{unit}"
        )
    for dtype, reason in found.missing.items():
        grid.add_row(f"{dtype} product", f"none: {reason}")
    return grid
