"""Weights of experts in 8 and 4 bits: what each format holds, and how it is made from wide weights.

| format | weights | scales | activations |
| --- | --- | --- | --- |
| fp8 | e4m3 (E, N, K) | one a row (E, N) | rounded too, one scale a row |
| fp8_block | e4m3 (E, N, K) | one for 128 x 128 (E, ⌈N/128⌉, ⌈K/128⌉) | rounded too, one scale for 128 of a row |
| int8 | int8 (E, N, K) | one a row (E, N) | rounded too, one scale a row |
| w8 | words of two, (E, N, ⌈K/128⌉ * 64) int16 | one for `group` weights of a row (E, N, ⌈K/group⌉) | 16 bits |
| w4 | words of four, (E, N, ⌈K/256⌉ * 64) int16 | as w8 | 16 bits |

Weights of w8 and w4 are packed by words of 16 bits, 64 of them together: from the low bits up, word i of 64 has weights
i and 64 + i (w8, two's complement), or i, 64 + i, 128 + i and 192 + i (w4, each plus 8). A kernel splits a block of
words into blocks of 64 neighbouring weights without moving one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flashkernels.fused.norm import LEAST_SCALE
from flashkernels.fused.rows import check_choice
from flashkernels.moe.problem import FORMATS, PHASES

BLOCK = 128  # weights along each side of a block of fp8_block, and activations along a row
WORDS = 64  # of a row that are packed together
GROUPS = (64, 128, 256, 512)
MOST = {"fp8": 448.0, "fp8_block": 448.0, "int8": 127.0, "w8": 127.0, "w4": 7.0}
DTYPES = {"fp8": torch.float8_e4m3fn, "fp8_block": torch.float8_e4m3fn, "int8": torch.int8}
SCALES = (torch.bfloat16, torch.float16, torch.float32)  # types of scales of groups
ROUNDED = ("fp8", "fp8_block", "int8")  # formats in which the activations are rounded too


class Quantised(NamedTuple):
    """Weights (E, N, K) in one of the formats; see the table above."""

    data: Tensor
    scale: Tensor
    format: str
    shape: tuple[int, int, int]
    group: int = 0  # of w8 and w4


def quantise(w: Tensor, format: str, *, group: int = 128, scale_dtype: torch.dtype = torch.bfloat16) -> Quantised:
    """Weights (E, N, K) in `format`: "fp8", "fp8_block", "int8", "w8" or "w4".

    `group` and `scale_dtype` are those of "w8" and "w4"; the scales are rounded before the weights are divided by them.
    There are no gradients.

    >>> import torch, flashkernels as fk
    >>> small = fk.moe.quantise(torch.randn(2, 8, 256), "w4")
    >>> small.data.shape, small.scale.shape, fk.moe.dequantise(small).shape
    (torch.Size([2, 8, 64]), torch.Size([2, 8, 2]), torch.Size([2, 8, 256]))
    """
    check_choice("format", format, tuple(FORMATS))
    if not isinstance(w, Tensor) or not w.is_floating_point():
        raise TypeError(f"w must be a floating-point tensor, got {getattr(w, 'dtype', type(w).__name__)}")
    if w.dim() != 3:
        raise ValueError(f"w has shape {tuple(w.shape)}; expected (experts, n, k)")
    if scale_dtype not in SCALES:
        raise ValueError(f"scale_dtype={scale_dtype!r} is not one of {', '.join(map(str, SCALES))}")
    experts, n, k = w.shape
    w = w.detach()
    if format in ("w8", "w4"):
        check_choice("group", group, GROUPS)
        parts = _padded(w.float(), group, 1).unflatten(-1, (-1, group))
        kind = torch.finfo(scale_dtype)
        least = max(LEAST_SCALE, kind.smallest_normal * kind.eps)  # fp16 has 2**-24
        exact = _scale(parts.abs().amax(-1), MOST[format], least)
        scale = exact.to(scale_dtype)
        if scale_dtype == torch.float16 and bool((scale.isinf() & exact.isfinite()).any()):  # others have the range
            needed = f"w needs a scale of {exact[exact.isfinite()].max():.3g}"
            raise ValueError(f"scale_dtype={scale_dtype} ends at {kind.max:.0f}, and {needed}")
        small = (parts / scale.float()[..., None]).round().clamp(-MOST[format], MOST[format]).flatten(-2)[..., :k]
        return Quantised(pack(small, format), scale, format, (experts, n, k), group)
    if format == "fp8_block":
        blocks = _padded(w.float(), BLOCK, BLOCK).unflatten(-1, (-1, BLOCK)).unflatten(1, (-1, BLOCK))
        scale = _scale(blocks.abs().amax((2, 4)), MOST[format])
        small = (blocks / scale[:, :, None, :, None]).flatten(-2).flatten(1, 2)[:, :n, :k]
    else:
        scale = _scale(w.float().abs().amax(-1), MOST[format]) if k else w.new_ones(experts, n, dtype=torch.float32)
        small = w.float() / scale[..., None]
    return Quantised(_rounded(small, format), scale, format, (experts, n, k))


def dequantise(w: Quantised) -> Tensor:
    """The weights that a kernel computes with, (E, N, K) fp32."""
    check_quantised("w", w)
    _, n, k = w.shape
    scale = w.scale.float()
    if w.format in ("w8", "w4"):
        return unpack(w.data, k, w.format) * scale.repeat_interleave(w.group, -1)[..., :k]
    if w.format == "fp8_block":
        scale = scale.repeat_interleave(BLOCK, 1)[:, :n].repeat_interleave(BLOCK, 2)[..., :k]
        return w.data.float() * scale
    return w.data.float() * scale[..., None]


def check_scale(name: str, scale: Tensor) -> None:
    if not isinstance(scale, Tensor):
        raise TypeError(f"{name}.scale must be a torch.Tensor, got {type(scale).__name__}")
    if not scale.is_floating_point():
        raise TypeError(f"{name}.scale.dtype={scale.dtype} is no floating-point type")


def check_quantised(name: str, w: Quantised) -> None:
    """That its parts are what they are called; a product also asks whether their sizes fit its format."""
    if not isinstance(w, Quantised):
        raise TypeError(f"{name} must be a flashkernels.moe.Quantised, got {type(w).__name__}")
    check_choice(f"{name}.format", w.format, tuple(FORMATS))
    if not isinstance(w.data, Tensor):
        raise TypeError(f"{name}.data must be a torch.Tensor, got {type(w.data).__name__}")
    check_scale(name, w.scale)
    if w.data.dim() != 3 or len(w.shape) != 3 or tuple(w.shape[:2]) != tuple(w.data.shape[:2]):
        about = f"{name}.data, {tuple(w.data.shape)}"
        raise ValueError(f"{name}.shape={tuple(w.shape)} must be (experts, n, k), the first two those of {about}")


def pack(small: Tensor, format: str) -> Tensor:
    """Whole numbers (..., K) of 8 bits in "w8", of 4 in "w4", as words (..., ⌈K/128⌉ * 64) or (..., ⌈K/256⌉ * 64)."""
    count, bits = PHASES[format], FORMATS[format]
    parts = _padded(small, count * WORDS, 1).to(torch.int32).unflatten(-1, (-1, count, WORDS))
    parts = (parts + (8 if format == "w4" else 0)) & (1 << bits) - 1
    shifts = torch.arange(count, dtype=torch.int32, device=small.device) * bits
    words = (parts << shifts[:, None]).sum(-2, dtype=torch.int32)
    return ((words + 0x8000 & 0xFFFF) - 0x8000).to(torch.int16).flatten(-2)


def unpack(data: Tensor, k: int, format: str) -> Tensor:
    """What `pack` was given, fp32."""
    count, bits = PHASES[format], FORMATS[format]
    shifts = torch.arange(count, dtype=torch.int32, device=data.device) * bits
    parts = data.to(torch.int32).unflatten(-1, (-1, 1, WORDS)) >> shifts[:, None] & (1 << bits) - 1
    small = parts - 8 if format == "w4" else (parts ^ 128) - 128
    return small.flatten(-3)[..., :k].float()


def rounded_rows(x: Tensor, format: str) -> tuple[Tensor, Tensor]:
    """x (R, K) in 8 bits, with a scale for each row (R,), or for 128 numbers of it (R, ⌈K/128⌉) in "fp8_block"."""
    wide, k = x.float(), x.shape[1]
    if format == "fp8_block":
        parts = _padded(wide, BLOCK, 1).unflatten(-1, (-1, BLOCK))
        scale = _scale(parts.abs().amax(-1), MOST[format])
        small = (parts / scale[..., None]).flatten(-2)[:, :k]
    else:
        scale = _scale(wide.abs().amax(-1), MOST[format]) if k else wide.new_ones(x.shape[0])
        small = wide / scale[:, None]
    return _rounded(small, format), scale


def _rounded(small: Tensor, format: str) -> Tensor:
    """Quotients in 8 bits; NaN, which INT8 does not have, is 0 there."""
    small = small.round().clamp(-127, 127).nan_to_num(0.0) if format == "int8" else small
    return small.to(DTYPES[format]).contiguous()


def _scale(largest: Tensor, most: float, least: float = LEAST_SCALE) -> Tensor:
    """To multiply by; 1 where all is 0, NaN where something is Inf or NaN, else at least `least`.

    Divided by a tensor: by a number, torch multiplies with its reciprocal on a GPU, and a scale that should be a power
    of two no longer is one.
    """
    scale = (largest / torch.full_like(largest, most)).clamp(min=least) + (largest - largest)
    return torch.where(largest == 0, 1.0, scale)


def _padded(x: Tensor, k: int, n: int) -> Tensor:
    """x with zeros up to a multiple of k in the last, of n in the second last dimension."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % k, 0, -x.shape[-2] % n)) if x.dim() > 2 or k > 1 else x
