"""The check of FP8: an oracle on what its numbers stand for, and an allowance for weights of eight bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashkernels as fk
from flashkernels.attention.cases import Case
from flashkernels.bench import accuracy, check, runner
from flashkernels.bench.peers import Unsupported, choose
from flashkernels.bench.runner import Contestant
from flashkernels.bench.suites import suite
from flashkernels.bench.timing import Call

SUITE = suite("attention", "fp8", device="cpu", quick=True)
FP8 = [case for case in SUITE.cases if case.problem.dtype == "fp8"]


def test_weights_of_eight_bits_are_near_the_softmax() -> None:
    scores = 3 * torch.randn(50, 400)
    scores[:, 200:] = -torch.inf
    weights, exact = check.eight_bits(scores), torch.softmax(scores, -1)
    assert (weights[:, 200:] == 0).all()
    # half a unit in the last of 3 bits; the largest weight is at least 8, and the smallest step 2^-9
    assert ((weights - exact).abs() <= exact * 2**-4 + exact.amax(-1, keepdim=True) * 2**-13 + 1e-7).all()
    assert not torch.equal(weights, exact)


@pytest.mark.parametrize("case", FP8, ids=lambda case: case.name)
def test_the_oracle_is_that_of_the_dequantised_numbers(case: Case) -> None:
    args, kwargs = runner.inputs(case, device="cpu")
    want = check.oracle(case, args, kwargs)
    assert want.dtype == torch.float32
    out = fk.attention(*args, **kwargs, impl="torch")
    assert isinstance(out, torch.Tensor)
    assert check.relative_error(out, want) < 2**-8  # the output is bf16
    error = check.relative_error(check.plain(case, args, kwargs), want)
    assert 0.01 < error < 0.04  # of weights with 3 bits


@pytest.mark.parametrize(
    ("change", "right"),
    [
        pytest.param(lambda out: out, True, id="right"),
        pytest.param(lambda out: 1.02 * out, True, id="within"),
        pytest.param(lambda out: 1.1 * out, False, id="scaled"),
        pytest.param(lambda out: out.roll(1, dims=2), False, id="heads-mixed"),
        pytest.param(lambda out: out * torch.nan, False, id="nan"),
    ],
)
def test_a_run_knows_how_wrong_fp8_may_be(change: Callable[[torch.Tensor], Any], right: bool) -> None:
    def prepare(case: Case, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        return Call(lambda: change(fk.attention(*args, impl="torch", **kwargs)))

    [row] = runner.measure(FP8[3], SUITE, [Contestant("it", False, prepare)], None, rounds=1)
    assert row.ok == right and row.params["dtype"] == "fp8"
    assert right or (row.reason is not None and row.reason.startswith("error "))


@pytest.mark.parametrize("peer", ["naive", "sdpa-flash", "sdpa-cudnn", "fa4", "flex", "flashinfer"])
def test_rivals_decline_fp8(peer: str) -> None:
    args, kwargs = runner.inputs(FP8[0], device="cpu")
    with pytest.raises(Unsupported, match=r"FP8|takes fp16 and bf16"):
        choose(peer)[0].prepare(FP8[0], args, kwargs)


def test_errors_to_the_exact_result() -> None:
    found = accuracy.errors("cpu", seq=200)
    assert list(found) == ["uniform", "normal", "outliers"]
    for errors in found.values():
        assert list(errors) == ["bf16", "fp8", "fp8, rotated"]
        assert 0 < errors["bf16"] < 0.005 < errors["fp8"] < 0.2
    assert found["outliers"]["fp8, rotated"] < 0.85 * found["outliers"]["fp8"]
