"""`fk.explain` of decode and the fused ops: the answer is that of the call itself, and nothing runs. That of attention
has tests of its own."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import flashkernels as fk
from flashkernels.decode.hopper.source import HopperDecodeTile
from flashkernels.decode.problem import DecodeProblem
from flashkernels.dispatch import Asked
from flashkernels.explained import OPS
from flashkernels.formats import FORMATS
from flashkernels.fused.problem import LinearProblem, LossProblem
from flashkernels.fused.triton.linear_tiles import LinearTile
from flashkernels.hardware import lookup
from flashkernels.kvcache import PagedCache

H200 = lookup("h200")
ROWS, WIDTH, WIDE = 6, 52, 200  # sizes that no other test has: a plan that is known is not logged again
DECODE = DecodeProblem(
    batch=64, tokens=1, heads=32, kv_heads=8, head_dim=128, context=4096, page_size=16, row_bits=4096
)  # fmt: skip


def cache_of(device: str = "cpu", dtype: torch.dtype = torch.bfloat16, **settings: Any) -> PagedCache:
    """Of 3 sequences of 7 pages."""
    table = torch.arange(21, dtype=torch.int32, device=device).view(3, 7)
    name = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    lengths = torch.full((3,), 100, dtype=torch.int32, device=device)
    return PagedCache.allocate(21, 16, 2, 64, block_table=table, lengths=lengths, **{"format": name} | settings)


Call = tuple[tuple[Any, ...], dict[str, Any], float, int]  # arguments, their names, elements moved, FLOPs


def call_of(op: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Call:
    """A call of an op, with the work that it has to do, by hand."""

    def x(*sizes: int) -> Tensor:
        return torch.ones(sizes, dtype=dtype, device=device)

    def whole(*sizes: int) -> Tensor:
        return torch.ones(sizes, dtype=torch.int64, device=device)

    n = ROWS * WIDTH
    cu = torch.tensor([0, 2, 3, 6], dtype=torch.int32, device=device)
    keys, linear = 3 * 7 * 16, 2 * ROWS * WIDE * WIDTH
    calls: dict[str, Call] = {
        "decode": ((x(3, 1, 8, 64), cache_of(device, dtype)), {}, keys * 2 * 128 + 3 * 8 * 128, 2 * keys * 8 * 128),
        "attention_paged": (
            (x(6, 8, 64), cache_of(device, dtype), cu, 3), {}, keys * 2 * 128 + 6 * 8 * 128, 2 * keys * 2 * 8 * 128,
        ),
        "rms_norm": ((x(2, 3, WIDTH), x(WIDTH)), {}, 2 * n, 0),
        "layer_norm": ((x(2, 3, WIDTH),), {"residual": x(2, 3, WIDTH)}, 4 * n, 0),
        "swiglu": ((x(ROWS, 2 * WIDTH),), {}, 3 * n, 0),
        "geglu": ((x(ROWS, 2 * WIDTH),), {"approximate": "none"}, 3 * n, 0),
        "relu2_glu": ((x(ROWS, 2 * WIDTH),), {}, 3 * n, 0),
        "gelu": ((x(ROWS, WIDTH),), {}, 2 * n, 0),
        "rope": ((x(1, 2, 3, WIDTH), x(1, 2, 1, WIDTH), x(4, 26), x(4, 26)), {}, 2 * 8 * WIDTH, 0),
        "softmax": ((x(ROWS, WIDTH),), {}, 2 * n, 0),
        "log_softmax": ((x(ROWS, WIDTH),), {}, 2 * n, 0),
        "linear": (
            (x(2, 3, WIDTH), x(WIDE, WIDTH)), {"activation": "swiglu"}, n + WIDE * WIDTH + ROWS * WIDE // 2, linear,
        ),
        "norm_linear": (
            (x(ROWS, WIDTH), None, x(WIDE, WIDTH), x(WIDE)), {}, n + WIDE * WIDTH + ROWS * WIDE, linear,
        ),
        "cross_entropy": ((x(ROWS, WIDTH), whole(ROWS)), {}, n, 0),
        "linear_cross_entropy": ((x(ROWS, WIDTH), x(WIDE, WIDTH), whole(ROWS)), {}, n + WIDE * WIDTH, linear),
        "sample": ((x(ROWS, WIDTH),), {"top_k": 5}, n, 0),
        "speculative_accept": ((whole(2, 2),), {"target_logits": x(2, 3, WIDTH)}, n, 0),
    }  # fmt: skip
    return calls[op]


each_op = pytest.mark.parametrize("op", OPS)


def test_every_public_op_is_explained() -> None:
    """Those that have `impl`, but for attention, which has an explanation of its own, and what is made of others."""
    names = vars(fk.fused) | {name: getattr(fk, name) for name in fk.__all__}
    chosen = {name for name, f in names.items() if inspect.isfunction(f) and "impl" in inspect.signature(f).parameters}
    assert chosen - {"attention", "attention_varlen", "cascade_decode", "merge_states"} == set(OPS)


@each_op
def test_what_is_explained_is_what_is_served(op: str, caplog: pytest.LogCaptureFixture) -> None:
    args, named, _, _ = call_of(op)
    why = fk.explain(op, *args, **named)
    assert (why.op, why.gpu, why.impl, why.named) == (op, None, "torch", False)
    with caplog.at_level(logging.INFO, "flashkernels.dispatch"):
        OPS[op].function(*args, **named)
    assert caplog.messages[0].startswith(f"torch serves {why.problem} (")
    assert fk.explain(op, *args, **named) == why  # also after a call like it has been prepared


@each_op
def test_work_is_what_must_be_read_and_written_once(op: str) -> None:
    args, named, elements, flops = call_of(op, dtype=torch.bfloat16)
    why = fk.explain(op, *args, **named, gpu="h200")
    assert (why.problem.bytes(), why.problem.flops()) == (2 * elements, flops)
    assert why.memory == pytest.approx(2 * elements / 4.8e12)
    assert why.compute == pytest.approx(flops / 989.4e12)
    assert why.floor == max(why.memory, why.compute) and why.bound == "memory"
    assert f"memory bound, at least {why.floor * 1e6:.1f} µs" in str(why)
    assert ("GFLOP" in str(why)) == bool(flops) == (f"compute {why.compute * 1e6:.2f} µs" in str(why))


@each_op
def test_a_gpu_by_name_is_answered_for_tensors_on_it(op: str) -> None:
    args, named, _, _ = call_of(op, dtype=torch.bfloat16)
    why = fk.explain(op, *args, **named, gpu="h200")
    assert (why.gpu, why.problem.device) == (H200, "cuda")
    assert why.impl == ("hopper" if op == "decode" else "triton")
    title, _, serves, *rest = str(why).splitlines()
    assert title.startswith(f"{op} bf16 ") and title.endswith(" on NVIDIA H200")
    assert serves == f"implementation: {why.impl}"
    others = [v.name for v in why.verdicts if v.name != why.impl]
    assert [line.split(":")[0] for line in rest[: len(others)]] == [f"  not {name}" for name in others]


@each_op
def test_a_named_implementation_is_explained_or_refused_with_its_reason(op: str) -> None:
    args, named, _, _ = call_of(op, dtype=torch.bfloat16)
    why = fk.explain(op, *args, **named, gpu="h200", impl="torch")
    assert (why.impl, why.named, why.tile) == ("torch", True, None)
    assert "not triton: could serve, but torch was asked for" in str(why)
    with pytest.raises(fk.UnsupportedError, match=r"impl='triton' cannot serve this call: triton: "):
        fk.explain(op, *args, **named, impl="triton")  # bf16 on the CPU, interpreted or not
    with pytest.raises(ValueError, match=r"impl='cutlass' is not one of 'auto', "):
        fk.explain(op, *args, **named, impl="cutlass")


@pytest.mark.parametrize("op", ["rms_norm", "gelu", "rope", "softmax"])
def test_tensors_without_memory_are_refused(op: str) -> None:
    args, named, _, _ = call_of(op, device="meta")
    with pytest.raises(ValueError, match=f"op='{op}' chose nothing: .*meta"):
        fk.explain(op, *args, **named)


@pytest.mark.gpu
@each_op
def test_what_is_explained_is_what_is_served_on_a_gpu(op: str, caplog: pytest.LogCaptureFixture) -> None:
    args, named, _, _ = call_of(op, "cuda", torch.bfloat16)
    why = fk.explain(op, *args, **named)
    assert why.gpu == fk.detect()
    with caplog.at_level(logging.INFO, "flashkernels.dispatch"):
        OPS[op].function(*args, **named)
    assert caplog.messages[0].startswith(f"{why.impl} serves {why.problem}")
    assert fk.explain(op, *args, **named) == why


# --- nothing runs


def test_nothing_is_written_in_place() -> None:
    q, k = torch.randn(1, 3, 2, WIDTH), torch.randn(1, 3, 1, WIDTH)
    before = q.clone()
    fk.explain("rope", q, k, *fk.rope_tables(4, WIDTH), inplace=True)
    assert torch.equal(q, before)


@pytest.mark.parametrize("op", ["sample", "speculative_accept"])
def test_no_random_number_is_drawn(op: str) -> None:
    args, named, _, _ = call_of(op)
    before = torch.get_rng_state()
    fk.explain(op, *args, **named)
    fk.explain(op, *args, **named, seeds=None)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_question_is_no_implementation() -> None:
    with pytest.raises(Asked, match="asks what would serve RowProblem"):
        fk.softmax(torch.ones(2, 3), impl="?")


# --- gradients


def test_gradients_are_part_of_the_problem() -> None:
    x, weight = torch.ones(ROWS, WIDTH, requires_grad=True), torch.ones(WIDE, WIDTH)
    assert fk.explain("linear", x, weight, activation="gelu").problem.saved
    with torch.no_grad():
        assert not fk.explain("linear", x, weight, activation="gelu").problem.saved
    targets = torch.zeros(ROWS, dtype=torch.int64)
    loss = fk.explain("linear_cross_entropy", x, weight, targets).problem
    assert loss == LossProblem(ROWS, WIDE, WIDTH, "fp32", "cpu", grads=True)
    for op in ("rms_norm", "softmax", "gelu", "swiglu"):
        assert fk.explain(op, x).impl == "torch"  # the registered op is asked


# --- rows


@pytest.mark.parametrize("quantise", ["fp8", "int8"])
def test_quantised_outputs_are_a_byte_each(quantise: str) -> None:
    x = torch.ones(8, 64, dtype=torch.bfloat16)
    why = fk.explain("rms_norm", x, quantise=quantise, gpu="h200")
    assert why.problem.bytes() == 8 * 64 * (2 + 1)
    assert fk.explain("rms_norm", x, quantise=quantise, residual=x).problem.bytes() == 8 * 64 * (2 + 2 + 2 + 1)
    assert str(why).startswith(f"rms_norm bf16 rows=8 width=64 quantise={quantise} on ")


def test_fp8_needs_a_gpu_that_has_it() -> None:
    why = fk.explain("layer_norm", torch.ones(8, 64), quantise="fp8", gpu="a100")
    assert why.impl == "torch" and "not triton: FP8 needs compute capability 8.9, NVIDIA A100" in str(why)


def test_fp64_has_a_plain_implementation_only() -> None:
    why = fk.explain("softmax", torch.ones(8, 64, dtype=torch.float64), gpu="h200")
    assert (why.impl, why.bound) == ("torch", "memory") and "not triton: has no fp64 kernel" in str(why)


# --- linear layers


def test_a_linear_layer_says_why_cublas_is_taken_and_which_tile_is_not() -> None:
    plain = fk.explain("linear", problem=LinearProblem(4096, 4096, 4096, "bf16", "cuda"), gpu="h200")
    assert (plain.impl, plain.tile, plain.bound) == ("matmul", None, "compute")
    assert "not triton: without an activation cuBLAS has nothing left to fuse" in str(plain)
    assert plain.floor == pytest.approx(2 * 4096**3 / 989.4e12)
    few = fk.explain("linear", problem=LinearProblem(16, 28672, 4096, "bf16", "cuda", "swiglu"), gpu="h200")
    assert few.impl == "triton" and few.tile.swap and few.tile.block_m == 16 and few.bound == "memory"
    assert f"tile: {few.tile.name}" in str(few) and "224 tiles, a program each, loaded by TMA" in str(few)


def test_a_norm_of_many_rows_is_apart() -> None:
    x, weight = torch.empty(65, 64, dtype=torch.bfloat16), torch.empty(32, 64, dtype=torch.bfloat16)
    why = fk.explain("norm_linear", x, None, weight, gpu="h200")
    assert why.impl == "apart" and "not triton: 65 rows: the norm's own pass costs less" in str(why)
    assert fk.explain("norm_linear", x[:64], None, weight, gpu="h200").impl == "triton"


def test_the_tile_in_force_is_explained_and_kept() -> None:
    forced = LinearTile(False, 64, 64, 64, warps=4, stages=2)
    problem = LinearProblem(128, 256, 64, "bf16", "cuda", "gelu")
    with fk.use_tile(tile=forced):
        why = fk.explain("linear", problem=problem, gpu="h200", impl="triton")
    assert why.tile == forced and "8 tiles, a program each, loaded by pointers" in str(why)


# --- decode


@pytest.mark.parametrize("form", ["bf16", "fp8", "int8", "int4"])
def test_decode_on_an_h200(form: str) -> None:
    bits = 2 * FORMATS[form].bits(128)
    problem = replace(DECODE, row_bits=bits, format=form, scales="" if form == "bf16" else "token")
    why = fk.explain("decode", problem=problem, gpu="h200")
    own = 64 * 32 * 256 * 2
    assert (why.impl, why.bound, why.token_bytes) == ("hopper", "memory", 8 * bits / 8)
    assert why.floor == pytest.approx((64 * 4096 * bits + own) / 4.8e12)
    assert why.compute == pytest.approx(4 * 64 * 4096 * 32 * 128 / 989.4e12)
    tile = why.tile
    assert isinstance(tile, HopperDecodeTile)
    text = str(why)
    assert text.startswith(f"decode bf16 B=64 T=1 context 4096, 32/8 heads, head_dim 128, {form} pages of 16 on NVIDIA")
    for part in (
        f"tile: {tile.name}", f"{tile.warps} warps a block, each with {16 * tile.sub} keys a step",
        f"{132 * tile.per_sm} blocks take the keys in up to {132 if tile.heads else 12 * 132} pieces", "KiB shared, ",
        f"{bits} bytes a token",
    ):  # fmt: skip
        assert part in text, part
    assert ("scales of each token included" in text) == (form != "bf16")
    kernel = {
        "bf16": "decode.cu, rows of 256 and 256 bytes in bf16 are as fast alone, or were not measured: every warp",
        "int4": "rows.cu, a full cache is 302 MB: one more warp copies rows of 8 heads together",
    }.get(form, "rows.cu, a full cache is 545.3 MB: one more warp copies rows of 8 heads together")
    assert kernel in text


def test_decode_in_triton_says_what_its_tile_means() -> None:
    why = fk.explain("decode", problem=DECODE, gpu="h200", impl="triton")
    tile = why.tile
    assert tile.block_m == 16 and f"16 query rows x {tile.block_n} keys a step, {tile.warps} warps" in str(why)
    assert f"{132 * tile.per_sm} programs, {tile.per_sm} an SM, take equal shares of all keys" in str(why)
    fixed = fk.explain("decode", problem=replace(DECODE, batch_invariant=True), gpu="h200")
    assert fixed.impl == "triton" and "take pieces of 2048 keys, the same in any batch" in str(fixed)
    assert "not hopper: balances keys over the whole batch" in str(fixed) and ", batch_invariant on " in str(fixed)


def test_arguments_of_a_decode_reach_its_problem() -> None:
    q, cache = torch.ones(3, 2, 8, 64, dtype=torch.bfloat16), cache_of(format="int8", scales="head")
    tree = torch.ones(2, 2, dtype=torch.bool)
    extra = {"sinks": torch.ones(8), "alibi_slopes": torch.ones(8), "softcap": 5.0, "window": (16, -1)}
    why = fk.explain("decode", q, cache, tree_mask=tree, **extra, gpu="h200")
    title = "decode bf16 B=3 T=2 context 112, 8/2 heads, head_dim 64, int8 pages of 16, softcap, alibi, sinks, tree"
    assert str(why).startswith(f"{title}, window (16, -1) on NVIDIA H200\n")
    assert "not hopper: takes one query token a sequence, not 2" in str(why)
    assert (why.token_bytes, why.problem.keys()) == (2 * 128, 3 * 18) and "one scale for each head beside" in str(why)
    ragged = fk.explain("attention_paged", q[0], cache_of(), torch.tensor([0, 1, 2, 2], dtype=torch.int32), 1)
    assert "T=2 ragged" in str(ragged) and ragged.tile is None


def test_the_decode_tile_in_force_is_explained_and_kept() -> None:
    forced = HopperDecodeTile(4, 1, 1, 2)
    with fk.use_tile(tile=forced):
        why = fk.explain("decode", problem=DECODE, gpu="h200")
    assert why.tile == forced
    assert "tile: hopper-w4-p1-k16-s2\n  4 warps a block, each with 16 keys a step and 2 stages" in str(why)
    assert "decode.cu, as use_tile says: every warp copies for itself" in str(why)


# --- errors


def test_an_unknown_op_is_refused_with_the_known_ones() -> None:
    known = r"'attention', 'attention_varlen', .*, 'speculative_accept'; for experts fk\.moe\.explain$"
    with pytest.raises(ValueError, match=rf"op='gemm' is not one of {known}"):
        fk.explain("gemm", torch.ones(2, 2))


def _refusal(call: Callable[[], Any]) -> str:
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize(
    ("op", "args", "named"),
    [
        ("rms_norm", (torch.ones(2, 8), torch.ones(7)), {}),
        ("rms_norm", (torch.ones(2, 8),), {"eps": -1.0}),
        ("swiglu", (torch.ones(2, 7),), {}),
        ("softmax", ([1.0],), {}),
        ("linear", (torch.ones(2, 8), torch.ones(4, 9)), {}),
        ("linear", (torch.ones(2, 8), torch.ones(4, 8)), {"activation": "tanh"}),
        ("cross_entropy", (torch.ones(2, 8), torch.ones(2)), {}),
        ("sample", (torch.ones(2, 8),), {"top_p": 1.5}),
        ("sample", (torch.ones(2, 8),), {"heat": 1.5}),
        ("decode", (torch.ones(3, 1, 8, 64), None), {}),
        ("decode", (torch.ones(3, 17, 8, 64), cache_of(dtype=torch.float32)), {}),
        ("decode", (torch.ones(3, 1, 7, 64), cache_of(dtype=torch.float32)), {}),
        ("attention_paged", (torch.ones(3, 8, 64), cache_of(dtype=torch.float32), [0, 1, 2, 3], 1), {}),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_wrong_arguments_are_refused_as_the_call_would(op: str, args: Any, named: Any) -> None:
    assert _refusal(lambda: fk.explain(op, *args, **named)) == _refusal(lambda: OPS[op].function(*args, **named))


def test_wrong_questions_are_refused() -> None:
    x = torch.ones(2, 8)
    with pytest.raises(ValueError, match=r"gpu='h300' is not known; known are a100, "):
        fk.explain("softmax", x, gpu="h300")
    with pytest.raises(TypeError, match="gpu=9 must be a Gpu or the short name of one, got int"):
        fk.explain("softmax", x, gpu=9)
    with pytest.raises(TypeError, match=r"problem=DecodeProblem\(.* of op='linear' must be a LinearProblem"):
        fk.explain("linear", problem=DECODE)
    with pytest.raises(ValueError, match="either tensors with their arguments or a problem"):
        fk.explain("decode", torch.ones(3, 1, 8, 64), problem=DECODE)
    with pytest.raises(ValueError, match="either tensors with their arguments or a problem"):
        fk.explain("decode", problem=DECODE, causal=False)


def test_a_gpu_that_is_made_up_is_taken() -> None:
    slow = replace(H200, name="Mine", bandwidth=1e9)
    assert fk.explain("softmax", torch.ones(500, 250), gpu=slow).floor == pytest.approx(1e-3)
