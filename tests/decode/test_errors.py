"""What `fk.decode` says to arguments that make no sense."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import flashkernels as fk
from flashkernels.compat.flash_attn import flash_attn_with_kvcache
from flashkernels.kvcache import PagedCache

from .cases import cache_of, each_impl, queries

BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "q-no-tensor": ({"q": [1]}, TypeError, "q must be a torch.Tensor, got list"),
    "q-dtype": ({"q": torch.zeros(2, 2, 4, 32).double()}, TypeError, "q.dtype=torch.float64 is not supported"),
    "q-other-dtype": (
        {"q": torch.zeros(2, 2, 4, 32)},
        TypeError,
        "q.dtype=torch.float32 differs from that of the cache, torch.float16",
    ),
    "q-rank": ({"q": torch.zeros(2, 4, 32).half()}, ValueError, "q has 3 dimensions"),
    "q-batch": ({"q": torch.zeros(3, 2, 4, 32).half()}, ValueError, "q has batch=3, the cache has 2"),
    "q-tokens": (
        {"q": torch.zeros(2, 17, 4, 32).half()},
        ValueError,
        "q has 17 tokens of each sequence; decode takes 1 to 16",
    ),
    "q-dim": ({"q": torch.zeros(2, 2, 4, 16).half()}, ValueError, "q has head_dim=16, the cache has 32"),
    "q-heads": ({"q": torch.zeros(2, 2, 3, 32).half()}, ValueError, "heads=3 of q is not a multiple of kv_heads=2"),
    "cache": ({"cache": torch.zeros(1)}, TypeError, "cache must be a kvcache.PagedCache, got Tensor"),
    "tree-dtype": ({"tree_mask": torch.ones(2, 2)}, TypeError, "tree_mask.dtype=torch.float32; it must be torch.bool"),
    "tree-shape": (
        {"tree_mask": torch.ones(2, 3).bool()},
        ValueError,
        r"tree_mask has shape \(2, 3\); expected \(2, 2\) or",
    ),
    "sinks": ({"sinks": torch.ones(3)}, ValueError, r"sinks has shape \(3,\); expected \(4,\)"),
    "slopes": ({"alibi_slopes": torch.ones(4).int()}, TypeError, "alibi_slopes.dtype=torch.int32"),
    "window": ({"window": (3,)}, ValueError, "window"),
    "window-of-many-bits": ({"window": (1 << 70, 0)}, ValueError, "has a side of more than 64 bits"),
    "softcap": ({"softcap": -1.0}, ValueError, "softcap=-1.0 must not be negative"),
    "causal": ({"causal": 1}, TypeError, "causal=1 must be a bool"),
    "batch-invariant": ({"batch_invariant": 1}, TypeError, "batch_invariant=1 must be a bool"),
    "impl": ({"impl": "cuda"}, ValueError, "impl='cuda' is not one of 'auto', 'hopper', 'triton', 'torch'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name: str) -> None:
    changes, error, words = BAD[name]
    cache = cache_of([9, 4])
    with pytest.raises(error, match=words):
        fk.decode(**{"q": queries(cache, 2), "cache": cache} | changes)


def test_lengths_and_table_are_checked_on_the_cpu() -> None:
    cache = cache_of([9, 4])
    cache.lengths[1] = 33
    with pytest.raises(ValueError, match=r"lengths\[1\]=33 is not in 0 to 32"):
        fk.decode(queries(cache), cache)
    cache.lengths[1] = 20
    cache.block_table[1, 1] = -7
    with pytest.raises(ValueError, match=r"block_table\[1, 1\]=-7 of sequence 1, slot 1"):
        fk.decode(queries(cache), cache)


@each_impl
def test_a_page_that_is_not_there_is_named_by_all_that_read_it(impl: str) -> None:
    cache = cache_of([9, 4, 20])
    pages = cache.k.shape[0]
    cache.block_table[2, 1] = pages
    words = rf"block_table\[2, 1\]={pages} of sequence 2, slot 1, is not in 0 to {pages - 1}"
    q = queries(cache)
    with pytest.raises(ValueError, match=words):
        fk.decode(q, cache, check=True, impl=impl)
    with pytest.raises(ValueError, match=words):
        fk.attention_paged(q[:, 0], cache, torch.arange(4).int(), 1, check=True, impl=impl)
    with pytest.raises(ValueError, match=words):
        fk.cascade_decode(q, cache_of([5]), cache, check=True, impl=impl)
    with pytest.raises(ValueError, match=words):
        flash_attn_with_kvcache(q, cache.k, cache.v, cache_seqlens=cache.lengths, block_table=cache.block_table)
    cache.lengths[2] = 16  # then nobody needs the slot
    fk.decode(q, cache, check=True, impl=impl)


def test_no_gradients() -> None:
    cache = cache_of([9, 4])
    with pytest.raises(fk.UnsupportedError, match="no gradients"):
        fk.decode(queries(cache).requires_grad_(), cache)


@pytest.mark.parametrize("name", ["q", "cache.k", "cache.v", "cache.k_scale", "cache.v_scale", "alibi_slopes", "sinks"])
def test_whatever_asks_for_gradients_is_named(name: str) -> None:
    cache = cache_of([9, 4], "int8" if "scale" in name else "fp16")
    given = {"q": queries(cache), "alibi_slopes": torch.ones(4), "sinks": torch.ones(4)}
    asking = getattr(cache, name[6:]) if name.startswith("cache.") else given[name]
    asking.requires_grad_()
    with pytest.raises(fk.UnsupportedError, match=f"^{name}: there are no gradients"):
        fk.decode(cache=cache, **given)
    with torch.no_grad():
        fk.decode(cache=cache, **given)


@pytest.mark.parametrize("name", ["q", "v", "sinks"])
def test_tangents_are_refused(name: str) -> None:
    cache, sinks = cache_of([9, 4]), torch.ones(4)
    q = queries(cache)
    with forward_ad.dual_level():
        given = {"q": q, "v": cache.v, "sinks": sinks}
        given[name] = forward_ad.make_dual(given[name], torch.ones_like(given[name]))
        cache = PagedCache(cache.k, given["v"], cache.block_table, cache.lengths)
        with pytest.raises(NotImplementedError, match="has a tangent"):
            fk.decode(given["q"], cache, sinks=given["sinks"])


SETTINGS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "return-lse": ({"return_lse": 1}, TypeError, "return_lse=1 must be a bool"),
    "batch-invariant": ({"batch_invariant": 1}, TypeError, "batch_invariant=1 must be a bool"),
    "causal": ({"causal": [True]}, TypeError, r"causal=\[True\] must be a bool, got list"),
    "softmax-scale": ({"softmax_scale": [1.0]}, TypeError, r"softmax_scale=\[1.0\] must be a float"),
    "window": ({"window": ([1], 2)}, TypeError, r"window=\(\[1\], 2\) must hold two ints"),
    "impl": ({"impl": ["x"]}, ValueError, r"impl=\['x'\] is not one of"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_are_named_also_where_a_call_like_it_is_kept(name: str) -> None:
    changes, error, words = SETTINGS[name]
    cache = cache_of([9, 4])
    q = queries(cache)
    fk.decode(q, cache, return_lse=True)
    fk.decode(q, cache, batch_invariant=True)
    with pytest.raises(error, match=words):
        fk.decode(q, cache, **changes)
