"""Made-up runs, written as torch's profiler writes a Chrome trace on an H200: one a rule, and a healthy one beside it.

`python -m tests.profiling.timeline` writes them to data/synthetic/. Runs of a real GPU are recorded by `record.py`.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
BF16, FP32 = "c10::BFloat16", "float"
H200 = {
    "id": 0, "name": "NVIDIA H200", "totalGlobalMem": 150109880320, "computeMajor": 9, "computeMinor": 0,
    "maxThreadsPerBlock": 1024, "maxThreadsPerMultiprocessor": 2048, "regsPerBlock": 65536, "warpSize": 32,
    "sharedMemPerBlock": 49152, "numSms": 132, "regsPerMultiprocessor": 65536, "sharedMemPerBlockOptin": 232448,
    "sharedMemPerMultiprocessor": 233472,
}  # fmt: skip
HOST, GPU = {"pid": 4321, "tid": 4321}, {"pid": 0, "tid": 7}


class Timeline:
    """A host that launches work and a GPU that does it in order, each with its clock in µs."""

    def __init__(self) -> None:
        self.host, self.gpu, self.next_id = 1000.0, 1000.0, 1
        self.events: list[dict[str, Any]] = []
        self.captured: list[tuple[str, float]] | None = None

    def event(self, cat: str, name: str, start: float, end: float, where: dict[str, int], **args: Any) -> None:
        self.events.append(
            {"ph": "X", "cat": cat, "name": name, **where, "ts": start, "dur": end - start, "args": args}
        )

    def _id(self) -> int:
        self.next_id += 1
        return self.next_id

    def op(
        self, name: str, dims: Sequence[Any], types: Sequence[str], kernels: Sequence[tuple[str, float]] = (),
        host: float = 6.0, values: Sequence[str] = (), **launch: Any,
    ) -> None:  # fmt: skip
        """An op that takes the host `host` µs and launches kernels of (name, µs)."""
        start, ident = self.host, self._id()
        recorded = {"Concrete Inputs": list(values or [""] * len(dims)), "Input type": list(types),
                    "Input Dims": [list(d) for d in dims]}  # fmt: skip
        self.host += 1
        for kernel, duration in kernels:
            self.kernel(kernel, duration, ident, **launch)
        self.host = max(self.host, start + host)
        self.event("cpu_op", name, start, self.host - 0.5, HOST, **{"External id": ident}, **recorded)

    def kernel(self, name: str, duration: float, op: int, **launch: Any) -> None:
        ident = self._id()
        called = self.host
        self.host += 2
        self.event("cuda_runtime", "cudaLaunchKernel", called, self.host, HOST,
                   **{"External id": op, "cbid": 211, "correlation": ident})  # fmt: skip
        if self.captured is not None:
            self.captured.append((name, duration))
            return
        self._run(name, duration, called + 3, ident, op, **launch)

    def _run(self, name: str, duration: float, earliest: float, correlation: int, op: int, **launch: Any) -> None:
        start = max(earliest, self.gpu + 0.8)
        self.gpu = start + duration
        grid, block = launch.get("grid", [1056, 1, 1]), launch.get("block", [256, 1, 1])
        more = {key: launch[key] for key in ("graph id", "graph node id") if key in launch}
        self.event(
            "kernel", name, start, self.gpu, GPU,
            **{"External id": op, "queued": 0, "device": 0, "context": 1, "stream": 7, "correlation": correlation,
               "registers per thread": launch.get("registers", 32), "shared memory": launch.get("shared", 0),
               "blocks per SM": grid[0] / 132, "warps per SM": grid[0] * block[0] / 32 / 132, "grid": grid,
               "block": block, "est. achieved occupancy %": launch.get("occupancy", 80)} | more,
        )  # fmt: skip

    def copy(self, name: str, moved: int, duration: float, wait: bool) -> None:
        ident, start = self._id(), max(self.host + 3, self.gpu + 0.8)
        self.gpu = start + duration
        end = self.gpu if wait else self.host + 4
        self.event("cuda_runtime", "cudaMemcpyAsync", self.host, end, HOST, cbid=41, correlation=ident)
        self.event("gpu_memcpy", name, start, self.gpu, GPU,
                   **{"device": 0, "context": 1, "stream": 7, "correlation": ident, "bytes": moved,
                      "memory bandwidth (GB/s)": moved / duration / 1e3})  # fmt: skip
        self.host = end

    def item(self, place: str = "") -> None:
        """`.item()`: the host waits for the GPU. With a place, as a session of ours marks it."""
        ident, start = self._id(), self.host
        end = max(self.host, self.gpu) + 4
        self.event("cuda_runtime", "cudaStreamSynchronize", start + 2, end, HOST,
                   **{"External id": ident, "cbid": 131, "correlation": self._id()})  # fmt: skip
        shapes = {"External id": ident, "Concrete Inputs": [""], "Input type": [FP32], "Input Dims": [[]]}
        self.event("cpu_op", "aten::_local_scalar_dense", start + 1, end + 0.5, HOST, **shapes)
        self.event("cpu_op", "aten::item", start + 0.5, end + 1, HOST, **{**shapes, "External id": self._id()})
        if place:
            self.event("user_annotation", f"fk:sync .item() {place}", start, end + 1.5, HOST)
        self.host = end + 2

    def mark(self, name: str, start: float) -> None:
        self.event("user_annotation", name, start, self.host, HOST)

    def frame(self, name: str, start: float) -> None:
        self.event("python_function", name, start, self.host, HOST, **{"Python id": self._id()})

    def call(self, name: str, host: float = 5.0, **args: Any) -> None:
        self.event("cuda_runtime", name, self.host, self.host + host, HOST, **{"correlation": self._id(), **args})
        self.host += host

    def replay(self, nodes: Sequence[tuple[str, float]]) -> None:
        ident, called = self._id(), self.host
        self.call("cudaGraphLaunch", 8.0, correlation=ident, cbid=311)
        for i, (name, duration) in enumerate(nodes):
            self._run(name, duration, called + 4, ident, 0, **{"graph id": 2, "graph node id": 8589934592 + i})

    def data(self) -> dict[str, Any]:
        return {
            "schemaVersion": 1, "deviceProperties": [H200], "record_shapes": 1, "with_stack": 0,
            "traceEvents": sorted(self.events, key=lambda e: e["ts"]), "traceName": "trace.json",
        }  # fmt: skip


ADD = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>(int, float*)"
GEMM = "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NNT"
SGEMM = "void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>(cutlass_80_simt_sgemm_256x128::Params)"
TF32GEMM = "sm90_xmma_gemm_f32f32_tf32f32_f32_nn_n_tilesize128x128x32_warpgroupsize1x1x1"


def matmul(line: Timeline, us: float = 200.0, host: float = 12.0, n: int = 4096) -> None:
    line.op("aten::mm", [[n, n], [n, n]], [BF16, BF16], [(GEMM, us)], host, registers=168, shared=214016)


def launch_gaps(broken: bool) -> Timeline:
    """Sixty small products, each launched by itself; healthy: as one CUDA graph."""
    line = Timeline()
    if not broken:
        line.call("cudaStreamBeginCapture")
        line.captured = []
    for _ in range(60):
        line.op("aten::mm", [[16, 512], [512, 512]], [BF16, BF16], [(GEMM, 2.1)], host=7.0)
    if not broken:
        nodes, line.captured = line.captured or [], None
        line.call("cudaStreamEndCapture")
        for _ in range(3):
            line.replay(nodes)
    return line


def sync_in_loop(broken: bool) -> Timeline:
    line = Timeline()
    for i in range(8):
        for _ in range(4):
            matmul(line, 100.0)
        if broken or i == 7:
            line.item("train.py:42")
            line.host += 60
    return line


def data_loader(broken: bool) -> Timeline:
    line = Timeline()
    for _ in range(5):
        start = line.host
        line.host = max(line.host, line.gpu) + 350 if broken else line.host + 20
        line.mark("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", start)
        for _ in range(4):
            matmul(line)
    return line


def slow_host(broken: bool) -> Timeline:
    line = Timeline()
    for _ in range(5):
        start = line.host
        line.host = max(line.host, line.gpu) + 400 if broken else line.host + 40
        line.frame("serve.py(60): prepare_batch", start)
        for _ in range(4):
            matmul(line)
    return line


def pageable_copies(broken: bool) -> Timeline:
    line = Timeline()
    for _ in range(5):
        kind, us = ("Pageable", 2600.0) if broken else ("Pinned", 640.0)
        line.copy(f"Memcpy HtoD ({kind} -> Device)", 16 << 20, us, wait=broken)
        for _ in range(8):
            matmul(line, 300.0)
    return line


def sdpa_math(broken: bool) -> Timeline:
    line = Timeline()
    dim = 264 if broken else 128
    q, types = [2, 8, 2048, dim], [BF16] * 3
    for _ in range(4):
        if broken:
            start = line.host
            line.host += 2
            line.op("aten::bmm", [[16, 2048, dim], [16, dim, 2048]], types[:2], [(GEMM, 90.0)])
            line.op("aten::_softmax", [[*q[:3], 2048]], types[:1], [("softmax_warp_forward", 120.0)])
            line.host += 2
            recorded = {"Concrete Inputs": ["", "", ""], "Input type": types, "Input Dims": [q, q, q]}
            for name in ("aten::_scaled_dot_product_attention_math", "aten::scaled_dot_product_attention"):
                line.event("cpu_op", name, start, line.host, HOST, **{"External id": line._id(), **recorded})
                start -= 0.5
            line.host += 1
        else:
            name = "aten::_scaled_dot_product_flash_attention"
            values = ["", "", "", "0.", "False", "False", ""]
            line.op(name, [q, q, q, [], [], [], []], [*types, "Scalar", "Scalar", "Scalar", ""],
                    [("pytorch_flash::flash_fwd_kernel", 60.0)], values=values)  # fmt: skip
        matmul(line)
    return line


def tf32_off(broken: bool) -> Timeline:
    line = Timeline()
    for _ in range(6):
        name, us = (SGEMM, 2800.0) if broken else (TF32GEMM, 400.0)
        line.op("aten::mm", [[4096, 4096], [4096, 4096]], [FP32, FP32], [(name, us)], 12.0)
        matmul(line, 300.0)
    return line


def tiny_elementwise(broken: bool) -> Timeline:
    line = Timeline()
    for _ in range(10):
        for _ in range(6 if broken else 1):
            line.op("aten::add", [[64, 4096], [64, 4096], []], [FP32, FP32, "Scalar"], [(ADD, 3.2)], 6.0, ["", "", "1"])
        matmul(line, 60.0)
    return line


def few_blocks(broken: bool) -> Timeline:
    line = Timeline()
    for _ in range(4):
        grid = [24, 1, 1] if broken else [2640, 1, 1]
        line.op("aten::sum", [[24, 1 << 20]], [FP32], [("void at::native::reduce_kernel<512, 1>", 180.0)], grid=grid)
        matmul(line)
    return line


def low_occupancy(broken: bool) -> Timeline:
    line = Timeline()
    for _ in range(4):
        us, occupancy = (400.0, 6) if broken else (60.0, 75)
        line.op(
            "aten::_softmax", [[4096, 4096]], [FP32], [("my_softmax_kernel", us)], occupancy=occupancy, registers=255
        )
        matmul(line)
    return line


RULES: dict[str, Callable[[bool], Timeline]] = {
    "launch-gaps": launch_gaps, "sync-in-loop": sync_in_loop, "data-loader": data_loader, "slow-host": slow_host,
    "pageable-copies": pageable_copies, "sdpa-math": sdpa_math, "tf32-off": tf32_off,
    "tiny-elementwise": tiny_elementwise, "few-blocks": few_blocks, "low-occupancy": low_occupancy,
}  # fmt: skip


def write(folder: Path, name: str, data: dict[str, Any]) -> None:
    """Compressed, and the same bytes for the same trace."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(data, separators=(",", ":")).encode()
    (folder / f"{name}.json.gz").write_bytes(gzip.compress(text, mtime=0))


def main() -> None:
    for name, make in RULES.items():
        write(DATA / "synthetic", name, make(True).data())
        write(DATA / "synthetic", f"{name}-healthy", make(False).data())


if __name__ == "__main__":
    main()
