"""The layer without gradients: what its parts run is found once for each kind of call, and kept together.

Each part alone looks up what to run by the kinds of its own tensors. But those of a layer follow from its arguments:
one look-up serves all parts (docs/notes/moe.md has what it saves).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _is_any_autocast_enabled as any_autocast
from torch.nn.functional import linear

from flashkernels.fused.rows import DTYPES, gpu_of
from flashkernels.jit.eager import Plans, Run
from flashkernels.moe.combine import Combine, forward as combines
from flashkernels.moe.gemm import ALPHA, LIMIT, Gemm, Tile, forward as products, gemm_problem, rounds_itself
from flashkernels.moe.hopper.route_tiles import HopperRouteTile
from flashkernels.moe.problem import Epilogue
from flashkernels.moe.route import call_of, forward as routings
from flashkernels.moe.rows import Rounding, forward as roundings
from flashkernels.moe.triton.tiles import GemmTile
from flashkernels.moe.weights import ROUNDED


class Tensors(NamedTuple):
    """Of a layer, as its parts take them. x is (T, H), and `shared` what all tokens get. Either there is a router, or
    its routing is given: the weights and the six tensors of a plan."""

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
    weights: Tensor | None
    plan: tuple[Tensor, ...]


UNROUTED = (None,) * 7  # in the place of weights and plan


class Settings(NamedTuple):
    """All else that decides what a layer does."""

    # as `route.call_of` takes them, from k to span
    k: int
    score: str
    renormalise: bool
    groups: int
    top_groups: int
    group_score: str
    scale: float
    span: tuple[int, ...] | None
    # of an `Epilogue`
    activation: str
    interleaved: bool
    alpha: float
    limit: float
    gate_up: tuple[str, int, int]  # format, group, depth
    down: tuple[str, int, int]
    block: int  # rows of the plan's tiles, where the routing is given
    impl: str
    forced: Any = None  # what `use_tile` has put in force

    @property
    def epilogue(self) -> Epilogue:
        return Epilogue(self.activation, self.interleaved, self.alpha, self.limit)


class Inferred(NamedTuple):
    """What a prepared layer returns."""

    out: Tensor
    logits: Tensor | None  # of the router
    routed: tuple[Tensor, ...]  # weights, ids and the plan's tensors, where there is a router
    block: int  # of that plan


class Parts(NamedTuple):
    """What the parts run; where activations stay as they are, or a product rounds them, there is no rounding."""

    block: int
    route: Run | None  # None where the routing is given
    round_x: Run | None
    gate_up: Run
    round_inner: Run | None
    down: Run
    combine: Run


def _plan(tensors: tuple[Any, ...], settings: tuple[Any, ...]) -> Run:
    """Parts are found at the first call: what each of them takes is what those before it have made."""
    s = Settings(*settings)
    check(tensors[0], tensors[1], tensors[2], tensors[8])
    parts: Parts | None = None

    def run(
        x: Tensor, router_weight: Tensor | None, router_bias: Tensor | None, choice_bias: Tensor | None,
        used: Tensor | None, w_gate_up: Tensor, gate_up_scale: Tensor | None, bias_gate_up: Tensor | None,
        w_down: Tensor, down_scale: Tensor | None, bias_down: Tensor | None, shared: Tensor | None,
        weights: Tensor | None, *plan: Tensor,
    ) -> Inferred:  # fmt: skip
        nonlocal parts
        if parts is None:
            found, parts = _first(
                Tensors(
                    x, router_weight, router_bias, choice_bias, used, w_gate_up, gate_up_scale, bias_gate_up, w_down,
                    down_scale, bias_down, shared, weights, plan,
                ), s,
            )  # fmt: skip
            return found
        block, route, round_x, gate_up, round_inner, down, combine = parts
        logits, routed = None, ()
        if route is not None and router_weight is not None:
            logits = router_logits(x, router_weight, router_bias)
            routed = weights, _, *plan = route(logits, choice_bias, used)
        x, scale = round_x(x) if round_x else (x, None)
        y = gate_up(x, w_gate_up, bias_gate_up, None, scale, gate_up_scale, *plan)
        y, scale = round_inner(y) if round_inner else (y, None)
        y = down(y, w_down, bias_down, None, scale, down_scale, *plan)
        return Inferred(combine(y, weights, shared, plan[2], plan[3]), logits, routed, block)

    return run


layers = Plans(_plan)


def check(x: Tensor, router_weight: Tensor | None, router_bias: Tensor | None, w_down: Tensor) -> None:
    """What no part of a layer sees: that the router is one, and that what comes out is as wide as what goes in."""
    hidden = x.shape[-1]
    if w_down.shape[1] != hidden:
        raise ValueError(f"w_down has shape {tuple(w_down.shape)}; expected (experts, {hidden}, inner): x has {hidden}")
    if router_weight is None:
        return
    for name, y in (("router_weight", router_weight), ("router_bias", router_bias)):
        if y is not None and (not isinstance(y, Tensor) or y.dtype not in DTYPES):
            got = getattr(y, "dtype", type(y).__name__)
            raise TypeError(f"{name} must be a tensor of {', '.join(map(str, DTYPES))}, got {got}")
    if router_weight.dim() != 2 or router_weight.shape[1] != hidden:
        raise ValueError(f"router_weight has shape {tuple(router_weight.shape)}; expected (experts, {hidden})")
    if router_bias is not None and router_bias.shape != router_weight.shape[:1]:
        shape = tuple(router_bias.shape)
        raise ValueError(f"router_bias has shape {shape}; expected ({router_weight.shape[0]},), one for each expert")


def _first(t: Tensors, s: Settings) -> tuple[Inferred, Parts]:
    """The same, while the parts are found."""
    logits: Tensor | None = None
    weights, plan, block = t.weights, t.plan, s.block
    routed: tuple[Tensor, ...] = ()
    runs: list[Any] = [None]
    if t.router_weight is not None:
        logits = router_logits(t.x, t.router_weight, t.router_bias)
        wanted = s.forced.block_m if isinstance(s.forced, GemmTile) else None
        tile = s.forced if isinstance(s.forced, HopperRouteTile) else None
        call = call_of(logits, *s[:8], True, wanted, s.impl, tile)
        runs = [routings.find((logits, t.choice_bias, t.used), call)]
        routed = weights, _, *plan = runs[0](logits, t.choice_bias, t.used)
        block = call.block
    y = t.x
    for product, w, bias, w_scale in zip(
        gemm_calls(s, block, DTYPES[t.x.dtype]), (t.w_gate_up, t.w_down), (t.bias_gate_up, t.bias_down),
        (t.gate_up_scale, t.down_scale), strict=True,
    ):  # fmt: skip
        rounding = None
        tensors = (y, w, bias, None, None, w_scale, *plan)
        if product.weights in ROUNDED and not rounds_itself(gemm_problem(tensors, product), gpu_of(y), product):
            impl = "auto" if s.impl == "hopper" else s.impl  # which does not round all
            rounding = roundings.find((y,), Rounding(product.weights, impl))
            y, scale = rounding(y)
            tensors = (y, w, bias, None, scale, w_scale, *plan)
        runs += [rounding, products.find(tensors, product)]
        y = runs[-1](*tensors)
    terms = (y, weights, t.shared, plan[2], plan[3])
    runs.append(combines.find(terms, Combine(DTYPES[t.x.dtype], s.impl, settled=True)))
    return Inferred(runs[-1](*terms), logits, routed, block), Parts(block, *runs)


def gemm_calls(s: Settings, block: int, out: str) -> tuple[Gemm, Gemm]:
    """What the two products ask for. The second may be in parts: the combine adds them up."""
    plain = Epilogue("none", False, ALPHA, LIMIT)
    tile = s.forced if isinstance(s.forced, Tile) else None
    return (
        Gemm(True, *s.epilogue, *s.gate_up, block, out, False, s.impl, tile),
        Gemm(False, *plain, *s.down, block, out, True, s.impl, tile),
    )


def router_logits(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """(T, E), in the wider dtype of x and weight, also under autocast: rounded to 16 bits, other experts are chosen."""
    if any_autocast() and torch.is_autocast_enabled(x.device.type):
        with torch.autocast(x.device.type, enabled=False):
            return router_logits(x, weight, bias)
    if x.dtype == weight.dtype and (bias is None or bias.dtype == x.dtype):
        return linear(x, weight, bias)
    dtype = torch.promote_types(x.dtype, weight.dtype)
    return linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
