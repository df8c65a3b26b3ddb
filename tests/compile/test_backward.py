"""The backward's tiles, compiled for real GPUs: they fit, and their inner loops hardly spill. Needs no GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from flashkernels.attention.problem import AttentionProblem, BackwardProblem
from flashkernels.attention.triton import backward_tiles
from flashkernels.attention.triton.backward_build import compile_pass, compile_rows, compile_sums
from flashkernels.attention.triton.backward_mask import Form
from flashkernels.attention.triton.build import LARGE
from flashkernels.hardware import Gpu, lookup
from flashkernels.jit.offline import Resources
from flashkernels.tiling import Tile

from .sass import loops, matrix, spills, waits

GPUS = ("a100", "h200", "rtx5090")  # sm_80, 90, 120
MATRIX = {8: "HMMA", 9: "HGMMA", 12: "HMMA"}
EVERYTHING = {"causal": True, "window": (1024, 0), "softcap": True, "alibi": True, "sinks": True}
RARE = 16  # registers stored or loaded in a pass of the interior loop, where dK and dV are wide
ADDING = {96: RARE, 256: 2 * RARE}  # the same by columns, where dQ is in registers too
BYTES = 1280  # of local memory a thread, most of it for what is used once a head

each_gpu = pytest.mark.parametrize("gpu", [lookup(key) for key in GPUS], ids=GPUS)
each_pass = pytest.mark.parametrize("name", ["dkdv", "dq"])


def chosen(name: str, problem: AttentionProblem, gpu: Gpu) -> Tile:
    """Of "dkdv" or "dq", or of "adding" or "dk", which is the first where it adds up dQ, or of "dv" or "dmask"."""
    if name == "dmask":
        return backward_tiles.for_a_mask(problem, gpu)
    adds = name in ("adding", "dk", "dv")
    tiles = backward_tiles.in_one_pass(problem, gpu) if adds else backward_tiles.in_two_passes(problem, gpu)
    tile = {"dq": tiles.dq, "dv": tiles.dv}.get(name, tiles.dkdv)
    assert tile is not None
    return tile


def compiled(name: str, gpu: Gpu, head_dim: int, dmask: Form = "none", **features: Any) -> Resources:
    problem = replace(LARGE, **{"head_dim": head_dim, "head_dim_v": head_dim} | features)
    tile = chosen(name, problem, gpu)
    made = compile_pass(name, tile, problem, gpu, dmask)
    assert made.shared <= backward_tiles.shared_bytes(name, tile, problem) <= gpu.shared_per_block, tile.name
    assert made.spills <= BYTES, tile.name
    return made


def interior(sass: str) -> list[str]:
    """The loop without hiding: the shortest of those with matrix instructions."""
    return min((body for body in loops(sass) if matrix(body)), key=len)


def adding(head_dim: int) -> str:
    """The pass that adds up dQ: of all gradients, or where rows are wide without dV."""
    return "adding" if head_dim <= backward_tiles.ADDING[-1].width else "dk"


def most_spills(head_dim: int) -> int:
    """Of the interior loop that adds up dQ."""
    return next(most for width, most in ADDING.items() if head_dim <= width)


@each_gpu
@each_pass
@pytest.mark.parametrize(
    ("head_dim", "features"),
    [
        pytest.param(64, {"causal": True}, id="64-causal"),
        pytest.param(72, EVERYTHING | {"mask": "float"}, id="72-everything"),
        pytest.param(256, {"causal": True}, id="256-causal"),
        pytest.param(64, {"causal": True, "dropout_p": 0.1}, id="64-dropout"),
        pytest.param(72, {"causal": True, "dropout_p": 0.1}, id="72-dropout"),
    ],
)
def test_a_tile_fits_and_hardly_spills(
    gpu: Gpu, name: str, head_dim: int, features: dict[str, Any], record_property: Any
) -> None:
    made = compiled(name, gpu, head_dim, **features)
    loop = interior(made.sass)
    record_property("spills", f"{made.spills} bytes, {len(spills(loop))} instructions in the interior loop")
    assert all(MATRIX[gpu.capability[0]] in line for line in matrix(loop))
    assert len(spills(loop)) <= (0 if head_dim <= 128 else RARE)


MASKED = {"causal": True, "mask": "float"}


@each_gpu
@pytest.mark.parametrize(
    ("head_dim", "features"),
    [
        pytest.param(64, MASKED, id="64-causal"),
        pytest.param(72, EVERYTHING | MASKED, id="72-everything"),
        pytest.param(128, MASKED | {"dropout_p": 0.1}, id="128-dropout"),
    ],
)
def test_the_pass_for_a_mask_that_heads_share_hardly_spills(gpu: Gpu, head_dim: int, features: dict[str, Any]) -> None:
    made = compiled("dmask", gpu, head_dim, "shared", **features)
    loop = interior(made.sass)
    assert all(MATRIX[gpu.capability[0]] in line for line in matrix(loop))
    assert not spills(loop)
    assert not any(" LDG.E.128" in line for line in loop)  # operands come asynchronously, and the mask before the loop
    assert "STG.E.128" in made.sass and " RED" not in made.sass and " ATOM" not in made.sass


@each_gpu
@pytest.mark.parametrize("form", ["columns", "scores"])
def test_the_gradient_of_a_mask_beside_dk_and_dv_does_not_spill(gpu: Gpu, form: Form) -> None:
    made = compiled("dkdv", gpu, 128, form, **MASKED)
    assert not spills(interior(made.sass))
    stored = sum("STG.E.128" in line for line in interior(made.sass))
    tile = chosen("dkdv", replace(LARGE, head_dim=128, head_dim_v=128, mask="float"), gpu)
    # four numbers at a time, or none in the loop
    assert stored == (tile.block_m * tile.block_n // (32 * tile.warps) // 4 if form == "scores" else 0)
    assert " RED" not in made.sass and " ATOM" not in made.sass


@each_pass
@pytest.mark.parametrize("head_dim", [64, 128])
def test_sm_100_runs_its_matrix_instruction_without_spills(name: str, head_dim: int) -> None:
    gpu, problem = lookup("b200"), replace(LARGE, head_dim=head_dim, head_dim_v=head_dim, causal=True)
    made = compile_pass(name, chosen(name, problem, gpu), problem, gpu)
    loop = interior(made.sass)
    assert all("UTCHMMA" in line for line in matrix(loop)) and not spills(loop)
    assert made.shared <= gpu.shared_per_block and made.spills <= BYTES


@each_pass
def test_dropout_runs_the_generator_once_for_four_weights(name: str) -> None:
    """And what it keeps is in the thread that has the score: nothing is exchanged, by shared memory or shuffles."""
    loop = interior(compiled(name, lookup("h200"), 128, dropout_p=0.1).sass)
    plain = interior(compiled(name, lookup("h200"), 128).sass)

    def count(body: list[str], *names: str) -> int:
        return sum(any(f" {op}" in line for op in names) for line in body)

    tile = chosen(name, replace(LARGE, head_dim=128, head_dim_v=128), lookup("h200"))
    runs = tile.block_m * tile.block_n // (32 * tile.warps) // 4
    assert count(loop, "STS", "SHFL", "BAR") == count(plain, "STS", "SHFL", "BAR")
    # ten rounds of two exclusive or's, of which the first have constant parts
    assert count(loop, "LOP3") - count(plain, "LOP3") <= 20 * runs + 64


@pytest.mark.parametrize(
    ("head_dim", "features"),
    [
        pytest.param(64, {}, id="64"),
        pytest.param(72, {}, id="72"),
        pytest.param(72, {"causal": True}, id="72-causal"),
        pytest.param(80, {}, id="80"),
        pytest.param(96, {}, id="96"),
        pytest.param(96, {"causal": True}, id="96-causal"),
        pytest.param(96, {"dtype": "fp16"}, id="96-fp16"),
        pytest.param(96, EVERYTHING, id="96-everything"),
        pytest.param(128, {"causal": True}, id="128-causal"),
        pytest.param(128, {"causal": True, "varlen": True, "total_q": 9000, "total_k": 9000}, id="128-ragged"),
        pytest.param(64, {"causal": True, "dropout_p": 0.1}, id="64-dropout"),
        pytest.param(160, {}, id="160"),
        pytest.param(160, {"dtype": "fp16", "causal": True}, id="160-fp16"),
        pytest.param(160, EVERYTHING, id="160-everything"),
        pytest.param(192, {}, id="192"),
        pytest.param(192, {"causal": True}, id="192-causal"),
        pytest.param(192, {"causal": True, "dropout_p": 0.1}, id="192-dropout"),
        pytest.param(200, {}, id="200"),
        pytest.param(256, {"causal": True}, id="256-causal"),
        pytest.param(256, {"dtype": "fp16", "alibi": True}, id="256-fp16-alibi"),
        pytest.param(256, EVERYTHING, id="256-everything"),
    ],
)
def test_additions_of_dq_are_of_four_numbers_and_bypass_shared_memory(
    head_dim: int, features: dict[str, Any], record_property: Any
) -> None:
    name = adding(head_dim)
    made = compiled(name, lookup("h200"), head_dim, **features)
    loop = interior(made.sass)
    record_property("spills", f"{made.spills} bytes, {len(spills(loop))} instructions in the interior loop")
    tile = chosen(name, replace(LARGE, **{"head_dim": head_dim, "head_dim_v": head_dim} | features), lookup("h200"))
    assert len(spills(loop)) <= most_spills(head_dim)
    # out of registers, ptxas waits for every instruction
    assert waits(loop) <= 6 < len(matrix(loop))
    added = [line for line in loop if " RED" in line or " ATOM" in line]
    squares = tile.block_m // 16 * -(-head_dim // 8)
    assert all("ADD.F32x4" in line for line in added) and squares <= tile.warps * len(added) <= 1.5 * squares
    packed = not {"softcap", "dropout_p", "dtype"} & {*features}
    assert any("HMUL2.BF16" in line for line in loop) == packed
    # dS alone, 8 numbers at a time; where two warpgroups share 64 keys, once more for the half that the other made
    shared = 2 if tile.block_n < 16 * tile.warps else 1
    assert sum(" STS" in line for line in loop) == shared * tile.block_m * tile.block_n // (32 * tile.warps) // 8


@each_pass
def test_a_sample_of_other_dimensions(name: str) -> None:
    compiled(name, lookup("h200"), 128, dtype="fp32")
    compiled(name, lookup("a100"), 176, head_dim_v=128, varlen=True, total_q=9000, total_k=9000)
    compiled(name, lookup("rtx5090"), 512)


@each_gpu
def test_the_row_kernel_does_not_spill(gpu: Gpu) -> None:
    assert compile_rows(replace(LARGE, head_dim_v=512), gpu).spills == 0


@pytest.mark.parametrize("head_dim", [72, 128, 256])
def test_the_kernel_of_sums_does_not_spill(head_dim: int) -> None:
    problem = replace(LARGE, head_dim=head_dim, head_dim_v=head_dim)
    assert compile_sums(chosen(adding(head_dim), problem, lookup("h200")), problem, lookup("h200")).spills == 0


@pytest.mark.slow
@each_gpu
@each_pass
def test_every_dimension_fits(name: str, gpu: Gpu) -> None:
    for head_dim in (*range(8, 257, 8), 272, 384, 448, 512):
        made = compiled(name, gpu, head_dim, causal=True)
        assert len(spills(interior(made.sass))) <= RARE, head_dim


@pytest.mark.slow
@each_gpu
def test_every_dimension_of_the_pass_for_a_mask_fits(gpu: Gpu) -> None:
    for head_dim in (*range(16, 257, 24), 320, 512):
        made = compiled("dmask", gpu, head_dim, "shared", **MASKED)
        # over 256 there is one stage, whose loads go through registers
        assert head_dim > 256 or len(spills(interior(made.sass))) <= (0 if head_dim <= 128 else RARE), head_dim


@pytest.mark.parametrize("head_dim", [160, 192, 256])
@pytest.mark.parametrize("features", [{}, {"causal": True}, EVERYTHING], ids=["full", "causal", "everything"])
def test_a_pass_for_dv_alone_hardly_spills(head_dim: int, features: dict[str, Any]) -> None:
    loop = interior(compiled("dv", lookup("h200"), head_dim, **features).sass)
    parts = backward_tiles.in_two(head_dim, 32)
    assert waits(loop) == len(parts) and len(spills(loop)) <= 3  # for the scores of each part, and nothing else


@pytest.mark.slow
def test_every_dimension_that_adds_fits() -> None:
    for head_dim in range(8, 257, 8):
        for name in ("adding",) if adding(head_dim) == "adding" else ("dk", "dv"):
            made = compiled(name, lookup("h200"), head_dim, causal=True)
            assert len(spills(interior(made.sass))) <= most_spills(head_dim), head_dim


@given(
    st.integers(1, 512), st.integers(1, 512), st.sampled_from(["fp16", "bf16", "fp32"]),
    st.sampled_from([None, "bool", "float"]), st.sampled_from([*GPUS, "rtx4090", "b200"]),
)  # fmt: skip
def test_every_choice_fits(head_dim: int, head_dim_v: int, dtype: str, mask: str | None, key: str) -> None:
    gpu, problem = lookup(key), replace(LARGE, head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype, mask=mask)
    if dtype == "fp32" and head_dim + head_dim_v > 512:
        return  # not on every GPU
    wanted = ("q", "k", "v", "mask") if mask == "float" else ("q", "k", "v")
    for deterministic in (False, True):
        tiles = backward_tiles.choose(BackwardProblem(problem, wanted, deterministic=deterministic), gpu)
        assert (tiles.dmask is None) == (mask != "float")
        first = "dkdv" if tiles.dq else "dk" if tiles.dv else "adding"
        for name, tile in ((first, tiles.dkdv), ("dq", tiles.dq), ("dv", tiles.dv), ("dmask", tiles.dmask)):
            if tile is not None:
                assert backward_tiles.shared_bytes(name, tile, problem) <= gpu.shared_per_block
                assert sum(tile.parts) >= head_dim and sum(tile.parts_v) >= head_dim_v
