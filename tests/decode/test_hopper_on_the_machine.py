"""The Hopper decode on the machine of tests/machine: every stored format, with its race detector."""

from __future__ import annotations

import pytest
from tests.machine.hopper import on_the_machine

import flashkernels as fk

from .cases import cache_of, compare, queries


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("form", "dim"), [("bf16", 64), ("fp16", 128), ("fp8", 64), ("int8", 128), ("int4", 64)])
def test_a_format(form: str, dim: int, seed: int) -> None:
    """Sequences of several pieces, of one, and of none; with copies that come late, and at once."""
    cache = cache_of([130, 7, 700, 0], form, kv_heads=2, dim=dim)
    q = queries(cache, heads=8)
    with on_the_machine(sms=4, seed=seed) as run:
        out, lse = fk.decode(q, cache, impl="hopper", return_lse=True)
    assert run.launches == ["decode"]
    compare(out, lse, q, cache)
