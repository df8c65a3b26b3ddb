"""Runs the GPU tests of the Hopper kernels of attention on the machine.

    pytest -p tests.machine.plugin -m gpu tests/attention/test_hopper.py
    pytest -p tests.machine.plugin -m gpu --one-in 30 tests/attention/test_hopper*.py

"cuda" means this CPU, and `impl="hopper"` the machine. What needs a GPU for real (graphs, streams, other kernels) is
skipped, and so is what would take too long here. The second line has a sample, always the same tests.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator, Iterator
from typing import Any, NoReturn

import pytest
import torch
from tests.machine import machine
from tests.machine.hopper import on_the_machine
from torch.overrides import TorchFunctionMode

from flashkernels import hardware

MOST_INSTRUCTIONS = 8_000_000  # of a launch, about 4 s
NEEDS_A_GPU = ("CUDAGraph", "Stream", "graph", "memory_allocated", "max_memory_allocated", "memory_stats",
               "reset_peak_memory_stats", "set_sync_debug_mode", "Event")  # fmt: skip


class OnTheCpu(TorchFunctionMode):
    """Calls that name a CUDA device have the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = {name: _cpu(value) for name, value in (kwargs or {}).items()}
        return function(*map(_cpu, args), **named)


def _cpu(x: Any) -> Any:
    if isinstance(x, str) and x.startswith("cuda"):
        return "cpu"
    return torch.device("cpu") if isinstance(x, torch.device) and x.type == "cuda" else x


def _unavailable(*of: Any, **named: Any) -> NoReturn:
    pytest.skip("needs a real GPU")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--one-in", type=int, default=1, help="one test in so many, always the same ones")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    def chosen(item: pytest.Item) -> bool:
        return zlib.crc32(item.nodeid.encode()) % config.getoption("--one-in") == 0

    config.hook.pytest_deselected(items=[item for item in items if not chosen(item)])
    items[:] = filter(chosen, items)


def pytest_configure(config: pytest.Config) -> None:
    """Before test modules are imported: they ask which GPU there is."""
    patch = pytest.MonkeyPatch()
    config.add_cleanup(patch.undo)
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    patch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    patch.setattr(torch.cuda, "mem_get_info", lambda device=None: (0, 0))
    patch.setattr(torch.cuda, "device_count", lambda: 1)
    patch.setattr(torch.Tensor, "cuda", lambda x, *of, **named: x)
    patch.setattr("flashkernels.attention.hopper.build.build_all", lambda variants: [])  # machine code: for GPUs
    patch.setattr(hardware, "detect", lambda device=None: hardware.GPUS["h200"])
    for name in NEEDS_A_GPU:
        patch.setattr(torch.cuda, name, _unavailable)


@pytest.fixture(autouse=True)
def _machine(request: pytest.FixtureRequest) -> Iterator[None]:
    """With an order of warps and copies that depends on the test's name."""
    if "triton" in request.node.name:
        pytest.skip("the machine runs the Hopper kernels")
    seed = zlib.crc32(request.node.nodeid.encode())
    with pytest.MonkeyPatch.context() as patch, on_the_machine(seed=seed), OnTheCpu():
        patch.setattr(machine, "BUDGET", MOST_INSTRUCTIONS)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    try:
        return (yield)
    except machine.TooLong as error:
        pytest.skip(f"too long for the machine: {error}")
