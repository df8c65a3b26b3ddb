"""Counters of persistent grids: launches that may run at once never share one, and there are always more."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flashkernels.jit import counters as module
from flashkernels.jit.counters import SLOT, counters, zeros


class Device:
    """Stands in for torch with a GPU: memory on the CPU, a capture that a test turns on and off."""

    int32 = torch.int32

    def __init__(self) -> None:
        self.capture, self.waits = 0, 0
        self.cuda = SimpleNamespace(synchronize=self.wait)
        self._C = SimpleNamespace(_cuda_isCurrentStreamCapturing=lambda: self.capture > 0)
        self.memory: list[torch.Tensor] = []

    def wait(self, device: int) -> None:
        assert not self.capture, "a wait would end the capture"
        self.waits += 1

    def zeros(self, *sizes: int, dtype: torch.dtype, device: str) -> torch.Tensor:
        self.memory.append(torch.zeros(*sizes, dtype=dtype))
        return self.memory[-1]

    @property
    def made(self) -> int:
        return len(self.memory)

    def holds(self, address: int) -> bool:
        """Whether a whole slot starts there."""
        return any(
            x.data_ptr() <= address <= x.data_ptr() + 4 * (x.numel() - SLOT) and (address - x.data_ptr()) % 4 == 0
            for x in self.memory
        )


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    fake = Device()
    monkeypatch.setattr(module, "torch", fake)
    monkeypatch.setattr(module, "_capture_id", lambda stream: fake.capture)
    monkeypatch.setattr(module, "_pools", {})
    monkeypatch.setattr(module, "_slots", {})
    monkeypatch.setattr(module, "_kept", [])
    monkeypatch.setattr(module, "SLOTS", 4)
    return fake


def test_a_stream_keeps_its_counters(device: Device) -> None:
    first = counters(0, 7)
    assert device.holds(first) and not device.memory[0].any()
    assert first == counters(0, 7)
    assert (device.made, device.waits) == (1, 1)  # other streams may use theirs at once


def test_streams_devices_and_captures_have_their_own(device: Device) -> None:
    plain, other, elsewhere = counters(0, 7), counters(0, 8), counters(1, 7)
    device.capture = 1
    captured = counters(0, 7)
    assert captured == counters(0, 7)
    device.capture = 2
    found = sorted((plain, other, elsewhere, captured, counters(0, 7)))
    assert all(later - sooner >= 4 * SLOT for sooner, later in pairwise(found))
    assert all(map(device.holds, found))
    device.capture = 0
    assert plain == counters(0, 7)


def test_a_capture_before_any_launch_clears_its_own(device: Device) -> None:
    device.capture = 1
    captured = counters(0, 7)
    assert captured == counters(0, 7) and (device.made, device.waits) == (1, 0)
    device.capture = 0
    assert counters(0, 7) != captured and (device.made, device.waits) == (2, 1)


def test_when_all_are_taken_a_stream_gets_more(device: Device) -> None:
    kept = [counters(0, stream) for stream in range(4)]
    more = [counters(0, stream) for stream in (8, 9)]
    assert len({*kept, *more}) == 6 and all(map(device.holds, [*kept, *more]))
    assert device.made == 3
    assert (counters(0, 2), counters(0, 9)) == (kept[2], more[1])


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No counters yet on the real GPU."""
    monkeypatch.setattr(module, "_pools", {})
    monkeypatch.setattr(module, "_slots", {})
    yield
    torch.cuda.synchronize()


def current() -> int:
    return counters(torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream)


def capture() -> int:
    """What a graph of its own is given."""
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device="cuda")
        found = current()
        assert found == current()
    return found


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh")
def test_on_a_gpu_streams_and_graphs_have_their_own() -> None:
    found = [current()]
    with torch.cuda.stream(torch.cuda.Stream()):
        found.append(current())
    found += [capture(), capture()]
    assert len({*found}) == 4
    assert found[0] == current()


@pytest.mark.gpu
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("full", [False, True], ids=["before-any-launch", "when-all-are-taken"])
def test_on_a_gpu_a_graph_without_counters_of_its_own_clears_some_at_each_replay(
    full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if full:
        monkeypatch.setattr(module, "SLOTS", 1)
        current()
    made: list[torch.Tensor] = []
    zeros = torch.zeros

    def watched(*sizes: int, **options: Any) -> torch.Tensor:
        made.append(zeros(*sizes, **options))
        return made[-1]

    graph = torch.cuda.CUDAGraph()
    with monkeypatch.context() as patch, torch.cuda.graph(graph):
        patch.setattr(torch, "zeros", watched)
        address = current()
        made[0].add_(1)
    assert address == made[0].data_ptr()
    for _ in range(3):
        graph.replay()
        assert (made[0] == 1).all()


def test_zeros_of_a_kernel_are_those_of_its_stream(device: Device) -> None:
    device._C._cuda_getCurrentRawStream = lambda index: 3
    found = zeros(SLOT // 2, torch.int64, 0)
    assert found.data_ptr() == counters(0, 3) and found.dtype == torch.int64
    assert zeros(1, torch.int32, 0).data_ptr() == counters(0, 3) and zeros(1, torch.int32, 0).dtype == torch.int32


def test_more_zeros_than_a_slot_has_are_new(device: Device) -> None:
    for index in (0, None):
        found = zeros(SLOT // 2 + 1, torch.int64, index)
        assert found.numel() == SLOT // 2 + 1 and found.dtype == torch.int64 and not found.any()
        assert found.data_ptr() != zeros(SLOT // 2 + 1, torch.int64, index).data_ptr()
    assert zeros(2, torch.int32, None).tolist() == [0, 0]
