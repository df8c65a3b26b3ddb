"""Losses that keep a router in balance. Plain torch: they are for training, and small beside the layer."""

from __future__ import annotations

import torch
from torch import Tensor

from flashkernels.moe.reference import scores_of, wide


def balance_loss(logits: Tensor, ids: Tensor, *, score: str = "softmax", used: Tensor | None = None) -> Tensor:
    """`E * Σ_e f_e * P_e`: f_e is the share of items that expert e got, P_e the mean of its scores (with sigmoid: of
    their share in a token's sum). 1 where all experts are equally loaded; gradients flow through P.

    Args:
        logits: (T, E) of the router; ids: (T, k) of the routing, -1 where a token was not routed.
        used: as in `route`: tokens past it do not count.

    >>> import torch, flashkernels as fk
    >>> fk.moe.balance_loss(torch.zeros(4, 2), torch.tensor([[0], [1], [0], [1]]))
    tensor(1.)
    """
    experts = logits.shape[1]
    scores = scores_of(logits, score == "sigmoid")
    if score == "sigmoid":
        total = scores.sum(-1, keepdim=True)
        scores = scores / torch.where(total == 0, 1.0, total)
    scores = torch.where(_in_use(logits, used)[:, None], scores, 0.0)
    there = ids.reshape(-1) >= 0
    counts = scores.new_zeros(experts).scatter_add(0, ids.reshape(-1).clamp(min=0).long(), there.to(scores.dtype))
    tokens = _in_use(logits, used).sum().clamp(min=1)
    return experts * (counts / there.sum().clamp(min=1) * (scores.sum(0) / tokens)).sum()


def z_loss(logits: Tensor, *, used: Tensor | None = None) -> Tensor:
    """The mean of `logsumexp(logits)²`, which keeps logits small (ST-MoE).

    >>> import torch, flashkernels as fk
    >>> fk.moe.z_loss(torch.zeros(3, 1))
    tensor(0.)
    """
    there = _in_use(logits, used)
    squares = torch.where(there, torch.where(there[:, None], wide(logits), 0.0).logsumexp(-1).square(), 0.0)
    return squares.sum() / there.sum().clamp(min=1)


def _in_use(logits: Tensor, used: Tensor | None) -> Tensor:
    index = torch.arange(logits.shape[0], device=logits.device)
    return index < (logits.shape[0] if used is None else used)
