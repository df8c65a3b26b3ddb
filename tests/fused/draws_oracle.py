"""What a draw may give: distributions in fp64 from a plain sort, and the random numbers that decide between tokens."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from flashkernels.fused.draws import NEW_SEGMENT, NEW_TOKEN, SEGMENT, TOKEN, segment_of, uniform, words

SLACK = 1e-5  # relative, of sums of fp32 weights
CLOSE = 1e-4  # of scores: exponentials and logarithms of fp32, around 20


class Row(NamedTuple):
    """One row of logits. Rounding in fp32 may keep a token that is `possible` but not `sure`."""

    logp: Tensor  # before any cut
    order: list[int]  # best first
    sure: Tensor
    possible: Tensor
    whole: bool

    @property
    def probabilities(self) -> Tensor:
        """Of the tokens that are kept."""
        return torch.where(self.possible, self.logp, -torch.inf).softmax(0)


def row(
    logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0,
    repetition_penalty: float = 1.0, presence_penalty: float = 0.0, frequency_penalty: float = 0.0,
    previous: Iterable[int] = (),
) -> Row:  # fmt: skip
    width = len(logits)
    x = [float(v) for v in logits.double()]
    x = [-math.inf if math.isnan(v) else min(v, 3e38) for v in x]
    for token, count in Counter(previous).items():
        if 0 <= token < width:
            v = x[token]
            v = v / repetition_penalty if v > 0 else v * repetition_penalty
            x[token] = v - frequency_penalty * count - presence_penalty
    greedy = temperature < 1e-5
    x = [v if greedy else min(v / temperature, 3e38) for v in x]
    order = sorted(range(width), key=lambda i: (-x[i], i))
    logp = torch.tensor(x, dtype=torch.float64).log_softmax(0)
    k = 1 if greedy else top_k if 0 < top_k < width else width
    weights = [math.exp(x[i] - x[order[0]]) for i in order[:k]]
    total = math.fsum(weights)

    # Numbers that fp32 holds are in their order; others may change places with their neighbours.
    penalised = repetition_penalty != 1 or presence_penalty != 0 or frequency_penalty != 0
    rounding = 1e-6 if penalised or temperature not in (0, 1) else 0.0

    def near(a: int, b: int) -> bool:
        return rounding > 0 and (x[a] == x[b] or abs(x[a] - x[b]) <= rounding * (1 + abs(x[a])))

    def cut(slack: float) -> int:
        """How many stay."""
        before = 0.0
        for n, weight in enumerate(weights):
            enough = top_p < 1 and before >= top_p * total * (1 + slack)
            if n > 0 and (enough or weight < min_p * (1 - slack)):
                return n
            before += weight
        return k

    sure, possible = (torch.zeros(width, dtype=torch.bool) for _ in range(2))
    low, high = cut(-SLACK), cut(SLACK)
    sure[[i for i in order[:low] if low == width or not near(i, order[low])]] = True
    possible[[i for n, i in enumerate(order) if n < high or near(i, order[high - 1])]] = True
    whole = not greedy and k == width and top_p >= 1 and min_p <= 0
    return Row(logp, order, sure, possible, whole)


def gumbels(seed: int, offset: int, index: Tensor, stream: int) -> Tensor:
    word = words(torch.tensor([seed]), torch.tensor([offset]), index, stream)[0]
    return -torch.log(-torch.log1p(-uniform(word).double()))


def check_draw(token: int, found: Row, seed: int, offset: int, new: bool = False) -> None:
    """The token is the one that its random numbers choose, or one as good but for rounding."""
    width = len(found.logp)
    assert 0 <= token < width
    ids = torch.arange(width)
    score = found.logp + gumbels(seed, offset, ids, NEW_TOKEN if new else TOKEN)
    if found.whole:
        size = segment_of(width)
        segment = ids // size
        mass = torch.stack([found.logp[segment == s].logsumexp(0) for s in range(int(segment[-1]) + 1)])
        of_segments = mass + gumbels(seed, offset, torch.arange(len(mass)), NEW_SEGMENT if new else SEGMENT)
        assert of_segments[token // size] >= of_segments.max() - CLOSE
        assert score[token] >= score[segment == token // size].max() - CLOSE
    else:
        assert found.possible[token]
        assert not found.sure.any() or score[token] >= score[found.sure].max() - CLOSE


def assert_distributed(drawn: Tensor, probabilities: Tensor) -> None:
    """Chi-square of drawn ids, with those that should be rare taken together; five standard deviations are allowed."""
    expected = probabilities.double().cpu() * drawn.numel()
    counts = torch.bincount(drawn.flatten().cpu(), minlength=len(expected)).double()
    assert len(counts) == len(expected) and counts[expected == 0].sum() == 0
    rare = expected < 10
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    counts = torch.cat((counts[~rare], counts[rare].sum()[None]))
    counts, expected = counts[expected > 0], expected[expected > 0]
    free = max(1, len(expected) - 1)
    chi = float(((counts - expected) ** 2 / expected).sum())
    assert chi <= free + 5 * math.sqrt(2 * free) + 10, f"chi-square {chi:.1f} with {free} degrees of freedom"
