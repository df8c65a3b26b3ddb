"""Facts about GPUs: what the tiling, the dispatch and the roofline need to know of a machine, present or not.

`GPUS` is the table of known models, `lookup()` finds a row, `detect()` reads the GPU that is really there.
Importing this needs no torch.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

KiB, MiB = 1024, 1024**2


@dataclass(frozen=True)
class Gpu:
    """One GPU model. Rates are dense (no sparsity), in FLOP/s (OP/s for int8) and bytes/s, from the named source.

    fp64, tf32, fp16, bf16, fp8 and int8 are tensor-core rates where the chip has them, fp32 is the plain cores' rate.
    Floating-point tensor rates are those with fp32 accumulation, which is how the kernels here compute. GeForce cards
    run that at half the rate of fp16 accumulation, so their figures are half of the advertised ones.
    """

    key: str  # short name for command lines: "h200"
    name: str  # as the driver reports it: "NVIDIA H200"
    capability: tuple[int, int]
    sms: int
    shared_per_block: int  # opt-in maximum of one block, bytes
    shared_per_sm: int
    l2_bytes: int
    bandwidth: float
    # dtype -> dense peak: fp64, fp32, tf32, fp16, bf16, fp8, int8 where the chip has it. Not hashed, so that a Gpu can
    # be the key of a cache.
    peak: Mapping[str, float] = field(hash=False)
    source: str
    registers_per_sm: int = 65536
    threads_per_sm: int = 2048

    @property
    def cc(self) -> int:
        """Compute capability as Triton and nvcc spell it: 80, 89, 90, 100, 120."""
        return self.capability[0] * 10 + self.capability[1]

    @property
    def has_wgmma(self) -> bool:
        return self.capability[0] == 9

    @property
    def has_tma(self) -> bool:
        return self.capability[0] >= 9

    @property
    def has_fp8(self) -> bool:
        return self.capability >= (8, 9)


def _tera(**rates: float) -> dict[str, float]:
    return {dtype: rate * 1e12 for dtype, rate in rates.items()}


# Shared memory and threads of every row: "Technical Specifications per Compute Capability", CUDA C++ Programming Guide.
GPUS: dict[str, Gpu] = {
    gpu.key: gpu
    for gpu in (
        Gpu(
            key="a100", name="NVIDIA A100-SXM4-80GB", capability=(8, 0), sms=108,
            shared_per_block=163 * KiB, shared_per_sm=164 * KiB, l2_bytes=40 * MiB, bandwidth=2.039e12,
            peak=_tera(fp64=19.5, fp32=19.5, tf32=156, fp16=312, bf16=312, int8=624),
            source="NVIDIA A100 datasheet (SXM 80 GB) and GA100 whitepaper",
        ),
        Gpu(
            key="rtx3090", name="NVIDIA GeForce RTX 3090", capability=(8, 6), sms=82,
            shared_per_block=99 * KiB, shared_per_sm=100 * KiB, l2_bytes=6 * MiB, bandwidth=936e9,
            peak=_tera(fp64=0.556, fp32=35.6, tf32=35.6, fp16=71, bf16=71, int8=284),
            threads_per_sm=1536,
            source="NVIDIA GA102 whitepaper, RTX 3090, tensor rates with fp32 accumulation; fp64 is 1/64 of fp32",
        ),
        Gpu(
            key="rtx4090", name="NVIDIA GeForce RTX 4090", capability=(8, 9), sms=128,
            shared_per_block=99 * KiB, shared_per_sm=100 * KiB, l2_bytes=72 * MiB, bandwidth=1.008e12,
            peak=_tera(fp64=1.29, fp32=82.6, tf32=82.6, fp16=165.2, bf16=165.2, fp8=330.3, int8=660.6),
            threads_per_sm=1536,
            source="NVIDIA Ada whitepaper, RTX 4090, tensor rates with fp32 accumulation; fp64 is 1/64 of fp32",
        ),
        Gpu(
            key="l40s", name="NVIDIA L40S", capability=(8, 9), sms=142,
            shared_per_block=99 * KiB, shared_per_sm=100 * KiB, l2_bytes=96 * MiB, bandwidth=864e9,
            peak=_tera(fp64=1.43, fp32=91.6, tf32=183, fp16=362.05, bf16=362.05, fp8=733, int8=733),
            threads_per_sm=1536,
            source="NVIDIA L40S datasheet (full rate with fp32 accumulation); L2 of AD102; fp64 is 1/64 of fp32",
        ),
        Gpu(
            key="h100", name="NVIDIA H100 80GB HBM3", capability=(9, 0), sms=132,
            shared_per_block=227 * KiB, shared_per_sm=228 * KiB, l2_bytes=50 * MiB, bandwidth=3.35e12,
            peak=_tera(fp64=66.9, fp32=66.9, tf32=494.7, fp16=989.4, bf16=989.4, fp8=1978.9, int8=1978.9),
            source="NVIDIA H100 whitepaper, SXM5",
        ),
        Gpu(
            key="h100-pcie", name="NVIDIA H100 PCIe", capability=(9, 0), sms=114,
            shared_per_block=227 * KiB, shared_per_sm=228 * KiB, l2_bytes=50 * MiB, bandwidth=2.039e12,
            peak=_tera(fp64=51.2, fp32=51.2, tf32=378, fp16=756, bf16=756, fp8=1513, int8=1513),
            source="NVIDIA H100 whitepaper, PCIe; bandwidth 1593 MHz x 2 x 5120 bits",
        ),
        Gpu(
            key="h200", name="NVIDIA H200", capability=(9, 0), sms=132,
            shared_per_block=227 * KiB, shared_per_sm=228 * KiB, l2_bytes=60 * MiB, bandwidth=4.8e12,
            peak=_tera(fp64=67, fp32=67, tf32=494.7, fp16=989.4, bf16=989.4, fp8=1978.9, int8=1978.9),
            source="NVIDIA H200 datasheet; L2 and SM count read from the device",
        ),
        Gpu(
            key="b200", name="NVIDIA B200", capability=(10, 0), sms=148,
            shared_per_block=227 * KiB, shared_per_sm=228 * KiB, l2_bytes=126 * MiB, bandwidth=8.0e12,
            peak=_tera(fp64=37, fp32=75, tf32=1100, fp16=2250, bf16=2250, fp8=4500, int8=4500),
            source="NVIDIA HGX B200 datasheet, half of its sparse tensor rates; bandwidth of DGX B200 / 8; "
            "L2 and SM count as published measurements read them",
        ),
        Gpu(
            key="rtx5090", name="NVIDIA GeForce RTX 5090", capability=(12, 0), sms=170,
            shared_per_block=99 * KiB, shared_per_sm=100 * KiB, l2_bytes=96 * MiB, bandwidth=1.792e12,
            peak=_tera(fp64=1.64, fp32=104.8, tf32=104.8, fp16=209.5, bf16=209.5, fp8=419, int8=838),
            threads_per_sm=1536,
            source="NVIDIA RTX Blackwell whitepaper, RTX 5090, tensor rates with fp32 accumulation; "
            "fp64 is 1/64 of fp32",
        ),
        Gpu(
            key="rtx5090-laptop", name="NVIDIA GeForce RTX 5090 Laptop GPU", capability=(12, 0), sms=82,
            shared_per_block=99 * KiB, shared_per_sm=100 * KiB, l2_bytes=64 * MiB, bandwidth=896e9,
            peak=_tera(fp64=0.89, fp32=57, tf32=57, fp16=114, bf16=114, fp8=228, int8=456),
            threads_per_sm=1536,
            source="every rate from NVIDIA's 1824 AI TOPS (sparse FP4 = 16 x fp16 with fp32 accumulation) at the top "
            "power limit; 256 bits of 28 Gb/s GDDR7; L2 of GB203",
        ),
    )
}  # fmt: skip

# A GeForce runs these at half the rate of the workstation and server cards of the same capability.
_HALVED_ON_GEFORCE = frozenset(("tf32", "fp16", "bf16", "fp8"))
# Datasheets round: memory clock x bus width of an H200 gives 4.81 TB/s, its datasheet says 4.8.
_BANDWIDTH_TOLERANCE = 0.05


def lookup(name: str) -> Gpu:
    """The table's row called `name`: its key or the driver's name, in any case.

    >>> lookup("H200").shared_per_block
    232448
    >>> lookup("NVIDIA GeForce RTX 5090").key
    'rtx5090'
    """
    for gpu in GPUS.values():
        if name.lower() in (gpu.key, gpu.name.lower()):
            return gpu
    raise ValueError(f"gpu={name!r} is not known; known are {', '.join(GPUS)}")


def detect(device: Any = None) -> Gpu | None:
    """The GPU that is really there, or None where `device` is not an NVIDIA GPU or there is none.

    `device` is an index, a torch device or its name; None is the current CUDA device. The table's row is corrected
    by what the device reports; see `from_properties`. The answer is read once per device.
    """
    import torch

    if not torch.cuda.is_available() or torch.version.hip:
        return None
    if not isinstance(device, int):
        device = torch.device("cuda" if device is None else device)
        if device.type != "cuda":
            return None
        device = torch.cuda.current_device() if device.index is None else device.index
    return _detect(device)


@functools.cache
def _detect(index: int) -> Gpu:
    import torch

    return from_properties(torch.cuda.get_device_properties(index))


def from_properties(properties: Any) -> Gpu:
    """The Gpu that a `torch.cuda.get_device_properties` object describes.

    What the device reports wins over the table; what this torch does not expose comes from the table. A model that the
    table does not have takes its rates from its nearest relative in the table, SM for SM, and says so in `source`.
    """
    name, capability, sms = properties.name, (properties.major, properties.minor), properties.multi_processor_count
    known = next((gpu for gpu in GPUS.values() if gpu.name.lower() == name.lower()), None)
    base = known or _relative(name, capability, sms)

    def read(attribute: str, otherwise: int) -> int:
        return getattr(properties, attribute, 0) or otherwise

    scale = sms / base.sms
    peak = {dtype: rate * scale for dtype, rate in base.peak.items()}
    bandwidth, notes = base.bandwidth, ["limits read from the device"]
    if known is None:
        notes.append(f"rates are those of an SM of {base.name}")
        if "GeForce" in base.name and "GeForce" not in name:
            peak = {dtype: rate * (2 if dtype in _HALVED_ON_GEFORCE else 1) for dtype, rate in peak.items()}
            notes.append("tensor rates doubled, for not a GeForce")
    elif scale != 1:
        notes.append(f"rates scaled to {sms} of {base.sms} SMs")

    # kHz and bits; both edges of the clock carry data.
    reported = 2e3 * read("memory_clock_rate", 0) * read("memory_bus_width", 0) / 8
    if reported and (known is None or abs(reported / base.bandwidth - 1) > _BANDWIDTH_TOLERANCE):
        bandwidth = reported
        notes.append("bandwidth is memory clock x bus width")
    elif known is None:
        bandwidth *= scale
        notes.append(f"bandwidth scaled by SMs from {base.name}")

    return replace(
        base,
        key=known.key if known else _slug(name),
        name=name,
        capability=capability,
        sms=sms,
        shared_per_block=read("shared_memory_per_block_optin", base.shared_per_block),
        shared_per_sm=read("shared_memory_per_multiprocessor", base.shared_per_sm),
        l2_bytes=read("L2_cache_size", base.l2_bytes),
        registers_per_sm=read("regs_per_multiprocessor", base.registers_per_sm),
        threads_per_sm=read("max_threads_per_multi_processor", base.threads_per_sm),
        bandwidth=bandwidth,
        peak=peak,
        source="; ".join([known.source, *notes] if known else notes),
    )


def _relative(name: str, capability: tuple[int, int], sms: int) -> Gpu:
    """The row nearest to an unknown GPU: newest capability not above its own, same product line, closest in size."""
    capabilities = {gpu.capability for gpu in GPUS.values()}
    nearest = max((c for c in capabilities if c <= capability), default=min(capabilities))
    return min(
        (gpu for gpu in GPUS.values() if gpu.capability == nearest),
        key=lambda gpu: (*((word in gpu.name) != (word in name) for word in ("GeForce", "Laptop")), abs(gpu.sms - sms)),
    )


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower().removeprefix("nvidia ")).strip("-")
