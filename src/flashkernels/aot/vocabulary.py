"""Calls over a vocabulary: tokens that are drawn or accepted, and the loss."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flashkernels.aot.blank import ROWS, Recipe, empty
from flashkernels.dispatch import select
from flashkernels.fused import sampling, speculative
from flashkernels.fused.cross_entropy import IMPLS as LOSS, LinearLoss, Loss as RowLoss
from flashkernels.fused.problem import LossProblem
from flashkernels.fused.rows import row_problem
from flashkernels.hardware import Gpu


@dataclass(frozen=True)
class Sampling:
    """A call of `sample` on logits (batch, vocab). Settings named in `rows` are tensors, the others are numbers.

    It has room for some multiple of top_k: a number up to 16, one up to 32, ..., up to 128 and any other (0 too) take
    kernels of their own. A greedy call takes those of top_k = 1.
    """

    vocab: int
    batch: int
    dtype: str = "bf16"
    top_k: int = 0
    greedy: bool = False  # the temperature is the number 0
    rows: tuple[str, ...] = ()
    seeds: bool = True  # a tensor, or drawn by torch's generator; else a number
    offsets: bool = False  # a tensor
    top_n: int = 0

    def __post_init__(self) -> None:
        _positive(self, "vocab", "batch")
        for name in self.rows:
            if name not in sampling.NAMES:
                raise ValueError(f"rows={self.rows}: {name!r} is not one of {', '.join(sampling.NAMES)}")


@dataclass(frozen=True)
class Accepting:
    """A call of `speculative_accept` on drafts (batch, drafts), int64, with seeds as a tensor. The target is logits of
    this dtype, or probabilities, fp32 as those of the draft are. Up to 15 drafts take one kernel, up to 31 another,
    and so on; multiples of 16, and 1, have theirs."""

    vocab: int
    batch: int
    drafts: int
    dtype: str = "bf16"
    logits: bool = True
    drawn: bool = False  # with draft_probs
    tree: bool = False  # with parents, (drafts,) int64
    heats: bool = False  # the temperature is a tensor

    def __post_init__(self) -> None:
        _positive(self, "vocab", "batch", "drafts")
        if self.drafts > speculative.MOST_NODES:
            raise ValueError(f"drafts={self.drafts} is over {speculative.MOST_NODES}")
        if self.heats and not self.logits:
            raise ValueError("heats=True: a temperature is of logits")


@dataclass(frozen=True)
class Loss:
    """A call of `cross_entropy` on logits (..., vocab), or with `hidden` one of `linear_cross_entropy`."""

    vocab: int
    hidden: int = 0
    dtype: str = "bf16"
    softcap: bool = False
    smoothed: bool = False  # with label_smoothing
    backward: bool = False  # the gradients too

    def __post_init__(self) -> None:
        _positive(self, "vocab")


def _positive(work: object, *names: str) -> None:
    for name in names:
        if getattr(work, name) < 1:
            raise ValueError(f"{name}={getattr(work, name)} must be at least 1")


def sampling_recipes(work: Sampling, gpu: Gpu) -> list[Recipe]:
    """By int32 and by int64 of top_k, where that is a tensor; seeds and offsets are int64."""
    logits, integers = empty(work.batch, work.vocab, dtype=work.dtype), empty(work.batch, dtype=torch.int64)
    problem = replace(row_problem("sample", logits, 1), device="cuda")
    impl = select(sampling.IMPLS, problem, gpu)
    if impl.name != "triton":
        return []
    # With a top_p below 1, the search for what it cuts is launched; what cuts nothing may take a kernel of its own.
    numbers = sampling.Numbers(0.0 if work.greedy else 1.0, work.top_k, 0.9, 0.0, 1.0, 0.0, 0.0, 0, 0)
    every = [numbers, *([] if work.greedy or work.top_k else [numbers._replace(top_p=1.0)])]
    seeds, offsets = (integers if given else None for given in (work.seeds, work.offsets))

    def run(dtype: torch.dtype) -> None:
        kinds = (dtype if name == "top_k" else torch.float32 for name in sampling.NAMES)
        settings = tuple(
            empty(work.batch, dtype=kind) if name in work.rows else None
            for name, kind in zip(sampling.NAMES, kinds, strict=True)
        )
        call = sampling.Sample(work.top_n, sampling.room(numbers, settings, work.top_n), "auto")
        tensors = (logits, None, None, seeds, offsets, *settings)
        planned = impl.load().plan(problem, gpu, tensors, call)
        for one in every:
            planned(one, *tensors)

    return [functools.partial(run, dtype) for dtype in (sampling.INTEGERS if "top_k" in work.rows else (torch.int64,))]


def accepting_recipes(work: Accepting, gpu: Gpu) -> list[Recipe]:
    rows, nodes = work.batch, work.drafts
    integers = empty(rows, dtype=torch.int64)
    target = empty(rows, nodes + 1, work.vocab, dtype=work.dtype if work.logits else "fp32")
    tensors = (
        empty(rows, nodes, dtype=torch.int64), target, empty(rows, nodes, work.vocab) if work.drawn else None,
        empty(nodes, dtype=torch.int64) if work.tree else None, empty(rows) if work.heats else None, integers, None,
    )  # fmt: skip
    problem = replace(row_problem("speculative_accept", target, 1), device="cuda")
    impl = select(speculative.IMPLS, problem, gpu)
    if impl.name != "triton":
        return []
    call = speculative.Accept(work.logits, "auto")

    def run() -> None:
        planned = impl.load().plan(problem, gpu, tensors, call)
        for temperature in (1.0, 0.0) if work.logits and not work.heats else (1.0,):
            planned((temperature, 0, 0), *tensors)

    return [run]


def loss_recipes(work: Loss, gpu: Gpu) -> list[Recipe]:
    problem = LossProblem(ROWS, work.vocab, work.hidden, work.dtype, "cuda", work.backward)
    impl = select(LOSS, problem, gpu)
    if impl.name != "triton":
        return []
    module, targets = impl.load(), empty(ROWS, dtype=torch.int64)
    call = RowLoss(-100, 0.1 if work.smoothed else 0.0, 0.0, 30.0 if work.softcap else 0.0, "auto")
    if not work.hidden:
        logits, each = empty(ROWS, work.vocab, dtype=work.dtype), empty(ROWS)
        given, kept = (logits, targets), (each, logits, targets, each)
        recipes: list[Recipe] = [lambda: module.forward_plan(problem, gpu, given, call)(*given)]
        if work.backward:
            recipes.append(lambda: module.backward_plan(problem, gpu, kept, call)(*kept))
        return recipes
    x, weight = (empty(n, work.hidden, dtype=work.dtype) for n in (ROWS, work.vocab))

    def run(scale: Tensor | None) -> None:
        learns = scale is not None
        tensors = (x, weight, None, targets, scale)
        found = module.linear_plan(problem, gpu, tensors, LinearLoss(call, learns, learns, False, 0))
        _, dx, dweight, _ = found(*tensors)
        if learns:
            module.multiply(dx, scale)
            module.multiply(dweight, scale)

    return [lambda: run(None), *([lambda: run(empty())] if work.backward else [])]
