"""Cross-entropy over a vocabulary: of given logits, or fused with the linear layer that makes them, in chunks of
tokens, so that tokens x vocabulary never exists."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flashkernels.dispatch import Impl, check_impl, lacks_triton, leaves_the_cpu, serving
from flashkernels.fused.linear import as_matrix, check_weight, in_fp32, lowered
from flashkernels.fused.norm import accumulator
from flashkernels.fused.problem import LossProblem
from flashkernels.fused.rows import DTYPES, check_choice, check_number, check_rows, gpu_of, nothing
from flashkernels.hardware import Gpu
from flashkernels.jit.eager import Plans, Run, followed_only

REDUCTIONS = ("mean", "sum", "none")
SHIFT = 12  # gradients of logits are up to 2 ** 12 times those of a mean: far from both ends of fp16
FP16_BITS = 15  # what stays below 2 ** 15 does not overflow, whatever the products round
CHUNKS, LEAST_ROWS = 4, 256  # of the `torch` implementation: chunks of tokens, unless they are as few as these


def needs_triton(problem: LossProblem, gpu: Gpu | None) -> str | None:
    return lacks_triton(problem.device, problem.dtype, gpu)


# Best first. "auto" takes the first row that does not reject the problem. `torch` is in this file.
IMPLS = (
    Impl("triton", "flashkernels.fused.triton.cross_entropy", rejects=needs_triton, defers=leaves_the_cpu),
    Impl("torch", "flashkernels.fused.cross_entropy"),
)


class Loss(NamedTuple):
    """What the loss of a row is."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float
    impl: str


class LinearLoss(NamedTuple):
    """A loss with the linear layer before it, and the gradients that are wanted."""

    loss: Loss
    need_x: bool
    need_weight: bool
    need_bias: bool
    shift: int  # gradients of x, weight and bias are divided by 2 ** shift, exactly


def cross_entropy(
    logits: Tensor, targets: Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0,
    reduction: str = "mean", softcap: float = 0.0, impl: str = "auto",
) -> Tensor:  # fmt: skip
    """`lse - (1 - ε) * s[target] - ε * mean(s) + z_loss * lse²` of each row, where lse is the logarithm of sum(exp(s)),
    ε is label_smoothing, and s are the logits, or `softcap * tanh(logits / softcap)`. In fp32.

    Args:
        logits: (..., V), fp16, bf16, fp32 (fp64 on the `torch` implementation).
        targets: (...), int64 or int32: numbers of classes, or ignore_index, which gives a loss of 0 and no gradient.
            Others are an error on the CPU. On a GPU, where looking would wait for it, they make the loss of their row
            NaN, and nothing is read out of bounds.
        label_smoothing: 0 to 1, of the probability, spread evenly over all classes.
        z_loss: weight of lse², which keeps logits from drifting; 0: none.
        reduction: "mean" over the rows that are not ignored (NaN with gradients of 0 if all are), "sum", or "none".
        softcap: as the final one of Gemma 2; 0: none.
        impl: "auto", or the name of the one implementation that must serve.

    Returns:
        The loss, fp32: (), or (...) with reduction="none". For gradients, two numbers a row are kept beside the logits.

    >>> import torch, flashkernels as fk
    >>> logits, targets = torch.randn(4, 1000), torch.tensor([1, 5, -100, 999])
    >>> plain = torch.nn.functional.cross_entropy(logits, targets)
    >>> torch.allclose(fk.fused.cross_entropy(logits, targets), plain)
    True
    """
    check_choice("reduction", reduction, REDUCTIONS)
    settings = (ignore_index, label_smoothing, z_loss, softcap, impl)
    run = forward.ready((logits, targets), settings)
    if run is not None:
        losses = run(logits, targets)[0]
    else:
        losses = cross_entropy_op(logits, targets, *_checked(logits, targets, settings))[0]  # the errors of eager
    return _reduced(losses, targets, ignore_index, reduction)


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, reduction: str = "mean", softcap: float = 0.0,
    impl: str = "auto",
) -> Tensor:  # fmt: skip
    """`cross_entropy(x @ weight.T + bias, targets)` without the memory for tokens x vocabulary.

    Args:
        x: (..., H), fp16, bf16, fp32 (fp64 on the `torch` implementation).
        weight: (V, H), as torch's Linear has it, of x's dtype.
        targets: (...), int64 or int32.
        bias: (V,), of x's dtype, or None.

    The other arguments and what is returned are those of `cross_entropy`. Logits and their gradients exist for a
    quarter of the tokens at a time, rounded to x's dtype (on the `torch` implementation fp32). With "mean" and "sum"
    the gradients are computed with the loss, as the logits are there; the backward pass only multiplies them by its own
    gradient, in place. With "none", and when a backward pass is repeated, they are computed by going through the chunks
    again. Under autocast x, weight and bias become 16-bit.

    >>> import torch, flashkernels as fk
    >>> x, weight = torch.randn(4, 64, requires_grad=True), torch.randn(1000, 64, requires_grad=True)
    >>> loss = fk.fused.linear_cross_entropy(x, weight, torch.tensor([1, 5, -100, 999]), z_loss=1e-4)
    >>> loss.backward()
    >>> weight.grad.shape
    torch.Size([1000, 64])
    """
    check_choice("reduction", reduction, REDUCTIONS)
    loss = _loss(ignore_index, label_smoothing, z_loss, softcap, impl)
    check_rows("x", x)
    x, weight, bias = lowered(x, weight, bias)
    check_weight(x, weight, bias)
    check_targets(targets, x, "x")
    need_x, need_weight, need_bias = (
        torch.is_grad_enabled() and y is not None and y.requires_grad for y in (x, weight, bias)
    )
    grads, scale, shift = need_x or need_weight or need_bias, None, 0
    if grads and reduction != "none":
        scale, shift = _scale(x, weight, bias, targets, loss, reduction)
    call = LinearLoss(loss, need_x, need_weight, need_bias, shift)
    tensors = (x, weight, bias, targets, scale)
    if not followed_only(tensors):
        losses = linear_cross_entropy_op(*tensors, *loss, *call[1:])[0]
    elif grads:
        followed: Any = _Losses.apply
        losses = followed(*tensors, call)
    else:
        losses = linear_forward(tensors, call)[0]
    return _reduced(losses, targets, ignore_index, reduction)


def _checked(logits: Tensor, targets: Tensor, settings: tuple[Any, ...]) -> Loss:
    call = _loss(*settings)
    check_impl(call.impl, IMPLS)
    check_rows("logits", logits)
    check_targets(targets, logits, "logits")
    return call


def _loss(ignore_index: int, label_smoothing: float, z_loss: float, softcap: float, impl: str) -> Loss:
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, (int, torch.SymInt)):
        raise TypeError(f"ignore_index={ignore_index!r} must be an int, got {type(ignore_index).__name__}")
    if isinstance(ignore_index, int) and not -(2**63) <= ignore_index < 2**63:
        raise ValueError(f"ignore_index={ignore_index} does not fit torch.int64")
    for name, value in (("label_smoothing", label_smoothing), ("z_loss", z_loss), ("softcap", softcap)):
        check_number(name, value)
        if value < 0 or (name == "label_smoothing" and value > 1):
            allowed = "between 0 and 1" if name == "label_smoothing" else "0 or positive"
            raise ValueError(f"{name}={value} must be {allowed}")
    return Loss(ignore_index, float(label_smoothing), float(z_loss), float(softcap), impl)


def check_targets(targets: Tensor, x: Tensor, of: str) -> None:
    if not isinstance(targets, Tensor):
        raise TypeError(f"targets must be a torch.Tensor, got {type(targets).__name__}")
    if targets.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"targets.dtype={targets.dtype} is not supported; allowed: torch.int64, torch.int32")
    if targets.shape != x.shape[:-1]:
        raise ValueError(f"targets has shape {tuple(targets.shape)}; expected {tuple(x.shape[:-1])}, the rows of {of}")
    if targets.device != x.device:
        raise ValueError(f"targets.device={targets.device} differs from {of}.device={x.device}")


def check_range(targets: Tensor, vocab: int, ignore_index: int) -> None:
    """Targets are classes; looked at on the CPU only."""
    if targets.device.type == "cpu":
        wrong = targets[((targets < 0) | (targets >= vocab)) & ~ignored(targets, ignore_index)]
        if wrong.numel():
            allowed = f"0 to {vocab - 1}, and ignore_index={ignore_index}"
            raise ValueError(f"targets has {wrong[0].item()}; allowed: {allowed}")


def ignored(targets: Tensor, ignore_index: int) -> Tensor:
    """As int64: torch would cut the number down to int32 targets."""
    return targets.long() == ignore_index


def _counted(targets: Tensor, ignore_index: int) -> Tensor:
    return (targets.long() != ignore_index).sum()


def _reduced(losses: Tensor, targets: Tensor, ignore_index: int, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    count = _counted(targets, ignore_index)
    return torch.where(count == 0, math.nan, losses.sum() / count.clamp(min=1))


def _scale(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, loss: Loss, reduction: str
) -> tuple[Tensor, int]:
    """By what the gradients of logits are multiplied when they are computed with the loss, and the shift of the others.

    For "mean" they must be divided by the count, which only the device knows. Times 2 ** SHIFT they do not vanish in
    fp16; the products divide by that, in fp32 and exactly. In fp16 they divide by half the power, and the backward
    pass, which knows the loss scale of the caller, by the rest. Where that could overflow, all are less."""
    wide = accumulator(x)
    if reduction == "sum":
        return torch.ones((), dtype=wide, device=x.device), 0
    share = 1 / _counted(targets, loss.ignore_index).clamp(min=1).to(wide)
    if x.dtype != torch.float16:
        return share * 2.0**SHIFT, SHIFT
    excess = torch.log2(_reach(x, weight, bias, share, loss)).ceil() - FP16_BITS
    excess = torch.where((excess > 0) & excess.isfinite(), excess, 0.0)
    return share * torch.exp2(SHIFT - excess), SHIFT // 2


def _reach(x: Tensor, weight: Tensor, bias: Tensor | None, share: Tensor, loss: Loss) -> Tensor:
    """At most this large is what fp16 holds: gradients of logits times 2 ** SHIFT, of others times half the power."""
    top_x, top_weight = _top(x), _top(weight)
    others = 2.0 ** (SHIFT - SHIFT // 2)
    largest = torch.maximum(2.0**SHIFT * share, others * share * top_weight).maximum(others * top_x.clamp(min=1))
    if not loss.z_loss:
        return 2 * largest  # a row's gradients of logits add up to this, without their signs
    logit = x.shape[-1] * top_x * top_weight + (0.0 if bias is None else _top(bias))
    lse = logit.clamp(max=loss.softcap or torch.finfo(x.dtype).max) + math.log(max(1, weight.shape[0]))
    return (2 + 2 * loss.z_loss * lse) * largest


def _top(x: Tensor) -> Tensor:
    """The largest absolute number, fp32."""
    if not x.numel():
        return x.new_zeros((), dtype=torch.float32)
    return torch.linalg.vector_norm(x.detach(), math.inf, dtype=torch.float32)


class _Losses(torch.autograd.Function):
    """Losses of rows, whose gradients are computed with them where `scale` says that they are alike.

    The gradients are given away by the first backward pass, multiplied in place: whoever accumulates them can take the
    memory instead of copying it. A second pass finds none and computes them again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, scale: Tensor | None,
        call: LinearLoss,
    ) -> Tensor:  # fmt: skip
        losses, *grads = linear_forward((x, weight, bias, targets, scale), call)
        ctx.save_for_backward(x, weight, bias, targets, scale)
        ctx.call, ctx.grads = call, None if scale is None else grads
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight, bias, targets, scale = ctx.saved_tensors
        call: LinearLoss = ctx.call
        grads, ctx.grads = ctx.grads, None
        if grads is None:
            grads = linear_forward((x, weight, bias, targets, grad), call._replace(shift=0))[1:]
        elif grad.numel():
            module = serving(IMPLS, linear_problem(x, weight, call), gpu_of(x), call.loss.impl)
            factor = _factor(grad, scale, call.shift)
            for y in grads:
                module.multiply(y, factor)
        wanted = (call.need_x, call.need_weight, call.need_bias)
        return (*(y if need else None for y, need in zip(grads, wanted, strict=True)), None, None, None)


def _factor(grad: Tensor, scale: Tensor, shift: int) -> Tensor:
    """What gradients computed with the loss still lack, when those of all its rows are alike."""
    return grad.reshape(-1)[0] / scale * 2.0**shift


def _times(x: Tensor, factor: Tensor) -> Tensor:
    """In the factor's dtype: torch would round that to x's, of which fp16 may not hold it."""
    return (x.to(factor.dtype) * factor).to(x.dtype)


def linear_problem(x: Tensor, weight: Tensor, call: LinearLoss) -> LossProblem:
    grads = call.need_x or call.need_weight or call.need_bias
    vocab, depth = weight.shape
    return LossProblem(math.prod(x.shape[:-1]), vocab, depth, DTYPES[x.dtype], x.device.type, grads)


def loss_problem(logits: Tensor, grads: bool) -> LossProblem:
    *rows, vocab = logits.shape
    return LossProblem(math.prod(rows), vocab, 0, DTYPES[logits.dtype], logits.device.type, grads)


def _plan(tensors: tuple[Any, ...], settings: tuple[Any, ...]) -> Run:
    logits, targets = tensors
    call = _checked(logits, targets, settings)
    problem, gpu = loss_problem(logits, False), gpu_of(logits)
    return serving(IMPLS, problem, gpu, call.impl).forward_plan(problem, gpu, tensors, call)


def _plan_backward(tensors: tuple[Any, ...], call: Any) -> Run:
    problem, gpu = loss_problem(tensors[1], True), gpu_of(tensors[1])
    return serving(IMPLS, problem, gpu, call.impl).backward_plan(problem, gpu, tensors, call)


def _plan_linear(tensors: tuple[Any, ...], call: Any) -> Run:
    x, weight = tensors[:2]
    problem, gpu = linear_problem(x, weight, call), gpu_of(x)
    return serving(IMPLS, problem, gpu, call.loss.impl).linear_plan(problem, gpu, tensors, call)


forward, backward, linear_forward = Plans(_plan), Plans(_plan_backward), Plans(_plan_linear)


def empty(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, call: LinearLoss
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Losses, and the gradients that are computed with them; to be filled."""
    losses = x.new_empty(x.shape[:-1], dtype=accumulator(x))
    none = (nothing(x), nothing(x), nothing(x))
    if scale is None:
        return losses, *none
    return (
        losses,
        x.new_empty(x.shape) if call.need_x else none[0],
        x.new_empty(weight.shape) if call.need_weight else none[1],
        x.new_empty(weight.shape[0]) if call.need_bias and bias is not None else none[2],
    )


# --- the `torch` implementation


def _terms(z: Tensor, targets: Tensor, call: Loss) -> tuple[Tensor, Tensor]:
    """The losses of rows of logits (T, V) in fp32 or fp64, and (T, 2) the largest of a row and the logarithm of the sum
    of exponentials below it: apart they keep what is lost in their sum where logits share a large offset."""
    check_range(targets, z.shape[-1], call.ignore_index)
    s = call.softcap * torch.tanh(z / call.softcap) if call.softcap else z
    none = ignored(targets, call.ignore_index)
    top = s.amax(-1) if s.shape[-1] else s.new_zeros(s.shape[:-1])
    rest = torch.exp(s - top[:, None]).sum(-1).log()
    at_target = s.gather(-1, torch.where(none, 0, targets).long()[:, None])[:, 0] if s.shape[-1] else top
    losses = (1 - call.label_smoothing) * (top - at_target) + rest + call.z_loss * (top + rest).square()
    if call.label_smoothing:
        losses = losses + call.label_smoothing * (top[:, None] - s).mean(-1)
    return torch.where(none, 0.0, losses), torch.stack((top, rest), -1)


def _slopes(z: Tensor, targets: Tensor, sums: Tensor, scale: Tensor, call: Loss) -> Tensor:
    """The gradient of logits, times scale, a number or one for each row."""
    share = torch.tanh(z / call.softcap) if call.softcap else z
    s = call.softcap * share if call.softcap else z
    top, rest = sums[:, :1], sums[:, 1:]
    hit = (torch.arange(z.shape[-1], device=z.device) == targets[:, None]).to(z.dtype)
    d = torch.exp((s - top) - rest) * (1 + 2 * call.z_loss * (top + rest))
    d = d - (1 - call.label_smoothing) * hit - call.label_smoothing / max(1, z.shape[-1])
    d = d * (1 - share.square()) if call.softcap else d
    return torch.where(ignored(targets, call.ignore_index)[:, None], 0.0, d * scale.reshape(-1, 1))


def forward_plan(problem: LossProblem, gpu: Gpu | None, tensors: tuple[Any, ...], call: Loss) -> Run:
    def run(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        z = logits.reshape(problem.tokens, problem.vocab).to(accumulator(logits))
        losses, sums = _terms(z, targets.reshape(-1), call)
        return losses.reshape(targets.shape), sums.reshape(*targets.shape, 2)

    return run


def backward_plan(problem: LossProblem, gpu: Gpu | None, tensors: tuple[Any, ...], call: Loss) -> Run:
    def run(grad: Tensor, logits: Tensor, targets: Tensor, sums: Tensor) -> Tensor:
        z = logits.reshape(problem.tokens, problem.vocab).to(sums.dtype)
        found = _slopes(z, targets.reshape(-1), sums.reshape(-1, 2), grad.reshape(-1), call)
        return logits.new_empty(logits.shape).copy_(found.reshape(logits.shape))

    return run


def linear_plan(problem: LossProblem, gpu: Gpu | None, tensors: tuple[Any, ...], call: LinearLoss) -> Run:
    step = max(LEAST_ROWS, -(-problem.tokens // CHUNKS))

    @in_fp32
    def run(
        x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, scale: Tensor | None
    ) -> tuple[Tensor, ...]:
        found = empty(x, weight, bias, scale, call)
        rows, w = (as_matrix(y).to(accumulator(x)) for y in (x, weight))
        targets, scale = targets.reshape(-1), None if scale is None else scale.reshape(-1)
        losses, dx = found[0].view(-1), found[1].view(rows.shape) if found[1].numel() else found[1]
        dweight, dbias = (torch.zeros_like(y, dtype=rows.dtype) for y in found[2:])
        for start in range(0, problem.tokens, step):
            here = slice(start, start + step)
            z = rows[here] @ w.T if bias is None else rows[here] @ w.T + bias
            losses[here], sums = _terms(z, targets[here], call.loss)
            if scale is None:
                continue
            mine = scale[here] if scale.shape[0] == problem.tokens else scale
            d = _slopes(z, targets[here], sums, mine, call.loss) * 2.0**-call.shift
            if dx.numel():
                dx[here] = d @ w
            if call.need_weight:
                dweight += d.T @ rows[here]
            if call.need_bias:
                dbias += d.sum(0)
        found[2].copy_(dweight)
        found[3].copy_(dbias)
        return found

    return run


def multiply(x: Tensor, factor: Tensor) -> None:
    """x times a number on its device, in place."""
    x.copy_(_times(x, factor))


# --- the registered ops: schema, fake and autograd, for torch.compile, torch.export and training


@torch.library.custom_op("flashkernels::cross_entropy", mutates_args=())
def cross_entropy_op(
    logits: Tensor, targets: Tensor, ignore_index: int, label_smoothing: float, z_loss: float, softcap: float, impl: str
) -> tuple[Tensor, Tensor]:
    """The loss of each row, and (..., 2) its largest logit with the logarithm of its sum of exponentials below that."""
    return forward((logits, targets), Loss(ignore_index, label_smoothing, z_loss, softcap, impl))


@cross_entropy_op.register_fake
def _fake(
    logits: Tensor, targets: Tensor, ignore_index: int, label_smoothing: float, z_loss: float, softcap: float, impl: str
) -> tuple[Tensor, Tensor]:
    losses = logits.new_empty(targets.shape, dtype=accumulator(logits))
    return losses, losses.new_empty(*targets.shape, 2)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, targets, *ctx.settings = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, targets, output[1])


def _gradients(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 7
    return cross_entropy_backward_op(grad, *ctx.saved_tensors, *ctx.settings), *(None,) * 6


cross_entropy_op.register_autograd(_gradients, setup_context=_setup)


@torch.library.custom_op("flashkernels::cross_entropy_backward", mutates_args=())
def cross_entropy_backward_op(
    grad: Tensor, logits: Tensor, targets: Tensor, sums: Tensor, ignore_index: int, label_smoothing: float,
    z_loss: float, softcap: float, impl: str,
) -> Tensor:  # fmt: skip
    return backward((grad, logits, targets, sums), Loss(ignore_index, label_smoothing, z_loss, softcap, impl))


@cross_entropy_backward_op.register_fake
def _fake_backward(
    grad: Tensor, logits: Tensor, targets: Tensor, sums: Tensor, ignore_index: int, label_smoothing: float,
    z_loss: float, softcap: float, impl: str,
) -> Tensor:  # fmt: skip
    return logits.new_empty(logits.shape)


@torch.library.custom_op("flashkernels::linear_cross_entropy", mutates_args=())
def linear_cross_entropy_op(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, scale: Tensor | None, ignore_index: int,
    label_smoothing: float, z_loss: float, softcap: float, impl: str, need_x: bool, need_weight: bool, need_bias: bool,
    shift: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The loss of each row; with `scale`, the gradients of x, weight and bias too."""
    loss = Loss(ignore_index, label_smoothing, z_loss, softcap, impl)
    return linear_forward((x, weight, bias, targets, scale), LinearLoss(loss, need_x, need_weight, need_bias, shift))


@linear_cross_entropy_op.register_fake
def _fake_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, scale: Tensor | None, ignore_index: int,
    label_smoothing: float, z_loss: float, softcap: float, impl: str, need_x: bool, need_weight: bool, need_bias: bool,
    shift: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    loss = Loss(ignore_index, label_smoothing, z_loss, softcap, impl)
    return empty(x, weight, bias, scale, LinearLoss(loss, need_x, need_weight, need_bias, shift))


def _setup_linear(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, targets, scale, *ctx.settings = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, bias, targets, scale, *output[1:])


def _linear_gradients(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if grad is None:
        return (None,) * 14
    x, weight, bias, targets, scale, *grads = ctx.saved_tensors
    *loss, need_x, need_weight, need_bias, shift = ctx.settings
    needs = (need_x, need_weight, need_bias)
    if scale is None:
        grads = linear_cross_entropy_op(x, weight, bias, targets, grad, *loss, *needs, 0)[1:]
    elif grad.numel():
        factor = _factor(grad, scale, shift)
        grads = [_times(y, factor) for y in grads]
    return (*(y if need else None for y, need in zip(grads, needs, strict=True)), *(None,) * 11)


linear_cross_entropy_op.register_autograd(_linear_gradients, setup_context=_setup_linear)
