"""The decode and append kernels, compiled for real GPUs: nothing spills while keys are read, shared memory fits, keys
come 16 bytes at a time, and a quantised key costs few instructions. Needs no GPU."""

from __future__ import annotations

import re
from typing import Any

import pytest

from flashkernels.decode.problem import DecodeProblem
from flashkernels.decode.triton.build import compile_decode, described
from flashkernels.decode.triton.combine import combine_kernel, constants as combine_constants
from flashkernels.decode.triton.decode import constants as decode_constants
from flashkernels.decode.triton.tiles import DecodeTile, ruled
from flashkernels.formats import FORMATS
from flashkernels.hardware import lookup
from flashkernels.jit.launch import compile_options
from flashkernels.jit.offline import Resources, compile_for
from flashkernels.kvcache.append import Append
from flashkernels.kvcache.triton import append

from .sass import loops, matrix, spills

GPUS = ("a100", "h200", "rtx5090")  # sm_80, 90, 120
MLA: dict[str, Any] = {"head_dim_v": 512, "heads": 128, "kv_heads": 1, "shared": True, "row_bits": 576 * 16}


def key_loop(found: Resources) -> list[str]:
    """The innermost loop with matrix instructions."""
    return min((body for body in loops(found.sass) if matrix(body)), key=len)


def check(problem: DecodeProblem, gpu: str, tile: DecodeTile | None = None) -> Resources:
    found = compile_decode(problem, lookup(gpu), tile)
    assert found.shared <= lookup(gpu).shared_per_block
    assert not spills(key_loop(found))
    return found


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("form", ["bf16", "fp8", "int8", "int4"])
def test_formats(form: str, gpu: str) -> None:
    if form == "fp8" and not lookup(gpu).has_fp8:
        pytest.skip("declined there")
    found = check(described(form, 128), gpu)
    assert re.search(r"LDGSTS\.E\.BYPASS\.(LTC128B\.)?128", found.sass)


# Lanes times instructions for each number of the cache, on Hopper. Memory at 3.6 TB/s feeds an SM 16 bytes a cycle,
# which leaves 8 for a number of 8 bits; bf16 at 4.4 TB/s leaves 13, INT4 at 2.6 times that speed 5.
@pytest.mark.parametrize(("form", "most"), [("bf16", 4.0), ("fp8", 3.5), ("int8", 4.0), ("int4", 4.2)])
def test_instructions_of_a_number(form: str, most: float) -> None:
    problem = described(form, 128)
    tile = ruled(problem, lookup("h200"))
    instructions = [line for line in key_loop(check(problem, "h200")) if re.search(r"/\*[0-9a-f]{4,}\*/", line)]
    assert len(instructions) * 32 * tile.warps / (tile.block_n * 256) <= most


@pytest.mark.parametrize("dim", [16, 72, 80, 96, 112, 192, 256])
def test_head_dimensions(dim: int) -> None:
    check(described("bf16", dim), "h200")


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": 4, "window": (1024, -1), "softcap": True, "alibi": True, "sinks": True, "need_lse": True},
        {"tokens": 4, "tree": True},
        {"batch_invariant": True, "need_lse": True},
        {"ragged": True, "tokens": 512, "total": 8192},
        {"batch": 1000},
    ],
    ids=str,
)
@pytest.mark.parametrize("form", ["bf16", "int8", "int4"])
def test_features(form: str, changes: dict[str, Any]) -> None:
    found = compile_decode(described(form, 128, **changes), lookup("h200"))
    assert found.shared <= lookup("h200").shared_per_block


@pytest.mark.parametrize("gpu", GPUS)
def test_latent_heads(gpu: str) -> None:
    found = compile_decode(described("bf16", 576, **MLA), lookup(gpu))
    assert found.shared <= lookup(gpu).shared_per_block


def test_one_page_of_each_sequence() -> None:
    check(described("bf16", 128, one_page=True, page_size=4096), "h200")


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("dim", [72, 128, 512])
def test_combine(dim: int, gpu: str) -> None:
    problem = described("bf16", dim, sinks=True, need_lse=True)
    tile = ruled(problem, lookup(gpu))
    fixed = combine_constants(problem, tile, decode_constants(problem, tile, *[(16, 16, 16)] * 4, lookup(gpu)), 4)
    types = {
        "part_ptr": "*fp32",
        "state_ptr": "*fp32",
        "length_ptr": "*i32",
        "sinks_ptr": "*fp32",
        "out_ptr": "*bf16",
        "lse_ptr": "*fp32",
    }
    absent = {"cu_ptr": None}
    types |= {
        name: "i64" if name.startswith("stride") else "i32"
        for name in combine_kernel.arg_names if name not in types and name not in absent and name not in fixed
    }  # fmt: skip
    aligned = {name for name in types if name.endswith("_ptr")}
    assert (
        compile_for(combine_kernel, types, absent | fixed, aligned, lookup(gpu).cc, compile_options(4, 3, 0)).spills
        == 0
    )


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("form", ["bf16", "fp8", "int8", "int4"])
def test_append(form: str, gpu: str) -> None:
    if form == "fp8" and not lookup(gpu).has_fp8:
        pytest.skip("declined there")
    f = FORMATS[form]
    fixed = append.constants(f, 8, 128, 128, False, Append(128, False, "auto"))
    pages = {"int8": "i8"}.get(form, "u8") if f.quantised else form
    pointers = {"k_ptr": "bf16", "v_ptr": "bf16", "k_pages_ptr": pages, "v_pages_ptr": pages, "table_ptr": "i32",
                "length_ptr": "i32", "cos_ptr": "fp32", "sin_ptr": "fp32"}  # fmt: skip
    pointers |= dict.fromkeys(("k_scale_ptr", "v_scale_ptr"), "fp16") if f.quantised else {}
    absent: dict[str, Any] = {}
    types: dict[str, str] = {}
    for name in append.append_kernel.arg_names:
        if name in fixed:
            continue
        if name.endswith("_ptr"):
            if name in pointers:
                types[name] = f"*{pointers[name]}"
            else:
                absent[name] = None
        else:
            types[name] = "i32" if name in ("batch", "heads", "capacity", "page_size") else "i64"
    aligned = {name for name in types if name.endswith("_ptr") or name.startswith("stride")}
    options = compile_options(append.warps(fixed), 3, 0)
    assert compile_for(append.append_kernel, types, absent | fixed, aligned, lookup(gpu).cc, options).spills == 0
