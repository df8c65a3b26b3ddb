"""`flashkernels explain`: why this kernel, on which tile, and how far from the roofline."""

from __future__ import annotations

from typing import Annotated

import typer


def explain(
    op: Annotated[str, typer.Argument(help="the op: attention")],
    head_dim: Annotated[int, typer.Option(help="head dimension of Q and K")] = 128,
    head_dim_v: Annotated[int, typer.Option(help="head dimension of V; 0: the same")] = 0,
    seq: Annotated[int, typer.Option(help="keys, and queries unless --seq-q is given")] = 4096,
    seq_q: Annotated[int, typer.Option(help="queries; 0: as many as keys")] = 0,
    batch: Annotated[int, typer.Option()] = 4,
    heads: Annotated[int, typer.Option(help="query heads; 0: round(2048 / head_dim)")] = 0,
    kv_heads: Annotated[int, typer.Option(help="key heads; 0: as many as query heads")] = 0,
    dtype: Annotated[str, typer.Option(help="fp8, fp16, bf16 or fp32")] = "bf16",
    causal: Annotated[bool, typer.Option("--causal")] = False,
    window: Annotated[tuple[int, int], typer.Option(help="left and right; -1: unbounded")] = (-1, -1),
    softcap: Annotated[bool, typer.Option("--softcap")] = False,
    alibi: Annotated[bool, typer.Option("--alibi")] = False,
    sinks: Annotated[bool, typer.Option("--sinks")] = False,
    mask: Annotated[str, typer.Option(help="none, bool or float")] = "none",
    gpu: Annotated[str, typer.Option(help="a GPU by its short name (h200, ...); default: this machine's")] = "",
    impl: Annotated[str, typer.Option(help="auto, or the implementation that must serve")] = "auto",
) -> None:
    """Show which implementation and tile serve a problem and why; needs no GPU."""
    from flashkernels import hardware
    from flashkernels.attention.explain import explain as explain_op
    from flashkernels.attention.problem import DTYPE_BYTES, AttentionProblem

    for name, value, allowed in (("--dtype", dtype, tuple(DTYPE_BYTES)), ("--mask", mask, ("none", "bool", "float"))):
        if value not in allowed:
            raise ValueError(f"{name} {value} is not one of {', '.join(allowed)}")
    for name, number in (("--head-dim", head_dim), ("--seq", seq), ("--batch", batch)):
        if number < 1:
            raise ValueError(f"{name} {number} must be at least 1")
    optional = {"--head-dim-v": head_dim_v, "--seq-q": seq_q, "--heads": heads, "--kv-heads": kv_heads}
    for name, number in optional.items():
        if number < 0:
            raise ValueError(f"{name} {number} must not be negative")
    if min(window) < -1:
        raise ValueError(f"--window {window[0]} {window[1]} has a side below -1; -1 means unbounded")
    heads = heads or max(1, round(2048 / head_dim))
    kv_heads = kv_heads or heads
    if heads % kv_heads:
        raise ValueError(f"--heads {heads} is not a multiple of --kv-heads {kv_heads}")
    here = hardware.lookup(gpu) if gpu else hardware.detect()
    problem = AttentionProblem(
        batch=batch, seq_q=seq_q or seq, seq_k=seq, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        head_dim_v=head_dim_v, dtype=dtype, causal=causal, window=window, softcap=softcap, alibi=alibi, sinks=sinks,
        mask=None if mask == "none" else mask, device="cuda" if here else "cpu",
    )  # fmt: skip
    typer.echo(explain_op(op, problem=problem, gpu=here, impl=impl))
