"""Compiles Triton kernels for a GPU that is not there, and reads what machine code, theirs or NVRTC's, needs."""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel uses, from its machine code."""

    shared: int
    tensor_columns: int  # of tensor memory; 0 before sm_100
    registers: int
    spills: int  # bytes of local memory a thread
    cubin: bytes = field(repr=False)
    entry: str  # the kernel's name; empty where the cubin has one kernel

    @functools.cached_property
    def sass(self) -> str:
        """The machine code as text: disassembled when first read, which takes longer than the rest."""
        sass = _output("nvdisasm", "-c", self.cubin)
        return _section(sass, self.entry) if self.entry else sass

    def count(self, opcode: str) -> int:
        """How many instructions of this name the machine code has, e.g. HGMMA, UTMALDG, LDL."""
        return len(re.findall(rf"\b{opcode}\b", self.sass))


def compile_for(
    kernel: Any, types: dict[str, str], constants: dict[str, Any], aligned: set[str], cc: int, options: dict[str, Any]
) -> Resources:
    """Compiles `kernel` for compute capability `cc` (80, 89, 90, 100, 120). Needs no GPU.

    `types` gives the Triton type of every runtime argument ("*bf16", "i32", "tensordesc<bf16[1,128,1,64]>"),
    `constants` the compile-time values, `aligned` the arguments that are multiples of 16, as the JIT would find out
    at run time; `options` are `jit.launch.compile_options`.
    """
    names = kernel.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    attrs = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, signature, constants, attrs)
    given = {"enable_fp_fusion": knobs.language.default_fp_fusion, **options}  # as a launch says it
    compiled = triton.compile(source, target=GPUTarget("cuda", cc, 32), options=given)
    return resources(compiled.asm["cubin"], compiled.metadata.shared, compiled.metadata.tmem_size or 0)


def resources(cubin: bytes, shared: int, tensor_columns: int = 0, entry: str = "") -> Resources:
    """What the kernel `entry` of a cubin uses; a cubin with one kernel needs no name."""
    usage = _output("cuobjdump", "-res-usage", cubin)
    found = re.search(rf"Function {entry or '.*'}:\s+REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump -res-usage gave no resource line: {usage!r}")
    return Resources(shared, tensor_columns, int(found[1]), int(found[2]), cubin, entry)


def _section(sass: str, entry: str) -> str:
    """The lines of one kernel."""
    parts = re.split(r"^\s*\.section\s+\.text\.(\w+),.*\n", sass, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))[entry]


def _output(tool: str, option: str, cubin: bytes) -> str:
    """What one of Triton's own tools says of a cubin."""
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(path), option, file.name], check=True, capture_output=True, text=True).stdout
