"""`flashkernels doctor`: healthy here, and exit code 1 for each fault that is put in its way."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from flashkernels.cli import app, doctor as doctor_module
from flashkernels.cli.doctor import CHECKS, Check, guarded, ok, serving_image
from flashkernels.hardware import lookup
from flashkernels.jit import nvrtc

NAMES = [check.__name__.replace("_", " ") for check in CHECKS]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flashkernels", "doctor", *arguments],
        capture_output=True, text=True, timeout=300, env={**os.environ, **environment},
    )  # fmt: skip


def report() -> tuple[int, dict[str, dict[str, str]]]:
    """Exit code and checks by name of a run in this process, where faults can be injected."""
    result = CliRunner().invoke(app, ["doctor", "--json"])
    found = json.loads(result.stdout)
    assert found["ok"] == (result.exit_code == 0)
    return result.exit_code, {check["name"]: check for check in found["checks"]}


def fake_gpu(key: str, **changes: Any) -> SimpleNamespace:
    row = lookup(key)
    attributes = {
        "name": row.name,
        "major": row.capability[0],
        "minor": row.capability[1],
        "multi_processor_count": row.sms,
        "total_memory": 32 * 2**30,
        "shared_memory_per_block_optin": row.shared_per_block,
        **changes,
    }
    return SimpleNamespace(**attributes)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No live run, and a healthy machine with one RTX 5090 as far as the other checks can see."""
    monkeypatch.setattr(doctor_module, "gpus", lambda: [fake_gpu("rtx5090")])
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_90", "sm_120"])
    without = (doctor_module.live_test, doctor_module.cuda_graph, doctor_module.implementations)
    monkeypatch.setattr(doctor_module, "CHECKS", [check for check in CHECKS if check not in without])


def test_this_machine_is_healthy() -> None:
    done = run("--json")
    found = json.loads(done.stdout)
    assert [check["name"] for check in found["checks"]] == NAMES
    assert [check for check in found["checks"] if check["status"] == "fail"] == []
    assert (done.returncode, found["ok"]) == (0, True)


@pytest.mark.gpu
def test_a_machine_with_a_gpu_is_healthy_on_it() -> None:
    done = run("--json")
    found = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert done.returncode == 0, done.stdout
    assert torch.cuda.get_device_name(0) in found["gpu"]["detail"]
    first = "hopper" if torch.cuda.get_device_capability() == (9, 0) else "triton"
    assert f"{first} serves" in found["implementations"]["detail"]
    assert "on cuda" in found["live test"]["detail"]


def test_the_table_shows_every_check() -> None:
    done = run(COLUMNS="160")
    assert all(name in done.stdout for name in NAMES)
    assert "nothing is broken" in done.stdout


def test_a_cache_folder_that_takes_no_file_is_broken(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run("--json", FLASHKERNELS_CACHE=str(tmp_path / "file" / "cache"))
    found = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert done.returncode == 1
    assert found["kernel cache"]["status"] == "fail"
    assert "FLASHKERNELS_CACHE" in found["kernel cache"]["fix"]
    assert found["triton cache"]["status"] == "ok"


def test_the_cache_check_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHKERNELS_CACHE", str(tmp_path / "a" / "b"))
    assert doctor_module.kernel_cache().status == "ok"
    assert list(tmp_path.iterdir()) == []


def test_a_machine_with_a_suitable_gpu_passes(quick: None) -> None:
    code, checks = report()
    assert code == 0
    assert checks["torch kernels"]["detail"] == "sm_120 runs torch's sm_120"
    assert "101376 bytes" in checks["shared memory"]["detail"]


def test_a_torch_without_code_for_the_gpu_is_broken(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90"])
    code, checks = report()
    assert code == 1
    assert checks["torch kernels"]["status"] == "fail"
    assert "no kernel image" in checks["torch kernels"]["detail"]


def test_a_torch_with_only_ptx_for_the_gpu_is_a_warning(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_90", "compute_90"])
    code, checks = report()
    assert (code, checks["torch kernels"]["status"]) == (0, "warn")


def test_ptx_that_the_driver_cannot_compile_is_broken(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_90", "compute_90"])
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(doctor_module, "driver_cuda", lambda: (12, 8))
    found = doctor_module.torch_kernels()
    assert found.status == "fail" and "unsupported toolchain" in found.detail and "CUDA 12.8" in found.detail
    monkeypatch.setattr(doctor_module, "driver_cuda", lambda: (13, 1))
    assert doctor_module.torch_kernels().status == "warn"


def test_little_shared_memory_between_processes_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.platform != "linux":
        pytest.skip("/dev/shm, which the check reads, is there on Linux alone")
    for total, status in ((64 * 2**20, "warn"), (8 * 2**30, "ok")):
        monkeypatch.setattr(doctor_module.shutil, "disk_usage", lambda _, total=total: SimpleNamespace(total=total))
        found = doctor_module.limits()
        assert found.status == status and ("--ipc=host" in found.fix) == (status == "warn")


@pytest.mark.parametrize("variable", ["NVIDIA_TF32_OVERRIDE=0", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1"])
def test_a_variable_that_decides_over_tf32_is_a_warning(
    variable: str, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"):
        monkeypatch.delenv(name, raising=False)
    assert doctor_module.precision().status == "ok"
    assert "computed in fp32" in doctor_module.precision().detail and "fp8" in doctor_module.precision().detail
    monkeypatch.setenv(*variable.split("="))
    found = doctor_module.precision()
    assert found.status == "warn" and variable in found.detail


def test_a_compiler_that_changes_the_numbers_or_refuses_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor_module.one_graph().status == "ok"
    monkeypatch.setattr(torch, "compile", lambda function, **_: lambda q: function(q) + 1)
    assert doctor_module.one_graph().status == "fail"
    monkeypatch.setattr(torch, "compile", lambda function, **_: 1 / 0)
    assert guarded(doctor_module.one_graph).status == "fail"


@pytest.mark.gpu
def test_a_graph_replays_what_a_call_computes() -> None:
    assert doctor_module.replayed() == (0.0, 0.0)


def test_no_c_compiler_is_broken_only_with_a_gpu(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    assert doctor_module.c_compiler().status == "fail"
    monkeypatch.setattr(doctor_module, "gpus", list)
    assert doctor_module.c_compiler().status == "warn"


def test_a_c_compiler_that_fails_is_named_with_its_complaint(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/bin/false")
    code, checks = report()
    assert code == 1
    assert "/bin/false cannot build a Python extension: exit code 1" in checks["c compiler"]["detail"]


def test_a_gpu_that_ptxas_does_not_know_is_broken(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(doctor_module, "gpus", lambda: [fake_gpu("rtx5090", major=99, minor=9)])
    assert doctor_module.ptxas().status == "fail"
    assert "sm_999" in doctor_module.ptxas().detail


@pytest.mark.parametrize(
    ("version", "status"), [("3.5.1", "warn"), ("3.6.0", "ok"), ("3.9.2", "ok"), ("3.10.0", "warn")]
)
def test_triton_outside_the_tested_range_is_a_warning(
    version: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=version))
    assert doctor_module.triton_version().status == status


def test_missing_triton_is_broken_only_with_a_gpu(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert doctor_module.triton_version().status == "fail"
    monkeypatch.setattr(doctor_module, "gpus", list)
    assert doctor_module.triton_version().status == "warn"


def test_missing_nvrtc_is_a_warning(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "find", functools.cache(nvrtc.find.__wrapped__))  # without what it found before
    monkeypatch.setattr(nvrtc, "paths", lambda: ["/nowhere/libnvrtc.so"])
    code, checks = report()
    assert (code, checks["nvrtc"]["status"]) == (0, "warn")


def test_an_nvrtc_that_cannot_compile_is_broken_only_with_a_gpu(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object) -> None:
        raise nvrtc.CompileError("refused:\nfailed to open libnvrtc-builtins.so")

    monkeypatch.setattr(nvrtc.Compiler, "run", run)
    found = doctor_module.nvrtc()
    assert found.status == "fail" and found.detail.endswith("failed to open libnvrtc-builtins.so")
    monkeypatch.setattr(doctor_module, "gpus", list)
    assert doctor_module.nvrtc().status == "warn"


def test_a_shared_memory_limit_unlike_the_tables_is_a_warning(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_module, "gpus", lambda: [fake_gpu("h200", shared_memory_per_block_optin=1000)])
    found = doctor_module.shared_memory()
    assert found.status == "warn"
    assert "1000 bytes" in found.detail and "232448" in found.detail


def test_a_gpu_that_torch_cannot_use_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def current_device() -> int:
        raise RuntimeError("the driver is too old\nand more")

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(doctor_module, "gpus", list)
    monkeypatch.setattr(doctor_module, "has_nvidia_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", current_device)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = doctor_module.gpu()
    assert found.status == "fail"
    assert found.detail.endswith("the driver is too old")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert doctor_module.gpu().status == "warn"


@pytest.mark.parametrize(
    ("only_admins", "capabilities", "status"),
    [(0, 0, "ok"), (1, 0, "warn"), (1, 1 << 21, "ok"), (1, 1 << 38, "ok"), (1, 1 << 12, "warn")],
    ids=["open", "closed", "SYS_ADMIN", "PERFMON", "other-capability"],
)
def test_profiler_permission(
    only_admins: int, capabilities: int, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = tmp_path / "params"
    params.write_text(f"ResmanDebugLevel: 4294967295\nRmProfilingAdminOnly: {only_admins}\nMobile: 4294967295\n")
    monkeypatch.setattr(doctor_module, "DRIVER_PARAMS", params)
    monkeypatch.setattr(doctor_module, "effective_capabilities", lambda: capabilities)
    found = doctor_module.profiler()
    assert found.status == status
    assert ("NVreg_RestrictProfilingToAdminUsers=0" in found.fix) == (status == "warn")


@pytest.mark.parametrize(("error", "status"), [(1e-3, "ok"), (3e-3, "fail"), (float("nan"), "fail")])
def test_wrong_numbers_in_the_live_test_are_broken(error: float, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_module, "gpus", list)
    monkeypatch.setattr(doctor_module, "smoke", lambda device: (error, 2e-3))
    assert doctor_module.live_test().status == status


def test_an_op_that_does_not_import_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashkernels.attention.api", None)
    monkeypatch.setattr(doctor_module, "CHECKS", [doctor_module.implementations])
    code, checks = report()
    assert (code, checks["implementations"]["status"]) == (1, "fail")


def test_a_check_that_hangs_is_a_failure_and_not_the_end() -> None:
    def slow_check() -> Check:
        time.sleep(60)
        return ok("at last")

    start = time.monotonic()
    found = guarded(slow_check, patience=0.05)
    assert (found.name, found.status) == ("slow check", "fail")
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    ("capability", "images", "expected"),
    [
        ((9, 0), ["sm_80", "sm_90", "compute_90"], "sm_90"),
        ((8, 9), ["sm_80", "sm_86"], "sm_86"),
        ((8, 0), ["sm_86"], None),
        ((9, 0), ["sm_90a"], "sm_90a"),
        ((10, 3), ["sm_100a"], None),
        ((10, 3), ["sm_100f"], "sm_100f"),
        ((12, 0), ["sm_100", "sm_100f"], None),
        ((12, 1), ["sm_120"], "sm_120"),
        ((12, 0), ["sm_90", "compute_90"], "compute_90"),
        ((12, 0), ["compute_90a", "compute_100f"], None),
        ((12, 0), [], None),
    ],
    ids=str,
)
def test_which_of_torchs_images_a_gpu_runs(
    capability: tuple[int, int], images: list[str], expected: str | None
) -> None:
    assert serving_image(capability, images) == expected
