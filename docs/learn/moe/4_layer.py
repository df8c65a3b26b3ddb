"""The whole layer: router, regrouping, two grouped products with SwiGLU between, the weighted sum."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import lesson  # before triton: it decides whether kernels are compiled or interpreted

import flashkernels as fk
from flashkernels.moe.problem import LayerProblem

EXPERTS, K = lesson.pick(128, 4), lesson.pick(8, 2)  # Qwen3-30B-A3B
HIDDEN, INNER = lesson.pick(2048, 32), lesson.pick(768, 32)
TOKENS = lesson.pick((4096, 16), (12, 3))
IMPL = lesson.pick("auto", "triton")  # on a CPU "auto" is torch; this is about the kernel


def loop(x: torch.Tensor, routing: fk.moe.Routing, w_gate_up: torch.Tensor, w_down: torch.Tensor) -> torch.Tensor:
    """Expert by expert in torch: find its tokens (the host waits), multiply, add."""
    out = torch.zeros_like(x)
    for e in range(w_gate_up.shape[0]):
        token, slot = (routing.ids == e).nonzero(as_tuple=True)
        if len(token):
            gate, up = (x[token] @ w_gate_up[e].T).chunk(2, -1)
            part = (torch.nn.functional.silu(gate) * up) @ w_down[e].T
            out.index_add_(0, token, part * routing.weights[token, slot, None].to(x.dtype))
    return out


def cases() -> Iterator[lesson.Case]:
    w_gate_up = lesson.normal(EXPERTS, 2 * INNER, HIDDEN, seed=1).mul_(HIDDEN**-0.5)
    w_down = lesson.normal(EXPERTS, HIDDEN, INNER, seed=2).mul_(INNER**-0.5)
    for tokens in TOKENS:
        x = lesson.normal(tokens, HIDDEN)
        router = lesson.normal(EXPERTS, HIDDEN, seed=3, dtype=torch.float32) * HIDDEN**-0.5
        routing = fk.moe.route(x.float() @ router.T, K)  # one routing for all: a near tie must not decide
        problem = LayerProblem(tokens, HIDDEN, INNER, EXPERTS, K, "fp16", lesson.DEVICE)
        inner = 2 * tokens * K * (2 * INNER + 2 * HIDDEN)  # activations between the launches, written and read

        def oracle(dtype: torch.dtype, x: torch.Tensor = x, routing: fk.moe.Routing = routing) -> torch.Tensor:
            return loop(x.to(dtype), routing, Cast(w_gate_up, dtype), Cast(w_down, dtype))

        def layer(x: torch.Tensor = x, routing: fk.moe.Routing = routing) -> torch.Tensor:
            return fk.moe.layer(x, None, w_gate_up, w_down, routing=routing, impl=IMPL)

        def looped(x: torch.Tensor = x, routing: fk.moe.Routing = routing) -> torch.Tensor:
            return loop(x, routing, w_gate_up, w_down)

        for name, run, launch in (("layer", layer, "graph"), ("loop over experts", looped, "eager")):
            yield lesson.Case(
                f"{name}, {tokens} tokens", run, oracle, flops=problem.flops(), floor=problem.bytes(),
                moved=problem.bytes() + inner, launch=launch,
            )  # fmt: skip


class Cast:
    """Weights in another dtype, one expert at a time: all of them at once in fp64 would be many."""

    def __init__(self, w: torch.Tensor, dtype: torch.dtype) -> None:
        self.w, self.dtype, self.shape = w, dtype, w.shape

    def __getitem__(self, e: int) -> torch.Tensor:
        return self.w[e].to(self.dtype)


if __name__ == "__main__":
    lesson.main(__file__, cases)
