"""`impl="triton"` on a real GPU: bf16, large shapes, and everything an interpreter cannot show."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import flashkernels as fk

from . import oracle
from .cases import EVERYTHING, FEATURES, NO_MASK, Shape, float_mask, keywords, pairs, qkv, ragged
from .test_properties import Call, calls, lengths

pytestmark = pytest.mark.gpu

GIB = 1024**3
INF, NAN = float("inf"), float("nan")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
HEAD_DIMS = sorted({*range(8, 257, 8), 1, 7, 33, 100, 255, 257, 320, 512})
FEW_DIMS = st.sampled_from([64, 72, 128])  # each new combination of flags and dimension compiles a kernel
LENGTHS = ([700, 0, 1, 129, 333, 64], [500, 40, 900, 0, 333, 1])
LARGE = Shape(b=2, sq=700, sk=1000, h=6, hkv=2, d=72)
dtype_id = lambda dtype: str(dtype).removeprefix("torch.")  # noqa: E731


def cuda(shape: Shape, dtype: torch.dtype = torch.bfloat16, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    return qkv(shape, dtype, device="cuda", **options)


def check(q: Tensor, k: Tensor, v: Tensor, **features: Any) -> tuple[Tensor, Tensor]:
    out, lse = fk.attention(q, k, v, return_lse=True, impl="triton", **features)
    oracle.assert_correct(out, lse, q, k, v, **features)
    return out, lse


def check_varlen(batch: Any, **features: Any) -> tuple[Tensor, Tensor]:
    out, lse = fk.attention_varlen(*batch.args, return_lse=True, impl="triton", **features)
    oracle.assert_correct_varlen(out, lse, *batch.tensors, **features)
    return out, lse


def needs_memory(gib: int) -> None:
    free = torch.cuda.mem_get_info()[0] // GIB
    if free < gib:
        pytest.skip(f"needs {gib} GiB of GPU memory, {free} GiB are free")


@pytest.fixture(autouse=True)
def _empty_cache() -> Iterator[None]:
    yield
    if torch.cuda.memory_reserved() > 8 * GIB:
        torch.cuda.empty_cache()


# Every dimension, feature and dtype


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_head_dimension(dim: int) -> None:
    check(*cuda(Shape(b=1, sq=700, sk=1000, h=4, hkv=2, d=dim)), causal=True)


@pytest.mark.parametrize("dim", [64, 72, 100, 128, 256, 320, 512])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=dtype_id)
def test_head_dimension_in_other_dtypes(dim: int, dtype: torch.dtype) -> None:
    check(*cuda(Shape(b=1, sq=300, sk=500, h=2, hkv=1, d=dim), dtype))


@pytest.mark.parametrize("dims", [(192, 128), (64, 256), (128, 72), (320, 64), (24, 512)], ids=str)
def test_head_dimension_of_v_differs(dims: tuple[int, int]) -> None:
    check(*cuda(Shape(b=1, sq=300, sk=500, h=2, hkv=1, d=dims[0], dv=dims[1])), causal=True)


@pytest.mark.parametrize("feature", FEATURES)
def test_feature_alone(feature: str) -> None:
    check(*cuda(LARGE), **keywords(feature, LARGE, "cuda"))


@pytest.mark.parametrize("both", pairs()[::6])
def test_pair_of_features(both: str) -> None:
    shape = LARGE.but(sq=1000, sk=700)
    check(*cuda(shape), **keywords(both, shape, "cuda"))


@pytest.mark.parametrize("mask", ["boolmask", "floatmask"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_every_feature_at_once(mask: str, dtype: torch.dtype) -> None:
    shape = LARGE.but(dv=104)
    check(*cuda(shape, dtype), **keywords([*EVERYTHING, mask], shape, "cuda"))


@pytest.mark.parametrize("feature", NO_MASK)
def test_varlen_feature(feature: str) -> None:
    shape = LARGE.but(b=len(LENGTHS[0]))
    check_varlen(ragged(*LENGTHS, shape, torch.bfloat16, device="cuda"), **keywords(feature, shape, "cuda"))


@pytest.mark.parametrize("heads", [(7, 1), (12, 4), (32, 4), (5, 5)], ids=lambda h: f"{h[0]}:{h[1]}")
def test_query_heads_share_key_heads(heads: tuple[int, int]) -> None:
    check(*cuda(Shape(sq=300, sk=300, h=heads[0], hkv=heads[1], d=64)), causal=True)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_layout(layout: str) -> None:
    check(*cuda(LARGE, layout=layout), layout=layout, causal=True)


@pytest.mark.parametrize("seq", [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 255, 256, 257, 1023, 1025])
def test_sequence_length_around_the_tile(seq: int) -> None:
    check(*cuda(Shape(b=1, sq=seq, sk=seq, h=2, hkv=1, d=64)), causal=True)
    check(*cuda(Shape(b=1, sq=seq, sk=1100 - seq, h=2, hkv=1, d=64)), window=(100, 30))


@pytest.mark.parametrize(
    "shape", [Shape(b=1, sq=8192, sk=8192, h=2, hkv=1, d=128), Shape(b=1, sq=1, sk=100_000, h=8, hkv=1, d=80)], ids=str
)
def test_long_sequence(shape: Shape) -> None:
    check(*cuda(shape), causal=True)


def test_mask_of_any_strides() -> None:
    shape = Shape(b=2, sq=200, sk=300, h=4, hkv=2, d=64)
    inputs = cuda(shape)
    make = lambda sizes: float_mask(sizes, device="cuda")  # noqa: E731
    check(*inputs, mask=make((2, 1, 1, 300)).expand(2, 4, 200, 300))
    check(*inputs, mask=make((300, 200, 4, 2)).permute(3, 2, 1, 0))
    check(*inputs, mask=make((2, 4, 200, 600))[..., ::2])
    check(*inputs, mask=make((300,)).to(torch.bfloat16))


def test_auto_takes_triton_on_a_gpu() -> None:
    inputs = cuda(LARGE)
    assert torch.equal(fk.attention(*inputs, causal=True), fk.attention(*inputs, causal=True, impl="triton"))


@settings(max_examples=20)
@given(calls(FEW_DIMS, DTYPES[:1], 400))
def test_any_dense_call(call: Call) -> None:
    features = {**on_gpu(call.keywords()), "layout": call.layout}
    check(*on_gpu(call.tensors()), **features)


@settings(max_examples=10)
@given(calls(FEW_DIMS, DTYPES[:1], 0, mask=False), lengths(400))
def test_any_varlen_call(call: Call, lens: list[tuple[int, int]]) -> None:
    call = Call(**{**vars(call), "shape": call.shape.but(b=len(lens))})
    batch = call.ragged([q for q, _ in lens], [k for _, k in lens])
    args, features = on_gpu(batch.args), on_gpu(call.keywords())
    out, lse = fk.attention_varlen(*args, return_lse=True, impl="triton", **features)
    oracle.assert_correct_varlen(out, lse, *args[:5], **features)


def on_gpu(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.cuda()
    if isinstance(x, tuple):
        return tuple(map(on_gpu, x))
    return {name: on_gpu(value) for name, value in x.items()} if isinstance(x, dict) else x


# A compiled kernel is kept and launched again: nothing of the first call may stick to it


def test_values_change_from_call_to_call() -> None:
    inputs = cuda(LARGE)
    for window, scale, softcap in (((5, 3), 0.3, 1.5), ((300, 64), -0.7, 30.0), ((0, 0), 1, 1), ((16, 1), 0.0, 16.0)):
        check(*inputs, window=window, softmax_scale=scale, softcap=softcap)


@pytest.mark.parametrize("dim", [64, 72])
def test_alignment_and_strides_change_from_call_to_call(dim: int) -> None:
    shape = Shape(b=2, sq=200, sk=300, h=4, hkv=2, d=dim)
    plain = cuda(shape)

    def misaligned(x: Tensor) -> Tensor:  # one element past the start of an allocation
        return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)

    def odd_rows(x: Tensor) -> Tensor:  # rows of an odd number of elements
        return torch.nn.functional.pad(x, (0, 1), value=NAN)[..., :-1]

    def spread(x: Tensor) -> Tensor:  # a gap between elements
        return torch.stack([x, x * NAN], -1)[..., 0]

    def sequence_first(x: Tensor) -> Tensor:
        return x.transpose(0, 1).contiguous().transpose(0, 1)

    for change in (torch.clone, misaligned, odd_rows, torch.clone, spread, sequence_first, misaligned):
        check(*map(change, plain), causal=True)
    check(plain[0], misaligned(plain[1]), plain[2], causal=True)
    check(misaligned(plain[0]), *plain[1:], causal=True)
    check(*plain[:2], odd_rows(plain[2]), causal=True)


def test_features_come_and_go_from_call_to_call() -> None:
    inputs = cuda(LARGE)
    for feature in ("sinks", "plain", "floatmask", "boolmask", "alibi", "plain", "alibi2d", "causal", "sinks"):
        check(*inputs, **keywords(feature, LARGE, "cuda"))


# More than 2^31 elements


def test_keys_and_values_of_more_than_2_31_elements() -> None:
    needs_memory(16)
    k, v = (torch.randn(1, 2**20 + 128, 16, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    assert k.numel() > 2**31
    q = torch.randn(1, 40, 16, 128, device="cuda", dtype=torch.bfloat16)
    features: dict[str, Any] = {"causal": True, "window": (300, -1)}  # the keys at the very end
    out, lse = fk.attention(q, k, v, return_lse=True, impl="triton", **features)
    oracle.assert_correct(out, lse, q, k[:, -400:], v[:, -400:], **features)


def test_queries_of_more_than_2_31_elements() -> None:
    needs_memory(16)
    rows = 2**20 + 128
    q = torch.randn(1, rows, 16, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, rows, 1, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out, lse = fk.attention(q, k, v, causal=True, window=(64, -1), return_lse=True, impl="triton")
    last = slice(-300, None)
    want = oracle.attention(q[:, last], k[:, -364:], v[:, -364:], causal=True, window=(64, -1))
    torch.testing.assert_close(out[:, last].double(), want.out, rtol=0.02, atol=0.02)
    oracle.assert_correct(
        out[:, last], lse[:, :, last], q[:, last], k[:, -364:], v[:, -364:], causal=True, window=(64, -1)
    )


def far_apart(x: Tensor) -> Tensor:
    """The same values with 2^31 elements between one sequence of the batch and the next."""
    step = 2**31
    inner = x[0].numel()
    room = torch.empty(step * (x.shape[0] - 1) + inner, device=x.device, dtype=x.dtype)
    return room.as_strided(x.shape, (step, *x.stride()[1:])).copy_(x)


@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_strides_of_more_than_2_31_elements(which: str) -> None:
    needs_memory(8)
    inputs = dict(zip("qkv", cuda(Shape(b=2, sq=100, sk=200, h=4, hkv=2, d=72)), strict=True))
    inputs[which] = far_apart(inputs[which])
    check(**inputs, causal=True)


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


def test_batch_beyond_the_grid_limit_of_65535() -> None:
    q, k, v = cuda(Shape(b=70_000, sq=3, sk=5, h=2, hkv=1, d=16))
    out, lse = fk.attention(q, k, v, causal=True, return_lse=True, impl="triton")
    for part in (slice(0, 3), slice(65_534, 65_538), slice(-3, None)):
        oracle.assert_correct(out[part], lse[part], q[part], k[part], v[part], causal=True)


# Memory


@contextmanager
def new_memory_is_nan() -> Iterator[None]:
    """torch.empty and its kin return NaN, so that an element nobody writes is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(1, device="cuda").isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("feature", ["plain", "causal", "window", "boolmask"])
def test_every_element_of_the_output_is_written(feature: str) -> None:
    shape = LARGE.but(sq=1000, sk=300, d=40)
    inputs, features = cuda(shape), keywords(feature, shape, "cuda")
    with new_memory_is_nan():
        out, lse = fk.attention(*inputs, return_lse=True, impl="triton", **features)
    oracle.assert_correct(out, lse, *inputs, **features)


def test_every_element_of_a_ragged_output_is_written() -> None:
    batch = ragged(*LENGTHS, LARGE, torch.bfloat16, device="cuda")
    with new_memory_is_nan():
        out, lse = fk.attention_varlen(*batch.args, causal=True, return_lse=True, impl="triton")
    oracle.assert_correct_varlen(out, lse, *batch.tensors, causal=True)


@pytest.mark.parametrize("seq", [131_072])
@pytest.mark.parametrize("heads", [1, 2])
def test_peak_memory_is_linear_in_the_sequence(seq: int, heads: int) -> None:
    q, k, v = cuda(Shape(b=1, sq=seq, sk=seq, h=heads, hkv=1, d=64))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out, lse = fk.attention(q, k, v, causal=True, return_lse=True, impl="triton")
    torch.cuda.synchronize()
    returned = out.numel() * out.element_size() + lse.numel() * lse.element_size()
    assert torch.cuda.max_memory_allocated() - before - returned < 1e9


@pytest.mark.parametrize("poison", [NAN, INF], ids=str)
@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("dim", [64, 72])
def test_poison_in_one_ragged_sequence_stays_there(poison: float, which: str, dim: int) -> None:
    batch = ragged([50, 90, 40], [170, 90, 60], Shape(h=4, hkv=2, d=dim), torch.bfloat16, device="cuda")
    clean = fk.attention_varlen(*batch.args, impl="triton")
    {"k": batch.k, "v": batch.v}[which][170:260] = poison
    out = fk.attention_varlen(*batch.args, impl="triton")
    assert torch.equal(out[:50], clean[:50]) and torch.equal(out[140:], clean[140:])
    assert not out[50:140].isfinite().any()


@pytest.mark.parametrize("poison", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("feature", ["causal", "boolmask", "floatmask"])
def test_poison_that_a_row_does_not_see_does_not_reach_it(poison: float, which: str, feature: str) -> None:
    q, k, v = cuda(Shape(b=1, sq=500, sk=500, h=4, hkv=2, d=72))
    keep = torch.ones(500, dtype=torch.bool, device="cuda")
    keep[300:] = False
    features: dict[str, Any] = {
        "causal": {"causal": True},
        "boolmask": {"mask": keep},
        "floatmask": {"mask": torch.zeros(500, device="cuda").masked_fill(~keep, -INF)},
    }[feature]
    rows = slice(0, 300 if feature == "causal" else 500)
    clean, clean_lse = fk.attention(q, k, v, return_lse=True, impl="triton", **features)
    largest = v.abs().max().item()
    {"k": k, "v": v}[which][:, 300:] = poison
    out, lse = fk.attention(q, k, v, return_lse=True, impl="triton", **features)
    # Around poison the kernel sums in another order: each way rounds P to bf16 (2^-9 of each term) and then the output.
    torch.testing.assert_close(out[:, rows], clean[:, rows], atol=4 * 2**-9 * largest, rtol=0)
    torch.testing.assert_close(lse[:, :, rows], clean_lse[:, :, rows])


# Behaviour in company


@pytest.mark.parametrize("feature", ["plain", "causal", "causal+softcap+alibi+sinks+floatmask"])
def test_twenty_runs_agree_bit_for_bit(feature: str) -> None:
    inputs, features = cuda(LARGE), keywords(feature, LARGE, "cuda")
    first = fk.attention(*inputs, return_lse=True, impl="triton", **features)
    for _ in range(19):
        again = fk.attention(*inputs, return_lse=True, impl="triton", **features)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@pytest.mark.parametrize("feature", ["causal", "causal+softcap+alibi+sinks+floatmask"])
def test_cuda_graph_replays_with_new_inputs(feature: str) -> None:
    features = keywords(feature, LARGE, "cuda")
    static = cuda(LARGE)
    fk.attention(*static, return_lse=True, impl="triton", **features)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = fk.attention(*static, return_lse=True, impl="triton", **features)
    for seed in (1, 2):
        fresh = cuda(LARGE, seed=seed)
        for x, y in zip(static, fresh, strict=True):
            x.copy_(y)
        graph.replay()
        oracle.assert_correct(out, lse, *fresh, **features)


def test_cuda_graph_of_a_ragged_batch_replays_with_new_lengths() -> None:
    static = ragged([100, 200, 52], [300, 10, 42], LARGE, torch.bfloat16, device="cuda")
    args = (*static.args[:5], 352, 352)
    fk.attention_varlen(*args, causal=True, impl="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = fk.attention_varlen(*args, causal=True, return_lse=True, impl="triton")
    other = ragged([352, 0, 0], [2, 349, 1], LARGE, torch.bfloat16, device="cuda", seed=3)
    for x, y in zip(static.tensors, other.tensors, strict=True):
        x.copy_(y)
    graph.replay()
    oracle.assert_correct_varlen(out, lse, *other.tensors, causal=True)


def test_runs_on_the_current_stream() -> None:
    q, k, v = cuda(LARGE)
    want = fk.attention(q, k, v, causal=True, impl="triton")
    late = torch.zeros_like(q)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # the copy is late: a launch on another stream would read zeros
        late.copy_(q)
        out = fk.attention(late, k, v, causal=True, impl="triton")
    side.synchronize()
    assert torch.equal(out, want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_a_gpu_that_is_not_current() -> None:
    inputs = [x.to("cuda:1") for x in cuda(LARGE)]
    with torch.cuda.device(0):
        out, lse = fk.attention(*inputs, causal=True, return_lse=True, impl="triton")
        assert torch.cuda.current_device() == 0
    oracle.assert_correct(out, lse, *inputs, causal=True)


@contextmanager
def syncs_are_errors() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_dense_never_waits_for_the_gpu() -> None:
    inputs, features = cuda(LARGE), keywords([*EVERYTHING, "floatmask"], LARGE, "cuda")
    fk.attention(*inputs, return_lse=True, **features)
    with syncs_are_errors():
        fk.attention(*inputs, return_lse=True, **features)


def test_varlen_never_waits_for_the_gpu() -> None:
    batch = ragged(*LENGTHS, LARGE, torch.bfloat16, device="cuda")
    features = keywords(EVERYTHING, LARGE, "cuda")
    with syncs_are_errors():
        out, lse = fk.attention_varlen(*batch.args, return_lse=True, **features)
    oracle.assert_correct_varlen(out, lse, *batch.tensors, **features)


def test_threads_may_compile_and_launch_at_once() -> None:
    shapes = [
        Shape(b=1, sq=130 + 7 * i, sk=200, h=2, hkv=1, d=dim) for i, dim in enumerate((44, 44, 52, 52, 60, 60, 68, 68))
    ]
    results: dict[int, Any] = {}
    start = threading.Barrier(len(shapes))

    def work(i: int) -> None:
        try:
            start.wait()
            with torch.cuda.stream(torch.cuda.Stream()):
                inputs = cuda(shapes[i], seed=i)
                for _ in range(5):
                    results[i] = inputs, fk.attention(*inputs, causal=True, return_lse=True, impl="triton")
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=dtype_id)
@pytest.mark.parametrize("feature", ["causal", "causal+softcap+alibi+sinks+floatmask"])
def test_gradients(dtype: torch.dtype, feature: str) -> None:
    from .test_autograd import check as check_gradients

    shape = Shape(b=1, sq=100, sk=150, h=4, hkv=2, d=40)
    check_gradients(*cuda(shape, dtype), impl="triton", **keywords(feature, shape, "cuda"))


@pytest.mark.parametrize("feature", ["causal", "causal+softcap+alibi+sinks+boolmask"])
def test_compiled_with_dynamic_shapes_gives_the_same(feature: str) -> None:
    torch._dynamo.reset()
    features = keywords(feature, LARGE.but(sq=1, sk=1), "cuda")  # a mask of one element broadcasts
    if "mask" in features:
        features["mask"] = torch.ones(1, 1, 1, 1, dtype=torch.bool, device="cuda")
    compiled = torch.compile(lambda q, k, v: fk.attention(q * 1.0, k, v, **features) + 1, fullgraph=True, dynamic=True)
    for seq in (128, 200, 333):
        q, k, v = cuda(LARGE.but(sq=seq, sk=seq))
        torch.testing.assert_close(compiled(q, k, v), fk.attention(q, k, v, **features) + 1)
