"""The calls whose launches are compared compute the same; measuring them needs a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from flashkernels.bench import launch
from flashkernels.bench.launch import Cost
from flashkernels.cli import app


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_ours_and_torch_compute_the_same(device: str) -> None:
    tolerance = {"cpu": 1e-4, "cuda": 0.1}[device]  # bf16 numbers up to 5, rounded at other places: 2**-8 * 5 each
    ops = []
    with torch.no_grad():
        for one in launch.contests(device):
            ops.append(one.op)
            ours, theirs = one.ours(), one.torch()
            if one.op == "attention":
                theirs = theirs.transpose(1, 2)
            pairs = zip(ours, theirs, strict=True) if isinstance(ours, tuple) else [(ours, theirs)]
            for a, b in pairs:
                torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)
    assert {*ops} == {
        "attention", "rms_norm", "layer_norm", "swiglu", "gelu", "softmax", "rope", "cross_entropy", "sample",
        "speculative_accept", "linear",
    }  # fmt: skip


def test_the_table_marks_what_costs_too_much() -> None:
    console = Console(width=100, record=True, force_terminal=True)
    rows = [Cost("rope", "triton", 20.0, 40.0, 15.0, 22.5, 41.0), Cost("gelu", "triton", 9.0, 3.0, 15.0, 16.0, 3.5)]
    console.print(launch.table(rows))
    lines = console.export_text(styles=True).splitlines()
    (rope,) = (line for line in lines if "rope" in line)
    (gelu,) = (line for line in lines if "gelu" in line)
    assert "\x1b[31m20.0" in rope and "(22.5)" in rope and "0.50" in rope and "\x1b[31m" not in gelu


def test_without_a_gpu_the_command_says_that_it_needs_one() -> None:
    done = CliRunner().invoke(app, ["bench", "launch", "--device", "cpu"])
    assert done.exit_code == 2 and "it needs a CUDA device" in done.output


@pytest.mark.gpu
def test_the_command_prints_and_writes_every_op(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["bench", "launch", "--json", str(tmp_path / "launch.json")])
    assert done.exit_code == 0, done.output
    body = json.loads((tmp_path / "launch.json").read_text())
    rows = body["launch"]
    assert {row["op"] for row in rows} >= {"attention", "rope"}
    assert all(0 < row["ours_us"] <= row["ours_median_us"] for row in rows)
