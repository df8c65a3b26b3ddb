"""Gradients by recomputing the scores in chunks of query rows: right, O(chunk * S_k) memory, not fast.

It serves every forward feature: on the CPU, and wherever the fused backward declines.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flashkernels.attention import dropout
from flashkernels.attention.problem import AttentionProblem, BackwardProblem
from flashkernels.attention.reference import hide, positions, softmax
from flashkernels.attention.tensors import Given, RunBackward, Tensors, lse_dtype
from flashkernels.hardware import Gpu

SCORES_PER_CHUNK = 1 << 24  # 64 MB of fp32 scores; a handful of such buffers is alive at a time


@dataclass(frozen=True)
class Chunk:
    """Some query rows of one sequence: where they, their keys and their part of the mask are."""

    batch: int
    rows: slice  # in the sequence dimension of q
    keys: slice  # in that of k and v
    first_row: int  # of the sequence
    seq_q: int


def plan(problem: BackwardProblem, gpu: Gpu | None, tensors: Tensors, given: Given) -> RunBackward:
    """Nothing to prepare."""

    def run(tensors: Tensors, given: Given, softmax_scale: float, softcap: float) -> list[Tensor | None]:
        with torch.autocast(tensors.q.device.type, enabled=False):  # it would round the products to 16 bits
            return backward(problem, tensors, given.grad_out, given.grad_lse, softmax_scale, softcap)

    return run


def backward(
    problem: BackwardProblem, tensors: Tensors, grad_out: Tensor, grad_lse: Tensor | None, scale: float, softcap: float
) -> list[Tensor | None]:
    """Gradients of q, k, v, alibi_slopes, sinks and mask (None for what nobody wants)."""
    dtype = lse_dtype(tensors.q)
    grads = [
        torch.zeros(x.shape, dtype=dtype, device=x.device) if x is not None and name in problem.wanted else None
        for name, x in zip(Tensors._fields[:6], tensors, strict=False)
    ]
    for chunk in chunks(problem.call, tensors):
        add_gradients(grads, chunk, problem.call, tensors, grad_out, grad_lse, scale, softcap)
    return [g if g is None or x is None else g.to(x.dtype) for g, x in zip(grads, tensors, strict=False)]


def chunks(problem: AttentionProblem, tensors: Tensors) -> Iterator[Chunk]:
    q_ends = [0, problem.seq_q] if tensors.cu_seqlens_q is None else tensors.cu_seqlens_q.tolist()
    k_ends = [0, problem.seq_k] if tensors.cu_seqlens_k is None else tensors.cu_seqlens_k.tolist()
    for b in range(problem.batch):
        at = b if problem.varlen else 0
        seq_q, keys = q_ends[at + 1] - q_ends[at], slice(k_ends[at], k_ends[at + 1])
        step = max(1, SCORES_PER_CHUNK // max(1, problem.heads * (keys.stop - keys.start)))
        for first in range(0, seq_q, step):
            rows = slice(q_ends[at] + first, q_ends[at] + min(first + step, seq_q))
            yield Chunk(b, rows, keys, first, seq_q)


def add_gradients(
    grads: list[Tensor | None], chunk: Chunk, problem: AttentionProblem, tensors: Tensors, grad_out: Tensor,
    grad_lse: Tensor | None, scale: float, softcap: float,
) -> None:  # fmt: skip
    """Recomputes one chunk's probabilities P and adds its gradients.

    With dP = dO Vᵀ and delta = rowsum(P * dP) - dLSE: dS = P * (dP - delta), dV = Pᵀ dO, and dS goes on to the mask,
    ALiBi, softcap, Q and K. The sink's probability has dP = 0. Dropout thins dP, and P for dV, alike.
    """
    dtype = lse_dtype(tensors.q)
    group = problem.heads // problem.kv_heads

    def heads_first(x: Tensor, at: slice) -> Tensor:  # (H, rows, D)
        return (x[at] if problem.varlen else x[chunk.batch, at]).to(dtype).transpose(0, 1)

    q, do = heads_first(tensors.q, chunk.rows), heads_first(grad_out, chunk.rows)
    k, v = (heads_first(x, chunk.keys).repeat_interleave(group, 0) for x in tensors[1:3])
    slopes, mask, grad_mask = tensors.alibi_slopes, tensors.mask, grads[5]
    if slopes is not None and slopes.dim() == 2:
        slopes = slopes[chunk.batch]
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
        at = (chunk.batch if mask.shape[0] > 1 else 0, slice(None), chunk.rows if mask.shape[2] > 1 else slice(None))
        mask = mask[at]
        grad_mask = None if grad_mask is None else grad_mask[(None,) * (4 - grad_mask.dim())][at]

    s = q @ k.transpose(-1, -2) * scale  # (H, rows, keys)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    i, j = positions(q.shape[1], k.shape[1], q.device, chunk.first_row, chunk.seq_q)
    capped = s
    s, seen = hide(s, i, j, *problem.band, slopes, mask)
    slope_of_cap = torch.where(seen, 1 - (capped / softcap) ** 2, 0.0) if softcap else 1.0  # of NaN nobody sees, 0
    if tensors.sinks is not None:
        s = torch.cat((s, tensors.sinks.to(dtype)[:, None, None].expand(*s.shape[:2], 1)), -1)
    p, _ = softmax(s)
    p, p_sink = p[..., : k.shape[1]], p[..., k.shape[1] :]
    stay = _kept(chunk, problem, tensors, q.shape[1], k.shape[1])

    def thinned(x: Tensor) -> Tensor:
        return x if stay is None else torch.where(stay, x / (1 - problem.dropout_p), 0.0)

    if grads[2] is not None:
        _add(grads[2], chunk, chunk.keys, thinned(p).transpose(-1, -2) @ do, group)
    if all(g is None for g in (*grads[:2], *grads[3:])):
        return
    dp = thinned(do @ v.transpose(-1, -2))
    dp = dp.masked_fill(p == 0, 0.0)  # a hidden key's V may be NaN
    delta = (p * dp).sum(-1, keepdim=True)
    if grad_lse is not None:
        of_lse = grad_lse[:, chunk.rows] if problem.varlen else grad_lse[chunk.batch, :, chunk.rows]
        delta = delta - of_lse[..., None].to(dtype)
    ds = p * (dp - delta)
    if grads[3] is not None:
        target = grads[3] if grads[3].dim() == 1 else grads[3][chunk.batch]
        target -= (ds * (i - j).abs()).sum((-1, -2))
    if grads[4] is not None:
        grads[4] -= (p_sink * delta).sum((-1, -2))
    if grad_mask is not None:
        grad_mask += ds.sum_to_size(grad_mask.shape)
    ds = ds * slope_of_cap * scale
    q, k = (torch.where(x.isfinite(), x, 0.0) for x in (q, k))  # a seen NaN is in dS
    if grads[0] is not None:
        _add(grads[0], chunk, chunk.rows, ds @ k, 1)
    if grads[1] is not None:
        _add(grads[1], chunk, chunk.keys, ds.transpose(-1, -2) @ q, group)


def _kept(chunk: Chunk, problem: AttentionProblem, tensors: Tensors, rows: int, keys: int) -> Tensor | None:
    """Where dropout leaves the weights of a chunk, (H, rows, keys); None: there is no dropout."""
    if tensors.dropout_seed is None:
        return None
    queries, batch = range(chunk.first_row, chunk.first_row + rows), range(chunk.batch, chunk.batch + 1)
    return dropout.kept(tensors.dropout_seed, problem.dropout_p, batch, problem.heads, queries, keys)[0]


def _add(grad: Tensor, chunk: Chunk, at: slice, value: Tensor, group: int) -> None:
    """Adds (H, rows, D) to the rows of a gradient, summed over the query heads that share a key head."""
    value = value.unflatten(0, (-1, group)).sum(1).transpose(0, 1)
    target = grad[at] if grad.dim() == 3 else grad[chunk.batch, at]
    target += value
