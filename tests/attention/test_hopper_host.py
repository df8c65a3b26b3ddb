"""The Hopper kernel's Python side, which needs no GPU: when it declines, what it asks of tensors, what it compiles."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

import flashkernels as fk
from flashkernels.attention.api import IMPLS, needs_hopper
from flashkernels.attention.hopper import source, tiles
from flashkernels.attention.hopper.source import HopperTile, Variant
from flashkernels.attention.hopper.variants import VARIANTS, label
from flashkernels.attention.problem import AttentionProblem
from flashkernels.attention.tensors import unaddressable
from flashkernels.dispatch import select
from flashkernels.hardware import lookup
from flashkernels.tiling import TilingError

from .examples import examples

PROBLEM = AttentionProblem(batch=4, seq_q=4096, seq_k=4096, heads=28, kv_heads=28, head_dim=72, causal=True)
RAGGED: dict[str, Any] = {"varlen": True, "total_q": 9000, "total_k": 9000}

REASONS: dict[str, tuple[dict[str, Any], str, str]] = {
    "cpu": ({"device": "cpu"}, "h200", "needs a Hopper GPU, the tensors are on cpu"),
    "a100": ({}, "a100", "needs compute capability 9.0, NVIDIA A100-SXM4-80GB has 8.0"),
    "b200": ({}, "b200", "needs compute capability 9.0, NVIDIA B200 has 10.0"),
    "fp32": ({"dtype": "fp32"}, "h200", "has no fp32 kernel"),
    "d-12": ({"head_dim": 12, "head_dim_v": 72}, "h200", "head_dim=12 is not a multiple of 8"),
    "d-8": ({"head_dim": 8}, "h200", "head_dim=8 is not in 16 to 512"),
    "d-520": ({"head_dim": 520}, "h200", "head_dim=520 is not in 16 to 512"),
    "fp8-d-272": ({"dtype": "fp8", "head_dim": 272}, "h200", "head_dim=272 is not in 16 to 256"),
    "dv-20": ({"head_dim_v": 20}, "h200", "head_dim of v=20 is not a multiple of 8"),
    "fp8-d72": ({"dtype": "fp8"}, "h200", "head_dim=72 is not a multiple of 16: TMA cannot address its rows"),
    "fp8-dv-24": ({"dtype": "fp8", "head_dim": 64, "head_dim_v": 24}, "h200", "head_dim of v=24 is not a multiple"),
    "dv-576": ({"head_dim_v": 576}, "h200", "head_dim of v=576 is not in 16 to 512"),
    "mask": ({"mask": "bool"}, "h200", "takes no mask tensor"),
    "page": ({"page_size": 16, **RAGGED}, "h200", "page_size=16 is not a multiple of 64"),
    "tma": ({"unaddressable": "k: its strides"}, "h200", "TMA cannot read k: its strides"),
    "no-queries": ({"seq_q": 0}, "h200", "an empty problem has nothing to load"),
    "no-keys": ({"seq_k": 0}, "h200", "an empty problem has nothing to load"),
}


@pytest.mark.parametrize("name", REASONS)
def test_it_declines_with_the_reason(name: str) -> None:
    changes, key, words = REASONS[name]
    problem, gpu = replace(PROBLEM, **{"head_dim_v": changes.get("head_dim", 72)} | changes), lookup(key)
    reason = needs_hopper(problem, gpu)
    assert reason is not None and reason.startswith(words)
    with pytest.raises(fk.UnsupportedError, match=re.escape(f"impl='hopper' cannot serve this call: hopper: {words}")):
        select(IMPLS, problem, gpu, "hopper")
    assert select(IMPLS, problem, gpu).name != "hopper"


@pytest.mark.parametrize("key", ["h100", "h100-pcie", "h200"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": "fp16"},
        {"dtype": "fp8", "head_dim": 80, "head_dim_v": 80},
        {"head_dim_v": 256},
        {"head_dim": 512, "head_dim_v": 512},
        {"head_dim_v": 512},
        RAGGED | {"head_dim": 264},
        {"positive_scale": False},
        RAGGED,
        RAGGED | {"page_size": 128},
        RAGGED | {"head_dim": 512, "page_size": 64},
        {"window": (5, 3), "softcap": True, "alibi": True, "sinks": True},
    ],
    ids=str,
)
def test_it_serves_everything_else_on_a_hopper(key: str, changes: dict[str, Any]) -> None:
    problem = replace(PROBLEM, **changes)
    assert needs_hopper(problem, lookup(key)) is None
    assert select(IMPLS, problem, lookup(key)).name == "hopper"


def test_without_a_gpu_it_declines() -> None:
    assert needs_hopper(PROBLEM, None) == "needs a Hopper GPU, the tensors are on cuda"


def test_pages_that_it_declines_go_to_triton() -> None:
    problem = replace(PROBLEM, page_size=16, **RAGGED)
    assert select(IMPLS, problem, lookup("h200")).name == "triton"
    assert select(IMPLS, replace(problem, page_size=64), lookup("a100")).name == "triton"


def test_a_tile_says_whose_it_is() -> None:
    gpu = lookup("h200")
    with fk.use_tile("standard"):
        assert select(IMPLS, PROBLEM, gpu).name == "triton"
    with fk.use_tile(tile=HopperTile(2, 128)):
        assert select(IMPLS, PROBLEM, gpu).name == "hopper"
        with pytest.raises(fk.UnsupportedError, match="use_tile asks for 128x128-s2, which is another kernel's"):
            select(IMPLS, PROBLEM, gpu, "triton")


@pytest.mark.parametrize(("dtype", "late", "most"), [("bf16", 8, 7), ("bf16", -1, 7), ("fp8", 4, 3)])
def test_a_step_of_its_products_has_two_sets_of_weights(dtype: str, late: int, most: int) -> None:
    problem = replace(PROBLEM, head_dim=64, head_dim_v=64, dtype=dtype)
    with pytest.raises(fk.TilingError, match=f"0 to {most} can have one set of P"):
        tiles.choose(problem, 132, HopperTile(2, 128, late=late))
    assert tiles.choose(problem, 132, HopperTile(2, 128, late=most)).variant.tile.name == f"128x128-s2-late{most}"


# What TMA can read


HALF = torch.zeros(2, 6, 4, 24, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (HALF, ""),
        (HALF.transpose(1, 2), ""),
        (HALF[:, 1:5, 2:], ""),
        (HALF[..., :16], ""),
        (HALF[:1, :, :1].as_strided((1, 6, 1, 24), (5, 96, 7, 1)), ""),  # nobody steps over a size of 1
        (HALF[0], ""),
        (HALF[:0], "shape (0, 6, 4, 24) is empty"),
        (HALF[..., 1:], "its address is a multiple of 2 bytes, not of 16"),
        (HALF[..., 4:], "its address is a multiple of 8 bytes, not of 16"),
        (HALF[..., ::2], "its last dimension has stride 2, not 1"),
        (HALF.transpose(2, 3), "its last dimension has stride 24, not 1"),
        (torch.zeros(2, 6, 4, 20, dtype=torch.bfloat16), "its strides (480, 80, 20, 1) are not all multiples of 16"),
        (HALF[:, :, :1].expand(2, 6, 4, 24), "its strides (576, 96, 0, 1) are not all multiples of 16 bytes"),
    ],
    ids=range(13),
)
def test_unaddressable(x: torch.Tensor, words: str) -> None:
    said = unaddressable(x)
    assert said.startswith(words) and bool(said) == bool(words)


# The source of a variant


def chunks(dim: int, dim_v: int = 0, *, fp8: bool = False, **knobs: bool) -> tuple[int, ...]:
    return Variant(dim, dim_v or dim, HopperTile(2, 64, **knobs), fp8=fp8).chunks


@pytest.mark.parametrize(
    ("seq", "dtype", "rows"),
    [
        (1024, "bf16", 256), (640, "fp16", 128), (1152, "bf16", 192), (4096, "bf16", 256), (1024, "fp8", 256),
        (1152, "fp8", 192),
    ],
)  # fmt: skip
def test_a_sequence_is_filled_by_its_tiles(seq: int, dtype: str, rows: int) -> None:
    """Many short sequences: 256 rows at a time would leave 128 of 768 or 1280 empty."""
    problem = replace(PROBLEM, batch=64, seq_q=seq, seq_k=seq, head_dim=64, head_dim_v=64, dtype=dtype)
    tile = tiles.choose(problem, 132).variant.tile
    assert 64 * tile.groups == rows


def test_a_few_long_sequences_keep_the_measured_tile() -> None:
    for causal in (False, True):
        problem = replace(PROBLEM, batch=16, causal=causal)
        assert replace(tiles.choose(problem, 132).variant.tile, cluster=1) == replace(
            tiles.by_dimension(72, 72, causal), cluster=1
        )


MANY = AttentionProblem(batch=4, seq_q=4096, seq_k=4096, heads=16, kv_heads=16, head_dim=128, causal=True)


@pytest.mark.parametrize(
    ("changes", "cluster"),
    [
        ({}, 2), ({"causal": False}, 2), ({"kv_heads": 4}, 2), ({"softcap": True, "alibi": True, "sinks": True}, 2),
        ({"window": (1024, -1)}, 1), ({"batch": 1, "heads": 8, "kv_heads": 8}, 1), ({"seq_q": 4096 + 128}, 2),
        ({"seq_q": 1152, "batch": 16}, 1), ({"varlen": True, "total_q": 16384, "total_k": 16384}, 1),
        ({"seq_q": 16, "batch": 64, "kv_heads": 4}, 1), ({"head_dim": 112, "head_dim_v": 112}, 1),
        ({"head_dim": 144, "head_dim_v": 144}, 1), ({"head_dim": 152, "head_dim_v": 152}, 2),
    ],
    ids=str,
)  # fmt: skip
def test_blocks_share_loads_where_many_dense_tiles_have_no_left_end(changes: dict[str, Any], cluster: int) -> None:
    """And where two tiles side by side fill the sequence as well as one: 1152 rows are 4.5 times 256."""
    assert tiles.choose(replace(MANY, **changes), 132).variant.tile.cluster == cluster


NARROW = replace(MANY, head_dim=48, head_dim_v=48)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "256x64-s4-pingpong-wide_v-late2"), ({"head_dim": 64}, "256x64-s4-wide_v-late3"),
        ({"head_dim_v": 24, "head_dim": 24}, "256x64-s4-wide_v"),
        ({"window": (-1, 100)}, "256x64-s4-pingpong-wide_v-late2"),
        ({"seq_q": 1024, "batch": 16, "causal": False}, "256x64-s4-pingpong-wide_v-late2"),
        ({"seq_q": 1152, "batch": 16, "causal": False}, "192x128-s3-pingpong-wide_v-late7"),
        ({"causal": False}, "192x128-s3-pingpong-wide_v-late7"), ({"head_dim": 72}, "192x96-s4-pingpong-wide_v"),
        ({"causal": False, "head_dim": 32, "head_dim_v": 32}, "256x64-s4-pingpong-wide_v"),
        ({"window": (1024, 0)}, "192x96-s3-pingpong-register-wide_v"),
        ({"batch": 1}, "192x96-s3-pingpong-register-wide_v"),
    ],
    ids=str,
)  # fmt: skip
def test_narrow_heads_have_four_warpgroups_where_256_rows_fill_them(changes: dict[str, Any], name: str) -> None:
    """Under a causal mask always, else where 192 rows would not fill it."""
    assert tiles.choose(replace(NARROW, **changes), 132).variant.tile.name == name


def test_a_ring_that_would_run_dry_under_a_causal_mask_is_refused() -> None:
    short = HopperTile(3, 64, 2)
    assert tiles.choose(replace(MANY, causal=False), 132, short).variant.tile == short
    assert tiles.choose(MANY, 132, short).variant.tile == short  # at most two key tiles to pass over
    with pytest.raises(TilingError, match=r"192x64-s2-cluster2: under a causal mask the ring of K would run dry"):
        tiles.choose(MANY, 132, replace(short, cluster=2))


def test_chunks_are_as_wide_as_fits_exactly() -> None:
    assert chunks(64) == (128, 1, 0, 128, 1)
    assert chunks(72) == (128, 1, 32, 32, 5)
    assert chunks(96) == (128, 1, 64, 64, 3)
    assert chunks(112) == (128, 2, 0, 32, 7)  # 96 bytes are no single chunk: K is padded to 256
    assert chunks(16, 256) == (32, 1, 0, 128, 4)
    assert chunks(48, 32) == (128, 1, 0, 64, 1)  # and here to 128
    assert chunks(32, 48) == (64, 1, 0, 32, 3)
    assert chunks(72, wide_v=True) == (128, 1, 32, 128, 2)
    assert chunks(72, wide_k=True, wide_v=True) == (128, 2, 0, 128, 2)


def test_chunks_of_fp8_have_half_the_bytes_and_rows_of_keys_in_v() -> None:
    assert chunks(16, fp8=True) == (32, 1, 0, 64, 1)
    assert chunks(64, fp8=True) == (64, 1, 0, 64, 1)
    assert chunks(96, fp8=True) == (128, 1, 0, 64, 1)
    assert chunks(144, fp8=True) == (128, 1, 32, 64, 1)
    assert chunks(192, 64, fp8=True, wide_v=True) == (128, 1, 64, 64, 1)
    assert chunks(256, fp8=True) == (128, 2, 0, 64, 1)


@given(st.sampled_from(VARIANTS))
def test_chunks_cover_the_head(one: Variant) -> None:
    k_width, k_chunks, k_rest, v_width, v_chunks = one.chunks
    size = 1 if one.fp8 else 2  # bytes of an element
    v_row = one.tile.block_n if one.fp8 else 2 * one.head_dim_v
    assert {k_width, v_width} <= {32, 64, 128} and k_rest in (0, 32, 64)
    assert size * one.head_dim <= k_width * k_chunks + k_rest < size * one.head_dim + 128
    assert v_row <= v_width * v_chunks < v_row + 128


@pytest.mark.parametrize(
    ("dim", "stages", "chunks"), [(64, 2, 1), (72, 2, 2), (128, 2, 2), (128, 3, 0), (160, 2, 1), (192, 2, 0)]
)
def test_outputs_have_what_is_left_of_shared_memory(dim: int, stages: int, chunks: int) -> None:
    one = Variant(dim, dim, HopperTile(2, 128, stages))
    assert one.out_chunks == chunks
    chunk = 2 * 64 * 128
    assert chunks == -(-dim // 64) or one.shared + chunk > tiles.SHARED_LIMIT


def test_shared_memory_is_the_sum_of_its_parts() -> None:
    one = Variant(64, 64, HopperTile(2, 128, 2))
    q, kv, barriers, mail, notes = 2 * 64 * 128, 2 * 2 * 128 * 128, 8 * (2 * 2 + 4 * 2 + 4), 64, 2 * 16
    out = 2 * 64 * 128
    assert one.shared == q + kv + out + barriers + mail + notes
    fp8 = replace(one, fp8=True)
    assert fp8.shared == q // 2 + kv // 2 + out + barriers + mail + notes
    assert replace(fp8, head_dim_v=128).shared == fp8.shared + 2 * 64 * 128 + out
    assert replace(one, varlen=True).shared == replace(one, pack=2).shared == one.shared - out
    assert one.threads == 384
    assert (one.queries, replace(one, pack=7).queries, replace(one, pack=64).queries) == (128, 18, 2)


def test_config_has_every_constant_once() -> None:
    one = Variant(72, 104, HopperTile(3, 96, 3, pingpong=True), right=True, pack=4)
    lines = source.config(one).splitlines()
    assert lines[0] == "#pragma once"
    for line in (
        "constexpr int D = 72;", "constexpr int DV = 104;", "constexpr int BLOCK_N = 96;", "constexpr int PACK = 4;",
        "constexpr bool RIGHT = true;", "constexpr bool LEFT = false;", "constexpr bool PINGPONG = true;",
        "constexpr int CONSUMER_REGISTERS = 160;", "#define CLUSTERED 0",
        f"constexpr int SHARED_MEMORY = {one.shared};",
    ):  # fmt: skip
        assert lines.count(line) == 1, line
    names = [line.split(" = ")[0] for line in lines]
    assert len(names) == len({*names})


def test_mma_has_the_exact_sizes() -> None:
    text = source.mma(Variant(72, 104, HopperTile(2, 96), fp16=True))
    assert re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\S+)", text) == [
        f"m64n{n}k16.f32.f16.f16" for n in (96, 96, 104)
    ]
    assert "float (&d)[48], u64 a, u64 b, int add" in text and "float (&d)[52], const u32* a, u64 b)" in text
    fp8 = source.mma(Variant(64, 80, HopperTile(2, 128), fp8=True))
    assert re.findall(r"aligned\.(\S+)", fp8) == [f"m64n{n}k32.f32.e4m3.e4m3" for n in (128, 128, 80)]
    assert "bf16" not in text and "n72k16" in source.mma(Variant(64, 72, HopperTile(2, 96)))


def test_every_header_is_sent_and_no_other_is_included() -> None:
    sent = source.headers(VARIANTS[0])
    included = re.findall(r'#include "(.*?)"', "\n".join([source.main_file(), *sent.values()]))
    assert {*included} == {*sent}
    assert "#include <" not in source.main_file() + "".join(sent.values())


# The fixed list is reached: test_hopper.py runs it on a GPU


@pytest.mark.parametrize("variant", VARIANTS, ids=label)
@settings(max_examples=5)
@given(st.data())
def test_a_call_reaches_each_variant(variant: Variant, data: st.DataObject) -> None:
    example = data.draw(examples(variant))
    assert needs_hopper(example.problem(), lookup("h200")) is None
