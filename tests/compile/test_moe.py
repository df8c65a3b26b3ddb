"""The kernels of the mixture of experts, compiled for real GPUs: nothing spills where it matters, tensor cores and TMA
are used. Needs no GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flashkernels.aot import blank, experts as ahead
from flashkernels.hardware import lookup
from flashkernels.jit.launch import compile_options
from flashkernels.jit.offline import Resources, compile_for
from flashkernels.moe.plan import block_rows, plan_of, sizes
from flashkernels.moe.problem import PHASES, GemmProblem, RouteProblem
from flashkernels.moe.route import Call
from flashkernels.moe.triton import backward, gemm as kernels, tiles
from flashkernels.moe.triton.build import build_gemm, build_route, build_widen

from .sass import loops, spills

GPUS = ("a100", "h200", "rtx5090")  # sm_80, 90, 120
each_gpu = pytest.mark.parametrize("gpu", GPUS)


def most_spills(gpu: str) -> int:
    """None on Hopper; elsewhere ptxas gives up a few registers for one more block on a multiprocessor."""
    return 0 if gpu == "h200" else 8


@each_gpu
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("tokens", "experts", "k"), [(32768, 64, 2), (32768, 128, 8), (128, 128, 8), (1, 128, 8)])
def test_routing_does_not_spill(tokens: int, experts: int, k: int, dtype: str, gpu: str) -> None:
    problem = RouteProblem(tokens, experts, k, dtype, "cuda")
    call = Call(k, False, True, 1, 1, True, 1.0, 0, experts, 16, "triton")
    found = build_route(problem, lookup(gpu), call)
    assert set(found) == ({"choose"} if tokens * k <= 1024 else {"choose", "place"})
    assert all(len(spills(kernel.sass.splitlines())) <= most_spills(gpu) for kernel in found.values())
    if gpu == "h200" and len(found) == 2:  # the second kernel waits for the first on the device
        assert found["place"].count("ACQBULK") == 1


def gemm(
    gpu: str, block: int, activation: str, dtype: str = "bf16", weights: str = "", interleaved: bool = False
) -> Resources:
    shape = (28672, 4096) if activation != "none" else (4096, 14336)
    group = 128 if weights in ("w8", "w4") else 0
    problem = GemmProblem(4096, 8, *shape, dtype, "cuda", weights, activation, activation != "none", block, group)
    tile = tiles.choose(problem, lookup(gpu), True, splittable=activation == "none")
    found = build_gemm(problem, tile, lookup(gpu), interleaved, group)
    assert found.shared <= lookup(gpu).shared_per_block
    assert len(spills(found.sass.splitlines())) <= most_spills(gpu)
    return found


@each_gpu
@pytest.mark.parametrize("block", [16, 64, 128])
@pytest.mark.parametrize("activation", ["none", "swiglu"])
def test_gemm(block: int, activation: str, gpu: str) -> None:
    found = gemm(gpu, block, activation)
    assert ("HGMMA" if gpu == "h200" else "HMMA") in found.sass
    assert ("UTMALDG" in found.sass) == (gpu != "a100")


def test_interleaved_halves_stay_in_their_threads() -> None:
    """The activation pairs registers of one thread: an exchange through shared memory would show as stores to it."""
    halves, pairs = (gemm("h200", 128, "swiglu", interleaved=interleaved) for interleaved in (False, True))
    plain = gemm("h200", 128, "none")
    stores = [found.sass.count("STS") for found in (halves, pairs, plain)]
    assert max(stores[:2]) <= stores[2]


@pytest.mark.parametrize("weights", ["fp8", "fp8_block", "int8", "w8", "w4"])
@pytest.mark.parametrize("activation", ["none", "swiglu"])
def test_formats_in_decode(weights: str, activation: str) -> None:
    dtype = {"fp8": "fp8", "fp8_block": "fp8", "int8": "int8"}.get(weights, "bf16")
    found = gemm("h200", 16, activation, dtype, weights)
    unit = {"fp8": "QGMMA", "int8": "IGMMA"}.get(dtype, "HGMMA")
    assert unit in found.sass and "UTMALDG" in found.sass


@pytest.mark.parametrize("activation", ["none", "swiglu"])
@pytest.mark.parametrize(("weights", "block", "most"), [("w4", 16, 2.5), ("w4", 32, 3.2), ("w8", 16, 3.2)])
def test_words_become_numbers_in_few_instructions(weights: str, block: int, most: float, activation: str) -> None:
    """Instructions of the loop for each weight: 2 are as many as memory gives time for, 4.5 were half of its speed."""
    loop = product_loop(gemm("h200", block, activation, weights=weights))
    of_thread = 128 * 64 * PHASES[weights] / (32 * (4 if block == 16 else 8))
    assert len(loop) / of_thread < most
    assert sum(bool(re.search(r"\b(PRMT|I2F)\b", line)) for line in loop) <= 8  # they are not what unpacks


@pytest.mark.parametrize("activation", ["none", "swiglu"])
@pytest.mark.parametrize(("weights", "group"), [("w4", 128), ("w8", 64)])
@pytest.mark.parametrize(("block", "most"), [(16, 168), (32, 128)])
def test_scales_of_two_groups_are_loaded_a_step_ahead(
    block: int, most: int, weights: str, group: int, activation: str
) -> None:
    """A thread loads those of its rows, 16 bits each, no more. The load is behind what uses its register: with a move
    of what it brings, or with two of them packed, the wait for it would be in the step that asks. Three programs of 16
    rows share a multiprocessor, two of 32."""
    shape = (28672, 4096) if activation != "none" else (4096, 14336)
    problem = GemmProblem(128, 8, *shape, "bf16", "cuda", weights, activation, activation != "none", block, group)
    tile = tiles.choose(problem, lookup("h200"), True, splittable=activation == "none")
    assert tile.paired
    found = build_gemm(problem, tile, lookup("h200"), group=group)
    assert not spills(found.sass.splitlines()) and found.registers <= most
    loop = product_loop(found)
    loads = [re.search(r"LDG\.E (R\d+),", line) for line in loop]
    at = {match[1]: i for i, match in enumerate(loads) if match}
    assert len(at) == (1 if tile.warps == 4 else 2) and not any("LDG.E.U16" in line for line in loop)
    for register, i in at.items():
        readers = [line for line in loop[i + 1 :] if re.search(rf", {register}\b", line)]
        assert not readers


def test_scales_in_pairs_are_for_what_was_timed() -> None:
    """Words in tiles of 16 and 32 rows, two groups a step, on GPUs with wgmma."""

    def paired(gpu: str = "h200", block: int = 16, weights: str = "w4", group: int = 128, depth: int = 2048) -> bool:
        problem = GemmProblem(128, 8, 4096, depth, "bf16", "cuda", weights, block=block, group=group)
        return tiles.choose(problem, lookup(gpu), True).paired

    assert paired() and paired(block=32) and paired(weights="w8", group=64)
    assert not any((paired(block=64), paired(group=64), paired(weights="w8"), paired(depth=1920), paired("a100")))


@pytest.mark.parametrize("tokens", [16, 64])
def test_scales_are_in_pairs_ahead_of_time_too(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is built from tensors without memory has the constants of a launch with quantised weights."""

    def made(empty: Callable[..., Tensor]) -> list[Any]:
        found: list[Any] = []

        class Recorder:
            def __init__(self, kernel: Any, fixed: Any, options: Any, device: Any) -> None:
                self.options = options
                found.append((fixed, options))

            def __call__(self, *_: Any) -> None:
                pass

        monkeypatch.setattr(kernels, "Launcher", Recorder)
        monkeypatch.setattr(ahead, "empty", empty)
        layer = ahead.Layer(ahead.Experts(tokens, 512, 256, 8, 2, weights="w4"), lookup("h200"))
        block = block_rows(tokens * 2, 8)
        plan = plan_of([empty(*s, dtype=torch.int32) for s in sizes(tokens, 2, 8, block).values()], block)
        h = layer.product(layer.x, layer.w_up, plan, True, "swiglu", False)
        layer.product(h, layer.w_down, plan, False, "none", True)
        return found

    def there(*shape: int, dtype: Any = "fp32") -> Tensor:
        return torch.zeros(shape, dtype=blank.DTYPES.get(dtype, dtype))

    launched = made(there)
    assert made(blank.empty) == launched and [fixed["PAIRED"] for fixed, _ in launched] == [True, True]


@pytest.mark.parametrize("activation", ["none", "swiglu"])
@pytest.mark.parametrize("weights", ["w8", "w4"])
def test_words_in_large_tiles(weights: str, activation: str) -> None:
    """The last product of a step goes on while the words of the next become numbers."""
    loop = product_loop(gemm("h200", 128, activation, weights=weights))
    waits = [line for line in loop if "WARPGROUP.DEPBAR" in line]
    assert len(waits) < PHASES[weights]


def product_loop(found: Resources) -> list[str]:
    """The innermost."""
    return min((loop for loop in loops(found.sass) if any("HGMMA" in line for line in loop)), key=len)


@each_gpu
@pytest.mark.parametrize("block", [16, 128])
def test_words_on_every_gpu(block: int, gpu: str) -> None:
    assert ("HGMMA" if gpu == "h200" else "HMMA") in gemm(gpu, block, "swiglu", weights="w4").sass


@each_gpu
@pytest.mark.parametrize("weights", ["w8", "w4"])
def test_unpacking_moves_whole_vectors(weights: str, gpu: str) -> None:
    problem = GemmProblem(8192, 8, 28672, 4096, "bf16", "cuda", weights, "swiglu", True, 128, 128)
    found = build_widen(problem, lookup(gpu))
    assert not spills(found.sass.splitlines())
    assert "LDG.E.128" in found.sass and "STG.E.128" in found.sass


@pytest.mark.parametrize("weights", ["fp8", "int8"])
def test_formats_in_large_tiles(weights: str) -> None:
    found = gemm("h200", 128, "swiglu", weights, weights)
    assert {"fp8": "QGMMA", "int8": "IGMMA"}[weights] in found.sass


@each_gpu
def test_gradients(gpu: str) -> None:
    options = compile_options(8, 3, 0)
    tall = 128 if gpu == "h200" else 64
    kernels = {
        backward.dx_kernel: {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64, "GROUP_M": 8, "EVEN": True},
        backward.dw_kernel: {"BLOCK_M": 64, "BLOCK_N": tall, "BLOCK_K": 128, "GROUP_N": 8, "GATHER": True},
        backward.clear_kernel: {"ROWS": 16, "BLOCK": 256},
    }
    for kernel, constants in kernels.items():
        types = {}
        for name in kernel.arg_names:
            if name in ("grad_ptr", "w_ptr", "x_ptr", "out_ptr"):
                types[name] = "*bf16"
            elif name not in constants:
                types[name] = "*i32" if name.endswith("_ptr") else "i64" if name.startswith("stride") else "i32"
        aligned = {n for n in types if n.endswith("_ptr") or n.startswith("stride") or n in ("width", "depth")}
        found = compile_for(kernel, types, constants, aligned, lookup(gpu).cc, options)
        assert len(spills(found.sass.splitlines())) <= most_spills(gpu)
        assert found.shared <= lookup(gpu).shared_per_block
