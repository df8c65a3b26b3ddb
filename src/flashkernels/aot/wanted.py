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

from flashkernels.aot.blank import DTYPES
from flashkernels.aot.experts import Experts
from flashkernels.aot.projections import Projection
from flashkernels.aot.vocabulary import Accepting, Loss, Sampling
from flashkernels.aot.work import GLU, ROW_OPS, Appending, Rotation, Rows, Work
from flashkernels.arguments import check_count
from flashkernels.attention.problem import AttentionProblem, BackwardProblem
from flashkernels.decode.problem import DecodeProblem
from flashkernels.formats import lookup
from flashkernels.moe.hopper.gemm_tiles import LEAST

OPS = (
    "attention", "attention_backward", "attention_varlen", "attention_paged", "decode", "append", "rope", *ROW_OPS,
    "linear", "norm_linear", "sample", "speculative_accept", "cross_entropy", "linear_cross_entropy", "moe",
)  # fmt: skip
ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu", "relu2": "relu2_glu"}
NORMED_HEADS = ("qwen3", "gemma3", "olmo2", "olmoe")  # queries and keys have a norm of their own
# Greedy, with top_k as a number up to 64, with top_p alone, and with tensors of settings.
SAMPLED = (
    Sampling(1, 1, greedy=True), Sampling(1, 1, top_k=50), Sampling(1, 1),
    Sampling(1, 1, rows=("temperature", "top_k", "top_p")),
)  # fmt: skip
# Logits, with drafts that were chosen or drawn, and probabilities; each as a chain and as a tree.
ACCEPTED = tuple(
    Accepting(1, 1, 1, logits=logits, drawn=drawn, tree=tree, heats=heats)
    for logits, drawn, heats in ((True, False, False), (True, False, True), (True, True, False), (True, True, True),
                                 (False, False, False), (False, True, False))
    for tree in (False, True)
)  # fmt: skip
# Of the ops that have settings, all calls but those of a norm without a weight, or with one of another dtype than x's.
ROW_SETTINGS: dict[str, tuple[dict[str, Any], ...]] = {
    "rms_norm": tuple({"residual": r, "rounded": hf} for hf in (False, True) for r in (False, True)),
    "layer_norm": tuple({"residual": r, "bias": bias} for bias in (False, True) for r in (False, True)),
    "geglu": ({}, {"exact": True}), "gelu": ({}, {"tanh": True}),
}  # fmt: skip
HF_DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}


@dataclass(frozen=True)
class Sizes:
    """What the calls are like. Every combination that an op can have is prepared for."""

    head_dims: Sequence[int] = (64, 128)
    heads: int = 32
    kv_heads: int = 8  # the decode of Hopper has the bytes of all of them compiled in, so their number has to be right
    dtypes: Sequence[str] = ("bf16",)
    batches: Sequence[int] = (1, 8)
    seqs: Sequence[int] = (256, 1024, 4096)
    causal: Sequence[bool] = (True, False)
    window: tuple[int, int] = (-1, -1)
    softcap: bool = False
    sinks: bool = False
    widths: Sequence[int] = (4096,)  # of rows; of `sample`, `speculative_accept` and the losses the vocabulary
    page_sizes: Sequence[int] = (16, 64)
    cache_formats: Sequence[str] = ()  # of a paged cache; none: that of the queries
    rotary_dim: int = 0
    hidden: int = 4096  # of linear layers, their loss and moe
    inner: int = 14336  # width of the output, of linear layers; of an expert
    activations: Sequence[str] = ("swiglu",)  # of linear layers; "": none
    drafts: Sequence[int] = (4,)  # of a sequence, of speculative_accept
    experts: int = 8
    experts_per_token: int = 2
    expert_formats: Sequence[str] = ("",)  # of the experts' weights; "": the dtype
    tokens: int = 0  # of linear layers and moe, at most; 0: those of the largest batch
    backward: bool = False  # gradients too

    def __post_init__(self) -> None:
        for name in ("head_dims", "dtypes", "batches", "seqs", "causal", "widths", "page_sizes", "cache_formats",
                     "activations", "drafts", "expert_formats"):  # fmt: skip
            value = getattr(self, name)
            if isinstance(value, str) or not isinstance(value, Sequence):
                raise TypeError(f"{name}={value!r} must be a list or a tuple")
        for name in ("head_dims", "batches", "seqs", "widths", "page_sizes", "drafts"):
            for value in getattr(self, name):
                if not isinstance(value, int) or value < 1:
                    raise ValueError(f"{name}={list(getattr(self, name))}: {value!r} is not a positive whole number")
        for name in ("hidden", "inner", "experts", "experts_per_token", "heads", "kv_heads"):
            check_count(name, getattr(self, name), 1)
        check_count("tokens", self.tokens)
        for dtype in self.dtypes:
            if dtype not in DTYPES:
                raise ValueError(f"dtypes={list(self.dtypes)}: {dtype!r} is not one of {', '.join(DTYPES)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}")


def wanted(ops: Sequence[str], sizes: Sizes | None = None) -> list[Work]:
    """The calls of these ops at these sizes.

    >>> len(wanted(["attention"], Sizes(head_dims=[72], batches=[1], seqs=[1024])))  # causal and full, 1024 and 1023
    4
    >>> [(one.op, one.width, one.tanh) for one in wanted(["gelu", "softmax"], Sizes(widths=[1000]))]
    [('gelu', 1000, False), ('gelu', 1000, True), ('softmax', 1000, False)]
    """
    sizes = sizes or Sizes()
    for op in ops:
        if op not in OPS:
            raise ValueError(f"ops: {op!r} is not one of {', '.join(OPS)}")
    return list(dict.fromkeys(itertools.chain.from_iterable(_calls(op, sizes) for op in ops)))


def of_model(config: Path, sizes: Sizes | None = None) -> list[Work]:
    """The calls of a decoder-only transformer, read from its Hugging Face config.json: prefill, decode, the cache,
    norms, RoPE, activation, linear layers with a norm or an activation, experts and sampling; with `backward` gradients
    and the loss. Of `sizes` are pages, formats and the largest batch and length: smaller ones are prepared for too."""
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
        batches=counts(max(given.batches)), seqs=counts(max(given.seqs), 8),
    )  # fmt: skip
    ops = ["attention", "attention_varlen", "attention_paged", "decode", "append", "rope"]
    works = wanted(ops, own)
    if left:
        windowed = [op for op in ops if op.startswith(("attention", "decode"))]
        works += wanted(windowed, replace(own, window=(left - 1, -1)))
    norm = "rms_norm" if "rms_norm_eps" in read else "layer_norm"
    for residual in (False, True):
        works.append(Rows(norm, width, dtype, residual=residual, bias=norm == "layer_norm", backward=own.backward))
    act = str(read.get("hidden_act") or read.get("hidden_activation") or "silu")
    for inner in (read["intermediate_size"], read.get("shared_expert_intermediate_size")):
        if act in ACTIVATIONS and inner:
            works.append(Rows(ACTIVATIONS[act], 2 * inner, dtype, backward=own.backward, exact=act == "gelu"))
            name = "geglu_exact" if act == "gelu" else ACTIVATIONS[act]
            works += _projections(Projection(1, inner, width, dtype, name), own)
            if norm == "rms_norm":
                works += _projections(Projection(1, inner, width, dtype, name, normed=True), own)
    if norm == "rms_norm":  # queries, keys and values by one product
        together = (heads + 2 * own.kv_heads) * head_dim
        works += _projections(Projection(1, together, width, dtype, normed=True), own)
    if str(read.get("model_type")).startswith(NORMED_HEADS):
        works.append(Rows(norm, head_dim, dtype, backward=own.backward))
    if experts := read.get("num_experts") or read.get("num_local_experts"):
        if act not in ACTIVATIONS or act == "gelu":
            raise ValueError(f"{config}: hidden_act={act!r} is no activation of moe.layer")
        inner = read.get("moe_intermediate_size") or read["intermediate_size"]
        model = Experts(
            1, width, inner, experts, read.get("num_experts_per_tok", 2), dtype, activation=ACTIVATIONS[act],
            renormalise=bool(read.get("norm_topk_prob", "num_local_experts" in read)),  # Mixtral always does
            shared="shared_expert_intermediate_size" in read,
        )  # fmt: skip
        works += _layers(model, own)
    if vocab := read.get("vocab_size"):
        last = replace(own, dtypes=tuple(dict.fromkeys((dtype, "fp32"))), widths=(vocab,), hidden=width)
        works += wanted(["sample", "softmax"], replace(last, backward=False))
        if own.backward:
            capped = bool(read.get("final_logit_softcapping"))
            works += [Loss(vocab, hidden, dtype, capped, backward=True) for hidden in (0, width)]
    return list(dict.fromkeys(works))


def _calls(op: str, sizes: Sizes) -> Iterator[Work]:
    if op in ("attention", "attention_backward", "attention_varlen"):
        for call in _attention(sizes):
            if call.dtype == "fp8" and op != "attention":
                continue
            if op == "attention_varlen":
                rows = call.batch * call.seq_q
                call = replace(call, varlen=True, total_q=rows, total_k=rows)
            if op != "attention_backward":
                yield call
            if call.dtype != "fp8" and (sizes.backward or op == "attention_backward"):
                yield BackwardProblem(call, ("q", "k", "v"))
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
                turned = min(dim, sizes.rotary_dim)
                yield Rotation(
                    sizes.heads, sizes.kv_heads, dim, turned, dtype, position_ids=ids, backward=sizes.backward
                )
    elif op == "sample":
        for vocab, dtype, batch in itertools.product(sizes.widths, _wide(sizes), counts(max(sizes.batches))):
            for how in SAMPLED:
                yield replace(how, vocab=vocab, dtype=dtype, batch=batch)
    elif op == "speculative_accept":
        for vocab, dtype, batch, drafts in itertools.product(
            sizes.widths, _wide(sizes), counts(max(sizes.batches)), sizes.drafts
        ):
            for accepted in ACCEPTED:
                yield replace(accepted, vocab=vocab, dtype=dtype, batch=batch, drafts=drafts)
    elif op in ("linear", "norm_linear"):
        for dtype, name in itertools.product(_wide(sizes), sizes.activations):
            model = Projection(1, sizes.inner, sizes.hidden, dtype, name, normed=op == "norm_linear")
            yield from _projections(model, sizes)
    elif op.endswith("cross_entropy"):
        for vocab, dtype in itertools.product(sizes.widths, _wide(sizes)):
            yield Loss(vocab, sizes.hidden if op.startswith("linear") else 0, dtype, backward=sizes.backward)
    elif op == "moe":
        for dtype in _wide(sizes):
            yield from _layers(
                Experts(1, sizes.hidden, sizes.inner, sizes.experts, sizes.experts_per_token, dtype), sizes
            )
    else:
        for width, dtype in itertools.product(sizes.widths, _wide(sizes)):
            plain = Rows(op, (2 if op in GLU else 1) * width, dtype, backward=sizes.backward)
            for settings in ROW_SETTINGS.get(op, ({},)):
                yield replace(plain, **settings)


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


def _projections(model: Projection, sizes: Sizes) -> Iterator[Projection]:
    """A linear layer at every number of rows."""
    for rows in counts(sizes.tokens or max(sizes.batches) * max(sizes.seqs)):
        yield replace(model, rows=rows, backward=sizes.backward)


def _layers(model: Experts, sizes: Sizes) -> Iterator[Work]:
    """The layer at every number of tokens; with gradients also the activation, which is then a call of its own."""
    for form in sizes.expert_formats:
        learns = sizes.backward and not form
        most = sizes.tokens or max(sizes.batches) * max(sizes.seqs)
        last = max(1, (LEAST * model.experts - 1) // model.k)  # that the Hopper products leave to Triton
        ends = {n for n in (last, max(1, last // 16 * 16)) if n <= most}
        for tokens in sorted({*counts(most), *ends}):
            yield replace(model, tokens=tokens, weights=form, backward=learns)
        if learns and model.activation in GLU:
            yield Rows(model.activation, 2 * model.inner, model.dtype, backward=True)


def counts(most: int, steps: int = 4) -> list[int]:
    """Numbers that stand for all from 1 to `most`: powers of two, `steps` from each to the next, and one more than each
    of these. Kernels depend on which of some thresholds a number passes, and on whether it is a multiple of 16.

    >>> counts(40, 2)
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 24, 25, 32, 33, 40]
    """
    found = {most}
    for power in range(most.bit_length()):
        for step in range(steps):
            place = (1 << power) + (step << power) // steps
            found |= {place, place + 1}
    return sorted(n for n in found if n <= most)


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
