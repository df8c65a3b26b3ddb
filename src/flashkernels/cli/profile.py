"""`flashkernels profile`: runs a Python program and says where its time goes and what would make it faster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from flashkernels.profiling.profile import Profile


def profile(
    command: Annotated[list[str] | None, typer.Argument(help="the program, after --: python script.py ...")] = None,
    trace: Annotated[Path | None, typer.Option(help="write the Chrome trace (Perfetto opens it) to this file")] = None,
    read: Annotated[Path | None, typer.Option(help="run nothing: read a Chrome trace of torch's profiler")] = None,
    json_: Annotated[Path | None, typer.Option("--json", help="write rows and findings as JSON")] = None,
    stacks: Annotated[bool, typer.Option("--stacks", help="record Python functions too; slows the host")] = False,
    top: Annotated[int, typer.Option(help="kernels to show")] = 20,
    gpu: Annotated[str, typer.Option(help="with --read: the GPU by its short name, where the trace does not say")] = "",
    counters: Annotated[Path | None, typer.Option(help="join the counters of an ncu CSV")] = None,
) -> None:
    """Profile a program: kernels against the roofs, idle time, latency, and a diagnosis in words."""
    from flashkernels import hardware
    from flashkernels.profiling import nsight, trace as traces
    from flashkernels.profiling.profile import profile_of

    if top < 1:
        raise ValueError(f"--top {top} must be at least 1")
    if (read is None) == (not command):
        raise ValueError("give a program after --, as in: flashkernels profile -- python script.py, or --read FILE")
    if read is not None and (trace or stacks):
        raise ValueError("--trace and --stacks are for a program; --read runs none")
    if gpu and read is None:
        raise ValueError(f"--gpu {gpu} is for --read: a program runs on this machine's")
    for option, path in (("--read", read), ("--counters", counters)):
        if path is not None and not path.exists():
            raise ValueError(f"{option} {path}: there is no such file")
    code = 0
    if read is not None:
        result = profile_of(traces.read(read), hardware.lookup(gpu) if gpu else None)
    else:
        result, code = record(command or [], trace, stacks)
    if counters is not None:
        measured = nsight.read_ncu(counters.read_text(encoding="utf-8"), str(counters)).kernels
        result = profile_of(nsight.with_counters(result.trace, measured), result.gpu)
    show(result, json_, top)
    if trace is not None:
        typer.echo(f"\nwrote {trace}: open it at ui.perfetto.dev")
    if code:
        raise typer.Exit(code)


def record(command: list[str], trace: Path | None = None, stacks: bool = False) -> tuple[Profile, int]:
    """Runs a program in a session; what it raises is shown, and what was recorded is still told."""
    import traceback

    from flashkernels.profiling.program import Program
    from flashkernels.profiling.session import profile as session_of

    program = Program(command)
    with session_of(trace, stacks=stacks) as session:
        try:
            code = program.run()
        except Exception:
            traceback.print_exc()
            code = 1
    return session.profile, code


def show(result: Profile, json_: Path | None, top: int = 20) -> None:
    from flashkernels.bench.results import write
    from flashkernels.profiling.words import describe

    typer.echo(describe(result, top))
    if json_ is not None:
        write(json_, json.dumps(result.as_dict(), indent=1) + "\n")
        typer.echo(f"\nwrote {json_}")
