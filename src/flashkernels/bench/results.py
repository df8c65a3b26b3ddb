"""The results of a benchmark: rows, where they were measured, and their files (JSON, CSV)."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import platform
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from flashkernels.jit import environment

META = ("gpu", "driver", "torch", "triton", "flashkernels", "commit", "date")
TIMES = ("ms_p50", "ms_p99", "tflops", "tbps")
COPY = "copy"  # the contestant that only moves the bytes: a yardstick, nobody's rival
MACHINE = ("gpu", "cpu", "driver", "torch", "triton", "quick")  # of the meta: what rows in one file share


class ResultsError(ValueError):
    """A results file does not have the documented format; the message says where."""


@dataclass(frozen=True)
class Row:
    """One contestant on one case. A row with `ok=False` has a reason instead of times."""

    op: str
    suite: str
    case: str
    params: dict[str, Any]
    impl: str
    peer: bool
    ms_p50: float | None = None
    ms_p99: float | None = None
    tflops: float | None = None
    tbps: float | None = None
    roofline: float | None = None
    bound: str | None = None
    error: float | None = None
    reference_error: float | None = None
    ok: bool = True
    reason: str | None = None
    commit: str | None = None  # of a row that is older than the rest of its file, with its date
    date: str | None = None
    peak_gb: float | None = None  # memory of one call beyond inputs and results, where that is what matters

    def as_dict(self) -> dict[str, Any]:
        """The JSON object of the row; a figure that cannot exist is null, one that was not measured is absent."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        nullable = ("roofline", "bound") if self.ok else ()
        return {name: _short(value) for name, value in values.items() if value is not None or name in nullable}

    @property
    def group(self) -> str:
        return f"{self.op} {self.suite}"

    @property
    def seconds(self) -> float:
        """Median time of one call; infinite where there is none, so that it never wins."""
        return math.inf if self.ms_p50 is None else self.ms_p50 / 1e3


@dataclass
class Results:
    """All rows of one run."""

    meta: dict[str, Any]
    rows: list[Row] = field(default_factory=list)

    def cases(self) -> dict[tuple[str, str], list[Row]]:
        """Rows by (op and suite, case), in the order they were measured: suites of two ops may share their names."""
        grouped: dict[tuple[str, str], list[Row]] = {}
        for row in self.rows:
            grouped.setdefault((row.group, row.case), []).append(row)
        return grouped

    def impls(self) -> list[str]:
        """Names of the contestants that were timed at least once: ours first, each in the order of appearance."""
        timed = sorted((row for row in self.rows if row.ok), key=lambda row: row.peer)
        return list(dict.fromkeys(row.impl for row in timed))

    def commits(self) -> list[str]:
        """The commits that the rows were measured at, the newest first."""
        found = {row.commit or self.meta["commit"]: row.date or self.meta["date"] for row in self.rows}
        return [commit or "unknown" for commit in sorted(found, key=lambda commit: found[commit], reverse=True)]

    def to_json(self) -> str:
        """One line a row, so that a diff of two files shows which rows changed."""
        rows = ",\n".join("  " + json.dumps(row.as_dict(), allow_nan=False) for row in self.rows)
        return f'{{"meta": {json.dumps(self.meta)},\n "rows": [\n{rows}\n ]}}\n'

    def to_csv(self) -> str:
        """A flat table: the parameters become columns of their own."""
        dicts = [row.as_dict() for row in self.rows]
        flat = [{k: v for k, v in d.items() if k != "params"} | d["params"] for d in dicts]
        params = list(dict.fromkeys(name for d in dicts for name in d["params"]))
        columns = ["op", "suite", "case", *params, *(f.name for f in fields(Row) if f.name not in _KEYS)]
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(flat)
        return text.getvalue()


_KEYS = ("op", "suite", "case", "params")


def fastest(rows: Iterable[Row], *, peer: bool) -> Row | None:
    """The fastest of our rows, or of the peers'. What we only measure against counts as neither."""
    rows = [row for row in rows if row.impl != COPY and not row.impl.endswith("-standard")]
    timed = [row for row in rows if row.ok and row.peer == peer]
    return min(timed, key=lambda row: row.seconds, default=None)


def unit_of(row: Row, gpu: str | None) -> str:
    """What tells most in a table of this row's suite: its time, or the rate at which it nears its roof."""
    if gpu is None or row.suite in ("scaling", "route"):
        return "ms"
    return "TB/s" if row.op in ("decode", "fused") else "TFLOPS"


def figure(row: Row, unit: str) -> str:
    """
    >>> figure(Row("decode", "formats", "bf16", {}, "hopper", False, 0.3, tflops=14.2, tbps=3.58), "TB/s")
    '3.58'
    """
    if unit == "ms":
        return f"{row.ms_p50:.4f}"
    return f"{row.tbps:.2f}" if unit == "TB/s" else f"{row.tflops:.0f}"


def speedup(rows: list[Row]) -> float | None:
    """Time of the best peer over our best time; None where one of them is missing."""
    ours, theirs = fastest(rows, peer=False), fastest(rows, peer=True)
    return theirs.seconds / ours.seconds if ours and theirs else None


def worst_error(rows: Iterable[Row]) -> float | None:
    """The largest error of ours, in units of the error that plain torch makes on the same inputs."""
    mine = [row for row in rows if row.ok and not row.peer]
    return max((row.error / row.reference_error for row in mine if row.error and row.reference_error), default=None)


def require_same_machine(old: dict[str, Any], new: dict[str, Any], where: Path) -> None:
    """Raises unless rows with these two `meta` may stand in one file."""
    for name in MACHINE:
        if old.get(name) != new.get(name):
            message = f"{where}: its rows have {name}={old.get(name)!r}, the new ones {new.get(name)!r}"
            raise ResultsError(f"{message}: write to another file")


def merge(old: Results, new: Results, where: Path) -> Results:
    """The old results with the new rows in the place of those of the same case and contestant.

    The meta is the new one; a row that stays takes its own commit and date along. Contestants of one case that were
    measured at different times did not take turns: compare them with care.
    """
    fresh = {(row.suite, row.case, row.impl): row for row in new.rows}
    params = {(row.suite, row.case): row.params for row in new.rows}
    rows: list[Row] = []
    for row in old.rows:
        replacement = fresh.pop((row.suite, row.case, row.impl), None)
        if replacement is None:
            if params.get((row.suite, row.case), row.params) != row.params:
                raise ResultsError(f"{where}: {row.case} of {row.impl} has other params: write to another file")
            commit, date = row.commit or old.meta["commit"], row.date or old.meta["date"]
            replacement = replace(row, commit=commit, date=date)
        rows.append(replacement)
    rows += fresh.values()
    places = {case: i for i, case in enumerate(dict.fromkeys((row.suite, row.case) for row in rows))}
    return Results(new.meta, sorted(rows, key=lambda row: places[row.suite, row.case]))


def joined(files: Sequence[tuple[Path, Results]]) -> Results:
    """The rows of several files of one device, with the newest file's meta. A row that is older than that takes its own
    commit and date along."""
    newest = max((one for _, one in files), key=lambda one: str(one.meta["date"]))
    rows: list[Row] = []
    seen: dict[tuple[str, str, str, str], Path] = {}
    for path, one in files:
        for name in ("gpu", "cpu", "quick"):
            if one.meta.get(name) != newest.meta.get(name):
                first = next(other for other, results in files if results is newest)
                values = f"{name}={one.meta.get(name)!r}, {first} {newest.meta.get(name)!r}"
                raise ResultsError(f"{path} has {values}: one report is about one device")
        own = {"commit": one.meta["commit"], "date": one.meta["date"]}
        own = {} if own["commit"] == newest.meta["commit"] or not own["commit"] else own
        for row in one.rows:
            key = (row.op, row.suite, row.case, row.impl)
            if key in seen:
                raise ResultsError(f"{path}: {row.case} of {row.impl} ({row.suite}) is in {seen[key]} too")
            seen[key] = path
            rows.append(row if row.commit else replace(row, **own))
    meta: dict[str, Any] = {}
    for one in sorted((one for _, one in files), key=lambda one: str(one.meta["date"])):
        meta |= one.meta
    if len({row.op for row in rows}) > 1:  # the cost of a launch is that of one op
        meta = {name: value for name, value in meta.items() if not name.startswith("launch_us")}
    return Results(meta, rows)


def write(path: Path, text: str) -> None:
    """Writes a file in one step: a reader sees the old text or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def read(path: Path) -> Results:
    """Reads a JSON file of results; raises `ResultsError` naming the file, the row and the field."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ResultsError(f"{path}: not JSON: {error}") from error
    if not isinstance(data, dict) or not isinstance(data.get("meta"), dict) or not isinstance(data.get("rows"), list):
        raise ResultsError(f"{path}: needs an object with 'meta' (an object) and 'rows' (a list)")
    for name in META:
        if name not in data["meta"]:
            raise ResultsError(f"{path}: meta has no {name!r}")
    return Results(data["meta"], [_row(values, f"{path}: row {i}") for i, values in enumerate(data["rows"])])


_TYPES: dict[str, tuple[type, ...]] = {
    "op": (str,), "suite": (str,), "case": (str,), "params": (dict,), "impl": (str,), "peer": (bool,), "ok": (bool,),
    "ms_p50": (float, int), "ms_p99": (float, int), "tflops": (float, int), "tbps": (float, int),
    "roofline": (float, int, type(None)), "bound": (str, type(None)),
    "error": (float, int), "reference_error": (float, int), "reason": (str,), "commit": (str,), "date": (str,),
    "peak_gb": (float, int),
}  # fmt: skip


def _row(values: Any, where: str) -> Row:
    if not isinstance(values, dict):
        raise ResultsError(f"{where}: {values!r} is not an object")
    required = ["op", "suite", "case", "params", "impl", "peer", "ok"]
    required += (*TIMES, "roofline", "bound", "error", "reference_error") if values.get("ok") else ("reason",)
    for name in required:
        if name not in values:
            raise ResultsError(f"{where}: {name!r} is missing")
    for name, value in values.items():
        if name not in _TYPES:
            raise ResultsError(f"{where}: {name!r} is not a field of a row")
        if not isinstance(value, _TYPES[name]) or (isinstance(value, bool) and bool not in _TYPES[name]):
            raise ResultsError(f"{where}: {name}={value!r} has the wrong type")
    return Row(**values)


def describe(device: str, *, quick: bool) -> dict[str, Any]:
    """Where and with what the figures are measured: the `meta` of the results."""
    import torch

    import flashkernels

    meta: dict[str, Any] = {
        "gpu": None,
        "driver": None,
        "torch": torch.__version__,
        "triton": _version("triton"),
        "flashkernels": flashkernels.__version__,
        "commit": commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "quick": quick,
    }
    if device == "cpu":
        return meta | {"cpu": _cpu_name(), "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    meta |= {"gpu": properties.name, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    query = "driver_version,clocks.sm,clocks.max.sm,power.limit"
    answer = _run("nvidia-smi", f"--id=GPU-{properties.uuid}", f"--query-gpu={query}", "--format=csv,noheader")
    if answer:
        values = [value.strip() for value in answer.split(",")]
        meta |= dict(zip(("driver", "clock", "max_clock", "power_limit"), values, strict=True))
    return meta


def commit() -> str | None:
    """The commit this package was checked out at, marked if files have changed; FLASHKERNELS_COMMIT overrides it."""
    if override := environment.commit():
        return override
    package = Path(__file__).resolve().parents[1]
    top = _run("git", "-C", str(package), "rev-parse", "--show-toplevel")
    # An installed package may lie inside the checkout of something else.
    if not top or Path(top) / "src" / "flashkernels" != package:
        return None
    return _run("git", "-C", str(package), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty")


def _run(*command: str) -> str | None:
    """What a command prints, or None when it is missing or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _version(module: str) -> str | None:
    try:
        version: str = __import__(module).__version__
        return version
    except ImportError:
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _short(value: Any) -> Any:
    """Five digits say more than a measurement knows."""
    return float(f"{value:.5g}") if isinstance(value, float) else value
