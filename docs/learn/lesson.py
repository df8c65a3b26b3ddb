"""What every lesson shares: where it runs, its check against fp64, its time, and its point under the roofs.

A lesson imports this before triton: without a GPU its kernels run in Triton's interpreter, which Triton decides when it
is imported.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from figures import Measured, columns

from flashkernels.bench import timing
from flashkernels.bench.results import describe, write
from flashkernels.hardware import detect

GPU = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET", "0") in ("", "0")
if not GPU:
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET", "0") in ("", "0"):
        raise RuntimeError("triton was imported without TRITON_INTERPRET=1: no kernel can run here without a GPU")
    os.environ["TRITON_INTERPRET"] = "1"
DEVICE = "cuda" if GPU else "cpu"

ROUNDS, HEAT_SECONDS = 3, 1.0
HERE = Path(__file__).parent
T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """One thing to check and time. The first case of a lesson is its point in the picture of the part."""

    name: str  # a word or two: what is special about it
    run: Callable[[], torch.Tensor]
    oracle: Callable[[torch.dtype], torch.Tensor]  # the same from plain torch, all of it computed in this dtype
    flops: float  # what the mathematics asks for, whatever the kernel does
    floor: float  # bytes that must move: each input and each output once
    moved: float  # bytes that this version moves: inputs and outputs of each of its launches, once a launch
    dtype: str = "fp16"  # which roof
    plain: torch.dtype = torch.float16  # what the allowed error comes from: plain torch in this dtype
    launch: timing.Launch = "graph"  # eager, where a CUDA graph cannot hold it
    sums: float = 0.0  # of the largest result, that the machine's own sums may lose beyond that


def pick(on_a_gpu: T, interpreted: T) -> T:
    """A size: the real one on a GPU, a tiny one for the interpreter."""
    return on_a_gpu if GPU else interpreted


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """Normal numbers, the same in every run."""
    generator = torch.Generator(device=DEVICE).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=DEVICE).to(dtype)


def check(case: Case) -> tuple[float, float]:
    """Largest error against fp64 and the largest allowed; raises where it is larger.

    Allowed is twice the error of plain torch in the case's dtype, one rounding of the largest result, and what the
    machine's sums lose.
    """
    exact = case.oracle(torch.float64).double()
    rounding = torch.finfo(case.plain).eps if case.plain.is_floating_point else 0.0
    allowed = 2 * _furthest(case.oracle(case.plain), exact) + (rounding + case.sums) * float(exact.abs().max())
    error = _furthest(case.run(), exact)
    if not error <= allowed:  # also where it is NaN
        raise SystemExit(f"{case.name}: wrong: the largest error is {error:.3g}, {allowed:.3g} is allowed")
    return error, allowed


def _furthest(found: torch.Tensor, exact: torch.Tensor) -> float:
    if found.shape != exact.shape:
        raise SystemExit(f"the result has shape {tuple(found.shape)}, the reference {tuple(exact.shape)}")
    return float((found.double() - exact).abs().max())


def measure(cases: Iterable[Case]) -> list[Measured]:
    """Checks every case, then times those of a lesson in turns: cold L2, clocks settled, the median of all rounds."""
    held = list(cases)
    if len({case.name for case in held}) < len(held):
        raise ValueError(f"two cases have the same name: {', '.join(case.name for case in held)}")
    errors = {case.name: check(case) for case in held}
    if GPU:
        timing.heat(HEAT_SECONDS)
    samplers = {
        case.name: timing.sampler(timing.Call(case.run), device=DEVICE, l2="cold", launch=case.launch) for case in held
    }
    found = []
    for case, times in zip(held, timing.interleave(samplers, ROUNDS if GPU else 1).values(), strict=True):
        if isinstance(times, Exception):
            raise times
        flops, floor, moved = float(case.flops), float(case.floor), float(case.moved)
        found.append(Measured(case.name, case.dtype, flops, floor, moved, times.p50, *errors[case.name]))
    return found


def _turn() -> None:
    """Waits until no other lesson measures, where `measure.py` runs several; the turn ends with this process."""
    if path := os.environ.get("LESSON_TURN"):
        import fcntl

        fcntl.flock(os.open(path, os.O_RDWR), fcntl.LOCK_EX)


def main(file: str, cases: Callable[[], Iterable[Case]]) -> None:
    """The command line of a lesson: checks, times, prints, and writes JSON where asked to."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the measurement there")
    into: Path | None = parser.parse_args().json
    gpu = detect() if GPU else None
    _turn()
    rows = measure(cases())
    name = str(Path(file).resolve().relative_to(HERE).with_suffix(""))
    print(f"{name} on {gpu.name if gpu else 'the CPU, interpreted or emulated: the times mean nothing'}")
    head, lines = columns(rows, gpu)
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    for line in (head, *lines):
        first, *rest = zip(line, widths, strict=True)
        print("  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]))
    if into:
        data: dict[str, Any] = {"meta": describe(DEVICE, quick=False), "cases": [vars(row) for row in rows]}
        write(into, json.dumps(data, indent=1) + "\n")
