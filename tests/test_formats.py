"""Number formats: what is stored, bit by bit, how far it is from the numbers, and the edges."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from flashkernels.formats import FORMATS, Format, decode, encode, lookup, scale_of

QUANTISED = [f for f in FORMATS.values() if f.quantised]
each_format = pytest.mark.parametrize("form", QUANTISED, ids=lambda f: f.name)
# half a step of the largest number: integers by their count, floats by their mantissa
ERROR = {"int8": 0.5 / 127, "int4": 0.5 / 7, "fp8": 2.0**-4, "fp8_e5m2": 2.0**-3}


@each_format
@given(exponent=st.floats(-12, 9), width=st.sampled_from([2, 16, 40, 128]), seed=st.integers(0, 99))
def test_comes_back_within_half_a_step(form: Format, exponent: float, width: int, seed: int) -> None:
    x = torch.randn(3, 5, width, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    stored, scale = encode(x, form)
    assert stored.dtype == form.dtype and stored.shape == (3, 5, width // form.packed)
    assert scale is not None and scale.dtype == torch.float16
    assert scale.shape == ((3, 5, -(-width // 32)) if form.group else (3, 5))
    largest = x.abs().amax(-1, keepdim=True)
    # scales are rounded up: by 2^-10, or by 2^-24 where fp16 has no more bits
    step = ERROR[form.name] * (1 + 2.0**-10) * largest + form.most * 2.0**-25
    assert ((decode(stored, form, scale) - x).abs() <= step).all()


@each_format
def test_nothing_is_clipped(form: Format) -> None:
    x = torch.randn(200, 32) * torch.logspace(-5, 3, 200)[:, None]
    scale = scale_of(x, form).float().flatten()
    assert (scale * form.most >= x.abs().amax(-1)).all()
    assert (scale * form.most <= x.abs().amax(-1) * (1 + 2.0**-9) + form.most * 2.0**-23).all()


@each_format
def test_zeros_and_broken_rows(form: Format) -> None:
    x = torch.zeros(4, 64)
    x[1, 3], x[2, 40], x[3] = torch.nan, -torch.inf, 1.0
    stored, scale = encode(x, form)
    back = decode(stored, form, scale)
    assert (back[0] == 0).all() and back[1].isnan().all() and back[2].isnan().all() and back[3].isfinite().all()


def test_int4_is_two_in_a_byte_with_the_even_column_low() -> None:
    x = torch.arange(-7.0, 8.0).repeat(3)[:32]
    stored, scale = encode(x[None], FORMATS["int4"])
    assert scale is not None and scale.item() == 1.0
    assert stored[0].tolist() == [(int(a) & 15) | (int(b) & 15) << 4 for a, b in zip(x[::2], x[1::2], strict=True)]
    assert torch.equal(decode(stored, FORMATS["int4"], scale)[0], x)


def test_groups_of_int4_have_their_own_scales() -> None:
    x = torch.cat((torch.ones(32), 100 * torch.ones(8)))[None]
    stored, scale = encode(x, FORMATS["int4"])
    assert scale is not None and scale.shape == (1, 2)
    torch.testing.assert_close(decode(stored, FORMATS["int4"], scale), x, rtol=2e-3, atol=0)


@each_format
def test_fixed_scales_of_heads_clip(form: Format) -> None:
    x = torch.randn(5, 2, 16)
    scale = torch.tensor([0.5, 1e-4]).half()
    stored, same = encode(x, form, scale)
    assert same is scale
    back = decode(stored, form, scale)
    assert (back[:, 1].abs() <= form.most * 1.001e-4).all()
    assert ((back - x)[:, 0].abs() <= 0.5).all()


def test_numbers_that_are_not_quantised_have_no_scales() -> None:
    x = torch.randn(3, 16)
    assert encode(x, FORMATS["fp32"])[1] is None
    assert torch.equal(decode(encode(x, FORMATS["bf16"])[0], FORMATS["bf16"]), x.bfloat16().float())


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match="format='int3' is not one of 'fp32', 'fp16'"):
        lookup("int3")
