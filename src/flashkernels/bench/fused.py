"""Benchmarks of the fused ops: what the runner needs to know of rows, sampling and losses.

Beside the rivals stands `copy`: torch's copy of as many bytes as the op has to move, the speed that memory gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flashkernels as fk
from flashkernels.bench import check, runner, timing
from flashkernels.bench.peers import Peer, torch_fused
from flashkernels.bench.results import COPY, Row
from flashkernels.bench.runner import BenchError as BenchError, Contestant, Subject
from flashkernels.bench.suites import Suite
from flashkernels.dispatch import Impl
from flashkernels.fused import activation, norm, rope, sampling, softmax
from flashkernels.fused.cases import LOSSES, Case, inputs, suite as cases, tiny
from flashkernels.fused.cross_entropy import IMPLS as LOSS_IMPLS
from flashkernels.hardware import Gpu, detect

IMPLS: dict[str, tuple[Impl, ...]] = {
    "rms_norm": norm.IMPLS, "layer_norm": norm.IMPLS, "rope": rope.IMPLS, "swiglu": activation.IMPLS,
    "softmax": softmax.IMPLS, "sample": sampling.IMPLS, **dict.fromkeys(LOSSES, LOSS_IMPLS),
}  # fmt: skip
TOKENS = 1024  # of a loss that the oracle has in memory at once
SLACK = 1e-5  # of top-p, in which a sum of probabilities in fp32 may differ from the exact one

Prepare = Callable[[Case, tuple[Any, ...], dict[str, Any]], timing.Call]


def run(
    suite: Suite, peers: Sequence[Peer], *, impls: Sequence[str] | None = None, rounds: int = 5
) -> Iterator[list[Row]]:
    """Measures one case after the other and yields its rows; those of a product's loss have their peak memory."""
    peaks: dict[str, float] = {}

    def everyone(case: Case, gpu: Gpu | None, impls: Sequence[str] | None) -> list[Contestant]:
        peaks.clear()
        rivals = [Contestant(peer.name, True, partial(timed, peer.prepare)) for peer in peers]
        found = [*ours(case, gpu, impls), *rivals]
        if case.depth:  # bound by its products: what matters beside time is memory
            return [replace(one, prepare=partial(_weighed, one, peaks)) for one in found] if gpu else found
        return [*found, Contestant(COPY, True, _copy)]

    for rows in runner.run(suite, (), impls=impls, rounds=rounds, contestants=everyone, subject=SUBJECT):
        yield [replace(row, peak_gb=peaks.get(row.impl)) for row in rows]


def choose(names: str) -> tuple[str, ...]:
    """Our implementations by a comma-separated list of their names."""
    return runner.named(names, [impl.name for impl in norm.IMPLS])  # those of every op


def ours(case: Case, gpu: Gpu | None, impls: Sequence[str] | None = None) -> list[Contestant]:
    """Our implementations that take part: by default the best one that serves."""
    able = [impl.name for impl in IMPLS[case.op] if impl.rejects(case.problem, gpu) is None]
    best = able[:1] if gpu else ["torch"]  # the time of Triton's interpreter says nothing
    names = best if impls is None else [name for name in able if name in impls]
    return [Contestant(name, False, partial(timed, partial(_our_call, impl=name))) for name in names]


def launch_costs(device: str, impls: Sequence[str] | None = None) -> dict[str, float]:
    """CPU microseconds of one eager `fk.rms_norm`, at a size that costs the device next to nothing."""
    case = tiny(cases("rows")[0], device)
    return runner.costs(case, ours(case, detect() if device == "cuda" else None, impls), SUBJECT, device)


def _our_call(case: Case, args: tuple[Any, ...], kwargs: dict[str, Any], *, impl: str) -> timing.Call:
    return timing.Call(partial(OURS[case.op], *args, impl=impl, **kwargs))


def _rms_norm(x: Tensor, weight: Tensor, residual: Tensor | None = None, *, impl: str) -> Any:
    return fk.rms_norm(x, weight, residual=residual, impl=impl)


def _sample(logits: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
    return fk.fused.sample(logits, seeds=0, **settings)[:2]


OURS: dict[str, Callable[..., Any]] = {
    "rms_norm": _rms_norm, "layer_norm": fk.layer_norm, "rope": fk.rope, "swiglu": fk.swiglu, "softmax": fk.softmax,
    "sample": _sample, "cross_entropy": fk.fused.cross_entropy, "linear_cross_entropy": fk.fused.linear_cross_entropy,
}  # fmt: skip


# --- what is timed


def timed(prepare: Prepare, case: Case, args: tuple[Any, ...], kwargs: dict[str, Any]) -> timing.Call:
    """The call that `prepare` makes, with its gradients where the case wants them."""
    if case.gradients == "step":
        return _step(prepare, case, args, kwargs)
    return _backward(prepare, case, args, kwargs) if case.gradients else prepare(case, args, kwargs)


def _step(prepare: Prepare, case: Case, args: tuple[Any, ...], kwargs: dict[str, Any]) -> timing.Call:
    """A loss and its gradients."""
    mine = _leaves(args)
    forward = prepare(case, mine, kwargs)

    def run() -> tuple[Tensor, ...]:
        loss = forward.run()
        return loss.detach(), *torch.autograd.grad(loss, _wanted(mine))

    return timing.Call(run, forward.scope)


def _backward(prepare: Prepare, case: Case, args: tuple[Any, ...], kwargs: dict[str, Any]) -> timing.Call:
    """Gradients through one forward call, whose graph is kept.

    A backward pass runs on the streams of its forward pass and its leaves, so each stream has its own: the one on which
    a CUDA graph is captured has them from the calls that warm it up.
    """
    known: dict[Any, tuple[Any, ...]] = {}
    scope = prepare(case, args, kwargs).scope

    def run() -> tuple[Tensor, ...]:
        stream = torch.cuda.current_stream() if args[0].is_cuda else None
        if stream not in known:
            mine = _leaves(args)
            outs = _parts(prepare(case, mine, kwargs).run())
            known[stream] = outs, _wanted(mine), _weights(case, outs)
        outs, wanted, weights = known[stream]
        return torch.autograd.grad(outs, wanted, weights, retain_graph=True)

    return timing.Call(run, scope)


def _leaves(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copies of the numbers, with gradients: some rivals write over what they are given."""
    return tuple(x.detach().clone().requires_grad_() if x.is_floating_point() else x for x in args)


def _wanted(args: tuple[Any, ...]) -> list[Tensor]:
    return [x for x in args if x.requires_grad]


def _weights(case: Case, outs: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of the outputs, the same for everyone: drawn in the dtype of the case."""
    random = torch.Generator(outs[0].device).manual_seed(1)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[case.dtype]
    return [torch.randn(x.shape, generator=random, device=x.device, dtype=dtype).to(x.dtype) for x in outs]


class Copied(NamedTuple):
    """A copy and what it is of."""

    made: Tensor
    source: Tensor


def _copy(case: Case, args: tuple[Any, ...], kwargs: dict[str, Any]) -> timing.Call:
    """Reads and writes half of the bytes each."""
    source = torch.randint(256, (case.problem.bytes() // 2,), dtype=torch.uint8, device=args[0].device)
    made = torch.empty_like(source)
    return timing.Call(lambda: Copied(made.copy_(source), source))


def _weighed(
    one: Contestant, peaks: dict[str, float], case: Case, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> timing.Call:
    """The contestant's call, after a look at what it allocates beyond its inputs and results."""
    call = one.prepare(case, args, kwargs)
    with call.scope():
        call.run()  # may compile
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        kept = call.run()
        torch.cuda.synchronize()
    most = torch.cuda.max_memory_allocated() - before
    peaks[one.name] = (most - sum(x.numel() * x.element_size() for x in kept)) / 1e9
    return call


# --- what is right


class Tokens(NamedTuple):
    """What may be drawn, and how probable each token is."""

    logprobs: Tensor  # (B, V)
    allowed: Tensor  # (B, V)


def oracle(case: Case, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the case should give: torch's formula on wider numbers; of a sampling what may be drawn."""
    dtype = torch.float64 if case.dtype == "fp32" else torch.float32
    wide = tuple(x.to(dtype) if x.is_floating_point() else x for x in args)
    if case.op == "sample":
        return _tokens(wide[0], **kwargs)
    if case.op in LOSSES:
        return _loss(case, wide)
    return _parts(timed(torch_fused.prepare, case, wide, kwargs).run())


def plain(case: Case, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What plain torch gives in the dtype of the inputs."""
    return timed(torch_fused.prepare, case, args, kwargs).run()


def _loss(case: Case, wide: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """The mean loss and its gradients, some tokens after the others."""
    *sides, targets = _leaves(wide)
    x, *weight = sides
    loss = torch.zeros((), dtype=x.dtype, device=x.device)
    for part in torch.arange(case.rows, device=x.device).split(TOKENS):
        share = torch_fused.formula(case)(x[part], *weight, targets[part]) * (len(part) / case.rows)
        share.backward()
        loss += share.detach()
    return loss, *(side.grad for side in sides)


def _tokens(logits: Tensor, *, temperature: float, top_k: int = 1, top_p: float = 1.0) -> Tokens:
    """Greedy is the best one, at a temperature of 1. Tokens as large as the last that stays may be drawn as well: equal
    ones are equally right."""
    x = logits / (temperature or 1.0)
    best = x.topk(top_k).values
    p = best.softmax(-1)
    least = torch.where(p.cumsum(-1) - p < top_p + SLACK, best, torch.inf).amin(-1, keepdim=True)
    return Tokens(x.log_softmax(-1), x >= least)


def error(found: Any, reference: Any, case: Case) -> float:
    """Of a copy none, or all; of tokens that of their log-probabilities where all may be drawn; else the worst of the
    outputs' errors, NaN when one has a NaN."""
    if isinstance(found, Copied):
        return 0.0 if torch.equal(*found) else torch.inf
    if isinstance(reference, Tokens):
        ids, logprobs = found
        right = reference.allowed.gather(1, ids[:, None]).all()
        return check.relative_error(logprobs, reference.logprobs.gather(1, ids[:, None])[:, 0]) if right else torch.inf
    pairs = zip(_parts(found), reference, strict=True)
    return float(torch.tensor([check.relative_error(x, want) for x, want in pairs]).max())


def _parts(found: Any) -> tuple[Tensor, ...]:
    return (found,) if isinstance(found, Tensor) else tuple(found)


def params(case: Case, suite: Suite) -> dict[str, Any]:
    return case.params | {"l2": suite.l2}


SUBJECT = Subject(
    inputs=lambda case, device: inputs(case, device=device), oracle=oracle, plain=plain, error=error, params=params
)
