"""The gradient of a float mask from the fused backward, against autograd of the oracle in fp64: in Triton's interpreter
here, and on a GPU."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import flashkernels as fk
import flashkernels.attention.api as api
import flashkernels.attention.triton.backward_mask as backward_mask
from flashkernels.hardware import lookup
from flashkernels.jit.eager import Plans

from . import test_dropout as dropped
from .cases import Shape, float_mask, interpreter, keywords, qkv
from .gpu import misaligned, needs_memory, odd_rows, spread, syncs_are_errors
from .gradients import assert_same_gradients, check, expected, gradients, leaves, weights_like
from .test_backward import INF, NAN, dtype_id, launches, sides, small_tiles as small_tiles

SMALL = Shape(b=2, sq=20, sk=35, h=4, hkv=2, d=16)
BIG = Shape(b=3, sq=700, sk=1000, h=4, hkv=2, d=72)
PATTERNS = tuple(itertools.product((False, True), repeat=4))  # which of (B, H, S_q, S_k) are broadcast
# one of each form; the last three are walked over by the pass that they have for themselves
FORMS = {
    "rows": (False, True, False, True), "columns": (True, False, True, False), "scores": (False,) * 4,
    "shared-batches": (True, False, False, False), "shared-heads": (False, True, False, False),
    "shared": (True, True, False, False),
}  # fmt: skip
each_form = pytest.mark.parametrize("form", FORMS)


def sizes(shape: Shape, pattern: tuple[bool, ...]) -> tuple[int, ...]:
    full = (shape.b, shape.h, shape.sq, shape.sk)
    return tuple(1 if broadcast else size for broadcast, size in zip(pattern, full, strict=True))


def pattern_id(pattern: tuple[bool, ...]) -> str:
    return "".join("1" if broadcast else name for broadcast, name in zip(pattern, "BHQK", strict=True))


@pytest.fixture
def walked(monkeypatch: pytest.MonkeyPatch) -> None:
    """One program walks all heads that share a block, as it does where there are blocks enough for a GPU."""
    monkeypatch.setattr(backward_mask, "step_of", lambda walk, blocks, gpu: max(1, walk))
    monkeypatch.setattr(api, "_backward_plans", Plans(api._plan_backward))


def features_of(feature: str, shape: Shape, form: str, device: str = "cpu", **options: Any) -> dict[str, Any]:
    mask = float_mask(sizes(shape, FORMS[form]), device=device, **options)
    return {**keywords(feature, shape, device), "mask": mask}


# Shapes of the mask


@interpreter
@pytest.mark.parametrize("pattern", PATTERNS, ids=pattern_id)
def test_every_broadcast(pattern: tuple[bool, ...]) -> None:
    mask = float_mask(sizes(SMALL, pattern))
    check(*qkv(SMALL, torch.float16), impl="triton", also=("mask",), mask=mask)


@interpreter
@each_form
@pytest.mark.usefixtures("walked")
def test_fp32(form: str) -> None:
    features = features_of("sinks", SMALL.but(sq=9), form)
    check(*qkv(SMALL.but(sq=9)), impl="triton", also=sides(features), **features)


@interpreter
@pytest.mark.parametrize("pattern", [p for p in PATTERNS if p[:2] != (False, False) and p[2:] == (False, False)],
                         ids=pattern_id)  # fmt: skip
@pytest.mark.parametrize("step", [2, 12], ids=["parts", "one walk"])
def test_heads_that_share_a_mask(
    pattern: tuple[bool, ...], step: int, small_tiles: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3 batches by parts of 2 heads: the last is shorter."""
    small_tiles(16, 32)
    monkeypatch.setattr(backward_mask, "step_of", lambda walk, blocks, gpu: step)
    shape = SMALL.but(b=3)
    features = {**keywords("causal+sinks", shape), "mask": float_mask(sizes(shape, pattern))}
    check(*qkv(shape, torch.float16), impl="triton", also=sides(features), **features)


def test_few_blocks_are_walked_over_by_many_programs() -> None:
    step = partial(backward_mask.step_of, gpu=lookup("h200"))  # 132 multiprocessors
    assert step(64, 264) == step(64, 9999) == 64 and step(64, 263) == step(64, 132) == 32
    assert step(4096, 4) == 4096 // 66 + 1 and step(3, 1) == step(0, 5) == step(1, 0) == 1


@interpreter
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_fewer_dimensions(dims: int) -> None:
    mask = float_mask(sizes(SMALL, FORMS["shared-batches"])[-dims:])
    check(*qkv(SMALL, torch.float16), impl="triton", also=("mask",), mask=mask)


@interpreter
@pytest.mark.parametrize("one", [{"sq": 1}, {"sk": 1}, {"b": 1}, {"h": 1, "hkv": 1}], ids=str)
def test_sizes_of_one(one: dict[str, int]) -> None:
    shape = SMALL.but(**one)
    check(*qkv(shape, torch.float16), impl="triton", also=("mask",), mask=float_mask(sizes(shape, FORMS["scores"])))


@interpreter
@pytest.mark.parametrize("none", [{"b": 0}, {"sq": 0}, {"sk": 0}], ids=str)
@each_form
def test_sizes_of_nothing(none: dict[str, int], form: str) -> None:
    shape = SMALL.but(**none)
    inputs = leaves(*qkv(shape), float_mask(sizes(shape, FORMS[form])))
    grads = torch.autograd.grad(fk.attention(*inputs[:3], mask=inputs[3], impl="triton").sum(), inputs)
    assert all(g.shape == x.shape and (g == 0).all() for g, x in zip(grads, inputs, strict=True))


def expanded(x: Tensor) -> Tensor:
    return x.mean(0, keepdim=True).expand(x.shape)


STRIDES = {
    "misaligned": misaligned, "odd": odd_rows, "spread": spread, "expanded": expanded,
    "transposed": lambda x: x.mT.contiguous().mT,
}  # fmt: skip


@interpreter
@pytest.mark.parametrize("change", STRIDES.values(), ids=STRIDES.keys())
@pytest.mark.parametrize("form", ["scores", "shared-heads"])
@pytest.mark.usefixtures("walked")
def test_any_strides(change: Any, form: str) -> None:
    """A mask that is expanded has a gradient for each of its elements, as in all of torch."""
    inputs = qkv(SMALL, torch.float16)
    mask = change(float_mask(sizes(SMALL, FORMS[form]), drop=0.0))
    want = expected(inputs, also=("mask",), features={"mask": mask})
    view = mask.detach().requires_grad_()
    out = fk.attention(*inputs, mask=view, return_lse=True, impl="triton")
    got = gradients(out, [view])
    assert got[0].shape == mask.shape and got[0].is_contiguous()
    assert_same_gradients(got, *(made[3:] for made in want), torch.float16)


@interpreter
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=dtype_id)
@pytest.mark.parametrize("form", ["rows", "scores", "shared"])
def test_dtype_of_the_mask(dtype: torch.dtype, form: str) -> None:
    mask = float_mask(sizes(SMALL, FORMS[form]), dtype=dtype)
    made = [(leaf := mask.to(to).requires_grad_(), *qkv(SMALL, torch.float16)) for to in (torch.float32, dtype)]
    want, got = (gradients(fk.attention(*i[1:], mask=i[0], return_lse=True, impl="triton"), [i[0]])[0] for i in made)
    assert got.dtype == dtype == leaf.dtype and torch.equal(got, want.to(dtype))


# Features


@interpreter
@pytest.mark.parametrize("feature", ["causal", "window", "softcap+scale", "alibi2d+sinks", "left+softcap+alibi+sinks"])
@pytest.mark.parametrize("form", ["columns", "scores", "shared-batches", "shared-heads"])
@pytest.mark.usefixtures("walked")
def test_feature(feature: str, form: str, small_tiles: Any) -> None:
    """Small blocks, so that some are skipped; of more queries than keys, some see nothing."""
    small_tiles(16, 16)
    shape = Shape(b=2, sq=40, sk=30, h=2, hkv=1, d=24, dv=16)
    features = features_of(feature, shape, form)
    also = ("mask", *sides({name: x for name, x in features.items() if name == "sinks"}))
    check(*qkv(shape, torch.float16), impl="triton", also=also, **features)


@interpreter
@each_form
@pytest.mark.usefixtures("walked")
def test_dropout(form: str, small_tiles: Any) -> None:
    small_tiles(16, 16)
    shape = SMALL.but(h=2, hkv=1)
    dropped.check(*qkv(shape, torch.float16), impl="triton", **features_of("causal+sinks", shape, form))


@interpreter
@pytest.mark.parametrize("form", ["columns", "scores", "shared"])
def test_beside_sums_of_dq(form: str, small_tiles: Any) -> None:
    small_tiles(16, 16, adds=True)
    features = features_of("causal+softcap", SMALL, form)
    check(*qkv(SMALL, torch.float16), impl="triton", also=("mask",), **features)


@interpreter
@pytest.mark.parametrize("dim", [72, 160])
def test_head_dimension_in_parts(dim: int) -> None:
    shape = Shape(b=2, sq=20, sk=35, h=2, hkv=1, d=dim)
    check(*qkv(shape, torch.float16), impl="triton", also=("mask",), **features_of("causal", shape, "shared"))


# What nobody sees


@interpreter
@each_form
@pytest.mark.usefixtures("walked")
def test_what_is_hidden_has_a_gradient_of_zero(form: str, small_tiles: Any) -> None:
    """Exactly: by causal, whole blocks of it, and by a mask of -inf, whole rows of it."""
    small_tiles(16, 16)
    shape = Shape(b=2, sq=70, sk=40, h=2, hkv=1)
    mask = float_mask(sizes(shape, FORMS[form]))
    mask[..., : max(1, mask.shape[2] // 8), :] = -INF
    inputs = leaves(*qkv(shape, torch.float16), mask)
    out = fk.attention(*inputs[:3], mask=inputs[3], causal=True, return_lse=True, impl="triton")
    (grad,) = gradients(out, inputs[3:])
    row, key = torch.arange(70)[:, None] - 30, torch.arange(40)
    seen = ((key <= row) & (mask != -INF)).sum_to_size(mask.shape) > 0
    assert (grad[~seen] == 0).all() and (form == "columns" or (grad[seen] != 0).any())


@interpreter
@pytest.mark.parametrize(("which", "value"), [("q", NAN), ("k", INF), ("v", NAN)], ids=str)
@pytest.mark.parametrize("form", ["columns", "scores", "shared"])
@pytest.mark.usefixtures("walked")
def test_poison_that_nobody_sees_reaches_no_gradient(form: str, which: str, value: float) -> None:
    """Keys from 30 on are hidden from all rows, and rows up to 5 see nothing."""
    q, k, v = qkv(SMALL, torch.float16)
    mask = float_mask(sizes(SMALL, FORMS[form]), drop=0.0)
    if mask.shape[3] > 1:
        mask[..., 30:] = -INF
    if mask.shape[2] > 1:
        mask[:, :, :5] = -INF
    attend = partial(fk.attention, return_lse=True, impl="triton")
    clean = leaves(q, k, v, mask)
    want = gradients(attend(*clean[:3], mask=clean[3]), clean)
    if which == "q" and mask.shape[2] > 1:
        q[:, :5] = value
    elif which != "q" and mask.shape[3] > 1:
        {"k": k, "v": v}[which][:, 30:] = value
    dirty = leaves(q, k, v, mask)
    got = gradients(attend(*dirty[:3], mask=dirty[3]), dirty)
    torch.testing.assert_close(got[3], want[3], rtol=1e-3, atol=1e-3)


@interpreter
@each_form
def test_a_nan_that_is_seen_is_not_hidden(form: str) -> None:
    """Of one batch: where the mask has batches of its own, it reaches no other."""
    q, k, v = qkv(SMALL, torch.float16)
    v[1, 3] = NAN
    leaf = float_mask(sizes(SMALL, FORMS[form]), drop=0.0).requires_grad_()
    (grad,) = gradients((fk.attention(q, k, v, mask=leaf, impl="triton"),), [leaf])
    assert grad[-1].isnan().all() and (leaf.shape[0] == 1 or grad[0].isfinite().all())


# What runs


@interpreter
@pytest.mark.parametrize(
    ("form", "kernels"),
    [
        ("rows", ["rows_kernel"]),
        ("columns", ["rows_kernel", "dkdv_kernel"]),
        ("scores", ["rows_kernel", "dkdv_kernel"]),
        ("shared", ["rows_kernel", "dmask_kernel"]),
    ],
)
def test_a_mask_alone_launches_no_more_than_it_needs(
    form: str, kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = leaves(*qkv(SMALL, torch.float16), float_mask(sizes(SMALL, FORMS[form])))
    attend = partial(fk.attention, impl="triton")
    want = gradients((attend(*inputs[:3], mask=inputs[3]),), inputs)[3]
    out = attend(*(x.detach() for x in inputs[:3]), mask=inputs[3])
    names = launches(monkeypatch)
    (got,) = gradients((out,), inputs[3:])
    assert names == kernels and torch.equal(got, want)


@interpreter
@pytest.mark.parametrize("form", ["columns", "scores", "shared-heads"])
def test_opcheck(form: str) -> None:
    shape = Shape(b=2, sq=9, sk=14, h=2, hkv=1, d=8)
    q, k, v, mask = leaves(*qkv(shape), float_mask(sizes(shape, FORMS[form])))
    out, lse = fk.attention(q, k, v, mask=mask, return_lse=True, impl="torch")
    saved = [x.detach() for x in (out, lse, q, k, v)]
    given = (torch.ones_like(out), None, *saved, None, None, mask.detach(), None, None)
    last = (0, 0, False, 8**-0.5, -1, -1, 0.0, "triton", [True, False, True, False, False, True])
    torch.library.opcheck(torch.ops.flashkernels.attention_backward.default, (*given, *last))


@interpreter
def test_compiled_gradients_are_the_eager_ones() -> None:
    def loss(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return fk.attention(q, k, v, mask=mask * 2, impl="triton").square().sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for seq in (11, 19):
        shape = Shape(b=3, sq=seq, sk=seq + 3, h=2, hkv=1)
        inputs = leaves(*qkv(shape), float_mask(sizes(shape, FORMS["shared-batches"]), drop=0.0))
        want = torch.autograd.grad(loss(*inputs), inputs)
        for g, w in zip(torch.autograd.grad(compiled(*inputs), inputs), want, strict=True):
            torch.testing.assert_close(g, w)


# On a GPU


@interpreter
@pytest.mark.parametrize("feature", ["plain", "causal"])
@pytest.mark.parametrize("shape", [(2, 20, 30), (1, 2, 20, 30)], ids=str)
def test_a_mask_of_every_score_may_leave_sizes_of_1_away(shape: tuple[int, ...], feature: str) -> None:
    size = Shape(b=1, sq=20, sk=30, h=2, hkv=1, d=24)
    features = keywords(feature, size) | {"mask": float_mask(shape, drop=0.2)}
    check(*qkv(size, torch.float32), impl="triton", also=("mask",), **features)


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", PATTERNS, ids=pattern_id)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=dtype_id)
def test_every_broadcast_on_a_gpu(pattern: tuple[bool, ...], dtype: torch.dtype) -> None:
    mask = float_mask(sizes(BIG, pattern), device="cuda")
    check(*qkv(BIG, dtype, device="cuda"), impl="triton", also=("mask",), mask=mask)


@pytest.mark.gpu
@each_form
@pytest.mark.parametrize("feature", ["causal", "window", "softcap+scale", "alibi2d+sinks", "left+softcap+alibi+sinks"])
@pytest.mark.parametrize("lengths", [(512, 640), (640, 512)], ids=str)
def test_feature_on_a_gpu(feature: str, form: str, lengths: tuple[int, int]) -> None:
    """Keys are a multiple of 16: dS is stored 16 bytes at a time."""
    shape = Shape(b=2, sq=lengths[0], sk=lengths[1], h=4, hkv=2, d=64)
    features = features_of(feature, shape, form, "cuda")
    check(*qkv(shape, torch.bfloat16, device="cuda"), impl="triton", also=sides(features), **features)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [8, 40, 64, 96, 128, 192, 256, 320, 512])
@pytest.mark.parametrize("form", ["columns", "scores", "shared-batches", "shared"])
def test_head_dimension_on_a_gpu(dim: int, form: str) -> None:
    shape = Shape(b=4, sq=300, sk=416, h=2, hkv=1, d=dim)
    features = features_of("causal", shape, form, "cuda")
    check(*qkv(shape, torch.bfloat16, device="cuda"), impl="triton", also=("mask",), **features)


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(16, 40), (192, 128), (64, 256)], ids=str)
def test_head_dimension_of_v_differs_on_a_gpu(dims: tuple[int, int]) -> None:
    shape = Shape(b=4, sq=300, sk=416, h=2, hkv=1, d=dims[0], dv=dims[1])
    features = features_of("causal", shape, "shared", "cuda")
    check(*qkv(shape, torch.bfloat16, device="cuda"), impl="triton", also=("mask",), **features)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=dtype_id)
@pytest.mark.parametrize("change", STRIDES.values(), ids=STRIDES.keys())
@pytest.mark.parametrize("form", ["columns", "scores", "shared-heads"])
def test_any_strides_on_a_gpu(change: Any, form: str, dtype: torch.dtype) -> None:
    """And any dtype of the mask."""
    inputs = qkv(BIG, torch.bfloat16, device="cuda")
    mask = change(float_mask(sizes(BIG, FORMS[form]), drop=0.0, dtype=dtype, device="cuda"))
    want = expected(inputs, also=("mask",), features={"mask": mask})
    view = mask.detach().requires_grad_()
    got = gradients(fk.attention(*inputs, mask=view, return_lse=True, impl="triton"), [view])
    assert got[0].shape == mask.shape and got[0].dtype == dtype
    assert_same_gradients(got, *(made[3:] for made in want), torch.bfloat16)


@pytest.mark.gpu
@each_form
def test_dropout_on_a_gpu(form: str) -> None:
    inputs = qkv(BIG, torch.bfloat16, device="cuda")
    dropped.check(*inputs, impl="triton", **features_of("causal", BIG, form, "cuda"))


@pytest.mark.gpu
@each_form
@pytest.mark.parametrize("batch", [3, 64], ids=["walked", "parts"])
def test_the_same_bits_every_time(form: str, batch: int) -> None:
    """Without `deterministic`, too."""
    shape = Shape(b=batch, sq=512, sk=1024, h=4, hkv=2, d=64) if batch < 9 else Shape(b=batch, sq=64, sk=64, h=4, d=32)
    features = features_of("causal", shape, form, "cuda")
    inputs = leaves(*qkv(shape, torch.bfloat16, device="cuda"), features.pop("mask"))
    made = []
    for _ in range(4):
        out = fk.attention(*inputs[:3], mask=inputs[3], return_lse=True, impl="triton", **features)
        made.append(gradients(out, inputs[3:])[0])
        torch.empty(1 << 26, device="cuda").fill_(NAN)  # what is not written would be seen
    assert all(torch.equal(made[0], again) for again in made[1:])


@pytest.mark.gpu
def test_a_shared_mask_takes_no_memory_of_its_users() -> None:
    """64 heads share 4096 x 4096 numbers: 4 GB of fp32 dS that are nowhere."""
    needs_memory(8)
    shape = Shape(b=16, sq=4096, sk=4096, h=4, hkv=4, d=64)
    inputs = leaves(*qkv(shape, torch.bfloat16, device="cuda"), torch.zeros(4096, 4096, device="cuda"))
    out = fk.attention(*inputs[:3], mask=inputs[3], impl="triton")
    weight = torch.ones_like(out)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    grads = torch.autograd.grad(out, inputs, weight)
    # the gradients, two numbers a row and head, and what the allocator rounds up
    assert torch.cuda.max_memory_allocated() - before < sum(g.nbytes for g in grads) + 4 * out.numel() // 8 + (32 << 20)


@pytest.mark.gpu
@each_form
def test_backward_waits_for_nothing(form: str) -> None:
    inputs = leaves(*qkv(BIG, torch.bfloat16, device="cuda"), float_mask(sizes(BIG, FORMS[form]), device="cuda"))
    for _ in range(2):  # the first time compiles
        out = fk.attention(*inputs[:3], mask=inputs[3], impl="triton")
        (weight,) = (w.to(out) for w in weights_like(out))
        with syncs_are_errors():
            torch.autograd.grad(out, inputs, weight)
