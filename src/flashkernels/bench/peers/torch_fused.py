"""The fused ops as one writes them in torch, called as they are or compiled.

Each function takes the arguments of its case: the same formula in fp32 is what the benchmark calls right.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch._functorch.config as functorch
import torch.nn.functional as F
from torch import Tensor

from flashkernels.bench.timing import Call
from flashkernels.fused.cases import Case


def prepare(case: Case, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    return Call(partial(formula(case), *args, **kwargs))


def compiled(case: Case, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    # fullgraph: a function that cannot be compiled, or no more often, raises instead of running as it is
    made = torch.compile(formula(case), fullgraph=True, dynamic=False)
    # a backward pass that is timed alone runs many times: it must not write over what the forward pass has left
    again = partial(functorch.patch, donated_buffer=False) if case.gradients == "backward" else nullcontext
    return Call(partial(made, *args, **kwargs), again)


def formula(case: Case) -> Callable[..., Any]:
    if case.op == "sample":
        return sample if case.settings["temperature"] else greedy
    return FORMULAS[case.op]


def rms_norm(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    total = x if residual is None else x + residual
    out = F.rms_norm(total, weight.shape, weight, 1e-6)
    return out if residual is None else (out, total)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    wide_cos, wide_sin = (table[:, None].repeat(1, 1, 2).to(q.dtype) for table in (cos, sin))

    def turned(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * wide_cos + torch.cat((-b, a), -1) * wide_sin

    return turned(q), turned(k)


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


def sample(logits: Tensor, *, temperature: float, top_k: int, top_p: float) -> tuple[Tensor, Tensor]:
    """Tokens and their log-probabilities. Only the k best are sorted; `torch.multinomial` would wait for the device."""
    best, ids = logits.topk(top_k)
    top = best.float() / temperature
    p = top.softmax(-1)
    p = torch.where(p.cumsum(-1) - p < top_p, p, 0.0)
    pick = (p / torch.empty_like(p).exponential_()).argmax(-1, keepdim=True)
    lse = (logits.float() / temperature).logsumexp(-1)
    return ids.gather(1, pick)[:, 0], top.gather(1, pick)[:, 0] - lse


def greedy(logits: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
    best, ids = logits.max(-1)
    return ids, best.float() - logits.float().logsumexp(-1)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets)


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight), targets)


FORMULAS: dict[str, Callable[..., Any]] = {
    "rms_norm": rms_norm, "layer_norm": layer_norm, "rope": rope, "swiglu": swiglu, "softmax": softmax,
    "cross_entropy": cross_entropy, "linear_cross_entropy": linear_cross_entropy,
}  # fmt: skip
