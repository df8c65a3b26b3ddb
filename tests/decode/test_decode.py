"""`fk.decode` against the oracle: `torch`, and `triton` in its interpreter, at sizes that do not fill its tiles.

fp16 and fp32 only: the interpreter's bf16 arithmetic is wrong, so bf16 is tested on a GPU (test_gpu.py).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings, strategies as st

import flashkernels as fk
from flashkernels.decode.api import run
from flashkernels.decode.tensors import Call
from flashkernels.decode.triton import decode as portable, tiles
from flashkernels.decode.triton.parts import pages_of
from flashkernels.kvcache import PagedCache
from flashkernels.tiling import use_tile

from . import oracle
from .cases import INTERPRETED, QUANTISED, cache_of, check, each_impl, interpreted, queries

LENGTHS = [0, 1, 90, 5, 0, 64]
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "full": {"causal": False},
    "window": {"window": (20, -1)},
    "band": {"causal": False, "window": (9, 1)},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi_slopes": torch.linspace(0.02, 0.3, 4)},
    "alibi-of-each": {"alibi_slopes": torch.linspace(0.02, 0.3, 24).view(6, 4)},
    "sinks": {"sinks": torch.tensor([-1.0, 0.5, 3.0, float("-inf")])},
    "scale": {"softmax_scale": -0.3},
    "invariant": {"batch_invariant": True},
    "tree": {"tree_mask": torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()},
    "tree-with-a-window": {"tree_mask": torch.ones(3, 3).bool(), "window": (30, 1)},
    "everything": {
        "window": (40, -1),
        "softcap": 3.0,
        "alibi_slopes": torch.linspace(0.02, 0.3, 4),
        "sinks": torch.ones(4),
    },
}


@each_impl
@pytest.mark.parametrize("feature", FEATURES)
def test_feature(feature: str, impl: str) -> None:
    cache = cache_of(LENGTHS)
    check(queries(cache, 3), cache, impl, **FEATURES[feature])


@each_impl
@pytest.mark.parametrize("scales", ["token", "head"])
@pytest.mark.parametrize("form", QUANTISED)
def test_format(form: str, scales: str, impl: str) -> None:
    cache = cache_of([0, 1, 140], form, scales=scales, dim=40)
    check(queries(cache, 2), cache, impl)
    check(queries(cache, 1, dtype=torch.float32), cache, impl, sinks=torch.ones(4))


@each_impl
@pytest.mark.parametrize("dim", [16, 18, 31, 72, 130])
def test_head_dimension(dim: int, impl: str) -> None:
    cache = cache_of([37, 70], dim=dim, dim_v=dim + 6)
    check(queries(cache), cache, impl)
    for form in ("int8", "int4") if dim % 2 == 0 else ("int8",):
        cache = cache_of([37, 70], form, dim=dim, dim_v=dim + 6)
        check(queries(cache), cache, impl)


@each_impl
@pytest.mark.parametrize(
    ("heads", "tokens"), [((1, 1), 16), ((7, 1), 1), ((6, 2), 5), ((20, 1), 2), ((3, 3), 3)], ids=str
)
def test_rows(heads: tuple[int, int], tokens: int, impl: str) -> None:
    cache = cache_of([33, 3], kv_heads=heads[1], dim=16)
    check(queries(cache, tokens, heads[0]), cache, impl)


@each_impl
@pytest.mark.parametrize("page", [1, 3, 16, 64, 200])
def test_page_size(page: int, impl: str) -> None:
    cache = cache_of([0, page - 1, page, page + 1, 100], page=page, dim=16, kv_heads=1)
    check(queries(cache, 3), cache, impl, window=(30, -1))


@each_impl
@pytest.mark.parametrize("form", ["fp16", "int8", "int4"])
def test_values_that_are_columns_of_the_keys(form: str, impl: str) -> None:
    cache = cache_of([70, 1], form, kv_heads=1, dim=96, dim_v=64, latent=True)
    assert cache.shared
    check(queries(cache, 1, 20), cache, impl)


@each_impl
@pytest.mark.parametrize("form", ["fp16", "int8"])
def test_latent_of_576_with_values_of_512(form: str, impl: str) -> None:
    """As MLA has it: one KV head, many query heads, the values are the first columns of the keys."""
    cache = cache_of([33, 0], form, kv_heads=1, dim=576, dim_v=512, latent=True)
    assert cache.shared and cache.head_dim_v == 512
    check(queries(cache, 1, 17), cache, impl)


@each_impl
@pytest.mark.parametrize("form", ["fp16", "int4"])
def test_where_pages_lie_changes_nothing(form: str, impl: str) -> None:
    """The same keys behind another permutation of the pages, bit for bit; two sequences may also share theirs."""
    cache = cache_of([70, 33, 70], form, dim=16, kv_heads=1)
    cache.block_table[2] = cache.block_table[0]
    order = torch.randperm(cache.k.shape[0], generator=torch.Generator().manual_seed(9))
    moved = [x if x is None else torch.empty_like(x) for x in (cache.k, cache.v, cache.k_scale, cache.v_scale)]
    for new, old in zip(moved, (cache.k, cache.v, cache.k_scale, cache.v_scale), strict=True):
        if new is not None and old is not None:
            new[order] = old
    table = order.int()[cache.block_table.long()]
    k, v, k_scale, v_scale = moved
    assert k is not None and v is not None
    other = PagedCache(k, v, table, cache.lengths, k_scale, v_scale)
    q = queries(cache)
    q[2] = q[0]
    out = fk.decode(q, cache, impl=impl)
    assert torch.equal(out, fk.decode(q, other, impl=impl)) and torch.equal(out[2], out[0])


@each_impl
def test_contiguous_cache(impl: str) -> None:
    k, v = torch.randn(2, 3, 90, 2, 24, generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([90, 5, 0], dtype=torch.int32)
    for b, length in enumerate(lengths.tolist()):
        k[b, length:], v[b, length:] = torch.nan, torch.nan
    cache = PagedCache.contiguous(k, v, lengths)
    check(queries(cache, 2), cache, impl)


@each_impl
def test_contiguous_cache_of_eight_bits(impl: str) -> None:
    k, v = torch.randint(-127, 128, (2, 2, 40, 2, 24), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    scales = torch.linspace(0.005, 0.02, 160).view(2, 40, 2).half()
    cache = PagedCache.contiguous(k, v, torch.tensor([40, 3], dtype=torch.int32), scales, scales.flip(1).contiguous())
    check(queries(cache, 2, dtype=torch.float16), cache, impl)


@each_impl
@pytest.mark.parametrize("form", ["fp16", "int8", "int4"])
def test_nan_reaches_those_who_see_it_and_nobody_else(form: str, impl: str) -> None:
    """The last of three tokens has NaN: the two before it do not see it, nor does the other head."""
    cache = cache_of([40, 33], form)
    page, slot = int(cache.block_table[0, 39 // 16]), 39 % 16
    for pages, scale in ((cache.k, cache.k_scale), (cache.v, cache.v_scale)):
        (pages if scale is None else scale)[page, slot, 0] = torch.nan
    out, lse = fk.decode(queries(cache, 3), cache, return_lse=True, impl=impl)
    assert out[0, 2, :2].isnan().all() and lse[0, :2, 2].isnan().all()
    rest = out.clone()
    rest[0, 2, :2] = 0
    assert rest.isfinite().all()


@each_impl
def test_infinity_in_a_value(impl: str) -> None:
    cache = cache_of([40], dim=16)
    cache.v[int(cache.block_table[0, 2]), 7, 0, 5] = float("inf")  # of the newest key
    out = fk.decode(queries(cache, 2), cache, impl=impl)
    assert out[0, 0].isfinite().all() and (out[0, 1, :2, 5] == float("inf")).all()


@each_impl
@pytest.mark.parametrize("keys", [1, 20, 200])
@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_values_whose_scale_is_zero(form: str, keys: int, impl: str) -> None:
    """Of the first keys, of which a part of the work may see no other; the others may have a negative one."""
    cache = cache_of([200], form, dim=16)
    assert cache.v_scale is not None
    for j in range(200):
        cache.v_scale[int(cache.block_table[0, j // 16]), j % 16] *= 0.0 if j < keys else (-1.0) ** j
    check(queries(cache), cache, impl)


@each_impl
@pytest.mark.parametrize("scales", ["token", "head"])
@pytest.mark.parametrize("form", ["fp8", "fp8_e5m2"])
@pytest.mark.parametrize("odd", [False, True], ids=["words", "bytes"])
def test_a_nan_of_eight_bits_reaches_those_who_see_it(odd: bool, form: str, scales: str, impl: str) -> None:
    """In one column of the newest value, which the first of two tokens does not see."""
    cache = cache_of([40, 33], form, scales=scales, dim=19 if odd else 32)
    cache.v.view(torch.uint8)[int(cache.block_table[0, 2]), 7, 0, 5] = 0x7F
    q = queries(cache, 2)
    out = fk.decode(q, cache, impl=impl)
    assert out[0, 1, :2, 5].isnan().all() and out.isnan().sum() == 2
    cache.v.view(torch.uint8)[int(cache.block_table[0, 2]), 7, 0, 5] = 0
    want = fk.decode(q, cache, impl="torch")
    out[0, 1, :2, 5] = want[0, 1, :2, 5]
    torch.testing.assert_close(out, want, atol=2e-3, rtol=2e-3)


@each_impl
@pytest.mark.parametrize("form", ["fp16", "fp8", "int8"])
def test_a_tree_hides_the_newest_of_one_token(form: str, impl: str) -> None:
    cache = cache_of([20], form, dim=16)
    page = int(cache.block_table[0, 1])
    if form == "fp8":
        cache.v.view(torch.uint8)[page, 3] = 0x7F
    else:
        (cache.v if cache.v_scale is None else cache.v_scale)[page, 3] = torch.nan
    out = fk.decode(queries(cache), cache, tree_mask=torch.zeros(1, 1).bool(), impl=impl)
    assert out.isfinite().all()


@each_impl
def test_pages_at_an_odd_byte(impl: str) -> None:
    pages = torch.randint(-100, 100, (2, 4, 16, 2, 34), generator=torch.Generator().manual_seed(0)).to(torch.int8)
    scales = torch.tensor([0.01, 0.02]).half()
    table, lengths = torch.arange(4).int().view(2, 2), torch.tensor([20, 7]).int()
    cache = PagedCache(pages[0, ..., 1:33], pages[1, ..., :32], table, lengths, scales, scales)
    assert cache.k.data_ptr() % 2
    check(queries(cache), cache, impl)


@interpreted
def test_scales_at_half_a_word_are_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU reads 32 bits at multiples of 4 bytes only."""
    given: list[bool] = []
    made = portable.constants

    def spy(*sizes: Any, **more: Any) -> dict[str, Any]:
        fixed = made(*sizes, **more)
        given.append(fixed["SCALE_WORDS"])
        return fixed

    monkeypatch.setattr(portable, "constants", spy)
    cache = cache_of([20, 7], "int8")
    assert cache.k_scale is not None and cache.v_scale is not None
    wide = [torch.ones(*x.shape[:2], 4).half() for x in (cache.k_scale, cache.v_scale)]
    for first in (2, 1):
        for to, x in zip(wide, (cache.k_scale, cache.v_scale), strict=True):
            to[..., first : first + 2] = x
        k_scale, v_scale = wide[0][..., first : first + 2], wide[1][..., 2:]
        wide[1][..., 2:] = cache.v_scale
        moved = PagedCache(cache.k, cache.v, cache.block_table, cache.lengths, k_scale, v_scale)
        check(queries(moved), moved, "triton")
    assert given == [True, False]


@triton.jit
def _offsets(to_ptr, table_ptr, STEP: tl.constexpr):
    page, slot = pages_of(table_ptr, 0, 0, 16, 16, False)
    tl.store(to_ptr + tl.arange(0, 16), page + slot * STEP)


@interpreted
def test_slots_that_lie_far_apart() -> None:
    """2^28 elements from slot to slot: the last of 16 is past 32 bits."""
    to = torch.zeros(16, dtype=torch.int64)
    _offsets[(1,)](to, torch.zeros(1, dtype=torch.int32), 1 << 28)
    assert to.tolist() == [slot << 28 for slot in range(16)]


@each_impl
def test_queries_of_any_strides(impl: str) -> None:
    cache = cache_of([40, 9])
    q = queries(cache, 2)
    strided = torch.empty(2, 4, 32, 2, dtype=q.dtype).permute(0, 3, 1, 2).copy_(q)
    assert torch.equal(fk.decode(strided.transpose(2, 3).contiguous().transpose(2, 3), cache, impl=impl),
                       fk.decode(q, cache, impl=impl))  # fmt: skip
    check(strided, cache, impl)


@each_impl
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_many_tokens_of_short_sequences(causal: bool, impl: str) -> None:
    """More than `decode` takes, and than sequences have: a shared prefix and flash-attn's function ask for them."""
    cache = cache_of([40, 3, 0, 21])
    q = queries(cache, 21)
    out, lse = run(Call(q, cache), 21, causal, None, (-1, -1), 0.0, True, False, False, impl)
    assert lse is not None
    for b in range(4):
        oracle.assert_right(out[b], lse[b], q[b], *oracle.keys(cache, b), causal=causal)


@each_impl
def test_no_sequences(impl: str) -> None:
    cache = PagedCache.allocate(1, 4, 2, 16, block_table=torch.zeros(0, 1, dtype=torch.int32), format="fp32")
    assert fk.decode(torch.zeros(0, 1, 2, 16), cache, impl=impl).shape == (0, 1, 2, 16)


@given(
    pages=st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 1)), min_size=1, max_size=4),
    page=st.sampled_from([1, 5, 16, 64]), form=st.sampled_from(["fp32", "fp16", *QUANTISED]),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 1), (7, 1), (9, 3)]), tokens=st.integers(1, 4), seed=st.integers(0, 9),
)  # fmt: skip
@settings(max_examples=6 if INTERPRETED else 40)
def test_any_batch(
    pages: list[tuple[int, int]], page: int, form: str, heads: tuple[int, int], tokens: int, seed: int
) -> None:  # fmt: skip
    """Lengths are whole pages, or one key more or less: among them 0 and 1."""
    lengths = [max(0, count * page + more) for count, more in pages]
    cache = cache_of(lengths, form, kv_heads=heads[1], page=page, seed=seed)
    q = queries(cache, tokens, heads[0], seed=seed)
    check(q, cache, "torch")
    if INTERPRETED:
        check(q, cache, "triton")


@pytest.mark.parametrize("form", ["fp16", "int8"])
def test_a_long_sequence_beside_a_short_one(form: str) -> None:
    cache = cache_of([100_000, 1], form, kv_heads=1, dim=16, page=128)
    q = queries(cache, dtype=torch.float16 if form == "fp16" else torch.float32, heads=2)
    check(q, cache, "torch")


@interpreted
@pytest.mark.parametrize("programs", [1, 2, 7, 20])
def test_any_number_of_programs(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However the work is dealt out, and also where there are more programs than work."""
    monkeypatch.setattr(tiles, "INTERPRETED_PROGRAMS", programs)
    cache = cache_of([0, 70, 1, 20], dim=16, kv_heads=1)
    with use_tile(tile=tiles.DecodeTile(16, 16 + 16 * (programs % 2), 4, 2, programs)):
        check(queries(cache, 2, 10), cache, "triton", sinks=torch.linspace(-1, 2, 10))


@interpreted
def test_batch_invariance(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence alone and in company, bit for bit."""
    monkeypatch.setattr(tiles, "CHUNK", 64)
    cache = cache_of([90, 150, 0, 17], dim=16, kv_heads=1)
    q = queries(cache, 2)
    together, lse = check(q, cache, "triton", batch_invariant=True)
    for b in range(4):
        alone = alone_in(cache, b)
        out, one = fk.decode(q[b : b + 1], alone, return_lse=True, impl="triton", batch_invariant=True)
        assert torch.equal(out[0], together[b]) and torch.equal(one[0], lse[b])


def alone_in(cache: PagedCache, b: int) -> PagedCache:
    """The same pages, one sequence."""
    fields = {f.name: getattr(cache, f.name) for f in dataclasses.fields(cache) if f.init}
    return PagedCache(**fields | {"block_table": cache.block_table[b : b + 1], "lengths": cache.lengths[b : b + 1]})


def test_auto_takes_the_reference_on_the_cpu() -> None:
    cache = cache_of([5])
    q = queries(cache)
    assert torch.equal(fk.decode(q, cache), fk.decode(q, cache, impl="torch"))


def test_compiles_whole() -> None:
    cache = cache_of([20, 7], "int8")

    def step(q: torch.Tensor) -> torch.Tensor:
        return fk.decode(q, cache, softcap=5.0) * 2

    q = queries(cache, dtype=torch.float32)
    torch.testing.assert_close(torch.compile(step, fullgraph=True, backend="eager")(q), step(q))


def test_op_is_registered_well() -> None:
    cache = cache_of([20, 7], "int4")
    from flashkernels.decode.api import decode_op

    arguments = (
        queries(cache, 2),
        *cache.tensors,
        None,
        None,
        torch.ones(4),
        None,
        2,
        True,
        0.2,
        -1,
        -1,
        0.0,
        True,
        False,
        "auto",
    )
    torch.library.opcheck(decode_op, arguments)
