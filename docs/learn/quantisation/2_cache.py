"""A quantised cache of keys and values: decoding reads all of it for one token, so fewer bits are less time."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import lesson  # before triton: it decides whether kernels are compiled or interpreted

import flashkernels as fk
from flashkernels.formats import FORMATS, decode, encode

BATCH, CONTEXT, PAGE = lesson.pick(32, 1), lesson.pick(4096, 16), 16
HEADS, KV_HEADS, D = lesson.pick(32, 2), lesson.pick(8, 1), 128
NAMES = ("fp16", "fp8", "int8", "int4")
IMPL = lesson.pick("auto", "triton")  # on a CPU "auto" is torch; this is about the kernel


def tokens() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries of one token, keys and values of the whole context."""
    k, v = (lesson.normal(BATCH, CONTEXT, KV_HEADS, D, seed=seed) for seed in (1, 2))
    return lesson.normal(BATCH, 1, HEADS, D), k, v


def stored(k: torch.Tensor, v: torch.Tensor, name: str) -> fk.kvcache.PagedCache:
    pages = BATCH * CONTEXT // PAGE
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).int().view(BATCH, -1)
    cache = fk.kvcache.PagedCache.allocate(
        pages, PAGE, KV_HEADS, D, block_table=table.to(lesson.DEVICE), format=name
    )  # fmt: skip
    cache.advance(CONTEXT)
    fk.kvcache.append(cache, k, v)
    return cache


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of one token (1, 1, H, D) over a context (1, S, H_kv, D)."""
    keys, values = (x[0].repeat_interleave(q.shape[2] // k.shape[2], 1).transpose(0, 1) for x in (k, v))  # (H, S, D)
    scores = keys @ q[0, 0, :, :, None] / D**0.5
    return (scores.softmax(1) * values).sum(1)[None, None]


def back(x: torch.Tensor, name: str) -> torch.Tensor:
    """The numbers as the format keeps them, by its definition."""
    kept, scale = encode(x, FORMATS[name])
    return decode(kept, FORMATS[name], scale)


def bill(name: str) -> float:
    """What the format changes of the output, relative to it: an error that no kernel can mend."""
    q, k, v = (torch.randn(1, s, 8, D, generator=torch.Generator().manual_seed(s)) for s in (1, 1024, 1025))
    q, k, v = q.double(), k.half().double(), v[:, :1024].half().double()
    exact = plain(q, k, v)
    return float((plain(q, back(k, name).double(), back(v, name).double()) - exact).norm() / exact.norm())


def counts() -> Iterator[str]:
    for name in NAMES:
        yield f"{name}: {FORMATS[name].bits(D) / D:.2f} bits a number with its scales, error {bill(name):.2%}"


def cases() -> Iterator[lesson.Case]:
    q, k, v = tokens()
    for name in NAMES:
        cache = stored(k, v, name)
        traffic = 2 * BATCH * CONTEXT * KV_HEADS * FORMATS[name].bits(D) / 8 + 4 * q.numel()

        def oracle(dtype: torch.dtype, name: str = name) -> torch.Tensor:
            out = torch.empty(q.shape, dtype=dtype, device=q.device)
            for b in range(BATCH):  # one sequence at a time: all keys in fp64 would be many
                keys, values = (back(x[b : b + 1], name).to(dtype) for x in (k, v))
                out[b : b + 1] = plain(q[b : b + 1].to(dtype), keys, values)
            return out

        yield lesson.Case(
            name, lambda cache=cache: fk.decode(q, cache, impl=IMPL), oracle, flops=4 * BATCH * CONTEXT * HEADS * D,
            floor=traffic, moved=traffic,
        )  # fmt: skip


if __name__ == "__main__":
    print(*counts(), sep="\n")
    lesson.main(__file__, cases)
