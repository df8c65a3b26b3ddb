"""Tiles of the Hopper kernels that no rule takes yet, in turns beside those of the rules.

    python -m tests.attention.contest compile     # into FLASHKERNELS_CACHE; needs no GPU
    python -m tests.attention.contest             # all
    python -m tests.attention.contest gradients 64

TFLOPS, heated, with a cold L2. "again" is the rule's tile once more: what it differs by is noise. What gains becomes a
rule with its figures, the rest goes (docs/notes/hopper_forward.md and hopper_backward.md, "Next").
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import flashkernels as fk
import flashkernels.attention.api as api
from flashkernels.attention.hopper import backward_source, backward_tiles, source, tiles
from flashkernels.attention.hopper.backward_build import CANDIDATES, retiled
from flashkernels.attention.hopper.source import HopperTile
from flashkernels.attention.problem import AttentionProblem, BackwardProblem
from flashkernels.bench import timing
from flashkernels.jit import nvrtc
from flashkernels.jit.eager import Plans

ROUNDS, ROUND_MS = 6, 20.0
MULTIPROCESSORS = 132
NARROW = tiles.four_warpgroups


@dataclass(frozen=True)
class Contest:
    """One problem, and what is tried on it: by name a tile, or the knobs of one."""

    problem: AttentionProblem
    tried: Mapping[str, Any]
    gradients: bool = False

    @property
    def name(self) -> str:
        p = self.problem
        if p.varlen:
            return f"outputs D={p.head_dim} {p.dtype} {p.batch} sequences causal"
        mask = f"window {p.window[0]}" if p.window[0] >= 0 else "causal" if p.causal else "full"
        kind = "gradients" if self.gradients else "outputs"
        return f"{kind} D={p.head_dim} {p.dtype} B={p.batch} H={p.heads} S={p.seq_q} {mask}"


def square(dim: int, seq: int, causal: bool, *, rows: int = 16384, **more: Any) -> AttentionProblem:
    heads = round(2048 / dim)
    sizes = {"batch": max(1, rows // seq), "seq_q": seq, "seq_k": seq, "heads": heads, "kv_heads": heads}
    return AttentionProblem(head_dim=dim, causal=causal, **(sizes | more))


LENGTHS = [100 + 260 * i for i in range(16)]  # of a ragged batch


def ragged(dim: int) -> AttentionProblem:
    heads, longest, total = round(2048 / dim), max(LENGTHS), sum(LENGTHS)
    return AttentionProblem(
        batch=len(LENGTHS), seq_q=longest, seq_k=longest, heads=heads, kv_heads=heads, head_dim=dim, causal=True,
        varlen=True, total_q=total, total_k=total,
    )  # fmt: skip


def outputs() -> Iterator[Contest]:
    for causal in (False, True):
        for seq in (1024, 4096):
            for dim, late in ((72, 0), (80, 1)):
                four = HopperTile(4, 48, 4, pingpong=True, wide_v=True, late=late)
                tried = {"four, 48 keys": four, "without turns": replace(four, pingpong=False)}
                yield Contest(square(dim, seq, causal), tried)
        for dim in (80, 96, 128):
            q_stages = {f"Q in registers, {n}": HopperTile(3, 64, 4, q_in_registers=True, q_stages=n) for n in (1, 2)}
            yield Contest(square(dim, 16384, causal, dtype="fp8"), q_stages)
        for dim in (48, 64):  # few tiles
            for batch, heads, seq in ((1, 8, 2048), (1, 8, 4096), (4, 8, 1024), (4, 8, 2048)):
                few = square(dim, seq, causal, batch=batch, heads=heads, kv_heads=heads)
                yield Contest(few, {"four": NARROW(dim, dim, causal)})
    for dim in (48, 64):
        yield Contest(ragged(dim), {"four": NARROW(dim, dim, True)})
        for seq in (2048, 8192):
            yield Contest(square(dim, seq, True, window=(1024, -1)), {"four": NARROW(dim, dim, True)})


def gradients() -> Iterator[Contest]:
    for dim in sorted({dim for dim, _ in CANDIDATES.values()}):
        tried = {name: knobs for name, (d, knobs) in CANDIDATES.items() if d == dim}
        only_masked = {name for name, knobs in tried.items() if knobs.get("skips")}
        for causal in (False, True):
            these = {name: knobs for name, knobs in tried.items() if causal or name not in only_masked}
            for seq in (1024, 4096) if these else ():
                yield Contest(square(dim, seq, causal, need_lse=True), these, gradients=True)


def contests(kinds: tuple[str, ...], dims: tuple[int, ...] = ()) -> Iterator[Contest]:
    for kind, make in (("outputs", outputs), ("gradients", gradients)):
        yield from (one for one in make() if kind in kinds and (not dims or one.problem.head_dim in dims))


def programs(one: Contest) -> Iterator[tuple[str, str, dict[str, str]]]:
    """What it takes, with the rule's own."""
    for tried in ({} if one.gradients else None, *one.tried.values()):
        if one.gradients:
            usual = backward_tiles.choose(BackwardProblem(one.problem, ("q", "k", "v")))
            yield backward_source.program(retiled(usual, **(tried or {})))
        else:
            yield source.program(tiles.choose(one.problem, MULTIPROCESSORS, tried).variant)
    if one.gradients:
        yield source.program(tiles.choose(one.problem, MULTIPROCESSORS).variant)


@contextmanager
def with_knobs(knobs: Mapping[str, Any], plans: Plans) -> Iterator[None]:
    """Gradients by the rule's tile, changed. `plans` are this contestant's own: others would find its kernels there."""
    choose, before = backward_tiles.choose, api._backward_plans

    def chosen(problem: BackwardProblem) -> backward_source.BackwardVariant:
        return retiled(choose(problem), **knobs)

    backward_tiles.choose, api._backward_plans = chosen, plans
    try:
        yield
    finally:
        backward_tiles.choose, api._backward_plans = choose, before


def call_of(one: Contest) -> Callable[[Any], timing.Call]:
    """Makes the call of a contestant."""
    p = one.problem
    draw = torch.Generator("cuda").manual_seed(0)
    shape = (p.total_q, p.heads, p.head_dim) if p.varlen else (p.batch, p.seq_q, p.heads, p.head_dim)
    inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=draw) for _ in range(4)]
    named: dict[str, Any] = {"causal": p.causal, "window": p.window, "impl": "hopper"}
    if one.gradients:
        q, k, v = (x.requires_grad_() for x in inputs[:3])
        out, grad = fk.attention(q, k, v, **named), inputs[3]
        run: Callable[[], Any] = partial(torch.autograd.grad, out, (q, k, v), grad, retain_graph=True)
        return lambda knobs: timing.Call(run, partial(with_knobs, knobs or {}, Plans(api._plan_backward)))
    if p.dtype == "fp8":
        small = fk.quantise_qkv(*inputs[:3])
        run = partial(fk.attention, *small[:3], **(named | small.scales))
    elif p.varlen:
        ends = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32).to(inputs[0].device)
        given: tuple[Any, ...] = (*inputs[:3], ends, ends, p.seq_q, p.seq_k)
        run = partial(fk.attention_varlen, *given, **named)
    else:
        run = partial(fk.attention, *inputs[:3], **named)
    return lambda tile: timing.Call(run, partial(fk.use_tile, tile=tile)) if tile else timing.Call(run)


def distance(found: Any, first: Any) -> float:
    """Of what a contestant made from what the rule's tile made, relative."""
    pairs = [(found, first)] if isinstance(found, Tensor) else list(zip(found, first, strict=True))
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)


def contest(one: Contest) -> str:
    make, samplers, first = call_of(one), {}, None
    apart: dict[str, float] = {}
    for name, tried in {"rule": None, "again": None, **one.tried}.items():
        call = make(tried)
        with call.scope():
            made = call.run()
        first = made if first is None else first
        apart[name] = distance(made, first)
        samplers[name] = timing.sampler(call, device="cuda", l2="cold", launch="eager")
    timing.heat(0.3)
    flops = BackwardProblem(one.problem, ("q", "k", "v")).flops() if one.gradients else one.problem.flops()
    words = []
    for name, times in timing.interleave(samplers, ROUNDS).items():
        figure = str(times) if isinstance(times, Exception) else f"{flops / times.p50 / 1e9:.0f}"
        words.append(f"{name} {figure}" + (f" (apart by {apart[name]:.1e})" if apart[name] > 1e-2 else ""))
    return f"{one.name}: {' | '.join(words)}"


def main(*words: str) -> None:
    kinds = tuple(word for word in words if word in ("outputs", "gradients")) or ("outputs", "gradients")
    chosen = list(contests(kinds, tuple(int(word) for word in words if word.isdigit())))
    if "compile" in words:
        for program in itertools.chain.from_iterable(map(programs, chosen)):
            nvrtc.compile(*program)  # once each: then it is in the cache
        return
    timing.GPU_ROUND_MS = ROUND_MS
    timing.heat(1.5)
    for one in chosen:
        print(contest(one), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
