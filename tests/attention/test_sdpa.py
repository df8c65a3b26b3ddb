"""`impl="sdpa"`, torch's fused CPU attention: it serves only what it computes right, and `auto` prefers it there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashkernels as fk

from . import oracle
from .cases import FEATURES, Shape, keywords, qkv

SELF = Shape(sq=40, sk=40)
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
WINDOWS = [(-1, 0), (3, -1), (-1, 3), (0, 0)]
dtype_id = lambda dtype: str(dtype).removeprefix("torch.")  # noqa: E731


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("feature", ["plain", "causal", "scale", "causal+scale"])
@pytest.mark.parametrize("shape", [SELF, SELF.but(h=6, hkv=6), SELF.but(h=7, hkv=1), SELF.but(d=72)], ids=str)
def test_what_it_serves_is_right(shape: Shape, feature: str, layout: str) -> None:
    q, k, v = qkv(shape, layout=layout)
    features = keywords(feature, shape)
    out = fk.attention(q, k, v, layout=layout, impl="sdpa", **features)
    oracle.assert_correct(out, None, q, k, v, layout=layout, **features)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", [SELF, Shape(), Shape(sq=47, sk=33), Shape(dv=24), Shape(sk=0), Shape(sq=1)], ids=str)
@pytest.mark.parametrize("window", [(-1, -1), *WINDOWS], ids=str)
def test_serves_rightly_or_refuses(shape: Shape, causal: bool, window: tuple[int, int], dtype: torch.dtype) -> None:
    q, k, v = qkv(shape, dtype)
    features: dict[str, Any] = {"causal": causal, "window": window}
    try:
        out = fk.attention(q, k, v, impl="sdpa", **features)
    except fk.UnsupportedError:
        return
    oracle.assert_correct(out, None, q, k, v, **features)


@pytest.mark.parametrize("feature", FEATURES)
def test_auto_is_right_without_lse(feature: str) -> None:
    """`auto` may take sdpa here, which cannot return the log-sum-exp."""
    features = keywords(feature, SELF)
    q, k, v = qkv(SELF)
    oracle.assert_correct(fk.attention(q, k, v, **features), None, q, k, v, **features)


@pytest.mark.parametrize("scale", [0.0, -0.7], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_scale_of_any_sign(scale: float, causal: bool) -> None:
    q, k, v = qkv(SELF)
    out = fk.attention(q, k, v, softmax_scale=scale, causal=causal)
    oracle.assert_correct(out, None, q, k, v, softmax_scale=scale, causal=causal)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("which", ["k", "v"])
def test_auto_brings_poison_to_the_rows_that_see_it_and_no_other(poison: float, which: str) -> None:
    q, k, v = qkv(SELF.but(b=1))
    clean = fk.attention(q, k, v, causal=True)
    {"k": k, "v": v}[which][:, 20:] = poison
    out = fk.attention(q, k, v, causal=True)
    torch.testing.assert_close(out[:, :20], clean[:, :20])
    assert not out[:, 20:].isfinite().any()


@pytest.mark.parametrize("how", ["every-other-head-dim", "padded-rows"])
def test_strides_do_not_matter(how: str) -> None:
    inputs = qkv(SELF)
    if how == "every-other-head-dim":
        q, k, v = (torch.stack([x, x + 1], -1)[..., 0] for x in inputs)
    else:
        q, k, v = (torch.nn.functional.pad(x, (3, 5), value=float("nan"))[..., 3:-5] for x in inputs)
    oracle.assert_correct(fk.attention(q, k, v, impl="sdpa"), None, *inputs)
