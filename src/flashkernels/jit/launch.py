"""Launches Triton kernels without paying for the JIT's argument handling on every call.

`JITFunction.__getitem__` hashes every argument to find the compiled kernel: tens of microseconds. A `Launcher` does
that once. The caller promises that later calls agree with the first in everything Triton specialises on (dtypes,
16-byte alignment of pointers, exact values of strides, which arguments are None); the ops' plan keys guarantee it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from flashkernels.jit import notes, specialised, strict
from flashkernels.jit.mode import interpreting

Box = tuple[tuple[int, ...], tuple[int, ...], list[int]]  # shape, strides and block of a descriptor


class Descriptor:
    """A tensor with the shape, strides and block that TMA reads it by."""

    __slots__ = ("base", "block", "shape", "strides")

    def __init__(self, base: Any, shape: tuple[int, ...], strides: tuple[int, ...], block: list[int]) -> None:
        self.base, self.shape, self.strides, self.block = base, shape, strides, block


def compile_options(warps: int, stages: int, registers: int) -> dict[str, Any]:
    """Triton's names for a tile's threads, pipeline stages and register cap (0: none)."""
    return {"num_warps": warps, "num_stages": stages} | ({"maxnreg": registers} if registers else {})


class Launcher:
    """A kernel with its compile-time arguments; the first call finds or compiles it, the following ones only launch.

    `boxes`, by place among the tensors, are of those that TMA reads alike in all launches: what a call gives there is
    the tensor itself, which spares it a `Descriptor`. Where a box is None, the kernel takes None.
    """

    def __init__(
        self, kernel: Any, constants: dict[str, Any], options: dict[str, Any], device: int | None,
        boxes: Mapping[int, Box | None] | None = None,
    ) -> None:  # fmt: skip
        self.kernel, self.constants, self.options, self.boxes = kernel, constants, options, boxes or {}
        self.device = device  # of the tensors, the current one of each call; None is the CPU
        self.compiled: Any = None  # by Triton
        self.direct: specialised.Parameters | None = None

    def __call__(self, grid: int, tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> None:
        """Runs `grid` programs. The kernel takes `tensors` (pointers, descriptors, None) first, then `numbers`, then
        its constants."""
        direct, device = self.direct, self.device
        if direct is not None and device is not None and not hooked():
            direct.launch(grid, torch._C._cuda_getCurrentRawStream(device), tensors, numbers)
        elif self.compiled is None:
            self._first(grid, tensors, numbers)
        else:
            seen = map(_validated, self.described(tensors))
            self.compiled[(grid, 1, 1)](*seen, *numbers, *self.constants.values())

    def described(self, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
        """What the kernel takes, where a call gives these."""
        if not self.boxes:
            return tensors
        seen = list(tensors)
        for at, box in self.boxes.items():
            seen[at] = None if box is None else Descriptor(tensors[at], *box)
        return tuple(seen)

    def _first(self, grid: int, tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> None:
        """Launches what our cache has, or what Triton finds or compiles. Where programs are noted, notes it."""
        seen, device = self.described(tensors), self.device
        arguments = (*map(_validated, seen), *numbers)
        fusion = {"enable_fp_fusion": knobs.language.default_fp_fusion}  # as everywhere; unsaid, Triton 3.9 warns of it
        keywords = {**self.constants, **self.options, **fusion}
        noting = notes.current()
        if noting is not None:
            noting.programs.append(specialised.specialise(self.kernel, arguments, keywords, noting.cc))
            return
        if device is None or interpreting() or not specialised.SUPPORTED or hooked():
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
        self.direct = specialised.Parameters(found, seen, numbers, frozenset(self.boxes))
        self.direct.launch(grid, torch._C._cuda_getCurrentRawStream(device), tensors, numbers)


def hooked() -> bool:
    """Whether a profiler listens to launches: a hook is a chain of the calls it makes, and may be None or one call."""
    runtime: Any = knobs.runtime
    try:
        return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)
    except AttributeError:
        hooks = runtime.launch_enter_hook, runtime.launch_exit_hook
        return any(getattr(hook, "calls", hook) for hook in hooks)


def _validated(x: Any) -> Any:
    """Triton's JIT and interpreter want its own descriptor class, which checks what it is given."""
    return TensorDescriptor(x.base, list(x.shape), list(x.strides), x.block) if isinstance(x, Descriptor) else x
