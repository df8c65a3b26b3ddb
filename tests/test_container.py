"""The Dockerfile and its page name only what exists. Nothing is built: there is no Docker here."""

from __future__ import annotations

import json
import re
import shlex
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from flashkernels.cli import COMMANDS
from flashkernels.cli.doctor import CHECKS
from flashkernels.jit.environment import VARIABLES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "container.md").read_text(encoding="utf-8")
OF_THE_IMAGE = {"numpy", "torch", "triton"}  # built for one another: pip leaves them alone
TOOLS = {"chmod", "flashkernels", "mkdir", "pip"}


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile, without comments, a continued line as one."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines if line.strip()]


def commands() -> list[list[str]]:
    """What RUN and CMD run."""
    found = [shlex.split(part) for name, rest in instructions() if name == "RUN" for part in rest.split("&&")]
    return found + [json.loads(rest) for name, rest in instructions() if name == "CMD"]


def named_in_page() -> list[list[str]]:
    """What the page runs inside of the container: the words after the image's name."""
    text = re.sub(r"\\\n\s*", " ", "\n".join(re.findall(r"^```\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)))
    runs = [shlex.split(line) for line in text.splitlines() if line.startswith("docker run")]
    return [run[run.index("flashkernels", 2) + 1 :] for run in runs]


def test_it_has_the_parts_of_an_image() -> None:
    names = [name for name, _ in instructions()]
    assert {*names} <= {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "VOLUME", "CMD"}
    assert names.count("FROM") == 1 and names[-1] == "CMD" and names.index("ARG") < names.index("FROM")


@pytest.mark.parametrize("source", [s for name, rest in instructions() if name == "COPY" for s in rest.split()[:-1]])
def test_every_copied_file_is_there_and_not_ignored(source: str) -> None:
    assert (ROOT / source).exists()
    ignored = False
    for pattern in (ROOT / ".dockerignore").read_text().splitlines():
        if pattern and not pattern.startswith("#") and fnmatch(source, pattern.removeprefix("!")):
            ignored = not pattern.startswith("!")  # the last pattern that fits decides
    assert not ignored, f".dockerignore keeps {source} from the build"


def test_every_command_is_known() -> None:
    for words in commands():
        assert words[0] in TOOLS, words
        assert words[0] != "flashkernels" or words[1] in COMMANDS, words


def test_the_page_runs_commands_that_exist() -> None:
    runs = named_in_page()
    assert len(runs) >= 3
    for words in runs:
        assert words[0] in ("flashkernels", "python") and (words[0] == "python" or words[1] in COMMANDS), words


def test_every_dependency_is_installed_or_the_images() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = {*settings["dependencies"], *settings["optional-dependencies"]["report"]}
    needed = {re.split(r"[^\w-]", dependency)[0] for dependency in wanted}
    installs = [words for words in commands() if words[:2] == ["pip", "install"]]
    given = {word for words in installs for word in words[2:] if not word.startswith("-")} - {"."}
    assert given == needed - OF_THE_IMAGE
    assert any({"--no-deps", "."} <= {*words} for words in installs)


def test_variables_and_checks_exist() -> None:
    known = {variable.name for variable in VARIABLES}
    text = PAGE + (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert {*re.findall(r"FLASHKERNELS_[A-Z]+", text)} <= known
    checks = {check.__name__.replace("_", " ") for check in CHECKS}
    table = PAGE[PAGE.index("| flag |") : PAGE.index("`--cap-add SYS_ADMIN` makes")]
    named = {name for line in table.strip().splitlines()[2:] for name in re.findall(r"`([^`]+)`", line.split("|")[-2])}
    assert named and named <= checks


def test_the_versions_that_the_page_asks_for_are_the_packages() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    torch, triton = (next(d for d in settings["dependencies"] if d.startswith(name)) for name in ("torch", "triton"))
    assert "torch>=2.10" in torch and "triton>=3.6,<3.10" in triton
    assert "torch 2.10 or newer and triton 3.6 to 3.9" in PAGE
