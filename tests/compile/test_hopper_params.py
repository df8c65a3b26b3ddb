"""The parameters of the Hopper kernel: Python and C++ lay out the same struct."""

from __future__ import annotations

import ctypes
import re

from flashkernels.attention.hopper import source
from flashkernels.attention.hopper.forward import Params
from flashkernels.attention.hopper.variants import VARIANTS
from flashkernels.jit import nvrtc

# A pointer of any type is 8 bytes.
BYTES = {"TensorMap": 128, "Strides": 24, "i64": 8, "int": 4, "float": 4}


def declared() -> list[tuple[str, int]]:
    """Name and size of each field of the C++ struct, in its order."""
    text = re.search(r"struct Params \{(.*?)\n\};", source.files()["params.cuh"], re.S)
    assert text is not None
    fields: list[tuple[str, int]] = []
    for statement in re.sub(r"//.*", "", text[1]).split(";"):
        words = re.match(r"\s*(?:const )?(?:unsigned )?(\w+)\b(.*)", statement, re.S)
        names = words[2].split(",") if words else []
        fields += [(name.strip(" *\n"), 8 if "*" in name else BYTES[words[1]]) for name in names]
    return fields


def test_both_have_the_same_fields_in_the_same_order() -> None:
    assert declared() == [(name, ctypes.sizeof(kind)) for name, kind in Params._fields_]


def test_both_have_the_same_size() -> None:
    size = -(-ctypes.sizeof(Params) // 64) * 64
    program = f'#include "params.cuh"\nstatic_assert(sizeof(Params) == {size}, "size");'
    assert nvrtc.compile("layout.cu", program, source.headers(VARIANTS[0]))
