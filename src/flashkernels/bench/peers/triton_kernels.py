"""triton_kernels, from Triton's own repository. Written for 3.6.0; its folder comes from the command line.

Its SwiGLU is gpt-oss's, which adds 1 to the linear half. Here that is not wanted, so it is given an activation of the
same cost that computes the same. It takes gate and up interleaved: the weights are reordered before the clock runs.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from flashkernels.bench.peers import require
from flashkernels.bench.timing import Call
from flashkernels.moe import Plan, Routing
from flashkernels.moe.cases import Case
from flashkernels.moe.problem import RouteProblem


def prepare(case: Case, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    p = case.problem
    if isinstance(p, RouteProblem):
        return Call(lambda: route(args[0], p.k, p.planned))
    require(not p.weights, "is not compared on quantised weights: its formats are others")
    rival = importlib.import_module("triton_kernels.matmul_ogs")
    x, logits, w_gate_up, w_down = args
    experts, wide, hidden = w_gate_up.shape
    pairs = w_gate_up.view(experts, 2, wide // 2, hidden).transpose(1, 2).reshape(w_gate_up.shape)
    activation = fused_activation(rival)

    def layer() -> torch.Tensor:
        data, gather, scatter = routing(rival, logits, p.k)
        h = rival.matmul_ogs(x, pairs.mT, None, data, gather_indx=gather, fused_activation=activation)
        return rival.matmul_ogs(h, w_down.mT, None, data, scatter_indx=scatter, gammas=data.gate_scal)

    return Call(layer)


def chosen(logits: torch.Tensor, k: int) -> Any:
    return importlib.import_module("triton_kernels.topk").topk(logits, k, apply_softmax=True)


def route(logits: torch.Tensor, k: int, planned: bool) -> Routing:
    sparse = chosen(logits, k)
    if not planned:
        return Routing(sparse.vals, sparse.indx, None)
    meta = sparse.mask_metadata
    ragged = importlib.import_module("triton_kernels.tensor").make_ragged_tensor_metadata(
        meta.col_sum, meta.row_sorted_indx.shape[0]
    )
    sizes, places = meta.col_sum, meta.col_sorted_indx
    inverse = meta.row_sorted_indx.view(-1, k)
    return Routing(sparse.vals, sparse.indx, Plan(sizes, ragged.slice_offs, places, inverse, sizes, sizes, 0))


def routing(rival: Any, logits: torch.Tensor, k: int) -> tuple[Any, Any, Any]:
    """What its grouped product wants: sizes of the experts, where rows come from, and where they go."""
    sparse = chosen(logits, k)
    meta = sparse.mask_metadata
    ragged = importlib.import_module("triton_kernels.tensor").make_ragged_tensor_metadata(
        meta.col_sum, meta.row_sorted_indx.shape[0]
    )
    gates = sparse.vals.reshape(-1)[meta.col_sorted_indx]
    data = rival.RoutingData(gates, ragged.slice_sizes, logits.shape[1], k, ragged)
    gather = rival.GatherIndx(meta.col_sorted_indx, meta.row_sorted_indx)
    return data, gather, rival.ScatterIndx(meta.row_sorted_indx, meta.col_sorted_indx)


def fused_activation(rival: Any) -> Any:
    """silu(gate) * up on interleaved columns, as an activation of theirs; where it halves the columns is said by the
    activation or, in later versions, by the function's description."""
    from flashkernels.bench.peers.swiglu import swiglu

    try:
        return rival.FusedActivation(rival.FnSpecs("swiglu", swiglu, (), reduction_n=2), ())
    except TypeError:
        return rival.FusedActivation(rival.FnSpecs("swiglu", swiglu, ()), (), 2)
