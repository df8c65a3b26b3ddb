"""The whole layer: router, routing, two grouped GEMMs, and the weighted sum of what the experts say."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C import _is_any_autocast_enabled as any_autocast
from torch.compiler import is_compiling
from torch.nn.functional import linear

from flashkernels.arguments import check_count
from flashkernels.fused import activation as fused
from flashkernels.fused.linear import lowered
from flashkernels.fused.rows import DTYPES, check_choice
from flashkernels.moe import reference
from flashkernels.moe.combine import Combine, combined
from flashkernels.moe.gemm import ALPHA, LIMIT, forced_tile, product
from flashkernels.moe.inference import UNROUTED, Inferred, Settings, check, gemm_calls, layers, router_logits
from flashkernels.moe.plan import Plan, plan_of
from flashkernels.moe.problem import ACTIVATIONS, GATED, Epilogue
from flashkernels.moe.route import Routing, check_used, route
from flashkernels.moe.triton.tiles import GemmTile
from flashkernels.moe.weights import Quantised, check_quantised
from flashkernels.tiling import override

FUSED = {"swiglu": fused.swiglu, "geglu": fused.geglu, "relu2_glu": fused.relu2_glu}


class Layered(NamedTuple):
    """What `layer` returns with `return_routing=True`."""

    out: Tensor
    logits: Tensor | None  # of the router, (T, E); None where the routing was given
    routing: Routing


def layer(
    x: Tensor, router_weight: Tensor | None, w_gate_up: Tensor | Quantised, w_down: Tensor | Quantised, *, k: int = 2,
    activation: str = "swiglu", interleaved: bool = False, alpha: float = ALPHA, limit: float = LIMIT,
    bias_gate_up: Tensor | None = None, bias_down: Tensor | None = None, router_bias: Tensor | None = None,
    score: str = "softmax", renormalise: bool = True, choice_bias: Tensor | None = None, groups: int = 1,
    top_groups: int = 1, group_score: str = "top2", scale: float = 1.0, shared: tuple[Tensor, Tensor] | None = None,
    shared_gate: Tensor | None = None, used: Tensor | None = None, span: tuple[int, int] | None = None,
    routing: Routing | None = None, return_routing: bool = False, impl: str = "auto",
) -> Tensor | Layered:  # fmt: skip
    """`out[t] = Σ_j weights[t, j] * w_down[e_j] @ f(w_gate_up[e_j] @ x[t])`, over the k experts e_j of token t.

    Args:
        x: (..., H) tokens, fp16, bf16 or fp32.
        router_weight: (E, H), with `router_bias` (E,) or None; logits are `x @ router_weight.T + router_bias`, in the
            wider dtype of the two.
        w_gate_up: (E, 2 I, H), the gate's rows first, or with `interleaved=True` gate and up alternating; (E, I, H) for
            an `activation` that is not gated. torch's Linear orientation, or `fk.moe.quantise` of such.
        w_down: (E, H, I), or quantised.
        activation, alpha, limit: as in `grouped_gemm`.
        bias_gate_up, bias_down: (E, 2 I) and (E, H), or None.
        k, score, renormalise, groups, top_groups, group_score, scale, used: as in `route`; `choice_bias` is its `bias`.
        shared: (gate_up (2 I', H), down (H, I')) of experts that see every token, side by side, or None; their sum is
            multiplied by `sigmoid(x @ shared_gate)` where there is a shared_gate (H,).
        span: (first, last): w_gate_up and w_down have only these experts, and the result is their share of the sum, for
            an all-reduce to complete; the shared experts are in the share of first = 0.
        routing: weights, ids and plan from elsewhere, instead of router_weight, its biases and `used`.
        return_routing: also return the router's logits and the routing, for losses.
        impl: "auto", or the name of the one implementation that must serve every part.

    Returns:
        Like x; tokens that are not in use get 0, plus what the shared experts give. Deterministic bit for bit.
        Gradients flow to everything, but not through quantised weights: what they multiply (x, or what the first of
        two products makes) and the bias beside them must not require any; a router and shared experts may.

    >>> import torch, flashkernels as fk
    >>> x, router = torch.randn(5, 16), torch.randn(4, 16)
    >>> fk.moe.layer(x, router, torch.randn(4, 24, 16), torch.randn(4, 16, 12), k=2).shape
    torch.Size([5, 16])
    """
    check_choice("activation", activation, ACTIVATIONS)
    if not isinstance(x, Tensor) or x.dtype not in DTYPES:
        got = getattr(x, "dtype", type(x).__name__)
        raise TypeError(f"x must be a tensor of {', '.join(map(str, DTYPES))}, got {got}")
    lowers, given_x = any_autocast() and torch.is_autocast_enabled(x.device.type), x
    if isinstance(span, list):
        span = tuple(span)
    if span is not None and (not isinstance(span, tuple) or len(span) != 2):
        raise ValueError(f"span={span!r} is not a range (first, last) of the experts, in whole numbers")
    if lowers:
        x, w_gate_up, w_down = lowered(x, w_gate_up, w_down)
    if (routing is None) == (router_weight is None):
        raise ValueError("a layer takes either router_weight or routing")
    if x.dim() == 0:
        raise ValueError("x has no dimension; expected (..., hidden)")
    tokens = x if x.dim() == 2 else x[None] if x.dim() == 1 else x.flatten(0, -2)
    everyone = None
    if shared is None and shared_gate is not None:
        raise ValueError("shared_gate goes with shared experts, and shared=None")
    if shared is not None and (span is None or span[0] == 0):
        everyone = _shared(tokens, shared, shared_gate, Epilogue(activation, interleaved, alpha, limit))
    up, up_scale, up_format = _stored("w_gate_up", w_gate_up)
    down, down_scale, down_format = _stored("w_down", w_down)
    given: tuple[Any, ...] = UNROUTED
    block = 0
    if routing is not None:
        _check_given(routing, used, span, router_bias, choice_bias)
        assert routing.plan is not None
        given = (routing.weights, *routing.plan[:6])
        block = routing.plan.block
    choices = (k, score, renormalise, groups, top_groups, group_score, scale, span)
    settings = (*choices, activation, interleaved, alpha, limit, up_format, down_format, block, impl)  # `Settings`
    compiling = is_compiling()
    if not lowers and not compiling:
        tensors = (
            tokens, router_weight, router_bias, choice_bias, used, up, up_scale, bias_gate_up, down, down_scale,
            bias_down, everyone, *given,
        )  # fmt: skip
        run = layers.ready(tensors, (*settings, override()))
        if run is not None:
            found: Inferred = run(*tensors)
            out = found.out if x.dim() == 2 else found.out.view(x.shape)
            if not return_routing:
                return out
            if routing is None:
                weights, ids, *parts = found.routed
                routing = Routing(weights, ids, plan_of(parts, found.block))
            return Layered(out, found.logits, routing)
    check(tokens, router_weight, router_bias, down)  # the same errors as eager
    logits: Tensor | None = None
    if routing is None:
        assert router_weight is not None
        seen = given_x.reshape(tokens.shape)  # not lowered
        if used is not None:  # the router's gradient is a sum over all tokens, and 0 * NaN would be in it
            check_used(used, tokens)
            there = torch.arange(len(tokens), device=x.device) < reference.tokens_used(used, len(tokens))
            seen = torch.where(there[:, None], seen, 0.0)
        logits = router_logits(seen, router_weight, router_bias)
        tile = None if compiling else forced_tile()
        routing = route(
            logits, k, score=score, renormalise=renormalise, bias=choice_bias, groups=groups, top_groups=top_groups,
            group_score=group_score, scale=scale, used=used, span=span,
            block=tile.block_m if isinstance(tile, GemmTile) else None, impl=impl,
        )  # fmt: skip
    assert routing.plan is not None
    y = _experts(tokens, w_gate_up, w_down, bias_gate_up, bias_down, routing.plan, Settings(*settings))
    out = combined(y, routing.weights, everyone, routing.plan, Combine(DTYPES[x.dtype], impl)).view(x.shape)
    return Layered(out, logits, routing) if return_routing else out


def _check_given(
    routing: Routing, used: Tensor | None, span: tuple[int, ...] | None, router_bias: Tensor | None,
    choice_bias: Tensor | None,
) -> None:  # fmt: skip
    """A routing that is given, and nothing beside it that only a router would heed."""
    if not isinstance(routing, Routing):
        raise TypeError(f"routing must be a flashkernels.moe.Routing, got {type(routing).__name__}")
    if routing.plan is None:
        raise ValueError("routing has no plan: make it with plan=True")
    for part, x, kind in (("weights", routing.weights, Tensor), ("plan", routing.plan, Plan)):
        if not isinstance(x, kind):
            raise TypeError(f"routing.{part} must be a {kind.__name__}, got {type(x).__name__}")
    for name, y in (("used", used), ("router_bias", router_bias), ("choice_bias", choice_bias)):
        if y is not None:
            raise ValueError(f"{name} belongs to a router, and routing is given: it was made with it, or without")
    experts = routing.plan.experts
    if span is not None and ([*map(type, span)] != [int, int] or span[0] < 0 or span[1] - span[0] != experts):
        raise ValueError(f"span={span!r} is not a range (first, last) of {experts} experts, which the routing has")


def _stored(name: str, w: Tensor | Quantised) -> tuple[Tensor, Tensor | None, tuple[str, int, int]]:
    """Weights, their scales, and format, group and depth."""
    if isinstance(w, Quantised):
        if len(w.shape) != 3:
            check_quantised(name, w)  # which says so; all else the product asks, of each kind of call once
        return w.data, w.scale, (w.format, w.group, w.shape[2])
    if not isinstance(w, Tensor) or w.dim() != 3:
        got = tuple(w.shape) if isinstance(w, Tensor) else type(w).__name__
        raise ValueError(f"{name} must be a tensor (experts, n, k) or Quantised, got {got}")
    return w, None, ("", 0, w.shape[-1])


def _experts(
    x: Tensor, w_gate_up: Tensor | Quantised, w_down: Tensor | Quantised, bias_gate_up: Tensor | None,
    bias_down: Tensor | None, plan: Plan, settings: Settings,
) -> Tensor:  # fmt: skip
    """The two products, by place; without gradients the activation is in the first, and the second may be in parts."""
    learns = torch.is_grad_enabled() and any(
        isinstance(y, Tensor) and y.requires_grad for y in (x, w_gate_up, w_down, bias_gate_up, bias_down)
    )
    plain = not learns or isinstance(w_gate_up, Quantised)
    first, second = gemm_calls(settings, plan.block, DTYPES[x.dtype])
    h = product(x, w_gate_up, plan, bias_gate_up, None, None, first if plain else first._replace(activation="none"))
    if not plain:
        h = activate(h, settings.epilogue)
    return product(h, w_down, plan, bias_down, None, None, second)


def activate(y: Tensor, call: Epilogue) -> Tensor:
    """The activation on its own, with gradients: by our kernels where there is one, else in torch."""
    if call.activation in FUSED and not call.interleaved:
        return FUSED[call.activation](y)
    return reference.activate(reference.wide(y), call).to(y.dtype)


def _shared(x: Tensor, shared: Any, gate: Tensor | None, call: Epilogue) -> Tensor:
    """What the shared experts say of (T, H) tokens."""
    pair = isinstance(shared, (tuple, list)) and len(shared) == 2
    if not pair or not all(isinstance(w, Tensor) and w.dim() == 2 for w in shared):
        raise TypeError(f"shared must be two matrices, (gate_up, down), got {type(shared).__name__}")
    gate_up, down = shared
    hidden, rows = x.shape[1], gate_up.shape[0]
    inner = rows // 2 if call.activation in GATED else rows
    if gate_up.shape[1] != hidden or (call.activation in GATED and rows % 2) or down.shape != (hidden, inner):
        shapes = f"{tuple(gate_up.shape)} and {tuple(down.shape)}"
        wanted = f"(n, {hidden}) and ({hidden}, columns of the activation)"
        raise ValueError(f"shared has shapes {shapes}; expected {wanted}")
    if gate is not None and (not isinstance(gate, Tensor) or gate.shape != (hidden,)):
        got = tuple(gate.shape) if isinstance(gate, Tensor) else type(gate).__name__
        raise ValueError(f"shared_gate must have shape ({hidden},), got {got}")
    if not any_autocast():
        for name, w in (("shared[0]", gate_up), ("shared[1]", down), ("shared_gate", gate)):
            if w is not None and w.dtype != x.dtype:
                raise TypeError(f"{name}.dtype={w.dtype} differs from x.dtype={x.dtype}")
    y = linear(activate(linear(x, gate_up), call), down)
    return y if gate is None else y * torch.sigmoid(x @ gate)[:, None]


class MoE(nn.Module):
    """`layer` as a module, with its parameters, named as in most checkpoints: `router`, `w_gate_up`, `w_down`.

    >>> import torch, flashkernels as fk
    >>> moe = fk.moe.MoE(hidden=16, inner=24, experts=4, k=2, shared_inner=8)
    >>> moe(torch.randn(2, 5, 16)).shape
    torch.Size([2, 5, 16])
    """

    def __init__(
        self, hidden: int, inner: int, experts: int, k: int, *, activation: str = "swiglu", interleaved: bool = False,
        bias: bool = False, score: str = "softmax", renormalise: bool = True, choice_bias: bool = False,
        groups: int = 1, top_groups: int = 1, group_score: str = "top2", scale: float = 1.0, shared_inner: int = 0,
        shared_gate: bool = False, impl: str = "auto", device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        check_choice("activation", activation, ACTIVATIONS)
        for name, size in (("hidden", hidden), ("inner", inner), ("experts", experts), ("k", k)):
            check_count(name, size, 1)
        check_count("shared_inner", shared_inner)
        if shared_gate and not shared_inner:
            raise ValueError("shared_gate=True goes with shared experts, and shared_inner=0")
        self.settings: dict[str, Any] = {
            "k": k, "activation": activation, "interleaved": interleaved, "score": score, "renormalise": renormalise,
            "groups": groups, "top_groups": top_groups, "group_score": group_score, "scale": scale, "impl": impl,
        }  # fmt: skip
        halves = 2 if activation in GATED else 1

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        self.router = parameter(experts, hidden)
        self.w_gate_up = parameter(experts, halves * inner, hidden)
        self.w_down = parameter(experts, hidden, inner)
        self.bias_gate_up = parameter(experts, halves * inner) if bias else None
        self.bias_down = parameter(experts, hidden) if bias else None
        self.shared_gate_up = parameter(halves * shared_inner, hidden) if shared_inner else None
        self.shared_down = parameter(hidden, shared_inner) if shared_inner else None
        self.shared_gate = parameter(hidden) if shared_gate else None
        self.choice_bias: Tensor | None  # moved by a balancing rule, not by gradients
        self.register_buffer("choice_bias", torch.zeros(experts, device=device) if choice_bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As torch's Linear: uniform within 1 / sqrt(columns); biases 0."""
        for name, parameter in self.named_parameters():
            if name.startswith("bias"):
                nn.init.zeros_(parameter)
            else:
                bound = parameter.shape[-1] ** -0.5
                nn.init.uniform_(parameter, -bound, bound)

    def forward(
        self, x: Tensor, *, used: Tensor | None = None, routing: Routing | None = None, return_routing: bool = False
    ) -> Tensor | Layered:
        """x (..., H); arguments and result as in `flashkernels.moe.layer`."""
        up, down = self.shared_gate_up, self.shared_down
        shared = None if up is None or down is None else (up, down)
        return layer(
            x, None if routing else self.router, self.w_gate_up, self.w_down, bias_gate_up=self.bias_gate_up,
            bias_down=self.bias_down, choice_bias=None if routing else self.choice_bias, shared=shared,
            shared_gate=self.shared_gate, used=used, routing=routing, return_routing=return_routing, **self.settings,
        )  # fmt: skip

    def extra_repr(self) -> str:
        experts, hidden, inner = self.w_down.shape
        sizes = f"hidden={hidden}, inner={inner}, experts={experts}"
        return ", ".join([sizes, *(f"{name}={value!r}" for name, value in self.settings.items())])
