"""`impl="hopper"` on a Hopper GPU: what it has and the other kernels have not. test_gpu.py has what they share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import flashkernels as fk
from flashkernels.attention.api import problem_of
from flashkernels.attention.hopper import tiles
from flashkernels.attention.hopper.source import Variant
from flashkernels.attention.hopper.variants import VARIANTS, label

from . import fp8, oracle
from .cases import EVERYTHING, Shape, generator, keywords, paged, ragged
from .examples import examples
from .gpu import (
    LARGE,
    LENGTHS,
    NAN,
    SMALL,
    SPLIT,
    check,
    check_pages,
    check_varlen,
    compile_ahead,
    cuda,
    each_half,
    misaligned,
    multiprocessors,
    new_memory_is_nan,
    odd_rows,
    on_hopper,
    shared_heads,
    shares,
    spread,
    syncs_are_errors,
)

pytestmark = [pytest.mark.gpu, on_hopper]

IMPL = "hopper"
DECODE = Shape(b=1, sq=1, sk=100_000, h=8, hkv=1, d=128)


# Every variant of the fixed list


@pytest.fixture(scope="module")
def compiled_variants(kernels: Path, request: pytest.FixtureRequest) -> None:
    compile_ahead(VARIANTS, request)


@pytest.mark.usefixtures("compiled_variants")
@pytest.mark.parametrize("variant", VARIANTS, ids=label)
@settings(max_examples=4)
@given(st.data())
def test_variant(variant: Variant, data: st.DataObject) -> None:
    example = data.draw(examples(variant, multiprocessors()))
    features = example.keywords("cuda")
    with fk.use_tile(tile=variant.tile):
        if variant.fp8:
            per_block = example.seed % 2 == 0
            fp8.check(fp8.quantised(example.shape, "cuda", per_block=per_block, seed=example.seed), IMPL, **features)
            return
        if not variant.varlen:
            check(*cuda(example.shape, example.dtype, seed=example.seed), impl=IMPL, **features)
            return
        lens_q, lens_k = zip(*example.lens, strict=True)
        batch = ragged(lens_q, lens_k, example.shape, example.dtype, device="cuda", seed=example.seed)
        if variant.paged:
            check_pages(batch, example.page_size, impl=IMPL, **features)
        else:
            check_varlen(batch, impl=IMPL, **features)


# Tensors that TMA cannot read


@pytest.mark.parametrize("which", "qkv")
@pytest.mark.parametrize("change", [misaligned, odd_rows, spread, shared_heads], ids=lambda f: f.__name__)
def test_a_tensor_that_tma_cannot_read_is_named_and_left_to_others(which: str, change: Callable[..., Tensor]) -> None:
    """Triton reads heads that are one as well as any; all else is copied first."""
    inputs = dict(zip("qkv", cuda(Shape(b=2, sq=100, sk=150, h=4, hkv=2, d=72)), strict=True))
    inputs[which] = change(inputs[which])
    with pytest.raises(fk.UnsupportedError, match=rf"hopper: TMA cannot read {which}: "):
        fk.attention(**inputs, causal=True, impl=IMPL)
    out, _ = check(**inputs, causal=True, impl="auto")
    served = "triton" if change is shared_heads else "aligned"
    assert fk.explain("attention", **inputs, causal=True).impl == served
    assert torch.equal(out, fk.attention(**inputs, causal=True, impl=served))


def test_one_sequence_and_one_head_may_have_any_stride() -> None:
    q, k, v = cuda(Shape(b=1, sq=100, sk=150, h=1, hkv=1, d=72))
    odd = [x.as_strided(x.shape, (7, 72, 13, 1)) for x in (q, k, v)]
    check(*odd, causal=True, impl=IMPL)


def test_a_slice_of_a_longer_tensor_is_read_in_place() -> None:
    q, k, v = cuda(Shape(b=3, sq=300, sk=400, h=6, hkv=4, d=64))
    check(q[1:, 37:250, 2:4], k[1:, 101:300, 1:3], v[1:, 101:300, 2:4], causal=True, impl=IMPL)


def test_q_k_and_v_of_one_projection() -> None:
    packed = torch.randn(2, 200, 3, 4, 72, device="cuda", dtype=torch.bfloat16)
    check(*packed.unbind(2), causal=True, impl=IMPL)


@pytest.mark.parametrize(
    ("shape", "words"),
    [(Shape(d=12), "head_dim=12"), (Shape(d=520), "head_dim=520"), (Shape(d=16, dv=8), "head_dim of v=8")],
    ids=str,
)
def test_what_it_cannot_serve_is_refused_with_the_reason(shape: Shape, words: str) -> None:
    with pytest.raises(fk.UnsupportedError, match=words):
        fk.attention(*cuda(shape), impl=IMPL)


# Pages


@pytest.mark.parametrize("page_size", [64, 128, 192, 256])
@pytest.mark.parametrize("feature", ["plain", "causal", "window"])
@pytest.mark.parametrize("dim", [64, 72, 128])
def test_paged(page_size: int, feature: str, dim: int) -> None:
    shape = LARGE.but(b=len(LENGTHS[0]), d=dim)
    check_pages(
        ragged(*LENGTHS, shape, torch.bfloat16, device="cuda"), page_size, impl=IMPL, **keywords(feature, shape, "cuda")
    )


@each_half
def test_paged_with_every_feature(dtype: torch.dtype) -> None:
    shape = LARGE.but(b=len(LENGTHS[0]), d=96, dv=128)
    check_pages(ragged(*LENGTHS, shape, dtype, device="cuda"), 64, impl=IMPL, **keywords(EVERYTHING, shape, "cuda"))


def test_paged_decoding_of_many_sequences() -> None:
    shape = Shape(b=40, h=32, hkv=4, d=128)
    batch = ragged([1] * 40, [37 * i for i in range(40)], shape, torch.bfloat16, device="cuda")
    check_pages(batch, 64, impl=IMPL, causal=True)


def test_a_page_size_that_it_cannot_load_goes_to_triton() -> None:
    batch = ragged([5, 9], [30, 47], Shape(h=4, hkv=2, d=64), torch.bfloat16, device="cuda")
    pages = paged(batch, 16)
    args = (batch.q, pages.k, pages.v, *batch.args[3:])
    with pytest.raises(fk.UnsupportedError, match="page_size=16 is not a multiple of 64"):
        fk.attention_varlen(*args, block_table=pages.table, impl=IMPL)
    out = fk.attention_varlen(*args, block_table=pages.table)
    oracle.assert_correct_varlen(out, None, *batch.tensors)


def test_a_graph_of_a_paged_cache_replays_with_other_pages() -> None:
    batch = ragged([1, 1], [300, 100], Shape(h=8, hkv=2, d=128), torch.bfloat16, device="cuda")
    pages = paged(batch, 64)
    args = (batch.q, pages.k, pages.v, batch.cu_q, batch.cu_k, 1, 320)
    fk.attention_varlen(*args, block_table=pages.table, impl=IMPL)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fk.attention_varlen(*args, block_table=pages.table, impl=IMPL)
    other = paged(batch, 64, seed=5)
    for old, new in ((pages.k, other.k), (pages.v, other.v), (pages.table, other.table)):
        old.copy_(new)
    graph.replay()
    oracle.assert_correct_varlen(out, None, *batch.tensors)


# Keys in parts


@pytest.mark.parametrize("feature", ["plain", "causal", "window", "softcap", "alibi2d", "sinks", "left+sinks"])
@pytest.mark.parametrize("shape", [SMALL, SPLIT, SPLIT.but(sq=33, h=4, hkv=2, d=72), SPLIT.but(d=256)], ids=str)
def test_few_tiles(shape: Shape, feature: str) -> None:
    check(*cuda(shape), impl=IMPL, **keywords(feature, shape, "cuda"))


def test_few_tiles_are_split() -> None:
    for shape in (SPLIT, DECODE, SPLIT.but(sq=33, h=4, hkv=2, d=72)):
        assert shares(*cuda(shape)) > 1
        assert shares(*cuda(shape), causal=True) > 1
        assert shares(*cuda(shape), window=(3000, 0)) > 1


LAST_ROUND = Shape(b=1, sq=2048, sk=4100, h=40, hkv=4, d=64)


@pytest.mark.parametrize("features", [(), ("softcap", "alibi2d", "sinks")], ids=["plain", "all"])
@pytest.mark.parametrize("shape", [
    LAST_ROUND, LAST_ROUND.but(d=72, h=64), LAST_ROUND.but(d=104, h=28), LAST_ROUND.but(d=128),
    LAST_ROUND.but(d=256, h=28), LAST_ROUND.but(d=120, b=2), LAST_ROUND.but(d=192, sq=2000, sk=3000, h=44),
    LAST_ROUND.but(b=3, sq=100, sk=9000, h=32), LAST_ROUND.but(sq=1000, h=100),
], ids=str)  # fmt: skip
def test_the_last_round_is_cut_by_keys(shape: Shape, features: tuple[str, ...]) -> None:
    """Tiles behind the last full round (of the last shape all), shared by the blocks: with one part in a share and with
    two, in clusters and without, with two to four warpgroups."""
    inputs = cuda(shape)
    more = {name: value for feature in features for name, value in keywords(feature, shape, "cuda").items()}
    chosen = tiles.choose(problem_of(*inputs, **more), multiprocessors())
    assert chosen.shares > chosen.cut > 0
    first, _ = check(*inputs, impl=IMPL, **more)
    for _ in range(10):
        assert torch.equal(fk.attention(*inputs, impl=IMPL, **more), first)


@pytest.mark.parametrize("dim", [32, 48, 64, 96, 112, 120, 192])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_many_tiles_of_one_key_block(dim: int, causal: bool) -> None:
    """The next tile's Q is loaded as soon as this one's is read, and must not be there before. Under the mask the first
    rows see nothing, then one key, two: they show a wrong score best."""
    q, k, v = cuda(Shape(b=2, sq=1024, sk=512 if causal else 64, h=40, hkv=40, d=dim))
    first, _ = check(q, k, v, causal=causal, impl=IMPL)
    for _ in range(30):
        assert torch.equal(fk.attention(q, k, v, causal=causal, impl=IMPL), first)


@pytest.mark.parametrize("dim", [64, 104, 120, 128, 136, 160, 168, 192, 200, 224, 232, 256])
@pytest.mark.parametrize(("more_keys", "hkv"), [(0, 40), (333, 8), (-700, 40)], ids=["square", "grouped", "unseen"])
def test_blocks_share_loads_under_a_causal_mask(dim: int, more_keys: int, hkv: int) -> None:
    """Blocks of a cluster see different numbers of keys, and hand back what only the other one sees."""
    b, sq = (3, 1150) if dim == 64 else (2, 1530)  # rows that four warpgroups would not fill
    q, k, v = cuda(Shape(b=b, sq=sq, sk=sq + more_keys, h=40, hkv=hkv, d=dim))
    assert tiles.choose(problem_of(q, k, v, causal=True), multiprocessors()).variant.tile.cluster == 2
    first, _ = check(q, k, v, causal=True, impl=IMPL)
    for _ in range(10):
        assert torch.equal(fk.attention(q, k, v, causal=True, impl=IMPL), first)
    clean = first[:, :700].clone()
    v[:, 700 + more_keys :] = NAN  # hidden from the first 700 queries
    torch.testing.assert_close(fk.attention(q, k, v, causal=True, impl=IMPL)[:, :700], clean, atol=0.05, rtol=0)


@pytest.mark.parametrize("feature", ["plain", "causal", "right", "scale+causal+softcap+alibi2d+sinks"])
@pytest.mark.parametrize(("dim", "dim_v"), [*((n, n) for n in range(16, 65, 8)), (64, 16), (24, 56)])
def test_narrow_heads_in_four_warpgroups(dim: int, dim_v: int, feature: str) -> None:
    """Of a tile's 256 rows, some are past the end, and some see no key."""
    shape = Shape(b=1, sq=610, sk=500, h=6, hkv=2, d=dim, dv=dim_v)
    features = keywords(feature, shape, "cuda")
    with fk.use_tile(tile=tiles.four_warpgroups(dim, dim_v, feature != "plain")):
        check(*cuda(shape), impl=IMPL, **features)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dim", [24, 32, 48, 64])
def test_narrow_heads_have_four_warpgroups(dim: int, causal: bool) -> None:
    """Where 256 rows fill the sequences. Each block takes several tiles."""
    inputs = cuda(Shape(b=2, sq=1010, sk=900, h=44, hkv=11, d=dim))
    assert tiles.choose(problem_of(*inputs, causal=causal), multiprocessors()).variant.tile.groups == 4
    first, _ = check(*inputs, causal=causal, impl=IMPL)
    for _ in range(10):
        assert torch.equal(fk.attention(*inputs, causal=causal, impl=IMPL), first)


@each_half
@pytest.mark.parametrize("feature", ["plain", "causal", "window"])
@pytest.mark.parametrize(
    ("dim", "dim_v"), [*((n, n) for n in (16, 40, 64, 72, 112, 160, 256)), (48, 136), (192, 128)]
)
def test_outputs_leave_through_shared_memory(dim: int, dim_v: int, feature: str, dtype: torch.dtype) -> None:
    """Of blocks that take several tiles, 64 columns at a time, as many as there is room for; others from registers.
    Every element is written, and no row past a sequence's end: there the next one begins."""
    shape = Shape(b=3, sq=570, sk=301, h=60, hkv=60, d=dim, dv=dim_v)
    inputs, features = cuda(shape, dtype), keywords(feature, shape, "cuda")
    choice = tiles.choose(problem_of(*inputs, **features), multiprocessors())
    assert choice.sent(multiprocessors())
    with new_memory_is_nan():
        first, _ = check(*inputs, impl=IMPL, **features)
        for _ in range(10):
            assert torch.equal(fk.attention(*inputs, impl=IMPL, **features), first)
        turned = fk.attention(*(x.transpose(1, 2) for x in inputs), layout="bhsd", impl=IMPL, **features)
    assert torch.equal(turned.transpose(1, 2), first)


@each_half
@pytest.mark.parametrize("kv_heads", [1, 8])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_one_query_and_very_many_keys(dtype: torch.dtype, kv_heads: int, dim: int) -> None:
    check(*cuda(DECODE.but(hkv=kv_heads, d=dim), dtype), causal=True, impl=IMPL)


def test_a_window_leaves_few_keys_for_each_part() -> None:
    few = SPLIT.but(sq=60, h=2, hkv=1, sk=30_000)
    assert shares(*cuda(few), window=(2500, 0)) > 1
    check(*cuda(few), window=(2500, 0), impl=IMPL)
    check(*cuda(SPLIT.but(sq=512, sk=300)), causal=True, impl=IMPL)


# Memory, streams and graphs


@pytest.mark.parametrize("shape", [SPLIT, DECODE, Shape(b=1, sq=3, sk=700, h=28, hkv=4, d=96)], ids=str)
def test_every_element_is_written_where_keys_are_split_and_heads_packed(shape: Shape) -> None:
    inputs = cuda(shape)
    with new_memory_is_nan():
        out, lse = fk.attention(*inputs, causal=True, return_lse=True, impl=IMPL)
    oracle.assert_correct(out, lse, *inputs, causal=True)


def call(name: str) -> Callable[[], tuple[Tensor, Tensor]]:
    """A prepared call: dense, in parts, ragged or paged."""
    if name in ("ragged", "paged"):
        batch = ragged(*LENGTHS, LARGE, torch.bfloat16, device="cuda")
        if name == "ragged":
            return lambda: fk.attention_varlen(*batch.args, causal=True, return_lse=True, impl=IMPL)
        pages = paged(batch, 64)
        args = (batch.q, pages.k, pages.v, *batch.args[3:])
        return lambda: fk.attention_varlen(*args, block_table=pages.table, causal=True, return_lse=True, impl=IMPL)
    shape = {"dense": Shape(b=4, sq=700, sk=1000, h=24, hkv=4, d=72), "split": SPLIT, "decode": DECODE}[name]
    inputs = cuda(shape)
    return lambda: fk.attention(*inputs, causal=name != "split", return_lse=True, impl=IMPL)


each_call = pytest.mark.parametrize("name", ["dense", "split", "decode", "ragged", "paged"])


def same(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@each_call
def test_a_hundred_runs_agree_bit_for_bit(name: str) -> None:
    run = call(name)
    first = run()
    runs = [run() for _ in range(100)]
    assert all(same(first, again) for again in runs)


@each_call
def test_two_streams_at_once(name: str) -> None:
    run = call(name)
    want = run()
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    results = []
    for _ in range(50):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(run())
    torch.cuda.synchronize()
    assert all(same(want, result) for result in results)


@each_call
def test_two_graphs_replayed_on_two_streams(name: str) -> None:
    run = call(name)
    want = run()
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    results = []
    for graph in graphs:
        with torch.cuda.graph(graph):
            results.append([run() for _ in range(5)])
    streams = [torch.cuda.Stream() for _ in graphs]
    torch.cuda.synchronize()
    for _ in range(10):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert all(same(want, result) for captured in results for result in captured)


def test_a_graph_and_calls_beside_it() -> None:
    run = call("dense")
    want = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    side, others = torch.cuda.Stream(), []
    torch.cuda.synchronize()
    for _ in range(20):
        graph.replay()
        with torch.cuda.stream(side):
            others.append(run())
    torch.cuda.synchronize()
    assert same(want, captured) and all(same(want, other) for other in others)


def test_the_first_call_of_a_signature_may_be_captured() -> None:
    shape = Shape(b=3, sq=211, sk=307, h=4, hkv=2, d=56)  # of no other test
    inputs = cuda(shape)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = fk.attention(*inputs, causal=True, return_lse=True, impl=IMPL)
    for _ in range(3):
        out.zero_()
        graph.replay()
        oracle.assert_correct(out, lse, *inputs, causal=True)


@each_call
def test_a_call_never_waits_for_the_gpu(name: str) -> None:
    run = call(name)
    run()
    with syncs_are_errors():
        run()


def test_a_call_leaves_no_memory_behind() -> None:
    for name in ("split", "ragged"):
        run = call(name)
        run()
        before = torch.cuda.memory_allocated()
        for _ in range(10):
            run()
        assert torch.cuda.memory_allocated() == before


# The registered op


def op_arguments(**features: Any) -> tuple[Any, ...]:
    q, k, v = cuda(Shape(b=2, sq=40, sk=70, h=4, hkv=2, d=64))
    sides = [features.get(name) for name in ("alibi_slopes", "sinks")]
    causal, softcap = features.get("causal", False), features.get("softcap", 0.0)
    window = features.get("window", (-1, -1))
    return (
        *(x.requires_grad_() for x in (q, k, v)), *sides, *(None,) * 7, 0, 0, causal, 0.125, *window, softcap, "bshd",
        True, IMPL,
    )  # fmt: skip


@pytest.mark.parametrize("feature", ["plain", "causal+softcap+sinks"])
def test_opcheck(feature: str) -> None:
    arguments = op_arguments(**keywords(feature, Shape(h=4), "cuda"))
    torch.library.opcheck(torch.ops.flashkernels.attention.default, arguments)


def test_opcheck_of_a_ragged_and_a_paged_batch() -> None:
    batch = ragged([30, 0, 20], [70, 5, 64], Shape(h=4, hkv=2, d=64), torch.bfloat16, device="cuda")
    pages = paged(batch, 64)
    rest = (None, None, None, batch.max_q, batch.max_k, True, 0.125, -1, -1, 0.0, "bshd", True, IMPL)
    op = torch.ops.flashkernels.attention.default
    torch.library.opcheck(op, (*batch.args[:3], None, None, None, batch.cu_q, batch.cu_k, None, *rest))
    torch.library.opcheck(op, (batch.q, pages.k, pages.v, None, None, None, batch.cu_q, batch.cu_k, pages.table, *rest))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_in_one_graph_gives_the_same(dynamic: bool) -> None:
    torch._dynamo.reset()

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return fk.attention(q * 1.0, k, v, causal=True, impl=IMPL) + 1

    compiled = torch.compile(run, fullgraph=True, dynamic=dynamic)
    for seq in (128, 200):
        q, k, v = cuda(LARGE.but(sq=seq, sk=seq))
        torch.testing.assert_close(compiled(q, k, v), run(q, k, v))


def test_compiled_paged_call_gives_the_same() -> None:
    torch._dynamo.reset()
    batch = ragged(*LENGTHS, LARGE, torch.bfloat16, device="cuda")
    pages = paged(batch, 128)

    def run(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
        out = fk.attention_varlen(q, k, v, *batch.args[3:], block_table=table, causal=True, impl=IMPL)
        assert isinstance(out, Tensor)
        return out * 2

    compiled = torch.compile(run, fullgraph=True)
    inputs = (batch.q, pages.k, pages.v, pages.table)
    torch.testing.assert_close(compiled(*inputs), run(*inputs))


# Tiles


def test_a_tile_for_another_kernel_is_not_taken() -> None:
    inputs = cuda(LARGE)
    with fk.use_tile("standard"):
        out = fk.attention(*inputs, causal=True)
        assert torch.equal(out, fk.attention(*inputs, causal=True, impl="triton"))


def test_every_tile_computes_the_same() -> None:
    inputs = cuda(Shape(b=1, sq=500, sk=600, h=4, hkv=2, d=64))
    like = [variant for variant in VARIANTS if variant.head_dim == 64 == variant.head_dim_v and not variant.fp8]
    for tile in {variant.tile for variant in like}:
        with fk.use_tile(tile=tile):
            check(*inputs, impl=IMPL)


def test_keys_of_random_lengths_and_places() -> None:
    """Long queues of tiles: every block takes many, of every kind."""
    draw = generator(3)
    for _ in range(4):
        lens_q, lens_k = (torch.randint(0, 700, (40,), generator=draw).tolist() for _ in range(2))
        check_varlen(ragged(lens_q, lens_k, LARGE, torch.bfloat16, device="cuda"), causal=True, impl=IMPL)
