"""The meaning of attention, one head at a time, and the error a correct implementation may make.

Everything here is plain torch and knows nothing of flashkernels: `attention` in fp64 says what is right, and the same
lines in the inputs' own dtype say how wrong plain torch is. The tolerance follows from the two.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Roundings allowed beyond plain torch's error, which is zero by luck on some inputs. In fp64 the oracle rounds as well.
SLACK = {torch.float64: 16.0}


class Answer(NamedTuple):
    out: Tensor  # as q, with the head dimension of v
    lse: Tensor  # (B, H, S_q); varlen: (H, total_q)
    terms: Tensor  # as out: root of the sum of squared terms p*v, the scale of rounding noise in out


class Bound(NamedTuple):
    """How far an output may be from the truth: as a norm of the whole, and at its worst element."""

    norm: float
    peak: float


def attention(q: Tensor, k: Tensor, v: Tensor, **features: Any) -> Answer:
    """Dense attention in fp64. The keywords are those of `flashkernels.attention`."""
    return _dense(q.double(), k.double(), v.double(), **_double(features))


def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **features: Any
) -> Answer:
    """Ragged attention in fp64: dense attention of each sequence by itself."""
    return _ragged(q.double(), k.double(), v.double(), cu_seqlens_q, cu_seqlens_k, **_double(features))


def naive(q: Tensor, k: Tensor, v: Tensor, **features: Any) -> Answer:
    """The same in the inputs' own dtype: what a user would write in plain torch."""
    return _dense(q, k, v, **features)


def naive_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **features: Any
) -> Answer:
    return _ragged(q, k, v, cu_seqlens_q, cu_seqlens_k, **features)


def tolerance(got: Tensor, plain: Tensor, want: Tensor, noise: Tensor, dtype: torch.dtype) -> Bound:
    """Twice plain torch's error, plus a few roundings of `noise`, the scale of the terms that were summed."""
    slack = SLACK.get(dtype, 4.0) * torch.finfo(dtype).eps
    error = (plain.double() - want).nan_to_num(0.0, posinf=0.0, neginf=0.0)
    return Bound(
        norm=2 * error.norm().item() + slack * noise.norm().item(),
        peak=2 * error.abs().max().item() + slack * noise.abs().max().item(),
    )


def assert_close(
    got: Tensor, plain: Tensor, want: Tensor, noise: Tensor, dtype: torch.dtype, name: str = "out"
) -> None:
    """`got` has the truth's NaN, infinities and exact zeros, and elsewhere stays within the tolerance."""
    assert got.shape == want.shape, f"{name}: shape {tuple(got.shape)}, want {tuple(want.shape)}"
    if got.numel() == 0:
        return
    got = got.double()
    finite = want.isfinite()
    same = torch.where(finite, got.isfinite(), (got == want) | (got.isnan() & want.isnan()))
    assert same.all(), f"{name}: {(~same).sum().item()} elements differ from the truth in being finite, infinite or NaN"
    empty = (noise == 0) & finite
    assert (got[empty] == want[empty]).all(), (
        f"{name}: not exactly {want[empty].unique().tolist()} where no key is visible"
    )
    bound = tolerance(got, plain, want, noise.nan_to_num(0.0, posinf=0.0, neginf=0.0), dtype)
    error = (got - want).nan_to_num(0.0, posinf=0.0, neginf=0.0)
    assert error.norm().item() <= bound.norm, f"{name}: norm of the error {error.norm().item():.3g} > {bound.norm:.3g}"
    assert error.abs().max().item() <= bound.peak, (
        f"{name}: worst error {error.abs().max().item():.3g} > {bound.peak:.3g}"
    )


def assert_correct(out: Tensor, lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, **features: Any) -> None:
    """`out` and `lse` are what dense attention of these inputs must be."""
    _assert_answer(out, lse, q, attention(q, k, v, **features), naive(q, k, v, **features))


def assert_correct_varlen(
    out: Tensor, lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, **features: Any
) -> None:
    want = attention_varlen(q, k, v, cu_q, cu_k, **features)
    _assert_answer(out, lse, q, want, naive_varlen(q, k, v, cu_q, cu_k, **features))


def _assert_answer(out: Tensor, lse: Tensor | None, q: Tensor, want: Answer, plain: Answer) -> None:
    assert out.dtype == q.dtype, f"out: dtype {out.dtype}, want {q.dtype}"
    assert out.device == q.device, f"out: device {out.device}, want {q.device}"
    assert_close(out, plain.out, want.out, want.terms, q.dtype)
    if lse is not None:
        allowed = (torch.float64,) if q.dtype == torch.float64 else (torch.float32,)
        assert lse.dtype in allowed, f"lse: dtype {lse.dtype}, want {allowed[0]}"
        noise = want.lse.abs().clamp(min=1.0)
        assert_close(lse, plain.lse, want.lse, noise, q.dtype, name="lse")


def _double(features: dict[str, Any]) -> dict[str, Any]:
    def double(x: Any) -> Any:
        return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x

    return {name: double(value) for name, value in features.items()}


def _ragged(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, **features: Any) -> Answer:
    slopes, stay = features.pop("alibi_slopes", None), features.pop("stay", None)
    parts = []
    starts_q, starts_k = cu_q.tolist(), cu_k.tolist()
    for b in range(len(starts_q) - 1):
        rows, keys = slice(starts_q[b], starts_q[b + 1]), slice(starts_k[b], starts_k[b + 1])
        one = slopes[b] if slopes is not None and slopes.dim() == 2 else slopes
        left = None if stay is None else stay[b]
        parts.append(_dense(q[None, rows], k[None, keys], v[None, keys], alibi_slopes=one, stay=left, **features))
    if not parts:
        out = q.new_zeros(0, q.shape[1], v.shape[2])
        return Answer(out, q.new_zeros(q.shape[1], 0), out)
    outs, lses, terms = zip(*parts, strict=True)
    return Answer(torch.cat(outs, 1)[0], torch.cat(lses, 2)[0], torch.cat(terms, 1)[0])


def _dense(
    q: Tensor, k: Tensor, v: Tensor, *, layout: str = "bshd", alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None, mask: Tensor | None = None, stay: Tensor | None = None, **features: Any,
) -> Answer:  # fmt: skip
    """`stay` (B, H, S_q, S_k) says which weights dropout leaves; of a ragged batch it is a list, one for each."""
    if layout == "bshd":
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    batch, heads, seq_q, _ = q.shape
    kv_heads, seq_k, dim_v = v.shape[1:]
    if mask is not None:
        mask = mask.expand(batch, heads, seq_q, seq_k)
    if alibi_slopes is not None:
        alibi_slopes = alibi_slopes.expand(batch, heads)
    answers = []
    for b in range(batch):
        for h in range(heads):
            kv = h // (heads // kv_heads)
            answers.append(
                _head(
                    q[b, h], k[b, kv], v[b, kv],
                    slope=None if alibi_slopes is None else alibi_slopes[b, h],
                    sink=None if sinks is None else sinks[h],
                    mask=None if mask is None else mask[b, h],
                    stay=None if stay is None else stay[b, h],
                    **features,
                )
            )  # fmt: skip
    if not answers:
        out = q.new_zeros(batch, heads, seq_q, dim_v)
        answer = Answer(out, q.new_zeros(batch, heads, seq_q), out)
    else:
        answer = Answer(*(torch.stack(x).unflatten(0, (batch, heads)) for x in zip(*answers, strict=True)))
    if layout == "bshd":
        answer = Answer(answer.out.transpose(1, 2), answer.lse, answer.terms.transpose(1, 2))
    return answer


def _head(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, softmax_scale: float | None = None,
    window: tuple[int, int] = (-1, -1), softcap: float = 0.0, slope: Tensor | None, sink: Tensor | None,
    mask: Tensor | None, stay: Tensor | None = None, dropout_p: float = 0.0, eight_bits: bool = False,
) -> Answer:  # fmt: skip
    """One head of one sequence: q (S_q, D), k (S_k, D), v (S_k, D_v), mask (S_q, S_k), scalars slope and sink.

    With `eight_bits` the weights are rounded to FP8, as they must be where the tensor cores multiply FP8.
    """
    seq_q, seq_k = q.shape[0], k.shape[0]
    row = torch.arange(seq_q, device=q.device)[:, None] + seq_k - seq_q  # the key each query is aligned with
    key = torch.arange(seq_k, device=q.device)[None, :]

    scores = q @ k.T * (q.shape[1] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if slope is not None:
        scores = scores - slope * (row - key).abs()

    visible = torch.ones(seq_q, seq_k, dtype=torch.bool, device=q.device)
    left, right = window
    if left >= 0:
        visible &= key >= row - left
    if right >= 0:
        visible &= key <= row + right
    if causal:
        visible &= key <= row
    if mask is not None and mask.dtype == torch.bool:
        visible &= mask
    elif mask is not None:
        visible &= mask != float("-inf")
        scores = scores + mask
    scores = scores.masked_fill(~visible, float("-inf"))

    # A sink is one more column, with no value. A row that sees nothing is computed as if it saw zeros, then cleared.
    blind = ~visible.any(1)
    if sink is not None:
        scores = torch.cat([scores, sink.to(scores.dtype).expand(seq_q, 1)], 1)
        blind &= sink == float("-inf")
    scores = scores.masked_fill(blind[:, None], 0.0)
    lse = torch.logsumexp(scores, 1) if scores.shape[1] else scores.new_zeros(seq_q)
    weights = _eight_bit_softmax(scores, seq_k) if eight_bits else torch.softmax(scores, 1)
    weights = weights[:, :seq_k].masked_fill(~visible, 0.0).to(v.dtype)
    if stay is not None:
        weights, visible = (weights / (1 - dropout_p)).masked_fill(~stay, 0.0), visible & stay
    return Answer(
        out=_weighted_sum(weights, visible, v),
        lse=lse.masked_fill(blind, float("-inf")),
        terms=_weighted_sum(weights.detach() ** 2, visible, v.detach() ** 2).sqrt(),
    )


def _eight_bit_softmax(scores: Tensor, keys: int) -> Tensor:
    """Weights in e4m3 over their unrounded sum. The reference is a power of two, so that the largest weight of a row is
    between 8 and 16: e4m3 has 3 bits, fewer below 2^-6, none below 2^-10, and ends at 448."""
    logits = scores * math.log2(math.e)
    weights = torch.exp2(logits - (logits[:, :keys].amax(1, keepdim=True).ceil() - 4))
    return weights.to(torch.float8_e4m3fn).to(scores.dtype) / weights.sum(1, keepdim=True)


def _weighted_sum(weights: Tensor, visible: Tensor, v: Tensor) -> Tensor:
    """weights @ v, in which a value that a row does not see counts as 0 even if it is NaN."""
    if v.isfinite().all():
        return weights @ v
    return torch.where(visible[..., None], weights[..., None] * v, 0.0).sum(1)
