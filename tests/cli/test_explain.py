"""`flashkernels explain`, as a user types it. No GPU is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from flashkernels.cli import app

ISSUE = ("attention", "--head-dim", "72", "--seq", "4096", "--gpu", "h200", "--causal")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flashkernels", "explain", *arguments], capture_output=True, text=True, timeout=120
    )


def test_it_prints_everything_that_decides_the_call() -> None:
    done = run(*ISSUE)
    assert (done.returncode, done.stderr) == (0, "")
    for part in (
        "attention bf16 B=4 S=4096, 28 heads, head_dim 72, causal on NVIDIA H200", "implementation: hopper",
        "not triton: ", "not sdpa: ", "not torch: ", "tile: ", " rows x ", "query head", "columns: 80 for 72",
        "waste 5.26%", "KiB shared", "waves", "GFLOP", "MB", "FLOP/byte", "compute bound", "predicted: ",
    ):  # fmt: skip
        assert part in done.stdout, part


def test_it_prints_what_the_portable_kernel_would_do() -> None:
    done = run(*ISSUE, "--impl", "triton")
    assert (done.returncode, done.stderr) == (0, "")
    for part in (
        "implementation: triton", "not hopper: could serve, but triton was asked for", "tile: exact-",
        "-d64+16-v64+16-", "waste 10.00%", "waste 43.75%", "register ", "split_d ", "predicted: ", "TFLOPS",
    ):  # fmt: skip
        assert part in done.stdout, part


def test_the_same_question_has_the_same_answer() -> None:
    assert CliRunner().invoke(app, ["explain", *ISSUE]).stdout == run(*ISSUE).stdout


def test_every_option_reaches_the_problem() -> None:
    done = run(
        "attention", "--head-dim", "192", "--head-dim-v", "128", "--seq", "1000", "--seq-q", "7", "--batch", "3",
        "--heads", "12", "--kv-heads", "4", "--dtype", "fp16", "--window", "64", "0", "--softcap", "--alibi", "--sinks",
        "--mask", "float", "--gpu", "rtx5090",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == (
        "attention fp16 B=3 S=7/1000, 12/4 heads, head_dim 192/128, softcap, alibi, sinks, window (64, 0), float mask "
        "on NVIDIA GeForce RTX 5090"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("attention", "--gpu", "h300"), "error: gpu='h300' is not known; known are a100, "),
        (("gemm",), "error: op='gemm' is not one of 'attention'"),
        (("attention", "--dtype", "int8"), "error: --dtype int8 is not one of fp8, fp16, bf16, fp32"),
        (("attention", "--mask", "maybe"), "error: --mask maybe is not one of none, bool, float"),
        (("attention", "--head-dim", "0"), "error: --head-dim 0 must be at least 1"),
        (("attention", "--seq", "-5"), "error: --seq -5 must be at least 1"),
        (("attention", "--batch", "0"), "error: --batch 0 must be at least 1"),
        (("attention", "--heads", "7", "--kv-heads", "2"), "error: --heads 7 is not a multiple of --kv-heads 2"),
        (("attention", "--impl", "wgmma", "--gpu", "h200"), "error: impl='wgmma' is not one of 'auto', 'hopper'"),
        (("attention", "--impl", "hopper", "--gpu", "a100"), "error: impl='hopper' cannot serve this call"),
        (("attention", "--impl", "sdpa", "--sinks", "--gpu", "h200"), "error: impl='sdpa' cannot serve this call"),
        (("attention", "--window", "-2", "0", "--gpu", "h200"), "error: --window -2"),
        (("attention", "--seq-q", "-3", "--gpu", "h200"), "error: --seq-q -3"),
        (("attention", "--head-dim-v", "-8", "--gpu", "h200"), "error: --head-dim-v -8"),
    ],
    ids=lambda value: " ".join(value[1:]) or "gemm" if isinstance(value, tuple) else "",
)
def test_a_refusal_is_one_line_and_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(app, ["explain", *arguments])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(message) and result.stderr.count("\n") == 1


def test_a_refusal_of_the_real_command_has_no_traceback() -> None:
    done = run("attention", "--gpu", "h300")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: gpu='h300' is not known; known are a100, ") and done.stderr.count("\n") == 1


def test_help_lists_the_options() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert all(option in done.stdout for option in ("--head-dim", "--gpu", "--causal", "--mask", "--impl"))
