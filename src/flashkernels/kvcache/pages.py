"""Pages on the move: back to dense tensors, from page to page, and to host memory and back."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor

from flashkernels.arguments import check_count
from flashkernels.formats import decode
from flashkernels.kvcache.cache import PagedCache, readable


def gather(
    cache: PagedCache, length: int = 0, dtype: torch.dtype | None = None, *, check: bool = False
) -> tuple[Tensor, Tensor]:
    """The first `length` (0: all that fit) keys and values of each sequence, dequantised, zeros past its own length.

    Args:
        check: raise where the block table or a length is wrong, with the sequence and the slot: `PagedCache.check`. On
            the CPU it is always done.

    Returns:
        k (B, length, H_kv, D) and v (B, length, H_kv, D_v), in `dtype`: by default that of the pages, fp32 for
        quantised ones. Without `check` nothing waits for the device.

    >>> import torch
    >>> pages = torch.arange(6.0).view(3, 2, 1, 1)
    >>> cache = PagedCache(pages, pages, torch.tensor([[2, 0]]).int(), torch.tensor([3]).int())
    >>> gather(cache)[0].flatten().tolist()
    [4.0, 5.0, 0.0, 0.0]
    """
    _check_cache(cache)
    check_count("length", length)
    length = length or cache.capacity
    if length > cache.capacity:
        raise ValueError(f"length={length} is not in 0 to {cache.capacity}, the capacity")
    if check or readable(cache.k):
        cache.check()
    if dtype is None:
        dtype = torch.float32 if cache.format.quantised else cache.k.dtype
    at = torch.arange(length, device=cache.k.device)
    there = at < cache.lengths[:, None]
    # a page that is not used may have any number in the table
    page = cache.block_table[:, at // cache.page_size].long().masked_fill(~there, 0)
    slot = (at % cache.page_size).expand_as(page)

    def rows(pages: Tensor, scale: Tensor | None) -> Tensor:
        each = scale[page, slot] if scale is not None and scale.dim() > 1 else scale
        return decode(pages[page, slot], cache.format, each, dtype).masked_fill(~there[..., None, None], 0.0)

    return rows(cache.k, cache.k_scale), rows(cache.v, cache.v_scale)


def copy_pages(cache: PagedCache, source: Tensor, target: Tensor) -> None:
    """Copies whole pages, with their scales: page source[i] to page target[i], all read before one is written.

    `source` and `target` are (n,) int32 or int64 on the device of the cache; a target is named once. For copy-on-write.
    """
    _check_cache(cache)
    for name, pages in (("source", source), ("target", target)):
        if not isinstance(pages, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(pages).__name__}")
        if pages.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name}.dtype={pages.dtype}; it must be torch.int32 or torch.int64")
        if pages.dim() != 1 or pages.shape != source.shape:
            raise ValueError(f"{name} has shape {tuple(pages.shape)}; both must be (n,)")
        if pages.device != cache.k.device:
            raise ValueError(f"{name}.device={pages.device} differs from that of the cache, {cache.k.device}")
        if readable(pages) and ((pages < 0) | (pages >= cache.k.shape[0])).any():
            raise ValueError(f"{name}={pages.tolist()} names a page that is not in 0 to {cache.k.shape[0] - 1}")
    if readable(target) and target.unique().numel() != target.numel():
        raise ValueError(f"target={target.tolist()} names a page twice")
    for x in _stored(cache):
        pages = x.view(torch.uint8) if x.element_size() == 1 else x  # torch copies no FP8 by index
        pages.index_copy_(0, target.long(), pages.index_select(0, source.long()))


class Host:
    """Host memory, pinned where there is a GPU, for pages that are swapped out; copies run on a stream of its own.

    >>> import torch
    >>> cache = PagedCache.allocate(4, 2, 1, 8, block_table=torch.zeros(1, 1, dtype=torch.int32), format="fp16")
    >>> cache.k[3] = 7.0
    >>> host = Host(cache, 2)
    >>> host.swap_out(cache, pages=[3], slots=[1])
    >>> cache.k.zero_(); host.swap_in(cache, slots=[1], pages=[0]); host.wait()  # doctest: +ELLIPSIS
    tensor(...
    >>> cache.k[0].unique().item()
    7.0
    """

    def __init__(self, cache: PagedCache, pages: int) -> None:
        _check_cache(cache)
        check_count("pages", pages, 1)
        cuda = cache.k.is_cuda
        self.pages, self.device = pages, cache.k.device
        self.buffers = [torch.empty(pages, *x.shape[1:], dtype=x.dtype, pin_memory=cuda) for x in _stored(cache)]
        self.stream = torch.cuda.Stream(cache.k.device) if cuda else None

    def swap_out(self, cache: PagedCache, pages: Sequence[int], slots: Sequence[int]) -> None:
        """Starts copying page pages[i] of the cache to slots[i] here, after what the current stream has to do. The
        pages must not be written before `wait`; a slot is named once."""
        self._copy(cache, pages, slots, out=True)

    def swap_in(self, cache: PagedCache, slots: Sequence[int], pages: Sequence[int]) -> None:
        """Starts copying slots[i] back to page pages[i], each named once; what reads them must come after `wait`."""
        self._copy(cache, pages, slots, out=False)

    def wait(self) -> None:
        """Lets the current stream wait for the copies started so far. The host does not wait."""
        if self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)

    def _copy(self, cache: PagedCache, pages: Sequence[int], slots: Sequence[int], *, out: bool) -> None:
        _check_cache(cache)
        stored = _stored(cache)
        kinds = [[(x.shape[1:], x.dtype) for x in each] for each in (stored, self.buffers)]
        if kinds[0] != kinds[1]:
            raise ValueError(f"cache has pages of {kinds[0]}; this host memory was made for {kinds[1]}")
        if cache.k.device != self.device:
            raise ValueError(f"cache is on {cache.k.device}; this host memory was made for {self.device}")
        pages, slots = _numbers("pages", pages, cache.k.shape[0]), _numbers("slots", slots, self.pages)
        if len(pages) != len(slots):
            raise ValueError(f"{len(pages)} pages and {len(slots)} slots: there must be as many")
        name, written = ("slots", slots) if out else ("pages", pages)
        if len({*written}) != len(written):
            raise ValueError(f"{name}={written} names one twice")
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):  # None: no change
            for x, host in zip(stored, self.buffers, strict=True):
                for page, slot in zip(pages, slots, strict=True):
                    to, source = (host[slot], x[page]) if out else (x[page], host[slot])
                    to.copy_(source, non_blocking=True)
                if self.stream is not None:
                    x.record_stream(self.stream)  # whoever frees the cache: its memory is not given away before


def _check_cache(cache: PagedCache) -> None:
    if not isinstance(cache, PagedCache):
        raise TypeError(f"cache must be a kvcache.PagedCache, got {type(cache).__name__}")


def _numbers(name: str, numbers: Sequence[int], end: int) -> list[int]:
    """Of pages or slots, checked."""
    try:
        found = [operator.index(number) for number in numbers]
    except TypeError:
        raise TypeError(f"{name}={numbers!r} must be a sequence of ints") from None
    for number in found:
        if not 0 <= number < end:
            raise ValueError(f"{name} has {number}, which is not in 0 to {end - 1}")
    return found


def _stored(cache: PagedCache) -> list[Tensor]:
    """The tensors that pages are made of, each once."""
    scales = [cache.k_scale, cache.v_scale] if cache.scales == "token" else []
    if cache.shared:
        return [x for x in (cache.k, *scales[:1]) if x is not None]
    return [x for x in (cache.k, cache.v, *scales) if x is not None]
