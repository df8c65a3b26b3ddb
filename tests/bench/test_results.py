"""Results survive their files, and a file of the wrong format is refused with the place."""

from __future__ import annotations

import csv
import io
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flashkernels.bench import results as module
from flashkernels.bench.results import (
    Results,
    ResultsError,
    Row,
    commit,
    fastest,
    merge,
    read,
    require_same_machine,
    speedup,
    worst_error,
    write,
)

META = dict.fromkeys(module.META) | {"gpu": "NVIDIA H200", "date": "2026-11-15T00:00:00+00:00"}
PARAMS = {"batch": 4, "seq": 4096, "heads": 28, "kv_heads": 28, "head_dim": 72, "causal": True, "dtype": "bf16"}


def row(impl: str, ms: float | None, *, peer: bool = False, case: str = "d72-causal") -> Row:
    if ms is None:
        return Row("attention", "headdims", case, PARAMS, impl, peer, ok=False, reason="takes head_dim up to 256")
    figures = {"ms_p50": ms, "ms_p99": 1.1 * ms, "tflops": 300 / ms, "tbps": 0.4, "roofline": 0.45, "bound": "compute"}
    return Row("attention", "headdims", case, PARAMS, impl, peer, **figures, error=0.002, reference_error=0.001)


ROWS = [
    row("triton", 0.6),
    row("triton-standard", 0.5),
    row("sdpa-cudnn", 0.66, peer=True),
    row("fa4", None, peer=True),
]


def test_json_survives_the_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "new" / "results.json"
    write(path, Results(META, ROWS).to_json())
    again = read(path)
    assert again.meta == META
    assert [r.as_dict() for r in again.rows] == [r.as_dict() for r in ROWS]
    assert [p.name for p in path.parent.iterdir()] == ["results.json"]


def test_a_row_has_the_documented_fields() -> None:
    timed, declined = ROWS[0].as_dict(), ROWS[3].as_dict()
    assert list(timed) == [
        "op", "suite", "case", "params", "impl", "peer", "ms_p50", "ms_p99", "tflops", "tbps", "roofline", "bound",
        "error", "reference_error", "ok",
    ]  # fmt: skip
    assert list(declined) == ["op", "suite", "case", "params", "impl", "peer", "ok", "reason"]


def test_without_a_gpu_the_roofline_is_null() -> None:
    on_cpu = Row(
        "attention", "headdims", "d72-full", PARAMS, "torch", False, ms_p50=1.0, ms_p99=1.0, tflops=0.1, tbps=0.1
    )
    assert (on_cpu.as_dict()["roofline"], on_cpu.as_dict()["bound"]) == (None, None)


def test_csv_has_the_parameters_as_columns() -> None:
    lines = list(csv.DictReader(io.StringIO(Results(META, ROWS).to_csv())))
    assert len(lines) == len(ROWS)
    assert (lines[0]["head_dim"], lines[0]["impl"], lines[0]["ms_p50"]) == ("72", "triton", "0.6")
    assert lines[3]["reason"] == "takes head_dim up to 256"


def change(**values: Any) -> dict[str, Any]:
    return {k: v for k, v in (ROWS[0].as_dict() | values).items() if v is not ...}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("{", "not JSON", id="no-json"),
        pytest.param("[]", "needs an object with 'meta'", id="no-object"),
        pytest.param({"meta": {}, "rows": []}, "meta has no 'gpu'", id="no-gpu"),
        pytest.param({"meta": META, "rows": [3]}, "row 0: 3 is not an object", id="row-no-object"),
        pytest.param({"meta": META, "rows": [change(impl=...)]}, "row 0: 'impl' is missing", id="missing"),
        pytest.param({"meta": META, "rows": [change(ms_p50=...)]}, "row 0: 'ms_p50' is missing", id="ok-without-time"),
        pytest.param(
            {"meta": META, "rows": [change(ok=False)]}, "row 0: 'reason' is missing", id="failed-without-reason"
        ),
        pytest.param({"meta": META, "rows": [change(ms_p50="1")]}, "row 0: ms_p50='1' has the wrong type", id="type"),
        pytest.param(
            {"meta": META, "rows": [change(ms_p50=True)]}, "ms_p50=True has the wrong type", id="bool-as-number"
        ),
        pytest.param({"meta": META, "rows": [change(ms=1.0)]}, "row 0: 'ms' is not a field", id="unknown"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(text: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(text if isinstance(text, str) else json.dumps(text))
    with pytest.raises(ResultsError, match=message):
        read(path)


def test_the_fastest_of_ours_is_not_the_baseline_strategy() -> None:
    best = fastest(ROWS, peer=False)
    assert best is not None
    assert best.impl == "triton"


def test_speedup_is_over_the_best_peer() -> None:
    assert speedup(ROWS) == pytest.approx(1.1)
    assert speedup(ROWS[:2]) is None


def test_errors_are_told_in_units_of_plain_torch() -> None:
    assert worst_error(ROWS) == pytest.approx(2.0)


OLD = META | {"commit": "old"}
NEW = META | {"commit": "new", "date": "2026-11-16T00:00:00+00:00"}
WHERE = Path("r.json")


def test_merging_replaces_rows_and_loses_none(tmp_path: Path) -> None:
    before = Results(OLD, [*ROWS, row("triton", 0.7, case="d80-full")])
    fresh = [row("hopper", 0.3), row("triton", 0.55), row("triton", 0.2, case="d64-full")]
    merged = merge(before, Results(NEW, fresh), WHERE)
    assert merged.meta == NEW
    assert [(r.case, r.impl, r.ms_p50, r.commit) for r in merged.rows] == [
        ("d72-causal", "triton", 0.55, None),
        ("d72-causal", "triton-standard", 0.5, "old"),
        ("d72-causal", "sdpa-cudnn", 0.66, "old"),
        ("d72-causal", "fa4", None, "old"),
        ("d72-causal", "hopper", 0.3, None),
        ("d80-full", "triton", 0.7, "old"),
        ("d64-full", "triton", 0.2, None),
    ]
    assert {r.date for r in merged.rows if r.commit == "old"} == {META["date"]}
    assert merged.commits() == ["new", "old"]
    write(tmp_path / "r.json", merged.to_json())
    assert [r.as_dict() for r in read(tmp_path / "r.json").rows] == [r.as_dict() for r in merged.rows]
    again = merge(merged, Results(NEW | {"commit": "newer"}, [row("hopper", 0.2)]), WHERE)
    assert {r.commit for r in again.rows} == {None, "old", "new"}


def test_rows_with_other_parameters_or_of_another_machine_are_not_merged() -> None:
    other = replace(ROWS[0], params=PARAMS | {"launch": "graph"})
    with pytest.raises(ResultsError, match=r"r\.json: d72-causal of triton-standard has other params"):
        merge(Results(OLD, ROWS), Results(NEW, [other]), WHERE)
    with pytest.raises(ResultsError, match=r"r\.json: its rows have gpu='NVIDIA H200', the new ones None"):
        require_same_machine(OLD, NEW | {"gpu": None}, WHERE)
    require_same_machine(OLD, NEW, WHERE)


def test_the_environment_overrides_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHKERNELS_COMMIT", "abc123")
    assert commit() == "abc123"


def test_a_foreign_checkout_gives_no_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FLASHKERNELS_COMMIT", raising=False)
    package = tmp_path / "env" / "flashkernels" / "bench"
    package.mkdir(parents=True)
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    monkeypatch.setattr(module, "__file__", str(package / "results.py"))
    assert commit() is None
