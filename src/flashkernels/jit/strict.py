"""Strict mode: a kernel that would have to be compiled is an error, because a request would wait for the compiler."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from flashkernels.jit import environment

_lock = threading.Lock()
_strict = 0  # `with strict():` blocks that are open
_allowed = threading.local()


class CompileStall(RuntimeError):
    """In strict mode a kernel was needed that is neither loaded nor in the cache. The message names it and the command
    that builds it."""


@contextlib.contextmanager
def strict() -> Iterator[None]:
    """Within it, in all threads of the process, no kernel of this package is compiled: `CompileStall` is raised.

    What is in memory, in FLASHKERNELS_CACHE or in Triton's own cache is used as always. FLASHKERNELS_STRICT=1 does the
    same from the start; `fk.warmup` may compile even then. Triton kernels are not watched while a
    profiler hooks into Triton's launches.

    >>> import torch, flashkernels as fk
    >>> q = torch.randn(1, 8, 2, 64)
    >>> with fk.strict():
    ...     fk.attention(q, q, q).shape  # on the CPU nothing is ever compiled
    torch.Size([1, 8, 2, 64])
    """
    global _strict
    with _lock:
        _strict += 1
    try:
        yield
    finally:
        with _lock:
            _strict -= 1


@contextlib.contextmanager
def allowed() -> Iterator[None]:
    """Within it this thread may compile, in strict mode too: what warms up does so."""
    before = getattr(_allowed, "value", False)
    _allowed.value = True
    try:
        yield
    finally:
        _allowed.value = before


def active() -> bool:
    return (_strict > 0 or environment.strict()) and not getattr(_allowed, "value", False)


def stall(what: str) -> None:
    """Raises in strict mode: `what` is about to be compiled."""
    if active():
        raise CompileStall(
            f"{what} is not compiled, and strict mode forbids to do it now. Call fk.warmup(...) with this problem "
            "before, or build it ahead of time: `flashkernels compile --gpu GPU --ops OP --out DIR`, then set "
            "FLASHKERNELS_CACHE=DIR"
        )
