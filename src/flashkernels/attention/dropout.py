"""Which weights dropout keeps, defined once: by Philox 4x32-10, from the seed and the place of a weight alone.

Query i and key j of a head are taken in squares of 16 x 16. The generator counts (j', i', head, batch), where j' is
16-key block number * 8 + j % 8 and i' the same of i; its key is the seed, low 32 bits first. Each count gives four
words: number 2 * (i // 8 % 2) + j // 8 % 2 is that of the weight. So one run of the generator serves four weights, and
they are those that one thread of a tensor core instruction holds, whichever way round the scores lie.

A weight is kept where its word is at least p * 2^32, and then multiplied by 1 / (1 - p). Heads are query heads; a
ragged batch counts each sequence's queries and keys from 0. `triton/dropout.py` is the same for kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashkernels.philox import LOW, philox

SQUARE = 16  # queries and keys whose bit 3 says which word is theirs


def threshold(p: float) -> int:
    """Words below it are dropped."""
    return min(int(p * 2**32), LOW)


def numbers(p: float) -> tuple[int, float]:
    """What kernels take: the threshold as the int32 of the same bits, and 1 / (1 - p)."""
    bound = threshold(p)
    return bound - 2**32 * (bound >> 31), 1 / (1 - p)


def seed_tensor(seed: int | Tensor | None, device: torch.device) -> Tensor:
    """(1,) int64 on the device, from where kernels read it. None draws it from torch's generator of that device.

    Nothing here waits for the device or copies to it, so that a CUDA graph may capture it. A graph replays an int as it
    was; a drawn seed is drawn anew, and a tensor is read again, by every replay.
    """
    if seed is None:
        return torch.randint(2**63 - 1, (1,), dtype=torch.int64, device=device)
    if isinstance(seed, Tensor):
        return seed.reshape(1)
    return torch.full((1,), seed, dtype=torch.int64, device=device)


def kept(seed: Tensor, p: float, batches: range, heads: int, rows: range, keys: int) -> Tensor:
    """Where weights stay: (batches, heads, rows, keys) of bool. `rows` are queries of their sequence."""
    device = seed.device
    first = rows.start // SQUARE

    def squares(start: int, stop: int) -> Tensor:
        """i' or j' of all squares that some of start to stop - 1 are in."""
        return torch.arange(start * 8, -(-stop // SQUARE) * 8, device=device)

    i, j = squares(first, max(rows.stop, rows.start)), squares(0, keys)
    counter = (
        j, i[:, None], torch.arange(heads, device=device)[:, None, None],
        torch.arange(batches.start, batches.stop, device=device)[:, None, None, None],
    )  # fmt: skip
    bound = threshold(p)
    words = philox(counter, (seed & LOW, seed >> 32 & LOW))
    stay = torch.stack([word >= bound for word in words], -1)  # (B, H, i', j', 4)
    # i' is (square, i % 8) and the words are (i // 8 % 2, j // 8 % 2): put each beside the rest of its index
    stay = stay.unflatten(-1, (2, 2)).unflatten(3, (j.numel() // 8, 8)).unflatten(2, (i.numel() // 8, 8))
    stay = stay.permute(0, 1, 2, 6, 3, 4, 7, 5).flatten(5, 7).flatten(2, 4)
    skipped = rows.start - first * SQUARE
    return stay[:, :, skipped : skipped + len(rows), :keys]
