"""A disk cache of compiled kernels, by content: the key is a hash of everything the result depends on.

A file is the data and, after it, a checksum of its key and data. The checksum is last so that NVIDIA's tools still read
a cubin in the cache. A file is written under another name and then renamed: readers see all of it or nothing, and
processes that store the same key at once do no harm. There are no locks, so a network file system is as good as a disk.
The data are bytes: nothing is unpickled.

A folder that takes no file (read-only, full, not there) is used as far as it goes; what is missing there this process
keeps in memory. So it does with what is missing in a folder that `flashkernels compile` made: its manifest seals it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from flashkernels.jit import environment

CHECKSUM = hashlib.sha256().digest_size
MANIFEST = "manifest.json"
UNFINISHED = ".unfinished"  # in the name of a file that is being written
ABANDONED = 3600.0  # seconds after which nobody is writing such a file any more
FRESH = 3600.0  # seconds for which a use is not noted again: a file system need not hear of each

log = logging.getLogger("flashkernels.jit")
_memory: dict[tuple[Path, str, str], bytes] = {}
_building: Path | None = None


def folder() -> Path:
    """Where the cache is: FLASHKERNELS_CACHE, else flashkernels in XDG_CACHE_HOME, else ~/.cache/flashkernels."""
    return _named().expanduser()


def build_into(where: Path) -> None:
    """From now on this process keeps what it compiles in `where`, sealed or not, whatever the environment says."""
    global _building
    _building = where


def digest(*parts: str | bytes) -> str:
    """A hash of the parts, each with its length, so that moving a character from one to the next changes it.

    >>> digest("ab", "c") == digest("a", "bc")
    False
    """
    sha = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        sha.update(len(data).to_bytes(8, "little"))
        sha.update(data)
    return sha.hexdigest()


def load(key: str, suffix: str) -> bytes | None:
    """What was stored under `key` and `suffix`, or None. A damaged file is deleted."""
    if (kept := _memory.get((_named(), key, suffix))) is not None:
        return kept
    try:
        path = _path(key, suffix)
        content = path.read_bytes()
    except (OSError, RuntimeError):  # not there, or not to be read: compiled anew, and `store` says what is wrong
        return None
    data, checksum = content[:-CHECKSUM], content[-CHECKSUM:]
    if checksum == _checksum(key, suffix, data):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > FRESH:
                os.utime(path)  # what was used longest ago goes first
        return data
    try:
        path.unlink()
        log.warning("%s is damaged: deleted", path)
    except OSError as error:
        log.warning("%s is damaged and cannot be deleted (%s): compiled anew", path, error.strerror)
    return None


def store(key: str, suffix: str, data: bytes) -> Path | None:
    """Keeps `data`; returns its file. Where the folder takes none it warns once, keeps them in memory, returns None."""
    try:
        path = _path(key, suffix)
        if sealed():
            raise OSError(0, "`flashkernels compile` made it, and its manifest does not have this kernel")
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}{UNFINISHED}")
        try:
            temporary.write_bytes(data + _checksum(key, suffix, data))
            os.replace(temporary, path)
        except BaseException:  # KeyboardInterrupt too: nobody would delete the file for an hour
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        _memory[_named(), key, suffix] = data
        _warn(_named(), getattr(error, "strerror", None) or str(error))
        return None
    if _building is None:
        trim(environment.cache_bytes(), keep=path)
    return path


def sealed() -> bool:
    """Whether the folder is one that `flashkernels compile` finished: then nothing is added and nothing cut."""
    return _building is None and (folder() / MANIFEST).exists()


def verify(path: Path) -> str:
    """What is wrong with one file of a cache, or nothing.

    >>> verify(Path("nothing.cubin"))
    'cannot be read: No such file or directory'
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    data, checksum = content[:-CHECKSUM], content[-CHECKSUM:]
    return "" if checksum == _checksum(path.stem, path.suffix, data) else "is damaged: its checksum is another"


def trim(limit: int, keep: Path | None = None) -> int:
    """Deletes what was used longest ago until the folder holds at most `limit` bytes (0: no bound), and files that a
    process which died was writing. Returns how many bytes are left. `keep` stays, however large."""
    kept, now = [], time.time()
    for path in files():
        with contextlib.suppress(OSError):
            found = path.stat()
            if path.name.endswith(UNFINISHED):
                if now - found.st_mtime > ABANDONED:
                    path.unlink()
            else:
                kept.append((found.st_mtime, found.st_size, path))
    total = sum(size for _, size, _ in kept)
    for _, size, path in sorted(kept):
        if not limit or total <= limit:
            break
        if path != keep:
            with contextlib.suppress(OSError):
                path.unlink()
            total -= size
    return total


def files() -> Iterator[Path]:
    """The files in the folder's own subfolders, which have the first two digits of a key as their names."""
    try:
        parts = [part.path for part in os.scandir(folder()) if len(part.name) == 2 and part.is_dir()]
    except (OSError, RuntimeError):  # there is none
        return
    for part in parts:
        with contextlib.suppress(OSError):  # deleted meanwhile, or not to be read: the others are
            yield from [Path(entry.path) for entry in os.scandir(part)]


def _named() -> Path:
    return _building or environment.cache_folder()


def _path(key: str, suffix: str) -> Path:
    return folder() / key[:2] / (key + suffix)


def _checksum(key: str, suffix: str, data: bytes) -> bytes:
    return bytes.fromhex(digest(key, suffix, data))


@functools.cache
def _warn(where: Path, reason: str) -> None:
    log.warning(
        "compiled kernels cannot be kept in %s (%s): each process compiles anew; set FLASHKERNELS_CACHE", where, reason
    )
