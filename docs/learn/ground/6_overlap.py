"""Streams: a copy from the host and a kernel run at the same time where nothing makes one wait for the other."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import lesson
from counting import pipelined

import flashkernels as fk

CHUNKS, ROWS = lesson.pick(8, 3), lesson.pick(2048, 16)
DEPTH, WIDTH = lesson.pick(4096, 32), lesson.pick(8192, 32)
Parts = list[torch.Tensor]


def in_order(parts: Parts, w: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Everything on one stream: each copy waits for the product before it."""
    for i, part in enumerate(parts):
        torch.mm(part.to(w.device, non_blocking=True), w, out=out[i])
    return out


def overlapped(parts: Parts, w: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Copies on a stream of their own, into two buffers; events say when a buffer is full, and when it is free."""
    if not lesson.GPU:
        return in_order(parts, w, out)  # a CPU has no streams
    compute, copies = torch.cuda.current_stream(), torch.cuda.Stream()
    buffers = [torch.empty(ROWS, DEPTH, dtype=w.dtype, device=w.device) for _ in range(2)]
    full, free = ([torch.cuda.Event() for _ in buffers] for _ in range(2))
    copies.wait_stream(compute)
    for i, part in enumerate(parts):
        slot = i % 2
        with torch.cuda.stream(copies):
            if i >= 2:
                copies.wait_event(free[slot])
            buffers[slot].copy_(part, non_blocking=True)
            full[slot].record(copies)
        compute.wait_event(full[slot])
        torch.mm(buffers[slot], w, out=out[i])
        free[slot].record(compute)
    return out


def prefetched(parts: Parts, w: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The same by the package: the next parts are copied while this one computes."""
    if lesson.GPU:  # it would copy while the call before computes, and the clock would not see it
        torch.cuda.current_stream().synchronize()
    for i, part in enumerate(fk.Prefetcher(parts, device=w.device)):
        torch.mm(part, w, out=out[i])
    return out


def counts() -> Iterator[str]:
    for copy, compute in ((2.0, 1.0), (1.0, 1.0), (1.0, 4.0)):
        apart, together = CHUNKS * (copy + compute), pipelined(copy, compute, CHUNKS)
        yield f"copy {copy:g}, compute {compute:g}: {apart:g} in order, {together:g} overlapped"


def cases() -> Iterator[lesson.Case]:
    x, w = lesson.normal(CHUNKS, ROWS, DEPTH), lesson.normal(DEPTH, WIDTH, seed=1) / DEPTH**0.5
    pageable = list(x.cpu())
    pinned = [part.pin_memory() for part in pageable] if lesson.GPU else pageable
    out = x.new_empty(CHUNKS, ROWS, WIDTH)
    moved = 2 * (x.numel() + w.numel() + out.numel())
    for name, function, parts in (
        ("overlapped", overlapped, pinned), ("prefetcher", prefetched, pinned), ("in order, pinned", in_order, pinned),
        ("in order, pageable", in_order, pageable), ("overlapped, pageable", overlapped, pageable),
    ):  # fmt: skip
        yield lesson.Case(
            name, lambda function=function, parts=parts: function(parts, w, out),
            lambda dtype: x.to(dtype) @ w.to(dtype), flops=2 * CHUNKS * ROWS * DEPTH * WIDTH, floor=moved, moved=moved,
            launch="eager",
        )  # fmt: skip


if __name__ == "__main__":
    print(*counts(), sep="\n")
    lesson.main(__file__, cases)
