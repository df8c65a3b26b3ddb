"""`fk.profile()` and programs run inside it, on the CPU."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import flashkernels as fk
from flashkernels.jit.eager import unwatched, watched
from flashkernels.profiling import syncs
from flashkernels.profiling.program import Program
from flashkernels.profiling.ranges import nvtx_ranges


def test_a_session_records_ops_with_their_cost() -> None:
    x = torch.randn(32, 48)
    with fk.profile() as session:
        x @ x.T
    (row,) = [row for row in session.profile.rows if row.name == "aten::mm"]
    assert row.cost is not None and row.cost.flops == 2 * 32 * 48 * 32 and row.time > 0 and row.kind == "cpu"
    assert "aten::mm" in str(session) and session.profile.latency.bound == "CPU only"


def test_our_ops_show_up_by_name() -> None:
    q = torch.randn(1, 8, 2, 16)
    with fk.profile() as session:
        fk.attention(q, q, q)
        fk.rms_norm(q, torch.ones(16))
    assert {"flashkernels::attention", "flashkernels::norm"} <= {row.name for row in session.profile.rows}


def test_results_inside_are_those_outside() -> None:
    q = torch.randn(1, 8, 2, 16)
    with fk.profile():
        inside = fk.attention(q, q, q, causal=True)
    torch.testing.assert_close(inside, fk.attention(q, q, q, causal=True), rtol=0, atol=0)


def test_calls_skip_the_dispatcher_again_after_a_session() -> None:
    x = (torch.ones(1),)
    with watched():
        assert not unwatched(x)
    assert unwatched(x)
    with pytest.raises(RuntimeError, match="broken"), fk.profile():
        raise RuntimeError("broken")
    assert unwatched(x)


def test_steps_are_timed_and_counted() -> None:
    with fk.profile() as session:
        for _ in range(5):
            with session.step("decode", items=3):
                torch.ones(4) + 1
    (steps,) = session.profile.latency.steps
    assert (steps.name, len(steps.times), steps.items) == ("decode", 5, 15)
    assert steps.percentile(50) <= steps.percentile(90) <= steps.percentile(99) and steps.throughput > 0


def test_the_trace_is_written_for_perfetto(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "trace.json"
    with fk.profile(path):
        torch.ones(4) + 1
    assert any(event["name"] == "aten::add" for event in json.loads(path.read_text())["traceEvents"])


def test_a_waiting_data_loader_is_found_without_a_gpu() -> None:
    class Slow(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, i: int) -> int:
            torch.randn(200_000).sort()
            return i

    with fk.profile() as session:
        for _ in DataLoader(Slow(), batch_size=2):
            torch.ones(4) + 1
    assert "data-loader" in [finding.rule for finding in session.profile.findings]


def test_stacks_bring_frames() -> None:
    with fk.profile(stacks=True) as session:
        torch.ones(4) + 1
    assert session.profile.trace.frames


def test_a_wait_is_marked_with_its_file_and_line() -> None:
    x = torch.ones(3)
    with fk.profile() as session, syncs.marked(waits=lambda tensor: True):
        line = inspect.currentframe().f_lineno + 1
        x.sum().item()
        bool(x[0])
        x.to(torch.float16).to("cpu")
    names = [mark.name for mark in session.profile.trace.marks]
    assert [name.rpartition("/")[2] for name in names] == [f"test_session.py:{line + i}" for i in range(3)]
    assert [name.split()[1] for name in names] == [".item()", "bool()", ".to()"]


def test_tensors_that_do_not_wait_are_not_marked_and_methods_come_back() -> None:
    before = {name: getattr(torch.Tensor, name) for name in syncs.METHODS}
    with fk.profile() as session, syncs.marked():
        torch.ones(1).item()
    assert session.profile.trace.marks == ()
    assert {name: getattr(torch.Tensor, name) for name in syncs.METHODS} == before


def test_misuse_is_explained() -> None:
    session = fk.profile()
    with pytest.raises(RuntimeError, match="has not ended"):
        _ = session.profile
    with session, pytest.raises(ValueError, match="name='two words'"):
        session.step("two words")
    with pytest.raises(ValueError, match="items=0"):
        session.step(items=0)
    with pytest.raises(RuntimeError, match="already recorded"), session:
        pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_ranges_need_a_gpu() -> None:
    with pytest.raises(ValueError, match="need an NVIDIA GPU"), nvtx_ranges():
        pass


# --- programs


def test_a_script_finds_its_arguments_and_neighbours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "neighbour_of_it.py").write_text("WORD = 'hello'")
    script = tmp_path / "script.py"
    script.write_text("import sys, neighbour_of_it\nprint(__name__, sys.argv[1:], neighbour_of_it.WORD)")
    assert Program(["python3.12", str(script), "--flag", "1"]).run() == 0
    assert capsys.readouterr().out == "__main__ ['--flag', '1'] hello\n"


@pytest.mark.parametrize(("code", "exit_code"), [("pass", 0), ("exit(3)", 3), ("exit('no')", 1)])
def test_the_exit_code_is_the_programs(code: str, exit_code: int) -> None:
    assert Program(["-c", code]).run() == exit_code


def test_a_module_runs_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert Program(["python", "-m", "calendar", "2026", "11"]).run() == 0
    assert "November 2026" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["python"], "no program is given"),
        (["python", "-m"], "python -m needs a word"),
        (["python", "-X", "dev"], "option -X of python"),
        (["nowhere.py"], "nowhere.py: there is no such script"),
    ],
)
def test_what_cannot_be_run_is_refused(command: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Program(command)
