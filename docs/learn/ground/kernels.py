"""CUDA C++ in a lesson: compiled by NVRTC and launched by the package's own code; without a GPU compiled only."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import lesson

from flashkernels.jit import driver, nvrtc

OLDEST = "sm_80"  # what is compiled for where there is no GPU


class Kernel:
    """One `extern "C"` kernel of a source. Calling it launches it; without a GPU `emulate` computes the same."""

    def __init__(self, source: str, name: str, emulate: Callable[..., None], **defines: int) -> None:
        self.name, self.emulate = name, emulate
        self.defines = {name.upper(): value for name, value in defines.items()}
        options = [f"-D{name}={value}" for name, value in self.defines.items()]
        arch = OLDEST
        if lesson.GPU:
            major, minor = torch.cuda.get_device_capability()
            arch = f"sm_{major}{minor}"
        try:
            self.made = nvrtc.compiled(f"{name}.cu", source, {}, arch, options)
        except nvrtc.CompilerMissing as error:
            if lesson.GPU:
                raise
            print(f"{name} is not compiled here: {error}")
            return
        self.library = driver.Library(self.made.cubin)
        self.kernels: dict[int, driver.Kernel] = {}  # by bytes of dynamic shared memory

    def __call__(self, grid: int, block: int, *arguments: torch.Tensor | int | float, shared: int = 0) -> None:
        """Launches `grid` blocks of `block` threads. Whole numbers arrive as `int`, others as `float`."""
        if not lesson.GPU:
            self.emulate(grid, block, *arguments, **{name.lower(): value for name, value in self.defines.items()})
            return
        held = [_parameter(argument) for argument in arguments]  # the driver copies them during the launch
        kernel = self.kernels.setdefault(shared, driver.Kernel(self.library, self.name, shared))
        start = kernel.starter(block, [ctypes.addressof(parameter) for parameter in held])
        start(grid, torch.cuda.current_stream().cuda_stream)


def _parameter(argument: torch.Tensor | int | float) -> Any:
    if isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return ctypes.c_int(argument) if isinstance(argument, int) else ctypes.c_float(argument)


def whole_numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    """fp32 numbers from -8 to 8 without fractions: their sums are exact, in any order."""
    generator = torch.Generator(device=lesson.DEVICE).manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator, device=lesson.DEVICE).float()


def multiprocessors() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count if lesson.GPU else 2
