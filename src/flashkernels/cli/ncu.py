"""`flashkernels ncu`: counters of Nsight Compute for each kernel, in the same table as a profile."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from flashkernels.cli.profile import record, show


def ncu(
    command: Annotated[list[str] | None, typer.Argument(help="the program, after --: python script.py ...")] = None,
    kernel: Annotated[str, typer.Option(help="only kernels whose name this regular expression finds")] = "",
    set_: Annotated[str, typer.Option("--set", help="basic, detailed or full; default: what the table needs")] = "",
    count: Annotated[int, typer.Option(help="measure at most so many launches; 0: all")] = 20,
    skip: Annotated[int, typer.Option(help="leave out so many launches first")] = 0,
    nvtx: Annotated[bool, typer.Option("--nvtx", help="NVTX ranges around our ops and torch's")] = False,
    read: Annotated[Path | None, typer.Option(help="run nothing: read what `ncu --csv` wrote")] = None,
    keep: Annotated[Path | None, typer.Option(help="keep the CSV in this file")] = None,
    json_: Annotated[Path | None, typer.Option("--json", help="write rows and findings as JSON")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the command line and run nothing")] = False,
) -> None:
    """Measure kernels with Nsight Compute: DRAM %, L2 hits, SM %, tensor cores, occupancy, stalls, bank conflicts."""
    from flashkernels.profiling import nsight
    from flashkernels.profiling.profile import profile_of

    if (read is None) == (not command):
        raise ValueError("give either a program after --, as in: flashkernels ncu -- python script.py, or --read FILE")
    if read is not None:
        if not read.exists():
            raise ValueError(f"--read {read}: there is no such file")
        show(profile_of(nsight.read_ncu(read.read_text(encoding="utf-8"), str(read))), json_)
        return
    program = command or []
    tool = nsight.find("ncu")
    with tempfile.TemporaryDirectory() as folder:
        log = keep.absolute() if keep else Path("ncu.csv") if dry_run else Path(folder) / "ncu.csv"
        line = nsight.ncu_command(
            tool or "ncu", program, log, kernel=kernel, set_=set_, count=count, skip=skip, nvtx=nvtx
        )
        if dry_run:
            typer.echo(" ".join(line))
            return
        if tool is None:
            _without(program, nsight.GET["ncu"], json_)
        log.parent.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(line, stderr=subprocess.PIPE, text=True)
        sys.stderr.write(done.stderr)
        written = log.read_text(encoding="utf-8") if log.exists() else ""
        if nsight.forbidden(written + done.stderr):
            _without(program, nsight.PERMIT, json_)
        if done.returncode and "Kernel Name" not in written:
            said = _complaint(written) or _complaint(done.stderr) or "it named no error"
            raise ValueError(f"ncu ended with exit code {done.returncode}: {said}")
        if "Kernel Name" not in written:
            raise ValueError(f"ncu measured no kernel; {_seen(written) or 'the program launched none'}")
        show(profile_of(nsight.read_ncu(written, "ncu")), json_)
    if done.returncode:
        raise typer.Exit(done.returncode)


def _complaint(text: str) -> str:
    """The first error that the tool names."""
    return next((line.removeprefix("==ERROR== ") for line in text.splitlines() if line.startswith("==ERROR==")), "")


def _seen(text: str) -> str:
    """Which kernels there were, where ncu says so because --kernel or --skip left none."""
    lines = [line.strip() for line in text.splitlines()]
    names = [name for number, _, name in (line.partition(". ") for line in lines) if number.isdigit()]
    return f"--kernel or --skip left none of: {', '.join(names)}" if names else ""


def _without(program: list[str], words: Sequence[str], json_: Path | None) -> None:
    """Says why there are no counters and how to get them, and goes on without: times and the model of the roofs."""
    for line in words:
        typer.echo(line, err=True)
    typer.echo("Going on without counters: times by torch's profiler, work by the model.\n", err=True)
    result, code = record(program)
    show(result, json_)
    raise typer.Exit(code)
