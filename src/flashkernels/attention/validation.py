"""Checks the arguments of an attention call once and describes the call as an `AttentionProblem`."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from flashkernels.arguments import check_count, check_flag, check_strided
from flashkernels.attention.problem import AttentionProblem

DTYPES = {
    torch.float8_e4m3fn: "fp8", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32",
    torch.float64: "fp64",
}  # fmt: skip
LAYOUTS = ("bshd", "bhsd")
MOST = 2.0**127  # of a number that kernels take in fp32, times log2(e)
SCALED_ROWS = 128  # rows of FP8 that share a scale, where a head has more than one


def described(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, softmax_scale: float | None, window: tuple[int, int],
    softcap: float, alibi_slopes: Tensor | None, sinks: Tensor | None, mask: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None, block_table: Tensor | None = None,
    q_scale: Tensor | None = None, k_scale: Tensor | None = None, v_scale: Tensor | None = None,
    max_seqlen_q: int = 0, max_seqlen_k: int = 0, need_lse: bool = False, layout: str = "bshd", dropout_p: float = 0.0,
) -> AttentionProblem:  # fmt: skip
    """The problem that these tensors pose, dense (B, S, H, D) or ragged (total, H, D); raises where they pose none."""
    varlen = cu_seqlens_q is not None or cu_seqlens_k is not None
    paged = block_table is not None
    _check_qkv(q, k, v, 3 if varlen else 4, paged)
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if varlen:
        batch = _check_cu_seqlens(q, cu_seqlens_q, cu_seqlens_k)
        check_count("max_seqlen_q", max_seqlen_q)
        check_count("max_seqlen_k", max_seqlen_k)
        seq_q, seq_k = max_seqlen_q, max_seqlen_k
        if block_table is not None:
            _check_block_table(block_table, q, batch, -(-max_seqlen_k // max(1, k.shape[1])))
    else:
        batch, seq_q, seq_k = q.shape[0], q.shape[1], k.shape[1]
    check_numbers(causal, softmax_scale, window, softcap)
    check_flag("return_lse", need_lse)
    check_dropout(dropout_p, None, q)
    if alibi_slopes is not None:
        shapes = ((heads,), (batch, heads))
        check_extra("alibi_slopes", alibi_slopes, q, shapes)
    if sinks is not None:
        check_extra("sinks", sinks, q, ((heads,),))
    if mask is not None:
        _check_mask(mask, q, (batch, heads, seq_q, seq_k))
    _check_scale("q_scale", q_scale, q, (batch, heads), -(-seq_q // SCALED_ROWS))
    _check_scale("k_scale", k_scale, q, (batch, kv_heads), -(-seq_k // SCALED_ROWS))
    _check_scale("v_scale", v_scale, q, (batch, kv_heads), None)
    if q.dtype == torch.float8_e4m3fn and varlen:
        raise TypeError("q.dtype=torch.float8_e4m3fn: a ragged batch is taken in fp16, bf16 and fp32 only")
    return AttentionProblem(
        batch=batch, seq_q=seq_q, seq_k=seq_k, heads=heads, kv_heads=kv_heads,
        head_dim=q.shape[-1], head_dim_v=v.shape[-1], dtype=DTYPES[q.dtype], causal=causal, window=window,
        softcap=softcap != 0, positive_scale=is_positive(softmax_scale),
        alibi=alibi_slopes is not None, sinks=sinks is not None,
        mask=None if mask is None else "bool" if mask.dtype == torch.bool else "float",
        varlen=varlen, total_q=q.shape[0] if varlen else 0,
        total_k=batch * seq_k if paged else k.shape[0] if varlen else 0, page_size=k.shape[1] if paged else 0,
        need_lse=need_lse, dropout_p=dropout_p, layout=layout, device=q.device.type,
    )  # fmt: skip


def check_cu_values(name: str, cu_seqlens: Tensor, total: int, longest: int) -> None:
    """The values of cumulative lengths, where they can be read without waiting for a device."""
    ends = cu_seqlens.tolist()
    steps = [b - a for a, b in pairwise(ends)]
    if ends[0] != 0 or ends[-1] != total:
        raise ValueError(f"{name} goes from {ends[0]} to {ends[-1]}; it must go from 0 to {total}, the rows there are")
    if any(step < 0 for step in steps):
        raise ValueError(f"{name}={ends} decreases; cumulative lengths cannot")
    if steps and max(steps) > longest:
        raise ValueError(f"max_seqlen{name[-2:]}={longest} is less than the longest sequence, {max(steps)}, of {name}")


def check_pages(block_table: Tensor, cu_seqlens_k: Tensor, pages: int, page_size: int) -> None:
    """The entries of a block table that are used, where they can be read without waiting for a device."""
    slots = torch.arange(block_table.shape[1], device=block_table.device)
    used = slots < ((cu_seqlens_k.diff() + page_size - 1) // page_size)[:, None]
    wrong = (used & ((block_table < 0) | (block_table >= pages))).nonzero()
    if wrong.numel():
        b, slot = wrong[0].tolist()
        raise ValueError(
            f"block_table[{b}, {slot}]={int(block_table[b, slot])} of sequence {b}, slot {slot}, is not in 0 to"
            f" {pages - 1}"
        )


def _check_qkv(q: Tensor, k: Tensor, v: Tensor, rank: int, paged: bool = False) -> None:
    dense = "(batch, seq, heads, head_dim) in this order after `layout`"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        check_strided(name, x)
        pages = paged and name != "q"
        want = 4 if pages else rank
        shape = "(pages, page_size, heads, head_dim)" if pages else "(total, heads, head_dim)" if rank == 3 else dense
        if x.dim() != want:
            raise ValueError(f"{name} has {x.dim()} dimensions, shape {tuple(x.shape)}; expected {want}: {shape}")
    if q.dtype not in DTYPES:
        raise TypeError(f"q.dtype={q.dtype} is not supported; allowed: {', '.join(map(str, DTYPES))}")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise TypeError(f"{name}.dtype={x.dtype} differs from q.dtype={q.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name}.device={x.device} differs from q.device={q.device}")
    if rank == 4:
        for name, x in (("k", k), ("v", v)):
            if x.shape[0] != q.shape[0]:
                raise ValueError(f"{name} has batch={x.shape[0]}, q has batch={q.shape[0]}")
    if paged and k.shape[1] == 0:
        raise ValueError(f"k has page_size=0, shape {tuple(k.shape)}; a page holds at least 1 key")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"k has shape {tuple(k.shape)}, v has {tuple(v.shape)}: all but the last size must agree")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k has head_dim={k.shape[-1]}, q has head_dim={q.shape[-1]}")
    for name, x in (("q", q), ("v", v)):
        if x.shape[-1] == 0:
            raise ValueError(f"{name} has head_dim=0; it must be at least 1")
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"heads={heads} of q is not a multiple of kv_heads={kv_heads} of k and v")


def _check_cu_seqlens(q: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None) -> int:
    for name, cu in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(cu, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(cu).__name__}")
        if cu.dtype != torch.int32:
            raise TypeError(f"{name}.dtype={cu.dtype}; it must be torch.int32")
        if cu.dim() != 1 or cu.shape[0] < 1:
            raise ValueError(f"{name} has shape {tuple(cu.shape)}; expected (batch + 1,)")
        if cu.device != q.device:
            raise ValueError(f"{name}.device={cu.device} differs from q.device={q.device}")
        if cu.stride(0) != 1 and cu.shape[0] > 1:
            raise ValueError(f"{name} has stride {cu.stride(0)}; it must be contiguous")
    assert isinstance(cu_seqlens_q, Tensor) and isinstance(cu_seqlens_k, Tensor)
    if cu_seqlens_q.shape != cu_seqlens_k.shape:
        raise ValueError(
            f"cu_seqlens_k has length {cu_seqlens_k.shape[0]}, cu_seqlens_q has {cu_seqlens_q.shape[0]}:"
            " both are batch + 1"
        )
    return cu_seqlens_q.shape[0] - 1


def _check_block_table(block_table: Tensor, q: Tensor, batch: int, pages: int) -> None:
    if not isinstance(block_table, Tensor):
        raise TypeError(f"block_table must be a torch.Tensor, got {type(block_table).__name__}")
    if block_table.dtype != torch.int32:
        raise TypeError(f"block_table.dtype={block_table.dtype}; it must be torch.int32")
    if block_table.dim() != 2 or block_table.shape[0] != batch or block_table.shape[1] < pages:
        raise ValueError(
            f"block_table has shape {tuple(block_table.shape)}; expected ({batch}, at least {pages}): batch and the"
            " pages of max_seqlen_k keys"
        )
    if block_table.device != q.device:
        raise ValueError(f"block_table.device={block_table.device} differs from q.device={q.device}")
    if not block_table.is_contiguous():
        raise ValueError(f"block_table has strides {block_table.stride()}; it must be contiguous")


def is_positive(softmax_scale: float | None) -> bool:
    """Whether fp32 has it as a number above 0, and not below its smallest normal one: -inf times 0 would be NaN."""
    return softmax_scale is None or softmax_scale > 2.0**-126


def check_numbers(causal: bool, softmax_scale: float | None, window: tuple[int, int], softcap: float) -> None:
    check_flag("causal", causal)
    for name, value in (("softmax_scale", softmax_scale), ("softcap", softcap)):
        if value is None and name == "softmax_scale":
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
            raise TypeError(f"{name}={value!r} must be a float, got {type(value).__name__}")
        if isinstance(value, (int, float)) and not -math.inf < value < math.inf:
            raise ValueError(f"{name}={value} must be finite")
        if isinstance(value, (int, float)) and abs(value) > MOST:
            raise ValueError(f"{name}={value} is too large for fp32; at most {MOST:g}")
    if softcap < 0:
        raise ValueError(f"softcap={softcap} must not be negative; 0 turns it off")
    if isinstance(softcap, (int, float)) and 0 < softcap * MOST < abs(softmax_scale or 1.0):
        raise ValueError(f"softcap={softcap} is too small: softmax_scale={softmax_scale} over it does not fit fp32")
    if not isinstance(window, tuple):
        raise TypeError(f"window={window!r} must be a pair (left, right), got {type(window).__name__}")
    if len(window) != 2:
        raise ValueError(f"window={window!r} must be a pair (left, right)")
    for side in window:
        if isinstance(side, bool) or not isinstance(side, (int, torch.SymInt)):
            raise TypeError(f"window={window!r} must hold two ints, got {type(side).__name__}")
        if side < -1:
            raise ValueError(f"window={window!r} has a side below -1; -1 means unbounded")
        if side >= 1 << 63:
            raise ValueError(f"window={window!r} has a side of more than 64 bits; -1 means unbounded")


def check_dropout(p: float, seed: int | Tensor | None, q: Tensor) -> None:
    if isinstance(p, bool) or not isinstance(p, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"dropout_p={p!r} must be a float, got {type(p).__name__}")
    if not 0 <= p < 1:
        raise ValueError(f"dropout_p={p} is not in [0, 1)")
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64:
            raise TypeError(f"dropout_seed.dtype={seed.dtype}; it must be torch.int64")
        if seed.numel() != 1:
            raise ValueError(f"dropout_seed has shape {tuple(seed.shape)}; it must hold one number")
        if seed.device != q.device:
            raise ValueError(f"dropout_seed.device={seed.device} differs from q.device={q.device}")
    elif seed is not None:
        if isinstance(seed, bool) or not isinstance(seed, (int, torch.SymInt)):
            raise TypeError(f"dropout_seed={seed!r} must be an int, a tensor or None, got {type(seed).__name__}")
        if not -(2**63) <= seed < 2**63:
            raise ValueError(f"dropout_seed={seed} is not a 64-bit integer")


def check_extra(name: str, x: Tensor, q: Tensor, shapes: tuple[tuple[int, ...], ...]) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    check_strided(name, x)
    if not x.dtype.is_floating_point:
        raise TypeError(f"{name}.dtype={x.dtype} must be a floating-point type")
    if tuple(x.shape) not in shapes:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; expected {' or '.join(map(str, shapes))}")
    if x.device != q.device:
        raise ValueError(f"{name}.device={x.device} differs from q.device={q.device}")


def _check_scale(name: str, scale: Tensor | None, q: Tensor, sizes: tuple[int, int], blocks: int | None) -> None:
    if scale is None:
        return
    if not isinstance(scale, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(scale).__name__}")
    if q.dtype != torch.float8_e4m3fn:
        raise ValueError(f"{name} is for torch.float8_e4m3fn; q.dtype={q.dtype}")
    if scale.dtype != torch.float32:
        raise TypeError(f"{name}.dtype={scale.dtype}; it must be torch.float32")
    shapes = (sizes,) if blocks is None else (sizes, (*sizes, blocks))
    if tuple(scale.shape) not in shapes:
        raise ValueError(f"{name} has shape {tuple(scale.shape)}; expected {' or '.join(map(str, shapes))}")
    if scale.device != q.device:
        raise ValueError(f"{name}.device={scale.device} differs from q.device={q.device}")
    if not scale.is_contiguous():
        raise ValueError(f"{name} has strides {scale.stride()}; it must be contiguous")


def _check_mask(mask: Tensor, q: Tensor, full: tuple[int, ...]) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask must be a torch.Tensor, got {type(mask).__name__}")
    check_strided("mask", mask)
    if mask.dtype != torch.bool and not mask.dtype.is_floating_point:
        raise TypeError(f"mask.dtype={mask.dtype} must be torch.bool or a floating-point type")
    if mask.device != q.device:
        raise ValueError(f"mask.device={mask.device} differs from q.device={q.device}")
    ends = full[4 - mask.dim() :] if mask.dim() <= 4 else ()
    if mask.dim() > 4 or any(m not in (1, f) for m, f in zip(mask.shape, ends, strict=True)):
        raise ValueError(f"mask has shape {tuple(mask.shape)}, which does not broadcast to (B, H, S_q, S_k) = {full}")
