"""The parameters of a kernel in memory, as the driver reads them: one block for all launches of a signature."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable

ALIGNMENT = 64  # of the tensor maps that parameters may hold; C++ rounds the size of such a struct up to it


class ParameterBlock:
    """An aligned copy of a struct. What changes is written into it before each launch, by its writers: they keep it
    alive, `address` alone does not."""

    def __init__(self, params: ctypes.Structure) -> None:
        self.fields = type(params)
        size = ctypes.sizeof(params)
        self.buffer = ctypes.create_string_buffer(-(-size // ALIGNMENT) * ALIGNMENT + ALIGNMENT)
        self.offset = -ctypes.addressof(self.buffer) % ALIGNMENT
        self.address = ctypes.addressof(self.buffer) + self.offset
        ctypes.memmove(self.address, ctypes.addressof(params), size)

    def writer(self, field: str, values: struct.Struct) -> Callable[..., None]:
        """What writes these values from `field` on. A partial: a call of it runs no Python."""
        at: int = getattr(self.fields, field).offset
        return functools.partial(values.pack_into, self.buffer, self.offset + at)
