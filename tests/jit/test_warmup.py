"""Strict mode and warm-up: what may compile, and when. What they do on a GPU is at the end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import flashkernels as fk
from flashkernels.aot.experts import Experts
from flashkernels.aot.projections import Projection
from flashkernels.aot.vocabulary import Accepting, Loss, Sampling
from flashkernels.aot.wanted import OPS, Sizes, counts, of_model, parse, wanted
from flashkernels.aot.work import Rotation, Rows
from flashkernels.attention.problem import AttentionProblem, BackwardProblem
from flashkernels.decode.problem import DecodeProblem
from flashkernels.jit import nvrtc, strict
from flashkernels.moe.hopper.gemm_tiles import LEAST

KERNEL = 'extern "C" __global__ void f(int* p) { *p = 1; }'
CALL = AttentionProblem(batch=1, seq_q=256, seq_k=256, heads=8, kv_heads=2, head_dim=72, causal=True)


def test_strict_mode_forbids_the_compiler_and_says_what_to_do() -> None:
    with fk.strict(), pytest.raises(fk.CompileStall, match=r"f\.cu for sm_90a \(\w+\) is not compiled.*fk\.warmup"):
        nvrtc.compile("f.cu", KERNEL, {})
    assert nvrtc.compile("f.cu", KERNEL, {})
    with fk.strict():  # the cache has it
        assert nvrtc.compile("f.cu", KERNEL, {})


def test_strict_mode_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHKERNELS_STRICT", "1")
    with pytest.raises(fk.CompileStall):
        nvrtc.compile("f.cu", KERNEL, {})
    with strict.allowed():
        assert nvrtc.compile("f.cu", KERNEL, {})
    assert strict.active()


def test_strict_mode_holds_in_every_thread_and_ends_with_the_outermost_block() -> None:
    found: list[bool] = []

    def ask() -> None:
        thread = threading.Thread(target=lambda: found.append(strict.active()))
        thread.start()
        thread.join()

    with fk.strict():
        with fk.strict():
            ask()
        with strict.allowed():
            assert not strict.active()
            ask()
        ask()
    ask()
    assert found == [True, True, True, False]


def test_an_error_ends_strict_mode() -> None:
    with pytest.raises(KeyError), fk.strict():
        raise KeyError
    assert not strict.active()


def test_every_op_has_calls() -> None:
    kinds = {op: {type(one) for one in wanted([op], Sizes(tokens=64))} for op in OPS}
    assert kinds["attention"] == {AttentionProblem} and kinds["attention_backward"] == {BackwardProblem}
    assert kinds["decode"] == {DecodeProblem} and kinds["rope"] == {Rotation} and kinds["softmax"] == {Rows}
    assert kinds["sample"] == {Sampling} and kinds["linear_cross_entropy"] == {Loss} and kinds["moe"] == {Experts}
    assert kinds["linear"] == kinds["norm_linear"] == {Projection} and kinds["speculative_accept"] == {Accepting}
    training = {op: wanted([op], Sizes(tokens=64, backward=True)) for op in OPS}
    for op in ("attention", "attention_varlen", "attention_backward"):
        assert any(isinstance(one, BackwardProblem) for one in training[op])
    for op in ("rms_norm", "swiglu", "linear", "norm_linear", "cross_entropy", "linear_cross_entropy", "moe"):
        assert all(one.backward for one in training[op] if isinstance(one, (Rows, Projection, Loss, Experts)))


def test_sizes_multiply() -> None:
    calls = wanted(["attention"], Sizes(head_dims=[64, 72], dtypes=["bf16", "fp8"], batches=[2], seqs=[128, 256]))
    assert len(calls) == 2 * 2 * 2 * 4  # lengths that are no multiples of 16 too
    formats = Sizes(head_dims=[64], batches=[1], page_sizes=[16], cache_formats=["int8", "int4"])
    assert len(wanted(["decode"], formats)) == 2 * 2
    widths = [one.width for one in wanted(["swiglu", "rms_norm"], Sizes(widths=[100])) if isinstance(one, Rows)]
    assert widths == [200, 100, 100, 100, 100]


def test_the_settings_of_row_wise_ops_are_prepared_for() -> None:
    found = {op: wanted([op], Sizes(widths=[64])) for op in ("rms_norm", "layer_norm", "gelu", "geglu")}
    for residual in (False, True):
        assert Rows("rms_norm", 64, residual=residual, rounded=True) in found["rms_norm"]
        assert Rows("layer_norm", 64, residual=residual, bias=True) in found["layer_norm"]
    assert Rows("gelu", 64, tanh=True) in found["gelu"] and Rows("geglu", 128, exact=True) in found["geglu"]


@pytest.mark.parametrize(
    ("ops", "sizes", "message"),
    [
        (["atention"], {}, "'atention' is not one of attention"),
        (["attention"], {"head_dims": [0]}, r"head_dims=\[0\]: 0 is not a positive"),
        (["attention"], {"head_dims": 64}, "head_dims=64 must be a list"),
        (["attention"], {"heads": 9, "kv_heads": 2}, "heads=9 is not a multiple of kv_heads=2"),
        (["attention"], {"dtypes": ["fp12"]}, "'fp12' is not one of"),
        (["attention"], {"head_dim": [64]}, "'head_dim' is not one of the sizes: head_dims"),
    ],
)
def test_bad_sizes_are_named(ops: list[str], sizes: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        wanted(ops, parse(**sizes))
    with pytest.raises((TypeError, ValueError), match=message):
        fk.warmup(*ops, **sizes)


def test_bad_work_is_named() -> None:
    with pytest.raises(TypeError, match="work=None must be a problem or the name of an op, got NoneType"):
        fk.warmup(None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"sizes=\['head_dims'\] go with names of ops"):
        fk.warmup(CALL, head_dims=[64])
    with pytest.raises(ValueError, match="op='norm' is not one of"):
        Rows("norm", 64)
    with pytest.raises(ValueError, match="tanh=True is for gelu, not 'geglu'"):
        Rows("geglu", 64, tanh=True)
    with pytest.raises(ValueError, match="rounded=True is for rms_norm, not 'layer_norm'"):
        Rows("layer_norm", 64, rounded=True)
    with pytest.raises(ValueError, match="weight='fp8' is not one of '', 'none', fp16"):
        Rows("layer_norm", 64, weight="fp8")


LLAMA = """{"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
"hidden_act": "silu", "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16", "sliding_window": 4096}"""


def test_a_models_config_gives_its_calls(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(LLAMA)
    works = of_model(config, Sizes(batches=[1], seqs=[1024], page_sizes=[16]))
    kinds = {type(one).__name__ for one in works}
    assert kinds == {"AttentionProblem", "DecodeProblem", "Appending", "Rotation", "Rows", "Projection"}
    attention = [one for one in works if isinstance(one, AttentionProblem)]
    assert {(one.head_dim, one.heads, one.kv_heads, one.causal) for one in attention} == {(128, 32, 8, True)}
    assert {one.window for one in attention} == {(-1, -1), (4095, -1)}
    assert {one.seq_q for one in attention} >= {*counts(1024)} and max(one.seq_q for one in attention) == 1024
    assert [(one.op, one.width) for one in works if isinstance(one, Rows)][-1] == ("swiglu", 28672)
    layers = {(one.width, one.depth, one.activation, one.normed) for one in works if isinstance(one, Projection)}
    assert layers == {(14336, 4096, "swiglu", False), (14336, 4096, "swiglu", True), (6144, 4096, "", True)}


MIXTRAL = {
    "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336,
    "num_local_experts": 8, "num_experts_per_tok": 2, "hidden_act": "silu", "rms_norm_eps": 1e-5, "vocab_size": 32000,
}  # fmt: skip
QWEN3 = {
    "model_type": "qwen3_moe", "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "hidden_act": "silu", "rms_norm_eps": 1e-6, "vocab_size": 151936,
}  # fmt: skip
QWEN2 = {**QWEN3, "model_type": "qwen2_moe", "norm_topk_prob": None, "shared_expert_intermediate_size": 5632}


@pytest.mark.parametrize(
    ("config", "layer"),
    [
        (MIXTRAL, Experts(1, 4096, 14336, 8, 2)),
        (QWEN3, Experts(1, 2048, 768, 128, 8)),
        (QWEN2, Experts(1, 2048, 768, 128, 8, renormalise=False, shared=True)),
    ],
    ids=["mixtral", "qwen3", "qwen2"],
)
def test_a_model_of_experts_gives_its_layers(config: dict[str, Any], layer: Experts, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    works = of_model(tmp_path / "config.json", Sizes(batches=[4], seqs=[256]))
    layers = [one for one in works if isinstance(one, Experts)]
    last = (LEAST * layer.experts - 1) // layer.k  # tokens that Hopper's own products leave to Triton
    tokens = {*counts(1024), *(n for n in (last, last // 16 * 16) if n <= 1024)}
    assert [one.tokens for one in layers] == sorted(tokens) and {replace(one, tokens=1) for one in layers} == {layer}
    sampled = [one for one in works if isinstance(one, Sampling)]
    assert {(one.vocab, one.dtype) for one in sampled} == {(config["vocab_size"], dtype) for dtype in ("bf16", "fp32")}
    rows = {(one.op, one.width) for one in works if isinstance(one, Rows)}
    wide = {("rms_norm", layer.hidden), ("softmax", config["vocab_size"]), ("swiglu", 2 * config["intermediate_size"])}
    assert rows >= wide and (("rms_norm", 128) in rows) == (config is QWEN3)
    assert (("swiglu", 2 * 5632) in rows) == (config is QWEN2)
    assert not any(isinstance(one, Loss) for one in works)
    training = of_model(tmp_path / "config.json", Sizes(batches=[4], seqs=[256], backward=True))
    assert [one.hidden for one in training if isinstance(one, Loss)] == [0, layer.hidden]
    assert any(isinstance(one, BackwardProblem) and one.call.varlen for one in training)
    assert all(one.backward for one in training if isinstance(one, Experts))


def test_experts_of_an_unknown_activation_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**MIXTRAL, "hidden_act": "tanh"}))
    with pytest.raises(ValueError, match="hidden_act='tanh' is no activation of"):
        of_model(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Experts(1, 64, 64, 2048, 2), "experts=2048 is over 1024"),
        (lambda: Experts(1, 64, 64, 8, 2, weights="fp8", backward=True), "weights='fp8' have no gradients"),
        (lambda: Experts(1, 64, 64, 8, 2, score="tanh"), "score='tanh' is not one of 'softmax', 'sigmoid'"),
        (lambda: Sampling(100, 1, rows=("heat",)), "'heat' is not one of temperature"),
        (lambda: Loss(0), "vocab=0 must be at least 1"),
        (lambda: Projection(1, 0, 64), "width=0 must be at least 1"),
        (lambda: Projection(1, 64, 64, activation="tanh"), "activation='tanh' is not one of '', 'relu'"),
        (lambda: Accepting(100, 1, 2000), "drafts=2000 is over 1024"),
        (lambda: Accepting(100, 1, 4, logits=False, heats=True), "heats=True: a temperature is of logits"),
    ],
)
def test_bad_calls_are_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("text", "message"), [("{", "not a model's config.json"), ("[]", "holds a list"), ("{}", "has no hidden_size")]
)
def test_a_config_that_is_none_is_named(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        of_model(tmp_path / "config.json")
    with pytest.raises(ValueError, match="not a model's config"):
        of_model(tmp_path / "missing.json")


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU")
def test_without_a_gpu_there_is_nothing_to_warm_up(kernel_cache: Path) -> None:
    done = fk.warmup(CALL, "rms_norm")
    assert (done.kernels, done.compiled) == (0, 0) and str(done).startswith("0 kernels") and not kernel_cache.exists()


# Once by Triton's JIT and NVRTC, then strict: warmed, or from a folder, with the compilers taken away.
PROGRAM = """
import sys, time, torch
import flashkernels as fk
from flashkernels.aot.work import Accepting, DecodeProblem, Experts, Loss, Projection, Rotation, Rows, Sampling
from flashkernels.attention.problem import AttentionProblem, BackwardProblem
from flashkernels.kvcache import PagedCache
file, mode = sys.argv[1:]
torch.manual_seed(0)
half = {"device": "cuda", "dtype": torch.bfloat16}
inputs = {dim: [torch.randn(2, 256, heads, dim, **half) for heads in (8, 2, 2)] for dim in (72, 70)}
cos, sin = fk.rope_tables(256, 72, device="cuda")
x, weight = torch.randn(64, 100, **half), torch.randn(576, **half)
y, z = torch.randn(2, 64, 576, **half)
table = torch.arange(32, device="cuda", dtype=torch.int32).reshape(2, 16)
cache = PagedCache.allocate(32, 16, 2, 72, block_table=table)
cache.k.normal_(), cache.v.normal_(), cache.lengths.fill_(100)
router, ups, downs = (torch.randn(*shape, **half) for shape in ((8, 576), (8, 256, 576), (8, 576, 128)))
head, targets = torch.randn(576, 576, **half), torch.arange(64, device="cuda")
seeds = torch.arange(2, device="cuda")

def results():
    outs = [fk.attention(*inputs[dim], causal=True) for dim in inputs]
    outs += fk.rope(*inputs[72][:2], cos, sin)
    outs.append(fk.softmax(x))
    outs += fk.rms_norm(y, weight, residual=z)
    leaves = [a.clone().requires_grad_() for a in inputs[72]]
    outs += torch.autograd.grad(fk.attention(*leaves, causal=True).float().square().sum(), leaves)
    outs.append(fk.decode(inputs[72][0][:, :1], cache))
    outs.append(fk.moe.layer(y, router, ups, downs, k=2))
    outs.append(fk.moe.layer(y[:3], router, ups, downs, k=2))
    outs += fk.fused.sample(y[:2], temperature=0.8, top_k=40, seeds=seeds)[:2]
    outs += fk.fused.speculative_accept(targets[:8].view(2, 4), target_logits=y[:10].view(2, 5, 576), seeds=seeds)
    for rows in (y, y[:3]):
        outs.append(fk.fused.linear(rows, ups[0], activation="swiglu"))
        outs.append(fk.fused.norm_linear(rows, weight, ups[0], activation="swiglu"))
    leaves = [a.clone().requires_grad_() for a in (y, weight, ups[0])]
    outs += torch.autograd.grad(fk.fused.norm_linear(*leaves, activation="swiglu").float().square().sum(), leaves)
    leaves = [a.clone().requires_grad_() for a in (y, head)]
    outs += torch.autograd.grad(fk.fused.linear_cross_entropy(*leaves, targets), leaves)
    leaves = [a.clone().requires_grad_() for a in (y, router, ups, downs)]
    outs += torch.autograd.grad(fk.moe.layer(*leaves, k=2), leaves, z)
    return outs

torch.cuda.synchronize()
start = time.perf_counter()
if mode == "jit":
    torch.save(results(), file)
    sys.exit()
if mode == "folder":
    import triton
    from flashkernels.jit import nvrtc
    triton.compile = nvrtc.Compiler.run = None
call = AttentionProblem(batch=2, seq_q=256, seq_k=256, heads=8, kv_heads=2, head_dim=72, causal=True)
odd = AttentionProblem(batch=2, seq_q=256, seq_k=256, heads=8, kv_heads=2, head_dim=70, causal=True)
gradients = BackwardProblem(call, ("q", "k", "v"))
norm = Rows("rms_norm", 576, residual=True)
sizes = {"batch": 2, "tokens": 1, "heads": 8, "kv_heads": 2, "head_dim": 72, "context": 256}
decode = DecodeProblem(page_size=16, row_bits=2304, **sizes)
layers = [Experts(64, 576, 128, 8, 2, backward=True), Experts(3, 576, 128, 8, 2), Rows("swiglu", 256, backward=True)]
last = [Sampling(576, 2, top_k=40), Accepting(576, 2, 4), Loss(576, 576, backward=True)]
for rows in (3, 64):
    last += [Projection(rows, 128, 576, activation="swiglu", normed=on, backward=True) for on in (False, True)]
work = [call, odd, gradients, norm, Rows("softmax", 100), Rotation(8, 2, 72), decode, *layers, *last]
work = work if mode == "warm" else []
done = fk.warmup(*work)
with fk.strict():
    outs = results()
    torch.cuda.synchronize()
    took = time.perf_counter() - start
    for i, (ours, jit) in enumerate(zip(outs, torch.load(file), strict=True)):
        assert torch.equal(ours, jit), i
    try:
        fk.softmax(torch.randn(64, 3000, device="cuda", dtype=torch.float16))
    except fk.CompileStall as stall:
        assert "softmax.forward_kernel" in str(stall)
    else:
        raise AssertionError("nothing was raised")
print(done.kernels, done.compiled, took)
"""


def run(mode: str, cache: Path, home: Path) -> list[str]:
    environment = {**os.environ, "FLASHKERNELS_CACHE": str(cache), "TRITON_CACHE_DIR": str(home / f"triton-{mode}")}
    command = [sys.executable, "-c", PROGRAM, str(home / "outs.pt"), mode]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.gpu
def test_after_warm_up_nothing_is_compiled_and_results_are_those_of_the_jit(kernel_cache: Path, tmp_path: Path) -> None:
    """Bit for bit; and the next process only loads what this one compiled."""
    run("jit", tmp_path / "other", tmp_path)
    first, second = (run("warm", kernel_cache, tmp_path) for _ in range(2))
    assert first[0] == first[1] == second[0] and second[1] == "0"
    print(f"{first[0]} kernels; seconds from torch's start to the results: {first[2]}, then {second[2]}")


@pytest.mark.gpu
def test_a_folder_built_ahead_serves_without_a_compiler(tmp_path: Path) -> None:
    gpu = fk.detect()
    assert gpu is not None
    folder = tmp_path / "kernels"
    ops = "attention,rope,softmax,rms_norm,decode,linear,norm_linear,sample,speculative_accept,linear_cross_entropy,moe"
    ops += " --head-dims 72,70 --widths 100,576"
    experts = "--hidden 576 --inner 128 --experts 8 --experts-per-token 2 --tokens 64 --page-sizes 16 --backward"
    command = f"compile --gpu {gpu.key} --ops {ops} --batches 2 --seqs 256 --heads 8 --kv-heads 2 {experts}"
    subprocess.run([sys.executable, "-m", "flashkernels", *command.split(), "--out", str(folder)], check=True)
    run("jit", tmp_path / "other", tmp_path)
    before = sorted(folder.rglob("*"))
    print(f"seconds from torch's start to the results: {run('folder', folder, tmp_path)[2]}")
    assert sorted(folder.rglob("*")) == before
