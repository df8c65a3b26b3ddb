"""The Hopper backward, compiled for sm_90a without a GPU: a sample, always the same, and in slow tests all variants."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from flashkernels.attention.hopper import backward_build as build, backward_source as source, backward_tiles as tiles
from flashkernels.attention.hopper.backward import Params
from flashkernels.attention.hopper.backward_build import (
    CANDIDATES,
    DIMS,
    LOGITS,
    VARIANTS,
    WIDE,
    WIDE_VARIANTS,
    candidate,
    label,
    variant,
)
from flashkernels.attention.hopper.backward_source import BackwardVariant
from flashkernels.attention.hopper.backward_wide_source import CHUNK, QUERIES, rings
from flashkernels.attention.problem import AttentionProblem, BackwardProblem
from flashkernels.hardware import lookup
from flashkernels.jit import nvrtc
from flashkernels.jit.offline import resources

from .sass import loops, matrix, spills
from .structs import declared

SAMPLE = (
    *(variant(dim, right=right) for dim in (64, 72, 128, 256) for right in (False, True)),
    variant(96),
    variant(112, right=True),
    variant(128, varlen=True, **LOGITS),
    variant(128, softcap=True, fp16=True),
    variant(72, want_q=False),
    variant(192, 128, right=True),
    variant(72, right=True, deterministic=True),
    *(one for one in VARIANTS if one.tile.cluster > 1 and one.head_dim in (64, 96)),
    replace(variant(256, right=True), own_dq=False),
    *(candidate(name, right=True) for name in CANDIDATES),
    variant(512),
    variant(328, 512, right=True),
    variant(512, varlen=True, softcap=True, fp16=True, **LOGITS),
)
RARE = 24  # registers stored or loaded in a pass of the loop, where every feature of the logits comes together


pytestmark = pytest.mark.usefixtures("compiler")


def depth(dim: int) -> int:
    return -(-dim // 16)


def products(one: BackwardVariant) -> int:
    """wgmma instructions. One reduces over 16 columns, queries or keys."""
    s, dp, dq = depth(one.head_dim), depth(one.head_dim_v), one.tile.keys // 16 * one.adds_dq
    dk, dv = (one.tile.queries // 16 * wanted for wanted in (one.want_k, one.want_v))
    if (
        one.tile.paired
    ):  # the first step has no dQ; of the first warpgroup, the others are there with a mask and without
        weights = 3 * (s + dv) + 3 * dq * (one.dq_first > 0)
        return weights + 2 * (dp + dk) + 2 * dq
    # A tile's ends, once; first steps without dQ; then turns in a loop, of which the first step makes dQ: with a mask,
    # without one for each warpgroup, and where warpgroups take turns one more for an odd end.
    turn = 1 if one.shares_dq else 2
    steps, with_dq = 1 + 3 * turn + (turn > 1), 3 + (turn > 1)
    return (1 + steps) * (s + dv + dp + dk) + (1 + with_dq) * dq


def wide_products(one: BackwardVariant) -> int:
    """The same of wide heads. Each gradient: a first step and a loop make weights, the loop and the end sum up."""
    s, dp = depth(one.head_dim), depth(one.head_dim_v)
    return sum(2 * (scores + QUERIES // 16) for scores in (s + dp, s + dp, s))


def walks(sass: str) -> list[list[str]]:
    """The loops over query blocks: those with matrix instructions that have no other such loop inside."""
    found = [set(body) for body in loops(sass) if matrix(body)]
    inner = [body for body in found if not any(other < body for other in found)]
    return [sorted(body) for body in inner]


@pytest.mark.parametrize(
    "one",
    [variant(64), variant(128, varlen=True, **LOGITS), variant(72, right=True, deterministic=True), variant(320)],
    ids=label,
)
def test_every_kernel_waits_for_the_one_ahead_before_it_touches_memory(one: BackwardVariant) -> None:
    """All are launched early. ACQBULK is the wait."""
    made = build.build(one).kernels
    cubin = next(iter(made.values())).cubin
    others = ("rows", *(() if one.tile.wide else ("order", "queries")), *(("keys",) if one.own_dq else ()))
    for entry in (*others, *made):
        sass = resources(cubin, 0, entry=entry).sass
        order = re.findall(r"ACQBULK|\b(?:LDG|STG|ATOMG|REDG|UTMALDG|UTMASTG|UTMAREDG|UBLKCP|UBLKRED)\b", sass)
        assert order.count("ACQBULK") == 1 and order[0] == "ACQBULK", entry


@pytest.mark.parametrize("one", SAMPLE, ids=label)
def test_a_variant_is_compiled_as_it_should_be(one: BackwardVariant) -> None:
    made = build.build(one)
    assert made.faults == []
    assert {name: kernel.shared for name, kernel in made.kernels.items()} == one.kernels
    assert max(one.kernels.values()) <= tiles.SHARED_LIMIT == 232448
    found = {name: kernel.count("HGMMA") for name, kernel in made.kernels.items()}
    most = RARE if one.left and one.varlen else 0
    if one.tile.wide:
        assert found == {"backward": wide_products(one)}
        each = walks(made.kernels["backward"].sass)
        assert len(each) == 3
        assert all(len(spills(walk)) <= most and sum("R2UR" in line for line in walk) <= 2 for walk in each)
        return
    assert found.pop("backward") == products(one)
    walk = walks(made.kernels["backward"].sass)
    assert walk and max(len(spills(body)) for body in walk) <= most
    if one.own_dq:  # a first step, and in the loop one with a mask and one without
        own = made.kernels["gradient_of_queries"]
        assert found == {"gradient_of_queries": 3 * (depth(one.head_dim) + depth(one.head_dim_v) + 4)}
        assert own.spills <= 8
        assert all(not spills(body) and sum("R2UR" in line for line in body) <= 2 for body in walks(own.sass))


@pytest.mark.slow
def test_every_variant() -> None:
    faults = {label(one): build.build(one).faults for one in VARIANTS + WIDE_VARIANTS}
    assert {name: found for name, found in faults.items() if found} == {}


def test_the_gate_sees_serialised_wgmma(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel with a read of an accumulator in flight."""
    files = dict(source.files())
    issue = "    issue_dk(dk, gradient_words());\n"
    broken = files["backward_split.cuh"].replace(issue, f"{issue}    dk[0] += 1.f;\n", 1)
    assert broken != files["backward_split.cuh"]
    monkeypatch.setattr(source, "files", lambda: files | {"backward_split.cuh": broken})
    assert any("wgmma is serialised" in fault for fault in build.build(variant(72)).faults)


def test_the_list_is_distinct_and_has_every_flag_and_size() -> None:
    everything = VARIANTS + WIDE_VARIANTS
    assert len(VARIANTS) <= 150 and len(everything) == len({label(one) for one in everything})
    for flag in ("fp16", "left", "right", "softcap", "alibi", "varlen"):
        for some in (VARIANTS, WIDE_VARIANTS):
            assert {getattr(one, flag) for one in some} == {False, True}, flag
    for flag in ("own_dq", "want_q", "want_k", "want_v"):
        assert {getattr(one, flag) for one in VARIANTS} == {False, True}, flag
    for flag in ("paired", "halves", "k_in_registers", "v_in_registers", "separate", "tall", "staged", "sends"):
        assert {getattr(one.tile, flag) for one in VARIANTS} == {False, True}, flag
    assert {one.tile.cluster for one in VARIANTS} == {1, 2}
    assert {one.tile.cluster for one in WIDE_VARIANTS} == {2} and all(one.tile.wide for one in WIDE_VARIANTS)
    assert {one.head_dim for one in VARIANTS} == {*range(16, 257, 8)}
    assert {one.head_dim for one in WIDE_VARIANTS} > {*WIDE}
    assert all(max(one.kernels.values()) <= tiles.SHARED_LIMIT for one in everything)


@pytest.mark.parametrize("dims", [(512, 512), (264, 16), (16, 264)], ids=str)
def test_wide_heads_take_all_the_shared_memory_that_helps(dims: tuple[int, int]) -> None:
    """One slot more would not fit, or would let statistics be overwritten early."""
    one = variant(*dims)
    for name in "qkv":
        grain, stages, shared = rings(one, name)
        slot = 2 * (CHUNK * grain + 3 * 8)
        assert stages * grain == 8 or shared + slot > tiles.SHARED_LIMIT >= shared
        assert grain == 2 or stages <= 5


# The parameters: Python and C++ lay out the same struct


def test_both_have_the_same_fields_in_the_same_order() -> None:
    fields = [(name, ctypes.sizeof(kind)) for name, kind in Params._fields_]
    assert declared(source.files()["backward_params.cuh"]) == fields


def test_both_have_the_same_size() -> None:
    size = -(-ctypes.sizeof(Params) // 64) * 64
    program = f'#include "backward_params.cuh"\nstatic_assert(sizeof(Params) == {size}, "size");'
    assert nvrtc.compile("layout.cu", program, source.headers(VARIANTS[0]))


# What it takes

CALL = AttentionProblem(batch=2, seq_q=64, seq_k=64, heads=4, kv_heads=2, head_dim=64)


@pytest.mark.parametrize(
    ("call", "options", "reason"),
    [
        ({"head_dim": 20}, {}, "head_dim=20 is not a multiple of 8: TMA cannot address its rows"),
        ({"head_dim_v": 520}, {}, "head_dim of v=520 is not in 16 to 512"),
        ({"head_dim": 8}, {}, "head_dim=8 is not in 16 to 512"),
        ({"dtype": "fp32"}, {}, "has no fp32 kernel"),
        ({"mask": "bool"}, {}, "takes no mask tensor"),
        ({"dropout_p": 0.1}, {}, "has no dropout"),
        ({"unaddressable": "k: why"}, {}, "TMA cannot read k: why"),
        ({"seq_k": 0}, {}, "an empty problem has nothing to load"),
        (
            {"varlen": True, "batch": 2**20, "total_q": 2**20, "total_k": 2**20, "heads": 32},
            {},
            "counts rows of queries in 32 bits; with the ends of all sequences there are 4328521728",
        ),
        ({"device": "cpu"}, {}, "needs a Hopper GPU, the tensors are on cpu"),
        ({}, {"saved": False}, "needs the output and the log-sum-exp, which this forward did not keep"),
        ({"alibi": True}, {"wanted": ("q", "alibi_slopes")}, "has no gradient of the ALiBi slopes"),
    ],
    ids=lambda x: "-".join(map(str, x)) if isinstance(x, dict) else "",
)
def test_it_says_why_it_cannot_serve(call: dict[str, object], options: dict[str, object], reason: str) -> None:
    changed = replace(CALL, **call)
    if not changed.varlen:
        changed = replace(changed, total_q=0, total_k=0)
    problem = BackwardProblem(changed, **{"wanted": ("q", "k", "v"), **options})
    assert tiles.rejects(problem, lookup("h200")) == reason


def test_it_serves_hopper_only() -> None:
    problem = BackwardProblem(CALL, ("q", "k", "v", "sinks"))
    assert tiles.rejects(problem, lookup("h200")) is None
    assert "needs compute capability 9.0" in str(tiles.rejects(problem, lookup("a100")))


@pytest.mark.parametrize(
    ("changed", "cluster"),
    [
        ({}, 2), ({"head_dim": 64, "head_dim_v": 64}, 2), ({"head_dim": 72, "head_dim_v": 72}, 1), ({"seq_k": 2049}, 1),
        ({"seq_k": 1024}, 1), ({"causal": True}, 1), ({"window": (500, -1)}, 1), ({"softcap": True}, 1),
        ({"head_dim_v": 64}, 1),
    ],
    ids=str,
)  # fmt: skip
def test_neighbours_share_their_loads_where_that_was_faster(changed: dict[str, object], cluster: int) -> None:
    call = replace(CALL, **({"seq_k": 4096, "head_dim": 96, "head_dim_v": 96} | changed))
    for deterministic in (False, True):
        one = tiles.choose(BackwardProblem(call, ("q", "k", "v"), deterministic=deterministic))
        assert one.tile.cluster == (1 if deterministic else cluster)


@given(
    st.sampled_from(DIMS + WIDE), st.sampled_from(DIMS + WIDE), st.booleans(), st.booleans(), st.booleans(),
    st.booleans(), st.booleans(), st.tuples(st.sampled_from([-1, 0, 300]), st.sampled_from([-1, 0, 300])),
)  # fmt: skip
def test_any_choice_is_legal(
    dim: int,
    dim_v: int,
    softcap: bool,
    alibi: bool,
    varlen: bool,
    causal: bool,
    deterministic: bool,
    window: tuple[int, int],
) -> None:
    call = replace(
        CALL, head_dim=dim, head_dim_v=dim_v, softcap=softcap, alibi=alibi, varlen=varlen, causal=causal, window=window
    )
    one = tiles.choose(BackwardProblem(call, ("q", "v"), deterministic=deterministic))
    tile = one.tile
    assert max(one.kernels.values()) <= tiles.SHARED_LIMIT
    ends = window[0] >= 0, causal or window[1] >= 0
    assert (one.left, one.right) == (ends[0], ends[1] or (ends[0] and alibi))  # a far one beside slopes
    assert (one.want_q, one.want_k, one.want_v) == (True, False, True)
    assert one.own_dq == (tile.paired or tile.wide or deterministic)
    assert tile.wide == (max(dim, dim_v) > 256)
    if tile.wide:
        assert tile.cluster == 2 and not (tile.paired or tile.tall or tile.staged) and tile.keys == 64
        return
    assert tile.paired or not (one.softcap or max(dim, dim_v) > 128)
    if tile.paired:
        assert not (tile.halves or tile.k_in_registers or tile.v_in_registers or tile.separate)
        assert one.dq_first % 64 == 0 and one.dq_first <= 128 and 8 <= one.dq_columns <= 128
    if tile.halves:
        assert 2 * one.dq_columns >= dim and (dim % 16 == 0 or dim > 64)
    assert tile.queries <= tiles.MOST_QUERIES
    if tile.tall:
        assert not (one.own_dq or tile.halves or tile.k_in_registers or tile.separate) and tile.queries % 16 == 0
    assert not (one.own_dq and tile.staged) and not (tile.sends and not tile.staged)
