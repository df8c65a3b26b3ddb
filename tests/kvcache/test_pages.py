"""Pages on the move: back to dense, from page to page, to the host and back."""

from __future__ import annotations

import contextlib

import pytest
import torch

from flashkernels.kvcache import Host, PagedCache, append, copy_pages, gather

TABLE = torch.tensor([[2, 0, 5], [1, 3, 4]], dtype=torch.int32)


def filled(form: str) -> tuple[PagedCache, torch.Tensor]:
    lengths = torch.tensor([7, 3], dtype=torch.int32)
    cache = PagedCache.allocate(6, 3, 2, 32, block_table=TABLE.clone(), format=form, lengths=lengths)
    k = torch.randn(2, 3, 2, 32, generator=torch.Generator().manual_seed(0))
    append(cache, k, -k)
    return cache, k


@pytest.mark.parametrize("form", ["fp32", "bf16", "fp8", "fp8_e5m2", "int8", "int4"])
def test_gather(form: str) -> None:
    cache, k = filled(form)
    dense_k, dense_v = gather(cache)
    assert dense_k.shape == (2, 9, 2, 32) and torch.equal(dense_v, -dense_k)
    step = {"int4": 0.5 / 7, "fp8_e5m2": 0.125}.get(form, 0.0625)
    assert ((dense_k[0, 4:7] - k[0]).abs() <= step * k.abs().max() * 1.01).all()
    assert (dense_k[0, 7:] == 0).all() and (dense_k[1, 3:] == 0).all()
    assert gather(cache, 4, torch.float16)[0].shape == (2, 4, 2, 32)


def test_gather_does_not_see_what_is_not_there() -> None:
    cache, _ = filled("fp32")
    cache.k[4] = torch.nan
    cache.block_table[1, 2] = 1 << 20
    assert gather(cache)[0].isfinite().all()
    with pytest.raises(ValueError, match="length=10 is not in 0 to 9"):
        gather(cache, 10)


@pytest.mark.parametrize("form", ["fp32", "int8", "fp8", "fp8_e5m2"])
def test_copy_reads_before_it_writes(form: str) -> None:
    cache, _ = filled(form)
    before = [x.clone() for x in cache.tensors if x is not None]
    copy_pages(cache, torch.tensor([0, 1]), torch.tensor([1, 0]))
    after = [x for x in cache.tensors if x is not None]
    for old, new in zip(before, after, strict=True):
        if old.shape[0] == 6:
            new, old = (x.view(torch.uint8) for x in (new, old))  # FP8 is not compared
            assert torch.equal(new[[1, 0]], old[[0, 1]]) and torch.equal(new[2:], old[2:])


def test_gather_names_a_page_that_is_not_there() -> None:
    cache, _ = filled("fp32")
    cache.block_table[0, 1] = 6
    with pytest.raises(ValueError, match=r"block_table\[0, 1\]=6 of sequence 0, slot 1, is not in 0 to 5"):
        gather(cache)


def test_copy_names_what_is_wrong() -> None:
    cache, _ = filled("fp32")
    with pytest.raises(ValueError, match=r"target=\[6\] names a page that is not in 0 to 5"):
        copy_pages(cache, torch.zeros(1).int(), torch.tensor([6]))
    with pytest.raises(TypeError, match=r"source.dtype=torch.float32"):
        copy_pages(cache, torch.ones(1), torch.ones(1).int())
    with pytest.raises(ValueError, match=r"target has shape \(2,\)"):
        copy_pages(cache, torch.ones(1).int(), torch.ones(2).int())
    with pytest.raises(ValueError, match=r"target=\[3, 3\] names a page twice"):
        copy_pages(cache, torch.tensor([0, 1]), torch.tensor([3, 3]))
    with pytest.raises(TypeError, match=r"source must be a torch.Tensor, got list"):
        copy_pages(cache, [0], [1])


def test_bad_arguments_of_gather_are_named() -> None:
    cache, _ = filled("fp32")
    with pytest.raises(TypeError, match=r"length=2.5 must be an int, got float"):
        gather(cache, 2.5)
    with pytest.raises(TypeError, match=r"cache must be a kvcache.PagedCache, got NoneType"):
        gather(None)


def test_host_memory_is_for_caches_of_its_kind() -> None:
    host = Host(filled("int4")[0], 2)
    with pytest.raises(ValueError, match=r"cache has pages of .* this host memory was made for .*torch.uint8"):
        host.swap_out(filled("int8")[0], pages=[0], slots=[0])


def test_swap() -> None:
    cache, _ = filled("int4")
    before = [None if x is None else x.clone() for x in cache.tensors]
    host = Host(cache, 2)
    host.swap_out(cache, pages=[5, 0], slots=[0, 1])
    for x in (cache.k, cache.k_scale, cache.v, cache.v_scale):
        assert x is not None
        x.zero_()
    host.swap_in(cache, slots=[1, 0], pages=[3, 5])
    host.wait()
    for x, old in zip(cache.tensors, before, strict=True):
        if old is not None and old.shape[0] == 6:
            assert x is not None and torch.equal(x[[3, 5]], old[[0, 5]]) and not x[0].any()
    with pytest.raises(ValueError, match="slots has 2, which is not in 0 to 1"):
        host.swap_out(cache, pages=[0], slots=[2])
    with pytest.raises(ValueError, match="1 pages and 2 slots"):
        host.swap_out(cache, pages=[0], slots=[0, 1])


def test_swap_names_what_is_wrong() -> None:
    cache, _ = filled("fp32")
    for pages in ("2", True, 2.0):
        with pytest.raises(TypeError, match=rf"pages={pages!r} must be an int, got {type(pages).__name__}"):
            Host(cache, pages)  # type: ignore[arg-type]
    host = Host(cache, 2)
    with pytest.raises(ValueError, match=r"slots=\[1, 1\] names one twice"):
        host.swap_out(cache, pages=[0, 1], slots=[1, 1])
    with pytest.raises(ValueError, match=r"pages=\[3, 3\] names one twice"):
        host.swap_in(cache, slots=[0, 1], pages=[3, 3])
    host.swap_out(cache, pages=[3, 3], slots=[0, 1])
    with pytest.raises(TypeError, match=r"pages=\[0.5\] must be a sequence of ints"):
        host.swap_out(cache, pages=[0.5], slots=[0])  # type: ignore[list-item]
    host.device = torch.device("meta")
    with pytest.raises(ValueError, match="cache is on cpu; this host memory was made for meta"):
        host.swap_out(cache, pages=[0], slots=[0])


def test_the_stream_of_a_swap_is_known_to_the_memory_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is freed under a copy is then not given to others."""
    cache, _ = filled("int8")
    host, seen = Host(cache, 2), []

    class Stream:
        device = None

        def wait_stream(self, other: object) -> None: ...

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: seen.append((x.data_ptr(), stream)))
    host.stream = Stream()  # type: ignore[assignment]
    host.swap_out(cache, pages=[0], slots=[0])
    stored = [x for x in (cache.k, cache.v, cache.k_scale, cache.v_scale) if x is not None]
    assert seen == [(x.data_ptr(), host.stream) for x in stored]
