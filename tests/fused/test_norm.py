"""What only the norms have: the Llama rounding, quantised rows, gradients of the sum."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import flashkernels as fk

from . import oracle
from .oracle import OPS
from .test_rows import INTERPRETED, each_impl, laid_out

MOST = {"fp8": 448.0, "int8": 127.0}
each_format = pytest.mark.parametrize("quantise", MOST)


@each_impl
def test_hf_rounds_as_transformers_does(impl: str) -> None:
    x, weight = OPS["rms_norm"].inputs((50, 64), torch.float16)
    want = oracle.llama_norm(x, weight)
    hf, fp32 = (fk.rms_norm(x, weight, numerics=numerics, impl=impl) for numerics in ("hf", "fp32"))
    assert (hf == want).float().mean() > 0.999  # the order of a sum may move a rounding
    assert (fp32 == want).float().mean() < 0.9


@each_impl
def test_the_sum_is_rounded_before_the_norm(impl: str) -> None:
    x, weight, residual = OPS["rms_norm-residual"].inputs((50, 64), torch.float16)
    out, total = fk.rms_norm(x, weight, residual=residual, impl=impl)
    assert torch.equal(total, x + residual)
    assert torch.equal(out, fk.rms_norm(total, weight, impl=impl))


@each_impl
@pytest.mark.parametrize("used", [0, 1])
def test_only_one_output_is_used(used: int, impl: str) -> None:
    tensors = [x.requires_grad_() for x in OPS["rms_norm-residual"].inputs((4, 10), torch.float32)]
    x, weight, residual = tensors
    out = fk.rms_norm(x, weight, residual=residual, impl=impl)[used]
    want = (oracle.rms_norm(x + residual, weight), x + residual)[used]
    dy = torch.randn(out.shape)
    for a, b in zip(*(torch.autograd.grad(y, tensors, dy, allow_unused=True) for y in (out, want)), strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b)


@each_impl
@pytest.mark.parametrize("need", [(True, False), (False, True)])
def test_only_some_gradients_are_wanted(need: tuple[bool, bool], impl: str) -> None:
    x, weight, bias = OPS["layer_norm"].inputs((4, 10), torch.float32)
    inputs = [y.requires_grad_() for y, wanted in zip((weight, bias), need, strict=True) if wanted]
    dy = torch.randn(4, 10)
    found = torch.autograd.grad(fk.layer_norm(x, weight, bias, impl=impl), inputs, dy)
    want = torch.autograd.grad(oracle.layer_norm(x, weight, bias), inputs, dy)
    torch.testing.assert_close(found, want)


# Quantised rows


def allowed(impl: str, quantise: str) -> None:
    if impl == "triton" and quantise == "fp8" and INTERPRETED:
        pytest.skip("Triton's interpreter rounds FP8 wrongly")


ROUNDING = 8 * torch.finfo(torch.float32).eps  # of the norm itself: a few, in fp32


def check_quantised(found: Tensor, scale: Tensor, want: Tensor, quantise: str) -> None:
    """The scale is the largest number of a row over the format's; numbers are off by half a step."""
    found, scale, want = found.double().cpu(), scale.cpu(), want.cpu()
    largest = want.abs().amax(-1)
    exact = torch.where(largest == 0, 1.0, largest / MOST[quantise])
    torch.testing.assert_close(scale.double(), exact, rtol=ROUNDING, atol=0.0)
    assert found.abs().max() <= MOST[quantise]
    # half a step: of the integers, or of 3 bits of fraction (and of the smallest numbers, 2 ** -9 apart)
    small = want / exact[..., None]
    step = torch.ones_like(small) if quantise == "int8" else (small.abs() / 8).clamp(min=2.0**-9)
    assert ((found - small).abs() <= step / 2 + ROUNDING * MOST[quantise]).all()


@each_impl
@each_format
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [1, 40, 1000, 17_001])
def test_quantised(quantise: str, dtype: torch.dtype, width: int, impl: str) -> None:
    allowed(impl, quantise)
    x, weight, residual = OPS["rms_norm-residual"].inputs((5, width), dtype)
    x = laid_out(x, "padded")
    small, scale, total = fk.rms_norm(x, weight, residual=residual, quantise=quantise, impl=impl)
    assert small.dtype == {"fp8": torch.float8_e4m3fn, "int8": torch.int8}[quantise]
    assert scale.dtype == torch.float32 and scale.shape == (5,) and torch.equal(total, x + residual)
    want = oracle.rms_norm(total.double(), weight.double())
    check_quantised(small, scale, want, quantise)

    x, weight, bias = OPS["layer_norm"].inputs((2, 3, width), dtype)
    small, scale = fk.layer_norm(x, weight, bias, quantise=quantise, impl=impl)
    check_quantised(small, scale, oracle.layer_norm(x.double(), weight.double(), bias.double()), quantise)


@each_impl
@each_format
def test_quantised_edges(quantise: str, impl: str) -> None:
    allowed(impl, quantise)
    x = torch.randn(4, 40)
    clean, scales = fk.rms_norm(x, quantise=quantise, impl=impl)
    x[0], x[1, 3], x[2, 3] = 0.0, torch.nan, torch.inf
    small, scale = fk.rms_norm(x, quantise=quantise, impl=impl)
    assert scale[0] == 1 and (small[0].float() == 0).all()
    assert scale[1:3].isnan().all() and torch.equal(scale[3], scales[3])
    assert torch.equal(small[3].float(), clean[3].float())
    small, scale = fk.rms_norm(x[:0], quantise=quantise, impl=impl)
    assert small.shape == (0, 40) and scale.shape == (0,)
    small, scale = fk.rms_norm(x[:, :0], quantise=quantise, impl=impl)
    assert small.shape == (4, 0) and (scale == 1).all()


@each_impl
@each_format
def test_rows_whose_scale_would_be_subnormal(quantise: str, impl: str) -> None:
    allowed(impl, quantise)
    weight = torch.tensor([1.0, -1.0, 0.5, -0.25]) * 2.0**-130
    small, scale = fk.rms_norm(torch.ones(2, 4), weight, quantise=quantise, impl=impl)
    assert (scale == 2.0**-126).all()
    torch.testing.assert_close(small.float(), (weight / 2.0**-126).expand(2, 4), rtol=0.07, atol=0.5)
    weight = torch.tensor([1.0, -1.0, 0.5, -0.5]) * 2.0**-119
    small, scale = fk.rms_norm(torch.ones(2, 4), weight, quantise=quantise, impl=impl)
    assert (small.float().sign() == weight.sign()).all() and small.float().abs().max() <= MOST[quantise]


@each_impl
@each_format
def test_quantised_rows_without_numbers(quantise: str, impl: str) -> None:
    allowed(impl, quantise)
    for norm in (fk.layer_norm, fk.rms_norm):
        small, scale = norm(torch.ones(4, 0), quantise=quantise, impl=impl)
        assert small.shape == (4, 0) and (scale == 1).all()
    *_, mean, rstd = torch.ops.flashkernels.norm(torch.ones(4, 0), None, None, None, True, 1e-5, False, quantise, impl)
    assert (mean == 0).all() and (rstd == 0).all()


@each_format
def test_quantised_under_compile(quantise: str) -> None:
    torch._dynamo.reset()
    x, weight = OPS["rms_norm"].inputs((5, 40), torch.float32)
    compiled = torch.compile(
        lambda y: fk.rms_norm(y * 2, weight, quantise=quantise), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for a, b in zip(compiled(x), fk.rms_norm(x * 2, weight, quantise=quantise), strict=True):
        assert torch.equal(a.float(), b.float())


def test_quantised_has_no_gradients() -> None:
    x = torch.randn(2, 6).requires_grad_()
    with pytest.raises(fk.UnsupportedError, match="quantise='int8' has no gradients"):
        fk.rms_norm(x, quantise="int8")
    with torch.no_grad():
        assert fk.rms_norm(x, quantise="int8")[0].dtype == torch.int8


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"eps": "1"}, TypeError, "eps='1' must be a number, got str"),
        ({"eps": True}, TypeError, "eps=True must be a number, got bool"),
        ({"eps": float("nan")}, ValueError, "eps=nan must be finite"),
        ({"eps": -1.0}, ValueError, "eps=-1.0 must not be negative"),
        ({"numerics": "bf16"}, ValueError, "numerics='bf16' is not one of 'fp32', 'hf'"),
        ({"quantise": "int4"}, ValueError, "quantise='int4' is not one of None, 'fp8', 'int8'"),
        ({"weight": torch.ones(2, 3)}, ValueError, r"weight has shape \(2, 3\); expected \(6,\)"),
        ({"bias": torch.ones(6, dtype=torch.int8)}, TypeError, "bias.dtype=torch.int8 is not supported"),
        ({"weight": torch.ones(6).double()}, TypeError, "weight.dtype=torch.float64 with x.dtype=torch.float32"),
        ({"weight": torch.ones(6, device="meta")}, ValueError, "weight.device=meta differs from x.device=cpu"),
        ({"residual": 1}, TypeError, "residual must be a torch.Tensor, got int"),
    ],
)
def test_errors(arguments: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fk.rms_norm(torch.ones(2, 6), **arguments)
