"""`fk.merge_states` and `fk.cascade_decode`: parts of the keys, put together, are attention over all of them."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

import flashkernels as fk
from flashkernels.kvcache import PagedCache

from .cases import cache_of, each_impl, interpreted, queries


def states(
    cuts: list[int], dtype: torch.dtype = torch.float32
) -> tuple[list[Tensor], list[Tensor], tuple[Tensor, ...]]:
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, h, 16, generator=gen).to(dtype) for n, h in ((3, 4), (cuts[-1], 2), (cuts[-1], 2)))
    parts = [fk.attention(q, k[:, a:b], v[:, a:b], return_lse=True, impl="torch") for a, b in pairwise(cuts)]
    return [part[0] for part in parts], [part[1] for part in parts], (q, k, v)


@pytest.mark.parametrize("cuts", [[0, 7], [0, 3, 7], [0, 0, 5, 5, 40]], ids=str)
@pytest.mark.parametrize("sink", [False, True], ids=["plain", "sinks"])
def test_parts_are_the_whole(cuts: list[int], sink: bool) -> None:
    outs, lses, qkv = states(cuts)
    sinks = torch.linspace(-2, 2, 4) if sink else None
    out, lse = fk.merge_states(outs, lses, sinks=sinks)
    want, want_lse = fk.attention(*qkv, sinks=sinks, return_lse=True, impl="torch")
    torch.testing.assert_close(out, want, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(lse, want_lse, atol=2e-6, rtol=2e-6)


def test_rows_without_keys_are_zero() -> None:
    empty = torch.zeros(1, 1, 2, 8), torch.full((1, 2, 1), float("-inf"))
    out, lse = fk.merge_states([empty[0]] * 3, [empty[1]] * 3)
    assert (out == 0).all() and (lse == float("-inf")).all()


def test_ragged_states() -> None:
    outs, lses, _ = states([0, 3, 7])
    flat = [o.flatten(0, 1) for o in outs], [x.transpose(0, 1).flatten(1) for x in lses]
    out, lse = fk.merge_states(*flat)
    want, want_lse = fk.merge_states(outs, lses)
    assert torch.equal(out, want.flatten(0, 1)) and torch.equal(lse, want_lse.transpose(0, 1).flatten(1))


def test_bad_states_are_named() -> None:
    outs, lses, _ = states([0, 3, 7])
    with pytest.raises(TypeError, match="outs must be a sequence of tensors, got int"):
        fk.merge_states(5, 5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="2 outputs and 1 log-sum-exps"):
        fk.merge_states(outs, lses[:1])
    with pytest.raises(ValueError, match=r"outs\[1\] is \(2, 3, 4, 8\)"):
        fk.merge_states([outs[0], outs[1][..., :8]], lses)
    with pytest.raises(ValueError, match=r"lses\[0\] has shape \(2, 3, 4\)"):
        fk.merge_states(outs, [x.transpose(1, 2) for x in lses])
    with pytest.raises(TypeError, match=r"outs\[1\] must be a torch.Tensor, got list"):
        fk.merge_states([outs[0], outs[1].tolist()], lses)
    with pytest.raises(TypeError, match=r"lses\[0\].dtype=torch.int32 must be a floating-point type"):
        fk.merge_states(outs, [x.int() for x in lses])
    with pytest.raises(TypeError, match=r"sinks must be a torch.Tensor, got list"):
        fk.merge_states(outs, lses, sinks=[1.0] * 4)
    with pytest.raises(TypeError, match=r"sinks.dtype=torch.int64 must be a floating-point type"):
        fk.merge_states(outs, lses, sinks=torch.ones(4).long())


@each_impl
@pytest.mark.parametrize("tokens", [1, 2])
def test_cascade_is_decode_over_prefix_and_rest(tokens: int, impl: str) -> None:
    """The same pages, once as prefix and rest, once as sequences that name the prefix's pages themselves."""
    together = cache_of([50, 36, 40], "fp32", page=8)
    together.block_table[:, :4] = together.block_table[0, :4].clone()
    rest = PagedCache(
        together.k, together.v, together.block_table[:, 4:].contiguous(), together.lengths - 32
    )  # fmt: skip
    prefix = PagedCache(together.k, together.v, together.block_table[:1, :4].contiguous(), torch.tensor([32]).int())
    q, sinks = queries(together, tokens), torch.linspace(-1, 1, 4)
    out, lse = fk.cascade_decode(q, prefix, rest, sinks=sinks, softcap=4.0, return_lse=True, impl=impl)
    want, want_lse = fk.decode(q, together, sinks=sinks, softcap=4.0, return_lse=True, impl="torch")
    torch.testing.assert_close(out, want, atol=2e-6, rtol=2e-6)
    torch.testing.assert_close(lse, want_lse, atol=2e-6, rtol=2e-6)


def test_prefix_is_one_sequence() -> None:
    cache = cache_of([5, 6])
    with pytest.raises(ValueError, match="prefix has 2 sequences"):
        fk.cascade_decode(queries(cache), cache, cache)


def test_caches_of_another_type_are_named() -> None:
    cache = cache_of([5])
    with pytest.raises(TypeError, match=r"prefix must be a kvcache.PagedCache, got NoneType"):
        fk.cascade_decode(queries(cache), None, cache)
    with pytest.raises(TypeError, match=r"cache must be a kvcache.PagedCache, got NoneType"):
        fk.cascade_decode(queries(cache), cache, None)


def test_what_a_part_without_keys_holds_does_not_matter() -> None:
    out, lse = torch.randn(1, 2, 3, 4), torch.randn(1, 3, 2)
    nothing = torch.full_like(out, torch.nan), torch.full_like(lse, float("-inf"))
    both, total = fk.merge_states([out, nothing[0]], [lse, nothing[1]])
    torch.testing.assert_close((both, total), (out, lse))


@pytest.mark.parametrize("sink", [None, float("-inf"), 0.5])
def test_gradients_of_rows_without_keys(sink: float | None) -> None:
    """No part has keys for the first head, one of two for the second."""
    out, lse = torch.randn(2, 1, 2, 3, 4), torch.randn(2, 1, 3, 2)
    lse[:, :, 0] = lse[0, :, 1] = float("-inf")
    out.requires_grad_()
    lse.requires_grad_()
    sinks = None if sink is None else torch.full((3,), sink, requires_grad=True)
    merged, total = fk.merge_states([*out], [*lse], sinks=sinks)
    (merged.sum() + total[total.isfinite()].sum()).backward()
    for x in (out, lse, sinks):
        assert x is None or (x.grad is not None and x.grad.isfinite().all())
    assert lse.grad is not None and not lse.grad[:, :, 0].any() and lse.grad[:, :, 2].all()


@interpreted
def test_a_cascade_is_batch_invariant() -> None:
    """A sequence alone and in company, bit for bit: also of the prefix, whose rows are those of the whole batch."""
    prefix = cache_of([300], "int8", kv_heads=1, seed=3)
    cache = cache_of([9] * 8, "int8", kv_heads=1)
    q = queries(cache, 2)
    one = PagedCache(cache.k, cache.v, cache.block_table[:1], cache.lengths[:1], cache.k_scale, cache.v_scale)
    alone = fk.cascade_decode(q[:1], prefix, one, batch_invariant=True, impl="triton")
    together = fk.cascade_decode(q, prefix, cache, batch_invariant=True, impl="triton")
    assert isinstance(alone, Tensor) and isinstance(together, Tensor) and torch.equal(alone[0], together[0])
    torch.testing.assert_close(together, fk.cascade_decode(q, prefix, cache, impl="torch"), atol=2e-3, rtol=2e-3)
