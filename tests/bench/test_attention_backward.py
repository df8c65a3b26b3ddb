"""The benchmark of gradients: whose they are, that they are checked first, and the work that is counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from flashkernels.attention.cases import Case, suite as cases
from flashkernels.bench import attention_backward as bench, check, runner
from flashkernels.bench.peers import choose
from flashkernels.bench.runner import Contestant
from flashkernels.bench.suites import only, suite
from flashkernels.bench.timing import Call
from flashkernels.hardware import lookup

QUICK = suite("attention_backward", "headdims", device="cpu", quick=True)
FEATURES = cases("features", device="cpu", quick=True)


def test_rows_of_a_quick_run() -> None:
    chosen = only(QUICK, "d64-causal")
    (rows,) = bench.run(chosen, choose("sdpa-flash", "attention_backward"), rounds=1)
    assert [(row.op, row.suite, row.impl, row.peer, row.ok) for row in rows] == [
        ("attention_backward", "headdims", "torch", False, True),
        ("attention_backward", "headdims", "sdpa-flash", True, True),
    ]
    assert rows[0].params | {"head_dim": 64, "causal": True, "dtype": "bf16"} == rows[0].params
    for row in rows:
        assert row.ms_p50 and row.tflops == pytest.approx(2.5 * chosen.cases[0].flops() / row.ms_p50 / 1e9)


def test_bytes_are_each_tensor_once() -> None:
    case = QUICK.cases[0]
    q, k, v = bench._inputs(case, "cpu")[0]
    size = sum(x.numel() * x.element_size() for x in (q, k, v))  # and as much of the gradients; then the output and its
    size = 2 * size + 2 * v.numel() * v.element_size() + 4 * q.shape[0] * q.shape[1] * q.shape[2]
    assert bench._backward(case.problem).bytes() == size


@pytest.mark.parametrize("case", FEATURES[:10], ids=lambda case: case.name)
def test_ours_is_right_on_every_feature(case: Case) -> None:
    which = replace(QUICK, cases=(case,))
    (rows,) = bench.run(which, (), rounds=1)
    assert [row.ok for row in rows] == [True], rows[0].reason


@pytest.mark.parametrize("case", [FEATURES[0], FEATURES[8]], ids=lambda case: case.name)
def test_the_oracle_in_pieces_is_the_oracle(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    args, kwargs = bench._inputs(case, "cpu")
    whole = bench.SUBJECT.oracle(case, args, kwargs)
    monkeypatch.setattr(check, "SCORE_LIMIT", 1)
    for part, want in zip(bench.SUBJECT.oracle(case, args, kwargs), whole, strict=True):
        torch.testing.assert_close(part, want)


@pytest.mark.parametrize("which", [0, 1, 2], ids=["dq", "dk", "dv"])
def test_a_wrong_gradient_is_caught_and_not_timed(which: int) -> None:
    def prepare(case: Case, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        right = bench._our_call(case, args, kwargs, impl="torch").run()
        return Call(lambda: [1.05 * x if i == which else x for i, x in enumerate(right)])

    (row,) = runner.measure(QUICK.cases[1], QUICK, [Contestant("it", False, prepare)], None, 1, bench.SUBJECT)
    assert not row.ok and "is over" in str(row.reason)


def names(case: str, gpu: str | None, impls: str = "") -> list[str]:
    (found,) = only(suite("attention_backward", "headdims"), case).cases
    chosen = bench.choose(impls) if impls else None
    return [one.name for one in bench.ours(found, lookup(gpu) if gpu else None, chosen)]


def test_who_takes_part() -> None:
    assert names("d72-full", "h200") == ["hopper", "hopper-deterministic", "triton"]
    everyone = "hopper,hopper-deterministic,triton"
    assert names("d72-full", "h200", everyone) == ["hopper", "hopper-deterministic", "triton"]
    assert names("d256-causal", "h200", everyone) == ["hopper", "triton"]  # there dQ is the same to the bit anyway
    assert names("d512-full", "h200") == ["hopper", "triton"]
    assert names("d72-full", "a100") == ["triton"]
    assert names("d72-full", "h200", "triton,torch") == ["triton", "torch"]
    assert names("d72-full", "h200", "hopper-deterministic") == ["hopper-deterministic"]
    with pytest.raises(ValueError, match="impls='wgmma' is not one of 'hopper', 'aligned', 'triton', 'torch'"):
        bench.choose("wgmma")


def test_rivals_are_those_that_autograd_follows() -> None:
    found = [peer.name for peer in choose("all", "attention_backward")]
    assert found == ["sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "flash-attn", "fa4", "flex"]
    with pytest.raises(ValueError, match="peers='flashinfer' is not one of"):
        choose("flashinfer", "attention_backward")


def test_what_it_cannot_measure() -> None:
    with pytest.raises(ValueError, match="launch='graph'"):
        suite("attention_backward", "scaling", launch="graph")
    assert suite("attention_backward", "scaling").launch == "eager"
    with pytest.raises(ValueError, match="FP8 has no gradients"):
        next(bench.run(suite("attention_backward", "fp8"), ()))
