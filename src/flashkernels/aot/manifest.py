"""What is in a folder that `flashkernels compile` made: each file with its checksum, and the versions that made it."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from flashkernels.jit import cache

FORMAT = 1


@dataclass
class Manifest:
    """The files of a folder by their path in it, each as {"bytes", "sha256", "kernel", "gpus"}."""

    flashkernels: str
    triton: str
    nvrtc: str
    gpus: list[str]
    format: int = FORMAT
    files: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, folder: Path, path: Path, kernel: str, gpus: list[str]) -> None:
        content = path.read_bytes()
        self.files[path.relative_to(folder).as_posix()] = {
            "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest(), "kernel": kernel, "gpus": gpus,
        }  # fmt: skip

    def write(self, folder: Path) -> None:
        """Last of all: it seals the folder."""
        body = asdict(self)
        temporary = folder / f".{cache.MANIFEST}.{os.getpid()}"
        temporary.write_text(json.dumps(body | {"sha256": _sum(body)}, indent=1, sort_keys=True), encoding="utf-8")
        os.replace(temporary, folder / cache.MANIFEST)


def read(folder: Path) -> Manifest:
    path = folder / cache.MANIFEST
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(body, dict) or body.pop("sha256", "") != _sum(body):
        raise ValueError(f"{path} is damaged: its checksum is another")
    if body.get("format") != FORMAT:
        raise ValueError(f"{path} has format={body.get('format')}; this version reads {FORMAT}")
    _check_names(path, body, {one.name for one in fields(Manifest)})
    if not isinstance(body["files"], dict):
        raise ValueError(f"{path} has files that are a {type(body['files']).__name__}")
    for name, facts in body["files"].items():
        _check_names(f"{path}: {name}", facts, {"bytes", "sha256", "kernel", "gpus"})
    return Manifest(**body)


def _check_names(where: Path | str, body: dict[str, Any], wanted: set[str]) -> None:
    if not isinstance(body, dict):
        raise ValueError(f"{where} is a {type(body).__name__}")
    if wrong := sorted(body.keys() ^ wanted):
        said = ", ".join(f"{'no' if name in wanted else 'an unknown'} {name!r}" for name in wrong)
        raise ValueError(f"{where} has {said}")


def faults(folder: Path, manifest: Manifest) -> list[str]:
    """What is wrong with the files of a folder, a line each."""
    found = []
    for name, facts in sorted(manifest.files.items()):
        path = folder / name
        wrong = cache.verify(path)
        if not wrong and hashlib.sha256(path.read_bytes()).hexdigest() != facts["sha256"]:
            wrong = "is another file than the manifest has"
        if wrong:
            found.append(f"{name} {wrong} ({facts['kernel']})")
    return found


def _sum(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
