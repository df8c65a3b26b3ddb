"""What the FP8 tests share: inputs, the numbers they stand for, and the error that is allowed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashkernels as fk
from flashkernels.attention.fp8 import Quantised

from . import oracle
from .cases import Shape, qkv

E4M3 = torch.float8_e4m3fn
ROWS = 128  # that share a scale
each_scale = pytest.mark.parametrize("per_block", [False, True], ids=["per-head", "per-block"])


def quantised(shape: Shape, device: str = "cpu", *, per_block: bool = False, seed: int = 0) -> Quantised:
    return fk.quantise_qkv(*qkv(shape, torch.bfloat16, device=device, seed=seed), per_block=per_block)


def head_first(small: Quantised) -> Quantised:
    """The same numbers as (B, H, S, D)."""
    return small._replace(**{name: getattr(small, name).transpose(1, 2).contiguous() for name in "qkv"})


def dequantised(x: Tensor, scale: Tensor | None, layout: str = "bshd") -> Tensor:
    """The numbers that FP8 stands for: exact in fp64."""
    if scale is None:
        return x.double()
    rows = x.shape[1 if layout == "bshd" else 2]
    each = scale[..., None].expand(*scale.shape, rows) if scale.dim() == 2 else scale.repeat_interleave(ROWS, 2)
    each = each[..., :rows, None].double()  # (B, H, S, 1)
    return x.double() * (each.transpose(1, 2) if layout == "bshd" else each)


def wide(small: Quantised, layout: str = "bshd") -> tuple[Tensor, Tensor, Tensor]:
    pairs = zip(small[:3], small[3:], strict=True)
    q, k, v = (dequantised(x, scale, layout) for x, scale in pairs)
    return q, k, v


def assert_exact(out: Tensor, lse: Tensor | None, small: Quantised, **features: Any) -> None:
    """What the reference must give: fp32 on the dequantised inputs, rounded to bf16 at the end."""
    inputs = wide(small, features.get("layout", "bshd"))
    want, plain = oracle.attention(*inputs, **features), oracle.naive(*(x.float() for x in inputs), **features)
    assert out.dtype == torch.bfloat16
    oracle.assert_close(out, plain.out.bfloat16(), want.out, want.terms, torch.float32)
    if lse is not None:
        assert lse.dtype == torch.float32
        oracle.assert_close(lse, plain.lse, want.lse, want.lse.abs().clamp(min=1.0), torch.float32, name="lse")


def assert_correct(out: Tensor, lse: Tensor | None, small: Quantised, **features: Any) -> None:
    """What a kernel may give: twice the error of plain torch that rounds its weights to FP8 as well.

    The few roundings beyond it are of fp16: the tensor cores keep little more bits of a sum of FP8 products.
    """
    inputs = wide(small, features.get("layout", "bshd"))
    want = oracle.attention(*inputs, **features)
    plain = oracle.naive(*(x.float() for x in inputs), eight_bits=True, **features)
    assert out.dtype == torch.bfloat16
    oracle.assert_close(out, plain.out.bfloat16(), want.out, want.terms, torch.float16)
    if lse is not None:
        assert lse.dtype == torch.float32
        oracle.assert_close(lse, plain.lse, want.lse, want.lse.abs().clamp(min=1.0), torch.float16, name="lse")


def check(small: Quantised, impl: str, **features: Any) -> tuple[Tensor, Tensor]:
    """Runs attention and compares it with the oracle."""
    out, lse = fk.attention(*small[:3], **small.scales, return_lse=True, impl=impl, **features)
    (assert_exact if impl == "torch" else assert_correct)(out, lse, small, **features)
    return out, lse
