"""The backward's tiles, compiled for real GPUs: they fit, and their inner loops hardly spill. Needs no GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from flashkernels.attention.triton import backward_tiles
from flashkernels.attention.triton.backward_build import compile_pass, compile_rows
from flashkernels.attention.triton.build import LARGE
from flashkernels.hardware import Gpu, lookup
from flashkernels.jit.offline import Resources

from .sass import loops, matrix, spills

GPUS = ("a100", "h200", "rtx5090")  # sm_80, 90, 120
MATRIX = {8: "HMMA", 9: "HGMMA", 12: "HMMA"}
EVERYTHING = {"causal": True, "window": (1024, 0), "softcap": True, "alibi": True, "sinks": True}
RARE = 16  # registers stored or loaded in a pass of the interior loop, where dK and dV are wide
BYTES = 1024  # of local memory a thread, most of it for what is used once a head

each_gpu = pytest.mark.parametrize("gpu", [lookup(key) for key in GPUS], ids=GPUS)
each_pass = pytest.mark.parametrize("name", ["dkdv", "dq"])


def compiled(name: str, gpu: Gpu, head_dim: int, **features: Any) -> Resources:
    problem = replace(LARGE, **{"head_dim": head_dim, "head_dim_v": head_dim} | features)
    tile = getattr(backward_tiles.choose(problem, gpu), name)
    made = compile_pass(name, tile, problem, gpu)
    assert made.shared <= backward_tiles.shared_bytes(name, tile, problem) <= gpu.shared_per_block, tile.name
    assert made.spills <= BYTES, tile.name
    return made


def interior(sass: str) -> list[str]:
    """The loop without hiding: the shortest of those with matrix instructions."""
    return min((body for body in loops(sass) if matrix(body)), key=len)


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


@each_pass
def test_dropout_runs_the_generator_once_for_four_weights(name: str) -> None:
    """And what it keeps is in the thread that has the score: nothing is exchanged, by shared memory or shuffles."""
    loop = interior(compiled(name, lookup("h200"), 128, dropout_p=0.1).sass)
    plain = interior(compiled(name, lookup("h200"), 128).sass)

    def count(body: list[str], *names: str) -> int:
        return sum(any(f" {op}" in line for op in names) for line in body)

    tile = getattr(backward_tiles.choose(replace(LARGE, head_dim=128, head_dim_v=128), lookup("h200")), name)
    runs = tile.block_m * tile.block_n // (32 * tile.warps) // 4
    assert count(loop, "STS", "SHFL", "BAR") == count(plain, "STS", "SHFL", "BAR")
    # ten rounds of two exclusive or's, of which the first have constant parts
    assert count(loop, "LOP3") - count(plain, "LOP3") <= 20 * runs + 64


@each_pass
def test_a_sample_of_other_dimensions(name: str) -> None:
    compiled(name, lookup("h200"), 128, dtype="fp32")
    compiled(name, lookup("a100"), 176, head_dim_v=128, varlen=True, total_q=9000, total_k=9000)
    compiled(name, lookup("rtx5090"), 512)


@each_gpu
def test_the_row_kernel_does_not_spill(gpu: Gpu) -> None:
    assert compile_rows(replace(LARGE, head_dim_v=512), gpu).spills == 0


@pytest.mark.slow
@each_gpu
@each_pass
def test_every_dimension_fits(name: str, gpu: Gpu) -> None:
    for head_dim in (*range(8, 257, 8), 272, 384, 448, 512):
        made = compiled(name, gpu, head_dim, causal=True)
        assert len(spills(interior(made.sass))) <= RARE, head_dim


@given(
    st.integers(1, 512), st.integers(1, 512), st.sampled_from(["fp16", "bf16", "fp32"]),
    st.sampled_from([None, "bool", "float"]), st.sampled_from([*GPUS, "rtx4090", "b200"]),
)  # fmt: skip
def test_every_choice_fits(head_dim: int, head_dim_v: int, dtype: str, mask: str | None, key: str) -> None:
    gpu, problem = lookup(key), replace(LARGE, head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype, mask=mask)
    if dtype == "fp32" and head_dim + head_dim_v > 512:
        return  # not on every GPU
    for name, tile in backward_tiles.choose(problem, gpu)._asdict().items():
        assert backward_tiles.shared_bytes(name, tile, problem) <= gpu.shared_per_block
        assert sum(tile.parts) >= head_dim and sum(tile.parts_v) >= head_dim_v
