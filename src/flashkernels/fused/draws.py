"""How a token is drawn from a row of weights, defined once: by Philox, from the seed and offset of the row and the id
of the token alone. `triton/draws.py` is the same for kernels.

The generator counts (index, offset's low word, stream, offset's high word); its key is the seed, low word first. The
first of its four words gives an exponential number E, and the token with the largest `log(weight) - log(E)` is drawn:
each token by its share of the weights. Nothing is summed up, so rounding moves a draw only where two are nearly equal.

Stream TOKEN counts token ids. Where a row is drawn from whole, that would be one number for each token of the
vocabulary. So ids are cut into segments, at most 1024 of them; stream SEGMENT draws one by the segments' weights, then
stream TOKEN draws a token in it. Stream ACCEPT counts the tokens of a draft, and what takes the place of a refused one
has streams of its own: a draft may have been drawn with the same seed and offset.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashkernels.philox import LOW, philox

TOKEN, SEGMENT, ACCEPT, NEW_TOKEN, NEW_SEGMENT = range(5)
MOST_SEGMENTS = 1024
MOST_TOKENS = 1 << 20
SERIES = 1 / 64  # below it, 1 - u would lose too many digits of u


def segment_of(width: int) -> int:
    """Tokens of a segment, where a row has `width` of them.

    >>> segment_of(100), segment_of(128_256), segment_of(262_144)
    (16, 128, 256)
    """
    return max(16, 1 << (-(-width // MOST_SEGMENTS) - 1).bit_length())


def words(seeds: Tensor, offsets: Tensor, index: Tensor, stream: int) -> Tensor:
    """(B, N) of int64 below 2^32: of rows with seeds and offsets (B,), at index (N,) or (B, N)."""
    seed, offset = seeds.long()[:, None], offsets.long()[:, None]
    counter = (index.long(), offset & LOW, torch.full_like(offset, stream), offset >> 32 & LOW)
    return philox(counter, (seed & LOW, seed >> 32 & LOW))[0]


def uniform(word: Tensor) -> Tensor:
    """fp32, above 0 and below 1; small numbers have all their digits."""
    return ((word.float() + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)


def gumbel(word: Tensor) -> Tensor:
    """-log(E) of an exponential number E."""
    u = uniform(word)
    series = u * (1 + u * (0.5 + u * (1 / 3 + u * 0.25)))
    return -torch.log(torch.where(u < SERIES, series, -torch.log(1 - u)))


def first_largest(score: Tensor) -> Tensor:
    """Where each row (B, N) has its largest number, ties by the lower index."""
    index = torch.arange(score.shape[1], device=score.device)
    return torch.where(score == score.amax(1, keepdim=True), index, score.shape[1]).amin(1)


def draw(
    log_weights: Tensor, seeds: Tensor, offsets: Tensor, whole: Tensor, streams: tuple[int, int] = (SEGMENT, TOKEN)
) -> Tensor:
    """A token for each row (B, V) of logarithms of weights, which need not sum to one; by segments where `whole` (B,).

    At least one of a row must be above -inf.
    """
    width = log_weights.shape[1]
    size = segment_of(width)
    device = log_weights.device
    tokens = torch.arange(width, device=device)
    count = -(-width // size)
    parts = torch.nn.functional.pad(log_weights, (0, count * size - width), value=-torch.inf).unflatten(1, (-1, size))
    segment = first_largest(
        parts.logsumexp(2) + gumbel(words(seeds, offsets, torch.arange(count, device=device), streams[0]))
    )
    inside = tokens // size == segment[:, None]
    score = log_weights + gumbel(words(seeds, offsets, tokens, streams[1]))
    return first_largest(torch.where(whole[:, None] & ~inside, -torch.inf, score))
