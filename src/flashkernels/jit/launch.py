"""Launches Triton kernels without paying for the JIT's argument handling on every call.

`JITFunction.__getitem__` hashes every argument to find the compiled kernel: tens of microseconds. A `Launcher` does
that once. The caller promises that later calls agree with the first in everything Triton specialises on (dtypes,
16-byte alignment of pointers, exact values of strides, which arguments are None); the ops' plan keys guarantee it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton import knobs

from flashkernels.jit.mode import interpreting

# Triton 3.6's launcher, called as its own JIT calls it; other versions go through their public indexing.
DIRECT = triton.__version__.startswith("3.6.")


def compile_options(warps: int, stages: int, registers: int) -> dict[str, int]:
    """Triton's names for a tile's threads, pipeline stages and register cap (0: none)."""
    return {"num_warps": warps, "num_stages": stages} | ({"maxnreg": registers} if registers else {})


class Descriptor:
    """What Triton's launcher reads of a tensor descriptor. Made per call: cheaper than the validated original."""

    __slots__ = ("base", "block_shape", "padding", "shape", "strides")

    def __init__(self, base: Any, shape: tuple[int, ...], strides: tuple[int, ...], block_shape: list[int]) -> None:
        self.base, self.shape, self.strides, self.block_shape = base, shape, strides, block_shape
        self.padding = "zero"


class Launcher:
    """A kernel with its compile-time arguments; the first call compiles and checks, the following ones only launch."""

    def __init__(self, kernel: Any, constants: dict[str, Any], options: dict[str, int]) -> None:
        self.kernel, self.constants, self.options = kernel, constants, options
        self.values = tuple(constants.values())
        self.compiled: Any = None

    def __call__(self, grid: int, device: int | None, *args: Any) -> None:
        """Runs `grid` programs. `args` are the kernel's arguments in order, without its constants (which come last)."""
        compiled = self.compiled
        if compiled is None:
            compiled = self.kernel[(grid,)](*map(_validated, args), **self.constants, **self.options)
            if not interpreting():
                self.compiled = compiled
        elif DIRECT and knobs.runtime.launch_enter_hook is None and knobs.runtime.launch_exit_hook is None:
            stream = torch._C._cuda_getCurrentRawStream(device)
            compiled.run(
                grid, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *args, *self.values
            )
        else:
            compiled[(grid, 1, 1)](*args, *self.values)


def _validated(arg: Any) -> Any:
    """Triton's JIT and interpreter want its own descriptor class, which checks what it is given."""
    if not isinstance(arg, Descriptor):
        return arg
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(arg.base, list(arg.shape), list(arg.strides), arg.block_shape)
