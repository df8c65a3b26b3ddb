"""`fk.attention_paged`: chunks of prompts and single tokens in one batch, over pages of any format."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashkernels as fk
from flashkernels.kvcache import PagedCache

from . import oracle
from .cases import cache_of, each_impl, interpreted

LENGTHS, COUNTS = [0, 1, 40, 20], [0, 1, 9, 1]
FEATURES: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": (12, -1)},
    "invariant": {"batch_invariant": True},
    "others": {
        "softcap": 2.0,
        "sinks": torch.linspace(-1, 1, 4),
        "alibi_slopes": torch.linspace(0.1, 0.2, 16).view(4, 4),
    },
}


@each_impl
@pytest.mark.parametrize(
    ("form", "feature"), [*(("fp16", name) for name in FEATURES), ("int8", "causal"), ("int4", "others")]
)
def test_against_the_oracle(form: str, feature: str, impl: str) -> None:
    features = dict(FEATURES[feature])
    cache = cache_of(LENGTHS, form, kv_heads=2)
    ends = torch.tensor([0, *COUNTS]).cumsum(0).int()
    q = torch.randn(sum(COUNTS), 4, 32, generator=torch.Generator().manual_seed(0)).half()
    out, lse = fk.attention_paged(q, cache, ends, 12, return_lse=True, impl=impl, **features)
    features.pop("batch_invariant", None)
    slopes = features.pop("alibi_slopes", None)
    for b in range(4):
        rows = slice(int(ends[b]), int(ends[b + 1]))
        own = None if slopes is None else slopes[b]
        oracle.assert_right(out[rows], lse[:, rows], q[rows], *oracle.keys(cache, b), slopes=own, **features)


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no-tensor": ({"cu_seqlens_q": [0, 2, 5]}, TypeError, "cu_seqlens_q must be a torch.Tensor, got list"),
    "int64": ({"cu_seqlens_q": torch.tensor([0, 2, 5])}, TypeError, "cu_seqlens_q.dtype=torch.int64"),
    "count": (
        {"cu_seqlens_q": torch.tensor([0, 5]).int()},
        ValueError,
        r"cu_seqlens_q has shape \(2,\); expected \(3,\)",
    ),
    "end": ({"cu_seqlens_q": torch.tensor([0, 2, 4]).int()}, ValueError, "go from 0 to 5"),
    "max": ({"max_seqlen_q": 2}, ValueError, "max_seqlen_q=2 is less than the longest sequence of queries, 3"),
    "short": (
        {"cu_seqlens_q": torch.tensor([0, 0, 5]).int(), "max_seqlen_q": 5},
        ValueError,
        r"lengths\[1\]=4 is less than its 5",
    ),
    "rank": ({"q": torch.zeros(1, 5, 4, 32).half()}, ValueError, "expected 3"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name: str) -> None:
    changes, error, words = BAD[name]
    good = {
        "q": torch.zeros(5, 4, 32).half(),
        "cache": cache_of([9, 4]),
        "cu_seqlens_q": torch.tensor([0, 2, 5]).int(),
        "max_seqlen_q": 3,
    }
    with pytest.raises(error, match=words):
        fk.attention_paged(**good | changes)


@interpreted
def test_batch_invariance() -> None:
    """A sequence of one token alone and beside a long prompt, bit for bit: the tile may not depend on the longest."""
    cache = cache_of([300, 90], "int8", kv_heads=1, dim=64)
    one = PagedCache(cache.k, cache.v, cache.block_table[:1], cache.lengths[:1], cache.k_scale, cache.v_scale)
    q = torch.randn(17, 4, 64, generator=torch.Generator().manual_seed(5)).half()
    features: dict[str, Any] = {"batch_invariant": True, "return_lse": True, "impl": "triton"}
    alone, alone_lse = fk.attention_paged(q[:1], one, torch.tensor([0, 1]).int(), 1, **features)
    out, lse = fk.attention_paged(q, cache, torch.tensor([0, 1, 17]).int(), 16, **features)
    assert torch.equal(alone[0], out[0]) and torch.equal(alone_lse[:, 0], lse[:, 0])
