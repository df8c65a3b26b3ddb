"""`impl="torch"` is the meaning of attention: every feature, every pair of features, every edge, against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashkernels as fk

from . import oracle
from .cases import (
    EVERYTHING,
    FEATURES,
    NO_MASK,
    Shape,
    bool_mask,
    dtype_id,
    float_mask,
    keywords,
    pairs,
    qkv,
    ragged,
)

INF = float("inf")
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def check(q: Tensor, k: Tensor, v: Tensor, **features: Any) -> tuple[Tensor, Tensor]:
    out, lse = fk.attention(q, k, v, return_lse=True, impl="torch", **features)
    oracle.assert_correct(out, lse, q, k, v, **features)
    return out, lse


def check_varlen(batch: Any, **features: Any) -> tuple[Tensor, Tensor]:
    out, lse = fk.attention_varlen(*batch.args, return_lse=True, impl="torch", **features)
    oracle.assert_correct_varlen(out, lse, *batch.tensors, **features)
    return out, lse


# Features


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("feature", FEATURES)
def test_feature_alone(feature: str, dtype: torch.dtype) -> None:
    shape = Shape()
    check(*qkv(shape, dtype), **keywords(feature, shape))


@pytest.mark.parametrize("both", pairs())
def test_pair_of_features(both: str) -> None:
    shape = Shape(sq=29, sk=18)  # more queries than keys: causal leaves rows that see nothing
    check(*qkv(shape), **keywords(both, shape))


@pytest.mark.parametrize("mask", ["boolmask", "floatmask"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_every_feature_at_once(mask: str, dtype: torch.dtype) -> None:
    shape = Shape(sq=31, sk=40, h=6, hkv=2, d=24, dv=40)
    check(*qkv(shape, dtype), **keywords([*EVERYTHING, mask], shape))


def test_order_is_scale_then_softcap_then_alibi() -> None:
    q, k, v = (torch.tensor(x).reshape(1, -1, 1, 1) for x in ([3.0], [1.0, -2.0], [1.0, 0.0]))
    scores = 1.25 * torch.tanh(torch.tensor([3.0, -6.0]) * 0.5 / 1.25) - 0.75 * torch.tensor([1.0, 0.0])
    out, lse = fk.attention(
        q, k, v, softmax_scale=0.5, softcap=1.25, alibi_slopes=torch.tensor([0.75]), return_lse=True, impl="torch"
    )
    torch.testing.assert_close(out.flatten(), scores.softmax(0)[:1])
    torch.testing.assert_close(lse.flatten(), scores.logsumexp(0, keepdim=True))


def test_default_scale_is_the_root_of_the_head_dimension_of_q() -> None:
    shape = Shape(d=9, dv=16)
    q, k, v = qkv(shape)
    explicit = fk.attention(q, k, v, softmax_scale=1 / 3, impl="torch")
    torch.testing.assert_close(fk.attention(q, k, v, impl="torch"), explicit)


def test_zero_scale_averages_the_visible_values() -> None:
    q, k, v = qkv(Shape(hkv=4))
    out, _ = check(q, k, v, softmax_scale=0.0)
    torch.testing.assert_close(out[:, 0], v.mean(1))


def test_negative_scale_is_allowed() -> None:
    check(*qkv(Shape()), softmax_scale=-0.5)


@pytest.mark.parametrize(
    "window", [(0, 0), (0, -1), (-1, 0), (3, 0), (0, 3), (1000, 1000), (2**31 - 1, 2**31 - 1)], ids=str
)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("sizes", [(20, 20), (12, 30), (30, 12)], ids=lambda s: f"q{s[0]}k{s[1]}")
def test_window_is_inclusive_around_the_bottom_right_diagonal(
    window: tuple[int, int], causal: bool, sizes: tuple[int, int]
) -> None:
    shape = Shape(sq=sizes[0], sk=sizes[1])
    check(*qkv(shape), window=window, causal=causal)


def test_window_of_zero_zero_is_the_value_on_the_diagonal() -> None:
    q, k, v = qkv(Shape(sq=10, sk=10, hkv=4))
    torch.testing.assert_close(fk.attention(q, k, v, window=(0, 0), impl="torch"), v)


def test_causal_is_aligned_bottom_right() -> None:
    q, k, v = qkv(Shape(sq=3, sk=8, hkv=4))
    last = fk.attention(q, k, v, causal=True, impl="torch")[:, -1:]
    torch.testing.assert_close(last, fk.attention(q[:, -1:], k, v, impl="torch"))
    first = fk.attention(q, k, v, causal=True, impl="torch")[:, :1]
    torch.testing.assert_close(first, fk.attention(q[:, :1], k[:, :6], v[:, :6], impl="torch"))


def test_sink_takes_weight_and_gives_no_value() -> None:
    shape = Shape()
    q, k, v = qkv(shape)
    sink = torch.linspace(-2, 2, shape.h)
    out, lse = fk.attention(q, k, v, return_lse=True, impl="torch")
    with_sink, lse_with = fk.attention(q, k, v, sinks=sink, return_lse=True, impl="torch")
    torch.testing.assert_close(lse_with, torch.logaddexp(lse, sink[:, None].expand_as(lse)))
    torch.testing.assert_close(with_sink, out * (lse - lse_with).exp().transpose(1, 2)[..., None])


@pytest.mark.parametrize("sink", [-INF, -1e4, 1e4], ids=str)
def test_extreme_sink(sink: float) -> None:
    shape = Shape()
    check(*qkv(shape), sinks=torch.full((shape.h,), sink), causal=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("name", ["sinks", "alibi", "floatmask"])
def test_side_inputs_take_any_float_dtype(name: str, dtype: torch.dtype) -> None:
    shape = Shape()
    features = {key: value.to(dtype) for key, value in keywords(name, shape).items()}
    check(*qkv(shape, torch.float16), **features)


def test_large_scores_do_not_overflow() -> None:
    q, k, v = qkv(Shape(), torch.float16)
    check(q * 50, k * 50, v, causal=True)


# Shapes


@pytest.mark.parametrize(
    "shape",
    [
        Shape(b=0),
        Shape(sq=0),
        Shape(sk=0),
        Shape(sq=0, sk=0),
        Shape(b=0, sq=0, sk=0),
        Shape(b=1, sq=1, sk=1, h=1, hkv=1, d=1),
        Shape(sq=1),
        Shape(sk=1),
        Shape(d=1),
        Shape(d=512),
        Shape(d=600),
        Shape(d=16, dv=40),
        Shape(d=40, dv=16),
        Shape(d=1, dv=512),
        Shape(d=512, dv=1),
    ],
    ids=str,
)
@pytest.mark.parametrize("feature", ["plain", "causal", "causal+sinks+floatmask+softcap+alibi"])
def test_shape(shape: Shape, feature: str) -> None:
    check(*qkv(shape), **keywords(feature, shape))


@pytest.mark.parametrize(
    "heads", [(1, 1), (6, 2), (7, 1), (14, 2), (8, 1), (16, 2), (5, 5)], ids=lambda h: f"{h[0]}:{h[1]}"
)
def test_query_heads_share_key_heads_in_consecutive_groups(heads: tuple[int, int]) -> None:
    shape = Shape(h=heads[0], hkv=heads[1])
    check(*qkv(shape), **keywords("causal+alibi+sinks+boolmask", shape))


@pytest.mark.parametrize("dim", [1, 3, 8, 40, 72, 80, 96, 112, 160, 192, 256, 320])
def test_head_dimension(dim: int) -> None:
    check(*qkv(Shape(b=1, d=dim)), causal=True)


# Rows that see no key


def blind_rows(lse: Tensor) -> Tensor:
    return lse == -INF


def test_causal_with_more_queries_than_keys_leaves_first_rows_blind() -> None:
    out, lse = check(*qkv(Shape(sq=12, sk=5)), causal=True)
    assert blind_rows(lse).sum(-1).unique().tolist() == [7]
    assert (out[:, :7] == 0).all()


def test_window_past_the_last_key_leaves_rows_blind() -> None:
    out, lse = check(*qkv(Shape(sq=20, sk=6)), window=(2, 2))
    assert blind_rows(lse).any() and (out[blind_rows(lse).transpose(1, 2)] == 0).all()


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masked_out_row_is_zero_with_lse_minus_infinity(kind: str) -> None:
    shape = Shape()
    mask = torch.ones(shape.b, 1, shape.sq, shape.sk, dtype=torch.bool)
    mask[0, :, 3] = False
    mask[1] = False
    if kind == "float":
        mask = torch.zeros(mask.shape).masked_fill(~mask, -INF)
    out, lse = check(*qkv(shape), mask=mask)
    assert (out[0, 3] == 0).all() and (lse[0, :, 3] == -INF).all()
    assert (out[1] == 0).all() and (lse[1] == -INF).all()
    assert lse[0, :, :3].isfinite().all()


@pytest.mark.parametrize("feature", ["causal", "window", "boolmask", "floatmask"])
def test_blind_row_with_a_sink_is_zero_with_the_sink_as_lse(feature: str) -> None:
    shape = Shape(sq=30, sk=8)
    features = keywords(feature, shape) | keywords("sinks", shape)
    if "mask" in features:
        features["mask"][:, :, 4] = False if feature == "boolmask" else -INF
    out, lse = check(*qkv(shape), **features)
    _, without = fk.attention(*qkv(shape), return_lse=True, impl="torch", **{**features, "sinks": None})
    blind = blind_rows(without)
    assert blind.any()
    assert (out[blind.transpose(1, 2)] == 0).all()
    torch.testing.assert_close(lse[blind], features["sinks"][:, None].expand_as(lse[0]).expand_as(lse)[blind])


def test_no_keys_at_all_is_zero_with_lse_minus_infinity() -> None:
    out, lse = check(*qkv(Shape(sk=0)))
    assert out.shape[1] == 33 and (out == 0).all() and (lse == -INF).all()


def test_no_keys_with_a_sink_has_the_sink_as_lse() -> None:
    shape = Shape(sk=0)
    sinks = torch.arange(shape.h, dtype=torch.float32)
    out, lse = check(*qkv(shape), sinks=sinks)
    assert (out == 0).all() and (lse == sinks[:, None]).all()


# Masks


MASK_SIZES = {
    "full": (2, 4, 33, 47),
    "one-batch": (1, 4, 33, 47),
    "one-head": (2, 1, 33, 47),
    "one-query": (2, 4, 1, 47),
    "one-key": (2, 4, 33, 1),
    "key-padding": (2, 1, 1, 47),
    "all-ones": (1, 1, 1, 1),
    "3d": (4, 33, 47),
    "3d-one-head": (1, 33, 47),
    "2d": (33, 47),
    "2d-one-query": (1, 47),
    "1d": (47,),
    "1d-one": (1,),
    "0d": (),
}


@pytest.mark.parametrize("make", [bool_mask, float_mask], ids=["bool", "float"])
@pytest.mark.parametrize("sizes", MASK_SIZES.values(), ids=MASK_SIZES.keys())
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_mask_broadcasts_over_batch_heads_queries_keys(make: Any, sizes: tuple[int, ...], layout: str) -> None:
    check(*qkv(Shape(), layout=layout), mask=make(sizes), layout=layout)


@pytest.mark.parametrize("make", [bool_mask, float_mask], ids=["bool", "float"])
def test_mask_of_any_strides(make: Any) -> None:
    inputs = qkv(Shape())
    check(*inputs, mask=make((2, 1, 1, 47)).expand(2, 4, 33, 47))
    check(*inputs, mask=make((47, 33, 2, 4)).permute(2, 3, 1, 0))
    check(*inputs, mask=make((2, 4, 33, 94))[..., ::2])
    check(*inputs, mask=make((2, 8, 40, 60))[:, 1::2, 3:36, 5:52])


def test_bool_mask_is_true_where_a_query_may_attend() -> None:
    q, k, v = qkv(Shape(hkv=4))
    only_third = torch.zeros(47, dtype=torch.bool)
    only_third[3] = True
    torch.testing.assert_close(fk.attention(q, k, v, mask=only_third, impl="torch"), v[:, 3:4].expand(-1, 33, -1, -1))


def test_row_masked_by_the_lowest_finite_number_averages_its_values() -> None:
    """The lowest float is added like any other: such a row has equal logits, it is not hidden."""
    q, k, v = qkv(Shape(b=1, sq=8, sk=20, h=2, hkv=2))
    mask = torch.zeros(8, 20)
    mask[:, 5:] = torch.finfo(torch.float32).min
    mask[3] = torch.finfo(torch.float32).min
    out, _ = check(q, k, v, mask=mask)
    torch.testing.assert_close(out[0, 3], v[0].mean(0))


# Layouts and strides


@pytest.mark.parametrize("feature", ["plain", "causal+alibi+sinks+boolmask"])
def test_layout_bhsd_is_bshd_transposed(feature: str) -> None:
    shape = Shape()
    features = keywords(feature, shape)
    q, k, v = qkv(shape)
    out, lse = fk.attention(q, k, v, return_lse=True, impl="torch", **features)
    turned, turned_lse = check(*(x.transpose(1, 2) for x in (q, k, v)), layout="bhsd", **features)
    assert torch.equal(turned.transpose(1, 2), out) and torch.equal(turned_lse, lse)


def strided(x: Tensor, how: str) -> Tensor:
    """The same values in other strides."""
    if how == "every-other-head-dim":
        return torch.stack([x, x + 1], -1)[..., 0]
    if how == "head-dim-outermost":
        return x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    if how == "padded-rows":
        return torch.nn.functional.pad(x, (3, 5), value=float("nan"))[..., 3:-5]
    if how == "packed":
        return torch.stack([x + 1, x, x + 2], 2)[:, :, 1]
    if how == "sequence-first":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    raise ValueError(how)


@pytest.mark.parametrize(
    "how", ["every-other-head-dim", "head-dim-outermost", "padded-rows", "packed", "sequence-first"]
)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_strides_of_q_k_v_do_not_matter(how: str, layout: str) -> None:
    q, k, v = (strided(x, how) for x in qkv(Shape(), layout=layout))
    check(q, k, v, layout=layout, causal=True)


def test_k_and_v_expanded_over_batch() -> None:
    q, k, v = qkv(Shape())
    check(q, k[:1].expand(2, -1, -1, -1), v[:1].expand(2, -1, -1, -1))


def test_inputs_are_not_written() -> None:
    shape = Shape()
    features = keywords([*EVERYTHING, "floatmask"], shape)
    inputs = qkv(shape)
    everything = [*inputs, *(x for x in features.values() if isinstance(x, Tensor))]
    before = [x.clone() for x in everything]
    fk.attention(*inputs, impl="torch", **features)
    assert all(torch.equal(x, y) for x, y in zip(everything, before, strict=True))


# What is returned


def test_return_lse_adds_the_log_sum_exp() -> None:
    q, k, v = qkv(Shape(), torch.float16)
    out = fk.attention(q, k, v, impl="torch")
    assert isinstance(out, Tensor)
    with_lse = fk.attention(q, k, v, return_lse=True, impl="torch")
    assert isinstance(with_lse, tuple) and len(with_lse) == 2
    assert torch.equal(with_lse[0], out)
    assert with_lse[1].shape == (2, 4, 33) and with_lse[1].dtype == torch.float32


def test_lse_joins_two_halves_of_the_keys() -> None:
    q, k, v = qkv(Shape())
    whole = fk.attention(q, k, v, impl="torch")
    (a, lse_a), (b, lse_b) = (
        fk.attention(q, k[:, part], v[:, part], return_lse=True, impl="torch") for part in (slice(0, 20), slice(20, 47))
    )
    lse = torch.logaddexp(lse_a, lse_b)
    share_a, share_b = ((part - lse).exp().transpose(1, 2)[..., None] for part in (lse_a, lse_b))
    torch.testing.assert_close(a * share_a + b * share_b, whole)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_module_computes_the_function(layout: str) -> None:
    shape = Shape()
    inputs = qkv(shape, layout=layout)
    module = fk.Attention(causal=True, window=(8, -1), softcap=2.0, softmax_scale=0.3, layout=layout, impl="torch")
    want = fk.attention(
        *inputs, causal=True, window=(8, -1), softcap=2.0, softmax_scale=0.3, layout=layout, impl="torch"
    )
    assert torch.equal(module(*inputs), want)


def test_module_drops_in_training_only() -> None:
    inputs = qkv(Shape())
    module = fk.Attention(dropout_p=0.4, impl="torch")
    want = fk.attention(*inputs, dropout_p=0.4, dropout_seed=3, impl="torch")
    assert torch.equal(module(*inputs, dropout_seed=3), want)
    assert torch.equal(module.eval()(*inputs), fk.attention(*inputs, impl="torch"))


# Numbers that are not finite


@pytest.mark.parametrize("poison", [float("nan"), INF, -INF], ids=str)
@pytest.mark.parametrize("which", ["k", "v", "kv"])
@pytest.mark.parametrize("feature", ["causal", "left", "boolmask", "floatmask"])
def test_poison_in_an_invisible_key_or_value_never_reaches_the_output(poison: float, which: str, feature: str) -> None:
    shape = Shape(sq=12, sk=12)
    q, k, v = qkv(shape)
    if feature == "causal":
        features: dict[str, Any] = {"causal": True}
        hidden = slice(9, 12)  # for the first rows
    elif feature == "left":
        features = {"window": (2, -1)}
        hidden = slice(0, 3)  # for the last rows
    else:
        keep = torch.ones(shape.sk, dtype=torch.bool)
        keep[5:8] = False
        features = {"mask": keep if feature == "boolmask" else torch.zeros(shape.sk).masked_fill(~keep, -INF)}
        hidden = slice(5, 8)
    for name, x in (("k", k), ("v", v)):
        if name in which:
            x[:, hidden] = poison
    out, lse = fk.attention(q, k, v, return_lse=True, impl="torch", **features)
    rows = {"causal": slice(0, 9), "left": slice(5, 12)}.get(feature, slice(None))
    assert out[:, rows].isfinite().all() and lse[:, :, rows].isfinite().all()
    clean = [x.nan_to_num(0.0, 0.0, 0.0) for x in (k, v)]
    want = fk.attention(q, *clean, impl="torch", **features)
    torch.testing.assert_close(out[:, rows], want[:, rows])


def test_poison_in_visible_keys_and_values_reaches_only_the_rows_that_see_them() -> None:
    q, k, v = qkv(Shape(b=1, sq=10, sk=10, hkv=4))
    k[0, 4, 1] = float("nan")  # head 1, seen by rows 4..9
    v[0, 7, 2, 3] = float("nan")  # head 2, seen by rows 7..9, one column
    out, _ = check(q, k, v, causal=True)
    assert out[0, 4:, 1].isnan().all() and out[0, :4, 1].isfinite().all()
    assert out[0, 7:, 2, 3].isnan().all() and out[0, :7, 2].isfinite().all() and out[0, :, 2, :3].isfinite().all()
    assert out[0, :, [0, 3]].isfinite().all()


def test_infinite_visible_value_gives_infinity() -> None:
    q, k, v = qkv(Shape(b=1, sq=6, sk=6, hkv=4))
    v[0, 2, 0, 5] = INF
    out, _ = check(q, k, v, causal=True)
    assert (out[0, 2:, 0, 5] == INF).all() and out[0, :2].isfinite().all()


def test_nan_query_spoils_its_own_row_only() -> None:
    q, k, v = qkv(Shape())
    q[1, 5, 2] = float("nan")
    out, lse = check(q, k, v)
    assert out[1, 5, 2].isnan().all() and out.isnan().any(-1).sum() == 1 and lse.isnan().sum() == 1


def test_nan_query_that_sees_nothing_is_zero() -> None:
    q, k, v = qkv(Shape(sq=12, sk=5))
    q[:, :7] = float("nan")
    out, lse = check(q, k, v, causal=True)
    assert (out[:, :7] == 0).all() and (lse[:, :, :7] == -INF).all() and out.isfinite().all()


# Ragged batches

LENGTHS = {
    "several": ([5, 17, 1, 30], [9, 17, 40, 3]),
    "some-empty": ([0, 7, 0, 12, 0], [4, 0, 0, 12, 6]),
    "one": ([13], [21]),
    "all-empty": ([0, 0], [0, 0]),
    "no-queries": ([0, 0], [3, 4]),
    "no-keys": ([3, 4], [0, 0]),
    "no-sequences": ([], []),
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("feature", ["plain", "causal", "window", "causal+sinks+alibi2d+softcap"])
def test_varlen_lengths(lengths: tuple[list[int], list[int]], feature: str) -> None:
    shape = Shape(b=len(lengths[0]))
    check_varlen(ragged(*lengths, shape), **keywords(feature, shape))


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("feature", NO_MASK)
def test_varlen_feature(feature: str, dtype: torch.dtype) -> None:
    shape = Shape(b=4, h=6, hkv=2, d=24, dv=16)
    check_varlen(ragged(*LENGTHS["several"], shape, dtype), **keywords(feature, shape))


@pytest.mark.parametrize("both", pairs(NO_MASK))
def test_varlen_pair_of_features(both: str) -> None:
    shape = Shape(b=4)
    check_varlen(ragged(*LENGTHS["several"], shape), **keywords(both, shape))


def test_varlen_equals_dense_for_each_sequence() -> None:
    batch = ragged([6, 0, 11], [9, 2, 11])
    out, lse = fk.attention_varlen(*batch.args, causal=True, return_lse=True, impl="torch")
    assert lse.shape == (4, 17)
    one, one_lse = fk.attention(
        batch.q[None, 6:], batch.k[None, 11:], batch.v[None, 11:], causal=True, return_lse=True, impl="torch"
    )
    torch.testing.assert_close(out[6:], one[0])
    torch.testing.assert_close(lse[:, 6:], one_lse[0])


def test_varlen_max_seqlen_may_be_larger_than_the_longest() -> None:
    batch = ragged([5, 9], [7, 3])
    out = fk.attention_varlen(*batch.args[:5], 1000, 2000, impl="torch")
    assert torch.equal(out, fk.attention_varlen(*batch.args, impl="torch"))


@pytest.mark.parametrize("poison", [float("nan"), INF], ids=str)
def test_varlen_poison_in_one_sequence_stays_there(poison: float) -> None:
    batch = ragged([5, 9, 4], [7, 9, 6])
    clean = fk.attention_varlen(*batch.args, impl="torch")
    for x in (batch.k, batch.v):
        x[7:16] = poison
    out = fk.attention_varlen(*batch.args, impl="torch")
    others = [*range(5), *range(14, 18)]
    torch.testing.assert_close(out[others], clean[others])


def test_varlen_of_strided_inputs() -> None:
    batch = ragged([5, 17], [9, 20], Shape(hkv=4))
    packed = torch.stack([batch.k, batch.v], 1)  # (total, 2, H, D): rows of k and v alternate
    out, lse = fk.attention_varlen(
        batch.q, packed[:, 0], packed[:, 1], *batch.args[3:], causal=True, return_lse=True, impl="torch"
    )
    oracle.assert_correct_varlen(out, lse, *batch.tensors, causal=True)
