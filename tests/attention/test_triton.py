"""`impl="triton"` on CPU tensors in Triton's interpreter, against the oracle, at sizes that do not fill its tiles.

fp16 and fp32 only: the interpreter's bf16 arithmetic is wrong, so bf16 is tested on a GPU (test_gpu.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import flashkernels as fk
from flashkernels.attention.triton import tiles
from flashkernels.attention.triton.build import LARGE
from flashkernels.hardware import lookup
from flashkernels.tiling import Tile, use_tile

from . import oracle
from .cases import (
    EVERYTHING,
    FEATURES,
    NO_MASK,
    Shape,
    bool_mask,
    dtype_id,
    float_mask,
    interpreter,
    keywords,
    pairs,
    qkv,
    ragged,
)

pytestmark = interpreter

INF, NAN = float("inf"), float("nan")
HEAD_DIMS = [1, 7, 16, 24, 40, 48, 64, 72, 80, 96, 112, 128, 160, 192, 256, 264, 320, 512]


def check(q: Tensor, k: Tensor, v: Tensor, **features: Any) -> tuple[Tensor, Tensor]:
    out, lse = fk.attention(q, k, v, return_lse=True, impl="triton", **features)
    oracle.assert_correct(out, lse, q, k, v, **features)
    return out, lse


def check_varlen(batch: Any, **features: Any) -> tuple[Tensor, Tensor]:
    out, lse = fk.attention_varlen(*batch.args, return_lse=True, impl="triton", **features)
    oracle.assert_correct_varlen(out, lse, *batch.tensors, **features)
    return out, lse


# Features


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=dtype_id)
@pytest.mark.parametrize("feature", FEATURES)
def test_feature_alone(feature: str, dtype: torch.dtype) -> None:
    shape = Shape(b=2, sq=70, sk=150, h=2, hkv=1)
    check(*qkv(shape, dtype), **keywords(feature, shape))


@pytest.mark.parametrize("both", pairs())
def test_pair_of_features(both: str) -> None:
    shape = Shape(b=1, sq=90, sk=75, h=2, hkv=1)  # more queries than keys: causal leaves rows that see nothing
    check(*qkv(shape), **keywords(both, shape))


@pytest.mark.parametrize("mask", ["boolmask", "floatmask"])
@pytest.mark.parametrize("dim", [24, 72, 264])
def test_every_feature_at_once(mask: str, dim: int) -> None:
    shape = Shape(b=2, sq=45, sk=140, h=3, hkv=1, d=dim, dv=40)
    check(*qkv(shape, torch.float16), **keywords([*EVERYTHING, mask], shape))


@pytest.mark.parametrize(
    "window", [(0, 0), (0, -1), (-1, 0), (40, 0), (0, 40), (64, 64), (2**31 - 1, 2**31 - 1)], ids=str
)
@pytest.mark.parametrize("sizes", [(130, 130), (40, 190), (190, 40)], ids=lambda s: f"q{s[0]}k{s[1]}")
def test_window(window: tuple[int, int], sizes: tuple[int, int]) -> None:
    check(*qkv(Shape(b=1, sq=sizes[0], sk=sizes[1], h=1, hkv=1)), window=window)


@pytest.mark.parametrize("scale", [0.0, -0.7, 3.0])
@pytest.mark.parametrize("feature", ["plain", "causal", "softcap"])
def test_scale_of_any_sign(scale: float, feature: str) -> None:
    shape = Shape(b=1, sq=20, sk=150, h=1, hkv=1)
    check(*qkv(shape), softmax_scale=scale, **keywords(feature, shape))


@pytest.mark.parametrize("softcap", [0.1, 30.0, 1000.0])
def test_softcap_keeps_fp32_accuracy(softcap: float) -> None:
    check(*qkv(Shape(b=1, sq=20, sk=150, h=2, hkv=2)), softcap=softcap)


@pytest.mark.parametrize("sink", [-INF, -1e4, 1e4], ids=str)
def test_extreme_sink(sink: float) -> None:
    check(*qkv(Shape(b=1, sq=20, sk=12, h=2)), sinks=torch.full((2,), sink), causal=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=dtype_id)
@pytest.mark.parametrize("name", ["sinks", "alibi", "alibi2d", "floatmask"])
def test_side_inputs_take_any_float_dtype(name: str, dtype: torch.dtype) -> None:
    shape = Shape(h=2)
    features = {key: value.to(dtype) for key, value in keywords(name, shape).items()}
    check(*qkv(shape, torch.float16), **features)


def test_side_inputs_of_any_strides() -> None:
    shape = Shape()
    check(
        *qkv(shape),
        sinks=torch.linspace(-1, 1, 2 * shape.h)[::2],
        alibi_slopes=torch.rand(shape.h, shape.b, generator=torch.Generator().manual_seed(0)).T,
    )
    check(*qkv(shape), sinks=torch.tensor(0.5).expand(shape.h), alibi_slopes=torch.tensor(0.1).expand(shape.h))


def test_large_scores_do_not_overflow() -> None:
    q, k, v = qkv(Shape(b=1, sk=150, h=1, hkv=1), torch.float16)
    check(q * 50, k * 50, v, causal=True)


# Shapes


@pytest.mark.parametrize("dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=dtype_id)
def test_head_dimension(dim: int, dtype: torch.dtype) -> None:
    check(*qkv(Shape(b=1, sq=35, sk=85, h=2, hkv=1, d=dim), dtype), causal=True)


@pytest.mark.parametrize("strategy", ["standard", "exact"])
@pytest.mark.parametrize("dim", [40, 72, 112])
def test_strategy_changes_the_tile_not_the_answer(strategy: str, dim: int) -> None:
    with use_tile(strategy=strategy):
        check(*qkv(Shape(b=1, sq=35, sk=85, h=1, hkv=1, d=dim), torch.float16), causal=True)


@pytest.mark.parametrize(
    "dims", [(16, 40), (40, 16), (192, 128), (1, 72), (72, 1), (64, 512), (512, 64), (320, 24)], ids=str
)
def test_head_dimension_of_v_differs(dims: tuple[int, int]) -> None:
    check(*qkv(Shape(b=1, sq=20, sk=70, h=2, hkv=1, d=dims[0], dv=dims[1]), torch.float16), causal=True)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(b=0),
        Shape(sq=0),
        Shape(sk=0),
        Shape(sq=0, sk=0),
        Shape(b=1, sq=1, sk=1, h=1, hkv=1, d=1),
        Shape(sq=1, sk=129),
        Shape(sq=129, sk=1),
        Shape(b=3, sq=2, sk=65, h=6, hkv=3),
    ],
    ids=str,
)
@pytest.mark.parametrize("feature", ["plain", "causal+sinks+floatmask+softcap+alibi"])
def test_shape(shape: Shape, feature: str) -> None:
    check(*qkv(shape), **keywords(feature, shape))


@pytest.mark.parametrize(
    "sizes", [(64, 64), (128, 128), (63, 65), (127, 129), (129, 127), (200, 17), (17, 200)], ids=str
)
@pytest.mark.parametrize("feature", ["plain", "causal", "window", "floatmask"])
def test_sequence_lengths_around_the_tile(sizes: tuple[int, int], feature: str) -> None:
    shape = Shape(b=1, sq=sizes[0], sk=sizes[1], h=1, hkv=1)
    check(*qkv(shape), **keywords(feature, shape))


@pytest.mark.parametrize("heads", [(6, 2), (7, 1), (14, 2), (8, 1), (5, 5)], ids=lambda h: f"{h[0]}:{h[1]}")
def test_query_heads_share_key_heads_in_consecutive_groups(heads: tuple[int, int]) -> None:
    shape = Shape(b=2, sq=9, sk=20, h=heads[0], hkv=heads[1])
    check(*qkv(shape), **keywords("causal+alibi+sinks+boolmask", shape))


TILES = {
    "16x16": (16, 16), "16x128": (16, 128), "128x16": (128, 16), "64x32": (64, 32), "32x64": (32, 64),
}  # fmt: skip


@pytest.mark.parametrize("tma", [False, True], ids=["pointer", "tma"])
@pytest.mark.parametrize("blocks", TILES.values(), ids=TILES.keys())
@pytest.mark.parametrize(
    "feature", ["plain", "causal", "window", "causal+left+softcap+alibi+sinks", "boolmask", "floatmask+causal"]
)
def test_tile_of_any_proportions(blocks: tuple[int, int], feature: str, tma: bool) -> None:
    """Small and asymmetric tiles: many blocks, of which some are hidden from a part of the rows."""
    shape = Shape(b=1, sq=75, sk=90, h=2, hkv=1, d=24, dv=40)
    tile = Tile("exact", *blocks, parts=(16, 16), parts_v=(32, 16), warps=4, stages=1, tma=tma)
    with use_tile(tile=tile):
        check(*qkv(shape, torch.float16), **keywords(feature, shape))


@pytest.mark.parametrize("tma", [False, True], ids=["pointer", "tma"])
@pytest.mark.parametrize("feature", ["plain", "causal", "window+sinks"])
def test_ragged_batch_in_tiles_of_any_proportions(feature: str, tma: bool) -> None:
    shape = Shape(b=4, h=2, hkv=1, d=24, dv=40)
    batch = ragged([40, 0, 1, 25], [33, 9, 50, 0], shape, torch.float16)
    for blocks in ((16, 32), (64, 16)):
        tile = Tile("exact", *blocks, parts=(16, 16), parts_v=(32, 16), warps=4, stages=1, tma=tma)
        with use_tile(tile=tile):
            check_varlen(batch, **keywords(feature, shape))


# Tiles that take the maximum of a row's last keys for all of them, or compute a part of the next scores early

LAZY = {"lazy": {"lazy": True}, "early": {"lazy": True, "early": True}}


@pytest.mark.parametrize("how", LAZY.values(), ids=LAZY)
@pytest.mark.parametrize("blocks", [(16, 32), (64, 16)], ids=["16x32", "64x16"])
@pytest.mark.parametrize("feature", FEATURES)
def test_lazy_tile_of_any_proportions(how: dict[str, bool], blocks: tuple[int, int], feature: str) -> None:
    shape = Shape(b=1, sq=75, sk=90, h=2, hkv=1, d=24, dv=40)
    tile = Tile("exact", *blocks, parts=(16, 16), parts_v=(32, 16), warps=4, stages=1, tma=True, **how)
    with use_tile(tile=tile):
        check(*qkv(shape, torch.float16), **keywords(feature, shape))


@pytest.mark.parametrize("feature", ["plain", "causal", "window+sinks"])
def test_ragged_batch_in_lazy_tiles(feature: str) -> None:
    shape = Shape(b=4, h=2, hkv=1, d=24, dv=40)
    batch = ragged([40, 0, 1, 25], [33, 9, 50, 0], shape, torch.float16)
    tile = Tile("exact", 16, 16, (16, 16), (32, 16), 4, stages=1, tma=True, lazy=True, early=True)
    with use_tile(tile=tile):
        check_varlen(batch, **keywords(feature, shape))


@pytest.mark.parametrize("keys", [31, 32, 33, 48], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_each_row_has_a_maximum_before_the_interior(keys: int, causal: bool) -> None:
    """Wherever the blocks of keys end against those of rows, the first ones walked show every row a key."""
    tile = Tile("exact", 16, 16, (16,), (16,), warps=4, stages=1, tma=True, lazy=True)
    with use_tile(tile=tile):
        check(*qkv(Shape(b=1, sq=32, sk=keys, h=1, hkv=1, d=16), torch.float32), causal=causal)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=dtype_id)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_scores_that_outgrow_the_lazy_maximum(dtype: torch.dtype, causal: bool) -> None:
    """Key 3 outweighs the last keys, by which the sums are scaled, by far more than a float can hold."""
    q, k, v = qkv(Shape(b=1, sq=48, sk=48, h=1, hkv=1, d=16), dtype)
    q, k = q.abs(), k.abs()
    k[:, 3] *= 200
    tile = Tile("exact", 16, 16, (16,), (16,), warps=4, stages=1, tma=True, lazy=True)
    with use_tile(tile=tile):
        out, _ = check(q, k, v, causal=causal)
    torch.testing.assert_close(out[:, 16:], v[:, 3:4].expand_as(out[:, 16:]))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("value", [INF, NAN, 60000.0], ids=str)
def test_poison_and_giants_in_v_under_a_lazy_maximum(value: float, causal: bool) -> None:
    q, k, v = qkv(Shape(b=1, sq=48, sk=48, h=1, hkv=1, d=16), torch.float16)
    v[:, 20] = value
    tile = Tile("exact", 16, 16, (16,), (16,), warps=4, stages=1, tma=True, lazy=True)
    with use_tile(tile=tile):
        check(q, k, v, causal=causal)


# The lazy tiles that the rules name for bf16. In fp32, whose sums reach as far.

RULED = {
    "64": (64, 64), "72": (72, 72), "80": (80, 80), "96": (96, 96), "96-64": (96, 64), "128": (128, 128),
    "160": (160, 160),
}  # fmt: skip
EARLY = ("96", "96-64", "160")
each_rule = pytest.mark.parametrize("dims", RULED.values(), ids=RULED)


def ruled(dims: tuple[int, int]) -> Tile:
    problem = replace(LARGE, head_dim=dims[0], head_dim_v=dims[1])
    return tiles.choose(problem, lookup("h200"), tma=True).tile


def test_the_rules_name_lazy_tiles_and_early_ones() -> None:
    assert all(ruled(dims).lazy for dims in RULED.values())
    assert {name for name, dims in RULED.items() if ruled(dims).early} == set(EARLY)
    assert {ruled(RULED[name]).parts for name in EARLY} == {(64, 32), (128, 32)}


@pytest.mark.slow
@each_rule
@pytest.mark.parametrize("sizes", [(130, 200), (150, 70)], ids=["q130k200", "q150k70"])
@pytest.mark.parametrize("feature", ["plain", "causal+sinks", "left"])
def test_tile_that_a_rule_names(dims: tuple[int, int], sizes: tuple[int, int], feature: str) -> None:
    shape = Shape(b=1, sq=sizes[0], sk=sizes[1], h=2 if feature == "plain" else 1, hkv=1, d=dims[0], dv=dims[1])
    with use_tile(tile=ruled(dims)):
        check(*qkv(shape), **keywords(feature, shape))


@each_rule
def test_ragged_batch_in_a_tile_that_a_rule_names(dims: tuple[int, int]) -> None:
    batch = ragged([70, 0, 130], [140, 9, 70], Shape(b=3, h=1, hkv=1, d=dims[0], dv=dims[1]))
    with use_tile(tile=ruled(dims)):
        check_varlen(batch, causal=True)


@each_rule
def test_giant_key_in_a_tile_that_a_rule_names(dims: tuple[int, int]) -> None:
    """Far from the last keys, so that every block of rows but the first is computed again."""
    q, k, v = qkv(Shape(b=1, sq=190, sk=190, h=1, hkv=1, d=dims[0], dv=dims[1]))
    q, k = q.abs(), k.abs()
    k[:, 3] *= 100
    with use_tile(tile=ruled(dims)):
        check(q, k, v, causal=True)


@each_rule
@pytest.mark.parametrize(("which", "poison"), [("k", NAN), ("v", NAN), ("v", -INF)], ids=str)
def test_poison_in_a_tile_that_a_rule_names(dims: tuple[int, int], which: str, poison: float) -> None:
    """In an interior block of the last rows, and hidden from the first ones."""
    q, k, v = qkv(Shape(b=1, sq=150, sk=150, h=1, hkv=1, d=dims[0], dv=dims[1]))
    {"k": k, "v": v}[which][:, 50, :, 1] = poison
    with use_tile(tile=ruled(dims)):
        out, _ = check(q, k, v, causal=True)
    assert out[:, :50].isfinite().all()


# Rows that see no key


@pytest.mark.parametrize("sinks", [False, True], ids=["no-sinks", "sinks"])
@pytest.mark.parametrize("case", ["causal", "window", "bool", "float"])
def test_rows_that_see_nothing_are_zero(case: str, sinks: bool) -> None:
    shape = Shape(b=1, sq=150, sk=40, h=2)
    features = keywords("sinks", shape) if sinks else {}
    if case == "causal":
        features["causal"] = True
    elif case == "window":
        features["window"] = (3, 3)
    else:
        keep = torch.ones(shape.sq, shape.sk, dtype=torch.bool)
        keep[10:100] = False
        features["mask"] = keep if case == "bool" else torch.zeros(keep.shape).masked_fill(~keep, -INF)
    out, lse = check(*qkv(shape), **features)
    blind = out.abs().sum(-1) == 0
    assert 80 <= blind[0, :, 0].sum() <= 115
    if sinks:
        torch.testing.assert_close(
            lse[0, :, blind[0, :, 0]], features["sinks"][:, None].expand(-1, int(blind[0, :, 0].sum()))
        )
    else:
        assert (lse[0, :, blind[0, :, 0]] == -INF).all()


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("where", ["first", "middle", "last"])
def test_key_block_hidden_from_some_rows_of_a_tile(kind: str, where: str) -> None:
    """The trap of running maxima: a row whose first blocks are all hidden has maximum -inf, and -inf - -inf is NaN."""
    shape = Shape(b=1, sq=30, sk=200, h=1, hkv=1)
    keep = torch.ones(shape.sq, shape.sk, dtype=torch.bool)
    keep[::2, {"first": slice(0, 136), "middle": slice(60, 140), "last": slice(60, 200)}[where]] = False
    keep[4] = False
    mask = keep if kind == "bool" else torch.zeros(keep.shape).masked_fill(~keep, -INF)
    check(*qkv(shape), mask=mask)


def test_window_hides_whole_key_blocks_from_some_rows_of_a_tile() -> None:
    for left in (0, 1, 17, 63, 64, 65, 100):
        check(*qkv(Shape(b=1, sq=150, sk=170, h=1, hkv=1)), window=(left, 0))


def test_row_masked_by_the_lowest_finite_number_averages_its_values() -> None:
    """The lowest float is added like any other: such a row has equal logits, it is not hidden."""
    q, k, v = qkv(Shape(b=1, sq=8, sk=20, h=2, hkv=2))
    mask = torch.zeros(8, 20)
    mask[:, 5:] = torch.finfo(torch.float32).min
    mask[3] = torch.finfo(torch.float32).min
    out = fk.attention(q, k, v, mask=mask, impl="triton")
    oracle.assert_correct(out, None, q, k, v, mask=mask)
    torch.testing.assert_close(out[0, 3], v[0].mean(0))


# Masks


MASK_SIZES = [
    (2, 2, 20, 70),
    (1, 2, 20, 70),
    (2, 1, 20, 70),
    (2, 2, 1, 70),
    (2, 2, 20, 1),
    (2, 1, 1, 70),
    (1, 1, 1, 1),
    (20, 70),
    (70,),
    (),
]


@pytest.mark.parametrize("make", [bool_mask, float_mask], ids=["bool", "float"])
@pytest.mark.parametrize("sizes", MASK_SIZES, ids=str)
def test_mask_broadcasts(make: Any, sizes: tuple[int, ...]) -> None:
    check(*qkv(Shape(sq=20, sk=70, h=2)), mask=make(sizes))


@pytest.mark.parametrize("make", [bool_mask, float_mask], ids=["bool", "float"])
def test_mask_of_any_strides(make: Any) -> None:
    inputs = qkv(Shape(sq=20, sk=70, h=2))
    check(*inputs, mask=make((2, 1, 1, 70)).expand(2, 2, 20, 70))
    check(*inputs, mask=make((70, 20, 2, 2)).permute(2, 3, 1, 0))
    check(*inputs, mask=make((2, 2, 20, 140))[..., ::2])


# Layouts and strides


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("feature", ["plain", "causal+alibi+sinks+floatmask"])
def test_layout(layout: str, feature: str) -> None:
    shape = Shape(h=2, hkv=2, d=40)
    check(*qkv(shape, layout=layout), layout=layout, **keywords(feature, shape))


def test_strides_of_q_k_v_do_not_matter() -> None:
    q, k, v = qkv(Shape(sq=20, sk=70, h=2, d=24))
    check(*(torch.stack([x, x + 1], -1)[..., 0] for x in (q, k, v)), causal=True)
    check(*(torch.nn.functional.pad(x, (3, 5), value=NAN)[..., 3:-5] for x in (q, k, v)), causal=True)
    check(*(x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0) for x in (q, k, v)), causal=True)
    check(q, k[:1].expand(2, -1, -1, -1), v[:, :, :1].expand(-1, -1, 2, -1))


def test_k_and_v_of_one_packed_tensor() -> None:
    q, _, _ = qkv(Shape(sq=20, sk=70, h=2, d=24))
    packed = torch.randn(2, 70, 3, 2, 24, generator=torch.Generator().manual_seed(0))
    check(q, packed[:, :, 1], packed[:, :, 2])


# Numbers that are not finite, and memory that is not ours


@pytest.mark.parametrize("poison", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("feature", ["causal", "window", "boolmask", "floatmask"])
def test_poison_in_an_invisible_key_or_value_never_reaches_the_output(poison: float, which: str, feature: str) -> None:
    shape = Shape(b=1, sq=150, sk=150, h=2, hkv=1)
    q, k, v = qkv(shape)
    features: dict[str, Any]
    if feature == "causal":
        features, hidden, rows = {"causal": True}, slice(100, 150), slice(0, 100)
    elif feature == "window":
        features, hidden, rows = {"window": (20, 3)}, slice(60, 70), [*range(57), *range(90, 150)]
    else:
        keep = torch.ones(150, dtype=torch.bool)
        keep[60:90] = False
        keep = keep if feature == "boolmask" else torch.zeros(150).masked_fill(~keep, -INF)
        features, hidden, rows = {"mask": keep}, slice(60, 90), slice(None)
    {"k": k, "v": v}[which][:, hidden] = poison
    out, lse = fk.attention(q, k, v, return_lse=True, impl="triton", **features)
    clean = [x.nan_to_num(0.0, 0.0, 0.0) for x in (k, v)]
    want, want_lse = fk.attention(q, *clean, return_lse=True, impl="triton", **features)
    torch.testing.assert_close(out[:, rows], want[:, rows])
    torch.testing.assert_close(lse[:, :, rows], want_lse[:, :, rows])


def test_poison_in_visible_values_reaches_only_the_rows_that_see_them() -> None:
    q, k, v = qkv(Shape(b=1, sq=100, sk=100, h=2, hkv=2, d=24))
    v[0, 70, 1, 3] = NAN  # seen by rows 70..99 of head 1, one column
    v[0, 80, 0, 20] = INF
    out, _ = fk.attention(q, k, v, causal=True, return_lse=True, impl="triton")
    assert out[0, 70:, 1, 3].isnan().all() and (out[0, 80:, 0, 20] == INF).all()
    assert out.isfinite().sum() == out.numel() - 30 - 20


def test_poison_in_a_visible_key_spoils_the_rows_that_see_it() -> None:
    q, k, v = qkv(Shape(b=1, sq=100, sk=100, h=2, hkv=2))
    k[0, 70, 1] = NAN
    out, lse = fk.attention(q, k, v, causal=True, return_lse=True, impl="triton")
    assert out[0, 70:, 1].isnan().all() and out[0, :70, 1].isfinite().all() and out[0, :, 0].isfinite().all()
    assert lse[0, 1, 70:].isnan().all() and lse[0, 1, :70].isfinite().all() and lse[0, 0].isfinite().all()


def test_nan_query_that_sees_nothing_is_zero() -> None:
    q, k, v = qkv(Shape(sq=30, sk=5))
    q[:, :25] = NAN
    out, lse = check(q, k, v, causal=True)
    assert (out[:, :25] == 0).all() and (lse[:, :, :25] == -INF).all() and out.isfinite().all()


def surrounded(x: Tensor, value: float) -> Tensor:
    """The same tensor as a view into a larger one that holds `value` everywhere else."""
    room = torch.full([size + 6 for size in x.shape], value, dtype=x.dtype)
    inner = room[tuple(slice(3, -3) for _ in x.shape)]
    inner.copy_(x)
    return inner


@pytest.mark.parametrize("dims", [(24, 24), (72, 40), (7, 1)], ids=str)
@pytest.mark.parametrize("feature", ["plain", "causal", "floatmask"])
def test_nothing_outside_the_tensors_is_used(dims: tuple[int, int], feature: str) -> None:
    shape = Shape(b=2, sq=19, sk=45, h=2, hkv=2, d=dims[0], dv=dims[1])
    q, k, v = (surrounded(x, NAN) for x in qkv(shape))
    features = {
        name: surrounded(x, NAN) if isinstance(x, Tensor) else x for name, x in keywords(feature, shape).items()
    }
    check(q, k, v, **features)


@pytest.mark.parametrize("feature", ["plain", "causal", "boolmask"])
def test_every_element_of_the_output_is_written(feature: str) -> None:
    """torch.empty returns NaN here."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan().all()
        for shape in (Shape(sq=40, sk=10, h=2, d=24, dv=40), Shape(sq=5, sk=0, h=2, d=16)):
            check(*qkv(shape, torch.float16), **keywords(feature, shape))
        check_varlen(ragged([0, 9, 0, 5], [3, 0, 0, 8], Shape(h=2, d=24)), causal=True)
    finally:
        torch.use_deterministic_algorithms(False)


def test_inputs_are_not_written() -> None:
    shape = Shape()
    features = keywords([*EVERYTHING, "floatmask"], shape)
    inputs = qkv(shape)
    everything = [*inputs, *(x for x in features.values() if isinstance(x, Tensor))]
    before = [x.clone() for x in everything]
    fk.attention(*inputs, impl="triton", **features)
    assert all(torch.equal(x, y) for x, y in zip(everything, before, strict=True))


def test_two_runs_agree_bit_for_bit() -> None:
    shape = Shape(sk=130)
    features = keywords([*EVERYTHING, "floatmask"], shape)
    first = fk.attention(*qkv(shape, torch.float16), return_lse=True, impl="triton", **features)
    second = fk.attention(*qkv(shape, torch.float16), return_lse=True, impl="triton", **features)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_return_lse_does_not_change_the_output() -> None:
    inputs = qkv(Shape(), torch.float16)
    out = fk.attention(*inputs, causal=True, impl="triton")
    assert isinstance(out, Tensor)
    assert torch.equal(out, fk.attention(*inputs, causal=True, return_lse=True, impl="triton")[0])


# Ragged batches

LENGTHS = {
    "several": ([5, 17, 1, 130], [90, 17, 140, 3]),
    "some-empty": ([0, 7, 0, 12, 0], [4, 0, 0, 70, 6]),
    "one": ([13], [81]),
    "all-empty": ([0, 0], [0, 0]),
    "no-keys": ([3, 4], [0, 0]),
    "no-sequences": ([], []),
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("feature", ["plain", "causal", "causal+sinks+alibi2d+softcap"])
def test_varlen_lengths(lengths: tuple[list[int], list[int]], feature: str) -> None:
    shape = Shape(b=len(lengths[0]), h=2)
    check_varlen(ragged(*lengths, shape), **keywords(feature, shape))


@pytest.mark.parametrize("feature", NO_MASK)
def test_varlen_feature(feature: str) -> None:
    shape = Shape(b=4, h=3, hkv=1, d=24, dv=40)
    check_varlen(ragged(*LENGTHS["several"], shape, torch.float16), **keywords(feature, shape))


def test_varlen_max_seqlen_may_be_larger_than_the_longest() -> None:
    batch = ragged([5, 9], [7, 80], Shape(h=2))
    out = fk.attention_varlen(*batch.args[:5], 300, 300, impl="triton")
    oracle.assert_correct_varlen(out, None, *batch.tensors)


@pytest.mark.parametrize("poison", [NAN, INF], ids=str)
@pytest.mark.parametrize("which", ["k", "v"])
def test_varlen_poison_in_one_sequence_stays_there(poison: float, which: str) -> None:
    batch = ragged([5, 9, 4], [70, 9, 6], Shape(h=2))
    clean = fk.attention_varlen(*batch.args, impl="triton")
    {"k": batch.k, "v": batch.v}[which][70:79] = poison
    out = fk.attention_varlen(*batch.args, impl="triton")
    others = [*range(5), *range(14, 18)]
    assert torch.equal(out[others], clean[others])


def test_varlen_of_packed_inputs() -> None:
    batch = ragged([5, 17], [9, 80], Shape(h=2, hkv=2, d=24))
    packed = torch.stack([batch.k, batch.v], 1)
    out = fk.attention_varlen(batch.q, packed[:, 0], packed[:, 1], *batch.args[3:], causal=True, impl="triton")
    oracle.assert_correct_varlen(out, None, *batch.tensors, causal=True)


@pytest.mark.parametrize("scale", [3e-46, 1e-40, 0.0, -1e-40])
def test_a_scale_that_fp32_has_not_weighs_all_keys_alike(scale: float) -> None:
    q, k, v = qkv(Shape(b=1, sq=20, sk=35, h=2, hkv=1, d=16))
    out = fk.attention(q, k, v, causal=True, softmax_scale=scale, impl="triton")
    torch.testing.assert_close(out, fk.attention(q, k, v, causal=True, softmax_scale=0.0, impl="torch"))
