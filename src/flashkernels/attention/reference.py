"""Attention in plain PyTorch: the definition that every other implementation is tested against, and the CPU path.

It computes in fp32 (fp64 for fp64 inputs) and holds the whole score matrix.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from flashkernels.attention import dropout
from flashkernels.attention.problem import AttentionProblem
from flashkernels.attention.tensors import Run, Tensors, laid_out, lse_dtype, lse_shape, output_dtype
from flashkernels.attention.validation import SCALED_ROWS
from flashkernels.hardware import Gpu

FAR = 1 << 62  # a side of a window that no sequence reaches; beside a position it still fits 64 bits


def plan(problem: AttentionProblem, gpu: Gpu | None, tensors: Tensors) -> Run:
    """Nothing to prepare: the reference is ready for any call."""
    return partial(forward, problem)


def forward(
    problem: AttentionProblem, given: tuple[Any, ...], softmax_scale: float, softcap: float
) -> tuple[Tensor, Tensor | None]:
    """Attention of (B, S, H, D) tensors, or with `cu_seqlens` of ragged (total, H, D) ones, sequence by sequence."""
    tensors = Tensors(*given)
    q, k, v = dequantised(tensors)
    alibi_slopes, sinks, mask, cu_seqlens_q, cu_seqlens_k, block_table = tensors[3:9]
    left, right = problem.band
    p, seed = problem.dropout_p, tensors.dropout_seed

    def kept(batches: range, rows: int, keys: int) -> Tensor | None:
        return None if seed is None else dropout.kept(seed, p, batches, q.shape[-2], range(rows), keys)

    if cu_seqlens_q is None or cu_seqlens_k is None:
        stay = kept(range(q.shape[0]), q.shape[1], k.shape[1])
        out, lse = attention(q, k, v, softmax_scale, left, right, softcap, alibi_slopes, sinks, mask, stay, p)
        return laid_out(problem, tensors.q, out.to(output_dtype(tensors.q))), lse
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    lse = torch.full(lse_shape(q), float("-inf"), dtype=lse_dtype(q), device=q.device)
    q_ends, k_ends = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for b in range(len(q_ends) - 1):
        rows, keys = slice(q_ends[b], q_ends[b + 1]), slice(k_ends[b], k_ends[b + 1])
        kb, vb = (_gathered(x, block_table[b], keys) if block_table is not None else x[keys] for x in (k, v))
        slopes = alibi_slopes[b] if alibi_slopes is not None and alibi_slopes.ndim == 2 else alibi_slopes
        qb, stay = q[rows], kept(range(b, b + 1), rows.stop - rows.start, kb.shape[0])
        one = attention(
            qb[None], kb[None], vb[None], softmax_scale, left, right, softcap, slopes, sinks, None, stay, p
        )  # fmt: skip
        out[rows], lse[:, rows] = one[0][0], one[1][0]
    return out, lse


def dequantised(tensors: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as they are; FP8 (B, S, H, D) as fp32, multiplied by its scales."""
    if tensors.q.dtype != torch.float8_e4m3fn:
        return tensors[:3]
    q, k, v = (
        x.float() if scale is None else x.float() * _of_each_row(scale, x.shape[1])
        for x, scale in zip(tensors[:3], tensors[9:12], strict=True)
    )
    return q, k, v


def _of_each_row(scale: Tensor, rows: int) -> Tensor:
    """(B, S, H, 1) of scales for each head (B, H) or for each 128 rows of it (B, H, blocks)."""
    if scale.dim() == 2:
        return scale[:, None, :, None]
    return scale.repeat_interleave(SCALED_ROWS, -1)[..., :rows].transpose(1, 2)[..., None]


def _gathered(pages: Tensor, table: Tensor, keys: slice) -> Tensor:
    """The rows (S_k, H_kv, D) of one sequence, from pages (pages, page_size, H_kv, D)."""
    count, size = keys.stop - keys.start, pages.shape[1]
    return pages[table[: -(-count // size)].long()].flatten(0, 1)[:count]


def attention(
    q: Tensor,  # (B, S_q, H, D)
    k: Tensor,  # (B, S_k, H_kv, D)
    v: Tensor,  # (B, S_k, H_kv, D_v)
    softmax_scale: float,
    left: int = -1,
    right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,  # (H,) or (B, H)
    sinks: Tensor | None = None,  # (H,)
    mask: Tensor | None = None,  # broadcastable to (B, H, S_q, S_k)
    stay: Tensor | None = None,  # (B, H, S_q, S_k): the weights that dropout leaves
    dropout_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Returns the output (B, S_q, H, D_v) in q's dtype and the log-sum-exp (B, H, S_q) in the compute dtype."""
    p, lse, seen = weights(q, k, softmax_scale, left, right, softcap, alibi_slopes, sinks, mask)
    if stay is not None:
        p, seen = torch.where(stay, p / (1 - dropout_p), 0.0), seen & stay
    vc = v.to(p.dtype).transpose(1, 2).repeat_interleave(q.shape[2] // k.shape[2], 1)  # (B, H, S_k, D_v)
    out = p @ torch.where(vc.isfinite(), vc, 0.0) + _visible_poison(seen.broadcast_to(p.shape), vc)
    return out.transpose(1, 2).to(q.dtype), lse


def weights(
    q: Tensor, k: Tensor, softmax_scale: float, left: int, right: int, softcap: float, alibi_slopes: Tensor | None,
    sinks: Tensor | None, mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Softmax weights (B, H, S_q, S_k), the log-sum-exp of their rows, and which keys a query sees."""
    dtype = lse_dtype(q)  # computes in what the log-sum-exp is returned in
    qc, kc = (x.to(dtype).transpose(1, 2) for x in (q, k))
    kc = kc.repeat_interleave(q.shape[2] // k.shape[2], 1)  # (B, H, S_k, D)

    s = qc @ kc.transpose(-1, -2) * softmax_scale  # (B, H, S_q, S_k)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    i, j = positions(q.shape[1], k.shape[1], q.device)
    s, seen = hide(s, i, j, left, right, alibi_slopes, mask)
    if sinks is not None:  # one more key per row, without a value
        s = torch.cat((s, sinks.to(dtype)[None, :, None, None].expand(*s.shape[:3], 1)), -1)
    p, lse = softmax(s)
    return p[..., : k.shape[1]], lse, seen


def positions(rows: int, keys: int, device: torch.device, first_row: int = 0, seq_q: int = 0) -> tuple[Tensor, Tensor]:
    """Key positions j and, aligned bottom-right with them, positions i of `rows` of `seq_q` (0: all) queries."""
    i = torch.arange(rows, device=device)[:, None] + first_row + keys - (seq_q or rows)
    return i, torch.arange(keys, device=device)[None, :]


def hide(
    s: Tensor, i: Tensor, j: Tensor, left: int, right: int, alibi_slopes: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Adds ALiBi and a float mask to the scores and puts -inf where a query may not look; also says where it may."""
    if alibi_slopes is not None:
        s = s - alibi_slopes.to(s.dtype)[..., None, None] * (i - j).abs()
    seen = torch.ones_like(i - j, dtype=torch.bool)
    if left >= 0:
        seen = seen & (j >= i - min(left, FAR))
    if right >= 0:
        seen = seen & (j <= i + min(right, FAR))
    if mask is not None and mask.dtype == torch.bool:
        seen = seen & mask
    elif mask is not None:
        seen = seen & (mask != float("-inf"))
        s = s + mask.to(s.dtype)
    return s.masked_fill(~seen, float("-inf")), seen


def softmax(s: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities and log-sum-exp of each row. A row of -inf (or of no keys) has probabilities 0 and lse -inf."""
    top = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:-1], 1), float("-inf"))
    e = torch.exp(s - top.masked_fill(top == float("-inf"), 0.0))
    total = e.sum(-1, keepdim=True)
    lse = (top + torch.log(total)).squeeze(-1)
    return e / total.masked_fill(total == 0, 1.0), lse


def _visible_poison(seen: Tensor, v: Tensor) -> Tensor | float:
    """What Inf and NaN in V add to the rows that see them. Hidden ones add nothing (in p @ v, 0 * NaN would be NaN)."""
    if v.isfinite().all():
        return 0.0
    rows = seen.to(v.dtype)
    up = rows @ (v.isnan() | (v == float("inf"))).to(v.dtype)
    down = rows @ (v.isnan() | (v == float("-inf"))).to(v.dtype)
    zero = torch.zeros_like(up)
    return torch.where(up > 0, float("inf"), zero) + torch.where(down > 0, float("-inf"), zero)
