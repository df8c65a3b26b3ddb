"""Quantised weights in a product: fewer bytes where memory is the limit, faster tensor cores where they are."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import lesson  # before triton: it decides whether kernels are compiled or interpreted

import flashkernels as fk
from flashkernels.moe.problem import FORMATS
from flashkernels.moe.weights import ROUNDED, Quantised, rounded_rows

N, DEPTH = lesson.pick(14336, 96), lesson.pick(4096, 256)
TOKENS = lesson.pick((16, 4096), (3, 20))
NAMES = ("fp16", "fp8", "int8", "w8", "w4")
IMPL = lesson.pick("auto", "triton")  # on a CPU "auto" is torch; this is about the kernel
# Hopper's tensor cores keep about 13 bits of a sum of FP8 products: over a depth of 4096, some thousandths are lost.
FP8_SUMS = 2.0**-7


def weights() -> torch.Tensor:
    return lesson.normal(1, N, DEPTH, seed=1).mul_(DEPTH**-0.5)


def product(x: torch.Tensor, w: torch.Tensor | Quantised, plan: fk.moe.Plan) -> torch.Tensor:
    """x @ w.T, as a grouped product with one group."""
    scale = None
    if isinstance(w, Quantised) and w.format in ROUNDED:
        x, scale = fk.moe.round_rows(x, w.format)
    return fk.moe.grouped_gemm(x, w, plan, gather=False, x_scale=scale, out_dtype=torch.float16, impl=IMPL)


def seen(x: torch.Tensor, name: str) -> torch.Tensor:
    """x as the product sees it: rounded to 8 bits in the formats that round both sides."""
    if name not in ROUNDED:
        return x
    small, scale = rounded_rows(x, name)
    return small.float() * scale[:, None]


def bits(w: torch.Tensor | Quantised) -> float:
    """Of a weight, with its share of the scales."""
    if not isinstance(w, Quantised):
        return 16
    return FORMATS[w.format] + w.scale.numel() * w.scale.dtype.itemsize * 8 / (w.shape[1] * w.shape[2])


def quantised(w: torch.Tensor, name: str) -> torch.Tensor | Quantised:
    return w if name == "fp16" else fk.moe.quantise(w, name)


def wide(w: torch.Tensor | Quantised) -> torch.Tensor:
    return fk.moe.dequantise(w) if isinstance(w, Quantised) else w


def bill(name: str) -> float:
    """What the format changes of the product, relative to it: an error that no kernel can mend."""
    x = lesson.normal(16, DEPTH).cpu()
    w = weights()[:, :512].cpu()
    exact = x.double() @ w[0].double().T
    return float((seen(x, name).double() @ wide(quantised(w, name))[0].double().T - exact).norm() / exact.norm())


def counts() -> Iterator[str]:
    w = weights()
    for name in NAMES:
        yield f"{name}: {bits(quantised(w, name)):.2f} bits a weight, error {bill(name):.2%}"


def cases() -> Iterator[lesson.Case]:
    w = weights()
    made = {name: quantised(w, name) for name in NAMES}
    for tokens in TOKENS:
        x = lesson.normal(tokens, DEPTH)
        plan = fk.moe.presorted(torch.tensor([tokens], device=x.device), tokens)
        for name, small in made.items():
            traffic = N * DEPTH * bits(small) / 8 + 2 * tokens * (DEPTH + N)

            def oracle(dtype: torch.dtype, x: torch.Tensor = x, name: str = name) -> torch.Tensor:
                return seen(x, name).to(dtype) @ wide(made[name])[0].to(dtype).T

            yield lesson.Case(
                f"{name}, {tokens} tokens", lambda x=x, small=small, plan=plan: product(x, small, plan), oracle,
                flops=2 * tokens * N * DEPTH, floor=traffic,
                moved=traffic + (2 * tokens * DEPTH if name in ROUNDED else 0),
                dtype={"fp8": "fp8", "int8": "int8"}.get(name, "fp16"), sums=FP8_SUMS if name == "fp8" else 0.0,
            )  # fmt: skip


if __name__ == "__main__":
    print(*counts(), sep="\n")
    lesson.main(__file__, cases)
