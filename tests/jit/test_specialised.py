"""What the key of a Triton kernel in our cache depends on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashkernels.jit import specialised

PTXAS = """#!/bin/sh
echo "Cuda compilation tools, release {version}"
"""
# In a process of its own: this one may interpret.
PROGRAM = """
from flashkernels.aot.work import Rows, programs
from flashkernels.hardware import lookup
for gpu in ("h200", "rtx5090"):
    (program,) = programs(Rows("softmax", 64), lookup(gpu))
    print(program.key)
"""


def keys(**environment: str) -> list[str]:
    """Of a kernel for Hopper and for Blackwell."""
    kept = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", *environment)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=kept | environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_another_ptxas_is_another_kernel(tmp_path: Path) -> None:
    tools = []
    for version in ("12.1, V12.1.1", "12.1, V12.1.2"):
        tool = tmp_path / version.split(".")[-1]
        tool.write_text(PTXAS.format(version=version))
        tool.chmod(0o755)
        tools.append(str(tool))
    own, one, other = keys(), keys(TRITON_PTXAS_PATH=tools[0]), keys(TRITON_PTXAS_PATH=tools[1])
    assert len({own[0], one[0], other[0]}) == 3 and own[1] == one[1] == other[1]
    blackwell = keys(TRITON_PTXAS_BLACKWELL_PATH=tools[0])
    assert blackwell[0] == own[0] and blackwell[1] != own[1]


@pytest.mark.parametrize("cc", [90, 120])
def test_tritons_own_is_not_asked(cc: int, monkeypatch: pytest.MonkeyPatch) -> None:

    for name in ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(subprocess, "check_output", None)
    assert specialised.assembler(cc) == ()
