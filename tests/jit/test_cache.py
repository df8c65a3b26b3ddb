"""The disk cache gives back what was stored, or nothing; whatever happens to its folder."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashkernels.jit import cache

KEY = cache.digest("a key")


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("data", [b"", b"x", bytes(range(256)) * 1000], ids=len)
def test_round_trip(data: bytes, kernel_cache: Path) -> None:
    assert cache.load(KEY, ".cubin") is None
    path = cache.store(KEY, ".cubin", data)
    assert path == kernel_cache / KEY[:2] / f"{KEY}.cubin"
    assert files(kernel_cache) == [path]
    assert cache.load(KEY, ".cubin") == data
    assert cache.load(KEY, ".log") is None


def test_storing_again_replaces() -> None:
    cache.store(KEY, ".cubin", b"old")
    cache.store(KEY, ".cubin", b"new")
    assert cache.load(KEY, ".cubin") == b"new"


@pytest.mark.parametrize("length", [0, 1, 32, 99, 131])
def test_a_truncated_file_is_a_miss_and_is_deleted(length: int) -> None:
    path = cache.store(KEY, ".cubin", b"x" * 100)
    assert path is not None
    path.write_bytes(path.read_bytes()[:length])
    assert cache.load(KEY, ".cubin") is None
    assert not path.exists()


@pytest.mark.parametrize("position", [0, 50, 99, 100, 131], ids=str)
def test_a_flipped_bit_is_a_miss_and_is_deleted(position: int, caplog: pytest.LogCaptureFixture) -> None:
    path = cache.store(KEY, ".cubin", b"x" * 100)
    assert path is not None
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)
    assert cache.load(KEY, ".cubin") is None
    assert not path.exists()
    assert str(path) in caplog.text


def test_a_file_under_another_key_is_a_miss() -> None:
    path, other = cache.store(KEY, ".cubin", b"data"), cache.store(cache.digest("other"), ".cubin", b"other")
    assert path is not None and other is not None
    other.write_bytes(path.read_bytes())
    assert cache.load(cache.digest("other"), ".cubin") is None


def test_parts_are_told_apart() -> None:
    keys = {cache.digest(*parts) for parts in [("ab", "c"), ("a", "bc"), ("abc",), ("abc", ""), ("", "abc")]}
    assert len(keys) == 5
    assert cache.digest("é") == cache.digest("é".encode())


def test_processes_that_store_the_same_key_at_once(kernel_cache: Path) -> None:
    code = """
import sys
from flashkernels.jit import cache
data = b"the same machine code" * 50_000
sys.stdin.read()  # until all have started
for _ in range(30):
    assert cache.store(sys.argv[1], ".cubin", data)
    assert cache.load(sys.argv[1], ".cubin") == data
"""
    command = [sys.executable, "-c", code, KEY]
    running = [subprocess.Popen(command, stdin=subprocess.PIPE) for _ in range(4)]
    for process in running:
        assert process.stdin is not None
        process.stdin.close()
    assert [process.wait(timeout=60) for process in running] == [0] * 4
    assert len(files(kernel_cache)) == 1


def test_a_folder_that_takes_no_file_is_a_warning_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "cache"
    monkeypatch.setenv("FLASHKERNELS_CACHE", str(folder))
    with caplog.at_level(logging.WARNING, logger="flashkernels.jit"):
        for number in range(3):
            assert cache.store(cache.digest(str(number)), ".cubin", b"data") is None
            assert cache.load(cache.digest(str(number)), ".cubin") == b"data"  # of this process
    assert [record.name for record in caplog.records] == ["flashkernels.jit"]
    assert str(folder) in caplog.text and os.strerror(20) in caplog.text  # ENOTDIR


def test_a_disk_that_is_full_leaves_nothing_behind(kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def replace(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", replace)
    assert cache.store(KEY, ".cubin", b"data") is None
    assert files(kernel_cache) == []


def test_a_subfolder_that_cannot_be_read_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound holds for what can be read."""
    stored = [cache.store(cache.digest(str(i)), ".cubin", b"x" * 100) for i in range(20)]
    paths = sorted(path for path in stored if path is not None)
    scan = os.scandir

    def scandir(folder: Path | str) -> object:
        if Path(folder) == closed:
            raise PermissionError(13, "Permission denied")
        return scan(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    for closed in {path.parent for path in paths}:  # whichever comes first
        assert sorted(cache.files()) == [path for path in paths if path.parent != closed]
    assert cache.trim(500) <= 500


def test_where_the_folder_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("FLASHKERNELS_CACHE", "~/own")
    assert cache.folder() == tmp_path / "own"
    monkeypatch.setenv("FLASHKERNELS_CACHE", "")
    assert cache.folder() == tmp_path / "xdg" / "flashkernels"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache.folder() == tmp_path / ".cache" / "flashkernels"


def test_no_home_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHKERNELS_CACHE", "~nobody-has-this-name/cache")
    assert cache.store(KEY, ".cubin", b"data") is None
    assert cache.load(KEY, ".cubin") == b"data"
