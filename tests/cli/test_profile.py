"""`flashkernels profile`, `ncu` and `nsys`, as a user types them. No GPU is needed."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flashkernels.cli import app

DATA = Path(__file__).parent.parent / "profiling" / "data"
RAW = DATA / "synthetic" / "ncu-raw.csv"
SCRIPT = """
import sys
import torch
import flashkernels as fk

x, q = torch.randn(64, 64), torch.randn(1, 16, 2, 24)
for _ in range(3):
    x @ x
    fk.attention(q, q, q, causal=True)
print("the program says", sys.argv[1])
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def run(*arguments: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flashkernels", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | env)


def test_a_program_is_run_and_its_profile_printed(script: Path, tmp_path: Path) -> None:
    files = ("--trace", tmp_path / "t.json", "--json", tmp_path / "p.json")
    done = run("profile", *files, "--", "python", script, "hello", "0")
    assert done.returncode == 0, done.stderr
    for part in ("the program says hello", "on the CPU", "aten::mm", "GFLOP/s", "flashkernels::attention", "diagnosis"):
        assert part in done.stdout, part
    assert (tmp_path / "t.json").exists()
    rows = {row["name"]: row for row in json.loads((tmp_path / "p.json").read_text())["kernels"]}
    assert rows["aten::mm"]["count"] == 3 and rows["aten::mm"]["flops"] == 3 * 2 * 64**3


def test_the_exit_code_is_the_programs(script: Path) -> None:
    done = run("profile", "--", script, "hello", "3")
    assert done.returncode == 3 and "aten::mm" in done.stdout


def test_a_program_that_raises_is_told_and_what_it_did_before(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("import torch\ntorch.ones(8, 8) @ torch.ones(8, 8)\nraise KeyError('lost')\n")
    result = CliRunner().invoke(app, ["profile", "--", str(script)])
    assert result.exit_code == 1 and "KeyError: 'lost'" in result.stderr and "aten::mm" in result.stdout


def test_a_recorded_trace_is_read(tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    result = CliRunner().invoke(
        app, ["profile", "--read", str(DATA / "synthetic" / "launch-gaps.json.gz"), "--json", str(out)]
    )
    assert result.exit_code == 0 and "capture a CUDA graph" in result.stdout
    assert json.loads(out.read_text())["meta"]["gpu"] == "NVIDIA H200"


def test_a_profile_is_no_trace(tmp_path: Path) -> None:
    trace, out = DATA / "synthetic" / "launch-gaps.json.gz", tmp_path / "run.json"
    assert CliRunner().invoke(app, ["profile", "--read", str(trace), "--json", str(out)]).exit_code == 0
    result = CliRunner().invoke(app, ["profile", "--read", str(out)])
    assert result.exit_code == 2
    assert result.stderr == f"error: {out} is a profile of --json; --read takes a trace of --trace\n"


def test_counters_of_ncu_join_the_table(tmp_path: Path) -> None:
    trace = str(DATA / "synthetic" / "low-occupancy.json.gz")
    counters = tmp_path / "ncu.csv"
    counters.write_text(RAW.read_text().replace('"softmax_rows"', '"my_softmax_kernel"'))
    result = CliRunner().invoke(app, ["profile", "--read", trace, "--counters", str(counters)])
    assert result.exit_code == 0 and "DRAM %" in result.stdout and "bank conflicts" in result.stdout
    missed = CliRunner().invoke(app, ["profile", "--read", trace, "--counters", str(RAW)])
    assert missed.exit_code == 2 and "is in the trace" in missed.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["profile"], "give a program after --"),
        (["profile", "--read", "x.json", "--", "y.py"], "give a program after --"),
        (["profile", "--read", "nowhere.json"], "--read nowhere.json: there is no such file"),
        (["profile", "--top", "0", "--", "y.py"], "--top 0 must be at least 1"),
        (["profile", "--gpu", "h200", "--", "y.py"], "--gpu h200 is for --read"),
        (["profile", "--read", "x.json", "--stacks"], "--read runs none"),
        (["profile", "--", "nowhere.py"], "nowhere.py: there is no such script"),
        (["ncu"], "give either a program after --"),
        (["ncu", "--set", "huge", "--", "python", "x.py"], "set='huge' is not one of"),
        (["ncu", "--read", "nowhere.csv"], "there is no such file"),
        (["nsys"], "give either a program after --"),
        (["nsys", "--read", "nowhere.csv"], "there is no such file"),
    ],
)
def test_misuse_is_one_line(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2 and words in result.stderr and result.stderr.count("\n") == 1


def test_ncu_prints_its_command_line_without_running_it() -> None:
    result = CliRunner().invoke(app, ["ncu", "--dry-run", "--kernel", "attn", "--", "python", "x.py"])
    assert result.exit_code == 0
    for part in ("--clock-control none", "--graph-profiling node", "--kernel-name regex:attn", "python x.py"):
        assert part in result.stdout


def test_nsys_prints_its_command_line_without_running_it() -> None:
    result = CliRunner().invoke(app, ["nsys", "--dry-run", "--", "python", "x.py"])
    assert result.exit_code == 0 and "--cuda-graph-trace=node" in result.stdout


def test_what_the_tools_wrote_is_read() -> None:
    counted = CliRunner().invoke(app, ["ncu", "--read", str(RAW)])
    assert counted.exit_code == 0 and "DRAM %" in counted.stdout and "bank conflicts" in counted.stdout
    timed = CliRunner().invoke(app, ["nsys", "--read", str(DATA / "nsys-gpu-trace.csv")])
    assert timed.exit_code == 0 and "pageable memory" in timed.stdout


def tool(folder: Path, name: str, body: str) -> Path:
    """A program that stands in for a tool."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!{sys.executable}\nimport sys\n{body}")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return folder


WRITE_LOG = "open(sys.argv[sys.argv.index('--log-file') + 1], 'w').write(open({!r}).read())\n"


def test_ncu_is_run_and_its_counters_shown(tmp_path: Path, script: Path) -> None:
    folder = tool(tmp_path / "bin", "ncu", WRITE_LOG.format(str(RAW)))
    done = run("ncu", "--keep", tmp_path / "kept.csv", "--", "python", script, "hello", "0", PATH=str(folder))
    assert done.returncode == 0, done.stderr
    assert "attention_forward" in done.stdout and "tensor %" in done.stdout
    assert (tmp_path / "kept.csv").read_text() == RAW.read_text()


def test_forbidden_counters_are_explained_and_the_profile_goes_on(tmp_path: Path, script: Path) -> None:
    folder = tool(tmp_path / "bin", "ncu", WRITE_LOG.format(str(DATA / "ncu-forbidden.txt")) + "sys.exit(1)\n")
    done = run("ncu", "--", "python", script, "hello", "0", PATH=str(folder))
    assert done.returncode == 0, done.stderr
    for part in ("Linux: ", "NVreg_RestrictProfilingToAdminUsers=0", "Docker: ", "WSL2: ", "Windows: ", "Going on"):
        assert part in done.stderr
    assert "the program says hello" in done.stdout and "aten::mm" in done.stdout


def test_a_failing_ncu_is_an_error_with_its_words(tmp_path: Path, script: Path) -> None:
    folder = tool(tmp_path / "bin", "ncu", "print('==ERROR== out of luck', file=sys.stderr); sys.exit(5)\n")
    done = run("ncu", "--", "python", script, "hello", "0", PATH=str(folder))
    assert done.returncode == 2 and "error: ncu ended with exit code 5: out of luck" in done.stderr


@pytest.mark.parametrize("name", ["ncu", "nsys"])
def test_a_missing_tool_is_explained_and_the_profile_goes_on(
    name: str, script: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("flashkernels.profiling.nsight.find", lambda tool: None)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, [name, "--", "python", str(script), "hello", "0"])
    assert result.exit_code == 0, result.stderr
    for part in ("is not installed", "Linux: ", "Docker: ", "WSL2: ", "Windows: ", "Going on without"):
        assert part in result.stderr
    assert "aten::mm" in result.stdout


def test_nsys_is_run_and_its_kernels_shown(tmp_path: Path, script: Path) -> None:
    body = f"""
if sys.argv[1] == "profile":
    output = next(word for word in sys.argv if word.startswith("--output=")).partition("=")[2]
    open(output, "w").write("a report")
else:
    print(open({str(DATA / "nsys-gpu-trace.csv")!r}).read())
"""
    folder, report = tool(tmp_path / "bin", "nsys", body), tmp_path / "run.nsys-rep"
    done = run("nsys", "--output", report, "--", "python", script, "hello", "0", PATH=str(folder))
    assert done.returncode == 0, done.stderr
    assert "gemm<float, 4>" in done.stdout and f"timeline: {report}" in done.stdout
