"""Benchmarks of the mixture of experts: what the runner needs to know of routings and layers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from flashkernels import moe
from flashkernels.bench import check, runner, timing
from flashkernels.bench.runner import BenchError as BenchError, Contestant, Subject
from flashkernels.bench.suites import Suite
from flashkernels.hardware import Gpu, detect
from flashkernels.moe.cases import Case, inputs, suite as cases
from flashkernels.moe.problem import RouteProblem
from flashkernels.moe.route import IMPLS
from flashkernels.moe.weights import ROUNDED, Quantised

AUTO = "auto"


def choose(names: str) -> tuple[str, ...]:
    """Our implementations by a comma-separated list of their names; "auto" is a layer whose parts have several."""
    return runner.named(names, [*(impl.name for impl in IMPLS), AUTO])


def ours(case: Case, gpu: Gpu | None, impls: Sequence[str] | None = None) -> list[Contestant]:
    """Our implementations that take part: by default the best one that serves, and of a layer Triton's beside it.

    The Hopper kernels have not all parts of a layer: where they have some, what "auto" takes is `auto`.
    """
    p = case.problem
    routing = p if isinstance(p, RouteProblem) else RouteProblem(p.tokens, p.experts, p.k, p.dtype, p.device)
    able = [impl.name for impl in IMPLS if impl.rejects(routing, gpu) is None]
    best = able[:1]
    if routing is not p and able[0] == "hopper":
        able[0] = AUTO
        best = able[:2]
    if gpu is None:
        best = ["torch"]  # the time of Triton's interpreter says nothing
    names = best if impls is None else [name for name in able if name in impls]
    return [Contestant(name, False, partial(_our_call, impl=name)) for name in names]


def launch_costs(device: str, impls: Sequence[str] | None = None) -> dict[str, float]:
    """CPU microseconds of one eager layer, at a size that costs the device next to nothing."""
    case = next(case for case in cases("layer", device=device, quick=device == "cpu") if "qwen3" in case.name)
    mine = ours(case, detect() if device == "cuda" else None, impls)
    return runner.costs(case, mine, SUBJECT, device, calls=30)


def _our_call(case: Case, args: tuple[Any, ...], kwargs: dict[str, Any], *, impl: str) -> timing.Call:
    p = case.problem
    if isinstance(p, RouteProblem):
        return timing.Call(lambda: moe.route(args[0], p.k, plan=p.planned, impl=impl))
    x, logits = args[:2]
    w_gate_up, w_down = quantised(case, *args[2:])

    def layer() -> Any:
        return moe.layer(x, None, w_gate_up, w_down, routing=moe.route(logits, p.k, impl=impl), impl=impl)

    return timing.Call(layer)


def quantised(case: Case, w_gate_up: Tensor, w_down: Tensor) -> tuple[Tensor | Quantised, Tensor | Quantised]:
    """The weights in the case's format, an expert at a time, as the wide numbers on the way take memory."""
    format = case.problem.weights if not isinstance(case.problem, RouteProblem) else ""
    if not format:
        return w_gate_up, w_down

    def small(w: Tensor) -> Quantised:
        parts = [moe.quantise(w[e : e + 1], format) for e in range(w.shape[0])]
        experts, n, k = w.shape
        return parts[0]._replace(
            data=torch.cat([part.data for part in parts]), scale=torch.cat([part.scale for part in parts]),
            shape=(experts, n, k),
        )  # fmt: skip

    return small(w_gate_up), small(w_down)


# --- what is right


def oracle(case: Case, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """What the case should give, in fp32, expert by expert; of a routing the weight of each expert (T, E)."""
    return _by_expert(case, args, torch.float32)


def plain(case: Case, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The same in the dtype of the inputs; where activations are rounded, our torch implementation, which does so."""
    p = case.problem
    if not isinstance(p, RouteProblem) and p.weights in ROUNDED:
        return result(_our_call(case, args, kwargs, impl="torch").run(), case)
    return _by_expert(case, args, args[0].dtype)


def _by_expert(case: Case, args: tuple[Any, ...], dtype: torch.dtype) -> Tensor:
    p = case.problem
    logits = args[0] if isinstance(p, RouteProblem) else args[1]
    top, ids = logits.float().topk(p.k)  # random logits have no ties
    weights = torch.softmax(top, -1)
    if isinstance(p, RouteProblem):
        return torch.zeros_like(logits).scatter(1, ids, weights)
    x = args[0].to(dtype)
    w_gate_up, w_down = quantised(case, *args[2:])
    out = torch.zeros_like(x, dtype=torch.float32)
    for e in range(p.experts):
        tokens, slots = (ids == e).nonzero(as_tuple=True)
        if tokens.numel():
            gate, up = (x[tokens] @ _one(w_gate_up, e).to(dtype).T).chunk(2, -1)
            y = (silu(gate) * up) @ _one(w_down, e).to(dtype).T
            out.index_add_(0, tokens, y.float() * weights[tokens, slots, None])
    return out.to(dtype)


def _one(w: Tensor | Quantised, e: int) -> Tensor:
    if not isinstance(w, Quantised):
        return w[e]
    _, n, k = w.shape
    return moe.dequantise(w._replace(data=w.data[e : e + 1], scale=w.scale[e : e + 1], shape=(1, n, k)))[0]


def result(found: Any, case: Case) -> Tensor:
    """What is compared: of a layer its output, of a routing the weight of each expert (T, E), read through the plan."""
    p = case.problem
    if isinstance(found, Tensor):
        return found
    weights, ids, plan = found
    if plan is None:
        return torch.zeros(p.tokens, p.experts, device=weights.device).scatter(1, ids.long(), weights)
    item = plan.permutation.long()
    expert = torch.repeat_interleave(torch.arange(p.experts, device=item.device), plan.counts.long())
    dense = torch.zeros(p.tokens, p.experts, device=weights.device)
    dense[item // p.k, expert] = weights.reshape(-1)[item]
    return dense


def error(found: Any, reference: Tensor, case: Case) -> float:
    return check.relative_error(result(found, case), reference)


def params(case: Case, suite: Suite) -> dict[str, Any]:
    return case.params | {"l2": suite.l2}


SUBJECT = Subject(
    inputs=lambda case, device: (inputs(case, device=device), {}), oracle=oracle, plain=plain, error=error,
    params=params,
)  # fmt: skip
run = partial(runner.run, contestants=ours, subject=SUBJECT)
