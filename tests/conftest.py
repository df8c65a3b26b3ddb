"""What runs where: GPU tests need a GPU, slow ones are sampled, a process either interprets or compiles kernels."""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
COMPILED_ONLY = Path(__file__).parent / "compile"
SLOW_SAMPLE = 10  # one slow test in so many runs by default


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run all slow tests and draw new hypothesis examples")


def pytest_configure(config: pytest.Config) -> None:
    # Without --slow the examples are the same in every run: a red build is somebody's change, not bad luck.
    hypothesis.settings.register_profile("flashkernels", deadline=None, derandomize=not config.getoption("--slow"))
    hypothesis.settings.load_profile("flashkernels")
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)
    if INTERPRETED:
        from . import interpreter

        interpreter.hasten()


def sampled(nodeid: str) -> bool:
    """Whether a slow test is among those that always run: by its name, so that other tests do not change the answer."""
    return zlib.crc32(nodeid.encode()) % SLOW_SAMPLE == 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if INTERPRETED and any(item.path.is_relative_to(COMPILED_ONLY) for item in items):
        raise pytest.UsageError("tests/compile needs Triton's compiler: run it in a process without TRITON_INTERPRET")

    no_gpu = "kernels are interpreted here (TRITON_INTERPRET)" if INTERPRETED else "no NVIDIA GPU here"
    if INTERPRETED or not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=no_gpu))

    if not config.getoption("--slow"):
        left_out = [item for item in items if item.get_closest_marker("slow") and not sampled(item.nodeid)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("slow") or sampled(item.nodeid)]


@pytest.fixture(scope="session", autouse=True)
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where this run keeps compiled CUDA kernels: the FLASHKERNELS_CACHE that was given, or else a temporary folder
    that its processes share. Never the cache of whoever runs the tests."""
    given = os.environ.get("FLASHKERNELS_CACHE")
    base = tmp_path_factory.getbasetemp()
    folder = Path(given) if given else (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "kernels"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHKERNELS_CACHE", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def seed() -> None:
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def device() -> torch.device:
    """Where a test that runs anywhere puts its tensors."""
    return torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
