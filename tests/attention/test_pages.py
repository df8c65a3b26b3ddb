"""`attention_varlen(..., block_table=)`: what a page table must be, and that pages mean the same as rows in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import flashkernels as fk
from flashkernels.tiling import Tile, use_tile

from . import oracle
from .cases import EVERYTHING, NO_MASK, Ragged, Shape, interpreter, keywords, paged, ragged
from .gpu import INF, NAN, check_pages
from .test_errors import says
from .test_properties import lengths

SHAPE = Shape(b=2, h=4, hkv=2, d=16, dv=8)
FEATURES = ("plain", "causal", "window", "+".join(EVERYTHING))


def arguments(batch: Ragged, page_size: int = 4, **changes: Any) -> dict[str, Any]:
    """Arguments of fk.attention_varlen for the same batch in pages."""
    pages = paged(batch, page_size)
    good = {
        "q": batch.q, "k": pages.k, "v": pages.v, "cu_seqlens_q": batch.cu_q, "cu_seqlens_k": batch.cu_k,
        "max_seqlen_q": batch.max_q, "max_seqlen_k": batch.max_k, "block_table": pages.table,
    }  # fmt: skip
    return good | changes


@pytest.fixture
def batch() -> Ragged:
    return ragged([2, 4], [3, 9], SHAPE)


BAD: dict[str, tuple[Callable[[Tensor], Any], type[Exception], tuple[str, ...]]] = {
    "no-tensor": (Tensor.tolist, TypeError, ("block_table", "list")),
    "int64": (Tensor.long, TypeError, ("block_table.dtype", "torch.int64", "torch.int32")),
    "of-one-dimension": (lambda x: x[0], ValueError, ("block_table", "(3,)", "(2, at least 3)")),
    "of-another-batch": (lambda x: x[:1], ValueError, ("block_table", "(1, 3)", "(2, at least 3)")),
    "with-too-few-pages": (lambda x: x[:, :2].contiguous(), ValueError, ("block_table", "(2, 2)", "(2, at least 3)")),
    "on-another-device": (lambda x: x.to("meta"), ValueError, ("block_table.device", "meta", "cpu")),
    "not-contiguous": (lambda x: x.t().contiguous().t(), ValueError, ("block_table", "(1, 2)", "contiguous")),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("impl", ["auto", "torch"])
def test_a_bad_table_is_refused(name: str, impl: str, batch: Ragged) -> None:
    change, error, words = BAD[name]
    good = arguments(batch)
    with pytest.raises(error, match=says(*words)):
        fk.attention_varlen(**{**good, "block_table": change(good["block_table"])}, impl=impl)


@pytest.mark.parametrize("which", ["k", "v"])
def test_rows_instead_of_pages_are_refused(which: str, batch: Ragged) -> None:
    rows = {"k": batch.k, "v": batch.v}
    with pytest.raises(ValueError, match=says(which, "3 dimensions", "(pages, page_size, heads, head_dim)")):
        fk.attention_varlen(**arguments(batch, **{which: rows[which]}))


@pytest.mark.parametrize("page", [-1, 10**6])
def test_a_page_that_is_not_there_is_named(page: int, batch: Ragged) -> None:
    good = arguments(batch)
    good["block_table"][1, 2] = page
    with pytest.raises(ValueError, match=says(f"block_table[1, 2]={page}", "sequence 1, slot 2", "is not in 0 to")):
        fk.attention_varlen(**good)


def test_pages_without_room_are_refused(batch: Ragged) -> None:
    good = arguments(batch)
    empty = {"k": good["k"][:, :0], "v": good["v"][:, :0], "cu_seqlens_k": torch.zeros(3).int(), "max_seqlen_k": 0}
    with pytest.raises(ValueError, match=says("k has page_size=0")):
        fk.attention_varlen(**good | empty)


def test_pages_without_a_table_are_refused(batch: Ragged) -> None:
    with pytest.raises(ValueError, match=says("k", "4 dimensions")):
        fk.attention_varlen(**arguments(batch, block_table=None))


def test_a_wider_table_and_a_longer_bound_are_taken(batch: Ragged) -> None:
    good = arguments(batch)
    wide = torch.nn.functional.pad(good["block_table"], (0, 3), value=-1)
    want = fk.attention_varlen(**good)
    assert torch.equal(fk.attention_varlen(**{**good, "block_table": wide}), want)
    assert torch.equal(fk.attention_varlen(**{**good, "block_table": wide, "max_seqlen_k": 24}), want)


def test_lengths_are_still_checked(batch: Ragged) -> None:
    with pytest.raises(ValueError, match=says("max_seqlen_k=8", "9")):
        fk.attention_varlen(**arguments(batch, max_seqlen_k=8))


def test_there_are_no_gradients(batch: Ragged) -> None:
    for name in "qkv":
        leaf = arguments(batch)
        leaf[name] = leaf[name].clone().requires_grad_()
        with pytest.raises(fk.UnsupportedError, match="block_table"):
            fk.attention_varlen(**leaf)
        with torch.no_grad():
            fk.attention_varlen(**leaf)


def test_sdpa_and_hopper_decline(batch: Ragged) -> None:
    for impl, words in (("sdpa", "ragged"), ("hopper", "Hopper")):
        with pytest.raises(fk.UnsupportedError, match=words):
            fk.attention_varlen(**arguments(batch), impl=impl)


@settings(max_examples=150)
@given(lengths(30).filter(len), st.integers(1, 12), st.sampled_from(FEATURES))
def test_pages_mean_what_rows_in_order_mean(lens: list[tuple[int, int]], page_size: int, feature: str) -> None:
    shape = SHAPE.but(b=len(lens))
    batch = ragged([q for q, _ in lens], [k for _, k in lens], shape)
    named = keywords(feature, shape)
    out, lse = fk.attention_varlen(**arguments(batch, page_size), return_lse=True, **named)
    want = fk.attention_varlen(*batch.args, return_lse=True, **named)
    assert torch.equal(out, want[0]) and torch.equal(lse, want[1])
    oracle.assert_correct_varlen(out, lse, *batch.tensors, **named)


def test_two_sequences_may_share_a_page(batch: Ragged) -> None:
    """A prefix that is kept once."""
    good = arguments(ragged([2, 4], [4, 9], SHAPE))
    table = good["block_table"].clone()
    table[0, 0] = table[1, 0]
    out = fk.attention_varlen(**{**good, "block_table": table})
    page = good["k"][table[1, 0]], good["v"][table[1, 0]]
    oracle.assert_correct(out[None, :2], None, good["q"][None, :2], page[0][None], page[1][None])


def test_the_registered_op_takes_pages(batch: Ragged) -> None:
    good = arguments(batch)
    order = ("q", "k", "v")
    call = (
        *(good[name] for name in order), None, None, None, batch.cu_q, batch.cu_k, good["block_table"],
        *(None,) * 3, batch.max_q, batch.max_k, True, 0.25, -1, -1, 0.0, "bshd", True, "torch",
    )  # fmt: skip
    torch.library.opcheck(torch.ops.flashkernels.attention.default, call)


# In Triton's interpreter


@interpreter
@pytest.mark.parametrize("page_size", [1, 7, 16, 64])
@pytest.mark.parametrize("feature", ["plain", "causal", "+".join(EVERYTHING)])
def test_pages_in_the_triton_kernel(feature: str, page_size: int) -> None:
    shape = Shape(b=4, h=3, hkv=1, d=24, dv=40)
    batch = ragged([5, 17, 1, 130], [90, 17, 140, 3], shape, torch.float16)
    check_pages(batch, page_size, impl="triton", **keywords(feature, shape))


@interpreter
@pytest.mark.parametrize("feature", NO_MASK)
def test_pages_in_blocks_with_and_without_hidden_keys(feature: str) -> None:
    shape = Shape(b=3, h=2, hkv=1, d=24, dv=40)
    tile = Tile("exact", 16, 32, parts=(16, 16), parts_v=(32, 16), warps=4, stages=1, tma=False)
    with use_tile(tile=tile):
        check_pages(
            ragged([40, 1, 9], [150, 100, 0], shape, torch.float16), 16, impl="triton", **keywords(feature, shape)
        )


@interpreter
@pytest.mark.parametrize("poison", [INF, NAN])
@pytest.mark.parametrize("which", ["k", "v"])
def test_poison_in_a_page_reaches_those_who_see_it(poison: float, which: str) -> None:
    batch = ragged([30, 5], [60, 40], Shape(b=2, h=2, d=24))
    getattr(batch, which)[55] = poison  # of the first sequence: hidden from its first rows
    check_pages(batch, 8, impl="triton", causal=True)


@interpreter
def test_a_tile_of_tma_cannot_follow_pages() -> None:
    batch = ragged([5], [9], Shape(b=1, h=2, d=16))
    pages = paged(batch, 4)
    tile = Tile("exact", 16, 16, parts=(16,), parts_v=(16,), warps=4, stages=1, tma=True)
    with use_tile(tile=tile), pytest.raises(fk.UnsupportedError, match="TMA cannot follow a block table"):
        fk.attention_varlen(batch.q, pages.k, pages.v, *batch.args[3:], block_table=pages.table, impl="triton")
