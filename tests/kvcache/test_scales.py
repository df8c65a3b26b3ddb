"""The scales that the append kernel chooses are those of `formats.py`, bit for bit: interpreted, and on a GPU."""

from __future__ import annotations

import os

import pytest
import torch
import triton
import triton.language as tl

from flashkernels.formats import FORMATS, Format, scale_of
from flashkernels.kvcache.append import Append
from flashkernels.kvcache.triton import append

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
where = pytest.mark.parametrize(
    "place",
    [
        pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ],
)
each_format = pytest.mark.parametrize("form", [f for f in FORMATS.values() if f.quantised], ids=lambda f: f.name)
chosen = append.scale_of


@triton.jit
def scales_kernel(
    x_ptr, scale_ptr, ROWS: tl.constexpr, WIDTH: tl.constexpr, MOST: tl.constexpr, TOP: tl.constexpr,
    AIMS: tl.constexpr, FRACTION: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    x = tl.load(x_ptr + at[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :])
    broken = tl.max((x - x != 0).to(tl.int32), 1) > 0
    tl.store(scale_ptr + at, chosen(x, broken, MOST, TOP, AIMS, FRACTION, UNIT))


@where
@each_format
@pytest.mark.parametrize("outliers", [0.0, 0.02, 0.3])
def test_scales_of_every_size(outliers: float, form: Format, place: str) -> None:
    """From rows that fp16 scales hardly hold to rows beyond them, zeros, NaN and Inf."""
    width, gen = form.group or 128, torch.Generator().manual_seed(0)
    x = torch.randn(512, width, generator=gen) * torch.logspace(-9, 9, 512)[:, None]
    x *= torch.where(torch.rand(512, width, generator=gen) < outliers, 20.0, 1.0)
    x[3], x[100, 7], x[200, 1], x[201] = 0.0, torch.nan, -torch.inf, 1.0
    fixed = append.constants(form, 1, width, width, False, Append(0, False, "auto"))
    sizes = {name: fixed[name] for name in ("MOST", "TOP", "AIMS", "FRACTION", "UNIT")}
    found = torch.empty(512, dtype=torch.float16, device=place)
    scales_kernel[(32,)](x.to(place), found, 16, width, **sizes)
    want = scale_of(x, form).flatten()
    assert torch.equal(found.cpu().view(torch.int16)[~want.isnan()], want.view(torch.int16)[~want.isnan()])
    assert found.cpu().isnan().tolist() == want.isnan().tolist() and want.isnan().sum() == 2
