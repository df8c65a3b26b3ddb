"""Accepting drafts: whatever the draft, what comes out is distributed as the target's own tokens would be."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import flashkernels as fk
from flashkernels.fused import speculative
from flashkernels.fused.draws import ACCEPT, NEW_SEGMENT, NEW_TOKEN, gumbel, segment_of, uniform, words

from .draws_oracle import assert_distributed
from .test_rows import each_impl, interpreter

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CLOSE = 1e-4
PROBS = torch.zeros(2, 4, 9)


# One sequence at a time, in fp64


def distribution(x: Tensor, logits: bool, temperature: float) -> Tensor:
    if not logits:
        return x.double()
    if temperature < 1e-5:
        return torch.nn.functional.one_hot(x.argmax(), len(x)).double()
    return (x.double() / temperature).softmax(0)


def walk(
    ids: list[int], parents: list[int], target: Tensor, draft: Tensor | None, seed: int, offset: int
) -> tuple[list[int], list[int], Tensor, bool]:
    """Accepted nodes and tokens, what is left of p, and whether some chance was too close to call."""
    chances = uniform(words(torch.tensor([seed]), torch.tensor([offset]), torch.arange(len(ids)), ACCEPT))[0].tolist()
    node, close = -1, False
    nodes: list[int] = []
    tokens: list[int] = []
    while True:
        p, q = target[node + 1].clone(), None
        for i, x in enumerate(ids):
            if parents[i] != node or not 0 <= x < len(p):
                continue
            if draft is None:
                q = torch.nn.functional.one_hot(torch.tensor(x), len(p)).double()
            elif q is None:
                q = draft[i].double()
            close |= abs(chances[i] * q[x] - p[x]) < 1e-5
            if chances[i] * q[x] < p[x]:
                nodes.append(i)
                tokens.append(x)
                node = i
                break
            p = (p - q).clamp(min=0)
            p = p / p.sum() if p.sum() > 0 else p
            q[x] = 0
            q = q / q.sum() if q.sum() > 0 else q
        else:
            return nodes, tokens, p, close


def assert_drawn(token: int, p: Tensor, seed: int, offset: int) -> None:
    seeds, offsets, size = torch.tensor([seed]), torch.tensor([offset]), segment_of(len(p))
    ids = torch.arange(len(p))
    score = p.log() + gumbel(words(seeds, offsets, ids, NEW_TOKEN))[0]
    mass = torch.stack([part.sum() for part in p.split(size)]).log()
    of_segments = mass + gumbel(words(seeds, offsets, torch.arange(len(mass)), NEW_SEGMENT))[0]
    assert of_segments[token // size] >= of_segments.max() - CLOSE
    assert score[token] >= score[ids // size == token // size].max() - CLOSE


def check(draft_ids: Tensor, kwargs: dict[str, Any], impl: str) -> None:
    found = fk.fused.speculative_accept(draft_ids, impl=impl, **kwargs)
    rows, nodes = draft_ids.shape
    logits = "target_logits" in kwargs
    target = kwargs["target_logits" if logits else "target_probs"]
    parents = kwargs.get("parents")
    parents = torch.arange(-1, nodes - 1) if parents is None else parents
    draft, heat, seed = kwargs.get("draft_probs"), kwargs.get("temperature", 1.0), kwargs["seeds"]
    for i in range(rows):
        one = heat[i].item() if isinstance(heat, Tensor) else heat
        distributions = torch.stack([distribution(x, logits, one) for x in target[i]])
        want_nodes, want_tokens, p, close = walk(
            draft_ids[i].tolist(), parents.expand(rows, nodes)[i].tolist(), distributions,
            None if draft is None else draft[i], seed + i, kwargs.get("offsets", 0),
        )  # fmt: skip
        if close:
            continue
        count = int(found.counts[i])
        last = int(found.last[i])
        assert found.nodes[i].tolist() == want_nodes + [-1] * (nodes + 1 - count)
        assert found.ids[i].tolist() == [*want_tokens, last, *[-1] * (nodes - count)]
        if p.sum() > 1e-6:
            assert_drawn(last, p, seed + i, kwargs.get("offsets", 0))


@st.composite
def calls(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...]) -> tuple[Tensor, dict[str, Any]]:
    rows, nodes, width = draw(st.integers(1, 3)), draw(st.integers(0, 5)), draw(st.sampled_from([1, 3, 17, 60]))
    make = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    ids = torch.randint(-1, width, (rows, nodes), generator=make)
    target = torch.randn(rows, nodes + 1, width, generator=make) * draw(st.sampled_from([0.3, 3.0]))
    kwargs: dict[str, Any] = {"seeds": draw(st.integers(-(2**40), 2**40)), "offsets": draw(st.integers(0, 2**40))}
    kind = draw(st.sampled_from(["probs", "logits", "greedy", "mixed"]))
    if kind == "probs":
        kwargs["target_probs"] = target.softmax(-1)
    else:
        kwargs["target_logits"] = target.to(draw(st.sampled_from(dtypes)))
        mixed = torch.tensor([0.0, 0.6, 1.0])[:rows]
        kwargs["temperature"] = {"logits": 0.8, "greedy": 0.0, "mixed": mixed}[kind]
    if draw(st.booleans()):
        kwargs["draft_probs"] = torch.randn(rows, nodes, width, generator=make).softmax(-1)
    if draw(st.booleans()):
        each = [[draw(st.integers(-1, i - 1)) for i in range(nodes)] for _ in range(rows)]
        kwargs["parents"] = torch.tensor(each, dtype=torch.int64).reshape(rows, nodes)
        if "draft_probs" in kwargs:  # siblings share it
            probs = kwargs["draft_probs"]
            for r, tree in enumerate(each):
                for i, parent in enumerate(tree):
                    probs[r, i] = probs[r, tree.index(parent)]
    return ids, kwargs


@settings(max_examples=100)
@given(calls((torch.float16, torch.bfloat16, torch.float32)))
def test_torch(call: tuple[Tensor, dict[str, Any]]) -> None:
    check(*call, "torch")


@interpreter
@settings(max_examples=25)
@given(calls((torch.float16, torch.float32)))
def test_triton(call: tuple[Tensor, dict[str, Any]]) -> None:
    check(*call, "triton")


# Distributions: of the first token, and of the second one where the first is known


def drawn_without_replacement(q: Tensor, rows: int, children: int) -> Tensor:
    return torch.multinomial(q.expand(rows, -1), children)


def rows_of(x: Tensor, rows: int) -> Tensor:
    return x.expand(rows, *x.shape)


ROWS = 10_000


@pytest.mark.parametrize("drafted", [True, False], ids=["drawn", "chosen"])
@pytest.mark.parametrize("alike", [0.0, 1.0], ids=["unlike", "alike"])
def test_chain_keeps_the_distribution(drafted: bool, alike: float) -> None:
    p = (torch.randn(3, 20) * 1.5).softmax(-1)
    q = (alike * p[:2].log() + torch.randn(2, 20) * 0.5).softmax(-1)
    if drafted:
        ids = torch.cat([drawn_without_replacement(x, ROWS, 1) for x in q], 1)
    else:
        ids = torch.tensor([[3, 5]]).expand(ROWS, 2)
    found = fk.fused.speculative_accept(
        ids, target_probs=rows_of(p, ROWS), draft_probs=rows_of(q, ROWS) if drafted else None, seeds=1
    )
    assert_distributed(found.ids[:, 0], p[0])
    for n in (1, 2):
        assert_distributed(found.ids[found.counts >= n, n], p[n])
    if drafted:  # the known share of accepted drafts
        want = torch.minimum(p[0], q[0]).sum().item()
        spread = math.sqrt(want * (1 - want) / ROWS)
        assert abs((found.counts > 0).float().mean().item() - want) < 5 * spread


@pytest.mark.parametrize("drafted", [True, False], ids=["drawn", "chosen"])
def test_tree_keeps_the_distribution(drafted: bool) -> None:
    """Three children of the context; two of the first of them, one of the second."""
    parents = torch.tensor([-1, -1, -1, 0, 0, 1])
    p, q = (torch.randn(7, 12).softmax(-1) for _ in range(2))
    q[1], q[2], q[4] = q[0], q[0], q[3]
    if drafted:
        ids = torch.cat([drawn_without_replacement(q[i], ROWS, n) for i, n in ((0, 3), (3, 2), (5, 1))], 1)
    else:
        ids = torch.tensor([[1, 4, 7, 2, 3, 4]]).expand(ROWS, 6)
    found = fk.fused.speculative_accept(
        ids, target_probs=rows_of(p, ROWS), draft_probs=rows_of(q[:6], ROWS) if drafted else None, parents=parents,
        seeds=1,
    )  # fmt: skip
    assert_distributed(found.ids[:, 0], p[0])
    for node in (0, 1, 2):
        assert_distributed(found.ids[found.nodes[:, 0] == node, 1], p[node + 1])
    for node in (3, 4, 5):
        assert_distributed(found.ids[found.nodes[:, 1] == node, 2], p[node + 1])
    assert torch.equal(found.counts, (found.nodes >= 0).sum(1))


def test_a_draft_drawn_by_the_same_seed_and_offset_keeps_the_distribution() -> None:
    p, q = (torch.randn(20) for _ in range(2))
    seeds = torch.arange(ROWS)
    ids = fk.fused.sample(rows_of(q, ROWS), seeds=seeds).ids[:, None]
    found = fk.fused.speculative_accept(
        ids, target_logits=p.expand(ROWS, 2, 20), draft_probs=q.softmax(0).expand(ROWS, 1, 20), seeds=seeds
    )
    assert_distributed(found.ids[:, 0], p.softmax(0))


# Edges


@each_impl
def test_greedy_is_a_comparison(impl: str) -> None:
    logits = torch.randn(3, 5, 50)
    best = logits.argmax(-1)
    ids = best[:, :4].clone()
    ids[1, 2] = (ids[1, 2] + 1) % 50
    ids[2, 0] = -1
    found = fk.fused.speculative_accept(ids, target_logits=logits, temperature=0.0, impl=impl)
    assert found.counts.tolist() == [4, 2, 0]
    for i, n in enumerate((4, 2, 0)):
        assert found.ids[i].tolist() == [*best[i, : n + 1].tolist(), *[-1] * (4 - n)]
        assert found.last[i] == best[i, n] and found.nodes[i].tolist() == [*range(n), *[-1] * (5 - n)]


@each_impl
@pytest.mark.parametrize("width", [1, 300, 9000])
@pytest.mark.parametrize("shape", ["chain", "tree", "trees"])
def test_greedy_takes_the_first_of_the_largest(shape: str, width: int, impl: str) -> None:
    """Of rows with ties, NaN and infinities, and of several programs; drafts of which some are right and some none."""
    rows, nodes = 6, 7
    logits = torch.randint(0, 4, (rows, nodes + 1, width)).float()
    logits[0, ::2], logits[1, 0], logits[2, :, width // 2] = -torch.inf, torch.nan, torch.inf
    logits[3, :, : width // 2] = torch.nan
    numbers = [[[-math.inf if math.isnan(x) else x for x in row] for row in one] for one in logits.tolist()]
    best = [[row.index(max(row)) for row in one] for one in numbers]
    empty = [[max(row) == -math.inf for row in one] for one in numbers]  # nothing is accepted there
    parents = torch.tensor([[-1, -1, 0, 0, 1, 2, 4], [-1, 0, 1, 1, 1, -1, 5]])[torch.arange(rows) % 2]
    parents = parents if shape == "trees" else parents[0] if shape == "tree" else torch.arange(-1, nodes - 1)
    every = parents.expand(rows, nodes).tolist()
    ids = torch.tensor([[best[b][every[b][i] + 1] for i in range(nodes)] for b in range(rows)])
    ids[2:, 0], ids[3, 2], ids[4, 3] = -1, width, 0
    given = {"target_logits": logits, "parents": None if shape == "chain" else parents, "impl": impl}
    found = fk.fused.speculative_accept(ids, temperature=0.0, **given)
    each = fk.fused.speculative_accept(ids, temperature=torch.zeros(rows), **given)  # which is another kernel
    assert all(torch.equal(a, b) for a, b in zip(found, each, strict=True))
    for b in range(rows):
        node, path = -1, []
        while not empty[b][node + 1]:
            fits = [i for i in range(nodes) if every[b][i] == node and ids[b, i] == best[b][node + 1]]
            if not fits:
                break
            node = fits[0]
            path.append(node)
        tokens = [*ids[b, path].tolist(), best[b][node + 1]]
        assert found.counts[b] == len(path) and found.last[b] == tokens[-1]
        assert found.nodes[b].tolist() == [*path, *[-1] * (nodes + 1 - len(path))]
        assert found.ids[b].tolist() == [*tokens, *[-1] * (nodes + 1 - len(tokens))]


@each_impl
def test_a_draft_like_the_target_is_accepted(impl: str) -> None:
    p = torch.randn(4, 4, 30).softmax(-1)
    ids = torch.stack([torch.multinomial(p[:, t], 1)[:, 0] for t in range(3)], 1)
    found = fk.fused.speculative_accept(ids, target_probs=p, draft_probs=p[:, :3], seeds=0, impl=impl)
    assert found.counts.tolist() == [3] * 4 and torch.equal(found.ids[:, :3], ids)


@each_impl
def test_nothing_to_draw_from(impl: str) -> None:
    nan, inf = torch.nan, torch.inf
    logits = torch.randn(4, 2, 20)
    logits[0], logits[1], logits[2, 0, 1:], logits[3, 0, 4] = nan, -inf, -inf, inf
    ids = torch.tensor([[3], [3], [3], [4]])
    found = fk.fused.speculative_accept(ids, target_logits=logits, seeds=0, impl=impl)
    assert found.counts.tolist() == [0, 0, 0, 1] and found.ids[:3, 0].tolist() == [0, 0, 0]
    assert ((found.last >= 0) & (found.last < 20)).all()
    found = fk.fused.speculative_accept(ids, target_probs=torch.zeros(4, 2, 20), seeds=0, impl=impl)
    assert found.counts.tolist() == [0] * 4 and found.last.tolist() == [0] * 4


@each_impl
def test_a_sequence_is_treated_alike_in_every_batch(impl: str) -> None:
    logits, q = torch.randn(4, 4, 40), torch.randn(4, 3, 40).softmax(-1)
    ids, seeds = torch.randint(0, 40, (4, 3)), torch.arange(4) * 5
    whole = fk.fused.speculative_accept(ids, target_logits=logits, draft_probs=q, seeds=seeds, offsets=3, impl=impl)
    part = slice(2, 3)
    alone = fk.fused.speculative_accept(
        ids[part], target_logits=logits[part], draft_probs=q[part], seeds=seeds[part], offsets=3, impl=impl
    )
    assert all(torch.equal(a[part], b) for a, b in zip(whole, alone, strict=True))


@each_impl
def test_strides_and_no_rows(impl: str) -> None:
    p, q = torch.randn(2, 40, 3).softmax(1).transpose(1, 2), torch.randn(1, 40).softmax(-1).expand(2, 2, 40)
    ids = torch.randint(0, 40, (2, 2)).int().t().contiguous().t()
    found, want = (
        fk.fused.speculative_accept(a, target_probs=b, draft_probs=c, seeds=0, impl=impl)
        for a, b, c in ((ids, p, q), (ids.contiguous(), p.contiguous(), q.contiguous()))
    )
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    none = fk.fused.speculative_accept(torch.zeros(0, 2).long(), target_probs=torch.zeros(0, 3, 9), impl=impl)
    assert [tuple(x.shape) for x in none] == [(0,), (0, 3), (0,), (0, 3)]


@each_impl
@pytest.mark.parametrize("nodes", [0, 1, 3])
@pytest.mark.parametrize("layout", ["stepped", "repeated"])
def test_settings_may_lie_anyhow(layout: str, nodes: int, impl: str) -> None:
    """Numbers that lie between or behind those of the rows are not read."""
    rows, width = 16, 4
    logits = torch.zeros(rows, nodes + 1, width)
    logits[..., 0] = 3.0
    each = {"seeds": torch.arange(2 * rows)[::2]}
    for name, (mine, other) in {"temperature": (1.0, 100.0), "offsets": (5, 77)}.items():
        x = torch.full((4 * rows,), other)
        x[: 2 * rows : 2 if layout == "stepped" else 2 * rows] = mine
        each[name] = x[: 2 * rows : 2] if layout == "stepped" else x[:1].expand(rows)
        assert not each[name].is_contiguous()
    ids, parents = torch.ones(rows, 2 * nodes).long()[:, ::2], torch.arange(-1, 2 * nodes - 1)[: 2 * nodes : 2] // 2
    draft = torch.ones(1, 1, width).div(width).expand(rows, nodes, width)
    found, want = (
        fk.fused.speculative_accept(a, target_logits=logits, parents=b, draft_probs=c, impl=impl, **given)
        for a, b, c, given in (
            (ids, parents, draft, each),
            (ids.clone(), parents.clone(), draft.contiguous(), {name: x.clone() for name, x in each.items()}),
        )
    )
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@each_impl
@pytest.mark.parametrize("equal", [2, 7, 40])
@pytest.mark.parametrize(("number", "heat"), [(torch.inf, 1.0), (90.0, 1.1e-5)], ids=["infinities", "cold"])
def test_equal_large_logits_share_the_probability(number: float, heat: float, equal: int, impl: str) -> None:
    rows = 60
    logits = torch.zeros(rows, 2, 50)
    logits[..., :equal] = number
    found = fk.fused.speculative_accept(
        torch.zeros(rows, 1).long(), target_logits=logits, temperature=heat, seeds=0, impl=impl
    )
    chances = uniform(words(torch.arange(rows), torch.zeros(rows), torch.arange(1), ACCEPT))[:, 0]
    assert torch.equal(found.counts, (chances < 1 / equal).long()) and (found.last < equal).all()


@each_impl
@pytest.mark.parametrize("temperature", [0.0, 1.0, torch.zeros(1)], ids=["greedy", "drawn", "greedy by a tensor"])
def test_parents_of_64_bits_are_not_cut(temperature: float | Tensor, impl: str) -> None:
    """2**32 is not 0, and 2**32 - 1 not -1: nobody's children."""
    logits = torch.full((1, 4, 5), -torch.inf)
    logits[..., 1] = 0.0
    parents = torch.tensor([-1, 2**32, 2**32 - 1])
    for ids, nodes in (([1, 1, 1], [0, -1, -1, -1]), ([0, 1, 1], [-1] * 4)):
        found = fk.fused.speculative_accept(
            torch.tensor([ids]), target_logits=logits, parents=parents, temperature=temperature, seeds=0, impl=impl
        )
        assert found.nodes.tolist() == [nodes]


@each_impl
def test_registered_op(impl: str) -> None:
    tensors = torch.randint(0, 20, (2, 2)), torch.randn(2, 3, 20), torch.rand(2, 2, 20).softmax(-1)
    torch.library.opcheck(
        speculative.accept_op, (*tensors, None, None, torch.arange(2), None, 1.0, 0, 0, True, impl),
    )  # fmt: skip


def test_compile() -> None:
    def step(ids: Tensor, logits: Tensor, seeds: Tensor) -> Tensor:
        return fk.fused.speculative_accept(ids, target_logits=logits * 2, seeds=seeds).ids + 1

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (2, 5):
        tensors = torch.randint(0, 30, (rows, 3)), torch.randn(rows, 4, 30), torch.arange(rows)
        assert torch.equal(compiled(*tensors), step(*tensors))


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({}, ValueError, "one of target_logits and target_probs"),
        ({"target_logits": torch.zeros(2, 3, 9)}, ValueError, "target_logits has shape (2, 3, 9); expected (2, 4, 9)"),
        ({"target_logits": torch.zeros(2, 4)}, ValueError, "target_logits has shape (2, 4); expected (2, 4, V)"),
        ({"target_logits": torch.zeros(2, 4, 9), "temperature": -1.0}, ValueError, "temperature=-1.0"),
        ({"target_probs": PROBS, "temperature": 0.5}, ValueError, "temperature=0.5 is for target_logits"),
        ({"target_probs": PROBS, "draft_probs": torch.zeros(2, 3, 8)}, ValueError, "draft_probs has shape"),
        ({"target_probs": PROBS, "parents": torch.zeros(3)}, TypeError, "parents.dtype=torch.float32"),
        ({"target_probs": PROBS, "parents": torch.zeros(4).int()}, ValueError, "parents has shape (4,)"),
        ({"target_probs": PROBS, "seeds": "a"}, TypeError, "seeds='a' must be a whole number"),
        ({"target_probs": PROBS, "offsets": True}, TypeError, "offsets=True must be a whole number"),
        ({"target_probs": PROBS, "seeds": 2**63}, ValueError, "seeds=9223372036854775808 does not fit 64 bits"),
        ({"target_probs": torch.zeros(2, 4)}, ValueError, "target_probs has shape (2, 4); expected (2, 4, V)"),
        ({"target_logits": PROBS.numpy()}, TypeError, "target_logits must be a torch.Tensor, got ndarray"),
        ({"target_probs": [1]}, TypeError, "target_probs must be a torch.Tensor, got list"),
        ({"target_logits": PROBS, "temperature": 10**400}, ValueError, f"temperature={10**400} does not fit"),
        ({"target_logits": PROBS, "temperature": 1e300}, ValueError, "temperature=1e+300 does not fit fp32"),
        ({"target_logits": PROBS, "impl": ["torch"]}, ValueError, "impl=['torch'] is not one of 'auto', 'triton'"),
    ],
    ids=str,
)  # fmt: skip
def test_errors(kwargs: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        fk.fused.speculative_accept(torch.zeros(2, 3, dtype=torch.int64), **kwargs)
    assert text in str(caught.value)


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("drafted", [True, False], ids=["drawn", "chosen"])
@pytest.mark.parametrize("kind", ["probs", "logits", "greedy"])
@pytest.mark.parametrize("width", [1000, 128_256])
def test_gpu(width: int, kind: str, drafted: bool, tree: bool) -> None:
    """Wide rows, against the `torch` implementation; rounding may decide one of them otherwise."""
    rows, nodes = 32, 6
    target = torch.randn(rows, nodes + 1, width, device="cuda").bfloat16() * 4
    parents = torch.tensor([-1, -1, 0, 0, 1, 3], device="cuda") if tree else None
    ids = torch.multinomial(target[:, 0].float().softmax(-1), nodes)
    kwargs: dict[str, Any] = {"seeds": 3, "parents": parents}
    if kind == "probs":
        kwargs["target_probs"] = target.float().softmax(-1)
    else:
        kwargs |= {"target_logits": target, "temperature": 0.0 if kind == "greedy" else 0.9}
    if drafted:
        kwargs["draft_probs"] = target[:, :1].float().softmax(-1).expand(rows, nodes, width)
    found, want = (fk.fused.speculative_accept(ids, impl=impl, **kwargs) for impl in ("triton", "torch"))
    assert (found.ids != want.ids).any(1).sum() <= 1
    same = (found.ids == want.ids).all(1)
    assert torch.equal(found.nodes[same], want.nodes[same]) and torch.equal(found.counts[same], want.counts[same])


@pytest.mark.gpu
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_gpu_distribution(tree: bool) -> None:
    rows, width = 50_000, 200
    p, q = (torch.randn(3, width, device="cuda") for _ in range(2))
    ids = torch.multinomial(q[0].softmax(0).expand(rows, width), 2)
    if not tree:
        ids[:, 1] = torch.multinomial(q[1].softmax(0).expand(rows, width), 1)[:, 0]
    drafts = torch.stack((q[0], q[0] if tree else q[1])).softmax(-1)
    parents = torch.tensor([-1, -1], device="cuda") if tree else None
    found = fk.fused.speculative_accept(
        ids, target_logits=rows_of(p, rows), draft_probs=rows_of(drafts, rows), parents=parents, seeds=2, impl="triton"
    )
    assert_distributed(found.ids[:, 0], p[0].softmax(0))
    if tree:
        for node in (0, 1):
            assert_distributed(found.ids[found.nodes[:, 0] == node, 1], p[node + 1].softmax(0))
    else:
        for n in (1, 2):
            assert_distributed(found.ids[found.counts >= n, n], p[n].softmax(0))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [4, 700])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_gpu_greedy_on_streams(tree: bool, rows: int) -> None:
    """Exact, on several streams at once; 700 rows need more memory than is kept at zero."""
    nodes, width = 6, 9000
    target = torch.randint(0, 50, (rows, nodes + 1, width), device="cuda").bfloat16()
    target[0], target[1, :, 5] = -torch.inf, torch.inf
    parents = torch.tensor([-1, -1, 0, 0, 1, 3], device="cuda") if tree else None
    ids = target[:, :nodes].float().argmax(-1)
    ids[::3, 2] = -1
    kwargs: dict[str, Any] = {"target_logits": target, "parents": parents, "temperature": 0.0, "seeds": 0}
    want = fk.fused.speculative_accept(ids, impl="torch", **kwargs)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    found: list[Any] = []
    for _ in range(30):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(fk.fused.speculative_accept(ids, impl="triton", **kwargs))
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for one in found for a, b in zip(one, want, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [1.0, 0.0], ids=["drawn", "greedy"])
def test_gpu_graphs(temperature: float) -> None:
    target, q = torch.randn(16, 5, 128_256, device="cuda").bfloat16(), torch.rand(16, 4, 128_256, device="cuda")
    q /= q.sum(-1, keepdim=True)
    ids, offsets = torch.randint(0, 128_256, (16, 4), device="cuda"), torch.zeros(16, dtype=torch.int64, device="cuda")

    def step() -> tuple[Tensor, ...]:
        return fk.fused.speculative_accept(
            ids, target_logits=target, draft_probs=q, seeds=1, offsets=offsets, temperature=temperature
        )

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))
        offsets += 1
        ids.copy_(target[:, :4].argmax(-1))
