"""`impl="hopper"` on a Hopper GPU with heads of more than 256 columns, which have a kernel of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flashkernels as fk
from flashkernels.attention.hopper.tiles import choose
from flashkernels.attention.hopper.wide_tiles import filled
from flashkernels.attention.hopper.wide_variants import ALONE, DIMS, MIXED, PAIR, WIDE, wide_variant
from flashkernels.attention.problem import AttentionProblem

from . import oracle
from .cases import EVERYTHING, NO_MASK, Shape, generator, keywords, pairs, ragged
from .gpu import (
    INF,
    LENGTHS,
    NAN,
    check,
    check_pages,
    check_varlen,
    compile_ahead,
    cuda,
    each_half,
    new_memory_is_nan,
    on_hopper,
    syncs_are_errors,
)
from .test_hopper_numbers import LOGITS, aligned

pytestmark = [pytest.mark.gpu, on_hopper]

IMPL = "hopper"
SHAPE = Shape(b=2, sq=300, sk=450, h=4, hkv=2, d=512)


def of(shape: Shape) -> AttentionProblem:
    return AttentionProblem(
        batch=shape.b, seq_q=shape.sq, seq_k=shape.sk, heads=shape.h, kv_heads=shape.hkv, head_dim=shape.d,
        device="cuda",
    )  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _compiled(kernels: Path, request: pytest.FixtureRequest) -> None:
    """Most variants of these tests."""
    both = [wide_variant(dim, right=right) for dim in DIMS for right in (False, True)]
    compile_ahead(dict.fromkeys((*WIDE, *both)), request)


# Sizes


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dim", DIMS)
def test_head_dimension(dim: int, causal: bool) -> None:
    check(*cuda(Shape(b=1, sq=700, sk=1000, h=4, hkv=2, d=dim)), causal=causal, impl=IMPL)


@pytest.mark.parametrize("dims", MIXED, ids=str)
@each_half
def test_head_dimension_of_v_differs(dims: tuple[int, int], dtype: torch.dtype) -> None:
    check(*cuda(SHAPE.but(d=dims[0], dv=dims[1]), dtype), causal=True, impl=IMPL)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("sk", [1, 63, 64, 65, 127, 128, 129, 192, 193, 256, 1000])
@pytest.mark.parametrize("sq", [1, 64, 65, 128, 129, 300])
def test_lengths_at_the_ends_of_tiles(sq: int, sk: int, causal: bool) -> None:
    check(*cuda(Shape(b=2, sq=sq, sk=sk, h=2, hkv=1, d=512)), causal=causal, impl=IMPL)


def test_more_tiles_than_multiprocessors() -> None:
    check(*cuda(Shape(b=2, sq=2100, sk=1900, h=10, hkv=5, d=384)), causal=True, impl=IMPL)


@pytest.mark.parametrize("tile", [PAIR, ALONE], ids=lambda tile: tile.name)
@pytest.mark.parametrize("dims", [(512, 512), (264, 264), (328, 512), (512, 136)], ids=str)
def test_every_tile_computes_the_same(tile: Any, dims: tuple[int, int]) -> None:
    with fk.use_tile(tile=filled(tile, *dims, 232448)):
        for feature in ("plain", "causal+softcap"):
            shape = SHAPE.but(sq=700, d=dims[0], dv=dims[1])
            check(*cuda(shape), impl=IMPL, **keywords(feature, shape, "cuda"))


# Features


@pytest.mark.parametrize("feature", [*NO_MASK, *pairs(NO_MASK)[::3]])
def test_feature(feature: str) -> None:
    for shape in (SHAPE, SHAPE.but(sq=450, sk=300, d=320)):
        check(*cuda(shape), impl=IMPL, **keywords(feature, shape, "cuda"))


@each_half
@pytest.mark.parametrize("dims", [(512, 512), (264, 400)], ids=str)
def test_every_feature_at_once(dims: tuple[int, int], dtype: torch.dtype) -> None:
    shape = SHAPE.but(d=dims[0], dv=dims[1])
    check(*cuda(shape, dtype), impl=IMPL, **keywords(EVERYTHING, shape, "cuda"))


@pytest.mark.parametrize("feature", ["plain", "causal", "window", "softcap", "sinks", "alibi"])
@pytest.mark.parametrize("dim", [320, 512])
def test_ragged(feature: str, dim: int) -> None:
    shape = Shape(b=len(LENGTHS[0]), h=4, hkv=2, d=dim)
    check_varlen(ragged(*LENGTHS, shape, torch.bfloat16, device="cuda"), impl=IMPL, **keywords(feature, shape, "cuda"))


def test_keys_of_random_lengths_and_places() -> None:
    draw = generator(3)
    for _ in range(3):
        lens_q, lens_k = (torch.randint(0, 700, (40,), generator=draw).tolist() for _ in range(2))
        batch = ragged(lens_q, lens_k, Shape(h=6, hkv=2, d=512), torch.bfloat16, device="cuda")
        check_varlen(batch, causal=True, impl=IMPL)


@pytest.mark.parametrize("feature", ["plain", "causal", "window", "+".join(EVERYTHING)])
@pytest.mark.parametrize("page_size", [64, 128, 192])
@pytest.mark.parametrize("dim", [264, 512])
def test_paged(dim: int, page_size: int, feature: str) -> None:
    shape = Shape(b=len(LENGTHS[0]), h=4, hkv=2, d=dim)
    batch = ragged(*LENGTHS, shape, torch.bfloat16, device="cuda")
    check_pages(batch, page_size, impl=IMPL, **keywords(feature, shape, "cuda"))


@pytest.mark.parametrize("feature", ["plain", "causal", "window", "alibi2d+sinks", "softcap"])
@pytest.mark.parametrize("heads", [(1, 8, 1), (5, 6, 2), (16, 16, 2), (70, 12, 1), (3, 70, 1)], ids=str)
def test_query_heads_share_a_row_block(heads: tuple[int, int, int], feature: str) -> None:
    """Queries, and heads of both sides. Groups of 3, 12 and 70 have packs that leave rows of nobody."""
    shape = Shape(b=2, sq=heads[0], sk=300, h=heads[1], hkv=heads[2], d=512)
    assert choose(of(shape), 132).variant.pack > 1
    with new_memory_is_nan():
        check(*cuda(shape), impl=IMPL, **keywords(feature, shape, "cuda"))


@pytest.mark.parametrize("feature", ["plain", "causal", "window"])
@pytest.mark.parametrize("page_size", [64, 192])
@pytest.mark.parametrize("heads", [(2, 2), (6, 1)], ids=str)
def test_few_rows_over_pages(heads: tuple[int, int], page_size: int, feature: str) -> None:
    batch = ragged([3, 0, 20], [130, 5, 64], Shape(b=3, h=heads[0], hkv=heads[1], d=264), torch.bfloat16, device="cuda")
    check_pages(batch, page_size, impl=IMPL, **keywords(feature, Shape(h=heads[0]), "cuda"))


def test_new_tokens_of_many_sequences_over_pages() -> None:
    lens = [1 + i % 4 for i in range(24)], [(37 * i) % 500 + 4 for i in range(24)]
    batch = ragged(*lens, Shape(b=24, h=16, hkv=2, d=512), torch.bfloat16, device="cuda")
    check_pages(batch, 64, impl=IMPL, causal=True)


# Numbers that are hard on a softmax whose maximum is lazy


@each_half
@pytest.mark.parametrize("feature", ["plain", "causal", "window"])
@pytest.mark.parametrize("logits", LOGITS.values(), ids=LOGITS.keys())
def test_logits_by_position(logits: Callable[[Tensor], Tensor], feature: str, dtype: torch.dtype) -> None:
    shape = Shape(b=1, sq=300, sk=900, h=2, hkv=2, d=512)
    check(*aligned(shape, logits, dtype), softmax_scale=1.0, impl=IMPL, **keywords(feature, shape, "cuda"))


def one_large(key: int, j: Tensor) -> Tensor:
    return 200.0 * (j == key)


def test_one_warpgroup_alone_outgrows_its_reference() -> None:
    """Keys come in pairs of 64, one for each warpgroup: the large logit is in the one or the other."""
    shape = Shape(b=1, sq=200, sk=1024, h=2, hkv=2, d=512)
    for key in (100, 300, 320, 383, 511):
        check(*aligned(shape, partial(one_large, key), torch.bfloat16), softmax_scale=1.0, impl=IMPL)


@each_half
def test_rows_that_see_nothing(dtype: torch.dtype) -> None:
    shape = SHAPE.but(sq=450, sk=200)
    with new_memory_is_nan():
        out, lse = check(*cuda(shape, dtype), causal=True, impl=IMPL)
    assert not out[:, :250].any() and (lse[:, :, :250] == -INF).all()


# Poison


@pytest.mark.parametrize("poison", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("columns", [slice(0, 512), slice(0, 8), slice(500, 501)], ids=["all", "first", "last"])
def test_poison_in_v_reaches_exactly_those_who_see_it(poison: float, columns: slice) -> None:
    q, k, v = cuda(Shape(b=1, sq=300, sk=300, h=2, hkv=1, d=512))
    v[:, 150, :, columns] = poison
    check(q, k, v, causal=True, impl=IMPL)
    check(q, k, v, window=(40, 20), impl=IMPL)


@pytest.mark.parametrize("poison", [NAN, INF], ids=str)
@pytest.mark.parametrize("which", ["k", "v"])
def test_poison_of_the_next_sequence_reaches_nobody(poison: float, which: str) -> None:
    batch = ragged([70, 200], [100, 300], Shape(h=2, hkv=1, d=512), torch.bfloat16, device="cuda")
    clean = fk.attention_varlen(*batch.args, impl=IMPL)
    {"k": batch.k, "v": batch.v}[which][100:] = poison
    out = fk.attention_varlen(*batch.args, impl=IMPL)
    # made again in another order: each way rounds P to 16 bits (2^-9 of each term), and then the output
    torch.testing.assert_close(out[:70], clean[:70], atol=4 * 2**-9 * batch.v[:100].abs().max().item(), rtol=0)


# Runs


@pytest.mark.parametrize("feature", ["plain", "causal"])
def test_runs_agree_bit_for_bit(feature: str) -> None:
    shape = Shape(b=2, sq=1500, sk=1500, h=8, hkv=8, d=512)
    inputs, features = cuda(shape), keywords(feature, shape, "cuda")
    first = fk.attention(*inputs, return_lse=True, impl=IMPL, **features)
    for _ in range(20):
        again = fk.attention(*inputs, return_lse=True, impl=IMPL, **features)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_a_graph_replays_and_nothing_waits_for_the_gpu() -> None:
    inputs = cuda(SHAPE)
    fk.attention(*inputs, causal=True, impl=IMPL)
    with syncs_are_errors():
        fk.attention(*inputs, causal=True, impl=IMPL)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = fk.attention(*inputs, causal=True, return_lse=True, impl=IMPL)
    for _ in range(3):
        out.zero_()
        graph.replay()
        oracle.assert_correct(out, lse, *inputs, causal=True)


def test_strides() -> None:
    packed = torch.randn(2, 200, 3, 4, 320, device="cuda", dtype=torch.bfloat16)
    check(*packed.unbind(2), causal=True, impl=IMPL)
    q, k, v = cuda(Shape(b=3, sq=300, sk=400, h=6, hkv=4, d=512))
    check(q[1:, 37:250, 2:4], k[1:, 101:300, 1:3], v[1:, 101:300, 2:4], causal=True, impl=IMPL)
