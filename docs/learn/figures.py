"""The figures of a measurement: what a case costs, what the machine would allow, and both as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flashkernels.hardware import Gpu


@dataclass(frozen=True)
class Measured:
    """A case that was right, and its time."""

    name: str
    dtype: str
    flops: float
    floor: float
    moved: float
    ms: float
    error: float
    allowed: float

    @property
    def tflops(self) -> float:
        return self.flops / self.ms / 1e9

    @property
    def gbps(self) -> float:
        return self.moved / self.ms / 1e6

    def bound(self, gpu: Gpu) -> tuple[str, float]:
        """What limits this version at best, and its milliseconds: its FLOPs at the peak, or its traffic."""
        return _bound(self.flops, self.moved, self.dtype, gpu)

    def least(self, gpu: Gpu) -> float:
        """Milliseconds under which no version can be: the FLOPs at the peak, or the floor's bytes."""
        return _bound(self.flops, self.floor, self.dtype, gpu)[1]


def _bound(flops: float, traffic: float, dtype: str, gpu: Gpu) -> tuple[str, float]:
    compute, memory = 1e3 * flops / gpu.peak[dtype], 1e3 * traffic / gpu.bandwidth
    return ("compute", compute) if compute >= memory else ("memory", memory)


def columns(rows: Sequence[Measured], gpu: Gpu | None) -> tuple[list[str], list[list[str]]]:
    """A table of them: its head, and its lines. Without a GPU there are no roofs to compare with."""
    head = ["case", "time", "TFLOPS", "GB/s", "FLOP/byte", "error", "allowed"]
    lines = [
        [
            row.name, duration(row.ms), short(row.tflops), f"{row.gbps:.0f}", short(row.flops / row.moved),
            f"{row.error:.1e}", f"{row.allowed:.1e}",
        ]
        for row in rows
    ]  # fmt: skip
    if gpu is None:
        return head, lines
    for line, row in zip(lines, rows, strict=True):
        kind, ms = row.bound(gpu)
        line[5:5] = [kind, f"{ms / row.ms:.0%}", f"{row.ms / row.least(gpu):.1f}x"]
    return [*head[:5], "bound", "of its roof", "over the floor", *head[5:]], lines


def duration(ms: float) -> str:
    """
    >>> duration(2.345), duration(0.01234)
    ('2.35 ms', '12.3 µs')
    """
    return f"{ms:.3g} ms" if ms >= 1 else f"{1e3 * ms:.3g} µs"


def short(value: float) -> str:
    """
    >>> short(2048.0), short(15.66), short(0.00123)
    ('2048', '15.7', '0.00123')
    """
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
