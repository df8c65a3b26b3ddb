"""The Hopper kernels on this CPU: `fk.attention` and `fk.decode` with impl="hopper" and CPU tensors; gradients, too.

Inside `on_the_machine`, all of the host's code is the usual one; only what talks to NVIDIA's driver is replaced.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from tests.machine import machine
from torch import Tensor

import flashkernels.attention.api as api
import flashkernels.decode.api as decode_api
from flashkernels import hardware
from flashkernels.attention.hopper import backward, forward
from flashkernels.decode.hopper import decode
from flashkernels.dispatch import Impl
from flashkernels.jit import counters, driver, eager, nvrtc

MAP = struct.Struct("QII5Q4Q5II")  # TensorMap of block.h
ELEMENTS = {0: 1, 6: 2, 7: 4, 9: 2}  # bytes, by CUtensorMapDataType
SWIZZLES = {number: width for width, number in driver.SWIZZLES.items()}


@dataclass
class Run:
    """What happened on the machine."""

    seed: int
    checks: bool
    resident: int
    launches: list[str] = field(default_factory=list)
    instructions: int = 0
    memory: dict[int, int] = field(default_factory=dict)  # ends of what kernels were told of, by beginnings
    zeros: list[Tensor] = field(default_factory=list)

    def saw(self, x: Tensor) -> None:
        if not x.is_meta and x.numel():
            storage = x.untyped_storage()
            self.memory[storage.data_ptr()] = storage.data_ptr() + storage.nbytes()

    def start(
        self, code: machine.Kernel, grid: int, threads: int, parameters: int, shared: int, cluster: int, together: bool
    ) -> None:  # fmt: skip
        """`together`: blocks wait for one another, so all of them run at a time."""
        self.launches.append(code.kernel.name)
        try:
            self.instructions += code.run(
                grid, threads, parameters, self.memory.items(), dynamic=shared, cluster=cluster,
                resident=grid if together else self.resident, seed=self.seed, checks=self.checks,
            )  # fmt: skip
        except machine.KernelFault:
            self.zeros.clear()  # it has not come to clear its counters
            raise


@contextmanager
def on_the_machine(
    *, sms: int = 132, seed: int = 2, checks: bool = True, resident: int = 6, edit: Callable[[str], str] | None = None
) -> Iterator[Run]:
    """A Hopper GPU of so many multiprocessors, of whose blocks at most `resident` run at a time. `seed`: see
    `machine.Kernel.run`. With `checks`, races are faults. `edit` changes the texts of programs, to break them."""
    if reason := machine.missing():
        pytest.skip(reason)
    run = Run(seed, checks, resident)
    gpu = replace(hardware.GPUS["h200"], sms=sms)
    data_ptr, new_empty = Tensor.data_ptr, Tensor.new_empty

    def there(describe: Callable[..., Any]) -> Callable[..., Any]:
        """The same problem, on the GPU."""
        return lambda *of, **named: replace(describe(*of, **named), device="cuda")

    def seen(x: Tensor) -> int:
        run.saw(x)
        return data_ptr(x)

    def unwritten(x: Tensor, *of: Any, **named: Any) -> Tensor:
        return _poisoned(new_empty(x, *of, **named))

    def room(*of: Any) -> Callable[[], Tensor]:
        made = eager.room(*of)
        return lambda: _poisoned(made())

    def zeros(device: int | None, stream: int) -> int:
        if not run.zeros:
            run.zeros.append(torch.zeros(counters.SLOT, dtype=torch.int32))
        return run.zeros[0].data_ptr()

    def compile(name: str, source: str, headers: Mapping[str, str], *of: Any) -> bytes:
        texts = {file: edit(text) for file, text in headers.items()} if edit else headers
        return machine.compiled(name, edit(source) if edit else source, texts).encode()

    class Kernel:
        """`driver.Kernel`, whose launches run at once."""

        def __init__(
            self, code: bytes | driver.Library, name: str, shared: int, early: bool = False, cooperative: bool = False,
            cluster: int = 0,
        ) -> None:  # fmt: skip
            text = code if isinstance(code, bytes) else code.cubin
            self.code, self.shared, self.cluster = machine.kernels(text.decode())[name], shared, cluster
            self.together = cooperative

        def launch(self, grid: int, block: int, stream: int, parameters: int) -> None:
            run.start(self.code, grid, block, parameters, self.shared, self.cluster, self.together)

        def starter(self, block: int, parameters: Sequence[int]) -> driver.Start:
            return lambda grid, stream: self.launch(grid, block, stream, parameters[0])

    driver.tensor_map.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "_problem", there(api._problem))
        patch.setattr(decode_api, "described", there(decode_api.described))
        patch.setattr(decode_api, "_plans", {})
        patch.setattr(api, "_fusable", lambda device, impl: impl != "torch")
        patch.setattr(hardware, "detect", lambda device=None: gpu)
        patch.setattr(Tensor, "data_ptr", seen)
        patch.setattr(Tensor, "new_empty", unwritten)
        patch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
        patch.setattr(torch.cuda, "current_device", lambda: None)
        patch.setattr(decode, "counters", zeros)
        decode.kernel.cache_clear()
        patch.setattr(driver, "Kernel", Kernel)
        patch.setattr(driver, "encoded_map", encoded_map)
        patch.setattr(nvrtc, "compile", compile)
        for module in (forward, backward):
            patch.setattr(module, "counters", zeros)
            patch.setattr(module, "room", room)
            module.library.cache_clear()
        for name, make in (("_plans", api._plan), ("_backward_plans", api._plan_backward)):
            patch.setattr(api, name, eager.Plans(make))
        patch.setattr(api, "BACKWARD_IMPLS", tuple(map(_hopper_or_nothing, api.BACKWARD_IMPLS)))
        try:
            yield run
        finally:  # no GPU may get what was compiled and mapped for the machine
            driver.tensor_map.cache_clear()
            decode.kernel.cache_clear()
            for module in (forward, backward):
                module.library.cache_clear()
    for counts in run.zeros:
        assert not counts.any(), "a kernel left its counters behind"


def _hopper_or_nothing(row: Impl[Any]) -> Impl[Any]:
    """No other implementation serves gradients here: that would pass for a test of this one."""
    return row if row.name == "hopper" else replace(row, rejects=lambda problem, gpu: "not on this machine")


def _poisoned(x: Tensor) -> Tensor:
    """Memory as nobody has written it: NaN, and far from any place."""
    if x.numel():
        x.untyped_storage().fill_(0xFF)
    return x


def encoded_map(
    pointer: int, dtype: int, sizes: tuple[int, ...], strides_bytes: tuple[int, ...], box: tuple[int, ...],
    swizzle: int, promotion: int,
) -> bytes:  # fmt: skip
    """`driver.encoded_map` for the machine, which refuses what the driver refuses."""
    if pointer % 16 or any(step % 16 or step >= 1 << 40 for step in strides_bytes):
        raise RuntimeError("CUDA_ERROR_INVALID_VALUE (1)")
    inner = box[0] * ELEMENTS[dtype]
    if any(not 1 <= n <= 256 for n in box) or inner % 16 or (swizzle and inner > SWIZZLES[swizzle]):
        raise RuntimeError("CUDA_ERROR_INVALID_VALUE (1)")
    if any(not 1 <= n <= 1 << 32 for n in sizes):
        raise RuntimeError("CUDA_ERROR_INVALID_VALUE (1)")

    def filled(numbers: tuple[int, ...], count: int) -> tuple[int, ...]:
        return (*numbers, *(1,) * (count - len(numbers)))

    packed = MAP.pack(
        pointer,
        ELEMENTS[dtype],
        len(sizes),
        *filled(sizes, 5),
        *filled(strides_bytes, 4),
        *filled(box, 5),
        SWIZZLES[swizzle],
    )
    return packed.ljust(driver.MAP_BYTES, b"\0")
