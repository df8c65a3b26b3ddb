"""FP8 inputs for attention: 16-bit q, k, v rounded to e4m3, with the scales that undo it."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flashkernels.attention.validation import SCALED_ROWS

E4M3_MOST = 448.0
TO_MOST = 1 / E4M3_MOST  # to multiply by: CUDA and the CPU divide by a number differently


class Quantised(NamedTuple):
    """q, k and v in float8_e4m3fn with fp32 scales, in the order and by the names that `fk.attention` takes them."""

    q: Tensor
    k: Tensor
    v: Tensor
    q_scale: Tensor
    k_scale: Tensor
    v_scale: Tensor

    @property
    def scales(self) -> dict[str, Tensor]:
        """The keywords of `fk.attention`."""
        return {"q_scale": self.q_scale, "k_scale": self.k_scale, "v_scale": self.v_scale}


def quantise_qkv(
    q: Tensor, k: Tensor, v: Tensor, *, per_block: bool = False, rotate: bool = False, seed: int = 0
) -> Quantised:
    """Rounds q (B, S_q, H, D), k (B, S_k, H_kv, D) and v (B, S_k, H_kv, D_v) to FP8, each head by its largest value.

    Args:
        per_block: q and k get a scale for each 128 rows instead of one for a whole head.
        rotate: turns q and k by the same random orthogonal (Hadamard) matrix first. Their products stay the same, but
            outliers are spread over the whole head, and fewer bits are lost. D must be a multiple of 16.
        seed: of the random signs.

    >>> import torch, flashkernels as fk
    >>> q = torch.randn(1, 200, 4, 64)
    >>> small = fk.quantise_qkv(q, q, q, per_block=True)
    >>> small.q.dtype, small.q_scale.shape, small.v_scale.shape
    (torch.float8_e4m3fn, torch.Size([1, 4, 2]), torch.Size([1, 4]))
    >>> fk.attention(*small[:3], **small.scales).dtype
    torch.bfloat16
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.dim() != 4 or not x.dtype.is_floating_point or x.shape[-1] == 0:
            got = f"{name} has shape {tuple(x.shape)} and dtype {x.dtype}"
            raise ValueError(f"{got}; expected (B, S, H, D) of floats, D of at least 1")
    if rotate:
        q, k = (rotated(x, seed) for x in (q, k))
    (q8, q_scale), (k8, k_scale) = (_rounded(x, per_block) for x in (q, k))
    v8, v_scale = _rounded(v, False)
    return Quantised(q8, k8, v8, q_scale, k_scale, v_scale)


def _rounded(x: Tensor, per_block: bool) -> tuple[Tensor, Tensor]:
    """x in e4m3, and its scales: (B, H), or with `per_block` (B, H, blocks)."""
    wide = x.float()
    wide = wide.masked_fill(wide.isinf(), float("nan"))  # e4m3 has no Inf
    largest = wide.abs().nan_to_num(0.0).amax(-1).transpose(1, 2)  # (B, H, S)
    if per_block:
        blocks = -(-x.shape[1] // SCALED_ROWS)
        padded = torch.nn.functional.pad(largest, (0, blocks * SCALED_ROWS - x.shape[1]))
        scale = padded.unflatten(-1, (blocks, SCALED_ROWS)).amax(-1) * TO_MOST
    else:
        scale = torch.nn.functional.pad(largest, (0, 1)).amax(-1) * TO_MOST  # of no rows too
    scale = torch.where(scale > 0, scale, 1.0)
    rows = scale.repeat_interleave(SCALED_ROWS, -1)[..., : x.shape[1]] if per_block else scale[..., None]
    return (wide / rows.transpose(1, 2)[..., None]).to(torch.float8_e4m3fn), scale.contiguous()


def rotated(x: Tensor, seed: int = 0) -> Tensor:
    """x (..., D) times a random orthogonal matrix, in fp32: random signs, then Hadamard transforms of the power of two
    in D. Numbers may grow by the root of that."""
    dim = x.shape[-1]
    size = dim & -dim
    if size < 16:
        raise ValueError(f"head_dim={dim}: a rotation needs a multiple of 16")
    generator = torch.Generator("cpu").manual_seed(seed)  # the same signs on every device
    signs = (torch.randint(0, 2, (dim,), generator=generator, device="cpu") * 2 - 1).to(x.device)
    turned = (x.float() * signs).unflatten(-1, (dim // size, size))
    for step in (1 << i for i in range(size.bit_length() - 1)):
        pairs = turned.unflatten(-1, (size // (2 * step), 2, step))
        turned = torch.stack((pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]), -2).flatten(-3)
    return turned.flatten(-2) / math.sqrt(size)
