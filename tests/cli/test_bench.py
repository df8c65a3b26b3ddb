"""`flashkernels bench` and `flashkernels table`, run for real on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import flashkernels as fk
from flashkernels.attention.cases import Case
from flashkernels.bench import runner
from flashkernels.bench.results import Row, read
from flashkernels.cli.bench import bench
from flashkernels.cli.table import table

ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"FLASHKERNELS_COMMIT": "abc123"}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """The command takes one thread on the CPU; the other tests keep theirs."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flashkernels", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=ENVIRONMENT)


@pytest.mark.parametrize("suite", ["headdims", "scaling", "seqlens", "features", "shapes", "fp8", "odd"])
def test_quick_run_writes_all_its_files(suite: str, tmp_path: Path) -> None:
    files = [tmp_path / f"results.{kind}" for kind in ("json", "csv", "html")]
    options = [text for path in files for text in (f"--{path.suffix[1:]}", str(path))]
    done = run("bench", "attention", "--suite", suite, "--quick", "--device", "cpu", "--rounds", "1", *options)
    assert done.returncode == 0, done.stderr
    results = read(files[0])
    assert results.meta["commit"] == "abc123"
    assert (results.meta["gpu"], results.meta["quick"]) == (None, True)
    assert {row.suite for row in results.rows} == {suite}
    assert all(row.ok for row in results.rows if not row.peer)
    assert files[1].read_text().count("\n") == len(results.rows) + 1
    assert all(case in files[2].read_text() for _, case in results.cases())
    assert "checks of ours against the oracle passed" in done.stdout
    assert "microseconds of CPU time" in done.stdout
    assert all(case in done.stdout for _, case in results.cases())
    assert ("error_to_exact" in results.meta) == (suite == "fp8") == ("error against fp32 on normal" in done.stdout)


@pytest.mark.parametrize(
    ("op", "suite", "case"),
    [("attention_backward", "headdims", "d72-full"), ("decode", "formats", "fp8-b1-s4096"),
     ("fused", "rows", "swiglu")],
)  # fmt: skip
def test_an_op_has_a_suite_of_its_own_where_none_is_named(op: str, suite: str, case: str, tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    done = run("bench", op, "--quick", "--device", "cpu", "--rounds", "1", "--cases", case, "--peers", "none",
               "--json", str(out))  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert {(row.op, row.suite, row.case) for row in read(out).rows} == {(op, suite, case)}


def test_without_a_gpu_the_full_sizes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENVIRONMENT, "CUDA_VISIBLE_DEVICES", "")
    done = run("bench", "attention")
    assert done.returncode == 2
    assert "pass --quick" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--suite", "nonsense"], "suite='nonsense' is not one of 'headdims'"),
        (["--cases", "d73-*"], r"cases='d73-\*' matches no case of the suite 'headdims'"),
        (["--peers", "fa5"], "peers='fa5' is not one of"),
        (["--peers", "sdpa-cudnn"], "peer sdpa-cudnn: needs a CUDA device"),
        (["--launch", "graph"], "on the CPU only 'eager' and 'warm' are possible"),
    ],
    ids=lambda value: value[1] if isinstance(value, list) else "",
)
def test_bad_options_are_refused_by_name(options: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bench("attention", **{"suite": "headdims", "quick": True, "device": "cpu"} | parsed(options))


def test_an_unknown_op_is_told_all_that_there_are() -> None:
    with pytest.raises(ValueError, match=r"op='foo' is not one of 'attention', .*'fused', 'launch'$"):
        bench("foo")


def test_the_accuracy_of_formats_is_quick_and_silent_in_a_pipe() -> None:
    done = run("bench", "decode", "--accuracy", "--quick", "--device", "cpu")
    assert (done.returncode, done.stderr) == (0, "")
    assert "8 draws of 256 keys (64 of 1024 without --quick)" in done.stdout
    assert all(f" {form} " in done.stdout for form in ("fp8", "fp8_e5m2", "int8", "int4"))


@pytest.mark.parametrize("quick", [False, True], ids=["full", "quick"])
def test_a_terminal_sees_that_accuracy_is_measured(
    quick: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[dict[str, int]] = []

    def accuracy(device: str, **sizes: int) -> dict[str, dict[str, tuple[float, float]]]:
        given.append(sizes)
        return {"normal": {"int8": (0.01, 0.02)}}

    monkeypatch.setattr("flashkernels.bench.decode.accuracy", accuracy)
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes any output for a terminal
    monkeypatch.setenv("TERM", "xterm")
    bench("decode", accuracy=True, quick=quick, device="cpu")
    draws, keys = (8, 256) if quick else (64, 1024)
    assert given == [{"draws": draws, "keys": keys}]
    shown = capsys.readouterr()
    assert f"{draws} draws of {keys} keys" in shown.err and "0:00:00" in shown.err
    assert f"{draws} draws of {keys} keys" in shown.out and ("--quick" in shown.out) == quick


def parsed(options: list[str]) -> dict[str, Any]:
    return dict(zip((name.removeprefix("--") for name in options[::2]), options[1::2], strict=True))


def test_a_wrong_implementation_makes_the_exit_code_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = fk.attention

    def wrong(*args: Any, impl: str = "auto", **kwargs: Any) -> Any:
        out = right(*args, impl=impl, **kwargs)
        return 1.1 * out if impl == "sdpa" else out

    monkeypatch.setattr("flashkernels.bench.runner.fk", type("fk", (), {"attention": staticmethod(wrong)}))
    with pytest.raises(typer.Exit) as stop:
        bench("attention", quick=True, device="cpu", cases="d72-*", peers="none", rounds=1, json=tmp_path / "r.json")
    assert stop.value.exit_code == 1
    assert "FAILED sdpa on d72-full: error 0.1" in capsys.readouterr().out
    failed = [row for row in read(tmp_path / "r.json").rows if not row.ok]
    assert {(row.impl, row.case) for row in failed} == {("sdpa", "d72-full"), ("sdpa", "d72-causal")}


def test_a_broken_run_keeps_what_it_has_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measure = runner.measure

    def breaking(case: Case, *arguments: Any) -> list[Row]:
        if case.name == "d72-causal":
            raise runner.BenchError("fa4 on d72-causal has broken the CUDA context")
        return measure(case, *arguments)

    monkeypatch.setattr(runner, "measure", breaking)
    with pytest.raises(typer.Exit) as stop:
        bench("attention", quick=True, device="cpu", cases="d72-*", peers="none", rounds=1, json=tmp_path / "r.json")
    assert stop.value.exit_code == 1
    assert "error: fa4 on d72-causal" in capsys.readouterr().err
    assert {row.case for row in read(tmp_path / "r.json").rows} == {"d72-full"}


def results_file(path: Path) -> Path:
    def row(impl: str, d: int, causal: bool, tflops: float) -> dict[str, Any]:
        params = {"batch": 4, "seq": 4096, "heads": 28, "kv_heads": 28, "head_dim": d, "causal": causal}
        params |= {"dtype": "bf16", "launch": "eager", "l2": "cold"}
        case = f"d{d}-{'causal' if causal else 'full'}"
        head = {"op": "attention", "suite": "headdims", "case": case, "params": params, "impl": impl}
        figures = {"ms_p50": 100 / tflops, "ms_p99": 1.0, "tflops": tflops, "tbps": 0.1, "roofline": 0.4}
        return (
            head
            | figures
            | {"peer": "sdpa" in impl, "bound": "compute", "error": 0.0, "reference_error": 0.0, "ok": True}
        )

    rows = [row("triton", 72, False, 382), row("triton-standard", 72, False, 294), row("sdpa-cudnn", 72, False, 349)]
    rows += [row("triton", 72, True, 339), row("sdpa-cudnn", 72, True, 315), row("sdpa-flash", 72, True, 216)]
    rows += [row("triton", 64, False, 476)]
    meta = {"gpu": "NVIDIA H200", "driver": "580", "torch": "2.11.0", "triton": "3.6.0", "flashkernels": "0.1.0"}
    meta |= {"commit": "0123456789abcdef", "date": "2026-11-15T12:00:00+00:00"}
    path.write_text(json.dumps({"meta": meta, "rows": rows}))
    return path


@pytest.fixture
def readme(tmp_path: Path) -> Path:
    path = tmp_path / "README.md"
    path.write_text("# Title\n\n<!-- table:headdims -->\nstale\n<!-- /table -->\n\nThe end.\n")
    return path


def test_table_fills_the_block_and_nothing_else(readme: Path, tmp_path: Path) -> None:
    table([results_file(tmp_path / "r.json")], into=readme)
    text = readme.read_text()
    assert text.startswith("# Title\n\n<!-- table:headdims -->\n| D |")
    assert text.endswith("<!-- /table -->\n\nThe end.\n")
    assert "stale" not in text
    assert "| 64 | 476 / - | - / - | - / - | - | - |" in text
    assert "| 72 | 382 / 339 | 349 / 315 | - / 216 | 1.09x / 1.08x | 1.30x / - |" in text
    assert "NVIDIA H200, 2026-11-15, commit 0123456789, torch 2.11.0." in text


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200"


@pytest.mark.parametrize(
    ("suite", "file", "line", "day", "commit"),
    [
        ("formats", "decode-formats", "| bf16-b16-s32768 | 4.40 | 2.95 | 4.62 |", 15, "9262a8e"),
        ("route", "moe-route", "| t32768-e64-k2-graph | 20.6 | 9.8 | 221.6 | 19.2 |", 18, "23d3e47, 4649949, 48d7a48"),
        (
            "layer",
            "moe-layer",
            "| mixtral-8x7b-t4096-fp8 | 2.717 (1062) | 2.512 (1149) |",
            18,
            "23d3e47, cfcd9f3, 48d7a48, 8a98538",
        ),
        ("odd", "attention-odd", "| d97-full | 1.119 (489) | 14.722 (37) | 2.646 (207) |", 16, "ddeb934, 2d22e42"),
        ("rows", "fused-rows", "| rope | 85.5 µs, 3.92 TB/s (95%) | ", 16, "48d7a48"),
        (
            "headdims",
            "attention-backward",
            "| 64 | 521 / 451 | 392 / 356 | 385 / 314 | 424 / 363 | 511 / 461 |",
            19,
            "982777f, 029f44b, cfcd9f3, 959a56a, 48d7a48, 864dd6e",
        ),
    ],
)
def test_tables_by_case(suite: str, file: str, line: str, day: int, commit: str, tmp_path: Path) -> None:
    path = tmp_path / "notes.md"
    path.write_text(f"<!-- table:{suite} -->\n<!-- /table -->\n")
    table([RESULTS / f"{file}.json"], into=path)
    text = path.read_text()
    assert line in text and f"NVIDIA H200, 2026-11-{day}, commit {commit}" in text


NOTES = [
    ("decode", ["decode-formats"]), ("moe", ["moe-route", "moe-layer"]), ("fused", ["fused-rows"]),
    ("hopper_backward", ["attention-backward"]), ("aligned", ["attention-odd"]),
]  # fmt: skip


@pytest.mark.parametrize(("note", "files"), NOTES)
def test_the_notes_show_the_committed_results(note: str, files: list[str]) -> None:
    notes = RESULTS.parents[2] / "docs" / "notes" / f"{note}.md"
    table([RESULTS / f"{file}.json" for file in files], into=notes, check=True)


def test_the_page_of_the_report_shows_how_near_predictions_are() -> None:
    """`flashkernels table benchmarks/results/h200/*.json --into docs/report.md` writes it anew."""
    table(sorted(RESULTS.glob("*.json")), into=RESULTS.parents[2] / "docs" / "report.md", check=True)


def test_check_tells_whether_the_file_is_up_to_date(readme: Path, tmp_path: Path) -> None:
    results = results_file(tmp_path / "r.json")
    before = readme.read_text()
    with pytest.raises(typer.Exit) as stop:
        table([results], into=readme, check=True)
    assert stop.value.exit_code == 1
    assert readme.read_text() == before
    table([results], into=readme)
    table([results], into=readme, check=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no block", "has no block between"),
        ("<!-- table:other -->\n<!-- /table -->", "table:other is not one of headdims"),
    ],
    ids=["no-block", "unknown-suite"],
)
def test_table_refuses_a_file_it_cannot_fill(text: str, message: str, readme: Path, tmp_path: Path) -> None:
    readme.write_text(text)
    with pytest.raises(ValueError, match=message):
        table([results_file(tmp_path / "r.json")], into=readme)


def test_table_refuses_the_same_suite_twice(readme: Path, tmp_path: Path) -> None:
    results = results_file(tmp_path / "r.json")
    with pytest.raises(ValueError, match="'headdims' is in another of the files too"):
        table([results, results], into=readme)
