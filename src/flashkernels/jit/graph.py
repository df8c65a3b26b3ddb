"""CUDA graphs of a function: captured at the first call of a kind, replayed at the following ones.

A graph has addresses, not arguments. So each captured kind of call has buffers of its own; arguments are copied there,
and what the function returns lies at fixed places. What it uses without taking it as an argument (weights, a cache) is
watched: if one has moved, the replay would compute with freed memory, so it raises.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import inspect
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashkernels.jit.captured import Modes, Watch, held

KERNEL_NODE = 0  # CU_GRAPH_NODE_TYPE_KERNEL
PLAIN = (int, float, complex, str, bytes, torch.dtype, torch.device, type(None))  # their repr is all there is to them


class GraphError(RuntimeError):
    """A call cannot be captured, or a captured one cannot be replayed any more; the message says which tensor and why.
    """


@dataclass
class Capture:
    """One kind of call: its buffers, its graph and how it was used. Times are of one call each, waited for."""

    key: tuple[Any, ...]
    inputs: list[Tensor]
    outputs: Any = None
    graph: Any = None  # None on the CPU
    watch: Watch = field(default_factory=Watch)
    fixed: list[Tensor] = field(default_factory=list)  # static arguments
    kept: Any = None  # the other arguments: the key has ids, which must not go to others
    launches: int = 0  # kernels in it
    calls: int = 0
    eager_ms: float = 0.0
    replay_ms: float = 0.0


@dataclass(frozen=True)
class Report:
    """What capturing saved: a line for each kind of call."""

    name: str
    captures: tuple[Capture, ...]

    @property
    def launches_saved(self) -> int:
        """Launches that replays did not make: one replay is one launch."""
        return sum(max(0, one.launches - 1) * one.calls for one in self.captures)

    def __str__(self) -> str:
        lines = [f"{self.name}: {len(self.captures)} captured, {self.launches_saved} launches saved"]
        for one in self.captures:
            shapes = ", ".join("x".join(map(str, x.shape)) or "()" for x in one.inputs) or "no tensors"
            times = f"{one.eager_ms:.3f} ms before" + (f", {one.replay_ms:.3f} ms after" if one.replay_ms else "")
            lines.append(f"  {shapes}: {one.calls} calls, {one.launches} launches in one; {times}")
        return "\n".join(lines)


class Graph:
    """`function` as CUDA graphs, one for each kind of call: shapes, dtypes, devices, all that is no tensor, the modes
    of autocast, gradients and inference, and which modules train of those that `function` holds.

    Args:
        function: takes and returns tensors, numbers, and tuples, lists and dicts of them. It may use anything on the
            GPU that capture allows, ours and others'. At the first call of a kind it runs `warmup` times before it is
            captured, so what it changes (a cache) is changed several times over with the same arguments.
        batch: names of the arguments whose first dimension is the batch. They are padded to the next of `buckets` by
            repeating the last row, which is a valid row whatever it means; outputs whose first size is the bucket are
            cut to the batch.
        buckets: batch sizes to capture, ascending. More than the last is an error.
        static: names of the arguments that are used where they are, not copied: caches that the function changes,
            weights. Their addresses must stay the same. Dataclasses, such as a PagedCache, are always static.
        copy: outputs are copies, the caller's own. False: they are the graph's own memory, which the next call of the
            same kind overwrites.
        warmup: runs before a capture.
        most: kinds of calls that are kept; the oldest is forgotten first.

    On the CPU there is nothing to capture: the function runs on the same buffers, with the same padding and checks.
    Calls from several streams wait for one another. There are no gradients. An object among the arguments makes a kind
    of call of its own and lives as long as its capture. What else decides what `function` does, such as a number in its
    closure or another setting of torch, stays as it was at the capture.

    >>> import torch, flashkernels as fk
    >>> step = fk.Graph(lambda x: x * 2, batch=("x",), buckets=(4, 8))
    >>> step(torch.arange(3)), step(torch.arange(5)).shape, step.report().captures[0].calls
    (tensor([0, 2, 4]), torch.Size([5]), 1)
    """

    def __init__(
        self, function: Callable[..., Any], *, batch: Sequence[str] = (), buckets: Sequence[int] = (),
        static: Sequence[str] = (), copy: bool = True, warmup: int = 3, most: int = 64,
    ) -> None:  # fmt: skip
        if not callable(function):
            raise TypeError(f"function must be callable, got {type(function).__name__}")
        for name, names in (("batch", batch), ("static", static)):
            if isinstance(names, str) or not all_of(str, names):
                raise TypeError(f"{name}={names!r} must be a list of names")
        if not all_of(int, buckets):
            raise TypeError(f"buckets={buckets!r} must be a list of whole numbers")
        if not all_of(int, (warmup, most)):
            raise TypeError(f"warmup={warmup!r} and most={most!r} must be whole numbers")
        if both := sorted({*batch} & {*static}):
            raise ValueError(f"{both} cannot be both in batch, which is copied and padded, and in static, which is not")
        if list(buckets) != sorted(set(buckets)) or any(size < 1 for size in buckets):
            raise ValueError(f"buckets={list(buckets)} must be positive and ascend")
        if bool(batch) != bool(buckets):
            raise ValueError(f"batch={list(batch)} and buckets={list(buckets)} go together")
        if warmup < 1 or most < 1:
            raise ValueError(f"warmup={warmup} and most={most} must be at least 1")
        self.function, self.batch, self.buckets, self.static = function, set(batch), tuple(buckets), set(static)
        self.copy, self.warmup, self.most = copy, warmup, most
        self.parameters = _parameters(function)
        names = (*self.parameters.names, *self.parameters.named_only, self.parameters.rest)
        unknown = (self.batch | self.static) - {*names}
        if unknown and not self.parameters.open:
            known = ", ".join(filter(None, names))
            raise ValueError(f"{sorted(unknown)} are no arguments of {self.name}: it has {known}")
        self.captures: dict[tuple[Any, ...], Capture] = {}
        self.modes = Modes()  # as the latest capture found them
        self.lock = threading.RLock()
        self.last: Any = None  # event after the latest replay
        self.stream: Any = None  # of it
        self.pool: Any = None
        functools.update_wrapper(self, function, updated=())

    @property
    def name(self) -> str:
        return getattr(self.function, "__qualname__", type(self.function).__name__)

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        with self.lock:
            call = Arguments(self, arguments, keywords)
            cuda = call.device is not None and call.device.type == "cuda"
            if cuda and torch.cuda.is_current_stream_capturing():
                return self.function(*arguments, **keywords)  # part of another capture
            if torch.is_grad_enabled() and any(x.requires_grad for x in (*call.copied, *call.fixed)):
                raise GraphError(f"{self.name}: a graph has no gradients: call it under torch.no_grad()")
            with torch.cuda.device(call.device) if cuda else contextlib.nullcontext():
                return self._replayed(call, cuda)

    def _replayed(self, call: Arguments, cuda: bool) -> Any:
        if cuda:
            self._wait()
        one = self.captures.get(self._key(call, cuda))
        if one is None:
            one = self._capture(call, cuda)
        else:
            self._check(one, call)
            call.fill(one.inputs)
        if not cuda:
            one.outputs = self._called(one, call)
        elif one.calls == 1:  # the first replay also uploads the graph
            torch.cuda.synchronize()
            start = time.perf_counter()
            one.graph.replay()
            torch.cuda.synchronize()
            one.replay_ms = (time.perf_counter() - start) * 1e3
        else:
            one.graph.replay()
        one.calls += 1
        out = call.cut(one.outputs, self.copy)
        if cuda:
            self.stream = torch.cuda.current_stream()
            self.last = self.last or torch.cuda.Event()
            self.last.record(self.stream)
        return out

    def _capture(self, call: Arguments, cuda: bool) -> Capture:
        one = Capture((), call.buffers(), fixed=call.fixed, kept=(call.parts, call.named))
        if cuda:
            self._record(one, call)
        inside = [x for label, module in call.modules for x in held(module, label)]
        one.watch = Watch([*held(self.function), *inside])
        self.modes = self.modes.of(self.function)
        one.key = self._key(call, cuda)
        while len(self.captures) >= self.most:
            self.captures.pop(next(iter(self.captures)))
        self.captures[one.key] = one
        return one

    def _key(self, call: Arguments, cuda: bool) -> tuple[Any, ...]:
        """The kind of a call: its arguments, and the state beside them that decides what the function does."""
        kind = "cuda" if cuda else "cpu"
        autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        grad = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return *call.key, autocast, grad, self.modes, self.modes.now()

    def _called(self, one: Capture, call: Arguments) -> Any:
        """The function on the buffers, not captured. The first time, they must come out of it as they went in."""
        arguments, keywords = call.rebuilt(one.inputs)
        first = not one.eager_ms
        before = [x.clone() for x in one.inputs] if first else []
        _synchronise(call.device)
        start = time.perf_counter()
        outputs = self.function(*arguments, **keywords)
        _synchronise(call.device)
        one.eager_ms = (time.perf_counter() - start) * 1e3
        for label, x, old in zip(call.labels, one.inputs, before, strict=False):
            if not _same(x, old):
                self.captures.pop(one.key, None)
                raise GraphError(f"{self.name} changes its argument {label} in place: name it in static=")
        return outputs

    def _record(self, one: Capture, call: Arguments) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), new_casts():
            for _ in range(self.warmup):
                self._called(one, call)
        torch.cuda.current_stream().wait_stream(side)
        arguments, keywords = call.rebuilt(one.inputs)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph, pool=self.pool, stream=side), new_casts():
            one.outputs = self.function(*arguments, **keywords)
        one.launches = kernels_in(graph.raw_cuda_graph())
        graph.instantiate()
        one.graph, self.pool = graph, graph.pool()

    def _check(self, one: Capture, call: Arguments) -> None:
        moved = one.watch.moved()
        for label, old, new in zip(call.fixed_labels, one.fixed, call.fixed, strict=True):
            if new.data_ptr() != old.data_ptr():
                moved.append(f"{label} was at {old.data_ptr():#x} and is at {new.data_ptr():#x}")
        if moved:
            raise GraphError(
                f"{self.name} was captured with other tensors: {'; '.join(moved)}. Keep them where they are, pass them "
                "as arguments, or call clear() to capture anew"
            )

    def _wait(self) -> None:
        """The buffers may still be in use on another stream."""
        if self.last is not None and self.stream != torch.cuda.current_stream():
            torch.cuda.current_stream().wait_event(self.last)

    def clear(self) -> None:
        """Forgets all captures; the next call of a kind captures it anew."""
        with self.lock:
            if any(one.graph is not None for one in self.captures.values()):
                torch.cuda.synchronize()  # a replay may still run
            self.captures.clear()
            self.pool = None

    def report(self) -> Report:
        """Launches saved, and the time of a call before and after, for each kind of call."""
        return Report(self.name, tuple(self.captures.values()))


def graph(function: Callable[..., Any] | None = None, **settings: Any) -> Any:
    """Decorator: the function as a `Graph`. The arguments are those of `Graph`.

    >>> import torch, flashkernels as fk
    >>> @fk.graph
    ... def double(x):
    ...     return x * 2
    >>> double(torch.ones(2)), double.report().captures[0].calls
    (tensor([2., 2.]), 1)
    """
    if function is None:
        return functools.partial(graph, **settings)
    return Graph(function, **settings)


class Arguments:
    """One call: its tensors, its key, and how to make the arguments again from buffers."""

    def __init__(self, owner: Graph, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self.labels: list[str] = []
        self.copied: list[Tensor] = []  # to buffers
        self.padded: list[bool] = []
        self.fixed: list[Tensor] = []  # used where they are
        self.fixed_labels: list[str] = []
        self.modules: list[tuple[str, torch.nn.Module]] = []
        self.owner = owner
        known, rest = owner.parameters.names, owner.parameters.rest
        named = [(name, name, x) for name, x in zip(known, arguments, strict=False)]
        named += [(f"{rest}[{i}]", rest, x) for i, x in enumerate(arguments[len(known) :])]
        parts = [self._part(label, x, name in owner.batch, name in owner.static) for label, name, x in named]
        self.parts = parts
        self.named = [
            (name, self._part(name, x, name in owner.batch, name in owner.static)) for name, x in keywords.items()
        ]
        self.rows, self.size = self._bucket()
        self.device = next((x.device for x in (*self.copied, *self.fixed)), None)
        shapes = [
            (self._shape(x, padded), _order(x), x.dtype, x.device)
            for x, padded in zip(self.copied, self.padded, strict=True)
        ]
        fixed = [(x.shape, x.stride(), x.dtype, x.device) for x in self.fixed]
        self.key = (tuple(shapes), tuple(fixed), repr(parts), repr(self.named))
        if self.device is not None:
            labels, tensors = (*self.labels, *self.fixed_labels), (*self.copied, *self.fixed)
            for label, x in zip(labels, tensors, strict=True):
                if x.device != self.device:
                    raise GraphError(f"{owner.name}: {label} is on {x.device}, other arguments are on {self.device}")

    def _part(self, label: str, x: Any, padded: bool, static: bool) -> Any:
        """x with its tensors replaced by places: ("copied", i) or ("fixed", i); its repr is part of the key."""
        if isinstance(x, Tensor):
            if static:
                self.fixed.append(x)
                self.fixed_labels.append(label)
                return Place("fixed", len(self.fixed) - 1)
            if padded and x.dim() == 0:
                raise ValueError(f"{label} has no dimensions, so no batch")
            self.labels.append(label)
            self.copied.append(x)
            self.padded.append(padded)
            return Place("copied", len(self.copied) - 1)
        if isinstance(x, (tuple, list)):
            inner = [self._part(f"{label}[{i}]", y, padded, static) for i, y in enumerate(x)]
            return Made(type(x), inner)
        if isinstance(x, dict):
            return Made(dict, {key: self._part(f"{label}[{key!r}]", y, padded, static) for key, y in x.items()})
        if dataclasses.is_dataclass(x) and not isinstance(x, type):
            values = {}
            for one in dataclasses.fields(x):
                if isinstance(value := getattr(x, one.name), Tensor):
                    self.fixed.append(value)
                    self.fixed_labels.append(f"{label}.{one.name}")
                elif isinstance(value, PLAIN):
                    values[one.name] = value
            return Opaque(x, values)
        if isinstance(x, torch.nn.Module):
            self.modules.append((label, x))
            return Opaque(x, [module.training for module in x.modules()])
        return x if isinstance(x, PLAIN) else Opaque(x)

    def _bucket(self) -> tuple[int, int]:
        """The batch, and the bucket it goes to; 0 where nothing is padded."""
        tensors = zip(self.labels, self.copied, self.padded, strict=True)
        counts = {label: x.shape[0] for label, x, padded in tensors if padded}
        if not counts:
            if self.owner.batch:
                raise ValueError(f"{self.owner.name}: no tensor is in {sorted(self.owner.batch)}")
            return 0, 0
        if len({*counts.values()}) > 1:
            raise ValueError(f"the batch sizes differ: {', '.join(f'{name} has {n}' for name, n in counts.items())}")
        rows = next(iter(counts.values()))
        size = next((size for size in self.owner.buckets if size >= rows), 0)
        if not rows or not size:
            raise ValueError(f"a batch of {rows} has no bucket among {list(self.owner.buckets)}")
        return rows, size

    def _shape(self, x: Tensor, padded: bool) -> tuple[int, ...]:
        return (self.size, *x.shape[1:]) if padded else tuple(x.shape)

    def buffers(self) -> list[Tensor]:
        """Memory of the graph's own for the copied arguments, filled."""
        made = []
        for x, padded in zip(self.copied, self.padded, strict=True):
            shape = self._shape(x, padded)
            order = _order(x)
            new = torch.empty([shape[i] for i in order], dtype=x.dtype, device=x.device)
            made.append(new.permute([order.index(i) for i in range(len(order))]))
        self.fill(made)
        return made

    def fill(self, buffers: list[Tensor]) -> None:
        with torch.no_grad():
            for x, padded, buffer in zip(self.copied, self.padded, buffers, strict=True):
                if not padded or self.rows == self.size:
                    buffer.copy_(x, non_blocking=True)
                else:
                    buffer[: self.rows].copy_(x, non_blocking=True)
                    buffer[self.rows :].copy_(x[-1:].expand_as(buffer[self.rows :]), non_blocking=True)

    def rebuilt(self, buffers: list[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        lists = {"copied": buffers, "fixed": self.fixed}
        return tuple(_make(x, lists) for x in self.parts), {name: _make(x, lists) for name, x in self.named}

    def cut(self, outputs: Any, copy: bool) -> Any:
        """What the caller gets: the rows of its batch, its own where copies are asked for."""
        if isinstance(outputs, Tensor):
            mine = outputs
            if self.size and mine.dim() and mine.shape[0] == self.size:
                mine = mine[: self.rows]
            return mine.clone() if copy else mine
        if isinstance(outputs, dict):
            return {key: self.cut(x, copy) for key, x in outputs.items()}
        if isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
            return type(outputs)(*(self.cut(x, copy) for x in outputs))
        if isinstance(outputs, (tuple, list)):
            return type(outputs)(self.cut(x, copy) for x in outputs)
        return outputs


@dataclass(frozen=True)
class Place:
    """Where a tensor stood among the arguments."""

    kind: str
    index: int


@dataclass(frozen=True)
class Made:
    """A tuple, list or dict of arguments."""

    kind: type
    inner: Any


class Opaque:
    """An argument that is neither tensor nor number: the same object each time, or another kind of call. So it is with
    other `values` inside."""

    def __init__(self, value: Any, values: Any = ()) -> None:
        self.value, self.values = value, values

    def __repr__(self) -> str:
        return f"{type(self.value).__name__} at {id(self.value):#x} {self.values}"


@contextlib.contextmanager
def new_casts() -> Iterator[None]:
    """Autocast casts weights each time: one that it keeps is freed with its scope, and a graph would have its address.
    """
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def kernels_in(graph: int) -> int:
    """How many kernels a captured cudaGraph_t launches."""
    from flashkernels.jit import driver

    handle, count = ctypes.c_void_p(graph), ctypes.c_size_t()
    driver.call("cuGraphGetNodes", handle, None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    driver.call("cuGraphGetNodes", handle, nodes, ctypes.byref(count))
    kinds = []
    for node in nodes:
        kind = ctypes.c_int()
        driver.call("cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
        kinds.append(kind.value)
    return kinds.count(KERNEL_NODE)


def _make(x: Any, lists: dict[str, list[Tensor]]) -> Any:
    if isinstance(x, Place):
        return lists[x.kind][x.index]
    if isinstance(x, Opaque):
        return x.value
    if isinstance(x, Made):
        if x.kind is dict:
            return {key: _make(y, lists) for key, y in x.inner.items()}
        inner = [_make(y, lists) for y in x.inner]
        return x.kind(*inner) if hasattr(x.kind, "_fields") else x.kind(inner)
    return x


def _order(x: Tensor) -> tuple[int, ...]:
    """The dimensions by stride, largest first: buffers are dense, in the order of the argument."""
    strides = x.stride()
    return tuple(sorted(range(x.dim()), key=lambda i: (-strides[i], i)))


class Parameters(NamedTuple):
    """What a function calls its arguments."""

    names: list[str]  # of those that come by position
    named_only: list[str]
    rest: str  # of all further ones by position: *args
    open: bool  # whether there may be others, by names that are not known


def _parameters(function: Callable[..., Any]) -> Parameters:
    target = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        found = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):
        return Parameters([], [], "argument", open=True)
    by_place = [p.name for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in found if p.kind == p.VAR_POSITIONAL), "")
    named_only = [p.name for p in found if p.kind == p.KEYWORD_ONLY]
    return Parameters(by_place, named_only, rest, open=any(p.kind == p.VAR_KEYWORD for p in found))


def all_of(kind: type, values: Any) -> bool:
    """Whether these are several of that type; True is no whole number."""
    try:
        return all(isinstance(x, kind) and not isinstance(x, bool) for x in values)
    except TypeError:  # one number
        return False


def _same(x: Tensor, y: Tensor) -> bool:
    """Bit for bit: NaN is like NaN."""
    a, b = (z.reshape(-1).contiguous().view(torch.uint8) for z in (x, y))
    return torch.equal(a, b)


def _synchronise(device: torch.device | None) -> None:
    if device is not None and device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
