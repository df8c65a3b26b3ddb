"""The Triton backward on a GPU, against autograd of the oracle in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashkernels as fk

from .cases import (
    EVERYTHING,
    FEATURES,
    NO_MASK,
    Shape,
    bool_mask,
    keywords,
    pairs,
    qkv,
    ragged,
)
from .gpu import IMPLS, INF, LENGTHS, NAN, dtype_id, needs_memory, on_gpu, syncs_are_errors
from .gradients import (
    assert_same_gradients,
    check,
    check_varlen,
    expected,
    gradients,
    leaves,
    weights_like,
)
from .test_backward import STRIDES, sides

pytestmark = pytest.mark.gpu

LARGE = Shape(b=2, sq=300, sk=420, h=4, hkv=2, d=72)
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=dtype_id)


def cuda(shape: Shape, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    return qkv(shape, dtype, device="cuda")


@each_dtype
@pytest.mark.parametrize("feature", FEATURES)
def test_feature(feature: str, dtype: torch.dtype) -> None:
    features = keywords(feature, LARGE, "cuda")
    check(*cuda(LARGE, dtype), impl="triton", also=sides(features), **features)


@pytest.mark.parametrize("dim", [192, 256])
@pytest.mark.parametrize("feature", [*NO_MASK, "window+softcap+sinks"])
def test_feature_of_wide_rows(feature: str, dim: int) -> None:
    """Which have tiles of their own, and a pass for dV."""
    shape = LARGE.but(d=dim)
    features = keywords(feature, shape, "cuda")
    check(*cuda(shape), impl="triton", also=sides(features, adds=True), **features)


@pytest.mark.parametrize("dim", [192, 256])
@pytest.mark.parametrize("wanted", [(0, 1), (0, 2), (1, 2), (2,)], ids=["q, k", "q, v", "k, v", "v"])
def test_some_gradients_of_wide_rows(wanted: tuple[int, ...], dim: int) -> None:
    inputs = cuda(LARGE.but(d=dim))
    plain, want, noise = (tuple(x[i] for i in wanted) for x in expected(inputs, features={"causal": True}))
    tensors = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(inputs)]
    got = gradients(fk.attention(*tensors, causal=True, return_lse=True, impl="triton"), [tensors[i] for i in wanted])
    assert_same_gradients(got, plain, want, noise, torch.bfloat16)


@pytest.mark.parametrize("both", pairs())
def test_pair_of_features(both: str) -> None:
    shape = LARGE.but(sq=420, sk=300)
    features = keywords(both, shape, "cuda")
    check(*cuda(shape), impl="triton", also=sides(features), **features)


@pytest.mark.parametrize("dim", [64, 72, 96, 128, 192, 256])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("impl", IMPLS)
def test_what_weights_are_multiplied_by_has_the_range_of_bf16(impl: str, causal: bool, dim: int) -> None:
    q, k, v = cuda(LARGE.but(d=dim))
    check(q, k, v * 1e6, impl=impl, causal=causal)


@pytest.mark.parametrize("mask", ["boolmask", "floatmask"])
def test_every_feature_at_once(mask: str) -> None:
    features = keywords([*EVERYTHING, mask], LARGE, "cuda")
    check(*cuda(LARGE), impl="triton", also=sides(features), **features)


@pytest.mark.parametrize("dim", [1, 8, *range(16, 257, 16), 33, 70, 72, 104, 150, 152, 200, 264, 320, 512])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_head_dimension(dim: int, causal: bool) -> None:
    check(*cuda(LARGE.but(d=dim, h=2, hkv=1)), impl="triton", causal=causal)


@pytest.mark.parametrize("dim", [16, 40, 64, 70, 72, 96, 128, 160, 192, 224, 256])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_sums_and_two_passes_agree(dim: int, causal: bool) -> None:
    """And two passes are the same to the bit, whatever ran before."""
    inputs = leaves(*cuda(Shape(b=2, sq=1000, sk=1028, h=4, hkv=2, d=dim)))
    want = expected(tuple(inputs), features={"causal": causal})
    first = None
    for deterministic in (True, False, True, False):
        out = fk.attention(*inputs, causal=causal, return_lse=True, deterministic=deterministic, impl="triton")
        got = torch.autograd.grad(out, inputs, [w.to(x) for w, x in zip(weights_like(*out), out, strict=True)])
        assert_same_gradients(got, *want, torch.bfloat16)
        if deterministic:
            first = first or got
            assert all(map(torch.equal, got, first))


@pytest.mark.parametrize("dim", [40, 64, 128, 256, 512])
def test_head_dimension_in_fp32(dim: int) -> None:
    check(*cuda(LARGE.but(d=dim, h=2, hkv=1), torch.float32), impl="triton", causal=True)


@pytest.mark.parametrize("dims", [(16, 40), (192, 128), (64, 256), (256, 64), (512, 64)], ids=str)
def test_head_dimension_of_v_differs(dims: tuple[int, int]) -> None:
    check(*cuda(LARGE.but(d=dims[0], dv=dims[1])), impl="triton", causal=True)


@each_dtype
@pytest.mark.parametrize("feature", NO_MASK)
def test_varlen(feature: str, dtype: torch.dtype) -> None:
    shape = LARGE.but(b=len(LENGTHS[0]))
    features = keywords(feature, shape, "cuda")
    batch = ragged(*LENGTHS, shape, dtype, device="cuda")
    check_varlen(batch, impl="triton", also=sides(features), **features)


@pytest.mark.parametrize("change", STRIDES.values(), ids=STRIDES.keys())
def test_any_strides(change: Any) -> None:
    """Not the same bits: strides decide how many elements a load takes, and with it the order of sums."""
    inputs = cuda(LARGE)
    views = [change(x).requires_grad_() for x in inputs]
    out = fk.attention(*views, causal=True, return_lse=True, impl="triton")
    weights = [change(w.to(x)) for w, x in zip(weights_like(*out), out, strict=True)]
    got = torch.autograd.grad(out, views, weights)
    assert_same_gradients(got, *expected(inputs, features={"causal": True}), torch.bfloat16)


def test_hidden_poison() -> None:
    """Gradients are those of clean inputs; not to the bit, as around NaN the forward sums in another order."""
    q, k, v = cuda(LARGE)
    mask = bool_mask((LARGE.sq, LARGE.sk), device="cuda")
    mask[:, 300:] = mask[:50] = False
    want = expected((q, k, v), features={"mask": mask})
    q[:, :50], k[:, 300:], v[:, 300:] = NAN, NAN, INF
    dirty = leaves(q, k, v)
    got = gradients(fk.attention(*dirty, mask=mask, return_lse=True, impl="triton"), dirty)
    assert_same_gradients(got, *want, torch.bfloat16)
    assert (got[0][:, :50] == 0).all() and all((g[:, 300:] == 0).all() for g in got[1:])


@pytest.mark.parametrize("dim", [64, 96, 128, 192, 216, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_id)
def test_poison_that_a_window_hides(dim: int, dtype: torch.dtype) -> None:
    """In one pass: of keys that no row sees, and of rows that see no key."""
    q, k, v = cuda(LARGE.but(sq=1000, sk=700, d=dim), dtype)
    features = {"window": (100, 0)}  # the first 299 rows are before all keys, the last 700 see all of them
    want = expected((q, k, v), features=features)
    q[:, :290] = NAN
    dirty = leaves(q, k, v)
    got = gradients(fk.attention(*dirty, return_lse=True, impl="triton", **features), dirty)
    assert_same_gradients(got, *want, dtype)
    q, k, v = cuda(LARGE.but(sq=700, sk=1000, d=dim), dtype)  # the first row sees keys 200 to 300
    want = expected((q, k, v), features=features)
    k[:, :190], v[:, :190] = NAN, INF
    dirty = leaves(q, k, v)
    got = gradients(fk.attention(*dirty, return_lse=True, impl="triton", **features), dirty)
    assert_same_gradients(got, *want, dtype)
    assert (got[0][:, :1] != 0).any() and all((g[:, :190] == 0).all() for g in got[1:])


def test_memory_grows_with_the_sequence_not_with_its_square() -> None:
    needs_memory(4)
    inputs = leaves(*cuda(Shape(b=1, sq=32768, sk=32768, h=2, hkv=2, d=64)))
    out = fk.attention(*inputs, causal=True, impl="triton")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(out, inputs, torch.ones_like(out))
    assert torch.cuda.max_memory_allocated() - before < 12 * inputs[0].numel() * 2


def test_backward_waits_for_nothing() -> None:
    batch = on_gpu(ragged(*LENGTHS, LARGE, torch.bfloat16).args)
    inputs = leaves(*batch[:3])
    slopes, sinks = leaves(torch.rand(LARGE.h, device="cuda"), torch.rand(LARGE.h, device="cuda"))
    features = {"causal": True, "alibi_slopes": slopes, "sinks": sinks}
    for _ in range(2):  # the first time compiles
        out = fk.attention_varlen(*inputs, *batch[3:], impl="triton", **features)
        weight = torch.ones_like(out)
        with syncs_are_errors():
            torch.autograd.grad(out, [*inputs, slopes, sinks], weight)
