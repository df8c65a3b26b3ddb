"""Nsight Compute and Nsight Systems: their command lines, and what they write, read into our records."""

from __future__ import annotations

import csv
import io
import re
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from flashkernels.profiling.program import Program
from flashkernels.profiling.trace import Kernel, Span, Trace

SETS = ("basic", "detailed", "full")
# What our counters are made of; a section asks for the metrics by the names that the GPU has for them.
SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "MemoryWorkloadAnalysis_Tables", "ComputeWorkloadAnalysis",
            "Occupancy", "WarpStateStats", "LaunchStats")  # fmt: skip
COUNTERS = {  # the name of ours: the metric of Nsight's, of several the largest
    "dram": r"dram__throughput\.avg\.pct_of_peak_sustained_elapsed"
    r"|gpu__dram_throughput\.avg\.pct_of_peak_sustained_elapsed",
    "l2_hit": r"lts__t_sector_hit_rate\.pct",
    "sm": r"sm__throughput\.avg\.pct_of_peak_sustained_elapsed",
    "tensor": r"sm__(pipe_tensor\w*_cycles_active|inst_executed_pipe_tensor\w*)\.avg\.pct_of_peak_sustained_active",
    "occupancy": r"sm__warps_active\.avg\.pct_of_peak_sustained_active",
}
STALL = re.compile(r"smsp__average_warps_issue_stalled_(?!selected)(\w+?)_per_issue_active\.ratio")
CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"
WAVEFRONTS = "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum"
DURATION = "gpu__time_duration.sum"
MICROSECONDS = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6,
                "nsecond": 1e-3, "usecond": 1.0, "msecond": 1e3, "second": 1e6}  # fmt: skip
BYTES = {"B": 1, "byte": 1, "KB": 1e3, "kB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}
FORBIDDEN = "ERR_NVGPUCTRPERM"
HOMES = ("/usr/local/cuda*/bin", "/opt/nvidia/nsight-compute/*", "/opt/nvidia/nsight-systems/*/bin",
         "/opt/nvidia/nsight-systems/*/target-linux-*")  # fmt: skip

GET = {
    "ncu": (
        "Nsight Compute (ncu) is not installed.",
        "Linux: it comes with the CUDA toolkit, or `apt install nsight-compute`; add /usr/local/cuda/bin to PATH.",
        "Docker: use an image whose name ends in -devel, or mount /opt/nvidia/nsight-compute into the container.",
        "WSL2: install the CUDA toolkit for WSL inside the distribution.",
        "Windows: install Nsight Compute from developer.nvidia.com/nsight-compute.",
    ),
    "nsys": (
        "Nsight Systems (nsys) is not installed.",
        "Linux: it comes with the CUDA toolkit, or `apt install nsight-systems-cli`; add /usr/local/cuda/bin to PATH.",
        "Docker: install nsight-systems-cli in the image.",
        "WSL2: install the CUDA toolkit for WSL inside the distribution.",
        "Windows: install Nsight Systems from developer.nvidia.com/nsight-systems.",
    ),
}
PERMIT = (
    "The driver keeps the GPU's counters for administrators (ERR_NVGPUCTRPERM).",
    "Linux: write 'options nvidia NVreg_RestrictProfilingToAdminUsers=0' to /etc/modprobe.d/nvidia-profiler.conf, run "
    "`update-initramfs -u` (Debian, Ubuntu) or `dracut -f` (Fedora, RHEL) and reboot; or run it with sudo.",
    "Docker: start the container with --cap-add=SYS_ADMIN (driver 565 and newer: --cap-add=PERFMON is enough), or do "
    "the Linux step on the host.",
    "WSL2: Windows decides; do the Windows step, then `wsl --shutdown`.",
    "Windows: open the NVIDIA Control Panel as administrator; Desktop: Enable Developer Settings; then Developer: "
    "Manage GPU Performance Counters: Allow access to the GPU performance counters to all users.",
)


class NsightError(ValueError):
    """What a tool wrote does not have its documented format; the message says where."""


def find(tool: str) -> str | None:
    """The path of ncu or nsys: on PATH, or where the CUDA toolkit and the packages put it."""
    if on_path := shutil.which(tool):
        return on_path
    places = (path / tool for home in HOMES for path in Path("/").glob(home.lstrip("/")))
    return next((str(path) for path in places if path.is_file()), None)


def _program(command: Sequence[str], nvtx: bool) -> list[str]:
    """The command as it is run by the tool; with `nvtx`, inside ranges around every op."""
    if not command:
        raise ValueError("no program is given: write it after --, as in: flashkernels ncu -- python script.py")
    if not nvtx:
        return list(command)
    Program(command)  # only a Python program can be run inside ranges: the same refusals
    words = list(command)[1:] if Path(command[0]).name.startswith("python") else list(command)
    return [sys.executable, "-m", "flashkernels.profiling.ranges", *words]


def ncu_command(
    tool: str, command: Sequence[str], log: Path, *, kernel: str = "", set_: str = "", count: int = 0, skip: int = 0,
    nvtx: bool = False,
) -> list[str]:  # fmt: skip
    """The command line that writes all counters of the wanted launches to `log`, as CSV.

    Clocks stay as they are in real runs (ncu would fix them at base otherwise), and the kernels of a CUDA graph are
    measured one by one.
    """
    if set_ and set_ not in SETS:
        raise ValueError(f"set={set_!r} is not one of {', '.join(SETS)}")
    if count < 0 or skip < 0:
        raise ValueError(f"count={count} and skip={skip} must not be negative")
    line = [tool, "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log), "--force-overwrite"]
    line += ["--clock-control", "none", "--graph-profiling", "node", "--target-processes", "all"]
    line += ["--set", set_] if set_ else [word for name in SECTIONS for word in ("--section", name)]
    line += ["--metrics", f"{CONFLICTS},{WAVEFRONTS}"]  # the sections have them by instruction only
    # the whole name: what CUTLASS calls Kernel2<...> has its name in the brackets
    line += ["--kernel-name-base", "demangled", "--kernel-name", f"regex:{kernel}"] if kernel else []
    line += ["--launch-skip", str(skip)] if skip else []
    line += ["--launch-count", str(count)] if count else []
    return [*line, *(["--nvtx"] if nvtx else []), *_program(command, nvtx)]


def nsys_command(tool: str, command: Sequence[str], report: Path, *, nvtx: bool = False) -> list[str]:
    """The command line that records the whole run to `report`, with each node of a CUDA graph on its own."""
    line = [tool, "profile", "--trace=cuda,nvtx,osrt,cublas,cudnn", "--cuda-graph-trace=node", "--sample=none"]
    line += ["--cpuctxsw=none", "--force-overwrite=true", f"--output={report}"]
    return [*line, *_program(command, nvtx)]


def nsys_stats_command(tool: str, report: Path) -> list[str]:
    """Prints every kernel and copy of a report as CSV."""
    return [tool, "stats", "--report", "cuda_gpu_trace", "--format", "csv", "--force-export=true", str(report)]


def forbidden(text: str) -> bool:
    """Whether a tool complains that it may not read the counters."""
    return FORBIDDEN in text


def read_ncu(text: str, where: str = "ncu") -> Trace:
    """The kernels of an ncu CSV, of `--page raw` (a column a metric) or `--page details` (a row a metric).

    ncu measures one kernel at a time, replayed: there is no timeline, so kernels stand one after the other.
    """
    rows = _table(text, "Kernel Name", where)
    if not rows:
        raise NsightError(f"{where}: no kernel was measured")
    launches: dict[tuple[str, str], dict[str, str]] = {}
    units: dict[str, str] = {}
    if "Metric Name" in rows[0]:
        for row in rows:
            launch = launches.setdefault((row.get("Process ID", ""), row["ID"]), dict(row))
            launch[row["Metric Name"]] = row["Metric Value"]
            units[row["Metric Name"]] = row.get("Metric Unit", "")
    else:
        if not rows[0]["Kernel Name"]:  # the row below the header has the units
            units, rows = rows[0], rows[1:]
        launches = {(row.get("Process ID", ""), row["ID"]): row for row in rows}
    kernels, at = [], 0.0
    for launch in launches.values():
        duration = _duration(launch, units, where)
        kernels.append(Kernel(
            launch["Kernel Name"], at, at + duration, duration, stream=int(launch.get("Stream") or 0),
            grid=_triple(launch.get("Grid Size", "")), block=_triple(launch.get("Block Size", "")),
            registers=int(_number(launch.get("launch__registers_per_thread", "")) or 0), counters=counters_of(launch),
        ))  # fmt: skip
        at += duration
    return Trace(tuple(kernels), window=Span(0.0, at), timeline=False)


def counters_of(metrics: dict[str, str]) -> dict[str, float]:
    """Our counters out of Nsight's metrics: percentages, stalls in warps for each issue, conflicts as a share."""
    found: dict[str, float] = {}
    for metric, text in metrics.items():
        value = _number(text)
        if value is None or not metric:
            continue
        for name, pattern in COUNTERS.items():
            if re.fullmatch(pattern, metric):
                found[name] = max(found.get(name, 0.0), value)
        if stall := STALL.fullmatch(metric):
            found[f"stall_{stall[1]}"] = value
    conflicts, wavefronts = (_number(metrics.get(name, "")) for name in (CONFLICTS, WAVEFRONTS))
    if conflicts is not None and wavefronts:
        found["bank_conflicts"] = conflicts / wavefronts
    return found


def read_nsys(text: str, where: str = "nsys") -> Trace:
    """The kernels, copies and fills of `nsys stats --report cuda_gpu_trace --format csv`."""
    kernels = []
    gpu = ""
    for row in _table(text, "Name", where):
        columns = {name.partition(" (")[0]: (value, name.partition(" (")[2].rstrip(")")) for name, value in row.items()}
        try:
            start, duration = (float(x) * MICROSECONDS[unit] for x, unit in (columns["Start"], columns["Duration"]))
        except (KeyError, ValueError) as error:
            raise NsightError(f"{where}: a row lacks a start or duration: {error}") from error
        name = row["Name"]
        kind = "copy" if name.startswith("[CUDA memcpy") else "fill" if name.startswith("[CUDA memset") else "kernel"
        if kind == "copy":  # as torch's profiler says it
            name = f"{name} ({columns.get('SrcMemKd', ('', ''))[0]} -> {columns.get('DstMemKd', ('', ''))[0]})"
        gpu = columns.get("Device", ("", ""))[0].partition(" (")[0] or gpu
        kernels.append(Kernel(
            name, start, start + duration, duration, kind, stream=_whole(columns, "Strm"),
            correlation=_whole(columns, "CorrId"), grid=_sizes(columns, "Grd"), block=_sizes(columns, "Blk"),
            registers=_whole(columns, "Reg/Trd"), shared=_bytes(columns, "StcSMem") + _bytes(columns, "DymSMem"),
            bytes=_bytes(columns, "Bytes"),
        ))  # fmt: skip
    if not kernels:
        raise NsightError(f"{where}: no kernel was recorded")
    kernels.sort(key=lambda kernel: kernel.start)
    return Trace(tuple(kernels), gpu=gpu, window=Span(kernels[0].start, max(kernel.end for kernel in kernels)))


def with_counters(trace: Trace, measured: Iterable[Kernel]) -> Trace:
    """The trace with the counters of kernels of the same name and grid, else of the name; raises where none fits."""
    exact = {(plain(kernel.name), kernel.grid): kernel.counters for kernel in measured}
    named = {name: counters for (name, _), counters in exact.items()}
    found = [exact.get((plain(k.name), k.grid)) or named.get(plain(k.name)) for k in trace.kernels]
    if not any(found):
        raise NsightError(f"none of the kernels that ncu measured ({', '.join(sorted(named))}) is in the trace")
    pairs = zip(trace.kernels, found, strict=True)
    return replace(trace, kernels=tuple(replace(k, counters=c or k.counters) for k, c in pairs))


def plain(name: str) -> str:
    """A kernel's name as all tools agree on it: they differ in casts of template arguments, spaces and parameters.

    >>> plain("void softmax<(int)4, float>(float *, int)"), plain("void softmax<4, float>(float*, int)")
    ('softmax<4,float>', 'softmax<4,float>')
    """
    name = re.sub(r"\((unsigned )?(int|bool|long|char|short)\)", "", name.removeprefix("void ")).replace(" ", "")
    name = name.replace("(anonymousnamespace)", "")
    depth = 0
    for i, letter in enumerate(name):
        depth += (letter == "<") - (letter == ">")
        if letter == "(" and not depth:
            return name[:i]
    return name


def _table(text: str, column: str, where: str) -> list[dict[str, str]]:
    """The rows of the CSV inside a tool's output, below the line that has `column`."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if column in next(csv.reader([line]), [])), None)
    if start is None:
        raise NsightError(f"{where}: there is no CSV with a column {column!r}")
    body = [line for line in lines[start:] if line.strip() and not line.startswith("==")]
    return [row for row in csv.DictReader(io.StringIO("\n".join(body))) if None not in row.values()]


def _duration(launch: dict[str, str], units: dict[str, str], where: str) -> float:
    """µs. The details page calls it Duration."""
    for name in (DURATION, "gpu__time_duration.avg", "Duration"):
        value = _number(launch.get(name, ""))
        if value is not None:
            return value * MICROSECONDS.get(units.get(name, "ns") or "ns", 1e-3)
    raise NsightError(f"{where}: {launch['Kernel Name']} has no {DURATION}")


def _number(text: str | None) -> float | None:
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return None


def _triple(text: str) -> tuple[int, ...]:
    """ "(132, 1, 1)" as numbers."""
    return tuple(int(number) for number in re.findall(r"\d+", text))


def _whole(columns: dict[str, tuple[str, str]], name: str) -> int:
    return int(_number(columns.get(name, ("", ""))[0]) or 0)


def _sizes(columns: dict[str, tuple[str, str]], name: str) -> tuple[int, ...]:
    sizes = tuple(_whole(columns, f"{name}{axis}") for axis in "XYZ")
    return sizes if all(sizes) else ()


def _bytes(columns: dict[str, tuple[str, str]], name: str) -> int:
    value, unit = columns.get(name, ("", ""))
    return round((_number(value) or 0) * BYTES.get(unit, 1e6))
