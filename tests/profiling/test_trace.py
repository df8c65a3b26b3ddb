"""Traces: what is read from a Chrome trace, and which op a kernel belongs to."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from flashkernels.profiling import trace
from flashkernels.profiling.trace import Span, TraceError

from .timeline import BF16, GEMM, Timeline, matmul


def event(cat: str, name: str, start: float, duration: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": start, "dur": duration, "args": args}


def test_a_kernel_knows_its_op_its_call_and_its_launch() -> None:
    line = Timeline()
    matmul(line, us=200.0)
    found = trace.parse(line.data())
    (kernel,) = found.kernels
    assert (kernel.name, kernel.kind, kernel.duration, kernel.stream) == (GEMM, "kernel", 200.0, 7)
    assert (kernel.grid, kernel.block, kernel.registers, kernel.shared) == ((1056, 1, 1), (256, 1, 1), 168, 214016)
    assert kernel.occupancy == 0.8
    assert [op.name for op in found.ancestors(kernel.op)] == ["aten::mm"]
    assert found.launch_of[kernel.correlation].name == "cudaLaunchKernel"
    assert found.gpu == "NVIDIA H200" and found.window == Span(kernel.start, kernel.end)


def test_without_an_external_id_the_innermost_op_around_the_call_counts() -> None:
    events = [
        event("cpu_op", "aten::linear", 0, 50, **{"External id": 1}),
        event("cpu_op", "aten::addmm", 10, 30, **{"External id": 2}),
        event("cpu_op", "aten::t", 5, 3, **{"External id": 3}),
        event("cpu_op", "aten::elsewhere", 11, 30, tid=2, **{"External id": 4}),
        event("cuda_runtime", "cudaLaunchKernel", 20, 5, correlation=9),
        event("kernel", "gemm", 30, 100, tid=7, correlation=9, stream=7),
    ]
    found = trace.parse({"traceEvents": events})
    assert [op.name for op in found.ancestors(found.kernels[0].op)] == ["aten::addmm", "aten::linear"]


def test_nodes_of_a_graph_take_the_ops_of_its_capture_in_order() -> None:
    line = Timeline()
    line.call("cudaStreamBeginCapture")
    line.captured = []
    line.op("aten::mm", [[16, 512], [512, 512]], [BF16, BF16], [("gemm", 2.0)])
    line.op("aten::relu", [[16, 512]], [BF16], [("relu", 1.0)])
    nodes, line.captured = line.captured, None
    line.call("cudaStreamEndCapture")
    line.replay(nodes)
    line.replay(nodes)
    found = trace.parse(line.data())
    names = [(kernel.name, found.ops[kernel.op].name) for kernel in found.kernels if kernel.op is not None]
    assert names == 2 * [("gemm", "aten::mm"), ("relu", "aten::relu")]
    assert all(kernel.graph == 2 for kernel in found.kernels)


def test_a_replay_without_its_capture_has_kernels_without_ops() -> None:
    line = Timeline()
    line.replay([("gemm", 2.0), ("relu", 1.0)])
    assert [kernel.op for kernel in trace.parse(line.data()).kernels] == [None, None]


@pytest.mark.parametrize(
    ("whole", "work"),
    [
        ("none", [("aten::linear", 20), ("aten::addmm", 25), ("aten::expand", 5)]),
        ("aten::addmm", [("aten::linear", 20), ("aten::addmm", 30)]),
        ("aten::linear", [("aten::linear", 50)]),
    ],
)
def test_without_a_gpu_ops_are_the_work_with_or_without_those_inside(whole: str, work: list[tuple[str, float]]) -> None:
    events = [
        event("cpu_op", "aten::linear", 0, 50, **{"External id": 1}),
        event("cpu_op", "aten::addmm", 10, 30, **{"External id": 2}),
        event("cpu_op", "aten::expand", 12, 5, **{"External id": 3}),
    ]
    found = trace.parse({"traceEvents": events})
    kernels = trace.cpu_kernels(found.ops, [op.name == whole for op in found.ops])
    assert [(kernel.name, kernel.duration) for kernel in kernels] == work
    assert not found.on_gpu and found.window == Span(0, 50)


def test_frames_have_file_line_and_function() -> None:
    names = ("my/train.py(42): step", "<built-in function print>")
    events = [event("python_function", name, 0, 5) for name in names]
    (frame,) = trace.parse({"traceEvents": events}).frames
    assert (frame.file, frame.line, frame.function) == ("my/train.py", 42, "step")


def test_busy_time_counts_overlapping_streams_once() -> None:
    events = [event("kernel", "a", 0, 10, stream=1), event("kernel", "b", 5, 10, stream=2), event("kernel", "c", 20, 1)]
    assert trace.parse({"traceEvents": events}).busy == [Span(0, 15), Span(20, 21)]


def test_plain_and_compressed_files_read_the_same(tmp_path: Path) -> None:
    line = Timeline()
    matmul(line)
    text = json.dumps(line.data())
    (tmp_path / "a.json").write_text(text)
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(text.encode()))
    assert trace.read(tmp_path / "a.json") == trace.read(tmp_path / "b.json.gz")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("not json", "not a JSON trace", id="not-json"),
        pytest.param("{}", "no list 'traceEvents'", id="no-events"),
        pytest.param('{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "k", "dur": 1}]}', "'ts'", id="no-start"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_by_name(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "odd.json"
    path.write_text(text)
    with pytest.raises(TraceError, match=words) as refused:
        trace.read(path)
    assert "odd.json" in str(refused.value)
