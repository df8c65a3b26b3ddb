"""A disk cache of compiled kernels, by content: the key is a hash of everything the result depends on.

A file is the data and, after it, a checksum of its key and data. The checksum is last so that NVIDIA's tools still read
a cubin in the cache. A file is written under another name and then renamed: readers see all of it or nothing, and
processes that store the same key at once do no harm. The data are bytes: nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import uuid
from pathlib import Path

CHECKSUM = hashlib.sha256().digest_size

log = logging.getLogger("flashkernels.jit")


def folder() -> Path:
    """Where the cache is: FLASHKERNELS_CACHE, else flashkernels in XDG_CACHE_HOME, else ~/.cache/flashkernels."""
    return _named().expanduser()


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
    try:
        path = _path(key, suffix)
        content = path.read_bytes()
    except (OSError, RuntimeError):  # not there, or not to be read: compiled anew, and `store` says what is wrong
        return None
    data, checksum = content[:-CHECKSUM], content[-CHECKSUM:]
    if checksum == _checksum(key, suffix, data):
        return data
    log.warning("%s is damaged: deleted", path)
    with contextlib.suppress(OSError):
        path.unlink()
    return None


def store(key: str, suffix: str, data: bytes) -> Path | None:
    """Keeps `data`; returns its file. Where the folder takes no file it warns, once, and returns None."""
    try:
        path = _path(key, suffix)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
        try:
            temporary.write_bytes(data + _checksum(key, suffix, data))
            os.replace(temporary, path)
        except BaseException:  # KeyboardInterrupt too: nobody would ever delete the file
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        _warn(_named(), getattr(error, "strerror", None) or str(error))
        return None
    return path


def _named() -> Path:
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "flashkernels")
    return Path(os.environ.get("FLASHKERNELS_CACHE") or default)


def _path(key: str, suffix: str) -> Path:
    return folder() / key[:2] / (key + suffix)


def _checksum(key: str, suffix: str, data: bytes) -> bytes:
    return bytes.fromhex(digest(key, suffix, data))


@functools.cache
def _warn(where: Path, reason: str) -> None:
    log.warning(
        "compiled kernels cannot be kept in %s (%s): each process compiles anew; set FLASHKERNELS_CACHE", where, reason
    )
