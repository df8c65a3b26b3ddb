"""flash-attn 2.8's way between a padded batch and the rows that are really there. All of it is differentiable."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from flashkernels.arguments import check_count

__all__ = ["index_first_axis", "pad_input", "unpad_input"]


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """The rows `input[indices]`: (rows, ...) and (n,) integers give (n, ...).

    >>> index_first_axis(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([2, 0])).tolist()
    [[3.0], [1.0]]
    """
    return input.index_select(0, indices)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Drop the padding of a batch and say where each row came from.

    Args:
        hidden_states: (batch, seqlen, ...)
        attention_mask: (batch, seqlen) bool or integer, nonzero where a row is in use.
        unused_mask: (batch, seqlen), nonzero where a row is kept but not in use.

    Returns:
        hidden_states: (total, ...), the rows that either mask keeps, in order.
        indices: (total,) int64, their places in the flattened batch; `pad_input` takes them.
        cu_seqlens: (batch + 1,) int32, where each sequence begins and ends in the result.
        max_seqlen_in_batch: the longest sequence, as a Python int (on a GPU this waits for the device).
        used_seqlens_in_batch: (batch,) int32, how many rows of each sequence `attention_mask` keeps.

    >>> x = torch.arange(6.0).view(2, 3, 1)
    >>> rows, indices, cu_seqlens, longest, used = unpad_input(x, torch.tensor([[1, 1, 0], [1, 0, 0]]))
    >>> rows.flatten().tolist(), indices.tolist(), cu_seqlens.tolist(), longest, used.tolist()
    ([0.0, 1.0, 3.0], [0, 1, 3], [0, 2, 3], 2, [2, 1])
    """
    if hidden_states.dim() < 2:
        raise ValueError(f"hidden_states has shape {tuple(hidden_states.shape)}; expected (batch, seqlen, ...)")
    for name, mask in (("attention_mask", attention_mask), ("unused_mask", unused_mask)):
        if mask is not None and mask.shape != hidden_states.shape[:2]:
            raise ValueError(
                f"{name} has shape {tuple(mask.shape)}, not the (batch, seqlen) of hidden_states, "
                f"{tuple(hidden_states.shape[:2])}"
            )
    used = attention_mask.bool()
    kept = used if unused_mask is None else used | unused_mask.bool()
    seqlens = kept.sum(dim=-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = F.pad(seqlens.cumsum(0, dtype=torch.int32), (1, 0))
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, cu_seqlens, max(seqlens.tolist(), default=0), used.sum(dim=-1, dtype=torch.int32)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Put rows back into a padded batch, zero where none goes: the way back from `unpad_input`.

    Args:
        hidden_states: (total, ...)
        indices: (total,) integers, the place of each row in the flattened (batch * seqlen) result.
        batch: batch size of the result.
        seqlen: padded length of the result.

    Returns:
        (batch, seqlen, ...)

    >>> pad_input(torch.tensor([[5.0], [6.0]]), torch.tensor([0, 3]), batch=2, seqlen=2).flatten().tolist()
    [5.0, 0.0, 0.0, 6.0]
    """
    check_count("batch", batch)
    check_count("seqlen", seqlen)
    if indices.dim() != 1 or indices.shape != hidden_states.shape[:1]:
        raise ValueError(
            f"indices has shape {tuple(indices.shape)}, not one place for each of the "
            f"{hidden_states.shape[0]} rows of hidden_states"
        )
    padded = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return padded.index_copy(0, indices, hidden_states).unflatten(0, (batch, seqlen))
