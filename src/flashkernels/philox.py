"""Philox 4x32-10 in torch: the generator of every random number here, as Triton and CUDA have it too."""

from __future__ import annotations

import torch
from torch import Tensor

LOW = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four words from four words and a key of two, all held in int64.

    >>> zero = torch.tensor(0)
    >>> [f"{word.item():08x}" for word in philox((zero, zero, zero, zero), (zero, zero))]
    ['6627e8d5', 'e169c58d', 'bc57ac4c', '9b00dbd8']
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _product(c0, MULTIPLIERS[0])
        high1, low1 = _product(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + STEPS[0] & LOW, k1 + STEPS[1] & LOW
    return c0, c1, c2, c3


def _product(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """The high and low word of a product of two words. int64 has no room for it: 16 bits of b at a time."""
    upper, lower = a * (b >> 16), a * (b & 0xFFFF)  # below 2^48
    return upper + (lower >> 16) >> 16, ((upper & 0xFFFF) << 16) + lower & LOW
