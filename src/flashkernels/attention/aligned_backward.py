"""Gradients of calls whose rows cannot be read 16 bytes at a time: of copies, as `aligned` makes them, and cut."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from flashkernels.attention.problem import BackwardProblem
from flashkernels.attention.tensors import Given, RunBackward, Tensors, addressed
from flashkernels.attention.triton.copy import copier
from flashkernels.dispatch import serving
from flashkernels.hardware import Gpu


def plan(problem: BackwardProblem, gpu: Gpu | None, tensors: Tensors, given: Given) -> RunBackward:
    """Plans the copies, what makes their gradients, and the way back."""
    from flashkernels.attention.api import BACKWARD_IMPLS  # the table that has this module

    device, wide = tensors.q.device.index, problem.widened()
    assert given.out is not None
    widths = (wide.call.head_dim, wide.call.head_dim, wide.call.head_dim_v)
    to_inputs = [copier(x, n, device) for x, n in zip(tensors[:3], widths, strict=True)]
    to_grad, to_out = (copier(x, widths[2], device) for x in (given.grad_out, given.out))

    def widen(tensors: Tensors, given: Given) -> tuple[Tensors, Given]:
        assert given.out is not None
        q, k, v = (copy(x) for copy, x in zip(to_inputs, tensors[:3], strict=True))
        return tensors._replace(q=q, k=k, v=v), given._replace(grad_out=to_grad(given.grad_out), out=to_out(given.out))

    first = widen(tensors, given)
    # the interpreter serves where it is asked for by name
    wide = replace(wide, call=addressed(wide.call, first[0]), impl=wide.impl if gpu else "triton")
    inner = serving(BACKWARD_IMPLS, wide, gpu).plan(wide, gpu, *first)
    cuts = [
        copier(torch.empty(x.shape, dtype=x.dtype, device="meta"), dim, device)
        for x, dim in zip(first[0][:3], (x.shape[-1] for x in tensors[:3]), strict=True)
    ]

    def run(tensors: Tensors, given: Given, softmax_scale: float, softcap: float) -> list[Tensor | None]:
        grads = inner(*widen(tensors, given), softmax_scale, softcap)
        return [*(x if x is None else cut(x) for cut, x in zip(cuts, grads[:3], strict=True)), *grads[3:]]

    return run
