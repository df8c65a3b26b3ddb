"""Copies the next batches to the GPU while the current one computes."""

from __future__ import annotations

import collections
import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sized
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


class Prefetcher:
    """Iterates over `loader` with its batches on `device`, the next `depth` of them copied ahead on a side stream.

    Batches are tensors, packed sequences, and tuples, lists and mappings of them and of other things. Tensors go
    through pinned memory, without which a copy would not overlap with anything. One that is pinned already is copied
    from where it is, while the loader goes on: it must not be refilled before its batch was used on the GPU. What is
    yielded may be used on the stream that is current when it is yielded, like any other tensor: that stream waits for
    the copy, and the memory is not reused before the stream is done with it. For other streams, torch's rules hold.

    An error of the loader is raised when its batch is due, after those before it. One may stop early: what was copied
    ahead is dropped. On the CPU the batches are passed on as they are.

    Args:
        loader: anything to iterate over, such as a DataLoader. It is asked for batches in the thread of the caller.
        device: default: the current CUDA device, the CPU where there is none.
        depth: batches ahead.

    >>> import torch, flashkernels as fk
    >>> loader = [{"x": torch.full((2,), i), "name": str(i)} for i in range(3)]
    >>> [int(batch["x"].sum()) for batch in fk.Prefetcher(loader, "cpu")]
    [0, 2, 4]
    """

    def __init__(
        self, loader: Iterable[Any], device: int | str | torch.device | None = None, *, depth: int = 2
    ) -> None:
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
            raise ValueError(f"depth={depth!r} must be at least 1")
        if not isinstance(loader, Iterable) and not hasattr(loader, "__getitem__"):
            raise TypeError(f"loader must be iterable, got {type(loader).__name__}")
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        named = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if named.type not in ("cpu", "cuda"):
            raise ValueError(f"device={device!r} is neither a CUDA device nor the CPU")
        if named.type == "cuda" and named.index is None:
            named = torch.device("cuda", torch.cuda.current_device())
        self.loader, self.device, self.depth = loader, named, depth

    def __len__(self) -> int:
        return len(cast(Sized, self.loader))

    def __iter__(self) -> Iterator[Any]:
        side = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        source = iter(self.loader)
        ahead: collections.deque[tuple[Any, torch.cuda.Event | None]] = collections.deque()
        error: Exception | None = None
        more = True
        while True:
            while more and len(ahead) <= (self.depth if side else 0):
                batch, error = _next(source)
                more = batch is not END
                if more:
                    ahead.append(self._sent(batch, side))
            if not ahead:
                break
            batch, sent = ahead.popleft()
            if sent is not None:
                current = torch.cuda.current_stream(self.device)
                current.wait_event(sent)
                # The memory belongs to the side stream: without this the next copy may be given it too early.
                each(batch, functools.partial(_recorded, current))
            yield batch
        if error is not None:  # due after the batches before it
            raise error

    def _sent(self, batch: Any, side: torch.cuda.Stream | None) -> tuple[Any, torch.cuda.Event | None]:
        """The batch on the device, and the event after its copy. Torch keeps pinned memory until its copy is done."""
        if side is None:
            return batch, None
        with torch.cuda.stream(side):
            moved = each(batch, self._moved)
            event = torch.cuda.Event()
            event.record(side)
        return moved, event

    def _moved(self, x: Tensor) -> Tensor:
        if x.device == self.device:
            return x
        source = x if x.is_cuda or x.is_pinned() else x.pin_memory()
        return source.to(self.device, non_blocking=True)


def each(x: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """x with its tensors changed; tuples, lists and mappings are walked through and stay what they are.

    >>> each({"a": (torch.ones(1), "b")}, lambda t: t * 2)
    {'a': (tensor([2.]), 'b')}
    """
    if isinstance(x, Tensor):
        return change(x)
    if isinstance(x, PackedSequence):  # whose lengths stay on the CPU
        order, back = (None if y is None else change(y) for y in (x.sorted_indices, x.unsorted_indices))
        return PackedSequence(change(x.data), x.batch_sizes, order, back)
    if isinstance(x, Mapping):
        return _like(x, {key: each(y, change) for key, y in x.items()})
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*(each(y, change) for y in x))
    if isinstance(x, (tuple, list)):
        return type(x)(each(y, change) for y in x)
    return x


def _like(x: Mapping[Any, Any], found: dict[Any, Any]) -> Mapping[Any, Any]:
    """`found` as a mapping of x's type, with what else x has; as a dict where that type is made in another way."""
    if type(x) is dict:
        return found
    try:
        if not isinstance(x, MutableMapping):
            make: Any = type(x)
            return make(found)
        made = copy.copy(x)
        made.update(found)
    except TypeError:
        return found
    return made


END = object()


def _next(source: Iterator[Any]) -> tuple[Any, Exception | None]:
    """The next batch, or END with the error of the loader, if it was one."""
    try:
        return next(source, END), None
    except Exception as error:
        return END, error


def _recorded(stream: torch.cuda.Stream, x: Tensor) -> Tensor:
    if x.is_cuda:
        x.record_stream(stream)
    return x
