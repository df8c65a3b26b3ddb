"""`kvcache.append`: where tokens go, how they are turned and quantised; `torch`, and `triton` in its interpreter."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

import flashkernels as fk
from flashkernels import formats
from flashkernels.kvcache import PagedCache, append, gather
from flashkernels.kvcache.append import Append, _planned

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")
each_impl = pytest.mark.parametrize("impl", ["torch", pytest.param("triton", marks=interpreted)])
# the interpreter rounds FP8 wrongly
each_format = pytest.mark.parametrize("form", ["fp32", "fp16", "int8", "int4"])
LENGTHS = (9, 4, 20)


def empty(form: str = "fp32", page: int = 5, dim: int = 40, dim_v: int = 24, **more: Any) -> PagedCache:
    table = torch.randperm(12, generator=torch.Generator().manual_seed(3)).int().view(3, 4)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    return PagedCache.allocate(12, page, 2, dim, dim_v, block_table=table, lengths=lengths, format=form, **more)


def tokens(*sizes: int, dim: int = 40, dim_v: int = 24) -> tuple[Tensor, Tensor]:
    gen = torch.Generator().manual_seed(0)
    return torch.randn(*sizes, 2, dim, generator=gen), torch.randn(*sizes, 2, dim_v, generator=gen)


def rotated(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """As the definition has it, pair by pair."""
    out, half = x.clone(), cos.shape[1]
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        c, s = cos[positions, i][..., None], sin[positions, i][..., None]
        out[..., a], out[..., b] = x[..., a] * c - x[..., b] * s, x[..., b] * c + x[..., a] * s
    return out


@each_impl
@each_format
@pytest.mark.parametrize("ragged", [False, True], ids=["dense", "ragged"])
def test_newest_tokens_go_where_the_lengths_say(ragged: bool, form: str, impl: str) -> None:
    cache = empty(form)
    counts = [9, 0, 3] if ragged else [4, 4, 4]
    k, v = tokens(12) if ragged else tokens(3, 4)
    ends = torch.tensor([0, *counts]).cumsum(0).int() if ragged else None
    append(cache, k, v, cu_seqlens=ends, impl=impl)
    rows_k, rows_v = (x.flatten(0, -3) for x in (k, v))
    at = 0
    for b, (length, count) in enumerate(zip(LENGTHS, counts, strict=True)):
        for t in range(count):
            j = length - count + t
            page, slot = int(cache.block_table[b, j // 5]), j % 5
            for pages, scale, x in ((cache.k, cache.k_scale, rows_k[at]), (cache.v, cache.v_scale, rows_v[at])):
                stored, own = formats.encode(x, cache.format)
                assert torch.equal(pages[page, slot], stored)
                assert scale is None or torch.equal(scale[page, slot], own)
            at += 1


@each_impl
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])
@pytest.mark.parametrize("rotary", [40, 16])
@pytest.mark.parametrize("given", [False, True], ids=["by-place", "by-id"])
def test_rotary(given: bool, rotary: int, interleaved: bool, impl: str) -> None:
    cache = empty()
    cos, sin = fk.rope_tables(64, rotary)
    k, v = tokens(3, 4)
    place = torch.tensor(LENGTHS)[:, None] - 4 + torch.arange(4)
    ids = torch.randint(64, (3, 4)) if given else place
    append(cache, k, v, cos=cos, sin=sin, position_ids=ids if given else None, interleaved=interleaved, impl=impl)
    dense_k, dense_v = gather(cache)
    rows = torch.arange(3)[:, None]
    torch.testing.assert_close(dense_k[rows, place], rotated(k, ids, cos, sin, interleaved))
    assert torch.equal(dense_v[rows, place], v)


@each_impl
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_fixed_scales(form: str, impl: str) -> None:
    cache = empty(form, scales="head")
    assert cache.k_scale is not None and cache.v_scale is not None
    cache.k_scale.copy_(torch.tensor([0.02, 0.3]))
    cache.v_scale.copy_(torch.tensor([0.5, 0.01]))
    k, v = tokens(3, 1)
    append(cache, k, v, impl=impl)
    page, slot = int(cache.block_table[2, 3]), 4
    assert torch.equal(cache.k[page, slot], formats.encode(k[2, 0], cache.format, cache.k_scale)[0])
    assert torch.equal(cache.v[page, slot], formats.encode(v[2, 0], cache.format, cache.v_scale)[0])
    assert cache.v_scale.tolist() == torch.tensor([0.5, 0.01]).half().tolist()


@each_impl
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_nan_breaks_its_own_row_only(form: str, impl: str) -> None:
    cache = empty(form)
    k, v = tokens(3, 1)
    k[1, 0, 1, 7] = torch.nan
    append(cache, k, v, impl=impl)
    dense, _ = gather(cache)
    assert dense[1, 3, 1].isnan().all() and dense[1, 3, 0].isfinite().all() and dense[0, 8].isfinite().all()


@each_impl
def test_latent_cache_is_written_by_its_keys(impl: str) -> None:
    cache = empty("int8", latent=True)
    k, _ = tokens(3, 2)
    append(cache, k, impl=impl)
    dense_k, dense_v = gather(cache)
    assert torch.equal(dense_v[0, 7:9], dense_k[0, 7:9, :, :24]) and dense_k[0, 7:9].any()


@each_impl
def test_tokens_of_any_strides(impl: str) -> None:
    k, v = tokens(3, 4)
    plain, strided = empty(), empty()
    append(plain, k, v, impl=impl)
    append(
        strided,
        k.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        v.transpose(0, 1).contiguous().transpose(0, 1),
        impl=impl,
    )
    assert torch.equal(plain.k, strided.k) and torch.equal(plain.v, strided.v)


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no-values": ({"v": None}, ValueError, "v is missing"),
    "heads": ({"k": torch.zeros(3, 4, 1, 40)}, ValueError, r"k has shape \(3, 4, 1, 40\); expected \(3, T, 2, 40\)"),
    "batch": ({"k": torch.zeros(2, 4, 2, 40)}, ValueError, "k has batch=2, the cache has 3"),
    "rows": ({"v": torch.zeros(3, 2, 2, 24)}, ValueError, "all but D must agree"),
    "dtype": ({"k": torch.zeros(3, 4, 2, 40).double()}, TypeError, "k.dtype=torch.float64"),
    "sin-missing": ({"cos": torch.zeros(9, 20)}, ValueError, "one of them is missing"),
    "ids-alone": ({"position_ids": torch.zeros(3, 4).int()}, ValueError, "position_ids is for cos and sin"),
    "ids-no-tensor": (
        {"cos": torch.zeros(9, 20), "sin": torch.zeros(9, 20), "position_ids": [[0] * 4] * 3},
        TypeError,
        "position_ids must be a torch.Tensor, got list",
    ),
    "rotary-dim": (
        {"cos": torch.zeros(9, 20), "sin": torch.zeros(9, 20), "rotary_dim": "40"},
        TypeError,
        "rotary_dim='40' must be an int, got str",
    ),
    "interleaved": ({"interleaved": "no"}, TypeError, "interleaved='no' must be a bool, got str"),
    "cu-no-tensor": (
        {"cu_seqlens": [0, 1, 2, 4], "k": torch.zeros(4, 2, 40), "v": torch.zeros(4, 2, 24)},
        TypeError,
        "cu_seqlens must be a torch.Tensor, got list",
    ),
    "cu-elsewhere": (
        {"cu_seqlens": torch.zeros(4, device="meta").int(), "k": torch.zeros(4, 2, 40), "v": torch.zeros(4, 2, 24)},
        ValueError,
        "cu_seqlens.device=meta differs from k.device=cpu",
    ),
    "too-many": (
        {"k": torch.zeros(3, 5, 2, 40), "v": torch.zeros(3, 5, 2, 24)},
        ValueError,
        r"lengths\[1\]=4 is less than the 5",
    ),
    "cu": (
        {"cu_seqlens": torch.zeros(3).int(), "k": torch.zeros(4, 2, 40), "v": torch.zeros(4, 2, 24)},
        ValueError,
        "cu_seqlens",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_named(name: str) -> None:
    changes, error, words = BAD[name]
    k, v = tokens(3, 4)
    arguments = {"k": k, "v": v} | changes
    with pytest.raises(error, match=words):
        append(empty(), **arguments)


@each_impl
def test_wrong_table_is_named(impl: str) -> None:
    cache = empty()
    cache.block_table[2, 3] = 12
    before = cache.k.clone()
    with pytest.raises(ValueError, match=r"block_table\[2, 3\]=12 of sequence 2, slot 3, is not in 0 to 11"):
        append(cache, *tokens(3, 4), impl=impl)
    assert torch.equal(cache.k, before)


def test_compiles_whole() -> None:
    """And finds a wrong table, which it cannot read before the graph runs."""
    eager, compiled = empty("int8"), empty("int8")
    k, v = tokens(3, 4)
    step = torch.compile(lambda cache: append(cache, k, v), fullgraph=True, backend="eager")
    append(eager, k, v)
    step(compiled)
    assert torch.equal(eager.k, compiled.k) and torch.equal(eager.v_scale, compiled.v_scale)
    compiled.block_table[2, 3] = 12
    with pytest.raises(ValueError, match=r"block_table\[2, 3\]=12 of sequence 2, slot 3"):
        step(compiled)


def test_no_gradients() -> None:
    k, v = tokens(3, 1)
    with pytest.raises(fk.UnsupportedError, match="no gradients"):
        append(empty(), k.requires_grad_(), v)


def test_op_is_registered_well() -> None:
    from flashkernels.kvcache.append import append_op

    cache = empty("int8")
    k, v = tokens(3, 2)
    arguments = (cache.k, cache.v, cache.k_scale, cache.v_scale, cache.block_table, cache.lengths, k, v)
    torch.library.opcheck(append_op, (*arguments, None, None, None, None, 0, False, "auto"))


@each_impl
def test_rows_past_the_last_sequence_are_left_out(impl: str) -> None:
    """As on a GPU, where nobody reads cu_seqlens first: what lies after the table and the lengths is not ours."""
    table, lengths = torch.tensor([[0], [1]], dtype=torch.int32), torch.tensor([3, 2], dtype=torch.int32)
    pages, x = torch.zeros(2, 4, 1, 16), torch.ones(2, 1, 16)
    ends = torch.tensor([0, 1, 2], dtype=torch.int32)
    tensors = (pages, pages.clone(), None, None, table[:1], lengths[:1], x, x, None, None, None, ends[:2])
    _planned(tensors, Append(0, False, impl))
    assert pages[0, 2].all() and pages.sum() == 16


@pytest.mark.parametrize("name", ["cache.k", "cache.v", "cache.k_scale", "cache.v_scale", "k", "v", "cos", "sin"])
def test_whatever_asks_for_gradients_is_named(name: str) -> None:
    cache = empty("int8" if "scale" in name else "fp32", dim_v=40)
    k, v = tokens(3, 2, dim_v=40)
    cos, sin = fk.rope_tables(20, 40)
    given = {"k": k, "v": v, "cos": cos, "sin": sin}
    asking = getattr(cache, name[6:]) if name.startswith("cache.") else given[name]
    asking.requires_grad_()
    before = cache.k.detach().clone()
    with pytest.raises(fk.UnsupportedError, match=rf"^{name}: a cache has no gradients"):
        append(cache, **given)
    assert torch.equal(cache.k, before)
