"""Public attention functions: the table of implementations, the eager hot path, the custom op and its autograd."""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch._C import _is_any_autocast_enabled as any_autocast
from torch.compiler import is_compiling

from flashkernels import hardware
from flashkernels.arguments import check_flag
from flashkernels.attention import aligned, sdpa
from flashkernels.attention.dropout import seed_tensor
from flashkernels.attention.hopper import backward_tiles as hopper_backward
from flashkernels.attention.problem import AttentionProblem, BackwardProblem
from flashkernels.attention.tensors import (
    Given,
    Tensors,
    addressed,
    empty_output,
    lse_dtype,
    lse_shape,
)
from flashkernels.attention.triton import backward_tiles
from flashkernels.attention.validation import (
    LAYOUTS,
    check_cu_values,
    check_dropout,
    check_pages,
    described,
)
from flashkernels.dispatch import Impl, UnsupportedError, lacks_triton, leaves_the_cpu, serving
from flashkernels.hardware import GPUS, Gpu
from flashkernels.jit.eager import Plans, followed_only
from flashkernels.tiling import Tile, TilingError, override


def needs_hopper(problem: AttentionProblem, gpu: Gpu | None) -> str | None:
    """Why the Hopper kernel cannot serve, or None."""
    if problem.device != "cuda" or gpu is None:
        return f"needs a Hopper GPU, the tensors are on {problem.device}"
    if gpu.capability != (9, 0):
        return f"needs compute capability 9.0, {gpu.name} has {gpu.capability[0]}.{gpu.capability[1]}"
    if problem.dtype not in ("fp8", "fp16", "bf16"):
        return f"has no {problem.dtype} kernel"
    step = 16 // problem.element_bytes
    for name, dim in (("head_dim", problem.head_dim), ("head_dim of v", problem.head_dim_v)):
        if dim % step:
            return f"{name}={dim} is not a multiple of {step}: TMA cannot address its rows"
        most = 256 if problem.dtype == "fp8" else 512
        if not 16 <= dim <= most:
            return f"{name}={dim} is not in 16 to {most}"
    if problem.mask:
        return "takes no mask tensor"
    if problem.dropout_p:
        return "has no dropout"
    if problem.page_size % 64:
        return f"page_size={problem.page_size} is not a multiple of 64"
    if problem.unaddressable:
        return f"TMA cannot read {problem.unaddressable}"
    if problem.empty:
        return "an empty problem has nothing to load"
    return None


def leaves_triton_tiles(problem: AttentionProblem, gpu: Gpu | None) -> str | None:
    """`use_tile` may ask for a tile that only the Triton kernel has."""
    forced = override()
    if isinstance(forced, Tile) or forced in ("standard", "split_d"):
        return f"use_tile asks for {getattr(forced, 'name', forced)}, which is the Triton kernel's"
    return None


def needs_triton(problem: AttentionProblem, gpu: Gpu | None) -> str | None:
    """Why the portable Triton kernel cannot serve, or None."""
    forced = override()
    if not isinstance(forced, (str, Tile, NoneType)):
        return f"use_tile asks for {forced.name}, which is another kernel's"
    if isinstance(forced, Tile) and forced.tma and problem.page_size:
        return f"use_tile asks for {forced.name}, whose loads by TMA cannot follow a block table"
    return refuses(problem, gpu)


def refuses(problem: AttentionProblem, gpu: Gpu | None) -> str | None:
    """What keeps our Triton kernels, forward and backward, from serving, or None."""
    if reason := lacks_triton(problem.device, problem.dtype, gpu):
        return reason
    if problem.dtype == "fp8":
        return "has no fp8 kernel"
    largest = max(problem.head_dim, problem.head_dim_v)
    return f"head_dim={largest} is over 512" if largest > 512 else None


def needs_triton_backward(problem: BackwardProblem, gpu: Gpu | None) -> str | None:
    """Why the fused backward cannot serve, or None."""
    if reason := refuses(problem.call, gpu):
        return reason
    if not problem.saved:
        return "needs the output and the log-sum-exp, which this forward did not keep"
    if gpu is not None and problem.call.narrow and not problem.call.empty:
        return problem.call.narrow
    try:
        backward_tiles.choose(problem, gpu or GPUS["h200"])
    except TilingError as error:
        return str(error)
    return None


def leaves_hopper(problem: BackwardProblem, gpu: Gpu | None) -> str | None:
    """The backward follows a forward that was asked for by name."""
    if problem.impl in ("triton", "torch"):
        return f"impl={problem.impl!r} was asked for"
    return None


def leaves_the_backward(problem: BackwardProblem, gpu: Gpu | None) -> str | None:
    """The backward follows a forward that was asked for by name; the interpreter is for tests."""
    if problem.impl == "torch":
        return "impl='torch' was asked for"
    return leaves_the_cpu(problem.call, gpu) if problem.impl not in ("aligned", "triton") else None


# Best first. "auto" takes the first row that does not reject the problem.
IMPLS = (
    Impl("hopper", "flashkernels.attention.hopper.forward", rejects=needs_hopper, defers=leaves_triton_tiles),
    Impl("aligned", "flashkernels.attention.aligned", rejects=aligned.rejects, defers=aligned.defers),
    Impl("triton", "flashkernels.attention.triton.forward", rejects=needs_triton, defers=leaves_the_cpu),
    Impl("sdpa", "flashkernels.attention.sdpa", rejects=sdpa.rejects),
    Impl("torch", "flashkernels.attention.reference"),
)
# Of the gradients, always by "auto": the first row that neither rejects nor defers. FP8 and pages have none.
BACKWARD_IMPLS = (
    Impl("hopper", "flashkernels.attention.hopper.backward", rejects=hopper_backward.rejects, defers=leaves_hopper),
    Impl("aligned", "flashkernels.attention.aligned_backward", rejects=aligned.rejects_gradients,
         defers=leaves_the_backward),
    Impl("triton", "flashkernels.attention.triton.backward", rejects=needs_triton_backward, defers=leaves_the_backward),
    Impl("torch", "flashkernels.attention.recompute"),
)


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, softmax_scale: float | None = None,
    window: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None, mask: Tensor | None = None, q_scale: Tensor | None = None,
    k_scale: Tensor | None = None, v_scale: Tensor | None = None, layout: str = "bshd", return_lse: bool = False,
    impl: str = "auto", dropout_p: float = 0.0, dropout_seed: int | Tensor | None = None, deterministic: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Softmax attention at any head dimension: `softmax(scale * Q Kᵀ + ...) V`, without an S x S buffer on a GPU.

    Logits are made in this order: scale, softcap `c * tanh(s / c)`, ALiBi `- slope * |i + S_k - S_q - j|`, then hiding
    by causal, window and mask, then sinks.

    Args:
        q: (B, S_q, H, D), fp16, bf16, fp32 or FP8 (float8_e4m3fn; fp64 on the `torch` implementation), any strides.
            On a GPU 16-bit rows of q, k and v that are no multiple of 16 bytes are copied first: `explain` says so.
        k: (B, S_k, H_kv, D); H is a multiple of H_kv.
        v: (B, S_k, H_kv, D_v).
        causal: query i sees keys j <= i + S_k - S_q (aligned bottom-right).
        softmax_scale: default D ** -0.5.
        window: (left, right) keys around the diagonal that stay visible, both inclusive; -1 is unbounded.
        softcap: bounds the logits; 0 turns it off.
        alibi_slopes: (H,) or (B, H), any float dtype.
        sinks: (H,), any float dtype: one more logit per head that joins the denominator and has no value.
        mask: broadcastable to (B, H, S_q, S_k); bool: True where a query may attend; float: added to the logits. The
            gradient of a float mask has its shape and dtype: sums over what is broadcast, in fp32. Broadcast is cheaper
            than expanded: what torch has expanded gets a gradient of the full size.
        q_scale, k_scale, v_scale: fp32, positive: what FP8 numbers are to be multiplied by. (B, H) and twice (B, H_kv),
            or for q and k one for each 128 rows: (B, H, ceil(S_q / 128)) and (B, H_kv, ceil(S_k / 128)).
            `fk.quantise_qkv` makes them. FP8 has no gradients.
        layout: "bshd", or "bhsd" for (B, H, S, D) tensors, read by their strides without a copy.
        return_lse: also return the natural log-sum-exp of the logits, fp32.
        impl: "auto", or the name of the one implementation that must serve.
        dropout_p: share of the softmax weights to drop, in [0, 1); those that stay are multiplied by 1 / (1 - p). The
            log-sum-exp is that of all keys. A dropped key's value does not reach the output, not even a NaN.
        dropout_seed: an int, or one int64 in a tensor on q's device, read by the kernels: the same seed drops the same
            weights, whatever the implementation, and in the backward. None draws one from torch's generator of the
            device. A CUDA graph replays an int as it was captured; a tensor is read again, and None draws again.
        deterministic: makes the gradients the same to the bit in every run; so does
            `torch.use_deterministic_algorithms(True)`. The forward always is, and so are the gradients of k, v, a mask
            and the rest. That of q is not, by default: on a GPU the fused backwards may add it up in an order that
            varies, and its last bits with it.

    Returns:
        The output (B, S_q, H, D_v) in q's dtype (bf16 for FP8) and the layout asked for; with `return_lse` also
        (B, H, S_q). A row that sees no key is 0 with log-sum-exp -inf. The same to the bit in every run.

    >>> import torch, flashkernels as fk
    >>> q = torch.randn(2, 5, 8, 72)
    >>> k, v = torch.randn(2, 7, 2, 72), torch.randn(2, 7, 2, 40)
    >>> out, lse = fk.attention(q, k, v, causal=True, return_lse=True)
    >>> out.shape, lse.shape
    (torch.Size([2, 5, 8, 40]), torch.Size([2, 8, 5]))
    """
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} is not one of {', '.join(map(repr, LAYOUTS))}")
    if layout == "bhsd":
        q, k, v = (x.transpose(1, 2) if isinstance(x, Tensor) and x.dim() == 4 else x for x in (q, k, v))
    out, lse = _call(
        (q, k, v, alibi_slopes, sinks, mask, None, None, None, q_scale, k_scale, v_scale, None),
        (0, 0, causal, softmax_scale, window, softcap, layout, return_lse, impl, dropout_p),
        deterministic, dropout_seed,
    )  # fmt: skip
    if layout == "bhsd":
        out = out.transpose(1, 2)
    if not return_lse:
        return out
    assert lse is not None  # it was asked for
    return out, lse


def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    *,
    causal: bool = False, softmax_scale: float | None = None, window: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, sinks: Tensor | None = None, block_table: Tensor | None = None,
    return_lse: bool = False, impl: str = "auto", dropout_p: float = 0.0, dropout_seed: int | Tensor | None = None,
    deterministic: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`attention` of a ragged batch: sequences of any lengths (also 0) packed one after the other, without padding.

    Args:
        q: (total_q, H, D); sequence b is rows cu_seqlens_q[b] to cu_seqlens_q[b + 1].
        k, v: (total_k, H_kv, D) and (total_k, H_kv, D_v).
        cu_seqlens_q, cu_seqlens_k: (B + 1,) int32 on q's device, from 0 to total. On a GPU their values are not read
            by the host, so they are not checked there.
        max_seqlen_q, max_seqlen_k: upper bounds of the lengths. Rows of a sequence past max_seqlen_q stay unwritten.
        block_table: (B, max_pages) int32: key j of sequence b is row j % page_size of page
            block_table[b, j // page_size]. Then k and v are pages (num_pages, page_size, H_kv, D) and (..., D_v), and
            cu_seqlens_k only gives the lengths. There are no gradients through pages.
        The other arguments are those of `attention`; there is no mask.

    Returns:
        The output (total_q, H, D_v); with `return_lse` also (H, total_q).

    >>> import torch, flashkernels as fk
    >>> q, k, v = (torch.randn(7, 2, 40) for _ in range(3))
    >>> ends = torch.tensor([0, 3, 7], dtype=torch.int32)
    >>> fk.attention_varlen(q, k, v, ends, ends, 4, 4, causal=True).shape
    torch.Size([7, 2, 40])
    """
    for name, cu in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(cu, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(cu).__name__}")
    settings = (
        max_seqlen_q, max_seqlen_k, causal, softmax_scale, window, softcap, "bshd", return_lse, impl, dropout_p
    )  # fmt: skip
    tensors = (q, k, v, alibi_slopes, sinks, None, cu_seqlens_q, cu_seqlens_k, block_table, None, None, None, None)
    out, lse = _call(tensors, settings, deterministic, dropout_seed)
    if not return_lse:
        return out
    assert lse is not None  # it was asked for
    return out, lse


def problem_of(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> AttentionProblem:
    """The problem that `attention(q, k, v, **arguments)` poses, after the same checks."""
    settings: dict[str, Any] = {
        "causal": False, "softmax_scale": None, "window": (-1, -1), "softcap": 0.0, "alibi_slopes": None, "sinks": None,
    }  # fmt: skip
    settings |= arguments
    settings.pop("impl", None)
    check_flag("deterministic", settings.pop("deterministic", False))
    if isinstance(settings["window"], list):
        settings["window"] = tuple(settings["window"])
    seed, layout = settings.pop("dropout_seed", None), settings.get("layout", "bshd")
    settings["need_lse"] = settings.pop("return_lse", False)
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} is not one of {', '.join(map(repr, LAYOUTS))}")
    if layout == "bhsd":
        q, k, v = (x.transpose(1, 2) if isinstance(x, Tensor) and x.dim() == 4 else x for x in (q, k, v))
    check_dropout(settings.get("dropout_p", 0.0), seed, q)
    return addressed(described(q, k, v, **settings), Tensors(q, k, v))


# --- the eager hot path: everything that can be decided from shapes and flags is decided once per signature


def _problem(
    tensors: Tensors, max_q: int, max_k: int, causal: bool, softmax_scale: float | None, window: tuple[int, int],
    softcap: float, layout: str = "bshd", need_lse: bool = False, dropout_p: float = 0.0,
) -> AttentionProblem:  # fmt: skip
    q, k, v, alibi_slopes, sinks, mask, cu_seqlens_q, cu_seqlens_k, block_table, q_scale, k_scale, v_scale, _ = tensors
    return described(
        q, k, v, causal=causal, softmax_scale=softmax_scale, window=window, softcap=softcap, alibi_slopes=alibi_slopes,
        sinks=sinks, mask=mask, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, block_table=block_table,
        q_scale=q_scale, k_scale=k_scale, v_scale=v_scale,
        max_seqlen_q=max_q, max_seqlen_k=max_k, need_lse=need_lse, dropout_p=dropout_p, layout=layout,
    )  # fmt: skip


def _plan(tensors: tuple[Any, ...], settings: tuple[Any, ...]) -> Callable[[tuple[Any, ...]], Attention]:
    """The prepared launch for tensors of this kind: validation, dispatch and tiling happen here, once."""
    given = Tensors(*tensors)
    max_q, max_k, causal, softmax_scale, window, softcap, layout, need_lse, impl, dropout_p = settings[:10]
    problem = addressed(
        _problem(given, max_q, max_k, causal, softmax_scale, window, softcap, layout, need_lse, dropout_p), given
    )
    gpu = hardware.detect(given.q.device) if problem.device == "cuda" else None
    run = serving(IMPLS, problem, gpu, impl).plan(problem, gpu, given)
    scale = problem.head_dim**-0.5 if softmax_scale is None else softmax_scale
    ends_known = problem.varlen and problem.device != "cuda"  # reading them would wait for a GPU

    def call(tensors: tuple[Any, ...]) -> Attention:
        if ends_known:
            _check_ends(Tensors(*tensors), max_q, max_k)
        found: Attention = run(tensors, scale, softcap)
        return found

    return call


_plans = Plans(_plan)
Attention = tuple[Tensor, "Tensor | None"]


def _settings(settings: tuple[Any, ...]) -> tuple[Any, ...]:
    """`_plan`'s, with the tile in force, and the types of the window's sides: True is no number of keys."""
    left, right = settings[4]
    return (*settings, override(), type(left), type(right))


def _check_ends(tensors: Tensors, max_q: int, max_k: int) -> None:
    """The values of a ragged batch."""
    assert tensors.cu_seqlens_q is not None and tensors.cu_seqlens_k is not None
    check_cu_values("cu_seqlens_q", tensors.cu_seqlens_q, tensors.q.shape[0], max_q)
    keys = int(tensors.cu_seqlens_k[-1]) if tensors.block_table is not None else tensors.k.shape[0]
    check_cu_values("cu_seqlens_k", tensors.cu_seqlens_k, keys, max_k)
    if tensors.block_table is not None:
        check_pages(tensors.block_table, tensors.cu_seqlens_k, *tensors.k.shape[:2])


def _call(
    given: tuple[Any, ...], settings: tuple[Any, ...], deterministic: bool, dropout_seed: int | Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Straight to the kernel where nothing watches, and with autograd alone by a function of its own, which costs the
    CPU a third of the registered op; through that under compile, transforms and modes.

    `given` are the fields of `Tensors`; `settings` those of `_problem` up to `need_lse`, with impl and dropout_p."""
    window, dropout_p = settings[4], settings[9]
    if isinstance(window, list):
        window = tuple(window)
        settings = (*settings[:4], window, *settings[5:])
    if deterministic is not False:
        check_flag("deterministic", deterministic)
    if settings[7] is not False:
        check_flag("return_lse", settings[7])
    if type(dropout_p) is not float:
        check_dropout(dropout_p, None, given[0])
    eager = isinstance(window, tuple) and len(window) == 2 and not is_compiling()
    plain = eager and dropout_seed is None and not dropout_p and not any_autocast()
    run = None
    if plain:  # `_settings` written out: a call less
        run = _plans.ready(given, (*settings, override(), type(window[0]), type(window[1])))
    if run is not None:
        return run(given)
    tensors = Tensors(*given)
    device = tensors.q.device.type if isinstance(tensors.q, Tensor) else ""
    if (dropout_p != 0 or dropout_seed is not None) and device:
        check_dropout(dropout_p, dropout_seed, tensors.q)
        if dropout_p:
            tensors = tensors._replace(dropout_seed=seed_tensor(dropout_seed, tensors.q.device))
    if device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            return _call(_autocast(tensors, device), settings, deterministic, tensors.dropout_seed)
    if eager and not plain:
        run = _plans.ready(tensors, _settings(settings))
        if run is not None:
            return run(tensors)
    max_q, max_k, causal, softmax_scale, _, softcap, layout, need_lse, impl, _ = settings
    followed = eager and device != "" and tensors.q.shape[-1:] > (0,) and followed_only(tensors)
    if not followed:  # the errors of eager; what autograd alone follows meets them in `_plan`, once for each kind
        _problem(tensors, max_q, max_k, causal, softmax_scale, window, softcap, layout, need_lse, dropout_p)
    scale = tensors.q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    keep = need_lse or (_fusable(device, impl) and _tracked(tensors))
    op: Any = Attended.apply if followed else attention_op
    return op(
        *tensors[:12], max_q, max_k, causal, scale, window[0], window[1], softcap, layout, keep, impl,
        tensors.dropout_seed, dropout_p, deterministic,
    )  # fmt: skip


def _tracked(tensors: Tensors) -> bool:
    """Whether autograd follows any of them."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def _fusable(device: str, impl: str) -> bool:
    """Whether the fused backward may serve a call. Only then is its forward asked for a log-sum-exp, and kept."""
    return impl in ("aligned", "triton") or (device == "cuda" and impl != "torch")


def _autocast(tensors: Tensors, device: str) -> Tensors:
    """Under autocast, q, k and v take its 16-bit type, as torch's own attention does."""
    dtype = torch.get_autocast_dtype(device)
    castable = (torch.float32, torch.float16, torch.bfloat16)
    q, k, v = (x.to(dtype) if isinstance(x, Tensor) and x.dtype in castable else x for x in tensors[:3])
    return tensors._replace(q=q, k=k, v=v)


# --- the registered op: schema, fake and autograd, for torch.compile, torch.export and training


def attend(
    q: Tensor, k: Tensor, v: Tensor, alibi_slopes: Tensor | None, sinks: Tensor | None, mask: Tensor | None,
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, block_table: Tensor | None, q_scale: Tensor | None,
    k_scale: Tensor | None, v_scale: Tensor | None, max_seqlen_q: int, max_seqlen_k: int, causal: bool,
    softmax_scale: float, window_left: int, window_right: int, softcap: float, layout: str, need_lse: bool, impl: str,
    dropout_seed: Tensor | None = None, dropout_p: float = 0.0, deterministic: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    tensors = Tensors(
        q, k, v, alibi_slopes, sinks, mask, cu_seqlens_q, cu_seqlens_k, block_table, q_scale, k_scale, v_scale,
        dropout_seed,
    )  # fmt: skip
    window = (window_left, window_right)
    settings = (max_seqlen_q, max_seqlen_k, causal, softmax_scale, window, softcap, layout, need_lse, impl, dropout_p)
    chosen = _settings(settings)
    run = _plans.ready(tensors, chosen) or _plans.find(tensors, chosen)  # the former takes less time
    out, lse = run(tensors)
    return out, q.new_empty(0, dtype=lse_dtype(q)) if lse is None or not need_lse else lse


attention_op = torch.library.custom_op("flashkernels::attention", attend, mutates_args=())


@attention_op.register_fake
def _fake(
    q: Tensor, k: Tensor, v: Tensor, alibi_slopes: Tensor | None, sinks: Tensor | None, mask: Tensor | None,
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, block_table: Tensor | None, q_scale: Tensor | None,
    k_scale: Tensor | None, v_scale: Tensor | None, max_seqlen_q: int, max_seqlen_k: int, causal: bool,
    softmax_scale: float, window_left: int, window_right: int, softcap: float, layout: str, need_lse: bool, impl: str,
    dropout_seed: Tensor | None = None, dropout_p: float = 0.0, deterministic: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out = empty_output(q, v.shape[-1], layout)
    if not need_lse:
        return out, q.new_empty(0, dtype=lse_dtype(q))
    return out, q.new_empty(lse_shape(q), dtype=lse_dtype(q))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    if inputs[8] is not None:
        raise UnsupportedError("block_table: there are no gradients through the pages of a cache")
    if inputs[0].dtype == torch.float8_e4m3fn:
        raise UnsupportedError("q.dtype=torch.float8_e4m3fn: FP8 has no gradients")
    *settings, need_lse, impl, dropout_seed, dropout_p, deterministic = inputs[12:]
    kept = output if need_lse and _fusable(inputs[0].device.type, impl) else (None, None)
    ctx.save_for_backward(*inputs[:8], *kept, dropout_seed)
    ctx.set_materialize_grads(False)
    ctx.settings, ctx.has_lse = (*settings[:-1], impl), need_lse
    ctx.dropout_p, ctx.deterministic = dropout_p, deterministic


def _backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
    *inputs, out, lse, dropout_seed = ctx.saved_tensors
    q, v = inputs[0], inputs[2]
    wanted = ctx.needs_input_grad[:6]
    if not ctx.has_lse:  # what stands in for it is empty
        grad_lse = None
    if grad_out is None:
        if grad_lse is None:
            return (None,) * 25
        grad_out = q.new_zeros(()).expand(*q.shape[:-1], v.shape[-1])
    tensors = (*inputs, *(None,) * 4, dropout_seed, grad_out, grad_lse, out, lse)
    run = _backward_plans.ready(tensors, _backward_settings(ctx.settings, wanted, ctx.dropout_p, ctx.deterministic))
    if run is not None:
        return (*run(tensors), *(None,) * 19)
    grads = attention_backward_op(
        grad_out, grad_lse, out, lse, *inputs, *ctx.settings, [*wanted], dropout_seed, ctx.dropout_p, ctx.deterministic
    )
    return (*(g if want else None for g, want in zip(grads, wanted, strict=True)), *(None,) * 19)


attention_op.register_autograd(_backward, setup_context=_setup)


class Attended(torch.autograd.Function):
    """The registered op without torch's dispatcher."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        out, lse = attend(*inputs)
        # A view that was made in here could not be changed in place outside, though nobody else has its memory.
        output = (out.data if out._is_view() else out, lse)
        _setup(ctx, inputs, output)
        return output

    backward = staticmethod(_backward)


def _backward_settings(
    settings: tuple[Any, ...], wanted: tuple[bool, ...], dropout_p: float, deterministic: bool
) -> tuple[Any, ...]:
    """`_plan_backward`'s, with torch's own wish for gradients that are the same in every run."""
    return (*settings, wanted, dropout_p, deterministic or torch.are_deterministic_algorithms_enabled())


def _plan_backward(tensors: tuple[Any, ...], settings: tuple[Any, ...]) -> Callable[[tuple[Any, ...]], Gradients]:
    """The prepared launches for gradients of this kind. `tensors` are the fields of `Tensors`, and then of `Given`."""
    inputs = len(Tensors._fields)
    first, given = Tensors(*tensors[:inputs]), Given(*tensors[inputs:])
    max_q, max_k, causal, softmax_scale, left, right, softcap, impl, wanted, dropout_p, deterministic = settings
    names = tuple(name for name, want in zip(Tensors._fields, wanted, strict=False) if want)
    call = _problem(first, max_q, max_k, causal, softmax_scale, (left, right), softcap, dropout_p=dropout_p)
    call = addressed(call, first)
    if call.heads == 0:
        return lambda tensors: [torch.zeros_like(x) if w else None for x, w in zip(tensors, wanted, strict=False)]
    problem = BackwardProblem(call, names, impl, saved=given.lse is not None, deterministic=deterministic)
    gpu = hardware.detect(first.q.device) if call.device == "cuda" else None
    run = serving(BACKWARD_IMPLS, problem, gpu).plan(problem, gpu, first, given)

    def differentiated(tensors: tuple[Any, ...]) -> Gradients:
        grads: Gradients = run(Tensors(*tensors[:inputs]), Given(*tensors[inputs:]), softmax_scale, softcap)
        return [g if want else None for g, want in zip(grads, wanted, strict=True)]

    return differentiated


_backward_plans = Plans(_plan_backward)
Gradients = list["Tensor | None"]  # of q, k, v, alibi_slopes, sinks and mask


def gradients(
    grad_out: Tensor, grad_lse: Tensor | None, out: Tensor | None, lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
    alibi_slopes: Tensor | None, sinks: Tensor | None, mask: Tensor | None, cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None, max_seqlen_q: int, max_seqlen_k: int, causal: bool, softmax_scale: float,
    window_left: int, window_right: int, softcap: float, impl: str, wanted: list[bool],
    dropout_seed: Tensor | None = None, dropout_p: float = 0.0, deterministic: bool = False,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v, alibi_slopes, sinks and mask; an empty tensor stands for one that nobody wants."""
    inputs = (q, k, v, alibi_slopes, sinks, mask, cu_seqlens_q, cu_seqlens_k, *(None,) * 4, dropout_seed)
    tensors = (*inputs, grad_out, grad_lse, out, lse)
    settings = (max_seqlen_q, max_seqlen_k, causal, softmax_scale, window_left, window_right, softcap, impl)
    chosen = _backward_settings(settings, tuple(wanted), dropout_p, deterministic)
    grads: Gradients = _backward_plans.find(tensors, chosen)(tensors)
    return [q.new_empty(0) if g is None else g for g in grads]


attention_backward_op = torch.library.custom_op("flashkernels::attention_backward", gradients, mutates_args=())


@attention_backward_op.register_fake
def _fake_backward(
    grad_out: Tensor, grad_lse: Tensor | None, out: Tensor | None, lse: Tensor | None, *inputs: Any,
) -> list[Tensor]:  # fmt: skip
    tensors, wanted = inputs[:6], inputs[16]
    return [x.new_empty(x.shape) if want else tensors[0].new_empty(0) for x, want in zip(tensors, wanted, strict=True)]
