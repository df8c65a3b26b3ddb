"""Cross-entropy on a real GPU: large vocabularies, memory, compiled and captured, and the same bits in every run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import flashkernels as fk

from .gpu import assert_the_same_in_a_graph, needs_memory
from .oracle import run
from .test_cross_entropy import check_linear, check_logits, each_option, each_reduction, inputs

pytestmark = pytest.mark.gpu


@each_reduction
@each_option
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_gpu(dtype: torch.dtype, options: dict[str, float], reduction: str) -> None:
    x, weight, bias, targets = inputs((2000,), 64, 5003, dtype, ignored=100, device="cuda", scale=3.0)
    check_linear(x, weight, bias, targets, "auto", reduction, options)
    check_logits(F.linear(x, weight, bias), targets, "auto", reduction, options)


def test_gpu_large_vocabulary() -> None:
    """Several chunks, rows wider than a program reads at a time."""
    x, weight, _, targets = inputs((2200,), 128, 128_256, torch.bfloat16, ignored=500, device="cuda", scale=3.0)
    check_linear(x, weight, None, targets, "auto", "mean", {"z_loss": 1e-4})


def test_gpu_repeats_bit_for_bit() -> None:
    x, weight, bias, targets = inputs((3000,), 64, 5000, torch.bfloat16, device="cuda")
    first, second = (
        run(lambda *y: (fk.fused.linear_cross_entropy(y[0], y[1], targets, bias=y[2]),), [x, weight, bias], True)
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("wrong", [-1, 5000, 1 << 40])
def test_gpu_targets_out_of_range(wrong: int) -> None:
    x, weight, _, targets = inputs((300,), 64, 5000, torch.bfloat16, device="cuda")
    clean = fk.fused.linear_cross_entropy(x, weight, targets, reduction="none")
    targets[7] = wrong
    losses = fk.fused.linear_cross_entropy(x, weight, targets, reduction="none")
    assert losses[7].isnan() and torch.equal(losses[8:], clean[8:])
    assert fk.fused.linear_cross_entropy(x, weight, targets).isnan()


def test_gpu_peak_memory() -> None:
    """Beyond inputs and gradients: an eighth of what torch's eager way holds for logits, and a few numbers a token."""
    x, weight, _, targets = inputs((8192,), 256, 32_000, torch.bfloat16, device="cuda")

    def peak(function: Callable[..., Tensor]) -> int:
        leaves = [y.detach().requires_grad_() for y in (x, weight)]
        function(*leaves).backward()  # workspaces of the products stay
        for y in leaves:
            y.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function(*leaves).backward()
        torch.cuda.synchronize()
        gradients = sum(y.grad.numel() * y.grad.element_size() for y in leaves)
        return torch.cuda.max_memory_allocated() - before - gradients

    ours = peak(lambda x, weight: fk.fused.linear_cross_entropy(x, weight, targets))
    theirs = peak(lambda x, weight: F.cross_entropy(F.linear(x, weight), targets))
    logits = 8192 * 32_000 * 2
    assert ours <= logits // 4 + (8 << 20) and ours <= 0.15 * theirs, (ours / logits, theirs / logits)


def test_gpu_compiled() -> None:
    x, weight, bias, targets = inputs((3000,), 64, 5000, torch.bfloat16, device="cuda")

    def function(*y: Tensor) -> tuple[Tensor, ...]:
        return (fk.fused.linear_cross_entropy(y[0], y[1], targets, bias=y[2], softcap=5.0),)

    compiled = torch.compile(function, fullgraph=True)
    for a, b in zip(run(compiled, [x, weight, bias], True), run(function, [x, weight, bias], True), strict=True):
        torch.testing.assert_close(a, b)


def test_gpu_captured() -> None:
    x, weight, _, targets = inputs((300,), 64, 5000, torch.bfloat16, device="cuda")
    leaves = [y.requires_grad_() for y in (x, weight)]

    def step() -> tuple[Tensor, ...]:
        loss = fk.fused.linear_cross_entropy(*leaves, targets)
        return loss, *torch.autograd.grad(loss, leaves)

    assert_the_same_in_a_graph(step)


def test_gpu_more_logits_than_32_bits_count() -> None:
    needs_memory(40)
    z = torch.randn(64_000, device="cuda").bfloat16().expand(34_000, -1).contiguous().requires_grad_()
    targets = torch.full((34_000,), 5, device="cuda")
    losses = fk.fused.cross_entropy(z, targets, reduction="none")
    assert (losses == losses[0]).all()
    (grad,) = torch.autograd.grad(losses.sum(), z)
    assert torch.equal(grad[-1], grad[0])
