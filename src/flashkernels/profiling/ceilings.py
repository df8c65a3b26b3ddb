"""What this machine really reaches: bandwidths and matrix products, measured once with torch's own ops and kept."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from flashkernels.bench import timing
from flashkernels.bench.results import ResultsError, describe, write
from flashkernels.jit import cache

ROUNDS = 3
HEAT_SECONDS = 1.5
COPY_BYTES, SIDE = 1_000_000_000, 8192  # on a GPU: far larger than any L2, and a product that fills it
CPU_COPY_BYTES, CPU_SIDE = 1 << 28, 1024
COMPUTE = ("bf16", "fp16", "fp8", "int8", "tf32", "fp32")


@dataclass(frozen=True)
class Ceilings:
    """Bytes/s by kind of traffic and FLOP/s (OP/s for int8) by dtype; `missing` says why a figure is not there."""

    device: str
    date: str
    torch: str
    bandwidth: dict[str, float]  # copy, read, l2: bytes read and written
    compute: dict[str, float]
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def memory(self) -> float:
        """The roof of memory: the fastest kind of traffic that goes past the caches."""
        return max(rate for kind, rate in self.bandwidth.items() if kind != "l2")


def path_of(device: str) -> Path:
    """Where the ceilings of a device are kept, by the name that its driver reports."""
    return cache.folder() / "ceilings" / (re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + ".json")


def kept(device: str) -> Ceilings | None:
    """What was measured earlier on such a device, if it was."""
    path = path_of(device)
    return read(path) if path.exists() else None


def read(path: Path) -> Ceilings:
    """Reads a file of ceilings; raises `ResultsError` naming the file and what is wrong."""
    try:
        found = Ceilings(**json.loads(path.read_text(encoding="utf-8")))
        rates = [*found.bandwidth.values(), *found.compute.values()]
        if not (found.bandwidth and all(isinstance(rate, float) and rate > 0 for rate in rates)):
            raise TypeError("every rate must be a positive number, and one bandwidth is needed")
    except (json.JSONDecodeError, TypeError, AttributeError) as error:
        raise ResultsError(f"{path}: not a file of ceilings: {error}") from error
    return found


def keep(ceilings: Ceilings, path: Path | None = None) -> Path:
    """Writes them where `kept` finds them, or into a file; returns its path."""
    if path is None and cache.sealed():
        raise OSError(0, "`flashkernels compile` made that folder, and nothing is added to it")
    path = path or path_of(ceilings.device)
    write(path, json.dumps(asdict(ceilings), indent=1) + "\n")
    return path


def measure(device: str) -> Ceilings:
    """Times copies, reads and matrix products on "cuda" or "cpu": about ten seconds on a GPU."""
    import torch

    about = describe(device, quick=False)
    bandwidth: dict[str, float] = {}
    compute: dict[str, float] = {}
    missing: dict[str, str] = {}
    if device == "cuda":
        timing.heat(HEAT_SECONDS)
    for kind, (amount, call) in _transfers(device).items():
        bandwidth[kind] = amount / _seconds(call, device)
    for dtype in COMPUTE if device == "cuda" else ("fp32",):
        side = SIDE if device == "cuda" else CPU_SIDE
        try:
            with _tf32(dtype == "tf32"):
                compute[dtype] = 2 * side**3 / _seconds(_product(dtype, side, device), device)
        except (RuntimeError, AttributeError) as error:  # a chip, or a torch, that has it not
            missing[dtype] = str(error).strip().splitlines()[0][:200]
    name = str(about["gpu"] or about["cpu"])
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return Ceilings(name, date, torch.__version__, bandwidth, compute, missing)


def _transfers(device: str) -> dict[str, tuple[int, Callable[[], Any]]]:
    """Bytes that each kind moves, and what moves them."""
    import torch

    size = COPY_BYTES if device == "cuda" else CPU_COPY_BYTES
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    # A kernel that reads and writes: in a graph torch's copy_ is left to the copy engine (H200, 2026-11-15: 2.7 for
    # 4.2 TB/s).
    found: dict[str, tuple[int, Callable[[], Any]]] = {"copy": (2 * size, lambda: torch.neg(source, out=target))}
    if device == "cuda":
        inside = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size // 4  # with its copy, half
        near, far = source[: inside // 4], target[: inside // 4]
        found |= {"read": (size, source.sum), "l2": (2 * 4 * near.numel(), lambda: torch.neg(near, out=far))}
    return found


def _product(dtype: str, side: int, device: str) -> Callable[[], Any]:
    """A square matrix product in this dtype."""
    import torch

    if dtype == "int8":
        a, b = (torch.randint(-8, 8, (side, side), dtype=torch.int8, device=device) for _ in range(2))
        return lambda: torch._int_mm(a, b.t())
    if dtype == "fp8":
        a, b = (torch.randn(side, side, device=device).to(torch.float8_e4m3fn) for _ in range(2))
        one = torch.ones((), device=device)
        return lambda: torch._scaled_mm(
            a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype, torch.float32)
    a, b = (torch.randn(side, side, device=device, dtype=kind) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


@contextmanager
def _tf32(on: bool) -> Iterator[None]:
    import torch

    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = on
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _seconds(call: Callable[[], Any], device: str) -> float:
    """Median time of one call. A GPU replays graphs: a copy inside the L2 takes as long as its launch."""
    launch: timing.Launch = "graph" if device == "cuda" else "eager"
    sample = timing.sampler(timing.Call(call), device=device, l2="warm", launch=launch)
    times = timing.interleave({"call": sample}, ROUNDS)["call"]
    if isinstance(times, Exception):
        raise times
    return times.p50 / 1e3
