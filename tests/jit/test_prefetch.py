"""`fk.Prefetcher`: order, errors and early stops everywhere; right results under races, and overlap, on a GPU."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import flashkernels as fk
from flashkernels.jit.prefetch import each

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_devices = pytest.mark.parametrize("device", DEVICES)


class Batch(NamedTuple):
    x: Tensor
    name: str


def batches(count: int, fail_at: int = -1, size: int = 3) -> Iterator[Batch]:
    for i in range(count):
        if i == fail_at:
            raise KeyError(f"batch {i}")
        yield Batch(torch.full((size,), i), f"b{i}")


@on_devices
@pytest.mark.parametrize("depth", [1, 2, 7])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_every_batch_comes_once_and_in_order(count: int, depth: int, device: str) -> None:
    got = list(fk.Prefetcher(batches(count), device, depth=depth))
    assert [(int(one.x[0]), one.name) for one in got] == [(i, f"b{i}") for i in range(count)]
    assert all(one.x.device.type == device and isinstance(one, Batch) for one in got)


@on_devices
def test_an_error_comes_after_the_batches_before_it(device: str) -> None:
    got = iter(fk.Prefetcher(batches(9, fail_at=3), device, depth=5))
    assert [int(next(got).x[0]) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError, match="batch 3"):
        next(got)


@on_devices
def test_stopping_early_leaves_the_loader_where_it_is(device: str) -> None:
    source = batches(10)
    for batch in fk.Prefetcher(source, device, depth=2):
        if batch.name == "b1":
            break
    ahead = 0 if device == "cpu" else 2
    assert next(source).name == f"b{2 + ahead}"


@on_devices
def test_a_loader_can_be_iterated_again(device: str) -> None:
    loader = fk.Prefetcher([torch.ones(1), torch.zeros(1)], device)
    assert len(loader) == 2 and [[float(x) for x in loader] for _ in range(2)] == [[1.0, 0.0]] * 2


@on_devices
def test_containers_keep_their_kind(device: str) -> None:
    given: list[Any] = [{"a": [torch.ones(2)], "b": (torch.zeros(1, dtype=torch.int64), None)}, 7, (), torch.empty(0)]
    first, second, third, fourth = fk.Prefetcher(given, device)
    assert isinstance(first["a"], list) and first["b"][0].dtype == torch.int64 and first["b"][1] is None
    assert (second, third, fourth.shape) == (7, (), (0,))


class Encoded(collections.UserDict[str, Any]):
    """As those of transformers: a mapping with more than its items."""

    def __init__(self, data: dict[str, Any], name: str) -> None:
        super().__init__(data)
        self.name = name


def test_mappings_keep_their_kind() -> None:
    x, double = torch.ones(2), lambda t: t * 2
    ordered = each(collections.OrderedDict(b=x, a=x), double)
    assert type(ordered) is collections.OrderedDict and list(ordered) == ["b", "a"] and ordered["a"][0] == 2
    default = each(collections.defaultdict(list, {"a": x}), double)
    assert type(default) is collections.defaultdict and default["a"][0] == 2 and default["b"] == []
    given = Encoded({"a": [x]}, "name")
    encoded = each(given, double)
    assert type(encoded) is Encoded and encoded.name == "name" and encoded["a"][0][0] == 2 and given["a"][0] is x
    fixed = each(MappingProxyType({"a": x}), double)
    assert type(fixed) is MappingProxyType and fixed["a"][0] == 2


def test_the_lengths_of_a_packed_sequence_stay_where_they_are() -> None:
    rows = torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(3)], enforce_sorted=False)
    moved = each({"a": rows}, lambda t: t.to("meta"))["a"]
    assert type(moved) is type(rows) and moved.batch_sizes is rows.batch_sizes
    for x in (moved.data, moved.sorted_indices, moved.unsorted_indices):
        assert x.device.type == "meta"
    assert each(torch.nn.utils.rnn.pack_sequence([torch.ones(2)]), lambda t: t).sorted_indices is None


def test_device_0_is_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert fk.Prefetcher([], 0).device == torch.device("cuda", 0)
    assert fk.Prefetcher([]).device == torch.device("cuda", 3)


@pytest.mark.parametrize("depth", [0, -1, True, 1.5])
def test_bad_depths_are_named(depth: Any) -> None:
    with pytest.raises(ValueError, match=f"depth={depth}"):
        fk.Prefetcher([], "cpu", depth=depth)


def test_bad_loaders_and_devices_are_named() -> None:
    with pytest.raises(TypeError, match="loader must be iterable, got int"):
        fk.Prefetcher(3, "cpu")
    with pytest.raises(ValueError, match="device='meta'"):
        fk.Prefetcher([], "meta")


@pytest.mark.gpu
def test_results_are_right_when_the_gpu_lags_behind() -> None:
    """Each batch is read long after the host has asked for the following ones; memory given away early would show."""
    size, count = 1 << 20, 40
    source = (torch.full((size,), float(i)) for i in range(count))
    sums = []
    for batch in fk.Prefetcher(source, "cuda", depth=3):
        torch.cuda._sleep(3_000_000)
        sums.append(batch.double().sum())
        del batch
    assert [int(x) // size for x in sums] == list(range(count))


@pytest.mark.gpu
def test_results_are_right_on_another_stream() -> None:
    stream = torch.cuda.Stream()
    size, sums = 1 << 20, []
    with torch.cuda.stream(stream):
        for batch in fk.Prefetcher((torch.full((size,), float(i)) for i in range(20)), "cuda"):
            torch.cuda._sleep(2_000_000)
            sums.append(batch.double().sum())
    stream.synchronize()
    assert [int(x) // size for x in sums] == list(range(20))


@pytest.mark.gpu
def test_copies_overlap_with_kernels_in_a_trace() -> None:
    weight = torch.randn(4096, 4096, device="cuda")
    host = [torch.randn(4096, 4096).pin_memory() for _ in range(8)]
    for batch in fk.Prefetcher(host[:2], "cuda"):
        batch @ weight
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as trace:
        for batch in fk.Prefetcher(host, "cuda"):
            for _ in range(4):
                batch @ weight
        torch.cuda.synchronize()
    events = [e for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    copies = [e.time_range for e in events if "HtoD" in e.name]
    kernels = [e.time_range for e in events if not e.name.startswith(("Memcpy", "Memset"))]
    assert copies and kernels
    overlap = sum(any(c.start < k.end and k.start < c.end for k in kernels) for c in copies)
    assert overlap >= len(host) // 2, f"{overlap} of {len(copies)} copies overlap with a kernel"
