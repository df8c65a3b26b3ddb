"""The Hopper decode: which calls it takes and how it cuts them (anywhere), and its results on a GPU."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import flashkernels as fk
from flashkernels.decode.hopper import decode, tiles
from flashkernels.decode.hopper.source import HopperDecodeTile, stored_bytes
from flashkernels.decode.problem import DecodeProblem
from flashkernels.decode.tensors import Call
from flashkernels.decode.validation import described
from flashkernels.formats import FORMATS as ALL_FORMATS
from flashkernels.hardware import lookup
from flashkernels.jit.counters import SLOT
from flashkernels.kvcache import PagedCache, append
from flashkernels.tiling import TilingError, use_tile

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
    for tile in (HopperDecodeTile(8, 1, 1, 1), HopperDecodeTile(12, 1, 1, 6, 2)):
        assert all(tile.pieces(sms, heads) + 2 <= SLOT for sms in (114, 132) for heads in (8, tiles.MOST_SEQUENCES))


def test_the_workspace_grows_with_the_heads_of_a_block_and_not_with_the_batch() -> None:
    """Two parts a piece: 16 rows of 130 floats for each of 132 blocks, or 4 for each of 12 pieces of an SM."""
    large = variant(replace(PROBLEM, batch=64, head_dim=112, head_dim_v=112))
    assert large.tile.heads == 4 and large.tile.pieces(132, 8) == 132 and large.part_floats == 16 * 114
    small = variant(PROBLEM)
    assert small.tile.heads == 0 and small.tile.pieces(132, 8) == 132 * 12 and small.part_floats == 4 * 130


def sized(form: str, batch: int, context: int, **changes: Any) -> DecodeProblem:
    dim = changes.get("head_dim", 128)
    changes = {"head_dim_v": dim, "scales": "token" if ALL_FORMATS[form].quantised else ""} | changes
    bits = 2 * ALL_FORMATS[form].bits(dim)
    return replace(PROBLEM, batch=batch, context=context, format=form, row_bits=bits, **changes)


@pytest.mark.parametrize(
    ("problem", "tile"),
    [
        *((sized("bf16", 64, 4096, head_dim=dim), "w12-p1-k32-s3-h4") for dim in (72, 80, 96, 112)),
        (sized("bf16", 64, 4096, head_dim=96, heads=8), "w12-p1-k32-s3-h4"),
        (sized("bf16", 64, 4096, head_dim=96, heads=64), "w12-p1-k32-s3-h4"),
        (sized("fp8", 16, 32768), "w8-p1-k32-s3-h8"), (sized("int8", 64, 4096), "w8-p1-k32-s3-h8"),
        (sized("fp8", 128, 4096, kv_heads=4), "w12-p1-k32-s3-h4"), (sized("int4", 64, 4096), "w8-p1-k32-s5-h8"),
    ],
    ids=str,
)  # fmt: skip
def test_a_large_cache_has_rows_of_several_heads_copied_together(problem: DecodeProblem, tile: str) -> None:
    assert variant(problem).tile.name == f"hopper-{tile}" and tiles.apart(problem) is None
    found = tiles.variant_of(problem, 4096, 4096, together=False)  # heads first, then slots
    assert not found.tile.heads


@pytest.mark.parametrize(
    ("problem", "word"),
    [
        (sized("bf16", 1, 32768, head_dim=96), "batch=1"), (sized("bf16", 16, 2048, head_dim=96), "100.7 MB"),
        (sized("bf16", 64, 4096), "256 and 256 bytes"), (sized("fp8", 16, 4096), "136.3 MB"),
        (sized("int4", 16, 4096), "75.5 MB"), (sized("int4", 64, 4096, head_dim=64), "32 and 32 bytes in int4"),
        (sized("bf16", 64, 4096, head_dim=256), "512 bytes"), (sized("bf16", 64, 4096, head_dim=48), "96 bytes"),
        (sized("fp8", 64, 32768, head_dim=256), "256 bytes in fp8"), (sized("bf16", 64, 4096, heads=128), "16 query"),
        (sized("bf16", 256, 4096, kv_heads=1, heads=8, head_dim=96), "kv_heads=1 is no multiple of 4"),
        (sized("bf16", 64, 4096, kv_heads=10, heads=40, head_dim=96), "kv_heads=10 is no multiple of 4"),
        (sized("int4", 64, 4096, kv_heads=4), "kv_heads=4 is no multiple of 8"),
        (sized("bf16", 64, 4096, kv_heads=32, head_dim=96), "6 groups of 4"),
        (sized("bf16", 64, 4096, window=(512, -1), head_dim=96), "100.9 MB"),
    ],
    ids=str,
)  # fmt: skip
def test_other_caches_have_every_warp_copy_for_itself(problem: DecodeProblem, word: str) -> None:
    assert not variant(problem).tile.heads and word in str(tiles.apart(problem))


@given(
    form=st.sampled_from(FORMATS), dim=st.integers(8, 16), kv_heads=st.integers(1, 24), group=st.integers(1, 16),
    batch=st.integers(1, 1024), context=st.integers(1, 4096),
)  # fmt: skip
@settings(max_examples=200)
def test_a_larger_cache_never_goes_back(
    form: str, dim: int, kv_heads: int, group: int, batch: int, context: int
) -> None:
    """So the least and the largest form of a problem name all kernels that it may need."""
    problem = sized(form, batch, 16 * context, head_dim=16 * dim, kv_heads=kv_heads, heads=kv_heads * group)
    least, most = tiles.forms(problem)
    own, ends = variant(problem), (variant(least), variant(most))
    assert own in ends and (own == ends[1] or tiles.apart(problem))


@pytest.mark.parametrize(
    ("tile", "together", "word"),
    [((12, 1, 1, 4, 3), True, "3 heads"), ((12, 1, 1, 2, 8), True, "12 warps"),
     ((8, 1, 1, 2, 4), False, "side by side"), ((8, 1, 1, 3, 2), True, "4 warps for each head"),
     ((4, 2, 1, 2, 2), True, "per_sm=2")],
    ids=str,
)  # fmt: skip
def test_rows_that_cannot_be_copied_together(tile: tuple[int, ...], together: bool, word: str) -> None:
    with use_tile(tile=HopperDecodeTile(*tile)), pytest.raises(TilingError, match=word):
        tiles.variant_of(PROBLEM, 2048, 2048, together=together)


class Launched:
    """A kernel that only notes where its queries lie."""

    def __init__(self) -> None:
        self.q: list[tuple[int, int]] = []

    def launch(self, grid: int, threads: int, stream: int, address: int) -> None:
        params = decode.Params.from_address(address)
        self.q.append((params.q, params.q_head))


@pytest.mark.parametrize("first", [0, 1, 4])
def test_queries_are_read_eight_bytes_at_a_time(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contiguous ones at another place are copied too, in every call."""
    kernel = Launched()
    monkeypatch.setattr(decode, "kernel", lambda variant: kernel)
    monkeypatch.setattr(decode, "counters", lambda device, stream: 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    cache = cache_of([20, 7], dim=64, kv_heads=2)
    q = torch.zeros(first + 2 * 4 * 64, dtype=torch.float16)[first:].view(2, 1, 4, 64)
    call = Call(q, cache)
    run = decode.plan(described(call, 1, True, None, (-1, -1), 0.0), H200, call)
    run(call, 0.125, 0.0)
    run(call, 0.125, 0.0)
    assert [(place % 8, step) for place, step in kernel.q] == [(0, 64)] * 2
    assert (kernel.q[0][0] == q.data_ptr()) == (first % 4 == 0)


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


def check_long(q: Tensor, cache: PagedCache) -> None:
    """Against the reference, as the oracle would take minutes; and 20 times the same."""
    out, lse = fk.decode(q, cache, impl="hopper", return_lse=True)
    want, want_lse = fk.decode(q, cache, impl="torch", return_lse=True)
    assert ((out - want).float().norm() / want.float().norm()).item() < 8e-3
    torch.testing.assert_close(lse, want_lse, atol=4e-3, rtol=1e-3)
    assert all(torch.equal(fk.decode(q, cache, impl="hopper"), out) for _ in range(20))


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["bf16", "int8", "int4", "fp8"])
@pytest.mark.parametrize("lengths", [(1, 100_000, 0, 99_999, 16), (20_000, *range(1, 600, 40))], ids=["long", "ragged"])
def test_lengths_of_all_kinds(form: str, lengths: tuple[int, ...]) -> None:
    cache = cache_of(lengths, form, kv_heads=2, dim=128, device="cuda")
    q = queries(cache, 1, 8, torch.bfloat16)
    check_long(q, cache)


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
@pytest.mark.parametrize("form", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("tile", [(), (6, 1, 1, 6, 2)], ids=["ruled", "rows"])
def test_a_graph_follows_the_lengths(form: str, tile: tuple[int, ...]) -> None:
    """Captured once at some lengths, replayed at others, among them 0 and the whole capacity."""
    cache = cache_of([600] * 5, form, dim=64, device="cuda", spare=4)
    everything = torch.randn(5, cache.capacity, 2, 64, device="cuda", dtype=torch.bfloat16)
    cache.lengths.fill_(cache.capacity)
    append(cache, everything, everything)
    q = queries(cache, 1, 8, torch.bfloat16)
    with use_tile(tile=HopperDecodeTile(*tile)) if tile else contextlib.nullcontext():
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


ROWS = [
    (6, 1, 1, 6, 2), (12, 1, 1, 6, 2), (4, 1, 2, 2, 2), (8, 1, 1, 12, 2), (12, 1, 1, 3, 4), (8, 1, 1, 6, 4),
    (8, 1, 1, 3, 8),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("tile", ROWS, ids=str)
@pytest.mark.parametrize("form", FORMATS)
def test_rows_copied_together(tile: tuple[int, ...], form: str) -> None:
    heads = tile[4]
    cache = cache_of(LENGTHS, form, kv_heads=heads, dim=128, device="cuda")
    q = queries(cache, 1, 4 * heads, dtype_of(form))
    with use_tile(tile=HopperDecodeTile(*tile)):
        out, _ = check(q, cache)
        assert all(torch.equal(fk.decode(q, cache, impl="hopper"), out) for _ in range(10))


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("feature", [name for name in FEATURES if "tree" not in name and name != "invariant"])
def test_feature_of_rows_copied_together(feature: str, form: str) -> None:
    cache = cache_of([0, 1, 1300, 75, 0, 64], form, dim=64, device="cuda")
    with use_tile(tile=HopperDecodeTile(6, 1, 1, 6, 2)):
        check(queries(cache, 1, 4, dtype_of(form)), cache, **on_gpu(FEATURES[feature]))


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(72, 72), (40, 40), (112, 112), (192, 128), (64, 256), (256, 16)], ids=str)
def test_head_dimensions_of_rows_copied_together(dims: tuple[int, int]) -> None:
    cache = cache_of([300, 37, 1], "bf16", dim=dims[0], dim_v=dims[1], device="cuda")
    with use_tile(tile=HopperDecodeTile(4, 1, 1, 4, 2)):
        check(queries(cache, 1, 8, torch.bfloat16), cache)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("form", ["bf16", "fp8", "int8"])
def test_more_groups_of_heads_than_one(form: str, group: int) -> None:
    """And, of 600 heads, more than there are blocks: these then take several in turn."""
    cache = cache_of([70, 0, 17, 333], form, kv_heads=12, dim=64, device="cuda")
    with use_tile(tile=HopperDecodeTile(6, 1, 1, 6, 2)):
        check(queries(cache, 1, 12 * group, torch.bfloat16), cache)
    if group == 1:
        many = cache_of([40, 0, 17], form, kv_heads=600, dim=16, device="cuda")
        with use_tile(tile=HopperDecodeTile(4, 1, 1, 4, 2)):
            check(queries(many, 1, 600, torch.bfloat16), many)


# By the rule: 16 sequences, and a table so wide that the cache could be a large one.
MANY = [0, 1, 700, 64, 0, 333, 16, 17, 1049, 15, 31, 32, 33, 128, 2, 500]
CHOSEN = [
    ("bf16", 128, 2, 0), ("fp16", 128, 6, 0), ("bf16", 72, 4, 4), ("bf16", 80, 4, 4), ("bf16", 96, 4, 4),
    ("bf16", 112, 8, 4), ("fp8", 128, 4, 4), ("int8", 128, 8, 8), ("int4", 128, 8, 8),
]  # fmt: skip


def roomy(cache: PagedCache) -> PagedCache:
    """The same pages, with slots of the table for 2 GB of keys, which no sequence uses."""
    wide = -(-(2 * 10**9) // (cache.batch * cache.capacity * cache.bits_per_token // 8))
    table = cache.block_table.repeat(1, wide)
    return PagedCache(cache.k, cache.v, table, cache.lengths, cache.k_scale, cache.v_scale)


def chosen(form: str, dim: int, kv_heads: int, group: int, heads: int, **options: Any) -> tuple[Tensor, PagedCache]:
    cache = roomy(cache_of(MANY, form, kv_heads=kv_heads, dim=dim, device="cuda", **options))
    q = queries(cache, 1, kv_heads * group, dtype_of(form))
    tile: Any = fk.explain("decode", q, cache, impl="hopper").tile
    assert tile.heads == heads or (group == 8 and tile.heads == 4)  # of 8 heads with 8 queries sums would not fit
    return q, cache


@pytest.mark.gpu
@pytest.mark.parametrize("case", CHOSEN, ids=str)
@pytest.mark.parametrize("group", [1, 4, 8])
def test_the_rule_at_every_ratio_of_heads(case: tuple[str, int, int, int], group: int) -> None:
    form, dim, kv_heads, heads = case
    q, cache = chosen(form, dim, kv_heads, group, heads)
    out, _ = check(q, cache)
    assert all(torch.equal(fk.decode(q, cache, impl="hopper"), out) for _ in range(5))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [CHOSEN[0], CHOSEN[2], CHOSEN[6]], ids=str)
@pytest.mark.parametrize("page", [16, 48, 64, 128])
def test_the_rule_at_every_page_size(case: tuple[str, int, int, int], page: int) -> None:
    form, dim, kv_heads, heads = case
    check(*chosen(form, dim, kv_heads, 4, heads, page=page))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [CHOSEN[0], CHOSEN[2], *CHOSEN[6:]], ids=str)
def test_the_rule_with_features_and_in_a_graph(case: tuple[str, int, int, int]) -> None:
    form, dim, kv_heads, heads = case
    q, cache = chosen(form, dim, kv_heads, 4, heads)
    features = {
        "window": (300, -1), "softcap": 3.0, "sinks": torch.randn(4 * kv_heads, device="cuda"),
        "alibi_slopes": torch.rand(4 * kv_heads, device="cuda") * 0.1,
    }  # fmt: skip
    with use_tile(tile=fk.explain("decode", q, cache, impl="hopper").tile):  # so small a window would leave it
        check(q, cache, **features)
    fk.decode(q, cache, impl="hopper", return_lse=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = fk.decode(q, cache, impl="hopper", return_lse=True)
    stored = cache.lengths.clone()
    for lengths in (stored, stored // 2, stored * 0, stored.clamp(max=1)):  # what is there behind them is no NaN
        cache.lengths.copy_(lengths)
        graph.replay()
        torch.cuda.synchronize()
        compare(out, lse, q, cache)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("form", "dim", "lengths"),
    [
        ("bf16", 128, (4096,) * 64), ("bf16", 72, (4096,) * 64), ("bf16", 128, (20_000, *(512,) * 31)),
        ("fp8", 128, (32_768,) * 16), ("int8", 128, (1, 65_000, 0, *range(7, 8000, 500))), ("int4", 128, (4096,) * 64),
    ],
    ids=["bf16", "72", "ragged", "fp8", "int8-ragged", "int4"],
)  # fmt: skip
def test_large_caches(form: str, dim: int, lengths: tuple[int, ...]) -> None:
    cache = cache_of(lengths, form, kv_heads=8, dim=dim, device="cuda")
    q = queries(cache, 1, 32, torch.bfloat16)
    why = fk.explain("decode", q, cache, impl="hopper")
    assert isinstance(why.tile, HopperDecodeTile) and (why.tile.heads > 0) == (dim < 128 or form != "bf16")
    assert ("rows.cu" if why.tile.heads else "decode.cu") in str(why)
    check_long(q, cache)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("form", "tile"),
    [
        ("bf16", (8, 1, 1, 12, 2)), ("bf16", (8, 1, 1, 3, 8)), ("fp8", (8, 1, 2, 3, 8)), ("int4", (8, 1, 2, 5, 8)),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("lengths", [(30_000,), (9_000, 0, *range(5, 3000, 170))], ids=["one", "ragged"])
def test_joins_of_rows_copied_together(form: str, tile: tuple[Any, ...], lengths: tuple[int, ...]) -> None:
    """One sequence has a part in every share."""
    cache = cache_of(lengths, form, kv_heads=8, dim=128, device="cuda")
    q = queries(cache, 1, 32, torch.bfloat16)
    with use_tile(tile=HopperDecodeTile(*tile)):
        check_long(q, cache)


# Warps that copy for themselves and rows that are copied together.
BOTH = [(8, 1, 2, 1), (8, 2, 1, 1), (12, 1, 1, 6, 2), (8, 1, 1, 12, 2)]


@pytest.mark.gpu
@pytest.mark.parametrize("tile", BOTH, ids=str)
@pytest.mark.parametrize("graph", [False, True], ids=["stream", "graph"])
def test_a_kernel_that_starts_early_waits_for_the_one_ahead(tile: tuple[int, ...], graph: bool) -> None:
    """Each call has the output of the one before as its queries, and lengths that were written just before it."""
    cache = cache_of([900, 0, 1, 333, 64], "bf16", dim=128, device="cuda")
    lengths = cache.lengths.clone()
    q = queries(cache, 1, 8)

    def chain(wait: bool = False) -> list[Tensor]:
        found = [q]
        for shift in range(6):
            torch.clamp(lengths - 7 * shift, min=0, out=cache.lengths)
            for factor in (8, 1):
                x = found[-1] * factor
                if wait:
                    torch.cuda.synchronize()
                found.append(fk.decode(x, cache, impl="hopper"))
        return found

    with use_tile(tile=HopperDecodeTile(*tile)):
        want = chain(wait=True)
        found = chain()
        if graph:
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                found = chain()
            for _ in range(3):
                captured.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(one, other) for one, other in zip(found, want, strict=True))
        cache.lengths.copy_(lengths)
        check(q, cache)


@pytest.mark.gpu
def test_heads_that_lie_apart_are_not_copied_together() -> None:
    """Pages as (heads, slots): rows of a token do not lie side by side."""
    q, cache = chosen("bf16", 96, 4, 4, 4)
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (cache.k, cache.v))
    lying_apart = PagedCache(k, v, cache.block_table, cache.lengths)
    check(q, lying_apart)
    with use_tile(tile=HopperDecodeTile(4, 1, 1, 4, 2)), pytest.raises(TilingError, match="side by side"):
        fk.decode(q, lying_apart, impl="hopper")


@pytest.mark.gpu
def test_large_queries_over_a_quantised_cache() -> None:
    """bf16 numbers that fp16 does not hold."""
    cache = cache_of([100, 3], "int8", dim=64, device="cuda")
    q = queries(cache, 1, 4, torch.bfloat16)
    check(q * 1e6, cache, softmax_scale=1e-7)
    check(q * 1e-9, cache, softmax_scale=1e8)
