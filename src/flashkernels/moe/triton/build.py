"""Compiles the kernels of the mixture of experts for a GPU that is not there, as a call of theirs would."""

from __future__ import annotations

from typing import Any

import torch

from flashkernels.hardware import Gpu
from flashkernels.jit.launch import compile_options
from flashkernels.jit.offline import Resources, compile_for
from flashkernels.moe.gemm import Gemm
from flashkernels.moe.problem import PHASES, GemmProblem, RouteProblem
from flashkernels.moe.route import Call
from flashkernels.moe.triton import gemm, route, widen
from flashkernels.moe.triton.early import starts_early
from flashkernels.moe.triton.tiles import GemmTile

NAMES = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32", "fp8": "fp8e4nv", "int8": "i8"}
WEIGHTS = {"fp8": "fp8e4nv", "fp8_block": "fp8e4nv", "int8": "i8", "w8": "i16", "w4": "i16"}
INTEGERS = ("permutation_ptr", "offsets_ptr", "tiles_ptr", "tile_offsets_ptr")


def build_gemm(problem: GemmProblem, tile: GemmTile, gpu: Gpu, interleaved: bool = False, group: int = 0) -> Resources:
    """The forward of a contiguous problem, without bias and row weights, whose sizes are multiples of 16."""
    call = Gemm(problem.gather, problem.activation, interleaved, 1.0, 1.0, problem.weights, group, problem.depth,
                problem.block, "bf16", tile.split > 1, "triton")  # fmt: skip
    x, w = NAMES[problem.dtype], WEIGHTS.get(problem.weights, NAMES[problem.dtype])
    by_tma = tile.tma and gemm.rows_by_tma(problem, tile)
    depth = tile.block_k // PHASES.get(problem.weights, 1)
    scaled = problem.weights in PHASES and tile.swap and tile.block_m >= 64
    box = gemm.weight_box(problem, tile, call, problem.depth)[2]
    types: dict[str, str] = {"x_ptr": f"*{x}", "w_ptr": f"*{w}", "out_ptr": "*fp32" if tile.split > 1 else "*bf16"}
    types |= dict.fromkeys(INTEGERS, "*i32")
    fixed: dict[str, Any] = gemm.constants(problem, tile, call, starts_early(gpu), scaled)
    if by_tma:
        types["x_desc"] = f"tensordesc<{x}[{tile.block_m},{depth}]>"
    if tile.tma:
        types["w_desc"] = f"tensordesc<{w}[{','.join(map(str, box))}]>"
    if problem.weights:
        types["scale_ptr"] = "*bf16" if problem.weights in ("w8", "w4") else "*fp32"
        types |= {"x_scale_ptr": "*fp32"} if problem.weights not in ("w8", "w4") else {}
    for name in gemm.gemm_kernel.arg_names:
        if name in types or name in fixed:
            continue
        if name.endswith(("_ptr", "_desc")):
            fixed[name] = None
        else:
            types[name] = "fp32" if name in ("alpha", "limit") else "i64" if name in WIDE else "i32"
    aligned = {name for name in types if name.endswith("_ptr") or name in ALIGNED}
    options = compile_options(tile.warps, tile.stages, tile.registers)
    return compile_for(gemm.gemm_kernel, types, fixed, aligned, gpu.cc, options)


def build_widen(problem: GemmProblem, gpu: Gpu) -> Resources:
    """The kernel that unpacks words of a problem first."""
    x = NAMES[problem.dtype]
    types = {"w_ptr": "*i16", "scale_ptr": f"*{x}", "out_ptr": f"*{x}", "depth": "i32", "packs": "i32", "groups": "i32",
             "rows": "i64"}  # fmt: skip
    fixed = {"ROWS": widen.ROWS, "FORMAT": problem.weights, "GROUP": problem.group, "EARLY": starts_early(gpu),
             "NATIVE": True}  # fmt: skip
    aligned = {"w_ptr", "scale_ptr", "out_ptr", "depth", "packs", "groups", "rows"}
    return compile_for(widen.widen_kernel, types, fixed, aligned, gpu.cc, compile_options(widen.WARPS, 3, 0))


WIDE = ("stride_x", "stride_we", "stride_wn", "stride_se")
ALIGNED = (*WIDE, "width", "depth", "packed_depth")


def build_route(problem: RouteProblem, gpu: Gpu, call: Call) -> dict[str, Resources]:
    """The kernels of a routing, by name."""
    whole = route.cut(problem.tokens, problem.experts, problem.k, gpu.sms)
    second = route.Finisher(problem, whole, call, torch.device("cpu"), gpu).launch
    fixed = route.constants(problem, whole, call, gpu)
    found = {"choose": _build(route.choose_kernel, fixed, whole.warps, problem, gpu)}
    if second is not None:
        found["place"] = _build(route.place_kernel, second.constants, 8, problem, gpu)
    return found


def _build(kernel: Any, constants: dict[str, Any], warps: int, problem: RouteProblem, gpu: Gpu) -> Resources:
    types: dict[str, str] = {}
    fixed = dict(constants)
    special = {"logits_ptr": f"*{problem.dtype}", "weights_ptr": "*fp32", "stride_t": "i64", "scale": "fp32"}
    for name in kernel.arg_names:
        if name in ("bias_ptr", "used_ptr"):
            fixed[name] = None
        elif name not in fixed:
            types[name] = special.get(name, "*i32" if name.endswith("_ptr") else "i32")
    aligned = {name for name in types if name.endswith("_ptr") or name == "stride_t"}
    return compile_for(kernel, types, fixed, aligned, gpu.cc, compile_options(warps, 3, 0))
