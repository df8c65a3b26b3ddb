"""Decode on a real GPU: bf16, every format at real sizes, graphs replayed with other lengths, NaN in unused pages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashkernels as fk
from flashkernels.decode.triton import tiles
from flashkernels.kvcache import Host, PagedCache, append, copy_pages, gather
from flashkernels.tiling import use_tile

from .cases import QUANTISED, cache_of, compare, queries
from .test_decode import FEATURES, alone_in

pytestmark = pytest.mark.gpu
FORMATS = ("bf16", "fp16", "fp32", *QUANTISED)
LENGTHS = [0, 1, 700, 64, 0, 333, 16, 17, 2049]


def on_gpu(features: dict[str, Any]) -> dict[str, Any]:
    return {name: value.cuda() if isinstance(value, Tensor) else value for name, value in features.items()}


def check(q: Tensor, cache: PagedCache, **features: Any) -> tuple[Tensor, Tensor]:
    out, lse = fk.decode(q, cache, impl="triton", return_lse=True, **features)
    compare(out, lse, q, cache, **features)
    return out, lse


def dtype_of(form: str) -> torch.dtype:
    return {"fp16": torch.float16, "fp32": torch.float32}.get(form, torch.bfloat16)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("scales", ["token", "head"])
def test_format(form: str, scales: str) -> None:
    cache = cache_of(LENGTHS, form, kv_heads=2, dim=128, scales=scales, device="cuda")
    check(queries(cache, 1, 8, dtype_of(form)), cache)
    check(queries(cache, 3, 8, dtype_of(form)), cache, sinks=torch.ones(8, device="cuda"))


@pytest.mark.parametrize("form", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("feature", FEATURES)
def test_feature(feature: str, form: str) -> None:
    cache = cache_of([0, 1, 1300, 75, 0, 64], form, dim=64, device="cuda")
    check(queries(cache, 3, 4, dtype_of(form)), cache, **on_gpu(FEATURES[feature]))


@pytest.mark.parametrize("form", ["bf16", "fp8", "int8", "int4"])
@pytest.mark.parametrize("dim", [16, 18, 40, 64, 72, 80, 96, 112, 160, 192, 256, 576])
def test_head_dimension(dim: int, form: str) -> None:
    cache = cache_of([300, 37, 1], form, dim=dim, dim_v=min(dim, 512), device="cuda")
    check(queries(cache, 1, 8, torch.bfloat16), cache)


@pytest.mark.parametrize("heads", [(1, 1), (8, 1), (12, 2), (40, 2), (128, 1)], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 7, 16])
def test_rows(heads: tuple[int, int], tokens: int) -> None:
    cache = cache_of([300, 33, 3], "bf16", kv_heads=heads[1], dim=64, device="cuda")
    check(queries(cache, tokens, heads[0]), cache)


@pytest.mark.parametrize("form", ["bf16", "int8"])
@pytest.mark.parametrize("page", [1, 7, 16, 64, 100, 128, 4096])
def test_page_size(page: int, form: str) -> None:
    cache = cache_of([0, page - 1, page, page + 1, 500], form, page=page, dim=64, device="cuda")
    check(queries(cache, 2, dtype=torch.bfloat16), cache)


@pytest.mark.parametrize("form", ["bf16", "fp8", "int8"])
def test_latent(form: str) -> None:
    cache = cache_of([500, 1, 77], form, kv_heads=1, dim=576, dim_v=512, latent=True, device="cuda")
    check(queries(cache, 1, 128, torch.bfloat16), cache)


def test_contiguous_cache() -> None:
    k, v = torch.randn(2, 3, 900, 2, 128, device="cuda", dtype=torch.bfloat16)
    cache = PagedCache.contiguous(k, v, torch.tensor([900, 5, 0], dtype=torch.int32, device="cuda"))
    check(queries(cache, 2, 8), cache)


@pytest.mark.parametrize("form", ["bf16", "int8", "int4", "fp8"])
@pytest.mark.parametrize("batch_invariant", [False, True], ids=["balanced", "invariant"])
def test_ragged_lengths_at_full_size(form: str, batch_invariant: bool) -> None:
    """One of 20000 beside short ones; the oracle would take minutes, so the reference stands in."""
    lengths = [20_000, *range(1, 600, 40)]
    cache = cache_of(lengths, form, kv_heads=4, dim=128, device="cuda")
    q = queries(cache, 1, 16, torch.bfloat16)
    out, lse = fk.decode(q, cache, impl="triton", return_lse=True, batch_invariant=batch_invariant)
    want, want_lse = fk.decode(q, cache, impl="torch", return_lse=True)
    assert ((out - want).float().norm() / want.float().norm()).item() < 8e-3
    torch.testing.assert_close(lse, want_lse, atol=4e-3, rtol=1e-3)


@pytest.mark.parametrize("form", ["bf16", "int8"])
def test_batch_invariance(form: str) -> None:
    cache = cache_of([90, 9000, 0, 17, 4096], form, dim=128, device="cuda")
    q = queries(cache, 2, 8, torch.bfloat16)
    together, lse = check(q, cache, batch_invariant=True)
    for b in range(5):
        out, one = fk.decode(q[b : b + 1], alone_in(cache, b), return_lse=True, batch_invariant=True)
        assert torch.equal(out[0], together[b]) and torch.equal(one[0], lse[b])


@pytest.mark.parametrize("form", ["bf16", "int4"])
def test_a_graph_follows_the_lengths(form: str) -> None:
    """Captured once at some lengths, replayed at others, among them 0 and the whole capacity."""
    cache = cache_of([600] * 5, form, dim=64, device="cuda", spare=4)
    append_all = torch.randn(5, cache.capacity, 2, 64, device="cuda", dtype=torch.bfloat16)
    cache.lengths.fill_(cache.capacity)
    append(cache, append_all, append_all)
    cache.lengths.copy_(torch.tensor([5, 600, 0, 17, 64]))
    q = queries(cache, 2, 8, torch.bfloat16)
    fk.decode(q, cache, return_lse=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = fk.decode(q, cache, return_lse=True)
    for lengths in ([5, 600, 0, 17, 64], [0, 0, 0, 0, 0], [cache.capacity, 1, 2, 3, 4], [1] * 5):
        cache.lengths.copy_(torch.tensor(lengths))
        graph.replay()
        torch.cuda.synchronize()
        compare(out, lse, q, cache)


def test_deterministic() -> None:
    cache = cache_of([3000, 20, 700], "fp8", dim=128, device="cuda")
    q = queries(cache, 1, 8, torch.bfloat16)
    first = fk.decode(q, cache)
    assert all(torch.equal(first, fk.decode(q, cache)) for _ in range(5))


@pytest.mark.parametrize("tile", [(16, 32, 2, 4, 4), (16, 128, 4, 2, 1), (32, 64, 8, 3, 2), (64, 64, 4, 2, 1)], ids=str)
@pytest.mark.parametrize("form", ["bf16", "int8", "int4"])
def test_tiles(tile: tuple[int, ...], form: str) -> None:
    cache = cache_of(LENGTHS, form, dim=128, device="cuda")
    with use_tile(tile=tiles.DecodeTile(*tile)):
        check(queries(cache, 1, 8, torch.bfloat16), cache)


def test_nan_in_a_key_that_is_not_seen() -> None:
    cache = cache_of([400, 33], "bf16", dim=64, device="cuda")
    page, slot = int(cache.block_table[0, 399 // 16]), 399 % 16
    cache.k[page, slot, 0], cache.v[page, slot, 0] = torch.nan, torch.nan
    out = fk.decode(queries(cache, 3), cache)
    assert out[0, 2, :2].isnan().all() and out[0, :2].isfinite().all() and out[0, 2, 2:].isfinite().all()


def test_large_queries_over_a_quantised_cache() -> None:
    """bf16 numbers that fp16 does not hold."""
    cache = cache_of([100, 3], "int8", dim=64, device="cuda")
    q = queries(cache, 1, 4, torch.bfloat16)
    check(q * 1e6, cache, softmax_scale=1e-7)
    check(q * 1e-9, cache, softmax_scale=1e8)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("feature", ["plain", "window", "sinks", "invariant"])
def test_paged_prefill(feature: str, form: str) -> None:
    lengths, counts = [0, 1, 700, 64, 300], [0, 1, 200, 1, 300]
    cache = cache_of(lengths, form, dim=64, device="cuda")
    ends = torch.tensor([0, *counts], device="cuda").cumsum(0).int()
    q = torch.randn(sum(counts), 4, 64, device="cuda", dtype=dtype_of(form))
    features = on_gpu(FEATURES[feature])
    out, lse = fk.attention_paged(q, cache, ends, 300, return_lse=True, impl="triton", **features)
    want, want_lse = fk.attention_paged(q, cache, ends, 300, return_lse=True, impl="torch", **features)
    limit = 1e-5 if form == "fp32" else 8e-3
    assert ((out - want).float().norm() / want.float().norm()).item() < limit
    torch.testing.assert_close(lse, want_lse, atol=4e-3, rtol=1e-3)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
def test_append(form: str, interleaved: bool) -> None:
    """Bit for bit what the reference writes, up to the rounding of the rotation."""
    cos, sin = fk.rope_tables(400, 96, device="cuda")
    found = []
    for impl in ("torch", "triton"):
        cache = cache_of([300, 7, 50], form, dim=128, dim_v=72, device="cuda")
        cache.advance(4)
        k, v = (
            torch.randn(3, 4, 2, n, device="cuda", generator=torch.Generator("cuda").manual_seed(n)) for n in (128, 72)
        )
        k, v = k.to(dtype_of(form)), v.to(dtype_of(form))
        append(cache, k, v, cos=cos, sin=sin, interleaved=interleaved, impl=impl)
        found.append(gather(cache))
    for a, b in zip(*found, strict=True):
        step = {"int8": 2 / 127, "int4": 2 / 7, "fp8": 1 / 8, "fp8_e5m2": 1 / 4, "fp32": 1e-6}.get(form, 2**-7)
        assert (a - b).abs().max() <= step * a.abs().max()
        assert (a != b).float().mean() < 0.02
    assert torch.equal(found[0][1], found[1][1])  # values are not turned


def test_swap_and_copy() -> None:
    cache = cache_of([100, 30], "int8", dim=64, device="cuda")
    before = cache.k.clone(), cache.v_scale.clone()
    host = Host(cache, 3)
    host.swap_out(cache, pages=[1, 4, 2], slots=[2, 0, 1])
    host.wait()
    for x in (cache.k, cache.v):
        x.zero_()
    host.swap_in(cache, slots=[2, 0, 1], pages=[1, 4, 2])
    host.wait()
    assert torch.equal(cache.k[[1, 4, 2]], before[0][[1, 4, 2]])
    copy_pages(cache, torch.tensor([1], device="cuda"), torch.tensor([3], device="cuda"))
    assert torch.equal(cache.k[3], before[0][1])


def test_check_names_sequence_and_slot() -> None:
    cache = cache_of([100, 30], "bf16", device="cuda")
    cache.block_table[1, 1] = 999
    with pytest.raises(ValueError, match=r"block_table\[1, 1\]=999 of sequence 1, slot 1"):
        fk.decode(queries(cache), cache, check=True)


def test_cascade() -> None:
    prefix = cache_of([900], "bf16", dim=64, device="cuda")
    cache = cache_of([40, 1, 300], "bf16", dim=64, device="cuda", seed=3)
    q = queries(cache, 1, 8)
    sinks = torch.ones(8, device="cuda")
    out = fk.cascade_decode(q, prefix, cache, sinks=sinks)
    want = fk.cascade_decode(q, prefix, cache, sinks=sinks, impl="torch")
    assert ((out - want).float().norm() / want.float().norm()).item() < 8e-3
