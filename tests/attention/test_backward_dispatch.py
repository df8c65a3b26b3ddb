"""Which implementation makes the gradients of a call, and what the table says of the others."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

import flashkernels as fk
import flashkernels.attention.api as api
from flashkernels.attention.problem import AttentionProblem, BackwardProblem
from flashkernels.dispatch import select, verdicts
from flashkernels.hardware import lookup
from flashkernels.jit.eager import Plans

from .cases import Shape, float_mask, interpreter, qkv
from .gradients import leaves

H200 = AttentionProblem(batch=1, seq_q=64, seq_k=64, heads=2, kv_heads=2, head_dim=64)


def served(problem: AttentionProblem, gpu: str | None = "h200", wanted: str = "q k v", **options: Any) -> str:
    backward = BackwardProblem(problem, tuple(wanted.split()), **options)
    return select(api.BACKWARD_IMPLS, backward, None if gpu is None else lookup(gpu)).name


def test_the_table_serves_every_backward() -> None:
    assert served(H200) == served(H200, impl="hopper") == served(H200, wanted="q sinks", deterministic=True) == "hopper"
    assert served(H200, impl="triton") == served(H200, "a100") == "triton"
    others: list[dict[str, Any]] = [{"dtype": "fp32"}, {"dropout_p": 0.1}, {"mask": "bool"}]
    for beyond in (*others, {"unaddressable": "q: odd"}):
        problem = replace(H200, **beyond)
        assert served(problem) == "triton"
        assert api.BACKWARD_IMPLS[0].rejects(BackwardProblem(problem, ("q",)), lookup("h200"))
    assert served(replace(H200, alibi=True), wanted="q alibi_slopes") == "triton"
    assert served(replace(H200, mask="float"), wanted="q mask") == "triton"
    assert served(H200, impl="torch") == served(H200, saved=False) == "torch"
    assert served(replace(H200, dtype="fp64")) == served(replace(H200, device="cpu"), None) == "torch"
    wide = replace(H200, head_dim=512, head_dim_v=512)
    assert served(wide) == "hopper"
    wide = replace(wide, dtype="fp32")
    assert served(wide) == "triton" and served(wide, "rtx5090") == "torch"


def test_the_table_says_why() -> None:
    def reasons(problem: AttentionProblem, gpu: str = "h200", **options: Any) -> dict[str, str | None]:
        found = verdicts(api.BACKWARD_IMPLS, BackwardProblem(problem, **options), lookup(gpu))
        return {verdict.name: verdict.reason for verdict in found}

    def reason(problem: AttentionProblem, gpu: str = "h200", **options: Any) -> str | None:
        return reasons(problem, gpu, **options)["triton"]

    even = "rows can be read 16 bytes at a time as they are"
    assert reasons(H200, wanted=("q",)) == {"hopper": None, "aligned": even, "triton": None, "torch": None}
    assert reasons(H200, wanted=("q",), impl="triton")["hopper"] == "impl='triton' was asked for"
    assert reasons(replace(H200, unaddressable="k: why"), wanted=("q",))["hopper"] == "TMA cannot read k: why"
    assert reasons(replace(H200, mask="float"), wanted=("mask",)) == {
        "hopper": "takes no mask tensor", "aligned": even, "triton": None, "torch": None,
    }  # fmt: skip
    assert reason(H200, wanted=("q",), impl="torch") == "impl='torch' was asked for"
    assert "no backward tile fits head_dim=512" in str(
        reason(replace(H200, head_dim=512, head_dim_v=512, dtype="fp32"), "rtx5090", wanted=("q",))
    )


@interpreter
def test_who_makes_the_gradients_is_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = float_mask((35, 50), drop=0.0).requires_grad_()
    inputs = leaves(*qkv(Shape(b=1, sq=35, sk=50, h=2, hkv=1, d=16)))
    out = fk.attention(*inputs, mask=mask, impl="triton")
    with caplog.at_level(logging.INFO, "flashkernels.dispatch"):
        monkeypatch.setattr(api, "_backward_plans", Plans(api._plan_backward))
        out.sum().backward()
    assert "triton serves" in caplog.text and "hopper: " in caplog.text
