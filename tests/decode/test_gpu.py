"""Decode on a real GPU: bf16, every format at real sizes, graphs replayed with other lengths, NaN in unused pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
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


@pytest.mark.parametrize("heads", [(1, 1), (7, 1), (8, 1), (12, 2), (40, 2), (128, 1)], ids=str)
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


@pytest.mark.parametrize("form", ["bf16", "int8", "int4", "fp8"])
@pytest.mark.parametrize("page", [16, 128])
def test_a_hundred_thousand_keys_beside_one(page: int, form: str) -> None:
    cache = cache_of([1, 100_000, 0, 99_999, page], form, kv_heads=1, dim=64, page=page, device="cuda")
    q = queries(cache, 1, 7, torch.bfloat16)
    out, lse = fk.decode(q, cache, impl="triton", return_lse=True, sinks=torch.ones(7, device="cuda"))
    want, want_lse = fk.decode(q, cache, impl="torch", return_lse=True, sinks=torch.ones(7, device="cuda"))
    assert ((out - want).float().norm() / want.float().norm()).item() < 8e-3
    torch.testing.assert_close(lse, want_lse, atol=4e-3, rtol=1e-3)


@given(
    pages=st.lists(st.tuples(st.integers(0, 40), st.integers(-1, 1)), min_size=1, max_size=6),
    page=st.sampled_from([1, 5, 16, 64, 128]), form=st.sampled_from(["bf16", *QUANTISED]),
    heads=st.sampled_from([(1, 1), (8, 2), (7, 1), (9, 3), (64, 2)]), tokens=st.sampled_from([1, 1, 2, 5]),
    seed=st.integers(0, 9),
)  # fmt: skip
@settings(max_examples=25)
def test_any_batch(
    pages: list[tuple[int, int]], page: int, form: str, heads: tuple[int, int], tokens: int, seed: int
) -> None:  # fmt: skip
    """Lengths are whole pages, or one key more or less: among them 0 and 1. Everything unused is NaN."""
    lengths = [max(0, count * page + more) for count, more in pages]
    cache = cache_of(lengths, form, kv_heads=heads[1], dim=64, page=page, device="cuda", seed=seed)
    check(queries(cache, tokens, heads[0], torch.bfloat16, seed=seed), cache)


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


@pytest.mark.parametrize("form", ["bf16", "fp8", "int4"])
def test_a_graph_follows_tokens_lengths_and_pages(form: str) -> None:
    """Append and decode captured together: replayed with other tokens, lengths and another block table."""
    cache = cache_of([300] * 3, form, dim=64, device="cuda", spare=2)
    filled = torch.randn(3, cache.capacity, 2, 64, device="cuda", dtype=torch.bfloat16)
    cache.lengths.fill_(cache.capacity)
    append(cache, filled, -filled)
    k, v = torch.randn(2, 3, 1, 2, 64, device="cuda", dtype=torch.bfloat16)
    q = queries(cache, 1, 8, torch.bfloat16)
    append(cache, k, v)
    fk.decode(q, cache, return_lse=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        append(cache, k, v)
        out, lse = fk.decode(q, cache, return_lse=True)
    for lengths in ([300, 17, 1], [16, 299, 64], [2, 2, cache.capacity]):
        cache.lengths.copy_(torch.tensor(lengths))
        cache.block_table.copy_(cache.block_table[[1, 2, 0]].clone())
        for x in (k, v, q):
            x.normal_()
        graph.replay()
        torch.cuda.synchronize()
        newest = [(int(cache.block_table[b, (n - 1) // 16]), (n - 1) % 16) for b, n in enumerate(lengths)]
        if form == "bf16":
            assert all(torch.equal(cache.k[at], k[b, 0]) for b, at in enumerate(newest))
        want, want_lse = fk.decode(q, cache, impl="torch", return_lse=True)
        assert ((out - want).float().norm() / want.float().norm()).item() < 8e-3
        torch.testing.assert_close(lse, want_lse, atol=4e-3, rtol=1e-3)


def test_a_graph_follows_ragged_queries() -> None:
    """Paged prefill captured once: the same rows of q, cut into other sequences."""
    cache = cache_of([200, 200, 200], "bf16", dim=64, device="cuda")
    q = torch.randn(64, 4, 64, device="cuda", dtype=torch.bfloat16)
    ends = torch.tensor([0, 1, 33, 64], device="cuda").int()
    fk.attention_paged(q, cache, ends, 64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fk.attention_paged(q, cache, ends, 64)
    for cuts, lengths in (
        ([0, 1, 33, 64], [200, 200, 200]),
        ([0, 64, 64, 64], [64, 0, 9]),
        ([0, 0, 0, 64], [1, 2, 99]),
    ):
        ends.copy_(torch.tensor(cuts))
        cache.lengths.copy_(torch.tensor(lengths))
        graph.replay()
        want = fk.attention_paged(q, cache, ends, 64, impl="torch")
        assert ((out - want).float().norm() / want.float().norm()).item() < 8e-3


def test_hopper_and_triton_agree_over_a_large_cache() -> None:
    """Of two kernels for Hopper the one for large caches; on other GPUs it is Triton twice."""
    lengths = [4096, 0, 1, *range(16, 4096, 300)] * 2
    cache = cache_of(lengths, "bf16", kv_heads=8, dim=128, device="cuda")
    q = queries(cache, 1, 32, torch.bfloat16)
    out, lse = fk.decode(q, cache, return_lse=True)
    want, want_lse = fk.decode(q, cache, return_lse=True, impl="triton")
    assert ((out - want).float().norm() / want.float().norm()).item() < 8e-3
    torch.testing.assert_close(lse, want_lse, atol=4e-3, rtol=1e-3)


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
    """Bit for bit what the reference writes: both divide, and round the products of the rotation before adding."""
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
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", QUANTISED)
def test_append_chooses_the_same_scales_and_codes(form: str, dtype: torch.dtype) -> None:
    """Without rotation nothing is left to rounding: every bit is the reference's, on the CPU too."""
    found = []
    for impl, device in (("torch", "cpu"), ("torch", "cuda"), ("triton", "cuda")):
        cache = cache_of([70, 7, 50], form, dim=72, dim_v=128, device=device)
        cache.advance(6)
        gen = torch.Generator().manual_seed(0)
        k, v = (torch.randn(3, 6, 2, n, generator=gen) for n in (72, 128))
        k[..., 5], v[..., 9], v[..., 77] = 20 * k[..., 5], 20 * v[..., 9], 20 * v[..., 77]
        k[0, 0], v[1, 2, 0, 3], k[2, 1] = 0.0, torch.nan, 1e-6 * k[2, 1]
        append(cache, k.to(device, dtype), v.to(device, dtype), impl=impl)
        found.append(
            [x.cpu().view(torch.uint8) for x in (cache.k, cache.v)]
            + [x.cpu().nan_to_num(-1.0).view(torch.int16) for x in (cache.k_scale, cache.v_scale) if x is not None]
        )
        rows = [tuple(x.tolist()) for x in _newest(cache, 6)]
        found[-1] = [torch.stack([x[at] for at in rows]) for x in found[-1]]
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def _newest(cache: PagedCache, count: int) -> Tensor:
    """(page, slot) of the newest tokens of each sequence."""
    lengths, table = cache.lengths.cpu(), cache.block_table.cpu()
    place = lengths[:, None] - count + torch.arange(count)
    page = table[torch.arange(cache.batch)[:, None], place // cache.page_size]
    return torch.stack((page, place % cache.page_size), -1).flatten(0, 1)


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
    """In everything that reads or writes pages; the process goes on."""
    cache = cache_of([100, 30], "bf16", device="cuda")
    good = cache.block_table.clone()
    cache.block_table[1, 1] = 999
    q, ends = queries(cache), torch.arange(3, device="cuda").int()
    k, v = torch.zeros(2, 2, 1, 2, 32, device="cuda", dtype=torch.bfloat16)
    prefix = cache_of([5], "bf16", device="cuda")
    calls: list[Callable[[], Any]] = [
        lambda: fk.decode(q, cache, check=True),
        lambda: fk.attention_paged(q[:, 0], cache, ends, 1, check=True),
        lambda: fk.cascade_decode(q, prefix, cache, check=True),
        lambda: append(cache, k, v, check=True),
        lambda: gather(cache, check=True),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"block_table\[1, 1\]=999 of sequence 1, slot 1"):
            call()
    cache.block_table.copy_(good)
    for call in calls:
        call()
    with pytest.raises(ValueError, match="max_seqlen_q=1 is less than the longest sequence of queries, 2"):
        fk.attention_paged(q[:, 0], cache, torch.tensor([0, 0, 2], device="cuda").int(), 1, check=True)


def test_check_is_refused_under_capture() -> None:
    cache = cache_of([100, 30], "bf16", device="cuda")
    q = queries(cache)
    fk.decode(q, cache)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(fk.UnsupportedError, match="check=True waits for the device"):
            fk.decode(q, cache, check=True)
        out = fk.decode(q, cache)
    graph.replay()
    assert torch.equal(out, fk.decode(q, cache))


def test_cascade() -> None:
    prefix = cache_of([900], "bf16", dim=64, device="cuda")
    cache = cache_of([40, 1, 300], "bf16", dim=64, device="cuda", seed=3)
    q = queries(cache, 1, 8)
    sinks = torch.ones(8, device="cuda")
    out = fk.cascade_decode(q, prefix, cache, sinks=sinks)
    want = fk.cascade_decode(q, prefix, cache, sinks=sinks, impl="torch")
    assert ((out - want).float().norm() / want.float().norm()).item() < 8e-3
