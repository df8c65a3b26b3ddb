"""DESIGN.md tells the truth: what its layout names exists, what exists it names, and CI checks its import order."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
DESIGN = (ROOT / "DESIGN.md").read_text(encoding="utf-8")


def layout_paths() -> Iterator[Path]:
    """The paths in the layout block. A line starts with one, relative to the folder above that is indented less;
    file and folder names further on in the line are inside that folder, or beside that file."""
    block = re.search(r"^## Layout\n+```\n(.*?)^```", DESIGN, re.MULTILINE | re.DOTALL)
    assert block, "DESIGN.md has no layout block"
    folders = [(-1, Path())]  # indentation and folder, from the root down to the line
    for line in block[1].splitlines():
        indent = len(line) - len(line.lstrip())
        while folders[-1][0] >= indent:
            folders.pop()
        first, *words = line.split()
        path = folders[-1][1] / first
        yield path
        if first.endswith("/"):
            folders.append((indent, path))
        for word in words:
            if re.fullmatch(r"[\w./-]+(/|\.(py|md|toml|txt|cu|j2))", word.strip(",;:()")):
                yield folders[-1][1] / word.strip(",;:()")


def packages() -> Iterator[Path]:
    for init in (ROOT / "src").rglob("__init__.py"):
        yield init.parent.relative_to(ROOT)


@pytest.mark.parametrize("path", [pytest.param(path, id=str(path)) for path in dict.fromkeys(layout_paths())])
def test_layout_names_only_what_exists(path: Path) -> None:
    assert (ROOT / path).exists(), f"DESIGN.md's layout names {path}, which is not there"


def test_layout_names_every_package_and_top_module() -> None:
    top_modules = {path.relative_to(ROOT) for path in (ROOT / "src" / "flashkernels").glob("*.py")}
    missing = ({*packages()} | top_modules) - {*layout_paths()}
    assert not missing, f"not in DESIGN.md's layout: {', '.join(sorted(map(str, missing)))}"


def test_import_order_is_the_one_that_ci_checks() -> None:
    line = re.search(r"^`(hardware → .*)`", DESIGN, re.MULTILINE)
    assert line, "DESIGN.md has no import order"
    designed = [{name.strip() for name in layer.split(",")} for layer in line[1].split("→")]
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    checked = [{name.strip(" ()") for name in layer.split("|")} for layer in reversed(layers)]
    assert checked == designed
