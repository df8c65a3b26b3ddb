"""Losses that keep a router in balance. Plain torch: they are for training, and small beside the layer."""

from __future__ import annotations

import torch
from torch import Tensor

from flashkernels.fused.rows import check_choice
from flashkernels.moe.reference import scores_of, tokens_used, wide
from flashkernels.moe.route import SCORES, check_ids, check_logits, check_used


def balance_loss(logits: Tensor, ids: Tensor, *, score: str = "softmax", used: Tensor | None = None) -> Tensor:
    """`E * Σ_e f_e * P_e`: f_e is the share of items that expert e got, P_e the mean of its scores (with sigmoid: of
    their share in a token's sum). 1 where all experts are equally loaded; gradients flow through P.

    Args:
        logits: (T, E) of the router; ids: (T, k) of the routing; one outside of 0 <= id < E, such as -1 of a
            token that was not routed, does not count.
        used: as in `route`: tokens past it do not count.

    >>> import torch, flashkernels as fk
    >>> fk.moe.balance_loss(torch.zeros(4, 2), torch.tensor([[0], [1], [0], [1]]))
    tensor(1.)
    """
    check_choice("score", score, SCORES)
    check_logits(logits)
    check_ids(ids, logits.shape[1])
    if ids.shape[0] != logits.shape[0]:
        raise ValueError(f"ids has shape {tuple(ids.shape)}; expected ({logits.shape[0]}, k), a row for each token")
    experts, in_use = logits.shape[1], _in_use(logits, used)[:, None]
    scores = scores_of(torch.where(in_use, wide(logits), 0.0), score == "sigmoid")  # no gradient is 0 * NaN
    if score == "sigmoid":
        total = scores.sum(-1, keepdim=True)
        scores = scores / torch.where(total == 0, 1.0, total)
    scores = torch.where(in_use, scores, 0.0)
    there = in_use & (ids >= 0) & (ids < experts)
    items = torch.where(there, ids, 0).reshape(-1).long()
    counts = scores.new_zeros(experts).scatter_add(0, items, there.reshape(-1).to(scores.dtype))
    tokens = in_use.sum().clamp(min=1)
    return experts * (counts / there.sum().clamp(min=1) * (scores.sum(0) / tokens)).sum()


def z_loss(logits: Tensor, *, used: Tensor | None = None) -> Tensor:
    """The mean of `logsumexp(logits)²`, which keeps logits small (ST-MoE). A token that is -inf everywhere adds 0: its
    experts have no weight.

    >>> import torch, flashkernels as fk
    >>> fk.moe.z_loss(torch.zeros(3, 1))
    tensor(0.)
    """
    check_logits(logits)
    in_use = _in_use(logits, used)
    there = in_use & (logits != -torch.inf).any(-1)
    squares = torch.where(there, torch.where(there[:, None], wide(logits), 0.0).logsumexp(-1).square(), 0.0)
    return squares.sum() / in_use.sum().clamp(min=1)


def _in_use(logits: Tensor, used: Tensor | None) -> Tensor:
    if used is not None:
        check_used(used, logits)
    tokens = logits.shape[0]
    return torch.arange(tokens, device=logits.device) < (tokens if used is None else tokens_used(used, tokens))
