"""Sampling on a real GPU: wide rows, graphs, streams, and seeds that an interpreter takes as negative."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flashkernels as fk

from .draws_oracle import assert_distributed, row
from .test_sampling import check

pytestmark = pytest.mark.gpu

GPU_WAYS: dict[str, dict[str, Any]] = {
    "top-k and top-p": {"top_k": 50, "top_p": 0.9, "temperature": 0.8}, "greedy": {"temperature": 0.0},
    "all": {"temperature": 0.7}, "top-p": {"top_p": 0.9}, "top-p of few": {"top_p": 0.9, "temperature": 0.2},
    "min-p": {"min_p": 0.05}, "many": {"top_k": 5000, "top_p": 0.99},
}  # fmt: skip
each_way = pytest.mark.parametrize("kwargs", GPU_WAYS.values(), ids=GPU_WAYS)
each_top_n = pytest.mark.parametrize("top_n", [0, 8])  # without any, other kernels serve


@each_way
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [1000, 50_257, 128_256, 262_144])
@each_top_n
def test_gpu(top_n: int, width: int, dtype: torch.dtype, kwargs: dict[str, Any]) -> None:
    """Of wide rows, each drawn token and the best ones; rounding may choose another token where two are as good."""
    logits = (torch.randn(16, width, device="cuda") * 2).to(dtype)
    found, want = (fk.fused.sample(logits, seeds=9, top_n=top_n, impl=impl, **kwargs) for impl in ("triton", "torch"))
    assert torch.equal(found.top_ids, want.top_ids)
    torch.testing.assert_close(found.top_logprobs, want.top_logprobs, rtol=1e-5, atol=2e-5)
    assert (found.ids != want.ids).sum() <= 1
    same = found.ids == want.ids
    torch.testing.assert_close(found.logprobs[same], want.logprobs[same], rtol=1e-5, atol=2e-5)


@each_way
@each_top_n
def test_gpu_against_the_oracle(top_n: int, kwargs: dict[str, Any]) -> None:
    logits = (torch.randn(4, 3000, device="cuda") * 2).bfloat16()
    check(logits, kwargs | {"seeds": 5, "top_n": top_n}, "triton")


@pytest.mark.parametrize("number", [2**31, 2**31 + 5, 2**32 - 1, 2**32, 2**63 - 5, -(2**63)], ids=str)
def test_gpu_takes_seeds_and_offsets_of_64_bits(number: int) -> None:
    """Those whose top bit is the 32nd too, which the interpreter would take as negative."""
    logits = (torch.randn(4, 3000, device="cuda") * 2).bfloat16()
    check(logits, {"seeds": number, "offsets": abs(number) % 2**62}, "triton")


@each_way
def test_gpu_distribution(kwargs: dict[str, Any]) -> None:
    logits = torch.randn(1000, device="cuda")
    found = fk.fused.sample(logits.expand(100_000, 1000), seeds=3, **kwargs)
    assert_distributed(found.ids, row(logits.cpu(), **kwargs).probabilities)


@each_way
@each_top_n
@pytest.mark.parametrize("width", [2000, 3000, 128_256])  # one program a row, one or two, many
def test_gpu_batches_and_graphs(width: int, top_n: int, kwargs: dict[str, Any]) -> None:
    kwargs = kwargs | {"top_n": top_n}
    logits = torch.randn(40, width, device="cuda").bfloat16()
    seeds, offsets = torch.arange(40, device="cuda"), torch.arange(40, device="cuda") + 7
    want = fk.fused.sample(logits, seeds=seeds, offsets=offsets, **kwargs)
    for part in (slice(0, 1), slice(39, 40), slice(3, 17)):
        found = fk.fused.sample(logits[part], seeds=seeds[part], offsets=offsets[part], **kwargs)
        assert all(torch.equal(a, b[part]) for a, b in zip(found, want, strict=True))
    torch.cuda.set_sync_debug_mode("error")
    try:
        fk.fused.sample(logits, seeds=seeds, offsets=offsets, **kwargs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fk.fused.sample(logits, seeds=seeds, offsets=offsets, **kwargs)
    for _ in range(3):
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, want, strict=True))
        offsets += 1
        logits.normal_()
        want = fk.fused.sample(logits, seeds=seeds, offsets=offsets, **kwargs)


@each_way
@pytest.mark.parametrize("width", [2000, 3000])
def test_gpu_rows_do_not_depend_on_their_number(width: int, kwargs: dict[str, Any]) -> None:
    """Enough of them for tiles of another size."""
    logits = torch.randn(2000, width, device="cuda").bfloat16()
    whole, one = (fk.fused.sample(x, seeds=3, **kwargs) for x in (logits, logits[:1]))
    assert all(torch.equal(a[:1], b) for a, b in zip(whole, one, strict=True))


@pytest.mark.parametrize("kwargs", [{"temperature": 0.0}, {}], ids=["greedy", "all"])
def test_gpu_streams_and_many_rows(kwargs: dict[str, Any]) -> None:
    """Programs of a row are counted, on each stream apart; of more rows than counters are kept for, in new memory."""
    logits = [torch.randn(rows, 9000, device="cuda").bfloat16() for rows in (3000, 5, 7)]
    want = [fk.fused.sample(x, seeds=3, impl="torch", **kwargs) for x in logits]
    streams = [torch.cuda.Stream() for _ in logits]
    torch.cuda.synchronize()
    found: list[list[fk.fused.Sampled]] = [[] for _ in logits]
    for _ in range(50):
        for x, stream, mine in zip(logits, streams, found, strict=True):
            with torch.cuda.stream(stream):
                mine.append(fk.fused.sample(x, seeds=3, **kwargs))
    torch.cuda.synchronize()
    for mine, one in zip(found, want, strict=True):
        assert all(torch.equal(a, b) for again in mine[1:] for a, b in zip(again, mine[0], strict=True))
        assert (mine[0].ids != one.ids).sum() <= 3  # where two are as good


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gpu_penalties(dtype: torch.dtype) -> None:
    logits = (torch.randn(8, 128_256, device="cuda") * 2).to(dtype)
    previous = torch.randint(-1, 128_256, (8, 4000), device="cuda")
    kwargs = {"repetition_penalty": 1.2, "presence_penalty": 0.1, "frequency_penalty": 0.2, "top_k": 50, "seeds": 1}
    found, want = (fk.fused.sample(logits, previous=previous, impl=i, **kwargs) for i in ("triton", "torch"))
    assert (found.ids != want.ids).sum() <= 1
    same = found.ids == want.ids
    torch.testing.assert_close(found.logprobs[same], want.logprobs[same], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("width", [300, 128_256, 1 << 20])
def test_gpu_greedy_rows_take_the_first_of_the_largest(width: int) -> None:
    logits = torch.randn(9, width, device="cuda", dtype=torch.bfloat16)
    logits[0], logits[1], logits[2, ::2] = 0.0, -torch.inf, torch.nan
    logits[3, -5:], logits[4, 100:], logits[5, :7] = torch.inf, 9.0, -torch.inf
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"top_k": 1}, {"temperature": torch.zeros(9, device="cuda")}]
    for kwargs in kinds:
        found, want = (fk.fused.sample(logits, seeds=4, impl=impl, **kwargs) for impl in ("triton", "torch"))
        assert torch.equal(found.ids, want.ids)
        torch.testing.assert_close(found.logprobs, want.logprobs, equal_nan=True, rtol=1e-5, atol=2e-5)


def test_gpu_ties_nan_and_infinities() -> None:
    logits = torch.zeros(12, 128_256, device="cuda", dtype=torch.bfloat16)
    logits[2], logits[3], logits[4, ::2], logits[5, 70_000] = torch.nan, -torch.inf, torch.nan, torch.inf
    logits[6, 100:] = 1.0
    for kwargs in ({"top_k": 3}, {"top_k": 3000}, {"top_p": 0.5}, {}, {"temperature": 0.0}, {"min_p": 0.9}):
        found, want = (fk.fused.sample(logits, seeds=4, top_n=3, impl=i, **kwargs) for i in ("triton", "torch"))
        assert torch.equal(found.top_ids, want.top_ids)
        assert ((found.ids >= 0) & (found.ids < 128_256)).all() and (found.ids != want.ids).sum() <= 1
