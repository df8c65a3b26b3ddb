"""Dropout: the generator, which weights it drops, and outputs and gradients against an oracle with the same weights."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from hypothesis import given, settings, strategies as st
from torch import Tensor

import flashkernels as fk
import flashkernels.attention.api as api
import flashkernels.attention.triton.backward_tiles as backward_tiles
from flashkernels.attention import dropout
from flashkernels.attention.problem import AttentionProblem, BackwardProblem
from flashkernels.dispatch import Impl, verdicts
from flashkernels.hardware import lookup
from flashkernels.jit.eager import Plans
from flashkernels.tiling import Tile, use_tile

from . import oracle
from .cases import EVERYTHING, Ragged, Shape, interpreter, keywords, qkv, ragged
from .gpu import LENGTHS, dtype_id, syncs_are_errors
from .gradients import _compare, leaves
from .test_properties import Call, calls, lengths

INF, NAN = float("inf"), float("nan")
SMALL = Shape(b=2, sq=35, sk=50, h=4, hkv=2, d=16, dv=24)
TINY = Shape(b=1, sq=20, sk=35, h=2, hkv=1, d=16, dv=24)  # the interpreter is slow
SEED, P = 1234567890123456789, 0.3
SEEDS = st.integers(-(2**63), 2**63 - 1)
RATES = st.sampled_from([0.01, 0.1, 0.5, 0.9])

impls = pytest.mark.parametrize("impl", ["torch", pytest.param("triton", marks=interpreter)])


# The generator


def philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Philox 4x32-10 with Python's integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = b >> 32 ^ c1 ^ k0, b % 2**32, a >> 32 ^ c3 ^ k1, a % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def word(seed: int, batch: int, head: int, query: int, key: int) -> int:
    """That of one weight, as the definition says."""
    counter = (key // 16 * 8 + key % 8, query // 16 * 8 + query % 8, head, batch)
    return philox(counter, (seed % 2**32, seed >> 32 & 0xFFFFFFFF))[2 * (query // 8 % 2) + key // 8 % 2]


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_the_published_answers(counter: tuple[int, ...], key: tuple[int, int], words: str) -> None:
    found = dropout.philox(tuple(map(torch.tensor, counter)), (torch.tensor(key[0]), torch.tensor(key[1])))
    assert " ".join(f"{int(x):08x}" for x in found) == " ".join(f"{x:08x}" for x in philox(counter, key)) == words


@settings(max_examples=20)
@given(SEEDS, st.integers(0, 40), st.integers(0, 20), st.integers(0, 40), RATES)
def test_the_mask_is_as_defined(seed: int, first: int, rows: int, keys: int, p: float) -> None:
    found = dropout.kept(torch.tensor([seed]), p, range(3, 5), 2, range(first, first + rows), keys)
    want = [
        [[[word(seed, b, h, i, j) >= p * 2**32 for j in range(keys)] for i in range(first, first + rows)]
         for h in range(2)] for b in (3, 4)
    ]  # fmt: skip
    assert torch.equal(found, torch.tensor(want, dtype=torch.bool).reshape(2, 2, rows, keys))


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_weights_are_dropped_at_the_rate_and_independently(p: float) -> None:
    stay = dropout.kept(torch.tensor([SEED]), p, range(8), 16, range(128), 128).double()
    others = {
        "next key": stay.roll(-1, 3), "8 keys on": stay.roll(-8, 3), "next query": stay.roll(-1, 2),
        "8 queries on": stay.roll(-8, 2), "next head": stay.roll(-1, 1), "next batch": stay.roll(-1, 0),
        "transposed": stay.transpose(2, 3), "next seed": dropout.kept(torch.tensor([SEED + 1]), p, range(8), 16,
                                                                      range(128), 128).double(),
    }  # fmt: skip
    # five standard deviations of n independent draws
    n = stay.numel()
    assert abs(stay.mean().item() - (1 - p)) < 5 * (p * (1 - p) / n) ** 0.5
    centred = stay - (1 - p)
    for name, other in others.items():
        # transposing leaves a pair of each two weights, counted twice, and the diagonal as it is
        pairs, drop = (n / 2, centred.diagonal(dim1=2, dim2=3).square().sum()) if name == "transposed" else (n, 0.0)
        product = ((centred * (other - (1 - p))).sum() - drop) / n
        assert abs(product.item()) < 5 * p * (1 - p) / pairs**0.5, name


def test_rows_and_columns_are_dropped_evenly() -> None:
    """The share of every row, and of every column, of all heads together."""
    stay = dropout.kept(torch.tensor([3]), 0.25, range(64), 16, range(64), 64).double()
    n = 64 * 16 * 64
    for dim in (2, 3):
        shares = stay.mean([d for d in range(4) if d != dim])
        assert ((shares - 0.75).abs() < 5 * (0.25 * 0.75 / n) ** 0.5).all()


# Outputs and gradients


def stay_of(q: Tensor, k: Tensor, layout: str = "bshd", p: float = P, seed: int = SEED) -> Tensor:
    seq, head = (1, 2) if layout == "bshd" else (2, 1)
    made = dropout.kept(torch.tensor([seed]), p, range(q.shape[0]), q.shape[head], range(q.shape[seq]), k.shape[seq])
    return made.to(q.device)


def stays_of(batch: Ragged, p: float = P, seed: int = SEED) -> list[Tensor]:
    q, _, _, cu_q, cu_k = batch.args[:5]
    lens = [zip(cu.tolist(), cu.tolist()[1:], strict=False) for cu in (cu_q, cu_k)]
    return [
        dropout.kept(torch.tensor([seed]), p, range(b, b + 1), q.shape[1], range(q1 - q0), k1 - k0).to(q.device)
        for b, ((q0, q1), (k0, k1)) in enumerate(zip(*lens, strict=True))
    ]


def sides(features: dict[str, Any]) -> tuple[str, ...]:
    names = ("alibi_slopes", "sinks", "mask")
    return tuple(name for name in names if name in features and features[name].is_floating_point())


def check(q: Tensor, k: Tensor, v: Tensor, *, impl: str, p: float = P, seed: int = SEED, **features: Any) -> None:
    """Output, log-sum-exp and gradients."""
    drop = {"dropout_p": p, "dropout_seed": seed}
    same = {"dropout_p": p, "stay": stay_of(q, k, features.get("layout", "bshd"), p, seed)}
    out, lse = fk.attention(q, k, v, return_lse=True, impl=impl, **drop, **features)
    oracle.assert_correct(out, lse, q, k, v, **same, **features)
    ours = partial(fk.attention, return_lse=True, impl=impl, **drop)
    plain, exact = partial(oracle.naive, **same), partial(oracle.attention, **same)
    _compare((q, k, v), ours, plain, exact, True, sides(features), features)


def check_varlen(batch: Ragged, *, impl: str, p: float = P, seed: int = SEED, **features: Any) -> None:
    lens = batch.args[3:]
    drop, same = {"dropout_p": p, "dropout_seed": seed}, {"dropout_p": p, "stay": stays_of(batch, p, seed)}
    out, lse = fk.attention_varlen(*batch.args, return_lse=True, impl=impl, **drop, **features)
    oracle.assert_correct_varlen(out, lse, *batch.tensors, **same, **features)

    def ours(*qkv: Tensor, **features: Any) -> Any:
        return fk.attention_varlen(*qkv, *lens, return_lse=True, impl=impl, **drop, **features)

    def plain(*qkv: Tensor, **features: Any) -> Any:
        return oracle.naive_varlen(*qkv, *lens[:2], **same, **features)

    def exact(*qkv: Tensor, **features: Any) -> Any:
        return oracle.attention_varlen(*qkv, *lens[:2], **same, **features)

    _compare(batch.args[:3], ours, plain, exact, True, sides(features), features)


@pytest.mark.parametrize("feature", ["plain", "causal", "window", "softcap+alibi", "sinks", "boolmask", "floatmask"])
def test_feature_in_torch(feature: str) -> None:
    check(*qkv(SMALL), impl="torch", **keywords(feature, SMALL))


@interpreter
@pytest.mark.parametrize("feature", ["plain", "causal", "sinks", "floatmask"])
def test_feature_in_triton(feature: str) -> None:
    check(*qkv(TINY, torch.float16), impl="triton", **keywords(feature, TINY))


@interpreter
def test_fp32_in_triton() -> None:
    check(*qkv(TINY), impl="triton", causal=True, window=(20, -1))


@impls
def test_every_feature_at_once(impl: str) -> None:
    check(*qkv(TINY, torch.float16), impl=impl, **keywords([*EVERYTHING, "boolmask"], TINY))


@impls
def test_ragged_batch(impl: str) -> None:
    batch = ragged([20, 0, 1, 5], [33, 9, 12, 0], TINY.but(b=4), torch.float16)
    check_varlen(batch, impl=impl, causal=True, window=(20, -1))


@impls
def test_bhsd(impl: str) -> None:
    check(*qkv(TINY, torch.float16, layout="bhsd"), impl=impl, layout="bhsd", causal=True)


@interpreter
@pytest.mark.parametrize("blocks", [(16, 16), (16, 32)], ids=str)
def test_tiles_make_no_difference(blocks: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    tile = Tile("exact", *blocks, (16,), (16, 16), 4, 1, tma=False)
    monkeypatch.setattr(backward_tiles, "choose", lambda *problem: backward_tiles.BackwardTiles(tile, tile))
    monkeypatch.setattr(api, "_backward_plans", Plans(api._plan_backward))
    with use_tile(tile=tile):
        check(*qkv(TINY, torch.float16), impl="triton", causal=True)


DIMS = st.sampled_from([1, 16, 24, 40, 72])


@settings(max_examples=40)
@given(calls(DIMS, [torch.float16, torch.bfloat16, torch.float32, torch.float64], 40), SEEDS, RATES)
def test_any_dense_call_in_torch(call: Call, seed: int, p: float) -> None:
    check(*call.tensors(), impl="torch", p=p, seed=seed, layout=call.layout, **call.keywords())


@interpreter
@settings(max_examples=4)
@given(calls(DIMS, [torch.float16, torch.float32], 30), SEEDS, RATES)
def test_any_dense_call_in_triton(call: Call, seed: int, p: float) -> None:
    check(*call.tensors(), impl="triton", p=p, seed=seed, layout=call.layout, **call.keywords())


@interpreter
@settings(max_examples=3)
@given(calls(DIMS, [torch.float16, torch.float32], 0, mask=False), lengths(20), SEEDS, RATES)
def test_any_ragged_call_in_triton(call: Call, lens: list[tuple[int, int]], seed: int, p: float) -> None:
    call = replace(call, shape=call.shape.but(b=len(lens)))
    batch = call.ragged([q for q, _ in lens], [k for _, k in lens])
    check_varlen(batch, impl="triton", p=p, seed=seed, **call.keywords())


@pytest.mark.parametrize("feature", ["causal", "softcap+sinks", "alibi"])
def test_gradcheck(feature: str) -> None:
    shape = Shape(b=1, sq=4, sk=5, h=2, hkv=1, d=3, dv=2)
    attend = partial(fk.attention, impl="torch", dropout_p=0.4, dropout_seed=5, **keywords(feature, shape))
    assert torch.autograd.gradcheck(attend, leaves(*qkv(shape, torch.float64)))


@interpreter
def test_gradcheck_of_the_kernels() -> None:
    shape = Shape(b=1, sq=3, sk=5, h=2, hkv=1, d=3, dv=2)
    attend = partial(fk.attention, impl="triton", dropout_p=0.4, dropout_seed=5, causal=True)
    inputs = leaves(*qkv(shape))
    assert torch.autograd.gradcheck(attend, inputs, eps=2e-2, atol=1e-2, rtol=1e-2, nondet_tol=0.0, fast_mode=True)


@impls
def test_the_log_sum_exp_is_that_of_all_keys(impl: str) -> None:
    q, k, v = qkv(TINY, torch.float16)
    lse = [fk.attention(q, k, v, return_lse=True, impl=impl, dropout_p=p)[1] for p in (0.0, 0.9)]
    assert torch.equal(*lse)


@impls
@pytest.mark.parametrize("poison", [NAN, INF])
def test_a_dropped_value_does_not_reach_the_output(poison: float, impl: str) -> None:
    q, k, v = qkv(TINY, torch.float16)
    v[:, 20] = poison
    out = fk.attention(q, k, v, dropout_p=P, dropout_seed=SEED, impl=impl)
    hit = stay_of(q, k)[..., 20].transpose(1, 2)[..., None].expand_as(out)
    assert torch.equal(~out.isfinite(), hit)
    oracle.assert_correct(out, None, q, k, v, dropout_p=P, stay=stay_of(q, k))


# Seeds


@impls
def test_a_seed_is_an_int_or_a_tensor(impl: str) -> None:
    q, k, v = qkv(TINY, torch.float16)
    attend = partial(fk.attention, q, k, v, dropout_p=P, impl=impl)
    want = attend(dropout_seed=-7)
    assert torch.equal(attend(dropout_seed=torch.tensor(-7)), want)
    assert torch.equal(attend(dropout_seed=torch.tensor([-7])), want)
    assert not torch.equal(attend(dropout_seed=7), want)


def test_no_seed_draws_one_from_torch() -> None:
    q, k, v = qkv(SMALL)
    attend = partial(fk.attention, q, k, v, dropout_p=P)
    torch.manual_seed(3)
    first, second = attend(), attend()
    torch.manual_seed(3)
    assert torch.equal(attend(), first) and not torch.equal(first, second)


def test_without_dropout_nothing_is_drawn() -> None:
    q, k, v = qkv(SMALL)
    state = torch.get_rng_state()
    assert torch.equal(fk.attention(q, k, v, dropout_p=0.0, dropout_seed=3), fk.attention(q, k, v))
    assert torch.equal(torch.get_rng_state(), state)


@impls
@pytest.mark.parametrize("seed", [None, 11])
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_drops_the_same_weights(reentrant: bool, seed: int | None, impl: str) -> None:
    inputs = leaves(*qkv(TINY, torch.float16))
    attend = partial(fk.attention, causal=True, dropout_p=P, dropout_seed=seed, impl=impl)
    torch.manual_seed(5)
    want = torch.autograd.grad(attend(*inputs).square().sum(), inputs)
    torch.manual_seed(5)
    out = torch.utils.checkpoint.checkpoint(attend, *inputs, use_reentrant=reentrant)
    out.square().sum().backward()
    assert all(torch.equal(x.grad, w) for x, w in zip(inputs, want, strict=True))


@impls
@pytest.mark.parametrize("given", ["int", "tensor"])
def test_compiled_is_eager(given: str, impl: str) -> None:
    torch._dynamo.reset()

    def loss(q: Tensor, k: Tensor, v: Tensor, seed: int | Tensor) -> Tensor:
        out = fk.attention(q * 2, k, v, causal=True, impl=impl, dropout_p=P, dropout_seed=seed, deterministic=True)
        return out.square().sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for i, seq in enumerate((11, 19, 23) if impl == "torch" else (11, 19)):
        inputs = leaves(*qkv(Shape(b=3, sq=seq, sk=seq + 3, h=2, hkv=1), torch.float16))
        seed = 17 + i if given == "int" else torch.tensor([17 + i])
        want = torch.autograd.grad(loss(*inputs, seed), inputs)
        for g, w in zip(torch.autograd.grad(compiled(*inputs, seed), inputs), want, strict=True):
            torch.testing.assert_close(g, w)


def test_compiled_without_a_seed() -> None:
    torch._dynamo.reset()
    q, k, v = qkv(SMALL)
    compiled = torch.compile(partial(fk.attention, dropout_p=P), fullgraph=True, backend="aot_eager")
    assert not torch.equal(compiled(q, k, v), compiled(q, k, v))


@pytest.mark.parametrize("varlen", [False, True])
def test_opcheck(varlen: bool) -> None:
    if varlen:
        batch = ragged([5, 0, 4], [6, 3, 7], SMALL)
        *inputs, cu_q, cu_k, max_q, max_k = batch.args
    else:
        inputs, cu_q, cu_k, max_q, max_k = qkv(SMALL.but(sq=9, sk=14)), None, None, 0, 0
    seed, rest = torch.tensor([3]), (0.25, True)
    fixed = (max_q, max_k, True, 0.5, -1, -1, 0.0)
    arguments = (*leaves(*inputs), *(None,) * 3, cu_q, cu_k, *(None,) * 4, *fixed, "bshd", True, "torch", seed, *rest)
    torch.library.opcheck(torch.ops.flashkernels.attention.default, arguments)
    out, lse = torch.ops.flashkernels.attention(*arguments)
    made = (torch.ones_like(out), None, out.detach(), lse.detach(), *inputs, *(None,) * 3, cu_q, cu_k, *fixed, "torch")
    wanted = [True, False, True, False, False, False]
    torch.library.opcheck(torch.ops.flashkernels.attention_backward.default, (*made, wanted, seed, *rest))


def test_autocast_drops_the_same_weights() -> None:
    q, k, v = qkv(SMALL)
    with torch.autocast("cpu", torch.bfloat16):
        out = fk.attention(q, k, v, dropout_p=P, dropout_seed=SEED)
    q, k, v = (x.bfloat16() for x in (q, k, v))
    assert torch.equal(out, fk.attention(q, k, v, dropout_p=P, dropout_seed=SEED))


# Errors, and who serves


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        ({"dropout_p": 1.0}, ValueError, r"dropout_p=1.0 is not in \[0, 1\)"),
        ({"dropout_p": -0.1}, ValueError, r"dropout_p=-0.1 is not in \[0, 1\)"),
        ({"dropout_p": NAN}, ValueError, r"dropout_p=nan is not in \[0, 1\)"),
        ({"dropout_p": "much"}, TypeError, "dropout_p='much' must be a float, got str"),
        ({"dropout_p": True}, TypeError, "dropout_p=True must be a float, got bool"),
        ({"dropout_p": False}, TypeError, "dropout_p=False must be a float, got bool"),
        ({"dropout_seed": 1.5}, TypeError, "dropout_seed=1.5 must be an int, a tensor or None, got float"),
        ({"dropout_seed": True}, TypeError, "dropout_seed=True must be an int"),
        ({"dropout_seed": 2**63}, ValueError, f"dropout_seed={2**63} is not a 64-bit integer"),
        ({"dropout_seed": torch.tensor([1, 2])}, ValueError, r"dropout_seed has shape \(2,\); it must hold one number"),
        ({"dropout_seed": torch.tensor(1, dtype=torch.int32)}, TypeError, "dropout_seed.dtype=torch.int32"),
        ({"dropout_seed": torch.tensor(1, device="meta")}, ValueError, "dropout_seed.device=meta differs from"),
        ({"deterministic": 1}, TypeError, "deterministic=1 must be a bool, got int"),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else None,
)
def test_error(arguments: dict[str, Any], kind: type[Exception], words: str) -> None:
    for grad in (False, True):
        q, k, v = (x.requires_grad_(grad) for x in qkv(SMALL))
        with pytest.raises(kind, match=words):
            fk.attention(q, k, v, **{"dropout_p": P, **arguments})
        batch = ragged([5], [6], SMALL)
        with pytest.raises(kind, match=words):
            fk.attention_varlen(*batch.args, **{"dropout_p": P, **arguments})


def test_the_table_says_why() -> None:
    problem = AttentionProblem(
        batch=1, seq_q=64, seq_k=64, heads=2, kv_heads=2, head_dim=64, dropout_p=0.1, causal=True
    )  # fmt: skip
    on = {v.name: v.reason for v in verdicts(api.IMPLS, problem, lookup("h200"))}
    assert on["hopper"] == "has no dropout" and on["triton"] is None
    on = {v.name: v.reason for v in verdicts(api.IMPLS, replace(problem, device="cpu", dtype="fp32"), None)}
    assert on["sdpa"] == "torch's fused attention drops other weights than ours would" and on["torch"] is None
    q, k, v = qkv(SMALL)
    with pytest.raises(fk.UnsupportedError, match="drops other weights"):
        fk.attention(q, k, v.new_zeros(k.shape), dropout_p=0.1, impl="sdpa")
    assert "dropout 0.1" in str(fk.explain("attention", problem=problem, gpu="h200"))


# Gradients that are the same in every run


def test_deterministic_asks_dispatch_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward that adds up in any order is refused by the flag alone."""
    asked: list[bool] = []

    def rejects(problem: BackwardProblem, gpu: object) -> str | None:
        asked.append(problem.deterministic)
        return "its additions have no fixed order" if problem.deterministic else "not here"

    hasty = Impl("hasty", "flashkernels.nowhere", rejects=rejects)
    monkeypatch.setattr(api, "BACKWARD_IMPLS", (hasty, *api.BACKWARD_IMPLS))
    monkeypatch.setattr(api, "_backward_plans", Plans(api._plan_backward))
    for flag in (False, True):
        fk.attention(*leaves(*qkv(SMALL)), deterministic=flag).sum().backward()
        fk.attention_varlen(*leaves(*ragged([5], [6], SMALL).args[:3]), *ragged([5], [6], SMALL).args[3:],
                            deterministic=flag).sum().backward()  # fmt: skip
    assert asked == [False, False, True, True]
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        fk.attention(*leaves(*qkv(SMALL)), causal=True).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert asked[4:] == [True]


def test_what_there_is_serves_deterministic_problems() -> None:
    call = AttentionProblem(batch=1, seq_q=64, seq_k=64, heads=2, kv_heads=2, head_dim=64)
    problem = BackwardProblem(call, ("q", "k", "v"), deterministic=True)
    assert {v.name: v.reason for v in verdicts(api.BACKWARD_IMPLS, problem, lookup("a100"))}["triton"] is None
    assert api.BACKWARD_IMPLS[0].name == "hopper" and api.BACKWARD_IMPLS[0].rejects(problem, lookup("h200")) is None


@impls
def test_gradients_are_the_same_in_every_run(impl: str) -> None:
    inputs = leaves(*qkv(TINY, torch.float16))
    attend = partial(fk.attention, dropout_p=P, dropout_seed=1, deterministic=True, impl=impl)
    first, second = (torch.autograd.grad(attend(*inputs).square().sum(), inputs) for _ in range(2))
    assert all(map(torch.equal, first, second))


# Nothing is done for what needs no gradient


@pytest.mark.parametrize("names", ["q", "k", "v", "q k", "sinks", "mask", "alibi_slopes"])
def test_only_what_is_wanted_is_made(names: str) -> None:
    features = keywords("alibi+sinks+floatmask", SMALL)
    inputs = dict(zip("qkv", qkv(SMALL), strict=True)) | features
    ours, all_of_it = ({name: x.clone() for name, x in inputs.items()} for _ in range(2))
    for name in names.split():
        ours[name].requires_grad_()
    for x in all_of_it.values():
        x.requires_grad_()
    for tensors in (ours, all_of_it):
        fk.attention(**tensors, dropout_p=P, dropout_seed=1, impl="torch").square().sum().backward()
    for name in inputs:
        if name in names.split():
            torch.testing.assert_close(ours[name].grad, all_of_it[name].grad)
        else:
            assert ours[name].grad is None


def test_no_product_is_computed_for_q_and_k_that_need_none() -> None:
    q, k, v = qkv(SMALL)
    out = fk.attention(q, k, v.requires_grad_(), impl="torch", dropout_p=P)
    with torch.profiler.profile() as profile:
        out.sum().backward()
    products = sum(e.count for e in profile.key_averages() if e.key == "aten::bmm")
    assert products == 2 * SMALL.b  # Q·Kᵀ and dV of each sequence


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=dtype_id)
@pytest.mark.parametrize("dim", [40, 64, 72, 128, 192, 256])
@pytest.mark.parametrize("feature", ["plain", "causal", "left+softcap+alibi+sinks", "boolmask"])
def test_gpu_dense(feature: str, dim: int, dtype: torch.dtype) -> None:
    shape = Shape(b=2, sq=300, sk=430, h=4, hkv=2, d=dim)
    check(*qkv(shape, dtype, device="cuda"), impl="triton", **keywords(feature, shape, "cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 72, 128])
def test_gpu_ragged(dim: int) -> None:
    batch = ragged(*LENGTHS, Shape(b=6, h=4, hkv=2, d=dim), torch.bfloat16, device="cuda")
    check_varlen(batch, impl="triton", causal=True)


@pytest.mark.gpu
def test_gpu_auto_drops_what_torch_drops() -> None:
    shape = Shape(b=2, sq=512, sk=512, h=4, hkv=4, d=72)
    q, k, v = qkv(shape, torch.bfloat16, device="cuda")
    got, want = (fk.attention(q, k, v, dropout_p=P, dropout_seed=SEED, impl=impl) for impl in ("auto", "torch"))
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    # a mask of ones shows every weight: V is the identity
    keys = torch.eye(72, device="cuda", dtype=torch.bfloat16)[None, :, None, :].expand(2, 72, 4, 72).contiguous()
    q, k = q[:, :512], torch.zeros_like(keys)
    out = fk.attention(q, k, keys, dropout_p=P, dropout_seed=SEED)
    assert torch.equal(out.transpose(1, 2) != 0, stay_of(q, keys))


@pytest.mark.gpu
def test_gpu_gradients_are_the_same_in_every_run() -> None:
    inputs = leaves(*qkv(Shape(b=2, sq=900, sk=1000, h=8, hkv=2, d=72), torch.bfloat16, device="cuda"))
    for p in (0.0, P):
        attend = partial(fk.attention, causal=True, dropout_p=p, dropout_seed=1, deterministic=True)
        runs = [torch.autograd.grad(attend(*inputs).square().sum(), inputs) for _ in range(5)]
        assert all(torch.equal(a, b) for run in runs for a, b in zip(run, runs[0], strict=True))


@pytest.mark.gpu
def test_gpu_does_not_wait_for_the_host() -> None:
    inputs = leaves(*qkv(Shape(b=2, sq=128, sk=128, h=4, hkv=4, d=72), torch.bfloat16, device="cuda"))
    with syncs_are_errors():
        for seed in (None, 5, torch.zeros(1, dtype=torch.int64, device="cuda")):
            fk.attention(*inputs, dropout_p=P, dropout_seed=seed).sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("seed", ["none", "int", "tensor"])
def test_gpu_graph(seed: str) -> None:
    """A graph replays an int; it draws again, or reads the tensor again, otherwise."""
    q, k, v = qkv(Shape(b=2, sq=128, sk=128, h=4, hkv=4, d=72), torch.bfloat16, device="cuda")
    held = torch.tensor([5], device="cuda")
    attend = partial(
        fk.attention, q, k, v, dropout_p=P, dropout_seed={"none": None, "int": 5, "tensor": held}[seed]
    )  # fmt: skip
    attend()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    graph.replay()
    first = out.clone()
    held.fill_(6)
    graph.replay()
    assert torch.equal(out, first) == (seed == "int")
    if seed == "tensor":
        assert torch.equal(out, fk.attention(q, k, v, dropout_p=P, dropout_seed=6))
