"""`impl="aligned"`: rows that cannot be read 16 bytes at a time are copied, and others serve the copies.

Here in Triton's interpreter, in fp16, and what dispatch says of GPUs; on a GPU in test_aligned_gpu.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import flashkernels as fk
from flashkernels.attention import tensors
from flashkernels.attention.problem import AttentionProblem, BackwardProblem
from flashkernels.dispatch import UnsupportedError

from . import oracle
from .cases import EVERYTHING, Shape, interpreter, keywords, qkv, ragged
from .gradients import check as check_gradients, check_varlen as check_gradients_of
from .test_backward import sides

PROBLEM = AttentionProblem(batch=4, seq_q=4096, seq_k=4096, heads=21, kv_heads=21, head_dim=97)
WANTED = ("q", "k", "v")
DIMS = [(1, 1), (7, 7), (13, 20), (24, 33), (70, 70), (97, 40), (150, 150)]


def backward(call: AttentionProblem, impl: str = "auto") -> BackwardProblem:
    return BackwardProblem(call, WANTED, impl)


# What it computes


@interpreter
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_head_dimension(dims: tuple[int, int], layout: str) -> None:
    shape = Shape(b=2, sq=70, sk=90, h=4, hkv=2, d=dims[0], dv=dims[1])
    q, k, v = qkv(shape, torch.float16)
    given = tuple(x.transpose(1, 2).contiguous() for x in (q, k, v)) if layout == "bhsd" else (q, k, v)
    out, lse = fk.attention(*given, causal=True, layout=layout, return_lse=True, impl="aligned")
    assert out.is_contiguous()
    oracle.assert_correct(out.transpose(1, 2) if layout == "bhsd" else out, lse, q, k, v, causal=True)


@interpreter
@pytest.mark.parametrize("mask", ["boolmask", "floatmask"])
def test_every_feature_at_once(mask: str) -> None:
    shape = Shape(b=2, sq=45, sk=70, h=3, hkv=1, d=23, dv=17)
    features = keywords([*EVERYTHING, mask], shape)
    out, lse = fk.attention(*qkv(shape, torch.float16), return_lse=True, impl="aligned", **features)
    oracle.assert_correct(out, lse, *qkv(shape, torch.float16), **features)


@interpreter
def test_a_ragged_batch() -> None:
    batch = ragged([33, 0, 1, 70], [40, 9, 0, 70], Shape(b=4, h=4, hkv=2, d=23, dv=41), torch.float16)
    out, lse = fk.attention_varlen(*batch.args, causal=True, return_lse=True, impl="aligned")
    oracle.assert_correct_varlen(out, lse, *batch.tensors, causal=True)
    check_gradients_of(batch, impl="aligned", causal=True)


@interpreter
@pytest.mark.parametrize("feature", ["plain", "causal+sinks", "window+softcap", "floatmask"])
@pytest.mark.parametrize("dims", [(7, 7), (33, 20)], ids=str)
def test_gradients(dims: tuple[int, int], feature: str) -> None:
    shape = Shape(b=2, sq=40, sk=50, h=4, hkv=2, d=dims[0], dv=dims[1])
    features = keywords(feature, shape)
    check_gradients(*qkv(shape, torch.float16), impl="aligned", also=sides(features), **features)


@interpreter
def test_gradients_of_what_is_wanted() -> None:
    q, k, v = qkv(Shape(b=1, sq=20, sk=20, h=2, hkv=2, d=13), torch.float16)
    k.requires_grad_()
    fk.attention(q, k, v, impl="aligned").sum().backward()  # whose gradient is one number, expanded
    mine, k.grad = k.grad, None
    fk.attention(q, k, v, impl="torch").sum().backward()
    assert mine is not None and k.grad is not None and q.grad is None and mine.is_contiguous()
    torch.testing.assert_close(mine, k.grad, atol=2e-3, rtol=2e-2)


@interpreter
def test_dropout_drops_the_same_weights() -> None:
    inputs = qkv(Shape(b=1, sq=40, sk=50, h=2, hkv=1, d=13), torch.float16)
    mine, plain = (fk.attention(*inputs, dropout_p=0.4, dropout_seed=7, impl=impl) for impl in ("aligned", "torch"))
    torch.testing.assert_close(mine, plain, atol=2e-3, rtol=2e-2)


@interpreter
@settings(max_examples=40)
@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 5)), dim=st.integers(1, 70),
    width=st.integers(1, 80), layout=st.sampled_from(["bshd", "bhsd"]), shape=st.sampled_from(["dense", "ragged"]),
    gap=st.sampled_from([1, 2]),
)  # fmt: skip
def test_copies(
    sizes: tuple[int, int, int], dim: int, width: int, layout: str, shape: str, gap: int
) -> None:
    """Columns that are there stay, others are zeros, whatever was in memory; of any strides, in any order."""
    from flashkernels.attention.triton import copy

    x = torch.randn(*sizes[shape == "ragged" :], gap * dim)[..., ::gap].half()
    want = torch.nn.functional.pad(x, (0, width - dim))  # below 0: cut
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copy, "empty_output", lambda *of: tensors.empty_output(*of).fill_(float("nan")))
        got = copy.copier(x, width, None, layout)(x)
    assert torch.equal(got, want)
    assert got is x or got.stride() == tensors.empty_output(x, width, layout).stride()


# What dispatch says


@pytest.mark.parametrize(
    ("gpu", "dims", "columns", "by"),
    [
        ("h200", (97, 97), "104", "hopper"),
        ("a100", (97, 97), "104", "triton"),
        ("h200", (192, 100), "192 and 104", "hopper"),
        ("h200", (7, 7), "8", "triton"),
    ],
)
def test_odd_rows_are_copied(gpu: str, dims: tuple[int, int], columns: str, by: str) -> None:
    problem = replace(PROBLEM, head_dim=dims[0], head_dim_v=dims[1])
    why = fk.explain("attention", problem=problem, gpu=gpu)
    assert (why.impl, why.inner.impl) == ("aligned", by)
    odd = next(dim for dim in dims if dim % 8)
    text = f"copies: rows of {odd} columns are no multiple of 16 bytes; to {columns} columns, filled up with zeros"
    assert f"{text}, and back\nthen {by}\ntile: " in str(why)
    if gpu == "h200":
        name = "head_dim" if dims[0] % 8 else "head_dim of v"
        assert f"not hopper: {name}={odd} is not a multiple of 8: TMA cannot address its rows" in str(why)
    assert why.inner.predicted < why.predicted < 2 * why.inner.predicted
    gradients = fk.explain("attention_backward", problem=backward(problem), gpu=gpu)
    assert gradients.impl == "aligned" and gradients.inner.problem.call.head_dim % 8 == 0
    assert text in str(gradients) and (gpu == "a100" or gradients.inner.predicted < gradients.predicted)
    assert gradients.repeatable == gradients.inner.repeatable


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim": 96, "head_dim_v": 96}, "rows can be read 16 bytes at a time as they are"),
        ({"dtype": "fp32"}, "copies rows of 16-bit numbers, not of fp32"),
        ({"page_size": 64, "varlen": True, "total_q": 99, "total_k": 99}, "would copy all pages of a cache"),
        ({"head_dim": 515, "head_dim_v": 64}, "head_dim=515 is over 512"),
        ({"batch": 0}, "an empty problem has nothing to copy"),
        ({"heads": 1 << 17, "kv_heads": 1 << 17}, "has no numbers for over 2 ** 31 rows"),
    ],
    ids=str,
)
def test_it_leaves_others_alone(change: dict[str, Any], reason: str) -> None:
    why = fk.explain("attention", problem=replace(PROBLEM, **change), gpu="h200")
    assert why.impl != "aligned" and why.inner is None and f"not aligned: {reason}" in str(why)


def test_a_tile_that_is_asked_for_is_of_the_call_as_it_is() -> None:
    with fk.use_tile("standard"):
        why = fk.explain("attention", problem=PROBLEM, gpu="h200")
    assert why.impl == "triton" and "not aligned: use_tile asks for a tile of the call as it is" in str(why)


def test_what_is_asked_for_by_name_reads_rows_as_they_are() -> None:
    why = fk.explain("attention", problem=PROBLEM, gpu="h200", impl="triton")
    assert why.impl == "triton" and "no multiple of 16 bytes, so read 2 bytes at a time" in str(why)
    even = fk.explain("attention", problem=replace(PROBLEM, head_dim=72, head_dim_v=72), gpu="h200", impl="triton")
    assert "2 bytes at a time" not in str(even)
    with pytest.raises(UnsupportedError, match="aligned: rows can be read 16 bytes at a time as they are"):
        fk.explain("attention", problem=replace(PROBLEM, head_dim=72, head_dim_v=72), gpu="h200", impl="aligned")


def test_triton_makes_no_gradients_of_odd_rows_on_a_gpu() -> None:
    """Where two parts, one of 32 columns, are read an element at a time, its pass over keys ends with an illegal access
    (H200, Triton 3.6.0, 2026-11-16)."""
    for impl in ("auto", "aligned", "triton"):
        why = fk.explain("attention_backward", problem=backward(PROBLEM, impl), gpu="h200")
        assert why.impl == "aligned" and "not triton: rows of 97 columns are no multiple of 16 bytes" in str(why)
        assert "not hopper: head_dim=97 is not a multiple of 8: TMA cannot address its rows" in str(why)
        assert why.inner.impl == ("triton" if impl == "triton" else "hopper")
    lying = replace(PROBLEM, head_dim=96, head_dim_v=96, misaligned="k: the strides")
    why = fk.explain("attention_backward", problem=backward(lying), gpu="a100")
    assert why.impl == "aligned" and "not triton: k: the strides" in str(why)
    plain = fk.explain("attention_backward", problem=backward(lying, "torch"), gpu="a100")
    assert plain.impl == "torch"


@pytest.mark.parametrize(
    ("x", "aligned"),
    [
        (torch.empty(2, 4, 3, 72, dtype=torch.half), 8),
        (torch.empty(2, 4, 4, 72, dtype=torch.half), 8),
        (torch.empty(2, 4, 3, 64, dtype=torch.half), 16),
        (torch.empty(2, 4, 1, 64, dtype=torch.half).expand(2, 4, 3, 64), 16),
        (torch.empty(2, 4, 3, 70, dtype=torch.half), 1),
        (torch.empty(2, 4, 3, 70, dtype=torch.half)[..., :64], 1),
        (torch.empty(2, 4, 3, 72, dtype=torch.half)[..., 1:65], 1),
        (torch.empty(2, 4, 3, 128, dtype=torch.half)[..., ::2], 1),
    ],
)
def test_what_can_be_read_16_bytes_at_a_time(x: Tensor, aligned: int) -> None:
    assert tensors.alignment(x) == aligned
    problem = replace(PROBLEM, head_dim=64, head_dim_v=64)
    found = tensors.addressed(problem, tensors.Tensors(torch.empty(2, 4, 3, 64, dtype=torch.half), x, x))
    reason = f"k: the address or the strides {x.stride()} are no multiples of 16 bytes"
    assert found.misaligned == found.narrow == ("" if aligned > 1 else reason)
    assert not tensors.addressed(replace(problem, dtype="fp32"), tensors.Tensors(x, x, x)).misaligned
