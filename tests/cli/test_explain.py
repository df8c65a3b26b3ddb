"""`flashkernels explain`, as a user types it. No GPU is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner, Result

from flashkernels.cli import app

ISSUE = ("attention", "--head-dim", "72", "--seq", "4096", "--gpu", "h200", "--causal")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flashkernels", "explain", *arguments], capture_output=True, text=True, timeout=120
    )


def invoke(*arguments: str) -> Result:
    """The same in this process, which has imported torch."""
    return CliRunner().invoke(app, ["explain", *arguments])


def test_it_prints_everything_that_decides_the_call() -> None:
    done = invoke(*ISSUE)
    assert (done.exit_code, done.stderr) == (0, "")
    for part in (
        "attention bf16 B=4 S=4096, 28 heads, head_dim 72, causal on NVIDIA H200", "implementation: hopper",
        "not triton: ", "not sdpa: ", "not torch: ", "tile: ", " rows x ", "query head", "columns: 80 for 72",
        "waste 5.26%", "KiB shared", "waves", "GFLOP", "MB", "FLOP/byte", "compute bound", "predicted: ",
    ):  # fmt: skip
        assert part in done.stdout, part


def test_it_prints_what_the_portable_kernel_would_do() -> None:
    done = invoke(*ISSUE, "--impl", "triton")
    assert (done.exit_code, done.stderr) == (0, "")
    for part in (
        "implementation: triton", "not hopper: could serve, but triton was asked for", "tile: exact-",
        "-d64+16-v64+16-", "waste 10.00%", "waste 43.75%", "register ", "split_d ", "predicted: ", "TFLOPS",
    ):  # fmt: skip
        assert part in done.stdout, part


def test_the_same_question_has_the_same_answer_in_another_process() -> None:
    done = run(*ISSUE)
    assert (done.returncode, done.stdout, done.stderr) == (0, invoke(*ISSUE).stdout, "")


def test_every_option_reaches_the_problem() -> None:
    done = invoke(
        "attention", "--head-dim", "192", "--head-dim-v", "128", "--seq", "1000", "--seq-q", "7", "--batch", "3",
        "--heads", "12", "--kv-heads", "4", "--dtype", "fp16", "--window", "64", "0", "--softcap", "--alibi", "--sinks",
        "--mask", "float", "--gpu", "rtx5090",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    assert done.stdout.splitlines()[0] == (
        "attention fp16 B=3 S=7/1000, 12/4 heads, head_dim 192/128, softcap, alibi, sinks, window (64, 0), float mask "
        "on NVIDIA GeForce RTX 5090"
    )


def test_decode_is_explained() -> None:
    done = invoke(
        "decode", "--heads", "32", "--kv-heads", "8", "--head-dim", "128", "--context", "4096", "--batch", "64", "--kv",
        "int8", "--gpu", "h200",
    )  # fmt: skip
    assert (done.exit_code, done.stderr) == (0, "")
    for part in (
        "decode bf16 B=64 T=1 context 4096, 32/8 heads, head_dim 128, int8 pages of 16 on NVIDIA H200",
        "implementation: hopper", "not triton: ", "not torch: ", "tile: hopper-w", "warps a block", "keys a step",
        "pieces", "KiB shared", "work: 4.295 GFLOP, 546.3 MB at least", "memory bound, at least 113.8 µs",
        "memory 113.81 µs, compute 4.34 µs", "cache: int8, 2080 bytes a token",
    ):  # fmt: skip
        assert part in done.stdout, part


def test_gradients_are_explained() -> None:
    done = invoke("attention_backward", "--head-dim", "72", "--causal", "--gpu", "h200")
    assert (done.exit_code, done.stderr) == (0, "")
    for part in (
        "gradients of q, k, v: attention bf16 B=4 S=4096, 28 heads, head_dim 72, causal on NVIDIA H200",
        "implementation: hopper", "not triton: ", "not torch: ", "tile: split-q3-register-staged-sends", "KiB shared",
        "work: 676.6 GFLOP, 530.3 MB at least", "compute bound, at least 683.9 µs", "predicted: ",
    ):  # fmt: skip
        assert part in done.stdout, part


def test_every_option_of_gradients_reaches_the_problem() -> None:
    done = invoke(
        "attention_backward", "--head-dim", "192", "--head-dim-v", "128", "--seq", "1000", "--seq-q", "7", "--batch",
        "3", "--heads", "12", "--kv-heads", "4", "--dtype", "fp16", "--window", "64", "0", "--softcap", "--alibi",
        "--sinks", "--mask", "float", "--dropout", "0.1", "--deterministic", "--gpu", "rtx5090", "--impl", "torch",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    assert done.stdout.splitlines()[0] == (
        "gradients of q, k, v, sinks, mask, the same bits in every run: attention fp16 B=3 S=7/1000, 12/4 heads, "
        "head_dim 192/128, softcap, alibi, sinks, window (64, 0), float mask, dropout 0.1 on NVIDIA GeForce RTX 5090"
    )
    assert "implementation: torch" in done.stdout and "not triton: needs the output" in done.stdout


def test_every_option_of_decode_reaches_the_problem() -> None:
    done = invoke(
        "decode", "--head-dim", "192", "--head-dim-v", "128", "--context", "1000", "--tokens", "7",
        "--batch", "3", "--heads", "12", "--kv-heads", "4", "--dtype", "fp16", "--kv", "int4", "--page-size", "64",
        "--window", "64", "0", "--softcap", "--alibi", "--sinks", "--gpu", "rtx5090", "--impl", "torch",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    assert done.stdout.splitlines()[0] == (
        "decode fp16 B=3 T=7 context 1024, 12/4 heads, head_dim 192/128, int4 pages of 64, softcap, alibi, sinks, "
        "window (64, 0) on NVIDIA GeForce RTX 5090"
    )
    assert "implementation: torch" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("attention", "--gpu", "h300"), "error: gpu='h300' is not known; known are a100, "),
        (
            ("gemm",),
            "error: op='gemm' is not one of 'attention', 'attention_backward', 'decode'; fk.explain has the other ops",
        ),
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
        (("attention", "--kv", "int8"), "error: --kv is not an option of attention"),
        (("attention", "--page-size", "16"), "error: --page-size is not an option of attention"),
        (("attention", "--deterministic"), "error: --deterministic is not an option of attention"),
        (("attention", "--dropout", "1"), "error: --dropout 1.0 must be in [0, 1)"),
        (("attention_backward", "--tokens", "2"), "error: --tokens is not an option of attention_backward"),
        (("attention_backward", "--dtype", "fp8", "--gpu", "h200"), "error: FP8 and the pages of a cache have no grad"),
        (("attention_backward", "--impl", "hopper", "--gpu", "a100"), "error: impl='hopper' cannot serve this call"),
        (("decode", "--seq-q", "1"), "error: --seq-q is not an option of decode"),
        (("decode", "--causal"), "error: --causal is not an option of decode"),
        (("decode", "--kv", "int3"), "error: --kv int3 is not one of bf16, fp8, fp8_e5m2, int8, int4"),
        (("decode", "--kv", "fp16"), "error: --kv fp16 is not one of bf16, fp8"),
        (("decode", "--dtype", "fp8"), "error: --dtype fp8 is not one of fp16, bf16, fp32"),
        (("decode", "--tokens", "17"), "error: --tokens 17 must be from 1 to 16"),
        (("decode", "--context", "0"), "error: --context 0 must be at least 1"),
        (("decode", "--page-size", "0"), "error: --page-size 0 must be at least 1"),
        (("decode", "--kv", "int4", "--head-dim", "73"), "error: --head-dim 73 must be even: --kv int4 stores two"),
        (("decode", "--impl", "hopper", "--gpu", "a100"), "error: impl='hopper' cannot serve this call"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
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
