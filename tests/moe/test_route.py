"""Routing: which experts, which weights, and the tokens regrouped; every implementation against lists and loops."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import flashkernels as fk
from flashkernels.moe.plan import BLOCKS, most_tiles

from . import oracle

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreter = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1 before triton is imported")
each_impl = pytest.mark.parametrize("impl", ["torch", pytest.param("triton", marks=interpreter)])
IMPLS = ["torch", "triton"] if INTERPRETED else ["torch"]

VARIANTS: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "raw softmax": {"renormalise": False},
    "scaled": {"scale": 2.5},
    "sigmoid": {"score": "sigmoid"},
    "raw sigmoid": {"score": "sigmoid", "renormalise": False},
    "deepseek-v3": {"score": "sigmoid", "bias": True, "groups": 4, "top_groups": 2, "scale": 2.5},
    "deepseek-v2": {"groups": 4, "top_groups": 2, "group_score": "max", "renormalise": False},
    "groups without bias": {"groups": 4, "top_groups": 2},
    "bias": {"bias": True},
}


def check(logits: Tensor, k: int, impl: str, **kwargs: Any) -> None:
    """Ids and order are the oracle's; weights err as plain torch does."""
    weights, ids, plan = fk.moe.route(logits, k, impl=impl, **kwargs)
    block = kwargs.pop("block", None)
    want, want_ids = oracle.route(logits, k, **kwargs)
    assert torch.equal(ids.cpu(), want_ids)
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32
    score = torch.sigmoid(logits.float()) if kwargs.get("score") == "sigmoid" else logits.float().softmax(-1)
    plain = score.cpu().gather(1, want_ids.long())
    plain = plain / plain.sum(-1, keepdim=True) if kwargs.get("renormalise", True) else plain
    oracle.assert_close(weights, plain * kwargs.get("scale", 1.0), want, torch.float32, "weights")
    assert plan is not None and block in (None, plan.block)
    check_plan(plan, want_ids.tolist(), logits.shape[1])


def check_plan(plan: fk.moe.Plan, ids: list[list[int]], experts: int, span: tuple[int, int] | None = None) -> None:
    want = oracle.plan(ids, experts, plan.block, span)
    for name, value in want.items():
        found = getattr(plan, name)
        assert found.dtype == torch.int32
        if name == "tiles":  # the rest is -1
            value = value + [-1] * (found.shape[0] - len(value))
        assert found.tolist() == value, name


@each_impl
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tokens", [5, 700], ids=["small", "large"])
def test_variant(variant: str, tokens: int, impl: str) -> None:
    kwargs = dict(VARIANTS[variant])
    if kwargs.get("bias"):
        kwargs["bias"] = torch.randn(16) / 4
    check(torch.randn(tokens, 16), 4, impl, **kwargs)


@each_impl
@pytest.mark.parametrize(
    ("tokens", "experts", "k"),
    [(1, 1, 1), (1, 128, 8), (3, 8, 8), (17, 7, 2), (64, 64, 16), (600, 60, 2), (33, 1024, 3), (300, 129, 4)],
)
def test_size(tokens: int, experts: int, k: int, impl: str) -> None:
    check(torch.randn(tokens, experts), k, impl)


@each_impl
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_ties_go_to_the_lower_id(dtype: torch.dtype, impl: str) -> None:
    logits = torch.randint(-2, 3, (500, 12)).to(dtype) / 2
    logits[0], logits[1], logits[2, ::2] = 0.0, 3.0, -0.0
    check(logits, 3, impl)


def test_bf16_is_chosen_exactly() -> None:
    logits = torch.randn(40, 12).bfloat16()
    check(logits, 3, "torch")


@each_impl
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_minus_infinity_hides_an_expert(score: str, impl: str) -> None:
    logits = torch.randn(6, 8)
    logits[0, 2:], logits[1], logits[2, :7] = -math.inf, -math.inf, -math.inf
    check(logits, 3, impl, score=score)
    weights, ids, _ = fk.moe.route(logits, 3, score=score, impl=impl)
    assert ids[1].tolist() == [0, 1, 2] and weights[1].tolist() == [0, 0, 0]
    assert weights[0, 2] == 0 and ids[0, 2] == 2


@each_impl
def test_nan_is_chosen_and_stays_in_its_token(impl: str) -> None:
    logits = torch.randn(4, 8)
    clean = fk.moe.route(logits, 2, impl=impl)
    logits[1, 5], logits[2] = math.nan, math.nan
    weights, ids, plan = fk.moe.route(logits, 2, impl=impl)
    assert ids[1, 0] == 5 and ids[2].tolist() == [0, 1]
    assert weights[1:3].isnan().all()
    assert torch.equal(weights[[0, 3]], clean.weights[[0, 3]]) and torch.equal(ids[[0, 3]], clean.ids[[0, 3]])
    assert plan is not None
    check_plan(plan, ids.tolist(), 8)
    raw = fk.moe.route(logits, 2, score="sigmoid", renormalise=False, impl=impl).weights
    assert raw[1].isnan().tolist() == [True, False]


@each_impl
def test_infinity(impl: str) -> None:
    logits = torch.randn(2, 8)
    logits[0, 3] = math.inf
    weights, ids, _ = fk.moe.route(logits, 2, impl=impl)
    assert ids[0, 0] == 3 and weights[0].isnan().all() and weights[1].isfinite().all()


@each_impl
def test_experts_outside_the_best_groups_are_never_chosen(impl: str) -> None:
    logits = torch.randn(9, 8)
    logits[:, :4] = -math.inf  # only one of the two groups left has anything to choose
    _, ids, _ = fk.moe.route(logits, 4, groups=4, top_groups=2, impl=impl)
    assert torch.equal(ids, oracle.route(logits, 4, groups=4, top_groups=2)[1])


@each_impl
@pytest.mark.parametrize("tokens", [40, 600], ids=["small", "large"])
@pytest.mark.parametrize("used", [0, 1, 33, 10_000, -5])
def test_only_tokens_in_use_are_routed(used: int, tokens: int, impl: str) -> None:
    logits, count = torch.randn(tokens, 6), torch.tensor([used], dtype=torch.int32)
    weights, ids, plan = fk.moe.route(logits, 2, used=count, impl=impl)
    there = min(max(used, 0), tokens)
    assert (ids[there:] == -1).all() and (weights[there:] == 0).all()
    assert plan is not None
    check_plan(plan, ids.tolist(), 6)
    if there:
        assert torch.equal(ids[:there], oracle.route(logits[:there], 2)[1])


@each_impl
@pytest.mark.parametrize("tokens", [40, 600], ids=["small", "large"])
def test_the_plan_of_a_span_has_only_its_experts(tokens: int, impl: str) -> None:
    logits = torch.randn(tokens, 12)
    _, ids, plan = fk.moe.route(logits, 3, span=(5, 9), impl=impl)
    assert torch.equal(ids, oracle.route(logits, 3)[1])
    assert plan is not None and plan.experts == 4
    check_plan(plan, ids.tolist(), 12, (5, 9))


@each_impl
def test_no_tokens(impl: str) -> None:
    weights, ids, plan = fk.moe.route(torch.randn(0, 8), 2, impl=impl)
    assert weights.shape == ids.shape == (0, 2)
    assert plan is not None and plan.counts.tolist() == [0] * 8 and plan.offsets.tolist() == [0] * 9


@each_impl
def test_without_a_plan(impl: str) -> None:
    logits = torch.randn(30, 8)
    assert fk.moe.route(logits, 2, plan=False, impl=impl).plan is None
    assert torch.equal(fk.moe.route(logits, 2, plan=False, impl=impl).ids, fk.moe.route(logits, 2, impl=impl).ids)


@each_impl
@pytest.mark.parametrize("layout", ["padded", "transposed"])
def test_strides(layout: str, impl: str) -> None:
    logits = torch.randn(50, 8)
    strided = torch.randn(50, 13)[:, 2:10].copy_(logits) if layout == "padded" else logits.T.contiguous().T
    for a, b in zip(fk.moe.route(strided, 2, impl=impl)[:2], fk.moe.route(logits, 2, impl=impl)[:2], strict=True):
        assert torch.equal(a, b)


@each_impl
@pytest.mark.parametrize("layout", ["strided", "expanded"])
def test_strides_of_the_bias(layout: str, impl: str) -> None:
    bias = torch.randn(16)[::2] if layout == "strided" else torch.randn(1).expand(8)
    check(torch.randn(6, 8), 2, impl, bias=bias)


@pytest.mark.parametrize("impl", IMPLS)
@settings(max_examples=12)
@given(data=st.data())
def test_any_ids_make_a_plan(impl: str, data: st.DataObject) -> None:
    """A permutation of the kept items, stable, with counts, offsets and aligned tiles; ids may be out of range."""
    experts = data.draw(st.integers(1, 40), label="experts")
    tokens, k = data.draw(st.integers(0, 60), label="tokens"), data.draw(st.integers(1, 5), label="k")
    wide = data.draw(st.sampled_from([experts, 2, 1]), label="skew")
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 99), label="seed"))
    ids = torch.randint(-2, wide + 2, (tokens, k), generator=random)
    first = data.draw(st.integers(0, experts - 1), label="first")
    last = data.draw(st.integers(first + 1, experts), label="last")
    block = data.draw(st.sampled_from(BLOCKS), label="block")
    plan = fk.moe.regroup(ids, experts, span=(first, last), block=block, impl=impl)
    check_plan(plan, ids.tolist(), experts, (first, last)) if tokens else None
    kept = plan.permutation[plan.permutation >= 0].long()
    assert len(set(kept.tolist())) == len(kept) == int(plan.counts.sum()) == int(plan.offsets[-1])
    sorted_ids = ids.reshape(-1)[kept] - first
    assert (sorted_ids.diff() >= 0).all()
    assert all((kept[sorted_ids == e].diff() > 0).all() for e in range(last - first))
    flat = plan.inverse.reshape(-1)
    assert torch.equal(flat[kept], torch.arange(len(kept), dtype=torch.int32))
    assert int(plan.tile_offsets[-1]) <= plan.tiles.shape[0] == most_tiles(tokens * k, last - first, block)
    for tile in plan.tiles[plan.tiles >= 0].tolist():
        assert plan.counts[tile % 1024] > tile // 1024 * block


@each_impl
@pytest.mark.parametrize("tokens", [3, 900], ids=["small", "large"])
def test_a_token_may_name_an_expert_twice(tokens: int, impl: str) -> None:
    ids = torch.randint(0, 3, (tokens, 4), dtype=torch.int32)
    check_plan(fk.moe.regroup(ids, 3, impl=impl), ids.tolist(), 3)


@each_impl
@pytest.mark.parametrize("tokens", [20, 900], ids=["small", "large"])
def test_regrouping_only_tokens_in_use(tokens: int, impl: str) -> None:
    ids, used = torch.randint(0, 5, (tokens, 2)), torch.tensor([13], dtype=torch.int32)
    plan = fk.moe.regroup(ids, 5, used=used, impl=impl)
    check_plan(plan, [row if t < 13 else [-1, -1] for t, row in enumerate(ids.tolist())], 5)


@each_impl
@pytest.mark.parametrize("tokens", [3, 900], ids=["small", "large"])
@pytest.mark.parametrize("far", [2**32 + 1, -(2**32) + 1, 2**62])
def test_ids_of_64_bits_are_compared_whole(far: int, tokens: int, impl: str) -> None:
    ids = torch.randint(0, 3, (tokens, 2))
    ids[0, 0], ids[-1, 1] = far, far
    check_plan(fk.moe.regroup(ids, 3, impl=impl), ids.tolist(), 3)


@each_impl
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
@pytest.mark.parametrize("used", [-(2**31), 7, 2**31 - 1])
def test_used_of_any_size_and_shape(used: int, shape: tuple[int, ...], impl: str) -> None:
    logits, there = torch.randn(10, 6), torch.full(shape, used, dtype=torch.int32)
    weights, ids, plan = fk.moe.route(logits, 2, used=there, impl=impl)
    rows = min(max(used, 0), 10)
    want = oracle.route(logits, 2)[1]
    want[rows:] = -1
    assert torch.equal(ids, want) and (weights[rows:] == 0).all() and (weights[:rows] > 0).all()
    for found in (plan, fk.moe.regroup(ids, 6, used=there, impl=impl)):
        assert found is not None
        check_plan(found, want.tolist(), 6)


def test_presorted_rows() -> None:
    counts = torch.tensor([3, 0, 40, 1])
    plan = fk.moe.presorted(counts, 50, block=16)
    ids = [[e] for e, n in enumerate(counts.tolist()) for _ in range(n)] + [[-1]] * 6
    check_plan(plan, ids, 4)


@pytest.mark.parametrize(("counts", "kept"), [([2, 3], [2, 2]), ([5, 1, 2], [4, 0, 0]), ([0, 4, 9], [0, 4, 0])])
def test_presorted_rows_that_do_not_fit_are_dropped(counts: list[int], kept: list[int]) -> None:
    for dtype in (torch.int32, torch.int64):
        plan = fk.moe.presorted(torch.tensor(counts, dtype=dtype), 4, block=16)
        check_plan(plan, [[e] for e, n in enumerate(kept) for _ in range(n)], len(kept))


def test_a_schedule_never_needs_more_tiles_than_allowed_for() -> None:
    for block in BLOCKS:
        worst = [1] * 8 + [0] * 8
        assert most_tiles(8, 16, block) >= sum(-(-n // block) for n in worst)
        assert most_tiles(16 + 7 * block, 16, block) >= 16 + 7


# Gradients


def test_gradients_of_the_weights() -> None:
    logits = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    for kwargs in ({}, {"renormalise": False, "scale": 2.0}, {"score": "sigmoid"}):
        assert torch.autograd.gradcheck(lambda x, kw=kwargs: fk.moe.route(x, 3, impl="torch", **kw).weights, (logits,))


@each_impl
def test_gradients_are_those_of_plain_torch(impl: str) -> None:
    logits = torch.randn(20, 8, requires_grad=True)
    used = torch.tensor([15], dtype=torch.int32)
    weights, ids, _ = fk.moe.route(logits, 2, used=used, impl=impl)
    dy = torch.randn(20, 2)
    (found,) = torch.autograd.grad(weights, logits, dy)
    top = logits[:15].softmax(-1).gather(1, ids[:15].long())
    (want,) = torch.autograd.grad(top / top.sum(-1, keepdim=True), logits, dy[:15])
    torch.testing.assert_close(found, want)


@each_impl
@pytest.mark.parametrize("kwargs", [{}, {"renormalise": False}, {"score": "sigmoid"}], ids=str)
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_tokens_not_in_use_have_no_gradient(poison: float, kwargs: dict[str, Any], impl: str) -> None:
    logits = torch.randn(4, 5)
    logits[3] = poison
    logits.requires_grad_()
    used = torch.tensor([3], dtype=torch.int32)
    weights = fk.moe.route(logits, 2, used=used, impl=impl, **kwargs).weights
    dy = torch.randn(4, 2)
    dy[3] = math.nan
    (found,) = torch.autograd.grad(weights, logits, dy)
    assert found[:3].isfinite().all() and (found[3] == 0).all()


# The registered ops


@pytest.mark.parametrize("kwargs", [{}, {"plan": False}], ids=["planned", "plain"])
def test_route_is_a_proper_op(kwargs: dict[str, Any]) -> None:
    call = (None, None, 2, False, True, 1, 1, True, 1.0, 0, 8, 0 if kwargs else 16, "torch")
    torch.library.opcheck(torch.ops.flashkernels.moe_route, (torch.randn(6, 8, requires_grad=True), *call))


def test_regroup_is_a_proper_op() -> None:
    torch.library.opcheck(torch.ops.flashkernels.moe_regroup, (torch.randint(0, 4, (6, 2)), None, 4, 0, 4, 16, "torch"))


def test_compiles_with_dynamic_shapes() -> None:
    compiled = torch.compile(lambda x: fk.moe.route(x, 2, block=16), fullgraph=True, dynamic=True, backend="eager")
    for tokens in (5, 9, 30):
        logits = torch.randn(tokens, 8)
        found, want = compiled(logits), fk.moe.route(logits, 2, block=16)
        assert torch.equal(found.ids, want.ids)
        assert all(torch.equal(a, b) for a, b in zip(found.plan[:6], want.plan[:6], strict=True))


# Bad input


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 9}, "k=9"),
        ({"k": 0}, "k=0"),
        ({"k": True}, "k=True"),
        ({"score": "soft"}, "score='soft'"),
        ({"groups": 3}, "groups=3"),
        ({"groups": 4, "top_groups": 5}, "top_groups=5"),
        ({"groups": 4, "top_groups": 1, "k": 3}, "k=3"),
        ({"block": 48}, "block=48"),
        ({"span": (3, 9)}, r"span=\(3, 9\)"),
        ({"span": 3}, "span=3"),
        ({"span": (0.0, 2)}, r"span=\(0\.0, 2\)"),
        ({"span": (1, 2, 3)}, r"span=\(1, 2, 3\)"),
        ({"scale": math.inf}, "scale=inf"),
        ({"bias": torch.zeros(7)}, r"bias has shape \(7,\)"),
        ({"group_score": "sum"}, "group_score='sum'"),
        ({"impl": "cuda"}, "impl='cuda'"),
    ],
)
def test_bad_values_are_named(change: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"k": 2} | change
    with pytest.raises(ValueError, match=message):
        fk.moe.route(torch.randn(4, 8), **arguments)


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (torch.zeros(4, 8, dtype=torch.int32), "torch.int32"),
        ([[1.0]], "list"),
    ],
)
def test_bad_logits(logits: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        fk.moe.route(logits, 1)


def test_bad_shapes() -> None:
    with pytest.raises(ValueError, match=r"\(4,\)"):
        fk.moe.route(torch.zeros(4), 1)
    with pytest.raises(ValueError, match="1025 experts"):
        fk.moe.route(torch.zeros(4, 1025), 1)
    with pytest.raises(TypeError, match="used must be"):
        fk.moe.route(torch.zeros(4, 8), 1, used=torch.tensor([3]))


def test_ids_out_of_range_are_named_when_asked_for() -> None:
    ids = torch.tensor([[0, 5]])
    assert fk.moe.regroup(ids, 4).inverse.tolist() == [[0, -1]]
    with pytest.raises(ValueError, match="ids has 5"):
        fk.moe.regroup(ids, 4, check=True)
    with pytest.raises(ValueError, match="ids has -3"):
        fk.moe.regroup(torch.tensor([[-3, 1]]), 4, check=True)
    assert fk.moe.regroup(torch.tensor([[-1, 1]]), 4, check=True).counts.tolist() == [0, 1, 0, 0]
    with pytest.raises(ValueError, match="span=2"):
        fk.moe.regroup(ids, 4, span=2)


@pytest.mark.parametrize("used", [-1, 0, 1])
def test_ids_of_tokens_not_in_use_are_not_looked_at(used: int) -> None:
    ids, there = torch.tensor([[0, 1], [99, -7]]), torch.tensor([used], dtype=torch.int32)
    assert fk.moe.regroup(ids, 4, used=there, check=True).offsets[-1] == max(0, 2 * used)
    with pytest.raises(ValueError, match="ids has -7"):
        fk.moe.regroup(ids, 4, used=torch.tensor([2], dtype=torch.int32), check=True)


@each_impl
def test_more_items_than_32_bits_count(impl: str) -> None:
    with pytest.raises(ValueError, match="134217728 tokens with k=16 are 2147483648 items"):
        fk.moe.route(torch.zeros(1, 16).expand(2**27, 16), 16, impl=impl)
    with pytest.raises(ValueError, match="1073741824 tokens with k=2 are 2147483648 items"):
        fk.moe.regroup(torch.zeros(1, 2, dtype=torch.int32).expand(2**30, 2), 4, impl=impl)
    with pytest.raises(ValueError, match="2147483648 items"):
        fk.moe.presorted(torch.tensor([1, 2]), 2**31)


@interpreter
def test_a_refusal_has_its_reason() -> None:
    with pytest.raises(fk.UnsupportedError, match="fp64"):
        fk.moe.route(torch.randn(2, 4, dtype=torch.float64), 1, impl="triton")
