"""What attention over a cache must be, and the error a correct implementation may make.

Plain torch that knows nothing of flashkernels: stored numbers are brought back bit by bit, attention is written out in
fp64 head by head, and the same lines in the queries' own dtype say how wrong plain torch is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Answer(NamedTuple):
    out: Tensor  # (T, H, D_v)
    lse: Tensor  # (H, T)
    terms: Tensor  # as out: root of the sum of squared terms p * v, the scale of rounding noise in out


def numbers(stored: Tensor, scale: Tensor | None) -> Tensor:
    """Rows (..., H, D) of a format as fp64."""
    if stored.dtype == torch.uint8:  # two in a byte, the even column in the low half
        low, high = stored.long() & 15, stored.long() >> 4
        found = torch.stack((low - 16 * (low > 7), high - 16 * (high > 7)), -1).flatten(-2).double()
    else:
        found = stored.double()
    if scale is None:
        return found
    wide = scale.double()
    if wide.dim() == 1:
        return found * wide[:, None]
    if wide.dim() == found.dim():  # groups of 32
        columns = torch.arange(found.shape[-1], device=found.device) // 32
        return found * wide[..., columns]
    return found * wide[..., None]


def keys(cache: Any, b: int) -> tuple[Tensor, Tensor]:
    """Keys and values of one sequence, one row at a time."""
    size, table, found = cache.k.shape[1], cache.block_table[b].tolist(), []
    places = [(table[j // size], j % size) for j in range(int(cache.lengths[b]))]
    for pages, scale in ((cache.k, cache.k_scale), (cache.v, cache.v_scale)):
        rows = torch.stack([pages[place] for place in places]) if places else pages[:0, 0]
        each = scale
        if scale is not None and scale.dim() > 1:
            each = torch.stack([scale[place] for place in places]) if places else scale[:0, 0]
        found.append(numbers(rows, each))
    return found[0], found[1]


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, tree: Tensor | None = None,
    softmax_scale: float | None = None, window: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    slopes: Tensor | None = None, sinks: Tensor | None = None,
) -> Answer:  # fmt: skip
    """One sequence in the dtype of q: q (T, H, D), k (S, H_kv, D), v (S, H_kv, D_v)."""
    count, heads, _ = q.shape
    length, group = k.shape[0], heads // k.shape[1]
    outs, lses, terms = [], [], []
    row = torch.arange(count, device=q.device)[:, None] + length - count
    key = torch.arange(length, device=q.device)[None, :]
    visible = torch.ones(count, length, dtype=torch.bool, device=q.device)
    if tree is not None:
        for i in range(count):
            for j in range(count):
                if length - count + j >= 0:
                    visible[i, length - count + j] &= tree[i, j]
    elif causal:
        visible &= key <= row
    if window[1] >= 0:
        visible &= key <= row + window[1]
    if window[0] >= 0:
        visible &= key >= row - window[0]
    for h in range(heads):
        s = q[:, h] @ k[:, h // group].T * (q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale)
        if softcap:
            s = softcap * torch.tanh(s / softcap)
        if slopes is not None:
            s = s - slopes[h].to(s.dtype) * (row - key).abs()
        s = s.masked_fill(~visible, float("-inf"))
        if sinks is not None:
            s = torch.cat((s, sinks[h].to(s.dtype).expand(count, 1)), 1)
        top = s.amax(1, keepdim=True) if s.shape[1] else s.new_full((count, 1), float("-inf"))
        e = torch.exp(s - top.masked_fill(top == float("-inf"), 0.0))
        total = e.sum(1, keepdim=True)
        p = (e / total.masked_fill(total == 0, 1.0))[:, :length]
        values = v[:, h // group]
        weighed = torch.where(visible[..., None], p[..., None] * values, 0.0)
        outs.append(p @ values if values.isfinite().all() else weighed.sum(1))
        terms.append((weighed.double() ** 2).sum(1).sqrt())
        lses.append((top + torch.log(total))[:, 0])
    return Answer(torch.stack(outs, 1), torch.stack(lses), torch.stack(terms, 1))


def assert_right(
    out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, rounded: torch.dtype | None = None, **features: Any
) -> None:
    """`out` (T, H, D_v) and `lse` (H, T) are what attention of q over k and v (fp64) is: to twice the error of plain
    torch in the dtype of q, and a few roundings of the terms that were summed. `rounded`: what keys are multiplied in.
    """
    dtype = rounded or q.dtype
    truth = attention(q.double(), k, v, **features)
    plain = attention(q.to(dtype), k.to(dtype), v.to(dtype), **features)
    eps = max(torch.finfo(dtype).eps, torch.finfo(q.dtype).eps)
    for name, got, near, want, noise in (
        ("out", out, plain.out, truth.out, truth.terms),
        ("lse", lse, plain.lse, truth.lse, truth.lse.abs().clamp(min=1.0)),
    ):
        assert got.shape == want.shape, f"{name}: {tuple(got.shape)}, want {tuple(want.shape)}"
        got = got.double()
        finite = want.isfinite()
        same = torch.where(finite, got.isfinite(), (got == want) | (got.isnan() & want.isnan()))
        assert same.all(), f"{name}: {(~same).sum().item()} elements differ in being finite, infinite or NaN"
        if not finite.any():
            continue
        error, allowed = (got - want)[finite].abs(), (near.double() - want)[finite].nan_to_num(0.0).abs()
        slack = 4 * eps * noise[finite].nan_to_num(0.0, posinf=0.0)
        assert error.max() <= 2 * allowed.max() + slack.max(), (
            f"{name}: {error.max():.3g} > {2 * allowed.max() + slack.max():.3g}"
        )
        norm = 2 * allowed.norm() + slack.norm()
        assert error.norm() <= norm, f"{name}: norm {error.norm():.3g} > {norm:.3g}"
