"""Row-wise ops with their settings ask for no other kernels than those that a warm-up by name prepares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import flashkernels as fk
from flashkernels.aot.blank import empty
from flashkernels.aot.wanted import Sizes, wanted
from flashkernels.aot.work import Rows, Work, programs
from flashkernels.dispatch import select
from flashkernels.fused import activation, norm
from flashkernels.hardware import lookup
from flashkernels.jit.eager import Plans
from flashkernels.jit.notes import noting

GPU = lookup("h200")


@pytest.fixture(autouse=True)
def posed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of tensors without memory, as if these were on a GPU."""

    def serving(impls: Any, problem: Any, _: Any, name: str) -> Any:
        return select(impls, replace(problem, device="cuda"), GPU, name).load()

    for module in (activation, norm):
        monkeypatch.setattr(module, "serving", serving)
        monkeypatch.setattr(module, "gpu_of", lambda _: GPU)
    monkeypatch.setattr(Plans, "ready", lambda plans, tensors, settings: plans.make(tensors, settings))


def check(call: Callable[[], Any], works: list[Work]) -> None:
    prepared = {program.key for work in works for program in programs(work, GPU)}
    with noting(GPU.cc) as asked:
        call()
    assert asked and [program.label for program in asked if program.key not in prepared] == []


@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])
def test_norms(op: str, residual: bool) -> None:
    x, side, each = empty(64, 576, dtype="bf16"), empty(576, dtype="bf16"), empty(64)
    settings: dict[str, Any] = {"bias": side} if op == "layer_norm" else {"numerics": "hf"}
    other = x if residual else None
    check(lambda: getattr(fk, op)(x, side, residual=other, **settings), wanted([op], Sizes(widths=[576])))

    def gradients() -> None:
        centred = op == "layer_norm"
        bias, mean = (side, each) if centred else (None, each.new_empty(0))
        first, call = (x, side, bias, other), norm.Norm(centred, 1e-6, not centred, "", True, "auto")
        norm.forward.make(first, call)(*first)
        second, backward = (
            (x, other, x, side, mean, each),
            norm.NormBackward(centred, not centred, True, centred, "auto"),
        )
        norm._backward.make(second, backward)(*second)

    check(gradients, wanted([op], Sizes(widths=[576], backward=True)))


@pytest.mark.parametrize("weight", ["none", "fp32"])
def test_norms_with_other_weights(weight: str) -> None:
    x, side = empty(64, 576, dtype="bf16"), None if weight == "none" else empty(576)
    check(lambda: fk.rms_norm(x, side), [Rows("rms_norm", 576, weight=weight)])


@pytest.mark.parametrize(("op", "approximate"), [("gelu", "tanh"), ("gelu", "none"), ("geglu", "none")])
def test_gelus(op: str, approximate: str) -> None:
    x = empty(64, 1152 if op == "geglu" else 576, dtype="bf16")
    check(lambda: getattr(fk, op)(x, approximate=approximate), wanted([op], Sizes(widths=[576])))
