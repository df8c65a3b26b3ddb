"""Chooses the implementation that serves a problem, and says why.

An op lists its implementations, best first, in a table of `Impl` rows. The first row that does not reject the
problem serves it. Nothing falls back silently: naming an implementation that cannot serve raises, with its reason.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from flashkernels.hardware import Gpu
from flashkernels.jit import environment
from flashkernels.jit.mode import interpreting

log = logging.getLogger("flashkernels.dispatch")
if environment.logs("dispatch"):
    log.setLevel(logging.INFO)
    log.addHandler(logging.StreamHandler())


class UnsupportedError(ValueError):
    """No implementation, or not the one asked for, can serve this call; the message has the reason."""


Answer = Callable[[Any, "Gpu | None"], "str | None"]


def _never(problem: Any, gpu: Gpu | None) -> str | None:
    return None


@dataclass(frozen=True)
class Impl:
    """One row of an op's table: a name, the module that implements it, and the words with which it declines.

    `rejects` says why it cannot serve a problem. `defers` says why "auto" should leave one that it could serve to a
    later row. Both return None where there is no such reason.
    """

    name: str
    module: str
    rejects: Answer = _never
    defers: Answer = _never

    def load(self) -> ModuleType:
        return importlib.import_module(self.module)


@dataclass(frozen=True)
class Verdict:
    """What one implementation says to a problem: `reason` is None where it can serve."""

    name: str
    reason: str | None


def verdicts(impls: Sequence[Impl], problem: Any, gpu: Gpu | None) -> list[Verdict]:
    """Every implementation's answer, in the order of preference."""
    return [Verdict(impl.name, impl.rejects(problem, gpu) or impl.defers(problem, gpu)) for impl in impls]


def select(impls: Sequence[Impl], problem: Any, gpu: Gpu | None, name: str = "auto") -> Impl:
    """The implementation called `name`, or with "auto" the first that does not reject the problem."""
    names = [impl.name for impl in impls]
    if name != "auto" and name not in names:
        raise ValueError(f"impl={name!r} is not one of 'auto', {', '.join(map(repr, names))}")
    refusals: list[str] = []
    for impl in impls:
        if name not in ("auto", impl.name):
            continue
        reason = impl.rejects(problem, gpu)
        if reason is None and name == "auto":
            reason = impl.defers(problem, gpu)
        if reason is None:
            log.info("%s serves %s%s", impl.name, problem, f" ({'; '.join(refusals)})" if refusals else "")
            return impl
        refusals.append(f"{impl.name}: {reason}")
    raise UnsupportedError(f"impl={name!r} cannot serve this call: {'; '.join(refusals)}")


# --- the words with which Triton kernels decline, whatever the op


def lacks_triton(device: str, dtype: str, gpu: Gpu | None) -> str | None:
    """Why no Triton kernel can run here on such tensors, or None."""
    if device == "cpu":
        if not interpreting():
            return "needs a GPU (or TRITON_INTERPRET=1 set before the import)"
        if dtype == "bf16":
            return "Triton's interpreter computes bf16 wrongly"
    elif device != "cuda" or gpu is None:
        return f"needs an NVIDIA GPU, the tensors are on {device}"
    elif gpu.capability < (8, 0):
        return f"needs compute capability 8.0, {gpu.name} has {gpu.capability[0]}.{gpu.capability[1]}"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return "has no fp64 kernel" if dtype == "fp64" else None


def leaves_the_cpu(problem: Any, gpu: Gpu | None) -> str | None:
    """The interpreter is for tests: it serves CPU tensors only when asked for by name."""
    return "Triton's interpreter is slow: name impl='triton' to use it" if problem.device == "cpu" else None
