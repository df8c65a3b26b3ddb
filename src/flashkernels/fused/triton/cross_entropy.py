"""Cross-entropy in Triton: a program reads a row of logits once for its loss and once more for its gradient, which
takes the place of the logits. Products before and after it are torch's own."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashkernels.fused.cross_entropy import LinearLoss, Loss, check_range, empty
from flashkernels.fused.linear import as_matrix
from flashkernels.fused.problem import BYTES, LossProblem
from flashkernels.fused.rows import gpu_of, row_view
from flashkernels.fused.triton.blocks import Launch, resident
from flashkernels.hardware import Gpu
from flashkernels.jit.eager import Plans, Run, room

LEAST = tl.constexpr(float("-inf"))
PER_LANE = 8  # logits that share a maximum while it is not final: 16 bytes
# One program a multiprocessor: its rows, 256 KB of a vocabulary of 128 K, are in the L2 when they are read again.
BLOCK, WARPS = 16384, 32
CHUNKS = 4  # of tokens, unless their logits exceed BUFFER
BUFFER = 512 << 20  # bytes
LEAST_ROWS = 1024  # of a chunk: less does not fill the GPU in the product that makes the gradient of x
ROW_STEP = 128  # rows of a tile of the products
# A 16-bit gradient of the weight is rounded once for each of n chunks, while it grows: that errs sqrt((n + 1) / 2)
# times as much as one rounding. We stay below 2.
MOST_ROUNDINGS = 6


@triton.jit
def tanh(x):
    return 2 / (1 + tl.exp(-2 * x)) - 1


@triton.jit(do_not_specialize=["ignore", "scale_step"])
def loss_kernel(
    z_ptr, target_ptr, scale_ptr, lse_ptr, loss_ptr, grad_ptr,
    width, inner, outer_stride: tl.int64, inner_stride: tl.int64, scale_step: tl.int64, ignore: tl.int64, smoothing,
    z_weight, cap, BLOCK: tl.constexpr, LANE: tl.constexpr, SMOOTHED: tl.constexpr, CAPPED: tl.constexpr,
    FINAL: tl.constexpr,
):  # fmt: skip
    """One row. FINAL: what `lse_ptr` has is known, only the gradient is wanted. That is the largest logit and the
    logarithm of the sum of exponentials below it: apart they keep what is lost in their sum where logits share a large
    offset."""
    row = tl.program_id(0).to(tl.int64)
    z_row = z_ptr + (row // inner * outer_stride + row % inner * inner_stride)
    grad_row = grad_ptr
    if grad_ptr is not None:
        grad_row = grad_ptr + row * width
    target = tl.load(target_ptr + row).to(tl.int64)
    cols = tl.arange(0, BLOCK // LANE)[:, None] * LANE + tl.arange(0, LANE)[None, :]
    if target == ignore:
        if not FINAL:
            tl.store(loss_ptr + row, 0.0)
            if lse_ptr is not None:
                tl.store(lse_ptr + 2 * row, 0.0)
                tl.store(lse_ptr + 2 * row + 1, 0.0)
        if grad_ptr is not None:
            for start in tl.range(0, width, BLOCK):
                nought = tl.zeros((BLOCK // LANE, LANE), grad_ptr.dtype.element_ty)
                tl.store(grad_row + (start + cols), nought, mask=start + cols < width)
    else:
        known = (target >= 0) & (target < width)
        if FINAL:
            top = tl.load(lse_ptr + 2 * row)
            rest = tl.load(lse_ptr + 2 * row + 1)
        else:
            chosen = tl.load(z_row + target, mask=known, other=0.0).to(tl.float32)
            if CAPPED:
                chosen = cap * tanh(chosen / cap)
            base = tl.where(tl.abs(chosen) < float("inf"), chosen, 0.0)  # of logits whose mean is wanted
            tops = tl.full((BLOCK // LANE,), LEAST, tl.float32)
            sums = tl.zeros((BLOCK // LANE,), tl.float32)
            plain = tl.zeros((BLOCK // LANE,), tl.float32)
            for start in tl.range(0, width, BLOCK):
                inside = start + cols < width
                s = tl.load(z_row + (start + cols), mask=inside, other=LEAST).to(tl.float32)
                if CAPPED:
                    s = tl.where(inside, cap * tanh(s / cap), LEAST)
                higher = tl.maximum(tops, tl.max(s, 1))
                safe = tl.where(higher == LEAST, 0.0, higher)  # a lane that has seen nothing but -inf
                sums = sums * tl.exp(tops - safe) + tl.sum(tl.exp(s - safe[:, None]), 1)
                tops = higher
                if SMOOTHED:
                    plain += tl.sum(tl.where(inside, s - base, 0.0), 1)
            top = tl.max(tops, 0)
            rest = tl.log(tl.sum(sums * tl.exp(tops - top), 0))
            loss = (1 - smoothing) * (top - chosen) + rest + z_weight * (top + rest) * (top + rest)
            if SMOOTHED:
                loss += smoothing * ((top - base) - tl.sum(plain, 0) / width)
            tl.store(loss_ptr + row, tl.where(known, loss, float("nan")))
            if lse_ptr is not None:
                tl.store(lse_ptr + 2 * row, top)
                tl.store(lse_ptr + 2 * row + 1, rest)
        if grad_ptr is not None:
            # What is written below may be the logits themselves: `chosen` must have been read by every thread.
            tl.debug_barrier()
            scale = tl.load(scale_ptr + row * scale_step).to(tl.float32)
            scale = tl.where(known, scale, float("nan"))
            pull = 1 + 2 * z_weight * (top + rest)
            for start in tl.range(0, width, BLOCK):
                inside = start + cols < width
                s = tl.load(z_row + (start + cols), mask=inside, other=LEAST).to(tl.float32)
                slope = scale
                if CAPPED:
                    share = tanh(s / cap)
                    s = cap * share
                    slope = scale * (1 - share * share)
                d = tl.exp((s - top) - rest) * pull - tl.where(start + cols == target, 1 - smoothing, 0.0)
                if SMOOTHED:
                    d -= smoothing / width
                tl.store(grad_row + (start + cols), (d * slope).to(grad_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["programs"])
def multiply_kernel(x_ptr, factor_ptr, count: tl.int64, programs, BLOCK: tl.constexpr):
    """x times a number that the device knows; nothing is touched where that is 1."""
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1.0:
        for start in tl.range(tl.program_id(0).to(tl.int64) * BLOCK, count, programs * BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + at, mask=at < count, other=0.0).to(tl.float32)
            tl.store(x_ptr + at, (x * factor).to(x_ptr.dtype.element_ty), mask=at < count)


class Rows:
    """The kernel, for rows of one vocabulary."""

    def __init__(self, vocab: int, call: Loss, device: torch.device, final: bool = False) -> None:
        self.call, self.vocab = call, vocab
        block, warps = blocks(vocab)
        self.launch = Launch(loss_kernel, constants(block, call, final), warps, device)

    def numbers(self, place: tuple[int, int, int], scale_step: int) -> tuple[Any, ...]:
        """Of rows that lie at `place`, as `RowView.numbers` has it."""
        call = self.call
        return (self.vocab, *place, scale_step, call.ignore_index, call.label_smoothing, call.z_loss, call.softcap)

    def __call__(
        self, rows: int, numbers: tuple[Any, ...], z: Tensor, targets: Tensor, scale: Tensor | None,
        sums: Tensor | None, losses: Tensor | None, grad: Tensor | None,
    ) -> None:  # fmt: skip
        if rows:
            self.launch(rows, (z, targets, scale, sums, losses, grad), numbers)


def blocks(vocab: int) -> tuple[int, int]:
    """Logits of a row that are read together, and the warps that do it."""
    block = max(32 * PER_LANE, min(BLOCK, triton.next_power_of_2(vocab)))
    return block, max(1, block * WARPS // BLOCK)


def constants(block: int, call: Loss, final: bool) -> dict[str, Any]:
    """The compile-time values of `loss_kernel`, in its order."""
    smoothed, capped = call.label_smoothing != 0, call.softcap != 0
    return {"BLOCK": block, "LANE": PER_LANE, "SMOOTHED": smoothed, "CAPPED": capped, "FINAL": final}


def forward_plan(problem: LossProblem, gpu: Gpu | None, tensors: tuple[Any, ...], call: Loss) -> Run:
    logits, targets = tensors
    view, rows = row_view(logits), Rows(problem.vocab, call, logits.device)
    numbers = rows.numbers(view.numbers, 0)
    each, pairs = (room(shape, torch.float32, logits.device) for shape in (targets.shape, (*targets.shape, 2)))

    def run(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        check_range(targets, problem.vocab, call.ignore_index)
        losses, sums = each(), pairs()
        rows(problem.tokens, numbers, view.of(logits), targets.contiguous(), None, sums, losses, None)
        return losses, sums

    return run


def backward_plan(problem: LossProblem, gpu: Gpu | None, tensors: tuple[Any, ...], call: Loss) -> Run:
    logits = tensors[1]
    view, rows = row_view(logits), Rows(problem.vocab, call, logits.device, final=True)
    numbers = rows.numbers(view.numbers, 1)

    def run(grad: Tensor, logits: Tensor, targets: Tensor, sums: Tensor) -> Tensor:
        out = logits.new_empty(logits.shape)
        scale, z = grad.contiguous(), view.of(logits)
        rows(problem.tokens, numbers, z, targets.contiguous(), scale, sums, None, out)
        return out

    return run


def chunk_rows(problem: LossProblem, need_weight: bool) -> int:
    """Tokens of a chunk, a multiple of ROW_STEP unless it is all of them.

    >>> chunk_rows(LossProblem(8192, 128256, 4096, "bf16", "cuda"), True)
    2048
    >>> chunk_rows(LossProblem(65536, 128256, 4096, "bf16", "cuda"), True)
    11008
    >>> chunk_rows(LossProblem(65536, 128256, 4096, "bf16", "cuda"), False)
    2048
    """
    size = BYTES[problem.dtype]
    chunks = max(CHUNKS, -(-problem.tokens * problem.vocab * size // BUFFER))
    if need_weight and size == 2:
        chunks = min(chunks, MOST_ROUNDINGS)
    rows = max(LEAST_ROWS, -(-problem.tokens // chunks))
    return min(problem.tokens, -(-rows // ROW_STEP) * ROW_STEP)


def linear_plan(problem: LossProblem, gpu: Gpu | None, tensors: tuple[Any, ...], call: LinearLoss) -> Run:
    x, scale = tensors[0], tensors[4]
    rows = Rows(problem.vocab, call.loss, x.device)
    step = chunk_rows(problem, call.need_weight and scale is not None)
    chunks = [(start, min(start + step, problem.tokens)) for start in range(0, problem.tokens, step or 1)]
    scale_step = 0 if scale is None or scale.dim() == 0 else 1
    alpha, numbers = 2.0**-call.shift, rows.numbers((1, problem.vocab, 0), scale_step)

    def run(
        x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, scale: Tensor | None
    ) -> tuple[Tensor, ...]:
        check_range(targets, problem.vocab, call.loss.ignore_index)
        found = empty(x, weight, bias, scale, call)
        x, losses, targets = as_matrix(x), found[0].view(-1), targets.contiguous().view(-1)
        scale = scale.contiguous().view(-1) if scale is not None and scale_step else scale
        dx = found[1].view(problem.tokens, problem.depth) if found[1].numel() else found[1]
        dweight = found[2]
        dbias = torch.zeros_like(found[3], dtype=torch.float32)
        if not chunks:
            dweight.zero_()
        buffer = x.new_empty(step, problem.vocab)  # logits, then their gradients
        for start, end in chunks:
            z, here = buffer[: end - start], x[start:end]
            if bias is None:
                torch.mm(here, weight.T, out=z)
            else:
                torch.addmm(bias, here, weight.T, out=z)
            mine = scale[start:end] if scale is not None and scale_step else scale
            rows(
                end - start, numbers, z, targets[start:end], mine, None, losses[start:end],
                None if scale is None else z,
            )  # fmt: skip
            if scale is None:
                continue
            if call.need_x:
                dx[start:end].addmm_(z, weight, beta=0, alpha=alpha)
            if call.need_weight:
                dweight.addmm_(z.T, here, beta=1 if start else 0, alpha=alpha)
            if call.need_bias:
                dbias += z.sum(0, dtype=torch.float32)
        if call.need_bias and scale is not None:
            found[3].copy_(dbias * alpha)
        return found

    return run


def _plan_multiply(tensors: tuple[Any, ...], _: Any) -> Run:
    x, block, warps = tensors[0], 4096, 8
    programs = min(-(-x.numel() // block), resident(gpu_of(x), warps))
    launch = Launch(multiply_kernel, {"BLOCK": block}, warps, x.device)

    def run(x: Tensor, factor: Tensor) -> None:
        if programs:
            launch(programs, (x, factor), (x.numel(), programs))

    return run


_multiply = Plans(_plan_multiply)


def multiply(x: Tensor, factor: Tensor) -> None:
    """x times a number on its device, in place."""
    _multiply((x, factor), ())
