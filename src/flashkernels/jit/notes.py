"""Finding out what a call would compile, without a GPU and without compiling: a scope in which kernels are noted."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol


class Program(Protocol):
    """One kernel that can be compiled for one architecture, without a GPU."""

    @property
    def key(self) -> str:
        """Its key in the cache: a hash of all that it depends on."""

    @property
    def label(self) -> str:
        """A name for people."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Of its files in the cache."""

    def cached(self) -> bool:
        """Whether the cache has it, whole."""

    def build(self) -> None:
        """Compiles it into the cache, unless it is there."""

    def preload(self) -> None:
        """Makes it ready to be launched by this process; the cache has it."""


class Noted(Exception):
    """Ends a plan that cannot go on without the machine code of the program that it has just noted."""


@dataclass
class Notes:
    """What has been noted, for GPUs of compute capability `cc`, as Triton spells it: 90."""

    cc: int
    programs: list[Program] = field(default_factory=list)


_notes: contextvars.ContextVar[Notes | None] = contextvars.ContextVar("flashkernels_notes", default=None)


def current() -> Notes | None:
    return _notes.get()


@contextlib.contextmanager
def noting(cc: int) -> Iterator[list[Program]]:
    """Within it, launches of kernels do nothing but add to the list what they would compile."""
    token = _notes.set(Notes(cc))
    found = _notes.get()
    assert found is not None
    try:
        with contextlib.suppress(Noted):
            yield found.programs
    finally:
        _notes.reset(token)
