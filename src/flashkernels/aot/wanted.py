"""Which calls to prepare for: by op and size, or by the config.json of a model.

Kernels are compiled for kinds of problems, not for each size: what counts beside the head dimension is whether sizes
are multiples of 16, how many query heads share a key head, and which tile a size takes. These here stand for kinds.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from flashkernels.aot.work import DTYPES, GLU, ROW_OPS, Appending, Rotation, Rows, Work
from flashkernels.attention.problem import AttentionProblem, BackwardProblem
from flashkernels.decode.problem import DecodeProblem
from flashkernels.formats import lookup

OPS = (
    "attention", "attention_backward", "attention_varlen", "attention_paged", "decode", "append", "rope", *ROW_OPS
)  # fmt: skip
ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu", "relu2": "relu2_glu"}
HF_DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


@dataclass(frozen=True)
class Sizes:
    """What the calls are like. Every combination that an op can have is prepared for."""

    head_dims: Sequence[int] = (64, 128)
    heads: int = 32
    kv_heads: int = 8
    dtypes: Sequence[str] = ("bf16",)
    batches: Sequence[int] = (1, 8)
    seqs: Sequence[int] = (256, 1024, 4096)
    causal: Sequence[bool] = (True, False)
    window: tuple[int, int] = (-1, -1)
    softcap: bool = False
    sinks: bool = False
    widths: Sequence[int] = (4096,)  # of rows
    page_sizes: Sequence[int] = (16, 64)
    cache_formats: Sequence[str] = ()  # of a paged cache; none: that of the queries
    rotary_dim: int = 0
    backward: bool = False

    def __post_init__(self) -> None:
        for name in ("head_dims", "dtypes", "batches", "seqs", "causal", "widths", "page_sizes", "cache_formats"):
            value = getattr(self, name)
            if isinstance(value, str) or not isinstance(value, Sequence):
                raise TypeError(f"{name}={value!r} must be a list or a tuple")
        for name in ("head_dims", "batches", "seqs", "widths", "page_sizes"):
            for value in getattr(self, name):
                if not isinstance(value, int) or value < 1:
                    raise ValueError(f"{name}={list(getattr(self, name))}: {value!r} is not a positive whole number")
        for dtype in self.dtypes:
            if dtype not in DTYPES:
                raise ValueError(f"dtypes={list(self.dtypes)}: {dtype!r} is not one of {', '.join(DTYPES)}")
        if self.heads < 1 or self.kv_heads < 1 or self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")


def wanted(ops: Sequence[str], sizes: Sizes | None = None) -> list[Work]:
    """The calls of these ops at these sizes.

    >>> len(wanted(["attention"], Sizes(head_dims=[72], batches=[1], seqs=[1024])))  # causal and full, 1024 and 1023
    4
    >>> wanted(["softmax"], Sizes(widths=[1000]))
    [Rows(op='softmax', width=1000, dtype='bf16', residual=False, bias=False, quantise='', backward=False, exact=False)]
    """
    sizes = sizes or Sizes()
    for op in ops:
        if op not in OPS:
            raise ValueError(f"ops: {op!r} is not one of {', '.join(OPS)}")
    return list(dict.fromkeys(itertools.chain.from_iterable(_calls(op, sizes) for op in ops)))


def of_model(config: Path, sizes: Sizes | None = None) -> list[Work]:
    """The calls of a decoder-only transformer, read from its Hugging Face config.json: prefill, decode, the cache,
    norms, RoPE and activation. Batches, lengths and pages are those of `sizes`."""
    try:
        read = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{config} is not a model's config.json: {error}") from None
    if not isinstance(read, dict):
        raise ValueError(f"{config} is not a model's config.json: it holds a {type(read).__name__}")
    read = read.get("text_config", read)
    missing = [name for name in ("hidden_size", "num_attention_heads", "intermediate_size") if name not in read]
    if missing:
        raise ValueError(f"{config} has no {', '.join(missing)}")
    heads, width = read["num_attention_heads"], read["hidden_size"]
    head_dim = read.get("head_dim") or width // heads
    left = read.get("sliding_window") if read.get("use_sliding_window", True) else None
    given = sizes or Sizes()
    dtype = HF_DTYPES.get(str(read.get("dtype") or read.get("torch_dtype")), "bf16")
    own = replace(
        given, head_dims=(head_dim,), heads=heads, kv_heads=read.get("num_key_value_heads") or heads, dtypes=(dtype,),
        causal=(True,), softcap=bool(read.get("attn_logit_softcapping")),
        rotary_dim=int(head_dim * read.get("partial_rotary_factor", 1.0)),
    )  # fmt: skip
    ops = ["attention", "attention_varlen", "attention_paged", "decode", "append", "rope"]
    ops += ["attention_backward"] if own.backward else []
    works = wanted(ops, own)
    if left:
        windowed = [op for op in ops if op.startswith(("attention", "decode"))]
        works += wanted(windowed, replace(own, window=(left - 1, -1)))
    norm = "rms_norm" if "rms_norm_eps" in read else "layer_norm"
    for residual in (False, True):
        works.append(Rows(norm, width, dtype, residual=residual, bias=norm == "layer_norm", backward=own.backward))
    act = str(read.get("hidden_act") or read.get("hidden_activation") or "silu")
    if act in ACTIVATIONS:
        width = 2 * read["intermediate_size"]
        works.append(Rows(ACTIVATIONS[act], width, dtype, backward=own.backward, exact=act == "gelu"))
    return list(dict.fromkeys(works))


def _calls(op: str, sizes: Sizes) -> Iterator[Work]:
    if op in ("attention", "attention_backward", "attention_varlen"):
        for call in _attention(sizes):
            if op == "attention":
                yield call
            elif call.dtype != "fp8" and op == "attention_backward":
                yield BackwardProblem(call, ("q", "k", "v"))
            elif call.dtype != "fp8":
                rows = call.batch * call.seq_q
                yield replace(call, varlen=True, total_q=rows, total_k=rows)
    elif op == "decode":
        yield from _decode(sizes)
    elif op == "attention_paged":
        for paged in _decode(sizes):
            for seq in sizes.seqs:
                yield replace(paged, tokens=seq, ragged=True, total=paged.batch * seq)
    elif op == "append":
        for one in _decode(sizes):
            for rotary in (False, True):
                pages = one.context // one.page_size
                yield Appending(
                    one.kv_heads, one.head_dim, one.page_size, one.dtype, one.format, rotary=rotary, pages=pages
                )
    elif op == "rope":
        for dim, dtype in itertools.product(sizes.head_dims, _wide(sizes)):
            for ids in (False, True):
                yield Rotation(sizes.heads, sizes.kv_heads, dim, min(dim, sizes.rotary_dim), dtype, position_ids=ids)
    else:
        for width, dtype in itertools.product(sizes.widths, _wide(sizes)):
            packed = 2 if op in GLU else 1
            yield Rows(op, packed * width, dtype, backward=sizes.backward)
            if op.endswith("_norm"):
                yield Rows(op, width, dtype, residual=True, backward=sizes.backward)


def _attention(sizes: Sizes) -> Iterator[AttentionProblem]:
    seqs = dict.fromkeys((*sizes.seqs, *(max(1, seq - 1) for seq in sizes.seqs)))  # multiples of 16, and not
    for dim, dtype, batch, seq, causal in itertools.product(
        sizes.head_dims, sizes.dtypes, sizes.batches, seqs, sizes.causal
    ):
        yield AttentionProblem(
            batch=batch, seq_q=seq, seq_k=seq, heads=sizes.heads, kv_heads=sizes.kv_heads, head_dim=dim, dtype=dtype,
            causal=causal, window=sizes.window, softcap=sizes.softcap, sinks=sizes.sinks,
        )  # fmt: skip


def _decode(sizes: Sizes) -> Iterator[DecodeProblem]:
    for dim, dtype, batch, page, more in itertools.product(
        sizes.head_dims, _wide(sizes), sizes.batches, sizes.page_sizes, (0, 1)
    ):
        pages = -(-max(sizes.seqs) // (16 * page)) * 16 + more  # a multiple of 16, and not: the stride of the table
        for name in sizes.cache_formats or (dtype,):
            form = lookup(name)
            yield DecodeProblem(
                batch=batch, tokens=1, heads=sizes.heads, kv_heads=sizes.kv_heads, head_dim=dim,
                context=pages * page, page_size=page, row_bits=2 * form.bits(dim), dtype=dtype, format=form.name,
                scales="token" if form.quantised else "", window=sizes.window, softcap=sizes.softcap, sinks=sizes.sinks,
            )  # fmt: skip


def _wide(sizes: Sizes) -> list[str]:
    """The dtypes of queries and rows: FP8 is one of attention alone."""
    return [dtype for dtype in sizes.dtypes if dtype != "fp8"]


def parse(**given: Any) -> Sizes:
    """Sizes by name; one that is unknown raises.

    >>> parse(head_dims=[72]).head_dims
    [72]
    """
    known = [field.name for field in fields(Sizes)]
    for name in given:
        if name not in known:
            raise TypeError(f"{name!r} is not one of the sizes: {', '.join(known)}")
    return Sizes(**given)
