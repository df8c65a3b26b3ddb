"""Eager calls: whether one may skip torch's dispatcher, and what it then runs, prepared once for each kind of call."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import maybe_current_level as transforms
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

MOST_PLANS = 4096
compiled: Any = torch._C._dynamo.guards  # what torch.compile's own code calls: comparing and allocating in little time
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
    follows. Raises where one has a tangent."""
    if not is_compiling() and forward_ad._current_level >= 0:
        refuse_tangents(tensors)
    return alone() and plain(tensors) and not (torch.is_grad_enabled() and tracked(tensors))


def followed_only(tensors: Iterable[Tensor | None]) -> bool:
    """The same, but autograd may."""
    return alone() and plain(tensors)


def alone() -> bool:
    """Whether neither compile, a dispatch mode, a transform nor a profiler follows what this thread does."""
    return not (is_compiling() or _watchers or is_in_torch_dispatch_mode()) and transforms() is None


def plain(tensors: Iterable[Tensor | None]) -> bool:
    """Whether these are dense tensors with memory that says what they are, of no class of their own."""
    for x in tensors:
        if x is None:
            continue
        if type(x) is not Tensor and type(x) is not torch.nn.Parameter:
            return False
        if x.is_meta or x.layout is not torch.strided or x.is_neg():  # whose numbers in memory have the other sign
            return False
    return True


def tracked(tensors: Iterable[Tensor | None]) -> bool:
    return True in [x.requires_grad for x in tensors if x is not None]  # `any` of a generator takes twice the time


def refuse_tangents(tensors: Iterable[Any]) -> None:
    """Forward-mode derivatives would be lost without a word: kernels know nothing of them."""
    for x in tensors:
        if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            about = f"a tensor of shape {tuple(x.shape)} has a tangent"
            raise NotImplementedError(f"{about}: there are gradients, but no forward-mode derivatives")


# --- prepared calls: what shapes and settings decide is decided once

Run = Callable[..., Any]
# What compares tensors; whether those that pass require no gradient; where one is given several times, of each where
# it is first.
Guard = tuple[Callable[..., bool], bool, "list[int] | None"]


class Plan:
    """What runs all calls of a kind, and how to tell such a call in less time than a look-up takes."""

    def __init__(self, run: Run, tensors: tuple[Any, ...], settings: tuple[Any, ...]) -> None:
        self.run, self.settings, self.types = run, settings, [*map(type, settings)]
        self.given = chosen([i for i, x in enumerate(tensors) if x is not None])
        self.missing = chosen([i for i, x in enumerate(tensors) if x is None])
        self.none = self.missing(tensors)
        given = self.given(tensors)
        self.device = next((x.device.index for x in given if x.is_cuda), None)
        self.after: Plan | None = None  # the one that served the call after the last of this kind, if another
        self.guard: Guard | None = None
        if plain(given) and not any(x.data_ptr() & 15 for x in given):
            self.renew(tensors)

    def renew(self, tensors: tuple[Any, ...]) -> None:
        """Guards of the mode in force: those made under no_grad know no call under inference_mode."""
        given = self.given(tensors)
        firsts = [next(i for i, other in enumerate(given) if other is x) for x in given]
        distinct = [x for i, x in enumerate(given) if firsts[i] == i]
        same = None if len(distinct) == len(given) else firsts
        self.guard = guards(distinct), not tracked(given), same  # at once: other threads read it

    def serves(self, tensors: tuple[Any, ...], settings: tuple[Any, ...]) -> bool | None:
        """Whether this is another call of the kind, of tensors that require no gradient; None where it is not, or only
        `kind_of` can tell."""
        guard = self.guard
        if guard is None or settings != self.settings or self.missing(tensors) != self.none:
            return None
        if [*map(type, settings)] != self.types:
            return None
        alike, untracked, firsts = guard
        given = self.given(tensors)
        if firsts:
            if any(x is not given[i] for x, i in zip(given, firsts, strict=True)):
                return None
            given = tuple(x for i, x in enumerate(given) if firsts[i] == i)
        if not alike(*given):
            return None
        places = 0
        for x in given:
            places |= x.data_ptr()
        return None if places & 15 else untracked


def placed(run: Run, device: int | None) -> Run:
    """What runs it with this device as the current one; None is the CPU."""
    if device is None or device == torch._C._cuda_getDevice():
        return run
    return functools.partial(_run_on, device, run)


def chosen(places: list[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """What takes these of a tuple, as a slice where they follow one another: that is one copy of memory."""
    first, end = (places[0], places[-1] + 1) if places else (0, 0)
    if end - first == len(places):
        return operator.itemgetter(slice(first, end))
    return operator.itemgetter(*places)


def guards(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """What torch.compile compares tensors by: types, shapes, strides, dtypes, devices, who follows them, and whether
    they require gradients. The same tensor twice does not pass."""
    sizes, strides = [[*x.shape] for x in tensors], [[*x.stride()] for x in tensors]
    guard = compiled.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    check: Callable[..., bool] = guard.check
    return check


class Plans:
    """The prepared calls of one op: `make(tensors, settings)` checks and prepares the first of each kind.

    A kind of call is the type, shape, strides, dtype, device and alignment of each tensor, and the settings with their
    types: 1, 1.0 and True are equal, but not equally valid. A call is most likely of the kind that followed the last
    call's before: the layers of a model repeat.

    >>> double = Plans(lambda tensors, settings: lambda x: x * settings[0])
    >>> double((torch.ones(2),), (2,))
    tensor([2., 2.])
    """

    def __init__(self, make: Callable[[tuple[Any, ...], tuple[Any, ...]], Run]) -> None:
        self.make = make
        self.known: dict[Any, Plan] = {}  # of plain tensors
        self.last: Plan | None = None  # one of them

    def __call__(self, tensors: tuple[Any, ...], settings: tuple[Any, ...]) -> Any:
        return self.find(tensors, settings)(*tensors)

    def find(self, tensors: tuple[Any, ...], settings: tuple[Any, ...]) -> Run:
        """What to call with these tensors, once torch has seen the call."""
        kind = kind_of(tensors, settings)
        try:
            plan = self.known.get(kind)
        except TypeError:  # a setting without a hash: the op's own checks say which
            return self.make(tensors, settings)
        plan = plan or self.prepared(kind, tensors, settings)
        return placed(plan.run, plan.device)

    def ready(self, tensors: tuple[Any, ...], settings: tuple[Any, ...]) -> Run | None:
        """The same, if the call may skip torch's dispatcher; None where torch has to see it, and where something is no
        tensor or no setting, which is left to the op's checks. Raises what `make` does.

        `alone` and `placed` are written out here: every eager call passes, and a call less is 0.1 of its 10 to 15 µs
        (H200's host, 2026-11-16)."""
        if is_compiling():
            return None
        dual = forward_ad._current_level >= 0
        if _watchers or dual or is_in_torch_dispatch_mode() or transforms() is not None:
            if dual:
                refuse_tangents(tensors)
            return None
        last, kind = self.last, None
        plan = guess = last and (last.after or last)
        try:
            untracked = plan and plan.serves(tensors, settings)
            if untracked is None:
                if not plain(tensors):
                    return None
                kind = kind_of(tensors, settings)
                plan = self.known.get(kind)
                if plan is not None and plan is guess and plan.guard:
                    plan.renew(tensors)
        except (RuntimeError, TypeError, ValueError):  # settings that cannot be compared, or have no hash
            return None
        if not untracked and torch.is_grad_enabled() and tracked(tensors):
            return None
        if plan is None:
            plan = self.prepared(kind, tensors, settings)
        if last is not None and guess is not plan:
            last.after = None if plan is last else plan
        self.last = plan
        device = plan.device
        if device is None or device == torch._C._cuda_getDevice():
            return plan.run
        return placed(plan.run, device)

    def prepared(self, kind: Any, tensors: tuple[Any, ...], settings: tuple[Any, ...]) -> Plan:
        """Made, and kept if the tensors are plain: then those of all calls of the kind are."""
        plan = Plan(self.make(tensors, settings), tensors, settings)
        if plain(tensors):
            if len(self.known) >= MOST_PLANS:
                self.known.clear()
            self.known[kind] = plan
        return plan


def kind_of(tensors: tuple[Any, ...], settings: tuple[Any, ...]) -> tuple[Any, ...]:
    """All that a plan may depend on. Alignment matters to TMA and to vector loads."""
    kind: list[Any] = [settings, *map(type, settings)]
    for x in tensors:
        if x is None:
            kind.append(None)
        else:
            kind += (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15, type(x))
    return tuple(kind)


def _run_on(device: int, run: Run, *arguments: Any) -> Any:
    with torch.cuda.device(device):
        return run(*arguments)


def room(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, strides: Sequence[int] | None = None
) -> Callable[[], Tensor]:
    """What makes such tensors, to be filled, contiguous where no strides are given. On a GPU it is the current one, and
    it takes half the time of `torch.empty`.

    >>> room((2, 3), torch.float32, torch.device("cpu"))().stride()
    (3, 1)
    """
    if strides is None:
        strides = torch.empty(shape, device="meta").stride()
    if device.type == "cuda":
        return functools.partial(compiled._empty_strided_cuda, tuple(shape), strides, dtype)
    return functools.partial(torch.empty_strided, tuple(shape), strides, dtype=dtype, device=device)
