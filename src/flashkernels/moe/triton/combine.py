"""The k-way sum at the end of the layer, and its gradients, in Triton."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from flashkernels.fused.rows import RowProblem, nothing
from flashkernels.fused.triton.blocks import Launch, pieces
from flashkernels.hardware import Gpu
from flashkernels.jit.eager import Run, room
from flashkernels.moe.combine import Combine
from flashkernels.moe.triton.early import launched_early, starts_early


@triton.jit
def combine_kernel(
    y_ptr, weights_ptr, shared_ptr, inverse_ptr, out_ptr, tokens, width, part: tl.int64, stride_s: tl.int64,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, K: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr,
    SETTLED: tl.constexpr,
):  # fmt: skip
    """Of a few tokens, BLOCK columns. `part` is the distance of the sums over parts of the depth. All places and
    weights are loaded first: no term waits for its own. Where they are SETTLED, the kernel ahead has written neither,
    and they are loaded while it still runs."""
    if EARLY and not SETTLED:
        gdc_wait()
    pid = tl.program_id(0)
    wide = tl.cdiv(width, BLOCK)
    token = pid // wide * ROWS + tl.arange(0, ROWS)
    cols = pid % wide * BLOCK + tl.arange(0, BLOCK)
    here = token < tokens
    columns = (cols < width)[None, :]
    places = ()
    for j in tl.static_range(K):
        places = places + (tl.load(inverse_ptr + token * K + j, mask=here, other=-1),)
    weights = ()
    if weights_ptr is not None:
        for j in tl.static_range(K):  # of a dropped item, one that is not used
            weights = weights + (tl.load(weights_ptr + token * K + j, mask=here, other=0.0).to(tl.float32),)
    if EARLY and SETTLED:
        gdc_wait()
    acc = tl.zeros((ROWS, BLOCK), tl.float32)
    if shared_ptr is not None:
        at = shared_ptr + token.to(tl.int64)[:, None] * stride_s + cols[None, :]
        acc += tl.load(at, mask=here[:, None] & columns, other=0.0).to(tl.float32)
    for j in tl.static_range(K):
        there = (places[j][:, None] >= 0) & columns
        at = y_ptr + places[j].to(tl.int64)[:, None] * width + cols[None, :]
        y = tl.load(at, mask=there, other=0.0).to(tl.float32)
        for i in tl.static_range(1, PARTS):
            y += tl.load(at + i * part, mask=there, other=0.0).to(tl.float32)
        if weights_ptr is not None:
            y = tl.where(there, y * weights[j][:, None], 0.0)
        acc += y
    at = out_ptr + token.to(tl.int64)[:, None] * width + cols[None, :]
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=here[:, None] & columns)


@triton.jit
def spread_kernel(
    grad_ptr, y_ptr, weights_ptr, permutation_ptr, dy_ptr, dweights_ptr, width, of_token,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Of one place: dy, and the gradient of its weight. A place that nothing is at gets 0."""
    place = tl.program_id(0).to(tl.int64)
    item = tl.load(permutation_ptr + place)
    there = item >= 0
    weight = 1.0
    if weights_ptr is not None:
        weight = tl.load(weights_ptr + item, mask=there, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, width, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        inside = cols < width
        grad = tl.load(grad_ptr + (item // of_token).to(tl.int64) * width + cols, mask=inside & there, other=0.0)
        grad = grad.to(tl.float32)
        if weights_ptr is not None:
            total += grad * tl.load(y_ptr + place * width + cols, mask=inside & there, other=0.0).to(tl.float32)
        tl.store(dy_ptr + place * width + cols, (grad * weight).to(dy_ptr.dtype.element_ty), mask=inside)
    if weights_ptr is not None:
        tl.store(dweights_ptr + item, tl.sum(total, 0).to(dweights_ptr.dtype.element_ty), mask=there)


def combine_plan(problem: RowProblem, gpu: Gpu | None, tensors: tuple[Any, ...], call: Combine) -> Run:
    y, inverse = tensors[0], tensors[4]
    tokens, k = inverse.shape
    parts = y.shape[0] if y.dim() == 3 else 1
    block = pieces(problem.width)
    block = block._replace(rows=max(1, min(block.rows, tokens)))
    rows = triton.next_power_of_2(block.rows)
    grid = -(-tokens // rows) * -(-problem.width // block.width)
    settled = call.settled and (tensors[1] is None or tensors[1].is_contiguous())
    fixed = {"ROWS": rows, "BLOCK": block.width, "K": k, "PARTS": parts, "EARLY": starts_early(gpu),
             "SETTLED": settled}  # fmt: skip
    launch = Launch(combine_kernel, fixed, block.warps, y.device)
    launched_early(launch, starts_early(gpu))
    output = room((tokens, problem.width), call.dtype, y.device)
    numbers = (tokens, problem.width, y.shape[-2] * problem.width, problem.width)

    def run(y: Tensor, weights: Tensor | None, shared: Tensor | None, permutation: Tensor, inverse: Tensor) -> Tensor:
        out = output()
        if grid:
            y = y.contiguous()
            shared = None if shared is None else shared.contiguous()
            weights = None if weights is None else weights.contiguous()
            launch(grid, (y, weights, shared, inverse, out), numbers)
        return out

    return run


def backward_plan(problem: RowProblem, gpu: Gpu | None, tensors: tuple[Any, ...], call: Combine) -> Run:
    y, permutation = tensors[1], tensors[3]
    launch = Launch(spread_kernel, {"BLOCK": min(2048, max(16, triton.next_power_of_2(problem.width)))}, 4, y.device)
    places = permutation.shape[0]

    def run(
        grad: Tensor, y: Tensor, weights: Tensor | None, permutation: Tensor, inverse: Tensor
    ) -> tuple[Tensor, Tensor]:
        dy = y.new_empty(y.shape)
        dweights = None if weights is None else weights.new_zeros(weights.shape)  # dropped items have none
        if places and problem.width:
            weights = None if weights is None else weights.contiguous()
            tensors = (grad.contiguous(), y.contiguous(), weights, permutation, dy, dweights)
            launch(places, tensors, (problem.width, inverse.shape[1]))
        return dy, nothing(y) if dweights is None else dweights

    return run
