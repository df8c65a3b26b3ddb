"""`flashkernels report` and `flashkernels roofline`, as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer.testing

from flashkernels.cli import app
from flashkernels.profiling import ceilings as module
from flashkernels.profiling.ceilings import Ceilings

H200 = Path(__file__).parents[2] / "benchmarks" / "results" / "h200"
FILES = [str(H200 / f"attention-{suite}.json") for suite in ("scaling", "shapes", "fp8")]
LAUNCH = str(H200.with_name("h200-launch.json"))
CEILINGS = Ceilings("NVIDIA H200", "2026-11-15", "2.11", {"copy": 4.25e12}, {"bf16": 679e12, "fp16": 690e12})


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHKERNELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "CPU_COPY_BYTES", 1 << 22)
    monkeypatch.setattr(module, "CPU_SIDE", 128)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)  # the results are from elsewhere, even on an H200
    return tmp_path


def run(*arguments: str) -> typer.testing.Result:
    return typer.testing.CliRunner().invoke(app, arguments)


def test_a_report_of_several_files(folder: Path) -> None:
    done = run("report", *FILES, "-o", str(folder / "r.html"))
    assert done.exit_code == 0, done.output
    assert "predicted against measured times" in done.output and "15 of 15" in done.output
    page = (folder / "r.html").read_text(encoding="utf-8")
    assert all(f"attention {suite}" in page for suite in ("scaling", "shapes", "fp8"))


def test_a_report_against_itself_has_no_change(folder: Path) -> None:
    done = run("report", FILES[0], "--against", FILES[0], "-o", str(folder / "r.html"))
    assert done.exit_code == 0, done.output
    assert "0 became slower and 0 faster" in (folder / "r.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("none.json",), "none.json: there is no such file"),
        ((FILES[0], FILES[0]), "attention-scaling.json too"),
        (
            (FILES[0], LAUNCH),
            f"error: {LAUNCH} is a file of `flashkernels bench launch`, which the report does not show",
        ),
        ((FILES[0], "--against", LAUNCH), "which the report does not show"),
    ],
    ids=["no file", "twice", "launch", "against launch"],
)
def test_a_report_of_what_it_cannot_show_is_refused(arguments: tuple[str, ...], message: str, folder: Path) -> None:
    done = run("report", *arguments, "-o", str(folder / "r.html"))
    assert done.exit_code == 2
    assert message in done.output
    assert not (folder / "r.html").exists()


def test_this_machine_is_measured_once(folder: Path) -> None:
    first, second = run("roofline", "--json", str(folder / "c.json")), run("roofline")
    assert (first.exit_code, second.exit_code) == (0, 0), first.output + second.output
    assert "measured, kept in" in first.output and "measured, kept in" not in second.output
    assert "measured, kept in" in run("roofline", "--again").output
    assert module.read(folder / "c.json").bandwidth["copy"] > 0


def test_results_from_elsewhere_stand_under_their_own_roofs(folder: Path) -> None:
    done = run("roofline", *FILES, "--png", str(folder / "r.png"), "--html", str(folder / "r.html"))
    assert done.exit_code == 0, done.output
    assert "no measured ceilings of NVIDIA H200" in done.output
    assert "NVIDIA H200, measured" not in (folder / "r.html").read_text(encoding="utf-8")
    assert (folder / "r.png").stat().st_size > 20_000
    module.keep(CEILINGS, folder / "h200.json")
    done = run("roofline", *FILES, "--ceilings", str(folder / "h200.json"), "--html", str(folder / "r.html"))
    assert done.exit_code == 0, done.output
    assert "NVIDIA H200, measured" in (folder / "r.html").read_text(encoding="utf-8")


def test_the_ceilings_of_another_device_are_refused(folder: Path) -> None:
    other = json.loads(module.keep(CEILINGS, folder / "c.json").read_text()) | {"device": "NVIDIA H100"}
    (folder / "c.json").write_text(json.dumps(other))
    for command in ("roofline", "report"):
        done = run(command, *FILES, "--ceilings", str(folder / "c.json"))
        assert done.exit_code == 2
        assert "has the ceilings of NVIDIA H100" in done.output


def test_measuring_again_what_is_not_here_is_refused() -> None:
    done = run("roofline", *FILES, "--again")
    assert done.exit_code == 2
    assert "measures this machine" in done.output
