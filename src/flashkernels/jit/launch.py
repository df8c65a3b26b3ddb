"""Launches Triton kernels without paying for the JIT's argument handling on every call.

`JITFunction.__getitem__` hashes every argument to find the compiled kernel: tens of microseconds. A `Launcher` does
that once. The caller promises that later calls agree with the first in everything Triton specialises on (dtypes,
16-byte alignment of pointers, exact values of strides, which arguments are None); the ops' plan keys guarantee it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from flashkernels.jit import notes, specialised, strict
from flashkernels.jit.mode import interpreting

MOST_MAPS = 256


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
        self.compiled: Any = None  # by Triton's JIT
        self.direct: Direct | specialised.Loaded | None = None

    def __call__(self, grid: int, device: int | None, tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> None:
        """Runs `grid` programs. The kernel takes `tensors` (pointers, descriptors, None) first, then `numbers`, then
        its constants."""
        if self.direct and device is not None and not _hooked():
            self.direct(grid, torch._C._cuda_getCurrentRawStream(device), tensors, numbers, self.constants.values())
        elif self.compiled is None:
            self._first(grid, device, tensors, numbers)
        else:
            self.compiled[(grid, 1, 1)](*map(_validated, tensors), *numbers, *self.constants.values())

    def _first(self, grid: int, device: int | None, tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> None:
        """Launches what our cache has, or what Triton's JIT finds or compiles. Where programs are noted, notes it."""
        arguments, keywords = (*map(_validated, tensors), *numbers), {**self.constants, **self.options}
        noting = notes.current()
        if noting is not None:
            noting.programs.append(specialised.specialise(self.kernel, arguments, keywords, noting.cc))
            return
        program = None
        known = not interpreting() and specialised.SUPPORTED and (strict.active() or specialised.stocked())
        if device is not None and known and not _hooked():
            major, minor = torch.cuda.get_device_capability(device)
            program = specialised.specialise(self.kernel, arguments, keywords, 10 * major + minor)
            self.direct = specialised.loaded(program, look=program.key not in _compiled)
            if self.direct:
                self.direct(grid, torch._C._cuda_getCurrentRawStream(device), tensors, numbers, ())
                return
            if strict.active() and program.key not in _compiled and not program.in_tritons_cache():
                strict.stall(program.label)
        compiled = self.kernel[(grid,)](*arguments, **keywords)
        if not interpreting():
            self.compiled, self.direct = compiled, Direct.of(compiled)
        if program is not None:
            _compiled.add(program.key)


_compiled: set[str] = set()  # keys of programs that Triton's JIT has in memory


class Direct:
    """Triton 3.6's C launcher, called with the arguments that its Python wrapper would make, but made faster.

    Pointers go in as integers, and the TMA map of a tensor is kept for as long as its address comes back.
    """

    def __init__(self, compiled: Any, launch: Callable[..., Any], formats: list[dict[str, Any]]) -> None:
        from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST
        from triton.runtime import driver

        self.launch, self.encode = launch, driver.active.utils.fill_tma_descriptor
        self.formats = [
            (f["swizzle"], f["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[f["elem_type"]], f["block_size"]) for f in formats
        ]
        run = compiled.run
        flags = (run.launch_cooperative_grid, run.launch_pdl, None, None)
        self.head = (compiled.function, *flags, compiled.packed_metadata, None, None, None)
        self.maps: dict[tuple[int, int], Any] = {}

    @staticmethod
    def of(compiled: Any) -> Direct | None:
        """The direct launcher of a compiled kernel, or None where Triton is built otherwise than expected."""
        if not triton.__version__.startswith("3.6."):
            return None  # later launchers take other arguments
        wrapper = getattr(compiled.run, "launch", None)
        names = getattr(getattr(wrapper, "__code__", None), "co_freevars", ())
        run = compiled.run
        scratch = getattr(run, "global_scratch_size", None), getattr(run, "profile_scratch_size", None)
        if wrapper is None or scratch != (0, 0):
            return None
        if not names:
            return Direct(compiled, wrapper, [])
        cells = dict(zip(names, (cell.cell_contents for cell in wrapper.__closure__), strict=True))
        formats = cells.get("tensordesc_meta")
        if "launcher" not in cells or not formats or any(f is None or f["fp4_padded"] for f in formats):
            return None
        return Direct(compiled, cells["launcher"], formats)

    def __call__(
        self, grid: int, stream: int, tensors: tuple[Any, ...], numbers: tuple[Any, ...], constants: Any
    ) -> None:
        args = self._described(tensors) if self.formats else [None if x is None else x.data_ptr() for x in tensors]
        self.launch(grid, 1, 1, stream, *self.head, *args, *numbers, *constants)

    def _described(self, tensors: tuple[Any, ...]) -> list[Any]:
        args: list[Any] = []
        described = 0
        for x in tensors:
            if x is None:
                args.append(None)
            elif type(x) is Descriptor:
                args.append(self._map(described, x))
                args += x.shape
                args += x.strides
                described += 1
            else:
                args.append(x.data_ptr())
        return args

    def _map(self, index: int, x: Descriptor) -> Any:
        key = (index, x.base.data_ptr())
        found = self.maps.get(key)
        if found is None:
            if len(self.maps) >= MOST_MAPS:
                self.maps.clear()
            found = self.maps[key] = self.encode(key[1], *self.formats[index], x.shape, x.strides, 0)
        return found


def _hooked() -> bool:
    """Whether a profiler listens to launches: a hook is None, or a chain of the calls it makes."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def _validated(x: Any) -> Any:
    """Triton's JIT and interpreter want its own descriptor class, which checks what it is given."""
    return TensorDescriptor(x.base, list(x.shape), list(x.strides), x.block) if isinstance(x, Descriptor) else x
