"""Says what a row-wise op or a loss is expected to take."""

from __future__ import annotations

from dataclasses import dataclass

from flashkernels.dispatch import Explanation
from flashkernels.fused import cost
from flashkernels.fused.problem import LossProblem
from flashkernels.fused.rows import RowProblem


@dataclass(frozen=True)
class FusedExplanation(Explanation):
    """Everything that decides one call."""

    problem: RowProblem | LossProblem

    @property
    def predicted(self) -> float | None:
        """Seconds that the kernels are expected to take; None where nothing like it was measured."""
        return cost.seconds(self.problem, self.impl, self.gpu) if self.gpu else None

    def notes(self) -> list[str]:
        if not self.predicted or not self.floor:
            return super().notes()
        share = self.floor / self.predicted
        return [*super().notes(), f"predicted: {self.predicted * 1e6:.1f} µs, {share:.0%} of the roofline"]
