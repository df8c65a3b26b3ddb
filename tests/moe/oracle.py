"""What the mixture of experts must compute, written out, and the error it may make. Knows nothing of flashkernels."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

EPS = {torch.float64: 2.0**-52, torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def assert_close(got: Tensor, plain: Tensor, want: Tensor, dtype: torch.dtype, name: str = "out") -> None:
    """`got` errs at most twice as much as plain torch in the same dtype, and a few roundings of the largest number."""
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, want {tuple(want.shape)}"
    got, plain, want = (x.detach().double().cpu() for x in (got, plain, want))
    if not want.numel():
        return
    assert got.isfinite().all(), f"{name}: not finite"
    slack = 4 * EPS[dtype] * want.abs().max().item() + 1e-30
    error, allowed = (got - want).abs(), (plain - want).abs().nan_to_num(0.0)  # plain torch may have no answer
    worst = 2 * allowed.max() + slack
    assert error.max() <= worst, f"{name}: worst error {error.max():.3g} > {worst:.3g}"
    norm = 2 * allowed.norm() + slack * math.sqrt(want.numel())
    assert error.norm() <= norm, f"{name}: norm {error.norm():.3g} > {norm:.3g}"


# --- routing, a token at a time


def scores(row: list[float], score: str) -> list[float]:
    if score == "sigmoid":
        return [math.nan if math.isnan(x) else 1 / (1 + math.exp(-x)) if x > -700 else 0.0 for x in row]
    if any(map(math.isnan, row)) or math.inf in row:
        return [math.nan] * len(row)
    if max(row) == -math.inf:
        return [0.0] * len(row)
    powers = [math.exp(x - max(row)) for x in row]
    return [p / sum(powers) for p in powers]


def order(values: list[float], candidates: list[int]) -> list[int]:
    """Candidates, the largest value first: NaN before all, ties by the lower number."""
    nan = [math.isnan(value) for value in values]
    return sorted(candidates, key=lambda i: (not nan[i], 0.0 if nan[i] else -values[i], i))


def route_row(
    row: list[float], k: int, score: str = "softmax", renormalise: bool = True, bias: list[float] | None = None,
    groups: int = 1, top_groups: int = 1, group_score: str = "top2", scale: float = 1.0,
) -> tuple[list[float], list[int]]:  # fmt: skip
    """Weights and ids of one token."""
    value = scores(row, score)
    choice = row if bias is None else [a + b for a, b in zip(value, bias, strict=True)]
    candidates = list(range(len(row)))
    if groups > 1:
        size = len(row) // groups
        base = value if bias is None else choice
        worth = []
        for g in range(groups):
            best = order(base, list(range(g * size, (g + 1) * size)))[: 2 if group_score == "top2" else 1]
            worth.append(sum(base[i] for i in best))
        kept = order(worth, list(range(groups)))[:top_groups]
        candidates = [i for i in candidates if i // size in kept]
    ids = order(choice, candidates)[:k]
    weights = [value[i] for i in ids]
    if renormalise:
        total = sum(weights)
        weights = [w / total if total != 0 else 0.0 for w in weights]
    return [w * scale for w in weights], ids


def route(logits: Tensor, k: int, bias: Tensor | None = None, **settings: Any) -> tuple[Tensor, Tensor]:
    added = None if bias is None else bias.double().tolist()
    rows = [route_row(row, k, bias=added, **settings) for row in logits.double().cpu().tolist()]
    weights, ids = zip(*rows, strict=True)
    return torch.tensor(weights, dtype=torch.float64), torch.tensor(ids, dtype=torch.int32)


# --- the plan, by lists


def plan(ids: list[list[int]], experts: int, block: int, span: tuple[int, int] | None = None) -> dict[str, list[Any]]:
    first, last = span or (0, experts)
    flat = [e for row in ids for e in row]
    k = len(ids[0]) if ids else 1
    items = [[i for i, e in enumerate(flat) if e == expert] for expert in range(first, last)]
    permutation = [i for group in items for i in group]
    inverse = [-1] * len(flat)
    for place, item in enumerate(permutation):
        inverse[item] = place
    tiles = [e + 1024 * t for e, group in enumerate(items) for t in range(-(-len(group) // block))]
    return {
        "counts": [len(group) for group in items],
        "offsets": [sum(map(len, items[:e])) for e in range(last - first + 1)],
        "permutation": permutation + [-1] * (len(flat) - len(permutation)),
        "inverse": [inverse[t * k : t * k + k] for t in range(len(ids))],
        "tiles": tiles,
        "tile_offsets": [sum(-(-len(group) // block) for group in items[:e]) for e in range(last - first + 1)],
    }


# --- the layer, expert by expert, densely


def activate(y: Tensor, kind: str, interleaved: bool = False, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    if kind == "none":
        return y
    if kind == "relu2":
        return y.clamp(min=0) ** 2
    half = y.shape[-1] // 2
    gate, up = (y[..., ::2], y[..., 1::2]) if interleaved else (y[..., :half], y[..., half:])
    if kind == "clamped_swiglu":
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return (up + 1) * gate / (1 + torch.exp(-alpha * gate))
    if kind == "swiglu":
        return gate / (1 + torch.exp(-gate)) * up
    if kind == "geglu":
        return 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
    return gate.clamp(min=0) ** 2 * up


def experts(
    x: Tensor, weights: Tensor, ids: Tensor, w_gate_up: Tensor, w_down: Tensor, kind: str = "swiglu",
    interleaved: bool = False, bias_gate_up: Tensor | None = None, bias_down: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Every expert on every token, weighted by what the token gave it."""
    out = torch.zeros_like(x)
    for e in range(w_gate_up.shape[0]):
        h = x @ w_gate_up[e].T
        h = h if bias_gate_up is None else h + bias_gate_up[e]
        y = activate(h, kind, interleaved) @ w_down[e].T
        y = y if bias_down is None else y + bias_down[e]
        out = out + (weights.to(x.dtype) * (ids == e)).sum(-1)[:, None] * y
    return out
