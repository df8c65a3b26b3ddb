"""Kernels of the layer follow one another closely: each is launched before the one that it waits for has ended.

On sm_90 and later a kernel may be launched "programmatically dependent": its programs start as soon as all those of the
kernel before it run, and wait on the device (`gdc_wait`) until that one has ended. What is between two kernels is then
that wait, not a launch.
"""

from __future__ import annotations

from flashkernels.hardware import Gpu
from flashkernels.jit.launch import Launcher


def starts_early(gpu: Gpu | None) -> bool:
    """Whether kernels on this GPU can be launched so; the interpreter (no GPU) knows no such thing."""
    return gpu is not None and gpu.capability >= (9, 0)


def launched_early(launcher: Launcher, early: bool) -> Launcher:
    """The launcher, which launches its kernel early from now on. The kernel must wait before it touches memory."""
    if early:
        launcher.options["launch_pdl"] = True
    return launcher
