"""Accepting drafted tokens, in a chain or a tree, so that what comes out is distributed as the target would have it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashkernels.dispatch import Impl, check_impl, leaves_the_cpu, serving
from flashkernels.fused.draws import ACCEPT, MOST_TOKENS, NEW_SEGMENT, NEW_TOKEN, draw, first_largest, uniform, words
from flashkernels.fused.rows import RowProblem, gpu_of, needs_triton, row_problem
from flashkernels.fused.sampling import (
    ALLOWED,
    GREEDY_BELOW,
    INTEGERS,
    MOST_FP32,
    MOST_NUMBER,
    check_fp32,
    check_tensor,
    row_or_number,
)
from flashkernels.hardware import Gpu
from flashkernels.jit.eager import Plans, Run

MOST_NODES = 1024

# Best first. "auto" takes the first row that does not reject the problem. `torch` is in this file.
IMPLS = (
    Impl("triton", "flashkernels.fused.triton.speculative", rejects=needs_triton, defers=leaves_the_cpu),
    Impl("torch", "flashkernels.fused.speculative"),
)


class Accepted(NamedTuple):
    """What became of a draft."""

    counts: Tensor  # (B,) int64, accepted drafts
    ids: Tensor  # (B, N + 1) int64: the accepted tokens, one more, and -1
    last: Tensor  # (B,) int64: that one more
    nodes: Tensor  # (B, N + 1) int64: which drafts were accepted, and -1

    @staticmethod
    def empty(draft_ids: Tensor) -> Accepted:
        """To be filled."""
        rows, nodes = draft_ids.shape
        shapes: tuple[tuple[int, ...], ...] = ((rows,), (rows, nodes + 1), (rows,), (rows, nodes + 1))
        return Accepted(*(torch.empty(shape, dtype=torch.int64, device=draft_ids.device) for shape in shapes))


class Accept(NamedTuple):
    """What a call asks for, beside its tensors and numbers."""

    logits: bool  # the target is logits
    impl: str


class Numbers(NamedTuple):
    """What all rows have, where there is no tensor with one for each."""

    temperature: float
    seed: int
    offset: int


def speculative_accept(
    draft_ids: Tensor, *, target_logits: Tensor | None = None, target_probs: Tensor | None = None,
    draft_probs: Tensor | None = None, parents: Tensor | None = None, temperature: float | Tensor = 1.0,
    seeds: int | Tensor | None = None, offsets: int | Tensor = 0, impl: str = "auto",
) -> Accepted:  # fmt: skip
    """Accepts drafted tokens from the first on and adds one of the target's own; the target's distribution is kept.

    A draft x, drawn from q, is accepted with probability min(1, p(x) / q(x)), p being the target's distribution at that
    place. When it is refused, p becomes max(p - q, 0), normalised. In a chain a token is then drawn from that p and
    added; when all are accepted, one from the target's last distribution. So every token is distributed as p, exactly.

    In a tree, the children of the node that was reached last are tried in the order of their index, each against the
    p that the refusals before it left. They must have been drawn from q one after another without replacement: once
    x is refused, q is q without x, normalised. When every child is refused, or there is none, a token is drawn from p.

    Without draft_probs, drafts are taken as chosen in any way that does not depend on the target's tokens to come: q is
    1 at the draft. A refused one then leaves p without x, normalised.

    Args:
        draft_ids: (B, N) int32 or int64. An id out of range, such as -1, is no draft: nothing in it is accepted.
        target_logits: (B, N + 1, V) fp16, bf16 or fp32: row 0 is for the token after the context, row i + 1 for the
            token after draft i. NaN and infinities are as in `sample`.
        target_probs: the same as probabilities, instead of logits: after cuts, for example. NaN counts as 0.
        draft_probs: (B, N, V), of these dtypes: row i is what draft i was drawn from. Siblings have the same; that of
            the first one tried is read. None for drafts that were not drawn.
        parents: (N,) or (B, N) int32 or int64, the index of the draft before each one, lower than its own; -1 after
            the context. None is a chain.
        temperature: of the logits, a number or (B,) fp32; below 1e-5 only the target's largest token is accepted.
        seeds, offsets: as in `sample`; an offset must be new in each call, but may be that of the draft.
        impl: "auto", or the name of the one implementation that must serve.

    Returns:
        counts of accepted drafts; ids, accepted tokens with the added one after them; last, the added token; nodes,
        the indices of accepted drafts. int64, padded with -1. Where rounding leaves nothing of p, the added token is
        drawn from the target's own; where that has nothing either, it is 0.

    >>> import torch, flashkernels as fk
    >>> logits = torch.zeros(1, 3, 5)
    >>> logits[0, 0, 4] = logits[0, 1, 2] = logits[0, 2, 1] = 9.0
    >>> fk.fused.speculative_accept(torch.tensor([[4, 3]]), target_logits=logits, temperature=0.0).ids
    tensor([[ 4,  2, -1]])
    """
    if (target_logits is None) == (target_probs is None):
        raise ValueError("one of target_logits and target_probs must be given, and not both")
    target = target_logits if target_logits is not None else target_probs
    heats, heat = None, 1.0
    if type(temperature) is not float and isinstance(temperature, Tensor):  # which takes 0.1 µs to deny
        heats = temperature
    else:
        heat = _heat(temperature)
    if target_probs is not None and (heats is not None or heat != 1):
        raise ValueError(f"temperature={temperature} is for target_logits; target_probs are taken as they are")
    if seeds is None:
        _check_ids(draft_ids)
        seeds = torch.randint(2**63 - 1, draft_ids.shape[:1], dtype=torch.int64, device=draft_ids.device)
    plain = type(seeds) is int and 0 <= seeds < 2**63
    seed_rows, seed = (None, seeds) if plain else row_or_number("seeds", seeds)
    plain = type(offsets) is int and 0 <= offsets < 2**63
    offset_rows, offset = (None, offsets) if plain else row_or_number("offsets", offsets)
    numbers = (heat, seed, offset)  # as `Numbers` has them
    call = (target_logits is not None, impl)  # as `Accept` has them
    tensors = (draft_ids, target, draft_probs, parents, heats, seed_rows, offset_rows)
    run = _forward.ready(tensors, call)
    if run is not None:
        found: Accepted = run(numbers, *tensors)
        return found
    _check(target_logits is not None, *tensors)  # the same errors as eager
    check_impl(impl, IMPLS)
    return Accepted(*accept_op(*tensors, *numbers, *call))


# --- checks


def _heat(temperature: float) -> float:
    if type(temperature) is not float or not 0 <= temperature <= MOST_FP32:
        check_fp32("temperature", temperature)
        if temperature < 0:
            raise ValueError(f"temperature={temperature} must be at least 0")
    return float(temperature) if temperature >= GREEDY_BELOW else 0.0  # in fp32 it may be no less than that


def _check_ids(draft_ids: Tensor) -> None:
    if not isinstance(draft_ids, Tensor):
        raise TypeError(f"draft_ids must be a torch.Tensor, got {type(draft_ids).__name__}")
    if draft_ids.dtype not in INTEGERS:
        raise TypeError(f"draft_ids.dtype={draft_ids.dtype} is not supported; allowed: torch.int32, torch.int64")
    if draft_ids.dim() != 2 or draft_ids.shape[1] > MOST_NODES:
        raise ValueError(f"draft_ids has shape {tuple(draft_ids.shape)}; expected (B, N) with N up to {MOST_NODES}")


def _check(
    logits: bool, draft_ids: Tensor, target: Any, draft_probs: Tensor | None, parents: Tensor | None,
    heats: Tensor | None, seeds: Tensor | None, offsets: Tensor | None,
) -> None:  # fmt: skip
    _check_ids(draft_ids)
    rows, nodes = draft_ids.shape
    device = draft_ids.device
    name = "target_logits" if logits else "target_probs"
    if not isinstance(target, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(target).__name__}")
    if target.dim() != 3 or not 1 <= target.shape[2] <= MOST_TOKENS:
        expected = f"({rows}, {nodes + 1}, V) with V from 1 to {MOST_TOKENS}"
        raise ValueError(f"{name} has shape {tuple(target.shape)}; expected {expected}")
    width = target.shape[2]
    check_tensor(name, target, (rows, nodes + 1, width), ALLOWED, device, "draft_ids")
    check_tensor("draft_probs", draft_probs, (rows, nodes, width), ALLOWED, device, "draft_ids")
    wide = isinstance(parents, Tensor) and parents.dim() == 2
    check_tensor("parents", parents, (rows, nodes) if wide else (nodes,), INTEGERS, device, "draft_ids")
    check_tensor("temperature", heats, (rows,), (torch.float32,), device, "draft_ids")
    check_tensor("seeds", seeds, (rows,), INTEGERS, device, "draft_ids")
    check_tensor("offsets", offsets, (rows,), INTEGERS, device, "draft_ids")


# --- dispatch


def _plan(tensors: tuple[Any, ...], settings: tuple[Any, ...]) -> Run:
    """What it returns takes the fields of `Numbers` first."""
    target, call = tensors[1], Accept(*settings)
    _check(call.logits, *tensors)
    problem, gpu = row_problem("speculative_accept", target, 1), gpu_of(target)
    return serving(IMPLS, problem, gpu, call.impl).plan(problem, gpu, tensors, call)


_forward = Plans(_plan)


# --- the `torch` implementation


def plan(problem: RowProblem, gpu: Gpu | None, tensors: tuple[Any, ...], call: Accept) -> Run:
    def run(
        numbers: tuple[float, int, int], draft_ids: Tensor, target: Tensor, draft_probs: Tensor | None,
        parents: Tensor | None, heats: Tensor | None, seeds: Tensor | None, offsets: Tensor | None,
    ) -> Accepted:  # fmt: skip
        rows, device, given = draft_ids.shape[0], draft_ids.device, Numbers(*numbers)
        heat = torch.full((rows,), given.temperature, dtype=torch.float32, device=device) if heats is None else heats
        seed = torch.arange(rows, device=device) + given.seed if seeds is None else seeds
        offset = torch.full((rows,), given.offset, device=device) if offsets is None else offsets
        return _accepted(draft_ids.long(), _distributions(target, heat, call), draft_probs, parents, seed, offset)

    return run


def _distributions(target: Tensor, heat: Tensor, call: Accept) -> Tensor:
    """(B, N + 1, V) fp32; all 0 where there is nothing to draw from."""
    x = target.float()
    if not call.logits:
        return torch.where(x > 0, x, 0.0)
    greedy = ~(heat >= GREEDY_BELOW)[:, None, None]
    x = x * (1 / torch.where(greedy, 1.0, heat[:, None, None]))
    x = torch.where(x.isnan(), -torch.inf, x).clamp(max=MOST_NUMBER)
    dead = x.amax(2, keepdim=True) == -torch.inf
    best = first_largest(x.flatten(0, 1)).view(*x.shape[:2], 1)
    one = torch.zeros_like(x).scatter_(2, best, 1.0)
    return torch.where(dead, 0.0, torch.where(greedy, one, torch.where(dead, 0.0, x).softmax(2)))


def _accepted(
    draft_ids: Tensor, target: Tensor, draft: Tensor | None, parents: Tensor | None, seeds: Tensor, offsets: Tensor
) -> Accepted:
    (rows, nodes), width = draft_ids.shape, target.shape[2]
    device = draft_ids.device
    every = torch.arange(rows, device=device)
    before = torch.arange(-1, nodes - 1, device=device) if parents is None else parents
    before = before.expand(rows, nodes)
    chance = uniform(words(seeds, offsets, torch.arange(nodes, device=device), ACCEPT))
    node = torch.full((rows,), -1, device=device)
    p, q = target[:, 0], torch.zeros_like(target[:, 0])
    refused = torch.zeros(rows, dtype=torch.bool, device=device)  # some child of the node
    counts = torch.zeros(rows, dtype=torch.int64, device=device)
    out = Accepted.empty(draft_ids)
    out.ids.fill_(-1)
    out.nodes.fill_(-1)
    for i in range(nodes):
        x = draft_ids[:, i]
        tried = (before[:, i] == node) & (x >= 0) & (x < width)
        x = torch.where(tried, x, 0)
        here = torch.nn.functional.one_hot(x, width).bool()
        if draft is not None:
            first = draft[:, i].float()
            q = torch.where(refused[:, None], q, torch.where(first > 0, first, 0.0))
        else:
            q = here.float()
        at = (every, x)
        taken = tried & (chance[:, i] * q[at] < p[at])
        out.ids[every, counts] = torch.where(taken, x, out.ids[every, counts])
        out.nodes[every, counts] = torch.where(taken, i, out.nodes[every, counts])
        counts = counts + taken
        node = torch.where(taken, i, node)
        p = torch.where((tried & ~taken)[:, None], _normalised((p - q).clamp(min=0)), p)
        p = torch.where(taken[:, None], target[:, i + 1], p)
        q = torch.where(tried[:, None], _normalised(torch.where(here, 0.0, q)), q)
        refused = torch.where(tried, ~taken, refused)
    p = torch.where((p.amax(1) == 0)[:, None], target[every, node + 1], p)
    last = draw(torch.log(p), seeds, offsets, torch.ones_like(refused), (NEW_SEGMENT, NEW_TOKEN))
    last = torch.where(p.amax(1) == 0, 0, last)
    out.ids[every, counts] = last
    return Accepted(counts, out.ids, last, out.nodes)


def _normalised(p: Tensor) -> Tensor:
    total = p.sum(1, keepdim=True)
    return p / torch.where(total > 0, total, 1.0)


# --- the registered op: schema and fake, for torch.compile and torch.export


@torch.library.custom_op("flashkernels::speculative_accept", mutates_args=())
def accept_op(
    draft_ids: Tensor, target: Tensor, draft_probs: Tensor | None, parents: Tensor | None, heats: Tensor | None,
    seeds: Tensor | None, offsets: Tensor | None, temperature: float, seed: int, offset: int, logits: bool, impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    tensors = (draft_ids, target, draft_probs, parents, heats, seeds, offsets)
    return tuple(_forward.find(tensors, (logits, impl))((temperature, seed, offset), *tensors))


@accept_op.register_fake
def _fake(
    draft_ids: Tensor, target: Tensor, draft_probs: Tensor | None, parents: Tensor | None, heats: Tensor | None,
    seeds: Tensor | None, offsets: Tensor | None, temperature: float, seed: int, offset: int, logits: bool, impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    counts, ids, last, nodes = Accepted.empty(draft_ids)
    return counts, ids, last, nodes
