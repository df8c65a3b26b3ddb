"""Rounding, the copy that rounds, the sum, and loads ahead of their time on a Hopper GPU: bit for bit as the way in
more steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashkernels as fk
from flashkernels.hardware import detect
from flashkernels.moe import gemm
from flashkernels.moe.combine import Combine, combined
from flashkernels.moe.gemm import ALPHA, LIMIT, Gemm
from flashkernels.moe.hopper.gemm_tiles import HopperGemmTile
from flashkernels.moe.plan import Plan

from .test_layer import weights_of

pytestmark = pytest.mark.gpu
each_format = pytest.mark.parametrize("format", ["fp8", "int8"])
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])


@pytest.fixture(autouse=True)
def _hopper() -> None:
    gpu = detect()
    if gpu is None or not gpu.has_wgmma:
        pytest.skip("needs a Hopper GPU")


def numbers(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Rows of all sizes, of zeros, with NaN, Inf, and with a largest number that makes the scale a power of two."""
    x = (torch.randn(rows, width, device="cuda") * torch.logspace(-6, 4, rows, device="cuda")[:, None]).to(dtype)
    x[1::17], x[2::17, -1], x[3::17, 0], x[4::17, 7] = 0, torch.nan, torch.inf, -torch.inf
    x[5::17] = x[5::17].clamp(-3, 3)
    x[5::17, 3] = -3.5  # 448 / 128
    x[6::17] *= 1e-30
    x[7::17] = x[7::17].clamp(-2, 2).mul_(32).round_().div_(64)  # quotients between two numbers, with this largest one
    x[7::17, :1] = 127 / 64
    return x


def same(found: Tensor, want: Tensor) -> bool:
    return torch.equal(found.float().nan_to_num(12345.0), want.float().nan_to_num(12345.0))


@each_format
@each_dtype
@pytest.mark.parametrize("width", [16, 768, 1008, 1024, 2048, 2064, 4096, 14336, 16384])
@pytest.mark.parametrize("rows", [1, 9, 3000])
def test_rounding_is_the_same_everywhere(rows: int, width: int, dtype: torch.dtype, format: str) -> None:
    x = numbers(rows, width, dtype)
    hopper, triton, plain = (fk.moe.round_rows(x, format, impl=impl) for impl in ("hopper", "triton", "torch"))
    for found, other, want in zip(hopper, triton, plain, strict=True):
        assert found.dtype == other.dtype == want.dtype
        assert same(found, want) and same(other, want)


@each_format
def test_rounding_of_rows_that_lie_apart(format: str) -> None:
    x = numbers(3000, 1024, torch.bfloat16)[:, 256:]
    for found, want in zip(*(fk.moe.round_rows(x, format, impl=impl) for impl in ("hopper", "triton")), strict=True):
        assert same(found, want)


def routed(tokens: int, experts: int, k: int, span: tuple[int, int] | None = None) -> tuple[Plan, Tensor]:
    found = fk.moe.route(torch.randn(tokens, experts, device="cuda"), k, span=span)
    assert found.plan is not None
    return found.plan, found.weights


@each_format
@each_dtype
@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize(("depth", "k"), [(16, 1), (144, 2), (768, 8), (2048, 8), (4096, 2), (14336, 3)])
def test_rows_rounded_on_the_way_to_their_places(
    depth: int, k: int, cluster: int, dtype: torch.dtype, format: str
) -> None:
    """The product of the two ways differs in no bit: then neither do rows nor scales."""
    tokens, experts = 701, 9
    plan, _ = routed(tokens, experts, k)
    x = numbers(tokens, depth, dtype)
    w = fk.moe.quantise(torch.randn(experts, 256, depth, device="cuda") / depth**0.5, format)
    out = "fp16" if dtype == torch.float16 else "bf16"
    call = Gemm(True, "swiglu", False, ALPHA, LIMIT, format, 0, depth, plan.block, out, False, "hopper",
                HopperGemmTile(192, 4, cluster=cluster))  # fmt: skip
    rounded, scale = fk.moe.round_rows(x, format, impl="triton")
    found = gemm.forward((x, w.data, None, None, None, w.scale, *plan[:6]), call)
    want = gemm.forward((rounded, w.data, None, None, scale, w.scale, *plan[:6]), call)
    assert same(found, want)


@each_format
def test_rows_of_experts_elsewhere_are_not_copied(format: str) -> None:
    """With a span some items have no place: their rows go nowhere."""
    plan, _ = routed(1000, 12, 4, span=(3, 7))
    x = numbers(1000, 768, torch.bfloat16)
    w = fk.moe.quantise(torch.randn(4, 256, 768, device="cuda") / 27, format)
    call = Gemm(True, "none", False, ALPHA, LIMIT, format, 0, 768, plan.block, "bf16", False, "hopper",
                HopperGemmTile(192, 4))  # fmt: skip
    rounded, scale = fk.moe.round_rows(x, format, impl="triton")
    found = gemm.forward((x, w.data, None, None, None, w.scale, *plan[:6]), call)
    want = gemm.forward((rounded, w.data, None, None, scale, w.scale, *plan[:6]), call)
    used = int(plan.offsets[-1])
    assert 0 < used < 4000 and same(found[:used], want[:used])


@each_dtype
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("tokens", "k", "width"), [(1, 1, 8), (77, 2, 264), (1000, 8, 2048), (333, 16, 4096)])
def test_the_sum_is_triton_s(
    tokens: int, k: int, width: int, weighted: bool, shared: bool, dtype: torch.dtype
) -> None:  # fmt: skip
    plan, weights = routed(tokens, 32, k, span=(0, 29))
    y = torch.randn(tokens * k, width, device="cuda").to(dtype)
    y[int(plan.offsets[-1]) :] = torch.nan  # never written
    add = torch.randn(tokens, width, device="cuda").to(dtype) if shared else None
    found, want, settled = (
        combined(y, weights if weighted else None, add, plan, Combine("fp16" if dtype == torch.float16 else "bf16", *c))
        for c in (("hopper",), ("triton",), ("hopper", True))
    )
    assert torch.equal(found, want) and torch.equal(settled, want)


@pytest.mark.parametrize("format", ["", "fp8", "int8"])
@pytest.mark.parametrize("rows", [70, 500], ids=["few", "many"])
def test_weights_loaded_ahead_change_nothing(rows: int, format: str) -> None:
    """As a layer's second product, behind a kernel that makes its rows, which takes its time."""
    experts, depth = 16, 768
    plan, _ = routed(rows * experts // 2, experts, 2)
    x = torch.randn(rows * experts, depth, device="cuda").bfloat16()
    w: Any = torch.randn(experts, 1024, depth, device="cuda").bfloat16() / 27
    scale = None
    if format:
        small = fk.moe.quantise(w, format)
        w, scale = small.data, small.scale
    call = Gemm(False, "none", False, ALPHA, LIMIT, format, 0, depth, plan.block, "bf16", False, "hopper")
    results = []
    for splittable in (False, True):
        for _ in range(5):
            made = torch.zeros_like(x)
            made += x  # the kernel ahead
            small, x_scale = fk.moe.round_rows(made, format, impl="hopper") if format else (made, None)
            tensors = (small, w, None, None, x_scale, scale, *plan[:6])
            results.append(gemm.forward(tensors, call._replace(splittable=splittable)))
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("format", ["", "fp8", "int8"])
@pytest.mark.parametrize("tokens", [600, 4000], ids=["few", "many"])
def test_a_graph_follows_its_tokens(tokens: int, format: str) -> None:
    """Every replay has another routing: nothing that was read early is an earlier one's."""
    experts, k, hidden, inner = 64, 8, 512, 256
    router = torch.randn(experts, hidden, device="cuda").bfloat16()
    up, down = (w.cuda() for w in weights_of(experts, hidden, inner, torch.bfloat16))
    if format:
        up, down = (fk.moe.quantise(w, format) for w in (up, down))
    batches = torch.randn(12, tokens, hidden, device="cuda").bfloat16()
    x = batches[0].clone()
    with torch.no_grad():
        wants = [fk.moe.layer(batch, router, up, down, k=k) for batch in batches]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [fk.moe.layer(x, router, up, down, k=k) for _ in range(3)]
        for batch, want in zip(batches, wants, strict=True):
            x.copy_(batch)
            graph.replay()
            assert all(torch.equal(out, want) for out in outs)
