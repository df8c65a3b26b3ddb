"""The parameters of the Hopper kernel: Python and C++ lay out the same struct."""

from __future__ import annotations

import ctypes

from flashkernels.attention.hopper import source
from flashkernels.attention.hopper.forward import Params
from flashkernels.attention.hopper.variants import VARIANTS
from flashkernels.jit import nvrtc

from .structs import declared


def test_both_have_the_same_fields_in_the_same_order() -> None:
    assert declared(source.files()["params.cuh"]) == [(name, ctypes.sizeof(kind)) for name, kind in Params._fields_]


def test_both_have_the_same_size() -> None:
    size = -(-ctypes.sizeof(Params) // 64) * 64
    program = f'#include "params.cuh"\nstatic_assert(sizeof(Params) == {size}, "size");'
    assert nvrtc.compile("layout.cu", program, source.headers(VARIANTS[0]))
