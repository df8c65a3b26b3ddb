"""Every environment variable that this package reads: its name, its default and what it means.

A variable is read when it is needed, not at import, unless its text says otherwise; an empty one counts as not set.
What torch, Triton and CUDA read (TRITON_INTERPRET, TRITON_CACHE_DIR, CUDA_VISIBLE_DEVICES, CUDA_HOME) is not here.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
TRUE, FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


@dataclass(frozen=True)
class Variable:
    """One variable: `default` is what holds without it, in words or as the text one would give it."""

    name: str
    default: str
    meaning: str

    def text(self) -> str:
        """What it is set to; nothing where it is not set."""
        return os.environ.get(self.name, "")


LOG = Variable(
    "FLASHKERNELS_LOG", "", "what to log, separated by commas: `dispatch` says which implementation serves each new "
    "problem and why. Read at import.",
)  # fmt: skip
CACHE = Variable(
    "FLASHKERNELS_CACHE", "~/.cache/flashkernels", "the folder of compiled kernels; may be read-only. XDG_CACHE_HOME "
    "moves the default.",
)  # fmt: skip
CACHE_BYTES = Variable(
    "FLASHKERNELS_CACHE_BYTES", "4G", "the most that folder may hold (512M, 4G, 0: no bound); what was used longest "
    "ago goes first. A folder made by `flashkernels compile` is never cut.",
)  # fmt: skip
STRICT = Variable("FLASHKERNELS_STRICT", "0", "1: a kernel that would have to be compiled raises CompileStall instead.")
COMMIT = Variable(
    "FLASHKERNELS_COMMIT", "that of the checkout", "the commit that `flashkernels bench` writes into its results."
)
VARIABLES = (LOG, CACHE, CACHE_BYTES, STRICT, COMMIT)


def logs(topic: str) -> bool:
    """Whether FLASHKERNELS_LOG names this topic."""
    return topic in LOG.text().split(",")


def cache_folder() -> Path:
    """The folder of compiled kernels as it was named: a ~ is still in it."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "flashkernels")
    return Path(CACHE.text() or home)


def cache_bytes() -> int:
    """The most bytes that folder may hold; 0: no bound."""
    return size(CACHE_BYTES.text() or CACHE_BYTES.default, CACHE_BYTES.name)


def strict() -> bool:
    return switch(STRICT)


def commit() -> str:
    return COMMIT.text()


def size(text: str, name: str) -> int:
    """A number of bytes, with or without a unit of 1024.

    >>> size("512M", "LIMIT"), size("4GiB", "LIMIT"), size("1000", "LIMIT")
    (536870912, 4294967296, 1000)
    """
    found = re.fullmatch(r"(\d+)\s*([kmgt]?)(i?b)?", text.strip().lower())
    if found is None:
        raise ValueError(f"{name}={text!r} is not a number of bytes, such as 1000000, 512M or 4G")
    return int(found[1]) * UNITS[found[2]]


def switch(variable: Variable) -> bool:
    """A variable that is on or off."""
    text = variable.text().strip().lower()
    if text not in TRUE + FALSE:
        raise ValueError(f"{variable.name}={variable.text()!r} is not 1 or 0")
    return text in TRUE
