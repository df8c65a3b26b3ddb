"""`flashkernels compile`: builds kernels ahead of time, without a GPU, into a folder that FLASHKERNELS_CACHE takes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from flashkernels.aot.work import Work


def compile(
    out: Annotated[Path | None, typer.Option(help="The folder to build into.")] = None,
    gpu: Annotated[str, typer.Option(help="GPUs by short name, separated by commas: h200,rtx5090.")] = "h200",
    ops: Annotated[str, typer.Option(help="Ops, separated by commas: attention,decode,rms_norm, ...")] = "",
    model_config: Annotated[Path | None, typer.Option(help="A model's config.json: what the model calls.")] = None,
    head_dims: Annotated[str, typer.Option(help="Head dimensions, separated by commas.")] = "64,128",
    heads: Annotated[int, typer.Option(help="Query heads.")] = 32,
    kv_heads: Annotated[int, typer.Option(help="Key heads; Hopper's decode fits their number alone.")] = 8,
    dtypes: Annotated[str, typer.Option(help="fp16, bf16, fp32, fp8 (attention only).")] = "bf16",
    batches: Annotated[str, typer.Option(help="Batch sizes.")] = "1,8",
    seqs: Annotated[str, typer.Option(help="Lengths of sequences.")] = "256,1024,4096",
    widths: Annotated[str, typer.Option(help="Widths of rows; of sampling and losses the vocabulary.")] = "4096",
    page_sizes: Annotated[str, typer.Option(help="Keys of a page, of decode.")] = "16,64",
    hidden: Annotated[int, typer.Option(help="Width of tokens, of moe and linear layers.")] = 4096,
    inner: Annotated[int, typer.Option(help="Width of an expert of moe, and of what linear returns.")] = 14336,
    activations: Annotated[str, typer.Option(help="Of linear layers: none, gelu, swiglu, ...")] = "swiglu",
    drafts: Annotated[str, typer.Option(help="Drafted tokens of a sequence, of speculative_accept.")] = "4",
    experts: Annotated[int, typer.Option(help="Experts, of moe.")] = 8,
    experts_per_token: Annotated[int, typer.Option(help="Experts of a token, of moe.")] = 2,
    expert_formats: Annotated[str, typer.Option(help="Formats of experts: fp8, fp8_block, int8, w8, w4.")] = "",
    tokens: Annotated[int, typer.Option(help="The most tokens of moe and linear; 0: of the largest batch.")] = 0,
    backward: Annotated[bool, typer.Option("--backward", help="Gradients too: training.")] = False,
    jobs: Annotated[int, typer.Option(help="Processes; 0: one a core.")] = 0,
    check: Annotated[Path | None, typer.Option(help="Verify this folder instead.")] = None,
) -> None:
    """Compile kernels for GPUs that need not be here; later: FLASHKERNELS_CACHE=DIR uses them without one compile."""
    from flashkernels.aot.wanted import Sizes, of_model, wanted

    if check is not None:
        _check(check)
        return
    if out is None:
        raise ValueError("--out is missing: the folder to build into")
    if jobs < 0:
        raise ValueError(f"--jobs {jobs} must not be negative")
    if bool(ops) == bool(model_config):
        raise ValueError("give --ops or --model-config, one of them")
    sizes = Sizes(
        head_dims=_numbers("--head-dims", head_dims), heads=heads, kv_heads=kv_heads, dtypes=_words(dtypes),
        batches=_numbers("--batches", batches), seqs=_numbers("--seqs", seqs), widths=_numbers("--widths", widths),
        page_sizes=_numbers("--page-sizes", page_sizes), hidden=hidden, inner=inner,
        activations=["" if name == "none" else name for name in _words(activations)],
        drafts=_numbers("--drafts", drafts), experts=experts, experts_per_token=experts_per_token,
        expert_formats=_words(expert_formats) or [""], tokens=tokens, backward=backward,
    )  # fmt: skip
    works = of_model(model_config, sizes) if model_config else wanted(_words(ops), sizes)
    _build(works, _words(gpu), out, jobs)


def _build(works: list[Work], gpus: list[str], out: Path, jobs: int) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from flashkernels import hardware
    from flashkernels.aot.build import build, kernels

    wanted = kernels(works, [hardware.lookup(name) for name in gpus])
    if not wanted:
        raise ValueError(f"nothing to compile: on {', '.join(gpus)} these calls take no kernel of ours")
    failed = 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("compiling", total=len(wanted))
        for built in build(wanted, out, jobs or None):
            progress.update(task, advance=1, description=built.kernel.label.split(" (")[0])
            if built.error:
                failed += 1
                typer.echo(f"error: {built.kernel.label}: {built.error}", err=True)
    if failed:
        typer.echo(f"error: {failed} of {len(wanted)} kernels failed; {out} has no manifest", err=True)
        raise typer.Exit(1)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    typer.echo(f"{len(wanted)} kernels for {', '.join(gpus)} in {out}, {size / 2**20:.1f} MiB")
    typer.echo(f"to use them: FLASHKERNELS_CACHE={out}")


def _check(folder: Path) -> None:
    import triton

    import flashkernels
    from flashkernels.aot import manifest
    from flashkernels.jit import nvrtc

    found = manifest.read(folder)
    faults = manifest.faults(folder, found)
    for fault in faults:
        typer.echo(f"error: {fault}", err=True)
    if faults:
        typer.echo(f"error: {len(faults)} of {len(found.files)} files: compile into {folder} again", err=True)
        raise typer.Exit(1)
    typer.echo(f"{len(found.files)} files for {', '.join(found.gpus)}, all as they were made")
    if found.flashkernels != flashkernels.__version__:
        about = f"made with flashkernels {found.flashkernels}; the {flashkernels.__version__} here"
        typer.echo(f"note: {about} compiles anew what has changed since")
    if found.triton != triton.__version__:
        typer.echo(f"note: made with triton {found.triton}; the {triton.__version__} here compiles its kernels anew")
    try:
        here = ".".join(map(str, nvrtc.find().version))
    except nvrtc.CompilerMissing:
        here = ""
    if found.nvrtc and here and found.nvrtc != here:
        typer.echo(f"note: made with NVRTC {found.nvrtc}; the {here} here compiles its kernels anew")


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(option: str, text: str) -> list[int]:
    try:
        return [int(word) for word in _words(text)]
    except ValueError:
        raise ValueError(f"{option} {text!r} is not a list of whole numbers, such as 64,72,128") from None
