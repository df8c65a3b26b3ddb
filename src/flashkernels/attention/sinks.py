"""Of attention sinks, what their gradient is made of. A sink's weight has dP = 0: -P_sink * delta, over all rows."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def unseeing(lse: Tensor, ends: Tensor | None) -> Tensor:
    """Rows without a weight: those that see nothing, and, after the last sequence of a ragged batch (`ends`), nobody's,
    whose log-sum-exp is whatever was in memory.

    >>> unseeing(torch.tensor([[0.5, -math.inf, 3.0]]), torch.tensor([0, 2], dtype=torch.int32))
    tensor([[False,  True,  True]])
    """
    blind = lse == -math.inf
    return blind if ends is None else blind | (torch.arange(lse.shape[-1], device=lse.device) >= ends[-1])


def weights(sinks: Tensor, lse: Tensor, blind: Tensor) -> Tensor:
    """(B, H, S_q) or (H, total_q), as the log-sum-exp."""
    return torch.exp(sinks.float()[:, None] - lse).masked_fill(blind, 0.0)


def gradient(sinks: Tensor, weights: Tensor, delta: Tensor, blind: Tensor) -> Tensor:
    return -(weights * delta).masked_fill(blind, 0.0).sum(-1).sum_to_size(sinks.shape).to(sinks.dtype)
