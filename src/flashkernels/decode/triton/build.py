"""Compiling the decode kernel for a GPU that is not there."""

from __future__ import annotations

from typing import Any

from flashkernels.decode.problem import DecodeProblem
from flashkernels.decode.triton.decode import constants, decode_kernel
from flashkernels.decode.triton.tiles import DecodeTile, ruled
from flashkernels.formats import FORMATS
from flashkernels.hardware import Gpu
from flashkernels.jit.launch import compile_options
from flashkernels.jit.offline import Resources, compile_for

STORED = {"fp32": "fp32", "fp16": "fp16", "bf16": "bf16", "int8": "i8", "int4": "u8", "fp8": "u8", "fp8_e5m2": "u8"}


def described(form: str, head_dim: int, **changes: Any) -> DecodeProblem:
    """A problem of many sequences over a cache of this format, 32 query heads over 8, pages of 16 keys."""
    f = FORMATS[form]
    dim_v = changes.get("head_dim_v") or head_dim
    usual: dict[str, Any] = {
        "batch": 64, "tokens": 1, "heads": 32, "kv_heads": 8, "context": 4096, "page_size": 16, "format": form,
        "scales": "token" if f.quantised else "", "dtype": form if form in ("fp32", "fp16") else "bf16",
        "row_bits": f.bits(head_dim) + f.bits(dim_v),
    }  # fmt: skip
    return DecodeProblem(head_dim=head_dim, **(usual | changes))


def compile_decode(problem: DecodeProblem, gpu: Gpu, tile: DecodeTile | None = None) -> Resources:
    """Machine code of the decode kernel, as the JIT would make it for contiguous tensors."""
    tile = tile or ruled(problem, gpu)
    form = FORMATS[problem.format]
    width, width_v = form.stored(problem.head_dim), form.stored(problem.head_dim_v)
    strides, strides_v = (
        (problem.page_size * problem.kv_heads * n, problem.kv_heads * n, n)
        for n in (width, width if problem.shared else width_v)
    )
    rows = (problem.page_size * problem.kv_heads, problem.kv_heads, 1) if problem.scales == "token" else (0, 0, 0)
    scales, scales_v = (
        tuple(n * (form.groups(dim) if form.group else 1) for n in rows)
        for dim in (problem.head_dim, problem.head_dim_v)
    )
    fixed = constants(problem, tile, strides, strides_v, scales, scales_v, gpu)
    pointers = {"q_ptr": problem.dtype, "out_ptr": problem.dtype, "table_ptr": "i32", "length_ptr": "i32",
                "part_ptr": "fp32", "state_ptr": "fp32"}  # fmt: skip
    pointers |= dict.fromkeys(("k_ptr", "v_ptr"), "i16" if fixed["PAIRS"] else STORED[problem.format])
    pointers |= dict.fromkeys(("k_scale_ptr", "v_scale_ptr"), "fp16") if form.quantised else {}
    optional = {"lse_ptr": (problem.need_lse, "fp32"), "cu_ptr": (problem.ragged, "i32"),
                "tree_ptr": (problem.tree, "i1"),
                "slopes_ptr": (problem.alibi, "fp32"), "sinks_ptr": (problem.sinks, "fp32")}  # fmt: skip
    pointers |= {name: kind for name, (there, kind) in optional.items() if there}
    types: dict[str, str] = {}
    absent: dict[str, Any] = {}
    for name in decode_kernel.arg_names:
        if name in fixed:
            continue
        if name.endswith("_ptr"):
            if name in pointers:
                types[name] = f"*{pointers[name]}"
            else:
                absent[name] = None
        elif name == "stride_qd":
            absent[name] = 1
        elif name.startswith("stride_"):
            types[name] = "i64"
        else:
            types[name] = "fp32" if name in ("scale", "softcap") else "i32"
    aligned = {name for name in types if name.endswith("_ptr")}
    aligned |= {name for name in types if name.startswith("stride_") and name[7] in "qo"}
    return compile_for(
        decode_kernel, types, absent | fixed, aligned, gpu.cc, compile_options(tile.warps, tile.stages, 0)
    )
