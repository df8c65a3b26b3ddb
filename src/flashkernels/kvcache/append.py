"""Writes new keys and values to the pages of a cache: rotary embedding, quantisation and the scatter in one launch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashkernels.arguments import check_count, check_flag
from flashkernels.dispatch import Impl, UnsupportedError, lacks_triton, leaves_the_cpu, serving
from flashkernels.formats import encode
from flashkernels.fused.rope import rope
from flashkernels.fused.rows import DTYPES, RowProblem, check_rows, gpu_of
from flashkernels.hardware import Gpu
from flashkernels.jit.eager import Plans, Run, unwatched
from flashkernels.kvcache.cache import PagedCache, readable


def needs_triton(problem: RowProblem, gpu: Gpu | None) -> str | None:
    """Why the Triton kernel cannot serve, or None."""
    if reason := lacks_triton(problem.device, problem.dtype, gpu):
        return reason
    if problem.quantise == "bf16" and gpu is None:
        return "Triton's interpreter computes bf16 wrongly"
    if not problem.quantise.startswith("fp8"):
        return None
    if gpu is None:
        return "Triton's interpreter rounds FP8 wrongly"
    return None if gpu.has_fp8 else f"FP8 needs compute capability 8.9, {gpu.name} has {gpu.capability}"


# Best first. "auto" takes the first row that does not reject the problem. `torch` is in this file.
IMPLS = (
    Impl("triton", "flashkernels.kvcache.triton.append", rejects=needs_triton, defers=leaves_the_cpu),
    Impl("torch", "flashkernels.kvcache.append"),
)


# of the tensors of a call, in their order
NAMES = (
    "cache.k", "cache.v", "cache.k_scale", "cache.v_scale", "cache.block_table", "cache.lengths", "k", "v", "cos",
    "sin", "position_ids", "cu_seqlens",
)  # fmt: skip


class Append(NamedTuple):
    """What a call asks for, beside its tensors."""

    rotary_dim: int  # 0: nothing turns
    interleaved: bool
    impl: str


def append(
    cache: PagedCache, k: Tensor, v: Tensor | None = None, *, cos: Tensor | None = None, sin: Tensor | None = None,
    position_ids: Tensor | None = None, interleaved: bool = False, rotary_dim: int | None = None,
    cu_seqlens: Tensor | None = None, check: bool = False, impl: str = "auto",
) -> None:  # fmt: skip
    """Writes the newest T tokens of each sequence, which `cache.lengths` already counts: token t of sequence b becomes
    key lengths[b] - T + t. Turned by their angles and quantised on the way, never quantised again.

    Args:
        cache: its pages (and scales, where each token has its own) are written.
        k: (B, T, H_kv, D), fp16, bf16 or fp32; or with `cu_seqlens` ragged, (total, H_kv, D). Any T.
        v: the same with D_v; None where the values are columns of the keys.
        cos, sin: (P, R / 2) tables of `fk.rope_tables`: then k is turned, as `fk.rope` would.
        position_ids: (B, T), or (total,): rows of the tables; by default the key's place in its sequence. A position
            outside the tables gives NaN (on the CPU an error).
        interleaved, rotary_dim: as of `fk.rope`.
        cu_seqlens: (B + 1,) int32: the tokens of sequence b are rows cu_seqlens[b] to cu_seqlens[b + 1]. Rows past the
            last of these are left out (on the CPU an error).
        check: raise where the block table or a length is wrong, with the sequence and the slot: `PagedCache.check`.
            This waits for the device; on the CPU it is always done. Without it a token whose place is not in 0 to
            capacity - 1 is left out, and a wrong page writes to wrong memory.
        impl: "auto", or the name of the one implementation that must serve.

    >>> import torch
    >>> from flashkernels import kvcache
    >>> table = torch.tensor([[1, 0]], dtype=torch.int32)
    >>> cache = kvcache.PagedCache.allocate(2, 4, 2, 8, block_table=table, format="fp32")
    >>> k = torch.randn(1, 5, 2, 8)
    >>> cache.advance(5)
    >>> kvcache.append(cache, k, k)
    >>> torch.equal(cache.k[0, 0], k[0, 4])
    True
    """
    _check(cache, k, v, cos, sin, position_ids, cu_seqlens, rotary_dim, interleaved)
    if check or readable(k):
        cache.check()
        _check_places(cache, k, cu_seqlens)
    turned = 0
    if cos is not None:
        turned = rotary_dim if rotary_dim is not None else min(2 * cos.shape[-1], cache.head_dim)
    pages = (cache.k, None if cache.shared else cache.v, cache.k_scale, None if cache.shared else cache.v_scale)
    tensors = (*pages, cache.block_table, cache.lengths, k, v, cos, sin, position_ids, cu_seqlens)
    if unwatched(tensors):
        _planned(tensors, Append(turned, interleaved, impl))
        return
    if torch.is_grad_enabled():
        for name, x in zip(NAMES, tensors, strict=True):
            if x is not None and x.requires_grad:
                raise UnsupportedError(f"{name}: a cache has no gradients: call append under torch.no_grad()")
    append_op(*tensors, turned, interleaved, impl)


def _check(
    cache: PagedCache, k: Tensor, v: Tensor | None, cos: Tensor | None, sin: Tensor | None,
    position_ids: Tensor | None, cu_seqlens: Tensor | None, rotary_dim: int | None, interleaved: bool,
) -> None:  # fmt: skip
    if not isinstance(cache, PagedCache):
        raise TypeError(f"cache must be a kvcache.PagedCache, got {type(cache).__name__}")
    if (v is None) != cache.shared:
        raise ValueError("v must be None, the values are columns of the keys" if cache.shared else "v is missing")
    rank = 3 if cu_seqlens is not None else 4
    for name, x, dim in (("k", k, cache.head_dim), ("v", v, cache.head_dim_v)):
        if x is None:
            continue
        check_rows(name, x)
        if x.dtype == torch.float64:
            raise TypeError(f"{name}.dtype={x.dtype} is not supported; allowed: fp16, bf16 and fp32")
        if x.dim() != rank or x.shape[-2:] != (cache.kv_heads, dim):
            rows = "(total" if rank == 3 else f"({cache.batch}, T"
            raise ValueError(f"{name} has shape {tuple(x.shape)}; expected {rows}, {cache.kv_heads}, {dim})")
        if x.device != cache.k.device:
            raise ValueError(f"{name}.device={x.device} differs from that of the cache, {cache.k.device}")
    if rank == 4 and k.shape[0] != cache.batch:
        raise ValueError(f"k has batch={k.shape[0]}, the cache has {cache.batch} sequences")
    if v is not None and (v.shape[:-1] != k.shape[:-1] or v.dtype != k.dtype):
        raise ValueError(
            f"k is {tuple(k.shape)} of {k.dtype}, v is {tuple(v.shape)} of {v.dtype}: all but D must agree"
        )
    for name, other in (("position_ids", position_ids), ("cu_seqlens", cu_seqlens)):
        if other is not None and not isinstance(other, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(other).__name__}")
        if other is not None and other.device != k.device:
            raise ValueError(f"{name}.device={other.device} differs from k.device={k.device}")
    if rotary_dim is not None:
        check_count("rotary_dim", rotary_dim)
    check_flag("interleaved", interleaved)
    if cu_seqlens is not None:
        if cu_seqlens.dtype != torch.int32 or tuple(cu_seqlens.shape) != (cache.batch + 1,):
            got = f"{tuple(cu_seqlens.shape)} of {cu_seqlens.dtype}"
            raise ValueError(f"cu_seqlens is {got}; expected ({cache.batch + 1},) of torch.int32")
        if not cu_seqlens.is_contiguous():
            raise ValueError(f"cu_seqlens has stride {cu_seqlens.stride(0)}; it must be contiguous")
    if (cos is None) != (sin is None):
        raise ValueError("cos and sin belong together: one of them is missing")
    if cos is None or sin is None:
        for name, value in (("position_ids", position_ids), ("rotary_dim", rotary_dim)):
            if value is not None:
                raise ValueError(f"{name} is for cos and sin, which are missing")
        return
    for name, x in (("cos", cos), ("sin", sin)):
        check_rows(name, x)
        if x.dim() != 2 or x.shape != cos.shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}; expected (positions, rotary_dim / 2), both the same")
        if x.device != k.device:
            raise ValueError(f"{name}.device={x.device} differs from k.device={k.device}")
    turned = rotary_dim if rotary_dim is not None else min(2 * cos.shape[1], cache.head_dim)
    if turned < 0 or turned % 2 or turned > cache.head_dim or cos.shape[1] not in (turned, turned // 2):
        raise ValueError(
            f"rotary_dim={turned} does not go with head_dim={cache.head_dim} and {cos.shape[1]} columns of cos"
        )
    if position_ids is not None:
        if position_ids.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"position_ids.dtype={position_ids.dtype}; it must be torch.int32 or torch.int64")
        if position_ids.shape != k.shape[:-2]:
            raise ValueError(f"position_ids has shape {tuple(position_ids.shape)}; expected {tuple(k.shape[:-2])}")


def _check_places(cache: PagedCache, k: Tensor, cu_seqlens: Tensor | None) -> None:
    """No sequence is shorter than what is appended to it, and ragged rows are all there."""
    counts = torch.full_like(cache.lengths, k.shape[1]) if cu_seqlens is None else cu_seqlens.diff()
    if cu_seqlens is not None and (int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) != k.shape[0] or (counts < 0).any()):
        raise ValueError(
            f"cu_seqlens={cu_seqlens.tolist()} must not decrease and go from 0 to {k.shape[0]}, the rows of k"
        )
    short = (cache.lengths < counts).nonzero()
    if short.numel():
        b = int(short[0])
        raise ValueError(
            f"lengths[{b}]={int(cache.lengths[b])} is less than the {int(counts[b])} tokens appended: it counts them"
        )


def _plan(tensors: tuple[Any, ...], call: Any) -> Run:
    pages, k = tensors[0], tensors[6]
    cache = PagedCache(*_cache_tensors(tensors))
    tokens = k.shape[:-2].numel()
    moved = tokens * (
        cache.bits_per_token // 8 + k.element_size() * cache.kv_heads * (cache.head_dim + cache.head_dim_v)
    )
    problem = RowProblem(
        "append", tokens * cache.kv_heads, cache.head_dim, DTYPES[k.dtype], pages.device.type, moved, cache.format.name
    )
    gpu = gpu_of(k)
    return serving(IMPLS, problem, gpu, call.impl).plan(problem, gpu, tensors, call)


_planned = Plans(_plan)


def _cache_tensors(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """The cache of a call; one whose values are columns of the keys is written by its keys alone."""
    k, v, k_scale, v_scale, table, lengths = tensors[:6]
    return k, k if v is None else v, table, lengths, k_scale, k_scale if v is None else v_scale


# --- the `torch` implementation


def plan(problem: RowProblem, gpu: Gpu | None, tensors: tuple[Any, ...], call: Append) -> Run:
    def run(*tensors: Any) -> None:
        cache = PagedCache(*_cache_tensors(tensors))
        k, v, cos, sin, position_ids, cu_seqlens = tensors[6:]
        sequence, place = _places(cache, k, cu_seqlens)
        if call.rotary_dim:
            ids = place if position_ids is None else position_ids
            wide = k.float() if k.dim() == 4 else k.float()[None]
            wide, _ = rope(wide, wide[:, :, :0], cos, sin, position_ids=ids if k.dim() == 4 else ids[None],
                           interleaved=call.interleaved, rotary_dim=call.rotary_dim, impl="torch")  # fmt: skip
            k = wide.view(k.shape)
        there = (place >= 0) & (place < cache.capacity)
        sequence, place = sequence[there], place[there]
        page = cache.block_table[sequence, place // cache.page_size].long()
        for pages, scales, x in ((cache.k, cache.k_scale, k), (cache.v, cache.v_scale, v)):
            if x is None:
                continue
            fixed = scales if scales is not None and scales.dim() == 1 else None
            stored, scale = encode(x[there], cache.format, fixed)
            pages[page, place % cache.page_size] = stored
            if scale is not None and scales is not None and fixed is None:
                scales[page, place % cache.page_size] = scale

    return run


def _places(cache: PagedCache, k: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Of each token its sequence and its place there: (B, T), or (total,) of a ragged batch."""
    if cu_seqlens is None:
        count = k.shape[1]
        sequence = torch.arange(cache.batch, device=k.device)[:, None].expand(-1, count)
        return sequence, cache.lengths[:, None].long() - count + torch.arange(count, device=k.device)
    row = torch.arange(k.shape[0], device=k.device)
    ends = cu_seqlens[1:].contiguous()
    sequence = torch.searchsorted(ends, row.int(), right=True)
    there = sequence < cache.batch  # rows past the last end are nobody's
    if not cache.batch:
        return sequence, row.new_full(row.shape, -1)
    sequence = sequence.clamp(max=cache.batch - 1)
    return sequence, torch.where(there, cache.lengths[sequence] - ends[sequence] + row, -1)


# --- the registered op: schema and fake, for torch.compile and torch.export


@torch.library.custom_op("flashkernels::kv_append", mutates_args=("k_pages", "v_pages", "k_scale", "v_scale"))
def append_op(
    k_pages: Tensor, v_pages: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None, block_table: Tensor,
    lengths: Tensor, k: Tensor, v: Tensor | None, cos: Tensor | None, sin: Tensor | None, position_ids: Tensor | None,
    cu_seqlens: Tensor | None, rotary_dim: int, interleaved: bool, impl: str,
) -> None:  # fmt: skip
    tensors = (
        k_pages, v_pages, k_scale, v_scale, block_table, lengths, k, v, cos, sin, position_ids, cu_seqlens
    )  # fmt: skip
    if not k.is_cuda:  # under compile nothing was read before
        cache = PagedCache(*_cache_tensors(tensors))
        cache.check()
        _check_places(cache, k, cu_seqlens)
    _planned(tensors, Append(rotary_dim, interleaved, impl))


@append_op.register_fake
def _fake(
    k_pages: Tensor, v_pages: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None, block_table: Tensor,
    lengths: Tensor, k: Tensor, v: Tensor | None, cos: Tensor | None, sin: Tensor | None, position_ids: Tensor | None,
    cu_seqlens: Tensor | None, rotary_dim: int, interleaved: bool, impl: str,
) -> None:  # fmt: skip
    return None
