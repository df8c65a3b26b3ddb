"""`flashkernels tiles`: the list of all tiles, and the gate that compiles them."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flashkernels.attention.hopper.variants import VARIANTS, label
from flashkernels.attention.hopper.wide_variants import WIDE
from flashkernels.attention.problem import AttentionProblem
from flashkernels.attention.triton.build import every_tile
from flashkernels.cli import app
from flashkernels.hardware import lookup
from flashkernels.tiling import Tile

TILE = re.compile(
    r"  (exact|standard|split_d)-\d+x\d+-d[\d+]+-v[\d+]+-w\d-s\d-(tma|pointer)(-r\d+)?(-lazy)?(-early)?"
    r" \w+ D=\d+ mask=\w+( softcap)?"
)


@functools.cache
def listed(key: str) -> list[tuple[Tile, AttentionProblem]]:
    return list(every_tile(lookup(key)))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", "flashkernels", "tiles", *arguments],
        capture_output=True, text=True, timeout=300, env=environment,
    )  # fmt: skip


@pytest.mark.parametrize(("key", "least"), [("rtx5090", 200), ("h200", 300)])
def test_it_lists_every_tile_of_a_gpu(key: str, least: int) -> None:
    done = run("--gpu", key)
    assert (done.returncode, done.stderr) == (0, "")
    triton, _, hopper = done.stdout.partition("hopper: ")
    title, *lines = triton.splitlines()
    assert title == f"{lookup(key).name}: {len(lines)} tiles"
    assert len(lines) > least
    assert len(set(lines)) == len(lines)
    assert all(TILE.fullmatch(line) for line in lines)
    assert any("bf16" in line for line in lines) and any("fp32" in line for line in lines)
    assert [line.split()[0] for line in lines] == [tile.name for tile, _ in listed(key)]
    every = (*VARIANTS, *WIDE)
    names = [f"{len(every)} variants", *(f"  {label(variant)}" for variant in every)]
    assert hopper.splitlines() == (names if key == "h200" else [])


def test_a_sample_is_every_nth_and_gpus_may_be_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which has made the lists."""
    monkeypatch.setattr("flashkernels.attention.triton.build.every_tile", lambda gpu: listed(gpu.key))
    done = CliRunner().invoke(app, ["tiles", "--gpu", "rtx5090,h200", "--sample", "50"])
    assert done.exit_code == 0
    expected: list[str] = []
    for key in ("rtx5090", "h200"):
        names = [tile.name for tile, _ in listed(key)][::50]
        expected += [f"{lookup(key).name}: {len(names)} tiles", *names]
    lines = done.stdout.partition("hopper: ")[0].splitlines()
    assert [line if line.endswith(" tiles") else line.split()[0] for line in lines] == expected


def test_the_help_says_what_a_sample_is() -> None:
    assert "only 1 in N" in CliRunner().invoke(app, ["tiles", "--help"]).stdout


OPTIONS = """
import sys
import triton
from triton import knobs
from triton.compiler import make_backend
from flashkernels.attention.triton.build import compile_tile, every_tile
from flashkernels.hardware import lookup

def compile(source, target, options):
    unsaid = {name: value for name, value in options.items() if name != "enable_fp_fusion"}
    said, default = (make_backend(target).parse_options(dict(each)).hash() for each in (options, unsaid))
    print(options["enable_fp_fusion"], said == default)
    sys.exit()

triton.compile = compile
compile_tile(*next(every_tile(lookup("h200"))), lookup("h200"))
"""


@pytest.mark.parametrize(("knob", "fusion"), [("", "True"), ("1", "True"), ("0", "False")])
def test_fusion_is_said_as_triton_would_choose_it(knob: str, fusion: str) -> None:
    """Unsaid, Triton 3.9 warns. What is cached keeps its key."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_DEFAULT_FP_FUSION": knob} if knob else {}
    command = [sys.executable, "-c", OPTIONS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.stdout.split() == [fusion, "True"], done.stderr


def test_compiling_a_sample_passes() -> None:
    done = run("--gpu", "a100", "--sample", "150", "--compile")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"NVIDIA A100-SXM4-80GB: [1-9]\d* tiles", done.stdout)


def test_a_variant_that_is_compiled_badly_fails_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: every variant has a fault."""
    monkeypatch.setattr("flashkernels.attention.triton.build.every_tile", lambda gpu: [])
    monkeypatch.setattr(
        "flashkernels.attention.hopper.build.build_all",
        lambda variants: [(label(variant), ["wgmma is serialised"]) for variant in variants],
    )
    result = CliRunner().invoke(app, ["tiles", "--gpu", "h100,h200", "--sample", "70", "--compile"])
    assert result.exit_code == 1
    assert f"  {label(VARIANTS[0])}: wgmma is serialised\n" in result.stderr
    assert result.stderr.endswith(f"error: {len((*VARIANTS, *WIDE)[::70])} tiles do not fit\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpu", "h300"), "error: gpu='h300' is not known; known are a100, "),
        (("--gpu", "h200,"), "error: gpu='' is not known"),
        (("--sample", "0"), "error: --sample 0 must be at least 1"),
    ],
)
def test_a_refusal_is_one_line_and_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(app, ["tiles", *arguments])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(message) and result.stderr.count("\n") == 1


def test_the_make_target_uses_options_that_exist() -> None:
    makefile = Path(__file__).parents[2] / "Makefile"
    (command,) = re.findall(r"^\t\$\(RUN\) flashkernels tiles (.*)$", makefile.read_text(), re.MULTILINE)
    shown = run("--help").stdout
    assert all(option in shown for option in command.split() if option.startswith("--"))
