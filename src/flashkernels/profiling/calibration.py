"""How near the predictions of `explain` are to what was measured."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flashkernels.attention.backward_explain import WANTED, explain as explain_gradients
from flashkernels.attention.explain import explain
from flashkernels.attention.hopper import cost, tiles
from flashkernels.attention.problem import AttentionProblem, BackwardProblem
from flashkernels.bench import decode, fused, moe, suites
from flashkernels.bench.results import COPY, Results, Row
from flashkernels.decode import cost as decode_cost
from flashkernels.dispatch import UnsupportedError
from flashkernels.fused import cost as fused_cost
from flashkernels.hardware import GPUS, Gpu
from flashkernels.moe.cost import ROUTES
from flashkernels.moe.explain import explain as explain_layer
from flashkernels.moe.problem import RouteProblem

NEAR = 0.2  # a prediction is good within this share of the measurement
MODELLED = ("hopper", "aligned", "triton", "auto")  # a layer has parts of several: "auto"
SIZES = ("batch", "heads", "kv_heads", "head_dim", "head_dim_v", "causal", "dtype", "alibi", "sinks", "mask")
OTHERS = ("seq", "seq_k", "window", "softcap", "lengths", "launch", "l2")  # those that are not taken as they are
SUBJECTS = {
    ("decode", "formats"): decode.SUBJECT, ("moe", "route"): moe.SUBJECT, ("moe", "layer"): moe.SUBJECT,
    ("fused", "rows"): fused.SUBJECT,
}  # fmt: skip


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
    if gpu is None:
        return []
    mine = (row for row in results.rows if row.ok and row.impl in MODELLED and row.op in MODELS)
    times = ((row, MODELS[row.op](row, gpu)) for row in mine)
    return [Prediction(row, seconds) for row, seconds in times if seconds is not None]


def summaries(found: Sequence[Prediction]) -> list[Summary]:
    """One for each kernel and suite; where there are several, one of all of them comes last."""
    groups: dict[tuple[str, str], list[Prediction]] = {}
    for prediction in found:
        groups.setdefault((prediction.row.impl, prediction.row.group), []).append(prediction)
    each = [Summary(impl, suite, tuple(of)) for (impl, suite), of in groups.items()]
    return [*each, Summary("all", "", tuple(found))] if len(each) > 1 else each


def unpredicted(results: Results, found: Sequence[Prediction]) -> dict[str, int]:
    """How many timed rows of ours have no prediction, by kernel and suite; what we only measure against is not ours."""
    known = {id(prediction.row) for prediction in found}
    mine = (row for row in results.rows if row.ok and not row.peer and row.impl != COPY)
    names = (f"{row.impl} {row.group}" for row in mine if id(row) not in known and not row.impl.endswith("-standard"))
    return dict(Counter(names))


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


def _attention(row: Row, gpu: Gpu) -> float | None:
    if row.params.keys() - {*SIZES, *OTHERS}:  # a parameter of tomorrow may mean anything
        return None
    problem, lengths = problem_of(row.params), row.params.get("lengths", ())
    try:
        if row.impl == "hopper" and lengths:  # which `explain` does not know
            return cost.seconds(problem, tiles.choose(problem, gpu.sms), gpu, lengths)
        return explain("attention", problem=problem, gpu=gpu, impl=row.impl).predicted
    except UnsupportedError:  # measured with a version that served it
        return None


def _gradients(row: Row, gpu: Gpu) -> float | None:
    if row.params.keys() - {*SIZES, *OTHERS}:
        return None
    try:
        why = explain_gradients(problem=BackwardProblem(problem_of(row.params), WANTED, row.impl), gpu=gpu)
    except UnsupportedError:  # measured with a version that served it
        return None
    return why.predicted if why.impl == row.impl else None


def _decode(row: Row, gpu: Gpu) -> float | None:
    case = _case(row)
    even = case and len({*case.lengths}) == 1  # ragged lengths are on the device
    return decode_cost.seconds(case.problem, row.impl, gpu) if even else None


def _moe(row: Row, gpu: Gpu) -> float | None:
    case = _case(row)
    if case is None or case.launch != "graph":  # the time of eager calls is Python's
        return None
    p = case.problem
    if isinstance(p, RouteProblem):
        return ROUTES[row.impl](p, gpu)
    sizes = (p.tokens, p.hidden, p.inner, p.experts, p.k)
    return explain_layer(*sizes, dtype=p.dtype, weights=p.weights, gpu=gpu, impl=row.impl).predicted


def _fused(row: Row, gpu: Gpu) -> float | None:
    case = _case(row)
    return fused_cost.seconds(case.problem, row.impl, gpu) if case else None


def _case(row: Row) -> Any:
    """The case that a row names, if it has the row's parameters: they alone do not say all of a problem."""
    subject = SUBJECTS.get((row.op, row.suite))
    if subject is None:
        return None
    suite = suites.suite(row.op, row.suite)
    return next((c for c in suite.cases if c.name == row.case and subject.params(c, suite) == row.params), None)


MODELS = {
    "attention": _attention, "attention_backward": _gradients, "decode": _decode, "moe": _moe, "fused": _fused,
}  # fmt: skip
