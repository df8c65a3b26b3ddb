"""The GPU kernels on a real GPU: bf16, large shapes, and everything an interpreter cannot show.

What the kernels share is tested here, with each of them; what only `impl="hopper"` has is in test_hopper.py and its
neighbours.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st

import flashkernels as fk

from . import oracle
from .cases import EVERYTHING, FEATURES, NO_MASK, Shape, float_mask, keywords, pairs, ragged
from .gpu import (
    GIB,
    INF,
    LARGE,
    LENGTHS,
    NAN,
    capability,
    check,
    check_pages,
    check_varlen,
    cuda,
    dtype_id,
    each_impl,
    far_apart,
    head_first,
    misaligned,
    needs_memory,
    new_memory_is_nan,
    odd_rows,
    on_gpu,
    per_impl,
    sequence_first,
    spread,
    syncs_are_errors,
    wide_rows,
)  # fmt: skip
from .test_properties import Call, calls, lengths

pytestmark = pytest.mark.gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
HEAD_DIMS = sorted({*range(8, 257, 8), 1, 7, 33, 100, 255, 257, 320, 512})
HOPPER_DIMS = range(16, 257, 8)
MIXED_DIMS = [(192, 128), (64, 256), (128, 72)]
FEW_DIMS = st.sampled_from([64, 72, 128])  # each new combination of flags and dimension compiles a kernel
LOGITS = "causal+softcap+alibi+sinks"


@pytest.fixture(autouse=True)
def _empty_cache() -> Iterator[None]:
    yield
    if torch.cuda.memory_reserved() > 8 * GIB:
        torch.cuda.empty_cache()


# Every dimension, feature and dtype


@per_impl("dim", HEAD_DIMS, HOPPER_DIMS)
def test_head_dimension(impl: str, dim: int) -> None:
    check(*cuda(Shape(b=1, sq=700, sk=1000, h=4, hkv=2, d=dim)), causal=True, impl=impl)


@per_impl("dim", [64, 72, 100, 128, 256, 320, 512], [])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=dtype_id)
def test_head_dimension_in_other_dtypes(impl: str, dim: int, dtype: torch.dtype) -> None:
    check(*cuda(Shape(b=1, sq=300, sk=500, h=2, hkv=1, d=dim), dtype), impl=impl)


@per_impl("dim", [], [16, 40, 64, 72, 104, 128, 192, 256])
def test_head_dimension_in_fp16(impl: str, dim: int) -> None:
    check(*cuda(Shape(b=1, sq=300, sk=500, h=2, hkv=1, d=dim), torch.float16), impl=impl)


@per_impl("dims", [*MIXED_DIMS, (320, 64), (24, 512)], [*MIXED_DIMS, (16, 256), (256, 16), (24, 200), (136, 40)])
def test_head_dimension_of_v_differs(impl: str, dims: tuple[int, int]) -> None:
    check(*cuda(Shape(b=1, sq=300, sk=500, h=2, hkv=1, d=dims[0], dv=dims[1])), causal=True, impl=impl)


@per_impl("feature", FEATURES, NO_MASK)
def test_feature_alone(impl: str, feature: str) -> None:
    check(*cuda(LARGE), **keywords(feature, LARGE, "cuda"), impl=impl)


@per_impl("both", pairs()[::6], pairs(NO_MASK)[::3])
def test_pair_of_features(impl: str, both: str) -> None:
    shape = LARGE.but(sq=1000, sk=700)
    check(*cuda(shape), **keywords(both, shape, "cuda"), impl=impl)


@pytest.mark.parametrize("mask", ["boolmask", "floatmask"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_every_feature_and_a_mask_at_once(mask: str, dtype: torch.dtype) -> None:
    shape = LARGE.but(dv=104)
    check(*cuda(shape, dtype), **keywords([*EVERYTHING, mask], shape, "cuda"), impl="triton")


@per_impl("dtype", DTYPES, DTYPES[:2])
def test_every_feature_at_once(impl: str, dtype: torch.dtype) -> None:
    shape = LARGE.but(dv=104)
    check(*cuda(shape, dtype), **keywords(EVERYTHING, shape, "cuda"), impl=impl)


@each_impl
@pytest.mark.parametrize("feature", NO_MASK)
def test_varlen_feature(impl: str, feature: str) -> None:
    shape = LARGE.but(b=len(LENGTHS[0]))
    check_varlen(ragged(*LENGTHS, shape, torch.bfloat16, device="cuda"), **keywords(feature, shape, "cuda"), impl=impl)


@pytest.mark.parametrize("page_size", [1, 16, 48, 128])
@pytest.mark.parametrize("feature", ["plain", "causal", "window", "+".join(EVERYTHING)])
def test_pages_of_any_size(feature: str, page_size: int) -> None:
    shape = LARGE.but(b=len(LENGTHS[0]))
    batch = ragged(*LENGTHS, shape, torch.bfloat16, device="cuda")
    check_pages(batch, page_size, impl="triton", **keywords(feature, shape, "cuda"))


@pytest.mark.parametrize("dim", [33, 64, 128, 256, 512])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_pages_of_each_head_dimension(dtype: torch.dtype, dim: int) -> None:
    shape = LARGE.but(b=len(LENGTHS[0]), d=dim)
    check_pages(ragged(*LENGTHS, shape, dtype, device="cuda"), 16, impl="triton", causal=True)


@each_impl
@pytest.mark.parametrize("heads", [(7, 1), (12, 4), (32, 4), (5, 5)], ids=lambda h: f"{h[0]}:{h[1]}")
def test_query_heads_share_key_heads(impl: str, heads: tuple[int, int]) -> None:
    for seq in (300, 5):
        check(*cuda(Shape(sq=seq, sk=300, h=heads[0], hkv=heads[1], d=64)), causal=True, impl=impl)


@each_impl
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_layout(impl: str, layout: str) -> None:
    check(*cuda(LARGE, layout=layout), layout=layout, causal=True, impl=impl)


@each_impl
@pytest.mark.parametrize("seq", [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 255, 256, 257, 1023, 1025])
def test_sequence_length_around_the_tile(impl: str, seq: int) -> None:
    check(*cuda(Shape(b=1, sq=seq, sk=seq, h=2, hkv=1, d=64)), causal=True, impl=impl)
    check(*cuda(Shape(b=1, sq=seq, sk=1100 - seq, h=2, hkv=1, d=64)), window=(100, 30), impl=impl)


@each_impl
@pytest.mark.parametrize(
    "shape", [Shape(b=1, sq=8192, sk=8192, h=2, hkv=1, d=128), Shape(b=1, sq=1, sk=100_000, h=8, hkv=1, d=80)], ids=str
)
def test_long_sequence(impl: str, shape: Shape) -> None:
    check(*cuda(shape), causal=True, impl=impl)


def test_mask_of_any_strides() -> None:
    shape = Shape(b=2, sq=200, sk=300, h=4, hkv=2, d=64)
    inputs = cuda(shape)
    make = partial(float_mask, device="cuda")
    check(*inputs, mask=make((2, 1, 1, 300)).expand(2, 4, 200, 300), impl="triton")
    check(*inputs, mask=make((300, 200, 4, 2)).permute(3, 2, 1, 0), impl="triton")
    check(*inputs, mask=make((2, 4, 200, 600))[..., ::2], impl="triton")
    check(*inputs, mask=make((300,)).to(torch.bfloat16), impl="triton")


def test_auto_takes_the_best_kernel_of_this_gpu() -> None:
    best = "hopper" if capability() == (9, 0) else "triton"
    every = ((cuda(LARGE), best), (cuda(LARGE.but(d=33)), "aligned"), (cuda(LARGE, torch.float32), "triton"))
    for inputs, named in every:
        assert fk.explain("attention", *inputs, causal=True).impl == named
        assert torch.equal(fk.attention(*inputs, causal=True), fk.attention(*inputs, causal=True, impl=named))


def serves(impl: str, call: Call) -> bool:
    """The Hopper kernel takes no mask, and leaves problems of nothing to others."""
    shape = call.shape
    return impl == "triton" or (not call.mask and min(shape.b, shape.sq, shape.sk) > 0)


@each_impl
@settings(max_examples=20)
@given(calls(FEW_DIMS, DTYPES[:1], 400))
def test_any_dense_call(impl: str, call: Call) -> None:
    assume(serves(impl, call))
    features = {**on_gpu(call.keywords()), "layout": call.layout}
    check(*on_gpu(call.tensors()), **features, impl=impl)


@each_impl
@settings(max_examples=10)
@given(calls(FEW_DIMS, DTYPES[:1], 0, mask=False), lengths(400))
def test_any_varlen_call(impl: str, call: Call, lens: list[tuple[int, int]]) -> None:
    assume(impl == "triton" or (sum(q for q, _ in lens) and sum(k for _, k in lens)))
    call = Call(**{**vars(call), "shape": call.shape.but(b=len(lens))})
    batch = call.ragged([q for q, _ in lens], [k for _, k in lens])
    args, features = on_gpu(batch.args), on_gpu(call.keywords())
    out, lse = fk.attention_varlen(*args, return_lse=True, impl=impl, **features)
    oracle.assert_correct_varlen(out, lse, *args[:5], **features)


# A compiled kernel is kept and launched again: nothing of the first call may stick to it


@each_impl
def test_values_change_from_call_to_call(impl: str) -> None:
    inputs = cuda(LARGE)
    for window, scale, softcap in (((5, 3), 0.3, 1.5), ((300, 64), -0.7, 30.0), ((0, 0), 1, 1), ((16, 1), 0.0, 16.0)):
        check(*inputs, window=window, softmax_scale=scale, softcap=softcap, impl=impl)


@pytest.mark.parametrize("dim", [64, 72])
def test_alignment_and_strides_change_from_call_to_call(dim: int) -> None:
    plain = cuda(Shape(b=2, sq=200, sk=300, h=4, hkv=2, d=dim))
    for impl in ("triton", "auto"):
        for change in (torch.clone, misaligned, odd_rows, torch.clone, spread, sequence_first, misaligned):
            check(*map(change, plain), causal=True, impl=impl)
        check(plain[0], misaligned(plain[1]), plain[2], causal=True, impl=impl)
        check(misaligned(plain[0]), *plain[1:], causal=True, impl=impl)
        check(*plain[:2], odd_rows(plain[2]), causal=True, impl=impl)


@each_impl
@pytest.mark.parametrize("dim", [64, 72])
def test_strides_that_tma_takes_change_from_call_to_call(impl: str, dim: int) -> None:
    plain = cuda(Shape(b=2, sq=200, sk=300, h=4, hkv=2, d=dim))
    for change in (torch.clone, sequence_first, wide_rows, head_first, torch.clone, wide_rows):
        check(*map(change, plain), causal=True, impl=impl)
    check(plain[0], wide_rows(plain[1]), head_first(plain[2]), causal=True, impl=impl)


@per_impl(
    "features",
    [("sinks", "plain", "floatmask", "boolmask", "alibi", "plain", "alibi2d", "causal", "sinks")],
    [("sinks", "plain", "alibi", "plain", "alibi2d", "causal", "sinks")],
)
def test_features_come_and_go_from_call_to_call(impl: str, features: tuple[str, ...]) -> None:
    inputs = cuda(LARGE)
    for feature in features:
        check(*inputs, **keywords(feature, LARGE, "cuda"), impl=impl)


# More than 2^31 elements


@each_impl
def test_keys_and_values_of_more_than_2_31_elements(impl: str) -> None:
    needs_memory(16)
    k, v = (torch.randn(1, 2**20 + 128, 16, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    assert k.numel() > 2**31
    q = torch.randn(1, 40, 16, 128, device="cuda", dtype=torch.bfloat16)
    features: dict[str, Any] = {"causal": True, "window": (300, -1)}  # the keys at the very end
    out, lse = fk.attention(q, k, v, return_lse=True, impl=impl, **features)
    oracle.assert_correct(out, lse, q, k[:, -400:], v[:, -400:], **features)


@each_impl
def test_queries_of_more_than_2_31_elements(impl: str) -> None:
    needs_memory(16)
    rows = 2**20 + 128
    q = torch.randn(1, rows, 16, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, rows, 1, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out, lse = fk.attention(q, k, v, causal=True, window=(64, -1), return_lse=True, impl=impl)
    last = slice(-300, None)
    want = oracle.attention(q[:, last], k[:, -364:], v[:, -364:], causal=True, window=(64, -1))
    torch.testing.assert_close(out[:, last].double(), want.out, rtol=0.02, atol=0.02)
    oracle.assert_correct(
        out[:, last], lse[:, :, last], q[:, last], k[:, -364:], v[:, -364:], causal=True, window=(64, -1)
    )


@each_impl
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_strides_of_more_than_2_31_elements(impl: str, which: str) -> None:
    needs_memory(8)
    inputs = dict(zip("qkv", cuda(Shape(b=2, sq=100, sk=200, h=4, hkv=2, d=72)), strict=True))
    inputs[which] = far_apart(inputs[which])
    check(**inputs, causal=True, impl=impl)


def test_mask_of_more_than_2_31_elements() -> None:
    needs_memory(8)
    rows = 47_000
    q, k, v = cuda(Shape(b=1, sq=rows, sk=rows, h=1, hkv=1, d=64))
    mask = torch.zeros(rows, rows, dtype=torch.bool, device="cuda")
    assert mask.numel() > 2**31
    mask[:, :10] = True
    mask[-200:] = torch.rand(200, rows, device="cuda") < 0.5
    out, lse = fk.attention(q, k, v, mask=mask, return_lse=True, impl="triton")
    last = slice(-200, None)
    oracle.assert_correct(out[:, last], lse[:, :, last], q[:, last], k, v, mask=mask[last])


@each_impl
def test_batch_beyond_the_grid_limit_of_65535(impl: str) -> None:
    q, k, v = cuda(Shape(b=70_000, sq=3, sk=5, h=2, hkv=1, d=16))
    out, lse = fk.attention(q, k, v, causal=True, return_lse=True, impl=impl)
    for part in (slice(0, 3), slice(65_534, 65_538), slice(-3, None)):
        oracle.assert_correct(out[part], lse[part], q[part], k[part], v[part], causal=True)


# Memory


@per_impl("feature", ["plain", "causal", "window", "boolmask"], ["plain", "causal", "window"])
def test_every_element_of_the_output_is_written(impl: str, feature: str) -> None:
    shape = LARGE.but(sq=1000, sk=300, d=40)
    inputs, features = cuda(shape), keywords(feature, shape, "cuda")
    with new_memory_is_nan():
        out, lse = fk.attention(*inputs, return_lse=True, impl=impl, **features)
    oracle.assert_correct(out, lse, *inputs, **features)


@each_impl
def test_every_element_of_a_ragged_output_is_written(impl: str) -> None:
    batch = ragged(*LENGTHS, LARGE, torch.bfloat16, device="cuda")
    with new_memory_is_nan():
        out, lse = fk.attention_varlen(*batch.args, causal=True, return_lse=True, impl=impl)
    oracle.assert_correct_varlen(out, lse, *batch.tensors, causal=True)


@each_impl
@pytest.mark.parametrize("seq", [131_072])
@pytest.mark.parametrize("heads", [1, 2])
def test_peak_memory_is_linear_in_the_sequence(impl: str, seq: int, heads: int) -> None:
    q, k, v = cuda(Shape(b=1, sq=seq, sk=seq, h=heads, hkv=1, d=64))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out, lse = fk.attention(q, k, v, causal=True, return_lse=True, impl=impl)
    torch.cuda.synchronize()
    returned = out.numel() * out.element_size() + lse.numel() * lse.element_size()
    assert torch.cuda.max_memory_allocated() - before - returned < 1e9


@each_impl
@pytest.mark.parametrize("poison", [NAN, INF], ids=str)
@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("dim", [64, 72])
def test_poison_in_one_ragged_sequence_stays_there(impl: str, poison: float, which: str, dim: int) -> None:
    batch = ragged([50, 90, 40], [170, 90, 60], Shape(h=4, hkv=2, d=dim), torch.bfloat16, device="cuda")
    clean = fk.attention_varlen(*batch.args, impl=impl)
    {"k": batch.k, "v": batch.v}[which][170:260] = poison
    out = fk.attention_varlen(*batch.args, impl=impl)
    # Around poison a kernel may sum in another order: each way rounds P to bf16 (2^-9 of each term), then the output.
    for rows in (slice(50), slice(140, None)):
        torch.testing.assert_close(out[rows], clean[rows], atol=4 * 2**-9 * 5, rtol=0)
    if impl == "triton":
        assert torch.equal(out[:50], clean[:50]) and torch.equal(out[140:], clean[140:])
    assert not out[50:140].isfinite().any()


@pytest.mark.parametrize("poison", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("which", ["k", "v"])
@per_impl("feature", ["causal", "boolmask", "floatmask"], ["causal"])
def test_poison_that_a_row_does_not_see_does_not_reach_it(impl: str, poison: float, which: str, feature: str) -> None:
    q, k, v = cuda(Shape(b=1, sq=500, sk=500, h=4, hkv=2, d=72))
    keep = torch.ones(500, dtype=torch.bool, device="cuda")
    keep[300:] = False
    features: dict[str, Any] = {
        "causal": {"causal": True},
        "boolmask": {"mask": keep},
        "floatmask": {"mask": torch.zeros(500, device="cuda").masked_fill(~keep, -INF)},
    }[feature]
    rows = slice(0, 300 if feature == "causal" else 500)
    clean, clean_lse = fk.attention(q, k, v, return_lse=True, impl=impl, **features)
    largest = v.abs().max().item()
    {"k": k, "v": v}[which][:, 300:] = poison
    out, lse = fk.attention(q, k, v, return_lse=True, impl=impl, **features)
    # Around poison the kernel sums in another order: each way rounds P to bf16 (2^-9 of each term) and then the output.
    torch.testing.assert_close(out[:, rows], clean[:, rows], atol=4 * 2**-9 * largest, rtol=0)
    torch.testing.assert_close(lse[:, :, rows], clean_lse[:, :, rows])


@each_impl
@pytest.mark.slow
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
@pytest.mark.parametrize("what", ["outputs", "gradients"])
@pytest.mark.parametrize("part", ["1/4", "2/4", "3/4", "4/4"])
def test_sanitizer_finds_nothing(impl: str, tool: str, what: str, part: str) -> None:
    """The calls of sanitize.py read and write only what is theirs, and what they wait for."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    command = [sanitizer, "--tool", tool, "--error-exitcode", "1"]
    command += [sys.executable, "-m", "tests.attention.sanitize", impl, what, part]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-4000:]


# Behaviour in company


@per_impl("feature", ["plain", "causal", f"{LOGITS}+floatmask"], ["plain", "causal", LOGITS])
def test_twenty_runs_agree_bit_for_bit(impl: str, feature: str) -> None:
    inputs, features = cuda(LARGE), keywords(feature, LARGE, "cuda")
    first = fk.attention(*inputs, return_lse=True, impl=impl, **features)
    for _ in range(19):
        again = fk.attention(*inputs, return_lse=True, impl=impl, **features)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@per_impl("feature", ["causal", f"{LOGITS}+floatmask"], ["plain", "causal", LOGITS])
def test_cuda_graph_replays_with_new_inputs(impl: str, feature: str) -> None:
    features = keywords(feature, LARGE, "cuda")
    static = cuda(LARGE)
    fk.attention(*static, return_lse=True, impl=impl, **features)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = fk.attention(*static, return_lse=True, impl=impl, **features)
    for seed in (1, 2):
        fresh = cuda(LARGE, seed=seed)
        for x, y in zip(static, fresh, strict=True):
            x.copy_(y)
        graph.replay()
        oracle.assert_correct(out, lse, *fresh, **features)


@each_impl
def test_cuda_graph_of_a_ragged_batch_replays_with_new_lengths(impl: str) -> None:
    static = ragged([100, 200, 52], [300, 10, 42], LARGE, torch.bfloat16, device="cuda")
    args = (*static.args[:5], 352, 352)
    fk.attention_varlen(*args, causal=True, impl=impl)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = fk.attention_varlen(*args, causal=True, return_lse=True, impl=impl)
    other = ragged([352, 0, 0], [2, 349, 1], LARGE, torch.bfloat16, device="cuda", seed=3)
    for x, y in zip(static.tensors, other.tensors, strict=True):
        x.copy_(y)
    graph.replay()
    oracle.assert_correct_varlen(out, lse, *other.tensors, causal=True)


@each_impl
def test_runs_on_the_current_stream(impl: str) -> None:
    q, k, v = cuda(LARGE)
    want = fk.attention(q, k, v, causal=True, impl=impl)
    late = torch.zeros_like(q)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # the copy is late: a launch on another stream would read zeros
        late.copy_(q)
        out = fk.attention(late, k, v, causal=True, impl=impl)
    side.synchronize()
    assert torch.equal(out, want)


@each_impl
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_a_gpu_that_is_not_current(impl: str) -> None:
    inputs = [x.to("cuda:1") for x in cuda(LARGE)]
    with torch.cuda.device(0):
        out, lse = fk.attention(*inputs, causal=True, return_lse=True, impl=impl)
        assert torch.cuda.current_device() == 0
    oracle.assert_correct(out, lse, *inputs, causal=True)


@each_impl
def test_dense_never_waits_for_the_gpu(impl: str) -> None:
    features = [*EVERYTHING, "floatmask"] if impl == "triton" else EVERYTHING
    inputs, named = cuda(LARGE), keywords(features, LARGE, "cuda")
    fk.attention(*inputs, return_lse=True, impl=impl, **named)
    with syncs_are_errors():
        fk.attention(*inputs, return_lse=True, impl=impl, **named)


@each_impl
def test_varlen_never_waits_for_the_gpu(impl: str) -> None:
    batch = ragged(*LENGTHS, LARGE, torch.bfloat16, device="cuda")
    features = keywords(EVERYTHING, LARGE, "cuda")
    check(*cuda(LARGE), impl=impl)  # the very first launch of a process makes its counters, and waits for them
    with syncs_are_errors():
        out, lse = fk.attention_varlen(*batch.args, return_lse=True, impl=impl, **features)
    oracle.assert_correct_varlen(out, lse, *batch.tensors, **features)


@per_impl("dims", [(44, 44, 52, 52, 60, 60, 68, 68)], [(24, 24, 40, 40, 56, 56, 88, 88)])
def test_threads_may_compile_and_launch_at_once(impl: str, dims: tuple[int, ...]) -> None:
    shapes = [Shape(b=1, sq=130 + 7 * i, sk=200, h=2, hkv=1, d=dim) for i, dim in enumerate(dims)]
    results: dict[int, Any] = {}
    start = threading.Barrier(len(shapes))

    def work(i: int) -> None:
        try:
            start.wait()
            with torch.cuda.stream(torch.cuda.Stream()):
                inputs = cuda(shapes[i], seed=i)
                for _ in range(5):
                    results[i] = inputs, fk.attention(*inputs, causal=True, return_lse=True, impl=impl)
                torch.cuda.current_stream().synchronize()
        except Exception as error:  # shown by the test, which a thread cannot fail
            results[i] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(shapes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(len(shapes)):
        assert not isinstance(results[i], Exception), results[i]
        inputs, (out, lse) = results[i]
        oracle.assert_correct(out, lse, *inputs, causal=True)


def test_fp32_is_ieee_fp32_whatever_torch_allows() -> None:
    inputs = cuda(LARGE, torch.float32)
    want = fk.attention(*inputs, impl="triton")
    torch.set_float32_matmul_precision("medium")
    try:
        assert torch.equal(fk.attention(*inputs, impl="triton"), want)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_autocast_computes_in_16_bits() -> None:
    inputs = cuda(LARGE, torch.float32)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = fk.attention(*inputs, causal=True)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, fk.attention(*(x.bfloat16() for x in inputs), causal=True))


@per_impl("dtype", [torch.bfloat16, torch.float32], [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("feature", ["causal", LOGITS, f"{LOGITS}+floatmask"])
def test_gradients(impl: str, dtype: torch.dtype, feature: str) -> None:
    from .test_autograd import check as check_gradients

    shape = Shape(b=1, sq=100, sk=150, h=4, hkv=2, d=40)
    inputs, features = cuda(shape, dtype), keywords(feature, shape, "cuda")
    if impl == "hopper" and "mask" in feature:
        with pytest.raises(fk.UnsupportedError, match="mask"):
            fk.attention(*inputs, impl=impl, **features)
    else:
        check_gradients(*inputs, impl=impl, **features)


@pytest.mark.parametrize("feature", ["causal", LOGITS, f"{LOGITS}+boolmask"])
def test_compiled_with_dynamic_shapes_gives_the_same(feature: str) -> None:
    torch._dynamo.reset()
    features = keywords(feature, LARGE.but(sq=1, sk=1), "cuda")  # a mask of one element broadcasts
    if "mask" in features:
        features["mask"] = torch.ones(1, 1, 1, 1, dtype=torch.bool, device="cuda")
    compiled = torch.compile(lambda q, k, v: fk.attention(q * 1.0, k, v, **features) + 1, fullgraph=True, dynamic=True)
    for seq in (128, 200, 333):
        q, k, v = cuda(LARGE.but(sq=seq, sk=seq))
        torch.testing.assert_close(compiled(q, k, v), fk.attention(q, k, v, **features) + 1)
