"""Attention over a paged cache in plain PyTorch: each sequence by itself, on its keys brought back to fp32.

This is what the other implementations are tested against, and the CPU path. It reads the lengths, so on a GPU it waits.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from flashkernels.attention.reference import attention
from flashkernels.decode.problem import DecodeProblem
from flashkernels.decode.tensors import Call, Run, empty_lse, empty_output
from flashkernels.formats import decode as dequantise
from flashkernels.hardware import Gpu
from flashkernels.kvcache.cache import PagedCache


def plan(problem: DecodeProblem, gpu: Gpu | None, call: Call) -> Run:
    """Nothing to prepare: the reference is ready for any call."""
    return partial(forward, problem)


def forward(problem: DecodeProblem, call: Call, softmax_scale: float, softcap: float) -> tuple[Tensor, Tensor]:
    q, cache, tree_mask, slopes, sinks, cu_seqlens = call
    out, lse = empty_output(q, problem.head_dim_v).zero_(), empty_lse(q).fill_(float("-inf"))
    left, right = problem.band
    ends = None if cu_seqlens is None else cu_seqlens.tolist()
    for b, length in enumerate(cache.lengths.tolist()):
        rows = q[b] if ends is None else q[ends[b] : ends[b + 1]]  # (T, H, D)
        k, v = keys_of(cache, b, length)
        mask = None if tree_mask is None else visible(tree_mask if tree_mask.dim() == 2 else tree_mask[b], length)
        slope = slopes[b] if slopes is not None and slopes.dim() == 2 else slopes
        own, own_lse = attention(
            rows[None].float(), k[None], v[None], softmax_scale, left, right, softcap, slope, sinks, mask
        )
        if ends is None:
            out[b], lse[b] = own[0].to(q.dtype), own_lse[0]
        else:
            out[ends[b] : ends[b + 1]], lse[:, ends[b] : ends[b + 1]] = own[0].to(q.dtype), own_lse[0]
    return out, lse


def keys_of(cache: PagedCache, b: int, length: int) -> tuple[Tensor, Tensor]:
    """The keys and values of one sequence, (length, H_kv, D) and (length, H_kv, D_v), in fp32."""
    table = cache.block_table[b, : -(-length // cache.page_size)].long()

    def rows(pages: Tensor, scale: Tensor | None) -> Tensor:
        each = scale[table].flatten(0, 1)[:length] if scale is not None and scale.dim() > 1 else scale
        return dequantise(pages[table].flatten(0, 1)[:length], cache.format, each)

    return rows(cache.k, cache.k_scale), rows(cache.v, cache.v_scale)


def visible(tree: Tensor, length: int) -> Tensor:
    """(T, length): all older keys, and of the T newest those that the tree (T, T) shows."""
    count = tree.shape[0]
    older = tree.new_ones(count, max(0, length - count))
    return torch.cat((older, tree[:, count - min(count, length) :]), 1)
