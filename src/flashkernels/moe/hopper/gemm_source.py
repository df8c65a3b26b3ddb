"""The CUDA source of one variant of the grouped GEMM: headers of this folder and of the attention's, its constants, and
the wgmma instructions of its sizes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from flashkernels.jit.headers import constants, texts
from flashkernels.moe.hopper.gemm_tiles import GRANULE, MOST_EXPERTS, stage_bytes

OWN_HEADERS = ("gemm_params", "gemm_cut", "gemm_schedule", "gemm_epilogue", "rounding")
SHARED_HEADERS = ("prelude", "counter", "mbarrier", "tma", "wgmma")  # of attention/hopper
THREADS = 384
REGISTERS = 40, 232  # of a producer and a consumer thread: with two consumers 168 at launch, 504 in all
FIXED = 48.0  # rows that the weights of a tile cost as much as (predicted for an H200, 2026-11)


@dataclass(frozen=True)
class GemmVariant:
    """All that the compiler sees of a problem."""

    rows: int  # of a tile, at most
    stages: int
    fp16: bool = False
    gated: bool = False
    bias: bool = False
    row_weights: bool = False
    fused: bool = False  # rows are gathered by the loads
    cluster: int = 1  # blocks that share their loads of rows
    small: str = ""  # "fp8" or "int8": what is multiplied; the output has 16 bits
    wide: str = ""  # "bf16" or "fp16": rows are rounded from it while they are copied
    ahead: bool = False  # the first weights are loaded before the kernel ahead has ended

    @property
    def shared(self) -> int:
        """Bytes of shared memory; gemm_params.cuh asserts the same."""
        barriers = 16 * self.stages + 32
        return self.stages * stage_bytes(self.rows) + barriers + 64 + 64 + 4 * MOST_EXPERTS


def config(variant: GemmVariant) -> str:
    """`config.cuh`: the variant as constants."""
    v = variant
    numbers = {
        "MOST": v.rows // GRANULE, "STAGES": v.stages, "CLUSTER": v.cluster, "MOST_EXPERTS": MOST_EXPERTS,
        "SHARED_MEMORY": v.shared, "PRODUCER_REGISTERS": REGISTERS[0], "CONSUMER_REGISTERS": REGISTERS[1],
    }  # fmt: skip
    flags = {
        "FP16": v.fp16, "FP8": v.small == "fp8", "INT8": v.small == "int8", "GATED": v.gated, "BIAS": v.bias,
        "ROW_WEIGHTS": v.row_weights, "FUSED": v.fused, "AHEAD": v.ahead, "WIDE_FP16": v.wide == "fp16",
    }  # fmt: skip
    return constants(
        numbers, flags, f"#define CLUSTERED {int(v.cluster > 1)}", f"#define ROUNDS {int(bool(v.wide))}",
        f"constexpr float FIXED = {FIXED}f;", f"typedef {'int' if v.small == 'int8' else 'float'} Sum;",
    )  # fmt: skip


def mma(variant: GemmVariant) -> str:
    """`mma.cuh`: wgmma for every number of rows that a tile may have; C++ tells them apart by the sums they add to."""
    name = variant.small or ("fp16" if variant.fp16 else "bf16")
    step = GRANULE * (2 if name == "int8" else 1)
    sizes = range(step, variant.rows + 1, step)
    return '#pragma once\n#include "prelude.cuh"\n' + "\n".join(_product(n, name) for n in sizes)


# By name: types of sums and operands, depth, and what follows "d += a * b": the signs of both operands, and, where they
# may lie along their columns, that they do not. INT8 has neither.
INSTRUCTIONS = {
    "bf16": ("f32.bf16.bf16", 16, ", 1, 1, 0, 0"), "fp16": ("f32.f16.f16", 16, ", 1, 1, 0, 0"),
    "fp8": ("f32.e4m3.e4m3", 32, ", 1, 1"), "int8": ("s32.s8.s8", 32, ""),
}  # fmt: skip


def _product(n: int, name: str) -> str:
    count = n // 2
    kinds, depth, rest = INSTRUCTIONS[name]
    letter = "r" if name == "int8" else "f"
    sums = ", ".join(f'"+{letter}"(d[{i}])' for i in range(count))
    destination = ", ".join(f"%{i}" for i in range(count))
    instruction = f"wgmma.mma_async.sync.aligned.m64n{n}k{depth}.{kinds}"
    return f"""
// d += a * b; 64 x {n}
DEVICE void mma(Sum (&d)[{count}], u64 a, u64 b) {{
  asm volatile("{instruction} {{{destination}}}, %{count}, %{count + 1}, 1{rest};\\n"
    : {sums}
    : "l"(a), "l"(b));
}}
"""


@cache
def files() -> dict[str, str]:
    """The headers, by the names that they include one another with."""
    here = Path(__file__).parent
    return texts(here, OWN_HEADERS) | texts(here.parents[1] / "attention" / "hopper", SHARED_HEADERS)


def program(variant: GemmVariant) -> tuple[str, str, dict[str, str]]:
    """Name, text and headers, as `jit.nvrtc.compile` takes them."""
    text = (Path(__file__).parent / "gemm.cu").read_text()
    return "gemm.cu", text, {**files(), "config.cuh": config(variant), "mma.cuh": mma(variant)}
