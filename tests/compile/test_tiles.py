"""The tiles that the engine returns, compiled for real GPUs: they fit, they do not spill where it counts, and they use
the matrix and copy instructions of their architecture. Needs no GPU, only Triton's own compiler."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from flashkernels.attention.problem import AttentionProblem
from flashkernels.attention.triton import tiles
from flashkernels.attention.triton.build import LARGE, compile_tile, every_tile
from flashkernels.hardware import Gpu, lookup
from flashkernels.jit.offline import Resources
from flashkernels.tiling import Tile, decomposed

from .sass import key_loops, matrix, spills, waits

GPUS = ("a100", "rtx4090", "h200", "b200", "rtx5090")  # sm_80, 89, 90, 100, 120
MATRIX = {8: "HMMA", 9: "HGMMA", 10: "UTCHMMA", 12: "HMMA"}
EVERYTHING = {"causal": True, "window": (1024, 0), "softcap": True, "alibi": True, "sinks": True}
CAUSAL = {"causal": True}
RULED = (40, 48, 56, 64, 72, 80, 88, 96, 128, 144, 160, 192, 256)

each_gpu = pytest.mark.parametrize("gpu", [lookup(key) for key in GPUS], ids=GPUS)
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "33-causal": (33, CAUSAL),
    "64": (64, {}),
    "72-causal": (72, CAUSAL),
    "72-104": (72, {"head_dim_v": 104}),
    "72-dropout": (72, CAUSAL | {"dropout_p": 0.1}),
    "72-everything": (72, EVERYTHING | {"mask": "float"}),
    "80-bool": (80, {"mask": "bool"}),
    "97": (97, {}),
    "128-everything-but-mask": (128, EVERYTHING),
    "128-varlen": (128, CAUSAL | {"varlen": True, "total_q": 9000, "total_k": 9000}),
    "128-pages": (128, CAUSAL | {"varlen": True, "total_q": 9000, "total_k": 9000, "page_size": 16}),
    "128-fp32": (128, {"dtype": "fp32"}),
    "192-128-causal": (192, CAUSAL | {"head_dim_v": 128}),
    "255-causal": (255, CAUSAL),
    "512": (512, {}),
}
EVERYWHERE = ("72-dropout", "72-everything", "80-bool", "128-varlen", "128-pages", "128-fp32")  # alone of their kind


def calls() -> Iterator[Any]:
    """All on Hopper; those that differ in head dimensions by halves on the other architectures, the rest if slow."""
    others = [name for name in CASES if name not in EVERYWHERE]
    halves = {"a100": 0, "rtx4090": 1, "b200": 0, "rtx5090": 1}  # with TMA both halves, without both
    for name, (head_dim, features) in CASES.items():
        for key in GPUS:
            taken = key == "h200" or name in EVERYWHERE or others.index(name) % 2 == halves[key]
            marks = () if taken else pytest.mark.slow
            yield pytest.param(lookup(key), head_dim, features, id=f"{name}-{key}", marks=marks)


def problem_of(head_dim: int, **features: Any) -> AttentionProblem:
    return replace(LARGE, **{"head_dim": head_dim, "head_dim_v": head_dim} | features)


def chosen(problem: AttentionProblem, gpu: Gpu) -> Tile:
    """The tile for contiguous tensors, whose rows TMA can read if they are multiples of 16 bytes."""
    row_bytes = [dim * problem.element_bytes for dim in (problem.head_dim, problem.head_dim_v)]
    return tiles.choose(problem, gpu, tma=not problem.page_size and all(size % 16 == 0 for size in row_bytes)).tile


def check(tile: Tile, problem: AttentionProblem, gpu: Gpu) -> Resources:
    """Compiles a tile and checks what holds for each one."""
    made = compile_tile(tile, problem, gpu)
    assert made.shared <= tiles.shared_bytes(tile, problem) <= gpu.shared_per_block
    assert made.registers <= (tile.registers or 255)
    assert made.tensor_columns <= tiles.TENSOR_COLUMNS
    if problem.element_bytes == 2:
        loops = key_loops(made.sass)
        # masked blocks and interior, and all blocks again where sums overflow; under a mask tensor there is no interior
        # early scores have one more, of a single block, which may be unrolled
        assert len(loops) - (1 if problem.mask else 3 if tile.lazy else 2) in (0, tile.early)
        # tcgen05 takes 64 rows or more
        unit = "HMMA" if gpu.capability[0] == 10 and tile.block_m < 64 else MATRIX[gpu.capability[0]]
        assert all(unit in line for loop in loops for line in matrix(loop))
        assert [line.strip() for loop in loops for line in spills(loop)] == []
        assert (made.count("UTMALDG") > 0) == tile.tma
    return made


@pytest.mark.parametrize(("gpu", "head_dim", "features"), [*calls()])
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
    made = check(tile, problem, gpu)
    assert made.spills == 0
    if head_dim != 128:  # there two blocks a multiprocessor, with products one by one, beat one with products in flight
        assert waits(key_loops(made.sass)[-2 if tile.lazy else -1]) == len(tile.parts) - tile.early


WINDOW = CAUSAL | {"window": (1024, 0), "sinks": True}


@pytest.mark.parametrize(
    ("head_dim", "features"),
    [
        pytest.param(64, WINDOW, id="64-window"),
        pytest.param(64, {"head_dim_v": 96}, id="64-96"),
        pytest.param(80, WINDOW, id="80-window"),
        pytest.param(96, CAUSAL | {"varlen": True, "total_q": 9000, "total_k": 9000}, id="96-varlen"),
        pytest.param(96, WINDOW, id="96-window"),
        pytest.param(96, CAUSAL | {"dtype": "fp16"}, id="96-fp16"),
        pytest.param(104, CAUSAL, id="104-causal"),
        pytest.param(120, CAUSAL, id="120-causal"),
        pytest.param(128, WINDOW, id="128-window"),
        pytest.param(160, WINDOW | {"head_dim_v": 128}, id="160-128-window"),
    ],
)
def test_the_measured_tiles_of_hopper_keep_features_in_registers(head_dim: int, features: dict[str, Any]) -> None:
    gpu, problem = lookup("h200"), problem_of(head_dim, **features)
    check(chosen(problem, gpu), problem, gpu)


def held(head_dim: int, blocks: tuple[int, int, int], cap: int = 0, **how: bool) -> Any:
    """A tile of two stages and its options, for a head dimension that it exactly covers."""
    parts = parts_v = decomposed(head_dim)
    if how.get("early") and len(parts) == 1:
        parts = (parts[0] // 2,) * 2
    tile = Tile("exact", *blocks[:2], parts, parts_v, blocks[2], 2, tma=True, registers=cap, **how)
    return pytest.param(head_dim, tile, id=f"{head_dim}-{tile.name}")


@pytest.mark.parametrize(
    ("head_dim", "tile"),
    [
        held(64, (64, 128, 4), 168, lazy=True),
        held(64, (128, 64, 8), 128, lazy=True, early=True),
        held(80, (64, 64, 4), 168, lazy=True, early=True),
        held(128, (128, 128, 8), lazy=True, early=True),
    ],
)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_a_tile_with_options_takes_effect_on_hopper(head_dim: int, tile: Tile, causal: bool) -> None:
    problem = problem_of(head_dim, causal=causal)
    made = check(tile, problem, lookup("h200"))
    assert made.spills == 0
    interior = key_loops(made.sass)[-2]
    # one wait for the scores of a part, none for the part that was early; more would mean that products run one by one
    assert waits(interior) == len(tile.parts) - tile.early
    assert not [line for line in interior if "FMNMX" in line or "SHFL" in line]  # no maximum, nothing between lanes


@pytest.mark.parametrize("gpu", [lookup(key) for key in GPUS if lookup(key).has_tma], ids=lambda gpu: gpu.key)
def test_a_tile_with_options_compiles_wherever_there_is_tma(gpu: Gpu) -> None:
    tile = Tile("exact", 64, 32, (64, 16), (64, 16), 4, 2, tma=True, lazy=True, early=True)
    assert compile_tile(tile, problem_of(80), gpu).shared <= gpu.shared_per_block


@pytest.mark.parametrize("gpu", [lookup(key) for key in GPUS], ids=GPUS)
def test_a_lazy_maximum_compiles_everywhere(gpu: Gpu) -> None:
    tile = Tile("exact", 64, 32, (64, 16), (64, 16), 4, 2, tma=False, lazy=True)
    assert compile_tile(tile, problem_of(80, causal=True), gpu).shared <= gpu.shared_per_block


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
