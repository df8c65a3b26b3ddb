"""Sampling and accepting, compiled for GPUs: nothing spills, and logits are read by whole vectors. Needs no GPU."""

from __future__ import annotations

import re
from typing import Any

import pytest

from flashkernels.fused.draws import segment_of
from flashkernels.fused.triton import counts, sampling, speculative
from flashkernels.hardware import lookup
from flashkernels.jit.launch import compile_options
from flashkernels.jit.offline import Resources, compile_for

GPUS = ("a100", "h200", "rtx5090")  # sm_80, 90, 120
each_gpu = pytest.mark.parametrize("gpu", GPUS)
FLOATS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
REGISTERS = 65536  # of a multiprocessor


def compiled(
    kernel: Any, gpu: str, pointers: dict[str, str], constants: dict[str, Any], warps: int, aligned: bool = True
) -> Resources:
    """`pointers` by name, what is not there is None. `aligned`: rows are multiples of 16 apart."""
    types: dict[str, str] = {}
    fixed = dict(constants)
    for name in kernel.arg_names:
        if name.endswith("_ptr"):
            if name in pointers:
                types[name] = f"*{pointers[name]}"
            else:
                fixed[name] = None
        elif name not in fixed:
            wide = name.startswith("stride") or name in ("seed", "offset")
            types[name] = "fp32" if name in FLOATS else "i64" if wide else "i32"
    sixteens = {name for name in types if name.endswith("_ptr") or (aligned and name in ("width", "stride_row"))}
    return compile_for(kernel, types, fixed, sixteens, lookup(gpu).cc, compile_options(warps, 3, 0))


SCANNED = {"scanned_ptr": "fp32"}


@each_gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("tile", [sampling.TILE, sampling.SMALL_TILE])
def test_scan(tile: int, dtype: str, gpu: str) -> None:
    size = segment_of(128_256)
    constants = {"WIDTH": size, "ROWS": tile // size}
    found = compiled(sampling.scan_kernel, gpu, {"logits_ptr": dtype} | SCANNED, constants, sampling.SCAN_WARPS)
    assert found.spills == 0
    each = tile * {"bf16": 2, "fp32": 4}[dtype] // (16 * 32 * sampling.SCAN_WARPS)
    assert len(re.findall(r"LDG\.E\.\S*128", found.sass)) == each


@each_gpu
def test_scan_with_penalties(gpu: str) -> None:
    pointers = {"logits_ptr": "bf16", "counts_ptr": "i16", "repetition_ptr": "fp32"} | SCANNED
    constants = {"WIDTH": 128, "ROWS": sampling.TILE // 128}
    assert compiled(sampling.scan_kernel, gpu, pointers, constants, sampling.SCAN_WARPS, False).spills == 0


@each_gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_settled(dtype: str, gpu: str) -> None:
    """Programs that scan and draw are no fewer on a multiprocessor than half its threads have room for."""
    size = segment_of(128_256)
    constants = {"WIDTH": size, "ROWS": sampling.TILE // size, "SEGMENTS": 1024}
    pointers = {"logits_ptr": dtype, "done_ptr": "i32", "seed_ptr": "i64", "ids_ptr": "i64", "logprobs_ptr": "fp32"}
    found = compiled(sampling.settled_kernel, gpu, pointers | SCANNED, constants, sampling.SCAN_WARPS)
    assert found.spills == 0 and found.registers <= 64
    each = sampling.TILE * {"bf16": 2, "fp32": 4}[dtype] // (16 * 32 * sampling.SCAN_WARPS)
    assert len(re.findall(r"LDG\.E\.\S*128", found.sass)) == each


@each_gpu
def test_settled_by_one_program(gpu: str) -> None:
    """Nothing goes through memory between the scan and the draw."""
    size = segment_of(2048)
    constants = {"WIDTH": size, "ROWS": 2048 // size, "SEGMENTS": 2048 // size}
    pointers = {"logits_ptr": "bf16", "ids_ptr": "i64", "logprobs_ptr": "fp32"}
    found = compiled(sampling.settled_kernel, gpu, pointers, constants, sampling.SCAN_WARPS)
    assert found.spills == 0 and found.count("MEMBAR") == 0 and found.count("STG") <= 4


FINISHED = {"lists_ptr": "i32", "seed_ptr": "i64", "ids_ptr": "i64", "logprobs_ptr": "fp32"}


FINISHES = [*((128_256, 256, 0, gpu) for gpu in GPUS), (262_144, 1024, 20, "h200")]
each_finish = pytest.mark.parametrize(("width", "capacity", "top_n", "gpu"), FINISHES)


def pointers_of(top_n: int) -> dict[str, str]:
    pointers = {"logits_ptr": "bf16"} | SCANNED | FINISHED
    if top_n:
        pointers |= {"top_ids_ptr": "i64", "top_logprobs_ptr": "fp32", "top_k_ptr": "i32", "top_p_ptr": "fp32"}
    return pointers


@each_finish
def test_finish(width: int, capacity: int, top_n: int, gpu: str) -> None:
    """Two programs share a multiprocessor."""
    constants = sampling.finish_constants(width, capacity, top_n)
    found = compiled(sampling.finish_kernel, gpu, pointers_of(top_n), constants, sampling.FINISH_WARPS)
    assert found.spills == 0
    assert 2 * found.registers * 32 * sampling.FINISH_WARPS <= REGISTERS


@each_finish
def test_search(width: int, capacity: int, top_n: int, gpu: str) -> None:
    """Its walks over a row copy ahead."""
    constants = sampling.finish_constants(width, capacity, top_n) | {"WALK": sampling.WALK}
    found = compiled(sampling.search_kernel, gpu, pointers_of(top_n), constants, sampling.SEARCH_WARPS)
    assert found.spills == 0 and found.count("LDGSTS") > 0


@each_gpu
@pytest.mark.parametrize("halves", [True, False])
def test_count(halves: bool, gpu: str) -> None:
    pointers = {"previous_ptr": "i64", "counts_ptr": "i32"}
    assert compiled(counts.count_kernel, gpu, pointers, {"IDS": counts.IDS, "HALVES": halves}, 4).spills == 0


@each_gpu
@pytest.mark.parametrize("drawn", [True, False])
@pytest.mark.parametrize("logits", [True, False])
def test_accept(logits: bool, drawn: bool, gpu: str) -> None:
    pointers = dict.fromkeys(("ids_ptr", "seed_ptr", "counts_ptr", "out_ptr", "last_ptr", "nodes_ptr"), "i64")
    pointers |= {"left_ptr": "fp32", "target_ptr": "bf16", "parents_ptr": "i32"}
    pointers |= (SCANNED if logits else {}) | ({"draft_ptr": "bf16"} if drawn else {})
    constants = speculative.constants(128_256, 15, logits)
    found = compiled(speculative.accept_kernel, gpu, pointers, constants, speculative.WARPS)
    assert found.spills == 0


@each_gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_greedy_accept(dtype: str, gpu: str) -> None:
    pointers = dict.fromkeys(("ids_ptr", "zeros_ptr", "counts_ptr", "out_ptr", "last_ptr", "nodes_ptr"), "i64")
    pointers |= {"target_ptr": dtype, "parents_ptr": "i32"}
    constants = {"NODES": 16, "TILE": sampling.TILE}
    found = compiled(speculative.greedy_kernel, gpu, pointers, constants, speculative.GREEDY_WARPS)
    assert found.spills == 0 and found.registers <= 64
    each = sampling.TILE * {"bf16": 2, "fp32": 4}[dtype] // (16 * 32 * speculative.GREEDY_WARPS)
    assert len(re.findall(r"LDG\.E\.\S*128", found.sass)) == each


@each_gpu
@pytest.mark.parametrize("nodes", [16, 256])
def test_greedy_clears_what_every_warp_has_loaded(nodes: int, gpu: str) -> None:
    """There is a barrier between the loads of what other programs left, and the first store."""
    names = ("ids_ptr", "parents_ptr", "zeros_ptr", "counts_ptr", "out_ptr", "last_ptr", "nodes_ptr")
    pointers, constants = dict.fromkeys(names, "i64") | {"target_ptr": "bf16"}, {"NODES": nodes, "TILE": 4096}
    found = compiled(speculative.greedy_kernel, gpu, pointers, constants, speculative.GREEDY_WARPS)
    memory = [word[:3] for word in re.findall(r"\b(LDG\S*STRONG|STG|BAR)\b", found.sass)]
    loaded = max(i for i, word in enumerate(memory) if word == "LDG")
    assert memory[loaded + 1 : loaded + 3] == ["BAR", "STG"] and found.spills == 0
