"""Fused calls at the edge of what they take: right, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashkernels as fk


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_sampling_does_not_heed_the_default_dtype(dtype: torch.dtype) -> None:
    logits = torch.tensor([[1.0, 9.0, 3.0]])
    want = fk.fused.sample(logits, temperature=0.7, top_p=0.9, seeds=1, top_n=3)
    torch.set_default_dtype(dtype)
    try:
        got = fk.fused.sample(logits, temperature=0.7, top_p=0.9, seeds=1, top_n=3)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(got.top_logprobs, want.top_logprobs) and got.logprobs.dtype == torch.float32


def overlapping() -> torch.Tensor:
    return torch.arange(40.0).as_strided((1, 3, 1, 4), (4, 2, 4, 1))


COS, SIN = fk.rope_tables(8, 4)
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "overlap": (lambda: fk.rope(overlapping(), torch.ones(1, 3, 1, 4), COS, SIN, inplace=True), "q has strides"),
    "dtype of tables": (lambda: fk.rope_tables(4, 4, dtype=torch.int32), "dtype=torch.int32"),
    "max_position": (lambda: fk.rope_tables(10**20, 4), "max_position=1000"),
    "reversed band": (
        lambda: fk.rope_tables(8, 4, scaling="yarn", factor=2.0, original_max_position=4, beta_fast=1, beta_slow=32),
        "beta_slow=32",
    ),
    "impl": (lambda: fk.softmax(torch.randn(2, 4, requires_grad=True), impl=3), "impl=3"),
    "impl of a norm": (lambda: fk.rms_norm(torch.randn(2, 4, requires_grad=True), impl=3), "impl=3"),
    "sparse": (lambda: fk.rms_norm(torch.eye(2).to_sparse()), "x.layout=torch.sparse_coo"),
    "sparse logits": (lambda: fk.fused.sample(torch.eye(2).to_sparse()), "logits.layout=torch.sparse_coo"),
    "warmup": (lambda: fk.warmup("rms_norm", hidden="a"), "hidden='a'"),
}  # fmt: skip


@pytest.mark.parametrize(("call", "words"), BAD.values(), ids=BAD)
def test_bad_input_is_named(call: Callable[[], Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        call()


def test_strides_that_interleave_share_no_memory() -> None:
    x = torch.arange(12.0).as_strided((1, 2, 1, 2), (12, 3, 12, 2))  # 0, 2, 3, 5
    cos, sin = fk.rope_tables(2, 2)
    want, _ = fk.rope(x.clone(), torch.ones(1, 2, 1, 2), cos, sin)
    got, _ = fk.rope(x, torch.ones(1, 2, 1, 2), cos, sin, inplace=True)
    torch.testing.assert_close(got, want)
