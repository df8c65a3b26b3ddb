"""Named shapes of decoding. Benchmarks take them from here: a name means one shape everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from flashkernels.decode.problem import DecodeProblem

if TYPE_CHECKING:
    from torch import Tensor

    from flashkernels.kvcache.cache import PagedCache

PAGE = 16
FORMATS = ("bf16", "fp8", "int8", "int4")
SIZES = ((1, 4096), (1, 32768), (16, 4096), (64, 4096), (128, 4096), (16, 32768))  # batch, context
HEAD_DIMS = (72, 80, 96, 112, 192, 256)
QUICK_ON_GPU = ("bf16-b16-s4096", "int8-b16-s4096", "int4-b16-s4096", "bf16-ragged")


@dataclass(frozen=True)
class Case:
    """One named problem, with the lengths that a `DecodeProblem` leaves out."""

    name: str
    problem: DecodeProblem
    lengths: tuple[int, ...]
    l2: Literal["warm"] | None = None  # instead of the run's: the cache stays in the L2 between calls

    def flops(self) -> int:
        return self.problem.flops(sum(self.lengths))

    def cache_bytes(self) -> int:
        """Of keys, values and scales that are there, read once."""
        return self.problem.cache_bytes(sum(self.lengths))


def suite(name: str, *, device: str = "cuda", quick: bool = False) -> tuple[Case, ...]:
    """The cases of a suite. A quick run takes a few of them on a GPU, and all of them at tiny sizes on the CPU.

    >>> [case.name for case in suite("formats")][:3]
    ['bf16-b1-s4096', 'bf16-b1-s32768', 'bf16-b16-s4096']
    """
    if name != "formats":
        raise ValueError(f"suite={name!r} is not one of 'formats'")
    cases: Iterator[Case] = _formats()
    if quick and device == "cpu":
        cases = map(_tiny, cases)
    elif quick:
        cases = (case for case in cases if case.name in QUICK_ON_GPU)
    return tuple(replace(case, problem=replace(case.problem, device=device)) for case in cases)


def inputs(case: Case, *, device: str, seed: int = 0) -> tuple[Tensor, PagedCache]:
    """Random queries and a filled cache behind a shuffled block table, each page once."""
    import torch

    from flashkernels.kvcache import PagedCache, append

    p = case.problem
    random = torch.Generator(device).manual_seed(seed)
    pages = [-(-n // PAGE) for n in case.lengths]
    order = torch.randperm(sum(pages), generator=random, device=device).int()
    table = torch.zeros(p.batch, max(pages), dtype=torch.int32, device=device)
    for b, part in enumerate(order.split(pages)):
        table[b, : len(part)] = part
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    cache = PagedCache.allocate(
        sum(pages), PAGE, p.kv_heads, p.head_dim, p.head_dim_v, block_table=table, lengths=lengths, format=p.format,
        latent=p.shared,
    )  # fmt: skip
    dtype = getattr(torch, {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[p.dtype])
    for b, length in enumerate(case.lengths):  # one by one: the numbers before they are quantised take more room
        own = PagedCache(cache.k, cache.v, table[b : b + 1], lengths[b : b + 1], cache.k_scale, cache.v_scale)
        k, v = (
            torch.randn(1, length, p.kv_heads, n, generator=random, device=device, dtype=dtype)
            for n in (p.head_dim, p.head_dim_v)
        )
        append(own, k, None if p.shared else v)
    q = torch.randn(p.batch, p.tokens, p.heads, p.head_dim, generator=random, device=device, dtype=dtype)
    return q, cache


def _case(name: str, form: str, lengths: tuple[int, ...], *, latent: bool = False, **sizes: int) -> Case:
    from flashkernels.formats import FORMATS as ALL

    usual: dict[str, Any] = {"heads": 32, "kv_heads": 8, "head_dim": 128} | sizes
    dim_v = usual.get("head_dim_v") or usual["head_dim"]
    f = ALL[form]
    bits = f.bits(usual["head_dim"]) + (0 if latent else f.bits(dim_v))
    problem = DecodeProblem(
        batch=len(lengths), tokens=1, context=-(-max(lengths) // PAGE) * PAGE, page_size=PAGE, row_bits=bits,
        format=form, scales="token" if f.quantised else "", shared=latent, **usual,
    )  # fmt: skip
    return Case(name, problem, lengths)


def _formats() -> Iterator[Case]:
    for form in FORMATS:
        for batch, context in SIZES:
            yield _case(f"{form}-b{batch}-s{context}", form, (context,) * batch)
    yield replace(_case("bf16-b1-s4096-warm", "bf16", (4096,)), l2="warm")
    for dim in HEAD_DIMS:
        yield _case(f"bf16-d{dim}-b64-s4096", "bf16", (4096,) * 64, head_dim=dim)
    yield _case("bf16-ragged", "bf16", (512,) * 63 + (65536,))
    yield _case(
        "bf16-mla-b64-s4096", "bf16", (4096,) * 64, latent=True, heads=128, kv_heads=1, head_dim=576, head_dim_v=512
    )


def _tiny(case: Case) -> Case:
    """Two sequences of at most 40 keys, in fp32 and few heads: a check, not a measurement."""
    lengths = tuple(min(n, 24 + 16 * (i % 2)) for i, n in enumerate(case.lengths[:2]))
    p = case.problem
    form = "fp32" if p.format == "bf16" else p.format
    bits = p.row_bits * 2 if form == "fp32" else p.row_bits
    heads = max(2, p.heads // 8)
    small = replace(
        p, batch=len(lengths), total=0, context=48, heads=heads, kv_heads=min(p.kv_heads, 2), format=form, dtype="fp32",
        row_bits=bits,
    )  # fmt: skip
    return replace(case, problem=small, lengths=lengths)
