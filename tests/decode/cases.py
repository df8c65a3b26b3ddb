"""Caches for the tests: random keys behind a shuffled block table, and NaN wherever nothing is stored."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import flashkernels as fk
from flashkernels.kvcache import PagedCache, append

from . import oracle

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1 before triton is imported")
each_impl = pytest.mark.parametrize("impl", ["torch", pytest.param("triton", marks=interpreted)])
QUANTISED = ("fp8", "fp8_e5m2", "int8", "int4")


def cache_of(
    lengths: Sequence[int], form: str = "fp16", *, kv_heads: int = 2, dim: int = 32, dim_v: int = 0, page: int = 16,
    scales: str = "token", latent: bool = False, spare: int = 1, device: str = "cpu", seed: int = 0,
) -> PagedCache:  # fmt: skip
    there = torch.empty(0, device=device).device  # "cuda" may mean the CPU: tests/machine/plugin.py
    gen = torch.Generator(device=there).manual_seed(seed)
    batch = len(lengths)
    pages = max(1, *(-(-n // page) for n in lengths)) + spare
    table = torch.randperm(batch * pages, generator=gen, device=device).int().view(batch, pages)
    cache = PagedCache.allocate(
        batch * pages, page, kv_heads, dim, dim_v, block_table=table, format=form, scales=scales, latent=latent,
        lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
    )  # fmt: skip
    total = sum(lengths)
    k, v = (torch.randn(total, kv_heads, n, generator=gen, device=device) for n in (dim, dim_v or dim))
    if scales == "head" and cache.k_scale is not None and cache.v_scale is not None:
        most = cache.format.most
        cache.k_scale.copy_(torch.linspace(4, 5, kv_heads, device=device) / most)
        cache.v_scale.copy_(torch.linspace(5, 4, kv_heads, device=device) / most)
    ends = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    append(cache, k, None if latent else v, cu_seqlens=ends, impl="torch")
    poison(cache)
    return cache


def poison(cache: PagedCache) -> None:
    """NaN in every row that no sequence uses: in the pages, or in the scales where integers cannot be NaN."""
    free = torch.ones(cache.k.shape[:2], dtype=torch.bool)
    table = cache.block_table.tolist()
    for b, length in enumerate(cache.lengths.tolist()):
        for j in range(length):
            free[table[b][j // cache.page_size], j % cache.page_size] = False
    free = free.to(cache.k.device)
    for pages, scale in ((cache.k, cache.k_scale), (cache.v, cache.v_scale)):
        if pages.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            pages.view(torch.uint8)[free] = 0x7F
        elif pages.dtype.is_floating_point:
            pages[free] = torch.nan
        if scale is not None and scale.dim() > 1:
            scale[free] = torch.nan


def queries(
    cache: PagedCache, tokens: int = 1, heads: int = 4, dtype: torch.dtype | None = None, seed: int = 1
) -> Tensor:
    gen = torch.Generator(device=cache.k.device).manual_seed(seed)
    q = 2 * torch.randn(cache.batch, tokens, heads, cache.head_dim, generator=gen, device=cache.k.device)
    return q.to(dtype or (cache.k.dtype if not cache.format.quantised else torch.float16))


def check(q: Tensor, cache: PagedCache, impl: str, **features: Any) -> tuple[Tensor, Tensor]:
    """Runs `fk.decode` and compares each sequence with the oracle."""
    out, lse = fk.decode(q, cache, impl=impl, return_lse=True, **features)
    assert out.dtype == q.dtype and out.shape == (*q.shape[:3], cache.head_dim_v)
    compare(out, lse, q, cache, **features)
    return out, lse


def compare(out: Tensor, lse: Tensor, q: Tensor, cache: PagedCache, **features: Any) -> None:
    """The oracle works on the CPU, whatever ran where."""
    cache = PagedCache(*(None if x is None else x.cpu() for x in cache.tensors))
    out, lse, q = out.cpu(), lse.cpu(), q.cpu()
    features = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in features.items()}
    named = {name: features.pop(name, None) for name in ("tree_mask", "alibi_slopes")}
    features.pop("batch_invariant", None)
    # quantised keys are multiplied in fp16, their scales rounded with them
    rounded = torch.float16 if cache.format.quantised and q.dtype == torch.bfloat16 else None
    for b in range(cache.batch):
        tree, slopes = (
            (x[b] if x is not None and x.dim() == rank else x) for x, rank in zip(named.values(), (3, 2), strict=True)
        )
        oracle.assert_right(out[b], lse[b], q[b], *oracle.keys(cache, b), rounded, tree=tree, slopes=slopes, **features)
