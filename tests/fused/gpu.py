"""What the GPU tests of this folder share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

GIB = 1 << 30


def needs_memory(gib: int) -> None:
    free = torch.cuda.mem_get_info()[0] // GIB
    if free < gib:
        pytest.skip(f"needs {gib} GiB of GPU memory, {free} GiB are free")


def assert_the_same_in_a_graph(step: Callable[[], tuple[Tensor, ...]]) -> None:
    """A step on a stream of its own, which is also what a capture wants to have run before, and replayed."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        want = [x.clone() for x in step()]
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, want, strict=True))
