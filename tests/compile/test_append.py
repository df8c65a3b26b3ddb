"""The append kernel, compiled for an H200: what it needs, and that the compiler leaves the search for scales exact."""

from __future__ import annotations

from typing import Any

import pytest

from flashkernels.formats import FORMATS
from flashkernels.jit.launch import compile_options
from flashkernels.jit.offline import Resources, compile_for
from flashkernels.kvcache.append import Append
from flashkernels.kvcache.triton.append import append_kernel, constants, warps

HEADS, DIM = 8, 128
POINTERS = {"k_ptr": "bf16", "v_ptr": "bf16", "k_scale_ptr": "fp16", "v_scale_ptr": "fp16", "table_ptr": "i32",
            "length_ptr": "i32"}  # fmt: skip


def compiled(name: str) -> tuple[Resources, int]:
    """Machine code, and how many numbers a thread has."""
    form = FORMATS[name]
    fixed = constants(form, HEADS, DIM, DIM, False, Append(0, False, "auto"))
    pointers = POINTERS | dict.fromkeys(("k_pages_ptr", "v_pages_ptr"), "i8" if name == "int8" else "u8")
    types: dict[str, str] = {}
    absent: dict[str, Any] = {}
    for argument in append_kernel.arg_names:
        if argument.endswith("_ptr"):
            if argument in pointers:
                types[argument] = f"*{pointers[argument]}"
            else:
                absent[argument] = None
        elif argument not in fixed:
            wide = argument.startswith("stride_") or argument in ("tokens", "positions", "blocks")
            types[argument] = "i64" if wide else "i32"
    aligned = {name for name in types if name.endswith("_ptr") or (name.startswith("stride_") and name[7] in "kv")}
    options = compile_options(warps(fixed), 3, 0)
    return compile_for(append_kernel, types, absent | fixed, aligned, 90, options), 2 * HEADS * DIM // (
        32 * warps(fixed)
    )


@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2", "int4"])
def test_the_product_stays_a_product(name: str) -> None:
    """Fused with the difference that follows it, it would be rounded once instead of twice, and the scale might differ
    from the reference's. Also: registers for all numbers, none in memory."""
    found, numbers = compiled(name)
    assert found.spills == 0 and found.registers <= 80
    assert found.count("FMUL") >= numbers * len(FORMATS[name].aims)


def test_instructions_of_a_number() -> None:
    """What the aims cost, for each number and thread; memory would allow about 20 on an H200 (3 bytes a number)."""
    most = {"int8": 55, "fp8": 100, "int4": 125}
    for name, limit in most.items():
        found, numbers = compiled(name)
        assert found.sass.count(";") / numbers <= limit, name
