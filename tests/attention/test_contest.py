"""The tiles that are to be timed beside those of the rules. Timing itself needs a GPU."""

from __future__ import annotations

import pytest

from flashkernels.attention.hopper import backward_tiles, tiles
from flashkernels.attention.hopper.backward_build import CANDIDATES, retiled
from flashkernels.attention.problem import BackwardProblem

from . import contest

ALL = list(contest.contests(("outputs", "gradients")))


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.name)
def test_what_is_tried_fits_and_is_not_what_the_rule_takes(one: contest.Contest) -> None:
    assert one.tried
    if one.gradients:
        problem = BackwardProblem(one.problem, ("q", "k", "v"))
        usual = backward_tiles.choose(problem)
        for knobs in one.tried.values():
            tried = retiled(usual, **knobs)
            assert tried != usual and max(tried.kernels.values()) <= backward_tiles.SHARED_LIMIT
    else:
        usual = tiles.choose(one.problem, contest.MULTIPROCESSORS)
        for tile in one.tried.values():
            assert tiles.choose(one.problem, contest.MULTIPROCESSORS, tile).variant.tile != usual.variant.tile
    assert len(list(contest.programs(one))) == len(one.tried) + 1 + one.gradients


def test_each_is_there_once_and_can_be_asked_for_by_head_dimension() -> None:
    assert len({one.name for one in ALL}) == len(ALL)
    assert {one.problem.head_dim for one in contest.contests(("gradients",))} == {dim for dim, _ in CANDIDATES.values()}
    assert {one.problem.head_dim for one in contest.contests(("outputs", "gradients"), (64,))} == {64}
