"""The softmax with the sign of dropout, which flash-attn returns for its tests: the whole matrix, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from flashkernels.attention import dropout
from flashkernels.attention.reference import weights
from flashkernels.dispatch import UnsupportedError

MOST_WEIGHTS = 1 << 26  # 256 MB in fp32, and several such buffers


def signed(
    q: Tensor, k: Tensor, seed: Tensor, dropout_p: float, softmax_scale: float | None, causal: bool,
    window: tuple[int, int], softcap: float, alibi_slopes: Tensor | None,
) -> Tensor:  # fmt: skip
    """(B, H, S_q, S_k) in q's dtype: the softmax, negative where dropout takes the weight away."""
    batch, seq_q, heads, dim = q.shape
    check_size(batch, heads, seq_q, k.shape[1])
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    left, right = window[0], 0 if causal else window[1]
    with torch.autocast(q.device.type, enabled=False):
        p, _, _ = weights(q.detach(), k.detach(), scale, left, right, softcap, alibi_slopes, None, None)
    return torch.where(dropout.kept(seed, dropout_p, range(batch), heads, range(seq_q), k.shape[1]), p, -p).to(q.dtype)


def signed_varlen(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    seed: Tensor, dropout_p: float, softmax_scale: float | None, causal: bool, window: tuple[int, int],
    softcap: float, alibi_slopes: Tensor | None,
) -> Tensor:  # fmt: skip
    """(B, H, max_seqlen_q, max_seqlen_k): the same of every sequence, with zeros past its end."""
    q_ends, k_ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    batch, (_, heads, dim) = len(q_ends) - 1, q.shape
    check_size(batch, heads, max_seqlen_q, max_seqlen_k)
    scale = dim**-0.5 if softmax_scale is None else softmax_scale
    left, right = window[0], 0 if causal else window[1]
    out = q.new_zeros(batch, heads, max_seqlen_q, max_seqlen_k)
    for b in range(batch):
        qb, kb = (x.detach()[None, ends[b] : ends[b + 1]] for x, ends in ((q, q_ends), (k, k_ends)))
        slopes = alibi_slopes[b] if alibi_slopes is not None and alibi_slopes.dim() == 2 else alibi_slopes
        rows, keys = qb.shape[1], kb.shape[1]
        with torch.autocast(q.device.type, enabled=False):
            p, _, _ = weights(qb, kb, scale, left, right, softcap, slopes, None, None)
        stay = dropout.kept(seed, dropout_p, range(b, b + 1), heads, range(rows), keys)
        out[b, :, :rows, :keys] = torch.where(stay, p, -p)[0]
    return out


def check_size(batch: int, heads: int, rows: int, keys: int) -> None:
    if batch * heads * rows * keys > MOST_WEIGHTS:
        raise UnsupportedError(
            f"return_attn_probs with dropout makes the whole softmax, here {batch} x {heads} x {rows} x {keys}; it is"
            f" for tests, up to {MOST_WEIGHTS} weights"
        )
