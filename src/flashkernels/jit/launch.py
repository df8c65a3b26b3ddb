"""Launches Triton kernels without paying for the JIT's argument handling on every call.

`JITFunction.__getitem__` hashes every argument to find the compiled kernel: tens of microseconds. A `Launcher` does
that once. The caller promises that later calls agree with the first in everything Triton specialises on (dtypes,
16-byte alignment of pointers, exact values of strides, which arguments are None); the ops' plan keys guarantee it.
"""

from __future__ import annotations

from typing import Any

import torch
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from flashkernels.jit import notes, specialised, strict
from flashkernels.jit.mode import interpreting


class Descriptor:
    """A tensor with the shape, strides and block that TMA reads it by."""

    __slots__ = ("base", "block", "shape", "strides")

    def __init__(self, base: Any, shape: tuple[int, ...], strides: tuple[int, ...], block: list[int]) -> None:
        self.base, self.shape, self.strides, self.block = base, shape, strides, block


def compile_options(warps: int, stages: int, registers: int) -> dict[str, Any]:
    """Triton's names for a tile's threads, pipeline stages and register cap (0: none)."""
    return {"num_warps": warps, "num_stages": stages} | ({"maxnreg": registers} if registers else {})


class Launcher:
    """A kernel with its compile-time arguments; the first call finds or compiles it, the following ones only launch."""

    def __init__(self, kernel: Any, constants: dict[str, Any], options: dict[str, Any]) -> None:
        self.kernel, self.constants, self.options = kernel, constants, options
        self.compiled: Any = None  # by Triton
        self.direct: specialised.Parameters | None = None

    def __call__(self, grid: int, device: int | None, tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> None:
        """Runs `grid` programs. The kernel takes `tensors` (pointers, descriptors, None) first, then `numbers`, then
        its constants."""
        direct = self.direct
        if direct is not None and device is not None and not _hooked():
            direct.launch(grid, torch._C._cuda_getCurrentRawStream(device), tensors, numbers)
        elif self.compiled is None:
            self._first(grid, device, tensors, numbers)
        else:
            self.compiled[(grid, 1, 1)](*map(_validated, tensors), *numbers, *self.constants.values())

    def _first(self, grid: int, device: int | None, tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> None:
        """Launches what our cache has, or what Triton finds or compiles. Where programs are noted, notes it."""
        arguments = (*map(_validated, tensors), *numbers)
        fusion = {"enable_fp_fusion": knobs.language.default_fp_fusion}  # as everywhere; unsaid, Triton 3.9 warns of it
        keywords = {**self.constants, **self.options, **fusion}
        noting = notes.current()
        if noting is not None:
            noting.programs.append(specialised.specialise(self.kernel, arguments, keywords, noting.cc))
            return
        if device is None or interpreting() or not specialised.SUPPORTED or _hooked():
            made = self.kernel[(grid,)](*arguments, **keywords)
            self.compiled = None if interpreting() else made
            return
        major, minor = torch.cuda.get_device_capability(device)
        program = specialised.specialise(self.kernel, arguments, keywords, 10 * major + minor)
        found = None
        if strict.active() or specialised.stocked():
            found = specialised.loaded(program, look=not program.is_made)
            if found is None and strict.active() and not program.is_made and not program.in_tritons_cache():
                strict.stall(program.label)
        if found is None:
            self.compiled, found = program.made, specialised.compiled(program)
        if found is None:
            self.compiled[(grid, 1, 1)](*arguments, *self.constants.values())
            return
        self.direct = specialised.Parameters(found, tensors, numbers)
        self.direct.launch(grid, torch._C._cuda_getCurrentRawStream(device), tensors, numbers)


def _hooked() -> bool:
    """Whether a profiler listens to launches: a hook is None, or a chain of the calls it makes."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _validated(x: Any) -> Any:
    """Triton's JIT and interpreter want its own descriptor class, which checks what it is given."""
    return TensorDescriptor(x.base, list(x.shape), list(x.strides), x.block) if isinstance(x, Descriptor) else x
