"""Triton kernels in our own cache: what one call compiles, how it is kept, and how it is launched from there.

Triton's cache serves the machine and the Python that filled it: its keys hash Triton's own binaries, and each signature
needs a C compiler for its launcher. Here the key is Triton's version, the kernel's source and everything the JIT
specialises on. The cubin is launched through the driver, like those of NVRTC. So a folder made on a machine without a
GPU serves any machine with the same version of Triton, and neither a compiler nor Triton's JIT runs there.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import inspect
import json
import operator
import os
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any

import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

from flashkernels.jit import cache, driver
from flashkernels.jit.mode import interpreting

# The versions whose specialisation, parameters and tensor maps are known here, each with those of its settings
# (`knobs.compilation`) that the JIT adds to the options of every call.
KNOWN = {
    "3.6": ("instrumentation_mode",), "3.7": ("instrumentation_mode",), "3.8": ("instrumentation_mode",),
    "3.9": ("instrumentation_mode", "fpsan_homomorphic_casts"),
}  # fmt: skip
RELEASE = ".".join(triton.__version__.split(".")[:2])
SUPPORTED = RELEASE in KNOWN  # else Triton's own way serves
if SUPPORTED:
    from triton._C.libtriton import get_cache_invalidating_env_vars
    from triton.runtime.cache import get_cache_key, get_cache_manager
    from triton.runtime.jit import JITCallable, create_function_from_signature

VERSION = "1"  # of the files
MOST_MAPS = 256
# By Triton's name of a type: the letter of `struct`; pointers are like u64.
LETTERS = {
    "i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q",
    "fp32": "f", "f32": "f", "fp64": "d",
}  # fmt: skip
# CUtensorMapDataType by Triton's element type; the device counts them otherwise than the host.
MAP_TYPES = {**{i: i for i in range(16)}, 8: 10, 9: 8, 10: 9}
PROMOTE_128 = 2  # CU_TENSOR_MAP_L2_PROMOTION_L2_128B, as Triton has it
# Drivers up to CUDA 13.1 set this bit in the map of a tensor that is too small for it, and Blackwell may then read
# outside of it. NVIDIA's known issue, whose remedy is to clear it; Hopper ignores it. Triton does so from 3.7 on.
LARGE_BIT, LARGE_BYTES, LAST_FLAWED_DRIVER = 85, 128 * 1024, 13010


@dataclass(frozen=True, eq=False)
class TritonProgram:
    """One kernel with all that the JIT specialises it on, for one architecture."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: Any
    cc: int
    suffixes = (".cubin", ".json")

    @functools.cached_property
    def key(self) -> str:
        options = {name: value for name, value in vars(self.options).items() if name != "extern_libs"}
        parts = (
            self.signature, sorted(self.constants.items()), sorted(self.attributes.items()), sorted(options.items())
        )  # fmt: skip
        settings = sorted(get_cache_invalidating_env_vars().items())
        texts = (*map(repr, parts), repr(settings), str(self.cc), *assembler(self.cc))
        return cache.digest("triton", VERSION, triton.__version__, source_key(self.kernel), *texts)

    @property
    def label(self) -> str:
        names = self.kernel.arg_names
        fixed = ", ".join(f"{names[at[0]]}={x}" for at, x in self.constants.items() if names[at[0]].isupper())
        where = self.kernel.module.removeprefix("flashkernels.")
        return f"{where}.{self.kernel.__name__} for sm_{self.cc} ({fixed})"

    def cached(self) -> bool:
        return self.find() is not None

    def find(self) -> tuple[bytes, dict[str, Any]] | None:
        cubin, facts = cache.load(self.key, ".cubin"), cache.load(self.key, ".json")
        return None if cubin is None or facts is None else (cubin, json.loads(facts))

    def build(self) -> None:
        if self.cached():
            return
        if needs := unknown(self.made.metadata):
            raise RuntimeError(f"{self.label}: launched from our cache it cannot have {needs}")
        facts = {**facts_of(self.made), "label": self.label}
        cache.store(self.key, ".json", json.dumps(facts).encode())
        cache.store(self.key, ".cubin", self.made.asm["cubin"])
        stocked.cache_clear()

    @functools.cached_property
    def made(self) -> Any:
        """Compiled, or from Triton's own cache. By its compiler alone: the JIT around it builds a module in C first."""
        source = ASTSource(self.kernel, self.signature, self.constants, self.attributes)
        return triton.compile(source, target=GPUTarget("cuda", self.cc, 32), options=vars(self.options))

    @property
    def is_made(self) -> bool:
        return "made" in self.__dict__

    def preload(self) -> None:
        found = loaded(self)
        assert found is not None
        found.kernel.prepare()

    def in_tritons_cache(self) -> bool:
        """Whether Triton's own cache on disk has it: then its JIT would not compile."""
        source = ASTSource(self.kernel, self.signature, self.constants, self.attributes)
        backend = make_backend(GPUTarget("cuda", self.cc, 32))
        text = get_cache_key(source, backend, self.options, get_cache_invalidating_env_vars())
        manager = get_cache_manager(hashlib.sha256(text.encode()).hexdigest())
        name = f"{source.name[:150]}.json"  # as Triton shortens it
        return name in (manager.get_group(name) or {})


def assembler(cc: int) -> tuple[str, ...]:
    """What the environment puts in the place of Triton's own ptxas says of its version; nothing where it does not."""
    name = "ptxas_blackwell" if cc >= 100 else "ptxas"
    if not os.environ.get(f"TRITON_{name.upper()}_PATH"):
        return ()
    return (_version_of(getattr(knobs.nvidia, name).path),)


@functools.cache
def _version_of(tool: str) -> str:
    return subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout


# By id: kernels are never deleted, and Triton's own hash of one takes up to 0.1 s.
_binders: dict[tuple[int, int], tuple[Any, Callable[..., Any]]] = {}
_sources: dict[int, str] = {}
_programs: dict[tuple[int, int, str, str, str], TritonProgram] = {}


def _binder(kernel: Any, cc: int) -> tuple[Any, Callable[..., Any]]:
    found = _binders.get((id(kernel), cc))
    if found is None:
        backend = make_backend(GPUTarget("cuda", cc, 32))
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        found = _binders[id(kernel), cc] = (backend, bind)
    return found


def source_key(kernel: Any) -> str:
    """A hash of the kernel's text, of the functions it calls and of the constants they use.

    Triton's own, `cache_key`, depends on which kernels of the process were hashed before.
    """
    if id(kernel) not in _sources:
        _sources[id(kernel)] = cache.digest(*_texts(kernel, set()))
    return _sources[id(kernel)]


def _texts(function: Any, seen: set[int]) -> Iterator[str]:
    seen.add(id(function))
    plain = function.fn
    yield from (plain.__module__, plain.__qualname__, function.src, repr(getattr(function, "noinline", None)))
    names = sorted(_names(plain.__code__))
    places = {name: plain.__globals__[name] for name in names if name in plain.__globals__}
    places |= inspect.getclosurevars(plain).nonlocals
    for name, value in sorted(places.items()):
        members = [value]
        if isinstance(value, ModuleType) and not value.__name__.startswith("triton"):
            members = [getattr(value, inner) for inner in names if hasattr(value, inner)]
        for member in members:
            if isinstance(member, JITCallable):
                if id(member) not in seen and not member.fn.__module__.startswith("triton."):
                    yield from _texts(member, seen)
            elif isinstance(member, (bool, int, float, str, tuple, tl.constexpr, tl.dtype)):
                yield f"{name}={member!r}"


def _names(code: CodeType) -> set[str]:
    inner = (_names(one) for one in code.co_consts if isinstance(one, CodeType))
    return {*code.co_names}.union(*inner)


def specialise(kernel: Any, arguments: tuple[Any, ...], keywords: dict[str, Any], cc: int) -> TritonProgram:
    """What the JIT would compile for this call; tensors may be on the meta device.

    But of an integer the JIT tells the compiler whether it is a multiple of 16, and no more: rows of 72 columns of 16
    bits would be read 2 bytes at a time. Here the compiler hears of multiples of 8 too, and reads 16 bytes.
    """
    if interpreting():
        raise ValueError("TRITON_INTERPRET is set: in this process kernels are interpreted and cannot be compiled")
    added = {name: getattr(knobs.compilation, name) for name in KNOWN[RELEASE]}
    settings = keywords | {"debug": kernel.debug or knobs.runtime.debug} | added
    backend, binder = _binder(kernel, cc)
    bound, specialisation, options = binder(*arguments, **settings)
    eights = [(i,) for i, (value, (type_, hint)) in enumerate(zip(bound.values(), specialisation, strict=True))
              if type_ in ("i32", "i64") and hint == "" and value % 8 == 0]  # fmt: skip
    kind = (id(kernel), cc, str(specialisation), str(eights), str(options))
    found = _programs.get(kind)
    if found is None:
        options, signature, constants, attributes = kernel._pack_args(backend, settings, bound, specialisation, options)
        attributes |= {place: [["tt.divisibility", 8]] for place in eights}
        found = _programs[kind] = TritonProgram(kernel, signature, constants, attributes, options, cc)
    return found


# --- launching what the cache has, or what was compiled

_loaded: dict[str, Loaded] = {}  # by our key of a program, or Triton's
_lock = threading.Lock()


@functools.cache
def stocked() -> bool:
    """Whether the cache holds any Triton kernel. Where nobody put one there, a first call need not look."""
    return any(path.suffix == ".json" for path in cache.files())


def loaded(program: TritonProgram, look: bool = True) -> Loaded | None:
    """The program, ready to be launched: from this process or, if it is to `look` there, from the cache; else None."""
    found = _loaded.get(program.key)
    if found is None and look and (files := program.find()) is not None:
        with _lock:
            found = _loaded.setdefault(program.key, Loaded(*files))
    return found


def compiled(program: TritonProgram) -> Loaded | None:
    """The program as Triton makes it, ready to be launched; None where only Triton can launch it."""
    made = program.made
    found = _loaded.get(made.hash)
    if found is None and not unknown(made.metadata):
        with _lock:
            found = _loaded.setdefault(made.hash, Loaded(made.asm["cubin"], facts_of(made)))
    return found


def unknown(said: Any) -> str:
    """What a kernel with this metadata needs of its launch that is not known here."""
    needs = {
        "clusters": said.num_ctas != 1, "a cooperative grid": said.launch_cooperative_grid,
        "scratch memory": said.global_scratch_size or said.profile_scratch_size,
        "instrumentation": said.instrumentation_mode,  # some modes have parameters of their own
    }  # fmt: skip
    return ", ".join(name for name, on in needs.items() if on)


def facts_of(made: Any) -> dict[str, Any]:
    """What a launch has to know of a kernel, beside its machine code."""
    said = made.metadata
    return {
        "name": said.name, "shared": said.shared, "threads": 32 * said.num_warps, "early": said.launch_pdl,
        "signature": list(made.src.signature.values()), "maps": getattr(said, "tensordesc_meta", None) or [],
    }  # fmt: skip


class Loaded:
    """A cubin that Triton made, which is launched through the driver, by any number of `Parameters`."""

    def __init__(self, cubin: bytes, facts: dict[str, Any]) -> None:
        self.kernel = driver.Kernel(cubin, facts["name"], facts["shared"], facts["early"])
        self.threads = facts["threads"]
        self.signature = facts["signature"]
        self.formats = facts["maps"]


class Parameters:
    """The parameters of a kernel as the driver reads them, for launches of one kind. A launch writes what differs from
    the one before: pointers always, the map of a tensor where its address is another, numbers where their tuple is.

    `alike` are the places of descriptors of which launches give the tensor alone, as sizes and strides stay."""

    def __init__(
        self, loaded: Loaded, tensors: tuple[Any, ...], numbers: tuple[Any, ...], alike: frozenset[int] = frozenset()
    ) -> None:
        self.lock = threading.Lock()
        found = layout(loaded.signature)
        self.buffer = ctypes.create_string_buffer(found.size + 64)
        first = -ctypes.addressof(self.buffer) % 64
        start = ctypes.addressof(self.buffer) + first
        self.addresses = [start + at for at in found.offsets]
        self.start = loaded.kernel.starter(loaded.threads, self.addresses)
        self.words = (ctypes.c_uint64 * (found.size // 8)).from_buffer(self.buffer, first)
        self.pointers: list[tuple[int, int]] = []  # which of the words, and which of the tensors
        self.maps: list[Map] = []
        self.moved: list[tuple[int, Map]] = []  # of tensors that are given without a descriptor
        at, formats = 0, iter(loaded.formats)
        for i, x in enumerate(tensors):
            if x is None:
                continue
            offset = found.offsets[at]
            if hasattr(x, "data_ptr"):  # a tensor, or the address of one
                self.pointers.append((offset // 8, i))
                at += 1
            else:
                one = Map(next(formats), i, self.buffer, first + offset)
                if i in alike:
                    one.write(x)
                    self.moved.append((i, one))
                else:
                    self.maps.append(one)
                at += 1 + len(x.shape) + len(x.strides)
        left = [i for i in range(len(numbers)) if loaded.signature[len(tensors) + i] != "constexpr"]
        self.chosen = operator.itemgetter(*left) if len(left) > 1 else lambda values: tuple(values[i] for i in left)
        self.write = functools.partial(found.packing(at).pack_into, self.buffer, first + found.offsets[at])
        self.numbers: tuple[Any, ...] | None = None

    def launch(self, grid: int, stream: int, tensors: tuple[Any, ...], numbers: tuple[Any, ...]) -> None:
        words = self.words
        self.lock.acquire()  # the driver copies the parameters before it returns; `with` takes twice the time
        try:
            for at, i in self.pointers:
                words[at] = tensors[i].data_ptr()
            for one in self.maps:
                one.write(tensors[one.index])
            for i, one in self.moved:
                address = tensors[i].data_ptr()
                if address != one.written[0]:
                    one.move(address)
            if numbers is not self.numbers:
                self.write(*self.chosen(numbers), 0, 0)
                self.numbers = numbers
            self.start(grid, stream)
        finally:
            self.lock.release()


class Map:
    """A tensor that TMA reads, among the parameters of a kernel: its map, sizes and strides."""

    def __init__(self, form: dict[str, Any], index: int, buffer: ctypes.Array[ctypes.c_char], at: int) -> None:
        self.form, self.index = form, index
        rank = len(form["block_size"])
        packing = struct.Struct(f"<128s{rank}i{4 * (rank % 2)}x{rank}q")
        self.put = functools.partial(packing.pack_into, buffer, at)
        self.written: tuple[Any, ...] = ()  # address, sizes and strides
        self.known: dict[tuple[Any, ...], bytes] = {}

    def write(self, x: Any) -> None:
        kind = (x.base.data_ptr(), x.shape, x.strides)
        if kind != self.written:
            self.put_map(kind)

    def move(self, address: int) -> None:
        """The same of a tensor elsewhere."""
        self.put_map((address, *self.written[1:]))

    def put_map(self, kind: tuple[Any, ...]) -> None:
        """Of this address, sizes and strides."""
        found = self.known.get(kind)
        if found is None:
            if len(self.known) >= MOST_MAPS:
                self.known.clear()
            found = self.known[kind] = self.encoded(*kind)
        _, shape, strides = kind
        self.put(found, *shape, *strides)
        self.written = kind

    def encoded(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
        form = self.form
        steps = tuple(step * form["elem_size"] for step in reversed(strides))
        sizes, box = tuple(reversed(shape)), tuple(reversed(form["block_size"]))
        kind = MAP_TYPES[form["elem_type"]]
        found = driver.encoded_map(address, kind, sizes, steps[1:], box, form["swizzle"], PROMOTE_128)
        reach = form["elem_size"] + sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))
        if reach < LARGE_BYTES and driver.version() <= LAST_FLAWED_DRIVER:
            found = (int.from_bytes(found, "little") & ~(1 << LARGE_BIT)).to_bytes(len(found), "little")
        return found


@dataclass(frozen=True)
class Layout:
    """Where a kernel's parameters are in one block of memory, in its order, scratch pointers last."""

    letters: tuple[str, ...]  # of `struct`, by parameter
    offsets: tuple[int, ...]

    @property
    def size(self) -> int:
        return self.offsets[-1] + 8

    def packing(self, first: int = 0) -> struct.Struct:
        """Of the parameters from that one on."""
        text, end = "<", self.offsets[first]
        for letter, at in zip(self.letters[first:], self.offsets[first:], strict=True):
            text += (f"{at - end}x" if at > end else "") + letter
            end = at + struct.calcsize(f"<{letter}")
        return struct.Struct(text)


def layout(signature: list[str]) -> Layout:
    """How parameters of these Triton types are passed.

    >>> found = layout(["*bf16", "i32", "constexpr", "i64"])
    >>> found.packing().format, found.offsets
    ('<Qi4xqQQ', (0, 8, 16, 24, 32))
    """
    letters: list[str] = []
    for kind in signature:
        if kind.startswith("tensordesc"):
            rank = kind[kind.index("[") : kind.index("]")].count(",") + 1
            letters += ["128s", *"i" * rank, *"q" * rank]
        elif kind != "constexpr":
            letters.append("Q" if kind.startswith("*") else LETTERS[kind])
    offsets, at = [], 0
    for letter in (letters := [*letters, "Q", "Q"]):
        size = struct.calcsize(f"<{letter}")
        at += -at % min(size, 64)
        offsets.append(at)
        at += size
    return Layout(tuple(letters), tuple(offsets))
