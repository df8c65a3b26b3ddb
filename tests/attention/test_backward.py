"""The fused backward against autograd of the oracle in fp64: in Triton's interpreter here, and on a GPU.

fp16 and fp32 only in the interpreter, whose bf16 is wrong. The tolerance is twice plain torch's error (gradients.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from hypothesis import given, settings, strategies as st
from torch import Tensor

import flashkernels as fk
import flashkernels.attention.api as api
import flashkernels.attention.triton.backward_tiles as backward_tiles
from flashkernels.attention.problem import AttentionProblem, BackwardProblem
from flashkernels.attention.triton import backward
from flashkernels.hardware import lookup
from flashkernels.jit.eager import Plans
from flashkernels.tiling import Tile

from . import oracle
from .cases import (
    EVERYTHING,
    FEATURES,
    NO_MASK,
    Shape,
    interpreter,
    keywords,
    pairs,
    qkv,
    ragged,
)
from .gpu import dtype_id, misaligned, odd_rows, sequence_first, spread
from .gradients import (
    assert_same_gradients,
    check,
    check_varlen,
    expected,
    gradients,
    leaves,
    weights_like,
)
from .test_properties import Call, calls, lengths

INF, NAN = float("inf"), float("nan")
SMALL = Shape(b=1, sq=35, sk=50, h=2, hkv=1, d=16)
SIDES = ("alibi_slopes", "sinks")


FORMS: tuple[dict[str, bool], ...] = (
    {}, {"late": True}, {"apart": True}, {"turned": True}, {"turned": True, "apart": True},
)  # fmt: skip
each_form = pytest.mark.parametrize("adds", [False, True], ids=["two passes", "sums"])


def sides(features: dict[str, Any], adds: bool = False) -> tuple[str, ...]:
    """Those that have a gradient too; where dQ is added up, that of the slopes is never asked for."""
    mask = ("mask",) if "mask" in features and features["mask"].is_floating_point() else ()
    return (*(name for name in SIDES if name in features and not (adds and name == "alibi_slopes")), *mask)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Small blocks, so that small inputs have an interior, an edge and a ragged end."""

    def use(block_m: int, block_n: int, adds: bool = False, apart: bool = False, **form: bool) -> None:
        def choose(problem: BackwardProblem, gpu: Any, by_tma: bool = True) -> backward_tiles.BackwardTiles:
            adding = adds and by_tma
            parts, parts_v = map(backward_tiles.in_two, (problem.call.head_dim, problem.call.head_dim_v))
            plain = Tile("exact", block_m, block_n, parts, parts_v, 4, 1, tma=adding)
            tile, dmask = replace(plain, **(form if adding else {})), replace(plain, tma=False)
            dv = replace(plain, block_m=2 * block_m, block_n=2 * block_n) if adding and apart else None
            return backward_tiles.BackwardTiles(tile, None if adding else tile, dmask, dv)

        monkeypatch.setattr(backward_tiles, "choose", choose)
        monkeypatch.setattr(api, "_backward_plans", Plans(api._plan_backward))

    return use


# Features


@interpreter
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=dtype_id)
@pytest.mark.parametrize("feature", FEATURES)
def test_feature_alone(feature: str, dtype: torch.dtype) -> None:
    features = keywords(feature, SMALL)
    check(*qkv(SMALL, dtype), impl="triton", also=sides(features), **features)


@interpreter
@pytest.mark.parametrize("both", pairs()[::5])
def test_pair_of_features(both: str) -> None:
    shape = Shape(b=1, sq=45, sk=30, h=2, hkv=1)  # more queries than keys: causal leaves rows that see nothing
    features = keywords(both, shape)
    check(*qkv(shape), impl="triton", also=sides(features), **features)


@interpreter
@pytest.mark.parametrize("mask", ["boolmask", "floatmask"])
@pytest.mark.parametrize("dim", [24, 72])
def test_every_feature_at_once(mask: str, dim: int) -> None:
    shape = Shape(b=2, sq=30, sk=70, h=3, hkv=1, d=dim, dv=40)
    features = keywords([*EVERYTHING, mask], shape)
    check(*qkv(shape, torch.float16), impl="triton", also=sides(features), **features)


@interpreter
@pytest.mark.parametrize("blocks", [(16, 16), (16, 32), (32, 16)], ids=str)
@pytest.mark.parametrize("feature", ["plain", "causal", "window", "left+softcap+alibi+sinks", "floatmask+causal"])
@pytest.mark.parametrize("sizes", [(45, 60), (60, 30)], ids=str)
def test_walk_of_many_blocks(blocks: tuple[int, int], feature: str, sizes: tuple[int, int], small_tiles: Any) -> None:
    small_tiles(*blocks)
    shape = Shape(b=1, sq=sizes[0], sk=sizes[1], h=2, hkv=1, d=24, dv=16)
    features = keywords(feature, shape)
    check(*qkv(shape, torch.float16), impl="triton", also=sides(features), **features)


@interpreter
@pytest.mark.parametrize("feature", ["plain", "causal", "window", "left+softcap+alibi+sinks", "floatmask+causal"])
@pytest.mark.parametrize("sizes", [(45, 60), (60, 30)], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=["-".join(form) or "at once" for form in FORMS])
def test_walk_that_adds_up_dq(feature: str, sizes: tuple[int, int], form: dict[str, bool], small_tiles: Any) -> None:
    small_tiles(*((16, 32) if sizes[0] < sizes[1] else (32, 16)), adds=True, **form)
    shape = Shape(b=1, sq=sizes[0], sk=sizes[1], h=2, hkv=1, d=24, dv=16)
    features = keywords(feature, shape)
    check(*qkv(shape, torch.float16), impl="triton", also=sides(features, adds=True), **features)


@pytest.mark.parametrize(
    ("dim", "heads", "together"), [(256, 8, 4), (224, 9, 6), (192, 11, 11), (96, 21, 14), (48, 43, 43)]
)
def test_heads_are_summed_in_equal_sections(dim: int, heads: int, together: int) -> None:
    """About 48 MB each, of batches of 4 and 4096 queries; a head at a time where every row sees every key."""
    call = AttentionProblem(4, 4096, 4096, heads, heads, dim, causal=True)
    assert backward.heads_summed_together(call) == together
    assert backward.heads_summed_together(replace(call, causal=False)) == 1


@interpreter
@pytest.mark.parametrize("feature", ["plain", "causal", "window+sinks", "alibi2d+causal"])
@each_form
def test_ragged_walk_of_many_blocks(feature: str, adds: bool, small_tiles: Any) -> None:
    small_tiles(16, 16, adds, late=True)
    shape = Shape(b=4, h=2, hkv=1, d=24, dv=16)
    features = keywords(feature, shape)
    batch = ragged([40, 0, 1, 25], [33, 9, 50, 0], shape, torch.float16)
    check_varlen(batch, impl="triton", also=sides(features, adds), **features)


@interpreter
@pytest.mark.parametrize("feature", ["plain", "causal", "window+softcap", "alibi+causal+sinks", "floatmask+softcap"])
def test_rows_and_numbers_by_boxes(feature: str, small_tiles: Any) -> None:
    """Lengths that are multiples of 4: TMA reads the numbers of rows as well as the rows."""
    small_tiles(32, 32, True, late=True)
    shape = Shape(b=2, sq=52, sk=36, h=2, hkv=1, d=72, dv=40)
    features = keywords(feature, shape)
    check(*qkv(shape, torch.float16), impl="triton", also=sides(features, True), **features)


@interpreter
def test_rows_of_the_next_sequence_stay_there(small_tiles: Any) -> None:
    """TMA reads past the end of a sequence: what is there must not count."""
    small_tiles(16, 16, True)
    shape = Shape(b=2, h=2, hkv=1, d=16)
    batch = ragged([21, 10], [18, 12], shape, torch.float16)
    clean = leaves(batch.q, batch.k, batch.v)
    want = torch.autograd.grad(fk.attention_varlen(*clean, *batch.args[3:], softcap=5.0, impl="triton").sum(), clean)
    poison = [x.detach().clone() for x in clean]
    poison[0][21:], poison[1][18:], poison[2][18:] = NAN, NAN, NAN
    dirty = leaves(*poison)
    out = fk.attention_varlen(*dirty, *batch.args[3:], softcap=5.0, impl="triton")
    got = torch.autograd.grad(out, dirty, torch.ones_like(out))
    for g, w, rows in zip(got, want, (21, 18, 18), strict=True):
        assert torch.equal(g[:rows], w[:rows]) and not g[rows:].isfinite().all()


@interpreter
@pytest.mark.parametrize("scale", [0.0, -0.7])
def test_scale_of_any_sign(scale: float) -> None:
    check(*qkv(SMALL), impl="triton", softmax_scale=scale, causal=True)


@interpreter
@pytest.mark.parametrize("sink", [-INF, -1e4, 1e4], ids=str)
def test_extreme_sink(sink: float) -> None:
    shape = Shape(b=1, sq=20, sk=12, h=2)
    check(*qkv(shape), impl="triton", also=("sinks",), sinks=torch.full((2,), sink), causal=True)


@interpreter
@pytest.mark.parametrize("name", SIDES)
def test_side_gradient_has_the_dtype_of_its_input(name: str) -> None:
    q, k, v = qkv(SMALL, torch.float16)
    side = torch.zeros(SMALL.h, dtype=torch.float64).requires_grad_()
    (grad,) = torch.autograd.grad(fk.attention(q, k, v, **{name: side}, impl="triton").sum(), side)
    assert grad.dtype == side.dtype and grad.shape == side.shape


@interpreter
@pytest.mark.parametrize("feature", ["alibi", "alibi+sinks", "alibi+causal", "alibi+softcap"])
def test_slopes_gradient_does_not_know_that_the_output_was_rounded(feature: str) -> None:
    """Rows up to 40 places before the first key, fp16 inputs and gradients: as good as plain torch in fp32."""
    shape = Shape(b=1, sq=60, sk=20, h=2, hkv=1)
    features = keywords(feature, shape)
    made = []
    for function, dtype in (
        (partial(fk.attention, return_lse=True, impl="triton"), torch.float16),
        (oracle.naive, torch.float32),
        (oracle.attention, torch.float64),
    ):
        slopes = features["alibi_slopes"].to(dtype if dtype != torch.float16 else torch.float32).requires_grad_()
        inputs = (x.to(dtype) for x in qkv(shape, torch.float16))
        outputs = function(*inputs, **features | {"alibi_slopes": slopes})[:2]
        weights = [w.half().to(x) for w, x in zip(weights_like(*outputs), outputs, strict=True)]
        made.append(torch.autograd.grad(outputs, slopes, weights)[0])
    got, plain, want = made
    oracle.assert_close(got, plain, want, want.abs().max().expand_as(want), torch.float32, name=feature)


# Shapes


@interpreter
@pytest.mark.parametrize("dim", [1, 8, 40, 72, 112, 128, 160, 192, 256, 320])
def test_head_dimension(dim: int) -> None:
    check(*qkv(Shape(b=1, sq=20, sk=35, h=2, hkv=1, d=dim), torch.float16), impl="triton", causal=True)


@interpreter
@pytest.mark.parametrize("dim", [40, 72, 320])
def test_head_dimension_in_fp32(dim: int) -> None:
    check(*qkv(Shape(b=1, sq=20, sk=35, h=1, hkv=1, d=dim)), impl="triton", causal=True)


@interpreter
@pytest.mark.parametrize("dims", [(16, 40), (40, 16), (192, 128), (1, 72), (72, 1), (320, 24)], ids=str)
def test_head_dimension_of_v_differs(dims: tuple[int, int]) -> None:
    shape = Shape(b=1, sq=20, sk=35, h=2, hkv=1, d=dims[0], dv=dims[1])
    check(*qkv(shape, torch.float16), impl="triton", causal=True)


@interpreter
@pytest.mark.parametrize("heads", [(6, 2), (7, 1), (3, 3)], ids=lambda h: f"{h[0]}:{h[1]}")
def test_gradients_of_k_and_v_sum_over_their_query_heads(heads: tuple[int, int]) -> None:
    shape = Shape(b=2, sq=9, sk=20, h=heads[0], hkv=heads[1])
    features = keywords("causal+alibi+sinks+boolmask", shape)
    check(*qkv(shape), impl="triton", also=SIDES, **features)


@interpreter
@pytest.mark.parametrize("sizes", [(1, 1), (1, 70), (70, 1), (64, 64), (127, 65)], ids=str)
def test_sequence_lengths(sizes: tuple[int, int]) -> None:
    check(*qkv(Shape(b=1, sq=sizes[0], sk=sizes[1], h=1, hkv=1), torch.float16), impl="triton", causal=True)


@interpreter
@pytest.mark.parametrize("sizes", [{"b": 0}, {"sq": 0}, {"sk": 0}, {"sq": 0, "sk": 0}], ids=str)
def test_sizes_of_nothing(sizes: dict[str, int]) -> None:
    shape = SMALL.but(**sizes)
    features = keywords("causal+alibi2d+sinks", shape)
    inputs = leaves(*qkv(shape), *(features[name] for name in SIDES))
    out = fk.attention(*inputs[:3], causal=True, alibi_slopes=inputs[3], sinks=inputs[4], impl="triton")
    assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), inputs))


@interpreter
@pytest.mark.parametrize("feature", [*NO_MASK, "+".join(EVERYTHING)])
def test_varlen(feature: str) -> None:
    shape = Shape(b=3, h=4, hkv=2, d=8, dv=5)
    features = keywords(feature, shape)
    check_varlen(ragged([5, 0, 12], [9, 3, 7], shape), impl="triton", also=sides(features), **features)


@interpreter
@pytest.mark.parametrize("lens", [([], []), ([0, 0], [0, 0]), ([3], [0]), ([0], [3])], ids=str)
def test_varlen_of_nothing(lens: tuple[list[int], list[int]]) -> None:
    batch = ragged(*lens, SMALL)
    inputs = leaves(batch.q, batch.k, batch.v)
    out = fk.attention_varlen(*inputs, *batch.args[3:], causal=True, impl="triton")
    assert all((g == 0).all() for g in torch.autograd.grad(out.sum(), inputs))


STRIDES = {"misaligned": misaligned, "odd": odd_rows, "spread": spread, "sequence-first": sequence_first}


@interpreter
@pytest.mark.parametrize("change", STRIDES.values(), ids=STRIDES.keys())
def test_any_strides_of_the_inputs_and_of_the_gradient(change: Any) -> None:
    inputs, exact = qkv(SMALL), [x.double().requires_grad_() for x in qkv(SMALL)]
    views = [change(x).requires_grad_() for x in inputs]
    out, lse = fk.attention(*views, causal=True, return_lse=True, impl="triton")
    weights = [torch.randn_like(out), torch.randn_like(lse)]
    got = torch.autograd.grad((out, lse), views, [change(w) for w in weights])
    want = torch.autograd.grad(oracle.attention(*exact, causal=True)[:2], exact, [w.double() for w in weights])
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g.double(), w, rtol=1e-4, atol=1e-5)


# What nobody sees


@interpreter
@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("value", [NAN, INF], ids=str)
@pytest.mark.parametrize("kind", ["bool", "float", "window", "softcap"])
@pytest.mark.parametrize("form", [None, {}, {"turned": True}], ids=["two passes", "sums", "turned"])
def test_poison_that_nobody_sees_reaches_no_gradient(
    kind: str, value: float, which: str, form: dict[str, bool] | None, small_tiles: Any
) -> None:
    """Keys from 30 on are hidden from all rows, and rows up to 10 see nothing."""
    if form is not None:
        small_tiles(16, 16, adds=True, **form)
    q, k, v = qkv(SMALL.but(sq=50), torch.float32 if form is None else torch.float16)
    keep = torch.ones(50, 50, dtype=torch.bool)
    keep[:, 30:] = keep[:10] = False
    mask = keep if kind == "bool" else torch.zeros(50, 50).masked_fill(~keep, -INF)
    features: dict[str, Any] = {"mask": mask}
    if kind == "window":  # the rows look at keys 20 to 45 places before them
        features = {"window": (45, 0), "mask": keep}
    if kind == "softcap":
        features["softcap"] = 5.0
    clean = expected((q, k, v), with_lse=False, features=features)
    if which == "q":
        q[:, :10] = value
    else:
        {"k": k, "v": v}[which][:, 30:] = value
    got = gradients((fk.attention(*(dirty := leaves(q, k, v)), impl="triton", **features),), dirty)
    assert_same_gradients(got, *clean, q.dtype)


@interpreter
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=dtype_id)
def test_poison_behind_the_causal_edge_reaches_no_other_row(dtype: torch.dtype) -> None:
    q, k, v = qkv(Shape(b=1, sq=40, sk=40, h=1, hkv=1), dtype)
    v[:, 20:], k[:, 20:] = NAN, NAN
    inputs = leaves(q, k, v)
    dq, *_ = torch.autograd.grad(fk.attention(*inputs, causal=True, impl="triton").nansum(), inputs)
    assert dq[:, :20].isfinite().all() and (dq[:, :20] != 0).any()


@interpreter
@each_form
def test_keys_past_the_end_add_nothing_where_all_scores_are_low(adds: bool, small_tiles: Any) -> None:
    """Their scores are 0, and exp(0 - L) overflows."""
    small_tiles(16, 16, adds)
    q, k, v = qkv(SMALL, torch.float16)
    q[..., 0], k[..., 0] = 40, -20  # logits around -200
    check(q, k, v, impl="triton")


@interpreter
@pytest.mark.parametrize("bias", [-1e9, torch.finfo(torch.float32).min], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=dtype_id)
def test_rows_hidden_by_a_large_number_have_finite_gradients(dtype: torch.dtype, bias: float) -> None:
    mask = torch.zeros(35, 50)
    mask[:10] = bias
    inputs = leaves(*qkv(SMALL, dtype), mask)
    grads = gradients((fk.attention(*inputs[:3], mask=inputs[3], impl="triton"),), inputs)
    assert all(g.isfinite().all() for g in grads) and (grads[0][:, :10] == 0).all() and (grads[3][:10] == 0).all()


# What runs


def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    from flashkernels.jit import launch

    names: list[str] = []
    call = launch.Launcher.__call__

    def counted(self: Any, *args: Any) -> None:
        names.append(self.kernel.__name__)
        call(self, *args)

    monkeypatch.setattr(launch.Launcher, "__call__", counted)
    return names


@interpreter
@pytest.mark.parametrize(
    ("wanted", "kernels"),
    [
        ("q", ["rows_kernel", "dq_kernel"]),
        ("k", ["rows_kernel", "dkdv_kernel"]),
        ("v", ["rows_kernel", "dkdv_kernel"]),
        ("qkv", ["rows_kernel", "dq_kernel", "dkdv_kernel"]),
    ],
)
def test_what_nobody_wants_is_not_computed(wanted: str, kernels: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = dict(zip("qkv", qkv(SMALL, torch.float16), strict=True))
    all_of_them = leaves(*inputs.values())
    attend = partial(fk.attention, impl="triton", deterministic=True)
    want = torch.autograd.grad(attend(*all_of_them).sum(), all_of_them)
    for name in wanted:
        inputs[name].requires_grad_()
    out = attend(**inputs)
    names = launches(monkeypatch)
    out.sum().backward()
    assert names == kernels
    for (name, x), w in zip(inputs.items(), want, strict=True):
        assert torch.equal(x.grad, w) if name in wanted else x.grad is None


@interpreter
@pytest.mark.parametrize("wanted", ["qk", "qv", "qkv"])
def test_one_pass_makes_all_that_is_wanted(wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    all_of_them = leaves(*qkv(SMALL.but(d=40), torch.float16))
    some = {n: x.detach().requires_grad_(n in wanted) for n, x in zip("qkv", all_of_them, strict=True)}
    out = fk.attention(*all_of_them, impl="triton")
    want = torch.autograd.grad(out, all_of_them, torch.ones_like(out))
    out = fk.attention(**some, impl="triton")
    names = launches(monkeypatch)
    out.backward(torch.ones_like(out))
    assert names == ["rows_kernel", "dkdv_kernel", "sums_kernel"]
    assert all(torch.equal(x.grad, w) for (n, x), w in zip(some.items(), want, strict=True) if n in wanted)


@interpreter
def test_a_gradient_that_tma_cannot_read_is_copied_or_takes_two_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = leaves(*qkv(SMALL.but(d=40), torch.float16))
    out = fk.attention(*inputs, impl="triton")
    number, row = torch.ones((), dtype=out.dtype), torch.randn_like(out[:, :1])  # rows can be read 16 bytes at a time
    one, two = ["rows_kernel", "dkdv_kernel", "sums_kernel"], ["rows_kernel", "dq_kernel", "dkdv_kernel"]
    for grad, passes in ((number.expand_as(out), one), (row.expand_as(out), two)):
        want = torch.autograd.grad(out, inputs, grad.contiguous(), retain_graph=True)
        with pytest.MonkeyPatch.context() as patch:
            names = launches(patch)
            got = torch.autograd.grad(out, inputs, grad, retain_graph=True)
        assert names == passes
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w)


def test_which_problems_add_up_dq() -> None:
    call = AttentionProblem(batch=1, seq_q=64, seq_k=64, heads=2, kv_heads=2, head_dim=128)

    def adds(call: AttentionProblem = call, wanted: str = "q k v", gpu: str = "h200", **options: Any) -> bool:
        problem = BackwardProblem(call, tuple(wanted.split()), **options)
        return backward_tiles.choose(problem, lookup(gpu)).dq is None

    assert adds() and adds(wanted="q k") and adds(wanted="q v sinks") and adds(replace(call, causal=True))
    features: tuple[dict[str, Any], ...] = ({"softcap": True}, {"alibi": True}, {"dropout_p": 0.1}, {"window": (64, 0)})
    assert all(adds(replace(call, **feature)) for feature in features)
    assert not adds(deterministic=True) and not adds(gpu="a100")
    assert not any(adds(wanted=wanted) for wanted in ("q", "k v", "q sinks", "q k v alibi_slopes"))
    others: tuple[dict[str, Any], ...] = ({"dtype": "fp32"}, {"head_dim": 136}, {"head_dim_v": 136}, {"mask": "bool"})
    uneven: tuple[dict[str, Any], ...] = ({"head_dim_v": 64}, {"varlen": True})
    assert not any(adds(replace(call, **beyond)) for beyond in (*others, *uneven))


@interpreter
def test_the_same_bits_every_time() -> None:
    inputs = leaves(*qkv(SMALL, torch.float16))
    out = fk.attention(*inputs, causal=True, deterministic=True, impl="triton")
    first = torch.autograd.grad(out.sum(), inputs, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, torch.autograd.grad(out.sum(), inputs), strict=True))


@interpreter
def test_checkpointing() -> None:
    inputs = leaves(*qkv(SMALL))
    attend = partial(fk.attention, causal=True, impl="triton")
    want = torch.autograd.grad(attend(*inputs).square().sum(), inputs)
    out = torch.utils.checkpoint.checkpoint(attend, *inputs, use_reentrant=False)
    for g, w in zip(torch.autograd.grad(out.square().sum(), inputs), want, strict=True):
        assert torch.equal(g, w)


@interpreter
def test_changing_the_output_before_backward_is_an_error() -> None:
    inputs = leaves(*qkv(SMALL))
    out = fk.attention(*inputs, impl="triton")
    out.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@interpreter
@pytest.mark.parametrize("lse", [False, True], ids=["out", "lse"])
def test_opcheck_of_both_ops(lse: bool) -> None:
    q, k, v = leaves(*qkv(Shape(b=1, sq=9, sk=14, h=2, hkv=1, d=8, dv=5)))
    slopes, sinks = leaves(torch.rand(2), torch.rand(2))
    arguments = (q, k, v, slopes, sinks, *(None,) * 7, 0, 0, True, 0.5, -1, -1, 2.0, "bshd", lse, "triton")
    torch.library.opcheck(torch.ops.flashkernels.attention.default, arguments)
    out, level = fk.attention(q, k, v, causal=True, softmax_scale=0.5, return_lse=True, impl="torch")
    saved = [x.detach() for x in (out, level, q, k, v)]
    given = (torch.ones_like(out), torch.ones_like(level) if lse else None, *saved, None, None, None, None, None)
    last = (0, 0, True, 0.5, -1, -1, 0.0, "triton", [True, lse, True, False, False, False])
    torch.library.opcheck(torch.ops.flashkernels.attention_backward.default, (*given, *last))


@interpreter
def test_compiled_gradients_are_the_eager_ones() -> None:
    def loss(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        out, lse = fk.attention(q * 2, k, v, causal=True, sinks=sinks, return_lse=True, impl="triton")
        return out.square().sum() + lse.sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for seq in (11, 19):
        inputs = leaves(*qkv(Shape(b=3, sq=seq, sk=seq + 3)), torch.rand(4))
        want = torch.autograd.grad(loss(*inputs), inputs)
        for g, w in zip(torch.autograd.grad(compiled(*inputs), inputs), want, strict=True):
            torch.testing.assert_close(g, w)


# Any call


def check_call(call: Call) -> None:
    features = {**call.keywords(), "layout": call.layout}
    check(*call.tensors(), impl="triton", also=sides(features), **features)


DIMS = st.sampled_from([1, 5, 16, 24, 40, 72])


@interpreter
@settings(max_examples=10)
@given(calls(DIMS, [torch.float16, torch.float32], 50))
def test_any_dense_call(call: Call) -> None:
    check_call(call)


@interpreter
@settings(max_examples=8)
@given(calls(DIMS, [torch.float16, torch.float32], 0, mask=False), lengths(40))
def test_any_ragged_call(call: Call, lens: list[tuple[int, int]]) -> None:
    call = replace(call, shape=call.shape.but(b=len(lens)))
    batch = call.ragged([q for q, _ in lens], [k for _, k in lens])
    features = call.keywords()
    check_varlen(batch, impl="triton", also=sides(features), **features)


@pytest.mark.slow
@interpreter
@settings(max_examples=60)
@given(calls(st.integers(1, 512), [torch.float16, torch.float32], 200))
def test_any_dense_call_at_length(call: Call) -> None:
    check_call(call)
