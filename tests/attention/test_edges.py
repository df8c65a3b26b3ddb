"""Calls at the edge of what attention takes: right, or refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashkernels as fk
from flashkernels import kvcache
from flashkernels.compat.flash_attn import flash_attn_func

NAN, FAR = math.nan, 2**63 - 1
CU = torch.tensor([0, 3, 7], dtype=torch.int32)
X = torch.randn(7, 2, 8)
Q = torch.randn(2, 5, 2, 8)


def qkv(*shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=gen, dtype=torch.float64).to(dtype) for _ in range(3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("seq", [1, 5, 15, 16, 17, 33])
@pytest.mark.parametrize("causal", [False, True])
def test_nan_of_few_keys_is_not_lost(dtype: torch.dtype, seq: int, causal: bool) -> None:
    """torch's fused attention on the CPU gives zeros for them."""
    for place in range(2):
        inputs = qkv(1, seq, 2, 8, dtype=dtype)
        inputs[place][:] = NAN
        assert fk.attention(*inputs, causal=causal).isnan().all()


@pytest.mark.parametrize("seq_q", [5, 8])
def test_a_window_of_64_bits_hides_nothing(seq_q: int) -> None:
    _, k, v = qkv(2, 5, 2, 8)
    q = torch.randn(2, seq_q, 2, 8)
    want = fk.attention(q, k, v, impl="torch")
    for window in ((-1, FAR), (FAR, -1), (FAR, FAR)):
        torch.testing.assert_close(fk.attention(q, k, v, window=window), want)


def test_nan_that_a_row_does_not_see_leaves_its_gradient_under_softcap() -> None:
    q, k, v = qkv(1, 5, 1, 8)
    k[0, 4] = NAN
    out = fk.attention(q.requires_grad_(), k, v, causal=True, softcap=5.0, impl="torch")
    (dq,) = torch.autograd.grad(out[:, :4].sum(), q)
    assert dq[:, :4].isfinite().all()


@pytest.mark.parametrize("value", [NAN, math.inf])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_poison_that_nobody_sees_reaches_no_gradient(which: int, value: float) -> None:
    """The first three of eight rows are before all keys; of eight keys of five rows the first is behind all windows."""
    rows, keys, hidden = (8, 5, 3) if which == 0 else (5, 8, 1)
    q, k, v = torch.randn(1, rows, 2, 8), torch.randn(1, keys, 2, 8), torch.randn(1, keys, 2, 8)

    def made() -> tuple[torch.Tensor, ...]:
        inputs = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(fk.attention(*inputs, window=(2, 0), impl="torch").square().sum(), inputs)

    clean = made()
    (q, k, v)[which][:, :hidden] = value
    torch.testing.assert_close(made(), clean, rtol=0, atol=0)


def test_autocast_around_the_backward_changes_nothing() -> None:
    def made(inside: bool) -> list[torch.Tensor]:
        inputs = [x.requires_grad_() for x in qkv(1, 64, 2, 32)]
        out = fk.attention(*inputs).pow(2).sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            out.backward()
        return [x.grad for x in inputs if x.grad is not None]

    for a, b in zip(made(False), made(True), strict=True):
        assert torch.equal(a, b)


def test_autocast_around_decode_changes_nothing() -> None:
    k, v, q = qkv(2, 16, 2, 32)
    cache = kvcache.PagedCache.contiguous(k, v, torch.tensor([16, 9], dtype=torch.int32))
    want = fk.decode(q[:, :1], cache)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fk.decode(q[:, :1], cache), want)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("impl", ["auto", "torch"])
def test_an_output_may_be_changed_in_place(layout: str, impl: str) -> None:
    x = torch.randn(2, 20, 20, 8, requires_grad=True)
    out = fk.attention(x, x, x, layout=layout, impl=impl)
    twice = torch.autograd.grad(2 * out.sum(), x, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(out.mul_(2).sum(), x), twice)


def test_gradients_without_heads() -> None:
    q, k = torch.randn(1, 3, 0, 4, requires_grad=True), torch.randn(1, 3, 1, 4, requires_grad=True)
    fk.attention(q, k, k).sum().backward()
    assert q.grad is not None and k.grad is not None and q.grad.shape == q.shape and not k.grad.any()


def test_another_default_device_is_not_used() -> None:
    pages, table = torch.randn(3, 2, 2, 8), torch.tensor([[0, 1], [2, 1]], dtype=torch.int32)
    x = torch.randn(1, 9, 2, 16)
    with torch.device("meta"):
        assert fk.attention_varlen(X, pages, pages, CU, CU, 4, 4, block_table=table).device.type == "cpu"
        assert fk.quantise_qkv(x, x, x, rotate=True)[0].device.type == "cpu"


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "sparse mask": (lambda: fk.attention(Q, Q, Q, mask=torch.ones(5, 5).to_sparse()), "mask.layout=torch.sparse_coo"),
    "sparse sinks": (lambda: fk.attention(Q, Q, Q, sinks=torch.ones(2).to_sparse()), "sinks.layout=torch.sparse_coo"),
    "softcap": (lambda: flash_attn_func(Q, Q, Q, softcap="x"), "softcap='x'"),
    "layout": (lambda: fk.explain("attention", Q, Q, Q, layout="xx"), "layout='xx'"),
    "deterministic": (lambda: fk.explain("attention", Q, Q, Q, deterministic=5), "deterministic=5"),
    "seed": (lambda: fk.explain("attention", Q, Q, Q, dropout_p=0.1, dropout_seed="x"), "dropout_seed='x'"),
    "missing": (lambda: fk.explain("attention_varlen", X, X, X, CU), "without cu_seqlens_k"),
    "half ragged": (lambda: fk.explain("attention", X, X, X, cu_seqlens_q=CU), "cu_seqlens_k must be"),
    "surplus": (lambda: fk.explain("attention_varlen", X, X, X, CU, CU, 4, 4, 5), "more than it takes"),
    "q": (lambda: fk.explain("attention", None, Q, Q, layout="bhsd"), "q must be a torch.Tensor"),
    "gpu": (lambda: fk.explain("attention", Q, Q, Q, gpu=5), "gpu=5"),
    "problem": (lambda: fk.explain("attention", problem=5), "problem must be"),
    "op": (lambda: fk.explain(["a"]), r"op=\['a'\]"),
    "no columns": (lambda: fk.quantise_qkv(Q, Q[..., :0], Q), r"k has shape \(2, 5, 2, 0\)"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "words"), BAD.values(), ids=BAD)
def test_bad_input_is_named(call: Callable[[], Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        call()


def test_explain_takes_a_list_for_a_window() -> None:
    assert fk.explain("attention", Q, Q, Q, window=[1, 1]).problem.window == (1, 1)
