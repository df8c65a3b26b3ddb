"""The suite of decoding and the accuracy of the cache's formats."""

from __future__ import annotations

import pytest
import torch

from flashkernels.bench import decode
from flashkernels.bench.suites import only, suite
from flashkernels.formats import FORMATS
from flashkernels.kvcache import PagedCache

# What rounding gives on normal numbers, and with outlier channels, a little rounded up: more is a bug.
LIMITS = {"fp8": 0.045, "int8": 0.012, "int4": 0.14}
OUTLIER_LIMITS = {"fp8": 0.05, "int8": 0.08}


def test_accuracy_on_normal_numbers() -> None:
    found = decode.accuracy("cpu", draws=2)["normal"]
    assert all(found[form][0] <= limit for form, limit in LIMITS.items()), found
    assert all(errors[1] <= errors[0] for errors in found.values())


@pytest.mark.slow
def test_accuracy_with_outliers() -> None:
    found = decode.accuracy("cpu")["1% of channels 20x"]
    assert all(found[form][0] <= limit for form, limit in OUTLIER_LIMITS.items()), found


def test_accuracy_is_one_ratio_of_norms() -> None:
    """Over all draws together, as if they were one batch."""
    found = decode.accuracy("cpu", draws=3, keys=64, heads=2)["1% of channels 20x"]["int8"]
    q, k, v = (torch.cat(x) for x in zip(*(decode._drawn(seed, 0.01, 64, 2, 128) for seed in range(3)), strict=True))
    near = decode._attended(q, *(decode.numbers(*decode._stored(x, "int8")) for x in (k, v)))
    for error, ours, right in zip(found, near, decode._attended(q, k, v), strict=True):
        assert error == pytest.approx(float((ours - right).norm() / right.norm()), rel=1e-3)


@pytest.mark.parametrize(("form", "steps"), [("int8", 127), ("int4", 7)])
def test_outliers_cost_what_rounding_alone_costs(form: str, steps: int) -> None:
    """Against the same rounding in fp64, with scales that are not rounded themselves."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        groups = x.double().unflatten(-1, (-1, FORMATS[form].group or x.shape[-1]))
        scale = groups.abs().amax(-1, keepdim=True) / steps
        return ((groups / scale).round() * scale).flatten(-2).float()

    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(4, n, 128, generator=gen) for n in (16, 512, 512))
    for x in (k, v):
        x[:, :, 17] *= 20
    exact, _ = decode._attended(q, k, v)
    ours = decode._attended(q, *(decode.numbers(*decode._stored(x, form)) for x in (k, v)))[0]
    alone = decode._attended(q, rounded(k), rounded(v))[0]
    assert (ours - exact).norm() <= 1.03 * (alone - exact).norm()


def test_rows_of_a_quick_run() -> None:
    chosen = only(suite("decode", "formats", device="cpu", quick=True), "int4-b16-s4096,bf16-ragged")
    for (row,) in decode.run(chosen, [], rounds=1):
        assert row.ok and row.impl == "torch" and row.op == "decode" and row.suite == "formats"
        assert {"batch", "context", "kv", "page_size", "heads", "kv_heads", "head_dim", "launch", "l2"} <= {*row.params}
    keys = sum(chosen.cases[1].lengths)
    assert row.params["keys"] == keys
    assert row.tbps == pytest.approx(chosen.cases[1].cache_bytes() / row.seconds / 1e12)


def test_cases_count_the_bytes_of_the_cache() -> None:
    whole = {case.name: case for case in suite("decode", "formats").cases}
    assert whole["bf16-b64-s4096"].cache_bytes() == 64 * 4096 * 8 * 2 * 128 * 2
    assert whole["int4-b64-s4096"].cache_bytes() == 64 * 4096 * 8 * 2 * (64 + 8)
    assert whole["bf16-mla-b64-s4096"].cache_bytes() == 64 * 4096 * 576 * 2
    assert whole["bf16-ragged"].cache_bytes() == (63 * 512 + 65536) * 8 * 2 * 128 * 2


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="suite='headdims' is not one of 'formats'"):
        suite("decode", "headdims")
    with pytest.raises(ValueError, match="impls='cuda' is not one of 'hopper', 'triton', 'torch', 'invariant'"):
        decode.choose("cuda")


@pytest.mark.parametrize("latent", [False, True], ids=["two", "latent"])
@pytest.mark.parametrize("form", ["fp32", "int4"])
def test_turns_with_copies_of_the_cache(form: str, latent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as make the bytes, of the same numbers in memory of their own."""
    table = torch.arange(4, dtype=torch.int32).view(2, 2)
    cache = PagedCache.allocate(4, 16, 2, 64, block_table=table, format=form, latent=latent)
    for x in cache.tensors:
        if x is not None and x.is_floating_point():
            x.normal_()
    case = suite("decode", "formats", device="cpu", quick=True).cases[0]
    monkeypatch.setattr(decode, "APART", 2.5 * case.cache_bytes())
    first, *more = decode._turns(case, (torch.zeros(2), cache))
    assert first[1] is cache and len(more) == 2
    for _, copy in more:
        assert copy.shared == latent
        assert copy.k.data_ptr() != cache.k.data_ptr() and copy.v.data_ptr() != cache.v.data_ptr()
        for name in ("k", "v", "k_scale", "v_scale"):
            mine, theirs = getattr(copy, name), getattr(cache, name)
            assert (mine is None and theirs is None) or torch.equal(mine, theirs)


def test_one_case_keeps_its_cache_warm() -> None:
    chosen = suite("decode", "formats")
    warm = [case for case in chosen.cases if decode.SUBJECT.params(case, chosen)["l2"] == "warm"]
    assert chosen.l2 == "cold" and [case.name for case in warm] == ["bf16-b1-s4096-warm"]
