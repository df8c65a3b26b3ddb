"""How long the hardware needs at least for a cost, and how close a time comes to that."""

from __future__ import annotations

from dataclasses import dataclass

from flashkernels.hardware import Gpu
from flashkernels.profiling.costs import Cost


@dataclass(frozen=True)
class Roofs:
    """Microseconds below which the arithmetic and the traffic of a cost cannot be done."""

    compute: float
    memory: float

    @property
    def floor(self) -> float:
        return max(self.compute, self.memory)


def roofs_of(cost: Cost | None, gpu: Gpu | None) -> Roofs | None:
    """By the datasheet's peaks; None where the GPU or its figure for the format is not known.

    >>> from flashkernels.hardware import GPUS
    >>> roofs_of(Cost(989.4e6, 4.8e6, "bf16"), GPUS["h200"])
    Roofs(compute=1.0, memory=1.0)
    """
    if cost is None or gpu is None or cost.dtype not in gpu.peak:
        return None
    return Roofs(1e6 * cost.flops / gpu.peak[cost.dtype], 1e6 * cost.bytes / gpu.bandwidth)
