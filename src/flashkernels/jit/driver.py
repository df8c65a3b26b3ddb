"""Loads and launches cubins, and encodes TMA descriptors: the few calls of the CUDA driver that this takes, by ctypes.

Importing this needs no CUDA; the driver is loaded at the first use. Torch's context is the one used.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from ctypes import byref, c_int, c_void_p

LIBRARY = "libcuda.so.1"
# CU_LAUNCH_ATTRIBUTE_COOPERATIVE, _CLUSTER_DIMENSION and _PROGRAMMATIC_STREAM_SERIALIZATION
COOPERATIVE, CLUSTER, EARLY_START = 2, 4, 6
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
DTYPES = {"fp8": 0, "fp16": 6, "fp32": 7, "bf16": 9}  # CUtensorMapDataType; FP8 travels as bytes
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # CUtensorMapSwizzle
PROMOTE_256 = 3  # CU_TENSOR_MAP_L2_PROMOTION_L2_256B
MAP_BYTES, MAP_ALIGNMENT = 128, 64
MOST_KEPT = 128

Start = Callable[[int, int], None]  # of so many blocks, on this stream


class Library:
    """A cubin with any number of kernels, for every device. It is loaded at the first launch and never unloaded."""

    def __init__(self, cubin: bytes) -> None:
        self.cubin = cubin
        self.lock = threading.Lock()
        self.loaded: c_void_p | None = None
        self.allowed: dict[tuple[str, int], int] = {}  # dynamic shared memory, by kernel and device

    def handle(self, name: str) -> c_void_p:
        """The driver's CUkernel."""
        with self.lock:
            if self.loaded is None:
                library = c_void_p()
                nothing = (None, None, 0)
                call("cuLibraryLoadData", byref(library), self.cubin, *nothing, *nothing)
                self.loaded = library
        kernel = c_void_p()
        call("cuLibraryGetKernel", byref(kernel), self.loaded, name.encode())
        return kernel

    def allow(self, name: str, handle: c_void_p, shared: int, device: int) -> None:
        """Lets a kernel have so much dynamic shared memory; never less than another that uses it was allowed."""
        with self.lock:
            if shared > self.allowed.get((name, device), 0):
                call("cuKernelSetAttribute", MAX_DYNAMIC_SHARED, shared, handle, device)
                self.allowed[name, device] = shared


class Kernel:
    """One entry point (`extern "C"`), which takes one struct by value and `shared` bytes of dynamic shared memory."""

    def __init__(
        self, code: bytes | Library, name: str, shared: int, early: bool = False, cooperative: bool = False,
        cluster: int = 0,
    ) -> None:  # fmt: skip
        self.library = code if isinstance(code, Library) else Library(code)
        self.name, self.shared = name, shared
        self.attributes = [
            *([Attribute(COOPERATIVE, 0, (1,))] if cooperative else ()),  # all blocks run at once: they may wait
            *([Attribute(CLUSTER, 0, (cluster, 1, 1))] if cluster else ()),  # so many blocks are neighbours
            # may start before the kernel ahead of it ends, and waits for it itself
            *([Attribute(EARLY_START, 0, (1,))] if early else ()),
        ]
        self.lock = threading.Lock()
        self.entry: c_void_p | None = None  # the driver's CUkernel
        self.prepared: set[int] = set()  # devices
        self.last: tuple[tuple[int, int], Start] | None = None  # what `launch` started, by threads and parameters

    def launch(self, grid: int, block: int, stream: int, parameters: int) -> None:
        """Starts `grid` blocks of `block` threads on `stream` of the current device. One call at a time.

        `parameters` is the address of the struct. The driver copies it before this returns, with the GIL held.
        """
        kind, last = (block, parameters), self.last
        if last is None or last[0] != kind:
            last = self.last = (kind, self.starter(block, [parameters]))
        last[1](grid, stream)

    def starter(self, block: int, parameters: Sequence[int]) -> Start:
        """What starts `grid` blocks of `block` threads on `stream`, with the parameters at these addresses.

        All that the driver is told stays in memory, so a launch is one call of it with nothing to convert: 0.15 µs of
        ctypes where cuLaunchKernel, with eleven arguments, takes 0.4. One call at a time.
        """
        addresses = (c_void_p * len(parameters))(*parameters)
        attributes = (Attribute * len(self.attributes))(*self.attributes)
        config = Config(
            (1, 1, 1), (block, 1, 1), self.shared, None, ctypes.cast(attributes, ctypes.POINTER(Attribute)),
            len(self.attributes),
        )  # fmt: skip
        blocks, queue, launch = 1, 0, None  # the grid and stream of `config`, the driver's function with its arguments

        def start(grid: int, stream: int) -> None:
            nonlocal blocks, queue, launch
            if grid != blocks or stream != queue:
                config.grid[0], config.stream = grid, stream
                blocks, queue = grid, stream
            if launch is None:
                arguments = (byref(config), self.prepare(), byref(addresses), None)
                launch = functools.partial(launcher().cuLaunchKernelEx, *arguments)
            result = launch()
            if result:
                # The device is not asked for beforehand: that would nearly double what a launch costs in Python. On a
                # device that is new to the kernel, and in a thread that is new to CUDA, the second launch succeeds.
                self.prepare()
                result = launch()
            if result:
                what = f"{grid} blocks of {block} threads with {self.shared} bytes of dynamic shared memory"
                raise RuntimeError(f"cannot launch {self.name}, {what}: {words(result)}")

        return start

    def prepare(self) -> c_void_p:
        """Makes the kernel ready for the current device. A launch does it by itself; before a capture, call this."""
        device = current_device()
        with self.lock:
            if self.entry is None:
                self.entry = self.library.handle(self.name)
            if device not in self.prepared:
                self.library.allow(self.name, self.entry, self.shared, device)
                call("cuKernelGetFunction", byref(c_void_p()), self.entry)  # loads its code now, not at the launch
                self.prepared.add(device)
            return self.entry


@functools.lru_cache(maxsize=1024)
def tensor_map(
    pointer: int,
    dtype: str,
    sizes: tuple[int, ...],
    strides_bytes: tuple[int, ...],
    box: tuple[int, ...],
    swizzle_bytes: int,
) -> bytes:
    """The 128 bytes by which TMA reads and writes boxes of a tensor; a kernel wants them at a multiple of 64.

    Sizes, strides and box have the innermost dimension first. Its stride is one element and not among the strides, so
    there is one fewer of them than dimensions. What lies outside the tensor is read as zero and not written.
    A box starts at a multiple of 16 bytes along the innermost dimension: elsewhere the load is an illegal instruction.
    """
    rank = len(sizes)
    given = f"pointer={pointer:#x}, {dtype=}, {sizes=}, {strides_bytes=}, {box=}, {swizzle_bytes=}"
    if not 1 <= rank <= 5 or len(strides_bytes) != rank - 1 or len(box) != rank:
        raise ValueError(f"a tensor map has 1 to 5 sizes, one stride fewer, and as many box sizes: {given}")
    if dtype not in DTYPES or swizzle_bytes not in SWIZZLES:
        raise ValueError(f"dtype is one of {', '.join(DTYPES)}, swizzle_bytes one of {[*SWIZZLES]}: {given}")
    try:
        return encoded_map(pointer, DTYPES[dtype], sizes, strides_bytes, box, SWIZZLES[swizzle_bytes], PROMOTE_256)
    except RuntimeError as error:
        raise RuntimeError(
            f"no tensor map of {given}: {error}. Pointer and strides are multiples of 16 bytes, sizes at most "
            "2**32, strides below 2**40, box sizes at most 256; the innermost box size is a multiple of 16 bytes, and "
            "no more bytes than the swizzle where there is one"
        ) from None


class Kept(dict[tuple[int, ...], bytes]):
    """Maps of one signature by the addresses of its tensors, at most MOST_KEPT: the layers of a model take turns, step
    after step, and `tensor_map` needs 5 µs to find one that it has made."""

    def __setitem__(self, addresses: tuple[int, ...], maps: bytes) -> None:
        if len(self) >= MOST_KEPT:
            self.clear()
        super().__setitem__(addresses, maps)


def encoded_map(
    pointer: int, dtype: int, sizes: tuple[int, ...], strides_bytes: tuple[int, ...], box: tuple[int, ...],
    swizzle: int, promotion: int,
) -> bytes:  # fmt: skip
    """`tensor_map` by the driver's own numbers: CUtensorMapDataType, CUtensorMapSwizzle, CUtensorMapL2promotion."""
    rank = len(sizes)
    buffer = ctypes.create_string_buffer(MAP_BYTES + MAP_ALIGNMENT)
    offset = -ctypes.addressof(buffer) % MAP_ALIGNMENT
    longs, ints = ctypes.c_uint64 * rank, ctypes.c_uint32 * rank
    result = driver().cuTensorMapEncodeTiled(
        byref(buffer, offset), dtype, rank, c_void_p(pointer), longs(*sizes), longs(*strides_bytes),
        ints(*box), ints(*[1] * rank), 0, swizzle, promotion, 0,
    )  # fmt: skip
    if result:
        raise RuntimeError(words(result))
    return buffer.raw[offset : offset + MAP_BYTES]


def current_device() -> int:
    """The device of this thread's context. A thread that has none yet gets the first device's, as from the runtime."""
    device, context = c_int(), c_void_p()
    if driver().cuCtxGetDevice(byref(device)):
        call("cuDeviceGet", byref(device), 0)
        call("cuDevicePrimaryCtxRetain", byref(context), device)
        call("cuCtxSetCurrent", context)
    return device.value


@functools.cache
def driver() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise RuntimeError(f"the NVIDIA driver cannot be loaded: {error}") from None
    result = library.cuInit(0)
    if result:
        raise RuntimeError(f"the NVIDIA driver does not start: cuInit gives {result}")
    return library


@functools.cache
def version() -> int:
    """The CUDA version of the driver, 13010 for 13.1."""
    found = c_int()
    call("cuDriverGetVersion", byref(found))
    return found.value


@functools.cache
def launcher() -> ctypes.PyDLL:
    """The driver with the GIL kept: a launch takes microseconds, and no thread changes its parameters meanwhile.

    No `argtypes`, which would double the time of a launch: what is 64 bits wide goes in as a ctypes object.
    """
    return ctypes.PyDLL(driver()._name)


class Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", c_int), ("unused", c_int), ("value", c_int * 16))


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint), ("stream", c_void_p),
        ("attributes", ctypes.POINTER(Attribute)), ("count", ctypes.c_uint),
    )  # fmt: skip


def call(function: str, *arguments: object) -> None:
    result = getattr(driver(), function)(*arguments)
    if result:
        raise RuntimeError(f"{function}: {words(result)}")


def words(result: int) -> str:
    """The name and meaning of a CUresult."""
    name, meaning = ctypes.c_char_p(b"unknown error"), ctypes.c_char_p(b"")
    driver().cuGetErrorName(result, byref(name))
    driver().cuGetErrorString(result, byref(meaning))
    return f"{(name.value or b'unknown error').decode()} ({result}): {(meaning.value or b'').decode()}"
