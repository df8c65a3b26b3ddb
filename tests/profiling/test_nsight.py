"""Nsight: the command lines, and the files that the tools write, read into our records."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from flashkernels.profiling import nsight, trace
from flashkernels.profiling.nsight import NsightError
from flashkernels.profiling.profile import Profile, profile_of
from flashkernels.profiling.words import stall_of

from .timeline import DATA, Timeline

PROGRAM = ["python", "train.py", "--steps", "3"]
LOG = Path("/tmp/ncu.csv")
RAW = DATA / "synthetic" / "ncu-raw.csv"


def after(line: list[str], option: str) -> str:
    return line[line.index(option) + 1]


def test_ncu_leaves_the_clocks_alone_and_measures_graph_nodes() -> None:
    line = nsight.ncu_command("ncu", PROGRAM, LOG, kernel="attention|softmax", count=5, skip=2)
    assert line[0] == "ncu" and line[-4:] == PROGRAM
    assert after(line, "--clock-control") == "none" and after(line, "--graph-profiling") == "node"
    assert after(line, "--kernel-name") == "regex:attention|softmax"
    assert after(line, "--kernel-name-base") == "demangled"
    assert (after(line, "--launch-count"), after(line, "--launch-skip")) == ("5", "2")
    assert (after(line, "--page"), after(line, "--print-units"), after(line, "--log-file")) == ("raw", "base", str(LOG))
    assert {"SpeedOfLight", "WarpStateStats", "Occupancy"} <= {*line}
    assert "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum" in after(line, "--metrics")


def test_a_set_stands_in_for_the_sections() -> None:
    line = nsight.ncu_command("ncu", PROGRAM, LOG, set_="full")
    assert after(line, "--set") == "full" and "--section" not in line and "--launch-count" not in line
    assert "--metrics" in line


def test_nsys_records_each_node_of_a_graph() -> None:
    line = nsight.nsys_command("nsys", PROGRAM, Path("out.nsys-rep"))
    assert line[:2] == ["nsys", "profile"] and line[-4:] == PROGRAM
    assert {"--cuda-graph-trace=node", "--output=out.nsys-rep"} <= {*line}


def test_with_ranges_the_program_runs_inside_them(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    line = nsight.nsys_command("nsys", ["python3", str(script), "-v"], Path("out"), nvtx=True)
    assert line[-5:] == [sys.executable, "-m", "flashkernels.profiling.ranges", str(script), "-v"]


@pytest.mark.parametrize(
    ("command", "settings", "words"),
    [
        pytest.param([], {}, "no program is given", id="no-program"),
        pytest.param(PROGRAM, {"set_": "huge"}, "set='huge' is not one of basic, detailed, full", id="set"),
        pytest.param(PROGRAM, {"count": -1}, "count=-1", id="count"),
    ],
)
def test_a_command_that_makes_no_sense_is_refused(command: list[str], settings: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        nsight.ncu_command("ncu", command, LOG, **settings)


def test_the_raw_page_of_ncu_gives_counters() -> None:
    first, second = nsight.read_ncu(RAW.read_text()).kernels
    assert (first.name, first.duration, first.grid, first.block) == (
        "attention_forward", pytest.approx(1013.376), (132, 1, 1), (384, 1, 1),
    )  # fmt: skip
    assert first.registers == 168
    assert first.counters == {
        "dram": 11.42, "l2_hit": 91.2, "sm": 78.05, "tensor": 72.31, "occupancy": 18.71, "stall_barrier": 0.35,
        "stall_long_scoreboard": 0.92, "bank_conflicts": pytest.approx(1024 / 1048576),
    }  # fmt: skip
    assert second.counters["bank_conflicts"] == pytest.approx(0.3)


@pytest.mark.parametrize("path", [pytest.param(p, id=p.parent.name) for p in sorted(DATA.glob("*/ncu-raw.csv"))])
def test_a_recording_has_the_counters_of_the_table(path: Path) -> None:
    for kernel in nsight.read_ncu(path.read_text()).kernels:
        assert {"dram", "l2_hit", "sm", "tensor", "occupancy"} <= kernel.counters.keys() and kernel.duration > 0
        assert any(name.startswith("stall_") for name in kernel.counters)


def test_the_details_page_of_ncu_gives_the_same_counters() -> None:
    (kernel,) = nsight.read_ncu((DATA / "ncu-details.csv").read_text()).kernels
    assert (kernel.name, kernel.duration) == ("saxpy(int, float *)", pytest.approx(1211.94))
    assert kernel.counters == {"dram": 88.1, "sm": 9.0}  # what was not counted is not there


def test_counters_decide_the_bound() -> None:
    attention, softmax = Profile(nsight.read_ncu(RAW.read_text())).rows
    assert (attention.bound, softmax.bound) == ("compute", "latency")
    assert (stall_of(attention), stall_of(softmax)) == ("long scoreboard", "long scoreboard")


def test_the_table_shows_the_counters() -> None:
    text = str(Profile(nsight.read_ncu(RAW.read_text())))
    assert "on a GPU, kernels measured one by one" in text
    for part in ("DRAM %", "L2 hit %", "tensor %", "occupancy %", "bank conflicts", "waits for"):
        assert part in text


def test_counters_join_a_trace_by_name_and_grid() -> None:
    line = Timeline()
    line.op("aten::mm", [], [], [("softmax_rows", 50.0)], grid=[4096, 1, 1])
    line.op("aten::mm", [], [], [("softmax_rows", 50.0)], grid=[8, 1, 1])
    line.op("aten::mm", [], [], [("other", 50.0)])
    measured = nsight.read_ncu(RAW.read_text()).kernels
    joined = nsight.with_counters(trace.parse(line.data()), measured).kernels
    assert [kernel.counters.get("dram") for kernel in joined] == [38.5, 38.5, None]


def test_counters_of_kernels_that_are_not_in_the_trace_are_an_error() -> None:
    line = Timeline()
    line.op("aten::mm", [], [], [("other", 50.0)])
    measured = nsight.read_ncu(RAW.read_text()).kernels
    with pytest.raises(NsightError, match=r"attention_forward, softmax_rows.* is in the trace"):
        nsight.with_counters(trace.parse(line.data()), measured)


@pytest.mark.parametrize("path", [pytest.param(p, id=p.parent.name) for p in sorted(DATA.glob("**/nsys-*.csv"))])
def test_a_recording_of_nsys_is_a_timeline(path: Path) -> None:
    found = nsight.read_nsys(path.read_text(encoding="utf-8"))
    assert found.gpu and all(kernel.duration > 0 for kernel in found.kernels)
    assert {"kernel"} <= {kernel.kind for kernel in found.kernels} <= {"kernel", "copy", "fill"}


def test_the_gpu_trace_of_nsys_gives_a_timeline() -> None:
    found = nsight.read_nsys((DATA / "nsys-gpu-trace.csv").read_text())
    copy, gemm, fill = found.kernels
    assert found.gpu == "NVIDIA H200"
    assert (copy.kind, copy.bytes, copy.duration) == ("copy", 16777000, 2600.0)
    assert (gemm.name, gemm.start, gemm.grid) == ("void gemm<float, 4>(float*, int)", 3700.0, (132, 1, 1))
    assert (gemm.registers, gemm.shared, fill.kind) == (168, 214000, "fill")
    assert [finding.rule for finding in profile_of(found).findings] == ["pageable-copies"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("==PROF== nothing", "no CSV with a column 'Kernel Name'", id="no-table"),
        pytest.param('"ID","Kernel Name"\n', "no kernel was measured", id="no-kernels"),
        pytest.param('"ID","Kernel Name","Stream"\n"0","k","7"\n', "k has no gpu__time_duration.sum", id="no-time"),
    ],
)
def test_a_file_of_another_kind_is_refused(text: str, words: str) -> None:
    with pytest.raises(NsightError, match=words):
        nsight.read_ncu(text)


def test_a_gpu_trace_without_times_is_refused() -> None:
    with pytest.raises(NsightError, match="lacks a start or duration"):
        nsight.read_nsys("Start (ns),Name\n12,kernel\n")


def test_forbidden_counters_are_recognised_and_explained_for_every_system() -> None:
    assert nsight.forbidden((DATA / "ncu-forbidden.txt").read_text())
    assert not nsight.forbidden(RAW.read_text())
    for words in (nsight.PERMIT, nsight.GET["ncu"], nsight.GET["nsys"]):
        for system in ("Linux:", "Docker:", "WSL2:", "Windows:"):
            assert any(line.startswith(system) for line in words), system
