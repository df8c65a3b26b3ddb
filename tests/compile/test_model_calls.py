"""What is compiled ahead for a model is what its calls ask for: public functions, called on tensors without memory that
pose as a GPU's, note the same kernels. The recipes of `aot` have no part in that."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef

import flashkernels as fk
from flashkernels import dispatch, kvcache
from flashkernels.aot.blank import empty
from flashkernels.aot.wanted import Sizes, counts, of_model, wanted
from flashkernels.aot.work import Work, programs
from flashkernels.attention import api as attention_api
from flashkernels.attention.problem import AttentionProblem, BackwardProblem
from flashkernels.attention.tensors import lse_shape
from flashkernels.decode import api as decode_api
from flashkernels.hardware import Gpu, lookup
from flashkernels.jit.counters import Address
from flashkernels.jit.eager import Plans
from flashkernels.jit.notes import Noted, noting
from flashkernels.moe import gemm
from flashkernels.moe.combine import CombineProblem
from flashkernels.moe.plan import sizes
from flashkernels.moe.problem import GemmProblem, RouteProblem
from flashkernels.moe.rows import RoundingProblem
from flashkernels.moe.triton import route
from flashkernels.moe.weights import rounded_rows

BF16 = torch.bfloat16
MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2,
    "intermediate_size": 896, "num_local_experts": 8, "num_experts_per_tok": 2, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "vocab_size": 32000, "torch_dtype": "bfloat16", "sliding_window": None,
}  # fmt: skip
QWEN3 = {
    "model_type": "qwen3_moe", "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4,
    "head_dim": 128, "intermediate_size": 3072, "moe_intermediate_size": 384, "num_experts": 60,
    "num_experts_per_tok": 6, "norm_topk_prob": False, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "vocab_size": 151936, "dtype": "bfloat16", "use_sliding_window": False, "sliding_window": 128,
}  # fmt: skip
CONFIGS = {"mixtral": MIXTRAL, "qwen3_moe": QWEN3}
SIZES = Sizes(batches=[1, 12], seqs=[256], page_sizes=[16])


def on(problem: Any) -> Any:
    """The problem, on a GPU."""
    if isinstance(problem, BackwardProblem):
        return replace(problem, call=replace(problem.call, device="cuda"))
    return replace(problem, device="cuda")


def differentiable(op: CustomOpDef) -> Callable[..., Any]:
    """The registered op without torch's dispatcher, which would not run it on such tensors: its own function, with its
    own gradients."""
    if op._backward_fn is None:
        return op._init_fn

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(*inputs: Any) -> Any:
            found = op._init_fn(*inputs)
            return tuple(found) if isinstance(found, list) else found

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.listed = op._opoverload._schema.returns[0].type.kind() == "ListType"
            op._setup_context_fn(ctx, inputs, list(output) if ctx.listed else output)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return op._backward_fn(ctx, list(grads)) if ctx.listed else op._backward_fn(ctx, *grads)

    return Function.apply


class Asked:
    """Calls of public functions as if there were a GPU, and the kernels that they would look up."""

    def __init__(self, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gpu = gpu
        self.labels: dict[str, str] = {}
        select = dispatch.select

        def posed(impls: Sequence[Any], problem: Any, _: Any, name: str = "auto") -> Any:
            impl = select(impls, on(problem), gpu, name)
            return SimpleNamespace(name=impl.name, load=lambda: Posed(impl.load(), gpu))

        def unwatched(tensors: Sequence[Tensor | None]) -> bool:
            return not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors))

        for name, module in [*sys.modules.items()]:
            if not name.startswith("flashkernels.") or name.startswith("flashkernels.aot"):
                continue
            for attribute, value in [*vars(module).items()]:
                if value is select:
                    monkeypatch.setattr(module, attribute, posed)
                elif attribute == "unwatched":
                    monkeypatch.setattr(module, attribute, unwatched)
                elif attribute == "followed_only":
                    monkeypatch.setattr(module, attribute, lambda tensors: True)
                elif isinstance(value, CustomOpDef):
                    monkeypatch.setattr(module, attribute, differentiable(value))

        # Nothing is kept: another GPU may pose next.
        def ready(plans: Plans, tensors: Any, settings: Any) -> Any:
            return plans.make(tensors, settings) if unwatched(tensors) else None

        monkeypatch.setattr(Plans, "find", lambda plans, tensors, settings: plans.make(tensors, settings))
        monkeypatch.setattr(Plans, "ready", ready)
        monkeypatch.setattr(gemm.Prepared, "find", lambda _, tensors, call: gemm._plan(tensors, call))
        monkeypatch.setattr(decode_api, "_plans", {})
        fusable = attention_api._fusable
        monkeypatch.setattr(attention_api, "_fusable", lambda _, impl: fusable("cuda", impl))
        monkeypatch.setattr(route, "zeros", lambda count, dtype, device: Address(1 << 20, dtype))
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # which knows no such device

    def __call__(self, call: Callable[[], Any]) -> None:
        with noting(self.gpu.cc) as found:
            call()
        assert found
        self.labels |= {program.key: program.label for program in found}


class Posed:
    """An implementation's module, whose plans are for the GPU."""

    def __init__(self, module: Any, gpu: Gpu) -> None:
        self.module, self.gpu = module, gpu

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.module, name)
        if not name.endswith("plan"):
            return function

        def plan(problem: Any, _: Any, *rest: Any) -> Any:
            try:
                return function(on(problem), self.gpu, *rest)
            except Noted:  # CUDA C++ is compiled by the plan; what follows it is to be asked for all the same
                if isinstance(problem, AttentionProblem):
                    return lambda tensors, *_: (torch.empty_like(tensors[0]), empty(*lse_shape(tensors[0])))
                if isinstance(problem, RouteProblem):
                    return lambda *_: routed(problem, rest[1])
                if isinstance(problem, GemmProblem):
                    return lambda *_: empty(problem.rows, problem.width, dtype=rest[1].out)
                if isinstance(problem, RoundingProblem):
                    return lambda x: rounded_rows(x, rest[1].format)
                if isinstance(problem, CombineProblem):
                    return lambda *_: empty(problem.rows, problem.width, dtype=rest[1].out)
                raise

        return plan


def routed(problem: RouteProblem, call: Any) -> tuple[Tensor, ...]:
    """What a routing returns, without memory."""
    whole = (problem.tokens, problem.k)
    shapes = [whole, *sizes(*whole, call.last - call.first, call.block).values()]
    return empty(*whole), *(empty(*shape, dtype=torch.int32) for shape in shapes)


@pytest.fixture
def asked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Asked:
    return Asked(lookup(request.param), monkeypatch)


def missing(asked: Asked, works: Sequence[Work]) -> list[str]:
    there = {program.key for work in works for program in programs(work, asked.gpu)}
    return [label for key, label in asked.labels.items() if key not in there]


def half(*shape: int, learns: bool = False) -> Tensor:
    return empty(*shape, dtype=BF16).requires_grad_(learns)


def experts(config: dict[str, Any], learns: bool = False) -> dict[str, Any]:
    """The arguments of `moe.layer`, but its tokens."""
    n, hidden = config.get("num_experts") or config["num_local_experts"], config["hidden_size"]
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    return {
        "router_weight": half(n, hidden, learns=learns), "w_gate_up": half(n, 2 * inner, hidden, learns=learns),
        "w_down": half(n, hidden, inner, learns=learns), "k": config["num_experts_per_tok"],
        "renormalise": config.get("norm_topk_prob", True),
    }  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("asked", ["h200", "a100", "rtx5090"], indirect=True)
def test_a_served_model_finds_its_kernels(name: str, asked: Asked, tmp_path: Path) -> None:
    config = CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    hidden, heads, kv_heads = (config[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    dim, vocab, weight = config.get("head_dim", hidden // heads), config["vocab_size"], half(hidden)
    layer, gate_up = experts(config), half(2 * config["intermediate_size"], hidden)
    cos = empty(4096, dim // 2)
    for batch, seq in ((1, 256), (12, 256), (1, 255), (12, 1)):
        tokens = half(batch, seq, hidden)
        q, k = half(batch, seq, heads, dim), half(batch, seq, kv_heads, dim)
        if seq > 1:
            asked(lambda q=q, k=k: fk.attention(q, k, k, causal=True))
        asked(lambda x=tokens: fk.rms_norm(x, weight))
        asked(lambda x=tokens: fk.rms_norm(x, weight, residual=x))
        asked(lambda q=q, k=k: fk.rope(q, k, cos, cos, position_ids=empty(*q.shape[:2], dtype=torch.int64)))
        asked(lambda b=batch, s=seq: fk.swiglu(half(b, s, 2 * config["intermediate_size"])))
        asked(lambda x=tokens: fk.fused.linear(x, gate_up, activation="swiglu"))
        asked(lambda x=tokens: fk.fused.norm_linear(x, weight, gate_up, activation="swiglu"))
        asked(lambda x=tokens: fk.fused.norm_linear(x, weight, half((heads + 2 * kv_heads) * dim, hidden)))
        asked(lambda x=tokens: fk.moe.layer(x, **layer))
        if name == "qwen3_moe":
            asked(lambda q=q: fk.rms_norm(q, half(dim)))
    for batch, seq in ((1, 2), (1, 77), (1, 128), (5, 200), (9, 99), (12, 16)):
        q, k = half(batch, seq, heads, dim), half(batch, seq, kv_heads, dim)
        asked(lambda q=q, k=k: fk.attention(q, k, k, causal=True))
    for batch in (1, 7, 12):
        logits, row = half(batch, vocab), empty(batch)
        asked(lambda x=logits: fk.fused.sample(x, temperature=0.0))
        asked(lambda x=logits: fk.fused.sample(x))
        asked(lambda x=logits: fk.fused.sample(x, temperature=0.8, top_p=0.95))
        asked(lambda x=logits: fk.fused.sample(x, temperature=0.8, top_k=40))
        rows = {"temperature": row, "top_k": empty(batch, dtype=torch.int32), "top_p": row}
        asked(lambda x=logits, rows=rows: fk.fused.sample(x.float(), **rows))
        asked(lambda x=logits: fk.softmax(x.float()))
        asked(lambda b=batch: fk.moe.layer(half(b, hidden), **layer))
    for batch in (1, 12):
        table = empty(batch, 16, dtype=torch.int32)
        cache = kvcache.PagedCache.allocate(64, 16, kv_heads, dim, block_table=table)
        object.__setattr__(cache, "shared", False)  # tensors without memory all are at one address
        asked(lambda b=batch, cache=cache: fk.decode(half(b, 1, heads, dim), cache))
    assert not missing(asked, of_model(tmp_path / "config.json", SIZES))
    if asked.gpu.key == "h200":
        assert any(label.startswith("decode.cu") for label in asked.labels.values())


@pytest.mark.parametrize("asked", ["h200", "a100"], indirect=True)
def test_training_finds_its_kernels(asked: Asked, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    hidden, inner, vocab = QWEN3["hidden_size"], QWEN3["intermediate_size"], QWEN3["vocab_size"]
    q, k, v = (half(1, 256, heads, 128, learns=True) for heads in (16, 4, 4))
    x, weight, head = (half(*shape, learns=True) for shape in ((256, hidden), (hidden,), (vocab, hidden)))
    targets, table, gate_up = empty(256, dtype=torch.int64), empty(4096, 64), half(2 * inner, hidden, learns=True)
    calls: list[Callable[[], Tensor]] = [
        lambda: fk.attention(q, k, v, causal=True),
        lambda: torch.cat(fk.rope(q, k, table, table), 2),
        lambda: torch.cat(fk.rope(q, k, table, table, position_ids=targets[None]), 2),
        lambda: fk.rms_norm(x, weight),
        lambda: sum(fk.rms_norm(x, weight, residual=x)),
        lambda: fk.swiglu(half(256, 2 * inner, learns=True)),
        lambda: fk.moe.layer(x, **experts(QWEN3, learns=True)),
        lambda: fk.fused.linear(x, gate_up, activation="swiglu"),
        lambda: fk.fused.norm_linear(x, weight, gate_up, activation="swiglu"),
        lambda: fk.fused.linear_cross_entropy(x, head, targets),
        lambda: fk.fused.cross_entropy(half(256, vocab, learns=True), targets),
    ]
    for call in calls:
        asked(lambda call=call: (out := call()).backward(torch.empty_like(out)))
        with torch.no_grad():
            asked(call)
    names = " ".join(asked.labels.values())
    attention = ("backward.cu",) if asked.gpu.key == "h200" else ("dkdv_kernel",)
    of_gradients = ("CONJUGATE=True", "norm.backward", "spread", "dw_kernel", "multiply", *attention)
    assert all(kernel in names for kernel in of_gradients)
    assert not missing(asked, of_model(tmp_path / "config.json", replace(SIZES, backward=True)))


@pytest.mark.parametrize(
    ("asked", "form"),
    [*(("h200", form) for form in ("", "fp8", "fp8_block", "int8", "w8", "w4")), ("a100", ""), ("a100", "w4")],
    indirect=["asked"],
)
def test_every_number_of_tokens_finds_its_kernels(form: str, asked: Asked) -> None:
    """`counts` are few, and stand for all: tried at each of many numbers that are not among them."""
    most, (n, k, hidden, inner) = 3000, (60, 4, 256, 384)
    sizes = Sizes(
        hidden=hidden, inner=inner, experts=n, experts_per_token=k, expert_formats=[form], tokens=most
    )  # fmt: skip
    ups, downs = half(n, 2 * inner, hidden), half(n, hidden, inner)
    if form:
        ups, downs = fk.moe.quantise(ups, form), fk.moe.quantise(downs, form)
    for tokens in (*range(1, 150), *range(150, most, 89)):
        x = half(tokens, hidden)
        asked(lambda x=x: fk.moe.layer(x, half(n, hidden), ups, downs, k=k))
    assert not missing(asked, wanted(["moe"], sizes))
    assert len(counts(most)) < 100


@pytest.mark.parametrize("backward", [False, True], ids=["serving", "training"])
@pytest.mark.parametrize("activation", ["", "gelu", "swiglu"])
@pytest.mark.parametrize("asked", ["h200", "a100", "rtx5090"], indirect=True)
def test_every_number_of_rows_of_a_linear_layer_finds_its_kernels(
    asked: Asked, activation: str, backward: bool
) -> None:
    most, hidden, inner = 3000, 512, 640
    sizes = Sizes(hidden=hidden, inner=inner, activations=[activation], tokens=most, backward=backward)
    norm = half(hidden, learns=backward)
    weight = half(2 * inner if activation == "swiglu" else inner, hidden, learns=backward)

    def call(x: Tensor) -> None:
        for out in (
            fk.fused.linear(x, weight, activation=activation or None),
            fk.fused.norm_linear(x, norm, weight, activation=activation or None),
        ):
            if backward:
                out.backward(torch.empty_like(out))

    for rows in (*range(1, 150, 7), *range(150, most, 89)):
        asked(lambda rows=rows: call(half(rows, hidden, learns=backward)))
    assert not missing(asked, wanted(["linear", "norm_linear"], sizes))


@pytest.mark.parametrize("drafts", [1, 5, 16])
@pytest.mark.parametrize("asked", ["h200"], indirect=True)
def test_every_batch_that_accepts_drafts_finds_its_kernels(asked: Asked, drafts: int) -> None:
    width = 50257
    for batch in (*range(1, 40, 3), 63, 99):
        ids, seeds, heats = empty(batch, drafts, dtype=torch.int64), empty(batch, dtype=torch.int64), empty(batch)
        logits, drawn = half(batch, drafts + 1, width), empty(batch, drafts, width)
        for parents in (None, empty(drafts, dtype=torch.int64)):
            for probs in (None, drawn):
                asked(
                    lambda t=(ids, logits, probs, parents, seeds): fk.fused.speculative_accept(
                        t[0], target_logits=t[1], draft_probs=t[2], parents=t[3], seeds=t[4], temperature=0.7
                    )
                )
            asked(
                lambda t=(ids, logits, parents): fk.fused.speculative_accept(
                    t[0], target_logits=t[1], parents=t[2], temperature=0.0, seeds=0
                )
            )
            asked(
                lambda t=(ids, logits, drawn, parents, seeds): fk.fused.speculative_accept(
                    t[0], target_probs=t[1].float(), draft_probs=t[2], parents=t[3], seeds=t[4]
                )
            )
        asked(
            lambda t=(ids, logits, heats, seeds): fk.fused.speculative_accept(
                t[0], target_logits=t[1], temperature=t[2], seeds=t[3]
            )
        )
    sizes = Sizes(widths=[width], batches=[100], drafts=[drafts])
    assert not missing(asked, wanted(["speculative_accept"], sizes))


@pytest.mark.parametrize("asked", ["h200"], indirect=True)
def test_every_batch_that_samples_finds_its_kernels(asked: Asked) -> None:
    for batch in range(1, 300):
        asked(lambda batch=batch: fk.fused.sample(half(batch, 50257), top_p=0.9))
        asked(lambda batch=batch: fk.fused.sample(half(batch, 50257)))
    assert not missing(asked, wanted(["sample"], Sizes(widths=[50257], batches=[300])))
