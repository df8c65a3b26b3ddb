"""The Hopper routing without a GPU: its CUDA C++ compiled for the CPU, where threads are fibers, against plain torch;
what it refuses, and how it cuts."""

from __future__ import annotations

import ctypes
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import flashkernels as fk
from flashkernels.fused.rows import DTYPES
from flashkernels.hardware import lookup
from flashkernels.jit.eager import Plans
from flashkernels.moe import inference, reference
from flashkernels.moe.hopper.route import POINTERS, Params, RouteVariant, program, vector_of
from flashkernels.moe.hopper.route_tiles import CLUSTER, HopperRouteTile, cut, rejects, tile_of
from flashkernels.moe.plan import block_rows, most_tiles, sizes
from flashkernels.moe.problem import Choice, RouteProblem
from flashkernels.tiling import TilingError

H200 = lookup("h200")
FILES = Path(__file__).parent / "cpu"
SMS = 10  # of the machine that is posed
compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("route")


def compiled(variant: RouteVariant, folder: Path) -> Any:
    """The variant as a library for the CPU. Each block's shared memory is its own."""
    into = folder / f"{abs(hash(variant)):x}"
    if not into.exists():
        into.mkdir()
        _, text, headers = program(variant)
        text = text.replace("extern __shared__ u32 memory[];", "u32* memory = blocks_memory[blockIdx.x].data();")
        own = r"static Chosen of_blocks[64][\1][\2]; auto& all_chosen = of_blocks[blockIdx.x];"
        text, found = re.subn(r"__shared__ Chosen all_chosen\[(\w+)\]\[(\w+)\];", own, text)
        assert found == 1 and "__shared__" not in text
        (into / "route.inc").write_text(text)
        (into / "config.cuh").write_text(headers["config.cuh"])
        command = ["g++", "-O1", "-std=c++17", "-shared", "-fPIC", "-w", f"-I{into}", f"-I{FILES}"]
        subprocess.run([*command, "-o", str(into / "run.so"), str(FILES / "run.cpp")], check=True)
    return ctypes.CDLL(str(into / "run.so"))


def check(
    folder: Path, logits: Tensor, k: int, tile: tuple[int, int, str], *, bias: Tensor | None = None,
    used: int | None = None, span: tuple[int, int] | None = None, block: int | None = None, sigmoid: bool = False,
    renormalise: bool = True, scale: float = 1.0,
) -> None:  # fmt: skip
    """Ids and plan are those of the reference bit for bit. Tiles are (warps, ahead, way)."""
    tokens, experts = logits.shape
    first, last = span or (0, experts)
    block = block or block_rows(tokens * k, last - first)
    dtype, kind = DTYPES[logits.dtype], "" if bias is None else DTYPES[bias.dtype]
    warps, ahead, way = tile
    whole = cut(HopperRouteTile(warps, 1, ahead, way), tokens, experts, k, SMS)
    assert whole.fault is None
    vector = vector_of(dtype, experts, logits.stride(0), logits.data_ptr())
    variant = RouteVariant(experts, k, dtype, vector, kind, sigmoid, renormalise, whole.tile, whole.way)
    limit = None if used is None else torch.tensor([used], dtype=torch.int32)
    weights, ids, arrivals = torch.full((tokens, k), 9.0), torch.full((tokens, k), -9), torch.zeros(2)
    ids, arrivals = ids.int(), arrivals.int()
    plan = [torch.full(shape, -9, dtype=torch.int32) for shape in sizes(tokens, k, last - first, block).values()]
    table = torch.full((whole.blocks * whole.columns,), -9, dtype=torch.int16)
    tensors = (logits, bias, limit, weights, ids, *plan, table, arrivals)
    most = most_tiles(tokens * k, last - first, block)
    numbers = (logits.stride(0), scale, tokens, whole.of_warp, first, last, block.bit_length() - 1, most)
    addresses = [0 if x is None else x.data_ptr() for x in tensors]
    assert len(addresses) == len(POINTERS)
    params = Params(*addresses, *numbers)
    assert compiled(variant, folder).run(ctypes.byref(params), whole.blocks, 32 * warps, whole.shared) == 0
    assert arrivals.tolist() == [0, 0]  # as the next launch wants them
    choice = Choice(k, sigmoid, renormalise, 1, 1, True, scale)
    want_weights, want_ids = reference.choose(logits, bias, limit, choice)
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(weights, want_weights, rtol=1e-5, atol=1e-6, equal_nan=True)
    want = reference.regroup(want_ids, limit, experts, (first, last), block)
    for name, x, y in zip(want._fields, plan, want[:6], strict=False):
        assert torch.equal(x, y), name


@compiler
def test_blocks_that_meet(folder: Path) -> None:
    tile = (2, 4, "grid")
    for tokens in (131, 180):
        check(folder, torch.randn(tokens, 60), 4, tile)
    check(folder, torch.randn(131, 60), 4, tile, span=(7, 33), block=16, scale=2.5)
    for used in (77, 0, -3, 500):
        check(folder, torch.randn(131, 60), 4, tile, used=used)
    check(folder, torch.zeros(131, 60), 4, tile, block=128)
    for tokens in (1, 5):
        check(folder, torch.randn(tokens, 60), 4, tile)


@compiler
@pytest.mark.parametrize(
    ("tokens", "experts", "k", "tile"),
    [
        (1, 128, 8, (4, 4, "cluster")), (64, 128, 8, (8, 4, "cluster")), (100, 256, 8, (4, 2, "grid")),
        (20, 1024, 3, (2, 1, "cluster")), (29, 7, 7, (4, 8, "cluster")), (60, 512, 16, (2, 1, "grid")),
        (500, 3, 1, (2, 8, "grid")),
    ],
)  # fmt: skip
def test_sizes(tokens: int, experts: int, k: int, tile: tuple[int, int, str], folder: Path) -> None:
    check(folder, torch.randn(tokens, experts), k, tile)


def other_nans(logits: Tensor) -> None:
    """Puts such with a sign and with a payload beside one another: they are equal."""
    bits = logits.view(torch.int32 if logits.dtype == torch.float32 else torch.int16)
    quiet = {torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}[logits.dtype]
    bits[::5, 7], bits[::5, 9], bits[::15, 8] = quiet - (1 << 8 * logits.element_size() - 1), quiet + 5, -1


@compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_ties_nan_and_infinities(dtype: torch.dtype, folder: Path) -> None:
    logits = (torch.randint(-3, 4, (200, 24)) / 2).to(dtype)
    logits[::7, 3], logits[::11], logits[::13, 5] = math.nan, -math.inf, -math.inf
    logits[::17, 2], logits[::19], logits[::23, 4] = math.inf, math.nan, -0.0
    other_nans(logits)
    scores = [(False, True), (True, False), (False, False)]
    for sigmoid, renormalise in scores if dtype == torch.float32 else scores[:1]:
        check(folder, logits, 4, (4, 4, "grid"), sigmoid=sigmoid, renormalise=renormalise)


@compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bias_and_odd_strides(dtype: torch.dtype, folder: Path) -> None:
    logits = torch.randn(60, 41).to(dtype)[:, 3:37]
    check(folder, logits, 3, (4, 4, "grid"))
    check(folder, logits, 3, (4, 4, "grid"), bias=torch.randn(34).to(dtype) / 4, sigmoid=True)
    if dtype == torch.float32:
        check(folder, logits, 3, (4, 4, "grid"), bias=torch.randn(34) / 4)


# What it takes


@pytest.mark.parametrize(
    ("change", "gpu", "words"),
    [
        ({}, H200, None),
        ({"groups": 4}, H200, "groups=4"),
        ({"given": True}, H200, "given"),
        ({"dtype": "fp64"}, H200, "fp64"),
        ({"device": "cpu"}, None, "on cpu"),
        ({}, lookup("b200"), "9.0"),
        ({"tokens": 4_000_000}, H200, "shared memory"),
        ({"tokens": 2_000_000, "k": 1}, H200, "16 bits"),
        ({"tokens": 4_000_000, "planned": False}, H200, None),
        ({"tokens": 1 << 30, "planned": False}, H200, "32 bits"),
    ],
    ids=str,
)
def test_refusals_have_reasons(change: dict[str, Any], gpu: Any, words: str | None) -> None:
    fields: dict[str, Any] = {"tokens": 32768, "experts": 64, "k": 2, "dtype": "fp32", "device": "cuda"} | change
    found = rejects(RouteProblem(**fields), gpu)
    assert found is None if words is None else found is not None and words in found


@pytest.mark.parametrize("experts", [1, 8, 60, 64, 128, 129, 256, 512, 1024])
@pytest.mark.parametrize("tokens", [1, 7, 128, 257, 4096, 32768, 70000])
def test_every_token_has_a_warp(tokens: int, experts: int) -> None:
    k = min(8, experts)
    whole = cut(tile_of(RouteProblem(tokens, experts, k, "fp32", "cuda")), tokens, experts, k, H200.sms)
    warps = whole.blocks * whole.tile.warps
    assert whole.fault is None and warps * whole.of_warp >= tokens
    idle = whole.blocks - -(-tokens // (whole.tile.warps * whole.of_warp))
    assert idle == 0 or (whole.way == "cluster" and whole.blocks in (2, 4, 8) and idle < whole.blocks / 2)
    assert whole.blocks <= (CLUSTER if whole.way == "cluster" else H200.sms)


def test_bad_tiles_are_named() -> None:
    for numbers in ((3, 1, 1, "grid"), (64, 1, 1, "grid"), (32, 4, 1, "grid"), (32, 1, 1, "pair")):
        with pytest.raises(TilingError, match=str(numbers[3]) if numbers[3] == "pair" else str(numbers[0])):
            HopperRouteTile(*numbers)


def test_loads_stay_in_a_row_and_aligned() -> None:
    assert vector_of("bf16", 1024, 1024, 0) == 8 and vector_of("fp32", 1024, 1024, 8) == 2
    assert vector_of("bf16", 96, 101, 2) == 1 and vector_of("fp32", 60, 60, 0) == 2


def test_a_tile_in_force_is_part_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    tile, asked = HopperRouteTile(8, 1, 2, "grid"), []
    monkeypatch.setattr(Plans, "ready", lambda self, tensors, settings: asked.append(settings[-1]))
    logits = torch.zeros(4, 8)
    fk.moe.route(logits, 2)
    with fk.use_tile(tile=tile):
        fk.moe.route(logits, 2)
    assert asked == [None, tile]


def test_a_layer_that_was_prepared_without_a_tile_takes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tile, asked, make = HopperRouteTile(8, 1, 2, "grid"), [], inference.call_of

    def recorded(*arguments: Any) -> Any:
        asked.append(arguments[-1])
        return make(*arguments)

    monkeypatch.setattr(inference, "call_of", recorded)
    tensors = torch.randn(5, 16), torch.randn(4, 16), torch.randn(4, 24, 16), torch.randn(4, 16, 12)
    for _ in range(2):
        fk.moe.layer(*tensors, impl="torch")
        with fk.use_tile(tile=tile):
            fk.moe.layer(*tensors, impl="torch")
    assert asked == [None, tile]
