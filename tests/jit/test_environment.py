"""Every variable is documented and read in one place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flashkernels.jit import environment
from flashkernels.jit.environment import VARIABLES

ROOT = Path(__file__).parents[2]


def test_no_other_module_reads_a_variable_of_ours() -> None:
    readers = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "src").rglob("*.py")
        if re.search(r"(environ|getenv)[^\n]*FLASHKERNELS_", path.read_text(encoding="utf-8"))
    ]
    assert readers == []


def test_every_variable_that_is_named_anywhere_is_in_the_table() -> None:
    known = {variable.name for variable in VARIABLES}
    for folder, pattern in (("src", "*.py"), ("docs", "*.md"), (".", "README.md")):
        for path in (ROOT / folder).rglob(pattern) if folder != "." else [ROOT / pattern]:
            named = set(re.findall(r"\bFLASHKERNELS_[A-Z_]+\b", path.read_text(encoding="utf-8")))
            assert named <= known, path


def test_the_readme_lists_every_variable() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [v.name for v in VARIABLES if f"| `{v.name}` |" not in text] == []


def test_each_has_a_meaning() -> None:
    assert all(v.name.startswith("FLASHKERNELS_") and v.meaning.endswith(".") for v in VARIABLES)
    assert len({v.name for v in VARIABLES}) == len(VARIABLES)


@pytest.mark.parametrize(("text", "on"), [("", False), ("0", False), ("1", True), ("true", True), ("Off", False)])
def test_switches(text: str, on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHKERNELS_STRICT", text)
    assert environment.strict() is on


@pytest.mark.parametrize(
    ("text", "size"), [("", 4 << 30), ("0", 0), ("10", 10), ("3k", 3072), ("1.5G", -1), ("big", -1)]
)
def test_sizes(text: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHKERNELS_CACHE_BYTES", text)
    if size >= 0:
        assert environment.cache_bytes() == size
        return
    with pytest.raises(ValueError, match=f"FLASHKERNELS_CACHE_BYTES='{text}' is not a number of bytes"):
        environment.cache_bytes()


def test_a_switch_that_is_neither_on_nor_off_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHKERNELS_STRICT", "maybe")
    with pytest.raises(ValueError, match="FLASHKERNELS_STRICT='maybe' is not 1 or 0"):
        environment.strict()


def test_topics_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHKERNELS_LOG", "other,dispatch")
    assert environment.logs("dispatch") and not environment.logs("disp")
