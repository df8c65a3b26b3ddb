"""Activations rounded to 8 bits, as weights in "fp8", "fp8_block" and "int8" want them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashkernels.dispatch import Impl, UnsupportedError, leaves_the_cpu, serving
from flashkernels.fused.rows import RowProblem, check_choice, check_rows, gpu_of, needs_triton, row_problem
from flashkernels.hardware import Gpu
from flashkernels.jit.eager import Plans, Run, unwatched
from flashkernels.moe.hopper import rounding as hopper
from flashkernels.moe.weights import BLOCK, DTYPES, ROUNDED, rounded_rows

# Best first. "auto" takes the first row that does not reject the problem. `torch` is in this file.
IMPLS = (
    Impl("hopper", "flashkernels.moe.hopper.rows", rejects=hopper.refuses, defers=hopper.defers),
    Impl("triton", "flashkernels.moe.triton.rows", rejects=needs_triton, defers=leaves_the_cpu),
    Impl("torch", "flashkernels.moe.rows"),
)


@dataclass(frozen=True)
class RoundingProblem(RowProblem):
    by_block: bool = False  # a scale for 128 numbers, not for a row
    aligned: bool = True  # rows of x lie in steps of 16 bytes


def rounding_problem(x: Tensor, format: str) -> RoundingProblem:
    plain = row_problem("rounding", x, 1.5, "int8" if format == "int8" else "fp8")
    step = x.stride(0) * x.element_size()
    aligned = x.stride(1) == 1 and step % 16 == 0 and (x.is_meta or x.data_ptr() % 16 == 0)
    return RoundingProblem(**vars(plain), by_block=format == "fp8_block", aligned=aligned)


class Rounding(NamedTuple):
    format: str
    impl: str


def round_rows(x: Tensor, format: str, *, impl: str = "auto") -> tuple[Tensor, Tensor]:
    """x (R, K) in 8 bits: "fp8", "fp8_block" or "int8". Multiplied by its scales it is x again, nearly.

    Returns:
        (R, K) of e4m3 or int8, and fp32 scales: (R,), or (R, ⌈K/128⌉) for "fp8_block". There are no gradients.

    >>> import torch, flashkernels as fk
    >>> small, scale = fk.moe.round_rows(torch.randn(3, 256), "fp8_block")
    >>> small.dtype, scale.shape
    (torch.float8_e4m3fn, torch.Size([3, 2]))
    """
    check_choice("format", format, ROUNDED)
    if unwatched((x,)):
        return forward((x,), Rounding(format, impl))
    check_rows("x", x)
    return rounding_op(x, format, impl)


def _plan(tensors: tuple[Any, ...], call: Any) -> Run:
    (x,) = tensors
    check_rows("x", x)
    if x.dim() != 2:
        raise ValueError(f"x has shape {tuple(x.shape)}; expected (rows, columns)")
    problem, gpu = rounding_problem(x, call.format), gpu_of(x)
    return serving(IMPLS, problem, gpu, call.impl).rounding_plan(problem, gpu, tensors, call)


forward = Plans(_plan)


def rounding_plan(problem: RowProblem, gpu: Gpu | None, tensors: tuple[Any, ...], call: Rounding) -> Run:
    return lambda x: rounded_rows(x, call.format)


@torch.library.custom_op("flashkernels::moe_rounding", mutates_args=())
def rounding_op(x: Tensor, format: str, impl: str) -> tuple[Tensor, Tensor]:
    return forward((x,), Rounding(format, impl))


@rounding_op.register_fake
def _fake(x: Tensor, format: str, impl: str) -> tuple[Tensor, Tensor]:
    shape = (x.shape[0], -(-x.shape[1] // BLOCK)) if format == "fp8_block" else x.shape[:1]
    return x.new_empty(x.shape, dtype=DTYPES[format]), x.new_empty(shape, dtype=torch.float32)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    raise UnsupportedError("x rounded to 8 bits has no gradients: call it under torch.no_grad()")


rounding_op.register_autograd(lambda ctx, *grads: (None,) * 3, setup_context=_setup)
