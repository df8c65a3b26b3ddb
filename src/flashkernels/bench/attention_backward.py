"""Benchmarks of attention's gradients of q, k and v: `torch.autograd.grad` through a forward call that is not timed.

Rivals are those of the forward whose call autograd can follow, with the same adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import flashkernels as fk
from flashkernels.attention.api import BACKWARD_IMPLS
from flashkernels.attention.cases import Case, inputs
from flashkernels.attention.hopper import backward_tiles
from flashkernels.attention.problem import AttentionProblem, BackwardProblem
from flashkernels.bench import check, runner, timing
from flashkernels.bench.peers import Peer, naive
from flashkernels.bench.results import Row
from flashkernels.bench.runner import BenchError as BenchError, Contestant, Subject
from flashkernels.bench.suites import Suite
from flashkernels.dispatch import verdicts
from flashkernels.hardware import Gpu, detect

WANTED = ("q", "k", "v")
DETERMINISTIC = "hopper-deterministic"  # what it costs that dQ is the same to the bit in every run


def run(
    suite: Suite, peers: Sequence[Peer], *, impls: Sequence[str] | None = None, rounds: int = 5
) -> Iterator[list[Row]]:
    """Measures one case after the other and yields its rows, with the work of a backward."""
    for case in suite.cases:
        if case.problem.dtype == "fp8":
            raise ValueError(f"case {case.name}: FP8 has no gradients")
    gpu = detect() if suite.device == "cuda" else None

    def everyone(case: Case, gpu: Gpu | None, impls: Sequence[str] | None) -> list[Contestant]:
        return [*ours(case, gpu, impls), *theirs(peers)]

    measured = runner.run(suite, (), impls=impls, rounds=rounds, contestants=everyone, subject=SUBJECT)
    for case, rows in zip(suite.cases, measured, strict=True):
        yield [_counted(row, case, gpu) for row in rows]


def choose(names: str) -> tuple[str, ...]:
    """Our implementations by a comma-separated list of their names."""
    return runner.named(names, [*(impl.name for impl in BACKWARD_IMPLS), DETERMINISTIC])


def ours(case: Case, gpu: Gpu | None, impls: Sequence[str] | None = None) -> list[Contestant]:
    """Our implementations that take part: those of `impls` that can serve, or those that "auto" may take.

    Of the latter, on a GPU plain torch takes part only where nothing else serves.
    """
    problem = _backward(case.problem)
    if impls is not None:
        able = [impl.name for impl in BACKWARD_IMPLS if impl.rejects(problem, gpu) is None]
    else:
        able = [verdict.name for verdict in verdicts(BACKWARD_IMPLS, problem, gpu) if verdict.reason is None]
        able = [name for name in able if name != "torch"] or able
    if "hopper" in able and not backward_tiles.choose(problem).own_dq:
        able.insert(1, DETERMINISTIC)
    names = able if impls is None else [name for name in able if name in impls]
    return [Contestant(name, False, partial(_our_call, impl=name)) for name in names]


def theirs(peers: Sequence[Peer]) -> list[Contestant]:
    return [Contestant(peer.name, True, partial(_their_call, peer)) for peer in peers]


def launch_costs(device: str, impls: Sequence[str] | None = None) -> dict[str, float]:
    """CPU microseconds of one eager backward, at a size that costs the device next to nothing."""
    problem = AttentionProblem(batch=1, seq_q=64, seq_k=64, heads=1, kv_heads=1, head_dim=64, causal=True,
                               dtype="fp32" if device == "cpu" else "bf16", device=device)  # fmt: skip
    case = Case("launch", problem)
    return runner.costs(case, ours(case, detect() if device == "cuda" else None, impls), SUBJECT, device)


def _backward(call: AttentionProblem) -> BackwardProblem:
    return BackwardProblem(replace(call, need_lse=True), WANTED)


def _our_call(case: Case, args: tuple[Any, ...], kwargs: dict[str, Any], *, impl: str) -> timing.Call:
    attend = fk.attention_varlen if case.lengths else fk.attention
    name, deterministic = impl.removesuffix("-deterministic"), impl == DETERMINISTIC
    return _gradients(timing.Call(lambda: attend(*args, impl=name, deterministic=deterministic, **kwargs)), args)


def _their_call(peer: Peer, case: Case, args: tuple[Any, ...], kwargs: dict[str, Any]) -> timing.Call:
    return _gradients(peer.prepare(case, args, kwargs), args)


def _gradients(forward: timing.Call, args: tuple[Any, ...]) -> timing.Call:
    """The gradients of q, k and v through one call, whose graph is kept."""
    with forward.scope():
        out = forward.run()
    weight = _weight(out)
    return timing.Call(lambda: torch.autograd.grad(out, args[:3], weight, retain_graph=True), forward.scope)


def _weight(out: Tensor) -> Tensor:
    """The gradient of the output, always the same."""
    random = torch.Generator(out.device).manual_seed(1)
    return torch.randn(out.shape, generator=random, device=out.device, dtype=out.dtype)


def _counted(row: Row, case: Case, gpu: Gpu | None) -> Row:
    """The row with the FLOPs and bytes of a backward in the place of the forward's."""
    if not row.ok:
        return row
    p = case.problem
    # 5 products instead of 2; by the true lengths of a ragged batch
    flops = case.flops() * _backward(p).flops() / max(1, p.flops())
    moved = _backward(p).bytes()
    figures: dict[str, Any] = {"tflops": flops / row.seconds / 1e12, "tbps": moved / row.seconds / 1e12}
    if gpu and p.dtype in gpu.peak:
        compute, memory = flops / gpu.peak[p.dtype], moved / gpu.bandwidth
        figures["roofline"] = max(compute, memory) / row.seconds
        figures["bound"] = "compute" if compute >= memory else "memory"
    return replace(row, **figures)


# --- what is right


def _inputs(case: Case, device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, kwargs = inputs(case, device=device)
    return (*(x.requires_grad_() for x in args[:3]), *args[3:]), kwargs


def _through(dtype: torch.dtype | None, case: Case, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Gradients through the plain formula, part by part, in fp32 or in the dtype of the inputs."""
    dtype = dtype or args[0].dtype
    out = args[0].new_empty(*args[0].shape[:-1], case.problem.head_dim_v)
    weight = _weight(out)
    found = [torch.zeros_like(x, dtype=dtype) for x in args[:3]]
    detached = (*(x.detach() for x in args[:3]), *args[3:])
    for place, parts, piece in check.pieces(case, detached, kwargs):
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in parts]
        made = naive.attention(*leaves, **piece)
        rows = weight[place][None] if case.lengths else weight[place]
        grads = torch.autograd.grad(made, leaves, rows.to(dtype))
        group = case.problem.heads // case.problem.kv_heads
        *where, heads = place
        keys = (*where, slice(heads.start // group, heads.stop // group))
        for whole, at, part in zip(found, (place, keys, keys), grads, strict=True):
            whole[at] = part[0] if case.lengths else part
    return found


def _error(found: Sequence[Tensor], reference: Sequence[Tensor], case: Case) -> float:
    """The worst of the three; NaN when one has a NaN."""
    errors = torch.tensor([check.relative_error(x, want) for x, want in zip(found, reference, strict=True)])
    return float(errors.max())


SUBJECT = Subject(
    inputs=_inputs,
    oracle=partial(_through, torch.float32),
    plain=partial(_through, None),
    error=_error,
    params=runner.attention().params,
)
