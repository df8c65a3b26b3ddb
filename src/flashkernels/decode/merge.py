"""Partial attention put together: states of different keys, and a prefix that many sequences share, read once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashkernels.attention.validation import check_extra
from flashkernels.decode.api import decode, run
from flashkernels.decode.tensors import Call
from flashkernels.decode.triton.tiles import MOST_ROWS
from flashkernels.kvcache.cache import PagedCache


def merge_states(
    outs: Sequence[Tensor], lses: Sequence[Tensor], *, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention over all keys from attention over parts of them: `out = Σ exp(lse_i - lse) out_i`, in fp32.

    Args:
        outs: outputs of the same queries over disjoint keys, each (B, T, H, D_v), or (total, H, D_v).
        lses: their log-sum-exp, each (B, H, T), or (H, total), fp32. -inf: that part has no key for the row.
        sinks: (H,), any float dtype: enters here, once; the parts must have been made without.

    Returns:
        The output in the dtype of the parts, and the log-sum-exp. A row without any key is 0 with -inf.

    >>> import torch, flashkernels as fk
    >>> q, k, v = torch.randn(1, 2, 4, 8), torch.randn(1, 9, 4, 8), torch.randn(1, 9, 4, 8)
    >>> parts = [fk.attention(q, k[:, s], v[:, s], return_lse=True) for s in (slice(0, 5), slice(5, 9))]
    >>> out, lse = fk.merge_states(*zip(*parts))
    >>> torch.allclose(out, fk.attention(q, k, v), atol=1e-5)
    True
    """
    _check(outs, lses, sinks)
    lse = torch.stack(list(lses)).float()
    heads = lse.shape[-2]
    terms = lse
    if sinks is not None:
        terms = torch.cat((lse, sinks.float().view(heads, 1).expand_as(lse[:1])))
    # -inf - -inf would be NaN, also in the gradients: rows without a key are filled, and put back below
    empty = (terms == float("-inf")).all(0)
    total = torch.logsumexp(torch.where(empty, 0.0, terms), 0)
    shares = torch.exp(lse - total).transpose(-1, -2)[..., None]
    there = (lse != float("-inf")).transpose(-1, -2)[..., None]
    out = torch.zeros_like(outs[0], dtype=torch.float32)
    for share, has_keys, part in zip(shares, there, outs, strict=True):
        out += share * torch.where(has_keys, part.float(), 0.0)  # 0 * NaN would be NaN
    return out.to(outs[0].dtype), torch.where(empty, float("-inf"), total)


def cascade_decode(
    q: Tensor, prefix: PagedCache, cache: PagedCache, *, causal: bool = True, tree_mask: Tensor | None = None,
    softmax_scale: float | None = None, softcap: float = 0.0, sinks: Tensor | None = None, return_lse: bool = False,
    batch_invariant: bool = False, check: bool = False, impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`decode` of sequences that begin with the same keys: the prefix is read once for all of them, not once for each.

    Args:
        q: (B, T, H, D), the T newest tokens of each sequence.
        prefix: a cache of one sequence: the keys that all B share. All queries see all of them.
        cache: the keys of each sequence after the prefix; its lengths count the T newest tokens.
        The other arguments are those of `decode`. There is no window and no ALiBi: they would need the queries'
        distance from the prefix.

    >>> import torch, flashkernels as fk
    >>> from flashkernels import kvcache
    >>> one, two = (torch.arange(n, dtype=torch.int32)[:, None] for n in (1, 2))
    >>> k = torch.randn(2, 4, 1, 16)
    >>> prefix = kvcache.PagedCache(k[:1], k[:1], one, torch.tensor([3], dtype=torch.int32))
    >>> cache = kvcache.PagedCache(k, k, two, torch.tensor([4, 2], dtype=torch.int32))
    >>> fk.cascade_decode(torch.randn(2, 1, 4, 16), prefix, cache).shape
    torch.Size([2, 1, 4, 16])
    """
    for name, x in (("prefix", prefix), ("cache", cache)):
        if not isinstance(x, PagedCache):
            raise TypeError(f"{name} must be a kvcache.PagedCache, got {type(x).__name__}")
    if prefix.batch != 1:
        raise ValueError(f"prefix has {prefix.batch} sequences; the one that is shared is one")
    if prefix.head_dim_v != cache.head_dim_v or prefix.kv_heads != cache.kv_heads:
        raise ValueError(
            f"prefix has kv_heads={prefix.kv_heads}, head_dim_v={prefix.head_dim_v};"
            f" the cache has {cache.kv_heads}, {cache.head_dim_v}"
        )
    own, own_lse = decode(
        q, cache, causal=causal, tree_mask=tree_mask, softmax_scale=softmax_scale, softcap=softcap, return_lse=True,
        batch_invariant=batch_invariant, check=check, impl=impl,
    )  # fmt: skip
    batch, tokens, heads, _ = q.shape
    rows, together = batch * tokens, q.reshape(1, batch * tokens, heads, q.shape[3])
    if batch_invariant:  # more rows, of nothing: tiles are those of many, however few these are
        more = max(0, MOST_ROWS * prefix.kv_heads // heads - rows)
        together = torch.nn.functional.pad(together, (0, 0, 0, 0, 0, more))
    settings = (together.shape[1], False, softmax_scale, (-1, -1), softcap, True, batch_invariant, check, impl)
    shared, shared_lse = run(Call(together, prefix), *settings)
    assert shared_lse is not None  # it was asked for
    shared, shared_lse = shared[:, :rows], shared_lse[..., :rows]
    out, lse = merge_states(
        (shared.reshape(own.shape), own),
        (shared_lse.reshape(heads, batch, tokens).transpose(0, 1), own_lse), sinks=sinks,
    )  # fmt: skip
    return (out, lse) if return_lse else out


def _check(outs: Sequence[Tensor], lses: Sequence[Tensor], sinks: Tensor | None) -> None:
    for name, parts in (("outs", outs), ("lses", lses)):
        if not isinstance(parts, (Sequence, Tensor)):
            raise TypeError(f"{name} must be a sequence of tensors, got {type(parts).__name__}")
    if len(outs) == 0 or len(outs) != len(lses):
        raise ValueError(f"{len(outs)} outputs and {len(lses)} log-sum-exps: there must be as many, and at least one")
    for name, parts in (("outs", outs), ("lses", lses)):
        for i, x in enumerate(parts):
            if not isinstance(x, Tensor):
                raise TypeError(f"{name}[{i}] must be a torch.Tensor, got {type(x).__name__}")
            if not x.dtype.is_floating_point:
                raise TypeError(f"{name}[{i}].dtype={x.dtype} must be a floating-point type")
    first = outs[0]
    rank = first.dim()
    if rank not in (3, 4):
        raise ValueError(f"outs[0] has shape {tuple(first.shape)}; expected (B, T, H, D) or (total, H, D)")
    rows = (first.shape[0], first.shape[2], first.shape[1]) if rank == 4 else (first.shape[1], first.shape[0])
    for i, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if out.shape != first.shape or out.dtype != first.dtype or out.device != first.device:
            got = f"{tuple(out.shape)} of {out.dtype} on {out.device}"
            raise ValueError(f"outs[{i}] is {got}; outs[0] is {tuple(first.shape)} of {first.dtype} on {first.device}")
        if tuple(lse.shape) != rows or lse.device != first.device:
            raise ValueError(
                f"lses[{i}] has shape {tuple(lse.shape)} on {lse.device}; expected {rows} on {first.device}"
            )
    if sinks is not None:
        check_extra("sinks", sinks, first, ((rows[-2],),))
