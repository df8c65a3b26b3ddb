"""`flashkernels bench`: is every implementation right, how fast is it, and how fast are the others?"""

from __future__ import annotations

import importlib
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

if TYPE_CHECKING:
    from flashkernels.bench.against import Change
    from flashkernels.bench.peers import Peer
    from flashkernels.bench.results import Results, Row

WIDTH = 160  # columns of the table where the output is a file or a pipe
DRAWS, QUICK_DRAWS = (64, 1024), (8, 256)  # of --accuracy: how many, and keys of each


def bench(
    op: Annotated[
        str, typer.Argument(help="attention, attention_backward, decode, fused, moe; launch: a call's CPU time.")
    ],
    suite: Annotated[
        str,
        typer.Option(
            help="headdims (the default), scaling, seqlens, features, shapes, fp8, odd; moe: layer, route; decode: "
            "formats; fused: rows."
        ),
    ] = "",
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
    accuracy: Annotated[
        bool,
        typer.Option(
            "--accuracy",
            help="Of decode: only print how far each format of the cache is from bf16; --quick takes fewer draws.",
        ),
    ] = False,
    against: Annotated[Path | None, typer.Option(help="Earlier results (JSON): print what changed.")] = None,
    fail_below: Annotated[
        float | None, typer.Option(help="With --against: exit 1 where one of ours has less than this of its old speed.")
    ] = None,
    triton_kernels: Annotated[
        Path | None, typer.Option(help="The folder that has the package triton_kernels, a rival of moe.")
    ] = None,
) -> None:
    """Check and time our implementations and their rivals on the same inputs, in turns.

    The exit code is 1 when one of ours is wrong, or with --fail-below slower than it was.
    """
    import torch

    from flashkernels.bench import accuracy as of_fp8, against as earlier, results as files
    from flashkernels.bench.peers import choose
    from flashkernels.bench.suites import FIRST, OPS, only, suite as load
    from flashkernels.hardware import detect
    from flashkernels.profiling import report

    if op not in (*OPS, "launch"):
        raise ValueError(f"op={op!r} is not one of {', '.join(map(repr, (*OPS, 'launch')))}")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if op == "launch":
        _launch(device, json)
        return
    if accuracy:
        if op != "decode":
            raise ValueError(f"accuracy=True is for decode, not {op!r}")
        Console(width=None if Console().is_terminal else WIDTH).print(_accuracy(device, quick=quick))
        return
    if device == "cpu" and not quick:
        raise ValueError("no CUDA device was found or chosen: pass --quick to run tiny sizes on the CPU")
    if triton_kernels is not None:
        if not (triton_kernels / "triton_kernels" / "__init__.py").exists():
            raise ValueError(f"triton_kernels={str(triton_kernels)!r} has no package triton_kernels")
        sys.path.insert(0, str(triton_kernels))
    chosen = only(load(op, suite or FIRST.get(op, "headdims"), device=device, quick=quick, launch=launch, l2=l2), cases)
    runner = importlib.import_module(f"flashkernels.bench.{'runner' if op == 'attention' else op}")
    named = runner.choose(impls) if impls else None
    gpu = detect() if device == "cuda" else None
    if named and not any(runner.ours(case, gpu, named) for case in chosen.cases):
        raise ValueError(f"impls={impls!r}: none of them serves a case that was chosen")
    if update and not json:
        raise ValueError("update=True needs json=, the file to update")
    part = impls or cases != "*" or peers not in ("fast", "all")
    if part and json and json.exists() and not update:
        raise ValueError(f"{json} exists and may hold more rows than this run: pass --update, or another file")
    if fail_below is not None and (against is None or fail_below <= 0):
        raise ValueError(f"fail_below={fail_below} needs against=, the earlier results, and must be over 0")
    if against and not against.is_file():
        raise ValueError(f"against={str(against)!r}: there is no such file")
    old = files.read(against) if against else None  # now: it may be the file that this run writes
    if html:
        report.require_extra()
    if device == "cpu":
        torch.set_num_threads(1)  # at tiny sizes threads cost more than they bring, and disturb the clock
    console, progress_console = Console(), Console(stderr=True)
    present = _present(choose(peers, op), device, named=peers not in ("all", "fast", "none"), console=progress_console)

    results = files.Results(files.describe(device, quick=quick))
    if against and old:
        earlier.require_same_device(old.meta, results.meta, against)
    before = files.read(json) if update and json and json.exists() else None
    if before and json:
        files.require_same_machine(before.meta, results.meta, json)
    if costs := runner.launch_costs(device, named):
        results.meta |= {"launch_us": next(iter(costs.values())), "launch_us_by_impl": costs}
    if any(case.problem.dtype == "fp8" for case in chosen.cases):
        results.meta["error_to_exact"] = of_fp8.errors(device)
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
        files.write(html, report.render(whole, against=(against, old) if against and old else None))

    if not console.is_terminal:
        console = Console(width=WIDTH)
    console.print(table(results))
    for line in notes(results):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    slower: list[earlier.Change] = []
    if against and old:
        changes = earlier.compare(results, old, against)
        slower = earlier.regressions(changes, fail_below) if fail_below is not None else []
        console.print(changed(changes, str(against)))
    for path in (json, csv, html):
        if path:
            console.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)
    if broken:
        typer.echo(f"error: {broken}", err=True)
    for change in slower:
        message = f"{change.new.impl} on {change.new.case} has {change.ratio:.3f} of its earlier speed"
        typer.echo(f"error: {message}, under {fail_below}", err=True)
    if broken or slower or any(not row.ok and not row.peer for row in results.rows):
        raise typer.Exit(1)


def _launch(device: str, json: Path | None) -> None:
    from flashkernels.bench import launch

    found = launch.costs(device)
    Console(width=None if Console().is_terminal else WIDTH).print(launch.table(found))
    if json:
        launch.write(json, found)


def table(results: Results) -> Table:
    """One line a case, one column a contestant, the best in bold, then ours against the best peer."""
    from flashkernels.bench.results import fastest, figure, speedup, unit_of, worst_error

    gpu, first = results.meta["gpu"], results.rows[0]
    unit = unit_of(first, gpu)
    how = f"{first.params['launch']}, {first.params['l2']} L2"
    title = f"{first.op} {first.suite} on {gpu or results.meta['cpu']} ({how}), {unit}"
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
            text = "-" if row is None else figure(row, unit)
            cells.append(f"[bold]{text}[/bold]" if row and row is best else text)
        ratio, mine, error = speedup(rows), fastest(rows, peer=False), worst_error(rows)
        if gpu:
            cells.append("-" if ratio is None else f"[{'green' if ratio >= 1 else 'yellow'}]{ratio:.2f}x[/]")
            cells.append("-" if mine is None or mine.roofline is None else f"{mine.roofline:.0%}")
        else:
            cells.append("-" if error is None else f"{error:.2f}x")
        grid.add_row(case, *cells)
    return grid


def changed(changes: Sequence[Change], old: str) -> Table:
    """One line a contestant and case that was timed before too, the slowest first."""
    from flashkernels.bench.against import NOISE, mood

    peers = mood(changes)
    told = "" if peers is None else f"; the peers have {peers:.3f} of their earlier speed"
    grid = Table(title=f"against {old}{told}", title_justify="left")
    for name in ("case", "contestant"):
        grid.add_column(name, no_wrap=True)
    for name in ("ms before", "ms now", "speed now over before"):
        grid.add_column(name, justify="right")
    for change in sorted(changes, key=lambda change: change.ratio):
        colour = "red" if change.ratio < 1 - NOISE else "green" if change.ratio > 1 + NOISE else "default"
        now = f"{change.new.ms_p50:.4f}" if change.new.ok else "no longer runs"
        ratio = f"[{colour}]{change.ratio:.3f}[/]"
        grid.add_row(change.new.case, change.new.impl, f"{change.old.ms_p50:.4f}", now, ratio)
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
    for (_, case), rows in results.cases().items():
        if peaks := [f"{row.peak_gb:.2f} ({row.impl})" for row in rows if row.peak_gb is not None]:
            lines.append(f"{case} allocates {', '.join(peaks)} GB beyond inputs and results")
    op = results.rows[0].op if results.rows else "attention"
    call = {"moe": "fk.moe.layer", "attention_backward": "a backward", "fused": "fk.rms_norm"}.get(op, f"fk.{op}")
    small = f"one eager call of {call}" if results.meta["gpu"] else f"one tiny call of {call}"
    if costs := results.meta.get("launch_us_by_impl"):
        each = ", ".join(f"{cost:.1f} ({impl})" for impl, cost in costs.items())
        lines.append(f"{small} takes {each} microseconds of CPU time")
    return lines


def _accuracy(device: str, *, quick: bool) -> Table:
    """One line a format of the cache: its error in the output and in the attention probabilities, by distribution."""
    import torch

    from flashkernels.bench.decode import accuracy

    if quick and device == "cpu":
        torch.set_num_threads(1)
    draws, keys = QUICK_DRAWS if quick else DRAWS
    told = f"{draws} draws of {keys} keys"
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(told, total=None)  # the bar moves, and does not say how far it is
        found = accuracy(device, draws=draws, keys=keys)
    less = f" ({DRAWS[0]} of {DRAWS[1]} without --quick)" if quick else ""
    title = f"error against a bf16 cache, relative, by norm: of the output, of the probabilities\n{told}{less}"
    grid = Table(title=title, title_justify="left")
    grid.add_column("format")
    for name in found:
        grid.add_column(name, justify="right")
    for form in next(iter(found.values())):
        cells = [f"{found[name][form][0]:.2%}, {found[name][form][1]:.2%}" for name in found]
        grid.add_row(form, *cells)
    return grid


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
