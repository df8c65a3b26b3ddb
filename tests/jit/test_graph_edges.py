"""Graphs of functions with unusual arguments, closures and decorators."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flashkernels as fk
from flashkernels.jit.captured import held
from flashkernels.jit.graph import GraphError

WEIGHT = torch.ones(2)


def in_a_comprehension(x: Tensor) -> Tensor:
    return torch.stack([x * WEIGHT for _ in range(1)])


def in_a_lambda(x: Tensor) -> Tensor:
    return (lambda y: y * WEIGHT)(x)


def by_default(x: Tensor, *, w: Tensor = WEIGHT) -> Tensor:
    return x * w


def decorated(function: Callable[[Tensor], Tensor], factor: Tensor) -> Callable[[Tensor], Tensor]:
    @functools.wraps(function)
    def wrapper(x: Tensor) -> Tensor:
        return function(x) * factor

    return wrapper


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (in_a_comprehension, "WEIGHT"), (in_a_lambda, "WEIGHT"), (by_default, "default w"),
        (decorated(lambda x: x + 1, WEIGHT), "factor"), (decorated(in_a_lambda, torch.ones(2)), "WEIGHT"),
    ],
)  # fmt: skip
def test_a_tensor_is_found_where_it_is_used(function: Any, name: str) -> None:
    assert name in [x.name for x in held(function)]


def test_a_global_of_a_comprehension_that_moved_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    step = fk.Graph(in_a_comprehension)
    step(torch.ones(2))
    monkeypatch.setitem(globals(), "WEIGHT", WEIGHT * 5)
    with pytest.raises(GraphError, match="WEIGHT was at"):
        step(torch.ones(2))


def test_a_container_that_has_lost_a_tensor_is_reported() -> None:
    for caches in ([torch.ones(2), torch.ones(2)], {0: torch.ones(2), 1: torch.ones(2)}):
        step = fk.Graph(functools.partial(lambda many, x: x + many[0], caches))
        step(torch.ones(2))
        caches.pop(1)
        with pytest.raises(GraphError, match="no tensor any more"):
            step(torch.ones(2))


def test_further_arguments_by_position_are_copied_like_others() -> None:
    def padded(x: Tensor, *rest: Tensor, y: Tensor) -> Tensor:
        return x + y + rest[0].sum()

    step = fk.Graph(padded, batch=("x", "y"), buckets=(4,))
    assert step(torch.ones(3), torch.ones(7), y=torch.ones(3)).tolist() == [9.0] * 3

    def changes(x: Tensor, *rest: Tensor, cache: Tensor | None = None) -> Tensor:
        rest[0].add_(1)
        return x

    with pytest.raises(GraphError, match=r"rest\[0\] in place"):
        fk.Graph(changes, static=("cache",))(torch.zeros(2), torch.zeros(2))
    mine = torch.zeros(2)
    fk.Graph(changes, static=("rest",))(torch.zeros(2), mine)
    assert mine.tolist() == [1, 1]


def test_a_decorator_of_what_is_no_python_function() -> None:
    @functools.wraps(torch.add)
    def twice(x: Tensor) -> Tensor:
        return torch.add(x, x)

    assert fk.Graph(twice)(torch.ones(2)).tolist() == [2, 2]


def test_a_closure_that_is_not_filled_yet() -> None:
    def step(x: Tensor) -> Tensor:
        return late(x) if x.numel() > 100 else x * 2

    made = fk.Graph(step)(torch.ones(2))
    late = torch.neg
    assert made.tolist() == [2, 2] and late is torch.neg


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"warmup": "3"}, "warmup='3'"), ({"warmup": 1.5}, "warmup=1.5"), ({"most": None}, "most=None"),
        ({"static": 5}, "static=5"), ({"batch": ["x"], "buckets": 4}, "buckets=4"),
        ({"batch": ["x"], "buckets": (4.5,)}, "4.5"), ({"batch": ["x"], "buckets": (4,), "static": ["x"]}, "both"),
        ({"static": ["zz"]}, "zz"),
    ],
)  # fmt: skip
def test_bad_settings_are_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        fk.Graph(lambda x: x, **settings)
