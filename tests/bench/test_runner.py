"""A run checks before it times: wrong answers, refusals and crashes become rows with a reason."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import flashkernels as fk
from flashkernels.attention.cases import Case, suite as cases
from flashkernels.bench import check, runner
from flashkernels.bench.peers import PEERS, Unsupported, choose
from flashkernels.bench.results import Row
from flashkernels.bench.runner import Contestant
from flashkernels.bench.suites import Suite, suite
from flashkernels.bench.timing import Call
from flashkernels.hardware import GPUS

HEADDIMS = suite("attention", "headdims", device="cpu", quick=True)
FEATURES = cases("features", device="cpu", quick=True)


def contestant(change: Callable[[torch.Tensor], Any], *, peer: bool = False) -> Contestant:
    def prepare(case: Case, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        return Call(lambda: change(fk.attention(*args, impl="torch", **kwargs)))  # type: ignore[arg-type]

    return Contestant("it", peer, prepare)


def measured(one: Contestant, which: Suite = HEADDIMS) -> Row:
    [row] = runner.measure(which.cases[1], which, [one], None, rounds=2)
    return row


def test_a_right_implementation_is_timed() -> None:
    row = measured(contestant(lambda out: out))
    assert row.ok
    assert row.ms_p50 is not None and row.ms_p99 is not None and 0 < row.ms_p50 <= row.ms_p99
    assert row.tflops == pytest.approx(HEADDIMS.cases[1].flops() / row.ms_p50 / 1e9)
    assert row.error is not None and row.reference_error is not None and row.error <= 2 * row.reference_error + 1e-5
    assert (row.roofline, row.bound) == (None, None)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda out: 1.05 * out, id="scaled"),
        pytest.param(lambda out: out.roll(1, dims=2), id="heads-mixed"),
        pytest.param(lambda out: torch.zeros_like(out), id="zero"),
        pytest.param(lambda out: torch.where(torch.arange(out.shape[1])[:, None, None] == 5, math.nan, out), id="nan"),
    ],
)
def test_a_wrong_implementation_is_caught_and_not_timed(change: Callable[[torch.Tensor], Any]) -> None:
    row = measured(contestant(change))
    assert not row.ok
    assert row.ms_p50 is None
    assert row.reason is not None and row.reason.startswith("error ")
    row.as_dict()


def test_a_wrong_shape_is_caught() -> None:
    row = measured(contestant(lambda out: out.transpose(1, 2)))
    assert not row.ok
    assert row.reason is not None and "shape" in row.reason


def raising(error: Exception) -> Callable[[torch.Tensor], Any]:
    def change(out: torch.Tensor) -> Any:
        raise error

    return change


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        pytest.param(Unsupported("has no sinks"), "has no sinks", id="unsupported"),
        pytest.param(torch.OutOfMemoryError("Tried to allocate"), "out of memory", id="memory"),
        pytest.param(RuntimeError("first line\nsecond line"), "RuntimeError: first line", id="crash"),
        pytest.param(AssertionError(), "AssertionError: no message", id="assert"),
    ],
)
def test_an_exception_becomes_a_reason(error: Exception, reason: str) -> None:
    row = measured(contestant(raising(error), peer=True))
    assert (row.ok, row.reason) == (False, reason)


def test_a_contestant_that_fails_under_the_clock_does_not_end_the_run() -> None:
    calls = []

    def once(out: torch.Tensor) -> torch.Tensor:
        calls.append(out)
        if len(calls) > 1:
            raise RuntimeError("only once")
        return out

    row = measured(contestant(once))
    assert (row.ok, row.reason) == (False, "RuntimeError: only once")


def test_params_hold_what_changes_the_figure() -> None:
    row = measured(contestant(lambda out: out))
    assert row.params == {
        "batch": 2, "seq": 64, "heads": 2, "kv_heads": 2, "head_dim": 32, "causal": True, "dtype": "bf16",
        "launch": "eager", "l2": "warm",
    }  # fmt: skip


def test_params_of_features() -> None:
    which = suite("attention", "features")
    params = {case.name: runner._params(case, which) for case in which.cases}
    assert params["d64-window1024"]["window"] == [1024, -1]
    assert params["d64-softcap30"]["softcap"] == 30.0
    assert params["d64-cross"]["seq_k"] == 4096
    assert params["d192-v128"]["head_dim_v"] == 128
    assert len(params["d72-varlen"]["lengths"]) == 16
    assert params["d72-gqa7"]["kv_heads"] == 4


@pytest.mark.parametrize("case", FEATURES, ids=lambda case: case.name)
def test_peers_compute_the_same_or_say_why_not(case: Case) -> None:
    which = Suite("attention", "features", (case,), "cpu", "eager", "warm")
    for row in runner.measure(case, which, runner.theirs(choose("naive,sdpa-flash,sdpa-math")), None, rounds=1):
        assert row.ok or (row.reason is not None and not row.reason.startswith("error ")), row


@pytest.mark.parametrize("case", FEATURES, ids=lambda case: case.name)
def test_the_oracle_in_pieces_is_the_oracle(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    args, kwargs = runner.inputs(case, device="cpu", dtype=torch.float32)
    attend = fk.attention_varlen if case.lengths else fk.attention
    monkeypatch.setattr(check, "SCORE_LIMIT", 1)
    whole = attend(*args, impl="torch", **kwargs)
    assert isinstance(whole, torch.Tensor)
    assert check.relative_error(check.oracle(case, args, kwargs), whole) < 1e-6
    assert check.relative_error(check.plain(case, args, kwargs), whole) < 1e-5


def test_ours_on_a_gpu_are_the_kernels_and_the_padded_baseline() -> None:
    gpu = GPUS["h200"]
    d72, d64, d512 = (next(c for c in cases("headdims") if c.name == f"d{d}-causal") for d in (72, 64, 512))
    assert [c.name for c in runner.ours(d72, gpu)] == ["triton", "triton-standard"]
    assert [c.name for c in runner.ours(d64, gpu)] == ["triton"]
    assert [c.name for c in runner.ours(d512, gpu)] == ["triton"]


def test_ours_on_the_cpu_leave_the_interpreter_out() -> None:
    assert [c.name for c in runner.ours(HEADDIMS.cases[0], None)] == ["sdpa", "torch"]


def test_the_score_matrix_of_the_naive_peer_is_limited() -> None:
    long = next(case for case in cases("seqlens") if case.name == "d64-s16384")
    naive = choose("naive")[0]
    huge = torch.empty(0)
    with pytest.raises(Unsupported, match="the score matrix takes 16 GiB, the limit is 16 GiB"):
        naive.prepare(long, (huge, huge, huge), {})


def test_peers_are_chosen_by_name() -> None:
    assert choose("none") == ()
    assert choose("all") == PEERS
    assert {peer.name for peer in PEERS} - {peer.name for peer in choose("fast")} == {"flex", "flashinfer"}
    with pytest.raises(ValueError, match="peers='fa5' is not one of 'all'"):
        choose("naive,fa5")


def test_a_peer_says_why_it_is_not_here() -> None:
    cudnn = choose("sdpa-cudnn")[0]
    assert cudnn.available("cpu") == "needs a CUDA device"
    assert cudnn.available("cuda") is None
    missing = choose("flash-attn")[0].available("cuda")
    assert missing in (None, "flash_attn.flash_attn_interface is not installed")


def test_the_cpu_has_no_graphs_and_no_cache_to_flush() -> None:
    with pytest.raises(ValueError, match="on the CPU only 'eager' and 'warm'"):
        suite("attention", "headdims", device="cpu", quick=True, launch="graph")


def test_suites_have_their_own_ways_of_timing() -> None:
    assert [(s.launch, s.l2) for s in (suite("attention", "scaling"), suite("attention", "headdims"))] == [
        ("graph", "warm"),
        ("eager", "cold"),
    ]
    assert suite("attention", "scaling", l2="cold").l2 == "cold"


@pytest.mark.gpu
@pytest.mark.parametrize(("launch", "l2"), [("eager", "cold"), ("graph", "warm"), ("graph", "cold")])
def test_a_gpu_run_is_right_and_within_the_roofline(launch: Any, l2: Any) -> None:
    which = suite("attention", "scaling", quick=True, launch=launch, l2=l2)
    rows = [row for rows in runner.run(which, choose("naive,sdpa-flash"), rounds=2) for row in rows]
    assert {row.impl for row in rows} >= {"triton", "naive", "sdpa-flash"}
    for row in rows:
        assert row.ok, row
        assert row.roofline is not None and 0 < row.roofline < 1, row


@pytest.mark.gpu
def test_a_gpu_run_of_every_feature_is_right() -> None:
    which = suite("attention", "features", quick=True)
    for rows in runner.run(which, choose("fast"), rounds=1):
        assert all(row.ok for row in rows if not row.peer), rows
