"""The Hopper backward against autograd of the oracle in fp64, on a GPU. The tolerance is twice plain torch's error.

Its table row stands alone here: a call that it cannot serve fails, and none is served by another backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor

import flashkernels as fk
import flashkernels.attention.api as api
from flashkernels.attention.hopper import backward_tiles
from flashkernels.attention.hopper.backward_build import CANDIDATES, retiled
from flashkernels.attention.hopper.backward_source import BackwardVariant
from flashkernels.attention.problem import BackwardProblem
from flashkernels.dispatch import Impl, UnsupportedError
from flashkernels.jit.eager import Plans

from . import oracle
from .cases import EVERYTHING, NO_MASK, Ragged, Shape, keywords, pairs, qkv, ragged
from .gpu import (
    INF,
    LENGTHS,
    NAN,
    each_half,
    head_first,
    misaligned,
    new_memory_is_nan,
    odd_rows,
    on_hopper,
    sequence_first,
    spread,
    syncs_are_errors,
    wide_rows,
)
from .gradients import (
    assert_same_gradients,
    check as check_gradients,
    check_varlen as check_gradients_varlen,
    expected,
    leaves,
    weights_like,
)
from .test_properties import Call, calls, lengths

pytestmark = [pytest.mark.gpu, on_hopper]

IMPL = "hopper"
LARGE = Shape(b=2, sq=300, sk=420, h=4, hkv=2, d=72)
KINDS = (56, 64, 72, 96, 112, 128, 192, 328)  # one head dimension of each kind of tile
WITHOUT_SLOPES = ("sinks",)  # of the ALiBi slopes it makes no gradient

LENGTH_PAIRS = [(1, 1), (1, 300), (300, 1), (64, 64), (80, 81), (65, 129), (161, 129), (129, 65), (500, 128)]

each_kind = pytest.mark.parametrize("dim", KINDS)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    row = Impl("hopper", "flashkernels.attention.hopper.backward", rejects=backward_tiles.rejects)
    monkeypatch.setattr(api, "BACKWARD_IMPLS", (row,))
    monkeypatch.setattr(api, "_backward_plans", Plans(api._plan_backward))
    with new_memory_is_nan():  # an element that nobody writes is seen
        # torch's mode that fills memory asks for deterministic gradients as well; the tests choose these themselves
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
        yield


@pytest.fixture(params=[False, True], ids=["adds", "own"])
def own_dq(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """dQ by additions in memory, and by a kernel of its own, whatever the problem would take."""
    choose, own = backward_tiles.choose, bool(request.param)
    if not own and getattr(request.node, "callspec", None) and request.node.callspec.params.get("dim", 0) > 256:
        pytest.skip("heads over 256 have no other")

    def chosen(problem: BackwardProblem) -> BackwardVariant:
        return replace(choose(replace(problem, deterministic=own)), own_dq=own)

    monkeypatch.setattr(backward_tiles, "choose", chosen)
    return own


def sides(features: dict[str, Any]) -> tuple[str, ...]:
    return tuple(name for name in WITHOUT_SLOPES if name in features)


def cuda(shape: Shape, dtype: torch.dtype = torch.bfloat16, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    return qkv(shape, dtype, device="cuda", **options)


def check(q: Tensor, k: Tensor, v: Tensor, **features: Any) -> tuple[Tensor, ...]:
    return check_gradients(q, k, v, impl=IMPL, also=sides(features), **features)


def check_varlen(batch: Ragged, **features: Any) -> tuple[Tensor, ...]:
    return check_gradients_varlen(batch, impl=IMPL, also=sides(features), **features)


# Features


@each_half
@pytest.mark.parametrize("feature", NO_MASK)
def test_feature_alone(feature: str, dtype: torch.dtype) -> None:
    check(*cuda(LARGE, dtype), **keywords(feature, LARGE, "cuda"))


@pytest.mark.parametrize("both", pairs(NO_MASK))
def test_pair_of_features(both: str) -> None:
    shape = LARGE.but(sq=420, sk=300)  # more queries than keys: causal leaves rows that see nothing
    check(*cuda(shape), **keywords(both, shape, "cuda"))


@each_kind
@pytest.mark.parametrize("feature", ["causal", "window", "left", "softcap", "alibi2d+causal", "+".join(EVERYTHING)])
def test_feature_with_each_kind_of_tile(dim: int, feature: str, own_dq: bool) -> None:
    shape = LARGE.but(d=dim)
    check(*cuda(shape), **keywords(feature, shape, "cuda"))


@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_scale_of_any_sign(scale: float) -> None:
    check(*cuda(LARGE), softmax_scale=scale, causal=True)


@pytest.mark.parametrize("sink", [-INF, -1e4, 1e4], ids=str)
def test_extreme_sink(sink: float) -> None:
    check(*cuda(LARGE), sinks=torch.full((LARGE.h,), sink, device="cuda"), causal=True)


# Shapes


@pytest.mark.parametrize("dim", [*range(16, 257, 8), 264, 320, 376, 448, 512])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_head_dimension(dim: int, causal: bool) -> None:
    check(*cuda(LARGE.but(d=dim, h=2, hkv=1)), causal=causal)


DIMS = [(16, 40), (40, 16), (192, 128), (128, 192), (64, 256), (256, 64), (64, 128), (128, 64), (104, 72), (120, 16),
        (512, 64), (64, 512), (16, 264), (264, 16), (320, 256)]  # fmt: skip


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_head_dimension_of_v_differs(dims: tuple[int, int]) -> None:
    check(*cuda(LARGE.but(d=dims[0], dv=dims[1])), causal=True)


@each_kind
@pytest.mark.parametrize("heads", [(6, 2), (7, 1), (3, 3)], ids=lambda h: f"{h[0]}:{h[1]}")
def test_gradients_of_k_and_v_sum_over_their_query_heads(heads: tuple[int, int], dim: int, own_dq: bool) -> None:
    shape = LARGE.but(h=heads[0], hkv=heads[1], d=dim)
    check(*cuda(shape), **keywords("causal+alibi+sinks", shape, "cuda"))


@each_kind
@pytest.mark.parametrize("sizes", LENGTH_PAIRS, ids=str)
def test_sequence_lengths(sizes: tuple[int, int], dim: int, own_dq: bool) -> None:
    check(*cuda(LARGE.but(sq=sizes[0], sk=sizes[1], d=dim)), causal=True)


@pytest.mark.parametrize("window", [(0, 0), (50, -1), (-1, 70), (100, 30)], ids=str)
@pytest.mark.parametrize("sizes", [(100, 900), (900, 100), (600, 700)], ids=str)
def test_windows(window: tuple[int, int], sizes: tuple[int, int], own_dq: bool) -> None:
    check(*cuda(LARGE.but(sq=sizes[0], sk=sizes[1])), window=window)


@pytest.mark.parametrize("dim", [48, 64, 72, 96, 112, 128])
@pytest.mark.parametrize("keys", [257, 600], ids=["odd", "even"])
def test_blocks_that_share_their_loads(dim: int, keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an odd number of key blocks, one of the last cluster's has none."""
    choose = backward_tiles.choose

    def chosen(problem: BackwardProblem) -> BackwardVariant:
        return retiled(choose(problem), cluster=2)

    monkeypatch.setattr(backward_tiles, "choose", chosen)
    shape = Shape(b=2, sq=330, sk=keys, h=4, hkv=2, d=dim)
    check(*cuda(shape))
    check(*cuda(shape), **keywords("alibi+sinks", shape, "cuda"))


@pytest.mark.parametrize("feature", ["plain", "causal", "right", "alibi2d+causal+sinks"])
@pytest.mark.parametrize("name", CANDIDATES)
def test_tiles_that_no_rule_takes_yet(name: str, feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dim, knobs = CANDIDATES[name]
    choose = backward_tiles.choose

    def chosen(problem: BackwardProblem) -> BackwardVariant:
        return retiled(choose(problem), **knobs)

    monkeypatch.setattr(backward_tiles, "choose", chosen)
    shape = Shape(b=2, sq=330, sk=300, h=4, hkv=2, d=dim)
    check(*cuda(shape), **keywords(feature, shape, "cuda"))


def test_more_tiles_than_multiprocessors() -> None:
    check(*cuda(Shape(b=2, sq=700, sk=700, h=40, hkv=40, d=64)), causal=True)


@each_half
@pytest.mark.parametrize("feature", NO_MASK)
def test_varlen(feature: str, dtype: torch.dtype) -> None:
    shape = LARGE.but(b=len(LENGTHS[0]))
    check_varlen(ragged(*LENGTHS, shape, dtype, device="cuda"), **keywords(feature, shape, "cuda"))


@each_kind
@pytest.mark.parametrize("feature", ["causal", "window", "+".join(EVERYTHING)])
def test_varlen_with_each_kind_of_tile(dim: int, feature: str, own_dq: bool) -> None:
    shape = LARGE.but(b=len(LENGTHS[0]), d=dim)
    check_varlen(ragged(*LENGTHS, shape, torch.bfloat16, device="cuda"), **keywords(feature, shape, "cuda"))


def test_varlen_of_very_many_sequences() -> None:
    lens = [(7 * i) % 41 for i in range(300)]
    shape = LARGE.but(b=len(lens))
    check_varlen(ragged(lens, lens[::-1], shape, torch.bfloat16, device="cuda"), causal=True)


READABLE = {"sequence-first": sequence_first, "head-first": head_first, "wide": wide_rows}
UNREADABLE = {"misaligned": misaligned, "odd": odd_rows, "spread": spread}


@pytest.mark.parametrize("change", READABLE.values(), ids=READABLE.keys())
def test_any_strides_that_tma_reads(change: Any) -> None:
    check(*map(change, cuda(LARGE)), causal=True)


@pytest.mark.parametrize("change", [*READABLE.values(), *UNREADABLE.values()], ids=[*READABLE, *UNREADABLE])
def test_any_strides_of_the_gradient(change: Any) -> None:
    inputs = leaves(*cuda(LARGE))
    out = fk.attention(*inputs, causal=True, impl=IMPL)
    weight = torch.randn_like(out)
    want = torch.autograd.grad(out, inputs, weight, retain_graph=True)
    got = torch.autograd.grad(out, inputs, change(weight))
    assert torch.equal(got[1], want[1]) and torch.equal(got[2], want[2])
    torch.testing.assert_close(got[0], want[0], rtol=2**-7, atol=1e-4)  # dQ is summed in another order


def test_a_gradient_expanded_from_one_number() -> None:
    inputs = leaves(*cuda(LARGE))
    out = fk.attention(*inputs, impl=IMPL)
    want = torch.autograd.grad(out, inputs, torch.ones_like(out), retain_graph=True)
    for got, w in zip(torch.autograd.grad(out.sum(), inputs), want, strict=True):
        torch.testing.assert_close(got, w, rtol=2**-7, atol=1e-4)


# What nobody sees. Poison sends the forward down another path, whose output is rounded elsewhere: the truth judges.

Rows = slice | list[int]


def weighted(out: Tensor) -> Tensor:
    """The gradient of `out` that `expected` takes."""
    return weights_like(out)[0].to(out)


def assert_unharmed(got: tuple[Tensor, ...], clean: tuple[tuple[Tensor, ...], ...], rows: tuple[Rows, ...]) -> None:
    """These rows of the gradients are what they are without the poison; `clean` is from `expected`."""
    parts = [tuple(x.movedim(-3, 0)[r] for x, r in zip(some, rows, strict=False)) for some in (got, *clean)]
    assert_same_gradients(*parts, torch.bfloat16)


def expected_varlen(batch: Ragged, **also: Tensor) -> tuple[tuple[Tensor, ...], ...]:
    def plain(*qkv: Tensor, **features: Any) -> Any:
        return oracle.naive_varlen(*qkv, *batch.args[3:5], causal=True, **features)

    def exact(*qkv: Tensor, **features: Any) -> Any:
        return oracle.attention_varlen(*qkv, *batch.args[3:5], causal=True, **features)

    return expected(batch.args[:3], plain, exact, with_lse=False, also=tuple(also), features=also)


@each_kind
@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("value", [NAN, INF], ids=str)
def test_poison_behind_the_causal_edge_reaches_no_other_row(which: str, value: float, dim: int, own_dq: bool) -> None:
    q, k, v = cuda(Shape(b=1, sq=400, sk=400, h=2, hkv=1, d=dim))
    clean = expected((q, k, v), with_lse=False, features={"causal": True})
    {"k": k, "v": v}[which][:, 200:] = value
    inputs = leaves(q, k, v)
    out = fk.attention(*inputs, causal=True, impl=IMPL)
    got = torch.autograd.grad(out, inputs, weighted(out))
    assert_unharmed(got[:1], clean, (slice(200),))


@each_kind
@pytest.mark.parametrize("value", [NAN, -INF], ids=str)
@pytest.mark.parametrize("feature", ["causal", "causal+sinks", "causal+softcap"])
def test_poisoned_queries_that_see_nothing_reach_no_gradient(
    feature: str, value: float, dim: int, own_dq: bool
) -> None:
    """With a sink their log-sum-exp is finite: it does not tell of them."""
    shape = Shape(b=1, sq=400, sk=250, h=2, hkv=1, d=dim)
    q, k, v = cuda(shape)
    features = keywords(feature, shape, "cuda")
    clean = expected((q, k, v), with_lse=False, features=features)
    q[:, :150] = value
    inputs = leaves(q, k, v)
    out = fk.attention(*inputs, impl=IMPL, **features)
    got = torch.autograd.grad(out, inputs, weighted(out))
    assert_unharmed(got, clean, (slice(None),) * 3)
    assert (got[0][:, :150] == 0).all()


@each_kind
def test_a_poisoned_sequence_reaches_no_other(dim: int, own_dq: bool) -> None:
    batch = ragged([100, 70, 130], [90, 70, 150], LARGE.but(b=3, d=dim), torch.bfloat16, device="cuda")
    clean = expected_varlen(batch)
    poisoned = [slice(100, 170), slice(90, 160), slice(90, 160)]
    for x, rows in zip((batch.q, batch.k, batch.v), poisoned, strict=True):
        x[rows] = NAN
    inputs = leaves(batch.q, batch.k, batch.v)
    out = fk.attention_varlen(*inputs, *batch.args[3:], causal=True, impl=IMPL)
    weight = weighted(out)
    weight[poisoned[0]] = NAN
    got = torch.autograd.grad(out, inputs, weight)
    assert_unharmed(got, clean, tuple(slice(rows.start) for rows in poisoned))
    assert_unharmed(got, clean, tuple(slice(rows.stop, None) for rows in poisoned))
    assert all(g[rows].isnan().all() for g, rows in zip(got, poisoned, strict=True))


@each_kind
@pytest.mark.parametrize("features", [{"causal": True}, {"window": (30, 0)}, {"window": (-1, 50)}], ids=str)
def test_poisoned_keys_alone_are_seen(features: dict[str, Any], dim: int, own_dq: bool) -> None:
    """Rows that see no other key have no weight that could tell of them."""
    q, k, v = cuda(Shape(b=1, sq=400, sk=400, h=4, hkv=2, d=dim))
    k[:] = NAN
    inputs = leaves(q, k, v)
    out = fk.attention(*inputs, impl=IMPL, **features)
    assert all(g.isnan().all() for g in torch.autograd.grad(out, inputs, weighted(out)))


@each_kind
@pytest.mark.parametrize("at", [0, 7, 399])
def test_a_poisoned_key_that_one_row_sees_harms_that_row_and_key(at: int, dim: int, own_dq: bool) -> None:
    q, k, v = cuda(Shape(b=1, sq=400, sk=400, h=4, hkv=2, d=dim))
    features = {"window": (0, 0)}
    clean = expected((q, k, v), with_lse=False, features=features)
    k[:, at] = NAN
    inputs = leaves(q, k, v)
    out = fk.attention(*inputs, impl=IMPL, **features)
    got = torch.autograd.grad(out, inputs, weighted(out))
    assert all(g[:, at].isnan().all() for g in got)
    others = [i for i in range(400) if i != at]
    assert_unharmed(got, clean, (others, others, others))


@each_kind
@pytest.mark.parametrize("feature", ["causal", "causal+sinks", "causal+softcap"])
def test_a_poisoned_query_that_sees_keys_poisons_what_it_sees(feature: str, dim: int, own_dq: bool) -> None:
    """And nothing else: row 300 of 400 sees the keys up to 300."""
    shape = Shape(b=1, sq=400, sk=400, h=2, hkv=1, d=dim)
    q, k, v = cuda(shape)
    features = keywords(feature, shape, "cuda")
    clean = expected((q, k, v), with_lse=False, features=features)
    q[:, 300] = NAN
    inputs = leaves(q, k, v)
    out = fk.attention(*inputs, impl=IMPL, **features)
    got = torch.autograd.grad(out, inputs, weighted(out))
    assert got[0][:, 300].isnan().all() and all(g[:, :301].isnan().all() for g in got[1:])
    assert_unharmed(got, clean, ([*range(300), *range(301, 400)], slice(301, None), slice(301, None)))


def test_rows_that_belong_to_no_sequence_reach_no_gradient(own_dq: bool) -> None:
    batch = ragged([100, 70], [90, 70], LARGE.but(b=2), torch.bfloat16, device="cuda")
    clean = expected_varlen(batch)
    longer = leaves(*(torch.cat((x, torch.full_like(x[:30], NAN))) for x in (batch.q, batch.k, batch.v)))
    out = fk.attention_varlen(*longer, *batch.args[3:], causal=True, impl=IMPL)
    weight = weighted(out[: len(batch.q)])
    got = torch.autograd.grad(out, longer, torch.cat((weight, torch.full_like(weight[:30], NAN))))
    lengths = [len(x) for x in (batch.q, batch.k, batch.v)]
    assert_unharmed(got, clean, tuple(map(slice, lengths)))
    assert all((g[n:] == 0).all() for g, n in zip(got, lengths, strict=True))


@pytest.mark.parametrize("rows", [0, 30])
def test_rows_that_belong_to_no_sequence_reach_no_sink(rows: int, own_dq: bool) -> None:
    """The output is not the same to the bit with and without them: rows that meet a hidden NaN are made in fp32."""
    batch = ragged([100, 70], [90, 70], LARGE.but(b=2), torch.bfloat16, device="cuda")
    (sinks,) = leaves(torch.randn(LARGE.h, device="cuda"))
    inputs = leaves(*(torch.cat((x, torch.full_like(x[:rows], NAN))) for x in (batch.q, batch.k, batch.v)))
    out = fk.attention_varlen(*inputs, *batch.args[3:], causal=True, sinks=sinks, impl=IMPL)
    weight = weighted(out[: len(batch.q)])
    got = torch.autograd.grad(out, sinks, torch.cat((weight, torch.full_like(weight[:rows], NAN))))
    clean = expected_varlen(batch, sinks=sinks.detach())
    assert_same_gradients(got, *(some[3:] for some in clean), torch.bfloat16)


# What runs


@each_kind
@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk", "qv", "kv"])
def test_what_nobody_wants_is_not_made(wanted: str, dim: int, own_dq: bool) -> None:
    inputs = dict(zip("qkv", cuda(LARGE.but(d=dim)), strict=True))
    all_of_them = leaves(*inputs.values())
    out = fk.attention(*all_of_them, causal=True, impl=IMPL)
    weight = torch.randn_like(out)
    want = torch.autograd.grad(out, all_of_them, weight)
    for name in wanted:
        inputs[name].requires_grad_()
    fk.attention(**inputs, causal=True, impl=IMPL).backward(weight)
    for (name, x), w in zip(inputs.items(), want, strict=True):
        if name not in wanted:
            assert x.grad is None
        elif name == "q":
            torch.testing.assert_close(x.grad, w, rtol=2**-7, atol=1e-4)
        else:
            assert torch.equal(x.grad, w)


def requested(when: str) -> int:
    """Bytes that were asked for. The allocator may have given a block of up to 1 MiB more, if others left one."""
    found = int(torch.cuda.memory_stats()[f"requested_bytes.all.{when}"])
    assert found > 0  # the inputs are there: an allocator that does not count would pass any bound
    return found


@each_kind
def test_memory_beyond_the_gradients(dim: int) -> None:
    """At most the log-sum-exp, delta, and dQ in fp32 of whole blocks of queries."""
    inputs = leaves(*cuda(Shape(b=2, sq=2000, sk=2000, h=8, hkv=2, d=dim)))
    out = fk.attention(*inputs, causal=True, impl=IMPL)
    weight = torch.randn_like(out)
    torch.autograd.grad(out, inputs, weight, retain_graph=True)  # compiles
    before = requested("current")
    torch.cuda.reset_peak_memory_stats()
    grads = torch.autograd.grad(out, inputs, weight)
    extra = requested("peak") - before - sum(g.nbytes for g in grads)
    rows = 2 * 8 * 2000
    blocks = 2 * 8 * 112  # a block is not longer than that
    assert extra <= rows * (4 + 4) + (rows + blocks) * 4 * dim + 2**15


@each_kind
def test_gradients_have_the_same_bits_every_time(dim: int, own_dq: bool) -> None:
    """All of them; where dQ is added up in memory, those of k and v."""
    inputs = leaves(*cuda(LARGE.but(d=dim)))
    out = fk.attention(*inputs, causal=True, impl=IMPL)
    weight = torch.randn_like(out)
    first = torch.autograd.grad(out, inputs, weight, retain_graph=True)
    for _ in range(20):
        again = torch.autograd.grad(out, inputs, weight, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in list(zip(again, first, strict=True))[0 if own_dq else 1 :])


@each_kind
@pytest.mark.parametrize("mode", ["argument", "torch"])
def test_deterministic_gradients_have_the_same_bits_every_time(
    dim: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: mode == "torch")
    inputs = leaves(*cuda(LARGE.but(b=4, sq=2000, sk=2000, d=dim)))
    out = fk.attention(*inputs, deterministic=mode == "argument", impl=IMPL)
    weight = torch.randn_like(out)
    first = torch.autograd.grad(out, inputs, weight, retain_graph=True)
    for _ in range(20):
        again = torch.autograd.grad(out, inputs, weight, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


def test_the_host_never_waits() -> None:
    batch = ragged(*LENGTHS, LARGE.but(b=len(LENGTHS[0])), torch.bfloat16, device="cuda")
    inputs = leaves(batch.q, batch.k, batch.v)
    (sinks,) = leaves(torch.rand(LARGE.h, device="cuda"))
    for _ in range(2):  # the first time compiles
        out = fk.attention_varlen(*inputs, *batch.args[3:], causal=True, sinks=sinks, impl=IMPL)
        weight = torch.ones_like(out)
        with syncs_are_errors():
            torch.autograd.grad(out, [*inputs, sinks], weight)


@pytest.mark.parametrize("deterministic", [False, True], ids=["adds", "deterministic"])
@pytest.mark.parametrize("dim", [64, 128, 256, 512])
def test_peak_memory_is_the_statistics_and_one_dq(dim: int, deterministic: bool) -> None:
    shape = Shape(b=1, sq=8192, sk=8192, h=8, hkv=8, d=dim)
    inputs = leaves(*cuda(shape))
    out = fk.attention(*inputs, causal=True, deterministic=deterministic, impl=IMPL)
    weight = torch.ones_like(out)
    torch.autograd.grad(out, inputs, weight, retain_graph=True)
    torch.cuda.reset_peak_memory_stats()
    before = requested("current")
    grads = torch.autograd.grad(out, inputs, weight)
    rows = shape.sq * shape.h
    extra = requested("peak") - before - sum(g.numel() * 2 for g in grads)
    sums = 0 if deterministic or dim > 128 else 4 * dim  # dQ in fp32, where it is added up in memory
    assert extra <= rows * (sums + 2 * 4) + 2**15  # notes, a few bytes a block


def test_a_graph_replays_it() -> None:
    inputs = leaves(*cuda(LARGE))
    weight = torch.randn_like(inputs[0])

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(fk.attention(*inputs, causal=True, impl=IMPL), inputs, weight)

    want = both()
    torch.cuda.synchronize()
    torch.use_deterministic_algorithms(False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = both()
    for _ in range(2):
        graph.replay()
    assert torch.equal(got[1], want[1]) and torch.equal(got[2], want[2])
    torch.testing.assert_close(got[0], want[0], rtol=2**-7, atol=1e-4)


def test_it_refuses_what_it_cannot_do() -> None:
    q, k, v = leaves(*cuda(LARGE))
    slopes = torch.rand(LARGE.h, device="cuda").requires_grad_()
    out = fk.attention(q, k, v, alibi_slopes=slopes, impl=IMPL)
    with pytest.raises(UnsupportedError, match="has no gradient of the ALiBi slopes"):
        out.sum().backward()


# Any call

SIZES = st.sampled_from([*range(16, 257, 8), 264, 328, 512])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls(SIZES, [torch.float16, torch.bfloat16], 300, mask=False))
def test_any_dense_call(call: Call) -> None:
    if min(call.shape.b, call.shape.sq, call.shape.sk) == 0:
        return
    features = {**call.keywords(), "layout": call.layout}
    check(*(x.cuda() for x in call.tensors()), **_on_gpu(features))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls(SIZES, [torch.float16, torch.bfloat16], 0, mask=False), lengths(200))
def test_any_ragged_call(call: Call, lens: list[tuple[int, int]]) -> None:
    if not (sum(q for q, _ in lens) and sum(k for _, k in lens)):
        return
    call = replace(call, shape=call.shape.but(b=len(lens)))
    batch = call.ragged([q for q, _ in lens], [k for _, k in lens])
    there = Ragged(*(x.cuda() if isinstance(x, Tensor) else x for x in batch.args))
    check_varlen(there, **_on_gpu(call.keywords()))


def _on_gpu(features: dict[str, Any]) -> dict[str, Any]:
    return {name: x.cuda() if isinstance(x, Tensor) else x for name, x in features.items()}
