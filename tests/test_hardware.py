"""The table of GPUs, finding a row in it, and reading a live device."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from flashkernels import hardware
from flashkernels.hardware import GPUS, Gpu, detect, from_properties, lookup

KEYS = ["a100", "rtx3090", "rtx4090", "l40s", "h100", "h100-pcie", "h200", "b200", "rtx5090", "rtx5090-laptop"]
# CUDA C++ Programming Guide: opt-in bytes of a block, bytes of an SM, threads of an SM.
LIMITS = {
    (8, 0): (163 * 1024, 164 * 1024, 2048),
    (8, 6): (101376, 102400, 1536),
    (8, 9): (101376, 102400, 1536),
    (9, 0): (232448, 233472, 2048),
    (10, 0): (232448, 233472, 2048),
    (12, 0): (101376, 102400, 1536),
}

each_gpu = pytest.mark.parametrize("gpu", GPUS.values(), ids=GPUS)


def properties(row: Gpu, **changes: Any) -> SimpleNamespace:
    """What torch would report of a GPU that is exactly the table's row, with `changes`; None removes an attribute."""
    attributes = {
        "name": row.name,
        "major": row.capability[0],
        "minor": row.capability[1],
        "multi_processor_count": row.sms,
        "shared_memory_per_block_optin": row.shared_per_block,
        "shared_memory_per_multiprocessor": row.shared_per_sm,
        "L2_cache_size": row.l2_bytes,
        "regs_per_multiprocessor": row.registers_per_sm,
        "max_threads_per_multi_processor": row.threads_per_sm,
        "memory_clock_rate": round(row.bandwidth * 8 / 2e3 / 5120),
        "memory_bus_width": 5120,
        **changes,
    }
    return SimpleNamespace(**{name: value for name, value in attributes.items() if value is not None})


def test_the_table_has_every_promised_gpu() -> None:
    assert list(GPUS) == KEYS


@each_gpu
def test_limits_are_those_of_the_compute_capability(gpu: Gpu) -> None:
    assert (gpu.shared_per_block, gpu.shared_per_sm, gpu.threads_per_sm) == LIMITS[gpu.capability]
    assert gpu.registers_per_sm == 65536


@each_gpu
def test_rates_are_in_order_and_fp8_is_where_the_chip_has_it(gpu: Gpu) -> None:
    peak = gpu.peak
    assert peak["fp64"] <= peak["fp32"] <= peak["tf32"] < peak["fp16"] == peak["bf16"] < peak["int8"]
    assert ("fp8" in peak) == gpu.has_fp8
    # FLOP per byte at which the bound changes: far outside this range a unit is wrong.
    assert 50 < peak["fp16"] / gpu.bandwidth < 450
    assert gpu.source


@each_gpu
def test_fp16_rate_per_sm_is_that_of_the_tensor_cores(gpu: Gpu) -> None:
    """Peak / (SMs x FLOP per clock) must give back a believable boost clock."""
    flops_per_clock = {(8, 0): 2048, (9, 0): 4096, (10, 0): 8192}.get(
        gpu.capability, 512 if "GeForce" in gpu.name else 1024
    )
    clock = gpu.peak["fp16"] / gpu.sms / flops_per_clock
    assert 1.3e9 < clock < 2.8e9


@each_gpu
def test_a_gpu_can_key_a_cache(gpu: Gpu) -> None:
    assert {gpu: 1}[lookup(gpu.key)] == 1


@each_gpu
def test_lookup_takes_key_and_driver_name_in_any_case(gpu: Gpu) -> None:
    assert lookup(gpu.key.upper()) is lookup(gpu.name.lower()) is gpu


def test_lookup_of_an_unknown_gpu_names_it_and_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"gpu='h300'.*a100, .*rtx5090-laptop"):
        lookup("h300")


def test_capabilities_follow_the_architecture() -> None:
    assert [key for key, gpu in GPUS.items() if gpu.has_wgmma] == ["h100", "h100-pcie", "h200"]
    assert not lookup("l40s").has_tma and lookup("b200").has_tma and lookup("rtx5090").has_tma
    assert [lookup(key).cc for key in ("a100", "rtx4090", "b200", "rtx5090")] == [80, 89, 100, 120]


@each_gpu
def test_a_device_as_in_the_table_gives_back_its_row(gpu: Gpu) -> None:
    found = from_properties(properties(gpu))
    assert (found.key, found.peak, found.bandwidth) == (gpu.key, gpu.peak, gpu.bandwidth)
    assert found.source == f"{gpu.source}; limits read from the device"


def test_what_the_device_reports_corrects_the_table() -> None:
    row = lookup("h200")
    found = from_properties(
        properties(row, multi_processor_count=66, shared_memory_per_block_optin=200_000, L2_cache_size=30_000_000)
    )
    assert (found.key, found.sms, found.shared_per_block, found.l2_bytes) == ("h200", 66, 200_000, 30_000_000)
    assert found.peak["bf16"] == row.peak["bf16"] / 2
    assert "rates scaled to 66 of 132 SMs" in found.source


@pytest.mark.parametrize(
    ("clock_khz", "bandwidth"), [(3_201_000, 4.8e12), (1_600_000, 2 * 1.6e9 * 752)], ids=["as-rounded", "really-lower"]
)
def test_bandwidth_is_the_datasheets_unless_the_clock_disagrees(clock_khz: int, bandwidth: float) -> None:
    found = from_properties(properties(lookup("h200"), memory_clock_rate=clock_khz, memory_bus_width=6016))
    assert found.bandwidth == pytest.approx(bandwidth)


def test_an_older_torch_that_reports_little_gives_the_tables_limits() -> None:
    row = lookup("rtx4090")
    missing = dict.fromkeys(
        (
            "shared_memory_per_block_optin", "shared_memory_per_multiprocessor", "L2_cache_size",
            "regs_per_multiprocessor", "memory_clock_rate", "memory_bus_width",
        )
    )  # fmt: skip
    found = from_properties(properties(row, **missing))
    assert (found.shared_per_block, found.l2_bytes, found.bandwidth) == (
        row.shared_per_block,
        row.l2_bytes,
        row.bandwidth,
    )


def test_an_unknown_gpu_takes_its_limits_from_the_device_and_its_rates_from_a_relative() -> None:
    row = lookup("rtx4090")
    found = from_properties(
        properties(
            row,
            name="NVIDIA GeForce RTX 4080",
            multi_processor_count=76,
            memory_clock_rate=11_201_000,
            memory_bus_width=256,
        )
    )
    assert (found.key, found.name, found.sms) == ("geforce-rtx-4080", "NVIDIA GeForce RTX 4080", 76)
    assert found.peak["fp16"] == pytest.approx(row.peak["fp16"] * 76 / 128)
    assert found.bandwidth == pytest.approx(716.9e9, rel=1e-3)
    assert "NVIDIA GeForce RTX 4090" in found.source


def test_an_unknown_gpu_without_a_memory_clock_scales_its_bandwidth() -> None:
    row = lookup("b200")
    found = from_properties(
        properties(row, name="NVIDIA B300", minor=3, multi_processor_count=74, memory_clock_rate=None)
    )
    assert found.capability == (10, 3)
    assert found.bandwidth == row.bandwidth / 2
    assert "bandwidth scaled" in found.source


@pytest.mark.parametrize(
    ("name", "capability", "sms", "relative"),
    [
        ("NVIDIA A100-SXM4-40GB", (8, 0), 108, "a100"),
        ("Orin", (8, 7), 16, "rtx3090"),
        ("NVIDIA RTX 6000 Ada Generation", (8, 9), 142, "l40s"),
        ("NVIDIA GeForce RTX 4060", (8, 9), 24, "rtx4090"),
        ("NVIDIA H100 NVL", (9, 0), 132, "h100"),
        ("NVIDIA GeForce RTX 5080 Laptop GPU", (12, 0), 60, "rtx5090-laptop"),
        ("NVIDIA GB10", (12, 1), 48, "rtx5090"),  # not a laptop, though nearer to one in size
        ("NVIDIA Thor", (11, 0), 20, "b200"),
        ("NVIDIA Tesla T4", (7, 5), 40, "a100"),
    ],
)
def test_the_relative_of_an_unknown_gpu(name: str, capability: tuple[int, int], sms: int, relative: str) -> None:
    assert hardware._relative(name, capability, sms).key == relative


def test_a_workstation_card_runs_fp32_accumulation_at_twice_the_geforce_rate() -> None:
    row = lookup("rtx5090")
    found = from_properties(
        properties(row, name="NVIDIA RTX PRO 6000 Blackwell Server Edition", multi_processor_count=188)
    )
    assert found.peak["bf16"] == pytest.approx(2 * row.peak["bf16"] * 188 / 170)
    assert found.peak["fp32"] == pytest.approx(row.peak["fp32"] * 188 / 170)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A torch that sees an H200 as cuda:0 and a current RTX 5090 as cuda:1; gives the indices that were read."""
    torch = pytest.importorskip("torch")
    read: list[int] = []

    def get_device_properties(index: int) -> SimpleNamespace:
        read.append(index)
        return properties(lookup(("h200", "rtx5090")[index]))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", get_device_properties)
    monkeypatch.setattr(torch.version, "hip", None)
    hardware._detect.cache_clear()
    yield read
    hardware._detect.cache_clear()


@pytest.mark.parametrize(
    ("device", "key"),
    [(None, "rtx5090"), ("cuda", "rtx5090"), (0, "h200"), ("cuda:0", "h200"), ("cuda:1", "rtx5090"), ("cpu", None)],
)
def test_detect_reads_the_device_asked_for(two_gpus: list[int], device: Any, key: str | None) -> None:
    found = detect(device)
    assert (found.key if found else None) == key


def test_detect_reads_a_device_once(two_gpus: list[int]) -> None:
    assert detect(0) is detect("cuda:0")
    assert two_gpus == [0]


def test_detect_without_cuda_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert detect() is None


def test_importing_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import flashkernels.hardware as h; print(h.lookup('h200').name)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "NVIDIA H200"


@pytest.mark.gpu
def test_the_live_gpu_agrees_with_its_properties() -> None:
    import torch

    found, reported = detect(0), torch.cuda.get_device_properties(0)
    assert found is not None
    assert (found.name, found.sms) == (reported.name, reported.multi_processor_count)
    assert found.shared_per_block >= 99 * 1024
    assert found.bandwidth > 1e11
