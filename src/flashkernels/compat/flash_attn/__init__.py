"""flash-attn 2.8's attention functions over Flash Kernels: same names, argument order, defaults and meaning.

    from flashkernels.compat.flash_attn import flash_attn_func
    from flashkernels.compat.flash_attn.bert_padding import pad_input, unpad_input

Wider than flash-attn: also on the CPU and in fp32, at any head dimension, values may have their own head dimension.

Where the two differ:

- `dropout_p > 0` raises `UnsupportedError`: there is no kernel for it yet.
- `block_table` takes pages of any size. The Hopper kernel reads those of a multiple of 64 keys; the rest, and other
  GPUs, are served by the plain `torch` implementation, which is slow. There are no gradients through pages.
- `deterministic` changes nothing: forward and backward are always deterministic.
- The third result of `return_attn_probs=True` is None (flash-attn from 2.7 on has an empty tensor there).
- `softmax_lse` of a row that sees no key is -inf, the logarithm of an empty sum. flash-attn writes +inf.
- `softmax_lse` with `alibi_slopes` and `causal` has the bias as documented, `-slope * |i + S_k - S_q - j|`.
  flash-attn's kernel adds `slope * j` there: the same output, an LSE shifted by `slope * (i + S_k - S_q)`.
"""

from __future__ import annotations

from torch import Tensor

from flashkernels.attention.api import attention, attention_varlen
from flashkernels.dispatch import UnsupportedError

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
]

Result = Tensor | tuple[Tensor, Tensor, None]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """softmax(scale · q kᵀ) v, where each group of nheads / nheads_k query heads shares one key and value head.

    Query i sits at key position `i + S_k - S_q`: the mask is aligned to the bottom-right corner. A row that sees
    no key is 0.

    Args:
        q: (batch, S_q, nheads, headdim)
        k: (batch, S_k, nheads_k, headdim)
        v: (batch, S_k, nheads_k, headdim)
        dropout_p: must be 0.0.
        softmax_scale: defaults to headdim ** -0.5.
        causal: hide the keys after each query's position.
        window_size: (left, right) keys visible on each side of the position, inclusive; -1 is unbounded.
        softcap: c > 0 turns each scaled score s into c * tanh(s / c); 0 and below leave it.
        alibi_slopes: (nheads,) or (batch, nheads), adds `-slope * |i + S_k - S_q - j|` to the score of query i, key j.
        deterministic: accepted; the result is deterministic either way.
        return_attn_probs: return `(out, softmax_lse, None)`.

    Returns:
        out (batch, S_q, nheads, headdim), and on request softmax_lse (batch, nheads, S_q) in fp32 (fp64 for fp64).

    >>> import torch
    >>> q, k, v = torch.randn(2, 5, 6, 72), torch.randn(2, 9, 2, 72), torch.randn(2, 9, 2, 72)
    >>> out, softmax_lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    >>> out.shape, softmax_lse.shape
    (torch.Size([2, 5, 6, 72]), torch.Size([2, 6, 5]))
    """
    _check_dropout(dropout_p)
    found = attention(
        q,
        k,
        v,
        causal=causal,
        softmax_scale=softmax_scale,
        window=window_size,
        softcap=max(softcap, 0.0),
        alibi_slopes=alibi_slopes,
        return_lse=return_attn_probs,
    )
    return (*found, None) if isinstance(found, tuple) else found


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Result:
    """`flash_attn_func` over sequences of different lengths, laid end to end without padding.

    Args:
        q: (total_q, nheads, headdim)
        k: (total_k, nheads_k, headdim)
        v: (total_k, nheads_k, headdim)
        cu_seqlens_q: (batch + 1,) int32; sequence b has the rows `cu_seqlens_q[b]` to `cu_seqlens_q[b + 1]` of q.
        cu_seqlens_k: (batch + 1,) int32; the same for k and v.
        max_seqlen_q: length of the longest sequence of queries.
        max_seqlen_k: length of the longest sequence of keys.
        block_table: (batch, max_num_blocks_per_seq) int32. Then k and v are the pages of a cache,
            (num_blocks, page_block_size, nheads_k, headdim): key j of sequence b is row `j % page_block_size` of page
            `block_table[b, j // page_block_size]`, and cu_seqlens_k only gives the lengths.

    The other arguments are those of `flash_attn_func`.

    Returns:
        out (total_q, nheads, headdim), and on request softmax_lse (nheads, total_q) in fp32 (fp64 for fp64).

    >>> import torch
    >>> q = k = v = torch.randn(7, 4, 40)
    >>> cu_seqlens = torch.tensor([0, 3, 7], dtype=torch.int32)
    >>> flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 4, 4, causal=True).shape
    torch.Size([7, 4, 40])
    """
    _check_dropout(dropout_p)
    if block_table is not None:
        block_table = block_table.contiguous()  # flash-attn also takes the left part of a larger table
    found = attention_varlen(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        causal=causal,
        softmax_scale=softmax_scale,
        window=window_size,
        softcap=max(softcap, 0.0),
        alibi_slopes=alibi_slopes,
        block_table=block_table,
        return_lse=return_attn_probs,
    )
    return (*found, None) if isinstance(found, tuple) else found


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` on queries, keys and values stacked in one tensor (batch, S, 3, nheads, headdim).

    >>> import torch
    >>> flash_attn_qkvpacked_func(torch.randn(2, 5, 3, 4, 40)).shape
    torch.Size([2, 5, 4, 40])
    """
    q, k, v = _unpacked("qkv", qkv, ("batch", "seqlen", "3", "nheads", "headdim"))
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` on keys and values stacked in one tensor (batch, S_k, 2, nheads_k, headdim).

    >>> import torch
    >>> flash_attn_kvpacked_func(torch.randn(2, 5, 6, 40), torch.randn(2, 9, 2, 2, 40)).shape
    torch.Size([2, 5, 6, 40])
    """
    k, v = _unpacked("kv", kv, ("batch", "seqlen_k", "2", "nheads_k", "headdim"))
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` on queries, keys and values stacked in one tensor (total, 3, nheads, headdim).

    >>> import torch
    >>> cu_seqlens = torch.tensor([0, 3, 7], dtype=torch.int32)
    >>> flash_attn_varlen_qkvpacked_func(torch.randn(7, 3, 4, 40), cu_seqlens, 4).shape
    torch.Size([7, 4, 40])
    """
    q, k, v = _unpacked("qkv", qkv, ("total", "3", "nheads", "headdim"))
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens,
        cu_seqlens,
        max_seqlen,
        max_seqlen,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` on keys and values stacked in one tensor (total_k, 2, nheads_k, headdim).

    >>> import torch
    >>> cu_seqlens = torch.tensor([0, 3, 7], dtype=torch.int32)
    >>> q, kv = torch.randn(7, 6, 40), torch.randn(7, 2, 2, 40)
    >>> flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens, cu_seqlens, 4, 4).shape
    torch.Size([7, 6, 40])
    """
    k, v = _unpacked("kv", kv, ("total_k", "2", "nheads_k", "headdim"))
    return flash_attn_varlen_func(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def _check_dropout(dropout_p: float) -> None:
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p={dropout_p} is not in [0, 1)")
    if dropout_p > 0.0:
        raise UnsupportedError(f"dropout_p={dropout_p}: there is no dropout kernel yet; pass 0.0")


def _unpacked(name: str, packed: Tensor, axes: tuple[str, ...]) -> tuple[Tensor, ...]:
    """The tensors stacked along the third axis from the end, as views; `axes` are the names of a right shape."""
    if packed.dim() != len(axes) or packed.shape[-3] != int(axes[-3]):
        raise ValueError(f"{name} has shape {tuple(packed.shape)}, not ({', '.join(axes)})")
    return packed.unbind(-3)  # its gradient is one stack, not one padded tensor for each part
