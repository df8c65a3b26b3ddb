"""flash-attn 2.8's attention functions over Flash Kernels: same names, argument order, defaults and meaning.

    from flashkernels.compat.flash_attn import flash_attn_func
    from flashkernels.compat.flash_attn.bert_padding import pad_input, unpad_input

Wider than flash-attn: also on the CPU and in fp32, at any head dimension, values may have their own head dimension.

Where the two differ:

- `dropout_p > 0` drops other weights than flash-attn does from the same state of torch's generator, which both take
  their seed from. On Hopper it is the Triton kernel that serves it. There is no dropout with `block_table`.
- `block_table` takes pages of any size. The Hopper kernel reads those of a multiple of 64 keys; the rest, and other
  GPUs, are served by the plain `torch` implementation, which is slow. There are no gradients through pages.
- `deterministic` is that of `fk.attention`: the forward always is.
- `flash_attn_with_kvcache`: `num_splits` changes nothing: how keys are split follows from the lengths, on the device.
  `cache_leftpad` wants a cache whose rows lie in one line, and reads it key by key, which is slower. A q that asks for
  gradients raises `UnsupportedError`; flash-attn returns a result without.
- The third result of `return_attn_probs=True` is None without dropout (flash-attn from 2.7 on has an empty tensor).
  With dropout it is the softmax, negative where a weight was dropped, (batch, nheads, S_q, S_k) without flash-attn's
  padding. It is computed apart, in plain torch, for tests: more than 2^26 weights raise `UnsupportedError`.
- `softmax_lse` of a row that sees no key is -inf, the logarithm of an empty sum. flash-attn writes +inf.
- `softmax_lse` with `alibi_slopes` and `causal` has the bias as documented, `-slope * |i + S_k - S_q - j|`.
  flash-attn's kernel adds `slope * j` there: the same output, an LSE shifted by `slope * (i + S_k - S_q)`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashkernels.arguments import check_count, check_flag
from flashkernels.attention.api import attention, attention_varlen
from flashkernels.attention.dropout import seed_tensor
from flashkernels.attention.validation import check_dropout
from flashkernels.compat.flash_attn.probabilities import signed, signed_varlen
from flashkernels.decode.api import refuse_gradients, run
from flashkernels.decode.tensors import Call
from flashkernels.decode.validation import described
from flashkernels.dispatch import UnsupportedError
from flashkernels.fused.rope import rope
from flashkernels.kvcache import PagedCache, append
from flashkernels.kvcache.cache import readable

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Result = Tensor | tuple[Tensor, Tensor, Tensor | None]


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
        dropout_p: share of the softmax weights to drop, by a seed from torch's generator.
        softmax_scale: defaults to headdim ** -0.5.
        causal: hide the keys after each query's position.
        window_size: (left, right) keys visible on each side of the position, inclusive; -1 is unbounded.
        softcap: c > 0 turns each scaled score s into c * tanh(s / c); 0 and below leave it.
        alibi_slopes: (nheads,) or (batch, nheads), adds `-slope * |i + S_k - S_q - j|` to the score of query i, key j.
        deterministic: makes the gradients the same to the bit in every run.
        return_attn_probs: return `(out, softmax_lse, None)`; with dropout the third is the softmax, negative where a
            weight was dropped, for tests on small inputs.

    Returns:
        out (batch, S_q, nheads, headdim), and on request softmax_lse (batch, nheads, S_q) in fp32 (fp64 for fp64).

    >>> import torch
    >>> q, k, v = torch.randn(2, 5, 6, 72), torch.randn(2, 9, 2, 72), torch.randn(2, 9, 2, 72)
    >>> out, softmax_lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    >>> out.shape, softmax_lse.shape
    (torch.Size([2, 5, 6, 72]), torch.Size([2, 6, 5]))
    """
    seed = _seed(dropout_p, q)
    softcap = _cap(softcap)
    found = attention(
        q,
        k,
        v,
        causal=causal,
        softmax_scale=softmax_scale,
        window=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        return_lse=return_attn_probs,
        dropout_p=dropout_p,
        dropout_seed=seed,
        deterministic=deterministic,
    )
    if not isinstance(found, tuple):
        return found
    if seed is None:
        return *found, None
    return *found, signed(q, k, seed, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)


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
    seed = _seed(dropout_p, q)
    softcap = _cap(softcap)
    if block_table is not None:
        if seed is not None:
            raise UnsupportedError(f"dropout_p={dropout_p}: there is no dropout over pages (block_table)")
        _check_integers("block_table", block_table, q)
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
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        block_table=block_table,
        return_lse=return_attn_probs,
        dropout_p=dropout_p,
        dropout_seed=seed,
        deterministic=deterministic,
    )
    if not isinstance(found, tuple):
        return found
    if seed is None:
        return *found, None
    probs = signed_varlen(
        q,
        k,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        seed,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
    )
    return *found, probs


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


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over a cache of keys and values, to which k and v are added first, in place.

    Args:
        q: (batch, S_q, nheads, headdim)
        k_cache: (batch_cache, S_cache, nheads_k, headdim), or with block_table pages
            (num_blocks, page_block_size, nheads_k, headdim).
        v_cache: the same.
        k, v: (batch, S_new, nheads_k, headdim), written to the cache after the keys that are there.
        rotary_cos, rotary_sin: (S_ro, rotary_dim / 2), with k and v: turn k, and q: at the places of the new keys where
            causal or window_size hides something, else all at the first of them.
        cache_seqlens: keys there are before k is added: (batch,) int32, or one number; by default the whole cache.
        cache_batch_idx: (batch,): the row of the cache that each sequence is; not with block_table.
        cache_leftpad: (batch,): where each sequence begins in its row of the cache; cache_seqlens and the places of
            rotary_cos count from the row's own beginning all the same. Not with block_table.
        block_table: (batch, max_num_blocks_per_seq) int32.
        num_splits: accepted; the split follows from the lengths.

    The other arguments are those of `flash_attn_func`.

    Returns:
        out (batch, S_q, nheads, headdim), and on request softmax_lse (batch, nheads, S_q) in fp32.

    >>> import torch
    >>> cache = torch.zeros(2, 16, 2, 8)
    >>> q, new = torch.randn(2, 1, 4, 8), torch.randn(2, 1, 2, 8)
    >>> flash_attn_with_kvcache(q, cache, cache.clone(), new, new, cache_seqlens=3, causal=True).shape
    torch.Size([2, 1, 4, 8])
    >>> torch.equal(cache[:, 3], new[:, 0])
    True
    """
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; expected 4 dimensions")
    if (k is None) != (v is None):
        raise ValueError("k and v belong together: one of them is missing")
    if (rotary_cos is None) != (rotary_sin is None):
        raise ValueError("rotary_cos and rotary_sin belong together: one of them is missing")
    if rotary_cos is not None and k is None:
        raise ValueError("rotary_cos and rotary_sin are for new keys: k and v are missing")
    check_flag("return_softmax_lse", return_softmax_lse)
    batch, rows = q.shape[:2]
    added = k.shape[1] if isinstance(k, Tensor) and k.dim() == 4 else 0  # what else it may be, `append` refuses
    if block_table is None:
        if cache_batch_idx is None and batch > k_cache.shape[0]:
            raise ValueError(f"q has batch={batch}, the cache has {k_cache.shape[0]} rows")
        first = torch.arange(batch, device=q.device) if cache_batch_idx is None else cache_batch_idx
        _check_integers("cache_batch_idx", first, q, batch)
        _check_range("cache_batch_idx", first, k_cache.shape[0] - 1, "the last row of the cache")
        table = first.to(torch.int32)[:, None].contiguous()
    else:
        for name, given in (("cache_batch_idx", cache_batch_idx), ("cache_leftpad", cache_leftpad)):
            if given is not None:
                raise ValueError(f"{name} is for a cache without block_table")
        _check_integers("block_table", block_table, q)
        if block_table.dim() != 2:
            raise ValueError(f"block_table has shape {tuple(block_table.shape)}; expected ({batch}, pages)")
        table = block_table.contiguous()
    capacity = table.shape[1] * k_cache.shape[1]
    if cache_seqlens is None:
        cache_seqlens = max(0, capacity - added)
    if not isinstance(cache_seqlens, Tensor):
        check_count("cache_seqlens", cache_seqlens)
        if cache_seqlens + added > capacity:
            raise ValueError(f"cache_seqlens={cache_seqlens} and {added} new keys are over the capacity, {capacity}")
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)
    _check_integers("cache_seqlens", cache_seqlens, q, batch)
    _check_range("cache_seqlens", cache_seqlens, capacity - added, f"the capacity less {added} new keys")
    cache = PagedCache(k_cache, v_cache, table, (cache_seqlens + added).to(torch.int32))
    places = None
    if cache_leftpad is not None:
        cache = _from(cache_leftpad, cache, q)
        places = (cache_seqlens[:, None] + torch.arange(added, device=q.device)).int()
    window = tuple(window_size) if isinstance(window_size, list) else window_size
    cap = _cap(softcap)
    settings = (rows, causal, softmax_scale, window, cap, return_softmax_lse)
    if k is not None:  # what is wrong is said before anything is written
        described(Call(q, cache, None, alibi_slopes), *settings)
        refuse_gradients(Call(q, cache, None, alibi_slopes))
    if rotary_cos is not None and rotary_sin is not None:
        ordered = causal or window != (-1, -1)
        steps = torch.arange(rows, device=q.device) if ordered else q.new_zeros(rows).int()
        ids = cache_seqlens[:, None] + steps
        if isinstance(rotary_cos, Tensor) and rotary_cos.dim() == 2 and readable(ids) and ids.numel():
            last = int(cache_seqlens.max()) + max(added, rows if ordered else 1) - 1
            if last >= rotary_cos.shape[0]:
                raise ValueError(f"rotary_cos has {rotary_cos.shape[0]} rows; there are tokens up to place {last}")
        q, _ = rope(q, q[:, :, :0], rotary_cos, rotary_sin, position_ids=ids.int(), interleaved=rotary_interleaved)
    if k is not None:
        append(
            cache, k, v, cos=rotary_cos, sin=rotary_sin, interleaved=rotary_interleaved,
            position_ids=None if rotary_cos is None else places,
        )  # fmt: skip
    found = run(Call(q, cache, None, alibi_slopes), *settings, False, False, "auto")
    if not return_softmax_lse:
        return found[0]
    assert found[1] is not None  # it was asked for
    return found[0], found[1]


def _from(leftpad: Tensor, cache: PagedCache, q: Tensor) -> PagedCache:
    """The cache of one page for each sequence, without the first keys of each: every key is a page of its own."""
    _check_integers("cache_leftpad", leftpad, q, cache.batch)
    if readable(leftpad):
        cache.check()  # what is over one sequence would be in the next
        if ((leftpad < 0) | (leftpad > cache.lengths)).any():
            raise ValueError(f"cache_leftpad={leftpad.tolist()} is not in 0 to the lengths, {cache.lengths.tolist()}")
    rows = cache.page_size
    places = leftpad[:, None] + torch.arange(rows, device=q.device)
    table = cache.block_table * rows + places.clamp(max=rows - 1)
    lengths = (cache.lengths - leftpad).to(torch.int32)
    k, v = _key_by_key("k_cache", cache.k), _key_by_key("v_cache", cache.v)
    return PagedCache(k, v, table.to(torch.int32), lengths)


def _key_by_key(name: str, x: Tensor) -> Tensor:
    """(batch_cache, S_cache, ...) as (batch_cache * S_cache, 1, ...), never by a copy: it is written to."""
    try:
        return x.view(-1, 1, *x.shape[2:])
    except RuntimeError:
        reason = f"cache_leftpad: {name} has strides {x.stride()}; its rows do not lie in one line"
        raise UnsupportedError(reason) from None


def _check_integers(name: str, x: Tensor, q: Tensor, count: int | None = None) -> None:
    """x is a tensor of integers on the device of q, with `count` of them where that is given."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}.dtype={x.dtype}; it must be torch.int32")
    if count is not None and tuple(x.shape) != (count,):
        raise ValueError(f"{name} has shape {tuple(x.shape)}; expected ({count},), one for each sequence of q")
    if isinstance(q, Tensor) and x.device != q.device:
        raise ValueError(f"{name}.device={x.device} differs from q.device={q.device}")


def _check_range(name: str, x: Tensor, last: int, words: str) -> None:
    """Its numbers are in 0 to `last`, where they can be read: of 64 bits they would wrap on their way to 32."""
    if readable(x) and ((x < 0) | (x > last)).any():
        raise ValueError(f"{name}={x.tolist()} is not in 0 to {last}, {words}")


def _seed(dropout_p: float, q: Tensor) -> Tensor | None:
    """The seed of one call, where it drops anything."""
    check_dropout(dropout_p, None, q)
    return seed_tensor(None, q.device) if dropout_p and isinstance(q, Tensor) else None


def _cap(softcap: float) -> float:
    """What is below 0 turns it off; what is no number is left to the call, which names it."""
    return max(softcap, 0.0) if isinstance(softcap, (int, float, torch.SymFloat)) else softcap


def _unpacked(name: str, packed: Tensor, axes: tuple[str, ...]) -> tuple[Tensor, ...]:
    """The tensors stacked along the third axis from the end, as views; `axes` are the names of a right shape."""
    if not isinstance(packed, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(packed).__name__}")
    if packed.dim() != len(axes) or packed.shape[-3] != int(axes[-3]):
        raise ValueError(f"{name} has shape {tuple(packed.shape)}, not ({', '.join(axes)})")
    return packed.unbind(-3)  # its gradient is one stack, not one padded tensor for each part
