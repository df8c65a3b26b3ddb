"""`PagedCache`: what its tensors must be, in words, and what it says of itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flashkernels.kvcache import PagedCache

TABLE = torch.tensor([[2, 0], [1, 3]], dtype=torch.int32)


def tensors(form: str = "fp16") -> dict[str, Any]:
    cache = PagedCache.allocate(4, 8, 2, 32, 16, block_table=TABLE.clone(), format=form)
    return dict(zip(("k", "v", "block_table", "lengths", "k_scale", "v_scale"), cache.tensors, strict=True))


BAD: dict[str, tuple[str, str, Callable[[Tensor], Any], type[Exception], tuple[str, ...]]] = {
    "k-no-tensor": ("fp16", "k", lambda x: None, TypeError, ("k", "NoneType")),
    "k-of-three-dimensions": ("fp16", "k", lambda x: x[0], ValueError, ("k has shape", "(8, 2, 32)", "page_size")),
    "k-dtype": ("fp16", "k", Tensor.double, TypeError, ("k.dtype=torch.float64", "torch.float16")),
    "v-dtype": ("fp16", "v", Tensor.float, TypeError, ("v.dtype=torch.float32", "torch.float16")),
    "v-heads": ("fp16", "v", lambda x: x[:, :, :1], ValueError, ("(4, 8, 1, 16)", "(4, 8, 2, 32)")),
    "v-strides": ("fp16", "v", lambda x: x.mT.contiguous().mT, ValueError, ("v has strides", "contiguous")),
    "table-int64": ("fp16", "block_table", Tensor.long, TypeError, ("block_table.dtype=torch.int64", "int32")),
    "table-rank": ("fp16", "block_table", Tensor.flatten, ValueError, ("block_table", "(4,)", "(batch, max_pages)")),
    "table-strides": ("fp16", "block_table", lambda x: x.T.contiguous().T, ValueError, ("block_table", "contiguous")),
    "lengths-float": ("fp16", "lengths", Tensor.float, TypeError, ("lengths.dtype=torch.float32",)),
    "lengths-count": ("fp16", "lengths", lambda x: x[:1], ValueError, ("lengths has 1", "block_table has 2")),
    "scale-unasked": ("fp16", "k_scale", lambda x: torch.ones(2).half(), ValueError, ("k_scale", "torch.float16")),
    "scale-missing": ("int8", "k_scale", lambda x: None, ValueError, ("k_scale is missing", "torch.int8")),
    "scale-dtype": ("int8", "v_scale", Tensor.float, TypeError, ("v_scale.dtype=torch.float32", "torch.float16")),
    "scale-shape": ("int8", "v_scale", lambda x: x[..., None], ValueError, ("v_scale", "(4, 8, 2) or (2,)")),
    "scale-groups": ("int4", "k_scale", lambda x: x[..., 0], ValueError, ("k_scale", "(4, 8, 2, 1) or (2,)")),
    "two-kinds": ("int8", "k_scale", lambda x: x[0, 0].contiguous(), ValueError, ("(2,)", "one kind")),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_tensors_are_named(name: str) -> None:
    form, argument, change, error, words = BAD[name]
    good = tensors(form)
    with pytest.raises(error) as caught:
        PagedCache(**good | {argument: change(good[argument])})
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"format": "int4", "head_dim": 33}, "head_dim=33 must be even"),
        ({"format": "int2"}, "format='int2' is not one of"),
        ({"scales": "row"}, "scales='row' is not one of 'token', 'head'"),
        ({"page_size": 0}, "page_size=0 must be at least 1"),
        ({"head_dim": -8}, "head_dim=-8 must be at least 1"),
        ({"head_dim_v": -8}, "head_dim_v=-8 must not be negative"),
        ({"latent": True, "head_dim_v": 64}, "head_dim_v=64 is over head_dim=32"),
    ],
    ids=str,
)
def test_bad_sizes_are_named(arguments: dict[str, Any], words: str) -> None:
    sizes = {"num_pages": 4, "page_size": 8, "kv_heads": 2, "head_dim": 32} | arguments
    with pytest.raises(ValueError, match=words):
        PagedCache.allocate(block_table=TABLE, **sizes)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_of_heads_are_positive(value: float) -> None:
    cache = PagedCache.allocate(4, 8, 2, 32, block_table=TABLE, format="int8", scales="head")
    cache.check()
    assert cache.v_scale is not None
    cache.v_scale[1] = value
    with pytest.raises(ValueError, match=rf"v_scale\[1\]={value} must be positive and finite"):
        cache.check()


def test_arguments_of_another_type_are_named() -> None:
    with pytest.raises(TypeError, match=r"page_size=8.0 must be an int, got float"):
        PagedCache.allocate(4, 8.0, 2, 32, block_table=TABLE)
    with pytest.raises(TypeError, match=r"block_table must be a torch.Tensor, got list"):
        PagedCache.allocate(4, 8, 2, 32, block_table=[[0]])
    with pytest.raises(TypeError, match=r"k must be a torch.Tensor, got NoneType"):
        PagedCache.contiguous(None, torch.zeros(1), torch.zeros(1))
    cache = PagedCache.allocate(4, 8, 2, 32, block_table=TABLE)
    with pytest.raises(TypeError, match=r"tokens=1.5 must be an int"):
        cache.advance(1.5)
    with pytest.raises(ValueError, match=r"tokens is \(3,\) of torch.int64; expected an int or \(2,\)"):
        cache.advance(torch.ones(3).long())


@pytest.mark.parametrize(
    ("form", "scales", "bits"),
    [("bf16", "token", 2 * 48 * 16), ("int8", "token", 2 * (48 * 8 + 32)), ("int8", "head", 2 * 48 * 8),
     ("int4", "token", 2 * (48 * 4 + 32)), ("fp8", "token", 2 * (48 * 8 + 32))],
)  # fmt: skip
def test_bits_of_a_token(form: str, scales: str, bits: int) -> None:
    cache = PagedCache.allocate(4, 8, 2, 32, 16, block_table=TABLE, format=form, scales=scales)
    assert cache.bits_per_token == bits


def test_latent_values_are_a_view() -> None:
    cache = PagedCache.allocate(4, 8, 1, 96, 64, block_table=TABLE, format="int4", latent=True)
    assert cache.shared and cache.head_dim_v == 64 and cache.bits_per_token == 96 * 4 + 48
    assert not PagedCache.allocate(4, 8, 1, 96, block_table=TABLE).shared


@pytest.mark.parametrize(
    ("slot", "page", "lengths", "words"),
    [
        ((1, 1), 4, [16, 9], r"block_table\[1, 1\]=4 of sequence 1, slot 1, is not in 0 to 3"),
        ((0, 0), -1, [1, 0], r"block_table\[0, 0\]=-1 of sequence 0, slot 0"),
        ((0, 0), 2, [3, 17], r"lengths\[1\]=17 is not in 0 to 16"),
        ((0, 0), 2, [-1, 0], r"lengths\[0\]=-1"),
    ],
)
def test_check_names_sequence_and_slot(slot: tuple[int, int], page: int, lengths: list[int], words: str) -> None:
    table = TABLE.clone()
    table[slot] = page
    cache = PagedCache.allocate(4, 8, 1, 16, block_table=table, lengths=torch.tensor(lengths, dtype=torch.int32))
    with pytest.raises(ValueError, match=words):
        cache.check()


def test_check_names_the_first_of_many() -> None:
    table = torch.full((3, 2), 9, dtype=torch.int32)
    cache = PagedCache.allocate(4, 8, 1, 16, block_table=table, lengths=torch.tensor([0, 9, 16], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"block_table\[1, 0\]=9 of sequence 1, slot 0"):
        cache.check()


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)], ids=str)
def test_check_of_a_table_without_entries(shape: tuple[int, int]) -> None:
    cache = PagedCache.allocate(4, 8, 1, 16, block_table=torch.zeros(shape, dtype=torch.int32))
    cache.check()
    cache.lengths.add_(1)
    if shape[0]:
        with pytest.raises(ValueError, match=r"lengths\[0\]=1 is not in 0 to 0"):
            cache.check()


def test_check_ignores_entries_that_no_key_needs() -> None:
    table = torch.tensor([[2, 99], [-5, 7]], dtype=torch.int32)
    PagedCache.allocate(4, 8, 1, 16, block_table=table, lengths=torch.tensor([8, 0], dtype=torch.int32)).check()
