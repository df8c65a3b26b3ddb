"""What the gradient of sinks is made of: rows that see nothing, or are nobody's, have no part in it."""

from __future__ import annotations

import math

import pytest
import torch

from flashkernels.attention.sinks import gradient, unseeing, weights

NAN = math.nan


@pytest.mark.parametrize("garbage", [NAN, math.inf, -1e30], ids=str)
def test_rows_after_the_last_sequence_add_nothing(garbage: float) -> None:
    generator = torch.Generator().manual_seed(0)
    sinks, lse, delta = (torch.randn(shape, generator=generator) for shape in ((3,), (3, 7), (3, 7)))
    ends = torch.tensor([0, 2, 5], dtype=torch.int32)
    whole = torch.cat((lse[:, :5], torch.full((3, 2), garbage)), -1), torch.cat((delta[:, :5], delta[:, 5:] * NAN), -1)
    found = []
    for logs, deltas, cut in ((*whole, ends), (lse[:, :5], delta[:, :5], None)):
        blind = unseeing(logs, cut)
        found.append(gradient(sinks, weights(sinks, logs, blind), deltas, blind))
    torch.testing.assert_close(*found, rtol=0, atol=0)
    expected = -(torch.exp(sinks[:, None] - lse[:, :5]) * delta[:, :5]).sum(-1)
    torch.testing.assert_close(found[0], expected)


def test_a_row_that_sees_nothing_has_no_weight_and_a_nan_stays() -> None:
    sinks, lse = torch.zeros(2), torch.tensor([[-math.inf, 0.0], [-math.inf, NAN]])
    blind = unseeing(lse, None)
    assert weights(sinks, lse, blind)[:, 0].tolist() == [0, 0]
    found = gradient(sinks, weights(sinks, lse, blind), torch.tensor([[NAN, 2.0], [1.0, 1.0]]), blind)
    assert found[0] == -2 and found[1].isnan()
