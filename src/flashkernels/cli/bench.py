"""`flashkernels bench`: is every implementation right, how fast is it, and how fast are the others?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from flashkernels.bench.peers import Peer
    from flashkernels.bench.results import Results, Row

WIDTH = 160  # columns of the table where the output is a file or a pipe


def bench(
    op: Annotated[str, typer.Argument(help="The op to run: attention.")],
    suite: Annotated[str, typer.Option(help="headdims, scaling, seqlens, features, shapes or fp8.")] = "headdims",
    quick: Annotated[bool, typer.Option("--quick", help="A few cases on a GPU, tiny sizes on the CPU.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write the results as JSON.")] = None,
    update: Annotated[bool, typer.Option("--update", help="Keep the other rows that the JSON file has.")] = False,
    csv: Annotated[Path | None, typer.Option(help="Write the results as CSV.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write a report with plots; needs the extra 'report'.")] = None,
    peers: Annotated[str, typer.Option(help="fast: all but those slow to compile; all, none, or a,b.")] = "fast",
    rounds: Annotated[int | None, typer.Option(min=1, help="Turns of each contestant: 5, or 3 when quick.")] = None,
    l2: Annotated[Literal["cold", "warm"] | None, typer.Option(help="Flush the L2 cache before each call?")] = None,
    launch: Annotated[Literal["eager", "graph"] | None, typer.Option(help="Call, or replay a CUDA graph.")] = None,
    cases: Annotated[str, typer.Option(help="Only the cases that match a pattern: 'd72-*,d96-full'.")] = "*",
    impls: Annotated[str, typer.Option(help="Of ours only these: 'hopper,triton'. By default all that serve.")] = "",
    device: Annotated[Literal["cuda", "cpu"] | None, typer.Option(help="By default cuda where there is one.")] = None,
) -> None:
    """Check and time our implementations and their rivals on the same inputs, in turns.

    The exit code is 1 when one of ours is wrong.
    """
    import torch

    from flashkernels.bench import accuracy, report, results as files, runner
    from flashkernels.bench.peers import choose
    from flashkernels.bench.suites import only, suite as load
    from flashkernels.hardware import detect

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cpu" and not quick:
        raise ValueError("no CUDA device was found or chosen: pass --quick to run tiny sizes on the CPU")
    chosen = only(load(op, suite, device=device, quick=quick, launch=launch, l2=l2), cases)
    named = runner.choose(impls) if impls else None
    gpu = detect() if device == "cuda" else None
    if named and not any(runner.ours(case, gpu, named) for case in chosen.cases):
        raise ValueError(f"impls={impls!r}: none of them serves a case that was chosen")
    if update and not json:
        raise ValueError("update=True needs json=, the file to update")
    part = impls or cases != "*" or peers not in ("fast", "all")
    if part and json and json.exists() and not update:
        raise ValueError(f"{json} exists and may hold more rows than this run: pass --update, or another file")
    if html:
        report.require_extra()
    if device == "cpu":
        torch.set_num_threads(1)  # at tiny sizes threads cost more than they bring, and disturb the clock
    console, progress_console = Console(), Console(stderr=True)
    present = _present(choose(peers), device, named=peers not in ("all", "fast", "none"), console=progress_console)

    results = files.Results(files.describe(device, quick=quick))
    before = files.read(json) if update and json and json.exists() else None
    if before and json:
        files.require_same_machine(before.meta, results.meta, json)
    if costs := runner.launch_costs(device, named):
        results.meta |= {"launch_us": next(iter(costs.values())), "launch_us_by_impl": costs}
    if any(case.problem.dtype == "fp8" for case in chosen.cases):
        results.meta["error_to_exact"] = accuracy.errors(device)
    whole, broken = results, None
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=progress_console, transient=True) as progress:
        task = progress.add_task(chosen.cases[0].name, total=len(chosen.cases))
        try:
            turns = runner.run(chosen, present, impls=named, rounds=rounds or (3 if quick else 5))
            for upcoming, rows in zip((*chosen.cases[1:], chosen.cases[-1]), turns, strict=True):
                results.rows += rows
                if json:
                    whole = files.merge(before, results, json) if before else results
                    files.write(json, whole.to_json())  # after each case: an interrupted run leaves its results
                progress.update(task, advance=1, description=upcoming.name)
        except runner.BenchError as error:
            broken = error
    if broken and not results.rows:
        raise broken
    if csv:
        files.write(csv, whole.to_csv())
    if html:
        files.write(html, report.render(whole))

    if not console.is_terminal:
        console = Console(width=WIDTH)
    console.print(table(results))
    for line in notes(results):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for path in (json, csv, html):
        if path:
            console.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)
    if broken:
        typer.echo(f"error: {broken}", err=True)
    if broken or any(not row.ok and not row.peer for row in results.rows):
        raise typer.Exit(1)


def table(results: Results) -> Table:
    """One line a case, one column a contestant, the best in bold, then ours against the best peer."""
    from flashkernels.bench.results import fastest, speedup, worst_error

    gpu = results.meta["gpu"]
    by_time = gpu is None or results.rows[0].suite == "scaling"
    first = results.rows[0]
    how = f"{first.params['launch']}, {first.params['l2']} L2"
    title = f"{first.op} {first.suite} on {gpu or results.meta['cpu']} ({how}), {'ms' if by_time else 'TFLOPS'}"
    grid = Table(title=title, title_justify="left")
    grid.add_column("case", no_wrap=True)
    impls = results.impls()
    for impl in impls:
        grid.add_column(impl, justify="right")
    # Tiny sizes on the CPU are there to check, so the error stands where a GPU has its speed.
    for column in ("vs best peer", "% roofline") if gpu else ("error vs plain torch's",):
        grid.add_column(column, justify="right")
    for (_, case), rows in results.cases().items():
        timed = {row.impl: row for row in rows if row.ok}
        best = min(timed.values(), key=lambda row: row.seconds, default=None)
        cells = []
        for impl in impls:
            row = timed.get(impl)
            text = "-" if row is None else f"{row.ms_p50:.4f}" if by_time else f"{row.tflops:.0f}"
            cells.append(f"[bold]{text}[/bold]" if row and row is best else text)
        ratio, mine, error = speedup(rows), fastest(rows, peer=False), worst_error(rows)
        if gpu:
            cells.append("-" if ratio is None else f"[{'green' if ratio >= 1 else 'yellow'}]{ratio:.2f}x[/]")
            cells.append("-" if mine is None or mine.roofline is None else f"{mine.roofline:.0%}")
        else:
            cells.append("-" if error is None else f"{error:.2f}x")
        grid.add_row(case, *cells)
    return grid


def notes(results: Results) -> list[str]:
    """What the table cannot show: how right, who failed or declined and why, and the cost of a launch."""
    from flashkernels.bench.results import worst_error

    mine = [row for row in results.rows if not row.peer]
    right = [row for row in mine if row.ok]
    lines = [f"{len(right)} of {len(mine)} checks of ours against the oracle passed"]
    if error := worst_error(results.rows):
        lines[0] += f"; the largest error is {error:.2f} times that of plain torch"
    lines += [f"FAILED {row.impl} on {row.case}: {row.reason}" for row in mine if not row.ok]
    declined: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in results.rows:
        if row.peer and not row.ok:
            declined[row.impl, row.reason or ""].append(row)
    for (impl, reason), rows in declined.items():
        where = rows[0].case if len(rows) == 1 else f"{rows[0].case} and {len(rows) - 1} more"
        lines.append(f"{impl} left out of {where}: {reason}")
    for name, errors in results.meta.get("error_to_exact", {}).items():
        each = ", ".join(f"{error:.2g} ({way})" for way, error in errors.items())
        lines.append(f"error against fp32 on {name} inputs, before they are rounded: {each}")
    small = "one eager call of fk.attention" if results.meta["gpu"] else "one tiny call of fk.attention"
    if costs := results.meta.get("launch_us_by_impl"):
        each = ", ".join(f"{cost:.1f} ({impl})" for impl, cost in costs.items())
        lines.append(f"{small} takes {each} microseconds of CPU time")
    return lines


def _present(peers: Sequence[Peer], device: str, *, named: bool, console: Console) -> list[Peer]:
    """The peers that can run here. One that the user named must be able to."""
    present = []
    for peer in peers:
        reason = peer.available(device)
        if reason is None:
            present.append(peer)
        elif named:
            raise ValueError(f"peer {peer.name}: {reason}")
        else:
            console.print(f"without {peer.name}: {reason}", style="dim")
    return present
