"""Whether a call may skip torch's dispatcher and go straight to its kernel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

_watchers = 0


@contextmanager
def watched() -> Iterator[None]:
    """Sends every call inside through torch's dispatcher, so that torch's profiler records the op with its shapes."""
    global _watchers
    _watchers += 1
    try:
        yield
    finally:
        _watchers -= 1


def unwatched(tensors: Iterable[Tensor | None]) -> bool:
    """Whether these are plain dense tensors that neither compile, autograd, a dispatch mode, a transform nor a profiler
    follows."""
    return _plain(tensors, torch.is_grad_enabled())


def followed_only(tensors: Iterable[Tensor | None]) -> bool:
    """The same, but autograd may."""
    return _plain(tensors, False)


def _plain(tensors: Iterable[Tensor | None], grad: bool) -> bool:
    if torch.compiler.is_compiling() or _watchers:
        return False
    for x in tensors:
        if x is None:
            continue
        if type(x) is not Tensor and type(x) is not torch.nn.Parameter:
            return False
        if x.is_meta or (grad and x.requires_grad) or x.layout is not torch.strided:
            return False
    return not is_in_torch_dispatch_mode() and torch._C._functorch.maybe_current_level() is None
