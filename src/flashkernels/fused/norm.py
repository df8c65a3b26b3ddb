"""RMS norm and layer norm over the last dimension, with what surrounds them in a transformer: the residual addition
before and the quantisation after."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashkernels.dispatch import Impl, UnsupportedError, check_impl, leaves_the_cpu, serving
from flashkernels.fused.rows import (
    RowProblem,
    check_choice,
    check_like,
    check_number,
    check_rows,
    gpu_of,
    like,
    needs_triton,
    nothing,
    registered,
    row_problem,
)
from flashkernels.hardware import Gpu
from flashkernels.jit.eager import Plans, Run

NUMERICS = ("fp32", "hf")
QUANTISE = {"fp8": (torch.float8_e4m3fn, 448), "int8": (torch.int8, 127)}  # dtype, largest number
QUANTISED = (None, *QUANTISE)
LEAST_SCALE = 2.0**-126  # below, fp32 has too few bits for a row's largest number to come out as that of the format

# Best first. "auto" takes the first row that does not reject the problem. `torch` is in this file.
IMPLS = (
    Impl("triton", "flashkernels.fused.triton.norm", rejects=needs_triton, defers=leaves_the_cpu),
    Impl("torch", "flashkernels.fused.norm"),
)


class Norm(NamedTuple):
    """What a call asks for, beside its tensors."""

    centred: bool  # layer norm: the mean is subtracted
    eps: float
    rounded: bool  # numerics="hf"
    quantise: str  # "", "fp8" or "int8"
    stats: bool  # mean and 1 / deviation are wanted, for gradients
    impl: str


class Normed(NamedTuple):
    """What an implementation returns; None for what the call does not have."""

    out: Tensor
    total: Tensor | None  # x + residual
    scale: Tensor | None  # of quantised rows, fp32
    mean: Tensor | None  # fp32, like scale one for each row
    rstd: Tensor | None  # 1 / sqrt(variance + eps)


def rms_norm(
    x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6, residual: Tensor | None = None,
    bias: Tensor | None = None, numerics: str = "fp32", quantise: str | None = None, impl: str = "auto",
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """`x / sqrt(mean(x²) + eps) * weight + bias`, over the last dimension, in fp32.

    Args:
        x: (..., N), fp16, bf16, fp32 (fp64 on the `torch` implementation). Rows may be anywhere two strides lead; a
            tensor that needs more of them, or whose last dimension is not contiguous, is copied first.
        weight, bias: (N,), any of these dtypes, or None.
        residual: like x. The norm is of `x + residual`, rounded to x's dtype, which is returned too.
        numerics: "fp32" rounds once, at the end. "hf" rounds the normalised x before `weight` multiplies it, as the
            Llama models of transformers do.
        quantise: "fp8" (e4m3) or "int8": each row is divided by its largest number and rounded. There are no gradients.
        impl: "auto", or the name of the one implementation that must serve.

    Returns:
        The norm, like x; with `quantise` followed by the scales (...) fp32, to multiply its numbers by; with `residual`
        followed by `x + residual`. Deterministic bit for bit, gradients too.

    >>> import torch, flashkernels as fk
    >>> x, weight = torch.randn(2, 5, 4096), torch.ones(4096)
    >>> out, total = fk.rms_norm(x, weight, residual=x)
    >>> out.shape, torch.equal(total, x + x)
    (torch.Size([2, 5, 4096]), True)
    >>> small, scale = fk.rms_norm(x, weight, quantise="fp8")
    >>> small.dtype, scale.shape
    (torch.float8_e4m3fn, torch.Size([2, 5]))
    """
    return _call(False, x, weight, bias, residual, eps, numerics, quantise, impl)


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5,
    residual: Tensor | None = None, quantise: str | None = None, impl: str = "auto",
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    """`(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias`, over the last dimension, in fp32.

    The arguments and what is returned are those of `rms_norm`.

    >>> import torch, flashkernels as fk
    >>> x = torch.randn(3, 100)
    >>> torch.allclose(fk.layer_norm(x), torch.nn.functional.layer_norm(x, (100,)), atol=1e-5)
    True
    """
    return _call(True, x, weight, bias, residual, eps, "fp32", quantise, impl)


def _call(
    centred: bool, x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, eps: float,
    numerics: str, quantise: str | None, impl: str,
) -> Tensor | tuple[Tensor, ...]:  # fmt: skip
    check_choice("numerics", numerics, NUMERICS)
    check_choice("quantise", quantise, QUANTISED)
    small, rounded = quantise or "", numerics == "hf"
    run = forward.ready((x, weight, bias, residual), (centred, eps, rounded, small, False, impl))
    if run is not None:
        out, total, scale, _, _ = run(x, weight, bias, residual)
    else:
        _check(x, weight, bias, residual, eps)  # the same errors as eager
        check_impl(impl, IMPLS)
        out, total, scale, _, _ = norm_op(x, weight, bias, residual, centred, eps, rounded, small, impl)
    if quantise is None:
        return out if residual is None else (out, total)
    return (out, scale) if residual is None else (out, scale, total)


def _check(x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, eps: float) -> None:
    check_rows("x", x)
    check_eps(eps)
    for name, y in (("weight", weight), ("bias", bias)):
        check_vector(name, y, x)
    if residual is not None:
        check_like("residual", residual, x)


def check_eps(eps: float) -> None:
    check_number("eps", eps)
    if eps < 0:
        raise ValueError(f"eps={eps} must not be negative")


def check_vector(name: str, y: Tensor | None, x: Tensor) -> None:
    """y is None, or a vector as long as the rows of x."""
    if y is None:
        return
    check_rows(name, y)
    if y.dim() != 1 or y.shape[0] != x.shape[-1]:
        raise ValueError(f"{name} has shape {tuple(y.shape)}; expected ({x.shape[-1]},), the last size of x")
    if (y.dtype == torch.float64) != (x.dtype == torch.float64):
        raise TypeError(f"{name}.dtype={y.dtype} with x.dtype={x.dtype}: torch.float64 goes with itself only")
    if y.device != x.device:
        raise ValueError(f"{name}.device={y.device} differs from x.device={x.device}")


def _plan(tensors: tuple[Any, ...], settings: tuple[Any, ...]) -> Run:
    (x, weight, bias, residual), call = tensors, Norm(*settings)
    _check(x, weight, bias, residual, call.eps)
    written = 1 / x.element_size() if call.quantise else 1
    streams = written + (1 if residual is None else 3)
    name = "layer_norm" if call.centred else "rms_norm"
    problem, gpu = row_problem(name, x, streams, call.quantise), gpu_of(x)
    return serving(IMPLS, problem, gpu, call.impl).forward_plan(problem, gpu, tensors, call)


def _plan_backward(tensors: tuple[Any, ...], call: Any) -> Run:
    x = tensors[2]
    streams = 3 if tensors[1] is None else 4
    name = "layer_norm" if call.centred else "rms_norm"
    problem, gpu = row_problem(f"{name}_backward", x, streams), gpu_of(x)
    return serving(IMPLS, problem, gpu, call.impl).backward_plan(problem, gpu, tensors, call)


forward, _backward = Plans(_plan), Plans(_plan_backward)


def empty(call: Norm, x: Tensor, residual: Tensor | None) -> Normed:
    """The outputs of a call, to be filled; all are contiguous."""
    rows, wide = x.shape[:-1], accumulator(x)
    return Normed(
        out=x.new_empty(x.shape, dtype=QUANTISE[call.quantise][0]) if call.quantise else like(x),
        total=None if residual is None else like(x),
        scale=x.new_empty(rows, dtype=torch.float32) if call.quantise else None,
        mean=x.new_empty(rows, dtype=wide) if call.stats and call.centred else None,
        rstd=x.new_empty(rows, dtype=wide) if call.stats else None,
    )


def without_numbers(found: Normed) -> Normed:
    """The outputs of rows of width 0."""
    for y, value in ((found.scale, 1.0), (found.mean, 0.0), (found.rstd, 0.0)):
        if y is not None:
            y.fill_(value)
    return found


def accumulator(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


# --- the `torch` implementation


def forward_plan(problem: RowProblem, gpu: Gpu | None, tensors: tuple[Any, ...], call: Norm) -> Run:
    def run(x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None) -> Normed:
        found = empty(call, x, residual)
        if not problem.width:
            return without_numbers(found)
        total = x if residual is None or found.total is None else found.total.copy_(x + residual)
        wide = total.to(accumulator(x))
        mean = wide.mean(-1) if call.centred else torch.zeros_like(wide[..., 0])
        rstd = torch.rsqrt((wide - mean[..., None]).square().mean(-1) + call.eps)
        y = (wide - mean[..., None]) * rstd[..., None]
        if call.rounded:
            y = y.to(x.dtype).to(y.dtype)
        if weight is not None:
            y = y * weight
        if bias is not None:
            y = y + bias
        if found.rstd is not None:
            found.rstd.copy_(rstd)
        if found.mean is not None:
            found.mean.copy_(mean)
        if found.scale is None:
            found.out.copy_(y)
            return found
        if call.rounded:
            y = y.to(x.dtype).to(y.dtype)
        most = QUANTISE[call.quantise][1]
        largest = y.abs().amax(-1)
        # By a tensor: on a GPU torch divides by a number as it multiplies by its reciprocal. Inf makes NaN.
        scale = largest / torch.full_like(largest, most) + (largest - largest)
        found.scale.copy_(torch.where(largest == 0, 1.0, scale.clamp(min=LEAST_SCALE)))
        small = y / found.scale[..., None]
        found.out.copy_(small.round().clamp(-most, most).nan_to_num(0.0) if call.quantise == "int8" else small)
        return found

    return run


def backward_plan(problem: RowProblem, gpu: Gpu | None, tensors: tuple[Any, ...], call: NormBackward) -> Run:
    def run(
        grad: Tensor, grad_total: Tensor | None, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = accumulator(x)
        dy, y = grad.to(wide), x.to(wide)
        y = (y - mean[..., None] if call.centred else y) * rstd[..., None]
        dx = dy if weight is None else dy * weight
        along = (dx * y).mean(-1, keepdim=True) if problem.width else 0
        dx = (dx - y * along - (dx.mean(-1, keepdim=True) if call.centred else 0)) * rstd[..., None]
        if grad_total is not None:
            dx = dx + grad_total
        out = x.new_empty(x.shape).copy_(dx)
        dy, y = (a.reshape(problem.rows, problem.width) for a in (dy, y))
        factor = y.to(x.dtype).to(wide) if call.rounded else y
        dweight = (dy * factor).sum(0) if call.need_weight else nothing(rstd)
        return out, dweight, dy.sum(0) if call.need_bias else nothing(rstd)

    return run


# --- the registered ops: schema, fake and autograd, for torch.compile, torch.export and training


@torch.library.custom_op("flashkernels::norm", mutates_args=())
def norm_op(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, centred: bool, eps: float,
    rounded: bool, quantise: str, impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return registered(forward((x, weight, bias, residual), (centred, eps, rounded, quantise, True, impl)), x)


@norm_op.register_fake
def _fake(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, residual: Tensor | None, centred: bool, eps: float,
    rounded: bool, quantise: str, impl: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    return registered(empty(Norm(centred, eps, rounded, quantise, True, impl), x, residual), x)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, residual, centred, _, rounded, quantise, impl = inputs
    if quantise:
        raise UnsupportedError(f"quantise={quantise!r} has no gradients: call it under torch.no_grad()")
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x if residual is None else output[1], weight, output[3], output[4])
    ctx.settings = centred, rounded, impl
    ctx.dtypes = [None if y is None else y.dtype for y in (weight, bias)]
    ctx.residual = residual is not None


def _gradients(ctx: Any, grad: Tensor | None, grad_total: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if grad is None:
        return (grad_total, None, None, grad_total if ctx.residual else None, *(None,) * 5)
    centred, rounded, impl = ctx.settings
    need_weight, need_bias = ctx.needs_input_grad[1:3]
    total = grad_total if ctx.residual else None
    dx, *others = norm_backward_op(grad, total, *ctx.saved_tensors, centred, rounded, need_weight, need_bias, impl)
    wanted = zip(others, ctx.dtypes, (need_weight, need_bias), strict=True)
    dweight, dbias = (dy.to(dtype) if need else None for dy, dtype, need in wanted)
    return (dx, dweight, dbias, dx if ctx.residual else None, *(None,) * 5)


norm_op.register_autograd(_gradients, setup_context=_setup)


class NormBackward(NamedTuple):
    """What the gradients of a call depend on, beside its tensors."""

    centred: bool
    rounded: bool
    need_weight: bool
    need_bias: bool
    impl: str


@torch.library.custom_op("flashkernels::norm_backward", mutates_args=())
def norm_backward_op(
    grad: Tensor, grad_total: Tensor | None, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor,
    centred: bool, rounded: bool, need_weight: bool, need_bias: bool, impl: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x (which is x + residual where there is one), weight and bias; the last two in fp32."""
    call = NormBackward(centred, rounded, need_weight, need_bias, impl)
    return _backward((grad, grad_total, x, weight, mean, rstd), call)


@norm_backward_op.register_fake
def _fake_backward(
    grad: Tensor, grad_total: Tensor | None, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor,
    centred: bool, rounded: bool, need_weight: bool, need_bias: bool, impl: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    width = x.shape[-1]
    return x.new_empty(x.shape), rstd.new_empty(width if need_weight else 0), rstd.new_empty(width if need_bias else 0)
