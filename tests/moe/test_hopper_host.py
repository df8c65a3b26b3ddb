"""The Hopper grouped GEMM's Python side, without a driver: which kernels start, and where their operands lie."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

import flashkernels as fk
from flashkernels.hardware import lookup
from flashkernels.moe.gemm import Gemm, gemm_problem
from flashkernels.moe.hopper import gemm as hopper
from flashkernels.moe.hopper.gemm import Params
from flashkernels.moe.hopper.gemm_source import GemmVariant
from flashkernels.moe.hopper.gemm_tiles import HopperGemmTile


class Machine:
    """Notes what would be compiled, mapped and launched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.variants: list[GemmVariant] = []
        self.maps: list[tuple[Any, ...]] = []
        self.launches: list[tuple[str, int, dict[str, int]]] = []
        monkeypatch.setattr(hopper, "library", self.variants.append)
        monkeypatch.setattr(hopper.driver, "Kernel", self.kernel)
        monkeypatch.setattr(hopper.driver, "tensor_map", self.tensor_map)
        monkeypatch.setattr(hopper, "counters", lambda device, stream: 64)
        monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)

    def kernel(self, code: Any, name: str, shared: int, early: bool) -> Any:
        def launch(grid: int, threads: int, stream: int, address: int) -> None:
            given = Params.from_address(address)
            names = (*hopper.POINTERS, "stride_tokens", *hopper.NUMBERS)
            self.launches.append((name, grid, {field: getattr(given, field) or 0 for field in names}))

        return type("Started", (), {"launch": staticmethod(launch)})

    def tensor_map(self, *arguments: Any) -> bytes:
        self.maps.append(arguments)
        return bytes(ctypes.sizeof(ctypes.c_uint64 * 16))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def run(
    format: str, gather: bool, activation: str, tile: HopperGemmTile, rounds: bool = False, splittable: bool = False
) -> tuple[Any, ...]:  # fmt: skip
    """x, its scales, the weights and the output of one product of 12 tokens."""
    routing = fk.moe.route(torch.randn(12, 4), 2)
    plan = routing.plan
    assert plan is not None
    rows, n, depth = 12 if gather else 24, 48, 64
    x, w = torch.randn(rows, depth).bfloat16(), torch.randn(4, n, depth).bfloat16()
    scale = w_scale = None
    data = w
    if format:
        if not rounds:
            x, scale = fk.moe.round_rows(x, format, impl="torch")
        data, w_scale, *_ = fk.moe.quantise(w, format)
    call = Gemm(gather, activation, True, 1.702, 7.0, format, 0, depth, plan.block, "bf16", splittable, "hopper", tile)
    tensors = (x, data, None, None, scale, w_scale, *plan[:6])
    out = hopper.gemm_plan(gemm_problem(tensors, call), lookup("h200"), tensors, call)(*tensors)
    return x, scale, data, w_scale, out


@pytest.mark.parametrize("format", ["fp8", "int8"])
def test_scales_are_gathered_with_the_rows(machine: Machine, format: str) -> None:
    x, scale, w, w_scale, out = run(format, True, "swiglu", HopperGemmTile(192, 4, cluster=2))
    assert machine.variants == [GemmVariant(192, 4, gated=True, cluster=2, small=format, ahead=True)]
    assert [name for name, *_ in machine.launches] == ["gather", "gemm"]
    for _, _, given in machine.launches:
        assert given["tokens"] == x.data_ptr() and given["token_scales"] == scale.data_ptr()
        assert given["x_scales"] == given["gathered"] + 24 * 64  # behind the rows
        assert given["w_scales"] == w_scale.data_ptr() and given["out"] == out.data_ptr()
        assert (given["stride_tokens"], given["step"], given["half"]) == (64, 2, 1)
    w_map, x_map = machine.maps
    assert w_map[:2] == (w.data_ptr(), "fp8") and x_map[1] == "fp8"
    assert w_map[2:] == ((64, 24, 2, 4), (2 * 64, 64, 48 * 64), (128, 64, 2, 1), 128)
    assert x_map[2][1] * 64 >= 24 * 64 + 24 * 4 and x_map[4] == (128, 16, 1, 1)  # rows and scales are one allocation
    assert out.shape == (24, 24) and out.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("gather", "tile"), [(True, HopperGemmTile(96, 5, fused=True)), (False, HopperGemmTile(192, 4))],
    ids=["by token", "by place"],
)  # fmt: skip
def test_scales_that_are_not_copied_are_read_where_they_are(
    machine: Machine, gather: bool, tile: HopperGemmTile
) -> None:
    x, scale, _, _, out = run("fp8", gather, "none", tile)
    variant = GemmVariant(tile.rows, tile.stages, fused=tile.fused, small="fp8")
    assert machine.variants == [variant] and out.shape == (24, 48)
    ((name, grid, given),) = machine.launches
    assert (name, grid, given["x_scales"]) == ("gemm", 132, scale.data_ptr())
    assert (given["step"], given["half"]) == (1, 48)  # nothing alternates without an activation
    assert machine.maps[1][0] == x.data_ptr() and machine.maps[1][4] == (128, 1 if gather else 16, 1, 1)


@pytest.mark.parametrize("format", ["fp8", "int8"])
def test_rows_that_a_copy_rounds(machine: Machine, format: str) -> None:
    x, scale, _, w_scale, out = run(format, True, "swiglu", HopperGemmTile(192, 4), rounds=True)
    assert machine.variants == [GemmVariant(192, 4, gated=True, small=format, wide="bf16", ahead=True)]
    (name, grid, given), (last, _, _) = machine.launches
    assert (name, last, scale) == ("round_and_gather", "gemm", None)
    assert (grid, given["token_count"], given["row_warps"]) == (2, 12, 1)  # 8 of a block's warps have a row each
    assert given["tokens"] == x.data_ptr() and given["stride_tokens"] == 2 * 64 and given["token_scales"] == 0
    assert given["x_scales"] == given["gathered"] + 24 * 64 and given["w_scales"] == w_scale.data_ptr()
    assert machine.maps[1][1] == "fp8" and out.dtype == torch.bfloat16


@pytest.mark.parametrize(("gather", "splittable", "ahead"), [(False, True, True), (False, False, False)])
def test_only_what_the_kernel_ahead_leaves_alone_is_read_early(
    machine: Machine, gather: bool, splittable: bool, ahead: bool
) -> None:
    """Any kernel may run before a product; before the second one of a layer it is one that makes its rows."""
    run("", gather, "none", HopperGemmTile(192, 4), splittable=splittable)
    assert [variant.ahead for variant in machine.variants] == [ahead]


def test_16_bits_have_no_scales(machine: Machine) -> None:
    _, _, w, _, _ = run("", True, "swiglu", HopperGemmTile(192, 4, cluster=2))
    given = machine.launches[-1][2]
    assert [given[name] for name in ("token_scales", "x_scales", "w_scales")] == [0, 0, 0]
    assert given["stride_tokens"] == 128 and machine.maps[0][:2] == (w.data_ptr(), "bf16")
    assert machine.maps[0][4] == (64, 64, 2, 1) and machine.maps[1][2] == (64, 24, 1, 1)
