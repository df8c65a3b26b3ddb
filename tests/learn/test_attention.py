"""What the lessons on attention say of their kernels, beyond the cases that they check themselves."""

from __future__ import annotations

import itertools
import runpy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture
def causal(folder_of_lessons: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return load(folder_of_lessons, "5_causal", monkeypatch)


@pytest.fixture
def decode(folder_of_lessons: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return load(folder_of_lessons, "7_decode", monkeypatch)


@pytest.fixture
def hopper(folder_of_lessons: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return load(folder_of_lessons, "8_hopper", monkeypatch)


def load(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(folder / "attention")
    return runpy.run_path(str(folder / "attention" / f"{name}.py"))


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).half()


@pytest.mark.parametrize("tile", [(16, 16), (32, 16), (16, 32)], ids=["16x16", "32x16", "16x32"])
@pytest.mark.parametrize(("seq_q", "seq_k"), [(40, 40), (40, 19), (19, 40), (1, 33)])
def test_causal_at_the_edges(causal: dict[str, Any], tile: tuple[int, int], seq_q: int, seq_k: int) -> None:
    q, k, v = normal(1, seq_q, 32), normal(1, seq_k, 32), normal(1, seq_k, 32)
    out = causal["attention"](q, k, v, tile=tile).double()
    exact = torch.zeros(seq_q, 32, dtype=torch.float64)
    for i in range(seq_q):
        seen = i + seq_k - seq_q + 1
        if seen > 0:  # a row that sees no key is 0
            exact[i] = (q[0, i].double() @ k[0, :seen].double().T / 32**0.5).softmax(-1) @ v[0, :seen].double()
    torch.testing.assert_close(out[0], exact, rtol=0, atol=4 * 2**-11 * float(v.abs().max()))  # P and O in fp16


def test_without_its_guard_tall_tiles_give_nan(causal: dict[str, Any]) -> None:
    q, k, v = (normal(1, 64, 32) for _ in range(3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lost = {
            tile: int(causal["attention"](q, k, v, tile=tile, safe=False).isnan().any(-1).sum())
            for tile in ((16, 16), (32, 16), (16, 32), (64, 16))
        }
        more = causal["attention"](q, normal(1, 68, 32), normal(1, 68, 32), tile=(16, 16), safe=False)
    assert lost == {(16, 16): 0, (32, 16): 32, (16, 32): 0, (64, 16): 48}  # as the page says
    assert int(more.isnan().any(-1).sum()) == 48  # 4 keys more than queries


@pytest.mark.parametrize("parts", [3, 64])
def test_decode_refuses_parts_that_it_cannot_merge(decode: dict[str, Any], parts: int) -> None:
    with pytest.raises(ValueError, match=rf"parts={parts} must be a power of two that leaves no part of 40 keys empty"):
        decode["decode"](normal(4, 32), normal(2, 40, 32), normal(2, 40, 32), parts)


@pytest.mark.parametrize("overlap", [False, True], ids=["in-turns", "overlap"])
@pytest.mark.parametrize("warpgroups", [1, 2, 3])
@pytest.mark.parametrize("stages", [1, 2])
def test_the_model_of_the_hopper_kernel_keeps_its_rules(
    hopper: dict[str, Any], warpgroups: int, overlap: bool, stages: int
) -> None:
    starts = hopper["timeline"](64, 128, warpgroups, overlap=overlap, stages=stages, tiles=6)
    ends = {op.name: start + op.cycles for op, start in starts.items()}
    assert len(ends) == len(starts) == 6 * (2 + 3 * warpgroups)
    for op, start in starts.items():
        assert all(ends[name] <= start for name in op.after)
    for unit in hopper["UNITS"]:  # one thing at a time
        spans = sorted((start, start + op.cycles) for op, start in starts.items() if op.unit == unit)
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))
        assert 0 < hopper["busy"](starts, unit) <= 1
