"""The examples run, and say so where they find what they should not."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def train_tiny() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_tiny", EXAMPLES / "train_tiny.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(module: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["train_tiny.py", *arguments])
    return module.main()


def test_train_tiny_agrees_and_plots(
    train_tiny: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    assert run(train_tiny, monkeypatch, "--device", "cpu", "--steps", "4", "--out", str(tmp_path / "losses.png")) == 0
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert "agree; " in capsys.readouterr().out


def test_train_tiny_without_matplotlib_writes_a_table(
    train_tiny: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert run(train_tiny, monkeypatch, "--device", "cpu", "--steps", "2", "--out", str(tmp_path / "losses.png")) == 0
    assert (tmp_path / "losses.csv").read_text().splitlines()[0] == "step,fk.attention,torch SDPA"
    assert "matplotlib is not installed" in capsys.readouterr().out


def test_train_tiny_fails_where_the_curves_part(
    train_tiny: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(train_tiny, "flash", lambda q, k, v: v)
    assert run(train_tiny, monkeypatch, "--device", "cpu", "--steps", "2", "--out", str(tmp_path / "losses.png")) == 1


def test_train_tiny_is_as_small_as_it_says(train_tiny: ModuleType) -> None:
    model = train_tiny.Transformer(train_tiny.sdpa)
    assert sum(x.numel() for x in model.parameters()) < 1_000_000
    assert train_tiny.HEAD_DIM == 72 and train_tiny.LAYERS == 2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_train_tiny_on_a_gpu(
    train_tiny: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: str
) -> None:
    assert torch.cuda.is_available()
    out = str(tmp_path / "losses.png")
    assert run(train_tiny, monkeypatch, "--device", "cuda", "--steps", "150", "--dtype", dtype, "--out", out) == 0
