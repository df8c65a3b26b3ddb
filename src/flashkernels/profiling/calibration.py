"""How near the predictions of `explain` are to what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flashkernels.attention.explain import explain
from flashkernels.attention.hopper import cost, tiles
from flashkernels.attention.problem import AttentionProblem
from flashkernels.bench.results import Results, Row
from flashkernels.dispatch import UnsupportedError
from flashkernels.hardware import GPUS, Gpu

NEAR = 0.2  # a prediction is good within this share of the measurement
MODELLED = ("hopper", "triton")
SIZES = ("batch", "heads", "kv_heads", "head_dim", "head_dim_v", "causal", "dtype", "alibi", "sinks", "mask")
OTHERS = ("seq", "seq_k", "window", "softcap", "lengths", "launch", "l2")  # those that are not taken as they are


@dataclass(frozen=True)
class Prediction:
    row: Row
    seconds: float

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.seconds / self.row.seconds - 1

    @property
    def near(self) -> bool:
        return abs(self.error) <= NEAR


@dataclass(frozen=True)
class Summary:
    """The predictions for one kernel in one suite."""

    impl: str
    suite: str
    predictions: tuple[Prediction, ...]

    @property
    def near(self) -> int:
        return sum(prediction.near for prediction in self.predictions)

    @property
    def typical(self) -> float:
        return statistics.median(abs(prediction.error) for prediction in self.predictions)

    @property
    def worst(self) -> Prediction:
        return max(self.predictions, key=lambda prediction: abs(prediction.error))


def predictions(results: Results) -> list[Prediction]:
    """A prediction for each timed row of a kernel that has a cost model, on a GPU that the table has."""
    gpu = next((gpu for gpu in GPUS.values() if gpu.name == results.meta["gpu"]), None)
    found = []
    for row in results.rows if gpu else ():
        known = not row.params.keys() - {*SIZES, *OTHERS}  # a parameter of tomorrow may mean anything
        if gpu and known and row.ok and row.op == "attention" and row.impl in MODELLED:
            seconds = _predicted(row, gpu)
            if seconds is not None:
                found.append(Prediction(row, seconds))
    return found


def summaries(found: Sequence[Prediction]) -> list[Summary]:
    groups: dict[tuple[str, str], list[Prediction]] = {}
    for prediction in found:
        groups.setdefault((prediction.row.impl, prediction.row.suite), []).append(prediction)
    return [Summary(impl, suite, tuple(of)) for (impl, suite), of in groups.items()]


def problem_of(params: dict[str, Any]) -> AttentionProblem:
    """The problem that a row's parameters describe.

    >>> problem_of({"batch": 4, "seq": 64, "heads": 2, "kv_heads": 2, "head_dim": 72, "causal": True}).pairs()
    8320
    """
    lengths = params.get("lengths", ())
    return AttentionProblem(
        seq_q=params["seq"], seq_k=params.get("seq_k", params["seq"]),
        window=tuple(params.get("window", (-1, -1))), softcap=bool(params.get("softcap")),
        varlen=bool(lengths), total_q=sum(lengths), total_k=sum(lengths),
        **{name: params[name] for name in SIZES if name in params},
    )  # fmt: skip


def _predicted(row: Row, gpu: Gpu) -> float | None:
    problem, lengths = problem_of(row.params), row.params.get("lengths", ())
    try:
        if row.impl == "hopper" and lengths:  # which `explain` does not know
            return cost.seconds(problem, tiles.choose(problem, gpu.sms), gpu, lengths)
        return explain("attention", problem=problem, gpu=gpu, impl=row.impl).predicted
    except UnsupportedError:  # measured with a version that served it
        return None
