"""Warp specialisation: who does what in the Hopper kernel, as a model of one multiprocessor, and the kernel itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import lesson
from plain import case, inputs

import flashkernels as fk
from flashkernels.hardware import detect

FLOPS_A_CYCLE, EXPONENTIALS_A_CYCLE = 4096, 16  # of one multiprocessor of an H200
UNITS = ("loads", "tensor", "exp")
LOAD_BYTES_A_CYCLE = 64  # an assumption: an L2 that no other multiprocessor reads at the same time


@dataclass(frozen=True)
class Op:
    """Work for one unit, that can start when the others it names are done."""

    name: str  # "qk 3 of 0": key tile 3, warpgroup 0
    unit: str
    cycles: float
    after: tuple[str, ...]


def producer(tiles: int, keys: int, d: int, stages: int, warpgroups: int) -> Iterator[Op]:
    """One warp: it only issues loads. A stage of K is free again after every Q·Kᵀ, one of V after every P·V."""
    cycles = keys * d * 2 / LOAD_BYTES_A_CYCLE
    for i in range(tiles):
        for name, reader in (("k", "qk"), ("v", "pv")):
            freed = tuple(f"{reader} {i - stages} of {w}" for w in range(warpgroups)) if i >= stages else ()
            yield Op(f"{name} {i}", "loads", cycles, freed)


def consumer(w: int, tiles: int, keys: int, d: int, *, overlap: bool) -> Iterator[Op]:
    """A warpgroup of 64 rows: it only computes. `overlap`: exponentials while P·V of the tile before runs."""
    product, softmax = 2 * 64 * keys * d / FLOPS_A_CYCLE, 64 * keys / EXPONENTIALS_A_CYCLE
    for i in range(tiles):
        before = (f"{'exp' if overlap else 'pv'} {i - 1} of {w}",) if i else ()
        yield Op(f"qk {i} of {w}", "tensor", product, (f"k {i}", *before))
        if overlap and i:
            yield Op(f"pv {i - 1} of {w}", "tensor", product, (f"v {i - 1}", f"exp {i - 1} of {w}"))
        yield Op(f"exp {i} of {w}", "exp", softmax, (f"qk {i} of {w}",))
        if not overlap or i == tiles - 1:
            yield Op(f"pv {i} of {w}", "tensor", product, (f"v {i}", f"exp {i} of {w}"))


def timeline(d: int, keys: int, warpgroups: int, *, overlap: bool, stages: int = 2, tiles: int = 32) -> dict[Op, float]:
    """When each op starts: a role issues its ops in order, a unit does one at a time, first come first served."""
    roles = [list(producer(tiles, keys, d, stages, warpgroups))]
    roles += [list(consumer(w, tiles, keys, d, overlap=overlap)) for w in range(warpgroups)]
    done: dict[str, float] = {}
    free = dict.fromkeys(UNITS, 0.0)
    starts: dict[Op, float] = {}
    while any(roles):
        ready = [role[0] for role in roles if role and all(name in done for name in role[0].after)]
        came = {op: max([0.0, *(done[name] for name in op.after)]) for op in ready}
        op = min(ready, key=lambda op: (max(came[op], free[op.unit]), came[op]))
        start = starts[op] = max(came[op], free[op.unit])
        done[op.name] = free[op.unit] = start + op.cycles
        next(role for role in roles if role and role[0] is op).pop(0)
    return starts


def busy(starts: dict[Op, float], unit: str) -> float:
    """The share of the time in which a unit works."""
    end = max(start + op.cycles for op, start in starts.items())
    return sum(op.cycles for op in starts if op.unit == unit) / end


def picture(starts: dict[Op, float], cycles_a_letter: float = 64, width: int = 72) -> str:
    """A line a unit: the warpgroup (or L) that it works for, a dot where it waits."""
    lines = []
    for unit in UNITS:
        letters = ["."] * width
        for op, start in starts.items():
            if op.unit == unit:
                letter = op.name[-1] if unit != "loads" else "L"
                for i in range(round(start / cycles_a_letter), round((start + op.cycles) / cycles_a_letter)):
                    letters[i : i + 1] = [letter] if i < width else []
        lines.append(f"{unit:>6} {''.join(letters)}")
    return "\n".join(lines)


def show() -> None:
    for d, keys in ((64, 128), (128, 128)):
        for warpgroups, overlap in ((1, False), (1, True), (2, False), (2, True)):
            starts = timeline(d, keys, warpgroups, overlap=overlap)
            how = "overlap" if overlap else "in turns"
            print(f"D={d}, {warpgroups} x 64 rows, {how}: tensor cores {busy(starts, 'tensor'):.0%} busy")
            print(picture(starts))


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, impl: str) -> torch.Tensor:
    return fk.attention(q[None], k[None], v[None], layout="bhsd", impl=impl)[0]


def cases() -> Iterator[lesson.Case]:
    gpu = detect() if lesson.GPU else None
    best = "hopper" if gpu and gpu.has_wgmma else "triton" if gpu else "torch"
    yield case(f"{best}, D=64", attention, *inputs(), impl=best)
    if best == "hopper":
        yield case("triton, D=64", attention, *inputs(), impl="triton")
    yield case(f"{best}, D=128", attention, *inputs(head_dim=128, heads=lesson.pick(16, 2)), impl=best)


if __name__ == "__main__":
    show()
    lesson.main(__file__, cases)
