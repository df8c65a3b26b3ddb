"""The Hopper kernel of wide heads, compiled for sm_90a without a GPU: a sample, always the same, and what it may be."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from flashkernels.attention.hopper import build, source, tiles, wide_source
from flashkernels.attention.hopper.source import HopperTile, Variant
from flashkernels.attention.hopper.variants import EVERYTHING, label
from flashkernels.attention.hopper.wide_source import GRAIN
from flashkernels.attention.hopper.wide_variants import ALONE, DIMS, MIXED, WIDE, wide_variant
from flashkernels.attention.problem import AttentionProblem
from flashkernels.tiling import TilingError

SAMPLE = (
    *(wide_variant(dim, right=right) for dim in (264, 512) for right in (False, True)),
    wide_variant(512, **EVERYTHING[2]),
    wide_variant(320, 512, left=True, fp16=True),
    wide_variant(512, tile=ALONE),
    wide_variant(16, 264),
    wide_variant(512, varlen=True, paged=True, right=True, pack=3),
)


pytestmark = pytest.mark.usefixtures("compiler")


def products(one: Variant) -> int:
    """wgmma instructions: Q·Kᵀ of a tile is there twice, first and in the loop over keys; P·V of a pair in the loop and
    after it."""
    return 2 * -(-one.head_dim // 16) + 2 * one.tile.block_n // 16


@pytest.mark.parametrize("one", SAMPLE, ids=label)
def test_a_variant_is_compiled_as_it_should_be(one: Variant) -> None:
    made = build.build(one)
    assert made.faults == []
    assert made.resources.registers == build.most_registers(one) == 168
    assert made.resources.shared == one.shared <= tiles.SHARED_LIMIT
    assert made.resources.count("HGMMA") == products(one)


def test_the_gate_sees_serialised_wgmma(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel with one more read of an accumulator in flight."""
    name, text, headers = source.program(wide_variant(512))
    broken = text.replace("    issue_values(theirs);\n", "    issue_values(theirs);\n    o[0] += 1.f;\n")
    assert broken != text
    monkeypatch.setattr(source, "program", lambda _: (name, broken, headers))
    assert any("wgmma is serialised" in fault for fault in build.build(wide_variant(512)).faults)


def test_every_header_is_sent_and_no_other_is_included() -> None:
    _, text, headers = source.program(WIDE[0])
    assert {*re.findall(r'#include "(.*?)"', "\n".join([text, *headers.values()]))} == {*headers}


def test_the_list_has_every_flag_and_size() -> None:
    assert len({label(one) for one in WIDE}) == len(WIDE) <= 100
    for flag in ("fp16", "left", "right", "softcap", "alibi", "sinks", "negative", "varlen", "paged"):
        assert {getattr(one, flag) for one in WIDE} == {False, True}, flag
    assert {one.head_dim for one in WIDE} >= {*DIMS} == {*range(264, 513, 8)}
    assert {(one.head_dim, one.head_dim_v) for one in WIDE} >= {*MIXED}
    assert {one.tile.cluster for one in WIDE} == {1, 2}
    for one in WIDE:
        assert_legal(one)


def assert_legal(one: Variant) -> None:
    """The rules that the kernel's static_asserts state."""
    tile = one.tile
    assert one.wide and one.shared <= tiles.SHARED_LIMIT and one.threads == 384
    assert not (one.fp8 or one.split) and one.queries == 64 // one.pack >= 1
    assert (tile.groups, tile.block_n) == (1, 128)
    assert tile.stages > 4 // GRAIN
    assert 2 * wide_source.columns(one.head_dim_v) - one.head_dim_v in (0, 8)


SIZES = st.integers(1, 10) | st.integers(1, 20_000)


@st.composite
def problems(draw: st.DrawFn) -> AttentionProblem:
    kv_heads, batch, seq_q, seq_k = draw(st.integers(1, 16)), draw(st.integers(1, 64)), draw(SIZES), draw(SIZES)
    varlen, reach = draw(st.booleans()), st.just(-1) | st.integers(0, 5000)
    dims = [draw(st.sampled_from(DIMS)), 8 * draw(st.integers(2, 64))]
    if draw(st.booleans()):
        dims.reverse()
    return AttentionProblem(
        batch=batch, seq_q=seq_q, seq_k=seq_k, heads=kv_heads * draw(st.integers(1, 70)), kv_heads=kv_heads,
        head_dim=dims[0], head_dim_v=dims[1], dtype=draw(st.sampled_from(["fp16", "bf16"])),
        causal=draw(st.booleans()), window=(draw(reach), draw(reach)), softcap=draw(st.booleans()), varlen=varlen,
        total_q=batch * seq_q // 2 if varlen else 0, total_k=batch * seq_k // 2 if varlen else 0,
    )  # fmt: skip


@given(problems(), st.sampled_from([78, 114, 132]))
def test_any_choice_is_legal(problem: AttentionProblem, multiprocessors: int) -> None:
    choice = tiles.choose(problem, multiprocessors)
    one = choice.variant
    assert_legal(one)
    assert choice.cut == 0 and one.tile.cluster == (2 if problem.seq_q > one.queries else 1)
    assert problem.heads // problem.kv_heads % one.pack == 0
    assert (one.head_dim, one.head_dim_v) == (problem.head_dim, problem.head_dim_v)
    more = replace(one, tile=replace(one.tile, stages=one.tile.stages + 1))
    assert more.shared > tiles.SHARED_LIMIT


PROBLEM = AttentionProblem(batch=4, seq_q=4096, seq_k=4096, heads=4, kv_heads=4, head_dim=512)


@pytest.mark.parametrize(
    ("forced", "words"),
    [
        ("register", "use_tile asks for register, which the Hopper kernel of wide heads does not have"),
        (HopperTile(2, 128), "128x128-s2: wide heads take 64 rows, 128 keys"),
        (HopperTile(1, 64, 8), "64x64-s8: wide heads take 64 rows, 128 keys"),
        (HopperTile(1, 128, 8, cluster=3), "clusters of 1 or 2"),
        (HopperTile(1, 128, 8, q_stages=2), "64x128-s8-q2: wide heads take"),
        (HopperTile(1, 128, 2), "64x128-s2: needs at least 3 stages"),
        (HopperTile(1, 128, 5), "64x128-s5 at head_dim=512 takes 247088 bytes of shared memory"),
    ],
    ids=str,
)
def test_a_tile_that_it_cannot_have_is_refused(forced: object, words: str) -> None:
    with pytest.raises(TilingError, match=words):
        tiles.choose(PROBLEM, 132, forced)
