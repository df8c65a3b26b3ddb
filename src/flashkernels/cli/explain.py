"""`flashkernels explain`: why this kernel, on which tile, and how far from the roofline."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

OWN = {  # options that not all ops have
    "attention": ("seq", "seq_q", "causal", "mask", "dropout"),
    "attention_backward": ("seq", "seq_q", "causal", "mask", "dropout", "deterministic"),
    "decode": ("context", "tokens", "kv", "page_size"),
}


def explain(
    ctx: typer.Context,
    op: Annotated[str, typer.Argument(help="the op: attention, attention_backward or decode")],
    head_dim: Annotated[int, typer.Option(help="head dimension of Q and K")] = 128,
    head_dim_v: Annotated[int, typer.Option(help="head dimension of V; 0: the same")] = 0,
    seq: Annotated[int, typer.Option(help="attention: keys, and queries unless --seq-q is given")] = 4096,
    seq_q: Annotated[int, typer.Option(help="attention: queries; 0: as many as keys")] = 0,
    context: Annotated[int, typer.Option(help="decode: keys of each sequence")] = 4096,
    tokens: Annotated[int, typer.Option(help="decode: newest tokens of each sequence, 1 to 16")] = 1,
    batch: Annotated[int, typer.Option()] = 4,
    heads: Annotated[int, typer.Option(help="query heads; 0: round(2048 / head_dim)")] = 0,
    kv_heads: Annotated[int, typer.Option(help="key heads; 0: as many as query heads")] = 0,
    dtype: Annotated[str, typer.Option(help="fp16, bf16 or fp32; attention: fp8 too")] = "bf16",
    kv: Annotated[str, typer.Option(help="decode: format of the cache (int8, ...); default: the dtype")] = "",
    page_size: Annotated[int, typer.Option(help="decode: keys of a page")] = 16,
    causal: Annotated[bool, typer.Option("--causal", help="attention")] = False,
    window: Annotated[tuple[int, int], typer.Option(help="left and right; -1: unbounded")] = (-1, -1),
    softcap: Annotated[bool, typer.Option("--softcap")] = False,
    alibi: Annotated[bool, typer.Option("--alibi")] = False,
    sinks: Annotated[bool, typer.Option("--sinks")] = False,
    mask: Annotated[str, typer.Option(help="attention: none, bool or float")] = "none",
    dropout: Annotated[float, typer.Option(help="attention: share of dropped weights")] = 0.0,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="attention_backward")] = False,
    gpu: Annotated[str, typer.Option(help="a GPU by its short name (h200, ...); default: this machine's")] = "",
    impl: Annotated[str, typer.Option(help="auto, or the implementation that must serve")] = "auto",
) -> None:
    """Show which implementation and tile serve a problem and why; needs no GPU. fk.explain has the other ops."""
    from flashkernels import hardware
    from flashkernels.attention.problem import DTYPE_BYTES, AttentionProblem, BackwardProblem
    from flashkernels.decode.problem import DecodeProblem
    from flashkernels.explained import explain as explain_op
    from flashkernels.formats import FORMATS

    if op not in OWN:
        raise ValueError(f"op={op!r} is not one of {', '.join(map(repr, OWN))}; fk.explain has the other ops")
    for name in (name for other in OWN for name in OWN[other] if name not in OWN[op]):
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise ValueError(f"--{name.replace('_', '-')} is not an option of {op}")
    dtypes = tuple(DTYPE_BYTES) if op != "decode" else ("fp16", "bf16", "fp32")
    formats = [name for name, form in FORMATS.items() if form.quantised or name == dtype]
    chosen = (("--dtype", dtype, dtypes), ("--mask", mask, ("none", "bool", "float")), ("--kv", kv or dtype, formats))
    for option, value, allowed in chosen[: 3 if op == "decode" else 2]:
        if value not in allowed:
            raise ValueError(f"{option} {value} is not one of {', '.join(allowed)}")
    needed = {"--head-dim": head_dim, "--seq": seq, "--batch": batch, "--context": context, "--page-size": page_size}
    for option, number in needed.items():
        if number < 1:
            raise ValueError(f"{option} {number} must be at least 1")
    optional = {"--head-dim-v": head_dim_v, "--seq-q": seq_q, "--heads": heads, "--kv-heads": kv_heads}
    for option, number in optional.items():
        if number < 0:
            raise ValueError(f"{option} {number} must not be negative")
    if not 0 <= dropout < 1:
        raise ValueError(f"--dropout {dropout} must be in [0, 1)")
    if not 1 <= tokens <= 16:
        raise ValueError(f"--tokens {tokens} must be from 1 to 16")
    if min(window) < -1:
        raise ValueError(f"--window {window[0]} {window[1]} has a side below -1; -1 means unbounded")
    heads = heads or max(1, round(2048 / head_dim))
    kv_heads = kv_heads or heads
    if heads % kv_heads:
        raise ValueError(f"--heads {heads} is not a multiple of --kv-heads {kv_heads}")
    here = hardware.lookup(gpu) if gpu else hardware.detect()
    device = "cuda" if here else "cpu"
    problem: AttentionProblem | BackwardProblem | DecodeProblem
    if op != "decode":
        problem = AttentionProblem(
            batch=batch, seq_q=seq_q or seq, seq_k=seq, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
            head_dim_v=head_dim_v, dtype=dtype, causal=causal, window=window, softcap=softcap, alibi=alibi, sinks=sinks,
            mask=None if mask == "none" else mask, dropout_p=dropout, device=device,
        )  # fmt: skip
        if op == "attention_backward":
            wanted = ("q", "k", "v", *(("sinks",) if sinks else ()), *(("mask",) if mask == "float" else ()))
            call = replace(problem, need_lse=True)
            problem, impl = BackwardProblem(call, wanted, impl, impl != "torch", deterministic), ""
    else:
        form = FORMATS[kv or dtype]
        for option, dim in (("--head-dim", head_dim), ("--head-dim-v", head_dim_v)):
            if dim % form.packed:
                raise ValueError(f"{option} {dim} must be even: --kv {form.name} stores two numbers in a byte")
        problem = DecodeProblem(
            batch=batch, tokens=tokens, heads=heads, kv_heads=kv_heads, head_dim=head_dim, head_dim_v=head_dim_v,
            context=-(-context // page_size) * page_size, page_size=page_size,
            row_bits=form.bits(head_dim) + form.bits(head_dim_v or head_dim), dtype=dtype, format=form.name,
            scales="token" if form.quantised else "", window=window, softcap=softcap, alibi=alibi, sinks=sinks,
            device=device,
        )  # fmt: skip
    typer.echo(explain_op(op, problem=problem, gpu=here, **({"impl": impl} if impl else {})))
