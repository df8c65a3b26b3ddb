"""Compiles CUDA C++ at run time with NVRTC; that needs neither nvcc nor a GPU, and no header but NVRTC's own.

NVRTC is a C library that comes with torch's CUDA build; ctypes calls it without any further package. What it makes is
kept on disk, see `jit/cache.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import itertools
import os
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from flashkernels.jit import cache, notes, strict

VERBOSE = "--ptxas-options=-v"  # registers and spills are in the log
DEFAULTS = ("-std=c++17", "-default-device", VERBOSE)
CONTEXT = 2  # lines shown before and after one that an error names
MAJORS = ("13", "12")

_locks: dict[str, threading.Lock] = {}
if hasattr(os, "register_at_fork"):  # a lock that another thread holds at a fork stays held in the child
    os.register_at_fork(after_in_child=_locks.clear)


class CompilerMissing(RuntimeError):
    """There is no libnvrtc here."""


class CompileError(RuntimeError):
    """NVRTC refused a program. The message has its log, and the lines of the program that the log names."""


@dataclass(frozen=True)
class Compiled:
    """Machine code, and what the compiler said: warnings, registers, spills, wgmma that it had to serialise."""

    cubin: bytes
    log: str


def compile(
    name: str, source: str, headers: Mapping[str, str], arch: str = "sm_90a", options: Sequence[str] = ()
) -> bytes:
    """The cubin of `compiled`."""
    return compiled(name, source, headers, arch, options).cubin


def compiled(
    name: str, source: str, headers: Mapping[str, str], arch: str = "sm_90a", options: Sequence[str] = ()
) -> Compiled:
    """Compiles the program `source` for `arch` ("sm_90a", not "compute_90a"), or finds it in the disk cache.

    `name` is the program's in messages; `headers` are the texts it may include, by the name it includes them by;
    `options` come after DEFAULTS and override them. Threads may call this; those that want the same program wait for
    the first.
    """
    program = CudaProgram(name, source, tuple(sorted(headers.items())), arch, tuple(options))
    if noting := notes.current():
        noting.programs.append(program)
        raise notes.Noted(program.label)
    with _locks.setdefault(program.key, threading.Lock()):
        found = program.find()
        if found is not None:
            return found
        strict.stall(program.label)
        return program.make()


@dataclass(frozen=True)
class CudaProgram:
    """A program of CUDA C++, for one architecture."""

    name: str
    source: str
    headers: tuple[tuple[str, str], ...]
    arch: str
    options: tuple[str, ...]
    suffixes = (".cubin", ".log")

    @functools.cached_property
    def key(self) -> str:
        texts = itertools.chain.from_iterable(self.headers)
        version = map(str, find().version)
        return cache.digest(
            "nvrtc", *version, self.name, self.source, str(len(self.headers)), *texts, *self.arguments
        )  # fmt: skip

    @property
    def label(self) -> str:
        return f"{self.name} for {self.arch} ({self.key[:12]})"

    @property
    def arguments(self) -> tuple[str, ...]:
        return (f"--gpu-architecture={self.arch}", *DEFAULTS, *self.options)

    def find(self) -> Compiled | None:
        cubin, log = cache.load(self.key, ".cubin"), cache.load(self.key, ".log")
        return Compiled(cubin, log.decode()) if cubin and log else None

    def make(self) -> Compiled:
        made = find().run(self.name, self.source, dict(self.headers), self.arguments)
        cache.store(self.key, ".log", made.log.encode())
        cache.store(self.key, ".cubin", made.cubin)
        return made

    def cached(self) -> bool:
        return self.find() is not None

    def build(self) -> None:
        if not self.cached():
            self.make()

    def preload(self) -> None:
        """The plan of the call that noted it loads it."""


class Compiler:
    """One libnvrtc. Raises OSError where there is none at `path`, a file or a name that the system's loader knows."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.version = named_version(path) or self._version()

    @functools.cached_property
    def library(self) -> ctypes.CDLL:
        """Loaded when it is to compile: that takes 0.1 s, which a process with all its kernels on disk is spared."""
        # NVRTC opens its builtins by their bare name when it compiles: have them loaded from the folder it is in.
        for builtins in Path(self.path).parent.glob("libnvrtc-builtins.so*") if "/" in self.path else ():
            with contextlib.suppress(OSError):
                ctypes.CDLL(str(builtins))
        library = ctypes.CDLL(self.path)
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        return library

    def _version(self) -> tuple[int, int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def targets(self) -> list[int]:
        """The architectures it compiles for, as numbers: 80 for sm_80."""
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        found = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", found)
        return list(found)

    def run(self, name: str, source: str, headers: Mapping[str, str], arguments: Sequence[str]) -> Compiled:
        """Compiles, whatever is in the disk cache."""
        made = self._run(name, source, headers, arguments)
        if not made.log and VERBOSE in arguments:  # NVRTC keeps cubins of its own where there is a driver, but no log
            made = self._run(name, source, headers, [*arguments, "--no-cache"])
        return made

    def ptx(self, name: str, source: str, headers: Mapping[str, str], arguments: Sequence[str]) -> str:
        """The same program for a virtual architecture ("compute_90a"), as text."""
        return self._run(name, source, headers, arguments, "PTX").cubin.rstrip(b"\0").decode()

    def _run(
        self, name: str, source: str, headers: Mapping[str, str], arguments: Sequence[str], kind: str = "CUBIN"
    ) -> Compiled:
        program = ctypes.c_void_p()
        texts, names = _strings(headers.values()), _strings(headers)
        self._call(
            "nvrtcCreateProgram", ctypes.byref(program), source.encode(), name.encode(), len(headers), texts, names
        )
        try:
            failed = self.library.nvrtcCompileProgram(program, len(arguments), _strings(arguments))
            log = self._output(program, "nvrtcGetProgramLog").rstrip(b"\0").decode(errors="replace")
            if failed:
                title = f"NVRTC {'.'.join(map(str, self.version))} refuses {name} ({' '.join(arguments)})"
                ptx = self._output(program, "nvrtcGetPTX").decode() if "ptx input, line" in log else ""
                raise CompileError("\n".join([f"{title}:", log, *_places(log, {**headers, name: source, "ptx": ptx})]))
            return Compiled(self._output(program, f"nvrtcGet{kind}"), log)
        finally:
            self.library.nvrtcDestroyProgram(ctypes.byref(program))

    def _output(self, program: ctypes.c_void_p, function: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"{function}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(function, program, buffer)
        return buffer.raw

    def _call(self, function: str, *arguments: object) -> None:
        result = getattr(self.library, function)(*arguments)
        if result:
            raise RuntimeError(f"{function}: {self.library.nvrtcGetErrorString(result).decode()}")


def named_version(path: str) -> tuple[int, int] | None:
    """The version of a libnvrtc in a folder, where one file of builtins beside it tells: NVRTC opens its own by a name
    that ends with that version."""
    if "/" not in path or not Path(path).exists():
        return None
    names = [file.name for file in Path(path).parent.glob("libnvrtc-builtins.so.*")]
    found = {(int(match[1]), int(match[2])) for name in names if (match := re.fullmatch(r".*\.so\.(\d+)\.(\d+)", name))}
    fitting = [version for version in found if path.endswith(".so") or f".so.{version[0]}" in path]
    return fitting[0] if len(fitting) == 1 else None


@functools.cache
def find() -> Compiler:
    """The first libnvrtc that is there."""
    for path in paths():
        with contextlib.suppress(OSError):
            return Compiler(path)
    raise CompilerMissing(
        "libnvrtc cannot be loaded, so kernels written in CUDA C++ cannot be compiled: pip install nvidia-cuda-nvrtc "
        "(CUDA 12: nvidia-cuda-nvrtc-cu12); a CUDA build of torch brings it"
    )


def paths() -> list[str]:
    """Where libnvrtc may be: in this Python's wheels, then where the system's loader looks, then in the CUDA toolkit.

    Of these, first those of the CUDA that torch was built for: the driver here serves that one.
    """
    found: list[str] = []
    for package, pattern in (("nvidia", "*/lib/libnvrtc.so*"), ("torch", "lib/libnvrtc*.so*")):
        spec = importlib.util.find_spec(package)
        for root in (spec.submodule_search_locations or []) if spec else []:
            found += sorted(str(path) for path in Path(root).glob(pattern) if "builtins" not in path.name)
    found += [f"libnvrtc.so.{major}" for major in MAJORS]
    toolkit = Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda", "lib64")
    found += [str(toolkit / f"libnvrtc.so.{major}") for major in MAJORS]
    preferred = f".so.{(torch.version.cuda or MAJORS[0]).split('.')[0]}"
    return sorted(found, key=lambda path: preferred not in path)


def _strings(texts: Iterable[str]) -> ctypes.Array[ctypes.c_char_p]:
    encoded = [text.encode() for text in texts]
    return (ctypes.c_char_p * len(encoded))(*encoded)


def _places(log: str, files: Mapping[str, str]) -> Iterable[str]:
    """The lines that `log` names as `file(line)`, with their neighbours; ptxas says `ptx input, line 1`."""
    log = re.sub(r"ptx input, line (\d+)", r"ptx(\1)", log)
    for file, number in dict.fromkeys(re.findall(r"([^\s()]+)\((\d+)\)", log)):
        lines, at = files.get(file, "").splitlines(), int(number) - 1
        if 0 <= at < len(lines):
            yield f"{file}, line {number}:"
            for i in range(max(at - CONTEXT, 0), min(at + CONTEXT + 1, len(lines))):
                yield f"{'>' if i == at else ' '} {i + 1:5} | {lines[i]}"
