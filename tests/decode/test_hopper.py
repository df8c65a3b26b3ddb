"""The Hopper decode: which calls it takes and how it cuts them (anywhere), and its results on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import flashkernels as fk
from flashkernels.decode.hopper import tiles
from flashkernels.decode.hopper.source import PIECES, HopperDecodeTile, stored_bytes
from flashkernels.decode.problem import DecodeProblem
from flashkernels.formats import FORMATS as ALL_FORMATS
from flashkernels.hardware import lookup
from flashkernels.jit.counters import SLOT
from flashkernels.kvcache import PagedCache, append
from flashkernels.tiling import use_tile

from .cases import cache_of, compare, queries
from .test_decode import FEATURES

H200 = lookup("h200")
PROBLEM = DecodeProblem(
    batch=4, tokens=1, heads=32, kv_heads=8, head_dim=128, context=4096, page_size=16, row_bits=4096
)
FORMATS = ("bf16", "fp16", "fp8", "int8", "int4")
LENGTHS = [0, 1, 700, 64, 0, 333, 16, 17, 2049]


def variant(problem: DecodeProblem) -> Any:
    slots = (problem.kv_heads * stored_bytes(problem.format, dim) for dim in (problem.head_dim, problem.head_dim_v))
    return tiles.variant_of(problem, *slots)


# --- anywhere


def test_it_takes_what_it_is_for() -> None:
    assert tiles.rejects(PROBLEM, H200) is None


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"device": "cpu"}, "cpu"), ({"tokens": 2}, "2"), ({"ragged": True}, "ragged"), ({"tree": True}, "tree"),
        ({"batch_invariant": True}, "invariant"), ({"shared": True}, "twice"), ({"heads": 512}, "64 query heads"),
        ({"batch": 5000}, "batch=5000"), ({"kv_heads": 2048, "heads": 2048}, "kv_heads=2048"),
        ({"page_size": 24}, "page_size=24"), ({"head_dim": 264}, "head_dim=264"), ({"head_dim": 20}, "head_dim=20"),
        ({"head_dim_v": 72, "format": "int8", "scales": "token"}, "head_dim of v=72"),
        ({"head_dim": 96, "head_dim_v": 96, "format": "int4", "scales": "token"}, "INT4"),
        ({"dtype": "fp32", "format": "fp32"}, "fp32"), ({"format": "fp8_e5m2", "scales": "token"}, "fp8_e5m2"),
        ({"unaddressable": "k: odd"}, "k: odd"),
    ],
    ids=str,
)  # fmt: skip
def test_it_says_what_it_does_not_take(change: dict[str, Any], word: str) -> None:
    reason = tiles.rejects(replace(PROBLEM, **change), H200)
    assert reason is not None and word in reason


def test_it_wants_hopper() -> None:
    assert "9.0" in str(tiles.rejects(PROBLEM, lookup("a100"))) and "Hopper" in str(tiles.rejects(PROBLEM, None))


@given(
    form=st.sampled_from(FORMATS), dim=st.integers(1, 16), dim_v=st.integers(1, 16), group=st.integers(1, 16),
    scales=st.sampled_from(["token", "head"]),
)  # fmt: skip
@settings(max_examples=200)
def test_whatever_it_takes_has_a_tile_that_fits(form: str, dim: int, dim_v: int, group: int, scales: str) -> None:
    quantised = ALL_FORMATS[form].quantised
    problem = replace(PROBLEM, head_dim=16 * dim, head_dim_v=16 * dim_v, heads=8 * group, format=form)
    problem = replace(problem, scales=scales if quantised else "")
    if tiles.rejects(problem, H200) is None:
        found = variant(problem)
        assert found.shared * found.tile.per_sm <= tiles.SHARED_LIMIT
        assert found.tile.warps * found.tile.stages <= 32 * found.tile.warps  # a thread for each barrier


def test_a_slot_of_counters_holds_every_piece() -> None:
    assert all(max(gpu_sms * PIECES, tiles.MOST_SEQUENCES) + 2 <= SLOT for gpu_sms in (114, 132))


# --- on a GPU


def on_gpu(features: dict[str, Any]) -> dict[str, Any]:
    return {name: value.cuda() if isinstance(value, Tensor) else value for name, value in features.items()}


def check(q: Tensor, cache: PagedCache, **features: Any) -> tuple[Tensor, Tensor]:
    out, lse = fk.decode(q, cache, impl="hopper", return_lse=True, **features)
    compare(out, lse, q, cache, **features)
    return out, lse


def dtype_of(form: str) -> torch.dtype:
    return torch.float16 if form == "fp16" else torch.bfloat16


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("scales", ["token", "head"])
def test_format(form: str, scales: str) -> None:
    """Everything that is not stored is NaN."""
    cache = cache_of(LENGTHS, form, kv_heads=2, dim=128, scales=scales, device="cuda")
    check(queries(cache, 1, 8, dtype_of(form)), cache)
    if ALL_FORMATS[form].quantised:
        check(queries(cache, 1, 8, torch.float16), cache, sinks=torch.ones(8, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("feature", [name for name in FEATURES if "tree" not in name and name != "invariant"])
def test_feature(feature: str, form: str) -> None:
    cache = cache_of([0, 1, 1300, 75, 0, 64], form, dim=64, device="cuda")
    check(queries(cache, 1, 4, dtype_of(form)), cache, **on_gpu(FEATURES[feature]))


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["bf16", "fp8", "int8"])
@pytest.mark.parametrize("dim", [16, 32, 48, 64, 80, 96, 112, 160, 192, 240, 256])
def test_head_dimension(dim: int, form: str) -> None:
    cache = cache_of([300, 37, 1], form, dim=dim, device="cuda")
    check(queries(cache, 1, 8, torch.bfloat16), cache)


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(72, 72), (40, 40), (192, 128), (64, 256), (256, 16)], ids=str)
def test_head_dimensions_of_bf16(dims: tuple[int, int]) -> None:
    cache = cache_of([300, 37, 1], "bf16", dim=dims[0], dim_v=dims[1], device="cuda")
    check(queries(cache, 1, 8, torch.bfloat16), cache)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "form"),
    [*(((n, k), "bf16") for n, k in ((1, 1), (7, 1), (8, 1), (16, 1), (40, 5))), ((12, 2), "fp8"), ((32, 2), "fp8")],
    ids=str,
)
def test_rows(heads: tuple[int, int], form: str) -> None:
    cache = cache_of([300, 33, 3], form, kv_heads=heads[1], dim=64, device="cuda")
    check(queries(cache, 1, heads[0], torch.bfloat16), cache)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["bf16", "int8"])
@pytest.mark.parametrize("page", [16, 48, 64, 128, 4096])
def test_page_size(page: int, form: str) -> None:
    cache = cache_of([0, page - 1, page, page + 1, 500], form, page=page, dim=64, device="cuda")
    check(queries(cache, 1, dtype=torch.bfloat16), cache)


@pytest.mark.gpu
def test_contiguous_cache_and_strides_of_q() -> None:
    k, v = torch.randn(2, 3, 912, 2, 128, device="cuda", dtype=torch.bfloat16)
    cache = PagedCache.contiguous(k, v, torch.tensor([900, 5, 0], dtype=torch.int32, device="cuda"))
    q = queries(cache, 1, 8)
    out, _ = check(q, cache)
    spread = torch.stack((q, q), -1)[..., 0]
    assert torch.equal(fk.decode(spread, cache, impl="hopper"), out)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["bf16", "int8", "int4", "fp8"])
@pytest.mark.parametrize("lengths", [(1, 100_000, 0, 99_999, 16), (20_000, *range(1, 600, 40))], ids=["long", "ragged"])
def test_lengths_of_all_kinds(form: str, lengths: tuple[int, ...]) -> None:
    """The oracle would take minutes, so the reference stands in."""
    cache = cache_of(lengths, form, kv_heads=2, dim=128, device="cuda")
    q = queries(cache, 1, 8, torch.bfloat16)
    out, lse = fk.decode(q, cache, impl="hopper", return_lse=True)
    want, want_lse = fk.decode(q, cache, impl="torch", return_lse=True)
    assert ((out - want).float().norm() / want.float().norm()).item() < 8e-3
    torch.testing.assert_close(lse, want_lse, atol=4e-3, rtol=1e-3)
    assert all(torch.equal(fk.decode(q, cache, impl="hopper"), out) for _ in range(20))


@pytest.mark.gpu
@given(
    pages=st.lists(st.tuples(st.integers(0, 40), st.integers(-1, 1)), min_size=1, max_size=6),
    form=st.sampled_from(FORMATS[:1] + FORMATS[2:]), heads=st.sampled_from([(8, 2), (64, 4)]), seed=st.integers(0, 9),
)  # fmt: skip
@settings(max_examples=25)
def test_any_batch(pages: list[tuple[int, int]], form: str, heads: tuple[int, int], seed: int) -> None:
    """Lengths are whole pages, or one key more or less: among them 0 and 1. Everything unused is NaN."""
    lengths = [max(0, count * 16 + more) for count, more in pages]
    cache = cache_of(lengths, form, kv_heads=heads[1], dim=64, device="cuda", seed=seed)
    check(queries(cache, 1, heads[0], torch.bfloat16, seed=seed), cache)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["bf16", "int4"])
def test_a_graph_follows_the_lengths(form: str) -> None:
    """Captured once at some lengths, replayed at others, among them 0 and the whole capacity."""
    cache = cache_of([600] * 5, form, dim=64, device="cuda", spare=4)
    everything = torch.randn(5, cache.capacity, 2, 64, device="cuda", dtype=torch.bfloat16)
    cache.lengths.fill_(cache.capacity)
    append(cache, everything, everything)
    q = queries(cache, 1, 8, torch.bfloat16)
    fk.decode(q, cache, impl="hopper", return_lse=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = fk.decode(q, cache, impl="hopper", return_lse=True)
    for lengths in ([5, 600, 0, 17, 64], [0, 0, 0, 0, 0], [cache.capacity, 1, 2, 3, 4], [1] * 5):
        cache.lengths.copy_(torch.tensor(lengths))
        graph.replay()
        torch.cuda.synchronize()
        compare(out, lse, q, cache)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", [(4, 1, 1, 3), (8, 1, 2, 1), (4, 2, 1, 1), (16, 1, 1, 1)], ids=str)
@pytest.mark.parametrize("form", ["bf16", "int8", "int4"])
def test_tiles(tile: tuple[int, ...], form: str) -> None:
    cache = cache_of(LENGTHS, form, dim=128, device="cuda")
    with use_tile(tile=HopperDecodeTile(*tile)):
        check(queries(cache, 1, 8, torch.bfloat16), cache)


@pytest.mark.gpu
def test_large_queries_over_a_quantised_cache() -> None:
    """bf16 numbers that fp16 does not hold."""
    cache = cache_of([100, 3], "int8", dim=64, device="cuda")
    q = queries(cache, 1, 4, torch.bfloat16)
    check(q * 1e6, cache, softmax_scale=1e-7)
    check(q * 1e-9, cache, softmax_scale=1e8)
