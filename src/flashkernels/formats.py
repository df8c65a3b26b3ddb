"""Number formats of stored tensors: what a number becomes, what scales it, and how it is packed. Defined here, once.

Quantised formats are symmetric: a stored number times its scale. A scale is fp16 and belongs to one row (the last
dimension) or, of INT4, to each group of 32 numbers of it; or it is given from outside, one for each head. A row that
holds NaN or Inf has the scale NaN: all of it comes back as NaN.

A scale decides what the row's largest number becomes. A format has some *aims* for it, and a row takes the one that
leaves the least squared error, the first of equals. The aims of floats are numbers that they hold, so that the row's
largest number is stored exactly; how well the others lie differs. It lowers the error of FP8 by 8 % on normal numbers,
by a third where rows have outliers. Those of INT4 clip the largest number for a smaller step (7 %). INT8 has one: more
of them would gain 2 %, with outliers nothing, which is not worth their arithmetic. Scales are rounded up, so that
nothing is clipped but by INT4's aims over 7.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST_SCALE = 65504.0  # of fp16
SMALLEST_SCALE = 2.0**-24  # so that a scale is never 0, also of a row of zeros


@dataclass(frozen=True)
class Format:
    """How numbers are stored. `most` is the largest that a stored one may be; 0: stored as they are, without scale."""

    name: str
    dtype: torch.dtype
    most: float = 0.0
    aims: tuple[float, ...] = ()  # what the largest number of a row may become
    unit: float = 1.0  # what errors are counted in where aims are compared; a power of two
    group: int = 0  # numbers of a row that share a scale; 0: all of them
    packed: int = 1  # numbers in one stored element

    @property
    def fraction(self) -> int:
        """Bits after the point of a stored number; 0 of an integer.

        >>> FORMATS["fp8"].fraction, FORMATS["int8"].fraction
        (3, 0)
        """
        return -round(math.log2(torch.finfo(self.dtype).eps)) if self.dtype.is_floating_point else 0

    @property
    def largest_scale(self) -> float:
        """fp16 holds it, and what comes back of two in a byte."""
        return LARGEST_SCALE / self.most if self.packed > 1 else LARGEST_SCALE

    @property
    def quantised(self) -> bool:
        return self.most > 0

    def stored(self, width: int) -> int:
        """Stored elements of a row of `width` numbers."""
        return width // self.packed

    def groups(self, width: int) -> int:
        """Scales of a row of `width` numbers.

        >>> FORMATS["int4"].groups(72), FORMATS["int8"].groups(72)
        (3, 1)
        """
        return -(-width // self.group) if self.group else 1

    def bits(self, width: int, by_row: bool = True) -> int:
        """Bits of a row of `width` numbers with its scales, if those are the row's own.

        >>> [FORMATS[name].bits(128) for name in ("bf16", "int8", "int4")]
        [2048, 1040, 576]
        """
        scales = 16 * self.groups(width) if self.quantised and by_row else 0
        return self.stored(width) * self.dtype.itemsize * 8 + scales


# INT4: two in a byte, the even index in the low nibble, each a number of two's complement from -7 to 7.
FORMATS = {
    f.name: f
    for f in (
        Format("fp32", torch.float32),
        Format("fp16", torch.float16),
        Format("bf16", torch.bfloat16),
        Format("fp8", torch.float8_e4m3fn, most=448, aims=(448, 384, 320, 256), unit=2.0**-3),
        Format("fp8_e5m2", torch.float8_e5m2, most=57344, aims=(57344, 49152, 40960, 32768), unit=2.0**5),
        Format("int8", torch.int8, most=127, aims=(127,)),
        Format("int4", torch.uint8, most=7, aims=(7, 7.375, 7.75, 8.25), unit=2.0**-6, group=32, packed=2),
    )
}


def lookup(name: str) -> Format:
    """The format of this name, or an error that lists them."""
    if name not in FORMATS:
        raise ValueError(f"format={name!r} is not one of {', '.join(map(repr, FORMATS))}")
    return FORMATS[name]


def scale_of(x: Tensor, form: Format) -> Tensor:
    """The fp16 scales (...) of the rows of x (..., N); of a format with groups (..., groups)."""
    wide = x.detach().float()
    if form.group:
        wide = torch.nn.functional.pad(wide, (0, -x.shape[-1] % form.group)).unflatten(-1, (-1, form.group))
    largest = wide.abs().amax(-1)
    # by a tensor: by a plain number torch multiplies with its inverse on a GPU, which rounds otherwise
    best, *others = (_rounded_up(largest / torch.full_like(largest, aim), form) for aim in form.aims)
    if others:
        least = _left_over(wide, best, form)
    for scale in others:
        error = _left_over(wide, scale, form)
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    broken = ~torch.isfinite(x).all(-1)
    return best.masked_fill(broken[..., None] if form.group else broken, float("nan"))


def _rounded_up(wide: Tensor, form: Format) -> Tensor:
    """Scales in fp16."""
    wide = wide.clamp(SMALLEST_SCALE, form.largest_scale)
    scale = wide.half()
    above = (scale.view(torch.int16) + 1).view(torch.float16)  # the next number up: all are positive
    return torch.where(scale.float() < wide, above, scale)


def _left_over(x: Tensor, scale: Tensor, form: Format) -> Tensor:
    """The squared error of rows x (..., N) under scales (...). It is counted in whole units: the sum of those is the
    same in any order, so every implementation finds the same scale."""
    wide = scale.float()
    y = x * (1 / wide)[..., None]
    if form.fraction:  # the nearest number with so many bits; which of two equally near ones does not matter here
        dropped = 23 - form.fraction
        near = (y.view(torch.int32) + (1 << dropped - 1) & -(1 << dropped)).view(torch.float32)
    else:
        near = y.clamp(-form.most, form.most).round()
    units = ((y - near) / form.unit).round().int()
    return (units * units).sum(-1, dtype=torch.int32).float() * (wide * wide)


def encode(x: Tensor, form: Format, scale: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """x (..., N) as it is stored, (..., N / packed), and its scales; or by the `scale` given, (H,) of x (..., H, N).

    >>> stored, scale = encode(torch.tensor([[1.0, -7.0] * 16]), FORMATS["int4"])
    >>> stored[0, 0].item() == (1 | 9 << 4), scale
    (True, tensor([[1.]], dtype=torch.float16))
    """
    if not form.quantised:
        return x.to(form.dtype), None
    if scale is None:
        scale = scale_of(x, form)
    small = (x.float() / spread(scale, form, x.shape[-1])).clamp(-form.most, form.most).nan_to_num(0.0)
    if form.dtype.is_floating_point:
        return small.to(form.dtype), scale
    whole = small.round().to(torch.int8)
    if form.packed == 1:
        return whole, scale
    return (whole[..., 0::2] & 15 | whole[..., 1::2] << 4).view(torch.uint8), scale


def decode(stored: Tensor, form: Format, scale: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """The numbers (..., N) that `encode` stored.

    >>> stored, scale = encode(torch.tensor([[0.5, -127.0, 2.0]]), FORMATS["int8"])
    >>> decode(stored, FORMATS["int8"], scale)
    tensor([[   0., -127.,    2.]])
    """
    if not form.quantised:
        return stored.to(dtype)
    if form.packed > 1:
        nibbles = stored.view(torch.int8)
        stored = torch.stack((nibbles << 4 >> 4, nibbles >> 4), -1).flatten(-2)
    assert scale is not None
    return (stored.float() * spread(scale, form, stored.shape[-1])).to(dtype)


def spread(scale: Tensor, form: Format, width: int) -> Tensor:
    """Scales in fp32, to multiply rows (..., H, N) by: of heads (H,), of rows (..., H), of groups (..., H, G)."""
    wide = scale.float()
    if form.group and scale.dim() > 1:
        return wide.repeat_interleave(form.group, -1)[..., :width]
    return wide[..., None]
