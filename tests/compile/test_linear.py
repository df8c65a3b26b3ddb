"""The linear layer's and the loss's kernels, compiled for real GPUs: nothing spills, tensor cores and TMA are used.
Needs no GPU."""

from __future__ import annotations

import re
from typing import Any

import pytest

from flashkernels.fused.cross_entropy import Loss
from flashkernels.fused.linear import Linear
from flashkernels.fused.problem import LinearProblem
from flashkernels.fused.triton import cross_entropy, linear, linear_tiles as tiles
from flashkernels.fused.triton.linear_tiles import LinearTile
from flashkernels.hardware import lookup
from flashkernels.jit.launch import compile_options
from flashkernels.jit.offline import Resources, compile_for

from .sass import spills

GPUS = ("a100", "h200", "rtx5090")  # sm_80, 90, 120
each_gpu = pytest.mark.parametrize("gpu", GPUS)


def most_spills(gpu: str) -> int:
    """None on Hopper; elsewhere ptxas gives up a few registers for one more block on a multiprocessor."""
    return 0 if gpu == "h200" else 8


def compiled(problem: LinearProblem, gpu: str, interleaved: bool = False, tile: LinearTile | None = None) -> Resources:
    """As the JIT would for contiguous tensors with sizes that are multiples of 16, with a bias."""
    call = Linear(problem.activation, interleaved, problem.normed, 1e-6, False, problem.saved, "triton")
    tile = tile or tiles.choose(problem, lookup(gpu), True)
    dtype = problem.dtype
    types = dict.fromkeys(("x_ptr", "w_ptr", "bias_ptr", "out_ptr"), f"*{dtype}") | {"eps": "fp32"}
    types |= {"norm_ptr": f"*{dtype}", "rstd_ptr": "*fp32"} if problem.normed else {}
    types |= {"pre_ptr": f"*{dtype}"} if problem.saved else {}
    if tile.tma:
        box = linear.weight_box(problem, tile, call, problem.depth)[2]
        types["x_desc"] = f"tensordesc<{dtype}[{tile.block_m},{tile.block_k}]>"
        types["w_desc"] = f"tensordesc<{dtype}[{','.join(map(str, box))}]>"
        if not tile.swap:
            types["out_desc"] = f"tensordesc<{dtype}[{tile.block_m},{tiles.stored_columns(tile, problem)}]>"
    fixed: dict[str, Any] = linear.constants(problem, tile, call, tile.persistent and tile.tma)
    for name in linear.linear_kernel.arg_names:
        if name.endswith(("_ptr", "_desc")) and name not in types:
            fixed[name] = None
        elif name not in types and name not in fixed:
            types[name] = "i64" if name.startswith("stride") else "i32"
    aligned = {name for name in types if name.endswith("_ptr") or name in ("width", "depth", "stride_x", "stride_w")}
    options = compile_options(tile.warps, tile.stages, 0)
    found = compile_for(linear.linear_kernel, types, fixed, aligned, lookup(gpu).cc, options)
    assert found.shared <= lookup(gpu).shared_per_block
    assert len(spills(found.sass.splitlines())) <= most_spills(gpu)
    return found


@each_gpu
@pytest.mark.parametrize("rows", [16, 64, 4096])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_linear(activation: str, rows: int, gpu: str) -> None:
    found = compiled(LinearProblem(rows, 28672, 4096, "bf16", "cuda", activation), gpu)
    assert ("HGMMA" if gpu == "h200" else "HMMA") in found.sass
    assert ("UTMALDG" in found.sass) == (gpu != "a100")
    assert ("UTMASTG" in found.sass) == (gpu != "a100" and rows > 64)


@pytest.mark.parametrize("gpu", ["a100", "h200"])
@pytest.mark.parametrize("activation", ["gelu_tanh", "swiglu"])
@pytest.mark.parametrize(("rows", "n", "depth"), [(1000, 3072, 1024), (4096, 28672, 4096)])
def test_kept_for_gradients(rows: int, n: int, depth: int, activation: str, gpu: str) -> None:
    """The pre-activation takes shared memory of its own."""
    compiled(LinearProblem(rows, n, depth, "bf16", "cuda", activation, saved=True), gpu)


@each_gpu
@pytest.mark.parametrize("rows", [16, 4096])
def test_folded_norm(rows: int, gpu: str) -> None:
    found = compiled(LinearProblem(rows, 28672, 4096, "bf16", "cuda", "swiglu", normed=True, saved=True), gpu)
    assert ("HGMMA" if gpu == "h200" else "HMMA") in found.sass


@pytest.mark.parametrize("rows", [16, 4096])
def test_interleaved(rows: int) -> None:
    found = compiled(LinearProblem(rows, 28672, 4096, "bf16", "cuda", "swiglu"), "h200", interleaved=True)
    assert "UTMALDG" in found.sass


@each_gpu
def test_fp32_stays_fp32(gpu: str) -> None:
    found = compiled(LinearProblem(4096, 14336, 4096, "fp32", "cuda", "gelu"), gpu)
    assert "HMMA" not in found.sass


def compiled_loss(gpu: str, vocab: int, loss: Loss, final: bool, grads: bool, dtype: str = "bf16") -> Resources:
    block, warps = cross_entropy.blocks(vocab)
    fixed: dict[str, Any] = cross_entropy.constants(block, loss, final) | {"inner": 1}
    types = {"z_ptr": f"*{dtype}", "target_ptr": "*i64"} | dict.fromkeys(("smoothing", "z_weight", "cap"), "fp32")
    types |= {"lse_ptr": "*fp32"} if final or not grads else {}
    types |= {} if final else {"loss_ptr": "*fp32"}
    types |= {"grad_ptr": f"*{dtype}", "scale_ptr": "*fp32"} if grads else {}
    for name in cross_entropy.loss_kernel.arg_names:
        if name.endswith("_ptr") and name not in types:
            fixed[name] = None
        elif name not in types and name not in fixed:
            types[name] = "i32" if name == "width" else "i64"
    aligned = {name for name in types if name.endswith("_ptr") or name in ("width", "outer_stride", "inner_stride")}
    options = compile_options(warps, 3, 0)
    return compile_for(cross_entropy.loss_kernel, types, fixed, aligned, lookup(gpu).cc, options)


@each_gpu
@pytest.mark.parametrize(("final", "grads"), [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize(("smoothing", "cap"), [(0.0, 0.0), (0.1, 30.0)])
def test_loss(smoothing: float, cap: float, final: bool, grads: bool, gpu: str) -> None:
    """Lanes of eight logits: rows are read and written 16 bytes at a time, and sums of lanes stay in their thread."""
    found = compiled_loss(gpu, 128256, Loss(-100, smoothing, 1e-4, cap, "triton"), final, grads)
    assert spills(found.sass.splitlines()) == []
    assert re.search(r"LDG\.E\.\S*128", found.sass)
    assert bool(re.search(r"STG\.E\.\S*128", found.sass)) == grads
