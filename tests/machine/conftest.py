from __future__ import annotations

import pytest
from tests.machine import machine


@pytest.fixture(autouse=True)
def available() -> None:
    if reason := machine.missing():
        pytest.skip(reason)
