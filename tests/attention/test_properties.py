"""Any shape with any combination of features agrees with the oracle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

import flashkernels as fk

from . import oracle
from .cases import Ragged, Shape, bool_mask, float_mask, interpreter, qkv, ragged, sinks, slopes

# The examples are the same in every run (see tests/conftest.py), unless --slow asks for new ones.
FAST, INTERPRETED = settings(max_examples=500), settings(max_examples=50)
LONG, LONG_INTERPRETED = settings(max_examples=2000), settings(max_examples=60)


@dataclass(frozen=True)
class Call:
    """Arguments of one call, kept as small numbers so that a failing example reads as one."""

    shape: Shape
    dtype: torch.dtype
    seed: int
    features: dict[str, Any]
    alibi: int  # dimensions of the slopes, 0 without
    sinks: bool
    mask: str  # "", "bool", "float"
    mask_sizes: tuple[int, ...] = ()
    layout: str = "bshd"
    transposed: bool = False  # q, k, v as transposed views of the other layout

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        if not self.transposed:
            return qkv(self.shape, self.dtype, layout=self.layout, seed=self.seed)
        other = {"bshd": "bhsd", "bhsd": "bshd"}[self.layout]
        q, k, v = (x.transpose(1, 2) for x in qkv(self.shape, self.dtype, layout=other, seed=self.seed))
        return q, k, v

    def ragged(self, lens_q: list[int], lens_k: list[int]) -> Ragged:
        return ragged(lens_q, lens_k, self.shape, self.dtype, seed=self.seed)

    def keywords(self) -> dict[str, Any]:
        keywords = dict(self.features)
        if self.alibi:
            keywords["alibi_slopes"] = slopes((self.shape.b, self.shape.h)[-self.alibi :])
        if self.sinks:
            keywords["sinks"] = sinks(self.shape.h)
        if self.mask:
            make = bool_mask if self.mask == "bool" else float_mask
            keywords["mask"] = make(self.mask_sizes, seed=self.seed)
        return keywords


def calls(
    dims: st.SearchStrategy[int], dtypes: list[torch.dtype], longest: int, *, mask: bool = True
) -> st.SearchStrategy[Call]:
    @st.composite
    def build(draw: st.DrawFn) -> Call:
        kv_heads, ratio = draw(st.integers(1, 2)), draw(st.integers(1, 4))
        shape = Shape(
            b=draw(st.integers(0, 3)),
            sq=draw(st.integers(0, longest)),
            sk=draw(st.integers(0, longest)),
            h=kv_heads * ratio,
            hkv=kv_heads,
            d=draw(dims),
            dv=draw(st.just(0) | dims),
        )
        reach = st.just(-1) | st.integers(0, longest)
        features: dict[str, Any] = {
            "causal": draw(st.booleans()),
            "window": (draw(reach), draw(reach)),
            "softcap": draw(st.sampled_from([0.0, 0.5, 3.0, 30.0])),
            "softmax_scale": draw(st.none() | st.floats(-2, 2).map(lambda x: round(x, 3))),
        }
        kind = draw(st.sampled_from(["", "", "bool", "float"])) if mask else ""
        sizes = tuple(draw(st.sampled_from([1, size])) for size in (shape.b, shape.h, shape.sq, shape.sk))
        return Call(
            shape, draw(st.sampled_from(dtypes)), draw(st.integers(0, 999)), features,
            alibi=draw(st.integers(0, 2)), sinks=draw(st.booleans()), mask=kind,
            mask_sizes=sizes[draw(st.integers(0, 4 if shape.b == 1 else 0)) :] if kind else (),
            layout=draw(st.sampled_from(["bshd", "bhsd"])), transposed=draw(st.booleans()),
        )  # fmt: skip

    return build()


def lengths(longest: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    one = st.just(0) | st.integers(0, longest)
    return st.lists(st.tuples(one, one), max_size=4)


def check_dense(call: Call, impl: str) -> None:
    q, k, v = call.tensors()
    features = {**call.keywords(), "layout": call.layout}
    out, lse = fk.attention(q, k, v, return_lse=True, impl=impl, **features)
    oracle.assert_correct(out, lse, q, k, v, **features)


def check_output_only(call: Call, impl: str) -> None:
    q, k, v = call.tensors()
    features = {**call.keywords(), "layout": call.layout}
    oracle.assert_correct(fk.attention(q, k, v, impl=impl, **features), None, q, k, v, **features)


def check_varlen(call: Call, lens: list[tuple[int, int]], impl: str) -> None:
    call = Call(**{**vars(call), "shape": call.shape.but(b=len(lens))})
    batch = call.ragged([q for q, _ in lens], [k for _, k in lens])
    out, lse = fk.attention_varlen(*batch.args, return_lse=True, impl=impl, **call.keywords())
    oracle.assert_correct_varlen(out, lse, *batch.tensors, **call.keywords())


ANY_DIM = st.integers(1, 80)
ANY_DTYPE = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
TILE_DIM = st.sampled_from([1, 5, 16, 24, 40, 48, 64, 72, 96])  # few: each part is interpreted slowly
INTERPRETED_DTYPE = [torch.float16, torch.float32]


@FAST
@given(calls(ANY_DIM, ANY_DTYPE, 40))
def test_torch_dense(call: Call) -> None:
    check_dense(call, "torch")


@FAST
@given(calls(ANY_DIM, ANY_DTYPE, 0, mask=False), lengths(30))
def test_torch_varlen(call: Call, lens: list[tuple[int, int]]) -> None:
    check_varlen(call, lens, "torch")


@FAST
@given(calls(ANY_DIM, ANY_DTYPE, 40))
def test_auto_serves_every_dense_call(call: Call) -> None:
    check_output_only(call, "auto")


@interpreter
@INTERPRETED
@given(calls(TILE_DIM, INTERPRETED_DTYPE, 100))
def test_triton_dense(call: Call) -> None:
    check_dense(call, "triton")


@interpreter
@INTERPRETED
@given(calls(TILE_DIM, INTERPRETED_DTYPE, 0, mask=False), lengths(70))
def test_triton_varlen(call: Call, lens: list[tuple[int, int]]) -> None:
    check_varlen(call, lens, "triton")


@pytest.mark.slow
@LONG
@given(calls(st.integers(1, 600), ANY_DTYPE, 200))
def test_torch_dense_at_length(call: Call) -> None:
    check_dense(call, "torch")


@pytest.mark.slow
@interpreter
@LONG_INTERPRETED
@given(calls(st.integers(1, 512), INTERPRETED_DTYPE, 200))
def test_triton_dense_at_length(call: Call) -> None:
    check_dense(call, "triton")


@pytest.mark.slow
@interpreter
@LONG_INTERPRETED
@given(calls(st.integers(1, 512), INTERPRETED_DTYPE, 0, mask=False), lengths(200))
def test_triton_varlen_at_length(call: Call, lens: list[tuple[int, int]]) -> None:
    check_varlen(call, lens, "triton")
