"""Bad input raises before anything is computed, and the message names the argument and its value."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

import flashkernels as fk
import flashkernels.attention.api as api
from flashkernels import dispatch
from flashkernels.jit.eager import Plans

from .cases import Shape, interpreter, qkv, ragged

NAN, INF = float("nan"), float("inf")
IMPLS = ["auto", "torch"]


def dense(**changes: Any) -> dict[str, Any]:
    """Good arguments of fk.attention (b=2, s_q=6, s_k=8, 4 query heads on 2, d=16), but for `changes`."""
    q, k, v = qkv(Shape(b=2, sq=6, sk=8, h=4, hkv=2, d=16))
    return {"q": q, "k": k, "v": v, **changes}


def varlen(**changes: Any) -> dict[str, Any]:
    """Good arguments of fk.attention_varlen, two sequences, but for `changes`."""
    batch = ragged([2, 4], [3, 5], Shape(h=4, hkv=2, d=16))
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    return {**dict(zip(names, batch.args, strict=True)), **changes}


def says(*words: str) -> str:
    """A pattern that wants every word in the message, whole and in any order."""
    return "(?s)" + "".join(rf"(?=.*(?<!\w){re.escape(word)}(?!\w))" for word in words)


def zeros(*sizes: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(sizes, dtype=dtype, device=device)


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


BAD_DENSE: dict[str, tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = {
    # ranks and sizes
    "q-sparse": ({"q": zeros(2, 6, 4, 16).to_sparse()}, TypeError, ("q", "torch.sparse_coo")),
    "return-lse-of-1": ({"return_lse": 1}, TypeError, ("return_lse", "1")),
    "q-of-rank-3": ({"q": zeros(6, 4, 16)}, ValueError, ("q", "(6, 4, 16)")),
    "k-of-rank-5": ({"k": zeros(1, 2, 8, 2, 16)}, ValueError, ("k", "(1, 2, 8, 2, 16)")),
    "v-of-rank-3": ({"v": zeros(8, 2, 16)}, ValueError, ("v", "(8, 2, 16)")),
    "batch-of-k": ({"k": zeros(3, 8, 2, 16)}, ValueError, ("k", "3", "2")),
    "batch-of-v": ({"v": zeros(1, 8, 2, 16)}, ValueError, ("v", "1", "2")),
    "lengths-of-k-and-v": ({"v": zeros(2, 9, 2, 16)}, ValueError, ("v", "9", "8")),
    "heads-of-k-and-v": ({"v": zeros(2, 8, 4, 16)}, ValueError, ("v", "4", "2")),
    "head-dim-of-q-and-k": ({"k": zeros(2, 8, 2, 24)}, ValueError, ("k", "24", "16")),
    "heads-not-divisible": ({"q": zeros(2, 6, 5, 16)}, ValueError, ("heads", "5", "2")),
    "fewer-heads-in-q": ({"q": zeros(2, 6, 1, 16)}, ValueError, ("heads", "1", "2")),
    "no-key-heads": ({"k": zeros(2, 8, 0, 16), "v": zeros(2, 8, 0, 16)}, ValueError, ("heads", "0")),
    "head-dim-0": ({"q": zeros(2, 6, 4, 0), "k": zeros(2, 8, 2, 0)}, ValueError, ("head_dim", "0")),
    "head-dim-of-v-0": ({"v": zeros(2, 8, 2, 0)}, ValueError, ("v", "0")),
    # dtypes and devices
    "q-of-integers": ({"q": zeros(2, 6, 4, 16, dtype=torch.int32)}, TypeError, ("q", "int32")),
    "q-of-bools": ({"q": zeros(2, 6, 4, 16, dtype=torch.bool)}, TypeError, ("q", "bool")),
    "q-complex": ({"q": zeros(2, 6, 4, 16, dtype=torch.complex64)}, TypeError, ("q", "complex64")),
    "all-of-integers": (
        {name: zeros(2, 8, 2, 16, dtype=torch.int64) for name in "qkv"}, TypeError, ("q", "int64")
    ),
    "all-of-another-fp8": (
        {name: zeros(2, 8, 2, 16).to(torch.float8_e5m2) for name in "qkv"}, TypeError, ("q", "float8_e5m2")
    ),
    "dtype-of-k": ({"k": zeros(2, 8, 2, 16, dtype=torch.float16)}, TypeError, ("k", "float16", "float32")),
    "dtype-of-v": ({"v": zeros(2, 8, 2, 16, dtype=torch.bfloat16)}, TypeError, ("v", "bfloat16", "float32")),
    "device-of-k": ({"k": zeros(2, 8, 2, 16, device="meta")}, ValueError, ("k", "meta", "cpu")),
    "device-of-v": ({"v": zeros(2, 8, 2, 16, device="meta")}, ValueError, ("v", "meta", "cpu")),
    "q-not-a-tensor": ({"q": [[1.0]]}, TypeError, ("q", "list")),
    "q-none": ({"q": None}, TypeError, ("q", "NoneType")),
    "k-none": ({"k": None}, TypeError, ("k", "NoneType")),
    "v-none": ({"v": None}, TypeError, ("v", "NoneType")),
    # scale and softcap
    "scale-nan": ({"softmax_scale": NAN}, ValueError, ("softmax_scale", "nan")),
    "scale-inf": ({"softmax_scale": INF}, ValueError, ("softmax_scale", "inf")),
    "scale-minus-inf": ({"softmax_scale": -INF}, ValueError, ("softmax_scale", "-inf")),
    "scale-a-string": ({"softmax_scale": "0.5"}, TypeError, ("softmax_scale", "0.5")),
    "scale-a-bool": ({"softmax_scale": True}, TypeError, ("softmax_scale", "True")),
    "softcap-negative": ({"softcap": -1.5}, ValueError, ("softcap", "-1.5")),
    "softcap-nan": ({"softcap": NAN}, ValueError, ("softcap", "nan")),
    "softcap-inf": ({"softcap": INF}, ValueError, ("softcap", "inf")),
    "softcap-none": ({"softcap": None}, TypeError, ("softcap", "None")),
    # window
    "window-below-minus-one": ({"window": (-2, 0)}, ValueError, ("window", "-2")),
    "window-right-below-minus-one": ({"window": (4, -7)}, ValueError, ("window", "-7")),
    "window-of-one": ({"window": (4,)}, ValueError, ("window", "(4,)")),
    "window-of-three": ({"window": (4, 4, 4)}, ValueError, ("window", "(4, 4, 4)")),
    "window-an-int": ({"window": 128}, TypeError, ("window", "128")),
    "window-of-floats": ({"window": (1.5, 0)}, TypeError, ("window", "1.5")),
    "window-none": ({"window": None}, TypeError, ("window", "None")),
    # ALiBi and sinks
    "slopes-too-few": ({"alibi_slopes": zeros(3)}, ValueError, ("alibi_slopes", "(3,)")),
    "slopes-of-key-heads": ({"alibi_slopes": zeros(2)}, ValueError, ("alibi_slopes", "(2,)")),
    "slopes-other-batch": ({"alibi_slopes": zeros(3, 4)}, ValueError, ("alibi_slopes", "(3, 4)")),
    "slopes-of-rank-3": ({"alibi_slopes": zeros(2, 4, 1)}, ValueError, ("alibi_slopes", "(2, 4, 1)")),
    "slopes-of-integers": ({"alibi_slopes": zeros(4, dtype=torch.int64)}, TypeError, ("alibi_slopes", "int64")),
    "slopes-elsewhere": ({"alibi_slopes": zeros(4, device="meta")}, ValueError, ("alibi_slopes", "meta")),
    "slopes-a-list": ({"alibi_slopes": [0.5] * 4}, TypeError, ("alibi_slopes", "list")),
    "sinks-too-many": ({"sinks": zeros(5)}, ValueError, ("sinks", "(5,)")),
    "sinks-of-rank-2": ({"sinks": zeros(2, 4)}, ValueError, ("sinks", "(2, 4)")),
    "sinks-of-integers": ({"sinks": zeros(4, dtype=torch.int32)}, TypeError, ("sinks", "int32")),
    "sinks-elsewhere": ({"sinks": zeros(4, device="meta")}, ValueError, ("sinks", "meta")),
    "sinks-a-number": ({"sinks": 0.5}, TypeError, ("sinks", "float")),
    # mask
    "mask-other-keys": ({"mask": zeros(6, 9)}, ValueError, ("mask", "(6, 9)", "(2, 4, 6, 8)")),
    "mask-other-queries": ({"mask": zeros(2, 4, 5, 8)}, ValueError, ("mask", "(2, 4, 5, 8)")),
    "mask-of-key-heads": ({"mask": zeros(2, 2, 6, 8)}, ValueError, ("mask", "(2, 2, 6, 8)")),
    "mask-other-batch": ({"mask": zeros(3, 1, 1, 8)}, ValueError, ("mask", "(3, 1, 1, 8)")),
    "mask-of-rank-5": ({"mask": zeros(1, 2, 4, 6, 8)}, ValueError, ("mask", "(1, 2, 4, 6, 8)")),
    "mask-of-integers": ({"mask": zeros(6, 8, dtype=torch.int64)}, TypeError, ("mask", "int64")),
    "mask-of-bytes": ({"mask": zeros(6, 8, dtype=torch.uint8)}, TypeError, ("mask", "uint8")),
    "mask-elsewhere": ({"mask": zeros(6, 8, device="meta")}, ValueError, ("mask", "meta")),
    "mask-a-list": ({"mask": [True]}, TypeError, ("mask", "list")),
    # words
    "layout-unknown": ({"layout": "sbhd"}, ValueError, ("layout", "sbhd", "bshd", "bhsd")),
    "impl-unknown": ({"impl": "fastest"}, ValueError, ("impl", "fastest", "torch")),
    # numbers that fp32 has not
    "scale-beyond-fp32": ({"softmax_scale": 1e39}, ValueError, ("softmax_scale", "1e+39", "fp32")),
    "softcap-beyond-fp32": ({"softcap": 1e39}, ValueError, ("softcap", "1e+39", "fp32")),
    "softcap-too-small": ({"softcap": 1e-40}, ValueError, ("softcap", "1e-40", "too small")),
    "impl-a-list": ({"impl": ["torch"]}, ValueError, ("impl", "torch")),
    # arrays, which Python cannot compare with what a call before had
    "layout-an-array": ({"layout": np.ones(2)}, ValueError, ("layout", "array")),
    "mask-an-array": ({"mask": np.ones((6, 8))}, TypeError, ("mask", "ndarray")),
    "scale-an-array": ({"softmax_scale": np.ones(2)}, TypeError, ("softmax_scale", "ndarray")),
    "softcap-an-array": ({"softcap": np.ones(2)}, TypeError, ("softcap", "ndarray")),
    "causal-an-array": ({"causal": np.ones(2)}, TypeError, ("causal", "ndarray")),
    "return-lse-an-array": ({"return_lse": np.ones(2)}, TypeError, ("return_lse", "ndarray")),
    "return-lse-a-number": ({"return_lse": 1}, TypeError, ("return_lse", "int")),
    "dropout-an-array": ({"dropout_p": np.ones(2)}, TypeError, ("dropout_p", "ndarray")),
    "deterministic-an-array": ({"deterministic": np.ones(2)}, TypeError, ("deterministic", "ndarray")),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_DENSE.values(), ids=BAD_DENSE.keys())
@pytest.mark.parametrize("impl", IMPLS)
def test_bad_dense_argument(case: tuple[dict[str, Any], type[Exception], tuple[str, ...]], impl: str) -> None:
    changes, error, words = case
    with pytest.raises(error, match=says(*words)):
        fk.attention(**{"impl": impl, **dense(**changes)})


@pytest.mark.parametrize("grad", [False, True], ids=["plain", "training"])
@pytest.mark.parametrize("case", BAD_DENSE.values(), ids=BAD_DENSE.keys())
def test_bad_dense_argument_after_a_good_call(
    case: tuple[dict[str, Any], type[Exception], tuple[str, ...]], grad: bool
) -> None:
    changes, error, words = case

    def followed(arguments: dict[str, Any]) -> dict[str, Any]:
        floats = {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
        return arguments | {name: x.detach().requires_grad_(grad) for name, x in floats.items()}

    fk.attention(**followed(dense()), impl="torch")
    with pytest.raises(error, match=says(*words)):
        fk.attention(**{"impl": "torch", **followed(dense(**changes))})


def test_bad_size_in_the_other_layout_is_read_in_that_layout() -> None:
    q, k, v = qkv(Shape(b=2, sq=6, sk=8, h=4, hkv=2), layout="bhsd")
    fk.attention(q, k, v, layout="bhsd", impl="torch")
    with pytest.raises(ValueError, match=says("heads", "4", "3")):
        fk.attention(q, zeros(2, 3, 8, 16), zeros(2, 3, 8, 16), layout="bhsd", impl="torch")


BAD_VARLEN: dict[str, tuple[dict[str, Any], type[Exception], tuple[str, ...]]] = {
    "q-of-rank-4": ({"q": zeros(1, 6, 4, 16)}, ValueError, ("q", "(1, 6, 4, 16)")),
    "k-of-rank-2": ({"k": zeros(8, 16)}, ValueError, ("k", "(8, 16)")),
    "totals-of-k-and-v": ({"v": zeros(9, 2, 16)}, ValueError, ("v", "9", "8")),
    "head-dim-of-q-and-k": ({"k": zeros(8, 2, 24)}, ValueError, ("k", "24", "16")),
    "heads-not-divisible": ({"q": zeros(6, 5, 16)}, ValueError, ("heads", "5", "2")),
    "dtype-of-k": ({"k": zeros(8, 2, 16, dtype=torch.float16)}, TypeError, ("k", "float16")),
    "device-of-v": ({"v": zeros(8, 2, 16, device="meta")}, ValueError, ("v", "meta")),
    "cu-q-int64": ({"cu_seqlens_q": int32(0, 2, 6).long()}, TypeError, ("cu_seqlens_q", "int64", "int32")),
    "cu-k-float": ({"cu_seqlens_k": int32(0, 3, 8).float()}, TypeError, ("cu_seqlens_k", "float32", "int32")),
    "cu-q-of-rank-2": ({"cu_seqlens_q": int32(0, 2, 6)[None]}, ValueError, ("cu_seqlens_q", "(1, 3)")),
    "cu-q-of-rank-0": ({"cu_seqlens_q": torch.tensor(0, dtype=torch.int32)}, ValueError, ("cu_seqlens_q", "()")),
    "cu-q-empty": (
        {"cu_seqlens_q": int32(), "cu_seqlens_k": int32()}, ValueError, ("cu_seqlens_q", "(0,)")
    ),
    "cu-lengths-differ": ({"cu_seqlens_k": int32(0, 3, 5, 8)}, ValueError, ("cu_seqlens_k", "4", "3")),
    "cu-q-decreasing": ({"cu_seqlens_q": int32(0, 7, 6)}, ValueError, ("cu_seqlens_q", "7")),
    "cu-k-decreasing": ({"cu_seqlens_k": int32(0, 9, 8)}, ValueError, ("cu_seqlens_k", "9")),
    "cu-q-decreasing-within-max": (
        {"cu_seqlens_q": int32(0, 4, 3, 6), "cu_seqlens_k": int32(0, 3, 3, 8)}, ValueError, ("cu_seqlens_q", "4, 3")
    ),
    "cu-q-not-from-0": ({"cu_seqlens_q": int32(1, 2, 6)}, ValueError, ("cu_seqlens_q", "1")),
    "cu-q-negative": ({"cu_seqlens_q": int32(-1, 2, 6)}, ValueError, ("cu_seqlens_q", "-1")),
    "cu-q-past-the-end": ({"cu_seqlens_q": int32(0, 2, 7)}, ValueError, ("cu_seqlens_q", "7", "6")),
    "cu-k-short-of-the-end": ({"cu_seqlens_k": int32(0, 3, 7)}, ValueError, ("cu_seqlens_k", "7", "8")),
    "cu-q-elsewhere": (
        {"cu_seqlens_q": zeros(3, dtype=torch.int32, device="meta")}, ValueError, ("cu_seqlens_q", "meta")
    ),
    "cu-k-a-list": ({"cu_seqlens_k": [0, 3, 8]}, TypeError, ("cu_seqlens_k", "list")),
    "max-q-negative": ({"max_seqlen_q": -1}, ValueError, ("max_seqlen_q", "-1")),
    "max-k-negative": ({"max_seqlen_k": -3}, ValueError, ("max_seqlen_k", "-3")),
    "max-q-a-float": ({"max_seqlen_q": 4.0}, TypeError, ("max_seqlen_q", "4.0")),
    "max-k-a-bool": ({"max_seqlen_k": True}, TypeError, ("max_seqlen_k", "True")),
    "max-q-a-tensor": ({"max_seqlen_q": torch.tensor(4)}, TypeError, ("max_seqlen_q", "4")),
    "max-q-none": ({"max_seqlen_q": None}, TypeError, ("max_seqlen_q", "None")),
    "max-q-too-small": ({"max_seqlen_q": 3}, ValueError, ("max_seqlen_q", "3", "4")),
    "max-k-too-small": ({"max_seqlen_k": 4}, ValueError, ("max_seqlen_k", "4", "5")),
    "slopes-other-batch": ({"alibi_slopes": zeros(3, 4)}, ValueError, ("alibi_slopes", "(3, 4)")),
    "sinks-too-many": ({"sinks": zeros(5)}, ValueError, ("sinks", "(5,)")),
    "window-below-minus-one": ({"window": (-2, 0)}, ValueError, ("window", "-2")),
    "window-of-many-bits": ({"window": (1 << 70, 0)}, ValueError, ("window", "64 bits")),
    "scale-nan": ({"softmax_scale": NAN}, ValueError, ("softmax_scale", "nan")),
    "softcap-negative": ({"softcap": -1.5}, ValueError, ("softcap", "-1.5")),
    "impl-unknown": ({"impl": "fastest"}, ValueError, ("impl", "fastest")),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_VARLEN.values(), ids=BAD_VARLEN.keys())
@pytest.mark.parametrize("impl", IMPLS)
def test_bad_varlen_argument(case: tuple[dict[str, Any], type[Exception], tuple[str, ...]], impl: str) -> None:
    changes, error, words = case
    with pytest.raises(error, match=says(*words)):
        fk.attention_varlen(**{"impl": impl, **varlen(**changes)})


EQUAL_TO_GOOD: dict[str, tuple[str, Any, Any]] = {  # argument, good value, bad value that Python finds equal to it
    "scale": ("softmax_scale", 1.0, True),
    "softcap": ("softcap", 1.0, True),
    "window": ("window", (1, 0), (1.0, 0)),
    "max-seqlen": ("max_seqlen_q", 6, 6.0),
}


@pytest.mark.parametrize("case", EQUAL_TO_GOOD.values(), ids=EQUAL_TO_GOOD.keys())
def test_bad_argument_is_refused_also_after_a_good_call_with_an_equal_one(case: tuple[str, Any, Any]) -> None:
    name, good, bad = case
    fk.attention_varlen(**varlen(**{name: good}), impl="torch")
    with pytest.raises(TypeError, match=says(name)):
        fk.attention_varlen(**varlen(**{name: bad}), impl="torch")


def test_varlen_takes_no_mask() -> None:
    with pytest.raises(TypeError, match="mask"):
        fk.attention_varlen(**varlen(), mask=zeros(6, 8))


def test_options_are_keywords_only() -> None:
    with pytest.raises(TypeError, match="positional"):
        fk.attention(*dense().values(), True)
    with pytest.raises(TypeError, match="positional"):
        fk.attention_varlen(*varlen().values(), True)


def test_the_good_arguments_are_good() -> None:
    """Otherwise the cases above could fail for another reason."""
    assert fk.attention(**dense()).shape == (2, 6, 4, 16)
    assert fk.attention_varlen(**varlen()).shape == (6, 4, 16)
    integers = fk.attention(**dense(), softmax_scale=1, softcap=30, window=[3, 0])
    assert torch.equal(integers, fk.attention(**dense(), softmax_scale=1.0, softcap=30.0, window=(3, 0)))


# Good input that one implementation cannot serve


def test_unsupported_is_a_value_error() -> None:
    assert issubclass(fk.UnsupportedError, ValueError) and issubclass(fk.TilingError, ValueError)


SDPA_CANNOT: dict[str, tuple[dict[str, Any], str]] = {
    "softcap": ({"softcap": 2.0}, "softcap"),
    "alibi": ({"alibi_slopes": zeros(4)}, "alibi"),
    "sinks": ({"sinks": zeros(4)}, "sinks"),
    "window": ({"window": (2, 0)}, "window"),
    "lse": ({"return_lse": True}, "log-sum-exp"),
}


@pytest.mark.parametrize("case", SDPA_CANNOT.values(), ids=SDPA_CANNOT.keys())
def test_sdpa_says_what_it_cannot_do(case: tuple[dict[str, Any], str]) -> None:
    changes, word = case
    with pytest.raises(fk.UnsupportedError, match=f"(?is)sdpa.*{word}"):
        fk.attention(**dense(**changes), impl="sdpa")


def test_triton_without_the_interpreter_refuses_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "interpreting", lambda: False)
    monkeypatch.setattr(api, "_plans", Plans(api._plan))
    with pytest.raises(fk.UnsupportedError, match=r"(?is)triton.*(cuda|gpu)"):
        fk.attention(**dense(), impl="triton")


@interpreter
class TestTritonCannot:
    @pytest.mark.parametrize("dim", [513, 600, 4096])
    def test_head_dim_above_512(self, dim: int) -> None:
        q, k, v = qkv(Shape(b=1, sq=2, sk=2, h=1, hkv=1, d=dim))
        with pytest.raises(fk.UnsupportedError, match=says("triton", str(dim), "512")):
            fk.attention(q, k, v, impl="triton")

    def test_head_dim_of_v_above_512(self) -> None:
        q, k, v = qkv(Shape(b=1, sq=2, sk=2, h=1, hkv=1, d=16, dv=513))
        with pytest.raises(fk.UnsupportedError, match=says("triton", "513", "512")):
            fk.attention(q, k, v, impl="triton")

    def test_fp64(self) -> None:
        q, k, v = qkv(Shape(b=1, sq=2, sk=2, h=1, hkv=1), torch.float64)
        with pytest.raises(fk.UnsupportedError, match=says("triton", "fp64")):
            fk.attention(q, k, v, impl="triton")

    @pytest.mark.parametrize(
        "name", ["head-dim-0", "heads-not-divisible", "dtype-of-k", "mask-other-keys", "window-of-one"]
    )
    def test_bad_input_is_refused_as_by_every_other(self, name: str) -> None:
        changes, error, words = BAD_DENSE[name]
        with pytest.raises(error, match=says(*words)):
            fk.attention(**dense(**changes), impl="triton")


def test_auto_takes_what_triton_and_sdpa_refuse() -> None:
    q, k, v = qkv(Shape(b=1, sq=2, sk=2, h=1, hkv=1, d=600), torch.float64)
    assert fk.attention(q, k, v, softcap=2.0).shape == q.shape


def test_module_refuses_bad_options_when_made_or_called() -> None:
    with pytest.raises(ValueError, match=says("window", "-2")):
        fk.Attention(window=(-2, 0))(*dense().values())
