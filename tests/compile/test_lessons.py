"""The kernels of the lessons on attention, compiled for real GPUs as their programs launch them. Needs no GPU."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction

from flashkernels.hardware import lookup
from flashkernels.jit.offline import Resources, compile_for

FOLDER = Path(__file__).parents[2] / "docs" / "learn" / "attention"
LESSONS = ("2_tiled", "3_online", "4_fused", "5_causal", "6_exact", "7_decode")
TYPES = {torch.float16: "*fp16", torch.float32: "*fp32"}
Case = tuple[str, Callable[[], Any]]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A `lesson` that has the sizes of a GPU and tensors without memory: the real one would choose the interpreter."""
    lesson: Any = ModuleType("lesson")
    lesson.GPU, lesson.pick = True, lambda on_a_gpu, interpreted: on_a_gpu
    lesson.normal = lambda *shape, seed: torch.empty(shape, dtype=torch.float16, device="meta")
    lesson.Case = lambda name, run, *_, **__: (name, run)
    monkeypatch.setitem(sys.modules, "lesson", lesson)
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    monkeypatch.delitem(sys.modules, "plain", raising=False)


def compiled(lesson: str, gpu: str, monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], Resources]:
    """By case and kernel, what its launches need."""
    found: dict[tuple[str, str], Resources] = {}
    case = ""

    def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **given: Any) -> None:
        options = {name: given.pop(name) for name in ("num_warps", "num_stages") if name in given}
        bound = dict(zip(kernel.arg_names, args, strict=False)) | given
        constant = {p.name for p in kernel.params if p.is_constexpr}
        types = {
            name: TYPES[value.dtype] if isinstance(value, torch.Tensor) else "i32" if isinstance(value, int) else "fp32"
            for name, value in bound.items()
            if name not in constant
        }
        aligned = {n for n in types if isinstance(bound[n], torch.Tensor) or (types[n] == "i32" and bound[n] % 16 == 0)}
        constants = {name: bound[name] for name in constant}
        found[case, kernel.fn.__name__] = compile_for(kernel, types, constants, aligned, lookup(gpu).cc, options)

    monkeypatch.setattr(JITFunction, "run", launch)
    cases: list[Case] = list(runpy.run_path(str(FOLDER / f"{lesson}.py"))["cases"]())
    for case, run in cases:  # noqa: B007 (`launch` reads it)
        run()
    sys.modules.pop("plain", None)
    assert found
    return found


@pytest.mark.parametrize("lesson", LESSONS)
@pytest.mark.parametrize("gpu", ["a100", "h200"])
def test_nothing_spills_and_all_fits(lesson: str, gpu: str, stand_in: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for (case, kernel), need in compiled(lesson, gpu, monkeypatch).items():
        assert need.spills == 0, f"{case}: {kernel}"
        assert need.shared <= lookup(gpu).shared_per_block, f"{case}: {kernel}"


def test_the_fused_kernel_is_as_its_page_says(stand_in: None, monkeypatch: pytest.MonkeyPatch) -> None:
    need = compiled("4_fused", "h200", monkeypatch)["fused", "kernel"]
    assert need.shared == 64 * 1024 and 65536 // (256 * need.registers) == 2  # two blocks a multiprocessor
    assert need.count("HGMMA.*")


def test_padding_costs_a_block_as_its_page_says(stand_in: None, monkeypatch: pytest.MonkeyPatch) -> None:
    need = compiled("6_exact", "h200", monkeypatch)
    assert need["padded to 128", "kernel"].shared == 128 * 1024 and need["64 + 16", "kernel"].shared == 80 * 1024


def test_two_blocks_of_decode_fit_as_its_page_says(stand_in: None, monkeypatch: pytest.MonkeyPatch) -> None:
    need = compiled("7_decode", "h200", monkeypatch)["32 parts", "partial"]
    assert need.shared == 102 * 1024 and 2 * (need.shared + 1024) <= lookup("h200").shared_per_sm
