"""The Hopper kernel, compiled for sm_90a without a GPU: a sample, always the same. `make compile-all` has all."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from flashkernels.attention.hopper import build, source, tiles
from flashkernels.attention.hopper.source import Variant
from flashkernels.attention.hopper.variants import DIMS, EVERYTHING, VARIANTS, label, variant
from flashkernels.attention.problem import AttentionProblem

SAMPLE = (
    *(variant(dim, right=right) for dim in (64, 72, 128, 256) for right in (False, True)),
    variant(72, **EVERYTHING[-1]),
    variant(192, 128, left=True, fp16=True),
    next(one for one in VARIANTS if one.split and one.pack == 8 and one.head_dim == 64),
    next(one for one in VARIANTS if one.tile.q_in_registers and one.tile.groups == 3),
    next(one for one in VARIANTS if one.tile.groups == 4 and one.head_dim == 48 and one.right),
    next(one for one in VARIANTS if one.tile.groups == 4 and one.split and not one.fp8),
    variant(64, fp8=True, right=True),
    variant(128, fp8=True),
    variant(256, fp8=True),
    next(one for one in VARIANTS if one.fp8 and one.tile.q_in_registers),
    next(one for one in VARIANTS if one.fp8 and one.split and one.alibi),
    next(one for one in VARIANTS if one.fp8 and one.tile.late),
    next(one for one in VARIANTS if one.tile.late and one.head_dim == 128),
)


pytestmark = pytest.mark.usefixtures("compiler")


def products(one: Variant) -> int:
    """wgmma instructions: the loop over keys is there two steps at a time, for each kind of mask, and once more for an
    odd end; the first Q·Kᵀ and the last P·V of a tile are there twice. Each reduces over 16 columns or keys, or over 32
    of FP8."""
    steps = 2 * (1 + one.left + one.right) + 1
    depth = 32 if one.fp8 else 16
    return (steps + 2) * (-(-one.head_dim // depth) + one.tile.block_n // depth)


@pytest.mark.parametrize("one", SAMPLE, ids=label)
def test_a_variant_is_compiled_as_it_should_be(one: Variant) -> None:
    made = build.build(one)
    assert made.faults == []
    assert made.resources.registers <= build.most_registers(one)
    assert made.resources.shared == one.shared <= tiles.SHARED_LIMIT == 232448
    assert made.resources.count("QGMMA" if one.fp8 else "HGMMA") == products(one)
    assert not made.resources.count("HGMMA" if one.fp8 else "QGMMA")
    assert made.resources.count("UTMASTG") == one.out_chunks
    if one.head_dim <= 128 and one in SAMPLE[:8]:
        assert (made.spills, made.reloads) == (0, 0)


def test_the_gate_sees_serialised_wgmma(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel with one more wait-free read of an accumulator in flight."""
    broken = source.main_file().replace("    issue_pv(weights);\n", "    issue_pv(weights);\n    o[0] += 1.f;\n", 1)
    assert broken != source.main_file()
    monkeypatch.setattr(source, "main_file", lambda: broken)
    assert any("wgmma is serialised" in fault for fault in build.build(variant(64)).faults)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_the_gate_sees_a_kernel_without_wgmma(fp8: bool) -> None:
    made = build.build(variant(64, fp8=fp8))
    other = build.Report(replace(made.variant, fp8=not fp8), made.resources, 0, 0, ())
    assert (made.faults, other.faults) == ([], ["has no wgmma"])


def test_the_list_is_short_distinct_and_legal() -> None:
    assert len(VARIANTS) == len({*VARIANTS}) == len({label(one) for one in VARIANTS}) <= 150
    for one in VARIANTS:
        assert_legal(one)


def test_the_list_has_every_flag_size_and_pattern() -> None:
    flags = ("fp16", "fp8", "left", "right", "softcap", "alibi", "sinks", "negative", "varlen", "paged", "split")
    for flag in flags:
        assert {getattr(one, flag) for one in VARIANTS} == {False, True}, flag
    for right in (False, True):
        defaults = {variant(dim, right=right) for dim in DIMS}
        assert {one.head_dim for one in defaults} == {*range(16, 257, 8)} and defaults <= {*VARIANTS}
    knobs = (source.HopperTile(1, 64), source.HopperTile(1, 64, wide_v=True, wide_k=True))
    anything = [variant(dim, tile=tile) for dim in DIMS for tile in knobs]
    wide = [one for one in VARIANTS if not one.fp8]
    assert {one.chunks[:3] for one in wide} == {one.chunks[:3] for one in anything}
    assert {one.chunks[3:] for one in wide} == {one.chunks[3:] for one in anything}
    assert {1, 3, 4, 7, 8} <= {one.pack for one in VARIANTS}
    assert {one.tile.groups for one in VARIANTS} == {1, 2, 3, 4}
    assert any(one.tile.q_in_registers for one in VARIANTS)
    assert {one.right for one in VARIANTS if one.tile.cluster > 1} == {False, True}
    pairs = [one for one in VARIANTS if one.right and one.tile.cluster > 1]  # some pass over more than K's ring holds
    assert any(64 * (2 * one.tile.groups - 1) > one.tile.block_n * one.tile.stages for one in pairs)
    fp8 = [one for one in VARIANTS if one.fp8]
    assert {(16, 16), (64, 64), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128)} <= {
        (one.head_dim, one.head_dim_v) for one in fp8
    }
    for flag in ("left", "right", "softcap", "alibi", "sinks", "negative", "split"):
        assert {getattr(one, flag) for one in fp8} == {False, True}, flag
    assert {one.chunks[3:] for one in fp8} == {(keys, 1) for keys in (32, 64, 128)}  # V is transposed: keys of a tile
    assert {1, 4, 8} <= {one.pack for one in fp8} and {one.tile.groups for one in fp8} == {1, 2, 3, 4}
    assert {(192, 128), (64, 256), (16, 256), (256, 16)} <= {(one.head_dim, one.head_dim_v) for one in VARIANTS}


# What `tiles.choose` may return


def assert_legal(one: Variant) -> None:
    """The rules that the kernel's static_asserts state."""
    tile = one.tile
    assert one.shared <= tiles.SHARED_LIMIT
    assert 1 <= tile.groups <= 4 and tile.block_n % 16 == 0 and tile.block_n <= 256
    assert not tile.pingpong or tile.groups > 1
    assert 0 <= tile.late < tile.block_n // (32 if one.fp8 else 16) and tile.late <= tiles.MOST_LATE == 12
    if one.fp8:
        assert tile.block_n in (32, 64, 128) and not (one.fp16 or one.varlen or one.paged)
        assert one.head_dim % 16 == one.head_dim_v % 16 == 0
    if one.right:  # or the K ring runs dry
        assert -(-(tile.groups * tile.cluster - 1) * (64 // one.pack) // tile.block_n) <= tile.stages + 1
    if tile.cluster > 1:
        assert one.pack == 1 and not (one.left or one.varlen or one.paged)


@st.composite
def problems(draw: st.DrawFn) -> AttentionProblem:
    kv_heads, size = draw(st.integers(1, 16)), st.integers(1, 10) | st.integers(1, 20_000)
    dtype = draw(st.sampled_from(["fp8", "fp16", "bf16"]))
    varlen = dtype != "fp8" and draw(st.booleans())
    batch, seq_q, seq_k = draw(st.integers(1, 64)), draw(size), draw(size)
    reach, dims = st.just(-1) | st.integers(0, 5000), st.sampled_from(DIMS[:: 2 if dtype == "fp8" else 1])
    return AttentionProblem(
        batch=batch, seq_q=seq_q, seq_k=seq_k, heads=kv_heads * draw(st.integers(1, 70)), kv_heads=kv_heads,
        head_dim=draw(dims), head_dim_v=draw(st.just(0) | dims), dtype=dtype,
        causal=draw(st.booleans()), window=(draw(reach), draw(reach)), softcap=draw(st.booleans()),
        positive_scale=draw(st.booleans()), alibi=draw(st.booleans()), sinks=draw(st.booleans()), varlen=varlen,
        total_q=batch * seq_q // 2 if varlen else 0, total_k=batch * seq_k // 2 if varlen else 0,
        page_size=64 * draw(st.integers(0, 4)) if varlen else 0,
    )  # fmt: skip


def shared_fairly(choice: tiles.Choice) -> bool:
    """Whether the shares, cut as schedule.cuh cuts them, cover every cut tile once, in at most two parts each, and the
    parts that epilogue.cuh counts for a tile are those."""
    cut, shares = choice.cut, choice.shares
    parts: dict[int, list[tuple[int, int, int]]] = {tile: [] for tile in range(cut)}
    for share in range(shares):
        tile, start = divmod(share * cut, shares)
        parts[tile].append((share, start, min(start + cut, shares)))
        if start + cut > shares:
            parts[tile + 1].append((share, 0, start + cut - shares))
    for tile, found in parts.items():
        ends = [0, *(to for _, _, to in found)]
        assert ends[:-1] == [start for _, start, _ in found] and ends[-1] == shares
        counted = range(tile * shares // cut, ((tile + 1) * shares - 1) // cut + 1)
        assert [share for share, _, _ in found] == list(counted)
    return True


@given(problems(), st.sampled_from([78, 114, 132]))
def test_any_choice_is_legal(problem: AttentionProblem, multiprocessors: int) -> None:
    choice = tiles.choose(problem, multiprocessors)
    one, tile = choice.variant, choice.variant.tile
    assert_legal(one)
    assert choice.tiles == tiles.query_tiles(problem, tile, one.pack)
    assert one.split == (choice.cut > 0 or not (problem.varlen or one.left or one.right))
    group = problem.heads // problem.kv_heads
    assert 1 <= one.pack <= 64 and group % one.pack == 0
    assert (one.head_dim, one.head_dim_v) == (problem.head_dim, problem.head_dim_v)
    if choice.cut:
        blocks = multiprocessors // tile.cluster
        assert not problem.varlen and choice.cut * tile.cluster * tile.groups <= tiles.CUT_TILES
        assert choice.cut < choice.shares <= min(blocks, choice.cut * tiles.MOST_PARTS)
        assert choice.whole % blocks == 0 and (choice.whole == 0 or not (one.left or one.right))
        assert shared_fairly(choice)
    left, right = problem.band
    assert (one.fp8, one.fp16) == (problem.dtype == "fp8", problem.dtype == "fp16")
    assert (one.left, one.right, one.paged) == (left >= 0, right >= 0, problem.page_size > 0)
