"""A recorded run: kernels, ops, calls of the CUDA runtime, marks and frames, from a Chrome trace of torch's profiler.

Live profiles take the same way: what the profiler exports is what is read. Times are in microseconds, as in the file.
"""

from __future__ import annotations

import gzip
import json
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

GPU_KINDS = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "fill"}
CALLS = ("cuda_runtime", "cuda_driver")
MARKS = ("user_annotation",)
FRAME = re.compile(r"(?P<file>.+?)\((?P<line>\d+)\): (?P<function>.+)")
CAPTURE = ("StreamBeginCapture", "StreamEndCapture")
LAUNCHES = ("LaunchKernel", "LaunchCooperativeKernel", "MemcpyAsync", "MemsetAsync")


class TraceError(ValueError):
    """A file is not a trace of torch's profiler; the message says where."""


@dataclass(frozen=True)
class Op:
    """One call of a torch op, with the shapes, types and numbers of its arguments where they were recorded."""

    name: str
    start: float
    end: float
    thread: Any = 0
    id: int = 0  # by which kernels name the op that launched them
    dims: tuple[Any, ...] = ()
    types: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    strides: tuple[Any, ...] = ()
    parent: int | None = None  # index among the ops of the trace

    @property
    def duration(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Call:
    """One call of the CUDA runtime or driver by the host."""

    name: str
    start: float
    end: float
    thread: Any = 0
    correlation: int = 0
    op: int = 0  # id of the op that made it


@dataclass(frozen=True)
class Kernel:
    """One piece of work: a kernel, copy or fill of a GPU; where there is no GPU, one op."""

    name: str
    start: float
    end: float
    duration: float  # of an op on the CPU less than end - start
    kind: str = "kernel"  # kernel, copy, fill or cpu
    device: int = 0
    stream: int = 0
    correlation: int = 0
    op: int | None = None  # index among the ops of the trace
    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()
    registers: int = 0  # of a thread
    shared: int = 0  # bytes of a block
    occupancy: float | None = None  # share of the warps that fit, estimated by the profiler
    bytes: int = 0  # of a copy or fill
    graph: int = 0  # of a CUDA graph that launched it, 0: none
    node: int = 0  # in that graph
    counters: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Mark:
    """A range that the program named: `record_function`, a step, a wait for a data loader."""

    name: str
    start: float
    end: float
    thread: Any = 0


@dataclass(frozen=True)
class Frame:
    """One call of a Python function. `line` is where the function is defined: the profiler knows no other."""

    file: str
    line: int
    function: str
    start: float
    end: float
    thread: Any = 0


class Span(NamedTuple):
    start: float
    end: float

    @property
    def length(self) -> float:
        return self.end - self.start


EMPTY = Span(0.0, 0.0)


@dataclass(frozen=True)
class Trace:
    """Everything recorded, each kind in the order of time."""

    kernels: tuple[Kernel, ...] = ()
    ops: tuple[Op, ...] = ()
    calls: tuple[Call, ...] = ()
    marks: tuple[Mark, ...] = ()
    frames: tuple[Frame, ...] = ()
    gpu: str = ""  # the driver's name of it
    window: Span = EMPTY
    timeline: bool = True  # False: kernels were measured one by one, so that pauses between them mean nothing

    @property
    def on_gpu(self) -> bool:
        """Whether a GPU did anything."""
        return any(kernel.kind != "cpu" for kernel in self.kernels)

    @cached_property
    def launch_of(self) -> dict[int, Call]:
        """The host's call by its correlation."""
        return {call.correlation: call for call in self.calls if call.correlation}

    def ancestors(self, index: int | None) -> Iterator[Op]:
        """The op at `index` and those around it, from the innermost out."""
        while index is not None:
            yield self.ops[index]
            index = self.ops[index].parent

    @cached_property
    def busy(self) -> list[Span]:
        """When the GPU works on anything, as spans that do not overlap."""
        return union((k.start, k.end) for k in self.kernels if k.kind != "cpu")


def union(spans: Iterable[tuple[float, float]]) -> list[Span]:
    """Spans that cover the same time without overlap.

    >>> union([(5, 6), (0, 2), (1, 3)])
    [Span(start=0, end=3), Span(start=5, end=6)]
    """
    merged: list[Span] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1].end:
            merged[-1] = Span(merged[-1].start, max(merged[-1].end, end))
        else:
            merged.append(Span(start, end))
    return merged


def overlap(span: tuple[float, float], spans: Sequence[Span]) -> float:
    """How much of `span` lies in `spans`, which are sorted and do not overlap.

    >>> overlap((1, 10), [Span(0, 2), Span(4, 5), Span(9, 20)])
    3
    """
    start, end = span
    first = bisect_left(spans, start, key=lambda s: s.end)
    last = bisect_right(spans, end, key=lambda s: s.start)
    return sum(max(0, min(end, s.end) - max(start, s.start)) for s in spans[first:last])


def read(path: Path) -> Trace:
    """The trace in a file of `export_chrome_trace`, also compressed by gzip."""
    try:
        raw = path.read_bytes()
        data = json.loads(gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw)
    except (json.JSONDecodeError, UnicodeDecodeError, gzip.BadGzipFile) as error:
        raise TraceError(f"{path}: not a JSON trace: {error}") from error
    return parse(data, str(path))


def parse(data: Any, where: str = "trace") -> Trace:
    """The trace in a Chrome trace object, as torch's profiler writes it."""
    if isinstance(data, dict) and "traceEvents" not in data and {"kernels", "findings"} <= data.keys():
        raise TraceError(f"{where} is a profile of --json; --read takes a trace of --trace")
    events = data.get("traceEvents") if isinstance(data, dict) else data
    if not isinstance(events, list):
        raise TraceError(f"{where}: has no list 'traceEvents'")
    kinds: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and "dur" in event:
            kinds[event.get("cat", "")].append(event)
    try:
        ops = nested(_op(e) for e in kinds["cpu_op"])
        calls = tuple(sorted((_call(e) for cat in CALLS for e in kinds[cat]), key=lambda c: c.start))
        marks = tuple(sorted((_mark(e) for cat in MARKS for e in kinds[cat]), key=lambda m: m.start))
        frames = tuple(sorted(filter(None, (_frame(e) for e in kinds["python_function"])), key=lambda f: f.start))
        index = {op.id: i for i, op in enumerate(ops) if op.id}
        found = [_kernel(e, kind, index) for cat, kind in GPU_KINDS.items() for e in kinds[cat]]
    except (KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{where}: an event lacks or misspells {error}") from error
    kernels = attributed(sorted(found, key=lambda k: k.start), ops, calls)
    devices = data.get("deviceProperties") or [] if isinstance(data, dict) else []
    gpu = str(devices[0].get("name", "")) if devices and kernels else ""
    return Trace(kernels, ops, calls, marks, frames, gpu, _window(kernels, ops, calls, marks))


def _window(kernels: Sequence[Kernel], *host: Sequence[Any]) -> Span:
    """From the first work to the last: of the GPU where there is one, not a program's start-up."""
    work = kernels or [item for group in host for item in group]
    if not work:
        return EMPTY
    return Span(min(item.start for item in work), max(item.end for item in work))


def _times(event: dict[str, Any]) -> tuple[float, float]:
    start = float(event["ts"])
    return start, start + float(event["dur"])


def _op(event: dict[str, Any]) -> Op:
    args = event.get("args", {})
    start, end = _times(event)
    return Op(
        event["name"], start, end, event.get("tid", 0), int(args.get("External id", 0)),
        tuple(args.get("Input Dims", ())), tuple(args.get("Input type", ())), tuple(args.get("Concrete Inputs", ())),
        tuple(args.get("Input Strides", ())),
    )  # fmt: skip


def _call(event: dict[str, Any]) -> Call:
    args = event.get("args", {})
    start, end = _times(event)
    correlation, op = int(args.get("correlation", 0)), int(args.get("External id", 0))
    return Call(event["name"], start, end, event.get("tid", 0), correlation, op)


def _mark(event: dict[str, Any]) -> Mark:
    return Mark(event["name"], *_times(event), event.get("tid", 0))


def _frame(event: dict[str, Any]) -> Frame | None:
    found = FRAME.fullmatch(event["name"])
    if not found:
        return None  # a built-in function or a module's forward: there is no file
    return Frame(found["file"], int(found["line"]), found["function"], *_times(event), event.get("tid", 0))


def _kernel(event: dict[str, Any], kind: str, index: Mapping[int, int]) -> Kernel:
    args = event.get("args", {})
    start, end = _times(event)
    occupancy = args.get("est. achieved occupancy %")
    return Kernel(
        event["name"], start, end, end - start, kind, int(args.get("device", 0)), int(args.get("stream", 0)),
        int(args.get("correlation", 0)), index.get(int(args.get("External id", 0))), tuple(args.get("grid", ())),
        tuple(args.get("block", ())), int(args.get("registers per thread", 0)), int(args.get("shared memory", 0)),
        None if occupancy is None else float(occupancy) / 100, int(args.get("bytes", 0)),
        int(args.get("graph id", 0)), int(args.get("graph node id", 0)),
    )  # fmt: skip


def nested(ops: Iterable[Op]) -> tuple[Op, ...]:
    """The ops in the order of time, each with the op around it as its parent."""
    ordered = sorted(ops, key=lambda op: (op.start, -op.end))
    stacks: dict[Any, list[int]] = defaultdict(list)
    placed: list[Op] = []
    for i, op in enumerate(ordered):
        stack = stacks[op.thread]
        while stack and ordered[stack[-1]].end < op.end:
            stack.pop()
        placed.append(replace(op, parent=stack[-1] if stack else None))
        stack.append(i)
    return tuple(placed)


def cpu_kernels(ops: Sequence[Op], whole: Sequence[bool]) -> tuple[Kernel, ...]:
    """The work of a run without a GPU: each op less the ops inside it, and of those that are `whole` everything."""
    hidden, inner = [False] * len(ops), [0.0] * len(ops)
    for i, op in enumerate(ops):
        if op.parent is not None:
            hidden[i] = whole[op.parent] or hidden[op.parent]
            inner[op.parent] += op.duration
    return tuple(
        Kernel(op.name, op.start, op.end, op.duration if whole[i] else max(0.0, op.duration - inner[i]), "cpu", op=i)
        for i, op in enumerate(ops)
        if not hidden[i]
    )


def attributed(kernels: Sequence[Kernel], ops: Sequence[Op], calls: Sequence[Call]) -> tuple[Kernel, ...]:
    """Kernels with the op that launched them, where the trace does not say it itself.

    Of a launch, the innermost op around the host's call. Nodes of a CUDA graph all come from one call of
    cudaGraphLaunch: they take, in order, the ops that made the calls between the begin and the end of the capture,
    where that was recorded and has as many calls as the graph has nodes.
    """
    by_id = {op.id: i for i, op in enumerate(ops) if op.id}
    launch = {call.correlation: call for call in calls if call.correlation}
    replays: dict[int, list[int]] = defaultdict(list)
    placed = list(kernels)
    for i, kernel in enumerate(placed):
        call = launch.get(kernel.correlation)
        if call is not None and "GraphLaunch" in call.name:
            replays[kernel.correlation].append(i)
            placed[i] = replace(kernel, graph=kernel.graph or 1, op=None)
        elif kernel.op is None and call is not None:
            placed[i] = replace(kernel, op=by_id.get(call.op, _around(ops, call)))
    captures = _captures(calls)
    for members in replays.values():
        members.sort(key=lambda i: (placed[i].node, placed[i].start))
        first = placed[members[0]].start
        fitting = [c for c in captures if len(c) == len(members) and c[-1].end <= first]
        if fitting:  # the latest capture of that size before this replay
            for i, call in zip(members, fitting[-1], strict=True):
                placed[i] = replace(placed[i], op=by_id.get(call.op, _around(ops, call)))
    return tuple(placed)


def _captures(calls: Sequence[Call]) -> list[list[Call]]:
    """The launches inside each recorded capture of a CUDA graph."""
    captures: list[list[Call]] = []
    open_ = False
    for call in calls:
        if CAPTURE[0] in call.name:
            open_ = True
            captures.append([])
        elif CAPTURE[1] in call.name:
            open_ = False
        elif open_ and any(word in call.name for word in LAUNCHES):
            captures[-1].append(call)
    return [capture for capture in captures if capture]


def _around(ops: Sequence[Op], call: Call) -> int | None:
    """The innermost op of the same thread that the call lies in."""
    last = bisect_right(ops, call.start, key=lambda op: op.start) - 1
    while last >= 0 and ops[last].thread != call.thread:
        last -= 1
    index: int | None = last if last >= 0 else None
    while index is not None and ops[index].end < call.end:
        index = ops[index].parent
    return index
