from __future__ import annotations

import sys

import pytest

from flashkernels.jit import nvrtc


@pytest.fixture
def compiler() -> None:
    """NVRTC. On Linux the development extra installs it: without it a gate fails, and is not passed over."""
    try:
        nvrtc.find()
    except nvrtc.CompilerMissing as error:
        if sys.platform == "linux":
            raise
        pytest.skip(str(error))
