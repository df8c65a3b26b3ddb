"""The row-wise kernels on a real GPU: bf16, FP8, large tensors, and everything an interpreter cannot show."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import flashkernels as fk

from . import oracle
from .gpu import GIB, assert_the_same_in_a_graph, needs_memory
from .oracle import OPS, Op, check, run
from .test_norm import check_quantised, each_format
from .test_rope import check as check_rope, heads_of
from .test_rows import each_op, laid_out

pytestmark = pytest.mark.gpu
FAR = 1 << 31  # elements: one more than 32 bits of offset reach
WIDTHS = (1, 8, 64, 127, 128, 1000, 4096, 5120, 8192, 12288, 16384, 16392, 32768, 151_936)


@pytest.fixture(autouse=True)
def _empty_cache() -> Iterator[None]:
    yield
    if torch.cuda.memory_reserved() > 8 * GIB:
        torch.cuda.empty_cache()


@each_op
@pytest.mark.parametrize("width", WIDTHS)
def test_bf16(op: Op, width: int) -> None:
    check(op, op.inputs((37, width), torch.bfloat16, scale=2.0, device="cuda"), "triton")


@each_op
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [64, 1000, 4096, 20_000])
def test_other_dtypes(op: Op, width: int, dtype: torch.dtype) -> None:
    check(op, op.inputs((300, width), dtype, device="cuda"), "triton")


@each_op
def test_many_rows(op: Op) -> None:
    check(op, op.inputs((20_000, 128), torch.bfloat16, device="cuda"), "triton")
    check(op, op.inputs((5000, 4096), torch.bfloat16, device="cuda"), "triton")


@each_op
@pytest.mark.parametrize("layout", ["padded", "transposed", "stepped", "repeated"])
def test_strides(op: Op, layout: str) -> None:
    """Aligned tensors first: a launch that was prepared for them must not serve these."""
    tensors = op.inputs((3, 5, 7, 256), torch.bfloat16, device="cuda")
    check(op, tensors, "triton")
    check(op, [laid_out(x, layout) for x in tensors], "triton")


@each_op
def test_auto_takes_triton(op: Op) -> None:
    tensors = op.inputs((20, 4096), torch.bfloat16, device="cuda")
    for a, b in zip(op.call(*tensors, impl="auto"), op.call(*tensors, impl="triton"), strict=True):
        assert torch.equal(a, b)


@each_format
@pytest.mark.parametrize("width", [64, 4096, 16384, 32768])
def test_quantised(quantise: str, width: int) -> None:
    capability = torch.cuda.get_device_capability()
    if quantise == "fp8" and capability < (8, 9):
        pytest.skip("FP8 needs compute capability 8.9")
    x, weight = OPS["rms_norm"].inputs((300, width), torch.bfloat16, device="cuda")
    small, scale = fk.rms_norm(x, weight, quantise=quantise, impl="triton")
    check_quantised(small, scale, oracle.rms_norm(x.double(), weight.double()), quantise)
    x[1, 3] = torch.nan
    small, dirty = fk.rms_norm(x, weight, quantise=quantise, impl="triton")
    assert dirty[1].isnan() and torch.equal(dirty[2:], scale[2:])


@each_op
def test_more_elements_than_32_bits_count(op: Op) -> None:
    needs_memory(60)
    rows = FAR // 4096 + 3
    x, *others = op.inputs((1, 4096), torch.bfloat16, device="cuda")
    big = torch.empty(rows, x.shape[-1], dtype=x.dtype, device="cuda").copy_(x)
    big[-1] = x[0] * 2
    others = [y.expand_as(big) if y.dim() == 2 else y for y in others]
    found = op.call(big, *others, impl="triton")
    few = op.call(big[-2:], *(y[-2:] if y.dim() == 2 else y for y in others), impl="triton")
    for a, b in zip(found, few, strict=True):
        assert torch.equal(a[-2:], b) and torch.equal(a[:1], b[:1])
    del found
    if op.residual:
        return
    leaf = big.requires_grad_()
    (out,) = op.call(leaf, *others, impl="triton")
    (grad,) = torch.autograd.grad(out, leaf, torch.ones_like(out[:1]).expand_as(out))
    small = big[-2:].detach().requires_grad_()
    (out,) = op.call(small, *others, impl="triton")
    assert torch.equal(grad[-2:], torch.autograd.grad(out, small, torch.ones_like(out))[0])


@each_op
def test_rows_far_apart(op: Op) -> None:
    needs_memory(20)
    tensors = op.inputs((2, 512), torch.bfloat16, device="cuda")
    room = torch.empty(FAR + 512, dtype=torch.bfloat16, device="cuda")
    x = room.as_strided((2, 512), (FAR, 1)).copy_(tensors[0])
    for a, b in zip(op.call(x, *tensors[1:], impl="triton"), op.call(*tensors, impl="triton"), strict=True):
        assert torch.equal(a, b)


def test_one_row_wider_than_32_bits_count() -> None:
    needs_memory(20)
    x = torch.zeros(1, FAR + 16, dtype=torch.bfloat16, device="cuda")
    x[0, -1] = 30.0
    out = fk.softmax(x, impl="triton")
    want = torch.exp(torch.tensor(30.0, dtype=torch.float64))
    assert out[0, -1].item() == pytest.approx((want / (want + FAR + 15)).item(), rel=0.01)
    assert out[0, -2].item() == out[0, 0].item() == pytest.approx((1 / (want + FAR + 15)).item(), rel=0.01)


@each_op
def test_no_sync_and_graphs(op: Op) -> None:
    tensors = op.inputs((64, 1024), torch.bfloat16, device="cuda")

    def step() -> tuple[Tensor, ...]:
        return run(lambda *x: op.call(*x, impl="auto"), tensors, False)

    want = step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for x in captured:
        x.zero_()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, want, strict=True))


@each_op
def test_training_step_in_a_graph(op: Op) -> None:
    tensors = [x.requires_grad_() for x in op.inputs((64, 1024), torch.bfloat16, device="cuda")]

    def step() -> tuple[Tensor, ...]:
        outs = op.call(*tensors, impl="auto")
        return torch.autograd.grad(outs, tensors, [torch.ones_like(x) for x in outs])

    assert_the_same_in_a_graph(step)


@pytest.mark.parametrize("name", ["rms_norm-residual", "layer_norm"])
@pytest.mark.parametrize("width", [128, 4096, 32768])
def test_gradients_are_the_same_in_every_run(name: str, width: int) -> None:
    op = OPS[name]
    tensors = op.inputs((3000, width), torch.bfloat16, device="cuda")
    first = run(lambda *x: op.call(*x, impl="triton"), tensors, True)
    for _ in range(5):
        again = run(lambda *x: op.call(*x, impl="triton"), tensors, True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@each_op
def test_compiled(op: Op) -> None:
    torch._dynamo.reset()
    tensors = op.inputs((64, 1024), torch.bfloat16, device="cuda")

    def function(x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        return op.call(x * 2, *others, impl="auto")

    compiled = torch.compile(function, fullgraph=True, dynamic=True)
    for a, b in zip(run(compiled, tensors, True), run(function, tensors, True), strict=True):
        assert torch.equal(a, b)


# Rope


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize(("dim", "rotary"), [(128, 128), (64, 64), (80, 80), (96, 24), (256, 64), (7, 6)])
def test_rope(dim: int, rotary: int, interleaved: bool, dtype: torch.dtype) -> None:
    q, k = (heads_of(3, 30, heads, dim, dtype).cuda() for heads in (32, 8))
    check_rope(q, k, rotary, "triton", interleaved=interleaved)
    ids = torch.randint(0, 32, (3, 30), device="cuda", dtype=torch.int32)
    check_rope(q, k, rotary, "triton", ids, interleaved=interleaved)


@pytest.mark.parametrize("layout", ["bhsd", "packed", "stepped"])
def test_rope_strides(layout: str) -> None:
    q, k = (heads_of(3, 30, heads, 128, torch.bfloat16) for heads in (16, 16))
    check_rope(q.cuda(), k.cuda(), 128, "triton")
    q, k = (heads_of(3, 30, 16, 128, torch.bfloat16, layout, seed).cuda() for seed in (0, 1))
    check_rope(q, k, 128, "triton")


def test_rope_of_a_long_batch() -> None:
    needs_memory(30)
    seq = FAR // (32 * 128) + 3
    q = torch.randn(1, 1, 32, 128, dtype=torch.bfloat16, device="cuda").expand(1, seq, 32, 128)
    k = q[:, :, :1]
    tables = [t.cuda() for t in fk.rope_tables(64, 128)]
    ids = (torch.arange(seq, device="cuda") % 64).int()
    out, _ = fk.rope(q, k, *tables, position_ids=ids, impl="triton")
    want, _ = fk.rope(q[:, -70:], k[:, -70:], *tables, position_ids=ids[-70:], impl="triton")
    assert torch.equal(out[:, -70:], want)


def test_rope_position_outside_the_tables_gives_nan() -> None:
    q = heads_of(1, 3, 2, 8, torch.bfloat16).cuda()
    tables = [t.cuda() for t in fk.rope_tables(32, 8)]
    out, _ = fk.rope(q, q, *tables, position_ids=torch.tensor([0, 32, -1], device="cuda"))
    assert out[0, 1:].isnan().all() and torch.equal(out[0, 0], q[0, 0])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@each_op
def test_a_device_that_is_not_current(op: Op) -> None:
    check(op, op.inputs((5, 64), torch.bfloat16, device="cuda:1"), "triton")
