"""`flash_attn_with_kvcache`: what it writes to the cache, and that it attends to what flash-attn documents."""

from __future__ import annotations

import inspect

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


def test_left_padding_is_declined() -> None:
    k_cache, v_cache = caches()
    with pytest.raises(fk.UnsupportedError, match="cache_leftpad"):
        flash_attn_with_kvcache(torch.ones(3, 1, 4, 16), k_cache, v_cache, cache_leftpad=LENGTHS)
