"""Public functions over a paged cache: the table of implementations, the eager hot path, and the custom op."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C import _is_any_autocast_enabled as any_autocast

from flashkernels import hardware
from flashkernels.decode.hopper import tiles as hopper_tiles
from flashkernels.decode.problem import DecodeProblem
from flashkernels.decode.tensors import Call, Run, empty_lse, empty_output
from flashkernels.decode.validation import MOST_TOKENS, described
from flashkernels.dispatch import Impl, UnsupportedError, lacks_triton, leaves_the_cpu, serving
from flashkernels.hardware import Gpu
from flashkernels.jit.eager import unwatched
from flashkernels.kvcache.cache import PagedCache, readable
from flashkernels.tiling import override

LARGEST_DIM = 576


def needs_triton(problem: DecodeProblem, gpu: Gpu | None) -> str | None:
    """Why the split Triton kernel cannot serve, or None."""
    if reason := lacks_triton(problem.device, problem.dtype, gpu):
        return reason
    if problem.format == "bf16" and gpu is None:
        return "Triton's interpreter computes bf16 wrongly"
    if problem.format.startswith("fp8") and gpu is not None and not gpu.has_fp8:
        return f"FP8 needs compute capability 8.9, {gpu.name} has {gpu.capability[0]}.{gpu.capability[1]}"
    largest = max(problem.head_dim, problem.head_dim_v)
    return f"head_dim={largest} is over {LARGEST_DIM}" if largest > LARGEST_DIM else None


# Best first. "auto" takes the first row that does not reject the problem.
IMPLS = (
    Impl("hopper", "flashkernels.decode.hopper.decode", rejects=hopper_tiles.rejects),
    Impl("triton", "flashkernels.decode.triton.decode", rejects=needs_triton, defers=leaves_the_cpu),
    Impl("torch", "flashkernels.decode.reference"),
)


def decode(
    q: Tensor, cache: PagedCache, *, causal: bool = True, tree_mask: Tensor | None = None,
    softmax_scale: float | None = None, window: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, sinks: Tensor | None = None, return_lse: bool = False,
    batch_invariant: bool = False, check: bool = False, impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of the newest tokens of each sequence over its whole cache, which is read once.

    The T newest tokens are already in the cache (`kvcache.append`) and `cache.lengths` counts them: query t of sequence
    b is at position `lengths[b] - T + t`. Logits are made as by `fk.attention`: scale, softcap, ALiBi, hiding, sinks.

    Args:
        q: (B, T, H, D), 1 to 16 tokens, fp16, bf16 or fp32: the dtype of the pages, any of them where those are
            quantised. H is a multiple of H_kv.
        cache: keys and values of the B sequences; of length 0 too.
        causal: token t does not see the keys of the tokens after it.
        tree_mask: (T, T) or (B, T, T) bool, instead of causal: whether token i sees the key of token j of the T newest.
            Keys before them are seen by all. Window and ALiBi go by places in the cache.
        softmax_scale: default D ** -0.5.
        window: (left, right) keys around the position that stay visible, both inclusive; -1 is unbounded.
        softcap: bounds the logits; 0 turns it off.
        alibi_slopes: (H,) or (B, H), any float dtype.
        sinks: (H,), any float dtype: one more logit per head, without a value. It enters once, however keys are split.
        return_lse: also return the natural log-sum-exp of the logits, fp32.
        batch_invariant: bitwise the same result for a sequence whatever else is in the batch: its keys are cut at fixed
            places and the parts are merged in order. Costs speed where sequences are few and long.
        check: raise where a length or an entry of the block table is out of range, with the sequence and the slot:
            `PagedCache.check`. This waits for the device; on the CPU it is always done. Without it a wrong table reads
            wrong memory.
        impl: "auto", or the name of the one implementation that must serve.

    Returns:
        The output (B, T, H, D_v) in q's dtype; with `return_lse` also (B, H, T). A query that sees no key is 0 with
        log-sum-exp -inf. Deterministic bit for bit. The lengths are read on the device: a captured CUDA graph may be
        replayed with others. There are no gradients.

    >>> import torch, flashkernels as fk
    >>> from flashkernels import kvcache
    >>> pages = torch.randn(8, 16, 2, 64)
    >>> table = torch.tensor([[3, 1], [0, 7]], dtype=torch.int32)
    >>> cache = kvcache.PagedCache(pages, pages, table, torch.tensor([20, 5], dtype=torch.int32))
    >>> fk.decode(torch.randn(2, 1, 8, 64), cache).shape
    torch.Size([2, 1, 8, 64])
    """
    call = Call(q, cache, tree_mask, alibi_slopes, sinks)
    if isinstance(q, Tensor) and q.dim() == 4 and not 1 <= q.shape[1] <= MOST_TOKENS:
        raise ValueError(f"q has {q.shape[1]} tokens of each sequence; decode takes 1 to {MOST_TOKENS}")
    settings = (q.shape[1] if isinstance(q, Tensor) and q.dim() == 4 else 0, causal, softmax_scale, window, softcap)
    out, lse = run(call, *settings, return_lse, batch_invariant, check, impl)
    if not return_lse:
        return out
    assert lse is not None  # it was asked for
    return out, lse


def attention_paged(
    q: Tensor, cache: PagedCache, cu_seqlens_q: Tensor, max_seqlen_q: int, *, causal: bool = True,
    softmax_scale: float | None = None, window: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, sinks: Tensor | None = None, return_lse: bool = False,
    batch_invariant: bool = False, check: bool = False, impl: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of ragged new tokens over a paged cache: chunks of prompts and single tokens in one batch.

    The new tokens are already in the cache and `cache.lengths` counts them; causal is aligned bottom-right.

    Args:
        q: (total, H, D); the queries of sequence b are rows cu_seqlens_q[b] to cu_seqlens_q[b + 1], its newest tokens.
        cu_seqlens_q: (B + 1,) int32 on q's device, from 0 to total.
        max_seqlen_q: upper bound of the queries of a sequence. On the CPU it is checked; on a GPU nothing depends on it
            but the choice of tiles, unless `check` asks for it.
        The other arguments are those of `decode`.

    Returns:
        The output (total, H, D_v); with `return_lse` also (H, total).

    >>> import torch, flashkernels as fk
    >>> from flashkernels import kvcache
    >>> pages = torch.randn(8, 16, 2, 64)
    >>> table = torch.tensor([[3, 1], [0, 7]], dtype=torch.int32)
    >>> cache = kvcache.PagedCache(pages, pages, table, torch.tensor([20, 5], dtype=torch.int32))
    >>> fk.attention_paged(torch.randn(6, 8, 64), cache, torch.tensor([0, 5, 6], dtype=torch.int32), 5).shape
    torch.Size([6, 8, 64])
    """
    if not isinstance(cu_seqlens_q, Tensor):
        raise TypeError(f"cu_seqlens_q must be a torch.Tensor, got {type(cu_seqlens_q).__name__}")
    call = Call(q, cache, None, alibi_slopes, sinks, cu_seqlens_q)
    settings = (max_seqlen_q, causal, softmax_scale, window, softcap)
    out, lse = run(call, *settings, return_lse, batch_invariant, check, impl)
    if not return_lse:
        return out
    assert lse is not None  # it was asked for
    return out, lse


def problem_of(q: Tensor, cache: PagedCache, **arguments: Any) -> DecodeProblem:
    """The problem that `decode(q, cache, **arguments)` poses, after the same checks."""
    settings: dict[str, Any] = {"causal": True, "softmax_scale": None, "window": (-1, -1), "softcap": 0.0}
    tensors = {name: arguments.pop(name, None) for name in ("tree_mask", "alibi_slopes", "sinks")}
    settings |= {name: value for name, value in arguments.items() if name in settings or name == "batch_invariant"}
    return described(Call(q, cache, **tensors), q.shape[1], need_lse=arguments.get("return_lse", False), **settings)


# --- the eager hot path: everything that can be decided from shapes and flags is decided once per signature


_plans: dict[tuple[Any, ...], Run] = {}
MOST_PLANS = 4096


def _signature(x: Tensor | None) -> tuple[Any, ...] | None:
    return None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16)


def run(
    call: Call, tokens: int, causal: bool, softmax_scale: float | None, window: tuple[int, int], softcap: float,
    need_lse: bool, batch_invariant: bool, check: bool, impl: str,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Straight to the kernel where nothing watches; through the registered op under compile and modes."""
    if isinstance(window, list):
        window = tuple(window)
    q, cache = call.q, call.cache
    if not isinstance(cache, PagedCache):
        raise TypeError(f"cache must be a kvcache.PagedCache, got {type(cache).__name__}")
    if check or readable(cache.k):
        cache.check()
    if check and call.cu_seqlens_q is not None:
        described(call, tokens, causal, softmax_scale, window, softcap)
        _check_ragged(call, tokens)
    watched = (
        q, cache.k, cache.v, cache.k_scale, cache.v_scale, cache.lengths, call.tree_mask, call.alibi_slopes, call.sinks
    )  # fmt: skip
    if isinstance(window, tuple) and unwatched(watched):
        settings = (tokens, causal, softmax_scale, window, softcap, need_lse, batch_invariant, impl)
        return _launched(call, *settings)
    described(call, tokens, causal, softmax_scale, window, softcap, need_lse, batch_invariant)  # the errors of eager
    refuse_gradients(call)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    return decode_op(
        q, *cache.tensors, *call[2:], tokens, causal, scale, window[0], window[1], softcap, need_lse, batch_invariant,
        impl,
    )  # fmt: skip


def refuse_gradients(call: Call) -> None:
    """Raises where one of the tensors asks for a gradient."""
    if not torch.is_grad_enabled():
        return
    cache = call.cache
    for name, x in (
        ("q", call.q), ("cache.k", cache.k), ("cache.v", cache.v), ("cache.k_scale", cache.k_scale),
        ("cache.v_scale", cache.v_scale), ("alibi_slopes", call.alibi_slopes), ("sinks", call.sinks),
    ):  # fmt: skip
        if x is not None and x.requires_grad:
            raise UnsupportedError(f"{name}: there are no gradients through a cache: call it under torch.no_grad()")


def _launched(
    call: Call, tokens: int, causal: bool, softmax_scale: float | None, window: tuple[int, int], softcap: float,
    need_lse: bool, batch_invariant: bool, impl: str,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    # 1, 1.0 and True are equal, but not equally valid: types are part of the key
    types = (
        type(tokens), type(causal), type(softmax_scale), type(softcap), type(need_lse), type(batch_invariant),
        *map(type, window),
    )  # fmt: skip
    key: Any = (
        *map(_signature, (call.q, *call[2:])), call.cache.signature, tokens, causal, softmax_scale, window, softcap,
        need_lse, batch_invariant, impl, types, override(),
    )  # fmt: skip
    try:
        plan = _plans.get(key)
    except TypeError:  # a setting without a hash: the checks below say which
        plan = key = None
    if plan is None:
        problem = described(call, tokens, causal, softmax_scale, window, softcap, need_lse, batch_invariant)
        gpu = hardware.detect(call.q.device) if problem.device == "cuda" else None
        plan = serving(IMPLS, problem, gpu, impl).plan(problem, gpu, call)
        if len(_plans) >= MOST_PLANS:
            _plans.clear()
        if key is not None:
            _plans[key] = plan
    if call.cu_seqlens_q is not None and not call.q.is_cuda:
        _check_ragged(call, tokens)
    scale = call.q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    if any_autocast():  # which would round the products of torch's plain operations, and says nothing to kernels
        with torch.autocast(call.q.device.type, enabled=False):
            return plan(call, scale, softcap)
    return plan(call, scale, softcap)


def _check_ragged(call: Call, longest: int) -> None:
    """The values of the cumulative lengths. Waits for the device."""
    assert call.cu_seqlens_q is not None
    ends = call.cu_seqlens_q
    counts = ends.diff()
    if int(ends[0]) != 0 or int(ends[-1]) != call.q.shape[0] or (counts < 0).any():
        rows = call.q.shape[0]
        raise ValueError(f"cu_seqlens_q={ends.tolist()} must not decrease and go from 0 to {rows}, the rows of q")
    if counts.numel() and int(counts.max()) > longest:
        raise ValueError(f"max_seqlen_q={longest} is less than the longest sequence of queries, {int(counts.max())}")
    short = (call.cache.lengths < counts).nonzero()
    if short.numel():
        b = int(short[0])
        raise ValueError(
            f"lengths[{b}]={int(call.cache.lengths[b])} is less than its {int(counts[b])} queries: it counts them"
        )


# --- the registered op: schema and fake, for torch.compile and torch.export


@torch.library.custom_op("flashkernels::decode", mutates_args=())
def decode_op(
    q: Tensor, k: Tensor, v: Tensor, block_table: Tensor, lengths: Tensor, k_scale: Tensor | None,
    v_scale: Tensor | None, tree_mask: Tensor | None, alibi_slopes: Tensor | None, sinks: Tensor | None,
    cu_seqlens_q: Tensor | None, tokens: int, causal: bool, softmax_scale: float, window_left: int, window_right: int,
    softcap: float, need_lse: bool, batch_invariant: bool, impl: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    cache = PagedCache(k, v, block_table, lengths, k_scale, v_scale)
    if not q.is_cuda:
        cache.check()
    call = Call(q, cache, tree_mask, alibi_slopes, sinks, cu_seqlens_q)
    window = (window_left, window_right)
    out, lse = _launched(call, tokens, causal, softmax_scale, window, softcap, need_lse, batch_invariant, impl)
    return out, q.new_empty(0, dtype=torch.float32) if lse is None or not need_lse else lse


@decode_op.register_fake
def _fake(
    q: Tensor, k: Tensor, v: Tensor, block_table: Tensor, lengths: Tensor, k_scale: Tensor | None,
    v_scale: Tensor | None, tree_mask: Tensor | None, alibi_slopes: Tensor | None, sinks: Tensor | None,
    cu_seqlens_q: Tensor | None, tokens: int, causal: bool, softmax_scale: float, window_left: int, window_right: int,
    softcap: float, need_lse: bool, batch_invariant: bool, impl: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    packed = 2 if k.dtype == torch.uint8 else 1
    return empty_output(q, v.shape[-1] * packed), empty_lse(q) if need_lse else q.new_empty(0, dtype=torch.float32)
