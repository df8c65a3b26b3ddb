"""The mixture of experts as one writes it in torch: top-k, a stable sort, `torch._grouped_mm`, an index_add."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad, silu

from flashkernels.bench.peers import require
from flashkernels.bench.timing import Call
from flashkernels.moe import Plan, Routing
from flashkernels.moe.cases import Case
from flashkernels.moe.problem import RouteProblem


def prepare(case: Case, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    p = case.problem
    if isinstance(p, RouteProblem):
        return Call(lambda: route(args[0], p.k, p.planned))
    require(not p.weights, "has no grouped product of quantised weights")
    x, logits, w_gate_up, w_down = args
    require(x.is_cuda, "torch._grouped_mm needs a GPU")

    def layer() -> torch.Tensor:
        weights, _, plan = route(logits, p.k, True)
        assert plan is not None
        token = plan.permutation // p.k
        gate, up = torch._grouped_mm(x[token], w_gate_up.mT, offs=plan.offsets[1:]).chunk(2, -1)
        y = torch._grouped_mm(silu(gate) * up, w_down.mT, offs=plan.offsets[1:])
        y = y * weights.reshape(-1)[plan.permutation, None].to(y.dtype)
        return torch.zeros_like(x).index_add_(0, token, y)

    return Call(layer)


def route(logits: torch.Tensor, k: int, planned: bool) -> Routing:
    """Softmax over the k best; with a plan that has what a grouped product needs."""
    top, ids = logits.float().topk(k)
    weights = torch.softmax(top, -1)
    if not planned:
        return Routing(weights, ids, None)
    flat = ids.reshape(-1)
    permutation = torch.sort(flat, stable=True).indices
    counts = torch.zeros(logits.shape[1], dtype=torch.int32, device=flat.device)
    counts = counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    offsets = pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    inverse = torch.empty_like(permutation).scatter_(0, permutation, torch.arange(flat.shape[0], device=flat.device))
    none = counts[:0]
    return Routing(weights, ids, Plan(counts, offsets, permutation, inverse.view(ids.shape), none, none, 0))
