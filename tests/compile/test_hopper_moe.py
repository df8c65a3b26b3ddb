"""The Hopper grouped GEMM, compiled for sm_90a without a GPU: wgmma stays asynchronous, and its loops are tight."""

from __future__ import annotations

import ctypes
import functools
import re

import pytest

from flashkernels.attention.hopper.build import spilled, warnings
from flashkernels.jit import nvrtc
from flashkernels.jit.offline import Resources, resources
from flashkernels.moe.hopper import gemm_source as source
from flashkernels.moe.hopper.gemm import Params
from flashkernels.moe.hopper.gemm_source import GemmVariant
from flashkernels.moe.hopper.gemm_tiles import GRANULE

from .sass import loops, spills
from .structs import declared

SHARED_LIMIT = 232448
INSTRUCTIONS = {"": "HGMMA", "fp8": "QGMMA", "int8": "IGMMA"}
SAMPLE = {
    "gated": GemmVariant(192, 4, gated=True, cluster=2, ahead=True),
    "plain": GemmVariant(192, 4, cluster=2, ahead=True),
    "few-gated": GemmVariant(96, 5, gated=True, fused=True), "few-plain": GemmVariant(96, 5, ahead=True),
    "few-fp16": GemmVariant(96, 5, fp16=True, gated=True, fused=True), "alone": GemmVariant(192, 4, gated=True),
    "extras": GemmVariant(192, 4, bias=True, row_weights=True, cluster=2),
    "few-extras": GemmVariant(96, 5, bias=True, row_weights=True),
    "few-extras-gated": GemmVariant(96, 5, gated=True, bias=True, row_weights=True),
    "fp8-gated": GemmVariant(192, 4, gated=True, small="fp8", wide="bf16", ahead=True),
    "fp8-plain": GemmVariant(192, 4, small="fp8", ahead=True),
    "few-fp8": GemmVariant(96, 5, gated=True, fused=True, small="fp8"),
    "int8-gated": GemmVariant(192, 4, gated=True, small="int8", wide="fp16", ahead=True),
    "int8-plain": GemmVariant(192, 4, small="int8", ahead=True),
    "fp8-cluster": GemmVariant(192, 4, cluster=2, small="fp8"),
    "few-int8": GemmVariant(96, 5, gated=True, fused=True, small="int8"),
    "few-fp8-extras": GemmVariant(96, 5, fp16=True, bias=True, row_weights=True, small="fp8"),
}  # fmt: skip
each_variant = pytest.mark.parametrize("variant", SAMPLE.values(), ids=SAMPLE.keys())


pytestmark = pytest.mark.usefixtures("compiler")


@functools.cache
def made(variant: GemmVariant) -> tuple[Resources, str]:
    found = nvrtc.compiled(*source.program(variant))
    return resources(found.cubin, variant.shared, entry="gemm"), found.log


@each_variant
def test_wgmma_is_asynchronous_and_nothing_spills(variant: GemmVariant) -> None:
    found, log = made(variant)
    assert not [line for line in warnings(log) if re.search(r"C75\d\d", line)]
    assert spilled(log, "gemm") == (0, 0)
    assert found.registers == 168  # 384 threads; 40 of a producer and 232 of a consumer afterwards
    assert variant.shared <= SHARED_LIMIT


@each_variant
def test_each_number_of_rows_has_a_loop_of_its_own(variant: GemmVariant) -> None:
    """A loop has 4 steps of 32 bytes for each of two halves of the weights, and little beside. INT8 takes every second
    number of rows."""
    found, _ = made(variant)
    copies = variant.rows // GRANULE // (2 if variant.small == "int8" else 1)
    assert found.count(INSTRUCTIONS[variant.small]) == 8 * copies
    inner = [loop for loop in loops(found.sass) if sum(INSTRUCTIONS[variant.small] in line for line in loop) == 8]
    assert len(inner) == copies
    for loop in inner:
        assert len(loop) <= 70
        assert not spills(loop)
        assert not any("R2UR" in line for line in loop)  # descriptors are made in uniform registers
        assert sum("WARPGROUP.DEPBAR" in line for line in loop) == 1  # of the stage before


@each_variant
def test_a_thread_stores_16_bytes_at_once(variant: GemmVariant) -> None:
    """Written as an assignment of a uint4, most of these stores become four of 4 bytes."""
    found, _ = made(variant)
    stores = [line for line in found.sass.splitlines() if " STG.E" in line]
    assert sum("STG.E.128" in line for line in stores) >= len(stores) - 4


@each_variant
def test_the_first_weights_are_on_their_way_before_the_kernel_ahead_has_ended(variant: GemmVariant) -> None:
    """ACQBULK is the wait, PREEXIT lets the next kernel start. The counters, too, are the kernel ahead's until then. A
    block without a tile waits as well."""
    found, _ = made(variant)
    order = re.findall("ACQBULK|PREEXIT|UTMALDG|ATOMG", found.sass)
    producer = ["UTMALDG", "ACQBULK", "ATOMG", "UTMALDG", "UTMALDG", "ACQBULK", "ATOMG"]
    if variant.ahead:
        assert order == ["ACQBULK", "PREEXIT", *producer]
    else:
        assert order[:2] == ["ACQBULK", "PREEXIT"] and order.count("ACQBULK") == 1


@pytest.mark.parametrize("name", ["fp8-gated", "int8-gated"])
def test_rows_are_rounded_on_their_way(name: str) -> None:
    code = nvrtc.compiled(*source.program(SAMPLE[name]))
    found = resources(code.cubin, 0, entry="round_and_gather")
    assert found.spills == 0 and found.registers <= 64
    assert found.count("LDG.E.EF.128") == 4  # of each lane, at once
    assert found.count("STG.E.64") % 4 == 0


def test_both_have_the_same_fields_in_the_same_order() -> None:
    fields = [(name, ctypes.sizeof(kind)) for name, kind in Params._fields_]
    assert declared(source.files()["gemm_params.cuh"]) == fields
