"""Launching by ctypes: against a driver made of C stubs everywhere, against the real one where there is a GPU."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flashkernels.jit import driver, nvrtc

# Two devices; a thread has no context until it is given one. A handle is wider than 32 bits, as real ones are.
STUBS = """
#include <stdint.h>
#include <string.h>
#define LIBRARY ((void*)0x700000001000)
#define KERNEL ((void*)0x700000002000)
_Thread_local int device = -1;
int loads, allowed[2], attributes, launches;
struct { unsigned grid[3], block[3], shared; void* stream; int device, value; } last;

int cuInit(unsigned flags) { return 0; }
int cuCtxGetDevice(int* out) { *out = device; return device < 0 ? 201 : 0; }
int cuDeviceGet(int* out, int index) { *out = index; return 0; }
int cuDevicePrimaryCtxRetain(void** context, int index) { *context = (void*)(0x700000003000 + index); return 0; }
int cuCtxSetCurrent(void* context) { device = (intptr_t)context - 0x700000003000; return 0; }
int cuGetErrorName(int code, const char** out) { *out = code == 1 ? "CUDA_ERROR_INVALID_VALUE" : 0; return !*out; }
int cuGetErrorString(int code, const char** out) { *out = code == 1 ? "invalid argument" : 0; return !*out; }
int cuLibraryLoadData(void** out, const char* code, void* a, void* b, unsigned n, void* c, void* d, unsigned m) {
  loads++;
  *out = LIBRARY;
  return strcmp(code, "cubin") != 0 || a || b || n || c || d || m;
}
int cuLibraryGetKernel(void** out, void* library, const char* name) {
  *out = KERNEL;
  return library != LIBRARY || strcmp(name, "kernel") != 0;
}
int cuKernelSetAttribute(int attribute, int value, void* kernel, int on) {
  attributes++;
  allowed[on] = value;
  return attribute != 8 || kernel != KERNEL;
}
int cuKernelGetFunction(void** out, void* kernel) { *out = kernel; return device < 0 ? 201 : kernel != KERNEL; }
struct Config { unsigned grid[3], block[3], shared; void *stream, *attributes; unsigned count; };
int cuLaunchKernelEx(struct Config* config, void* kernel, void** parameters, void** extra) {
  if (device < 0) return 201;
  if (kernel != KERNEL || extra || config->count) return 1;
  if (config->shared > allowed[device] || config->block[0] > 1024) return 1;
  launches++;
  memcpy(&last, config, 28);
  last.stream = config->stream, last.device = device, last.value = *(int*)parameters[0];
  return 0;
}
int cuTensorMapEncodeTiled(void* map, int dtype, unsigned rank, void* pointer, uint64_t* sizes, uint64_t* strides,
                           uint32_t* box, uint32_t* steps, int interleave, int swizzle, int promotion, int fill) {
  if ((uintptr_t)map % 64 || (uintptr_t)pointer % 16 || interleave || fill) return 1;
  uint64_t out[16] = {(uintptr_t)pointer, dtype, rank, swizzle, promotion};
  for (unsigned i = 0; i < rank; i++) {
    if (steps[i] != 1) return 1;
    out[5] = out[5] * 100 + sizes[i];
    out[6] = out[6] * 100 + box[i];
    if (i + 1 < rank) out[7] = out[7] * 100 + strides[i];
  }
  memcpy(map, out, 128);
  return 0;
}
"""
STREAM = 0x7FFF_FFFF_1000


class Last(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("device", ctypes.c_int), ("value", ctypes.c_int),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or sys.platform != "linux":
        pytest.skip("needs a C compiler on Linux")
    folder = tmp_path_factory.mktemp("stubs")
    (folder / "stubs.c").write_text(STUBS)
    library = str(folder / "libstubs.so")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, str(folder / "stubs.c")], check=True)
    return library


@pytest.fixture
def fake(stubs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    """A driver of stubs in the real one's place, with counters that start at zero."""
    copy = shutil.copy(stubs, tmp_path)
    monkeypatch.setattr(driver, "LIBRARY", str(copy))
    for name in ("driver", "launcher", "tensor_map"):
        monkeypatch.setattr(driver, name, _afresh(getattr(driver, name)))
    return ctypes.CDLL(str(copy))


def _afresh(cached: Callable[..., object]) -> Callable[..., object]:
    """The same cached function with nothing in its cache."""
    return functools.cache(cached.__wrapped__)


def count(fake: ctypes.CDLL, name: str) -> int:
    return ctypes.c_int.in_dll(fake, name).value


def in_a_thread(action: Callable[[], None]) -> None:
    """Runs `action` in a thread of its own, which has no CUDA context yet; raises what it raises."""
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def test_a_launch_passes_everything_on(fake: ctypes.CDLL) -> None:
    kernel = driver.Kernel(b"cubin", "kernel", 100_000)
    value = ctypes.c_int(42)
    assert count(fake, "loads") == 0
    kernel.launch(7, 128, STREAM, ctypes.addressof(value))
    last = Last.in_dll(fake, "last")
    assert (*last.grid, *last.block) == (7, 1, 1, 128, 1, 1)
    assert (last.shared, last.stream, last.device, last.value) == (100_000, STREAM, 0, 42)
    value.value = 43
    kernel.launch(2**31 - 1, 1024, 0, ctypes.addressof(value))
    last = Last.in_dll(fake, "last")
    assert (last.grid[0], last.stream, last.value) == (2**31 - 1, None, 43)
    assert [count(fake, name) for name in ("loads", "attributes", "launches")] == [1, 1, 2]


def test_each_device_is_prepared_once(fake: ctypes.CDLL) -> None:
    kernel = driver.Kernel(b"cubin", "kernel", 100_000)
    value = ctypes.c_int(1)
    for device in (0, 1, 1, 0):
        fake.cuCtxSetCurrent(ctypes.c_void_p(0x700000003000 + device))
        kernel.launch(1, 32, STREAM, ctypes.addressof(value))
        assert Last.in_dll(fake, "last").device == device
    assert [count(fake, name) for name in ("loads", "attributes", "launches")] == [1, 2, 4]


def test_a_thread_without_a_context_gets_one(fake: ctypes.CDLL) -> None:
    kernel = driver.Kernel(b"cubin", "kernel", 0)
    value = ctypes.c_int(1)
    for _ in range(3):
        in_a_thread(lambda: kernel.launch(1, 32, STREAM, ctypes.addressof(value)))
    assert [count(fake, name) for name in ("loads", "attributes", "launches")] == [1, 0, 3]


def test_several_kernels_of_one_library_load_it_once(fake: ctypes.CDLL) -> None:
    library = driver.Library(b"cubin")
    value = ctypes.c_int(1)
    kernels = [driver.Kernel(library, "kernel", shared) for shared in (0, 1024, 65536)]
    threads = [
        threading.Thread(target=kernel.launch, args=(1, 32, STREAM, ctypes.addressof(value))) for kernel in kernels * 4
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [count(fake, name) for name in ("loads", "launches")] == [1, 12]


def test_kernels_of_one_name_keep_the_most_shared_memory(fake: ctypes.CDLL) -> None:
    library = driver.Library(b"cubin")
    value = ctypes.c_int(1)
    large, small = (driver.Kernel(library, "kernel", shared) for shared in (65536, 1024))
    for kernel in (large, small, large):
        kernel.launch(1, 32, STREAM, ctypes.addressof(value))
    assert [count(fake, name) for name in ("attributes", "launches")] == [1, 3]


def test_errors_have_the_drivers_words(fake: ctypes.CDLL) -> None:
    with pytest.raises(RuntimeError, match=r"kernel, 1 blocks of 2048 threads.*CUDA_ERROR_INVALID_VALUE.*invalid arg"):
        driver.Kernel(b"cubin", "kernel", 64).launch(1, 2048, STREAM, ctypes.addressof(ctypes.c_int(1)))
    with pytest.raises(RuntimeError, match="cuLibraryGetKernel: CUDA_ERROR_INVALID_VALUE"):
        driver.Kernel(b"cubin", "other", 0).launch(1, 32, STREAM, 0)
    with pytest.raises(RuntimeError, match="cuLibraryLoadData"):
        driver.Kernel(b"not a cubin", "kernel", 0).prepare()
    assert driver.words(999) == "unknown error (999): "


@pytest.mark.parametrize(
    ("arguments", "encoded"),
    [
        ((STREAM, "bf16", (64, 32), (16,), (8, 4), 128), [9, 2, 3, 3, 6432, 804, 16]),
        ((STREAM, "fp16", (1, 2, 3, 4, 5), (16, 32, 48, 64), (5, 4, 3, 2, 1), 64),
         [6, 5, 2, 3, 102030405, 504030201, 16324864]),
        ((STREAM, "fp8", (64,), (), (8,), 0), [0, 1, 0, 3, 64, 8, 0]),
        ((STREAM, "fp32", (64, 1), (16,), (8, 1), 32), [7, 2, 1, 3, 6401, 801, 16]),
    ],
    ids=["bf16", "fp16", "fp8", "fp32"],
)  # fmt: skip
def test_a_tensor_map_passes_everything_on(
    arguments: tuple[int, str, tuple[int, ...], tuple[int, ...], tuple[int, ...], int],
    encoded: list[int],
    fake: ctypes.CDLL,
) -> None:
    found = driver.tensor_map(*arguments)
    assert len(found) == 128
    assert list((ctypes.c_uint64 * 16).from_buffer_copy(found)) == [STREAM, *encoded, *[0] * 8]
    assert driver.tensor_map(*arguments) is found


def test_a_tensor_map_that_the_driver_refuses_names_every_argument(fake: ctypes.CDLL) -> None:
    with pytest.raises(RuntimeError) as caught:
        driver.tensor_map(0x1008, "bf16", (64, 32), (128,), (64, 16), 128)
    message = str(caught.value)
    assert "pointer=0x1008, dtype='bf16', sizes=(64, 32), strides_bytes=(128,)" in message
    assert "box=(64, 16), swizzle_bytes=128" in message
    assert "CUDA_ERROR_INVALID_VALUE" in message and "multiples of 16 bytes" in message


@pytest.mark.parametrize(
    ("dtype", "sizes", "strides", "box", "swizzle"),
    [
        ("bf16", (), (), (), 0),
        ("bf16", (8,) * 6, (16,) * 5, (8,) * 6, 0),
        ("bf16", (8, 8), (2, 16), (8, 8), 0),
        ("bf16", (8, 8), (16,), (8,), 0),
        ("int4", (8, 8), (16,), (8, 8), 0),
        ("bf16", (8, 8), (16,), (8, 8), 16),
    ],
    ids=["0d", "6d", "strides", "box", "dtype", "swizzle"],
)
def test_a_tensor_map_that_makes_no_sense_is_refused_without_the_driver(
    dtype: str, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], swizzle: int
) -> None:
    with pytest.raises(ValueError, match=r"tensor map has|is one of"):
        driver.tensor_map(0, dtype, sizes, strides, box, swizzle)


def test_maps_of_a_signature_are_kept_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "MOST_KEPT", 3)
    known = driver.Kept()
    for n in range(8):
        known[n, n] = bytes([n])
        assert known[n, n] == bytes([n]) and len(known) <= 3


def test_without_a_driver_only_the_use_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "LIBRARY", "libno-such-cuda.so.1")
    monkeypatch.setattr(driver, "driver", _afresh(driver.driver))
    kernel = driver.Kernel(b"cubin", "kernel", 0)
    with pytest.raises(RuntimeError, match=r"NVIDIA driver cannot be loaded: libno-such-cuda"):
        kernel.launch(1, 32, 0, 0)


# On a GPU.

KERNELS = """
struct Fill { float* out; int count; float value; };
extern "C" __global__ void fill(const __grid_constant__ Fill p) {
  extern __shared__ float shared[];
  shared[threadIdx.x * (DYNAMIC / 4 / 128)] = p.value;
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < p.count) p.out[i] = shared[threadIdx.x * (DYNAMIC / 4 / 128)] + i;
}

struct alignas(64) Map { char bytes[128]; };
struct Copy { Map map; float* out; };
// One TMA box of 8 x 4 floats at (-4, 1), as it lands in shared memory.
extern "C" __global__ void copy(const __grid_constant__ Copy p) {
#if __CUDA_ARCH__ >= 900
  __shared__ alignas(128) float box[32];
  __shared__ unsigned long long barrier;
  unsigned there = __cvta_generic_to_shared(&barrier), to = __cvta_generic_to_shared(box);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(there));
    asm volatile("fence.proxy.async.shared::cta;");
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 128;" ::"r"(there));
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
        ::"r"(to), "l"(&p.map), "r"(-4), "r"(1), "r"(there) : "memory");
  }
  __syncthreads();
  for (unsigned done = 0; !done;)
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], 0; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done) : "r"(there) : "memory");
  p.out[threadIdx.x] = box[threadIdx.x];
#endif
}
"""
DYNAMIC = 96 * 1024


class Fill(ctypes.Structure):
    _fields_ = [("out", ctypes.c_void_p), ("count", ctypes.c_int), ("value", ctypes.c_float)]


class Copy(ctypes.Structure):
    _fields_ = [("map", ctypes.c_ubyte * 128), ("out", ctypes.c_void_p), ("padding", ctypes.c_ubyte * 56)]


def cubin() -> bytes:
    major, minor = torch.cuda.get_device_capability()
    return nvrtc.compile("kernels.cu", KERNELS, {}, f"sm_{major}{minor}", [f"-DDYNAMIC={DYNAMIC}"])


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_kernels_of_the_gpu_tests_compile(arch: str) -> None:
    assert nvrtc.compile("kernels.cu", KERNELS, {}, arch, [f"-DDYNAMIC={DYNAMIC}"])


@pytest.mark.gpu
def test_a_kernel_fills_an_array_on_a_stream_of_its_own() -> None:
    kernel = driver.Kernel(cubin(), "fill", DYNAMIC)
    stream = torch.cuda.Stream()
    count = 100_000
    with torch.cuda.stream(stream):
        out = torch.zeros(count + 1, device="cuda")
        for value in (1.0, 0.5):
            parameters = Fill(out.data_ptr(), count, value)
            kernel.launch(-(-count // 128), 128, stream.cuda_stream, ctypes.addressof(parameters))
    stream.synchronize()
    expected = torch.arange(count + 1, device="cuda") + 0.5
    expected[-1] = 0
    assert torch.equal(out, expected)


@pytest.mark.gpu
def test_a_thread_that_has_not_used_cuda_launches_on_the_default_stream() -> None:
    kernel = driver.Kernel(cubin(), "fill", DYNAMIC)
    out = torch.zeros(128, device="cuda")
    parameters = Fill(out.data_ptr(), 128, 1.0)
    for _ in range(2):  # the kernel is new in the first thread and known in the second
        out.zero_()
        torch.cuda.synchronize()
        in_a_thread(lambda: kernel.launch(1, 128, 0, ctypes.addressof(parameters)))
        torch.cuda.synchronize()
        assert out[-1].item() == 128


@pytest.mark.gpu
@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two GPUs")
def test_a_kernel_runs_on_a_second_device() -> None:
    kernel = driver.Kernel(cubin(), "fill", DYNAMIC)
    for device in (0, 1):
        with torch.cuda.device(device):
            out = torch.zeros(128, device="cuda")
            parameters = Fill(out.data_ptr(), 128, 1.0)
            kernel.launch(1, 128, torch.cuda.current_stream().cuda_stream, ctypes.addressof(parameters))
            assert out[-1].item() == 128


@pytest.mark.gpu
def test_a_launch_that_cannot_be_is_an_error_and_the_next_one_works() -> None:
    out = torch.zeros(128, device="cuda")
    parameters = Fill(out.data_ptr(), 128, 1.0)
    kernel = driver.Kernel(cubin(), "fill", DYNAMIC)
    with pytest.raises(RuntimeError, match="CUDA_ERROR_INVALID_VALUE"):
        kernel.launch(1, 4096, 0, ctypes.addressof(parameters))
    with pytest.raises(RuntimeError, match="CUDA_ERROR"):
        driver.Kernel(cubin(), "fill", 2**20).launch(1, 128, 0, ctypes.addressof(parameters))
    with pytest.raises(RuntimeError, match="CUDA_ERROR_NOT_FOUND"):
        driver.Kernel(cubin(), "no_such_kernel", 0).launch(1, 128, 0, ctypes.addressof(parameters))
    kernel.launch(1, 128, 0, ctypes.addressof(parameters))
    torch.cuda.synchronize()
    assert out[-1].item() == 128


@pytest.mark.gpu
def test_a_launch_is_captured_in_a_graph() -> None:
    kernel = driver.Kernel(cubin(), "fill", DYNAMIC)
    kernel.prepare()
    out = torch.zeros(128, device="cuda")
    parameters = Fill(out.data_ptr(), 128, 1.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.launch(1, 128, torch.cuda.current_stream().cuda_stream, ctypes.addressof(parameters))
    parameters.value = 5.0  # the driver has copied the parameters
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert out[-1].item() == 128


@pytest.mark.gpu
def test_a_launch_costs_a_few_microseconds() -> None:
    kernel = driver.Kernel(cubin(), "fill", DYNAMIC)
    out = torch.zeros(128, device="cuda")
    parameters = Fill(out.data_ptr(), 128, 1.0)
    stream, address = torch.cuda.current_stream().cuda_stream, ctypes.addressof(parameters)
    times = []
    for _ in range(50):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(20):
            kernel.launch(1, 128, stream, address)
        times.append((time.perf_counter() - start) / 20)
    best = min(times)
    print(f"launch: {best * 1e6:.2f} us")
    assert best < 20e-6


@pytest.mark.gpu
def test_tma_reads_a_box_and_zeros_outside_the_tensor() -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("TMA is there from sm_90")
    source = torch.arange(16 * 4, dtype=torch.float32, device="cuda").reshape(4, 16)
    out = torch.full((4, 8), -1.0, device="cuda")
    tensor_map = driver.tensor_map(source.data_ptr(), "fp32", (16, 4), (64,), (8, 4), 0)
    parameters = Copy((ctypes.c_ubyte * 128).from_buffer_copy(tensor_map), out.data_ptr())
    driver.Kernel(cubin(), "copy", 0).launch(1, 32, 0, ctypes.addressof(parameters))
    torch.cuda.synchronize()
    expected = torch.zeros(4, 8, device="cuda")
    expected[:3, 4:] = source[1:, :4]
    assert torch.equal(out, expected)


@pytest.mark.gpu
def test_what_the_real_driver_refuses_is_explained() -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("TMA is there from sm_90")
    for pointer, strides, box, swizzle in (
        (0x1008, (128,), (64, 16), 128),
        (0x1000, (130,), (64, 16), 128),
        (0x1000, (128,), (64, 512), 128),
        (0x1000, (128,), (64, 16), 64),
    ):
        with pytest.raises(RuntimeError, match="multiples of 16 bytes"):
            driver.tensor_map(pointer, "bf16", (64, 32), strides, box, swizzle)
