"""How often each token has come before in its row: what penalties are made of."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashkernels.fused.triton.blocks import Launch

IDS = 1024  # previous tokens of a program that counts
LONGEST_HALF = 32767  # previous tokens, whose counts 16 bits hold


@triton.jit(do_not_specialize=["length"])
def count_kernel(
    previous_ptr, counts_ptr, width, length, blocks, stride_b: tl.int64, stride_l: tl.int64, stride_count: tl.int64,
    IDS: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Counts tokens. Where HALVES, counts are of 16 bits and added by pairs, as an int32."""
    pid = tl.program_id(0).to(tl.int64)
    row = pid // blocks
    at = pid % blocks * IDS + tl.arange(0, IDS)
    ids = tl.load(previous_ptr + row * stride_b + at * stride_l, mask=at < length, other=-1)
    real = (ids >= 0) & (ids < width)
    if HALVES:
        tl.atomic_add(counts_ptr + row * stride_count + ids // 2, tl.where(ids % 2 == 0, 1, 65536), mask=real)
    else:
        tl.atomic_add(counts_ptr + row * stride_count + ids, tl.full((IDS,), 1, tl.int32), mask=real)


class Counter:
    """Counts previous tokens (B, L), on the device."""

    def __init__(self, previous: Tensor, width: int) -> None:
        self.rows, self.length = previous.shape
        self.halves = self.length <= LONGEST_HALF
        self.width = -(-width // 16) * 16  # rows of counts stay aligned
        self.blocks = -(-self.length // IDS)
        step = self.width // 2 if self.halves else self.width
        self.numbers = (width, self.length, self.blocks, *previous.stride(), step)
        self.launch = Launch(count_kernel, {"IDS": IDS, "HALVES": self.halves}, 4, previous.device)

    def __call__(self, previous: Tensor) -> Tensor:
        dtype = torch.int16 if self.halves else torch.int32
        counts = torch.zeros((self.rows, self.width), dtype=dtype, device=previous.device)
        if counts.numel() and self.length:
            self.launch(self.rows * self.blocks, (previous, counts.view(torch.int32)), self.numbers)
        return counts
