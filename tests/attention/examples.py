"""Calls that make the Hopper kernel run as a given variant: hypothesis draws the sizes, the variant has the flags."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import assume, strategies as st
from torch import Tensor

from flashkernels.attention.hopper import tiles
from flashkernels.attention.hopper.source import Variant
from flashkernels.attention.problem import AttentionProblem

from .cases import Shape, sinks, slopes


@dataclass(frozen=True)
class Example:
    """One call, dense or (with `lens`) ragged."""

    variant: Variant
    shape: Shape
    lens: tuple[tuple[int, int], ...] = ()
    page_size: int = 0
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    scale: float | None = None
    seed: int = 0

    @property
    def dtype(self) -> torch.dtype:
        """Of the tensors to draw, those of FP8 before they are quantised."""
        return torch.float16 if self.variant.fp16 else torch.bfloat16

    def problem(self) -> AttentionProblem:
        v, s = self.variant, self.shape
        dtype = "fp8" if v.fp8 else "fp16" if v.fp16 else "bf16"
        plain = AttentionProblem(
            batch=s.b, seq_q=s.sq, seq_k=s.sk, heads=s.h, kv_heads=s.hkv, head_dim=s.d, head_dim_v=s.dim_v,
            dtype=dtype, causal=self.causal, window=self.window, softcap=v.softcap,
            positive_scale=not v.negative, alibi=v.alibi, sinks=v.sinks, page_size=self.page_size,
        )  # fmt: skip
        if not v.varlen:
            return plain
        total_q, total_k = (sum(lengths) for lengths in zip(*self.lens, strict=True))
        return replace(plain, varlen=True, total_q=total_q, total_k=s.b * s.sk if self.page_size else total_k)

    def keywords(self, device: str) -> dict[str, Any]:
        named: dict[str, Any] = {"causal": self.causal, "window": self.window, "softmax_scale": self.scale}
        named["softcap"] = self.softcap
        extra: dict[str, Tensor] = {}
        if self.variant.alibi:
            extra["alibi_slopes"] = slopes((self.shape.b, self.shape.h)[self.seed % 2 :], device=device)
        if self.variant.sinks:
            extra["sinks"] = sinks(self.shape.h, device=device)
        return named | extra


def keys_that_are_cut(variant: Variant, multiprocessors: int) -> int:
    """The fewest keys with which a lone tile of queries is cut."""
    tile = replace(variant.tile, cluster=1)
    lone = AttentionProblem(batch=1, seq_q=1, seq_k=1, heads=variant.pack, kv_heads=1, head_dim=variant.head_dim)

    def shares(keys: int) -> int:
        return tiles.shared_out(replace(lone, seq_k=keys), tile, variant.pack, multiprocessors)[2]

    return bisect_left(range(1 << 20), 2, key=shares)


@st.composite
def examples(draw: st.DrawFn, variant: Variant, multiprocessors: int = 132) -> Example:
    """Calls for which, with the variant's tile, `tiles.choose` takes exactly the variant."""
    tile, rows = variant.tile, variant.queries
    short = keys_that_are_cut(variant, multiprocessors) - 1
    band = variant.left or variant.right
    kv_heads = draw(st.integers(1, 2))
    heads = kv_heads * variant.pack * (1 if variant.pack > 1 else draw(st.sampled_from([1, 1, 2, 3])))
    batch, seq_q, seq_k = draw(st.integers(1, 3)), draw(st.integers(1, 3 * rows)), draw(st.integers(1, short))
    lens: list[tuple[int, int]] = []
    if variant.varlen:
        longest = rows if variant.pack > 1 else 4 * rows
        one = st.tuples(st.just(0) | st.integers(0, longest), st.just(0) | st.integers(0, 1000))
        lens = [*draw(st.lists(one, max_size=4)), (draw(st.integers(1, longest)), draw(st.integers(1, short)))]
        batch, seq_q, seq_k = len(lens), max(q for q, _ in lens), max(k for _, k in lens)
    elif variant.split and (band or draw(st.booleans())):  # few tiles and many keys: all are cut
        batch, seq_q, seq_k = 1, draw(st.integers(1, rows)), draw(st.integers(short + 1, 5 * short))
    elif variant.pack == 1 and draw(st.booleans()):  # more tiles than blocks: without a band, those behind a full round
        batch, kv_heads, heads = 2, 2, 2
        seq_q, seq_k = draw(st.integers(34 * rows + 1, 36 * rows)), draw(st.integers(1, 2500))
    reach = st.integers(0, 400)
    left = draw(reach) + (short + 1 if variant.split else 0) if variant.left else -1
    causal = variant.right and draw(st.booleans())
    right = draw(reach) if variant.right and not causal else -1
    scales = st.sampled_from([-0.5, -0.08, 0.0]) if variant.negative else st.sampled_from([None, 0.05, 0.3])
    example = Example(
        variant, Shape(batch, seq_q, seq_k, heads, kv_heads, variant.head_dim, variant.head_dim_v), tuple(lens),
        page_size=draw(st.sampled_from([64, 128, 192, 256])) if variant.paged else 0,
        causal=causal, window=(left, right), softcap=draw(st.sampled_from([1.5, 30.0])) if variant.softcap else 0.0,
        scale=draw(scales), seed=draw(st.integers(0, 99)),
    )  # fmt: skip
    assume(tiles.choose(example.problem(), multiprocessors, tile).variant == variant)
    return example
