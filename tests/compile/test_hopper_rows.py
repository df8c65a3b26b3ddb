"""Rounding and the sum on Hopper, compiled for sm_90a without a GPU: all loads of a thread are on their way at once."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from flashkernels.jit import nvrtc
from flashkernels.jit.offline import Resources, resources
from flashkernels.moe.hopper import combine, rows

from .structs import declared

pytestmark = pytest.mark.usefixtures("compiler")


def before_the_first(found: Resources, mark: str, what: str) -> int:
    lines = found.sass.splitlines()
    first = next(i for i, line in enumerate(lines) if mark in line)
    return sum(what in line for line in lines[:first])


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("format", ["fp8", "int8"])
def test_rounding(format: str, dtype: str) -> None:
    found = resources(nvrtc.compiled(*rows.program(format, dtype)).cubin, 0, entry="round_rows")
    assert found.spills == 0 and found.registers <= 48  # five blocks of 8 warps on a multiprocessor
    assert before_the_first(found, "VIMNMX3.U16x2", "LDG.E.EF.128") == 4 == found.count("LDG.E")
    assert found.count("STG.E.64") == 4
    assert found.count("F2FP.SATFINITE.E4M3" if format == "fp8" else "I2IP.S8.S32.SAT") == 16


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("k", "dtype"), [(1, "bf16"), (2, "fp16"), (8, "bf16"), (16, "bf16")])
def test_the_sum_reads_all_terms_at_once(k: int, dtype: str, weighted: bool, shared: bool) -> None:
    found = resources(nvrtc.compiled(*combine.program(k, dtype, weighted, shared)).cubin, 0, entry="combine")
    assert found.spills == 0 and found.registers <= (64 if k <= 8 else 128)
    # of 16, ptxas leaves the last for behind the first sum
    assert before_the_first(found, "FADD", "LDG.E.EF.128") >= k - (k > 8) and found.count("LDG.E.EF.128") == k + shared
    assert found.count("STG.E.128") == 1
    assert found.count("FFMA") == 0  # a product is rounded before it is added, as in Triton


@pytest.mark.parametrize(("module", "file"), [(rows, "rows.cu"), (combine, "combine.cu")], ids=["rows", "combine"])
def test_both_have_the_same_fields_in_the_same_order(module: Any, file: str) -> None:
    fields = [(name, ctypes.sizeof(kind)) for name, kind in module.Params._fields_]
    assert declared((Path(rows.__file__).parent / file).read_text()) == fields
