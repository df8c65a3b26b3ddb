"""Routing in one call: the k best by rounds of a maximum, counted in the same kernel; `flashkernels.moe.route`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import lesson  # before triton: it decides whether kernels are compiled or interpreted
from plain import EXPERTS, FLOOR, TOKENS, K, Routed, logits, verify

import flashkernels as fk

IMPL = lesson.pick("auto", "triton")  # on a CPU "auto" is torch; this is about the kernel


def cases() -> Iterator[lesson.Case]:
    x = logits()
    routing = fk.moe.route(x, K, impl=IMPL)
    assert routing.plan is not None
    want = verify(Routed(routing.weights, routing.ids, routing.plan.permutation, routing.plan.offsets), x)
    yield lesson.Case(
        "route", lambda: fk.moe.route(x, K, impl=IMPL).plan.permutation,
        lambda dtype: want.permutation.to(lesson.DEVICE, dtype), flops=0, floor=FLOOR, moved=FLOOR + 16 * TOKENS * K,
        dtype="fp32", plain=torch.float32,
    )  # fmt: skip
    yield lesson.Case(
        "choose alone", lambda: fk.moe.route(x, K, plan=False, impl=IMPL).ids,
        lambda dtype: want.ids.to(lesson.DEVICE, dtype), flops=0, floor=FLOOR - 8 * (TOKENS * K + EXPERTS + 1),
        moved=FLOOR - 8 * (TOKENS * K + EXPERTS + 1), dtype="fp32", plain=torch.float32,
    )  # fmt: skip


if __name__ == "__main__":
    lesson.main(__file__, cases)
