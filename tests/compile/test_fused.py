"""The row-wise kernels, compiled for real GPUs: nothing spills, and rows are read by whole vectors. Needs no GPU."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from flashkernels.fused.rope import Rope
from flashkernels.fused.triton import activation, norm, rope, softmax
from flashkernels.fused.triton.blocks import Blocks, blocks, pieces
from flashkernels.hardware import lookup
from flashkernels.jit.launch import compile_options
from flashkernels.jit.offline import Resources, compile_for

GPUS = ("a100", "h200", "rtx5090")  # sm_80, 90, 120
ELEMENT_BYTES = {"bf16": 2, "fp32": 4}
each_gpu = pytest.mark.parametrize("gpu", GPUS)


def compiled(
    kernel: Any, gpu: str, pointers: dict[str, str], constants: dict[str, Any], warps: int, width: bool = True
) -> Resources:
    """As the JIT would for contiguous tensors: `pointers` by name, what is not there is None. `width` is a multiple of
    16."""
    types: dict[str, str] = {}
    fixed = dict(constants)
    for name in kernel.arg_names:
        if name.endswith("_ptr"):
            if name in pointers:
                types[name] = f"*{pointers[name]}"
            else:
                fixed[name] = None
        elif name.endswith("_inner"):
            fixed[name] = 1
        elif name == "eps":
            types[name] = "fp32"
        elif name not in fixed:
            types[name] = "i32" if name.endswith("_heads") else "i64"
    aligned = {name for name in types if "_ptr" in name or "stride" in name or (width and name == "width")}
    return compile_for(kernel, types, fixed, aligned, lookup(gpu).cc, compile_options(warps, 3, 0))


def assert_lean(found: Resources, block: Blocks, dtype: str = "bf16") -> None:
    """No spills; global memory is read and written 16 bytes at a time where a thread has as many."""
    assert found.spills == 0
    each = block.rows * block.width // (32 * block.warps) * ELEMENT_BYTES[dtype]
    if each >= 16:
        assert re.search(r"LDG(STS)?\.E\.\S*128", found.sass) and re.search(r"STG\.E\.\S*128", found.sass)


WIDTHS = (64, 8192, 16384, 32768)


@each_gpu
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("centred", [False, True], ids=["rms", "layer"])
def test_norm_forward(width: int, centred: bool, gpu: str) -> None:
    block = blocks(width, norm.WIDEST)
    pointers = dict.fromkeys(("x_ptr", "weight_ptr", "residual_ptr", "out_ptr", "total_ptr"), "bf16")
    pointers |= {"rstd_ptr": "fp32"} | ({"mean_ptr": "fp32", "bias_ptr": "bf16"} if centred else {})
    constants = block.constants | {"CENTRED": centred, "ROUNDED": not centred, "MOST": 0}
    assert_lean(compiled(norm.forward_kernel, gpu, pointers, constants, block.warps), block)


@pytest.mark.parametrize(
    ("small", "most", "gpu"), [("fp8e4nv", 448, "h200"), ("fp8e4nv", 448, "rtx5090"), ("i8", 127, "a100")]
)
@pytest.mark.parametrize("width", [4096, 32768])
def test_norm_quantised(small: str, most: int, gpu: str, width: int) -> None:
    block = blocks(width, norm.WIDEST)
    pointers = {"x_ptr": "bf16", "weight_ptr": "bf16", "out_ptr": small, "scale_ptr": "fp32"}
    constants = block.constants | {"CENTRED": False, "ROUNDED": False, "MOST": most}
    assert compiled(norm.forward_kernel, gpu, pointers, constants, block.warps).spills == 0


@each_gpu
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("centred", [False, True], ids=["rms", "layer"])
def test_norm_backward(width: int, centred: bool, gpu: str) -> None:
    block = blocks(width, norm.WIDEST_BACKWARD)
    pointers = dict.fromkeys(("dy_ptr", "dtotal_ptr", "x_ptr", "weight_ptr", "dx_ptr"), "bf16") | {"rstd_ptr": "fp32"}
    pointers |= {"mean_ptr": "fp32"} if centred else {}
    flags = {"CENTRED": centred, "ROUNDED": False}
    sums = {"dweight_ptr": "fp32"} | ({"dbias_ptr": "fp32"} if centred else {})
    stages, _ = norm.walk(lookup(gpu), block, 2, total=True)
    constants = block.constants | flags | {"STAGES": stages}
    found = compiled(norm.backward_kernel, gpu, pointers | (sums if block.whole else {}), constants, block.warps)
    assert_lean(found, block)
    assert ("LDGSTS" in found.sass) == (stages > 1)
    if not block.whole:
        for name in ("dtotal_ptr", "weight_ptr", "dx_ptr"):
            del pointers[name]
        assert_lean(compiled(norm.column_kernel, gpu, pointers | sums, norm.COLUMNS.sizes | flags, 4), norm.COLUMNS)


def ahead(gpu: str, dtype: str, width: int, total: bool) -> bool:
    """Whether a walk over such rows loads ahead: one that does not needs next to no shared memory."""
    stages, _ = norm.walk(lookup(gpu), blocks(width, norm.WIDEST_BACKWARD), ELEMENT_BYTES[dtype], total)
    return stages > 1


AXES = ((*GPUS, "l40s"), tuple(ELEMENT_BYTES), (16, 2048, 4096, 8192), (False, True))
WALKS = [one for one in itertools.product(*AXES) if ahead(*one)]


def test_some_walks_load_ahead_on_every_gpu_and_at_every_width() -> None:
    assert [{*found} for found in zip(*WALKS, strict=True)] == [{*axis} for axis in AXES]


@pytest.mark.parametrize(("gpu", "dtype", "width", "total"), WALKS)
def test_a_walk_that_loads_ahead_has_room(gpu: str, dtype: str, width: int, total: bool) -> None:
    """There is shared memory for all programs of a multiprocessor."""
    block, limits = blocks(width, norm.WIDEST_BACKWARD), lookup(gpu)
    stages, programs = norm.walk(limits, block, ELEMENT_BYTES[dtype], total)
    pointers = dict.fromkeys(("dy_ptr", "x_ptr", "weight_ptr", "dx_ptr", *(["dtotal_ptr"] * total)), dtype)
    pointers |= dict.fromkeys(("rstd_ptr", "mean_ptr", "dweight_ptr", "dbias_ptr"), "fp32")
    constants = block.constants | {"CENTRED": True, "ROUNDED": False, "STAGES": stages}
    found = compiled(norm.backward_kernel, gpu, pointers, constants, block.warps)
    assert found.shared <= limits.shared_per_block
    assert (found.shared + norm.RESERVED) * (programs // limits.sms) <= limits.shared_per_sm


@each_gpu
@pytest.mark.parametrize("width", [64, 8192, 32768])
@pytest.mark.parametrize("centred", [False, True], ids=["rms", "layer"])
def test_norm_backward_without_a_weight(width: int, centred: bool, gpu: str) -> None:
    """With nothing to sum, and of a centred one with a bias alone."""
    block = blocks(width, norm.WIDEST_BACKWARD)
    pointers = dict.fromkeys(("dy_ptr", "x_ptr", "dx_ptr"), "bf16") | {"rstd_ptr": "fp32"}
    pointers |= {"mean_ptr": "fp32"} if centred else {}
    flags = {"CENTRED": centred, "ROUNDED": False}
    constants = block.constants | flags | {"STAGES": norm.walk(lookup(gpu), block, 2, total=False)[0]}
    assert_lean(compiled(norm.backward_kernel, gpu, pointers, constants, block.warps), block)
    if centred:
        sums = {"dbias_ptr": "fp32"}
        if block.whole:
            found = compiled(norm.backward_kernel, gpu, pointers | sums, constants, block.warps)
        else:
            del pointers["dx_ptr"]
            block = norm.COLUMNS
            found = compiled(norm.column_kernel, gpu, pointers | sums, block.sizes | flags, block.warps)
        assert_lean(found, block)


@each_gpu
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
def test_activation(kind: str, gpu: str) -> None:
    block = pieces(11008)
    constants = block.sizes | {"KIND": kind, "PACKED": True}
    found = compiled(activation.forward_kernel, gpu, {"x_ptr": "bf16", "out_ptr": "bf16"}, constants, block.warps)
    assert_lean(found, block)
    pointers = dict.fromkeys(("dy_ptr", "x_ptr", "dx_ptr"), "bf16")
    assert_lean(compiled(activation.backward_kernel, gpu, pointers, constants, block.warps), block)


@each_gpu
@pytest.mark.parametrize("width", [64, 16384, 32768])
def test_softmax(width: int, gpu: str) -> None:
    block = blocks(width, softmax.WIDEST)
    constants = block.constants | {"LOG": width == 64}
    found = compiled(softmax.forward_kernel, gpu, {"x_ptr": "bf16", "out_ptr": "bf16"}, constants, block.warps)
    assert_lean(found, block)
    pointers = dict.fromkeys(("dy_ptr", "y_ptr", "dx_ptr"), "bf16")
    assert_lean(compiled(softmax.backward_kernel, gpu, pointers, constants, block.warps), block)


@each_gpu
@pytest.mark.parametrize(("dim", "rotary", "interleaved"), [(128, 128, False), (128, 128, True), (80, 32, False)])
def test_rope(dim: int, rotary: int, interleaved: bool, gpu: str) -> None:
    constants = rope.constants(32, dim, Rope(rotary, interleaved, False, False, "triton"))
    pointers = dict.fromkeys(("q_ptr", "k_ptr", "q_out_ptr", "k_out_ptr"), "bf16")
    pointers |= dict.fromkeys(("cos_ptr", "sin_ptr"), "fp32")
    block = Blocks(constants["HEADS"], constants["HALF"], True, rope.warps(constants))
    assert_lean(compiled(rope.rope_kernel, gpu, pointers, constants, block.warps), block)
