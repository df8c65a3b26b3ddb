"""Kernels built ahead of time are those that a call asks for, their parameters lie where the machine code reads them,
and a process that has the folder compiles nothing."""

from __future__ import annotations

import ctypes
import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver as tritons_driver

import flashkernels as fk
from flashkernels.aot import build, manifest, work
from flashkernels.aot.blank import empty
from flashkernels.aot.experts import Experts
from flashkernels.aot.projections import Projection
from flashkernels.aot.vocabulary import Accepting, Loss, Sampling
from flashkernels.aot.work import Appending, Rotation, Rows, attention_tensors, programs
from flashkernels.attention.problem import AttentionProblem, BackwardProblem
from flashkernels.attention.triton import forward
from flashkernels.decode.problem import DecodeProblem
from flashkernels.hardware import lookup
from flashkernels.jit import cache, driver, launch, notes, nvrtc, specialised
from flashkernels.jit.counters import Address
from flashkernels.moe.triton import route

CALL = AttentionProblem(batch=2, seq_q=256, seq_k=256, heads=4, kv_heads=2, head_dim=72, causal=True)
# rows that are no multiple of 16 bytes, in pages, which are not copied
ODD = replace(CALL, head_dim=70, head_dim_v=70, varlen=True, page_size=16, total_q=512, total_k=512)
DECODE = DecodeProblem(batch=8, tokens=1, heads=32, kv_heads=8, head_dim=96, context=4096, page_size=16, row_bits=3072)
CASES = {
    "tma": (CALL, "rtx5090"), "pointers": (ODD, "h200"), "features": (replace(ODD, alibi=True, sinks=True), "a100"),
    "backward": (BackwardProblem(CALL, ("q", "k", "v")), "a100"), "decode": (DECODE, "a100"),
    "copies": (replace(CALL, head_dim=70, head_dim_v=70), "a100"),
    "norm": (Rows("rms_norm", 1000, residual=True, backward=True), "h200"), "rope": (Rotation(8, 2, 128), "a100"),
    "append": (Appending(8, 128, 16, format="int8", rotary=True), "h200"), "sample": (Sampling(32000, 8), "h200"),
    "linear": (Projection(256, 512, 256, activation="swiglu", backward=True), "h200"),
    "norm_linear": (Projection(8, 512, 256, bias=True, normed=True), "h200"),
    "accept": (Accepting(32000, 8, 4, drawn=True, tree=True), "h200"),
    "loss": (Loss(32000, 512, backward=True), "a100"), "moe": (Experts(64, 512, 256, 8, 2, backward=True), "h200"),
}  # fmt: skip
EIGHTS = [["tt.divisibility", 8]]
NARROW = re.compile(r"(ld|st)\.global\S*\.b16")
BYTES = {"u64": 8, "u32": 4, "f32": 4, "u8": 1, "b8": 1, "b64": 8, "b32": 4, "s32": 4, "s64": 8}


class OneGpu:
    """All that Triton's JIT asks of a driver before it launches."""

    def __init__(self, cc: int) -> None:
        self.cc = cc

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.cc, 32)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("FLASHKERNELS_CACHE", str(tmp_path / "kernels"))
    specialised._loaded.clear()
    specialised._programs.clear()
    yield tmp_path / "kernels"
    specialised._loaded.clear()


def test_the_installed_triton_is_supported() -> None:
    """A release that is not waits for every test of this file: till then its kernels go Triton's own, slower way."""
    assert specialised.SUPPORTED, f"triton {triton.__version__} is none of {', '.join(specialised.KNOWN)}"


@pytest.mark.parametrize("name", CASES)
def test_programs_are_those_that_the_jit_compiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's own JIT, with the same arguments, makes the same source, options and attributes, but for those of
    multiples of 8: of these it does not tell."""
    problem, gpu = CASES[name]
    asked: list[tuple[Any, ...]] = []
    ours: list[specialised.TritonProgram] = []

    def compile(self: Any, key: Any, signature: Any, device: int, constexprs: Any, options: Any, *rest: Any) -> None:
        asked.append((signature, constexprs, rest[0], options))

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "_do_compile", compile)
    specialise = specialised.specialise

    def both(kernel: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], cc: int) -> Any:
        kernel.device_caches.clear()
        assert kernel.run(*arguments, grid=(1,), warmup=True, **keywords) is None
        kernel.device_caches.clear()
        ours.append(specialise(kernel, arguments, keywords, cc))
        return ours[-1]

    monkeypatch.setattr(specialised, "specialise", both)
    monkeypatch.setattr(tritons_driver, "_active", OneGpu(lookup(gpu).cc))
    found = programs(problem, lookup(gpu))
    assert {one.key for one in found if isinstance(one, specialised.TritonProgram)} == {one.key for one in ours}
    assert len(ours) == len(asked) > 0
    for program, theirs in zip(ours, asked, strict=True):
        told = {place: [] if hint == EIGHTS else hint for place, hint in program.attributes.items()}
        assert (program.signature, program.constants, told, program.options) == theirs


@pytest.mark.parametrize("gpu", ["a100", "h200", "rtx5090"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_rows_of_a_multiple_of_8_are_read_by_16_bytes(gpu: str, deterministic: bool) -> None:
    """Contiguous heads of 72 columns are 144 bytes apart; Triton by itself would read them 2 bytes at a time."""
    backward = BackwardProblem(CALL, ("q", "k", "v"), "triton", deterministic=deterministic)
    found = [one for one in programs(backward, lookup(gpu)) if isinstance(one, specialised.TritonProgram)]
    # rows, dK and dV, dQ (of sums, or by a pass of its own), and where it is Triton's the forward
    assert len(found) == (3 if gpu == "h200" else 4) and all(EIGHTS in one.attributes.values() for one in found)
    assert [one.label for one in found if NARROW.search(one.made.asm["ptx"])] == []


def test_other_rows_are_read_an_element_at_a_time() -> None:
    """So the test above can fail."""
    (odd,) = programs(ODD, lookup("a100"))
    assert isinstance(odd, specialised.TritonProgram) and NARROW.search(odd.made.asm["ptx"])


@pytest.mark.parametrize("gpu", ["h200", "a100"])
def test_odd_rows_are_copied_and_served_as_wider_ones(gpu: str) -> None:
    call = AttentionProblem(batch=1, seq_q=256, seq_k=256, heads=4, kv_heads=4, head_dim=97)
    found, wide = (programs(BackwardProblem(one, ("q", "k", "v")), lookup(gpu)) for one in (call, call.widened()))
    added = {one.key: one.label for one in found if one.key not in {other.key for other in wide}}
    assert len(found) == len(wide) + len(added)
    copies = [label.split(" (")[0].removesuffix(f" for sm_{lookup(gpu).cc}") for label in added.values()]
    assert copies == ["attention.triton.copy.copy_kernel"] * 2  # to 104 columns, and back


def declared(ptx: str) -> list[int]:
    """Bytes of each parameter of the kernel, as its PTX declares them."""
    head = re.search(r"\.entry \w+\((.*?)\)", ptx, re.DOTALL)
    assert head
    found = []
    for line in head[1].split(","):
        kind = re.search(r"\.param(?: \.align \d+)? \.(\w+)", line)
        count = re.search(r"\[(\d+)\]", line)
        assert kind, line
        found.append(BYTES[kind[1]] * (int(count[1]) if count else 1))
    return found


@pytest.mark.parametrize("name", sorted({*CASES} - {"features", "backward", "rope", "loss"}))
def test_parameters_lie_as_the_machine_code_declares_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, gpu = CASES[name]
    monkeypatch.setattr(cache, "store", lambda *_: None)
    monkeypatch.setattr(cache, "load", lambda *_: None)
    for program in programs(problem, lookup(gpu)):
        if isinstance(program, nvrtc.CudaProgram):  # its struct is compared by a test of its own
            continue
        assert isinstance(program, specialised.TritonProgram)
        program.build()
        sizes = declared(program.made.asm["ptx"])
        found = specialised.layout(list(program.signature.values()))
        ends = (*found.offsets[1:], found.size)
        for at, end, size in zip(found.offsets, ends, sizes, strict=True):
            assert end - at >= size and at % min(size, 64) == 0
        letters = re.findall(r"128s|[a-zA-Z]", re.sub(r"\d+x", "", found.packing().format[1:]))
        assert [struct.calcsize(f"<{letter}") for letter in letters] == sizes


def launched_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are launched as if their tensors, which are on the CPU, were on a GPU."""
    make = launch.Launcher.__init__

    def made(self: launch.Launcher, *args: Any, **named: Any) -> None:
        make(self, *args, **named)
        self.device = 0

    monkeypatch.setattr(launch.Launcher, "__init__", made)


class Starts:
    """Kernels that note the bytes of their parameters instead of being launched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[tuple[Any, ...]] = []
        self.maps: list[tuple[Any, ...]] = []

        def starter(kernel: Any, block: int, parameters: list[int]) -> Any:
            def start(grid: int, stream: int) -> None:
                self.bytes = [ctypes.string_at(at, 8) for at in parameters]
                self.found.append((kernel, grid, block, stream, self.bytes))

            return start

        def encoded(*arguments: Any) -> bytes:
            self.maps.append(arguments)
            return len(self.maps).to_bytes(128, "little")

        monkeypatch.setattr(driver.Kernel, "starter", starter)
        monkeypatch.setattr(driver, "encoded_map", encoded)
        monkeypatch.setattr(driver, "version", lambda: 13020)
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (12, 0))


def test_a_launch_from_the_folder_passes_every_argument(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = lookup("rtx5090")
    (program,) = programs(CALL, gpu)
    assert isinstance(program, specialised.TritonProgram)
    program.build()
    specialised._programs.clear()  # as another process would find the folder
    starts = Starts(monkeypatch)
    tensors = attention_tensors(CALL)
    launched_on_a_gpu(monkeypatch)
    with fk.strict():
        run = forward.plan(CALL, gpu, tensors)
        run(tensors, 0.25, 0.0)
        run(tensors, 0.5, 0.0)
    assert len(starts.found) == 2
    kernel, grid, block, stream, _ = starts.found[0]
    facts = json.loads(cache.load(program.key, ".json") or b"")
    assert (kernel.name, kernel.shared, block, stream) == ("forward_kernel", facts["shared"], facts["threads"], 7)
    assert grid == 2 * 4 * -(-256 // program.constants[program.kernel.arg_names.index("BLOCK_M"),])
    names = [name for name, kind in program.signature.items() if kind != "constexpr"]
    flat = [part for name in names for part in ([name] * 9 if "_desc" in name else [name])]  # a map, 4 sizes, 4 strides
    values = dict(zip(flat, starts.bytes[:-2], strict=True))
    assert struct.unpack("f4x", values["scale"])[0] == pytest.approx(0.5 * 1.4426950408889634)
    assert struct.unpack("q", values["stride_ks"]) == (2 * 72,) and struct.unpack("i4x", values["seq_q"]) == (256,)
    assert starts.bytes[-2:] == [bytes(8)] * 2
    assert len(starts.maps) == len(program.signature["k_desc0"] and facts["maps"])  # made once, used twice
    _, dtype, sizes, strides, box, _, _ = starts.maps[0]
    assert (dtype, sizes, strides) == (9, (72, 2, 256, 2), (144, 288, 73728)) and box[0] == 64 and box[2] % 16 == 0

    made = len(starts.maps)
    here, there = torch.zeros(2, 2, 256, 2, 72, dtype=torch.bfloat16).unbind(0)
    for k in (here, there, here):
        with fk.strict():
            run(tensors._replace(k=k), 0.5, 0.0)
        values = dict(zip(flat, starts.bytes[:-2], strict=True))
        assert int.from_bytes(values["k_ptr"], "little") == k.data_ptr()
        (mine,) = {i for i, m in enumerate(starts.maps, 1) if m[0] == k.data_ptr() and m[4][0] == 64}
        assert dict(zip(reversed(flat), reversed(starts.bytes[:-2]), strict=True))["k_desc0"][0] == mine
    assert len(starts.maps) == made + 2 * sum(name.startswith("k_desc") for name in names)  # none is made again


def test_a_layer_of_experts_is_launched_from_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its routing counts programs by a counter of which it has the address alone."""
    layer, gpu = Experts(3, 64, 32, 4, 2), lookup("rtx5090")
    for program in programs(layer, gpu):
        program.build()
    starts = Starts(monkeypatch)
    monkeypatch.setattr(route, "zeros", lambda count, dtype, device: Address(0x7F0000001000, dtype))
    launched_on_a_gpu(monkeypatch)
    with fk.strict():
        for run in work.RECIPES[Experts](layer, gpu):
            run()
    names = [kernel.name for kernel, *_ in starts.found]
    assert names == ["choose_kernel", "gemm_kernel", "gemm_kernel", "combine_kernel"]
    assert (0x7F0000001000).to_bytes(8, "little") in starts.found[0][4]


def test_a_kernel_that_may_start_early_is_launched_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver gets a CUlaunchConfig as cuda.h declares it: 56 bytes, an attribute of 72."""
    calls = []

    class Cuda:
        def cuLaunchKernelEx(self, config: Any, handle: Any, parameters: Any, extra: Any) -> int:
            at = ctypes.addressof(config._obj)
            raw = ctypes.string_at(at, 56)
            grid, block, (shared,) = struct.unpack_from("3I", raw), struct.unpack_from("3I", raw, 12), raw[24:25]
            stream, attributes, count = struct.unpack_from("QQI", raw, 32)
            attribute = struct.unpack("ii4i48x", ctypes.string_at(attributes, 72))
            calls.append((grid, block, shared, stream, count, attribute[:3], handle.value, [*parameters._obj]))
            return 0

    monkeypatch.setattr(driver, "launcher", Cuda)
    assert ctypes.sizeof(driver.Config) == 56 and ctypes.sizeof(driver.Attribute) == 72
    monkeypatch.setattr(driver.Kernel, "prepare", lambda self: ctypes.c_void_p(0x700000002000))
    start = driver.Kernel(b"", "kernel", 64, early=True).starter(128, [0x700000003000])
    for grid in (5, 6):
        start(grid, 0x7FFF00001000)
    rest = ((128, 1, 1), 64, 0x7FFF00001000, 1, (6, 0, 1), 0x700000002000, [0x700000003000])
    assert calls == [((5, 1, 1), *rest), ((6, 1, 1), *rest)]


def test_a_first_call_needs_nothing_of_tritons_driver(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is a module in C, made when it is first asked for anything."""
    starts = Starts(monkeypatch)
    launched_on_a_gpu(monkeypatch)
    monkeypatch.setattr(tritons_driver, "_active", None)
    tensors = attention_tensors(CALL)
    run = forward.plan(CALL, lookup("rtx5090"), tensors)
    run(tensors, 0.25, 0.0)
    run(tensors, 0.25, 0.0)
    assert len(starts.found) == 2 and tritons_driver._active is None
    assert len({id(kernel) for kernel, *_ in starts.found}) == 1


def test_strict_mode_names_what_is_missing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Starts(monkeypatch)
    launched_on_a_gpu(monkeypatch)
    monkeypatch.setattr(specialised.TritonProgram, "in_tritons_cache", lambda self: False)
    tensors = attention_tensors(CALL)
    run = forward.plan(CALL, lookup("rtx5090"), tensors)
    monkeypatch.setenv("FLASHKERNELS_STRICT", "1")
    with pytest.raises(fk.CompileStall, match=r"forward_kernel for sm_120 \(DIM=72.*flashkernels compile"):
        run(tensors, 0.25, 0.0)


def test_tritons_own_cache_counts_as_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    (program,) = programs(Rows("softmax", 64), lookup("a100"))
    assert isinstance(program, specialised.TritonProgram)
    assert not program.in_tritons_cache()
    program.build()
    assert program.in_tritons_cache()


def test_noting_neither_compiles_nor_launches(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "compile", None)
    assert [type(one).__name__ for one in programs(CALL, lookup("h200"))] == ["CudaProgram"]
    assert [one.label.split(" ")[0] for one in programs(DECODE, lookup("h200"))] == ["decode.cu", "rows.cu"]
    assert len(programs(BackwardProblem(CALL, ("q", "k", "v")), lookup("a100"))) == 4
    assert notes.current() is None and not folder.exists()


def test_keys_do_not_depend_on_what_else_the_process_has_seen() -> None:
    """As those of Triton do: a folder would be of no use to a process that makes its calls in another order."""
    code = """
import sys
from flashkernels.aot.work import *
from flashkernels.hardware import lookup
call = AttentionProblem(batch=2, seq_q=256, seq_k=256, heads=4, kv_heads=2, head_dim=72, causal=True)
decode = DecodeProblem(batch=8, tokens=1, heads=32, kv_heads=8, head_dim=128, context=4096, page_size=16, row_bits=4096)
works = [call, BackwardProblem(call, ("q",)), decode, Rows("rms_norm", 64, backward=True), Rotation(4, 2, 64)]
for work in works[:: int(sys.argv[1])]:
    for program in programs(work, lookup("a100")):
        print(program.key)
"""
    runs = [
        subprocess.run([sys.executable, "-c", code, step], capture_output=True, text=True, check=True, timeout=120)
        for step in ("1", "-1", "2")
    ]
    forward, backward, few = ({*done.stdout.split()} for done in runs)
    assert forward == backward and len(forward) == 10 and few < forward


def test_a_change_in_what_a_kernel_calls_changes_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
import triton, triton.language as tl
FACTOR = tl.constexpr(2)
@triton.jit
def inner(x):
    return x * FACTOR
@triton.jit
def outer(x):
    return inner(x) + tl.sum(x)
@triton.jit
def kernel(p):
    tl.store(p, outer(tl.load(p)))
"""
    monkeypatch.syspath_prepend(str(tmp_path))
    changes = [("", ""), ("# Comments\n", ""), ("x * FACTOR", "x + FACTOR"), ("constexpr(2)", "constexpr(3)")]
    keys = []
    for i, (old, new) in enumerate(changes):
        (tmp_path / f"changing{i}.py").write_text(text.replace(old, new) if old else text)
        module = __import__(f"changing{i}")
        keys.append([*specialised._texts(module.kernel, set())][1:])
        keys[-1] = [part for part in keys[-1] if not part.startswith("changing")]
    assert keys[0] == keys[1] and keys[0] != keys[2] and keys[0] != keys[3]


def test_decode_kernels_of_hopper_are_the_same_for_all_batches_contexts_and_pages_but_not_for_other_heads() -> None:
    def keys(**changes: Any) -> set[str]:
        return {program.key for program in programs(replace(DECODE, **changes), lookup("h200"))}

    assert keys() == keys(batch=64) == keys(context=512) == keys(page_size=64)
    small = keys(head_dim=64, head_dim_v=64, row_bits=2048)
    assert len(set.union(keys(), keys(heads=16, kv_heads=4), keys(heads=64), keys(dtype="fp16"), small)) == 10
    assert keys(tokens=2).isdisjoint(keys())  # several tokens are Triton's


def test_keys_tell_kernels_apart() -> None:
    base = Rows("rms_norm", 4096)
    calls = (base, replace(base, residual=True), replace(base, dtype="fp16"), replace(base, width=4095))
    keys = {one.key for call in calls for gpu in ("h200", "a100") for one in programs(call, lookup(gpu))}
    assert len(keys) == 8
    assert programs(base, lookup("h200"))[0].key == programs(base, lookup("h100"))[0].key
    assert programs(replace(base, width=8192 // 2), lookup("h200"))[0].key in keys


def test_a_folder_built_here_leaves_nothing_to_compile_in_another_process(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    calls = [CALL, DECODE, Rows("softmax", 100), Rotation(4, 2, 64), Loss(1000), Experts(1, 64, 32, 4, 1)]
    wanted = build.kernels(calls, [lookup("h200"), lookup("rtx5090")])
    built = list(build.build(wanted, folder, jobs=2))
    assert [one.error for one in built] == [""] * len(wanted) and len(wanted) == 20
    found = manifest.read(folder)
    assert found.gpus == ["h200", "rtx5090"] and manifest.faults(folder, found) == []
    code = """
import triton
from flashkernels.aot.work import *
from flashkernels.hardware import lookup
from flashkernels.jit import nvrtc, cache
triton.compile = None
nvrtc.Compiler.run = None
call = AttentionProblem(batch=2, seq_q=256, seq_k=256, heads=4, kv_heads=2, head_dim=72, causal=True)
decode = DecodeProblem(batch=8, tokens=1, heads=32, kv_heads=8, head_dim=96, context=4096, page_size=16, row_bits=3072)
for gpu in map(lookup, ("h200", "rtx5090")):
    for work in (call, decode, Rows("softmax", 100), Rotation(4, 2, 64), Loss(1000), Experts(1, 64, 32, 4, 1)):
        for program in programs(work, gpu):
            assert program.cached(), program.label
            program.build()
(missing,) = programs(Rows("softmax", 100, "fp16"), lookup("h200"))
assert not missing.cached() and cache.sealed()
for one in (call, decode):
    for run in RECIPES[type(one)](one, lookup("h200"), only="hopper"):
        run()  # its plan compiles, or finds
print("nothing was compiled")
"""
    environment = {**os.environ, "FLASHKERNELS_CACHE": str(folder), "FLASHKERNELS_STRICT": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "nothing was compiled\n", done.stderr


def test_meta_tensors_pose_the_problem() -> None:
    problem = replace(CALL, varlen=True, total_q=300, total_k=500, alibi=True)
    tensors = attention_tensors(problem)
    assert tensors.q.shape == (300, 4, 72) and tensors.k.shape == (500, 2, 72) and tensors.alibi_slopes is not None
    assert empty(3, dtype="bf16").is_meta
    with pytest.raises(TypeError, match="AttentionProblem"):
        work.programs("attention", lookup("h200"))


def test_a_second_launch_writes_what_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pointers always, numbers where their tuple is another, and the map of a tensor where its address is."""
    starts = Starts(monkeypatch)
    form = {"block_size": [16, 64], "elem_size": 2, "elem_type": 9, "swizzle": 3}
    signature = ["*bf16", "constexpr", "tensordesc<bf16[16,64]>", "*bf16", "i32", "constexpr", "i64", "fp32"]
    facts = {"name": "kernel", "shared": 0, "early": False, "threads": 128, "signature": signature, "maps": [form]}
    x, y, z = (torch.zeros(32, 128, dtype=torch.bfloat16) for _ in range(3))

    def seen(base: torch.Tensor) -> launch.Descriptor:
        return launch.Descriptor(base, (32, 128), (128, 1), [16, 64])

    numbers = (3, 1, 5, 0.5)
    parameters = specialised.Parameters(specialised.Loaded(b"", facts), (x, None, seen(y), z), numbers)

    def launched(*arguments: Any) -> list[bytes]:
        parameters.launch(7, 11, *arguments)
        return starts.bytes

    def number(value: int) -> bytes:
        return value.to_bytes(8, "little")

    first = launched((x, None, seen(y), z), numbers)
    assert [first[0], first[1], first[6]] == [number(x.data_ptr()), number(1), number(z.data_ptr())]
    assert struct.unpack("<i4x", first[7]) == (3,) and struct.unpack("<q", first[8]) == (5,)
    assert struct.unpack("<f4x", first[9]) == (0.5,) and first[10:] == [bytes(8)] * 2
    assert launched((z, None, seen(y), x), numbers)[0] == number(z.data_ptr()) and len(starts.maps) == 1
    again = launched((x, None, seen(z), y), (4, 1, 6, 0.25))
    assert [again[1], again[6], again[8]] == [number(2), number(y.data_ptr()), number(6)] and len(starts.maps) == 2
    assert launched((x, None, seen(y), z), (4, 1, 6, 0.25))[1] == number(1) and len(starts.maps) == 2  # kept
    other = launched((x, None, launch.Descriptor(y, (16, 128), (256, 1), [16, 64]), z), numbers)
    assert other[1] == number(3) and struct.unpack("<2i", other[2]) == (16, 128)
    assert parameters.addresses[1] % 64 == 0  # where the driver wants a map


@pytest.mark.parametrize(("rows", "release", "cleared"), [(511, 13010, 1), (512, 13010, 0), (511, 13020, 0)])
def test_maps_of_small_tensors_are_mended(
    rows: int, release: int, cleared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to CUDA 13.1, in those of less than 128 KiB, from the first element to the last: bit 21 of the second word."""
    monkeypatch.setattr(driver, "encoded_map", lambda *_: bytes([255] * 128))
    monkeypatch.setattr(driver, "version", lambda: release)
    form = {"block_size": [16, 64], "elem_size": 2, "elem_type": 9, "swizzle": 3}
    one = specialised.Map(form, 0, ctypes.create_string_buffer(256), 0)
    words = struct.unpack("<16Q", one.encoded(0x1000, (rows, 128), (128, 1)))
    full = 2**64 - 1
    assert words == (full, full - (cleared << 21), *[full] * 14)
