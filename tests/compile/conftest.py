from __future__ import annotations

import pytest

from flashkernels.jit import nvrtc


@pytest.fixture
def compiler() -> None:
    """NVRTC, where it is; the development extra installs it."""
    try:
        nvrtc.find()
    except nvrtc.CompilerMissing as error:
        pytest.skip(str(error))
