"""Linear layers with what surrounds them: any sizes and strides, every activation, a folded norm, gradients, the choice
of an implementation, and the registered op under compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import flashkernels as fk
from flashkernels.dispatch import verdicts
from flashkernels.fused.linear import FOLDED_ROWS, IMPLS, NORM_IMPLS
from flashkernels.fused.problem import ACTIVATIONS, LinearProblem
from flashkernels.fused.triton import linear_tiles as tiles
from flashkernels.fused.triton.linear_tiles import LinearTile
from flashkernels.hardware import GPUS, lookup

from . import oracle
from .gpu import needs_memory
from .oracle import assert_close, run
from .test_rows import INTERPRETED, interpreter, laid_out

each_impl = pytest.mark.parametrize("impl", ["torch", "matmul", pytest.param("triton", marks=interpreter)])
each_norm_impl = pytest.mark.parametrize("impl", ["torch", "apart", pytest.param("triton", marks=interpreter)])
TRUTHS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda x: x.clamp(min=0), "relu2": lambda x: x.clamp(min=0) ** 2, "silu": lambda x: x / (1 + torch.exp(-x)),
    "gelu": lambda x: oracle.gelu(x, "none"), "gelu_tanh": lambda x: oracle.gelu(x, "tanh"),
}  # fmt: skip
PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu, "relu2": lambda x: F.relu(x).square(), "silu": F.silu, "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}  # fmt: skip


def layer(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, interleaved: bool,
    functions: dict[str, Callable[[Tensor], Tensor]],
) -> Tensor:  # fmt: skip
    """A linear layer by torch's product, with these functions as activations."""
    y = F.linear(x, weight, bias)
    if activation is None:
        return y
    kind, gated = ACTIVATIONS[activation]
    if not gated:
        return functions[kind](y)
    gate, up = (y[..., 0::2], y[..., 1::2]) if interleaved else y.chunk(2, -1)
    return functions[kind](gate) * up


def check(
    x: Tensor, norm_weight: Tensor | None, weight: Tensor, bias: Tensor | None, impl: str,
    activation: str | None = None, interleaved: bool = False, normed: bool = False, eps: float = 1e-6,
) -> None:  # fmt: skip
    """A call and all its gradients against the definition in fp64."""
    dtype, names = x.dtype, ("x", "norm_weight", "weight", "bias")
    given_ = {name: y for name, y in zip(names, (x, norm_weight, weight, bias), strict=True) if y is not None}

    def ours(*tensors: Tensor) -> tuple[Tensor, ...]:
        a = dict.fromkeys(names) | dict(zip(given_, tensors, strict=True))
        keywords: dict[str, Any] = {"activation": activation, "interleaved": interleaved, "impl": impl}
        if normed:
            out = fk.fused.norm_linear(a["x"], a["norm_weight"], a["weight"], a["bias"], eps=eps, **keywords)
        else:
            out = fk.fused.linear(a["x"], a["weight"], a["bias"], **keywords)
        return (out,)

    def theirs(true: bool) -> Callable[..., tuple[Tensor, ...]]:
        def function(*tensors: Tensor) -> tuple[Tensor, ...]:
            a = dict.fromkeys(names) | dict(zip(given_, tensors, strict=True))
            rows = a["x"]
            if normed and true:
                rows = oracle.rms_norm(rows, a["norm_weight"], eps)
            elif normed:
                rows = F.rms_norm(rows, rows.shape[-1:], a["norm_weight"], eps=eps)
            return (layer(rows, a["weight"], a["bias"], activation, interleaved, TRUTHS if true else PLAIN),)

        return function

    tensors = list(given_.values())
    got = run(ours, tensors, True)
    plain = run(theirs(False), tensors, True)
    want = run(theirs(True), [y.double() for y in tensors], True)
    cancelling = 0.0
    if normed and x.numel():  # a gradient at right angles to its row: what lies along it cancels
        true = [y.double() for y in tensors]
        scale = oracle.rms_norm(true[0], None, eps)
        factor = 1.0 if norm_weight is None else norm_weight.double()
        rest = [None if y is None else y.double() for y in (weight, bias)]
        _, along = run(lambda y: (layer(y * factor, *rest, activation, interleaved, TRUTHS),), [scale], True)
        cancelling = along.abs().max().item() / (true[0].square().mean(-1).min().item() + eps) ** 0.5
    for name, a, b, c in zip(("out", *given_), got, plain, want, strict=True):
        assert a.dtype == dtype
        assert_close(a, b, c, dtype, cancelling if name == "x" else 0.0, name)


def inputs(
    rows: tuple[int, ...], depth: int, n: int, dtype: torch.dtype, seed: int = 0, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, norm_weight, weight, bias; products of about 1."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    shapes = ((*rows, depth), (depth,), (n, depth), (n,))
    x, norm_weight, weight, bias = (torch.randn(shape, generator=generator, dtype=wide) for shape in shapes)
    made = (x, norm_weight, weight / max(1, depth) ** 0.5, bias)
    x, norm_weight, weight, bias = (y.to(dtype).to(device) for y in made)
    return x, norm_weight, weight, bias


# Sizes, strides, dtypes


@st.composite
def calls(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...]) -> dict[str, Any]:
    rows = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    if draw(st.booleans()):
        rows = (draw(st.sampled_from([1, 17, 64, 65, 130])),)
    depth, half = draw(st.sampled_from([1, 7, 16, 40, 130])), draw(st.sampled_from([1, 4, 17, 72]))
    dtype, seed = draw(st.sampled_from(dtypes)), draw(st.integers(0, 99))
    x, norm_weight, weight, bias = inputs(rows, depth, 2 * half, dtype, seed)
    layout = draw(st.sampled_from(["dense", "padded", "stepped", "transposed"]))
    normed = draw(st.booleans())
    return {
        "x": laid_out(x, layout), "norm_weight": norm_weight if normed and draw(st.booleans()) else None,
        "weight": laid_out(weight, draw(st.sampled_from(["dense", "padded", "stepped"]))),
        "bias": bias if draw(st.booleans()) else None, "normed": normed,
        "activation": draw(st.sampled_from([None, *ACTIVATIONS])), "interleaved": draw(st.booleans()),
    }  # fmt: skip


@settings(max_examples=150)
@given(calls((torch.float16, torch.bfloat16, torch.float32, torch.float64)))
def test_torch(call: dict[str, Any]) -> None:
    check(**call, impl="torch")


@settings(max_examples=30)
@given(calls((torch.float16, torch.float32)))
def test_steps(call: dict[str, Any]) -> None:
    check(**call, impl="apart" if call["normed"] else "matmul")


@interpreter
@settings(max_examples=20)
@given(calls((torch.float16, torch.float32)))
def test_triton(call: dict[str, Any]) -> None:
    check(**call, impl="triton")


@pytest.mark.slow
@interpreter
@settings(max_examples=1000)
@given(calls((torch.float16, torch.float32)))
def test_triton_at_length(call: dict[str, Any]) -> None:
    check(**call, impl="triton")


TILES = (
    LinearTile(True, 16, 64, 64, warps=4, stages=3, tma=True),
    LinearTile(True, 16, 256, 64, warps=4, stages=2),
    LinearTile(False, 64, 32, 64, warps=4, stages=3, persistent=True, group=2, tma=True),
    LinearTile(False, 64, 256, 32, warps=8, stages=3, tma=True),
    LinearTile(False, 32, 64, 32, warps=4, stages=3),
)


@interpreter
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: tile.name)
@pytest.mark.parametrize(("activation", "interleaved"), [("gelu", False), ("swiglu", False), ("swiglu", True)])
def test_tiles(tile: LinearTile, activation: str, interleaved: bool) -> None:
    """Many tiles, cut off on all sides."""
    x, norm_weight, weight, bias = inputs((70,), 72, 2 * 144, torch.float16)
    with fk.use_tile(tile=tile):
        normed = tile.block_n < 256 or tile.swap
        check(x, norm_weight if normed else None, weight, bias, "triton", activation, interleaved, normed)


@each_impl
def test_the_gate_comes_first(impl: str) -> None:
    weight = torch.tensor([[2.0], [-1.0], [10.0], [100.0]])  # gate 2 and -1, up 10 and 100
    x = torch.ones(1, 1)
    assert torch.equal(fk.fused.linear(x, weight, activation="relu2_glu", impl=impl), torch.tensor([[40.0, 0.0]]))
    pairs = weight[[0, 2, 1, 3]]
    out = fk.fused.linear(x, pairs, activation="relu2_glu", interleaved=True, impl=impl)
    assert torch.equal(out, torch.tensor([[40.0, 0.0]]))


@each_norm_impl
def test_a_norm_weight_of_another_dtype(impl: str) -> None:
    x, norm_weight, weight, _ = inputs((5,), 24, 8, torch.float16)
    wide = norm_weight.float().requires_grad_()
    out = fk.fused.norm_linear(x, wide, weight, impl=impl)
    assert torch.equal(out, fk.fused.norm_linear(x, norm_weight, weight, impl=impl))
    (grad,) = torch.autograd.grad(out.sum(), wide)
    assert grad.dtype == torch.float32


@pytest.mark.parametrize("impl", ["torch", "apart"])
def test_hf_numerics_are_those_of_two_calls(impl: str) -> None:
    x, norm_weight, weight, _ = inputs((5,), 24, 8, torch.bfloat16)
    normed = fk.rms_norm(x, norm_weight, numerics="hf", impl="torch")
    out = fk.fused.norm_linear(x, norm_weight, weight, numerics="hf", impl=impl)
    assert torch.equal(out, fk.fused.linear(normed, weight, impl="torch" if impl == "torch" else "auto"))


# Edges


@each_impl
@pytest.mark.parametrize(("rows", "depth", "n"), [((0,), 8, 4), ((3,), 0, 4), ((3,), 8, 0), ((2, 0, 3), 8, 4)], ids=str)
def test_nothing_to_do(rows: tuple[int, ...], depth: int, n: int, impl: str) -> None:
    x, _, weight, bias = inputs(rows, depth, n, torch.float32)
    check(x, None, weight, bias, impl, "gelu")


@each_impl
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_stays_in_its_row(value: float, impl: str) -> None:
    x, _, weight, bias = inputs((70,), 40, 16, torch.float32)
    clean = fk.fused.linear(x, weight, bias, activation="silu", impl=impl)
    x[3, 7] = value
    out = fk.fused.linear(x, weight, bias, activation="silu", impl=impl)
    assert not out[3].isfinite().all()
    out[3] = clean[3]
    assert torch.equal(out, clean)


@each_norm_impl
def test_a_row_of_zeros_is_normalised(impl: str) -> None:
    x, norm_weight, weight, bias = inputs((4,), 40, 16, torch.float32)
    x[2] = 0
    out = fk.fused.norm_linear(x, norm_weight, weight, bias, impl=impl)
    assert torch.equal(out[2], bias)


@pytest.mark.parametrize("activation", [None, "gelu", "swiglu"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_gradcheck(activation: str | None, interleaved: bool) -> None:
    tensors = [y.requires_grad_() for y in inputs((2,), 5, 4, torch.float64)]

    def function(x: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return fk.fused.norm_linear(
            x, norm_weight, weight, bias, activation=activation, interleaved=interleaved, impl="torch"
        )

    assert torch.autograd.gradcheck(function, tensors)


@each_impl
def test_only_the_gradients_that_are_wanted(impl: str) -> None:
    x, _, weight, bias = inputs((3,), 8, 4, torch.float32)
    weight.requires_grad_()
    out = fk.fused.linear(x, weight, bias, activation="gelu", impl=impl)
    out.sum().backward()
    assert weight.grad is not None and x.grad is None and bias.grad is None


def test_autocast() -> None:
    x, norm_weight, weight, bias = inputs((3,), 8, 4, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = fk.fused.linear(x, weight.requires_grad_(), bias)
        assert out.dtype == torch.bfloat16 == F.linear(x, weight, bias).dtype
        assert fk.fused.norm_linear(x, norm_weight, weight, bias).dtype == torch.bfloat16
        (grad,) = torch.autograd.grad(out.sum(), weight)
    assert grad.dtype == torch.float32


# Choosing


def reasons(problem: LinearProblem, gpu: str | None = "h200") -> dict[str, str | None]:
    table = NORM_IMPLS if problem.normed else IMPLS
    return {v.name: v.reason for v in verdicts(table, problem, lookup(gpu) if gpu else None)}


def test_an_activation_decides_whether_to_fuse() -> None:
    """Without one there is nothing to gain; few rows are bound by memory; a deep product outweighs its epilogue."""
    assert "nothing left to fuse" in str(reasons(LinearProblem(16, 14336, 4096, "bf16", "cuda"))["triton"])
    assert reasons(LinearProblem(16, 14336, 4096, "bf16", "cuda", "gelu"))["triton"] is None
    deep = reasons(LinearProblem(16384, 28672, 16384, "bf16", "cuda", "swiglu"))
    assert "is expected to lose" in str(deep["triton"]) and deep["matmul"] is None
    assert reasons(LinearProblem(16384, 28672, 256, "bf16", "cuda", "swiglu"))["triton"] is None
    assert "outside the tensor cores" in str(reasons(LinearProblem(16, 64, 64, "fp32", "cuda", "gelu"))["triton"])


def test_a_norm_is_folded_where_that_is_safe_and_pays() -> None:
    few = LinearProblem(FOLDED_ROWS, 14336, 4096, "bf16", "cuda", normed=True)
    assert reasons(few)["triton"] is None
    many = LinearProblem(FOLDED_ROWS + 1, 14336, 4096, "bf16", "cuda", normed=True)
    assert "65 rows" in str(reasons(many)["triton"])
    half = LinearProblem(1, 14336, 4096, "fp16", "cuda", normed=True)
    assert "overflow fp16" in str(reasons(half)["triton"])
    hf = LinearProblem(1, 14336, 4096, "bf16", "cuda", normed=True, rounded=True)
    assert "numerics='hf'" in str(reasons(hf)["triton"])


def test_auto_takes_torch_on_the_cpu() -> None:
    x, norm_weight, weight, bias = inputs((3,), 8, 4, torch.bfloat16)
    a, b = (fk.fused.linear(x, weight, bias, activation="silu", impl=impl) for impl in ("auto", "torch"))
    assert torch.equal(a, b)
    a, b = (fk.fused.norm_linear(x, norm_weight, weight, impl=impl) for impl in ("auto", "torch"))
    assert torch.equal(a, b)


def test_an_implementation_that_cannot_serve_says_why() -> None:
    x, norm_weight, weight, _ = inputs((3,), 8, 4, torch.bfloat16)
    with pytest.raises(fk.UnsupportedError, match="bf16" if INTERPRETED else "needs a GPU"):
        fk.fused.linear(x, weight, impl="triton")
    with pytest.raises(ValueError, match="impl='cublas' is not one of 'auto', 'triton', 'matmul', 'torch'"):
        fk.fused.linear(x, weight, impl="cublas")
    with pytest.raises(ValueError, match="impl='matmul' is not one of 'auto', 'triton', 'apart', 'torch'"):
        fk.fused.norm_linear(x, norm_weight, weight, impl="matmul")


@given(
    st.sampled_from(sorted(GPUS)), st.integers(1, 20_000), st.integers(1, 40_000), st.sampled_from(["bf16", "fp32"]),
    st.sampled_from(["", "gelu", "swiglu"]), st.booleans(), st.booleans(),
)  # fmt: skip
def test_every_gpu_has_a_tile(
    key: str, rows: int, n: int, dtype: str, activation: str, normed: bool, tma: bool
) -> None:
    gpu = lookup(key)
    problem = LinearProblem(rows, 2 * n, 4096, dtype, "cuda", activation, normed)
    tile = tiles.choose(problem, gpu, tma)
    assert tiles.shared_bytes(tile, problem, gpu) <= gpu.shared_per_block
    assert not tile.tma or (tma and gpu.has_tma)


# The registered op


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("activation", ["", "swiglu"])
@pytest.mark.parametrize("normed", [False, True])
def test_opcheck(activation: str, normed: bool, grad: bool) -> None:
    x, norm_weight, weight, bias = (y.requires_grad_(grad) for y in inputs((3, 2), 6, 4, torch.float32))
    args = (x, norm_weight if normed else None, weight, bias, activation, False, normed, 1e-6, False, grad, "torch")
    torch.library.opcheck(torch.ops.flashkernels.linear.default, args)


@pytest.mark.parametrize("normed", [False, True])
def test_compiled_once_serves_every_number_of_rows(normed: bool) -> None:
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")

    def function(x: Tensor, norm_weight: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        if normed:
            return (fk.fused.norm_linear(x * 2, norm_weight, weight, bias, activation="swiglu"),)
        return (fk.fused.linear(x * norm_weight, weight, bias, activation="swiglu"),)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
    counts = set()
    for rows in (5, 9, 7):
        tensors = list(inputs((3, rows), 10, 6, torch.float32))
        for a, b in zip(run(compiled, tensors, True), run(function, tensors, True), strict=True):
            torch.testing.assert_close(a, b)
        counts.add(backend.frame_count)
    assert len(counts) == 1


# Errors


@pytest.mark.parametrize("watched", [False, True])
def test_errors_name_the_argument(watched: bool) -> None:
    x, norm_weight, weight, bias = inputs((3,), 8, 5, torch.float32)
    x.requires_grad_(watched)
    cases: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (TypeError, "x must be a torch.Tensor, got list", lambda: fk.fused.linear([1.0], weight)),
        (TypeError, r"weight.dtype=torch.float16 differs from x.dtype", lambda: fk.fused.linear(x, weight.half())),
        (ValueError, r"weight has shape \(5, 7\); expected \(n, 8\)", lambda: fk.fused.linear(x, weight[:, :7])),
        (ValueError, r"weight has shape \(8,\); expected \(n, 8\)", lambda: fk.fused.linear(x, weight[0])),
        (ValueError, r"bias has shape \(4,\); expected \(5,\)", lambda: fk.fused.linear(x, weight, bias[:4])),
        (ValueError, "activation='tanh' is not one of", lambda: fk.fused.linear(x, weight, activation="tanh")),
        (TypeError, r"activation=array\(\['gelu'.* must be a str or None, got ndarray",
         lambda: fk.fused.linear(x, weight, activation=np.array(["gelu", "silu"]))),
        (TypeError, "activation=3 must be a str or None, got int", lambda: fk.fused.linear(x, weight, activation=3)),
        (TypeError, "interleaved=None must be a bool, got NoneType",
         lambda: fk.fused.linear(x, weight, interleaved=None)),
        (TypeError, "interleaved=1 must be a bool, got int",
         lambda: fk.fused.norm_linear(x, norm_weight, weight, interleaved=1)),
        (ValueError, "needs an even number of rows", lambda: fk.fused.linear(x, weight, activation="geglu")),
        (ValueError, "norm_weight has shape", lambda: fk.fused.norm_linear(x, norm_weight[:3], weight)),
        (ValueError, "eps=-1 must not be negative", lambda: fk.fused.norm_linear(x, norm_weight, weight, eps=-1)),
        (ValueError, "numerics='x'", lambda: fk.fused.norm_linear(x, norm_weight, weight, numerics="x")),
    ]  # fmt: skip
    for kind, match, call in cases:
        with pytest.raises(kind, match=match):
            call()


# On a real GPU


@pytest.mark.gpu
@pytest.mark.parametrize("activation", [None, "gelu", "gelu_tanh", "swiglu"])
@pytest.mark.parametrize("rows", [1, 16, 33, 64, 65, 256, 1000])
def test_gpu(rows: int, activation: str | None) -> None:
    x, norm_weight, weight, bias = inputs((rows,), 1024, 2 * 1536, torch.bfloat16, device="cuda")
    for impl in ("triton", "matmul", "auto"):
        check(x, None, weight, bias, impl, activation)
    for impl in ("triton", "apart", "auto"):
        check(x, norm_weight, weight, bias, impl, activation, normed=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("rows", "depth", "half"), [(7, 520, 40), (300, 72, 1000), (130, 129, 131), (5, 33, 3)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_gpu_odd_sizes(rows: int, depth: int, half: int, dtype: torch.dtype, interleaved: bool) -> None:
    """Some that TMA cannot address, and tiles that are cut off on all sides."""
    x, norm_weight, weight, bias = inputs((rows,), depth, 2 * half, dtype, device="cuda")
    check(x, None, weight, bias, "triton", "swiglu", interleaved)
    check(x, None, weight, None, "triton", "gelu", interleaved)
    check(x, norm_weight, weight, bias, "triton", "swiglu", interleaved, normed=True)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["padded", "transposed", "stepped"])
def test_gpu_strides(layout: str) -> None:
    """Aligned tensors first: a launch that was prepared for them must not serve these."""
    x, norm_weight, weight, bias = inputs((4, 50), 256, 512, torch.bfloat16, device="cuda")
    check(x, norm_weight, weight, bias, "triton", "swiglu", normed=True)
    check(laid_out(x, layout), norm_weight, laid_out(weight, "padded"), bias, "triton", "swiglu", normed=True)


@pytest.mark.gpu
def test_gpu_is_deterministic_and_captured() -> None:
    x, _, weight, bias = inputs((300,), 512, 1024, torch.bfloat16, device="cuda")
    want = fk.fused.linear(x, weight, bias, activation="gelu", impl="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fk.fused.linear(x, weight, bias, activation="gelu", impl="triton")
    graph.replay()
    assert torch.equal(out, want)


@pytest.mark.gpu
def test_gpu_more_elements_than_32_bits_count() -> None:
    needs_memory(30)
    x, _, weight, _ = inputs((300,), 64, 16384, torch.bfloat16, device="cuda")
    big = x.repeat(500, 1)  # 150,000 x 16,384 of the output
    out = fk.fused.linear(big, weight, activation="silu", impl="triton")
    assert torch.equal(out[-300:], out[:300])
    assert torch.equal(out[:300], fk.fused.linear(x, weight, activation="silu", impl="triton"))
