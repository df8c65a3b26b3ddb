"""Records real runs of a GPU for the rules, a broken and a healthy one each, and files of ncu and nsys: to data/<gpu>/.

`PYTHONPATH=src python -m tests.profiling.record [--pack FILE.tar] [NAMES]` on the GPU machine: a minute. NAMES choose
rules, ncu, banks or nsys. With --pack, one file to carry to the checkout: `tar -C tests/profiling/data -xf FILE.tar`.
Traces are cut to the events that the rules read, so that they stay small.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import flashkernels as fk
from flashkernels.hardware import detect
from flashkernels.profiling import nsight
from flashkernels.profiling.profile import profile_of
from flashkernels.profiling.trace import parse

from .timeline import DATA, write

KEPT = {"cpu_op", "kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime", "cuda_driver", "user_annotation"}


def square(n: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(n, n, device="cuda", dtype=dtype) / n**0.5


def launch_gaps(broken: bool) -> Callable[[], None]:
    x, w = square(512)[:16], square(512)

    def chain() -> Tensor:
        y = x
        for _ in range(60):
            y = y @ w
        return y

    if broken:
        return lambda: (chain(), None)[1]
    chain()
    torch.cuda.synchronize()

    def replay() -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chain()
        for _ in range(3):
            graph.replay()

    return replay


def sync_in_loop(broken: bool) -> Callable[[], None]:
    x = square(4096)

    def run() -> None:
        total = torch.zeros((), device="cuda")
        for _ in range(8):
            y = x
            for _ in range(3):
                y = y @ x
            loss = y.float().mean()
            total = total + (loss.item() if broken else loss)
        total.item()

    return run


class Rows(Dataset[Tensor]):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> Tensor:
        time.sleep(self.seconds)
        return torch.zeros(8)


def data_loader(broken: bool) -> Callable[[], None]:
    x, rows = square(4096), Rows(0.004 if broken else 0.0)

    def run() -> None:
        for batch in DataLoader(rows, batch_size=1):
            y = x * batch.sum().item()
            for _ in range(20):
                y = y @ x

    return run


def slow_host(broken: bool) -> Callable[[], None]:
    x = square(4096)

    def run() -> None:
        for _ in range(5):
            for _ in range(10):
                x @ x
            if broken:
                time.sleep(0.006)

    return run


def pageable_copies(broken: bool) -> Callable[[], None]:
    x, batch = square(4096), torch.randn(1 << 22)
    batch = batch if broken else batch.pin_memory()

    def run() -> None:
        for _ in range(5):
            batch.to("cuda", non_blocking=not broken)
            for _ in range(8):
                x @ x

    return run


def sdpa_math(broken: bool) -> Callable[[], None]:
    q = torch.randn(2, 8, 2048, 264 if broken else 128, device="cuda", dtype=torch.bfloat16)
    x = square(4096)

    def run() -> None:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        backend = SDPBackend.MATH if broken else SDPBackend.FLASH_ATTENTION
        with sdpa_kernel(backend):
            for _ in range(4):
                F.scaled_dot_product_attention(q, q, q)
                x @ x

    return run


def tf32_off(broken: bool) -> Callable[[], None]:
    x, y = square(4096, torch.float32), square(4096)

    def run() -> None:
        torch.set_float32_matmul_precision("highest" if broken else "high")
        for _ in range(6):
            x @ x
            y @ y
        torch.set_float32_matmul_precision("highest")

    return run


def tiny_elementwise(broken: bool) -> Callable[[], None]:
    x, small = square(4096), torch.randn(64, 4096, device="cuda")

    def run() -> None:
        for _ in range(10):
            y = small
            for _ in range(6 if broken else 1):
                y = y + 1
            x @ x[:, :256]

    return run


def few_blocks(broken: bool) -> Callable[[], None]:
    q = torch.randn(1, 16384, 4 if broken else 256, 128, device="cuda", dtype=torch.bfloat16)

    def run() -> None:
        for _ in range(4):  # one row block a head: as many blocks as heads
            with fk.use_tile("standard"):
                fk.attention(q[:, :64], q, q, impl="triton")

    return run


def low_occupancy(broken: bool) -> Callable[[], None]:
    """A softmax of few long rows is one block a row: a few warps on a few multiprocessors."""
    x, y = torch.randn((4, 1 << 21) if broken else (4096, 2048), device="cuda"), square(4096)

    def run() -> None:
        for _ in range(4):
            x.softmax(-1)
            y @ y

    return run


CASES: dict[str, Callable[[bool], Callable[[], None]]] = {
    "launch-gaps": launch_gaps, "sync-in-loop": sync_in_loop, "data-loader": data_loader, "slow-host": slow_host,
    "pageable-copies": pageable_copies, "sdpa-math": sdpa_math, "tf32-off": tf32_off,
    "tiny-elementwise": tiny_elementwise, "few-blocks": few_blocks,
    "low-occupancy": low_occupancy,
}  # fmt: skip


def record(run: Callable[[], None]) -> dict[str, Any]:
    """The trace of one run, after two to warm up."""
    run()
    run()
    torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with fk.profile(path):
            run()
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    events = [event for event in data["traceEvents"] if event.get("cat") in KEPT]
    return {"deviceProperties": data.get("deviceProperties", []), "traceEvents": events}


PROGRAM = """
import torch
x = torch.randn(4096, 4096, device='cuda', dtype=torch.bfloat16)
for _ in range(2):
    (x @ x).softmax(-1)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = x @ x
for _ in range(3):
    graph.replay()
torch.cuda.synchronize()
"""
# Two transposes through shared memory: without padding a column of the tile lies in one bank.
BANKS = """
import pathlib, runpy, sys
sys.path.insert(0, str(pathlib.Path(sys.argv[1]).parent))
lesson = runpy.run_path(sys.argv[1])
for case in lesson['cases']():
    if case.name.startswith('transpose'):
        case.run()
"""
LESSON = Path(__file__).parents[2] / "docs" / "learn" / "ground" / "3_banks.py"


def record_ncu(folder: Path, name: str, program: list[str], kernel: str) -> str:
    """The counters of two launches, as ncu writes them; or, where it may not, its words about that."""
    tool, log = nsight.find("ncu"), folder / f"{name}.csv"
    if tool is None:
        return nsight.GET["ncu"][0]
    folder.mkdir(parents=True, exist_ok=True)
    command = nsight.ncu_command(tool, [sys.executable, "-c", *program], log, kernel=kernel, count=2)
    done = subprocess.run(command, capture_output=True, text=True)
    written = log.read_text(encoding="utf-8") if log.exists() else ""
    if nsight.forbidden(written + done.stdout + done.stderr):
        log.unlink(missing_ok=True)
        (folder / "ncu-forbidden.txt").write_text(written + done.stdout + done.stderr, encoding="utf-8")
        return nsight.PERMIT[0]
    return "\n".join(
        f"{kernel.name} {kernel.duration:.1f} µs {dict(kernel.counters)}" for kernel in nsight.read_ncu(written).kernels
    )


def record_nsys(folder: Path) -> str:
    """The timeline of the program as nsys writes it, in CSV."""
    tool = nsight.find("nsys")
    if tool is None:
        return nsight.GET["nsys"][0]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        report = Path(place) / "run.nsys-rep"
        subprocess.run(nsight.nsys_command(tool, [sys.executable, "-c", PROGRAM], report), check=True)
        done = subprocess.run(nsight.nsys_stats_command(tool, report), capture_output=True, text=True, check=True)
    (folder / "nsys-gpu-trace.csv").write_text(done.stdout, encoding="utf-8")
    return f"{len(nsight.read_nsys(done.stdout).kernels)} kernels and copies"


TOOLS: dict[str, Callable[[Path], str]] = {
    "ncu": lambda folder: record_ncu(folder, "ncu-raw", [PROGRAM], "gemm|xmma|nvjet|softmax"),
    "banks": lambda folder: record_ncu(folder, "ncu-banks", [BANKS, str(LESSON)], "transpose"),
    "nsys": record_nsys,
}


def record_rule(name: str, folder: Path) -> bool:
    """Writes both traces of a rule; whether it fires on the one and not on the other."""
    right = True
    for broken, end in ((True, ""), (False, "-healthy")):
        data = record(CASES[name](broken))
        write(folder, f"{name}{end}", data)
        found = [finding.rule for finding in profile_of(parse(data)).findings]
        fits = (name in found) == broken
        events = len(data["traceEvents"])
        print(f"{name}{end}: {'right' if fits else 'WRONG'}, {events} events, findings: {', '.join(found) or 'none'}")
        right &= fits
    return right


def attempt(name: str, folder: Path) -> bool:
    """Records one thing; an error is told, and the others are still worth recording."""
    try:
        if name in CASES:
            return record_rule(name, folder)
        print(f"{name}: {TOOLS[name](folder)}")
    except Exception as error:
        print(f"{name}: WRONG, {type(error).__name__}: {error}")
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join([*CASES, *TOOLS])}; default: all")
    parser.add_argument("--pack", type=Path, metavar="FILE", help="put the recordings into this tar file too")
    args = parser.parse_args()
    names = args.names or [*CASES, *TOOLS]
    if unknown := [name for name in names if name not in (*CASES, *TOOLS)]:
        parser.error(f"{unknown[0]} is not one of {', '.join([*CASES, *TOOLS])}")
    gpu = detect()
    if gpu is None:
        parser.error("there is no NVIDIA GPU here to record")
    folder = DATA / gpu.key
    failed = [name for name in names if not attempt(name, folder)]
    if args.pack:
        with tarfile.open(args.pack, "w") as pack:
            pack.add(folder, folder.name)
        print(f"packed {sum(1 for _ in folder.iterdir())} files into {args.pack}")
    print(f"not as they should be: {', '.join(failed)}" if failed else "all as they should be")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
