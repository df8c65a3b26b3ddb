"""Benchmarks of the mixture of experts: the suites' promises, and that wrong results are found."""

from __future__ import annotations

import pytest
import torch

from flashkernels import moe
from flashkernels.bench import moe as runner
from flashkernels.bench.peers import choose
from flashkernels.bench.runner import Contestant, measure, theirs
from flashkernels.bench.suites import suite
from flashkernels.bench.timing import Call
from flashkernels.hardware import lookup
from flashkernels.moe.cases import QUICK_ON_GPU, SUITES, Case, suite as cases

ROUTE, LAYER = (suite("moe", name, device="cpu", quick=True) for name in ("route", "layer"))


@pytest.mark.parametrize("name", SUITES)
def test_names_are_unique_and_quick_runs_take_some(name: str) -> None:
    names = [case.name for case in cases(name)]
    assert len(names) == len(set(names))
    assert {case.name for case in cases(name, quick=True)} == set(QUICK_ON_GPU[name])
    assert [case.name for case in cases(name, device="cpu", quick=True)] == names


def test_rows_have_the_parameters_that_change_a_figure() -> None:
    route, layer = cases("route")[0], cases("layer")[0]
    assert route.params | {"tokens": 32768, "experts": 64, "k": 2, "launch": "graph"} == route.params
    assert layer.params | {"model": "mixtral-8x7b", "tokens": 1, "weights": "bf16"} == layer.params


@pytest.mark.parametrize("case", [*ROUTE.cases[:4], *LAYER.cases[:1], *LAYER.cases[-28::7]], ids=lambda case: case.name)
def test_ours_and_torch_are_right(case: Case) -> None:
    which = ROUTE if case in ROUTE.cases else LAYER
    contestants = [*runner.ours(case, None), *theirs(choose("torch-moe", "moe"))]
    rows = measure(case, which, contestants, None, 1, runner.SUBJECT)
    assert rows[0].ok and rows[0].params["launch"] == "eager"
    assert rows[1].ok == (case in ROUTE.cases)  # torch's grouped product needs a GPU


def test_a_layer_of_several_implementations_takes_part_beside_triton_s() -> None:
    def names(which: str, gpu: str, impls: list[str] | None = None) -> list[str]:
        return [one.name for one in runner.ours(cases(which)[0], lookup(gpu), impls)]

    assert names("layer", "h200") == ["auto", "triton"] and names("layer", "a100") == ["triton"]
    assert names("layer", "h200", ["auto"]) == ["auto"] and names("layer", "a100", ["auto"]) == []
    assert names("route", "h200") == ["hopper"] and names("route", "h200", ["triton", "hopper"]) == ["hopper", "triton"]
    assert runner.choose("auto,triton") == ("auto", "triton")


def test_a_wrong_plan_is_found() -> None:
    case = ROUTE.cases[0]

    def wrong(case: Case, args: tuple[torch.Tensor], kwargs: dict[str, object]) -> Call:
        found = moe.route(args[0], case.problem.k)
        assert found.plan is not None
        plan = found.plan._replace(permutation=found.plan.permutation.flip(0))
        return Call(lambda: moe.Routing(found.weights, found.ids, plan))

    [row] = measure(case, ROUTE, [Contestant("it", False, wrong)], None, 1, runner.SUBJECT)
    assert not row.ok and "error" in (row.reason or "")


def test_peers_belong_to_their_op() -> None:
    assert [peer.name for peer in choose("all", "moe")] == ["torch-moe", "triton-kernels"]
    with pytest.raises(ValueError, match="peers='fa4'"):
        choose("fa4", "moe")


def test_a_launch_is_the_cases_own() -> None:
    with pytest.raises(ValueError, match="launch='eager'"):
        suite("moe", "route", launch="eager")
