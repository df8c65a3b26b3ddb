"""The registered op: opcheck, torch.compile without breaks or needless recompiles, fake tensors, export, autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import flashkernels as fk
import flashkernels.attention.api  # registers the op

from . import oracle
from .cases import EVERYTHING, Shape, bool_mask, float_mask, keywords, qkv, ragged, sinks, slopes

SMALL = Shape(b=2, sq=9, sk=14, h=4, hkv=2, d=8, dv=5)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


# opcheck


def op_arguments(
    *, grad: bool = True, varlen: bool = False, layout: str = "bshd", lse: bool = True, **features: Any
) -> tuple[Any, ...]:
    """Arguments of the op itself, whose tensors are (B, S, H, D) in every layout."""
    if varlen:
        batch = ragged([5, 0, 4], [6, 3, 7], SMALL)
        q, k, v, cu_q, cu_k, max_q, max_k = batch.args
    else:
        q, k, v = qkv(SMALL, layout=layout)
        cu_q, cu_k, max_q, max_k = None, None, 0, 0
        if layout == "bhsd":
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if grad:
        q, k, v = (x.requires_grad_() for x in (q, k, v))
    sides = [features.get(name) for name in ("alibi_slopes", "sinks", "mask")]
    return (
        q, k, v, *sides, cu_q, cu_k, None, None, None, None, max_q, max_k, features.get("causal", False),
        features.get("softmax_scale", 0.5), *features.get("window", (-1, -1)), features.get("softcap", 0.0), layout,
        lse, "torch",
    )  # fmt: skip


OP_CASES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "plain": lambda: op_arguments(),
    "without-grad": lambda: op_arguments(grad=False),
    "without-lse": lambda: op_arguments(lse=False),
    "bhsd": lambda: op_arguments(layout="bhsd"),
    "causal": lambda: op_arguments(causal=True),
    "bool-mask": lambda: op_arguments(mask=bool_mask((2, 1, 9, 14))),
    "float-mask": lambda: op_arguments(mask=float_mask((1, 1, 9, 14)).requires_grad_()),
    "everything": lambda: op_arguments(
        causal=True, window=(4, -1), softcap=2.0, alibi_slopes=slopes((4,)), sinks=sinks(4).requires_grad_()
    ),
    "varlen": lambda: op_arguments(varlen=True, causal=True),
    "varlen-without-lse": lambda: op_arguments(varlen=True, lse=False),
}


@pytest.mark.parametrize("case", OP_CASES.values(), ids=OP_CASES.keys())
def test_opcheck(case: Callable[[], tuple[Any, ...]]) -> None:
    torch.library.opcheck(torch.ops.flashkernels.attention.default, case())


# torch.compile


class Compiled:
    """A function compiled in one graph; `recompiles` counts those after the first call."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.backend = CompileCounterWithBackend("aot_eager")
        self.function = torch.compile(function, fullgraph=True, dynamic=True, backend=self.backend)
        self.at_first = 0

    def __call__(self, *args: Any) -> Any:
        result = self.function(*args)
        self.at_first = self.at_first or self.backend.frame_count
        return result

    @property
    def recompiles(self) -> int:
        return self.backend.frame_count - self.at_first


# Sizes that are equal at the first call are taken to be equal for ever: these are all different.
ODD = Shape(b=3, sq=17, sk=30, h=8, hkv=4, d=16)


COMPILED = {
    "plain": {},
    "causal": {"causal": True},
    "window+softcap+scale": {"window": (5, 2), "softcap": 2.0, "softmax_scale": 0.3},
    "sinks+alibi": {"sinks": sinks(8), "alibi_slopes": slopes((8,))},
    "mask": {"mask": bool_mask((3, 1, 1, 1))},
    "bhsd": {"layout": "bhsd", "causal": True},
}


@pytest.mark.parametrize("impl", ["auto", "torch"])
@pytest.mark.parametrize("features", COMPILED.values(), ids=COMPILED.keys())
def test_compiled_once_serves_every_length(features: dict[str, Any], impl: str) -> None:
    function = Compiled(lambda q, k, v: fk.attention(q * 2, k, v, impl=impl, **features) + 1)
    for seq in (17, 40, 33):
        q, k, v = qkv(ODD.but(sq=seq, sk=seq + 5), layout=features.get("layout", "bshd"))
        torch.testing.assert_close(function(q, k, v), fk.attention(q * 2, k, v, impl=impl, **features) + 1)
    assert function.recompiles == 0


def test_compiled_once_serves_every_batch() -> None:
    function = Compiled(lambda q, k, v: fk.attention(q, k, v, causal=True))
    for batch in (3, 5, 7):
        inputs = qkv(ODD.but(b=batch))
        torch.testing.assert_close(function(*inputs), fk.attention(*inputs, causal=True))
    assert function.recompiles == 0


def test_compiled_with_lse() -> None:
    function = Compiled(lambda q, k, v: fk.attention(q, k, v, causal=True, return_lse=True))
    inputs = qkv(Shape())
    out, lse = function(*inputs)
    oracle.assert_correct(out, lse, *inputs, causal=True)


def test_compiled_with_every_feature_and_a_mask_of_the_sequence_lengths() -> None:
    features = keywords(EVERYTHING, ODD)
    function = Compiled(lambda q, k, v, mask: fk.attention(q, k, v, mask=mask, return_lse=True, **features))
    for sizes in ((17, 30), (31, 20)):
        shape = ODD.but(sq=sizes[0], sk=sizes[1])
        inputs, mask = qkv(shape), float_mask((3, 1, *sizes))
        out, lse = function(*inputs, mask)
        oracle.assert_correct(out, lse, *inputs, mask=mask, **features)
    assert function.recompiles == 0


def test_compiled_varlen_serves_every_batch_of_lengths() -> None:
    function = Compiled(lambda *args: fk.attention_varlen(*args, causal=True, return_lse=True))
    for lens in (([5, 14], [9, 12]), ([12, 3], [4, 20]), ([6, 27], [8, 31])):
        batch = ragged(*lens, ODD)
        out, lse = function(*batch.args)
        oracle.assert_correct_varlen(out, lse, *batch.tensors, causal=True)
    assert function.recompiles == 0


@pytest.mark.parametrize("impl", ["auto", "torch"])
def test_compiled_gradients_are_the_eager_ones(impl: str) -> None:
    def loss(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor) -> Tensor:
        out, lse = fk.attention(q, k, v, causal=True, sinks=sinks, mask=mask, return_lse=True, impl=impl)
        return out.square().sum() + lse.sum()

    function = Compiled(loss)
    for seq in (11, 19):
        leaves = [*qkv(ODD.but(sq=seq, sk=seq)), sinks(8), float_mask((seq, seq), drop=0.0)]
        inputs = [x.requires_grad_() for x in leaves]
        got = torch.autograd.grad(function(*inputs), inputs)
        want = torch.autograd.grad(loss(*inputs), inputs)
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w)
    assert function.recompiles == 0


def test_compiled_module() -> None:
    module = fk.Attention(causal=True, window=(8, -1))
    function = Compiled(module)
    for seq in (12, 20):
        inputs = qkv(ODD.but(sq=seq, sk=seq))
        torch.testing.assert_close(function(*inputs), module(*inputs))
    assert function.recompiles == 0


def test_compiling_a_bad_call_says_what_is_bad() -> None:
    function = Compiled(lambda q, k, v: fk.attention(q, k, v, window=(-2, 0)))
    with pytest.raises(Exception, match=r"window.*-2"):
        function(*qkv(Shape()))


@pytest.mark.slow
def test_compiled_by_inductor() -> None:
    function = torch.compile(
        lambda q, k, v: fk.attention(q * 2, k, v, causal=True).relu(), fullgraph=True, dynamic=True
    )
    for seq in (17, 40):
        q, k, v = qkv(Shape(sq=seq, sk=seq))
        torch.testing.assert_close(function(q, k, v), fk.attention(q * 2, k, v, causal=True).relu())


# Fake and meta tensors


def layouts(x: Tensor | tuple[Tensor, ...]) -> list[tuple[Any, ...]]:
    return [(y.shape, y.stride(), y.dtype) for y in (x if isinstance(x, tuple) else (x,))]


FAKE_CASES = {
    "bshd": {},
    "bhsd": {"layout": "bhsd"},
    "lse": {"return_lse": True},
    "bhsd-lse": {"layout": "bhsd", "return_lse": True},
}


@pytest.mark.parametrize("impl", ["auto", "torch"])
@pytest.mark.parametrize("features", FAKE_CASES.values(), ids=FAKE_CASES.keys())
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "transposed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_fake_output_has_the_shape_strides_and_dtype_of_the_real_one(
    features: dict[str, Any], strided: bool, dtype: torch.dtype, impl: str
) -> None:
    layout = features.get("layout", "bshd")
    if strided:
        other = {"bshd": "bhsd", "bhsd": "bshd"}[layout]
        inputs = [x.transpose(1, 2) for x in qkv(SMALL, dtype, layout=other)]
    else:
        inputs = list(qkv(SMALL, dtype, layout=layout))
    real = fk.attention(*inputs, impl=impl, **features)
    with FakeTensorMode() as mode:
        fake = fk.attention(*(mode.from_tensor(x) for x in inputs), impl=impl, **features)
    assert layouts(fake) == layouts(real)


@pytest.mark.parametrize("features", FAKE_CASES.values(), ids=FAKE_CASES.keys())
def test_meta_tensors_give_the_shape_strides_and_dtype_of_the_real_output(features: dict[str, Any]) -> None:
    inputs = qkv(SMALL, torch.bfloat16, layout=features.get("layout", "bshd"))
    meta = fk.attention(*(x.to("meta") for x in inputs), causal=True, **features)
    assert layouts(meta) == layouts(fk.attention(*inputs, causal=True, **features))


@pytest.mark.parametrize("lse", [False, True], ids=["out", "lse"])
def test_fake_varlen_output_has_the_shape_strides_and_dtype_of_the_real_one(lse: bool) -> None:
    batch = ragged([5, 0, 4], [6, 3, 7], SMALL)
    real = fk.attention_varlen(*batch.args, return_lse=lse)
    with FakeTensorMode() as mode:
        tensors = [mode.from_tensor(x) for x in batch.tensors]
        fake = fk.attention_varlen(*tensors, *batch.args[5:], return_lse=lse)
    assert layouts(fake) == layouts(real)


def test_output_is_contiguous_in_its_layout() -> None:
    for layout in ("bshd", "bhsd"):
        q, k, v = qkv(SMALL, layout=layout)
        spread = torch.stack([q, q], -1)[..., 0]
        assert fk.attention(spread, k, v, layout=layout).is_contiguous()


# Export


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_export_with_dynamic_sequence(layout: str) -> None:
    module = fk.Attention(causal=True, softcap=2.0, layout=layout)
    seq = torch.export.Dim("seq", min=2, max=1000)
    axis = 1 if layout == "bshd" else 2
    program = torch.export.export(module, qkv(Shape(sq=16, sk=16), layout=layout), dynamic_shapes=[{axis: seq}] * 3)
    assert any(node.target is torch.ops.flashkernels.attention.default for node in program.graph.nodes)
    inputs = qkv(Shape(sq=29, sk=29), layout=layout, seed=1)
    torch.testing.assert_close(program.module()(*inputs), module(*inputs))


# Autocast


@pytest.mark.parametrize("impl", ["auto", "torch"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_computes_in_16_bits(dtype: torch.dtype, impl: str) -> None:
    inputs = qkv(Shape(sq=40, sk=40))
    with torch.autocast("cpu", dtype=dtype):
        out = fk.attention(*inputs, causal=True, impl=impl)
    assert out.dtype == dtype
    assert torch.equal(out, fk.attention(*(x.to(dtype) for x in inputs), causal=True, impl=impl))


def test_autocast_joins_inputs_of_different_dtypes() -> None:
    q, k, v = qkv(Shape())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fk.attention(q, k.bfloat16(), v.bfloat16()).dtype == torch.bfloat16


def test_autocast_leaves_fp64_alone() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fk.attention(*qkv(Shape(), torch.float64)).dtype == torch.float64


def test_autocast_gradients_have_the_dtype_of_the_inputs() -> None:
    inputs = [x.requires_grad_() for x in qkv(Shape())]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = fk.attention(*inputs, causal=True).float().square().sum()
    assert all(g.dtype == torch.float32 and g.isfinite().all() for g in torch.autograd.grad(loss, inputs))


def test_autocast_varlen() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = fk.attention_varlen(*ragged([5, 9], [7, 9]).args, return_lse=True)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
