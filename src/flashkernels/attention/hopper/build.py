"""Compiling a variant for a GPU that is not there, and what its machine code and the compiler's words say of it."""

from __future__ import annotations

import multiprocessing
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from flashkernels.attention.hopper import source
from flashkernels.attention.hopper.source import Variant
from flashkernels.attention.hopper.tiles import SHARED_LIMIT
from flashkernels.attention.hopper.variants import label
from flashkernels.jit import nvrtc
from flashkernels.jit.offline import Resources, resources

MOST_SPILLS = 128  # bytes; a few at the ends of a tile cost nothing, in the loop over keys they would


@dataclass(frozen=True)
class Report:
    """One compiled variant."""

    variant: Variant
    resources: Resources
    spills: int  # bytes that a thread puts aside
    reloads: int  # bytes of them that its code fetches, in all places together
    warnings: tuple[str, ...]

    @property
    def faults(self) -> list[str]:
        """What no variant may have, in words."""
        # C7510 to C7519: ptxas waits after each wgmma, for the reason that the line gives
        found = [f"wgmma is serialised: {line}" for line in self.warnings if re.search(r"\bC75\d\d\b", line)]
        cap, made = most_registers(self.variant), self.resources
        if made.registers > cap:
            found.append(f"{made.registers} registers a thread; {self.variant.threads} threads leave {cap}")
        if made.shared > SHARED_LIMIT:
            found.append(f"{made.shared} bytes of shared memory; the limit is {SHARED_LIMIT}")
        if self.spills > MOST_SPILLS:
            found.append(f"spills {self.spills} bytes; the limit is {MOST_SPILLS}")
        if not made.count(matrix_opcode(self.variant)):
            found.append("has no wgmma")
        return found


def build(variant: Variant) -> Report:
    """Compiles one variant with NVRTC, or finds it in the disk cache. Needs no GPU."""
    made = nvrtc.compiled(*source.program(variant))
    used = resources(made.cubin, variant.shared, entry="forward")
    return Report(variant, used, *spilled(made.log, "forward"), warnings(made.log))


def build_all(variants: Iterable[Variant], jobs: int | None = None) -> Iterator[tuple[str, list[str]]]:
    """The label and the faults of each variant, compiled by `jobs` processes (default: as many as there are cores)."""
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(_checked, variants)


def _checked(variant: Variant) -> tuple[str, list[str]]:
    try:
        return label(variant), build(variant).faults
    except nvrtc.CompileError as error:
        return label(variant), [str(error)]


def matrix_opcode(variant: Variant) -> str:
    """The machine's name of wgmma, by the type of its operands."""
    return "QGMMA" if variant.fp8 else "HGMMA"


def most_registers(variant: Variant) -> int:
    """Of a thread at launch; `setmaxnreg` then moves them from the producer to the consumers."""
    return min(255, 65536 // variant.threads // 8 * 8)


def spilled(log: str, entry: str) -> tuple[int, int]:
    """Bytes of spill stores and spill loads of one kernel, as `ptxas -v` counts them.

    >>> spilled("Function properties for f\\n 8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads", "f")
    (4, 12)
    """
    words = rf"Function properties for {entry}\n.*?(\d+) bytes spill stores, (\d+) bytes spill loads"
    found = re.search(words, log)
    if found is None:
        raise RuntimeError(f"the log has no spills of {entry}: {log!r}")
    return int(found[1]), int(found[2])


def warnings(log: str) -> tuple[str, ...]:
    """The lines that speak of a problem: warnings, and remarks that have a number.

    >>> warnings("ptxas info    : (C7510) Potential Performance Loss: ...\\nptxas info    : Used 4 registers")
    ('ptxas info    : (C7510) Potential Performance Loss: ...',)
    """
    return tuple(line for line in log.splitlines() if re.search(r"warning|\(C\d+\)", line, re.IGNORECASE))
