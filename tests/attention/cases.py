"""Inputs of the attention tests: tensors of a shape, and the features of attention by name."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

interpreter = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1 before triton is imported"
)


def dtype_id(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Shape:
    """Sizes of one dense call; `str(shape)` is its test id."""

    b: int = 2
    sq: int = 33
    sk: int = 47
    h: int = 4
    hkv: int = 2
    d: int = 16
    dv: int = 0  # 0: the same as d

    @property
    def dim_v(self) -> int:
        return self.dv or self.d

    def but(self, **sizes: int) -> Shape:
        return replace(self, **sizes)

    def __str__(self) -> str:
        dims = f"d{self.d}" + (f"v{self.dv}" if self.dv else "")
        return f"b{self.b}-q{self.sq}-k{self.sk}-h{self.h}:{self.hkv}-{dims}"


DEFAULT = Shape()


def generator(seed: int, device: str = "cpu") -> torch.Generator:
    there = torch.empty(0, device=device).device  # "cuda" may mean the CPU: tests/machine/plugin.py
    return torch.Generator(device=there).manual_seed(seed)


def qkv(
    shape: Shape, dtype: torch.dtype = torch.float32, *, layout: str = "bshd", device: str = "cpu", seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Normal q, k, v; queries twice as large, so that some weights are large and most are small."""
    gen = generator(seed, device)

    def normal(seq: int, heads: int, dim: int) -> Tensor:
        sizes = (shape.b, seq, heads, dim) if layout == "bshd" else (shape.b, heads, seq, dim)
        return torch.randn(sizes, generator=gen, device=device)

    q = 2 * normal(shape.sq, shape.h, shape.d)
    k, v = normal(shape.sk, shape.hkv, shape.d), normal(shape.sk, shape.hkv, shape.dim_v)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _uniform(sizes: Iterable[int], seed: int, device: str) -> Tensor:
    return torch.rand(tuple(sizes), generator=generator(seed, device), device=device)


def bool_mask(sizes: Iterable[int], *, keep: float = 0.6, seed: int = 1, device: str = "cpu") -> Tensor:
    return _uniform(sizes, seed, device) < keep


def float_mask(
    sizes: Iterable[int], *, drop: float = 0.2, seed: int = 2, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Tensor:
    """Normal biases, of which a part is -inf."""
    sizes = tuple(sizes)
    bias = torch.randn(sizes, generator=generator(seed, device), device=device)
    return bias.masked_fill(_uniform(sizes, seed + 1, device) < drop, float("-inf")).to(dtype)


def slopes(sizes: Iterable[int], *, device: str = "cpu") -> Tensor:
    return 0.02 + 0.3 * _uniform(sizes, 4, device)


def sinks(heads: int, *, device: str = "cpu") -> Tensor:
    return 3 * _uniform((heads,), 5, device) - 1


# name -> keywords of fk.attention, given the shape and the device
FEATURES: dict[str, Callable[[Shape, str], dict[str, Any]]] = {
    "plain": lambda s, device: {},
    "scale": lambda s, device: {"softmax_scale": 0.37},
    "causal": lambda s, device: {"causal": True},
    "window": lambda s, device: {"window": (9, 4)},
    "left": lambda s, device: {"window": (7, -1)},
    "right": lambda s, device: {"window": (-1, 5)},
    "softcap": lambda s, device: {"softcap": 1.5},
    "alibi": lambda s, device: {"alibi_slopes": slopes((s.h,), device=device)},
    "alibi2d": lambda s, device: {"alibi_slopes": slopes((s.b, s.h), device=device)},
    "sinks": lambda s, device: {"sinks": sinks(s.h, device=device)},
    "boolmask": lambda s, device: {"mask": bool_mask((s.b, s.h, s.sq, s.sk), device=device)},
    "floatmask": lambda s, device: {"mask": float_mask((s.b, s.h, s.sq, s.sk), device=device)},
}
NO_MASK = tuple(name for name in FEATURES if not name.endswith("mask"))  # what varlen takes


def keywords(names: str | Iterable[str], shape: Shape, device: str = "cpu") -> dict[str, Any]:
    """The keywords of features joined by "+": "causal+softcap"."""
    together: dict[str, Any] = {}
    for name in names.split("+") if isinstance(names, str) else names:
        new = FEATURES[name](shape, device)
        assert not together.keys() & new.keys(), f"{names}: two features set {set(together) & set(new)}"
        together |= new
    return together


def pairs(names: Iterable[str] = tuple(FEATURES)) -> list[str]:
    """Every pair of features that do not set the same keyword, e.g. "causal+window"."""
    probe = {name: set(FEATURES[name](Shape(), "cpu")) for name in names if name != "plain"}
    return [f"{a}+{b}" for a, b in itertools.combinations(probe, 2) if not probe[a] & probe[b]]


EVERYTHING = ("scale", "causal", "left", "softcap", "alibi", "sinks")  # and one of the masks, where there may be one


@dataclass(frozen=True)
class Ragged:
    """A batch of sequences of different lengths, back to back."""

    q: Tensor  # (total_q, H, D)
    k: Tensor
    v: Tensor
    cu_q: Tensor  # (B + 1,) int32
    cu_k: Tensor
    max_q: int
    max_k: int

    @property
    def args(self) -> tuple[Any, ...]:
        """The positional arguments of fk.attention_varlen."""
        return self.q, self.k, self.v, self.cu_q, self.cu_k, self.max_q, self.max_k

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.cu_q, self.cu_k


def ragged(
    lens_q: Iterable[int], lens_k: Iterable[int], shape: Shape = DEFAULT, dtype: torch.dtype = torch.float32,
    *, device: str = "cpu", seed: int = 0,
) -> Ragged:  # fmt: skip
    """Sequences of the given lengths; of the shape only heads and head dimensions count."""
    lens_q, lens_k = list(lens_q), list(lens_k)
    total = shape.but(b=1, sq=sum(lens_q), sk=sum(lens_k))
    q, k, v = (x[0] for x in qkv(total, dtype, device=device, seed=seed))

    def starts(lens: list[int]) -> Tensor:
        return torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32, device=device)

    return Ragged(q, k, v, starts(lens_q), starts(lens_k), max(lens_q, default=0), max(lens_k, default=0))


@dataclass(frozen=True)
class Pages:
    """A paged cache: keys and values in pages, and the pages of each sequence."""

    k: Tensor  # (pages, page_size, H_kv, D)
    v: Tensor
    table: Tensor  # (B, max_pages) int32


def paged(batch: Ragged, page_size: int, *, seed: int = 0, spare: int = 2) -> Pages:
    """The keys and values of a ragged batch in shuffled pages. What belongs to no key is NaN, also in `spare` pages."""
    ends = batch.cu_k.tolist()
    counts = [-(-(end - start) // page_size) for start, end in itertools.pairwise(ends)]
    total, most = sum(counts) + spare, -(-batch.max_k // page_size)
    order = torch.randperm(total, generator=generator(seed)).tolist()
    table = torch.full((len(counts), most), order[-1] if spare else 0, dtype=torch.int32)
    k, v = (x.new_full((total, page_size, *x.shape[1:]), float("nan")) for x in (batch.k, batch.v))
    for b, count in enumerate(counts):
        for page in range(count):
            at = table[b, page] = order.pop(0)
            rows = slice(ends[b] + page * page_size, min(ends[b + 1], ends[b] + (page + 1) * page_size))
            for pages, x in ((k, batch.k), (v, batch.v)):
                pages[at, : rows.stop - rows.start] = x[rows]
    return Pages(k, v, table.to(batch.q.device))
