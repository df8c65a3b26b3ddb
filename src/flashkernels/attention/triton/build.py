"""The finite set of tiles the engine can return, and compiling any of them for a GPU that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from flashkernels.attention.problem import AttentionProblem
from flashkernels.attention.triton import tiles
from flashkernels.attention.triton.forward import constants, forward_kernel
from flashkernels.hardware import Gpu
from flashkernels.jit.launch import compile_options
from flashkernels.jit.offline import Resources, compile_for
from flashkernels.tiling import Tile

LARGE = AttentionProblem(batch=4, seq_q=4096, seq_k=4096, heads=16, kv_heads=16, head_dim=64)
SMALL = replace(LARGE, batch=1, seq_q=256, seq_k=256, heads=1, kv_heads=1)
FEATURES: tuple[dict[str, Any], ...] = (
    {}, {"causal": True}, {"causal": True, "window": (1024, 0), "softcap": True, "alibi": True, "sinks": True},
    {"mask": "bool"}, {"mask": "float"}, {"mask": "float", "causal": True, "window": (1024, 0)},
)  # fmt: skip


def every_tile(gpu: Gpu, dims: range = range(1, tiles.LARGEST_DIM + 1)) -> Iterator[tuple[Tile, AttentionProblem]]:
    """Every tile that `tiles.choose` returns on a GPU when D_v = D, each with one problem that it is returned for.

    D_v != D brings no new need: a tile's shared memory and registers grow with each part, and `choose` checks both.
    """
    seen: set[tuple[Tile, str, str | None, bool]] = set()
    for head_dim in dims:
        for dtype in ("bf16", "fp32"):
            for size in (LARGE, SMALL):
                for features in FEATURES:
                    for tma in (True, False) if gpu.has_tma else (False,):
                        problem = replace(size, head_dim=head_dim, head_dim_v=head_dim, dtype=dtype, **features)
                        if tma and head_dim * problem.element_bytes % 16:
                            continue  # rows that TMA cannot address
                        tile = tiles.choose(problem, gpu, tma).tile
                        key = (tile, dtype, problem.mask, problem.softcap)
                        if key not in seen:
                            seen.add(key)
                            yield tile, problem


def compile_tile(tile: Tile, problem: AttentionProblem, gpu: Gpu) -> Resources:
    """Machine code of the forward kernel on this tile, as the JIT would make it for contiguous inputs."""
    types: dict[str, str] = {}
    absent: dict[str, object] = {}

    def argument(name: str, kind: str, present: bool = True) -> None:
        if present:
            types[name] = kind
        else:
            absent[name] = None

    for name in ("q_ptr", "k_ptr", "v_ptr", "o_ptr"):
        argument(name, f"*{problem.dtype}")
    argument("lse_ptr", "*fp32")
    for side, parts in (("k", tile.parts), ("v", tile.parts_v)):
        for i in range(3):
            part = parts[i] if i < len(parts) else 0
            kind = f"tensordesc<{problem.dtype}[1,{tile.block_n},1,{part}]>"
            argument(f"{side}_desc{i}", kind, tile.tma and part > 0)
    argument("mask_ptr", "*i1" if problem.mask == "bool" else "*fp32", problem.mask is not None)
    argument("slopes_ptr", "*fp32", problem.alibi)
    argument("sinks_ptr", "*fp32", problem.sinks)
    for name in ("cu_q_ptr", "cu_k_ptr"):
        argument(name, "*i32", problem.varlen)
    argument("table_ptr", "*i32", problem.page_size > 0)
    argument("seed_ptr", "*i64", problem.dropout_p > 0)
    fixed = constants(problem, tile)
    for name in forward_kernel.arg_names:
        if name in ("stride_qd", "stride_kd", "stride_vd", "stride_mn"):
            absent[name] = 1
        elif name.startswith("stride_"):
            argument(name, "i64")
        elif name in ("scale", "softcap", "keep_scale"):
            argument(name, "fp32")
        elif name not in types and name not in absent and name not in fixed:
            argument(name, "i32")
    aligned = {name for name in types if name.endswith("_ptr") or name.startswith("stride_")}
    options = compile_options(tile.warps, tile.stages, tile.registers)
    return compile_for(forward_kernel, types, absent | fixed, aligned, gpu.cc, options)
