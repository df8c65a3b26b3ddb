"""The predicted time of row-wise ops and losses: near the committed measurements, and as `explain` tells it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import flashkernels as fk
from flashkernels.bench.results import read
from flashkernels.fused import cost
from flashkernels.fused.cases import suite
from flashkernels.fused.problem import LinearProblem, LossProblem
from flashkernels.fused.rows import RowProblem, row_problem
from flashkernels.hardware import lookup
from flashkernels.profiling.calibration import predictions, unpredicted

H200 = lookup("h200")
RATE = cost.REACHED * H200.bandwidth
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200" / "fused-rows.json"
CASES = {case.name: case.problem for case in suite("rows")}


def test_all_but_sampling_is_predicted_within_20_percent() -> None:
    results = read(RESULTS)
    found = predictions(results)
    far = {one.row.case: round(one.error, 2) for one in found if not one.near}
    assert {one.row.case for one in found} == CASES.keys() - {"sample", "greedy"}
    assert unpredicted(results, found) == {"triton fused rows": 2} and not far


def test_bytes_at_the_memorys_speed_and_a_launch_for_each_kernel() -> None:
    moved = 2 * 16384 * 4096 * 2
    assert cost.seconds(CASES["rms_norm"], "triton", H200) == pytest.approx(cost.LAUNCH + moved / RATE)
    backward = cost.seconds(CASES["layer_norm-backward"], "triton", H200)
    assert backward == pytest.approx(3 * cost.LAUNCH + 1.5 * moved / RATE)


def test_wide_rows_of_softmax_are_read_twice() -> None:
    whole, wide = (RowProblem("softmax", 8192, n, "bf16", "cuda", 2 * 8192 * n * 2) for n in (16384, 16385))
    assert cost.seconds(whole, "triton", H200) == pytest.approx(cost.LAUNCH + whole.bytes() / RATE)
    assert cost.seconds(wide, "triton", H200) == pytest.approx(cost.LAUNCH + 1.5 * wide.bytes() / RATE)


def test_widths_are_those_of_the_kernels() -> None:
    pytest.importorskip("triton")
    from flashkernels.fused.triton import norm, softmax

    assert cost.WAYS["softmax"].widest == cost.WAYS["log_softmax"].widest == softmax.WIDEST
    assert cost.WAYS["rms_norm"].widest == cost.WAYS["layer_norm"].widest == norm.WIDEST
    backward = {cost.WAYS[name].widest for name in ("rms_norm_backward", "layer_norm_backward")}
    assert backward == {norm.WIDEST_BACKWARD}


def test_a_loss_reads_its_logits_again_for_their_gradient_and_products_are_cublas() -> None:
    step = LossProblem(8192, 128256, 0, "bf16", "cuda", grads=True)
    logits = 8192 * 128256 * 2
    assert cost.seconds(step, "triton", H200) == pytest.approx(2 * cost.LAUNCH + 3 * logits / RATE)
    loss = replace(step, grads=False)
    assert cost.seconds(loss, "triton", H200) == pytest.approx(cost.LAUNCH + logits / RATE)
    more = (cost.seconds(replace(step, depth=4096), "triton", H200) or 0) - (cost.seconds(step, "triton", H200) or 0)
    assert more == pytest.approx(3 * 2 * 8192 * 128256 * 4096 / (cost.CUBLAS * H200.peak["bf16"]))


def test_other_gpus_scale_it() -> None:
    twice = replace(H200, bandwidth=2 * H200.bandwidth)
    large = cost.seconds(CASES["swiglu"], "triton", H200) or 0
    assert cost.seconds(CASES["swiglu"], "triton", twice) == pytest.approx((large + cost.LAUNCH) / 2)


@pytest.mark.parametrize(
    "problem",
    [
        CASES["sample"],
        replace(CASES["rms_norm"], op="gelu"),
        replace(CASES["rms_norm"], quantise="fp8"),
        replace(CASES["rms_norm"], width=16385),
        replace(CASES["layer_norm-backward"], width=8193),
        replace(CASES["rms_norm"], rows=131),
        replace(CASES["cross_entropy"], tokens=131),
        replace(CASES["linear_cross_entropy"], dtype="fp32"),
    ],
    ids=["sample", "erf", "fp8", "wide", "wide-backward", "few-rows", "few-tokens", "fp32-products"],
)
def test_what_was_not_measured_is_not_predicted(problem: RowProblem | LossProblem) -> None:
    assert cost.seconds(problem, "triton", H200) is None


@pytest.mark.parametrize("name", CASES)
def test_predictions_are_over_the_roofline_and_of_triton_alone(name: str) -> None:
    problem = CASES[name]
    assert cost.seconds(problem, "torch", H200) is None
    found = cost.seconds(problem, "triton", H200)
    assert found is None or found > problem.bytes() / H200.bandwidth


# --- as `explain` tells it


def test_explain_prints_the_prediction_after_the_roofline() -> None:
    x = torch.empty(8192, 2 * 4096, dtype=torch.bfloat16)
    why = fk.explain("swiglu", x, gpu="h200")
    assert why.predicted == pytest.approx(cost.LAUNCH + 3 * 8192 * 4096 * 2 / RATE) and why.floor
    share = why.floor / why.predicted
    assert str(why).endswith(f"\npredicted: {why.predicted * 1e6:.1f} µs, {share:.0%} of the roofline")
    normed = cost.seconds(row_problem("rms_norm", x, 2), "triton", H200)
    assert fk.explain("rms_norm", x, gpu="h200").predicted == normed


def test_explain_of_a_loss_has_compute_and_memory_before_it() -> None:
    why = fk.explain("linear_cross_entropy", problem=CASES["linear_cross_entropy"], gpu="h200")
    *_, times, last = str(why).splitlines()
    assert times.startswith("  memory ") and last.startswith("predicted: 38") and last.endswith("% of the roofline")


def test_without_a_gpu_or_a_model_there_is_none() -> None:
    x = torch.empty(512, 64, dtype=torch.bfloat16)
    assert fk.explain("rms_norm", x).predicted is None
    assert fk.explain("rms_norm", x, gpu="h200", impl="torch").predicted is None
    sampled = fk.explain("sample", x, gpu="h200")
    assert sampled.predicted is None and "predicted" not in str(sampled)
    linear = fk.explain("linear", problem=LinearProblem(4096, 4096, 4096, "bf16", "cuda"), gpu="h200")
    assert "predicted" not in str(linear)
