"""Chooses the implementation that serves a problem, and says why.

An op lists its implementations, best first, in a table of `Impl` rows. The first row that does not reject the
problem serves it. Nothing falls back silently: naming an implementation that cannot serve raises, with its reason.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any

from flashkernels.hardware import Gpu
from flashkernels.jit import environment
from flashkernels.jit.mode import interpreting

log = logging.getLogger("flashkernels.dispatch")
if environment.logs("dispatch"):
    log.setLevel(logging.INFO)
    log.addHandler(logging.StreamHandler())


ASKING = "?"  # as the name of an implementation: the call is not made, `Asked` has its problem


class UnsupportedError(ValueError):
    """No implementation, or not the one asked for, can serve this call; the message has the reason."""


class Asked(Exception):
    """Ends a call with impl="?" where it would choose, after its own checks."""

    def __init__(self, problem: Any, gpu: Gpu | None) -> None:
        super().__init__(f"impl={ASKING!r} asks what would serve {problem}; explain() does")
        self.problem, self.gpu = problem, gpu


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


def check_impl(impl: Any, impls: Sequence[Impl]) -> None:
    """What is no string would not get through an op's schema to `select`, which names those that it does not know."""
    if not isinstance(impl, str):
        raise ValueError(f"impl={impl!r} is not one of 'auto', {', '.join(repr(each.name) for each in impls)}")


def select(impls: Sequence[Impl], problem: Any, gpu: Gpu | None, name: str = "auto") -> Impl:
    """The implementation called `name`, or with "auto" the first that does not reject the problem."""
    names = [impl.name for impl in impls]
    if name == ASKING:
        raise Asked(problem, gpu)
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


def serving(impls: Sequence[Impl], problem: Any, gpu: Gpu | None, name: str = "auto") -> ModuleType:
    """The module of what `select` chooses. It warns where that is torch's plain operations on a GPU, and nobody asked
    for them: they are slow there."""
    impl = select(impls, problem, gpu, name)
    if impl.name == "torch" and gpu is not None and name == getattr(problem, "impl", "auto") == "auto":
        reasons = "; ".join(f"{one.name}: {one.reason}" for one in verdicts(impls, problem, gpu) if one.reason)
        warnings.warn(f"no kernel serves on {gpu.name}, torch's own operations do: {problem} ({reasons})", stacklevel=3)
    return impl.load()


@dataclass(frozen=True)
class Explanation:
    """What decides one call. `print` it, or read the fields; those of the roofline are None without a GPU, or where it
    has no rate for the dtype."""

    op: str
    problem: Any  # has dtype, flops() and bytes()
    gpu: Gpu | None
    impl: str
    named: bool  # asked for by name, not chosen
    verdicts: list[Verdict]
    tile: Any = None  # how the kernel that serves cuts its work, where there is a choice; it has a name
    words: tuple[str, ...] = ()  # what the tile means

    @property
    def intensity(self) -> float:
        """FLOPs for every byte that must move."""
        return self.problem.flops() / max(1, self.problem.bytes())

    @property
    def compute(self) -> float | None:
        """Seconds that the arithmetic takes at the GPU's peak."""
        if self.gpu is None or self.problem.dtype not in self.gpu.peak:
            return None
        return self.problem.flops() / self.gpu.peak[self.problem.dtype]

    @property
    def memory(self) -> float | None:
        """Seconds that the traffic takes at the GPU's bandwidth."""
        return None if self.gpu is None else self.problem.bytes() / self.gpu.bandwidth

    @property
    def floor(self) -> float | None:
        """The roofline: no kernel is faster than this many seconds on this GPU."""
        return None if self.compute is None or self.memory is None else max(self.compute, self.memory)

    @property
    def bound(self) -> str | None:
        if self.compute is None or self.memory is None:
            return None
        return "compute" if self.compute >= self.memory else "memory"

    @property
    def predicted(self) -> float | None:
        """Seconds that the call is expected to take; None where nothing like it was measured."""
        return None

    def title(self) -> str:
        """The op and its problem: what the problem requires, and what is not as usual."""
        known = [f for f in fields(self.problem) if f.name not in ("op", "dtype", "device", "traffic")]
        told = [(f.name, getattr(self.problem, f.name)) for f in known if getattr(self.problem, f.name) != f.default]
        return " ".join([self.op, self.problem.dtype, *(f"{name}={value}" for name, value in told)])

    def tiling(self) -> list[str]:
        """Lines on how the work is cut."""
        return [f"tile: {self.tile.name}", *(f"  {line}" for line in self.words)] if self.tile else []

    def notes(self) -> list[str]:
        """Lines after the roofline."""
        if not self.compute or self.memory is None:
            return []
        return [f"  memory {self.memory * 1e6:.2f} µs, compute {self.compute * 1e6:.2f} µs"]

    def __str__(self) -> str:
        lines = [f"{self.title()} on {self.gpu.name if self.gpu else 'the CPU'}", "", f"implementation: {self.impl}"]
        instead = f"could serve, but {self.impl} was asked for" if self.named else "could serve, but a better one does"
        lines += [f"  not {v.name}: {v.reason or instead}" for v in self.verdicts if v.name != self.impl]
        if tiling := self.tiling():
            lines += ["", *tiling]
        flops, moved = self.problem.flops(), f"{self.problem.bytes() / 1e6:.4g} MB at least"
        work = f"{flops / 1e9:.4g} GFLOP, {moved}, {self.intensity:.0f} FLOP/byte" if flops else moved
        lines += ["", f"work: {work}"]
        if self.floor is not None:
            lines.append(f"roofline: {self.bound} bound, at least {self.floor * 1e6:.1f} µs")
        return "\n".join([*lines, *self.notes()])


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
