"""The command itself: version, help, lazy loading, and errors as one line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

import pytest
from typer.testing import CliRunner

import flashkernels
from flashkernels.cli import COMMANDS, app
from flashkernels.dispatch import UnsupportedError


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flashkernels", *arguments], capture_output=True, text=True, timeout=120
    )


def test_version_prints_the_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"{flashkernels.__version__}\n")


def test_help_lists_every_command() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert {"bench", "doctor", "explain", "tiles"} <= set(COMMANDS)
    assert all(name in done.stdout for name in COMMANDS)


def test_an_unknown_command_is_refused() -> None:
    done = run("nonsense")
    assert done.returncode == 2
    assert "nonsense" in done.stderr


def test_the_command_loads_without_torch_and_triton() -> None:
    code = "import sys, flashkernels.cli; print(sorted({'torch', 'triton', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception], None]:
    """Puts a command that raises in the place of `doctor`."""

    def install(error: Exception) -> None:
        def doctor() -> None:
            raise error

        module = ModuleType("flashkernels.cli.doctor")
        module.doctor = doctor
        monkeypatch.setitem(sys.modules, module.__name__, module)

    return install


def test_a_refusal_is_one_line_and_exit_code_2(command: Callable[[Exception], None]) -> None:
    command(UnsupportedError("head_dim=600 is too large:\n  at most 512"))
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 2
    assert result.stderr == "error: head_dim=600 is too large: at most 512\n"
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (FileNotFoundError(2, "No such file", "nope.json"), "error: nope.json: No such file\n"),
        (OSError("disk full"), "error: disk full\n"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(
    error: OSError, line: str, command: Callable[[Exception], None]
) -> None:
    command(error)
    result = CliRunner().invoke(app, ["doctor"])
    assert (result.exit_code, result.stderr) == (2, line)


def test_a_bug_keeps_its_traceback(command: Callable[[Exception], None]) -> None:
    command(RuntimeError("a bug"))
    result = CliRunner().invoke(app, ["doctor"])
    assert isinstance(result.exception, RuntimeError)
