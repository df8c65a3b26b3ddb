"""The mixture of experts in plain torch: the oracle of every test, and the CPU path. No tricks, and no host sync."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from flashkernels.moe.plan import MOST_EXPERTS, Plan, most_tiles, plan_of
from flashkernels.moe.problem import Choice, Epilogue

# --- routing


def wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def scores_of(logits: Tensor, sigmoid: bool) -> Tensor:
    """Scores of every expert; 0 in a row that is -inf everywhere."""
    x = wide(logits)
    if sigmoid:
        return torch.sigmoid(x)
    hidden = (x == -torch.inf).all(-1, keepdim=True)
    return torch.softmax(torch.where(hidden, 0.0, x), -1).masked_fill(hidden, 0.0)


def without_sign(x: Tensor) -> Tensor:
    """NaN alike: on a GPU torch's sort takes one with a sign for the lowest number."""
    return x.masked_fill(x.isnan(), torch.nan)


def best(x: Tensor, k: int) -> Tensor:
    """Where the k largest of each row are, largest first, NaN before all, ties by the lower index."""
    return torch.sort(x, dim=-1, descending=True, stable=True).indices[..., :k]


def tokens_used(used: Tensor, tokens: int) -> Tensor:
    """How many tokens are in use, as a number of 64 bits: times k it may need more than 32."""
    return used.reshape(()).long().clamp(0, tokens)


def choose(logits: Tensor, bias: Tensor | None, used: Tensor | None, call: Choice) -> tuple[Tensor, Tensor]:
    """Weights (T, k) and expert ids (T, k) int32."""
    scores = scores_of(logits, call.sigmoid)
    # Scores grow with logits, so without a bias the logits decide: no rounding of exp can turn two experts around.
    choice = without_sign(wide(logits) if bias is None else scores + bias.to(scores.dtype))
    if call.groups > 1:
        value = without_sign(scores) if bias is None else choice
        grouped = value.unflatten(-1, (call.groups, -1))
        top = grouped.sort(-1, descending=True).values[..., : 2 if call.top2 else 1].sum(-1)  # NaN sorts first
        kept = torch.zeros_like(top, dtype=torch.bool).scatter(-1, best(top, call.top_groups), True)
        kept = kept.repeat_interleave(grouped.shape[-1], -1)
        # Sorting by (kept, choice): a kept expert comes first even if its logit is -inf.
        order = best(choice, choice.shape[-1])
        first = best(kept.gather(-1, order).to(torch.uint8), call.k)
        ids = order.gather(-1, first)
    else:
        ids = best(choice, call.k)
    weights = weights_of(scores, ids, call)
    if used is not None:
        tokens = logits.shape[0]
        there = torch.arange(tokens, device=logits.device)[:, None] < tokens_used(used, tokens)
        weights, ids = weights.masked_fill(~there, 0.0), ids.masked_fill(~there, -1)
    return weights.to(torch.promote_types(logits.dtype, torch.float32)), ids.to(torch.int32)


def weights_of(scores: Tensor, ids: Tensor, call: Choice) -> Tensor:
    """The chosen experts' scores, renormalised or not, times the scale; autograd follows it."""
    picked = scores.gather(-1, ids)
    if call.renormalise:
        total = picked.sum(-1, keepdim=True)
        picked = picked / torch.where(total == 0, 1.0, total)
    return picked * call.scale


def logit_gradients(grad: Tensor, logits: Tensor, ids: Tensor, call: Choice) -> Tensor:
    """Gradients of the logits, from those of the weights. A token that is not in use (ids of -1) has none. Autograd
    follows them where it follows gradients (`create_graph=True`)."""
    there, again = ids >= 0, torch.is_grad_enabled()
    with torch.enable_grad():
        x = torch.where(there[:, :1], wide(logits if again else logits.detach()), 0.0)  # else 0 * NaN
        x = x if x.requires_grad else x.requires_grad_()
        weights = weights_of(scores_of(x, call.sigmoid), ids.clamp(min=0).long(), call)
    (dx,) = torch.autograd.grad(weights, x, torch.where(there, grad.to(weights.dtype), 0.0), create_graph=again)
    return dx.to(logits.dtype)


# --- regrouping


def regroup(ids: Tensor, used: Tensor | None, experts: int, span: tuple[int, int], block: int) -> Plan:
    """The plan of expert ids (T, k) for the experts first <= e < last of `span`."""
    tokens, k = ids.shape
    first, last = span
    rows = torch.arange(tokens * k, device=ids.device)
    local = ids.reshape(-1).long() - first
    dropped = (local < 0) | (local >= last - first)
    if used is not None:
        dropped |= rows >= tokens_used(used, tokens) * k
    local = local.masked_fill(dropped, last - first)
    order = torch.sort(local, stable=True).indices
    counts = torch.zeros(last - first + 1, dtype=torch.long, device=ids.device).scatter_add_(
        0, local, torch.ones_like(local)
    )[:-1]
    inverse = torch.empty_like(rows).scatter_(0, order, rows).masked_fill(dropped, -1)
    permutation = torch.where(rows < counts.sum(), order, -1)
    tiles, tile_offsets = schedule(counts, tokens * k, block)
    found = (counts, _offsets(counts), permutation, inverse.view(tokens, k), tiles, tile_offsets)
    return plan_of((x.to(torch.int32) for x in found), block)


def schedule(counts: Tensor, rows: int, block: int) -> tuple[Tensor, Tensor]:
    """The tiles of experts with so many rows each, and where each expert's tiles begin."""
    begins = _offsets((counts + block - 1) // block)
    index = torch.arange(most_tiles(rows, counts.shape[0], block), device=counts.device)
    expert = torch.searchsorted(begins[1:].contiguous(), index, right=True)
    tile = index - begins[expert.clamp(max=counts.shape[0])]
    return torch.where(index < begins[-1], expert + MOST_EXPERTS * tile, -1), begins


def _offsets(counts: Tensor) -> Tensor:
    return torch.nn.functional.pad(counts.long().cumsum(0), (1, 0))


# --- grouped GEMM


def rows_of(x: Tensor, plan: Plan, gather: bool) -> Tensor:
    """x by places: gathered from tokens, or already there. Places past the last have some other row."""
    return x[(plan.permutation.clamp(min=0) // plan.k).long()] if gather else x


def expert_of(plan: Plan) -> Tensor:
    """The expert of each place (R,), and E for those past the last."""
    places = torch.arange(plan.rows, device=plan.offsets.device)
    return torch.searchsorted(plan.offsets[1:].contiguous(), places.to(torch.int32), right=True)


def multiply(x: Tensor, w: Tensor, plan: Plan, gather: bool) -> Tensor:
    """out[p] = x[p] @ w[expert of p].T in x's wide dtype; 0 past the last place."""
    rows = wide(rows_of(x, plan, gather))
    out = rows.new_zeros(rows.shape[0], w.shape[1])
    for e, mine, all_rows in segments(plan):
        part = rows[mine] @ w[e].to(rows.dtype).T
        out[mine] = part if all_rows is None else torch.where(all_rows, part, out)
    return out


def weight_gradient(grad: Tensor, x: Tensor, plan: Plan, gather: bool) -> Tensor:
    """dw[e] = Σ grad[p]ᵀ x[p] over the places p of expert e; wide (E, N, K)."""
    rows, dy = wide(rows_of(x, plan, gather)), wide(grad)
    out = rows.new_zeros(plan.experts, grad.shape[1], x.shape[1])
    for e, mine, all_rows in segments(plan):
        a, b = dy[mine], rows[mine]
        if all_rows is not None:
            a, b = torch.where(all_rows, a, 0.0), torch.where(all_rows, b, 0.0)
        out[e] = a.T @ b
    return out


def segments(plan: Plan) -> Iterator[tuple[int, slice, Tensor | None]]:
    """Each expert's places: a slice on the CPU. On a GPU its ends are not known here without waiting for the device,
    so there it is all places, and a mask (R, 1)."""
    if plan.offsets.is_cuda:
        expert = expert_of(plan)
        for e in range(plan.experts):
            yield e, slice(None), (expert == e)[:, None]
    else:
        ends = plan.offsets.tolist()
        for e in range(plan.experts):
            if ends[e] < ends[e + 1]:
                yield e, slice(ends[e], ends[e + 1]), None


def activate(y: Tensor, call: Epilogue) -> Tensor:
    """The epilogue's activation on (..., N) wide numbers: N halves where it is gated."""
    if call.activation == "none":
        return y
    if call.activation == "relu2":
        return torch.relu(y).square()
    gate, up = (y[..., 0::2], y[..., 1::2]) if call.interleaved else y.chunk(2, -1)
    return GATED[call.activation](gate, up, call)


def _clamped(gate: Tensor, up: Tensor, call: Epilogue) -> Tensor:
    gate, up = gate.clamp(max=call.limit), up.clamp(-call.limit, call.limit)
    return (up + 1) * gate * torch.sigmoid(call.alpha * gate)


GATED: dict[str, Callable[[Tensor, Tensor, Epilogue], Tensor]] = {
    "swiglu": lambda gate, up, call: torch.nn.functional.silu(gate) * up,
    "geglu": lambda gate, up, call: torch.nn.functional.gelu(gate, approximate="tanh") * up,
    "relu2_glu": lambda gate, up, call: torch.relu(gate).square() * up,
    "clamped_swiglu": _clamped,
}


def grouped_gemm(
    x: Tensor, w: Tensor, bias: Tensor | None, row_weights: Tensor | None, plan: Plan, gather: bool, call: Epilogue
) -> Tensor:
    """As `flashkernels.moe.grouped_gemm`, for weights that are not quantised (or were, and are again wide)."""
    y = multiply(x, w, plan, gather)
    there = plan.permutation >= 0
    if bias is not None:
        y = y + wide(bias)[expert_of(plan).clamp(max=plan.experts - 1)]
    y = activate(y, call)
    if row_weights is not None:
        y = y * wide(row_weights).reshape(-1)[plan.permutation.clamp(min=0).long()][:, None]
    return torch.where(there[:, None], y, 0.0)


def combine(y: Tensor, weights: Tensor | None, inverse: Tensor) -> Tensor:
    """out[t] = Σ_j weights[t, j] * y[inverse[t, j]], over the items that have a place; wide."""
    out = wide(y).new_zeros(inverse.shape[0], y.shape[-1])
    for j in range(inverse.shape[1]):
        rows = wide(y)[inverse[:, j].clamp(min=0).long()]
        if weights is not None:
            rows = rows * wide(weights)[:, j, None]
        out = out + torch.where((inverse[:, j] >= 0)[:, None], rows, 0.0)
    return out
