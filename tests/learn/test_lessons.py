"""Every lesson runs, is right, and says so in JSON; `measure.py` collects what they say."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
LEARN = ROOT / "docs" / "learn"
LESSONS = [pytest.param(path, id=f"{path.parent.name}-{path.stem}") for path in sorted(LEARN.glob("*/[0-9]*.py"))]
FIELDS = {"name", "dtype", "flops", "floor", "moved", "ms", "error", "allowed"}


def run(*command: Path | str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "PYTHONWARNINGS": "ignore"} | variables
    return subprocess.run(
        [sys.executable, *map(str, command)], env=environment, capture_output=True, text=True, timeout=300
    )


def measured(lesson: Path, into: Path, **variables: str) -> dict[str, Any]:
    done = run(lesson, "--json", into, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    data: dict[str, Any] = json.loads(into.read_text())
    assert data["cases"]
    for case in data["cases"]:
        assert case.keys() == FIELDS
        assert case["error"] <= case["allowed"] and case["ms"] > 0
        assert 0 < case["floor"] <= case["moved"]
        assert case["name"] in done.stdout
    return data


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_lesson_runs_without_a_gpu(lesson: Path, tmp_path: Path) -> None:
    assert measured(lesson, tmp_path / "one.json", TRITON_INTERPRET="1")["meta"]["gpu"] is None


@pytest.mark.gpu
@pytest.mark.parametrize("lesson", LESSONS)
def test_a_lesson_runs_on_a_gpu(lesson: Path, tmp_path: Path) -> None:
    assert measured(lesson, tmp_path / "one.json")["meta"]["gpu"]


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_lesson_is_short(lesson: Path) -> None:
    assert len(lesson.read_text(encoding="utf-8").splitlines()) <= 130


SHARED = [path for path in sorted(LEARN.glob("**/[a-z]*.py")) if ">>> " in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem) for path in SHARED])
def test_the_examples_in_shared_code(path: Path) -> None:
    done = run("-m", "doctest", path, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr


def lesson_of(body: str, folder: Path) -> Path:
    """A lesson beside copies of what lessons share."""
    for name in ("lesson.py", "figures.py", "measure.py"):
        (folder / name).write_text((LEARN / name).read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "part").mkdir(exist_ok=True)
    path = folder / "part" / "1_one.py"
    start = "import sys\nsys.path.insert(0, __file__.rsplit('/', 2)[0])\nimport torch\nimport lesson\n"
    path.write_text(start + body + "\nif __name__ == '__main__':\n    lesson.main(__file__, cases)\n", encoding="utf-8")
    return path


def one(run: str, name: str = "'double'") -> str:
    return f"""
x = lesson.normal(8, 8)
def cases():
    yield lesson.Case({name}, lambda: {run}, lambda dtype: 2 * x.to(dtype), 64, 256, 256)
"""


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (one("2 * x + 0.1"), "double: wrong: the largest error is 0.1"),
        (one("x / 0"), "wrong"),
        (one("x * float('nan')"), "double: wrong: the largest error is nan"),
        (one("x[:4]"), "the result has shape (4, 8), the reference (8, 8)"),
        (one("2 * x") + "    yield next(cases())\n", "two cases have the same name: double, double"),
    ],
    ids=["wrong", "inf", "nan", "shape", "names"],
)  # fmt: skip
def test_a_lesson_that_is_wrong_fails(body: str, words: str, tmp_path: Path) -> None:
    done = run(lesson_of(body, tmp_path), "--json", tmp_path / "one.json", TRITON_INTERPRET="1")
    assert done.returncode != 0 and words in done.stderr
    assert not (tmp_path / "one.json").exists()


def test_measure_collects_and_goes_on_after_a_failure(tmp_path: Path) -> None:
    lesson_of(one("2 * x"), tmp_path)
    (tmp_path / "part" / "2_wrong.py").write_text("raise SystemExit('it was wrong')\n")
    out = tmp_path / "deep" / "all.json"
    done = run(tmp_path / "measure.py", "--out", out, TRITON_INTERPRET="1")
    assert done.returncode == 1 and "1 of 2 lessons measured" in done.stdout, done.stdout + done.stderr
    lessons = json.loads(out.read_text())["lessons"]
    assert lessons["part/1_one"]["cases"][0]["name"] == "double"
    assert lessons["part/2_wrong"] == {"failed": "it was wrong"}

    (tmp_path / "part" / "2_wrong.py").write_text((tmp_path / "part" / "1_one.py").read_text())
    done = run(tmp_path / "measure.py", "--out", out, "--only", "part/2", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr
    again = json.loads(out.read_text())["lessons"]
    assert again["part/2_wrong"]["cases"] and again["part/1_one"] == lessons["part/1_one"]


def test_lessons_measure_one_after_the_other(tmp_path: Path) -> None:
    """Each call is noted with its lesson: those of one lesson stand together."""
    body = f"""
import time
x = lesson.normal(8, 8)
def double():
    with open({str(tmp_path / "log")!r}, "a") as log:
        print(sys.argv[0], file=log)
    time.sleep(0.02)
    return 2 * x
def cases():
    yield lesson.Case("double", double, lambda dtype: 2 * x.to(dtype), 64, 256, 256)
"""
    first = lesson_of(body, tmp_path)
    for name in ("2_two.py", "3_three.py"):
        (tmp_path / "part" / name).write_text(first.read_text())
    done = run(tmp_path / "measure.py", "--out", tmp_path / "all.json", "--jobs", "3", TRITON_INTERPRET="1")
    assert done.returncode == 0 and "3 of 3 lessons measured" in done.stdout, done.stdout + done.stderr
    order = (tmp_path / "log").read_text().split()
    assert len({*order}) == 3 and len([*itertools.groupby(order)]) == 3, order


def test_measure_waits_only_so_long(tmp_path: Path) -> None:
    lesson_of("import time\ntime.sleep(60)\ncases = None\n", tmp_path)
    done = run(tmp_path / "measure.py", "--out", tmp_path / "all.json", "--seconds", "0.5")
    assert done.returncode == 1
    lessons = json.loads((tmp_path / "all.json").read_text())["lessons"]
    assert lessons == {"part/1_one": {"failed": "it took more than 0.5 s"}}


def test_measure_names_the_lessons_it_has(tmp_path: Path) -> None:
    done = run(LEARN / "measure.py", "--out", tmp_path / "all.json", "--only", "nothing")
    assert done.returncode == 2 and "'nothing' is no lesson" in done.stderr and "attention/1_naive" in done.stderr
