"""Records real runs of a GPU for the rules, a broken and a healthy one each, and counters of ncu: to data/<gpu>/.

`PYTHONPATH=src python -m tests.profiling.record` on the GPU machine; names after it choose rules. Traces are cut to the
events that the rules read, so that they stay small.
"""

from __future__ import annotations

import json
import subprocess
import sys
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


CASES: dict[str, Callable[[bool], Callable[[], None]]] = {
    "launch-gaps": launch_gaps, "sync-in-loop": sync_in_loop, "data-loader": data_loader, "slow-host": slow_host,
    "pageable-copies": pageable_copies, "sdpa-math": sdpa_math, "tf32-off": tf32_off,
    "tiny-elementwise": tiny_elementwise, "few-blocks": few_blocks,
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
"""


def record_ncu(folder: Path) -> None:
    """The counters of one product and one softmax, as ncu writes them."""
    tool, log = nsight.find("ncu"), folder / "ncu-raw.csv"
    if tool is None:
        print("\n".join(nsight.GET["ncu"]))
        return
    folder.mkdir(parents=True, exist_ok=True)
    command = nsight.ncu_command(tool, [sys.executable, "-c", PROGRAM], log, kernel="gemm|xmma|nvjet|softmax", count=2)
    done = subprocess.run(command, capture_output=True, text=True)
    written = log.read_text(encoding="utf-8") if log.exists() else ""
    if nsight.forbidden(written + done.stdout + done.stderr):
        log.unlink(missing_ok=True)
        print("\n".join(nsight.PERMIT))
        return
    for kernel in nsight.read_ncu(written).kernels:
        print(f"ncu: {kernel.name} {kernel.duration:.1f} µs {dict(kernel.counters)}")


def main() -> None:
    gpu = detect()
    if gpu is None:
        sys.exit("there is no NVIDIA GPU here to record")
    for name in sys.argv[1:] or ["ncu", *CASES]:
        if name == "ncu":
            record_ncu(DATA / gpu.key)
            continue
        if name not in CASES:
            sys.exit(f"{name} is not one of ncu, {', '.join(CASES)}")
        for broken, end in ((True, ""), (False, "-healthy")):
            data = record(CASES[name](broken))
            write(DATA / gpu.key, f"{name}{end}", data)
            found = [finding.rule for finding in profile_of(parse(data)).findings]
            verdict = "right" if (name in found) == broken else "WRONG"
            print(f"{name}{end}: {verdict}, {len(data['traceEvents'])} events, findings: {', '.join(found) or 'none'}")


if __name__ == "__main__":
    main()
