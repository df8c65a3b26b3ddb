"""A run of a part: `--cases`, `--impls` and `--update` of `flashkernels bench`, and what `table` makes of hopper."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flashkernels.attention.cases import suite as cases
from flashkernels.bench.results import Results, Row, read
from flashkernels.bench.runner import _params
from flashkernels.bench.suites import only, suite
from flashkernels.cli.bench import bench
from flashkernels.cli.table import headdims


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """The command takes one thread on the CPU; the other tests keep theirs."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(**options: Any) -> None:
    bench("attention", quick=True, device="cpu", rounds=1, **{"peers": "none"} | options)


def measured(path: Path) -> set[tuple[str, str]]:
    return {(row.case, row.impl) for row in read(path).rows}


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        ("d72-*", ["d72-full", "d72-causal"]),
        ("d96-full, d72-causal", ["d72-causal", "d96-full"]),
        ("d4?-full", ["d40-full", "d48-full"]),
    ],
)
def test_cases_are_chosen_by_patterns(patterns: str, names: list[str]) -> None:
    assert [case.name for case in only(suite("attention", "headdims"), patterns).cases] == names


def test_a_pattern_that_matches_nothing_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="cases='d73-\\*' matches no case of the suite 'headdims'"):
        only(suite("attention", "headdims"), "d72-*,d73-*")


def test_only_the_chosen_part_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.json"
    run(cases="d72-*,d96-full", impls="torch", json=path)
    assert measured(path) == {("d72-full", "torch"), ("d72-causal", "torch"), ("d96-full", "torch")}
    assert list(read(path).meta["launch_us_by_impl"]) == ["torch"]
    out = capsys.readouterr().out
    assert "3 of 3 checks of ours" in out
    assert "(torch) microseconds of CPU time" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"impls": "torch,wgmma"}, "impls='wgmma' is not one of"),
        ({"impls": "triton-standard"}, "impls='triton-standard': none of them serves a case that was chosen"),
        ({"cases": "d73-*"}, "matches no case of the suite 'headdims'"),
        ({"update": True}, "update=True needs json="),
    ],
    ids=["unknown", "serves-nothing", "no-case", "update-what"],
)
def test_bad_choices_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(**options)


@pytest.mark.parametrize("part", [{"cases": "d72-full"}, {"impls": "torch"}, {"peers": "naive"}])
def test_a_part_does_not_replace_a_file(part: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text("precious")
    with pytest.raises(ValueError, match="exists and may hold more rows than this run: pass --update"):
        run(json=path, **part)
    assert path.read_text() == "precious"


def test_update_keeps_the_other_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.json"
    monkeypatch.setenv("FLASHKERNELS_COMMIT", "old")
    run(cases="d72-*", json=path, update=True)  # a file that is not there yet is made
    monkeypatch.setenv("FLASHKERNELS_COMMIT", "new")
    run(cases="d72-full,d96-full", impls="torch", json=path, update=True, csv=tmp_path / "r.csv")
    both = {(f"d72-{kind}", impl) for kind in ("full", "causal") for impl in ("sdpa", "torch")}
    assert measured(path) == both | {("d96-full", "torch")}
    after = read(path)
    assert after.meta["commit"] == "new"
    assert {(row.case, row.impl) for row in after.rows if row.commit == "old"} == both - {("d72-full", "torch")}
    assert (tmp_path / "r.csv").read_text().count("\n") == len(after.rows) + 1


def test_update_refuses_the_file_of_another_machine(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    run(cases="d72-full", impls="torch", json=path)
    data = json.loads(path.read_text())
    data["meta"]["torch"] = "1.0"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"its rows have torch='1\.0'"):
        run(cases="d72-full", impls="torch", json=path, update=True)


def test_the_table_has_a_column_for_each_of_ours_and_for_fa4() -> None:
    which = suite("attention", "headdims")
    case = next(case for case in cases("headdims") if case.name == "d72-full")
    figures = {"ms_p99": 1.0, "tbps": 0.1, "bound": "compute", "error": 0.0, "reference_error": 0.0}
    speeds = {"hopper": 600, "triton": 400, "triton-standard": 300, "sdpa-cudnn": 500, "fa4": 480}
    rows = [
        Row("attention", "headdims", "d72-full", _params(case, which), impl, impl in ("sdpa-cudnn", "fa4"),
            ms_p50=100 / speed, tflops=float(speed), **figures)
        for impl, speed in speeds.items()
    ]  # fmt: skip
    rows[1] = replace(rows[1], commit="0123456789abcdef", date="2026-11-14T00:00:00+00:00")
    meta = {"gpu": "NVIDIA H200", "torch": "2.11.0", "commit": "fedcba98765", "date": "2026-11-15T00:00:00+00:00"}
    text = headdims(Results(meta, rows))
    head = "| D | hopper | triton | cuDNN | FA4 | SDPA flash | ours over cuDNN | ours over FA4 | triton over padding"
    assert text.startswith(head)
    assert "| 72 | 600 / - | 400 / - | 500 / - | 480 / - | - / - | 1.20x / - | 1.25x / - | 1.33x / - |" in text
    assert "Ours is the fastest of hopper, triton." in text
    assert "commit fedcba9876, 0123456789," in text
