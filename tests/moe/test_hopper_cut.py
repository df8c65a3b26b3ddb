"""How the Hopper grouped GEMM cuts rows into tiles: gemm_cut.cuh compiled for this machine, against plain counting."""

from __future__ import annotations

import bisect
import ctypes
import itertools
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from flashkernels.hardware import lookup
from flashkernels.moe.hopper import gemm_source as source, gemm_tiles
from flashkernels.moe.hopper.gemm_tiles import GRANULE, HopperGemmTile
from flashkernels.moe.problem import GemmProblem
from flashkernels.tiling import TilingError

PRELUDE = """
#define DEVICE static inline
constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
"""
PROGRAM = """
#include "gemm_cut.cuh"
extern "C" {
int granules(int rows, int granule) { return granules_of(rows, granule); }
int tiles(int granules, int most) { return tiles_of(granules, most); }
void piece_of(int granules, int tiles, int i, int* to) {
  Piece p = piece(granules, tiles, i);
  to[0] = p.first, to[1] = p.count;
}
void place_of(int index, int rows, int features, int together, int* to) {
  Place p = place(index, rows, features, together);
  to[0] = p.row, to[1] = p.feature;
}
float cost(int tiles, int granules, int granule, int features, int blocks, float fixed) {
  return rounds_cost(tiles, granules, granule, features, blocks, fixed);
}
}
"""


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Any:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    folder: Path = tmp_path_factory.mktemp("cut")
    for name, text in (
        ("prelude.cuh", PRELUDE),
        ("gemm_cut.cuh", source.files()["gemm_cut.cuh"]),
        ("cut.cpp", PROGRAM),
    ):
        (folder / name).write_text(text)
    library = folder / "cut.so"
    subprocess.run([compiler, "-std=c++17", "-shared", "-fPIC", "-O1", "-o", library, folder / "cut.cpp"], check=True)
    found = ctypes.CDLL(str(library))
    found.cost.restype = ctypes.c_float
    return found


def two(function: Any, *arguments: int) -> tuple[int, int]:
    to = (ctypes.c_int * 2)()
    function(*arguments, to)
    return to[0], to[1]


@given(rows=st.integers(1, 5000), most=st.integers(6, 24))
def test_an_expert_is_cut_evenly_and_completely(cut: Any, rows: int, most: int) -> None:
    granules = cut.granules(rows, GRANULE)
    tiles = cut.tiles(granules, most)
    pieces = [two(cut.piece_of, granules, tiles, i) for i in range(tiles)]
    assert [first for first, _ in pieces] == [0, *itertools.accumulate(n for _, n in pieces)][:-1]
    assert sum(n for _, n in pieces) * GRANULE - rows in range(GRANULE)
    counts = [n for _, n in pieces]
    assert min(counts) >= 1 and max(counts) <= min(most, min(counts) + 1)
    assert tiles == -(-granules // most)
    assert all(first * GRANULE < rows for first, _ in pieces)  # no tile without a row


@given(
    counts=st.lists(st.integers(0, 700), min_size=1, max_size=12), features=st.integers(1, 9),
    together=st.integers(1, 9), most=st.sampled_from([6, 12, 24]),
)  # fmt: skip
def test_every_row_meets_every_feature_once(
    cut: Any, counts: list[int], features: int, together: int, most: int
) -> None:
    """The walk of gemm_schedule.cuh, `decode`, in Python."""
    of_expert = [cut.tiles(cut.granules(n, GRANULE), most) for n in counts]
    before = [0, *itertools.accumulate(of_expert)]
    met: dict[tuple[int, int, int], int] = {}
    for t in range(before[-1] * features):
        expert = bisect.bisect_right(before[:-1], t // features) - 1
        assert counts[expert] > 0
        row, feature = two(cut.place_of, t - before[expert] * features, of_expert[expert], features, together)
        first, n = two(cut.piece_of, cut.granules(counts[expert], GRANULE), of_expert[expert], row)
        rows = min(counts[expert] - first * GRANULE, n * GRANULE)
        met[expert, row, feature] = met.get((expert, row, feature), 0) + rows
    for expert, n in enumerate(counts):
        for feature in range(features):
            assert sum(met.get((expert, i, feature), 0) for i in range(of_expert[expert])) == n
    assert len(met) == before[-1] * features


def test_the_cost_counts_whole_rounds(cut: Any) -> None:
    assert cut.cost(132, 132 * 16, 8, 1, 132, ctypes.c_float(48.0)) == 128 + 48
    assert cut.cost(133, 133 * 16, 8, 1, 132, ctypes.c_float(48.0)) == 2 * (128 + 48)


def test_mixtral_at_1024_tokens_wastes_two_percent(cut: Any) -> None:
    """256 ± 14 rows an expert: tiles of 128 rows would be 20 % padding."""
    for rows in (242, 250, 256, 257, 270):
        assert cut.granules(rows, GRANULE) * GRANULE / rows < 1.03 and cut.tiles(cut.granules(rows, GRANULE), 24) == 2


# What is served, and by which tile


def problem(**changes: Any) -> GemmProblem:
    fields: dict[str, Any] = {"rows": 2048, "experts": 8, "n": 28672, "depth": 4096, "dtype": "bf16", "device": "cuda"}
    return GemmProblem(**fields | {"activation": "swiglu", "gather": True} | changes)


def test_large_loads_are_served() -> None:
    assert gemm_tiles.refuses(problem(), lookup("h200")) is None
    assert gemm_tiles.defers(problem(), lookup("h200")) is None


@pytest.mark.parametrize("weights", ["fp8", "int8"])
@pytest.mark.parametrize("out", ["", "bf16", "fp16"])
def test_weights_in_8_bits_with_scales_of_rows_are_served(weights: str, out: str) -> None:
    assert gemm_tiles.refuses(problem(dtype=weights, weights=weights, out=out), lookup("h200")) is None
    tile = gemm_tiles.choose(problem())
    assert gemm_tiles.choose(problem(dtype=weights, weights=weights)) == replace(tile, cluster=1)  # gains nothing there


def test_tiles_by_rows_and_features() -> None:
    wide, few = HopperGemmTile(192, 4, cluster=2), HopperGemmTile(96, 5, fused=True)
    assert gemm_tiles.choose(problem()) == wide and gemm_tiles.choose(problem(n=5760)) == wide
    assert gemm_tiles.choose(problem(n=768)) == HopperGemmTile(192, 4)  # half of every second cluster would be idle
    assert gemm_tiles.choose(problem(rows=8192, experts=128)) == few and gemm_tiles.choose(problem(), few) == few
    assert "gathered" in gemm_tiles.reason(problem(), few)
    assert "gathered" not in gemm_tiles.reason(problem(gather=False), few)
    assert "two blocks" in gemm_tiles.reason(problem(), wide)


@pytest.mark.parametrize(
    ("changes", "gpu", "word"),
    [
        ({"device": "cpu"}, None, "needs a Hopper GPU"),
        ({}, "a100", "compute capability 9.0"),
        ({}, "rtx5090", "compute capability 9.0"),
        ({"dtype": "fp32"}, "h200", "fp32"),
        ({"weights": "w4"}, "h200", "w4"),
        ({"out": "fp32"}, "h200", "writes bf16"),
        ({"dtype": "fp8", "weights": "fp8", "out": "fp32"}, "h200", "writes fp16 and bf16"),
        ({"dtype": "fp8", "weights": "fp8_block"}, "h200", "scales that change along the depth"),
        ({"dtype": "int8", "weights": "fp8"}, "h200", "no kernel for fp8"),
        ({"dtype": "bf16", "weights": "fp8"}, "h200", "no kernel for fp8"),
        ({"dtype": "fp8", "weights": "fp8", "depth": 72}, "h200", "depth=72 is not a multiple of 16"),
        ({"activation": "geglu"}, "h200", "geglu"),
        ({"experts": 513}, "h200", "513 experts"),
        ({"depth": 100}, "h200", "depth=100"),
        ({"n": 24}, "h200", "width=12"),
        ({"addressable": False}, "h200", "16 bytes"),
    ],
    ids=lambda value: str(value),
)
def test_what_is_not_served_has_a_reason(changes: dict[str, Any], gpu: str | None, word: str) -> None:
    assert word in str(gemm_tiles.refuses(problem(**changes), lookup(gpu) if gpu else None))


def test_few_rows_are_left_to_triton() -> None:
    assert "16 rows an expert" in str(gemm_tiles.defers(problem(rows=128), lookup("h200")))


@pytest.mark.parametrize(
    "arguments", [{"rows": 128, "stages": 4}, {"rows": 192, "stages": 5}, {"rows": 192, "stages": 4, "cluster": 4},
                  {"rows": 96, "stages": 5, "cluster": 2, "fused": True}], ids=str,
)  # fmt: skip
def test_tiles_that_do_not_exist(arguments: dict[str, int]) -> None:
    with pytest.raises(TilingError):
        HopperGemmTile(**arguments)
