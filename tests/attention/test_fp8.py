"""FP8: what the reference makes of it, how inputs are quantised, and what is refused."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import flashkernels as fk
from flashkernels.attention.fp8 import Quantised, rotated
from flashkernels.attention.hopper import tiles
from flashkernels.attention.hopper.source import HopperTile
from flashkernels.attention.problem import AttentionProblem

from .cases import FEATURES, Shape, generator, keywords, qkv, ragged
from .fp8 import E4M3, ROWS, assert_exact, check, dequantised, each_scale, head_first, quantised, wide
from .gpu import NAN
from .test_errors import says, zeros

SMALL = Shape(b=2, sq=150, sk=270, h=4, hkv=2, d=16, dv=24)  # the last blocks of rows have 22 and 14
TINY = Shape(b=2, sq=6, sk=8, h=4, hkv=2, d=16)


# The reference


@each_scale
@pytest.mark.parametrize("feature", FEATURES)
def test_reference(feature: str, per_block: bool) -> None:
    check(quantised(SMALL, per_block=per_block), "torch", **keywords(feature, SMALL))


@each_scale
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("sizes", [(1, 1), (127, 128), (128, 129), (129, 127), (256, 1), (300, 300)], ids=str)
def test_reference_at_odd_lengths(sizes: tuple[int, int], layout: str, per_block: bool) -> None:
    shape = SMALL.but(sq=sizes[0], sk=sizes[1], dv=0)
    small = quantised(shape, per_block=per_block)
    if layout == "bhsd":
        small = head_first(small)
    out, lse = check(small, "torch", causal=True, layout=layout)
    assert out.is_contiguous() and lse.shape == (2, 4, sizes[0])


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 2), (8, 1)], ids=str)
def test_reference_of_shared_heads(heads: tuple[int, int]) -> None:
    check(quantised(SMALL.but(h=heads[0], hkv=heads[1]), per_block=True), "torch", causal=True)


def test_scales_may_be_of_both_kinds() -> None:
    by_head, by_block = quantised(SMALL), quantised(SMALL, per_block=True)
    check(by_head._replace(k=by_block.k, k_scale=by_block.k_scale), "torch")
    check(by_block._replace(k=by_head.k, k_scale=by_head.k_scale), "torch")


def test_scales_are_1_by_default() -> None:
    small = quantised(SMALL)
    ones = small._replace(q_scale=torch.ones(2, 4), k_scale=torch.ones(2, 2), v_scale=torch.ones(2, 2))
    out = fk.attention(*small[:3], softmax_scale=1e-4)
    assert torch.equal(out, fk.attention(*ones[:3], **ones.scales, softmax_scale=1e-4))
    assert_exact(out, None, ones, softmax_scale=1e-4)
    for name in ones.scales:
        some = {other: scale for other, scale in small.scales.items() if other != name}
        with_one = small._replace(**{name: getattr(ones, name)})
        assert_exact(fk.attention(*small[:3], **some, softmax_scale=1e-2), None, with_one, softmax_scale=1e-2)


def test_the_scale_of_each_block_is_used_for_its_rows() -> None:
    small = quantised(SMALL.but(dv=0), per_block=True)
    random = generator(1)
    other = small._replace(
        q_scale=small.q_scale * (0.5 + torch.rand(small.q_scale.shape, generator=random)),
        k_scale=small.k_scale * (0.5 + torch.rand(small.k_scale.shape, generator=random)),
    )
    out, _ = check(other, "torch")
    assert not torch.equal(out, fk.attention(*small[:3], **small.scales))


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0)], ids=str)
@each_scale
def test_empty_sequences(sizes: tuple[int, int], per_block: bool) -> None:
    small = quantised(TINY.but(sq=sizes[0], sk=sizes[1]), per_block=per_block)
    out, lse = fk.attention(*small[:3], **small.scales, return_lse=True)
    assert (out.shape, lse.shape, out.dtype) == ((2, sizes[0], 4, 16), (2, 4, sizes[0]), torch.bfloat16)
    assert (out == 0).all() and (lse == -torch.inf).all()


def test_a_nan_behind_the_mask_reaches_nobody() -> None:
    small = quantised(SMALL.but(sq=270))
    clean = fk.attention(*small[:3], **small.scales, causal=True)
    small.v[:, 200:] = NAN
    out = fk.attention(*small[:3], **small.scales, causal=True)
    assert torch.equal(out[:, :200], clean[:, :200]) and out[:, 200:].isnan().all()


def test_the_call_is_the_reference_where_nothing_else_serves() -> None:
    small = quantised(SMALL)
    out = fk.attention(*small[:3], **small.scales)
    assert torch.equal(out, fk.attention(*small[:3], **small.scales, impl="torch"))
    assert fk.explain("attention", *small[:3], **small.scales).impl == "torch"


# Quantising


def e4m3_error(numbers: Tensor, scale: Tensor) -> Tensor:
    """Half a unit in the last place: 3 bits after the first, and below 2^-6 steps of 2^-9; then some of fp32."""
    return torch.maximum(numbers.abs() * 2.0**-4, scale * 2.0**-10) * (1 + 1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@each_scale
def test_quantising_rounds_to_the_nearest(per_block: bool, dtype: torch.dtype) -> None:
    inputs = qkv(SMALL, dtype)
    small = fk.quantise_qkv(*inputs, per_block=per_block)
    for x, y, scale in zip(inputs, small[:3], small[3:], strict=True):
        assert (y.dtype, y.shape, scale.dtype) == (E4M3, x.shape, torch.float32)
        assert scale.is_contiguous() and scale.dim() == (3 if per_block and scale is not small.v_scale else 2)
        each = dequantised(torch.ones_like(x), scale)
        error = (dequantised(y, scale) - x.double()).abs()
        assert (error <= e4m3_error(x.double(), each)).all()
        assert y.float().abs().max() == 448


def test_scales_come_from_the_largest_of_each_head_or_block() -> None:
    q, k, v = qkv(SMALL)
    by_head, by_block = fk.quantise_qkv(q, k, v), fk.quantise_qkv(q, k, v, per_block=True)
    torch.testing.assert_close(by_head.q_scale, q.abs().amax((1, 3)) / 448)
    torch.testing.assert_close(by_head.v_scale, v.abs().amax((1, 3)) / 448)
    assert by_block.q_scale.shape == (2, 4, 2) and by_block.k_scale.shape == (2, 2, 3)
    torch.testing.assert_close(by_block.k_scale[:, :, 2], k[:, 2 * ROWS :].abs().amax((1, 3)) / 448)
    torch.testing.assert_close(by_block.k_scale.amax(2), by_head.k_scale)
    assert torch.equal(by_block.v_scale, by_head.v_scale)


@each_scale
def test_a_head_or_block_of_zeros_has_scale_1(per_block: bool) -> None:
    q, k, v = qkv(SMALL)
    q[:, :, 1] = 0
    k[0, :ROWS] = 0
    v[1] = 0
    small = fk.quantise_qkv(q, k, v, per_block=per_block)
    assert (small.q_scale[:, 1] == 1).all() and (small.v_scale[1] == 1).all()
    assert not per_block or (small.k_scale[0, :, 0] == 1).all()
    assert (small.q[:, :, 1].float() == 0).all() and (small.v[1].float() == 0).all()
    check(small, "torch")


def test_a_scale_for_each_block_keeps_small_blocks() -> None:
    q, k, v = qkv(SMALL)
    k[:, ROWS:] *= 1e6
    near = {}
    for per_block in (False, True):
        small = fk.quantise_qkv(q, k, v, per_block=per_block)
        near[per_block] = (dequantised(small.k, small.k_scale) - k.double())[:, :ROWS].norm() / k[:, :ROWS].norm()
    assert near[True] < 0.04 < 0.5 < near[False]


@pytest.mark.parametrize("poison", [NAN, torch.inf, -torch.inf], ids=str)
@each_scale
def test_poison_stays_where_it_is(poison: float, per_block: bool) -> None:
    inputs = qkv(SMALL)
    clean = fk.quantise_qkv(*inputs, per_block=per_block)
    for x in inputs:
        x[1, 3, 1, 5] = poison
    small = fk.quantise_qkv(*inputs, per_block=per_block)
    for x, y, scale, before in zip(small[:3], clean[:3], small[3:], clean[3:], strict=True):
        assert x[1, 3, 1, 5].float().isnan() and x.float().isnan().sum() == 1
        kept = ~x.float().isnan()
        assert scale.isfinite().all() and (scale <= before).all()
        assert (before != scale).any() or torch.equal(x.float()[kept], y.float()[kept])


@pytest.mark.parametrize("dim", [16, 48, 64, 96, 128, 160])
def test_a_rotation_is_orthogonal(dim: int) -> None:
    q, k, _ = qkv(Shape(b=1, sq=40, sk=50, h=1, hkv=1, d=dim))
    matrix = rotated(torch.eye(dim))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(dim))
    torch.testing.assert_close(rotated(q), q @ matrix)
    turned_q, turned_k, plain_q, plain_k = (x[0, :, 0] for x in (rotated(q), rotated(k), q, k))
    torch.testing.assert_close(turned_q @ turned_k.T, plain_q @ plain_k.T, atol=1e-4, rtol=0)
    assert not torch.equal(rotated(q), rotated(q, seed=1)) and torch.equal(rotated(q), rotated(q, seed=0))
    assert rotated(q.bfloat16()).dtype == torch.float32  # it may have grown out of 16 bits


def test_rotating_leaves_v_and_the_result() -> None:
    inputs = qkv(SMALL.but(d=64))
    plain, turned = fk.quantise_qkv(*inputs), fk.quantise_qkv(*inputs, rotate=True)
    assert torch.equal(plain.v.float(), turned.v.float()) and not torch.equal(plain.q.float(), turned.q.float())
    exact = fk.attention(*inputs)
    outs = [fk.attention(*small[:3], **small.scales).float() for small in (plain, turned)]
    assert all((out - exact).norm() < 0.1 * exact.norm() for out in outs)


def test_rotating_helps_against_a_large_channel() -> None:
    q, k, v = qkv(Shape(b=1, sq=200, sk=200, h=2, hkv=2, d=64))
    q[..., 5] *= 20
    k[..., 5] *= 20

    def scores(x: Tensor, y: Tensor) -> Tensor:
        return torch.einsum("bshd,bthd->bhst", x.double(), y.double())

    errors = {}
    for rotate in (False, True):
        q8, k8, _ = wide(fk.quantise_qkv(q, k, v, rotate=rotate))
        errors[rotate] = (scores(q8, k8) - scores(q, k)).norm()
    assert errors[True] < errors[False] / 3


@pytest.mark.parametrize("dim", [8, 24, 72, 100])
def test_a_rotation_needs_a_multiple_of_16(dim: int) -> None:
    inputs = qkv(TINY.but(d=dim))
    fk.quantise_qkv(*inputs)
    with pytest.raises(ValueError, match=says(f"head_dim={dim}", "16")):
        fk.quantise_qkv(*inputs, rotate=True)


@pytest.mark.parametrize("name", "qkv")
@pytest.mark.parametrize(
    ("bad", "error", "word"),
    [(None, TypeError, "NoneType"), (zeros(6, 4, 16), ValueError, "(6, 4, 16)"),
     (zeros(2, 6, 4, 16, dtype=torch.int8), ValueError, "int8")],
    ids=["none", "rank", "integers"],
)  # fmt: skip
def test_what_cannot_be_quantised_is_named(name: str, bad: Any, error: type[Exception], word: str) -> None:
    good = dict(zip("qkv", qkv(TINY), strict=True))
    with pytest.raises(error, match=says(name, word)):
        fk.quantise_qkv(**{**good, name: bad})


# What is refused


def arguments(**changes: Any) -> dict[str, Any]:
    """Good arguments (b=2, s_q=6, s_k=8, 4 query heads on 2, d=16), but for `changes`."""
    return {**quantised(TINY)._asdict(), **changes}


HALF = torch.bfloat16
BAD: dict[str, tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = {
    "dtype-of-k": ({"k": zeros(2, 8, 2, 16, dtype=HALF)}, TypeError, ("k", "bfloat16", "float8_e4m3fn")),
    "dtype-of-v": ({"v": zeros(2, 8, 2, 16, dtype=HALF)}, TypeError, ("v", "bfloat16", "float8_e4m3fn")),
    "dtype-of-q": ({"q": zeros(2, 6, 4, 16, dtype=HALF)}, TypeError, ("k", "bfloat16", "float8_e4m3fn")),
    "another-fp8": (
        {name: zeros(2, 8, 2, 16).to(torch.float8_e5m2) for name in "qkv"}, TypeError, ("q", "float8_e5m2")
    ),
    "q-shape-of-kv": ({"q_scale": zeros(2, 2)}, ValueError, ("q_scale", "(2, 2)", "(2, 4)", "(2, 4, 1)")),
    "q-blocks": ({"q_scale": zeros(2, 4, 2)}, ValueError, ("q_scale", "(2, 4, 2)", "(2, 4, 1)")),
    "q-rank-1": ({"q_scale": zeros(4)}, ValueError, ("q_scale", "(4,)")),
    "q-rank-0": ({"q_scale": torch.tensor(1.0)}, ValueError, ("q_scale", "()")),
    "k-heads": ({"k_scale": zeros(2, 4)}, ValueError, ("k_scale", "(2, 4)", "(2, 2)", "(2, 2, 1)")),
    "k-blocks": ({"k_scale": zeros(2, 2, 8)}, ValueError, ("k_scale", "(2, 2, 8)")),
    "k-batch": ({"k_scale": zeros(1, 2)}, ValueError, ("k_scale", "(1, 2)")),
    "v-heads": ({"v_scale": zeros(2, 4)}, ValueError, ("v_scale", "(2, 4)", "(2, 2)")),
    "v-blocks": ({"v_scale": zeros(2, 2, 1)}, ValueError, ("v_scale", "(2, 2, 1)", "(2, 2)")),
    "q-strides": ({"q_scale": zeros(4, 2).T}, ValueError, ("q_scale", "(1, 2)", "contiguous")),
    "k-strides": ({"k_scale": zeros(2, 2).T}, ValueError, ("k_scale", "(1, 2)", "contiguous")),
    "v-strides": ({"v_scale": zeros(2, 4)[:, ::2]}, ValueError, ("v_scale", "(4, 2)", "contiguous")),
}  # fmt: skip
for _name, _sizes in {"q_scale": (2, 4), "k_scale": (2, 2), "v_scale": (2, 2)}.items():
    BAD |= {
        f"{_name}-bf16": ({_name: zeros(*_sizes, dtype=HALF)}, TypeError, (_name, "bfloat16", "float32")),
        f"{_name}-fp64": ({_name: zeros(*_sizes, dtype=torch.float64)}, TypeError, (_name, "float64", "float32")),
        f"{_name}-a-number": ({_name: 0.5}, TypeError, (_name, "float")),
        f"{_name}-elsewhere": ({_name: zeros(*_sizes, device="meta")}, ValueError, (_name, "meta", "cpu")),
    }


@pytest.mark.parametrize("case", BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize("impl", ["auto", "torch"])
def test_bad_argument(case: tuple[dict[str, Any], type[Exception], tuple[str, ...]], impl: str) -> None:
    changes, error, words = case
    with pytest.raises(error, match=says(*words)):
        fk.attention(**arguments(**changes), impl=impl)
    assert fk.attention(**arguments(), impl=impl).shape == (2, 6, 4, 16)


@pytest.mark.parametrize("name", ["q_scale", "k_scale", "v_scale"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_scales_are_for_fp8_only(name: str, dtype: torch.dtype) -> None:
    scale = quantised(TINY).scales[name]
    with pytest.raises(ValueError, match=says(name, "float8_e4m3fn", str(dtype).removeprefix("torch."))):
        fk.attention(*qkv(TINY, dtype), **{name: scale})


def test_there_are_no_ragged_batches_and_no_pages() -> None:
    batch = ragged([5, 4], [6, 7], TINY)
    small = [x.to(E4M3) for x in (batch.q, batch.k, batch.v)]
    with pytest.raises(TypeError, match=says("q", "float8_e4m3fn", "ragged")):
        fk.attention_varlen(*small, *batch.args[3:])
    pages = [x[:8].unflatten(0, (2, 4)) for x in small[1:]]
    table = torch.zeros(2, 2, dtype=torch.int32)
    with pytest.raises(TypeError, match=says("q", "float8_e4m3fn", "ragged")):
        fk.attention_varlen(small[0], *pages, *batch.args[3:], block_table=table)
    with pytest.raises(TypeError, match="q_scale"):
        fk.attention_varlen(*batch.args, q_scale=zeros(2, 4))


@pytest.mark.parametrize("name", ["q", "v", "sinks", "alibi_slopes", "q_scale", "v_scale"])
def test_there_are_no_gradients(name: str) -> None:
    good = arguments(sinks=zeros(4), alibi_slopes=zeros(4))
    good[name] = good[name].requires_grad_()
    with pytest.raises(fk.UnsupportedError, match="FP8 has no gradients"):
        fk.attention(**good)
    with torch.no_grad():
        assert fk.attention(**good).isfinite().all()


def test_sdpa_and_triton_say_that_they_have_no_fp8() -> None:
    with pytest.raises(fk.UnsupportedError, match=r"sdpa: torch's fused attention has no FP8"):
        fk.attention(**arguments(), impl="sdpa")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    with pytest.raises(fk.UnsupportedError, match="triton: " + ("has no fp8 kernel" if interpreted else "needs a GPU")):
        fk.attention(**arguments(), impl="triton")


PROBLEM = AttentionProblem(batch=1, seq_q=16384, seq_k=16384, heads=16, kv_heads=16, head_dim=128, dtype="fp8")


def but(**sizes: Any) -> AttentionProblem:
    return AttentionProblem(**{**vars(PROBLEM), "head_dim_v": 0, **sizes})


def test_explain_on_an_h200() -> None:
    why = fk.explain("attention", problem=PROBLEM, gpu="h200")
    assert (why.impl, why.bound, why.choices) == ("hopper", "compute", ())
    assert why.hopper is not None and why.hopper.variant.fp8 and why.hopper.computed == (128, 128)
    assert why.floor == pytest.approx(PROBLEM.flops() / 1978.9e12)
    for line in ("attention fp8 B=1", "not triton: has no fp8 kernel", "tile: 192x64", "1111.2 µs"):
        assert line in str(why)
    odd = fk.explain("attention", problem=but(head_dim=80), gpu="h200")
    assert odd.hopper is not None and odd.hopper.computed == (96, 80)  # Q·Kᵀ takes 32 columns at a time


def test_explain_where_no_kernel_has_fp8() -> None:
    reason = "head_dim=72 is not a multiple of 16: TMA cannot address its rows"
    why = fk.explain("attention", problem=but(head_dim=72), gpu="h200")
    assert why.impl == "torch" and f"not hopper: {reason}" in str(why)
    with pytest.raises(fk.UnsupportedError, match=f"hopper: {reason}"):
        fk.explain("attention", problem=but(head_dim=72), gpu="h200", impl="hopper")
    old = fk.explain("attention", problem=PROBLEM, gpu="a100")  # has no rate for FP8 either
    assert (old.impl, old.floor, old.bound) == ("torch", None, None)
    assert "not hopper: needs compute capability 9.0" in str(old) and "roofline" not in str(old)


def test_work_is_counted_in_bytes_of_fp8_in_and_bf16_out() -> None:
    elements = 16384 * 16 * 128
    assert PROBLEM.bytes() == 3 * elements + 2 * elements + 4 * 16384 * 16
    assert PROBLEM.flops() == but(dtype="bf16").flops()


@pytest.mark.parametrize("keys", [16, 48, 80, 96, 112, 256])
def test_a_tile_of_other_keys_is_refused(keys: int) -> None:
    with pytest.raises(fk.TilingError, match=f"128x{keys}-s2.*32, 64 or 128 keys"):
        tiles.choose(PROBLEM, 132, HopperTile(2, keys))


@pytest.mark.parametrize("keys", [32, 64, 128])
def test_a_tile_of_these_keys_is_taken(keys: int) -> None:
    assert tiles.choose(PROBLEM, 132, HopperTile(2, keys, 2)).variant.tile.block_n == keys


# The registered op, on the CPU


def op_arguments(small: Quantised, *, layout: str = "bshd", lse: bool = True) -> tuple[Any, ...]:
    q, k, v = (x.transpose(1, 2) for x in head_first(small)[:3]) if layout == "bhsd" else small[:3]
    return (q, k, v, *(None,) * 6, *small[3:], 0, 0, True, 0.25, -1, -1, 0.0, layout, lse, "torch")


@each_scale
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_opcheck(layout: str, per_block: bool) -> None:
    small = quantised(TINY, per_block=per_block)
    # the schema test compares inputs before and after, which torch cannot do with FP8
    tests = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    op = torch.ops.flashkernels.attention.default
    torch.library.opcheck(op, op_arguments(small, layout=layout, lse=per_block), test_utils=tests)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@each_scale
def test_compiled_in_one_graph_gives_the_same(per_block: bool, dynamic: bool) -> None:
    torch._dynamo.reset()

    def run(small: Quantised) -> Tensor:
        q, k, v, *scales = small
        named = dict(zip(("q_scale", "k_scale", "v_scale"), scales, strict=True))
        out = fk.attention(q, k, v, **named, causal=True)
        assert isinstance(out, Tensor)
        return out + 1

    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for seq in (150, 200, 300):
        small = quantised(SMALL.but(sq=seq, sk=seq + 5), per_block=per_block)
        torch.testing.assert_close(compiled(small), run(small))


def test_compiling_a_bad_call_says_what_is_bad() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda **named: fk.attention(**named), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"q_scale has shape \(2, 2\)"):
        compiled(**arguments(q_scale=zeros(2, 2)))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("kind", ["fake", "meta"])
def test_fake_output_has_the_shape_strides_and_dtype_of_the_real_one(kind: str, layout: str) -> None:
    small = quantised(SMALL, per_block=True)
    small = head_first(small) if layout == "bhsd" else small
    named: dict[str, Any] = {"layout": layout, "return_lse": True}
    real = fk.attention(*small[:3], **small.scales, **named)
    if kind == "meta":
        fake = fk.attention(**{name: x.to("meta") for name, x in small._asdict().items()}, **named)
    else:
        with FakeTensorMode() as mode:
            fake = fk.attention(**{name: mode.from_tensor(x) for name, x in small._asdict().items()}, **named)
    assert [(x.shape, x.stride(), x.dtype) for x in fake] == [(x.shape, x.stride(), x.dtype) for x in real]


def test_autocast_leaves_fp8_alone() -> None:
    small = quantised(TINY)
    with torch.autocast("cpu", dtype=torch.float16):
        out = fk.attention(*small[:3], **small.scales)
    assert torch.equal(out, fk.attention(*small[:3], **small.scales))


def test_a_rotation_of_large_numbers_does_not_overflow() -> None:
    q = torch.full((1, 4, 1, 64), 60000.0, dtype=torch.float16)
    for x in fk.quantise_qkv(q, q, q, rotate=True)[:2]:
        assert x.float().isfinite().all() and x.float().abs().max() > 100
