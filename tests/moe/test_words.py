"""The PTX that makes numbers of words, executed here one instruction after another: it needs no GPU to be wrong."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from flashkernels.moe.problem import FORMATS, PHASES
from flashkernels.moe.triton import words
from flashkernels.moe.weights import WORDS, pack

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def executed(code: str, inputs: list[int]) -> list[int]:
    """The outputs of PTX, whose operands are $0, $1, ...: outputs first, then these inputs."""
    outputs = 1 + max(map(int, re.findall(r"\$(\d+)", code))) - len(inputs)
    registers = {f"${outputs + i}": value for i, value in enumerate(inputs)}
    for line in (part.strip() for part in re.sub(r"\.reg [^;]*;", "", code).strip("{} \n").split(";")):
        if line:
            name, operands = line.split(None, 1)
            to, *rest = [part.strip() for part in operands.split(",")]
            values = [registers[x] if x in registers else int(x, 0) for x in rest]
            registers[to] = step(name, values) & 0xFFFFFFFF
    return [registers[f"${i}"] for i in range(outputs)]


def step(name: str, values: list[int]) -> int:
    a, b, c = (*values, 0, 0)[:3]
    if name == "lop3.b32":
        assert values[3] == 0xEA
        return (a & b) | c
    if name == "prmt.b32":
        parts = (a | b << 32).to_bytes(8, "little")
        return int.from_bytes(bytes(parts[c >> 4 * i & 7] for i in range(4)), "little")
    plain = {"mov.b32": a, "shr.u32": a >> b, "xor.b32": a ^ b}
    if name in plain:
        return plain[name]
    dtype = torch.bfloat16 if "bf16" in name else torch.float16
    x, y, z = (pair(v, dtype).double() for v in (a, b, c))
    found = {"fma": x * y + z, "sub": x - y, "mul": x * y}[name[:3]].to(dtype)
    low, high = (int(v) & 0xFFFF for v in found.view(torch.int16))
    return low | high << 16


def pair(value: int, dtype: torch.dtype) -> Tensor:
    """The two numbers of a register."""
    halves = [(value & 0xFFFF), value >> 16]
    return torch.tensor([(h ^ 0x8000) - 0x8000 for h in halves], dtype=torch.int16).view(dtype)


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("format", ["w8", "w4"])
def test_phases(format: str, dtype: str, scaled: bool) -> None:
    count, most = PHASES[format], 2 ** (FORMATS[format] - 1)
    small = torch.arange(count * WORDS * 2).reshape(2, -1) * 37 % (2 * most) - most
    data = pack(small.float(), format)
    code = getattr(words, f"{'SCALED' if scaled else 'PLAIN'}_{format.upper()}_{dtype.upper()}").value
    scales = torch.tensor([0.37, 1.5, 3e-3, 11.0][:count]).to(DTYPES[dtype])
    for row in range(2):
        for i in range(0, WORDS, 2):
            register = (int(data[row, i]) & 0xFFFF) | (int(data[row, i + 1]) & 0xFFFF) << 16
            both = [(int(s) & 0xFFFF) * 0x10001 for s in scales.view(torch.int16)]
            found = executed(code, [register, *both] if scaled else [register])
            for phase, value in enumerate(found):
                want = small[row, phase * WORDS + i : phase * WORDS + i + 2].to(DTYPES[dtype])
                want = want * scales[phase] if scaled else want
                assert torch.equal(pair(value, DTYPES[dtype]), want)
