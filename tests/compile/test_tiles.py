"""The tiles that the engine returns, compiled for real GPUs: they fit, they do not spill where it counts, and they use
the matrix and copy instructions of their architecture. Needs no GPU, only Triton's own compiler."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flashkernels.attention.problem import AttentionProblem
from flashkernels.attention.triton import tiles
from flashkernels.attention.triton.build import LARGE, compile_tile, every_tile
from flashkernels.hardware import Gpu, lookup
from flashkernels.jit.offline import Resources
from flashkernels.tiling import Tile

from .sass import key_loops, matrix, spills

GPUS = ("a100", "rtx4090", "h200", "b200", "rtx5090")  # sm_80, 89, 90, 100, 120
MATRIX = {8: "HMMA", 9: "HGMMA", 10: "UTCHMMA", 12: "HMMA"}
EVERYTHING = {"causal": True, "window": (1024, 0), "softcap": True, "alibi": True, "sinks": True}
CAUSAL = {"causal": True}
RULED = (48, 64, 72, 80, 96, 128, 160, 192, 256)

each_gpu = pytest.mark.parametrize("gpu", [lookup(key) for key in GPUS], ids=GPUS)
each_case = pytest.mark.parametrize(
    ("head_dim", "features"),
    [
        pytest.param(33, CAUSAL, id="33-causal"),
        pytest.param(64, {}, id="64"),
        pytest.param(72, CAUSAL, id="72-causal"),
        pytest.param(72, {"head_dim_v": 104}, id="72-104"),
        pytest.param(72, CAUSAL | {"dropout_p": 0.1}, id="72-dropout"),
        pytest.param(72, EVERYTHING | {"mask": "float"}, id="72-everything"),
        pytest.param(80, {"mask": "bool"}, id="80-bool"),
        pytest.param(97, {}, id="97"),
        pytest.param(128, EVERYTHING, id="128-everything-but-mask"),
        pytest.param(128, CAUSAL | {"varlen": True, "total_q": 9000, "total_k": 9000}, id="128-varlen"),
        pytest.param(128, {"dtype": "fp32"}, id="128-fp32"),
        pytest.param(192, CAUSAL | {"head_dim_v": 128}, id="192-128-causal"),
        pytest.param(255, CAUSAL, id="255-causal"),
        pytest.param(512, {}, id="512"),
    ],
)


def problem_of(head_dim: int, **features: Any) -> AttentionProblem:
    return replace(LARGE, **{"head_dim": head_dim, "head_dim_v": head_dim} | features)


def chosen(problem: AttentionProblem, gpu: Gpu) -> Tile:
    """The tile for contiguous tensors, whose rows TMA can read if they are multiples of 16 bytes."""
    row_bytes = [dim * problem.element_bytes for dim in (problem.head_dim, problem.head_dim_v)]
    return tiles.choose(problem, gpu, tma=all(size % 16 == 0 for size in row_bytes)).tile


def check(tile: Tile, problem: AttentionProblem, gpu: Gpu) -> Resources:
    """Compiles a tile and checks what holds for each one."""
    made = compile_tile(tile, problem, gpu)
    assert made.shared <= tiles.shared_bytes(tile, problem) <= gpu.shared_per_block
    assert made.registers <= (tile.registers or 255)
    assert made.tensor_columns <= tiles.TENSOR_COLUMNS
    if problem.element_bytes == 2:
        loops = key_loops(made.sass)
        # masked blocks and interior; under a mask tensor there is no interior
        assert len(loops) == (1 if problem.mask else 2)
        # tcgen05 takes 64 rows or more
        unit = "HMMA" if gpu.capability[0] == 10 and tile.block_m < 64 else MATRIX[gpu.capability[0]]
        assert all(unit in line for loop in loops for line in matrix(loop))
        assert [line.strip() for loop in loops for line in spills(loop)] == []
        assert (made.count("UTMALDG") > 0) == tile.tma
    return made


@each_gpu
@each_case
def test_a_chosen_tile_fits_and_does_not_spill_in_its_loops(gpu: Gpu, head_dim: int, features: dict[str, Any]) -> None:
    problem = problem_of(head_dim, **features)
    check(chosen(problem, gpu), problem, gpu)


@pytest.mark.parametrize("head_dim", RULED)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_the_measured_tiles_of_hopper_do_not_spill_at_all(head_dim: int, causal: bool) -> None:
    gpu, problem = lookup("h200"), problem_of(head_dim, causal=causal)
    tile = chosen(problem, gpu)
    assert tiles.ruled(tile.strategy, problem, gpu, tma=True) is not None
    assert tile.tma
    assert check(tile, problem, gpu).spills == 0


@each_gpu
@pytest.mark.parametrize("head_dim", [24, 304])
def test_a_sample_of_every_tile_fits(gpu: Gpu, head_dim: int) -> None:
    listed = list(every_tile(gpu, range(head_dim, head_dim + 1)))
    tile, problem = listed[head_dim % len(listed)]
    assert compile_tile(tile, problem, gpu).shared <= tiles.shared_bytes(tile, problem) <= gpu.shared_per_block


@pytest.mark.slow
def test_every_tile_of_the_smallest_gpu_fits() -> None:
    gpu = lookup("rtx5090")
    for tile, problem in every_tile(gpu):
        made = compile_tile(tile, problem, gpu)
        assert made.shared <= tiles.shared_bytes(tile, problem) <= gpu.shared_per_block, tile.name
