"""Runs every lesson, each in a process of its own, and collects their measurements in one file.

python docs/learn/measure.py --out docs/learn/results/h200.json [--only attention] [--seconds 60] [--jobs 3]

The next lessons start while one measures, since that takes seconds; they measure one after the other. The file is
written after each, so that a run that is cut short leaves what it has.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"


def lessons(only: str = "") -> list[Path]:
    """The files of all lessons, part by part: those whose names start with a number."""
    found = sorted(HERE.glob("*/[0-9]*.py"), key=lambda path: (path.parent.name, int(path.name.split("_")[0])))
    return [path for path in found if str(path.relative_to(HERE)).startswith(only)]


def name_of(lesson: Path) -> str:
    return lesson.relative_to(HERE).with_suffix("").as_posix()


def run(lesson: Path, seconds: float, patience: float, turn: Path) -> tuple[dict[str, Any], float]:
    """What a lesson wrote: its meta and cases; or why it failed. And how long it took, its wait for its turn included.

    `patience` is how long it may take with that wait.
    """
    start = time.perf_counter()
    return _run(lesson, seconds, patience, turn), time.perf_counter() - start


def _run(lesson: Path, seconds: float, patience: float, turn: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder) / "lesson.json"
        paths = os.pathsep.join([str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])])
        try:
            done = subprocess.run(
                [sys.executable, str(lesson), "--json", str(into)],
                env=os.environ | {"PYTHONPATH": paths, "LESSON_TURN": str(turn)}, stderr=subprocess.PIPE, text=True,
                timeout=patience,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"failed": f"it took more than {seconds:g} s"}
        if done.returncode:
            print(done.stderr, file=sys.stderr)
            last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
            return {"failed": last[0]}
        return json.loads(into.read_text(encoding="utf-8"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--only", default="", help="the part, or the lesson, whose figures to measure again")
    parser.add_argument("--seconds", type=float, default=60, help="how long one lesson may take")
    parser.add_argument("--jobs", type=int, default=3, help="lessons that are started at once; one of them measures")
    args = parser.parse_args()
    chosen = lessons(args.only)
    if not chosen:
        parser.error(f"--only {args.only!r} is no lesson; there are {', '.join(map(name_of, lessons()))}")
    found: dict[str, Any] = {}
    if args.only and args.out.exists():  # the rest of the file stays
        found = json.loads(args.out.read_text(encoding="utf-8"))["lessons"]
    if args.jobs < 1:
        parser.error(f"--jobs {args.jobs} must be at least 1")
    failed = 0
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        turn = Path(folder) / "turn"
        turn.touch()
        one = partial(run, seconds=args.seconds, patience=args.seconds * args.jobs, turn=turn)
        for lesson, (result, seconds) in zip(chosen, pool.map(one, chosen), strict=True):
            failed += "failed" in result
            print(f"{name_of(lesson)}: {result.get('failed', 'done')} ({seconds:.0f} s)\n", flush=True)
            found[name_of(lesson)] = result
            text = json.dumps({"lessons": dict(sorted(found.items()))}, indent=1) + "\n"
            args.out.write_text(text, encoding="utf-8")
    print(f"{len(chosen) - failed} of {len(chosen)} lessons measured, in {args.out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
