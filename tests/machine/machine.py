"""Runs kernels of CUDA C++ on this CPU: compiles them to PTX, and has machine.cpp execute that."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.machine import ptx, registers

from flashkernels.jit import nvrtc

FOLDER = Path(__file__).parent
SOURCES = ("machine.cpp", "numbers.h", "program.h", "clocks.h", "shared.h", "warp.h", "block.h", "engine.h", "tensor.h")
FLAGS = ("-O2", "-march=native", "-std=c++20", "-shared", "-fPIC")
SPECIALS = ("%tid.x", "%ntid.x", "%ctaid.x", "%nctaid.x", "%laneid", "%cluster_ctarank", "%cluster_nctarank",
            "ALL_THREADS", "%ntid.y", "%smid", "%clusterid.x")  # fmt: skip
SAME = {"%ntid.z": "%ntid.y", "%nctaid.y": "%ntid.y", "%nctaid.z": "%ntid.y"}
ZERO = ("%tid.y", "%tid.z", "%ctaid.y", "%ctaid.z")
KINDS = ("shared", "param", "local")
BUDGET = 2_000_000_000  # instructions of a launch
MESSAGE = 1 << 16


class KernelFault(AssertionError):
    """A kernel did what it may not, or stopped before its end."""


class TooLong(KernelFault):
    """A launch took more than BUDGET instructions."""


def compiler() -> str | None:
    return shutil.which("g++") or shutil.which("clang++") or shutil.which("c++")


def missing() -> str:
    """Why there is none here, or nothing. On Linux the development extra installs NVRTC: without it tests fail."""
    if compiler() is None:
        return "the machine is C++: there is no compiler here"
    try:
        nvrtc.find()
    except nvrtc.CompilerMissing as error:
        return "" if sys.platform == "linux" else str(error)
    return ""


@functools.cache
def library() -> ctypes.CDLL:
    """machine.cpp, compiled once for this machine's processor."""
    texts = b"".join((FOLDER / name).read_bytes() for name in SOURCES) + _processor().encode()
    folder = Path(os.environ.get("FLASHKERNELS_CACHE") or tempfile.gettempdir())
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f"machine-{hashlib.sha256(texts).hexdigest()[:16]}-{os.uname().machine}.so"
    if not made.exists():
        command = compiler()
        assert command, "a C++ compiler is needed"
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            new = Path(scratch) / made.name
            subprocess.run([command, *FLAGS, "-o", str(new), str(FOLDER / SOURCES[0])], check=True)
            new.replace(made)
    found = ctypes.CDLL(str(made))
    found.machine_ops.restype = ctypes.c_char_p
    return found


def _processor() -> str:
    """What it can do, where the system says so: code for one may stop on another."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


@functools.cache
def operations() -> list[str]:
    """What the machine can do, by number."""
    return [_spelled(name) for name in library().machine_ops().decode().split()]


def _spelled(name: str) -> str:
    """`mbarrier_wait` of C++ is `mbarrier.wait` here."""
    return name.replace("_", ".")


class Program(ctypes.Structure):
    """`Program` of program.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("code", "operands", "constants", "symbols", "specials")),
        *((name, ctypes.c_int32) for name in (
            "constant_count", "symbol_count", "special_count", "words", "predicates", "local_bytes", "shared_bytes",
        )),
    )  # fmt: skip


class Symbol(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("word", ctypes.c_int32), ("offset", ctypes.c_int64))


class Kernel:
    """One entry point, ready to run."""

    def __init__(self, kernel: ptx.Kernel, files: Mapping[int, str]) -> None:
        self.kernel, self.files = kernel, files

    @functools.cached_property
    def program(self) -> Program:
        kernel, code = self.kernel, registers.encode(self.kernel, operations())
        constants = array("I", [x for pair in code.constants for x in pair])
        symbols = (Symbol * max(1, len(code.symbols)))(
            *(Symbol(KINDS.index(kind), word, offset) for kind, offset, word in code.symbols)
        )
        specials = array("i", [x for name, word in code.specials.items() for x in (_special(name), word)])
        self.arrays = (array("i", code.instructions), array("i", code.operands), constants, specials, symbols)  # kept
        instructions, operands, first, last = (x.buffer_info()[0] for x in self.arrays[:4])
        return Program(
            instructions, operands, first, ctypes.addressof(symbols), last, len(code.constants), len(code.symbols),
            len(code.specials), code.words, code.predicates, kernel.local_bytes, kernel.dynamic,
        )  # fmt: skip

    def run(
        self, grid: int, threads: int, parameters: int, memory: Iterable[tuple[int, int]], *, dynamic: int = 0,
        cluster: int = 0, resident: int = 8, seed: int = 2, checks: bool = True,
    ) -> int:  # fmt: skip
        """`grid` blocks of `threads` threads, at most `resident` of them at a time; how many instructions that took.

        `memory`: from where to where the kernel may read and write. Of seeds, multiples of 3 have late copies, one more
        early ones, two more any order.
        """
        spans = array("Q", [x for span in memory for x in span])
        executed, at = ctypes.c_int64(), ctypes.c_int32(-1)
        message = ctypes.create_string_buffer(MESSAGE)
        cluster = cluster or self.kernel.cluster
        failed = library().machine_run(
            ctypes.byref(self.program), ctypes.c_uint64(parameters), ctypes.c_void_p(spans.buffer_info()[0]),
            len(spans) // 2, grid, threads, cluster, max(resident, cluster), ctypes.c_uint32(dynamic),
            ctypes.c_uint32(seed), int(checks), ctypes.c_int64(BUDGET), ctypes.byref(executed), ctypes.byref(at),
            message, MESSAGE,
        )  # fmt: skip
        if failed:
            raise (TooLong if executed.value > BUDGET else KernelFault)(
                f"{self.kernel.name}: {self._explained(message.value.decode(), at.value)}"
            )
        return executed.value

    def _explained(self, message: str, at: int) -> str:
        lines = []
        for line in message.splitlines():
            head, found, rest = line.partition(": instruction ")
            if found:
                number, _, what = rest.partition(",")
                line = f"{head}: {self.place(int(number))},{what}"
            lines.append(line)
        if at >= 0:
            lines.append(f"at {self.place(at)}: {self.kernel.instructions[at].text[:200]}")
        return "\n".join(lines)

    def place(self, at: int) -> str:
        """Where an instruction comes from."""
        place = self.kernel.instructions[at].place
        if place is None:
            return "an unknown line"
        here = f"{self.files.get(place.file, '?')}:{place.line}"
        if place.caller:
            here += f" (in {self.files.get(place.caller[0], '?')}:{place.caller[1]})"
        return here


def _special(name: str) -> int:
    name = SAME.get(name, name)
    if name in ZERO:
        return len(SPECIALS)
    if name not in SPECIALS:
        raise ptx.UnknownInstruction(f"no meaning for the register {name}")
    return SPECIALS.index(name)


def compiled(name: str, source: str, headers: Mapping[str, str]) -> str:
    """The PTX of a program of CUDA C++, with the lines it comes from."""
    return _compiled(name, source, tuple(headers.items()))


@functools.lru_cache(maxsize=256)
def _compiled(name: str, source: str, headers: tuple[tuple[str, str], ...]) -> str:
    arguments = ("--gpu-architecture=compute_90a", *(x for x in nvrtc.DEFAULTS if x != nvrtc.VERBOSE), "-lineinfo")
    return nvrtc.find().ptx(name, source, dict(headers), arguments)


@functools.lru_cache(maxsize=256)
def kernels(text: str) -> dict[str, Kernel]:
    """The entry points of a PTX module."""
    files = ptx.files(text)
    return {name: Kernel(kernel, files) for name, kernel in ptx.kernels(text).items()}
