"""What lessons of the ground count is what the hardware would do, and their CUDA C++ is what their pages say."""

from __future__ import annotations

import doctest
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, strategies as st

from flashkernels.hardware import GPUS, lookup
from flashkernels.jit import nvrtc
from flashkernels.tiling.limits import footprint
from flashkernels.tiling.tile import Tile

GROUND = Path(__file__).parents[2] / "docs" / "learn" / "ground"
KERNELS = (  # lesson, kernel, and its constants
    ("1_threads", "chain", {}),
    ("2_coalescing", "twice", {"BY_COLUMN": 1}), ("2_coalescing", "twice4", {"BY_COLUMN": 0}),
    ("3_banks", "transpose", {"PAD": 1, "STRIDE": 1, "STEPS": 64}),
    ("3_banks", "reads", {"PAD": 0, "STRIDE": 32, "STEPS": 64}),
    ("4_divergence", "kinds", {"WAYS": 8, "BY_LANE": 1}),
    ("5_reductions", "by_thread", {}), ("5_reductions", "by_warp", {}), ("5_reductions", "by_block", {}),
    ("5_reductions", "parts", {}),
    ("7_latency", "sums", {"LOADS": 8}), ("7_latency", "chase", {"LOADS": 1}),
)  # fmt: skip


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"ground_{name}", GROUND / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _beside(folder_of_lessons: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lessons import what lies beside them."""
    monkeypatch.syspath_prepend(GROUND)


counting = load("counting")  # imports nothing of the lessons
addresses = st.lists(st.integers(0, 1 << 14).map(lambda word: 4 * word), min_size=1, max_size=32)


def test_the_examples_of_counting() -> None:
    assert doctest.testmod(counting).failed == 0


@given(addresses)
def test_bank_conflicts_are_the_rounds_in_which_every_bank_gives_one_word(wanted: list[int]) -> None:
    rounds, waiting = 0, set(wanted)
    while waiting:
        rounds += 1
        given_out = {address % 128: address for address in waiting}  # one of each bank
        waiting -= {*given_out.values()}
    assert counting.bank_conflicts(wanted) == rounds


@given(addresses, st.sampled_from((4, 8, 16)))
def test_sectors_are_the_pieces_of_32_bytes_that_hold_a_wanted_byte(wanted: list[int], size: int) -> None:
    wanted = [address // size * size for address in wanted]  # as the hardware demands
    touched = {byte // 32 for address in wanted for byte in range(address, address + size)}
    assert counting.sectors(wanted, size) == len(touched)


@given(
    st.sampled_from((1, 2, 4, 8, 16)), st.integers(32, 255), st.integers(0, 99 * 1024), st.sampled_from(sorted(GPUS))
)
def test_resident_blocks_are_those_of_the_tiling(warps: int, registers: int, shared: int, key: str) -> None:
    tile = Tile("standard", 64, 64, (64,), (64,), warps, 2, tma=False)
    want = footprint(tile, lookup(key), shared, registers).blocks_per_sm
    assert counting.resident(32 * warps, registers, shared, lookup(key)) == want


@given(st.floats(0.1, 9), st.floats(0.1, 9), st.integers(1, 20))
def test_a_pipeline_takes_as_long_as_its_events_say(copy: float, compute: float, chunks: int) -> None:
    copied = done = 0.0
    for _ in range(chunks):
        copied += copy
        done = max(done, copied) + compute
    assert counting.pipelined(copy, compute, chunks) == pytest.approx(done)


def compiled(name: str, kernel: str, constants: dict[str, int], arch: str) -> bytes:
    try:
        nvrtc.find()
    except nvrtc.CompilerMissing as error:
        pytest.skip(str(error))
    options = [f"-D{key}={value}" for key, value in constants.items()]
    return nvrtc.compile(f"{kernel}.cu", load(name).source(), {}, arch, options)


@pytest.mark.parametrize(("name", "kernel", "constants"), KERNELS, ids=[kernel for _, kernel, _ in KERNELS])
@pytest.mark.parametrize("arch", ["sm_80", "sm_120"])
def test_a_kernel_compiles(name: str, kernel: str, constants: dict[str, int], arch: str) -> None:
    assert kernel.encode() in compiled(name, kernel, constants, arch)


def opcodes(name: str, kernel: str) -> list[str]:
    """The instructions of a kernel for sm_90, in their order."""
    from flashkernels.jit.offline import resources

    constants = next(found for one, entry, found in KERNELS if (one, entry) == (name, kernel))
    sass = resources(compiled(name, kernel, constants, "sm_90"), 0, entry=kernel).sass
    return re.findall(r"\*/\s+(?:@!?U?P\d+ )?([A-Z][A-Z0-9.]+)", sass)


def test_every_load_of_the_strided_reads_is_an_instruction() -> None:
    loads = [code for code in opcodes("3_banks", "reads") if code.startswith("LDS")]
    assert loads == ["LDS"] * 16  # unrolled 16 times, none of them wide


def test_divergence_is_a_real_branch() -> None:
    codes = opcodes("4_divergence", "kinds")
    assert codes.count("BSSY") == codes.count("BSYNC") == 8 and "FSEL" not in codes


def test_eight_loads_are_under_way_before_one_is_used() -> None:
    codes = [code[:4] for code in opcodes("7_latency", "sums")]
    first = codes.index("FADD")
    assert codes[:first].count("LDG.") == 8 == codes.count("LDG.")


def test_only_the_kernels_with_atomics_have_atomics() -> None:
    for kernel, count in (("by_thread", 1), ("by_warp", 1), ("by_block", 1), ("parts", 0)):
        codes = opcodes("5_reductions", kernel)
        assert sum(code.startswith(("RED", "ATOM")) for code in codes) == count, kernel


def test_the_counts_that_lessons_print() -> None:
    coalescing, banks, divergence = (load(name) for name in ("2_coalescing", "3_banks", "4_divergence"))
    assert [coalescing.touched(0), coalescing.touched(0, 16), coalescing.touched(1)] == [4, 16, 32]
    assert [banks.column(0), banks.column(1)] == [32, 1]
    assert [divergence.ways_of_a_warp(*kind) for kind in divergence.KINDS] == [1, 2, 1, 8, 32]
    latency = load("7_latency")
    for blocks in latency.BLOCKS:
        for key in ("h200", "b200", "a100"):
            held = counting.resident(latency.THREADS, 32, latency.claim(lookup(key), blocks), lookup(key))
            assert held == blocks, (key, blocks)
