"""Compiles what calls need into a folder, on all cores, without a GPU."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

import flashkernels
from flashkernels.aot.manifest import Manifest
from flashkernels.aot.work import Work, programs
from flashkernels.hardware import Gpu, lookup
from flashkernels.jit import cache, nvrtc


@dataclass
class Kernel:
    """One program to build, and a call that needs it: a process finds the program again by it."""

    key: str
    label: str
    suffixes: tuple[str, ...]
    work: Work
    gpus: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Built:
    """One kernel is there now. `error` is empty where it was compiled, or found."""

    kernel: Kernel
    seconds: float
    error: str = ""


def kernels(works: Iterable[Work], gpus: Sequence[Gpu]) -> list[Kernel]:
    """What these calls need on these GPUs, each once: GPUs of one architecture share most."""
    require_compiler()
    found: dict[str, Kernel] = {}
    for work in works:
        for gpu in gpus:
            for program in programs(work, gpu):
                known = found.setdefault(program.key, Kernel(program.key, program.label, program.suffixes, work))
                if gpu.key not in known.gpus:
                    known.gpus.append(gpu.key)
    return list(found.values())


def build(wanted: Sequence[Kernel], folder: Path, jobs: int | None = None) -> Iterator[Built]:
    """Compiles what the folder lacks, with `jobs` processes (default: one a core). Seals the folder at the end, unless
    a kernel failed."""
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / cache.MANIFEST).unlink(missing_ok=True)  # until all is there
    failed = False
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs or os.cpu_count(), context, cache.build_into, (folder,)) as pool:
        running = {pool.submit(_build, one.work, one.gpus[0], one.key): one for one in wanted}
        for done in as_completed(running):
            seconds, error = done.result()
            failed |= bool(error)
            yield Built(running[done], seconds, error)
    if not failed:
        seal(wanted, folder)


def seal(wanted: Sequence[Kernel], folder: Path) -> None:
    """Writes the manifest: the folder is complete, and nothing is added to it any more."""
    import triton

    gpus = sorted({gpu for one in wanted for gpu in one.gpus})
    version = ".".join(map(str, nvrtc.find().version)) if any(".log" in one.suffixes for one in wanted) else ""
    manifest = Manifest(flashkernels.__version__, triton.__version__, version, gpus)
    for one in wanted:
        for suffix in one.suffixes:
            manifest.add(folder, folder / one.key[:2] / (one.key + suffix), one.label, one.gpus)
    manifest.write(folder)


def require_compiler() -> None:
    """Raises where Triton kernels cannot be compiled ahead here."""
    from flashkernels.jit import specialised

    if not specialised.SUPPORTED:
        import triton

        known = ", ".join(specialised.KNOWN)
        raise ValueError(f"triton {triton.__version__}: kernels are compiled ahead of time with triton {known}")


def _build(work: Work, gpu: str, key: str) -> tuple[float, str]:
    start = time.perf_counter()
    program = next((one for one in programs(work, lookup(gpu)) if one.key == key), None)
    if program is None:
        return time.perf_counter() - start, "the package's files changed while its kernels were built"
    try:
        program.build()
    except Exception as error:
        return time.perf_counter() - start, f"{type(error).__name__}: {error}"
    if not program.cached():
        return time.perf_counter() - start, f"{cache.folder()} takes no file"
    return time.perf_counter() - start, ""
