"""A linear layer with what surrounds it in a transformer: an RMS norm before, bias and activation after."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _is_any_autocast_enabled as any_autocast
from torch.compiler import is_compiling

from flashkernels.arguments import check_flag
from flashkernels.dispatch import Impl, check_impl, lacks_triton, leaves_the_cpu, serving
from flashkernels.fused.activation import Activation, activated, activation_backward_op
from flashkernels.fused.norm import NUMERICS, accumulator, check_eps, check_vector, norm_backward_op, norm_op
from flashkernels.fused.problem import ACTIVATIONS, LinearProblem
from flashkernels.fused.rows import DTYPES, check_choice, check_rows, gpu_of, nothing, registered
from flashkernels.fused.triton.linear_tiles import LinearTile, forced_tile
from flashkernels.hardware import Gpu
from flashkernels.jit.eager import Plans, Run

# What decides between one kernel and cuBLAS with the activation after it. Speed of our product, cuBLAS's being 1: with
# SwiGLU 0.99 and 1.01, with GELU 0.81 and 0.87, where both ways then take the same time (H200, 2026-11-15, bf16, 4096
# and 16384 rows). The others are assumed.
BOUND_BY_COMPUTE, BOUND_BY_MEMORY = 0.94, 1.0
REACHED = 0.7  # of the data sheet's peak, by cuBLAS
LAUNCH = 3e-6  # seconds that one more kernel costs
NAMES = (None, *ACTIVATIONS)
FOLDED_ROWS = 64  # the most for which a norm inside the product is expected to be faster than one before it


def _cannot(problem: LinearProblem, gpu: Gpu | None) -> str | None:
    if reason := lacks_triton(problem.device, problem.dtype, gpu):
        return reason
    if problem.normed and problem.rounded:
        return "numerics='hf' rounds the normalised x before norm_weight multiplies it; a folded norm never has it"
    return "there is nothing to normalise, x has no columns" if problem.normed and problem.depth == 0 else None


def _slower(problem: LinearProblem, gpu: Gpu | None) -> str | None:
    """Why cuBLAS and a kernel for the activation are expected to be faster than one kernel, or None."""
    if gpu is None:
        return leaves_the_cpu(problem, gpu)
    if problem.dtype == "fp32":
        return "fp32 products run outside the tensor cores, where cuBLAS is faster"
    if not problem.activation:
        return "without an activation cuBLAS has nothing left to fuse: it adds the bias itself"
    compute, memory = problem.flops() / (REACHED * gpu.peak[problem.dtype]), problem.bytes() / gpu.bandwidth
    speed = BOUND_BY_COMPUTE if compute > memory else BOUND_BY_MEMORY
    loss, gain = max(compute, memory) * (1 / speed - 1), problem.epilogue_bytes() / gpu.bandwidth + LAUNCH
    if loss <= gain:
        return None
    costs = f"{loss * 1e6:.0f} us, the activation as a kernel of its own costs {gain * 1e6:.0f}"
    return f"a product that cuBLAS does not make is expected to lose {costs}"


def _unfolded(problem: LinearProblem, gpu: Gpu | None) -> str | None:
    """Why a norm of its own is expected to be better than one inside the product, or None."""
    if problem.device == "cpu":
        return leaves_the_cpu(problem, gpu)
    if problem.dtype == "fp16":
        return "x * norm_weight may overflow fp16 before the norm scales it"
    if problem.dtype == "fp32":
        return "fp32 products run outside the tensor cores, where cuBLAS is faster"
    if problem.rows > FOLDED_ROWS:
        return f"{problem.rows} rows: the norm's own pass costs less than a product that must wait for it in registers"
    return None


def _on_the_cpu(problem: LinearProblem, gpu: Gpu | None) -> str | None:
    return "rounds between its steps, which saves nothing on the CPU" if problem.device == "cpu" else None


# Best first. "auto" takes the first row that does not reject the problem. `torch` is in this file.
IMPLS = (
    Impl("triton", "flashkernels.fused.triton.linear", rejects=_cannot, defers=_slower),
    Impl("matmul", "flashkernels.fused.matmul", defers=_on_the_cpu),
    Impl("torch", "flashkernels.fused.linear"),
)
# With a norm: inside the product, or apart from a linear layer that chooses for itself.
NORM_IMPLS = (
    Impl("triton", "flashkernels.fused.triton.linear", rejects=_cannot, defers=_unfolded),
    Impl("apart", "flashkernels.fused.matmul", defers=_on_the_cpu),
    Impl("torch", "flashkernels.fused.linear"),
)


class Linear(NamedTuple):
    """What a call asks for, beside its tensors."""

    activation: str
    interleaved: bool
    normed: bool
    eps: float
    rounded: bool  # numerics="hf"
    saved: bool  # pre-activation and 1 / rms are wanted, for gradients
    impl: str
    tile: LinearTile | None = None  # the one that `use_tile` gives

    @property
    def rows_impl(self) -> str:
        """Who serves the row-wise ops of a gradient."""
        return self.impl if self.impl in ("triton", "torch") else "auto"


class Product(NamedTuple):
    """What an implementation returns; None for what the call does not have."""

    out: Tensor
    pre: Tensor | None  # before the activation, (..., N), the gate first
    rstd: Tensor | None  # of the norm, fp32, one for each row


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str | None = None, interleaved: bool = False,
    impl: str = "auto",
) -> Tensor:  # fmt: skip
    """`f(x @ weight.T + bias)`; sums in fp32, and f of them.

    Args:
        x: (..., K), fp16, bf16, fp32 (fp64 on the `torch` implementation).
        weight: (N, K), as torch's Linear has it, of x's dtype.
        bias: (N,), of x's dtype, or None.
        activation: None, "relu", "relu2", "gelu", "gelu_tanh", "silu"; or a gated one, which takes N = 2 I to I
            columns: "swiglu", "geglu" (by tanh), "geglu_exact", "reglu", "relu2_glu". The gate's rows come first in
            weight.
        interleaved: rows of the gate and of up alternate instead. Gradients cost one more copy then.
        impl: "auto", or the name of the one implementation that must serve: "triton" does all in one kernel; "matmul"
            is torch's product, rounded to x's dtype, and a kernel for the activation. "auto" takes what is expected to
            be faster, and FLASHKERNELS_LOG=dispatch shows why.

    Returns:
        (..., N), or (..., I), like x. For gradients, x @ weight.T + bias is kept where there is an activation; nothing
        is computed twice. Under autocast x, weight and bias become 16-bit, as for torch's own linear.

    >>> import torch, flashkernels as fk
    >>> x, weight = torch.randn(2, 5, 64), torch.randn(2 * 96, 64)
    >>> fk.fused.linear(x, weight, activation="swiglu").shape
    torch.Size([2, 5, 96])
    """
    return _call(x, None, weight, bias, (_name(activation), _flag(interleaved), False, 0.0, False), impl)


def norm_linear(
    x: Tensor, norm_weight: Tensor | None, weight: Tensor, bias: Tensor | None = None, *, eps: float = 1e-6,
    activation: str | None = None, interleaved: bool = False, numerics: str = "fp32", impl: str = "auto",
) -> Tensor:  # fmt: skip
    """`linear(rms_norm(x, norm_weight), weight, bias)`, as one kernel where that is expected to be faster.

    Args:
        norm_weight: (K,), any of the dtypes of x, or None.
        numerics: "fp32", or "hf", which rounds the normalised x before `norm_weight` multiplies it, as the Llama models
            of transformers do.
        impl: "triton" folds the norm into the product: rows are multiplied by `norm_weight` on their way to the tensor
            cores and rounded to x's dtype there, their squares are summed beside, and 1 / rms scales the sums. "apart"
            is `rms_norm`, which rounds its result to x's dtype, and `linear`. Both round each x once, so their errors
            are of one size; but the folded x is not normalised yet, and in fp16 it may overflow: "auto" folds bf16
            only, and few rows, where it saves a pass and a launch.

    The other arguments and what is returned are those of `linear`. For gradients, 1 / rms of each row is kept too, and
    the normalised x is computed again.

    >>> import torch, flashkernels as fk
    >>> x, norm_weight, weight = torch.randn(5, 64), torch.ones(64), torch.randn(96, 64)
    >>> apart = fk.fused.linear(fk.rms_norm(x, norm_weight), weight, activation="gelu")
    >>> torch.allclose(fk.fused.norm_linear(x, norm_weight, weight, activation="gelu"), apart, atol=1e-5)
    True
    """
    check_choice("numerics", numerics, NUMERICS)
    settings = _name(activation), _flag(interleaved), True, eps, numerics == "hf"
    return _call(x, norm_weight, weight, bias, settings, impl)


def _name(activation: str | None) -> str:
    if type(activation) is str and activation in ACTIVATIONS:
        return activation
    if activation is not None and not isinstance(activation, str):
        raise TypeError(f"activation={activation!r} must be a str or None, got {type(activation).__name__}")
    check_choice("activation", activation, NAMES)
    return activation or ""


def _flag(interleaved: bool) -> bool:
    check_flag("interleaved", interleaved)
    return interleaved


def _call(
    x: Tensor, norm_weight: Tensor | None, weight: Tensor, bias: Tensor | None,
    settings: tuple[str, bool, bool, float, bool], impl: str,
) -> Tensor:  # fmt: skip
    compiling = is_compiling()  # which can trace neither of the two questions that it spares
    if compiling or any_autocast():
        x, weight, bias = lowered(x, weight, bias)
    tensors = (x, norm_weight, weight, bias)
    run = None if compiling else forward.ready(tensors, (*settings, False, impl, forced_tile()))
    if run is not None:
        found: Tensor = run(*tensors)[0]
        return found
    _check(*tensors, Linear(*settings, False, impl))  # the same errors as eager
    check_impl(impl, IMPLS)
    saved = torch.is_grad_enabled() and any(y is not None and y.requires_grad for y in tensors)
    return linear_op(*tensors, *settings, saved, impl)[0]


def lowered(x: Any, *others: Any) -> tuple[Any, ...]:
    """Under autocast, tensors of a product take its 16-bit type, as those of torch's own do."""
    if not isinstance(x, Tensor) or not torch.is_autocast_enabled(x.device.type):
        return (x, *others)
    castable, dtype = (torch.float32, torch.float16, torch.bfloat16), torch.get_autocast_dtype(x.device.type)
    return tuple([y.to(dtype) if isinstance(y, Tensor) and y.dtype in castable else y for y in (x, *others)])


def _check(x: Tensor, norm_weight: Tensor | None, weight: Tensor, bias: Tensor | None, call: Linear) -> None:
    check_rows("x", x)
    check_weight(x, weight, bias)
    if call.activation and ACTIVATIONS[call.activation][1] and weight.shape[0] % 2:
        what = f"weight has shape {tuple(weight.shape)}; activation={call.activation!r}"
        raise ValueError(f"{what} needs an even number of rows, gate and up")
    if call.normed:
        check_eps(call.eps)
        check_vector("norm_weight", norm_weight, x)


def check_weight(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """weight (N, K) and bias (N,) go with x (..., K)."""
    check_rows("weight", weight)
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(f"weight has shape {tuple(weight.shape)}; expected (n, {x.shape[-1]}), the last size of x")
    if bias is not None:
        check_rows("bias", bias)
        if bias.dim() != 1 or bias.shape[0] != weight.shape[0]:
            raise ValueError(f"bias has shape {tuple(bias.shape)}; expected ({weight.shape[0]},), the rows of weight")
    for name, y in (("weight", weight), ("bias", bias)):
        if y is not None and y.dtype != x.dtype:
            raise TypeError(f"{name}.dtype={y.dtype} differs from x.dtype={x.dtype}")
        if y is not None and y.device != x.device:
            raise ValueError(f"{name}.device={y.device} differs from x.device={x.device}")


def as_matrix(x: Tensor) -> Tensor:
    """x (..., N) as (rows, N)."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def linear_problem(x: Tensor, weight: Tensor, call: Linear) -> LinearProblem:
    rows, (n, depth) = math.prod(x.shape[:-1]), weight.shape
    flags = (call.normed, call.rounded, call.saved)
    return LinearProblem(rows, n, depth, DTYPES[x.dtype], x.device.type, call.activation, *flags)


def _plan(tensors: tuple[Any, ...], settings: tuple[Any, ...]) -> Run:
    (x, norm_weight, weight, bias), call = tensors, Linear(*settings)
    _check(x, norm_weight, weight, bias, call)
    problem, gpu = linear_problem(x, weight, call), gpu_of(x)
    table = NORM_IMPLS if call.normed else IMPLS
    return serving(table, problem, gpu, call.impl).forward_plan(problem, gpu, tensors, call)


forward = Plans(_plan)


def empty(x: Tensor, weight: Tensor, call: Linear) -> Product:
    """The outputs of a call, to be filled; all are contiguous."""
    rows, n = x.shape[:-1], weight.shape[0]
    gated = bool(call.activation) and ACTIVATIONS[call.activation][1]
    return Product(
        out=x.new_empty((*rows, n // 2 if gated else n)),
        pre=x.new_empty((*rows, n)) if call.saved and call.activation else None,
        rstd=x.new_empty(rows, dtype=accumulator(x)) if call.saved and call.normed else None,
    )


def packed(x: Tensor, call: Linear) -> Tensor:
    """Columns as the activations take them, the gate first."""
    gated = bool(call.activation) and ACTIVATIONS[call.activation][1]
    return torch.cat((x[..., 0::2], x[..., 1::2]), -1) if gated and call.interleaved else x


# --- the `torch` implementation


def in_fp32(run: Run) -> Run:
    """The same function, which computes as it says under autocast too."""

    @functools.wraps(run)
    def function(x: Tensor, *others: Any) -> Any:
        with torch.autocast(x.device.type, enabled=False):
            return run(x, *others)

    return function


def forward_plan(problem: LinearProblem, gpu: Gpu | None, tensors: tuple[Any, ...], call: Linear) -> Run:
    @in_fp32
    def run(x: Tensor, norm_weight: Tensor | None, weight: Tensor, bias: Tensor | None) -> Product:
        found = empty(x, weight, call)
        wide = x.to(accumulator(x))
        if call.normed:
            rstd = torch.rsqrt(wide.square().mean(-1) + call.eps)
            wide = wide * rstd[..., None]
            wide = wide.to(x.dtype).to(wide.dtype) if call.rounded else wide
            wide = wide if norm_weight is None else wide * norm_weight
            wide = wide.to(x.dtype).to(wide.dtype)
            if found.rstd is not None:
                found.rstd.copy_(rstd)
        y = wide @ weight.to(wide.dtype).T
        y = packed(y if bias is None else y + bias, call)
        if found.pre is not None:
            found.pre.copy_(y)
        if problem.gated:
            gate, up = y.chunk(2, -1)
            y = activated(gate, problem.kind)[0] * up
        elif call.activation:
            y = activated(y, problem.kind)[0]
        found.out.copy_(y)
        return found

    return run


# --- the registered op: schema, fake and autograd, for torch.compile, torch.export and training


@torch.library.custom_op("flashkernels::linear", mutates_args=())
def linear_op(
    x: Tensor, norm_weight: Tensor | None, weight: Tensor, bias: Tensor | None, activation: str, interleaved: bool,
    normed: bool, eps: float, rounded: bool, saved: bool, impl: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    call = Linear(activation, interleaved, normed, eps, rounded, saved, impl, forced_tile())
    return registered(forward((x, norm_weight, weight, bias), call), x)


@linear_op.register_fake
def _fake(
    x: Tensor, norm_weight: Tensor | None, weight: Tensor, bias: Tensor | None, activation: str, interleaved: bool,
    normed: bool, eps: float, rounded: bool, saved: bool, impl: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    return registered(empty(x, weight, Linear(activation, interleaved, normed, eps, rounded, saved, impl)), x)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, norm_weight, weight, _, *settings = inputs
    ctx.set_materialize_grads(False)
    ctx.call = Linear(*settings)
    ctx.save_for_backward(x, norm_weight, weight, *output[1:])
    ctx.norm_dtype = None if norm_weight is None else norm_weight.dtype


def _gradients(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    """The activation's derivative is one elementwise kernel; then there are two products, and the norm's own kernel."""
    if grad is None:
        return (None,) * 11
    x, norm_weight, weight, pre, rstd = ctx.saved_tensors
    call: Linear = ctx.call
    need_x, need_norm, need_weight, need_bias = ctx.needs_input_grad[:4]
    rows, gated = as_matrix(x), False
    if call.activation:
        kind, gated = ACTIVATIONS[call.activation]
        grad = activation_backward_op(grad, pre, *Activation(kind, gated, call.rows_impl))
    dy = as_matrix(grad)
    if gated and call.interleaved:
        dy = torch.stack(dy.chunk(2, -1), -1).reshape(dy.shape)
    dx = dnorm = dweight = None
    if need_x or need_norm:
        dx = dy @ weight
    if need_weight:
        if call.normed:
            settings = (False, call.eps, call.rounded, "", call.rows_impl)
            dweight = dy.T @ norm_op(rows, norm_weight, None, None, *settings)[0]
        else:
            dweight = dy.T @ rows
    if call.normed and dx is not None:
        flags = (False, call.rounded, need_norm, False, call.rows_impl)
        dx, dnorm, _ = norm_backward_op(dx, None, rows, norm_weight, nothing(rstd), rstd.reshape(-1), *flags)
        dnorm = dnorm.to(ctx.norm_dtype) if need_norm else None
    dx = dx.reshape(x.shape) if dx is not None and need_x else None
    return (dx, dnorm, dweight, dy.sum(0) if need_bias else None, *(None,) * 7)


linear_op.register_autograd(_gradients, setup_context=_setup)
