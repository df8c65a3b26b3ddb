"""Parameters in memory: at a multiple of 64, as the struct says, written in place."""

from __future__ import annotations

import ctypes
import functools
import gc
import struct
from typing import Any

import pytest

from flashkernels.jit.block import ALIGNMENT, ParameterBlock


class Params(ctypes.Structure):
    """What the structs of kernels have: a map, pointers, a stride, floats and ints."""

    _fields_ = (
        ("map", ctypes.c_uint64 * 16), ("x", ctypes.c_void_p), ("out", ctypes.c_void_p), ("stride", ctypes.c_int64),
        ("scale", ctypes.c_float), ("softcap", ctypes.c_float), ("rows", ctypes.c_int), ("last", ctypes.c_int),
        ("odd", ctypes.c_int),
    )  # fmt: skip


class Small(ctypes.Structure):
    _fields_ = (("x", ctypes.c_void_p), ("rows", ctypes.c_int))


def given() -> Params:
    return Params((ctypes.c_uint64 * 16)(*range(1, 17)), 1 << 40, 2 << 40, -3, 0.5, 0.25, 7, -1, 9)


def seen(block: ParameterBlock) -> Any:
    """The struct as a launch finds it."""
    return Params.from_address(block.address)


def values(params: Params) -> list[Any]:
    return [*params.map, *(getattr(params, name) for name, _ in Params._fields_[1:])]


@pytest.mark.parametrize("params", [given(), Small(1 << 40, 7)], ids=["large", "small"])
def test_a_block_is_aligned_and_has_room_for_the_size_that_cpp_rounds_up(params: ctypes.Structure) -> None:
    for _ in range(20):  # a buffer is where the allocator puts it
        block = ParameterBlock(params)
        assert ALIGNMENT == 64 and block.address % ALIGNMENT == 0
        start = ctypes.addressof(block.buffer)
        assert block.address == start + block.offset
        rounded = -(-ctypes.sizeof(params) // ALIGNMENT) * ALIGNMENT
        assert start <= block.address and block.address + rounded <= start + ctypes.sizeof(block.buffer)


def test_it_starts_as_a_copy() -> None:
    params = given()
    block = ParameterBlock(params)
    assert bytes(seen(block)) == bytes(params)
    params.rows, params.x = 0, 0
    assert values(seen(block)) == values(given())


@pytest.mark.parametrize(
    ("field", "form", "written"),
    [
        pytest.param("map", "128s", {"map": list(range(16, 0, -1))}, id="map"),
        pytest.param("x", "2Q", {"x": 5 << 40, "out": 6 << 40}, id="pointers"),
        pytest.param("out", "Q", {"out": 6 << 40}, id="one pointer"),
        pytest.param("scale", "2f", {"scale": 1.5, "softcap": -2.5}, id="floats"),
        pytest.param("last", "2i", {"last": -8, "odd": 8}, id="the end"),
    ],
)
def test_a_writer_changes_its_fields_and_no_other(field: str, form: str, written: dict[str, Any]) -> None:
    block = ParameterBlock(given())
    numbers = [struct.pack("16Q", *written["map"])] if field == "map" else written.values()
    block.writer(field, struct.Struct(form))(*numbers)
    expected = given()
    for name, value in written.items():
        setattr(expected, name, (ctypes.c_uint64 * 16)(*value) if name == "map" else value)
    assert values(seen(block)) == values(expected)


def test_a_writer_is_a_partial_of_pack_into_which_keeps_the_block_alive() -> None:
    form = struct.Struct("i")
    block = ParameterBlock(given())
    buffer, address, at = block.buffer, block.address, block.offset + Params.rows.offset
    write = block.writer("rows", form)
    assert isinstance(write, functools.partial)
    assert (write.func, write.keywords, write.args[1]) == (form.pack_into, {}, at) and write.args[0] is buffer
    del block, buffer
    gc.collect()
    write(11)
    assert Params.from_address(address).rows == 11


def test_a_field_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="heads"):
        ParameterBlock(given()).writer("heads", struct.Struct("i"))
