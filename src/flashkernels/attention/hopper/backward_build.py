"""Compiling a variant of the backward for a GPU that is not there, and a list of variants that between them have every
flag, size and kind of tile."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from flashkernels.attention.hopper import backward_source as source
from flashkernels.attention.hopper.backward_source import THREADS, BackwardVariant
from flashkernels.attention.hopper.backward_tiles import SHARED_LIMIT, by_dimension
from flashkernels.attention.hopper.build import spilled, warnings
from flashkernels.jit import nvrtc
from flashkernels.jit.offline import Resources, resources

MOST_SPILLS = 160  # bytes; at the ends of a tile they cost nothing, in the loop over queries they would
FEW_MOVES = 50  # to uniform registers, outside of all loops
MOST_REGISTERS = 65536 // THREADS // 8 * 8  # of a thread at launch


@dataclass(frozen=True)
class BackwardReport:
    """One compiled variant."""

    variant: BackwardVariant
    kernels: dict[str, Resources]  # those with matrix products, by name
    spills: dict[str, int]  # bytes that a thread of each puts aside
    warnings: tuple[str, ...]

    @property
    def faults(self) -> list[str]:
        """What no variant may have, in words."""
        # C7510 to C7519: ptxas waits after each wgmma, for the reason that the line gives
        found = [f"wgmma is serialised: {line}" for line in self.warnings if re.search(r"\bC75\d\d\b", line)]
        for name, made in self.kernels.items():
            found += [f"{name}: {fault}" for fault in self._faults_of(made)]
            if self.spills[name] > MOST_SPILLS:
                found.append(f"{name}: spills {self.spills[name]} bytes; the limit is {MOST_SPILLS}")
        return found

    @staticmethod
    def _faults_of(made: Resources) -> list[str]:
        found = []
        if made.registers > MOST_REGISTERS:
            found.append(f"{made.registers} registers a thread; {THREADS} threads leave {MOST_REGISTERS}")
        if made.shared > SHARED_LIMIT:
            found.append(f"{made.shared} bytes of shared memory; the limit is {SHARED_LIMIT}")
        if made.spills > MOST_SPILLS:
            found.append(f"{made.spills} bytes of local memory; the limit is {MOST_SPILLS}")
        if not made.count("HGMMA"):
            found.append("has no wgmma")
        if (moves := made.count("R2UR")) > max(made.count("HGMMA"), FEW_MOVES):
            found.append(f"{moves} moves to uniform registers: ptxas takes a loop for divergent that is not")
        return found


def build(variant: BackwardVariant) -> BackwardReport:
    """Compiles one variant with NVRTC, or finds it in the disk cache. Needs no GPU."""
    made = nvrtc.compiled(*source.program(variant))
    kernels = {name: resources(made.cubin, shared, entry=name) for name, shared in variant.kernels.items()}
    spills = {name: spilled(made.log, name)[0] for name in kernels}
    return BackwardReport(variant, kernels, spills, warnings(made.log))


def variant(dim: int, dim_v: int = 0, deterministic: bool = False, **flags: bool) -> BackwardVariant:
    """A variant with the tile that its problems take."""
    logits = {name: on for name, on in flags.items() if name in ("left", "right", "softcap", "alibi", "varlen")}
    tile = by_dimension(dim, dim_v or dim, deterministic=deterministic, **logits)
    return BackwardVariant(dim, dim_v or dim, tile, own_dq=deterministic or tile.paired or tile.wide, **flags)


def label(one: BackwardVariant) -> str:
    """A short name: sizes, tile and flags.

    >>> label(variant(72, 104, right=True, want_k=False))
    'd72-v104-split-q3-separate-staged-sends-right-qv'
    """
    flags = ("fp16", "left", "right", "softcap", "alibi", "varlen", "own_dq")
    dims = [f"d{one.head_dim}"] + [f"v{one.head_dim_v}"] * (one.head_dim_v != one.head_dim)
    wanted = "".join(name for name in "qkv" if getattr(one, f"want_{name}"))
    return "-".join([*dims, one.tile.name, *(x for x in flags if getattr(one, x)), *([wanted] * (wanted != "qkv"))])


DIMS = tuple(range(16, 257, 8))
WIDE = (264, 272, 320, 328, 384, 448, 504, 512)
WIDE_MIXED = ((512, 64), (64, 512), (16, 264), (264, 16), (320, 256), (512, 448))
MIXED = ((192, 128), (128, 192), (64, 128), (128, 64), (72, 104), (104, 72), (40, 136), (16, 256), (256, 16))
LOGITS: dict[str, Any] = dict.fromkeys(("left", "right", "alibi"), True)
FLAGS: tuple[dict[str, Any], ...] = (
    {"left": True}, {"left": True, "right": True}, {"alibi": True}, {"softcap": True}, {"varlen": True},
    {"fp16": True}, {"right": True, "varlen": True}, {"right": True, "softcap": True},
    {"deterministic": True}, {"deterministic": True, "right": True},
    {"want_q": False}, {"want_k": False}, {"want_v": False}, {"want_k": False, "want_v": False},
    LOGITS | {"varlen": True}, LOGITS | {"varlen": True, "deterministic": True},
    LOGITS | {"varlen": True, "softcap": True, "fp16": True},
)  # fmt: skip


# Tiles that fit and that no rule takes until a GPU has timed them: head dimension, and what they have other than the
# rule's (docs/notes/hopper_backward.md, "Next").
_TALL = {"halves": True, "queries": 128, "staged": True, "sends": True, "separate": False, "v_in_registers": True}
CANDIDATES: dict[str, tuple[int, dict[str, Any]]] = {
    "halves": (64, {"halves": True}),
    "halves, K and V": (64, {"halves": True, "k_in_registers": True, "v_in_registers": True}),
    "128 queries": (64, {"halves": True, "queries": 128}),
    "128 queries, V": (64, {"halves": True, "queries": 128, "v_in_registers": True}),
    "48, 128 queries, K and V": (48, _TALL | {"k_in_registers": True}),
    "56, 128 queries, V": (56, _TALL | {"k_in_registers": False}),
    "80, V": (80, {"v_in_registers": True}),
    "80, K and V": (80, {"k_in_registers": True, "v_in_registers": True, "separate": False}),
    "88, V": (88, {"v_in_registers": True, "separate": False}),
    "104, V": (104, {"v_in_registers": True}),
    "48, skips": (48, {"skips": True}),
    "80, skips, V": (80, {"skips": True, "v_in_registers": True}),
    "96, skips": (96, {"skips": True}),
}


def retiled(one: BackwardVariant, **knobs: Any) -> BackwardVariant:
    """The same with another tile."""
    return replace(one, tile=replace(one.tile, **knobs))


def candidate(name: str, **flags: bool) -> BackwardVariant:
    dim, knobs = CANDIDATES[name]
    return retiled(variant(dim, **flags), **knobs)


def _all() -> Iterator[BackwardVariant]:
    for dim in DIMS:
        yield variant(dim)
        yield variant(dim, right=True)
    for dim, dim_v in MIXED:
        yield variant(dim, dim_v, right=dim > dim_v)
    for dim in (64, 72, 128, 256):
        for flags in FLAGS:
            yield variant(dim, **flags)
    for dim in (96, 104, 112, 120, 192):
        yield variant(dim, varlen=True, **LOGITS)
    for one in (*map(variant, (64, 80, 88, 96)), variant(64, alibi=True), variant(96, fp16=True)):
        yield retiled(one, cluster=2)
    yield replace(variant(192), own_dq=False)  # pairs that add dQ
    yield replace(variant(256, right=True), own_dq=False)


def _wide() -> Iterator[BackwardVariant]:
    for dim in WIDE:
        yield variant(dim, right=dim % 16 == 0)
    for dim, dim_v in WIDE_MIXED:
        yield variant(dim, dim_v, right=dim > dim_v)
    for flags in FLAGS:
        if not {"deterministic", "want_q", "want_k", "want_v"} & {*flags}:
            yield variant(512, **flags)
    yield variant(512)


VARIANTS, WIDE_VARIANTS = (tuple(dict.fromkeys(found)) for found in (_all(), _wide()))
