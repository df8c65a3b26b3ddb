"""The Hopper decode, compiled for sm_90a without a GPU: a sample of formats, head dimensions and features."""

from __future__ import annotations

import ctypes
import re

import pytest

from flashkernels.decode.hopper import source, tiles
from flashkernels.decode.hopper.decode import Params
from flashkernels.decode.hopper.source import DecodeVariant, HopperDecodeTile, stored_bytes
from flashkernels.decode.problem import DecodeProblem
from flashkernels.formats import FORMATS
from flashkernels.jit import nvrtc
from flashkernels.jit.offline import resources

from .structs import declared

MOST_SPILLS = 64  # bytes; where a unit ends they cost nothing


@pytest.fixture(autouse=True)
def _compiler() -> None:
    try:
        nvrtc.find()
    except nvrtc.CompilerMissing as error:
        pytest.skip(str(error))


def chosen(form: str, dim: int, dim_v: int = 0, group: int = 4, **features: bool) -> DecodeVariant:
    problem = DecodeProblem(
        batch=64, tokens=1, heads=8 * group, kv_heads=8, head_dim=dim, head_dim_v=dim_v, context=4096, page_size=16,
        row_bits=4096, format=form, dtype="fp16" if form == "fp16" else "bf16",
        scales="token" if FORMATS[form].quantised else "", **features,
    )  # fmt: skip
    return tiles.variant_of(problem, *(8 * stored_bytes(form, n) for n in (dim, dim_v or dim)))


SAMPLE = {
    "bf16": chosen("bf16", 128), "bf16-72": chosen("bf16", 72), "bf16-256": chosen("bf16", 256),
    "bf16-192x128": chosen("bf16", 192, 128), "bf16-16-rows": chosen("bf16", 128, group=16),
    "fp16-features": chosen("fp16", 96, softcap=True, alibi=True),
    "fp8": chosen("fp8", 128), "int8": chosen("int8", 128),
    "int8-80": chosen("int8", 80), "int4": chosen("int4", 128), "int4-64": chosen("int4", 64),
    "ahead": DecodeVariant(128, 128, 4, "bf16", HopperDecodeTile(8, 1, 1, 3), 2048, 2048, left=True),
}  # fmt: skip


@pytest.mark.parametrize("variant", SAMPLE.values(), ids=SAMPLE.keys())
def test_variants_fit_and_do_not_spill(variant: DecodeVariant) -> None:
    made = nvrtc.compiled(*source.program(variant))
    used = resources(made.cubin, variant.shared, entry="decode")
    assert used.spills <= MOST_SPILLS
    assert used.registers <= min(255, 65536 // (32 * variant.tile.warps * variant.tile.per_sm) // 8 * 8)
    assert variant.shared * variant.tile.per_sm <= tiles.SHARED_LIMIT


@pytest.mark.parametrize("variant", SAMPLE.values(), ids=SAMPLE.keys())
def test_every_number_is_multiplied_once(variant: DecodeVariant) -> None:
    """mma of 16 keys by 8 rows, once with hidden keys and once without: K and V have 16 columns a product."""
    made = nvrtc.compiled(*source.program(variant))
    used = resources(made.cubin, variant.shared, entry="decode")
    columns = sum(-(-stored_bytes(variant.format, n) // 32) * 32 for n in (variant.head_dim, variant.head_dim_v))
    numbers = columns * variant.head_dim // stored_bytes(variant.format, variant.head_dim)
    least = 2 * variant.tiles * variant.tile.sub * numbers // 16
    found = len(re.findall(r"\bHMMA\.16816", used.sass))
    assert least <= found <= 2 * least  # half of a chunk of K may be empty


def test_both_have_the_same_fields_in_the_same_order() -> None:
    fields = [(name, ctypes.sizeof(kind)) for name, kind in Params._fields_]
    assert declared(source.files()["decode_params.cuh"]) == fields
