"""What the GPU tests of all kernels share: inputs on the GPU, checks against the oracle, and which kernel runs here."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import flashkernels as fk
import flashkernels.attention.api as api
from flashkernels.attention.hopper import tiles
from flashkernels.attention.hopper.source import Variant
from flashkernels.hardware import detect
from flashkernels.jit import eager

from . import oracle
from .cases import Ragged, Shape, dtype_id as dtype_id, paged, qkv

GIB = 1024**3
INF, NAN = float("inf"), float("nan")
LENGTHS = ([700, 0, 1, 129, 333, 64], [500, 40, 900, 0, 333, 1])
LARGE = Shape(b=2, sq=700, sk=1000, h=6, hkv=2, d=72)
SMALL = Shape(b=1, sq=512, sk=512, h=8, hkv=8, d=64)
SPLIT = SMALL.but(sk=4200)  # the Hopper forward cuts its tiles along their keys
FAR = 2**31  # elements
MANY = 200  # tests: more than a process has of a module whose tests twelve or more share, less than the module has


def capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


on_hopper = pytest.mark.skipif(capability() != (9, 0), reason="needs a GPU of compute capability 9.0")
IMPLS = ("triton", pytest.param("hopper", marks=on_hopper))
each_impl = pytest.mark.parametrize("impl", IMPLS)
each_half = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_id)


def per_impl(name: str, triton: Iterable[Any], hopper: Iterable[Any]) -> pytest.MarkDecorator:
    """Parameters (impl, name), where the kernels do not take the same values."""
    params: list[Any] = [pytest.param("triton", x, id=f"triton-{_id(x)}") for x in triton]
    params += [pytest.param("hopper", x, marks=on_hopper, id=f"hopper-{_id(x)}") for x in hopper]
    return pytest.mark.parametrize(("impl", name), params)


def _id(x: Any) -> str:
    return dtype_id(x) if isinstance(x, torch.dtype) else str(x)


def compile_ahead(variants: Iterable[Variant], request: pytest.FixtureRequest) -> None:
    """By all cores, and looks for faults, where this process has most tests of the module. One of many processes,
    xdist's or others, compiles what it meets: the rest are on the other cores. (The gates of tests/compile and `make
    compile-all` look for faults in any case.)"""
    from flashkernels.attention.hopper.build import build_all  # imports Triton, which not every machine has

    chosen = sum(item.path == request.path for item in request.session.items)
    if "PYTEST_XDIST_WORKER" not in os.environ and chosen > MANY:
        assert [(name, faults) for name, faults in build_all(variants) if faults] == []


def multiprocessors() -> int:
    gpu = detect()
    assert gpu is not None
    return gpu.sms


def shares(*inputs: Tensor, **features: Any) -> int:
    """Blocks that share the tiles which the Hopper forward cuts along their keys."""
    return tiles.choose(api.problem_of(*inputs, **features), multiprocessors()).shares


def cuda(shape: Shape, dtype: torch.dtype = torch.bfloat16, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    return qkv(shape, dtype, device="cuda", **options)


def check(q: Tensor, k: Tensor, v: Tensor, *, impl: str, **features: Any) -> tuple[Tensor, Tensor]:
    """Runs dense attention and compares it with the oracle."""
    out, lse = fk.attention(q, k, v, return_lse=True, impl=impl, **features)
    oracle.assert_correct(out, lse, q, k, v, **features)
    return out, lse


def check_varlen(batch: Ragged, *, impl: str, **features: Any) -> tuple[Tensor, Tensor]:
    out, lse = fk.attention_varlen(*batch.args, return_lse=True, impl=impl, **features)
    oracle.assert_correct_varlen(out, lse, *batch.tensors, **features)
    return out, lse


def check_pages(batch: Ragged, page_size: int, *, impl: str, **features: Any) -> tuple[Tensor, Tensor]:
    """The keys and values in pages, against the same in order; what belongs to no key is NaN."""
    pages = paged(batch, page_size)
    args = (batch.q, pages.k, pages.v, *batch.args[3:])
    out, lse = fk.attention_varlen(*args, block_table=pages.table, return_lse=True, impl=impl, **features)
    oracle.assert_correct_varlen(out, lse, *batch.tensors, **features)
    return out, lse


def on_gpu(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.cuda()
    if isinstance(x, tuple):
        return tuple(map(on_gpu, x))
    return {name: on_gpu(value) for name, value in x.items()} if isinstance(x, dict) else x


def needs_memory(gib: int) -> None:
    free = torch.cuda.mem_get_info()[0] // GIB
    if free < gib:
        pytest.skip(f"needs {gib} GiB of GPU memory, {free} GiB are free")


def far_apart(x: Tensor) -> Tensor:
    """The same values with 2^31 elements between one sequence of the batch and the next."""
    room = torch.empty(FAR * (x.shape[0] - 1) + x[0].numel(), device=x.device, dtype=x.dtype)
    return room.as_strided(x.shape, (FAR, *x.stride()[1:])).copy_(x)


class Filling:
    """For `eager.compiled`, whose own allocator torch's mode does not know."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch._C._dynamo.guards, name)

    @staticmethod
    def _empty_strided_cuda(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(shape, strides, dtype=dtype, device="cuda")


@contextmanager
def new_memory_is_nan() -> Iterator[None]:
    """torch.empty and its kin return NaN, so that an element nobody writes is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(1, device="cuda").isnan().all()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(eager, "compiled", Filling())
            for name, make in (("_plans", api._plan), ("_backward_plans", api._plan_backward)):
                patch.setattr(api, name, eager.Plans(make))  # those of before have the other allocator
            yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def syncs_are_errors() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Inputs whose strides are not the usual ones


def misaligned(x: Tensor) -> Tensor:
    """One element past the start of an allocation."""
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


def odd_rows(x: Tensor) -> Tensor:
    """Rows of an odd number of elements."""
    return torch.nn.functional.pad(x, (0, 1), value=NAN)[..., :-1]


def spread(x: Tensor) -> Tensor:
    """A gap between elements."""
    return torch.stack([x, x * NAN], -1)[..., 0]


def sequence_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def head_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def wide_rows(x: Tensor) -> Tensor:
    """A part of rows that are twice as long."""
    return torch.cat([x, x * NAN], -1)[..., : x.shape[-1]]


def shared_heads(x: Tensor) -> Tensor:
    """All heads are views of the first."""
    return x[:, :, :1].expand(x.shape)
