"""Every row-wise op: any width, any strides, gradients, edges, and the registered op under compile."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import flashkernels as fk
from flashkernels.fused.rows import row_view

from .oracle import OPS, Op, check, run

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreter = pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1 before triton is imported")
each_impl = pytest.mark.parametrize("impl", ["torch", pytest.param("triton", marks=interpreter)])
each_op = pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
WIDTHS = (1, 2, 7, 16, 100, 129, 1024)
WIDE = 17_000  # more than a program keeps in registers
LAYOUTS = ("dense", "padded", "transposed", "stepped", "repeated")


def laid_out(x: Tensor, layout: str) -> Tensor:
    """x with other strides; with "repeated" all its rows are the first."""
    *rows, width = x.shape
    if layout == "padded":
        return x.new_zeros((*rows, width + 5))[..., 3 : width + 3].copy_(x)
    if layout == "transposed":
        order = [*reversed(range(len(rows))), len(rows)]
        return x.permute(order).contiguous().permute(order)
    if layout == "stepped":
        return x.new_zeros((*rows, 2 * width))[..., ::2].copy_(x)
    if layout == "repeated" and x.numel():
        return x.reshape(-1, width)[0].expand(x.shape)
    return x


# Widths, dtypes, strides


@each_impl
@each_op
@pytest.mark.parametrize("width", WIDTHS)
def test_width(op: Op, width: int, impl: str) -> None:
    check(op, op.inputs((3, width), torch.float32, scale=2.0), impl)


@each_impl
@each_op
def test_wide_rows(op: Op, impl: str) -> None:
    check(op, op.inputs((2, WIDE + 1), torch.float16 if op.residual else torch.float32), impl)


@each_op
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_dtype(op: Op, dtype: torch.dtype) -> None:
    check(op, op.inputs((2, 5, 96), dtype, scale=3.0), "torch")


@pytest.mark.parametrize("name", ["rms_norm", "rms_norm-residual", "layer_norm"])
@each_impl
def test_weights_of_another_dtype(name: str, impl: str) -> None:
    op = OPS[name]
    x, *others = op.inputs((3, 40), torch.float16)
    wide = [y.float() if y.dim() == 1 else y for y in others]
    for a, b in zip(op.call(x, *wide, impl=impl), op.call(x, *others, impl=impl), strict=True):
        assert torch.equal(a, b)
    found = run(lambda *y: op.call(*y, impl=impl), [x, *wide], True)[-1 - len(others) :]
    assert [g.dtype for g in found] == [x.dtype, *(y.dtype for y in wide)]


@st.composite
def calls(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...]) -> tuple[Op, list[Tensor]]:
    op = OPS[draw(st.sampled_from(sorted(OPS)))]
    shape = (*draw(st.lists(st.integers(0, 4), max_size=4)), draw(st.sampled_from(WIDTHS[:-1])))
    tensors = op.inputs(shape, draw(st.sampled_from(dtypes)), draw(st.integers(0, 99)), draw(st.sampled_from([0.1, 5])))
    return op, [laid_out(x, draw(st.sampled_from(LAYOUTS))) for x in tensors]


@settings(max_examples=150)
@given(calls((torch.float16, torch.bfloat16, torch.float32, torch.float64)))
def test_torch(call: tuple[Op, list[Tensor]]) -> None:
    check(*call, "torch")


@interpreter
@settings(max_examples=80)
@given(calls((torch.float16, torch.float32)))
def test_triton(call: tuple[Op, list[Tensor]]) -> None:
    check(*call, "triton")


@pytest.mark.slow
@interpreter
@settings(max_examples=2000)
@given(calls((torch.float16, torch.float32)))
def test_triton_at_length(call: tuple[Op, list[Tensor]]) -> None:
    check(*call, "triton")


@given(st.lists(st.integers(1, 4), max_size=4), st.permutations(range(4)), st.sampled_from(LAYOUTS))
def test_row_view_finds_every_row(sizes: list[int], order: list[int], layout: str) -> None:
    x = torch.arange(torch.Size([*sizes, 6]).numel(), dtype=torch.float64).reshape(*sizes, 6)
    x = laid_out(x.permute([i for i in order if i < len(sizes)] + [len(sizes)]), layout)
    view = row_view(x)
    data = view.of(x)
    for r, row in enumerate(x.reshape(-1, 6)):
        start = r // view.inner * view.outer_stride + r % view.inner * view.inner_stride
        assert torch.equal(data.as_strided((6,), (1,), data.storage_offset() + start), row)


# Edges


@each_impl
@each_op
@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0, 0), (2, 0, 4)], ids=str)
def test_nothing_to_do(op: Op, shape: tuple[int, ...], impl: str) -> None:
    tensors = op.inputs(shape, torch.float32)
    got = run(lambda *x: op.call(*x, impl=impl), tensors, True)
    assert [g.shape for g in got[-len(tensors) :]] == [x.shape for x in tensors]
    assert all((g == 0).all() for g in got)


@each_impl
@each_op
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_stays_in_its_row(op: Op, value: float, impl: str) -> None:
    check_that_nan_stays_in_its_row(op, (40, 40), value, impl)


@each_impl
@pytest.mark.parametrize("name", ["rms_norm-residual", "softmax"])
def test_nan_stays_in_its_wide_row(name: str, impl: str) -> None:
    check_that_nan_stays_in_its_row(OPS[name], (3, WIDE), float("nan"), impl)


def check_that_nan_stays_in_its_row(op: Op, shape: tuple[int, ...], value: float, impl: str) -> None:
    tensors = op.inputs(shape, torch.float32)
    clean = run(lambda *x: op.call(*x, impl=impl), tensors, True)
    tensors[0] = tensors[0].clone()
    tensors[0][1, 0] = value
    dirty = run(lambda *x: op.call(*x, impl=impl), tensors, True)
    others = [i for i in range(tensors[0].shape[0]) if i != 1]
    assert not dirty[0][1].isfinite().all()
    for a, b in zip(clean, dirty, strict=True):
        if a.dim() == 2:
            assert torch.equal(a[others], b[others])


@each_impl
@each_op
def test_outputs_are_contiguous_and_inputs_untouched(op: Op, impl: str) -> None:
    tensors = [laid_out(x, "transposed") for x in op.inputs((2, 3, 4, 10), torch.float32)]
    before = [x.clone() for x in tensors]
    assert all(x.is_contiguous() for x in run(lambda *x: op.call(*x, impl=impl), tensors, False))
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))


@each_impl
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("width", [40, WIDE])
def test_rows_of_minus_infinity(name: str, width: int, impl: str) -> None:
    (x,) = OPS[name].inputs((3, width), torch.float32)
    x[0] = -torch.inf
    x[1, ::2] = -torch.inf
    x[1, 5000:] = -torch.inf
    (out,) = check(OPS[name], [x], impl, gradients=False)
    assert out[0].isnan().all()
    assert (out[1, ::2] == (-torch.inf if name == "log_softmax" else 0.0)).all()


@each_impl
@pytest.mark.parametrize("name", ["gelu", "gelu-tanh", "swiglu", "geglu"])
def test_far_out(name: str, impl: str) -> None:
    op = OPS[name]
    x = torch.tensor([-1e30, -1e10, -200.0, -20.0, 20.0, 200.0, 1e10, 1e30])
    out, slope = run(lambda y: op.call(torch.cat((y, torch.ones(8))) if op.packed else y, impl=impl), [x], True)
    weights = torch.randn(8, generator=torch.Generator().manual_seed(9), dtype=torch.float64).float()
    torch.testing.assert_close(out, x.clamp(min=0))
    torch.testing.assert_close(slope, weights * (x > 0))


@each_impl
def test_the_result_is_the_same_in_every_run(impl: str) -> None:
    for name in ("rms_norm", "layer_norm"):
        tensors = OPS[name].inputs((50, 300), torch.float16)
        first, second = (run(lambda *x, op=OPS[name]: op.call(*x, impl=impl), tensors, True) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@each_op
def test_gradcheck(op: Op) -> None:
    tensors = [x.requires_grad_() for x in op.inputs((2, 6), torch.float64)]
    assert torch.autograd.gradcheck(lambda *x: op.call(*x, impl="torch"), tensors)


# Choosing


@each_op
def test_auto_takes_torch_on_the_cpu(op: Op) -> None:
    tensors = op.inputs((2, 6), torch.float32)
    for a, b in zip(op.call(*tensors, impl="auto"), op.call(*tensors, impl="torch"), strict=True):
        assert torch.equal(a, b)


@each_op
def test_an_implementation_that_cannot_serve_says_why(op: Op) -> None:
    reason = "bf16" if INTERPRETED else "needs a GPU"
    with pytest.raises(fk.UnsupportedError, match=reason):
        op.call(*op.inputs((2, 6), torch.bfloat16), impl="triton")
    with pytest.raises(ValueError, match="impl='cuda' is not one of 'auto', 'triton', 'torch'"):
        op.call(*op.inputs((2, 6), torch.float32), impl="cuda")


def test_the_cpu_needs_no_triton() -> None:
    program = """
import sys
sys.modules["triton"] = None
import torch, flashkernels as fk
x = torch.ones(1, 2, 2, 4)
fk.rms_norm(x), fk.swiglu(x), fk.softmax(x), fk.rope(x, x, *fk.rope_tables(2, 4))
"""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    subprocess.run([sys.executable, "-c", program], check=True, env=env)


# The registered op


@each_op
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_opcheck(op: Op, grad: bool) -> None:
    x, *others = (x.requires_grad_(grad) for x in op.inputs((3, 6), torch.float32))
    ops = torch.ops.flashkernels
    if "norm" in op.function:
        named = dict(zip(op.vectors, others, strict=False))
        residual = others[-1] if op.residual else None
        flags = (op.function == "layer_norm", 1e-6, op.settings.get("numerics") == "hf", "")
        args = (x, named.get("weight"), named.get("bias"), residual, *flags, "torch")
        torch.library.opcheck(ops.norm.default, args)
    elif "softmax" in op.function:
        torch.library.opcheck(ops.softmax.default, (x, op.function == "log_softmax", "torch"))
    else:
        kind = {"swiglu": "silu", "relu2_glu": "relu2"}.get(op.function, "gelu")
        torch.library.opcheck(ops.activation.default, (x, kind, op.packed, "torch"))


@each_op
def test_compiled_once_serves_every_number_of_rows(op: Op) -> None:
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")

    def function(x: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        return op.call(x * 2, *others, impl="auto")

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
    counts = set()
    for rows in (5, 9, 7):
        tensors = op.inputs((3, rows, 10), torch.float32)
        for a, b in zip(run(compiled, tensors, True), run(function, tensors, True), strict=True):
            torch.testing.assert_close(a, b)
        counts.add(backend.frame_count)  # not always 1: the tracer starts again at a float such as eps
    assert len(counts) == 1


# Errors


@each_op
def test_errors_name_the_argument(op: Op) -> None:
    name = "gate_up" if op.packed else "x"
    x, *others = op.inputs((2, 6), torch.float32)
    for watched in (False, True):
        first = x.clone().requires_grad_(watched)
        with pytest.raises(TypeError, match=f"{name} must be a torch.Tensor, got list"):
            op.call([1.0], *others, impl="auto")
        with pytest.raises(TypeError, match=rf"{name}.dtype=torch.int32 is not supported; allowed: torch.float16"):
            op.call(x.int(), *others, impl="auto")
        with pytest.raises(ValueError, match=f"{name} has no dimensions"):
            op.call(first.sum(), *others, impl="auto")
        if op.packed:
            with pytest.raises(ValueError, match=r"gate_up has shape \(2, 5\); its last size must be even"):
                op.call(first[:, :5], *others, impl="auto")
        if "weight" in op.vectors:
            with pytest.raises(ValueError, match=r"weight has shape \(5,\); expected \(6,\), the last size of x"):
                op.call(first, others[0][:5], *others[1:], impl="auto")
        if op.residual:
            with pytest.raises(ValueError, match=r"residual has shape \(1, 6\), x has \(2, 6\)"):
                op.call(first, *others[:-1], others[-1][:1], impl="auto")
            with pytest.raises(TypeError, match=r"residual.dtype=torch.float16 differs from x.dtype=torch.float32"):
                op.call(first, *others[:-1], others[-1].half(), impl="auto")
