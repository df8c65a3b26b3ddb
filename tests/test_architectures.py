"""docs/architectures.md tells the truth: its tables are what the code and the compiler say."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from flashkernels.attention import api as attention
from flashkernels.attention.problem import AttentionProblem
from flashkernels.attention.triton import tiles
from flashkernels.cli.doctor import serving_image
from flashkernels.decode import api as decode
from flashkernels.decode.problem import DecodeProblem
from flashkernels.dispatch import select
from flashkernels.hardware import GPUS, Gpu, lookup
from flashkernels.jit import nvrtc
from flashkernels.moe import gemm
from flashkernels.moe.problem import GemmProblem

PAGE = (Path(__file__).parent.parent / "docs" / "architectures.md").read_text(encoding="utf-8")
TARGETS = ("sm_80", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_100a", "sm_120", "sm_120a")
# One instruction of each kind, as PTX; %0 is a register of 32 bits, %1 one of 64.
INSTRUCTIONS = {
    "`mma.sync`, bf16": "{ .reg .f32 d; mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 "
    "{d,d,d,d}, {%0,%0}, {%0}, {0f00000000,0f00000000,0f00000000,0f00000000}; }",
    "`mma.sync`, FP8": "{ .reg .f32 d; mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 "
    "{d,d,d,d}, {%0,%0,%0,%0}, {%0,%0}, {0f00000000,0f00000000,0f00000000,0f00000000}; }",
    "`cp.async`": "cp.async.cg.shared.global [%0], [%1], 16;",
    "TMA (`cp.async.bulk.tensor`)": "cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes "
    "[%0], [%1, {%0}], [%0];",
    "`setmaxnreg`": "setmaxnreg.dec.sync.aligned.u32 40;",
    "`wgmma`": "wgmma.fence.sync.aligned;",
    "`tcgen05`": "tcgen05.fence::before_thread_sync;",
}


def block(name: str) -> str:
    """The table of this name on the page."""
    found = re.search(rf"<!-- table:{name} -->\n(.*?)<!-- /table -->", PAGE, re.DOTALL)
    assert found, f"docs/architectures.md has no table {name}"
    return found[1].strip()


def table(*rows: Iterable[str]) -> str:
    head, *rest = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([head, re.sub(r"[^|]+", " --- ", head), *rest])


def by_capability() -> dict[tuple[int, int], list[Gpu]]:
    found: dict[tuple[int, int], list[Gpu]] = {}
    for gpu in GPUS.values():
        found.setdefault(gpu.capability, []).append(gpu)
    return dict(sorted(found.items()))


def problem(head_dim: int = 128, dtype: str = "bf16") -> AttentionProblem:
    return AttentionProblem(
        batch=4, seq_q=4096, seq_k=4096, heads=16, kv_heads=16, head_dim=head_dim, dtype=dtype, causal=True,
        device="cuda",
    )  # fmt: skip


def support() -> str:
    """Who serves what, for each capability of the table of GPUs."""
    rows = [("", "GPUs", "shared memory a block", "attention bf16", "attention FP8", "decode, FP8 cache",
             "decode, INT8 cache", "MoE, FP8 weights", "MoE, INT4 weights")]  # fmt: skip
    for capability, gpus in by_capability().items():
        gpu = gpus[0]
        cached = [
            DecodeProblem(16, 1, 32, 8, 128, 4096, 16, bits, format=form, scales="row")
            for form, bits in (("fp8", 1040), ("int8", 1040))
        ]
        products = [
            GemmProblem(128, 8, 4096, 4096, dtype, "cuda", form, "none", False, 16, group)
            for dtype, form, group in (("fp8", "fp8", 0), ("bf16", "w4", 128))
        ]
        names = [select(attention.IMPLS, problem(dtype=dtype), gpu).name for dtype in ("bf16", "fp8")]
        names += [select(decode.IMPLS, one, gpu).name for one in cached]
        names += [select(gemm.IMPLS, one, gpu).name for one in products]
        who = ", ".join(gpu.key for gpu in gpus)
        rows.append((f"sm_{capability[0]}{capability[1]}", who, f"{gpu.shared_per_block // 1024} KiB",
                     *(f"`{name}`" for name in names)))  # fmt: skip
    return table(*rows)


def accepted(instruction: str, target: str) -> bool:
    source = (
        'extern "C" __global__ void probe(unsigned a, unsigned long long b) '
        f'{{ asm volatile("{instruction}" :: "r"(a), "l"(b)); }}'
    )
    try:
        nvrtc.find().run("probe.cu", source, {}, [f"--gpu-architecture={target}"])
    except nvrtc.CompileError as error:
        if "not supported on .target" not in str(error) and "requires .target" not in str(error):
            raise  # another fault than the one that is asked for
        return False
    return True


def instructions() -> str:
    rows = [
        (name, *("yes" if accepted(instruction, target) else "" for target in TARGETS))
        for name, instruction in INSTRUCTIONS.items()
    ]
    return table(("", *TARGETS), *rows)


def small_tiles() -> str:
    """The Triton tiles of a GPU with 99 KiB a block beside those of one with 227."""
    rows = [("head dimension", "rtx5090 (99 KiB)", "needs", "h200 (227 KiB)", "needs")]
    for head_dim in (64, 72, 128, 256, 512):
        cells = []
        for key in ("rtx5090", "h200"):
            gpu = lookup(key)
            tile = tiles.choose(problem(head_dim), gpu, tma=True).tile
            cells += [f"`{tile.name}`", f"{tiles.needs(tile, problem(head_dim), gpu).shared / 1024:.0f} KiB"]
        rows.append((str(head_dim), *cells))
    return table(*rows)


@pytest.mark.parametrize("build", [support, small_tiles], ids=lambda build: build.__name__)
def test_a_table_is_what_the_code_says(build: Callable[[], str]) -> None:
    expected = build()
    assert block(build.__name__) == expected, f"docs/architectures.md, table {build.__name__}, must be\n{expected}"


def test_the_instructions_are_what_the_compiler_takes() -> None:
    try:
        nvrtc.find()
    except nvrtc.CompilerMissing as error:
        pytest.skip(str(error))
    expected = instructions()
    assert block("instructions") == expected, f"docs/architectures.md, table instructions, must be\n{expected}"


def test_the_examples_of_images_are_what_doctor_answers() -> None:
    rows = re.findall(r"^\| `([^`]*)` \| (\d+)\.(\d) \| (.*?) \|", block("images"), re.MULTILINE)
    assert len(rows) >= 5
    for images, major, minor, answer in rows:
        found = serving_image((int(major), int(minor)), images.split())
        assert answer == (f"`{found}`" if found else "nothing"), (images, major, minor, found)
