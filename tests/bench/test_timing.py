"""The arithmetic of timing, and the order in which contestants take turns."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise

import pytest

from flashkernels.bench import timing
from flashkernels.bench.timing import Call, Times


def test_percentiles() -> None:
    times = Times(tuple(float(ms) for ms in range(1, 102)))
    assert times.p50 == 51
    assert times.p99 == 100


def test_one_slow_call_does_not_move_the_median() -> None:
    assert Times((1.0, 1.0, 1.0, 1.0, 500.0)).p50 == 1.0


@pytest.mark.parametrize(("call_ms", "expected"), [(0.5, 120), (200.0, 1), (1e-9, 1000), (0.0, 1000)])
def test_repetitions_fill_the_budget(call_ms: float, expected: int) -> None:
    assert timing.repetitions(60, call_ms) == expected


def test_contestants_take_turns_in_an_order_of_each_round_that_is_the_same_in_every_run() -> None:
    seen: list[str] = []

    def sampler(name: str) -> timing.Sampler:
        def sample() -> list[float]:
            seen.append(name)
            return [float(len(seen))]

        return sample

    times = timing.interleave({name: sampler(name) for name in "abc"}, rounds=12)
    rounds = ["".join(seen[i : i + 3]) for i in range(0, 36, 3)]
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert {a + b for a, b in pairwise(seen)} >= {"ab", "ba", "ac", "ca", "bc", "cb"}
    assert times["a"] == Times(tuple(float(i + 1) for i, name in enumerate(seen) if name == "a"))
    first = seen.copy()
    seen.clear()
    timing.interleave({name: sampler(name) for name in "abc"}, rounds=12)
    assert seen == first


def test_a_contestant_that_raises_is_out_and_the_others_go_on() -> None:
    error = RuntimeError("out of memory")

    def failing() -> list[float]:
        raise error

    assert timing.interleave({"a": lambda: [1.0], "b": failing}, rounds=2) == {"a": Times((1.0, 1.0)), "b": error}


def test_the_cpu_clock_measures_the_call_within_its_scope() -> None:
    inside = []

    @contextmanager
    def scope() -> Iterator[None]:
        inside.append(True)
        yield
        inside.pop()

    def run() -> None:
        assert inside
        time.sleep(0.002)

    sample = timing.sampler(Call(run, scope), device="cpu", l2="warm", launch="eager")
    ms = sample()
    assert len(ms) >= 1
    assert all(value >= 2.0 for value in ms)


def test_calls_in_turns() -> None:
    seen: list[int] = []
    call = timing.in_turns([Call(partial(seen.append, i)) for i in range(3)])
    for _ in range(5):
        call.run()
    assert seen == [0, 1, 2, 0, 1]


def test_launch_cost_is_in_microseconds() -> None:
    cost = timing.launch_cost(lambda: time.sleep(0.001), device="cpu", calls=2, batches=3)
    assert 1000 <= cost < 100_000


def test_a_burst_has_no_garbage_collected_and_no_call_that_warms_up() -> None:
    seen: list[tuple[float, bool]] = []

    def run() -> None:
        seen.append((time.perf_counter(), gc.isenabled()))
        time.sleep(0.02 if len(seen) <= 3 else 0.001)  # the first three are slow

    cost = timing.burst(run, device="cpu", calls=5)
    assert len(seen) == 8 and not any(on for _, on in seen) and gc.isenabled()
    assert 1000 <= cost < 8000


@pytest.mark.gpu
@pytest.mark.parametrize("launch", ["eager", "graph"])
@pytest.mark.parametrize("l2", ["cold", "warm"])
def test_gpu_times_of_a_copy_are_near_its_bandwidth(l2: timing.L2, launch: timing.Launch) -> None:
    import torch

    from flashkernels.hardware import detect

    gpu = detect()
    assert gpu is not None
    source = torch.empty(1024**3, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    sample = timing.sampler(Call(lambda: target.copy_(source)), device="cuda", l2=l2, launch=launch)
    rate = 2 * source.numel() / (Times(tuple(sample())).p50 / 1e3)
    assert 0.3 * gpu.bandwidth < rate < 1.1 * gpu.bandwidth
