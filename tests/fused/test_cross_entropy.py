"""Cross-entropy, alone and fused with the layer before it: every option against its definition, chunks, gradients that
are given away once, edges, and the registered ops under compile."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import flashkernels as fk
from flashkernels.fused.cross_entropy import linear_forward
from flashkernels.fused.problem import LossProblem
from flashkernels.fused.triton import cross_entropy as kernels

from .oracle import assert_close, run
from .test_rows import INTERPRETED, each_impl, interpreter, laid_out

loss_module = importlib.import_module("flashkernels.fused.cross_entropy")  # `fused` has the function by this name
OPTIONS: dict[str, dict[str, float]] = {
    "plain": {}, "smoothing": {"label_smoothing": 0.1}, "z-loss": {"z_loss": 0.01}, "softcap": {"softcap": 3.0},
    "all": {"label_smoothing": 0.2, "z_loss": 0.01, "softcap": 2.0},
}  # fmt: skip
each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
each_reduction = pytest.mark.parametrize("reduction", ["mean", "sum", "none"])


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Chunks of 4 tokens."""
    monkeypatch.setattr(loss_module, "LEAST_ROWS", 4)
    monkeypatch.setattr(loss_module, "CHUNKS", 100)
    monkeypatch.setattr(kernels, "LEAST_ROWS", 1)
    monkeypatch.setattr(kernels, "ROW_STEP", 4)
    monkeypatch.setattr(kernels, "MOST_ROUNDINGS", 100)
    monkeypatch.setattr(kernels, "CHUNKS", 100)
    linear_forward.known.clear()
    yield
    linear_forward.known.clear()


def reduced(losses: Tensor, targets: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (targets != -100).sum()


def truth(
    z: Tensor, targets: Tensor, reduction: str, label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float = 0.0
) -> Tensor:
    """The definition, as the cross-entropy between two distributions."""
    s = softcap * torch.tanh(z / softcap) if softcap else z
    lse = torch.log(torch.exp(s - s.amax(-1, keepdim=True)).sum(-1)) + s.amax(-1)
    kept = targets != -100
    wanted = F.one_hot(torch.where(kept, targets, 0), s.shape[-1]) * (1 - label_smoothing)
    wanted = wanted + label_smoothing / s.shape[-1]
    losses = -(wanted * (s - lse[..., None])).sum(-1) + z_loss * lse**2
    return reduced(torch.where(kept, losses, 0.0), targets, reduction)


def plain(
    z: Tensor, targets: Tensor, reduction: str, label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float = 0.0
) -> Tensor:
    """Torch's own functions on logits in their dtype; the loss in fp32."""
    z = softcap * torch.tanh(z / softcap) if softcap else z
    wide = z if z.dtype == torch.float64 else z.float()
    losses = F.cross_entropy(
        wide.flatten(0, -2), targets.flatten(), label_smoothing=label_smoothing, reduction="none"
    ).view(targets.shape)
    losses = losses + z_loss * torch.where(targets == -100, 0.0, wide.logsumexp(-1).square())
    return reduced(losses, targets, reduction)


def inputs(
    rows: tuple[int, ...], depth: int, vocab: int, dtype: torch.dtype, seed: int = 0, ignored: int = 1,
    device: str = "cpu", scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """x, weight, bias, targets; logits of about `scale`."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    made = [torch.randn(shape, generator=generator, dtype=wide) for shape in ((*rows, depth), (vocab, depth), (vocab,))]
    made[1] *= scale / max(1, depth) ** 0.5
    targets = torch.randint(0, vocab, rows, generator=generator)
    targets.view(-1)[1 : 1 + ignored] = -100
    x, weight, bias = (y.to(dtype).to(device) for y in made)
    return x, weight, bias, targets.to(device)


def top(x: Tensor) -> float:
    return x.abs().max().item()


def terms(z: Tensor, targets: Tensor, reduction: str) -> tuple[float, float]:
    """How large what cancels is: in a loss, logits and the logarithm of their sum; in its gradient by logits, a share
    of at most 1 less 1, times the gradient of the loss."""
    count = (targets != -100).sum().item()
    loss = (2 * top(z) + torch.tensor(float(z.shape[-1])).log().item()) * (targets.numel() if reduction == "sum" else 1)
    shape = targets.shape if reduction == "none" else ()
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    return loss, top(grad) / (max(1, count) if reduction == "mean" else 1)


def check_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, impl: str, reduction: str,
    options: dict[str, float],
) -> None:  # fmt: skip
    """A loss and all its gradients against the definition in fp64."""
    tensors = [x, weight, *([] if bias is None else [bias])]

    def ours(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, ...]:
        keywords: dict[str, Any] = {"bias": bias, "reduction": reduction, "impl": impl, **options}
        return (fk.fused.linear_cross_entropy(x, weight, targets, **keywords),)

    def layered(function: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, ...]]:
        return lambda x, weight, bias=None: (function(F.linear(x, weight, bias), targets, reduction, **options),)

    got, theirs = run(ours, tensors, True), run(layered(plain), tensors, True)
    want = run(layered(truth), [y.double() for y in tensors], True)
    loss, slope = terms(F.linear(*(y.double() for y in tensors)), targets, reduction)
    largest = {"loss": loss, "x": slope * top(weight), "weight": slope * top(x), "bias": slope}
    for (name, size), a, b, c in zip(largest.items(), got, theirs, want, strict=False):
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        assert a.dtype == (wide if name == "loss" else x.dtype)
        assert_close(a, b, c, x.dtype, size, name)


def check_logits(z: Tensor, targets: Tensor, impl: str, reduction: str, options: dict[str, float]) -> None:
    def ours(z: Tensor) -> tuple[Tensor, ...]:
        keywords: dict[str, Any] = {"reduction": reduction, "impl": impl, **options}
        return (fk.fused.cross_entropy(z, targets, **keywords),)

    got = run(ours, [z], True)
    theirs = run(lambda y: (plain(y, targets, reduction, **options),), [z], True)
    want = run(lambda y: (truth(y, targets, reduction, **options),), [z.double()], True)
    wide = torch.float64 if z.dtype == torch.float64 else torch.float32
    loss, slope = terms(z.double(), targets, reduction)
    assert_close(got[0], theirs[0], want[0], wide, loss, "loss")
    assert_close(got[1], theirs[1], want[1], z.dtype, slope, "logits")


# The definition


@each_impl
@each_reduction
@each_option
def test_linear(options: dict[str, float], reduction: str, impl: str, small_chunks: None) -> None:
    """Three chunks, the last of them cut off."""
    x, weight, bias, targets = inputs((10,), 16, 50, torch.float32, scale=2.0)
    check_linear(x, weight, bias, targets, impl, reduction, options)


@each_impl
@each_option
def test_logits(options: dict[str, float], impl: str) -> None:
    targets = torch.arange(6)
    targets[3] = -100
    check_logits(3 * torch.randn(6, 300), targets, impl, "mean", options)


@each_impl
def test_wide_rows(impl: str) -> None:
    """More than a program reads at a time."""
    check_logits(3 * torch.randn(3, 17_001), torch.tensor([0, 17_000, -100]), impl, "sum", OPTIONS["all"])


@st.composite
def calls(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...]) -> tuple[Any, ...]:
    rows = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)))
    depth, vocab = draw(st.sampled_from([1, 7, 32])), draw(st.sampled_from([1, 2, 9, 64, 300]))
    dtype, seed, scale = draw(st.sampled_from(dtypes)), draw(st.integers(0, 99)), draw(st.sampled_from([0.1, 3.0]))
    x, weight, bias, targets = inputs(rows, depth, vocab, dtype, seed, draw(st.integers(0, 2)), scale=scale)
    x = laid_out(x, draw(st.sampled_from(["dense", "padded", "transposed", "stepped"])))
    reduction = draw(st.sampled_from(["mean", "sum", "none"]))
    if reduction == "mean":
        targets.view(-1)[0] = 0  # one at least is not ignored
    targets = targets if draw(st.booleans()) else laid_out(targets[..., None], "padded")[..., 0]
    options = OPTIONS[draw(st.sampled_from(sorted(OPTIONS)))]
    return x, weight, draw(st.sampled_from([None, bias])), targets, reduction, options


@settings(max_examples=150)
@given(calls((torch.float16, torch.bfloat16, torch.float32, torch.float64)))
def test_torch(call: tuple[Any, ...]) -> None:
    x, weight, bias, targets, reduction, options = call
    check_linear(x, weight, bias, targets, "torch", reduction, options)
    check_logits(F.linear(x, weight, bias), targets, "torch", reduction, options)


@interpreter
@settings(max_examples=25)
@given(calls((torch.float16, torch.float32)))
def test_triton(call: tuple[Any, ...]) -> None:
    x, weight, bias, targets, reduction, options = call
    check_linear(x, weight, bias, targets, "triton", reduction, options)
    check_logits(F.linear(x, weight, bias), targets, "triton", reduction, options)


@pytest.mark.slow
@interpreter
@settings(max_examples=1000)
@given(calls((torch.float16, torch.float32)))
def test_triton_at_length(call: tuple[Any, ...]) -> None:
    x, weight, bias, targets, reduction, options = call
    check_linear(x, weight, bias, targets, "triton", reduction, options)


@each_impl
def test_a_loss_scale_does_not_cost_fp16_its_gradients(impl: str, small_chunks: None) -> None:
    """Gradients that are computed with the loss are finite and precise, whatever the caller multiplies the loss by."""
    x, weight, _, targets = inputs((10,), 8, 300, torch.float16)
    got, want = [], []
    for wide in (False, True):
        leaves = [(y.double() if wide else y).detach().requires_grad_() for y in (x, weight)]
        if wide:
            loss = truth(F.linear(*leaves), targets, "mean")
        else:
            loss = fk.fused.linear_cross_entropy(*leaves, targets, impl=impl)
        (want if wide else got).extend(torch.autograd.grad(loss * 1024, leaves))
    for a, b in zip(got, want, strict=True):
        # logits and their gradients are rounded to fp16 before the products
        assert (a - b).abs().max() <= 8 * torch.finfo(torch.float16).eps * b.abs().max()


@each_impl
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("x", "weight", "z_loss"),
    [([[0.01, 0.02]], [[2000.0, 0.0], [-1500.0, 10.0]], 0.0), ([[0.5, -0.5]], [[3.0, 1.0], [2.0, -1.0]], 100.0),
     ([[3000.0, 1.0]], [[0.001, 0.5], [-0.002, -0.5]], 0.0)],
    ids=["weight", "z-loss", "x"],
)  # fmt: skip
def test_what_fits_fp16_does_not_overflow(
    x: list[list[float]], weight: list[list[float]], z_loss: float, compiled: bool, impl: str
) -> None:
    """Gradients of a mean that are computed with the loss are stored at more than their value."""
    torch._dynamo.reset()
    leaves = [torch.tensor(y).half().requires_grad_() for y in (x, weight)]
    wide = [y.detach().double().requires_grad_() for y in leaves]
    targets = torch.tensor([1])

    def function(*y: Tensor) -> Tensor:
        return fk.fused.linear_cross_entropy(*y, targets, z_loss=z_loss, impl=impl)

    call = torch.compile(function, backend="aot_eager") if compiled else function
    got = torch.autograd.grad(call(*leaves), leaves)
    want = torch.autograd.grad(truth(F.linear(*wide), targets, "mean", z_loss=z_loss), wide)
    for a, b in zip(got, want, strict=True):
        assert b.abs().max() < 60_000 and (a - b).abs().max() <= 0.005 * b.abs().max()


@each_impl
def test_a_large_loss_scale_and_large_weights(impl: str) -> None:
    """What the backward pass multiplies by is more than fp16 holds; what it multiplies is not."""
    x, weight = torch.tensor([[2.0**-20, 0.0]]).half(), torch.tensor([[20000.0, 0.0], [0.0, 0.0]]).half()
    weight.requires_grad_()
    loss = fk.fused.linear_cross_entropy(x, weight, torch.tensor([0]), impl=impl)
    (grad,) = torch.autograd.grad(loss * 65536, weight)
    want = 65536 * 2.0**-20 * (torch.sigmoid(torch.tensor(20000 * 2.0**-20)).item() - 1)
    assert grad[:, 0].tolist() == pytest.approx([want, -want], rel=0.01) and (grad[:, 1] == 0).all()


@each_impl
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("offset", [1e6, -1e6])
def test_a_large_offset(offset: float, smoothing: float, impl: str) -> None:
    """Logits that share an offset: what is lost of them was lost when they were rounded."""
    z = (offset + torch.randn(4, 300).mul(2).mul(16).round() / 16).requires_grad_()
    targets = torch.tensor([3, 299, -100, 0])
    wide = z.detach().double().requires_grad_()
    got = fk.fused.cross_entropy(z, targets, label_smoothing=smoothing, reduction="none", impl=impl)
    want = truth(wide, targets, "none", smoothing)
    slopes = torch.autograd.grad(got.sum(), z) + torch.autograd.grad(want.sum(), wide)
    for a, b in ((got, want), slopes):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


@each_impl
@each_reduction
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_targets_of_two_dimensions_in_chunks(compiled: bool, reduction: str, impl: str, small_chunks: None) -> None:
    """Gradients that differ by row are cut into chunks as the rows are, in a repeated backward pass too."""
    torch._dynamo.reset()
    x, weight, bias, targets = inputs((2, 6), 8, 20, torch.float32)
    leaves = [y.requires_grad_() for y in (x, weight, bias)]
    wide = [y.detach().double().requires_grad_() for y in leaves]

    def function(*y: Tensor) -> Tensor:
        return fk.fused.linear_cross_entropy(y[0], y[1], targets, bias=y[2], reduction=reduction, impl=impl)

    loss = (torch.compile(function, backend="aot_eager") if compiled else function)(*leaves)
    grad = torch.randn(loss.shape, generator=torch.Generator().manual_seed(1))
    want = torch.autograd.grad(truth(F.linear(*wide), targets, reduction), wide, grad.double())
    for again in range(1 if compiled else 2):
        got = torch.autograd.grad(loss, leaves, grad, retain_graph=not again)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5)


# Gradients are given away


@each_impl
@each_reduction
def test_a_repeated_backward_pass_finds_the_same(reduction: str, impl: str, small_chunks: None) -> None:
    x, weight, bias, targets = (y.requires_grad_(y.is_floating_point()) for y in inputs((10,), 8, 20, torch.float32))
    loss = fk.fused.linear_cross_entropy(x, weight, targets, bias=bias, reduction=reduction, impl=impl)
    grad = torch.randn_like(loss)
    leaves = (x, weight, bias)
    first = [y.clone() for y in torch.autograd.grad(loss, leaves, grad, retain_graph=True)]
    halved = torch.autograd.grad(loss, leaves, grad / 2, retain_graph=True)
    again = torch.autograd.grad(loss, leaves, grad)
    for a, b, c in zip(first, halved, again, strict=True):
        torch.testing.assert_close(b, a / 2)
        torch.testing.assert_close(c, a)


def test_who_accumulates_takes_the_memory() -> None:
    """`weight.grad` is the tensor that was filled with the loss, not a copy of it."""
    x, weight, _, targets = inputs((6,), 8, 20, torch.float32)
    weight.requires_grad_()
    loss = fk.fused.linear_cross_entropy(x, weight, targets)
    kept = loss.grad_fn
    while not hasattr(kept, "grads"):
        kept = next(parent for parent, _ in kept.next_functions if parent is not None)
    place = kept.grads[1].data_ptr()
    loss.backward()
    assert weight.grad is not None and weight.grad.data_ptr() == place and kept.grads is None


@each_impl
def test_only_the_gradients_that_are_wanted(impl: str) -> None:
    x, weight, bias, targets = inputs((6,), 8, 20, torch.float32)
    whole = run(
        lambda *y: (fk.fused.linear_cross_entropy(y[0], y[1], targets, bias=y[2], impl=impl),), [x, weight, bias], True
    )
    for i, y in enumerate((x, weight, bias)):
        leaves = [x, weight, bias]
        leaves[i] = y.detach().requires_grad_()
        loss = fk.fused.linear_cross_entropy(leaves[0], leaves[1], targets, bias=leaves[2], impl=impl)
        seed = torch.randn((), generator=torch.Generator().manual_seed(9), dtype=torch.float64).float()
        (grad,) = torch.autograd.grad(loss, leaves[i], seed)
        torch.testing.assert_close(grad, whole[1 + i])


def test_the_inputs_must_not_change_before_the_backward_pass() -> None:
    x, weight, _, targets = inputs((6,), 8, 20, torch.float32)
    loss = fk.fused.linear_cross_entropy(x, weight.requires_grad_(), targets)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# Edges


@each_impl
@each_reduction
def test_all_ignored(reduction: str, impl: str) -> None:
    """The mean is NaN, as torch's; gradients are 0."""
    x, weight, bias, targets = inputs((5,), 8, 20, torch.float32)
    targets[:] = -100
    loss, *grads = run(
        lambda *y: (fk.fused.linear_cross_entropy(y[0], y[1], targets, bias=y[2], reduction=reduction, impl=impl),),
        [x, weight, bias], True,
    )  # fmt: skip
    assert loss.isnan() if reduction == "mean" else (loss == 0).all()
    assert F.cross_entropy(x, targets).isnan()
    assert all((grad == 0).all() for grad in grads)
    loss, grad = run(lambda z: (fk.fused.cross_entropy(z, targets, reduction=reduction, impl=impl),), [x], True)
    assert (loss.isnan() if reduction == "mean" else (loss == 0).all()) and (grad == 0).all()


@each_impl
def test_no_rows(impl: str) -> None:
    x, weight, bias, _ = inputs((3,), 8, 20, torch.float32)
    empty = torch.zeros(0, dtype=torch.int64)
    loss, *grads = run(
        lambda *y: (fk.fused.linear_cross_entropy(y[0][:0], y[1], empty, bias=y[2], reduction="sum", impl=impl),),
        [x, weight, bias], True,
    )  # fmt: skip
    assert loss == 0 and all((grad == 0).all() for grad in grads)


@each_impl
def test_an_ignored_row_of_nan_stays_out_of_the_logits(impl: str) -> None:
    z = torch.randn(4, 30)
    z[1] = torch.nan
    loss, grad = run(lambda y: (fk.fused.cross_entropy(y, torch.tensor([3, -100, 0, 29]), impl=impl),), [z], True)
    assert loss.isfinite() and grad.isfinite().all() and (grad[1] == 0).all()


@each_impl
def test_logits_of_minus_infinity(impl: str) -> None:
    """Classes that are masked out have no share and no gradient; a masked target costs infinity."""
    z = torch.randn(3, 300)
    z[:, ::2] = -torch.inf
    targets = torch.tensor([1, 299, 0])
    losses, grad = run(lambda y: (fk.fused.cross_entropy(y, targets, reduction="none", impl=impl),), [z], True)
    torch.testing.assert_close(losses[:2], F.cross_entropy(z, targets, reduction="none")[:2])
    assert losses[2] == torch.inf and (grad[:2, ::2] == 0).all() and grad[:2].isfinite().all()


@each_impl
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_stays_in_its_row(value: float, impl: str) -> None:
    x, weight, _, targets = inputs((5,), 8, 20, torch.float32)
    clean = fk.fused.linear_cross_entropy(x, weight, targets, reduction="none", impl=impl)
    x[2, 0] = value
    losses = fk.fused.linear_cross_entropy(x, weight, targets, reduction="none", impl=impl)
    assert losses[2].isnan()
    losses[2] = clean[2]
    assert torch.equal(losses, clean)


@each_impl
@pytest.mark.parametrize("wrong", [-1, 20, 1 << 40])
def test_targets_out_of_range(wrong: int, impl: str) -> None:
    x, weight, _, targets = inputs((5,), 8, 20, torch.float32)
    targets[3] = wrong
    with pytest.raises(ValueError, match=f"targets has {wrong}; allowed: 0 to 19, and ignore_index=-100"):
        fk.fused.linear_cross_entropy(x, weight, targets, impl=impl)
    with pytest.raises(ValueError, match=f"targets has {wrong}; allowed: 0 to 19"):
        fk.fused.cross_entropy(torch.randn(5, 20), targets, impl=impl)
    targets[1] = 0
    if wrong < 1 << 31:
        fk.fused.linear_cross_entropy(x, weight, targets.int(), ignore_index=wrong, impl=impl)


@each_impl
def test_ignored_by_a_number_that_int32_has_not(impl: str) -> None:
    """It is none of these targets, so nothing is ignored."""
    z, targets = torch.randn(4, 20), torch.tensor([5, 1, 5, 19], dtype=torch.int32)
    want = F.cross_entropy(z, targets.long())
    got = fk.fused.cross_entropy(z, targets, ignore_index=5 + 2**32, impl=impl)
    torch.testing.assert_close(got, want)
    got = fk.fused.linear_cross_entropy(z, torch.eye(20), targets, ignore_index=5 - 2**32, impl=impl)
    torch.testing.assert_close(got, want)


@each_option
def test_gradcheck(options: dict[str, float]) -> None:
    x, weight, bias, targets = inputs((4,), 3, 6, torch.float64)
    leaves = [y.requires_grad_() for y in (x, weight, bias)]
    for reduction in ("mean", "none"):
        keywords: dict[str, Any] = {"reduction": reduction, "impl": "torch", **options}
        assert torch.autograd.gradcheck(
            lambda *y, k=keywords: fk.fused.linear_cross_entropy(y[0], y[1], targets, bias=y[2], **k), leaves
        )
    assert torch.autograd.gradcheck(lambda y: fk.fused.cross_entropy(y, targets % 3, impl="torch", **options), [x])


def test_autocast() -> None:
    x, weight, _, targets = inputs((6,), 8, 20, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = fk.fused.linear_cross_entropy(x, weight.requires_grad_(), targets)
        (grad,) = torch.autograd.grad(loss, weight)
    want = fk.fused.linear_cross_entropy(x.bfloat16(), weight.bfloat16(), targets)
    assert loss.dtype == torch.float32 and torch.equal(loss, want) and grad.dtype == torch.float32


# Chunks


@given(st.integers(1, 1 << 20), st.integers(1, 300_000), st.sampled_from(["bf16", "fp32"]), st.booleans())
def test_chunks(tokens: int, vocab: int, dtype: str, need_weight: bool) -> None:
    """A quarter of the logits, or what the buffer holds; but not so many roundings of a 16-bit gradient."""
    rows = kernels.chunk_rows(LossProblem(tokens, vocab, 64, dtype, "cuda"), need_weight)
    chunks = -(-tokens // rows)
    assert rows == tokens or rows % 128 == 0
    assert rows <= max(kernels.LEAST_ROWS, tokens // 4 + 128)
    if need_weight and dtype == "bf16":
        assert chunks <= kernels.MOST_ROUNDINGS
        assert ((kernels.MOST_ROUNDINGS + 1) / 2) ** 0.5 < 2
    elif rows > kernels.LEAST_ROWS:
        assert (rows - 128) * vocab * {"bf16": 2, "fp32": 4}[dtype] <= kernels.BUFFER


def test_torch_has_a_quarter_of_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, _, targets = inputs((2050,), 4, 10, torch.float32)
    seen, terms_of = [], loss_module._terms

    def noted(z: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        seen.append(z.shape[0])
        return terms_of(z, *others)

    monkeypatch.setattr(loss_module, "_terms", noted)
    fk.fused.linear_cross_entropy(x, weight, targets, impl="torch")
    assert seen == [513, 513, 513, 511]


def test_the_peak_is_an_eighth_of_torchs() -> None:
    """Logits and their gradients of all tokens are what torch.compile holds at once."""
    rows = kernels.chunk_rows(LossProblem(8192, 128256, 4096, "bf16", "cuda"), True)
    assert rows * 128256 * 2 <= 0.15 * (2 * 8192 * 128256 * 2)


# The registered ops


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("scaled", [False, True])
def test_opcheck(scaled: bool, grad: bool) -> None:
    x, weight, bias, targets = inputs((2, 3), 4, 10, torch.float32)
    x, weight, bias = (y.requires_grad_(grad) for y in (x, weight, bias))
    scale = torch.tensor(0.5) if scaled else None
    loss = (-100, 0.1, 0.01, 2.0, "torch")
    if not (grad and scaled):  # gradients of rows that are not alike are not what `scale` is for
        args = (x, weight, bias, targets, scale, *loss, grad, grad, grad, 0)
        torch.library.opcheck(torch.ops.flashkernels.linear_cross_entropy.default, args)
    torch.library.opcheck(torch.ops.flashkernels.cross_entropy.default, (x, targets % 4, *loss))


@each_reduction
def test_compiled_once_serves_every_number_of_rows(reduction: str) -> None:
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")

    def function(x: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        loss = fk.fused.linear_cross_entropy(x * 2, weight, targets, bias=bias, reduction=reduction, z_loss=0.1)
        return loss, fk.fused.cross_entropy(F.linear(x, weight), targets, reduction=reduction)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=backend)
    counts = set()
    for rows in (5, 9, 7):
        x, weight, bias, targets = inputs((3, rows), 10, 12, torch.float32)
        found = (run(lambda *y, f=f, t=targets: f(*y, t), [x, weight, bias], True) for f in (compiled, function))
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b)
        counts.add(backend.frame_count)
    assert len(counts) == 1


# Errors


@pytest.mark.parametrize("watched", [False, True])
def test_errors_name_the_argument(watched: bool) -> None:
    x, weight, bias, targets = inputs((5,), 8, 20, torch.float32)
    x.requires_grad_(watched)

    def call(**changes: Any) -> Tensor:
        return fk.fused.linear_cross_entropy(**({"x": x, "weight": weight, "targets": targets, "bias": bias} | changes))

    cases: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (TypeError, "x must be a torch.Tensor, got int", {"x": 3}),
        (ValueError, r"weight has shape \(20, 7\); expected \(n, 8\)", {"weight": weight[:, :7]}),
        (TypeError, "weight.dtype=torch.float64 differs from x.dtype=torch.float32", {"weight": weight.double()}),
        (ValueError, r"bias has shape \(3,\); expected \(20,\)", {"bias": bias[:3]}),
        (ValueError, r"targets has shape \(4,\); expected \(5,\), the rows of x", {"targets": targets[:4]}),
        (TypeError, "targets.dtype=torch.float32 is not supported", {"targets": targets.float()}),
        (TypeError, "targets must be a torch.Tensor, got list", {"targets": [1, 2]}),
        (ValueError, "reduction='max' is not one of 'mean', 'sum', 'none'", {"reduction": "max"}),
        (ValueError, "label_smoothing=1.5 must be between 0 and 1", {"label_smoothing": 1.5}),
        (ValueError, "softcap=-1 must be 0 or positive", {"softcap": -1}),
        (TypeError, "z_loss='a' must be a number", {"z_loss": "a"}),
        (TypeError, "ignore_index=0.5 must be an int", {"ignore_index": 0.5}),
        (ValueError, f"ignore_index={2**63} does not fit torch.int64", {"ignore_index": 2**63}),
        (ValueError, "impl='cuda' is not one of 'auto', 'triton', 'torch'", {"impl": "cuda"}),
    ]
    for kind, match, changes in cases:
        with pytest.raises(kind, match=match):
            call(**changes)
    with pytest.raises(fk.UnsupportedError, match="bf16" if INTERPRETED else "needs a GPU"):
        fk.fused.cross_entropy(x.bfloat16(), targets % 8, impl="triton")
