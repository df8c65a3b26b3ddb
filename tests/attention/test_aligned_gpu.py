"""Rows that cannot be read 16 bytes at a time, on a GPU: copied, and served by the Hopper kernels or Triton's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

import flashkernels as fk

from .cases import EVERYTHING, FEATURES, NO_MASK, Shape, keywords, ragged
from .gpu import (
    LARGE,
    LENGTHS,
    check,
    check_varlen,
    cuda,
    misaligned,
    new_memory_is_nan,
    odd_rows,
    spread,
    syncs_are_errors,
)  # fmt: skip
from .gradients import check as check_gradients, check_varlen as check_gradients_of
from .test_backward import sides

pytestmark = pytest.mark.gpu

STRIDES = {"misaligned": misaligned, "odd": odd_rows, "spread": spread}
SMALL = Shape(b=2, sq=300, sk=420, h=4, hkv=2)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dims", [1, 7, 33, 70, 97, 100, 255, 257, 505, (192, 100), (97, 128)], ids=str)
def test_head_dimension(dims: int | tuple[int, int], causal: bool) -> None:
    dim, dim_v = dims if isinstance(dims, tuple) else (dims, dims)
    shape = LARGE.but(d=dim, dv=dim_v)
    inputs = cuda(shape)
    with new_memory_is_nan():
        out, lse = check(*inputs, impl="aligned", causal=causal)
    assert out.is_contiguous() and fk.explain("attention", *inputs, causal=causal).impl == "aligned"
    again, levels = fk.attention(*inputs, causal=causal, return_lse=True)
    assert torch.equal(out, again) and torch.equal(lse, levels)


@pytest.mark.parametrize("feature", FEATURES)
def test_feature(feature: str) -> None:
    shape = LARGE.but(d=97)
    check(*cuda(shape), impl="aligned", **keywords(feature, shape, "cuda"))


@pytest.mark.parametrize("change", STRIDES.values(), ids=STRIDES)
@pytest.mark.parametrize("which", range(4))
def test_strides(change: Callable[[Tensor], Tensor], which: int) -> None:
    """Of q, k or v alone, or of all."""
    inputs = [change(x) if which in (i, 3) else x for i, x in enumerate(cuda(LARGE))]
    assert fk.explain("attention", *inputs).impl == "aligned"
    check(*inputs, impl="auto", causal=True)
    inputs = [change(x) if which in (i, 3) else x for i, x in enumerate(cuda(SMALL.but(d=96)))]
    for impl in ("auto", "triton"):
        check_gradients(*inputs, impl=impl, causal=True)


@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize("dims", [1, 33, 50, 66, 70, 90, 97, 150, 170, 255, (192, 100)], ids=str)
def test_gradients(dims: int | tuple[int, int], impl: str) -> None:
    dim, dim_v = dims if isinstance(dims, tuple) else (dims, dims)
    check_gradients(*cuda(SMALL.but(d=dim, dv=dim_v)), impl=impl, causal=True)


@pytest.mark.parametrize("feature", [*NO_MASK, "floatmask", "+".join([*EVERYTHING, "floatmask"])])
def test_gradients_of_feature(feature: str) -> None:
    shape = SMALL.but(d=70)
    features = keywords(feature, shape, "cuda")
    check_gradients(*cuda(shape), impl="auto", also=sides(features), **features)


def test_a_ragged_batch() -> None:
    batch = ragged(*LENGTHS, Shape(b=6, h=6, hkv=2, d=70), torch.bfloat16, device="cuda")
    with syncs_are_errors():
        one, other = (fk.attention_varlen(*batch.args, causal=True) for _ in range(2))
    assert torch.equal(one, other)
    check_varlen(batch, impl="aligned", causal=True)
    check_gradients_of(batch, impl="auto", causal=True)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("impl", ["auto", "triton"])
@pytest.mark.parametrize("dim", [66, 70, 90, 97, 150])
def test_many_large_gradients_one_after_another(dim: int, impl: str, causal: bool) -> None:
    """Triton's pass over keys of such rows, as they were, ended in an illegal access: at this size, on an idle GPU."""
    q, k, v = (torch.randn(4, 4096, round(2048 / dim), dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    inputs, grad = [x.requires_grad_() for x in (q, k, v)], torch.randn_like(q)
    for _ in range(4):
        got = torch.autograd.grad(fk.attention(*inputs, causal=causal, impl=impl), inputs, grad)
    wide = [pad(x.detach(), (0, -dim % 8)).requires_grad_() for x in inputs]
    out = fk.attention(*wide, causal=causal, softmax_scale=dim**-0.5, impl="triton")
    want = torch.autograd.grad(out, wide, pad(grad, (0, -dim % 8)))
    for mine, theirs in zip(got, want, strict=True):
        assert (mine - theirs[..., :dim]).norm() < 0.01 * theirs.norm()


@pytest.mark.parametrize("impl", ["hopper", "triton"])
@pytest.mark.parametrize("dim", [72, 96])
def test_gradient_of_a_sum(dim: int, impl: str) -> None:
    """It is one number, expanded."""
    inputs = [x.requires_grad_() for x in cuda(SMALL.but(d=dim))]
    got = torch.autograd.grad(fk.attention(*inputs, impl=impl).sum(), inputs)
    out = fk.attention(*inputs, impl=impl)
    want = torch.autograd.grad(out, inputs, torch.ones_like(out))
    for mine, theirs in zip(got[1:], want[1:], strict=True):
        assert torch.equal(mine, theirs)


def test_a_graph_replays_with_new_inputs() -> None:
    shape = LARGE.but(d=97)
    static = cuda(shape)
    fk.attention(*static, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fk.attention(*static, causal=True)
    fresh = cuda(shape, seed=1)
    for x, y in zip(static, fresh, strict=True):
        x.copy_(y)
    graph.replay()
    assert torch.equal(out, fk.attention(*fresh, causal=True))


def test_compiled() -> None:
    inputs = [x.requires_grad_() for x in cuda(SMALL.but(d=70))]
    compiled = torch.compile(lambda *x: fk.attention(*x, causal=True), fullgraph=True)
    assert torch.equal(compiled(*inputs), fk.attention(*inputs, causal=True))
    torch.autograd.grad(compiled(*inputs).square().sum(), inputs)
