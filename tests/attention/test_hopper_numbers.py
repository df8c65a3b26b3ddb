"""`impl="hopper"` on a Hopper GPU, with numbers that are hard on it: poison behind a mask, and a softmax's extremes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flashkernels as fk

from . import oracle
from .cases import Shape, keywords
from .gpu import INF, LARGE, NAN, SMALL, SPLIT, check, cuda, each_half, new_memory_is_nan, on_hopper, shares

pytestmark = [pytest.mark.gpu, on_hopper]

IMPL = "hopper"


# Poison


@pytest.mark.parametrize("poison", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("shape", [Shape(b=2, sq=900, sk=900, h=40, hkv=40, d=64), SMALL.but(h=2, hkv=1)], ids=str)
def test_poison_outside_the_window_reaches_nobody(poison: float, which: str, shape: Shape) -> None:
    q, k, v = cuda(shape)
    hidden = slice(shape.sk // 2, shape.sk // 2 + 20)
    features: dict[str, Any] = {"window": (100, 30)}
    clean, clean_lse = fk.attention(q, k, v, return_lse=True, impl=IMPL, **features)
    largest = v.abs().max().item()
    {"k": k, "v": v}[which][:, hidden] = poison
    out, lse = fk.attention(q, k, v, return_lse=True, impl=IMPL, **features)
    blind = torch.ones(shape.sq, dtype=torch.bool, device="cuda")
    blind[hidden.start - 30 : hidden.stop + 100] = False
    # The rows are made again in another order: each way rounds P to 16 bits (2^-9 of each term), and then the output.
    torch.testing.assert_close(out[:, blind], clean[:, blind], atol=4 * 2**-9 * largest, rtol=0)
    torch.testing.assert_close(lse[:, :, blind], clean_lse[:, :, blind])
    assert not out[:, ~blind].isfinite().all()


@pytest.mark.parametrize("poison", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("which", ["k", "v"])
def test_poison_behind_the_diagonal_of_a_split_tile(poison: float, which: str) -> None:
    q, k, v = cuda(SPLIT)
    assert shares(q, k, v, causal=True) > 1
    clean, clean_lse = fk.attention(q, k, v, causal=True, return_lse=True, impl=IMPL)
    largest = v.abs().max().item()
    rows = 300
    {"k": k, "v": v}[which][:, SPLIT.sk - SPLIT.sq + rows :] = poison
    out, lse = fk.attention(q, k, v, causal=True, return_lse=True, impl=IMPL)
    torch.testing.assert_close(out[:, :rows], clean[:, :rows], atol=4 * 2**-9 * largest, rtol=0)
    torch.testing.assert_close(lse[:, :, :rows], clean_lse[:, :, :rows])
    assert not out[:, rows:].isfinite().any()


@pytest.mark.parametrize("poison", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
def test_poison_in_v_reaches_exactly_those_who_see_it(poison: float, sinks: bool) -> None:
    shape = Shape(b=1, sq=300, sk=300, h=2, hkv=1, d=64)
    q, k, v = cuda(shape)
    v[:, 150] = poison
    features = keywords("causal+sinks" if sinks else "causal", shape, "cuda")
    check(q, k, v, impl=IMPL, **features)


def test_poison_in_q_stays_in_its_row() -> None:
    q, k, v = cuda(LARGE)
    clean = fk.attention(q, k, v, causal=True, impl=IMPL)
    q[:, 333] = NAN
    out = fk.attention(q, k, v, causal=True, impl=IMPL)
    assert out[:, 333].isnan().all()
    others = [i for i in range(LARGE.sq) if i != 333]
    torch.testing.assert_close(out[:, others], clean[:, others], atol=4 * 2**-9 * v.abs().max().item(), rtol=0)


# Numbers that are hard on a softmax whose maximum is lazy


def aligned(shape: Shape, logits: Callable[[Tensor], Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs whose logits depend on the key's position j alone, but for a little noise: logits(j), with scale 1."""
    q, k, v = cuda(shape, torch.float32, seed=7)
    j = torch.arange(shape.sk, device="cuda", dtype=torch.float32)
    along = torch.zeros(shape.d, device="cuda")
    along[0] = 1.0
    q = 0.05 * q + along
    k = 0.05 * k + logits(j)[None, :, None, None] * along
    return q.to(dtype), k.to(dtype), v.to(dtype)


LOGITS: dict[str, Callable[[Tensor], Tensor]] = {
    "constant": lambda j: 0 * j + 3,
    "grow-with-every-tile": lambda j: j / 8,
    "grow-slowly": lambda j: j / 100,
    "fall-with-every-tile": lambda j: -j / 8,
    "fall-slowly": lambda j: -j / 100,
    "grow-fast": lambda j: 10 * j,
    "fall-fast": lambda j: -10 * j,
    "one-in-the-first-tile": lambda j: 40.0 * (j == 3),
    "one-in-the-last-tile": lambda j: 40.0 * (j == j.max() - 3),
    "one-in-the-middle": lambda j: 300.0 * (j == 401),
    "low-in-the-last-tile": lambda j: -10_000.0 * (j > j.max() - 200),
    "low-in-the-first-tile": lambda j: -10_000.0 * (j < 200),
    "saw": lambda j: (j % 97) / 3 + (j % 2) * 20,
}


@each_half
@pytest.mark.parametrize("feature", ["plain", "causal", "window"])
@pytest.mark.parametrize("logits", LOGITS.values(), ids=LOGITS.keys())
def test_logits_by_position(logits: Callable[[Tensor], Tensor], feature: str, dtype: torch.dtype) -> None:
    for shape in (Shape(b=1, sq=700, sk=900, h=2, hkv=2, d=64), Shape(b=4, sq=512, sk=900, h=40, hkv=4, d=128)):
        inputs = aligned(shape, logits, dtype)
        features = keywords(feature, shape, "cuda")
        out, lse = fk.attention(*inputs, softmax_scale=1.0, return_lse=True, impl=IMPL, **features)
        few = slice(shape.h - 2, shape.h)  # the oracle takes one head at a time
        group = shape.h // shape.hkv
        kv = slice(few.start // group, shape.hkv)
        part = [inputs[0][:1, :, few], inputs[1][:1, :, kv], inputs[2][:1, :, kv]]
        oracle.assert_correct(out[:1, :, few], lse[:1, few], *part, softmax_scale=1.0, **features)


@each_half
@pytest.mark.parametrize("feature", ["plain", "causal", "alibi", "sinks"])
def test_scores_up_to_10_000(feature: str, dtype: torch.dtype) -> None:
    shape = Shape(b=1, sq=300, sk=700, h=2, hkv=1, d=64)
    q, k, v = cuda(shape, torch.float32)
    q, k = 10 * q, 15 * k  # scores are sums of 64 products: their deviation is 20 * 15 * 8
    check(q.to(dtype), k.to(dtype), v.to(dtype), softmax_scale=1.0, impl=IMPL, **keywords(feature, shape, "cuda"))


@each_half
@pytest.mark.parametrize("softcap", [0.01, 1.0, 50.0, 1000.0])
def test_softcap_of_any_size(softcap: float, dtype: torch.dtype) -> None:
    check(*cuda(SMALL.but(h=2, hkv=2), dtype), softcap=softcap, impl=IMPL)


@each_half
def test_equal_rows_and_equal_values(dtype: torch.dtype) -> None:
    q, k, v = cuda(LARGE, dtype)
    check(q * 0, k, v, impl=IMPL)
    check(q, k * 0, v, causal=True, impl=IMPL)
    check(q, k, torch.ones_like(v), causal=True, impl=IMPL)


@pytest.mark.parametrize(
    ("dtype", "tiny"), [(torch.float16, 2.0**-22), (torch.bfloat16, 2.0**-110)], ids=["fp16", "bf16"]
)
def test_tiny_numbers(dtype: torch.dtype, tiny: float) -> None:
    q, k, v = cuda(LARGE, torch.float32)
    check(q.to(dtype), k.to(dtype), (v * tiny).to(dtype), causal=True, impl=IMPL)
    check((q * tiny).to(dtype), k.to(dtype), v.to(dtype), causal=True, impl=IMPL)
    check(q.to(dtype), (k * tiny).to(dtype), v.to(dtype), softmax_scale=1.0, impl=IMPL)


@each_half
def test_rows_that_see_nothing(dtype: torch.dtype) -> None:
    for shape in (Shape(b=1, sq=900, sk=200, h=2, hkv=1, d=72), Shape(b=2, sq=900, sk=200, h=80, hkv=8, d=64)):
        inputs = cuda(shape, dtype)
        with new_memory_is_nan():
            out, lse = fk.attention(*inputs, causal=True, return_lse=True, impl=IMPL)
        assert (out[:, :700] == 0).all() and (lse[:, :, :700] == -INF).all()
        first = [x[:1, :, :1] for x in (out, *inputs)]
        oracle.assert_correct(first[0], lse[:1, :1], *first[1:], causal=True)


def test_sinks_of_any_size() -> None:
    inputs = cuda(LARGE)
    for value in (-INF, -1e4, 0.0, 88.0, 1e4):
        check(*inputs, sinks=torch.full((6,), value, device="cuda"), causal=True, impl=IMPL)
