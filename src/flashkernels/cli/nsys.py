"""`flashkernels nsys`: a timeline of Nsight Systems, and its kernels in the same table as a profile."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Annotated

import typer

from flashkernels.cli.profile import record, show


def nsys(
    command: Annotated[list[str] | None, typer.Argument(help="the program, after --: python script.py ...")] = None,
    output: Annotated[Path, typer.Option(help="the report to write, for the Nsight Systems window")] = Path(
        "profile.nsys-rep"
    ),
    nvtx: Annotated[bool, typer.Option("--nvtx", help="NVTX ranges around our ops and torch's")] = False,
    read: Annotated[
        Path | None, typer.Option(help="run nothing: read a CSV of `nsys stats --report cuda_gpu_trace`")
    ] = None,
    json_: Annotated[Path | None, typer.Option("--json", help="write rows and findings as JSON")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the command line and run nothing")] = False,
) -> None:
    """Record a program with Nsight Systems, each node of a CUDA graph on its own, and show its kernels."""
    from flashkernels.profiling import nsight
    from flashkernels.profiling.profile import profile_of

    if (read is None) == (not command):
        raise ValueError("give either a program after --, as in: flashkernels nsys -- python script.py, or --read FILE")
    if read is not None:
        if not read.exists():
            raise ValueError(f"--read {read}: there is no such file")
        show(profile_of(nsight.read_nsys(read.read_text(encoding="utf-8"), str(read))), json_)
        return
    program = command or []
    tool = nsight.find("nsys")
    line = nsight.nsys_command(tool or "nsys", program, output, nvtx=nvtx)
    if dry_run:
        typer.echo(" ".join(line))
        return
    if tool is None:
        typer.echo("\n".join(nsight.GET["nsys"]), err=True)
        typer.echo("Going on without it: times by torch's profiler, work by the model.\n", err=True)
        result, code = record(program)
        show(result, json_)
        raise typer.Exit(code)
    done = subprocess.run(line)
    if not output.exists():
        raise ValueError(f"nsys ended with exit code {done.returncode} and wrote no {output}")
    stats = subprocess.run(nsight.nsys_stats_command(tool, output), capture_output=True, text=True)
    if stats.returncode:
        last = (stats.stderr.strip() or "no message").splitlines()[-1]
        raise ValueError(f"nsys stats ended with exit code {stats.returncode}: {last}")
    show(profile_of(nsight.read_nsys(stats.stdout, str(output))), json_)
    typer.echo(f"\ntimeline: {output}")
    if done.returncode:
        raise typer.Exit(done.returncode)
