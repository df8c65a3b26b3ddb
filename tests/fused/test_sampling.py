"""Sampling: every token is the one that the random numbers choose from exactly the tokens that stay."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import flashkernels as fk
from flashkernels.fused import sampling
from flashkernels.fused.draws import TOKEN, words
from flashkernels.fused.triton.blocks import Launch

from .draws_oracle import assert_distributed, check_draw, row
from .test_rows import each_impl, interpreter

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
WIDTHS = (1, 2, 7, 16, 33, 100, 300)
SETTINGS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@pytest.fixture(autouse=True, scope="module")
def _few_candidates() -> Iterator[None]:
    """The interpreter sorts slowly, and rows of a test would never have more candidates than there is room for."""
    with pytest.MonkeyPatch.context() as patch:
        if INTERPRETED:
            patch.setattr(sampling, "CAPACITIES", (16, 32))
        yield


def number(x: Any, i: int) -> Any:
    return x[i].item() if isinstance(x, Tensor) else x


def check(logits: Tensor, kwargs: dict[str, Any], impl: str) -> fk.fused.Sampled:
    """Each row of a call, against the oracle."""
    found = fk.fused.sample(logits, impl=impl, **kwargs)
    seeds, offsets, previous = kwargs["seeds"], kwargs.get("offsets", 0), kwargs.get("previous")
    n = kwargs.get("top_n", 0)
    for i, x in enumerate(logits.cpu()):
        each = {name: number(kwargs[name], i) for name in SETTINGS if name in kwargs}
        want = row(x, **each, previous=[] if previous is None else previous[i].tolist())
        seed = number(seeds, i) + (0 if isinstance(seeds, Tensor) else i)
        token = int(found.ids[i])
        check_draw(token, want, seed, number(offsets, i))
        top = found.top_ids[i].tolist()
        assert len({*top}) == n
        got = torch.cat((found.logprobs[i : i + 1], found.top_logprobs[i])).double().cpu()
        torch.testing.assert_close(got, want.logp[[token, *top]], rtol=1e-5, atol=2e-5)
        torch.testing.assert_close(want.logp[top], want.logp[want.order[:n]], rtol=1e-5, atol=2e-5)
    return found


def wide(low: int, high: int) -> st.SearchStrategy[int]:
    """Without the numbers whose top bit is the 32nd: Triton's interpreter takes those of an argument as negative."""
    return st.integers(low, high).filter(lambda n: not 2**31 <= n < 2**32)


@st.composite
def calls(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...]) -> tuple[Tensor, dict[str, Any]]:
    rows, width = draw(st.integers(1, 3)), draw(st.sampled_from(WIDTHS))
    make = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    logits = torch.randn(rows, width, generator=make) * draw(st.sampled_from([0.1, 2.0, 10.0]))
    if draw(st.booleans()):  # many ties
        logits = (logits * 2).round() / 2
    kwargs: dict[str, Any] = {"seeds": draw(wide(-(2**63), 2**63 - 5)), "offsets": draw(wide(0, 2**40))}
    choices: dict[str, list[float]] = {
        "temperature": [0.0, 0.5, 1.0, 1.7], "top_k": [-1, 0, 1, 3, 20, 50, 10**6],
        "top_p": [0.0, 0.3, 0.9, 0.999, 1.0], "min_p": [0.0, 0.02, 0.3, 1.0],
    }  # fmt: skip
    if draw(st.booleans()):
        kwargs["previous"] = torch.randint(-1, width, (rows, draw(st.integers(0, 9))), generator=make)
        choices |= {"repetition_penalty": [0.8, 1.0, 1.3], "presence_penalty": [-0.5, 0.0, 0.7]}
        choices["frequency_penalty"] = [0.0, 0.25]
    for name, values in choices.items():
        kind = draw(st.sampled_from(["default", "number", "tensor"]))
        if kind == "number":
            kwargs[name] = draw(st.sampled_from(values))
        if kind == "tensor":
            each = draw(st.lists(st.sampled_from(values), min_size=rows, max_size=rows))
            kwargs[name] = torch.tensor(each, dtype=torch.int32 if name == "top_k" else torch.float32)
    if draw(st.booleans()):
        kwargs["seeds"] = torch.randint(-(2**62), 2**62, (rows,), generator=make)
    kwargs["top_n"] = draw(st.integers(0, min(3, width)))
    return logits.to(draw(st.sampled_from(dtypes))), kwargs


@settings(max_examples=100)
@given(calls((torch.float16, torch.bfloat16, torch.float32)))
def test_torch(call: tuple[Tensor, dict[str, Any]]) -> None:
    check(*call, "torch")


@interpreter
@settings(max_examples=12)
@given(calls((torch.float16, torch.float32)))
def test_triton(call: tuple[Tensor, dict[str, Any]]) -> None:
    check(*call, "triton")


@pytest.mark.slow
@interpreter
@settings(max_examples=1000)
@given(calls((torch.float16, torch.float32)))
def test_triton_at_length(call: tuple[Tensor, dict[str, Any]]) -> None:
    check(*call, "triton")


# Every way through the kernel, by name


WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "candidates": (300, {"top_k": 8, "top_p": 0.9, "temperature": 0.8}),
    "greedy": (300, {"temperature": 0.0}),
    "all stay": (300, {"temperature": 1.3}),
    "more than fit, by number": (300, {"top_k": 100}),
    "more than fit, by weight": (300, {"top_p": 0.95, "temperature": 3.0}),
    "more than fit, by both": (300, {"top_k": 200, "top_p": 0.9, "temperature": 3.0}),
    "more than fit, of which one stays": (300, {"top_p": 0.0, "top_k": 200}),
    "more than fit, by the least": (300, {"min_p": 0.001, "temperature": 3.0}),
}


@interpreter
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("levels", [None, 4], ids=["numbers", "ties"])
def test_ways(way: str, levels: int | None) -> None:
    width, kwargs = WAYS[way]
    logits = torch.randn(2, width) if levels is None else torch.randint(0, levels, (2, width)).float()
    check(logits, kwargs | {"seeds": 11, "top_n": 2}, "triton")


LAUNCHES: dict[str, tuple[int, dict[str, Any]]] = {
    "greedy": (1, {"temperature": 0.0}),
    "greedy, with penalties": (2, {"temperature": 0.0, "previous": torch.tensor([[0, 1, 1], [2, -1, 0]])}),
    "one stays": (1, {"top_k": 1, "top_p": 0.5}),
    "all stay": (1, {}),
    "some stay": (3, {"top_p": 0.5}),
    "greedy, and the best": (3, {"temperature": 0.0, "top_n": 2}),
    "each row its own": (3, {"temperature": torch.tensor([0.0, 1.0])}),
}


@interpreter
@pytest.mark.parametrize("way", LAUNCHES)
@pytest.mark.parametrize("levels", [None, 1, 4], ids=["numbers", "all equal", "ties"])
def test_as_few_kernels_are_launched_as_may_be_needed(
    way: str, levels: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches, kwargs = LAUNCHES[way]
    logits = torch.randn(2, 300) if levels is None else torch.randint(0, levels, (2, 300)).float()
    made: list[Any] = []
    call = Launch.__call__

    def counted(self: Launch, *arguments: Any) -> None:
        made.append(self)
        call(self, *arguments)

    monkeypatch.setattr(Launch, "__call__", counted)
    check(logits, {"seeds": 11} | kwargs, "triton")
    assert len(made) == launches


@interpreter
@pytest.mark.parametrize(
    "kwargs", [{"temperature": 0.0}, {"top_k": 1, "temperature": 2.0}, {}, {"temperature": 0.6}], ids=str
)
@pytest.mark.parametrize("levels", [None, 3], ids=["numbers", "ties"])
def test_rows_of_several_programs_are_drawn_by_the_last(kwargs: dict[str, Any], levels: int | None) -> None:
    logits = torch.randn(2, 9000) if levels is None else torch.randint(0, levels, (2, 9000)).float()
    check(logits, kwargs | {"seeds": 11}, "triton")


@interpreter
def test_calls_whose_numbers_change_keep_their_own() -> None:
    """What a prepared call last passed to its kernels is kept."""
    logits = torch.randn(2, 300)
    for kwargs in (
        {"seeds": 1},
        {"seeds": 1, "offsets": 2},
        {"seeds": 2},
        {"seeds": 2, "temperature": 0.5},
        {"seeds": 1},
    ):
        check(logits, kwargs, "triton")


def test_a_temperature_that_fp32_rounds_up_is_greedy() -> None:
    logits = torch.randn(3, 300)
    for impl in ("torch", *(("triton",) if INTERPRETED else ())):
        found, want = (fk.fused.sample(logits, temperature=t, seeds=1, impl=impl) for t in (9.9999999e-6, 0.0))
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


# Distributions


@pytest.mark.parametrize(
    "kwargs",
    [
        {}, {"temperature": 0.6}, {"top_k": 12}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 30, "top_p": 0.9},
        {"top_k": 30, "top_p": 0.9, "min_p": 0.05, "temperature": 1.4},
    ],
    ids=str,
)  # fmt: skip
def test_distribution(kwargs: dict[str, Any]) -> None:
    logits, rows = torch.randn(60) * 1.5, 4_000
    found = fk.fused.sample(logits.expand(rows, 60), seeds=5, **kwargs)
    assert_distributed(found.ids, row(logits, **kwargs).probabilities)


@pytest.mark.parametrize("kwargs", [{}, {"top_k": 30}], ids=str)
def test_distribution_of_one_seed(kwargs: dict[str, Any]) -> None:
    logits, rows = torch.randn(60) * 1.5, 4_000
    seeds, offsets = torch.full((rows,), 3), torch.arange(rows)
    found = fk.fused.sample(logits.expand(rows, 60), seeds=seeds, offsets=offsets, **kwargs)
    assert_distributed(found.ids, row(logits, **kwargs).probabilities)


def test_words_of_nearby_seeds_offsets_and_tokens_are_not_alike() -> None:
    seeds, offsets = (x.flatten() for x in torch.meshgrid(torch.arange(20), torch.arange(20), indexing="ij"))
    found = words(seeds, offsets, torch.arange(50), TOKEN)
    assert found.unique().numel() > found.numel() - 5
    assert abs(found.double().mean() / 2**32 - 0.5) < 0.01


# A row by itself


@each_impl
@pytest.mark.parametrize("kwargs", [{}, {"top_k": 5, "top_p": 0.9}, {"top_p": 0.9, "min_p": 0.01}], ids=str)
def test_a_row_is_drawn_alike_in_every_batch(kwargs: dict[str, Any], impl: str) -> None:
    logits, seeds, offsets = torch.randn(3, 70), torch.arange(3) * 17, torch.arange(3) + 3
    whole = fk.fused.sample(logits, seeds=seeds, offsets=offsets, top_n=2, impl=impl, **kwargs)
    for i in (0, 2):
        part = slice(i, i + 1)
        alone = fk.fused.sample(logits[part], seeds=seeds[part], offsets=offsets[part], top_n=2, impl=impl, **kwargs)
        assert all(torch.equal(a[part], b) for a, b in zip(whole, alone, strict=True))
    again = fk.fused.sample(logits.flip(0), seeds=seeds.flip(0), offsets=offsets.flip(0), top_n=2, impl=impl, **kwargs)
    assert all(torch.equal(a, b.flip(0)) for a, b in zip(whole, again, strict=True))


@each_impl
def test_numbers_and_tensors_say_the_same(impl: str) -> None:
    logits, rows = torch.randn(3, 40), 3
    numbers = {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.02, "seeds": 4, "offsets": 2}
    tensors = {name: torch.full((rows,), value) for name, value in numbers.items()} | {"seeds": torch.arange(4, 7)}
    a, b = (fk.fused.sample(logits, impl=impl, **x) for x in (numbers, tensors))
    assert torch.equal(a.ids, b.ids)


def test_seeds_are_drawn_from_torch() -> None:
    logits = torch.zeros(16, 50)
    found = [fk.fused.sample(logits).ids for _ in range(2)]
    torch.manual_seed(0)
    a = fk.fused.sample(logits).ids
    torch.manual_seed(0)
    assert torch.equal(a, fk.fused.sample(logits).ids) and not torch.equal(*found)


# Ties and edges


@each_impl
def test_lower_ids_stay_where_tokens_are_equal(impl: str) -> None:
    logits = torch.zeros(2, 100)
    logits[:, 50:] = 1.0
    found = fk.fused.sample(logits, top_k=3, seeds=0, top_n=4, impl=impl)
    assert {*found.ids.tolist()} <= {50, 51, 52} and found.top_ids[0].tolist() == [50, 51, 52, 53]
    found = fk.fused.sample(logits, top_p=0.01, seeds=0, impl=impl)  # of 50 e + 50
    assert {*found.ids.tolist()} <= {50, 51}
    assert fk.fused.sample(logits, temperature=0.0, seeds=0, impl=impl).ids.tolist() == [50] * 2


@each_impl
@pytest.mark.parametrize("kwargs", [{"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}, {"temperature": 0.0}], ids=str)
def test_only_the_largest_stays(kwargs: dict[str, Any], impl: str) -> None:
    logits = torch.randn(2, 60)
    found = fk.fused.sample(logits, seeds=1, impl=impl, **kwargs)
    assert torch.equal(found.ids, logits.argmax(1))
    torch.testing.assert_close(found.logprobs, logits.log_softmax(1).amax(1))


@each_impl
@pytest.mark.parametrize("kwargs", [{"top_k": 60}, {"top_k": -1}, {"top_k": 5000}, {"top_p": 1.0}, {"min_p": 0.0}])
def test_nothing_is_cut(kwargs: dict[str, Any], impl: str) -> None:
    logits = torch.randn(2, 60)
    found, want = (fk.fused.sample(logits, seeds=1, impl=impl, **x) for x in (kwargs, {}))
    assert torch.equal(found.ids, want.ids)


@each_impl
@pytest.mark.parametrize("kwargs", [{}, {"top_k": 3}, {"top_p": 0.5}, {"temperature": 0.0}, {"min_p": 0.1}], ids=str)
def test_nan_and_infinities(kwargs: dict[str, Any], impl: str) -> None:
    nan, inf = torch.nan, torch.inf
    logits = torch.randn(6, 40)
    logits[0], logits[1], logits[2, ::2], logits[3, 7] = nan, -inf, nan, inf
    logits[4], logits[4, 9], logits[5, 1:] = -inf, -1e30, -inf
    found = fk.fused.sample(logits, seeds=2, top_n=2, impl=impl, **kwargs)
    assert found.ids[:2].tolist() == [0, 0] and found.logprobs[:2].isnan().all()
    assert found.top_ids[:2].tolist() == [[0, 1]] * 2 and found.top_logprobs[:2].isnan().all()
    assert found.ids[2] % 2 == 1 and found.logprobs[2:].isfinite().all()
    assert found.ids[3:].tolist() == [7, 9, 0] and found.logprobs[3:].tolist() == [0.0] * 3
    assert found.top_logprobs[4:, 1].tolist() == [-inf, -inf]


@each_impl
def test_tensors_out_of_range_count_as_the_nearest(impl: str) -> None:
    logits = torch.randn(4, 30)
    each = {
        "temperature": torch.tensor([-1.0, 1.0, 1.0, torch.nan]), "top_k": torch.tensor([5, -7, 5000, 5]),
        "top_p": torch.tensor([2.0, 1.5, -1.0, 1.0]), "min_p": torch.tensor([-1.0, -0.5, 0.0, 0.0]),
    }  # fmt: skip
    found = fk.fused.sample(logits, seeds=3, impl=impl, **each).ids
    plain = fk.fused.sample(logits, seeds=3, impl=impl).ids
    assert found.tolist() == [logits[0].argmax(), plain[1], logits[2].argmax(), logits[3].argmax()]


@each_impl
def test_numbers_of_64_bits_are_not_cut(impl: str) -> None:
    """2**32 + 1 is not 1."""
    logits = torch.randn(4, 30)
    k = torch.tensor([2**32 + 1, 2**32 + 3, -(2**32) + 1, 2**63 - 1])
    found = fk.fused.sample(logits, seeds=3, top_k=k, impl=impl).ids
    assert torch.equal(found, fk.fused.sample(logits, seeds=3, impl=impl).ids)
    assert torch.equal(found, fk.fused.sample(logits, seeds=3, top_k=10**400, impl=impl).ids)
    assert torch.equal(found, fk.fused.sample(logits, seeds=3, top_k=-(10**400), impl=impl).ids)


@each_impl
@pytest.mark.parametrize("kwargs", [{}, {"top_k": 12}, {"top_k": 200, "top_p": 0.9}], ids=str)
@pytest.mark.parametrize("least", [1.5, 2.0, torch.inf])
def test_min_p_above_1_is_1(least: float, kwargs: dict[str, Any], impl: str) -> None:
    """Of the equal ones that are the best, none goes."""
    logits = torch.zeros(4, 300)
    logits[:, ::2] = -1.0
    found, want = (
        fk.fused.sample(logits, seeds=3, min_p=torch.full((4,), x), impl=impl, **kwargs) for x in (least, 1.0)
    )
    assert torch.equal(found.ids, want.ids) and found.ids.unique().numel() > 1 and (found.ids % 2 == 1).all()


@each_impl
@pytest.mark.parametrize("kwargs", [{}, {"top_k": 3}, {"top_k": 100}, {"min_p": 0.5}, {"top_p": 0.5}], ids=str)
@pytest.mark.parametrize("name", ["top_p", "min_p"])
def test_nan_cuts_nothing(name: str, kwargs: dict[str, Any], impl: str) -> None:
    logits = torch.randn(4, 300)
    kwargs = {"seeds": 3, "impl": impl} | {key: x for key, x in kwargs.items() if key != name}
    found, want = (fk.fused.sample(logits, **kwargs, **x) for x in ({name: torch.full((4,), torch.nan)}, {}))
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@each_impl
@pytest.mark.parametrize("kwargs", [{}, {"top_k": 1}, {"top_k": 4}, {"top_k": 100}, {"top_p": 0.9}], ids=str)
@pytest.mark.parametrize("top_n", [0, 2])
def test_logarithms_of_large_numbers_keep_their_digits(top_n: int, kwargs: dict[str, Any], impl: str) -> None:
    """Of 80 equal tokens, the largest there are or large by their temperature, each has an 80th."""
    logits = torch.zeros(2, 300)
    logits[0, 70:150], logits[1, 70:150] = torch.inf, 90.0
    heat = torch.tensor([1.0, 1.1e-5])
    found = fk.fused.sample(logits, seeds=3, temperature=heat, top_n=top_n, impl=impl, **kwargs)
    assert ((found.ids >= 70) & (found.ids < 150)).all()
    every = torch.cat((found.logprobs[:, None], found.top_logprobs), 1)
    torch.testing.assert_close(every, torch.full_like(every, -math.log(80)))
    one = fk.fused.sample(logits[1:], seeds=3, temperature=1.1e-5, impl=impl)  # which is another kernel
    torch.testing.assert_close(one.logprobs, torch.full((1,), -math.log(80)))


# Penalties


@each_impl
def test_counts_say_the_same_as_previous(impl: str) -> None:
    logits = torch.randn(3, 37)
    previous = torch.tensor([[1, 1, 36, -1], [5, 5, 5, 5], [40, -3, 0, 0]])
    counts = torch.zeros(3, 37, dtype=torch.int32)
    for i, ids in enumerate(previous.tolist()):
        for token in ids:
            if 0 <= token < 37:
                counts[i, token] += 1
    kwargs = {"repetition_penalty": 1.5, "presence_penalty": 0.2, "frequency_penalty": 0.3, "seeds": 1, "top_n": 5}
    want = check(logits, kwargs | {"previous": previous}, impl)
    for other in (
        {"previous": previous.int()}, {"previous": previous.t().contiguous().t()}, {"counts": counts},
        {"counts": counts.short()}, {"counts": counts.t().contiguous().t()},
    ):  # fmt: skip
        found = fk.fused.sample(logits, impl=impl, **kwargs, **other)
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@each_impl
def test_a_context_longer_than_16_bits_count(impl: str) -> None:
    logits, previous = torch.zeros(1, 5), torch.full((1, 33_000), 3)
    found = fk.fused.sample(logits, previous=previous, frequency_penalty=-0.001, temperature=0.0, seeds=0, impl=impl)
    assert found.ids.tolist() == [3]
    torch.testing.assert_close(found.logprobs, torch.tensor([0.0]), atol=1e-4, rtol=0)


# Shapes, strides, the registered op


@each_impl
@pytest.mark.parametrize("layout", ["padded", "stepped", "repeated"])
def test_strides(layout: str, impl: str) -> None:
    from .test_rows import laid_out

    logits = laid_out(torch.randn(3, 50), layout)
    found, want = (fk.fused.sample(x, seeds=1, top_k=7, top_n=3, impl=impl) for x in (logits, logits.contiguous()))
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@each_impl
@pytest.mark.parametrize("layout", ["stepped", "repeated"])
def test_settings_may_lie_anyhow(layout: str, impl: str) -> None:
    """Numbers that lie between or behind those of the rows are not read."""
    rows, logits = 4, torch.randn(4, 50)
    values: dict[str, list[float]] = {
        "temperature": [0.9, 9.0], "top_k": [20, 1], "top_p": [0.9, 0.01], "min_p": [0.01, 1.0],
        "repetition_penalty": [1.1, 9.0], "presence_penalty": [0.2, 50.0], "frequency_penalty": [0.1, -9.0],
        "seeds": [7, 1000], "offsets": [3, 2000],
    }  # fmt: skip
    each = {}
    for name, (mine, other) in values.items():
        x = torch.tensor([mine, other] * rows)
        each[name] = x[::2] if layout == "stepped" else x[:1].expand(rows)
        assert not each[name].is_contiguous()
    previous = torch.randint(0, 50, (rows, 2 * 6))[:, ::2]
    if layout == "repeated":
        previous = previous[:1].expand(rows, 6)
    found, want = (
        fk.fused.sample(logits, previous=ids, top_n=3, impl=impl, **given)
        for ids, given in ((previous, each), (previous.clone(), {name: x.clone() for name, x in each.items()}))
    )
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@each_impl
def test_no_rows(impl: str) -> None:
    found = fk.fused.sample(torch.zeros(0, 30), top_n=4, impl=impl)
    assert [tuple(x.shape) for x in found] == [(0,), (0,), (0, 4), (0, 4)]


@each_impl
def test_registered_op(impl: str) -> None:
    logits, rows = torch.randn(3, 20), torch.tensor([0.5, 1.0, 0.0])
    seeds = torch.arange(3)
    numbers = [1.0, 1.0, 0.0, 1.0, 0.0, 0.0]
    nothing = [None] * 6
    for settings_ in ([None, *nothing], [rows, *nothing]):
        torch.library.opcheck(
            sampling.sample_op, (logits, None, None, seeds, None, settings_, numbers, 5, 0, 0, 2, 32, impl),
        )  # fmt: skip


@pytest.mark.parametrize("top_n", [0, 3])
def test_compile(top_n: int) -> None:
    def step(logits: Tensor, seeds: Tensor, heat: Tensor) -> Tensor:
        found = fk.fused.sample(logits * 2, temperature=heat, top_k=10, top_p=0.9, seeds=seeds, top_n=top_n)
        return found.ids + found.top_ids.sum()

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (2, 5):
        tensors = torch.randn(rows, 64), torch.arange(rows), torch.rand(rows) + 0.5
        assert torch.equal(compiled(*tensors), step(*tensors))


# Errors


@pytest.mark.parametrize(
    ("kwargs", "error", "words_"),
    [
        ({"temperature": -1.0}, ValueError, "temperature=-1.0 must be at least 0"),
        ({"temperature": "hot"}, TypeError, "temperature='hot' must be a number"),
        ({"temperature": None}, TypeError, "temperature=None must be a number"),
        ({"temperature": [1.0]}, TypeError, "temperature=[1.0] must be a number"),
        ({"top_p": True}, TypeError, "top_p=True must be a number"),
        ({"top_p": 1.5}, ValueError, "top_p=1.5 must be from 0.0 to 1.0"),
        ({"min_p": -0.1}, ValueError, "min_p=-0.1 must be from 0.0 to 1.0"),
        ({"top_k": 2.5}, TypeError, "top_k=2.5 must be a whole number"),
        ({"repetition_penalty": 0.0}, ValueError, "repetition_penalty=0.0 must be above 0"),
        ({"presence_penalty": float("nan")}, ValueError, "presence_penalty=nan must be finite"),
        ({"top_n": 31}, ValueError, "top_n=31 must be a whole number from 0 to 30"),
        ({"top_p": torch.ones(3)}, ValueError, "top_p has shape (3,); expected (2,)"),
        ({"top_k": torch.ones(2)}, TypeError, "top_k.dtype=torch.float32"),
        ({"temperature": torch.ones(2, dtype=torch.float64)}, TypeError, "temperature.dtype=torch.float64"),
        ({"seeds": 1.5}, TypeError, "seeds=1.5 must be a whole number"),
        ({"seeds": 2**63}, ValueError, "does not fit 64 bits"),
        ({"offsets": torch.zeros(2)}, TypeError, "offsets.dtype=torch.float32"),
        ({"previous": torch.zeros(3, 4, dtype=torch.int64)}, ValueError, "previous has shape (3, 4); expected (2, 4)"),
        ({"previous": torch.zeros(2, 4)}, TypeError, "previous.dtype=torch.float32"),
        ({"counts": torch.zeros(2, 31, dtype=torch.int32)}, ValueError, "counts has shape (2, 31); expected (2, 30)"),
        ({"previous": torch.zeros(2, 1).int(), "counts": torch.zeros(2, 30).int()}, ValueError, "both given"),
        ({"previous": torch.zeros(2, 4).int().numpy()}, TypeError, "previous must be a torch.Tensor, got ndarray"),
        ({"previous": [[1], [2]]}, TypeError, "previous must be a torch.Tensor, got list"),
        ({"impl": "cuda"}, ValueError, "impl='cuda' is not one of"),
        ({"impl": ["triton"]}, ValueError, "impl=['triton'] is not one of 'auto', 'triton', 'torch'"),
        ({"impl": np.zeros(2)}, ValueError, "impl=array([0., 0.]) is not one of"),
        ({"top_n": np.array([1, 2])}, ValueError, "top_n=array([1, 2]) must be a whole number from 0 to 30"),
        ({"top_k": True}, TypeError, "top_k=True must be a whole number"),
        ({"temperature": 10**400}, ValueError, f"temperature={10**400} does not fit"),
        ({"temperature": 1e300}, ValueError, "temperature=1e+300 does not fit fp32"),
        ({"presence_penalty": 1e300}, ValueError, "presence_penalty=1e+300 does not fit fp32"),
        ({"frequency_penalty": -1e39}, ValueError, "frequency_penalty=-1e+39 does not fit fp32"),
        ({"repetition_penalty": 10**40}, ValueError, f"repetition_penalty={10**40} does not fit fp32"),
    ],
    ids=str,
)  # fmt: skip
def test_errors(kwargs: dict[str, Any], error: type[Exception], words_: str) -> None:
    logits = torch.zeros(2, 30)
    fk.fused.sample(logits, seeds=0)  # what a call is compared with
    with pytest.raises(error) as caught:
        fk.fused.sample(logits, **{"seeds": 0} | kwargs)
    assert words_ in str(caught.value)


@pytest.mark.parametrize(
    ("logits", "error", "words_"),
    [
        ([[1.0]], TypeError, "logits must be a torch.Tensor, got list"),
        (torch.zeros(3), ValueError, "logits has shape (3,); expected (B, V)"),
        (torch.zeros(2, 0), ValueError, "logits has 0 tokens"),
        (torch.zeros(1, 3, dtype=torch.float64), TypeError, "logits.dtype=torch.float64"),
    ],
    ids=["list", "vector", "empty", "fp64"],
)
def test_errors_of_logits(logits: Any, error: type[Exception], words_: str) -> None:
    with pytest.raises(error) as caught:
        fk.fused.sample(logits)
    assert words_ in str(caught.value)
