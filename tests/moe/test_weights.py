"""Quantised weights and rows: how far from the numbers they stand for."""

from __future__ import annotations

import pytest
import torch

import flashkernels as fk
from flashkernels.moe.problem import FORMATS, PHASES
from flashkernels.moe.weights import LEAST_SCALE, MOST, ROUNDED, pack, rounded_rows, unpack

from .test_route import INTERPRETED, each_impl


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("n", "k"), [(8, 128), (130, 300), (1, 1), (3, 64)])
def test_weights_are_off_by_half_a_step(format: str, n: int, k: int) -> None:
    w = torch.randn(2, n, k)
    small = fk.moe.quantise(w, format, group=64, scale_dtype=torch.float32)
    wide = fk.moe.dequantise(small)
    assert small.shape == wide.shape == w.shape
    words = format in PHASES
    ones = small._replace(data=pack(torch.ones(w.shape), format) if words else torch.ones_like(w).to(small.data.dtype))
    scale = fk.moe.dequantise(ones)  # of every weight
    steps = (w / scale).abs()
    half = torch.full_like(w, 0.5) if not format.startswith("fp8") else (steps / 16).clamp(min=2.0**-10)
    assert ((w - wide).abs() <= (half + 1e-4) * scale).all()
    assert (wide / scale).abs().max() <= MOST[format] * (1 + 1e-6)


@pytest.mark.parametrize(("format", "words"), [("w8", 192), ("w4", 128)])
def test_words_pack_and_unpack(format: str, words: int) -> None:
    most = 2 ** (FORMATS[format] - 1)
    small = torch.randint(-most, most, (3, 5, 300)).float()
    data = pack(small, format)
    assert data.shape == (3, 5, words) and data.dtype == torch.int16
    assert torch.equal(unpack(data, 300, format), small)
    lowest = small[0, 0, 7].int() + (8 if format == "w4" else 0)
    assert data[0, 0, 7] & 2 * most - 1 == lowest % (2 * most)


def test_zeros_and_scales() -> None:
    for format in FORMATS:
        small = fk.moe.quantise(torch.zeros(1, 4, 128), format)
        assert (fk.moe.dequantise(small) == 0).all() and (small.scale == 1).all()


@each_impl
@pytest.mark.parametrize("format", ROUNDED)
@pytest.mark.parametrize("width", [1, 128, 300, 17_000])
def test_rows(format: str, width: int, impl: str) -> None:
    if impl == "triton" and INTERPRETED and format.startswith("fp8"):
        pytest.skip("Triton's interpreter rounds FP8 wrongly")
    x = torch.randn(5, width)
    x[2] = 0
    small, scale = fk.moe.round_rows(x, format, impl=impl)
    assert scale.shape == ((5, -(-width // 128)) if format == "fp8_block" else (5,))
    each = scale.repeat_interleave(128, 1)[:, :width] if format == "fp8_block" else scale[:, None]
    steps = (x / each).abs()
    half = torch.full_like(x, 0.5) if format == "int8" else (steps / 16).clamp(min=2.0**-10)
    assert ((x - small.float() * each).abs() <= (half + 1e-4) * each).all()
    assert (scale[2] == 1).all() and (small[2].float() == 0).all()
    x[1, 0] = torch.inf
    poisoned = fk.moe.round_rows(x, format, impl=impl)[1]
    assert poisoned[1].reshape(-1)[0].isnan() and torch.equal(poisoned[3], scale[3])


TINY = (1e-45, 4e-44, 2.66e-43, 1e-42, 1e-38, 3e-37, 6e-36)  # a scale of some is 0 in fp32, of others inexact


@each_impl
@pytest.mark.parametrize("format", ROUNDED)
@pytest.mark.parametrize("width", [16, 17_000])
def test_tiny_rows(format: str, width: int, impl: str) -> None:
    """Every number is off by half a step, and the largest does not turn around."""
    if impl == "triton" and INTERPRETED and format.startswith("fp8"):
        pytest.skip("Triton's interpreter rounds FP8 wrongly")
    x = torch.zeros(len(TINY), width)
    x[:, 0] = torch.tensor(TINY)
    x[:, 1] = x[:, 0] / -2
    small, scale = fk.moe.round_rows(x, format, impl=impl)
    for got, want in zip((small, scale), rounded_rows(x, format), strict=True):
        assert torch.equal(got.float(), want.float())
    assert small.float().isfinite().all() and (small[:, 2:].float() == 0).all() and (scale >= LEAST_SCALE).all()
    step = scale.reshape(len(TINY), -1)[:, :1].double()
    off = (small[:, :2].double() * step - x[:, :2]).abs()
    most = 0.5 if format == "int8" else (x[:, :2].double().abs() / step / 16).clamp(min=2.0**-10)
    assert (off <= most * step * 1.001).all()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_tiny_weights(format: str, scale_dtype: torch.dtype) -> None:
    w = torch.zeros(1, len(TINY), 256)
    w[0, :, 0] = torch.tensor(TINY)
    small = fk.moe.quantise(w, format, scale_dtype=scale_dtype)
    assert (small.scale > 0).all()
    wide = fk.moe.dequantise(small)
    assert wide.isfinite().all() and (wide[..., 1:] == 0).all()
    assert ((wide - w).abs() <= 0.51 * small.scale.float().max()).all()


@pytest.mark.parametrize("format", FORMATS)
def test_quantised_weights_keep_no_graph(format: str) -> None:
    small = fk.moe.quantise(torch.nn.Parameter(torch.randn(2, 8, 128)), format)
    assert not small.scale.requires_grad and not small.data.requires_grad


@pytest.mark.gpu
@pytest.mark.parametrize("format", ROUNDED)
@pytest.mark.parametrize("width", [4096, 17_000])
def test_ties_round_as_in_torch(format: str, width: int) -> None:
    """A scale that is a power of two puts numbers just between two others, and each goes to the even one."""
    x = torch.randn(64, width, device="cuda").half().float().clamp(-3, 3)
    largest = {"int8": 127.0, "fp8": 448.0, "fp8_block": 448.0}[format]
    x[:, ::128] = largest / 2.0 ** torch.arange(5, 9, device="cuda").repeat(16)[:, None]
    x = x.clamp(-x[:, :1], x[:, :1])
    for got, want in zip(fk.moe.round_rows(x, format, impl="triton"), rounded_rows(x, format), strict=True):
        assert torch.equal(got.float(), want.float())


def test_bad_formats_are_named() -> None:
    with pytest.raises(ValueError, match="format='int4'"):
        fk.moe.quantise(torch.zeros(1, 1, 1), "int4")
    with pytest.raises(ValueError, match="group=100"):
        fk.moe.quantise(torch.zeros(1, 1, 1), "w4", group=100)
    with pytest.raises(ValueError, match=r"\(1, 1\)"):
        fk.moe.quantise(torch.zeros(1, 1), "w4")
    with pytest.raises(ValueError, match="format='w4'"):
        fk.moe.round_rows(torch.zeros(1, 1), "w4")
