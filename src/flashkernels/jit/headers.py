"""Headers of CUDA programs: those of a folder as they are, and the one that holds a variant's constants."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path


def texts(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """The headers of a folder, by the names that programs include them with."""
    return {f"{name}.cuh": (folder / f"{name}.cuh").read_text() for name in names}


def constants(numbers: Mapping[str, int], flags: Mapping[str, bool], *first: str) -> str:
    """`config.cuh`: all that is decided before compiling. `first` are lines of other kinds.

    >>> print(constants({"D": 72}, {"CAUSAL": True}, "#define CLUSTERED 0"), end="")
    #pragma once
    #define CLUSTERED 0
    constexpr int D = 72;
    constexpr bool CAUSAL = true;
    """
    lines = ["#pragma once", *first]
    lines += [f"constexpr int {name} = {value};" for name, value in numbers.items()]
    lines += [f"constexpr bool {name} = {str(value).lower()};" for name, value in flags.items()]
    return "\n".join(lines) + "\n"
