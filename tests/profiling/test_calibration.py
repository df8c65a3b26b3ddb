"""Predictions are near what was measured: recomputed from the committed results."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

import flashkernels as fk
from flashkernels.attention.cases import suite
from flashkernels.attention.hopper import cost, tiles
from flashkernels.attention.problem import AttentionProblem
from flashkernels.bench.results import Results, joined, read
from flashkernels.bench.runner import _params
from flashkernels.bench.suites import suite as load
from flashkernels.hardware import lookup
from flashkernels.profiling.calibration import predictions, problem_of, summaries, unpredicted

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200"
H200 = lookup("h200")
FORWARD = {"attention", "decode", "moe"}


def _read(pattern: str) -> Results:
    return joined([(path, read(path)) for path in sorted(RESULTS.glob(pattern))])


@pytest.fixture(scope="module")
def committed() -> Results:
    return _read("attention-*.json")


def test_four_in_five_of_all_forward_rows_are_predicted_within_20_percent() -> None:
    """Rows without a prediction count as missed."""
    results = Results(_read("*.json").meta, [row for row in _read("*.json").rows if row.op in FORWARD])
    found = predictions(results)
    rows = len(found) + sum(unpredicted(results, found).values())
    far = {f"{one.row.impl} {one.row.group} {one.row.case}": round(one.error, 2) for one in found if not one.near}
    assert {one.row.op for one in found} == FORWARD and rows > 280
    assert len(found) - len(far) >= 0.8 * rows, far


@pytest.mark.parametrize(("op", "least"), [("attention-backward", 30), ("decode", 50), ("moe", 75), ("fused", 13)])
def test_four_in_five_rows_of_each_op_are_too(op: str, least: int) -> None:
    results = _read(f"{op}*.json")
    found = predictions(results)
    rows = len(found) + sum(unpredicted(results, found).values())
    assert rows >= least and sum(one.near for one in found) >= 0.8 * rows


def test_eager_routings_are_not_predicted() -> None:
    """Their time is Python's."""
    results = _read("moe-route.json")
    eager = Counter(row.impl for row in results.rows if not row.peer and row.params["launch"] == "eager")
    assert unpredicted(results, predictions(results)) == {f"{impl} moe route": n for impl, n in eager.items()}


@pytest.mark.parametrize("op", ["decode", "moe", "fused"])
def test_rows_that_are_not_the_case_they_name_are_not_predicted(op: str) -> None:
    results = _read(f"{op}-*.json")
    rows = [replace(row, params=row.params | {"colour": "blue"}) for row in results.rows]
    rows += [replace(row, suite="tomorrow") for row in results.rows]
    assert predictions(results) and not predictions(Results(results.meta, rows))


@pytest.mark.parametrize("impl", ["hopper", "triton"])
def test_four_in_five_predictions_are_within_20_percent(impl: str, committed: Results) -> None:
    found = [prediction for prediction in predictions(committed) if prediction.row.impl == impl]
    assert len(found) > 60
    far = {prediction.row.case: round(prediction.error, 2) for prediction in found if not prediction.near}
    assert len(far) <= 0.2 * len(found), far


def test_hopper_is_predicted_in_every_suite(committed: Results) -> None:
    of_hopper = {one.suite: one for one in summaries(predictions(committed)) if one.impl == "hopper"}
    assert {f"attention {suite}" for suite in ("headdims", "scaling", "shapes", "fp8")} <= of_hopper.keys()
    for one in of_hopper.values():
        assert one.near >= 0.8 * len(one.predictions), (one.suite, one.worst)


def test_the_last_line_counts_all_of_them(committed: Results) -> None:
    *each, whole = summaries(predictions(committed))
    assert whole.impl == "all" and whole.near == sum(one.near for one in each) >= 0.8 * len(whole.predictions)
    assert summaries(each[0].predictions) == [each[0]]


@pytest.mark.parametrize(("causal", "tflops"), [(False, 633), (True, 525)], ids=["full", "causal"])
def test_wide_heads_are_predicted_too(causal: bool, tflops: float) -> None:
    """Measured at D=512: docs/notes/hopper_forward.md."""
    problem = AttentionProblem(4, 4096, 4096, 4, 4, 512, causal=causal)
    why = fk.explain("attention", problem=problem, gpu="h200")
    assert why.impl == "hopper"
    assert why.predicted == pytest.approx(problem.flops() / tflops / 1e12, rel=0.2)


@pytest.mark.parametrize("name", ["headdims", "scaling", "seqlens", "features", "shapes", "fp8", "odd"])
def test_the_parameters_of_a_row_are_its_problem(name: str) -> None:
    whole = load("attention", name)
    for case in suite(name):
        assert problem_of(_params(case, whole)) == case.problem, case.name


def test_a_prediction_is_never_under_the_roofline() -> None:
    for name in ("headdims", "scaling", "seqlens", "shapes", "fp8"):
        for case in suite(name):
            why = fk.explain("attention", problem=case.problem, gpu="h200")
            if why.impl == "hopper":
                assert why.predicted and why.floor and why.predicted > why.floor, case.name


def test_more_work_takes_longer() -> None:
    problem = AttentionProblem(4, 4096, 4096, 16, 16, 128)

    def seconds(one: AttentionProblem) -> float:
        return cost.seconds(one, tiles.choose(one, H200.sms), H200)

    assert seconds(replace(problem, causal=True)) < seconds(problem) < seconds(replace(problem, softcap=True))
    assert 1.9 < seconds(replace(problem, batch=8, total_q=0, total_k=0)) / seconds(problem) < 2.1
    window = replace(problem, causal=True, window=(512, 0))
    assert seconds(window) < seconds(replace(problem, causal=True))


def test_few_queries_are_bound_by_memory() -> None:
    problem = AttentionProblem(64, 1, 32768, 32, 8, 128)
    choice = tiles.choose(problem, H200.sms)
    assert cost.seconds(problem, choice, H200) > problem.bytes() / H200.bandwidth


def test_nothing_to_do_takes_a_launch() -> None:
    problem = AttentionProblem(0, 64, 64, 4, 4, 64)
    assert cost.seconds(problem, tiles.choose(replace(problem, batch=1), H200.sms), H200) == cost.LAUNCH


def test_the_lengths_of_a_ragged_batch_count() -> None:
    (case,) = (case for case in suite("shapes") if case.lengths)
    choice = tiles.choose(case.problem, H200.sms)
    even = cost.seconds(case.problem, choice, H200)
    assert cost.seconds(case.problem, choice, H200, case.lengths) > 1.1 * even  # long ones cost their square


def test_rows_without_a_prediction_are_counted(committed: Results) -> None:
    left = unpredicted(committed, predictions(committed))  # of rows as they are, when no multiple of 16 bytes, too
    assert all("attention_backward" in kind or kind == "triton attention odd" for kind in left)
    row = next(row for row in committed.rows if row.ok and (row.op, row.impl) == ("attention", "hopper"))
    others = [replace(row, op="decode", suite="formats"), replace(row, peer=True, op="decode"), replace(row, ok=False)]
    results = Results(committed.meta, [row, *others])
    assert unpredicted(results, predictions(results)) == {"hopper decode formats": 1}


def test_unknown_gpus_and_parameters_are_left_out(committed: Results) -> None:
    assert not predictions(Results(committed.meta | {"gpu": "NVIDIA Z900"}, committed.rows))
    rows = [replace(row, params=row.params | {"colour": "blue"}) for row in committed.rows]
    assert not predictions(Results(committed.meta, rows))
