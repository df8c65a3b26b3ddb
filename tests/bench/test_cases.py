"""The named shapes: what the suites promise, and inputs that fit them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashkernels as fk
from flashkernels.attention.cases import HEAD_DIMS, QUICK_ON_GPU, SUITES, Case, inputs, suite

TINY = [case for name in SUITES for case in suite(name, device="cpu", quick=True)]


@pytest.mark.parametrize("name", SUITES)
def test_names_are_unique_within_a_suite(name: str) -> None:
    names = [case.name for case in suite(name)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", SUITES)
def test_quick_on_the_cpu_has_the_same_names_and_features(name: str) -> None:
    def features(case: Case) -> tuple[object, ...]:
        p = case.problem
        return case.name, p.head_dim, p.head_dim_v, p.causal, case.softcap, p.mask, p.varlen, p.heads // p.kv_heads

    assert [*map(features, suite(name, device="cpu", quick=True))] == [*map(features, suite(name))]


@pytest.mark.parametrize("name", SUITES)
def test_quick_on_a_gpu_takes_some_full_cases(name: str) -> None:
    full, quick = suite(name), suite(name, quick=True)
    assert set(quick) < set(full)
    assert len(quick) == len(QUICK_ON_GPU[name])


def test_headdims_has_every_dimension_full_and_causal() -> None:
    dims = [*range(32, 257, 8), 512]
    assert list(HEAD_DIMS) == dims
    assert [c.name for c in suite("headdims")] == [f"d{d}-{kind}" for d in dims for kind in ("full", "causal")]
    d72 = next(case.problem for case in suite("headdims") if case.name == "d72-causal")
    assert (d72.batch, d72.seq_q, d72.heads, d72.dtype, d72.causal) == (4, 4096, 28, "bf16", True)


def test_scaling_is_the_grid_of_thirteen_in_fp16() -> None:
    problems = [case.problem for case in suite("scaling")]
    assert len(problems) == 13
    assert {(p.dtype, p.causal) for p in problems} == {("fp16", False)}


def test_seqlens_keeps_the_tokens_constant() -> None:
    assert {case.problem.total_q for case in suite("seqlens")} == {16384}


def test_flops_of_a_ragged_batch_count_its_true_lengths() -> None:
    ragged = next(case for case in suite("features") if case.name == "d64-varlen")
    pairs = sum(n * (n + 1) // 2 for n in ragged.lengths)
    assert ragged.flops() == 4 * ragged.problem.heads * pairs * 64
    assert len(ragged.lengths) == 16


def test_shapes_are_one_long_sequence_many_short_ones_and_mixed_lengths() -> None:
    found = {case.name: case for case in suite("shapes")}
    assert len(found) == 15
    gqa = found["gqa-s16384-d128-causal"].problem
    assert (gqa.batch, gqa.seq_q, gqa.heads, gqa.kv_heads, gqa.causal, gqa.dtype) == (1, 16384, 32, 8, True, "bf16")
    window = found["window1024-s16384-d128-causal"].problem
    assert (window.heads, window.causal, window.band) == (16, True, (1024, 0))
    assert found["b16-s1024-d128-full"].problem.heads == 16
    assert found["b1-s16384-d72-causal"].problem.heads == 28


def test_the_mixed_lengths_are_spread_and_shuffled() -> None:
    lengths = next(case.lengths for case in suite("shapes") if case.name == "varlen64-d128-causal")
    assert (len(lengths), len(set(lengths)), min(lengths), max(lengths)) == (64, 64, 100, 4000)
    assert sum(lengths) == 64 * 2050
    assert abs(sum(lengths[:32]) - sum(lengths[32:])) < 4000  # neither half is the long one


def test_fp8_has_each_case_twice_on_the_same_numbers() -> None:
    found = suite("fp8")
    assert [case.name for case in found] == [
        f"d{d}-{kind}-{dtype}" for d in (64, 128, 256) for kind in ("full", "causal") for dtype in ("bf16", "fp8")
    ]
    for wide, small in zip(found[::2], found[1::2], strict=True):
        assert replace(wide.problem, dtype="fp8") == small.problem and wide.flops() == small.flops()
        p = small.problem
        assert (p.batch, p.seq_q, p.heads * p.head_dim) == (1, 16384, 2048)
    tiny = suite("fp8", device="cpu", quick=True)
    (args, _), (small_args, scales) = (inputs(case, device="cpu") for case in tiny[:2])
    assert {x.dtype for x in args} == {torch.bfloat16} and {x.dtype for x in small_args} == {torch.float8_e4m3fn}
    for x, y, scale in zip(args, small_args, scales.values(), strict=True):
        torch.testing.assert_close(y.float() * scale[:, None, :, None], x.float(), rtol=2**-4, atol=2**-9)


@pytest.mark.parametrize("case", TINY[::7] + list(suite("features", device="cpu", quick=True)), ids=lambda c: c.name)
def test_inputs_fit_the_public_function(case: Case) -> None:
    args, kwargs = inputs(case, device="cpu", dtype=torch.float32)
    attend = fk.attention_varlen if case.lengths else fk.attention
    out = attend(*args, impl="torch", **kwargs)
    assert isinstance(out, torch.Tensor)
    assert out.shape == (*args[0].shape[:-1], case.problem.head_dim_v)
    assert out.isfinite().all()


def test_the_same_seed_gives_the_same_inputs() -> None:
    first, again, other = (inputs(TINY[0], device="cpu", seed=seed)[0][0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_an_unknown_suite_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="suite='nonsense' is not one of 'headdims'"):
        suite("nonsense")
