"""Results beside earlier ones, and the exit code that CI reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

from flashkernels.bench.against import compare, mood, regressions
from flashkernels.bench.results import META as NAMES, Results, ResultsError, Row, joined, read
from flashkernels.cli.bench import bench

META = dict.fromkeys(NAMES) | {"gpu": "NVIDIA H200", "date": "2026-11-15T00:00:00+00:00", "commit": "new"}
PARAMS = {"head_dim": 72, "seq": 4096}
WHERE = Path("old.json")


def row(case: str, impl: str, ms: float | None, *, peer: bool = False, suite: str = "headdims") -> Row:
    figures: dict[str, Any] = {"ms_p50": ms} if ms else {"ok": False, "reason": "error 0.3 is over 0.002"}
    return Row("attention", suite, case, PARAMS, impl, peer, **figures)


OLD = Results(META, [row("a", "hopper", 1.0), row("a", "fa4", 2.0, peer=True), row("b", "hopper", None)])


def test_a_ratio_is_speed_now_over_before() -> None:
    changes = compare(Results(META, [row("a", "hopper", 1.25), row("a", "fa4", 2.0, peer=True)]), OLD, WHERE)
    assert [change.ratio for change in changes] == [0.8, 1.0]
    assert mood(changes) == 1.0
    assert [change.new.impl for change in regressions(changes, 0.97)] == ["hopper"]
    assert not regressions(changes, 0.8)


def test_a_slow_peer_is_no_regression_of_ours() -> None:
    changes = compare(Results(META, [row("a", "hopper", 1.0), row("a", "fa4", 4.0, peer=True)]), OLD, WHERE)
    assert not regressions(changes, 0.97)
    assert mood(changes) == 0.5


def test_one_that_no_longer_runs_is_a_regression() -> None:
    changes = compare(Results(META, [row("a", "hopper", None)]), OLD, WHERE)
    assert [change.ratio for change in regressions(changes, 0.01)] == [0.0]


def test_one_that_did_not_run_before_is_not_compared() -> None:
    changes = compare(Results(META, [row("a", "hopper", 1.0), row("b", "hopper", 9.0)]), OLD, WHERE)
    assert [change.new.case for change in changes] == ["a"]


def test_other_parameters_are_another_case() -> None:
    other = replace(row("a", "hopper", 1.0), params=PARAMS | {"l2": "warm"})
    with pytest.raises(ResultsError, match=r"old\.json has no row of the same case"):
        compare(Results(META, [other]), OLD, WHERE)


def test_another_device_is_refused() -> None:
    with pytest.raises(
        ResultsError, match=r"old\.json was measured on gpu='NVIDIA H200', the new results on 'NVIDIA H100'"
    ):
        compare(Results(META | {"gpu": "NVIDIA H100"}, [row("a", "hopper", 1.0)]), OLD, WHERE)


def test_files_are_joined_under_the_newest_meta() -> None:
    older = Results(
        META | {"date": "2026-11-14T00:00:00+00:00", "commit": "old", "launch_us": 9.0}, [row("a", "x", 1.0)]
    )
    newer = Results(META, [row("a", "x", 1.0, suite="scaling")])
    both = joined([(Path("1.json"), older), (Path("2.json"), newer)])
    assert (both.meta["commit"], both.meta["launch_us"]) == ("new", 9.0)
    assert [one.commit for one in both.rows] == ["old", None]
    assert both.commits() == ["new", "old"]


def test_files_that_do_not_go_together_are_refused() -> None:
    one = (Path("1.json"), Results(META, [row("a", "x", 1.0)]))
    with pytest.raises(ResultsError, match=r"2\.json: a of x \(headdims\) is in 1\.json too"):
        joined([one, (Path("2.json"), one[1])])
    with pytest.raises(ResultsError, match=r"one report is about one device"):
        joined([one, (Path("2.json"), Results(META | {"gpu": "NVIDIA H100"}, []))])


# --- the command, for real on the CPU


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def run(**options: Any) -> None:
    arguments: dict[str, Any] = {"quick": True, "device": "cpu", "cases": "d72-full", "peers": "none", "rounds": 1}
    bench("attention", suite="headdims", impls="torch", **(arguments | options))


@pytest.fixture
def old(tmp_path: Path, threads: None) -> Path:
    path = tmp_path / "old.json"
    run(json=path)
    return path


def rescaled(path: Path, factor: float) -> Path:
    """The file with times that are so many times as long."""
    data = json.loads(path.read_text())
    for one in data["rows"]:
        one["ms_p50"] *= factor
    path.write_text(json.dumps(data))
    return path


def test_slower_than_allowed_exits_with_1(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as stop:
        run(against=rescaled(old, 1e-4), fail_below=0.97)
    assert stop.value.exit_code == 1
    printed = capsys.readouterr()
    assert "error: torch on d72-full has 0.00" in printed.err and "under 0.97" in printed.err
    assert "speed now over before" in printed.out


def test_as_fast_as_before_passes(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(against=rescaled(old, 1e4), fail_below=0.97)
    assert "speed now over before" in capsys.readouterr().out


def test_without_a_limit_a_slow_run_is_only_shown(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(against=rescaled(old, 1e-4))
    assert "speed now over before" in capsys.readouterr().out


def test_the_old_file_may_be_the_new_one(old: Path) -> None:
    before = read(rescaled(old, 1e4)).rows[0].seconds
    run(against=old, fail_below=0.97, json=old, update=True)
    assert read(old).rows[0].seconds < before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fail_below": 0.97}, "fail_below=0.97 needs against="),
        ({"against": Path("none.json")}, "there is no such file"),
    ],
    ids=["limit alone", "no file"],
)
def test_what_cannot_be_compared_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(**options)
