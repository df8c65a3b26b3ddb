"""CUDA C++ becomes machine code without a GPU, once; and a mistake in it is shown where it is."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from flashkernels.jit import cache, nvrtc

HEADER = {"fill.cuh": "struct Fill {\n  float* out;\n  int count;\n};\n"}
FILL = """#include "fill.cuh"
extern "C" __global__ void fill(const __grid_constant__ Fill fill) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < fill.count) fill.out[i] = i;
}
"""
# The sum of an accumulator that is still being computed: ptxas has to wait after each wgmma.
SERIAL = """
extern "C" __global__ void __launch_bounds__(128) serial(float* out, unsigned long long a, unsigned long long b) {
  float d[4] = {};
  asm volatile("wgmma.fence.sync.aligned;");
  for (int i = 0; i < 4; ++i) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(a), "l"(b));
    d[0] += 1;
  }
  asm volatile("wgmma.commit_group.sync.aligned;\\nwgmma.wait_group.sync.aligned 0;");
  for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = d[i];
}
"""


@pytest.fixture(autouse=True)
def compiler() -> nvrtc.Compiler:
    """On Linux the development extra installs it: there its absence is a failure."""
    try:
        return nvrtc.find()
    except nvrtc.CompilerMissing as error:
        if sys.platform == "linux":
            raise
        pytest.skip(str(error))


@pytest.fixture
def runs(compiler: nvrtc.Compiler, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The programs that the compiler itself was called for."""
    called: list[str] = []
    run = nvrtc.Compiler.run

    def counted(
        self: nvrtc.Compiler, name: str, source: str, headers: Mapping[str, str], arguments: Sequence[str]
    ) -> nvrtc.Compiled:
        called.append(name)
        return run(self, name, source, headers, arguments)

    monkeypatch.setattr(nvrtc.Compiler, "run", counted)
    return called


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_compiles_for_a_gpu_that_is_not_here(arch: str) -> None:
    cubin = nvrtc.compile("fill.cu", FILL, HEADER, arch)
    assert cubin.startswith(b"\x7fELF")
    assert b"fill" in cubin


def test_the_log_tells_registers_and_spills() -> None:
    log = nvrtc.compiled("fill.cu", FILL, HEADER).log
    assert "registers" in log and "0 bytes spill stores" in log


def test_the_log_tells_that_wgmma_is_serialised() -> None:
    assert "wgmma.mma_async instructions are serialized" in nvrtc.compiled("serial.cu", SERIAL, {}).log


def test_the_second_time_it_comes_from_the_disk(runs: list[str], kernel_cache: Path) -> None:
    first = nvrtc.compiled("fill.cu", FILL, HEADER)
    assert nvrtc.compiled("fill.cu", FILL, HEADER) == first
    assert runs == ["fill.cu"]
    for path in kernel_cache.rglob("*.cubin"):
        path.write_bytes(b"damaged")
    assert nvrtc.compile("fill.cu", FILL, HEADER) == first.cubin
    assert runs == ["fill.cu"] * 2


def test_a_cubin_of_nvrtcs_own_cache_has_no_log_and_is_compiled_again(
    kernel_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Sequence[str]] = []
    run = nvrtc.Compiler._run

    def without_log(
        self: nvrtc.Compiler, name: str, source: str, headers: Mapping[str, str], arguments: Sequence[str]
    ) -> nvrtc.Compiled:
        asked.append(arguments)
        made = run(self, name, source, headers, arguments)
        return made if "--no-cache" in arguments else nvrtc.Compiled(made.cubin, "")

    monkeypatch.setattr(nvrtc.Compiler, "_run", without_log)
    assert "registers" in nvrtc.compiled("fill.cu", FILL, HEADER).log
    assert len(asked) == 2
    for path in kernel_cache.rglob("*.log"):  # as an earlier version kept it
        cache.store(path.stem, ".log", b"")
    assert "registers" in nvrtc.compiled("fill.cu", FILL, HEADER).log
    assert len(asked) == 4


def test_whatever_changes_the_result_changes_the_key(runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def variants() -> Iterator[bytes]:
        yield nvrtc.compile("fill.cu", FILL, HEADER)
        yield nvrtc.compile("fill2.cu", FILL, HEADER)
        yield nvrtc.compile("fill.cu", FILL + "// changed", HEADER)
        yield nvrtc.compile("fill.cu", FILL, {"fill.cuh": HEADER["fill.cuh"] + "// changed"})
        yield nvrtc.compile("fill.cu", FILL, {**HEADER, "more.cuh": ""})
        yield nvrtc.compile("fill.cu", FILL, HEADER, "sm_80")
        yield nvrtc.compile("fill.cu", FILL, HEADER, options=["--use_fast_math"])
        yield nvrtc.compile("fill.cu", FILL, HEADER, options=["--use_fast_math", "-lineinfo"])
        with monkeypatch.context() as other:
            other.setattr(nvrtc.find(), "version", (99, 0))
            yield nvrtc.compile("fill.cu", FILL, HEADER)

    for number, _ in enumerate(variants(), 1):
        assert len(runs) == number
    for _ in variants():  # in the cache, every one
        assert len(runs) == number


def test_an_error_shows_the_log_and_the_lines_it_names() -> None:
    source = '// first\n#include "bad.cuh"\n\nint before;\nint f() { return missing; }\nint after;\nint last;\n'
    with pytest.raises(nvrtc.CompileError) as caught:
        nvrtc.compile("bad.cu", source, {"bad.cuh": "// a header\nint g() { return lost; }"})
    message = str(caught.value)
    assert "bad.cu (--gpu-architecture=sm_90a" in message
    assert 'bad.cu(5): error: identifier "missing" is undefined' in message
    assert "bad.cu, line 5:\n" in message
    assert ">     5 | int f() { return missing; }\n      6 | int after;\n      7 | int last;" in message
    assert "      4 | int before;\n" in message and "// first" not in message
    assert "bad.cuh, line 2:\n      1 | // a header\n>     2 | int g() { return lost; }" in message


def test_an_error_of_the_assembler_shows_the_ptx() -> None:
    with pytest.raises(nvrtc.CompileError, match=r"ptx, line \d+:(?s:.*)> +\d+ \|\s+nonsense.x;"):
        nvrtc.compile("bad.cu", 'extern "C" __global__ void k() { asm volatile("nonsense.x;"); }', {})


def test_an_error_is_not_kept(runs: list[str], kernel_cache: Path) -> None:
    for _ in range(2):
        with pytest.raises(nvrtc.CompileError):
            nvrtc.compile("bad.cu", "nonsense", {})
    assert len(runs) == 2 and not kernel_cache.exists()


@pytest.mark.parametrize(("arch", "options"), [("sm_10", []), ("sm_90a", ["--nonsense"])])
def test_what_nvrtc_does_not_know_is_an_error_that_names_it(arch: str, options: list[str]) -> None:
    with pytest.raises(nvrtc.CompileError, match=r"nonsense|architecture"):
        nvrtc.compile("fill.cu", FILL, HEADER, arch, options)


def test_threads_compile_the_same_program_once_and_others_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(2, timeout=30)
    called: list[str] = []

    def run(self: nvrtc.Compiler, name: str, *_: object) -> nvrtc.Compiled:
        called.append(name)
        together.wait()  # the other program is being compiled as well
        time.sleep(0.05)
        return nvrtc.Compiled(name.encode(), "ptxas info")

    monkeypatch.setattr(nvrtc.Compiler, "run", run)
    results: list[bytes] = []
    threads = [
        threading.Thread(target=lambda name=name: results.append(nvrtc.compile(name, "", {})))
        for name in ["a.cu", "b.cu"] * 4
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(called) == ["a.cu", "b.cu"]
    assert sorted(results) == [b"a.cu"] * 4 + [b"b.cu"] * 4


def test_a_cache_that_takes_no_file_does_not_stop_compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLASHKERNELS_CACHE", str(tmp_path / "file"))
    assert nvrtc.compile("fill.cu", FILL, HEADER)


def test_a_missing_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "find", functools.cache(nvrtc.find.__wrapped__))
    monkeypatch.setattr(nvrtc, "paths", lambda: ["/nowhere/libnvrtc.so.13", "libno-such-nvrtc.so"])
    with pytest.raises(nvrtc.CompilerMissing, match="pip install nvidia-cuda-nvrtc"):
        nvrtc.compile("fill.cu", FILL, HEADER)


@pytest.mark.parametrize(
    ("beside", "version"),
    [
        (["libnvrtc-builtins.so.13.0", "libnvrtc-builtins.alt.so.13.0"], (13, 0)),
        (["libnvrtc-builtins.so", "libnvrtc-builtins.so.13.1", "libnvrtc-builtins.so.13.1.80"], (13, 1)),
        (["libnvrtc-builtins.so.12.9", "libnvrtc-builtins.so.13.0"], (13, 0)),
        (["libnvrtc-builtins.so.13.0", "libnvrtc-builtins.so.13.1"], None),
        (["libnvrtc-builtins.so.12.9"], None),
        ([], None),
    ],
    ids=["wheel", "toolkit", "two majors", "two minors", "another's", "none"],
)
def test_the_version_is_in_the_names_of_its_files(
    tmp_path: Path, beside: list[str], version: tuple[int, int] | None
) -> None:
    for file in ("libnvrtc.so.13", *beside):
        (tmp_path / file).touch()
    assert nvrtc.named_version(str(tmp_path / "libnvrtc.so.13")) == version
    assert nvrtc.named_version(str(tmp_path / "libnvrtc.so.12")) is None
    assert nvrtc.named_version("libnvrtc.so.13") is None


def test_the_library_confirms_its_version(compiler: nvrtc.Compiler) -> None:
    assert compiler._version() == compiler.version


def test_what_the_cache_has_needs_no_library(runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    nvrtc.compile("fill.cu", FILL, HEADER)
    fresh = functools.cache(nvrtc.find.__wrapped__)
    monkeypatch.setattr(nvrtc, "find", fresh)
    assert nvrtc.compile("fill.cu", FILL, HEADER)
    assert nvrtc.named_version(fresh().path) is None or "library" not in vars(fresh())


def test_the_library_of_torchs_cuda_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in ("cu13/lib/libnvrtc.so.13", "cuda_nvrtc/lib/libnvrtc.so.12", "cu13/lib/libnvrtc-builtins.so.13.0"):
        (tmp_path / "nvidia" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "nvidia" / file).touch()
    monkeypatch.syspath_prepend(tmp_path)
    for cuda, first in (("12.6", "cuda_nvrtc/lib/libnvrtc.so.12"), ("13.0", "cu13/lib/libnvrtc.so.13")):
        monkeypatch.setattr("torch.version.cuda", cuda)
        assert nvrtc.paths()[0] == str(tmp_path / "nvidia" / first)
    assert not any("builtins" in path for path in nvrtc.paths())
