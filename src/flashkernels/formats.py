"""Number formats of stored tensors: what a number becomes, what scales it, and how it is packed. Defined here, once.

Quantised formats are symmetric: a stored number times its scale. A scale is fp16 and belongs to one row (the last
dimension) or, of INT4, to each group of 32 numbers of it; or it is given from outside, one for each head. Scales are
rounded up, so that no number is clipped. A row that holds NaN or Inf has the scale NaN: all of it comes back as NaN.
"""

from __future__ import annotations

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
    group: int = 0  # numbers of a row that share a scale; 0: all of them
    packed: int = 1  # numbers in one stored element

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
        Format("fp8", torch.float8_e4m3fn, most=448),
        Format("fp8_e5m2", torch.float8_e5m2, most=57344),
        Format("int8", torch.int8, most=127),
        Format("int4", torch.uint8, most=7, group=32, packed=2),
    )
}


def lookup(name: str) -> Format:
    """The format of this name, or an error that lists them."""
    if name not in FORMATS:
        raise ValueError(f"format={name!r} is not one of {', '.join(map(repr, FORMATS))}")
    return FORMATS[name]


def scale_of(x: Tensor, form: Format) -> Tensor:
    """The fp16 scales (...) of the rows of x (..., N); of a format with groups (..., groups)."""
    largest = x.detach().float().abs()
    if form.group:
        pad = -x.shape[-1] % form.group
        largest = torch.nn.functional.pad(largest, (0, pad)).unflatten(-1, (-1, form.group))
    largest = largest.amax(-1)
    # fp16 holds what comes back: 7 * scale of INT4 too
    top = LARGEST_SCALE / form.most if form.packed > 1 else LARGEST_SCALE
    wide = (largest / form.most).clamp(SMALLEST_SCALE, top)
    scale = wide.half()
    above = (scale.view(torch.int16) + 1).view(torch.float16)  # the next number up: all are positive
    scale = torch.where(scale.float() < wide, above, scale)
    broken = ~torch.isfinite(x).all(-1)
    return scale.masked_fill(broken[..., None] if form.group else broken, float("nan"))


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
