"""Number formats: what is stored, bit by bit, how far it is from the numbers, and the edges."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from flashkernels.formats import FORMATS, Format, decode, encode, lookup, scale_of

QUANTISED = [f for f in FORMATS.values() if f.quantised]
each_format = pytest.mark.parametrize("form", QUANTISED, ids=lambda f: f.name)


def rows(seed: int, width: int, outliers: bool = True) -> Tensor:
    """Normal numbers of all sizes that fp16 scales hold; some rows with outliers, some of zeros."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(64, width, generator=gen) * torch.logspace(-6, 2, 64)[:, None]
    if outliers:
        x[16:] *= torch.where(torch.rand(48, width, generator=gen) < 0.05, 20.0, 1.0)
        x[60:] = 0.0
    return x


@each_format
@given(width=st.sampled_from([2, 16, 40, 128]), seed=st.integers(0, 99))
@settings(max_examples=30)
def test_comes_back_within_half_a_step(form: Format, width: int, seed: int) -> None:
    x = rows(seed, width)
    stored, scale = encode(x, form)
    assert stored.dtype == form.dtype and stored.shape == (64, width // form.packed)
    assert scale is not None and scale.dtype == torch.float16
    assert scale.shape == ((64, -(-width // 32)) if form.group else (64,))
    each = scale.float().view(64, -1).repeat_interleave(form.group or width, 1)[:, :width]
    held = x.clamp(-form.most * each, form.most * each)
    if form.dtype.is_floating_point:
        info = torch.finfo(form.dtype)
        half = held.abs() * info.eps / 2 + each * info.smallest_normal * info.eps / 2
    else:
        half = each / 2
    assert ((decode(stored, form, scale) - held).abs() <= half * (1 + 2.0**-20)).all()


@each_format
def test_the_largest_number_becomes_one_of_the_aims(form: Format) -> None:
    """Scales are rounded up: by 2^-10, or by 2^-24 where fp16 has no more bits. So only INT4 ever clips."""
    x = rows(0, 32, outliers=False)
    largest, scale = x.abs().amax(-1), scale_of(x, form).float().flatten()
    near = [(scale * aim >= largest) & (scale * aim <= largest * (1 + 2.0**-9) + aim * 2.0**-23) for aim in form.aims]
    assert torch.stack(near).any(0).all()
    assert min(form.aims) <= form.most and (max(form.aims) == form.most or form.name == "int4")


@pytest.mark.parametrize("form", [f for f in QUANTISED if len(f.aims) > 1], ids=lambda f: f.name)
@given(seed=st.integers(0, 99))
@settings(max_examples=15)
def test_the_scale_leaves_the_least_error(form: Format, seed: int) -> None:
    """Against all aims tried in fp64 on the list of all numbers that a format has; each error is counted to a unit."""
    x = rows(seed, 32)[:60].double()
    if form.dtype.is_floating_point:
        codes = torch.arange(256, dtype=torch.uint8).view(form.dtype).double()
        codes = codes[codes.isfinite()].unique()
    else:
        codes = torch.arange(-form.most, form.most + 1).double()

    def error(scale: Tensor) -> Tensor:
        y = (x / scale[:, None])[..., None]
        return ((codes[(y - codes).abs().argmin(-1)] - y[..., 0]) * scale[:, None]).norm(dim=-1)

    chosen = scale_of(x.float(), form).double().flatten()
    for aim in form.aims:
        wide = (x.float().abs().amax(-1) / aim).clamp(2.0**-24)
        above = torch.nextafter(wide.half(), torch.tensor(torch.inf).half())
        scale = torch.where(wide.half() < wide, above, wide.half()).double()
        counted = 32**0.5 * form.unit / 2 * (scale + chosen)
        assert (error(chosen) <= (error(scale) + counted) * (1 + 1e-6)).all()


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
