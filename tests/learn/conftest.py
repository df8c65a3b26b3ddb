"""What tests of lessons share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

LEARN = Path(__file__).parents[2] / "docs" / "learn"


@pytest.fixture
def folder_of_lessons(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Lessons import what lies beside them: afterwards the process knows nothing of it any more."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    yield LEARN
    for name, module in list(sys.modules.items()):
        if LEARN in Path(getattr(module, "__file__", None) or "").parents:
            del sys.modules[name]
