"""What one call costs the CPU: each op of ours beside what torch has for the same, at sizes that leave the GPU idle."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table

import flashkernels as fk
from flashkernels.attention.api import IMPLS, problem_of
from flashkernels.bench import results
from flashkernels.bench.timing import burst
from flashkernels.dispatch import select
from flashkernels.fused import norm
from flashkernels.fused.rows import row_problem

LIMITS = {"triton": 15.0, "hopper": 12.0}  # microseconds that a call may take, by implementation
ROUNDS, BURSTS, CALLS = 5, 8, 50  # a round has so many bursts of each op; the first round warms up
HOW = f"the least mean of {(ROUNDS - 1) * BURSTS} bursts of {CALLS} calls on an idle GPU (and the median of bursts)"


@dataclass(frozen=True)
class Contest:
    """One op: a tiny call of ours, and of torch."""

    op: str
    impl: str
    ours: Callable[[], Any]
    torch: Callable[[], Any]


@dataclass(frozen=True)
class Cost:
    """CPU microseconds of one call: the least of many bursts, and their median, which has the machine's moods in it."""

    op: str
    impl: str
    ours_us: float
    torch_us: float
    limit_us: float | None
    ours_median_us: float
    torch_median_us: float


def contests(device: str) -> Iterator[Contest]:
    """The ops, attention on each of its fast implementations that serves on this device."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    gpu = fk.detect(device) if device == "cuda" else None
    q, k, v = torch.randn(3, 1, 64, 4, 64, device=device, dtype=dtype)
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    problem = problem_of(q, k, v)
    for impl in IMPLS:
        if impl.name != "torch" and not (impl.rejects(problem, gpu) or impl.defers(problem, gpu)):
            ours = functools.partial(fk.attention, q, k, v, impl=impl.name)
            yield Contest("attention", impl.name, ours, functools.partial(F.scaled_dot_product_attention, *heads))
    x = torch.randn(16, 1024, device=device, dtype=dtype)
    weight, bias = torch.randn(2, 1024, device=device, dtype=dtype)
    cos, sin = fk.rope_tables(64, 64, device=device)
    wide_cos, wide_sin = (table[:, None].repeat(1, 1, 2).to(dtype) for table in (cos, sin))

    def turned(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return x * wide_cos + torch.cat((-b, a), -1) * wide_sin

    drafts, target = torch.zeros(4, 3, dtype=torch.int64, device=device), x.view(4, 4, 1024)

    def accepted() -> torch.Tensor:
        """Greedily: the target's tokens up to the first that the draft has not."""
        best = target.argmax(-1)
        count = (best[:, :-1] == drafts).long().cumprod(1).sum(1)
        return torch.where(torch.arange(4, device=device) <= count[:, None], best, -1)

    rows: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        "rms_norm": (lambda: fk.rms_norm(x, weight), lambda: F.rms_norm(x, (1024,), weight, 1e-6)),
        "layer_norm": (lambda: fk.layer_norm(x, weight, bias), lambda: F.layer_norm(x, (1024,), weight, bias)),
        "swiglu": (lambda: fk.swiglu(x), lambda: F.silu(x[:, :512]) * x[:, 512:]),
        "gelu": (lambda: fk.gelu(x), lambda: F.gelu(x)),
        "softmax": (lambda: fk.softmax(x), lambda: x.softmax(-1)),
        "rope": (lambda: fk.rope(q, k, cos, sin), lambda: (turned(q), turned(k))),
    }
    name = select(norm.IMPLS, row_problem("rms_norm", x, 2), gpu).name  # all of them have the same two
    targets = torch.arange(16, device=device)
    rows |= {
        "cross_entropy": (
            lambda: fk.fused.cross_entropy(x, targets, reduction="none"),
            lambda: F.cross_entropy(x.float(), targets, reduction="none"),
        ),
        "sample": (lambda: fk.fused.sample(x, temperature=0.0, seeds=0).ids, lambda: x.argmax(-1)),
        "speculative_accept": (
            lambda: fk.fused.speculative_accept(drafts, target_logits=target, temperature=0.0, seeds=0).ids,
            accepted,
        ),
    }
    for op, (mine, theirs) in rows.items():
        yield Contest(op, name, mine, theirs)
    wide = torch.randn(512, 1024, device=device, dtype=dtype)
    for name in ("triton", "matmul") if gpu else ("torch",):
        product = functools.partial(fk.fused.linear, x, wide, activation="gelu", impl=name)
        yield Contest("linear", name, product, lambda: F.gelu(F.linear(x, wide)))


def costs(device: str) -> list[Cost]:
    """Measures them all. On the CPU a call is its computation, so there is nothing to measure."""
    if device != "cuda":
        raise ValueError("bench launch measures what launching a kernel costs: it needs a CUDA device")
    every = list(contests(device))
    bursts: list[tuple[list[float], list[float]]] = [([], []) for _ in every]
    with torch.no_grad():
        for i in range(ROUNDS):
            for one, (ours, theirs) in zip(every, bursts, strict=True):
                for _ in range(BURSTS):  # taking turns: a slow moment of the machine is one of both
                    mine, torchs = (burst(run, device=device, calls=CALLS) for run in (one.ours, one.torch))
                    if i:
                        ours.append(mine)
                        theirs.append(torchs)
    return [
        Cost(one.op, one.impl, min(ours), min(theirs), LIMITS.get(one.impl), median(ours), median(theirs))
        for one, (ours, theirs) in zip(every, bursts, strict=True)
    ]


def table(found: Sequence[Cost]) -> Table:
    title = f"CPU microseconds of one eager call:\n{HOW}"
    grid = Table("op", "implementation", title=title, title_justify="left")
    for column in ("ours", "at most", "torch", "ours / torch"):
        grid.add_column(column, justify="right")
    for one in found:
        over = one.limit_us is not None and one.ours_us > one.limit_us
        limit = "-" if one.limit_us is None else f"{one.limit_us:.0f}"
        ours = f"[red]{one.ours_us:.1f}[/red]" if over else f"{one.ours_us:.1f}"
        theirs = f"{one.torch_us:.1f} ({one.torch_median_us:.1f})"
        share = f"{one.ours_us / one.torch_us:.2f}"
        grid.add_row(one.op, one.impl, f"{ours} ({one.ours_median_us:.1f})", limit, theirs, share)
    return grid


def write(path: Path, found: Sequence[Cost]) -> None:
    """The figures as JSON, with the machine and versions they belong to."""
    body = {"meta": results.describe("cuda", quick=False), "how": HOW, "launch": [asdict(one) for one in found]}
    results.write(path, json.dumps(body, indent=2))
