"""Checks the arguments of a call over a cache once and describes the call as a `DecodeProblem`."""

from __future__ import annotations

import torch
from torch import Tensor

from flashkernels.arguments import check_count, check_flag, check_strided
from flashkernels.attention.tensors import unaddressable
from flashkernels.attention.validation import check_extra, check_numbers, is_positive
from flashkernels.decode.problem import DecodeProblem
from flashkernels.decode.tensors import Call
from flashkernels.kvcache.cache import PagedCache

DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
MOST_TOKENS = 16


def described(
    call: Call, tokens: int, causal: bool, softmax_scale: float | None, window: tuple[int, int], softcap: float,
    need_lse: bool = False, batch_invariant: bool = False,
) -> DecodeProblem:  # fmt: skip
    """The problem that these tensors pose; raises where they pose none. The cache was checked when it was made."""
    q, cache = call.q, call.cache
    ragged = call.cu_seqlens_q is not None
    _check_q(call, 3 if ragged else 4)
    heads = q.shape[-2]
    check_numbers(causal, softmax_scale, window, softcap)
    check_flag("return_lse", need_lse)
    check_flag("batch_invariant", batch_invariant)
    if call.alibi_slopes is not None:
        check_extra("alibi_slopes", call.alibi_slopes, q, ((heads,), (cache.batch, heads)))
    if call.sinks is not None:
        check_extra("sinks", call.sinks, q, ((heads,),))
    if call.tree_mask is not None:
        _check_tree(call.tree_mask, q, tokens, cache.batch)
    if call.cu_seqlens_q is not None:
        _check_cu(call.cu_seqlens_q, q, cache.batch)
        check_count("max_seqlen_q", tokens)
    return DecodeProblem(
        batch=cache.batch, tokens=tokens, heads=heads, kv_heads=cache.kv_heads, head_dim=cache.head_dim,
        head_dim_v=cache.head_dim_v, context=cache.capacity, page_size=cache.page_size,
        row_bits=cache.bits_per_token // cache.kv_heads, dtype=DTYPES[q.dtype], format=cache.format.name,
        scales=cache.scales, shared=cache.shared, one_page=cache.block_table.shape[1] == 1, causal=causal,
        window=window, softcap=softcap != 0, positive_scale=is_positive(softmax_scale),
        alibi=call.alibi_slopes is not None, sinks=call.sinks is not None, tree=call.tree_mask is not None,
        ragged=ragged, total=q.shape[0] if ragged else 0, need_lse=need_lse, batch_invariant=batch_invariant,
        unaddressable=unaddressable_cache(cache) if q.is_cuda else "", device=q.device.type,
    )  # fmt: skip


def unaddressable_cache(cache: PagedCache) -> str:
    """Why TMA cannot read the pages, or copies of 4 bytes and more the scales of their tokens; or nothing."""
    for name, pages in (("k", cache.k), ("v", cache.v)):
        if reason := unaddressable(pages):
            return f"{name}: {reason}"
    for name, scale in (("k_scale", cache.k_scale), ("v_scale", cache.v_scale)):
        if scale is None or scale.dim() == 1:
            continue
        each = max(2, scale.shape[3] if scale.dim() == 4 else 0)  # fp16 numbers that are copied together
        steps = scale.stride()[: 3 if scale.dim() == 4 else 2]
        if scale.stride(-1) != 1 or any(step % each for step in steps) or scale.data_ptr() % (2 * each):
            return f"{name}: strides {scale.stride()} and its address do not let {each} be copied together"
    return ""


def _check_q(call: Call, rank: int) -> None:
    q, cache = call.q, call.cache
    if not isinstance(q, Tensor):
        raise TypeError(f"q must be a torch.Tensor, got {type(q).__name__}")
    check_strided("q", q)
    if q.dtype not in DTYPES:
        raise TypeError(f"q.dtype={q.dtype} is not supported; allowed: {', '.join(map(str, DTYPES))}")
    if q.dim() != rank:
        shape = "(total, heads, head_dim)" if rank == 3 else "(batch, tokens, heads, head_dim)"
        raise ValueError(f"q has {q.dim()} dimensions, shape {tuple(q.shape)}; expected {rank}: {shape}")
    if q.device != cache.k.device:
        raise ValueError(f"q.device={q.device} differs from that of the cache, {cache.k.device}")
    if rank == 4 and q.shape[0] != cache.batch:
        raise ValueError(f"q has batch={q.shape[0]}, the cache has {cache.batch} sequences")
    if not cache.format.quantised and q.dtype != cache.k.dtype:
        raise TypeError(f"q.dtype={q.dtype} differs from that of the cache, {cache.k.dtype}")
    if q.shape[-1] != cache.head_dim:
        raise ValueError(f"q has head_dim={q.shape[-1]}, the cache has {cache.head_dim}")
    if q.shape[-2] == 0 or q.shape[-2] % cache.kv_heads:
        raise ValueError(f"heads={q.shape[-2]} of q is not a multiple of kv_heads={cache.kv_heads} of the cache")


def _check_tree(tree: Tensor, q: Tensor, tokens: int, batch: int) -> None:
    if not isinstance(tree, Tensor):
        raise TypeError(f"tree_mask must be a torch.Tensor, got {type(tree).__name__}")
    if tree.dtype != torch.bool:
        raise TypeError(f"tree_mask.dtype={tree.dtype}; it must be torch.bool")
    if tuple(tree.shape) not in ((tokens, tokens), (batch, tokens, tokens)):
        raise ValueError(
            f"tree_mask has shape {tuple(tree.shape)}; expected ({tokens}, {tokens}) or ({batch}, {tokens}, {tokens})"
        )
    if tree.device != q.device:
        raise ValueError(f"tree_mask.device={tree.device} differs from q.device={q.device}")


def _check_cu(cu: Tensor, q: Tensor, batch: int) -> None:
    if cu.dtype != torch.int32:
        raise TypeError(f"cu_seqlens_q.dtype={cu.dtype}; it must be torch.int32")
    if tuple(cu.shape) != (batch + 1,):
        raise ValueError(
            f"cu_seqlens_q has shape {tuple(cu.shape)}; expected ({batch + 1},), the sequences and one more"
        )
    if cu.device != q.device:
        raise ValueError(f"cu_seqlens_q.device={cu.device} differs from q.device={q.device}")
    if not cu.is_contiguous():
        raise ValueError(f"cu_seqlens_q has stride {cu.stride(0)}; it must be contiguous")
