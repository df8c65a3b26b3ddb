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


pytestmark = pytest.mark.usefixtures("compiler")


def chosen(
    form: str, dim: int, dim_v: int = 0, group: int = 4, batch: int = 64, **features: bool
) -> DecodeVariant:  # fmt: skip
    bits = sum(FORMATS[form].bits(n) for n in (dim, dim_v or dim))
    problem = DecodeProblem(
        batch=batch, tokens=1, heads=8 * group, kv_heads=8, head_dim=dim, head_dim_v=dim_v, context=4096, page_size=16,
        row_bits=bits, format=form, dtype="fp16" if form == "fp16" else "bf16",
        scales="token" if FORMATS[form].quantised else "", **features,
    )  # fmt: skip
    return tiles.variant_of(problem, *(8 * stored_bytes(form, n) for n in (dim, dim_v or dim)))


def rows(form: str, dim: int, *tile: int, **features: bool) -> DecodeVariant:
    """Whole rows of some of 8 KV heads together."""
    slot, scales = 8 * stored_bytes(form, dim), "token" if FORMATS[form].quantised else ""
    return DecodeVariant(
        dim, dim, 4, form, HopperDecodeTile(*tile), slot, slot, scales=scales, scale_heads=8 if scales else 0,
        **features,
    )  # fmt: skip


ROWS = {
    "rows": rows("bf16", 128, 12, 1, 1, 6, 2), "rows-fp16": chosen("fp16", 96, softcap=True, alibi=True),
    "rows-of-4": rows("bf16", 128, 12, 1, 1, 3, 4),
    "rows-72": chosen("bf16", 72), "rows-80": chosen("bf16", 80), "rows-96": chosen("bf16", 96, group=8),
    "rows-112": chosen("bf16", 112), "rows-256": rows("bf16", 256, 8, 1, 1, 4, 2),
    "rows-fp8": chosen("fp8", 128), "rows-int8": chosen("int8", 128, group=8), "rows-int4": chosen("int4", 128),
    "rows-fp8-of-4": rows("fp8", 128, 12, 1, 2, 3, 4), "rows-deep": rows("bf16", 128, 8, 1, 1, 12, 2),
    "rows-features": rows("bf16", 96, 12, 1, 1, 6, 4, left=True, softcap=True, alibi=True),
}  # fmt: skip
SAMPLE = ROWS | {
    "bf16": chosen("bf16", 128), "bf16-8-rows": chosen("bf16", 128, group=8),
    "bf16-72": chosen("bf16", 72, batch=1), "bf16-256": chosen("bf16", 256),
    "bf16-192x128": chosen("bf16", 192, 128), "bf16-16-rows": chosen("bf16", 128, group=16),
    "fp16-features": chosen("fp16", 96, batch=1, softcap=True, alibi=True),
    "fp8": chosen("fp8", 128, batch=1), "int8": chosen("int8", 128, batch=1),
    "int8-80": chosen("int8", 80), "int4": chosen("int4", 128, batch=1), "int4-64": chosen("int4", 64),
    "ahead": DecodeVariant(128, 128, 4, "bf16", HopperDecodeTile(8, 1, 1, 3), 2048, 2048, left=True),
}  # fmt: skip


@pytest.mark.parametrize("variant", SAMPLE.values(), ids=SAMPLE.keys())
def test_variants_fit_and_do_not_spill(variant: DecodeVariant) -> None:
    made = nvrtc.compiled(*source.program(variant))
    used = resources(made.cubin, variant.shared, entry="decode")
    assert used.spills <= MOST_SPILLS
    assert used.registers <= min(255, 65536 // (variant.tile.threads * variant.tile.per_sm) // 8 * 8)
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


@pytest.mark.parametrize("variant", ROWS.values(), ids=ROWS.keys())
def test_a_row_is_one_copy_and_the_loop_does_not_spill(variant: DecodeVariant) -> None:
    """And copies take their addresses from uniform registers: otherwise there would be one in a loop over the lanes."""
    made = nvrtc.compiled(*source.program(variant))
    lines = resources(made.cubin, variant.shared, entry="decode").sass.splitlines()
    copies = sum("UBLKCP" in line for line in lines)
    assert copies == variant.tile.sub * (32 + 2 * (variant.scales == "token"))
    assert not any("LDGSTS" in line for line in lines)
    products = [i for i, line in enumerate(lines) if "HMMA" in line]
    half = len(products) // 2  # the loop's two bodies: with hidden keys and without
    for body in (lines[products[0] : products[half - 1]], lines[products[half] : products[-1]]):
        assert not any("LDL" in line or "STL" in line for line in body)


@pytest.mark.parametrize(
    "variant", [SAMPLE["rows"], SAMPLE["bf16"], SAMPLE["rows-72"]], ids=["rows", "bf16", "rows-72"]
)
def test_nothing_is_read_or_written_before_the_kernel_ahead_has_ended(variant: DecodeVariant) -> None:
    """It may be launched early: prefetches into the L2 are all that it may do then."""
    made = nvrtc.compiled(*source.program(variant))
    lines = resources(made.cubin, variant.shared, entry="decode").sass.splitlines()
    waits = [i for i, line in enumerate(lines) if "ACQBULK" in line]
    memory = [i for i, line in enumerate(lines) if re.search(r"\b(LDG|LDGSTS|UBLKCP|STG|ATOMG|RED)\b", line)]
    assert len(waits) == 1 and waits[0] < memory[0] and sum("PREEXIT" in line for line in lines) == 1


def test_both_have_the_same_fields_in_the_same_order() -> None:
    fields = [(name, ctypes.sizeof(kind)) for name, kind in Params._fields_]
    assert declared(source.files()["decode_params.cuh"]) == fields
