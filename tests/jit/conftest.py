"""Each test here starts with an empty cache of its own."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def kernel_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "kernel-cache"
    monkeypatch.setenv("FLASHKERNELS_CACHE", str(folder))
    return folder
