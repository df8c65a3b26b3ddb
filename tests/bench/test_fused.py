"""Benchmarks of the fused ops: the suite's promises, that every formula is right, and that wrong results are found."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flashkernels.bench import fused
from flashkernels.bench.check import tolerance
from flashkernels.bench.peers import Unsupported, choose, liger, torch_fused
from flashkernels.bench.results import COPY, Results, ResultsError, Row, describe, fastest, read, speedup
from flashkernels.bench.runner import Contestant, measure
from flashkernels.bench.suites import only, suite
from flashkernels.bench.timing import Call
from flashkernels.cli.bench import notes, table
from flashkernels.cli.table import fill
from flashkernels.fused.cases import QUICK_ON_GPU, ROWS, Case, inputs, suite as cases
from flashkernels.fused.problem import LossProblem

TINY = suite("fused", "rows", device="cpu", quick=True)
BY_NAME = {case.name: case for case in TINY.cases}
each_case = pytest.mark.parametrize("case", TINY.cases, ids=lambda case: case.name)


def errors(case: Case, prepare: fused.Prepare) -> tuple[float, float]:
    """Of what a contestant gives, and the largest that passes."""
    args, kwargs = inputs(case, device="cpu")
    reference = fused.oracle(case, args, kwargs)
    call = fused.timed(prepare, case, args, kwargs)
    with call.scope():
        found = fused.error(call.run(), reference, case)
    return found, tolerance(fused.error(fused.plain(case, args, kwargs), reference, case))


# --- the suite


def test_names_are_unique_and_quick_runs_take_some() -> None:
    names = [case.name for case in cases("rows")]
    assert len(names) == len(set(names))
    assert {case.name for case in cases("rows", quick=True)} == set(QUICK_ON_GPU["rows"])
    assert [case.name for case in cases("rows", device="cpu", quick=True)] == names
    with pytest.raises(ValueError, match="suite='formats' is not one of 'rows'"):
        suite("fused", "formats")


def test_cases_have_the_sizes_that_are_promised_and_count_the_bytes_that_must_move() -> None:
    found = {case.name: case for case in ROWS}
    row = 16384 * 4096 * 2
    moved = {"rms_norm": 2, "rms_norm+residual": 4, "rms_norm-backward": 3, "rms_norm+residual-backward": 4}
    for name, streams in moved.items():
        assert found[name].problem.bytes() == streams * row
    assert found["rope"].problem.bytes() == 2 * 16384 * (32 + 8) * 128 * 2
    assert found["swiglu"].problem.bytes() == 16384 * 3 * 14336 * 2
    assert found["softmax"].problem.bytes() == 2 * 8192 * 32768 * 2
    assert found["sample"].problem.bytes() == found["greedy"].problem.bytes() == 256 * 128256 * 2
    assert found["linear_cross_entropy"].problem == LossProblem(8192, 128256, 4096, "bf16", "cuda", grads=True)


def test_rows_have_the_parameters_that_change_a_figure() -> None:
    sample, rope, loss = (next(case for case in ROWS if case.name == name) for name in (
        "sample", "rope", "linear_cross_entropy"))  # fmt: skip
    assert sample.params | {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "launch": "graph"} == sample.params
    assert rope.params | {"heads": [32, 8], "width": 128} == rope.params
    assert loss.params | {"depth": 4096, "gradients": "step", "launch": "eager"} == loss.params


def test_a_launch_is_the_cases_own() -> None:
    whole = suite("fused", "rows")
    assert (whole.launch, whole.l2) == ("graph", "cold")
    with pytest.raises(ValueError, match="launch='eager': the cases of fused say"):
        suite("fused", "rows", launch="eager")


def test_peers_belong_to_their_op() -> None:
    assert [peer.name for peer in choose("all", "fused")] == ["eager", "compile", "liger"]
    with pytest.raises(ValueError, match="peers='fa4'"):
        choose("fa4", "fused")
    with pytest.raises(ValueError, match="impls='cuda' is not one of 'triton', 'torch'"):
        fused.choose("cuda")


# --- the contestants


@each_case
def test_everyone_is_right(case: Case) -> None:
    one = only(TINY, case.name)
    (rows,) = fused.run(one, choose("eager", "fused"), rounds=1)
    assert [row.impl for row in rows] == ["torch", "eager"] + ([] if case.depth else [COPY])
    assert all(row.ok and row.suite == "rows" and row.params["launch"] == "eager" for row in rows), rows
    assert all(row.tbps == pytest.approx(case.problem.bytes() / row.seconds / 1e12) for row in rows)


@each_case
def test_torch_compiles_the_formulas_in_one_graph(case: Case) -> None:
    def traced(case: Case, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        made = torch.compile(torch_fused.formula(case), fullgraph=True, dynamic=False, backend="aot_eager")
        return Call(lambda: made(*args, **kwargs))

    found, most = errors(case, traced)
    assert found <= most


@pytest.mark.parametrize("name", ["rms_norm+residual-backward", "layer_norm-backward"])
def test_a_backward_pass_is_the_same_every_time_and_leaves_the_inputs_alone(name: str) -> None:
    case = BY_NAME[name]
    args, kwargs = inputs(case, device="cpu")
    before = [x.clone() for x in args]
    run = fused.timed(torch_fused.prepare, case, args, kwargs).run
    for first, second in zip(run(), run(), strict=True):
        assert torch.equal(first, second)
    assert len(run()) == len(args)
    assert all(torch.equal(x, y) and not x.requires_grad for x, y in zip(args, before, strict=True))


def test_the_oracle_of_a_loss_goes_by_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    case = BY_NAME["linear_cross_entropy"]
    args, kwargs = inputs(case, device="cpu")
    whole = fused.oracle(case, args, kwargs)
    monkeypatch.setattr(fused, "TOKENS", 5)
    for one, other in zip(fused.oracle(case, args, kwargs), whole, strict=True):
        torch.testing.assert_close(one, other)


# --- what is wrong is found


@pytest.mark.parametrize("name", ["rms_norm", "rope", "rms_norm-backward", "linear_cross_entropy"])
def test_a_wrong_number_is_found(name: str) -> None:
    case = BY_NAME[name]

    def wrong(case: Case, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        def run() -> Any:
            found = torch_fused.formula(case)(*args)
            return tuple(x * 1.001 for x in found) if isinstance(found, tuple) else found * 1.001

        return Call(run)

    def prepare(case: Case, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        return fused.timed(wrong, case, args, kwargs)

    [row] = measure(case, TINY, [Contestant("it", False, prepare)], None, 1, fused.SUBJECT)
    assert not row.ok and "error" in (row.reason or "")


@pytest.mark.parametrize(("name", "rank"), [("sample", 50), ("greedy", 1)])
def test_a_token_that_was_cut_is_found(name: str, rank: int) -> None:
    case = BY_NAME[name]
    args, kwargs = inputs(case, device="cpu")
    reference = fused.oracle(case, args, kwargs)
    best = args[0].topk(rank + 1).indices

    def drawn(ids: Tensor) -> float:
        return fused.error((ids, reference.logprobs.gather(1, ids[:, None])[:, 0]), reference, case)

    assert drawn(best[:, 0]) == 0 and drawn(best[:, rank]) == math.inf


def test_top_p_leaves_the_fewest_that_have_its_share() -> None:
    logits = torch.tensor([[0.5, 0.2, 0.2, 0.1]], dtype=torch.float64).log()
    for top_p, allowed in ((0.4, 1), (0.6, 3), (0.95, 4)):  # equal tokens may all be drawn
        found = fused._tokens(logits, temperature=1.0, top_k=4, top_p=top_p)
        assert int(found.allowed.sum()) == allowed
    assert int(fused._tokens(logits, temperature=1.0, top_k=2).allowed.sum()) == 3


def test_a_copy_that_is_none_is_found() -> None:
    x = torch.arange(4)
    assert fused.error(fused.Copied(x.clone(), x), (), TINY.cases[0]) == 0
    assert fused.error(fused.Copied(x + 1, x), (), TINY.cases[0]) == math.inf


# --- Liger, by a module with its names: what it gets, and what it may write over


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Liger's functions, in torch, with its layouts; some write over their input as Liger's do."""
    module = ModuleType("liger_kernel.transformers.functional")

    def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        for x in (q, k):
            a, b = x.chunk(2, -1)
            x.copy_(x * cos + torch.cat((-b, a), -1) * sin)
        return q, k, cos, sin

    def add_norm(x: Tensor, r: Tensor, w: Tensor, eps: float, offset: float, mode: str, in_place: bool) -> Any:
        assert (mode, in_place) == ("gemma", False)
        return F.rms_norm(x + r, w.shape, w + offset, eps), x + r

    module.__dict__.update(
        liger_rms_norm=lambda x, w, eps, offset, mode, in_place: F.rms_norm(x, w.shape, w + offset, eps),
        liger_fused_add_rms_norm=add_norm,
        liger_layer_norm=lambda x, w, b, eps: F.layer_norm(x, w.shape, w, b, eps),
        liger_rope=rope,
        liger_swiglu=lambda a, b: F.silu(a) * b,
        liger_cross_entropy=F.cross_entropy,
        liger_fused_linear_cross_entropy=lambda x, w, targets: F.cross_entropy(F.linear(x, w), targets),
    )
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


@each_case
def test_liger_gets_what_it_expects(case: Case, names: ModuleType) -> None:
    if case.op in ("softmax", "sample"):
        reason = "has no sample" if case.op == "sample" else "this version has no liger_softmax"
        with pytest.raises(Unsupported, match=reason):
            errors(case, liger.prepare)
        return
    found, most = errors(case, liger.prepare)
    assert found <= most


def test_liger_turns_a_copy(names: ModuleType) -> None:
    args, kwargs = inputs(BY_NAME["rope"], device="cpu")
    before = args[0].clone()
    liger.prepare(BY_NAME["rope"], args, kwargs).run()
    assert torch.equal(args[0], before)


# --- the results


def rows_of(case: str, figures: dict[str, tuple[float, float]], peer: set[str], **more: Any) -> list[Row]:
    """Rows by impl: milliseconds and TB/s."""
    params = {"launch": "graph", "l2": "cold"}
    same = {"roofline": None, "bound": None, "error": 1e-3, "reference_error": 1e-3, "tflops": 0.0}
    return [
        Row("fused", "rows", case, params, impl, impl in peer, ms_p50=ms, ms_p99=ms, tbps=tbps, **same,
            **{name: values[impl] for name, values in more.items()})
        for impl, (ms, tbps) in figures.items()
    ]  # fmt: skip


def measured() -> Results:
    norm = {"triton": (0.1, 3.6), "eager": (0.2, 1.8), COPY: (0.09, 4.0)}
    loss = {"triton": (40.0, 0.1), "eager": (41.0, 0.1)}
    rows = rows_of("rms_norm", norm, {"eager", COPY})
    rows += rows_of("linear_cross_entropy", loss, {"eager"}, peak_gb={"triton": 0.5, "eager": 5.0})
    return Results(describe("cpu", quick=False), rows)


def test_a_copy_is_nobodys_rival() -> None:
    rows = measured().rows[:3]
    rival = fastest(rows, peer=True)
    assert rival is not None and rival.impl == "eager"
    assert speedup(rows) == pytest.approx(2.0)


def test_the_table_has_time_speed_and_share_of_a_copy_or_memory() -> None:
    text = fill("<!-- table:rows -->\n<!-- /table -->", [(Path("rows.json"), measured())], Path("it.md"))
    assert "| case | triton | torch eager | copy |" in text
    assert "| rms_norm | 100.0 µs, 3.60 TB/s (90%) | 200.0 µs, 1.80 TB/s (45%) | 90.0 µs, 4.00 TB/s (100%) |" in text
    assert "| linear_cross_entropy | 40000.0 µs, 0.50 GB | 41000.0 µs, 5.00 GB | - |" in text


def test_the_command_shows_speed_and_tells_the_peak() -> None:
    results = measured()
    results.meta["gpu"] = "NVIDIA H200"
    grid = table(results)
    assert str(grid.title).endswith("(graph, cold L2), TB/s")
    assert [column.header for column in grid.columns] == ["case", "triton", "eager", COPY, "vs best peer", "% roofline"]
    assert "linear_cross_entropy allocates 0.50 (triton), 5.00 (eager) GB beyond inputs and results" in notes(results)


def test_the_peak_survives_the_file(tmp_path: Path) -> None:
    path = tmp_path / "fused-rows.json"
    path.write_text(measured().to_json(), encoding="utf-8")
    assert [row.peak_gb for row in read(path).rows] == [None, None, None, 0.5, 5.0]
    path.write_text(measured().to_json().replace('"peak_gb": 0.5', '"peak_gb": "much"'), encoding="utf-8")
    with pytest.raises(ResultsError, match="peak_gb='much' has the wrong type"):
        read(path)


# --- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["rms_norm+residual-backward", "sample", "linear_cross_entropy"])
def test_small_sizes_run_on_a_gpu(name: str) -> None:
    """Backward passes and sampling in CUDA graphs, everyone right; a loss has its peak memory."""
    case = replace(next(case for case in ROWS if case.name == name), rows=64, width=1024)
    case = replace(case, depth=min(case.depth, 256))
    whole = replace(suite("fused", "rows"), cases=(case,))
    (rows,) = fused.run(whole, choose("eager,compile", "fused"), rounds=1)
    assert all(row.ok for row in rows), rows
    assert all((row.peak_gb is not None) == (case.depth > 0) for row in rows)
