"""`flashkernels compile`: builds a folder without a GPU, verifies it, and says what is wrong with a request."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flashkernels.aot import manifest
from flashkernels.cli import app, doctor
from flashkernels.jit import cache

CONFIG = {
    "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 512,
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16",
}  # fmt: skip


FEW = ("--gpu", "a100,h200", "--ops", "softmax,rms_norm", "--widths", "64", "--jobs", "2")


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """In a process of its own, which compiles: this one may interpret."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-m", "flashkernels", "compile", *map(str, arguments)],
        capture_output=True, text=True, timeout=300, env=environment,
    )  # fmt: skip


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few kernels for two architectures."""
    folder = tmp_path_factory.mktemp("built") / "kernels"
    done = run(*FEW, "--out", folder)
    assert done.returncode == 0, done.stderr
    assert f"10 kernels for a100, h200 in {folder}" in done.stdout and f"FLASHKERNELS_CACHE={folder}" in done.stdout
    return folder


@pytest.fixture
def folder(built: Path, tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    subprocess.run(["cp", "-r", str(built), str(tmp_path / "kernels")], check=True)
    return tmp_path / "kernels"


def check(folder: Path) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["compile", "--check", str(folder)])
    return done.exit_code, done.output


def test_a_models_folder_has_what_the_model_calls(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    built = tmp_path / "kernels"
    sizes = ("--batches", "1", "--seqs", "2", "--page-sizes", "16", "--jobs", "2")
    done = run("--gpu", "a100", "--model-config", tmp_path / "config.json", "--out", built, *sizes)
    assert done.returncode == 0, done.stderr
    found = manifest.read(built)
    kernels = {facts["kernel"].split(" for ")[0] for facts in found.files.values()}
    assert kernels == {
        "attention.triton.forward.forward_kernel", "decode.triton.decode.decode_kernel",
        "decode.triton.combine.combine_kernel", "fused.triton.rope.rope_kernel", "fused.triton.norm.forward_kernel",
        "fused.triton.activation.forward_kernel", "fused.triton.linear.linear_kernel",
        "kvcache.triton.append.append_kernel",
    }  # fmt: skip
    assert found.gpus == ["a100"] and found.triton.startswith("3.6.")
    on_disk = {path.relative_to(built).as_posix() for path in built.rglob("*") if path.is_file()}
    assert on_disk == {*found.files, "manifest.json"}


def test_a_whole_folder_passes(built: Path) -> None:
    code, output = check(built)
    assert code == 0 and "20 files for a100, h200, all as they were made" in output


@pytest.mark.parametrize("damage", ["flipped", "short", "missing", "exchanged"])
def test_a_damaged_file_is_named(damage: str, folder: Path) -> None:
    path, other = sorted(folder.rglob("*.cubin"))[:2]
    if damage == "missing":
        path.unlink()
    elif damage == "exchanged":
        key = path.stem
        data = other.read_bytes()[: -cache.CHECKSUM]
        path.write_bytes(data + bytes.fromhex(cache.digest(key, ".cubin", data)))  # with a checksum that is right
    else:
        content = bytearray(path.read_bytes())
        content[100] ^= 1
        path.write_bytes(content if damage == "flipped" else content[:-1])
    code, output = check(folder)
    assert code == 1 and path.name in output and "1 of" in output and "compile into" in output


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"format": 1, "sha256": "x"}'])
def test_a_damaged_manifest_is_named(text: str, folder: Path) -> None:
    (folder / "manifest.json").write_text(text)
    code, output = check(folder)
    assert code == 2 and "manifest.json" in output


def test_a_folder_without_a_manifest_is_named(tmp_path: Path) -> None:
    code, output = check(tmp_path)
    assert code == 2 and "manifest.json cannot be read" in output


def test_a_version_that_is_another_is_said(folder: Path) -> None:
    found = manifest.read(folder)
    found.triton = "3.5.0"
    found.write(folder)
    code, output = check(folder)
    assert code == 0 and "made with triton 3.5.0" in output and "made with flashkernels" not in output
    found.flashkernels = "0.0.9"
    found.write(folder)
    code, output = check(folder)
    assert code == 0 and "note: made with flashkernels 0.0.9; the" in output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body: body.pop("gpus"), "manifest.json has no 'gpus'"),
        (lambda body: body.update(more=1), "manifest.json has an unknown 'more'"),
        (lambda body: next(iter(body["files"].values())).pop("sha256"), "has no 'sha256'"),
        (lambda body: body.update(files=[1]), "manifest.json has files that are a list"),
    ],
)
def test_a_manifest_with_other_fields_is_named(change: Callable[[Any], Any], message: str, folder: Path) -> None:
    """Its checksum is right."""
    path = folder / "manifest.json"
    body = json.loads(path.read_text())
    del body["sha256"]
    change(body)
    path.write_text(json.dumps(body | {"sha256": manifest._sum(body)}))
    with pytest.raises(ValueError, match=message):
        manifest.read(folder)
    code, output = check(folder)
    assert code == 2 and message in output


def test_the_doctor_knows_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHKERNELS_CACHE", str(folder))
    found = doctor.kernel_cache()
    assert found.status == "ok" and "built ahead" in found.detail and "a100" in found.detail
    (folder / "manifest.json").write_text("{}")
    assert doctor.kernel_cache().status == "fail"


def test_a_second_run_builds_only_what_is_missing_and_replaces_damage(folder: Path) -> None:
    path, other = sorted(folder.rglob("*.cubin"))[:2]
    good, untouched = path.read_bytes(), other.stat().st_mtime_ns
    path.write_bytes(b"damaged")
    done = run(*FEW, "--out", folder)
    assert done.returncode == 0, done.stderr
    assert path.read_bytes() == good and other.stat().st_mtime_ns == untouched
    assert check(folder)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ops", "attention"], "--out is missing"),
        (["--out", "x"], "give --ops or --model-config"),
        (["--out", "x", "--ops", "atention"], "'atention' is not one of attention"),
        (["--out", "x", "--ops", "attention", "--gpu", "h2000"], "h2000"),
        (["--out", "x", "--ops", "attention", "--head-dims", "64,big"], "--head-dims '64,big' is not a list"),
        (["--out", "x", "--ops", "attention", "--head-dims", "-1"], "-1 is not a positive"),
        (["--out", "x", "--ops", "attention", "--heads", "7"], "heads=7 is not a multiple of kv_heads=8"),
        (["--out", "x", "--ops", "attention", "--jobs", "-1"], "--jobs -1"),
        (["--out", "x", "--ops", "moe", "--experts", "0"], "experts=0 must be at least 1"),
        (["--out", "x", "--ops", "moe", "--experts-per-token", "9"], "k=9 is over 8 with 8 experts"),
        (["--out", "x", "--ops", "moe", "--expert-formats", "fp9"], "weights='fp9' is not one of"),
        (["--out", "x", "--ops", "moe", "--tokens", "-1"], "tokens=-1 must not be negative"),
        (["--out", "x", "--ops", "linear", "--activations", "tanh"], "activation='tanh' is not one of '', 'relu'"),
        (["--out", "x", "--ops", "speculative_accept", "--drafts", "0"], "drafts=[0]: 0 is not a positive"),
        (["--out", "x", "--ops", "speculative_accept", "--drafts", "2000"], "drafts=2000 is over 1024"),
        (["--out", "x", "--model-config", "none.json"], "none.json is not a model's config.json"),
    ],
)
def test_a_bad_request_is_one_line(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["compile", *arguments])
    assert done.exit_code == 2 and message in done.output and len(done.output.splitlines()) == 1


def test_interpreted_kernels_cannot_be_compiled(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flashkernels", "compile", "--ops", "softmax", "--out", str(tmp_path / "x")]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"})
    assert done.returncode == 2 and "TRITON_INTERPRET is set" in done.stderr and not (tmp_path / "x").exists()
