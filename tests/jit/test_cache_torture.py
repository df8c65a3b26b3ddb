"""What may happen to a cache: processes that die or race, damage, folders that take nothing, disks that are full."""

from __future__ import annotations

import builtins
import errno
import logging
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from flashkernels.jit import cache, nvrtc

KEYS = [cache.digest(str(i)) for i in range(8)]
RACERS = 16


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def content(key: str) -> bytes:
    return key.encode() * 4000


WRITER = """
import sys
from flashkernels.jit import cache
keys = sys.argv[1:]
print("ready", flush=True)
while True:
    for key in keys:
        cache.store(key, ".cubin", key.encode() * 4000)
"""


def test_processes_killed_while_writing_leave_only_whole_entries(kernel_cache: Path) -> None:
    chance = random.Random(0)
    for _ in range(6):
        process = subprocess.Popen([sys.executable, "-c", WRITER, *KEYS], stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        time.sleep(chance.uniform(0.001, 0.05))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        for key in KEYS:
            assert cache.load(key, ".cubin") in (None, content(key))
    whole = [path for path in files(kernel_cache) if not path.name.endswith(cache.UNFINISHED)]
    assert whole and all(cache.verify(path) == "" for path in whole)


def test_files_of_processes_that_died_are_deleted_after_a_while(kernel_cache: Path) -> None:
    path = cache.store(KEYS[0], ".cubin", b"data")
    assert path is not None
    old, new = (path.with_name(f"{path.name}.{name}{cache.UNFINISHED}") for name in ("old", "new"))
    for unfinished in (old, new):
        unfinished.write_bytes(b"da")
    os.utime(old, (0, 0))
    cache.store(KEYS[1], ".cubin", b"data")
    assert not old.exists() and new.exists() and path.exists()


def test_many_processes_that_race_see_whole_entries(kernel_cache: Path) -> None:
    code = """
import random, sys
from flashkernels.jit import cache
seed, *keys = sys.argv[1:]
chance = random.Random(seed)
sys.stdin.read()  # until all have started
for _ in range(40):
    key = chance.choice(keys)
    data = key.encode() * 4000
    assert cache.load(key, ".cubin") in (None, data)
    if chance.random() < 0.5:
        assert cache.store(key, ".cubin", data)
    if chance.random() < 0.2:
        cache.trim(300_000)
"""
    code = f"import sys; sys.path[:0] = {sys.path!r}\n{code}"  # without `site`, for a quick start
    command = [sys.executable, "-S", "-c", code]
    racers = [subprocess.Popen([*command, str(i), *KEYS], stdin=subprocess.PIPE) for i in range(RACERS)]
    for process in racers:
        assert process.stdin is not None
        process.stdin.close()
    assert [process.wait(timeout=60) for process in racers] == [0] * RACERS
    assert not [path for path in files(kernel_cache) if path.name.endswith(cache.UNFINISHED)]


@pytest.mark.parametrize("damage", ["empty", "half", "flipped", "longer", "swapped"])
def test_a_damaged_entry_is_compiled_anew(damage: str, kernel_cache: Path) -> None:
    """By the compiler itself: the machine code is the same as before, and it is in the cache again."""
    kernel = 'extern "C" __global__ void f(int* p) { *p = 1; }'
    made = nvrtc.compiled("f.cu", kernel, {})
    (path,) = (path for path in files(kernel_cache) if path.suffix == ".cubin")
    good = path.read_bytes()
    flipped = bytearray(good)
    flipped[len(good) // 2] ^= 0x10
    log = path.with_suffix(".log").read_bytes()
    bad = {"empty": b"", "half": good[: len(good) // 2], "flipped": flipped, "longer": good + b"x", "swapped": log}
    path.write_bytes(bad[damage])
    assert cache.verify(path)
    again = nvrtc.compiled("f.cu", kernel, {})
    assert again.cubin == made.cubin and path.read_bytes() == good


def test_nothing_is_unpickled() -> None:
    """A pickle in place of an entry is damage, like anything else."""
    path = cache.store(KEYS[0], ".cubin", b"data")
    assert path is not None
    path.write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    assert cache.load(KEYS[0], ".cubin") is None


@pytest.fixture
def read_only(kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder refuses to be written, also for root: the calls that write fail as on a read-only file system."""
    cache.store(KEYS[0], ".cubin", b"kept")
    cache._warn.cache_clear()

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("replace", "utime", "unlink"):
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setattr(Path, "write_bytes", refuse)
    monkeypatch.setattr(Path, "mkdir", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    return kernel_cache


def test_a_read_only_folder_is_used_and_what_it_lacks_is_kept_in_memory(
    read_only: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert cache.load(KEYS[0], ".cubin") == b"kept"
    with caplog.at_level(logging.WARNING, logger="flashkernels.jit"):
        for key in KEYS[1:4]:
            assert cache.store(key, ".cubin", b"new") is None and cache.load(key, ".cubin") == b"new"
    assert len(caplog.records) == 1 and "Read-only file system" in caplog.text and str(read_only) in caplog.text


def test_damage_in_a_read_only_folder_is_a_miss(read_only: Path, caplog: pytest.LogCaptureFixture) -> None:
    (path,) = files(read_only)
    with open(path, "wb") as file:
        file.write(b"damaged")
    assert cache.load(KEYS[0], ".cubin") is None
    assert "cannot be deleted" in caplog.text
    cache.store(KEYS[0], ".cubin", b"again")
    assert cache.load(KEYS[0], ".cubin") == b"again"


def test_a_folder_without_permission_is_used(kernel_cache: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    path = cache.store(KEYS[0], ".cubin", b"kept")
    assert path is not None
    path.parent.chmod(0o500)
    kernel_cache.chmod(0o500)
    try:
        assert cache.load(KEYS[0], ".cubin") == b"kept" and cache.store(KEYS[1], ".cubin", b"new") is None
    finally:
        kernel_cache.chmod(0o700)
        path.parent.chmod(0o700)


def test_a_full_disk_leaves_no_part_of_a_file(
    kernel_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk is full in the middle of the write."""
    cache._warn.cache_clear()

    def write(path: Path, data: bytes) -> int:
        with builtins.open(path, "wb") as file:
            file.write(data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write)
    assert cache.store(KEYS[0], ".cubin", b"x" * 100) is None
    assert files(kernel_cache) == [] and cache.load(KEYS[0], ".cubin") == b"x" * 100
    assert "No space left on device" in caplog.text


def test_the_folder_is_bounded_and_the_oldest_go_first(kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = 1000 + cache.CHECKSUM
    monkeypatch.setenv("FLASHKERNELS_CACHE_BYTES", str(3 * size))
    paths = []
    for age, key in enumerate(KEYS[:3]):
        path = cache.store(key, ".cubin", b"x" * 1000)
        assert path is not None
        os.utime(path, (1e9 + age, 1e9 + age))
        paths.append(path)
    assert cache.load(KEYS[0], ".cubin") is not None  # used: it is not the oldest any more
    cache.store(KEYS[3], ".cubin", b"x" * 1000)
    assert [path.exists() for path in paths] == [True, False, True]
    assert sum(path.stat().st_size for path in files(kernel_cache)) <= 3 * size


def test_an_entry_larger_than_the_bound_is_kept_alone(kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.store(KEYS[0], ".cubin", b"small")
    monkeypatch.setenv("FLASHKERNELS_CACHE_BYTES", "100")
    path = cache.store(KEYS[1], ".cubin", b"x" * 1000)
    assert files(kernel_cache) == [path]


def test_no_bound_cuts_nothing(kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHKERNELS_CACHE_BYTES", "0")
    for key in KEYS:
        cache.store(key, ".cubin", b"x" * 1000)
    assert len(files(kernel_cache)) == len(KEYS)


def test_only_our_own_files_are_cut(kernel_cache: Path) -> None:
    cache.store(KEYS[0], ".cubin", b"x" * 1000)
    other = kernel_cache / "notes.txt"
    other.write_text("not ours")
    assert cache.trim(1) <= 0 and files(kernel_cache) == [other]


def test_a_sealed_folder_is_neither_added_to_nor_cut(
    kernel_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache._warn.cache_clear()
    cache.store(KEYS[0], ".cubin", b"kept")
    (kernel_cache / cache.MANIFEST).write_text("{}")
    monkeypatch.setenv("FLASHKERNELS_CACHE_BYTES", "1")
    before = files(kernel_cache)
    assert cache.store(KEYS[1], ".cubin", b"new") is None and cache.load(KEYS[1], ".cubin") == b"new"
    assert cache.load(KEYS[0], ".cubin") == b"kept" and files(kernel_cache) == before
    assert "its manifest does not have this kernel" in caplog.text
