"""The tensors of one call over a cache, as every implementation receives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from flashkernels.kvcache.cache import PagedCache


class Call(NamedTuple):
    """Queries are (B, T, H, D), or ragged (total, H, D)."""

    q: Tensor
    cache: PagedCache
    tree_mask: Tensor | None = None  # (T, T) or (B, T, T) bool
    alibi_slopes: Tensor | None = None  # (H,) or (B, H)
    sinks: Tensor | None = None  # (H,)
    cu_seqlens_q: Tensor | None = None  # (B + 1,) int32, of ragged queries


# What an implementation's `plan` returns: run(call, softmax_scale, softcap) -> output, log-sum-exp or None.
Run = Callable[[Call, float, float], "tuple[Tensor, Tensor | None]"]


def empty_output(q: Tensor, head_dim_v: int) -> Tensor:
    return q.new_empty((*q.shape[:-1], head_dim_v))


def empty_lse(q: Tensor) -> Tensor:
    """(B, H, T), or (H, total) of a ragged batch, fp32."""
    sizes = (q.shape[1], q.shape[0]) if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1])
    return q.new_empty(sizes, dtype=torch.float32)
