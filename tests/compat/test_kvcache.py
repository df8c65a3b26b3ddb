"""`flash_attn_with_kvcache`: what it writes to the cache, and that it attends to what flash-attn documents."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

import flashkernels as fk
from flashkernels.compat.flash_attn import flash_attn_with_kvcache

SIGNATURE_OF_2_8 = [
    "q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin", "cache_seqlens", "cache_batch_idx",
    "cache_leftpad", "block_table", "softmax_scale", "causal", "window_size", "softcap", "rotary_interleaved",
    "alibi_slopes", "num_splits", "return_softmax_lse",
]  # fmt: skip
LENGTHS = torch.tensor([5, 0, 11], dtype=torch.int32)


def caches(batch: int = 3, seq: int = 20) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = torch.randn(2, batch, seq, 2, 16)
    return k, v


def test_signature() -> None:
    assert list(inspect.signature(flash_attn_with_kvcache).parameters) == SIGNATURE_OF_2_8


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("rows", [1, 3, 18])
def test_appends_and_attends(rows: int, causal: bool) -> None:
    k_cache, v_cache = caches(seq=32)
    before = k_cache.clone(), v_cache.clone()
    q, k, v = torch.randn(3, rows, 4, 16), torch.randn(3, rows, 2, 16), torch.randn(3, rows, 2, 16)
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=LENGTHS, causal=causal, return_softmax_lse=True
    )
    for b, length in enumerate(LENGTHS.tolist()):
        keys, values = (torch.cat((x[b, :length], new[b])) for x, new in zip(before, (k, v), strict=True))
        want, want_lse = fk.attention(
            q[b : b + 1], keys[None], values[None], causal=causal, return_lse=True, impl="torch"
        )
        torch.testing.assert_close(out[b : b + 1], want)
        torch.testing.assert_close(lse[b : b + 1], want_lse)
        assert torch.equal(k_cache[b, : length + rows], keys) and torch.equal(
            v_cache[b, length + rows :], before[1][b, length + rows :]
        )


def test_without_new_keys_the_whole_cache_is_seen() -> None:
    k_cache, v_cache = caches()
    q = torch.randn(3, 2, 4, 16)
    out = flash_attn_with_kvcache(q, k_cache, v_cache, window_size=(6, 0), softcap=2.0)
    torch.testing.assert_close(out, fk.attention(q, k_cache, v_cache, window=(6, 0), softcap=2.0, impl="torch"))


def test_rows_of_the_cache_by_index() -> None:
    k_cache, v_cache = caches(5)
    q, index = torch.randn(3, 1, 4, 16), torch.tensor([4, 0, 2])
    out = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=7, cache_batch_idx=index)
    torch.testing.assert_close(out, fk.attention(q, k_cache[index, :7], v_cache[index, :7], impl="torch"))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
def test_rotary(interleaved: bool, causal: bool) -> None:
    """Keys are turned at their places; queries too where a mask orders them, else all at the first new place."""
    k_cache, v_cache = caches()
    cos, sin = fk.rope_tables(32, 8)
    q, k, v = torch.randn(3, 2, 4, 16), torch.randn(3, 2, 2, 16), torch.randn(3, 2, 2, 16)
    out = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cos, sin, LENGTHS, causal=causal, rotary_interleaved=interleaved
    )  # fmt: skip
    place = LENGTHS[:, None] + torch.arange(2)
    _, turned = fk.rope(q, k, cos, sin, position_ids=place, interleaved=interleaved)
    q, _ = fk.rope(
        q, k, cos, sin, position_ids=place if causal else LENGTHS[:, None].expand(3, 2), interleaved=interleaved
    )
    for b, length in enumerate(LENGTHS.tolist()):
        torch.testing.assert_close(k_cache[b, length : length + 2], turned[b])
        keys, values = k_cache[b : b + 1, : length + 2], v_cache[b : b + 1, : length + 2]
        torch.testing.assert_close(
            out[b : b + 1], fk.attention(q[b : b + 1], keys, values, causal=causal, impl="torch")
        )


def test_pages() -> None:
    pages = torch.randn(6, 4, 2, 16)
    table = torch.tensor([[5, 1, 9, 9], [0, 3, 2, 9]], dtype=torch.int32)[:, :3]
    out = flash_attn_with_kvcache(
        torch.ones(2, 1, 4, 16), pages, pages, cache_seqlens=torch.tensor([8, 10]).int(), block_table=table
    )
    keys = pages[table[1].long()].flatten(0, 1)[:10]
    torch.testing.assert_close(out[1:], fk.attention(torch.ones(1, 1, 4, 16), keys[None], keys[None], impl="torch"))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("rows", [1, 3, 18])
def test_left_padding(rows: int, causal: bool) -> None:
    """A sequence begins at its padding. New keys are written, and turned, at their places in the row of the cache."""
    k_cache, v_cache = caches(5, 32)
    before = k_cache.clone()
    index, pad = torch.tensor([4, 0, 2]), torch.tensor([2, 0, 11], dtype=torch.int32)
    cos, sin = fk.rope_tables(32, 16)
    q, k, v = torch.randn(3, rows, 4, 16), torch.randn(3, rows, 2, 16), torch.randn(3, rows, 2, 16)
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cos, sin, LENGTHS, index, pad, causal=causal, window_size=(9, -1),
        return_softmax_lse=True,
    )  # fmt: skip
    place = LENGTHS[:, None] + torch.arange(rows)
    turned_q, turned = fk.rope(q, k, cos, sin, position_ids=place, interleaved=True)
    for b, (row, length, first) in enumerate(zip(index.tolist(), LENGTHS.tolist(), pad.tolist(), strict=True)):
        end = length + rows
        torch.testing.assert_close(k_cache[row, length:end], turned[b])
        assert torch.equal(v_cache[row, length:end], v[b])
        assert torch.equal(k_cache[row, :length], before[row, :length])
        assert torch.equal(k_cache[row, end:], before[row, end:])
        keys, values = k_cache[row, first:end][None], v_cache[row, first:end][None]
        want, want_lse = fk.attention(
            turned_q[b : b + 1], keys, values, causal=causal, window=(9, -1), return_lse=True, impl="torch"
        )
        torch.testing.assert_close(out[b : b + 1], want)
        torch.testing.assert_close(lse[b : b + 1], want_lse)
    assert torch.equal(k_cache[[1, 3]], before[[1, 3]])


@pytest.mark.gpu
@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
@pytest.mark.parametrize("rows", [1, 3, 18])
def test_a_gpu_does_what_the_cpu_does(rows: int, padded: bool) -> None:
    """In fp32: the order of sums is all that differs."""
    k_cache, v_cache = caches(5, 32)
    pad = torch.tensor([2, 0, 11], dtype=torch.int32) if padded else None
    q, k, v = torch.randn(3, rows, 4, 16), torch.randn(3, rows, 2, 16), torch.randn(3, rows, 2, 16)
    given = (k, v, *fk.rope_tables(32, 16), LENGTHS, torch.tensor([4, 0, 2]), pad)
    there = [x.cuda() for x in (q, k_cache, v_cache)]
    found = flash_attn_with_kvcache(
        *there, *(x if x is None else x.cuda() for x in given), causal=True, return_softmax_lse=True
    )
    want = flash_attn_with_kvcache(q, k_cache, v_cache, *given, causal=True, return_softmax_lse=True)
    for x, y in zip((*found, *there[1:]), (*want, k_cache, v_cache), strict=True):
        torch.testing.assert_close(x.cpu(), y, atol=2e-5, rtol=2e-5)


def test_left_padding_wants_rows_in_one_line() -> None:
    _, v_cache = caches()
    wide = torch.zeros(3, 21, 2, 16)[:, :20]
    with pytest.raises(fk.UnsupportedError, match="cache_leftpad: k_cache has strides"):
        flash_attn_with_kvcache(torch.ones(3, 1, 4, 16), wide, v_cache, cache_seqlens=LENGTHS, cache_leftpad=LENGTHS)


@pytest.mark.parametrize("rows", [4, 20])
def test_more_queries_than_keys(rows: int) -> None:
    """Causal is aligned bottom-right: the first queries see nothing."""
    k_cache, v_cache = caches()
    q = torch.randn(3, rows, 4, 16)
    out = flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=2, causal=True)
    torch.testing.assert_close(out, fk.attention(q, k_cache[:, :2], v_cache[:, :2], causal=True, impl="torch"))


def test_an_open_window_may_be_a_list() -> None:
    """It hides nothing, so queries are turned all at the first new place, as with a tuple."""
    cos, sin = fk.rope_tables(32, 16)
    q, k, v = torch.randn(3, 2, 4, 16), torch.randn(3, 2, 2, 16), torch.randn(3, 2, 2, 16)
    results = []
    for window in ((-1, -1), [-1, -1]):
        caches = torch.zeros(2, 3, 20, 2, 16)
        results.append(flash_attn_with_kvcache(q, *caches, k, v, cos, sin, 5, window_size=window))
    assert torch.equal(*results)


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "q-no-tensor": ({"q": None}, TypeError, "q must be a torch.Tensor, got NoneType"),
    "q-rank": ({"q": torch.ones(3, 4, 16)}, ValueError, r"q has shape \(3, 4, 16\)"),
    "cache-no-tensor": ({"k_cache": None}, TypeError, "k_cache must be a torch.Tensor, got NoneType"),
    "v-alone": ({"v": torch.ones(3, 1, 2, 16)}, ValueError, "k and v belong together"),
    "cos-alone": ({"rotary_cos": torch.ones(20, 8)}, ValueError, "rotary_cos and rotary_sin belong together"),
    "rotary-without-keys": (
        {"rotary_cos": torch.ones(20, 8), "rotary_sin": torch.ones(20, 8)},
        ValueError,
        "k and v are missing",
    ),
    "lengths-float": (
        {"cache_seqlens": torch.ones(3)},
        TypeError,
        "cache_seqlens.dtype=torch.float32; it must be torch.int32",
    ),
    "lengths-a-float": ({"cache_seqlens": 3.0}, TypeError, "cache_seqlens=3.0 must be an int"),
    "lengths-a-list": ({"cache_seqlens": [3, 4, 5]}, TypeError, r"cache_seqlens=\[3, 4, 5\] must be an int"),
    "lengths-of-others": ({"cache_seqlens": LENGTHS[:2]}, ValueError, r"cache_seqlens has shape \(2,\); expected"),
    "length-negative": ({"cache_seqlens": -1}, ValueError, "cache_seqlens=-1 must not be negative"),
    "length-over-capacity": ({"cache_seqlens": 21}, ValueError, "cache_seqlens=21 and 0 new keys are over"),
    "lengths-over-capacity": ({"cache_seqlens": LENGTHS + 10}, ValueError, r"=\[15, 10, 21\] is not in 0 to 20"),
    "index-a-list": ({"cache_batch_idx": [0, 1, 2]}, TypeError, "cache_batch_idx must be a torch.Tensor, got list"),
    "index-float": ({"cache_batch_idx": torch.ones(3)}, TypeError, "cache_batch_idx.dtype=torch.float32"),
    "index-of-others": ({"cache_batch_idx": torch.ones(2).int()}, ValueError, r"cache_batch_idx has shape \(2,\)"),
    "index-over-the-cache": ({"cache_batch_idx": torch.tensor([0, 1, 3])}, ValueError, r"cache_batch_idx=\[0, 1, 3\]"),
    "table-a-list": ({"block_table": [[0], [1], [2]]}, TypeError, "block_table must be a torch.Tensor, got list"),
    "table-rank": ({"block_table": torch.ones(3).int()}, ValueError, r"block_table has shape \(3,\)"),
    "table-and-index": (
        {"block_table": torch.ones(3, 1).int(), "cache_batch_idx": LENGTHS},
        ValueError,
        "cache_batch_idx is for a cache without block_table",
    ),
    "table-and-padding": (
        {"block_table": torch.ones(3, 1).int(), "cache_leftpad": LENGTHS},
        ValueError,
        "cache_leftpad is for a cache without block_table",
    ),
    "padding-over-the-length": ({"cache_leftpad": LENGTHS + 1}, ValueError, r"cache_leftpad=\[6, 1, 12\] is not in 0"),
    "padding-negative": ({"cache_leftpad": LENGTHS - 1}, ValueError, r"cache_leftpad=\[4, -1, 10\] is not in 0 to"),
    "gradients": ({"q": torch.ones(3, 1, 4, 16).requires_grad_()}, fk.UnsupportedError, "no gradients"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name: str) -> None:
    changes, error, words = BAD[name]
    k_cache, v_cache = caches()
    good = {"q": torch.ones(3, 1, 4, 16), "k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": LENGTHS}
    with pytest.raises(error, match=words):
        flash_attn_with_kvcache(**good | changes)


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "slopes": ({"alibi_slopes": torch.ones(3)}, ValueError, "alibi_slopes has shape"),
    "q-dim": ({"q": torch.randn(2, 1, 4, 16)}, ValueError, "q has head_dim=16, the cache has 8"),
    "q-batch": ({"q": torch.randn(3, 1, 4, 8)}, ValueError, "q has batch=3, the cache has 2 rows"),
    "q-gradient": ({"q": torch.ones(2, 1, 4, 8, requires_grad=True)}, fk.UnsupportedError, "q: there are no gradients"),
    "window": ({"window_size": None}, TypeError, "window=None must be a pair"),
    "softcap": ({"softcap": "x"}, TypeError, "softcap='x' must be a float"),
    "causal": ({"causal": 1}, TypeError, "causal=1 must be a bool"),
    "lse": ({"return_softmax_lse": 1}, TypeError, "return_softmax_lse=1 must be a bool"),
    "rotary": (
        {"q": torch.randn(2, 3, 4, 8), "rotary_cos": torch.ones(5, 4), "rotary_sin": torch.ones(5, 4)},
        ValueError,
        "rotary_cos has 5 rows; there are tokens up to place 5",
    ),
    "seqlens-of-64-bits": ({"cache_seqlens": torch.tensor([3, (1 << 32) + 3])}, ValueError, r"cache_seqlens=\[3, 42"),
    "index-of-64-bits": ({"cache_batch_idx": torch.tensor([0, (1 << 32) + 1])}, ValueError, r"cache_batch_idx=\[0, 42"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_before_the_cache_is_written(name: str) -> None:
    changes, error, words = WRONG[name]
    k_cache, v_cache, new = torch.zeros(2, 16, 2, 8), torch.zeros(2, 16, 2, 8), torch.ones(2, 1, 2, 8)
    usual = {"q": torch.randn(2, 1, 4, 8), "k": new, "v": new, "cache_seqlens": 3, "causal": True}
    with pytest.raises(error, match=words):
        flash_attn_with_kvcache(k_cache=k_cache, v_cache=v_cache, **usual | changes)
    assert not k_cache.any() and not v_cache.any()
