"""docs/checklist.md: every command runs, and its output has the words that the page says to look for."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from typer.testing import CliRunner

from flashkernels.cli import COMMANDS, app
from flashkernels.cli.doctor import CHECKS
from flashkernels.profiling.diagnosis import RULES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "checklist.md").read_text(encoding="utf-8")
# What is small enough for a test: fewer steps, and kernels that compile in a moment.
SMALL = (
    ("--steps 20", "--steps 1"),
    ("--ops attention,rms_norm --head-dims 128", "--ops rms_norm --widths 64 --jobs 1"),
    ("examples/", f"{ROOT}/examples/"),
)
HERE = ("explain", "ncu")  # commands that run in this process; the others must not find that it interprets Triton


class Item(NamedTuple):
    command: str
    words: list[str]  # to look for in its output


def items() -> Iterator[Item]:
    for block in re.findall(r"^```\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            command, found, words = line.partition("# look for: ")
            assert found, f"nothing to look for: {line}"
            yield Item(command.strip(), [word.strip() for word in words.split(", ")])


class Runs:
    """The commands of a folder, each run once: some use what another one wrote."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.known: dict[str, tuple[int, str]] = {}

    def __call__(self, command: str) -> tuple[int, str]:
        if command not in self.known:
            small = command
            for long, short in SMALL:
                small = small.replace(long, short)
            self.known[command] = self.run(shlex.split(small))
        return self.known[command]

    def run(self, words: list[str]) -> tuple[int, str]:
        if words[0] == "flashkernels" and words[1] in HERE:
            done = CliRunner().invoke(app, words[1:])
            return done.exit_code, done.output + str(done.exception or "")
        # one thread: at these sizes more of them only wait for one another
        variables = {"PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
        while "=" in words[0]:
            name, _, variables[name] = words.pop(0).partition("=")
        module = ["-m"] if words[0] == "flashkernels" else []
        program = [sys.executable, *module, *(words if module else words[1:])]
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | variables
        ended = subprocess.run(program, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=300)
        return ended.returncode, ended.stdout + ended.stderr


def test_every_command_shows_what_the_page_says(tmp_path: Path) -> None:
    """In the order of the page, in one folder."""
    runs = Runs(tmp_path)
    for command, words in items():
        code, output = runs(command)
        assert code == 0, f"{command}\n{output}"
        for word in words:
            assert word in output, f"{word!r} is not in the output of {command}:\n{output}"


def test_there_is_a_command_for_each_part() -> None:
    parts = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
    assert len(parts) == 8
    for part in parts:
        assert "flashkernels " in "".join(re.findall(r"^```\n(.*?)^```", part, re.MULTILINE | re.DOTALL)), part[:30]


def test_checks_rules_and_commands_that_are_named_exist() -> None:
    rules, checks = {rule.name for rule in RULES}, {check.__name__.replace("_", " ") for check in CHECKS}
    for sentence in re.findall(r"[Tt]he (rules? `[^.:;]*?|checks? `[^.:;]*?) (?:of|shows|tries|captures)", PAGE):
        known = rules if sentence.startswith("rule") else checks
        assert {*re.findall(r"`([^`]+)`", sentence)} <= known, sentence
    assert {*re.findall(r"flashkernels (\w+)", " ".join(item.command for item in items()))} <= {*COMMANDS}
