"""`flashkernels tiles`: every tile the engine can return, and whether each compiles within its GPU's limits.

Of the Hopper kernel, which takes more combinations than anybody can compile, a fixed list that has every part of them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from flashkernels.attention.hopper.source import Variant


def tiles(
    gpu: Annotated[str, typer.Option(help="GPUs by short name, separated by commas, or 'all'")] = "h200",
    compile_: Annotated[bool, typer.Option("--compile", help="compile and check the tiles (no GPU needed)")] = False,
    sample: Annotated[int, typer.Option(help="list or compile only 1 in N: with 5, every 5th tile")] = 1,
) -> None:
    """List the tiles of the Triton attention forward and variants of the Hopper one; with --compile, check that each
    one fits and is compiled as it should be."""
    from rich.console import Console
    from rich.progress import track

    from flashkernels import hardware
    from flashkernels.attention.hopper.variants import VARIANTS, label
    from flashkernels.attention.hopper.wide_variants import WIDE
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
            softcap = " softcap" if problem.softcap else ""
            what = f"  {tile.name} {problem.dtype} D={problem.head_dim} mask={problem.mask}{softcap}"
            if not compile_:
                typer.echo(what)
                continue
            made = compile_tile(tile, problem, one)
            if made.shared > one.shared_per_block or made.tensor_columns > TENSOR_COLUMNS:
                broken += 1
                needs = f"{made.shared} B of shared memory, {made.tensor_columns} columns of tensor memory"
                typer.echo(f"{what}: {needs}; the limits are {one.shared_per_block} and {TENSOR_COLUMNS}", err=True)
    if any(one.capability == (9, 0) for one in chosen):
        variants = (*VARIANTS, *WIDE)[::sample]
        console.print(f"hopper: {len(variants)} variants")
        if compile_:
            broken += _compile_hopper(variants)
        else:
            typer.echo("\n".join(f"  {label(variant)}" for variant in variants))
    if broken:
        typer.echo(f"error: {broken} tiles do not fit", err=True)
        sys.exit(1)


def _compile_hopper(variants: Sequence[Variant]) -> int:
    """Compiles them on all cores; prints what is wrong, and returns how many have something wrong."""
    from rich.progress import track

    from flashkernels.attention.hopper.build import build_all

    broken = 0
    for name, faults in track(build_all(variants), "compiling", total=len(variants)):
        broken += bool(faults)
        for fault in faults:
            typer.echo(f"  {name}: {fault}", err=True)
    return broken
