"""A run checks before it times: wrong answers, refusals and crashes become rows with a reason."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
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
from flashkernels.dispatch import Impl
from flashkernels.hardware import GPUS, Gpu

HEADDIMS = suite("attention", "headdims", device="cpu", quick=True)
FEATURES = cases("features", device="cpu", quick=True)


def contestant(change: Callable[[torch.Tensor], Any], *, peer: bool = False) -> Contestant:
    def prepare(case: Case, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        return Call(lambda: change(fk.attention(*args, impl="torch", **kwargs)))

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
    names = [[c.name for c in runner.ours(case, gpu) if c.name != "hopper"] for case in (d72, d64, d512)]
    assert names == [["triton", "triton-standard"], ["triton"], ["triton"]]


def named(case: Case, impls: str, gpu: Gpu | None) -> list[str]:
    return [c.name for c in runner.ours(case, gpu, runner.choose(impls))]


def test_ours_can_be_named() -> None:
    gpu = GPUS["h200"]
    d72 = next(c for c in cases("headdims") if c.name == "d72-causal")
    assert named(d72, "torch,triton", gpu) == ["triton", "torch"]
    assert named(d72, "triton-standard", gpu) == ["triton-standard"]
    assert named(d72, "sdpa", gpu) == []
    assert named(HEADDIMS.cases[0], "torch", None) == ["torch"]


def test_a_named_implementation_is_timed_where_auto_would_leave_it(monkeypatch: pytest.MonkeyPatch) -> None:
    impls = (Impl("hopper", "", defers=lambda problem, gpu: "triton is faster"), Impl("triton", ""), Impl("torch", ""))
    monkeypatch.setattr(runner, "IMPLS", impls)
    d64 = next(c for c in cases("headdims") if c.name == "d64-full")
    assert [c.name for c in runner.ours(d64, GPUS["h200"])] == ["triton"]
    assert named(d64, "hopper,triton", GPUS["h200"]) == ["hopper", "triton"]


def test_an_unknown_implementation_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"impls='wgmma' is not one of .*'triton', .*'triton-standard'"):
        runner.choose("triton,wgmma")


def test_the_cost_of_a_launch_is_told_for_each_of_ours() -> None:
    assert list(runner.launch_costs("cpu")) == ["sdpa", "torch"]
    costs = runner.launch_costs("cpu", ["torch"])
    assert list(costs) == ["torch"] and costs["torch"] > 0


def test_ours_on_the_cpu_leave_the_interpreter_out() -> None:
    assert [c.name for c in runner.ours(HEADDIMS.cases[0], None)] == ["sdpa", "torch"]


def test_the_score_matrix_of_the_naive_peer_is_limited() -> None:
    long = next(case for case in cases("seqlens") if case.name == "d64-s16384")
    naive = choose("naive")[0]
    huge = torch.empty(0)
    with pytest.raises(Unsupported, match="the score matrix takes 16 GiB, the limit is 16 GiB"):
        naive.prepare(long, (huge, huge, huge), {})


class Fa4:
    """Stands for the module of FA4: keeps what it was called with, and answers as 4.0.0b36 does."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, dict[str, Any]]] = []

    def flash_attn_func(self, *tensors: torch.Tensor, **options: Any) -> tuple[torch.Tensor, None]:
        self.calls.append(("dense", len(tensors), options))
        return tensors[0], None

    def flash_attn_varlen_func(self, *tensors: torch.Tensor, **options: Any) -> tuple[torch.Tensor, None]:
        self.calls.append(("varlen", len(tensors), options))
        return tensors[0], None


def fa4_call(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, dict[str, Any], tuple[Any, ...], dict[str, Any]]:
    case = next(case for case in FEATURES if case.name == name)
    args, kwargs = runner.inputs(case, device="cpu")
    rival = Fa4()
    monkeypatch.setitem(sys.modules, "flash_attn.cute", rival)
    assert choose("fa4")[0].prepare(case, args, kwargs).run() is args[0]
    [(function, tensors, options)] = rival.calls
    assert tensors == 3  # a fourth one by place would be taken for qv
    return function, options, args, kwargs


def test_fa4_takes_none_for_an_open_side_of_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    function, options, _, _ = fa4_call("d72-gqa8", monkeypatch)
    assert (function, options["causal"], options["window_size"]) == ("dense", True, (None, None))
    function, options, _, _ = fa4_call("d72-window1024", monkeypatch)
    assert (function, options["causal"], options["window_size"]) == ("dense", True, (16, None))


def test_fa4_takes_lengths_and_sinks_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    function, options, args, _ = fa4_call("d72-varlen", monkeypatch)
    assert function == "varlen"
    assert options["cu_seqlens_q"] is args[3] and options["cu_seqlens_k"] is args[4]
    assert (options["max_seqlen_q"], options["max_seqlen_k"]) == args[5:]
    _, options, _, kwargs = fa4_call("d72-sinks", monkeypatch)
    assert options["learnable_sink"] is kwargs["sinks"]


@pytest.mark.parametrize(
    ("peer", "name", "reason"),
    [
        ("fa4", "d72-alibi", "has no ALiBi"),
        ("fa4", "d72-boolmask", "takes no mask tensor"),
        ("sdpa-cudnn", "d72-varlen", "takes dense batches only"),
        ("sdpa-cudnn", "d72-window1024", "has no window"),
        ("sdpa-cudnn", "d72-softcap30", "has no softcap"),
    ],
)
def test_a_rival_says_what_it_cannot_do(peer: str, name: str, reason: str) -> None:
    case = next(case for case in FEATURES if case.name == name)
    args, kwargs = runner.inputs(case, device="cpu")
    with pytest.raises(Unsupported, match=reason):
        choose(peer)[0].prepare(case, args, kwargs)


def test_fa4_takes_multiples_of_eight_up_to_256() -> None:
    large = next(case for case in cases("headdims") if case.name == "d512-full")
    odd = replace(large, problem=replace(large.problem, head_dim=68, head_dim_v=68))
    for case in (large, odd):
        with pytest.raises(Unsupported, match="multiples of 8 up to 256"):
            choose("fa4")[0].prepare(case, (), {})


def test_peers_are_chosen_by_name() -> None:
    assert choose("none") == ()
    assert choose("all") == tuple(peer for peer in PEERS if peer.op == "attention")
    assert {peer.name for peer in choose("all")} - {peer.name for peer in choose("fast")} == {"flex", "flashinfer"}
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
