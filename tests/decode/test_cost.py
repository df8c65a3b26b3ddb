"""The predicted time of decode: near the committed measurements, and larger for more work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flashkernels.bench.results import read
from flashkernels.decode import cost
from flashkernels.decode.cases import suite
from flashkernels.hardware import lookup
from flashkernels.profiling.calibration import predictions

H200 = lookup("h200")
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200" / "decode-formats.json"
CASES = {case.name: case.problem for case in suite("formats")}


@pytest.mark.parametrize("impl", ["hopper", "triton"])
def test_four_in_five_predictions_are_within_20_percent(impl: str) -> None:
    found = [prediction for prediction in predictions(read(RESULTS)) if prediction.row.impl == impl]
    assert len(found) >= 28
    assert sum(prediction.near for prediction in found) >= 0.8 * len(found)


def test_traffic_or_keys_whichever_takes_longer() -> None:
    problem = CASES["bf16-b64-s4096"]  # 64 x 4096 keys of 8 heads, 4096 bits each; 64 x 32 queries and outputs of 128
    moved = 64 * 4096 * 8 * 512 + 64 * 32 * 256 * 2
    assert cost.seconds(problem, "hopper", H200) == pytest.approx(8e-6 + moved / (0.92 * 4.8e12))
    narrow = CASES["int4-b64-s4096"]
    assert cost.seconds(narrow, "hopper", H200) == pytest.approx(8e-6 + 64 * 4096 * 8 * 5.9e-9 / 132)


def test_more_keys_take_longer_and_fewer_bits_never_do() -> None:
    problem = CASES["bf16-b64-s4096"]
    seconds = cost.seconds(problem, "hopper", H200)
    assert seconds and seconds > problem.bytes() / H200.bandwidth
    assert seconds < (cost.seconds(replace(problem, batch=128, total=0), "hopper", H200) or 0)
    narrow = [cost.seconds(CASES[f"{name}-b64-s4096"], "hopper", H200) for name in ("bf16", "fp8", "int4")]
    assert narrow == sorted(narrow, reverse=True)


def test_what_was_not_measured_is_not_predicted() -> None:
    problem = CASES["bf16-b64-s4096"]
    assert cost.seconds(replace(problem, tokens=8), "hopper", H200) is None
    assert cost.seconds(replace(problem, head_dim=512, head_dim_v=512), "triton", H200) is None
    assert cost.seconds(problem, "torch", H200) is None
