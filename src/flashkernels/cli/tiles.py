"""`flashkernels tiles`: every tile the engine can return, and whether each compiles within its GPU's limits."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def tiles(
    gpu: Annotated[str, typer.Option(help="GPUs by short name, separated by commas, or 'all'")] = "h200",
    compile_: Annotated[bool, typer.Option("--compile", help="compile and check the tiles (no GPU needed)")] = False,
    sample: Annotated[int, typer.Option(help="only every N-th tile")] = 1,
) -> None:
    """List the finite set of tiles of the Triton attention forward; with --compile, prove that each one fits."""
    from rich.console import Console
    from rich.progress import track

    from flashkernels import hardware
    from flashkernels.attention.triton.build import compile_tile, every_tile
    from flashkernels.attention.triton.tiles import TENSOR_COLUMNS

    if sample < 1:
        raise ValueError(f"--sample {sample} must be at least 1")
    chosen = list(hardware.GPUS.values()) if gpu == "all" else [hardware.lookup(name) for name in gpu.split(",")]
    console, broken = Console(), 0
    for one in chosen:
        listed = list(every_tile(one))[::sample]
        console.print(f"{one.name}: {len(listed)} tiles")
        for tile, problem in track(listed, "compiling", disable=not compile_):
            what = f"  {tile.name} {problem.dtype} D={problem.head_dim} mask={problem.mask}"
            if not compile_:
                typer.echo(what)
                continue
            made = compile_tile(tile, problem, one)
            if made.shared > one.shared_per_block or made.tensor_columns > TENSOR_COLUMNS:
                broken += 1
                needs = f"{made.shared} B of shared memory, {made.tensor_columns} columns of tensor memory"
                typer.echo(f"{what}: {needs}; the limits are {one.shared_per_block} and {TENSOR_COLUMNS}", err=True)
    if broken:
        typer.echo(f"error: {broken} tiles do not fit", err=True)
        sys.exit(1)
