"""Counters in device memory that kernels find at zero and leave at zero: tile counters of persistent grids.

Two launches that may run at the same time must not share one. Launches on one stream follow one another, so each stream
has its own; so has each CUDA graph, whatever stream it is replayed on.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any

import torch
from torch import Tensor

from flashkernels.jit import driver

SLOT = 2048  # ints that one launch may use
SLOTS = 512

_lock = threading.Lock()
_pools: dict[int, Tensor] = {}
_slots: dict[tuple[int, int, int], int] = {}
_kept: list[Tensor] = []


def counters(device: int, stream: int) -> int:
    """The address of SLOT int32 zeros, for one launch on this stream of this device."""
    capture = _capture_id(stream) if torch._C._cuda_isCurrentStreamCapturing() else 0
    found = _slots.get((device, stream, capture))
    return _new_slot(device, stream, capture) if found is None else found


class Address:
    """Numbers on a device by their address: what a launch needs of a tensor."""

    def __init__(self, address: int, dtype: torch.dtype) -> None:
        self.address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self.address


_address = functools.lru_cache(maxsize=4 * SLOTS)(Address)


def zeros(count: int, dtype: torch.dtype, device: int | None) -> Any:
    """So many of them for one launch of a Triton kernel on the current stream, which leaves them at zero. The device is
    the current one; None is the CPU."""
    if device is None or count * dtype.itemsize > SLOT * 4:
        return torch.zeros(count, dtype=dtype, device="cpu" if device is None else f"cuda:{device}")
    return _address(counters(device, torch._C._cuda_getCurrentRawStream(device)), dtype)


def _new_slot(device: int, stream: int, capture: int) -> int:
    with _lock:
        pool = _pools.get(device)
        if pool is None and not capture:
            pool = _pools[device] = torch.zeros(SLOTS, SLOT, dtype=torch.int32, device=f"cuda:{device}")
            torch.cuda.synchronize(device)  # other streams may use theirs at once
        used = sum(key[0] == device for key in _slots)
        if pool is None or used >= SLOTS:  # a graph clears these at each replay: right, for one more node
            _kept.append(torch.zeros(SLOT, dtype=torch.int32, device=f"cuda:{device}"))
            return _slots.setdefault((device, stream, capture), _kept[-1].data_ptr())
        return _slots.setdefault((device, stream, capture), pool.data_ptr() + used * SLOT * 4)


def _capture_id(stream: int) -> int:
    """A number that no other capture of this process has."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    driver.call("cuStreamGetCaptureInfo_v2", ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number),
                None, None, None)  # fmt: skip
    return number.value
