"""Selecting an implementation: the first that serves, the one named, and words where none can."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import flashkernels as fk
from flashkernels.dispatch import Impl, UnsupportedError, Verdict, select, serving, verdicts
from flashkernels.hardware import Gpu, lookup

H200 = lookup("h200")


def wants_even(problem: Any, gpu: Gpu | None) -> str | None:
    return f"problem={problem} is odd" if problem % 2 else None


def wants_gpu(problem: Any, gpu: Gpu | None) -> str | None:
    return None if gpu else "needs a GPU"


def leaves_small(problem: Any, gpu: Gpu | None) -> str | None:
    return "small problems are faster elsewhere" if problem < 10 else None


FAST = Impl("fast", "json", rejects=wants_gpu, defers=leaves_small)
EVEN = Impl("even", "json", rejects=wants_even)
ANY = Impl("any", "json")
IMPLS = (FAST, EVEN, ANY)


@pytest.mark.parametrize(
    ("problem", "gpu", "served"),
    [(10, H200, FAST), (11, H200, FAST), (10, None, EVEN), (11, None, ANY), (8, H200, EVEN), (9, H200, ANY)],
)
def test_auto_takes_the_first_row_that_neither_rejects_nor_defers(problem: int, gpu: Gpu | None, served: Impl) -> None:
    assert select(IMPLS, problem, gpu) is served


@pytest.mark.parametrize("impl", IMPLS, ids=lambda impl: impl.name)
def test_a_named_implementation_serves(impl: Impl) -> None:
    assert select(IMPLS, 10, H200, impl.name) is impl


def test_a_named_implementation_serves_what_auto_would_leave_to_another() -> None:
    assert select(IMPLS, 2, H200, "fast") is FAST


def test_a_named_implementation_that_cannot_serve_raises_with_its_reason_and_no_other() -> None:
    with pytest.raises(UnsupportedError, match=r"^impl='fast' cannot serve this call: fast: needs a GPU$"):
        select(IMPLS, 10, None, "fast")


def test_where_none_serves_every_reason_is_given_in_order() -> None:
    with pytest.raises(
        UnsupportedError, match=r"^impl='auto' cannot serve this call: fast: needs a GPU; even: problem=3 is odd$"
    ):
        select((FAST, EVEN), 3, None)


@pytest.mark.parametrize("name", ["hopper", "", "Fast"])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ValueError, match=f"impl='{name}' is not one of 'auto', 'fast', 'even', 'any'") as caught:
        select(IMPLS, 10, H200, name)
    assert not isinstance(caught.value, UnsupportedError)


def test_torch_on_a_gpu_warns_unless_somebody_asked_for_it(recwarn: pytest.WarningsRecorder) -> None:
    impls = (EVEN, Impl("torch", "json"))
    with pytest.warns(UserWarning, match=r"no kernel serves on NVIDIA H200, .*: 3 \(even: problem=3 is odd\)"):
        assert serving(impls, 3, H200).__name__ == "json"
    asked = SimpleNamespace(impl="torch")
    for problem, gpu, name in ((3, None, "auto"), (3, H200, "torch"), (2, H200, "auto"), (asked, H200, "auto")):
        serving(impls if problem is not asked else impls[1:], problem, gpu, name)
    assert not recwarn


def test_unsupported_is_a_value_error_and_public() -> None:
    assert issubclass(UnsupportedError, ValueError)
    assert fk.UnsupportedError is UnsupportedError


def test_verdicts_answer_for_every_row_and_a_rejection_comes_before_a_deferral() -> None:
    assert verdicts(IMPLS, 3, None) == [
        Verdict("fast", "needs a GPU"), Verdict("even", "problem=3 is odd"), Verdict("any", None),
    ]  # fmt: skip
    assert verdicts(IMPLS, 3, H200)[0] == Verdict("fast", "small problems are faster elsewhere")


def test_a_row_loads_its_module_only_when_asked() -> None:
    import json

    assert ANY.load() is json
    with pytest.raises(ModuleNotFoundError):
        Impl("missing", "flashkernels.no_such_module").load()


def test_the_choice_is_logged_with_the_reasons_of_those_before_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "flashkernels.dispatch"):
        select(IMPLS, 3, None)
    assert caplog.messages == ["any serves 3 (fast: needs a GPU; even: problem=3 is odd)"]


def run_logged(log: str | None) -> str:
    code = (
        "import torch, flashkernels as fk\n"
        "for _ in range(2): fk.attention(*(torch.zeros(1, 3, 1, 8) for _ in range(3)))"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "FLASHKERNELS_LOG")}
    environment |= {} if log is None else {"FLASHKERNELS_LOG": log}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120, env=environment
    )
    assert done.stdout == ""
    return done.stderr


def test_the_environment_turns_the_log_on_once_for_each_new_problem() -> None:
    shown = run_logged("dispatch")
    assert shown.count("serves AttentionProblem(") == 1
    assert "triton: needs a GPU" in shown


def test_without_it_nothing_is_logged() -> None:
    assert "serves" not in run_logged(None)
