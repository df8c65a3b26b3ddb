"""The layer without gradients: what its parts run is found once for each kind of call, and kept together.

Each part alone looks up what to run by the kinds of its own tensors. But those of a layer follow from its arguments:
one look-up serves all parts, which takes 39 µs of Python instead of 72 (docs/notes/moe.md).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from flashkernels.fused.rows import DTYPES, signature
from flashkernels.jit.eager import MOST_PLANS, Run
from flashkernels.moe.combine import Combine, forward as combines
from flashkernels.moe.gemm import ALPHA, LIMIT, Gemm, Tile, forward as products
from flashkernels.moe.hopper.route_tiles import HopperRouteTile
from flashkernels.moe.plan import plan_of
from flashkernels.moe.problem import Epilogue
from flashkernels.moe.route import Routing, call_of, forward as routings
from flashkernels.moe.rows import Rounding, forward as roundings
from flashkernels.moe.triton.tiles import GemmTile
from flashkernels.moe.weights import ROUNDED


class Tensors(NamedTuple):
    """Of a layer, as its parts take them. x is (T, H), and `shared` what all tokens get."""

    x: Tensor
    router_weight: Tensor | None
    router_bias: Tensor | None
    choice_bias: Tensor | None
    used: Tensor | None
    w_gate_up: Tensor
    gate_up_scale: Tensor | None
    bias_gate_up: Tensor | None
    w_down: Tensor
    down_scale: Tensor | None
    bias_down: Tensor | None
    shared: Tensor | None


class Settings(NamedTuple):
    """All else that decides what a layer does."""

    # as `route.call_of` takes them, from k to span
    routing: tuple[int, str, bool, int, int, str, float, tuple[int, ...] | None]
    epilogue: Epilogue
    gate_up: tuple[str, int, int]  # format, group, depth
    down: tuple[str, int, int]
    impl: str
    tile: Tile | None  # of the products, and of the routing, where `use_tile` gives one
    route_tile: HopperRouteTile | None


class Parts(NamedTuple):
    """What the parts run; where activations stay as they are, there is no rounding."""

    block: int  # rows of the plan's tiles
    route: Run | None  # None where the routing is given
    round_x: Run | None
    gate_up: Run
    round_inner: Run | None
    down: Run
    combine: Run


_known: dict[Any, Parts] = {}


def infer(t: Tensors, s: Settings, given: Routing | None) -> tuple[Tensor, Tensor | None, Routing]:
    """The output, the router's logits and the routing, unless that is given."""
    kinds = tuple([None if x is None else signature(x) for x in t])
    key = (kinds, s, tuple(map(type, s.routing)), given and _kind(given))  # 1, 1.0 and True are not equally valid
    parts = _known.get(key)
    if parts is None:
        return _first(t, s, given, key)
    logits = None
    if given is None:
        assert parts.route is not None and t.router_weight is not None
        logits = router_logits(t.x, t.router_weight, t.router_bias)
        found = parts.route(logits, t.choice_bias, t.used)
        given = Routing(found[0], found[1], plan_of(found[2:], parts.block))
    assert given.plan is not None
    plan = given.plan[:6]
    x, scale = parts.round_x(t.x) if parts.round_x else (t.x, None)
    y = parts.gate_up(x, t.w_gate_up, t.bias_gate_up, None, scale, t.gate_up_scale, *plan)
    y, scale = parts.round_inner(y) if parts.round_inner else (y, None)
    y = parts.down(y, t.w_down, t.bias_down, None, scale, t.down_scale, *plan)
    return parts.combine(y, given.weights, t.shared, plan[2], plan[3]), logits, given


def _first(t: Tensors, s: Settings, given: Routing | None, key: Any) -> tuple[Tensor, Tensor | None, Routing]:
    """The same, while the parts are found."""
    logits = None
    runs: list[Any] = [None]
    if given is None:
        assert t.router_weight is not None
        logits = router_logits(t.x, t.router_weight, t.router_bias)
        block = s.tile.block_m if isinstance(s.tile, GemmTile) else None
        call = call_of(logits, *s.routing, True, block, s.impl, s.route_tile)
        runs = [routings.find((logits, t.choice_bias, t.used), call)]
        weights, ids, *found = runs[0](logits, t.choice_bias, t.used)
        given = Routing(weights, ids, plan_of(found, call.block))
    plan = given.plan
    assert plan is not None
    y = t.x
    for product, w, bias, w_scale in zip(
        gemm_calls(s, plan.block, DTYPES[t.x.dtype]), (t.w_gate_up, t.w_down), (t.bias_gate_up, t.bias_down),
        (t.gate_up_scale, t.down_scale), strict=True,
    ):  # fmt: skip
        scale, rounding = None, None
        if product.weights in ROUNDED:
            rounding = roundings.find((y,), Rounding(product.weights, s.impl))
            y, scale = rounding(y)
        tensors = (y, w, bias, None, scale, w_scale, *plan[:6])
        runs += [rounding, products.find(tensors, product)]
        y = runs[-1](*tensors)
    terms = (y, given.weights, t.shared, plan.permutation, plan.inverse)
    runs.append(combines.find(terms, Combine(DTYPES[t.x.dtype], s.impl)))
    out = runs[-1](*terms)
    if len(_known) >= MOST_PLANS:
        _known.clear()
    _known[key] = Parts(plan.block, *runs)
    return out, logits, given


def _kind(routing: Routing) -> tuple[Any, ...]:
    """What runs depend on of a routing that is given: sizes, and how its tensors are aligned."""
    plan = routing.plan
    assert plan is not None
    places = 0
    for x in plan[:6]:
        places |= x.data_ptr()
    weights = None if routing.weights is None else signature(routing.weights)
    return weights, plan.counts.shape, plan.inverse.shape, plan.tiles.shape, plan.counts.device, places % 16, plan.block


def gemm_calls(s: Settings, block: int, out: str) -> tuple[Gemm, Gemm]:
    """What the two products ask for. The second may be in parts: the combine adds them up."""
    plain = Epilogue("none", False, ALPHA, LIMIT)
    return (
        Gemm(True, *s.epilogue, *s.gate_up, block, out, False, s.impl, s.tile),
        Gemm(False, *plain, *s.down, block, out, True, s.impl, s.tile),
    )


def router_logits(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """(T, E), in the wider dtype of x and weight."""
    if weight.dim() != 2 or weight.shape[1] != x.shape[1]:
        raise ValueError(f"router_weight has shape {tuple(weight.shape)}; expected (experts, {x.shape[1]})")
    if x.dtype == weight.dtype and (bias is None or bias.dtype == x.dtype):
        return linear(x, weight, bias)
    dtype = torch.promote_types(x.dtype, weight.dtype)
    return linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
