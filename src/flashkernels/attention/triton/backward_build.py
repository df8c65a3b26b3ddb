"""Compiling the backward's kernels for a GPU that is not there."""

from __future__ import annotations

from typing import Any

from flashkernels.attention.problem import AttentionProblem
from flashkernels.attention.triton.backward import (
    constants,
    dkdv_constants,
    rows_by_box,
    rows_constants,
    sums_constants,
)
from flashkernels.attention.triton.backward_keys import dkdv_kernel
from flashkernels.attention.triton.backward_mask import Form, dmask_kernel
from flashkernels.attention.triton.backward_queries import dq_kernel
from flashkernels.attention.triton.backward_rows import rows_kernel
from flashkernels.attention.triton.backward_sums import sums_kernel
from flashkernels.hardware import Gpu
from flashkernels.jit.launch import compile_options
from flashkernels.jit.offline import Resources, compile_for
from flashkernels.tiling import Tile

KERNELS = {
    "dkdv": dkdv_kernel, "adding": dkdv_kernel, "dk": dkdv_kernel, "dv": dkdv_kernel, "dq": dq_kernel,
    "dmask": dmask_kernel,
}  # fmt: skip
FP32 = (
    "lse_ptr", "level_ptr", "delta_ptr", "norm_ptr", "dlse_ptr", "dslope_ptr", "slopes_ptr", "sinks_ptr", "sums_ptr",
    "dcolumn_ptr",
)  # fmt: skip
LAST_STRIDES = ("stride_od", "stride_gd", "stride_qd", "stride_kd", "stride_vd", "stride_mn")


def compile_pass(name: str, tile: Tile, problem: AttentionProblem, gpu: Gpu, dmask: Form = "none") -> Resources:
    """Machine code of a pass (a field of `BackwardTiles`, "adding" for a `dkdv` that makes all gradients, "dk" for one
    without dV) on a tile, as the JIT would make it for contiguous inputs; of a mask's gradient the form is named."""
    options = compile_options(tile.warps, tile.stages, tile.registers)
    fixed = (dkdv_constants if KERNELS[name] is dkdv_kernel else constants)(problem, tile)
    boxes = {
        f"{side}_desc{i}": f"tensordesc<{problem.dtype}[1,{tile.block_m},1,{part}]>"
        for side, parts in (("q", tile.parts), ("do", tile.parts_v))
        for i, part in enumerate(parts)
        if tile.tma
    }
    if rows_by_box(problem, tile):
        boxes |= dict.fromkeys(("level_desc", "delta_desc"), f"tensordesc<fp32[{tile.block_m}]>")
    left_out = {"dk": "dv_ptr", "dv": "dk_ptr"}.get(name)
    return _compile(KERNELS[name], problem, gpu, fixed, options, boxes, name in ("adding", "dk"), dmask, left_out)


def compile_rows(problem: AttentionProblem, gpu: Gpu) -> Resources:
    """Machine code of the kernel that makes delta and the level, and clears sums."""
    return _compile(rows_kernel, problem, gpu, rows_constants(problem), compile_options(4, 1, 0), {}, True)


def compile_sums(tile: Tile, problem: AttentionProblem, gpu: Gpu) -> Resources:
    """Machine code of the kernel that turns sums into dQ."""
    return _compile(sums_kernel, problem, gpu, sums_constants(problem, tile), compile_options(8, 1, 0), {}, True)


def _compile(
    kernel: Any, problem: AttentionProblem, gpu: Gpu, fixed: dict[str, Any], options: dict[str, Any],
    boxes: dict[str, str], adds: bool, dmask: Form = "none", left_out: str | None = None,
) -> Resources:  # fmt: skip
    present = {
        "mask_ptr": problem.mask is not None, "slopes_ptr": problem.alibi, "dslope_ptr": problem.alibi,
        "cu_q_ptr": problem.varlen, "cu_k_ptr": problem.varlen, "seed_ptr": problem.dropout_p > 0,
        "sinks_ptr": problem.sinks, "norm_ptr": problem.element_bytes > 2,
        "dlse_ptr": problem.alibi or kernel is rows_kernel, "sums_ptr": adds,
        "dmask_ptr": dmask in ("scores", "shared"), "dcolumn_ptr": dmask == "columns",
    }  # fmt: skip
    types: dict[str, str] = {}
    absent: dict[str, object] = {}
    for name in kernel.arg_names:
        if name in fixed:
            continue
        if "_desc" in name:
            (types if name in boxes else absent)[name] = boxes.get(name)
        elif name == left_out or not present.get(name, True):
            absent[name] = None
        elif name in LAST_STRIDES or (name == "stride_dm" and not present["dmask_ptr"]):
            absent[name] = 1
        elif name == "seed_ptr":
            types[name] = "*i64"
        elif name == "stride_dm":
            types[name] = "i32"
        elif name in ("mask_ptr", "dmask_ptr"):
            types[name] = "*i1" if problem.mask == "bool" else "*fp32"
        elif name.endswith("_ptr"):
            types[name] = "*fp32" if name in FP32 else "*i32" if name.startswith("cu_") else f"*{problem.dtype}"
        elif name.startswith("stride_"):
            types[name] = "i64"
        else:
            types[name] = "fp32" if name in ("scale", "softcap", "grad_scale", "keep_scale") else "i32"
    aligned = {name for name in types if name.endswith("_ptr") or name.startswith("stride_")}
    return compile_for(kernel, types, absent | fixed, aligned, gpu.cc, options)
