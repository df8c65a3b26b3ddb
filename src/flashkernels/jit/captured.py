"""What a function uses without taking it as an argument: tensors, which a CUDA graph has the addresses of, and modules,
which train or not."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from flashkernels.jit.eager import guards, plain


@dataclass(frozen=True)
class Held:
    """One tensor, where it is found again, and what it was like when it was captured."""

    name: str
    get: Callable[[], Any]
    tensor: Tensor  # kept: its memory must not go to another
    address: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def moved(self) -> str:
        """How it is another tensor now, or nothing."""
        now = _now(self.get)
        if not isinstance(now, Tensor):
            return f"{self.name} is no tensor any more, but {type(now).__name__}"
        words = []
        if now.data_ptr() != self.address:
            words.append(f"was at {self.address:#x} and is at {now.data_ptr():#x}")
        if now.shape != self.shape:
            words.append(f"had shape {tuple(self.shape)} and has {tuple(now.shape)}")
        if now.stride() != self.stride:
            words.append(f"had strides {self.stride} and has {now.stride()}")
        if now.dtype != self.dtype:
            words.append(f"was {self.dtype} and is {now.dtype}")
        return f"{self.name} {', '.join(words)}" if words else ""


class Watch:
    """Held tensors, compared all at once: each for itself takes three times as long."""

    def __init__(self, tensors: Sequence[Held] = ()) -> None:
        self.tensors = tensors
        first: dict[int, Held] = {}
        for x in tensors:
            first.setdefault(id(x.tensor), x)
        self.twins = [(x, y) for x in tensors if (y := first[id(x.tensor)]) is not x]  # one tensor in two places
        self.each = [*first.values()]
        self.addresses = [x.address for x in self.each]
        found = tuple([x.tensor for x in self.each])
        self.alike = guards(found) if found and plain(found) else None

    def moved(self) -> list[str]:
        """How each that is another tensor now has changed."""
        return [] if self._same() else [words for x in self.tensors if (words := x.moved())]

    def _same(self) -> bool:
        """Whether nothing has changed. False, too, where only a tensor by itself can tell."""
        if self.alike is None:
            return False
        try:
            now = [x.get() for x in self.each]
            if not all(x.get() is y.get() for x, y in self.twins):
                return False
        except GONE:
            return False
        return self.alike(*now) and [x.data_ptr() for x in now] == self.addresses


class Modes:
    """The modules that a function holds; which of them train is part of the kind of a call, as are they themselves."""

    def __init__(self, modules: Sequence[torch.nn.Module] = ()) -> None:
        self.modules = modules

    def now(self) -> tuple[bool, ...]:
        return tuple(map(TRAINING, self.modules))

    def of(self, function: Any) -> Modes:
        """Those that `function` holds now: this, if they are the same."""
        found = modules(function)
        return self if [*map(id, found)] == [*map(id, self.modules)] else Modes(found)


TRAINING = operator.attrgetter("training")


def held(function: Any, name: str = "") -> list[Held]:
    """The tensors that `function` reaches through its closure, globals, defaults, partial arguments or object; of a
    module, its parameters and buffers. What it reaches through anything else is not found."""
    found = {(place, id(x)): (place, get, x) for place, get, x in _walk(function, name) if isinstance(x, Tensor)}
    return [Held(place, get, x, x.data_ptr(), x.shape, x.stride(), x.dtype) for place, get, x in found.values()]


def modules(function: Any) -> list[torch.nn.Module]:
    """The modules that `function` reaches in the same ways, and those inside them."""
    found = {id(x): x for _, _, x in _walk(function, "") if isinstance(x, torch.nn.Module)}
    return [*found.values()]


Found = tuple[str, Callable[[], Any], Tensor | torch.nn.Module]


def _walk(x: Any, name: str) -> Iterator[Found]:
    if isinstance(x, torch.nn.Module):
        for prefix, module in x.named_modules(prefix=name):
            yield prefix, functools.partial(_itself, module), module
            for place in (module._parameters, module._buffers):
                yield from _items(place, f"{prefix}." if prefix else "", deep=False)
    elif isinstance(x, functools.partial):
        yield from _walk(x.func, name)
        yield from _items(dict(enumerate(x.args)), name)
        yield from _items(x.keywords, name)
    elif isinstance(x, MethodType):
        yield from _object(x.__self__, name)
    elif isinstance(x, FunctionType):
        for cell_name, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
            yield from _place(f"{name}{cell_name}", functools.partial(_contents, cell))
        used = {key for key in _names(x.__code__) if key in x.__globals__}
        yield from _items(x.__globals__, name, only=used)
        yield from _items(dict(enumerate(x.__defaults__ or ())), f"{name}default ")
        yield from _items(x.__kwdefaults__ or {}, f"{name}default ")
        inner = getattr(x, "__wrapped__", None)  # of a decorator, which has a closure of its own
        if inner is not None and inner is not x:
            yield from _walk(inner, name)
    elif callable(x) and not isinstance(x, type):
        yield from _object(x, name)


def _object(x: Any, name: str) -> Iterator[Found]:
    """An object, or module, whose method is called: what it holds itself."""
    if isinstance(x, torch.nn.Module):
        yield from _walk(x, name)
    else:
        yield from _items(getattr(x, "__dict__", {}), f"{name}self.")


def _items(place: Any, name: str, only: set[str] | None = None, deep: bool = True) -> Iterator[Found]:
    for key in list(place) if only is None else sorted(only):
        yield from _place(f"{name}{key}", functools.partial(operator.getitem, place, key), deep)


def _place(name: str, get: Callable[[], Any], deep: bool = True) -> Iterator[Found]:
    value = get()
    if isinstance(value, Tensor):
        yield name, get, value
    elif deep and isinstance(value, torch.nn.Module):
        yield from _walk(value, name)
    elif deep and isinstance(value, (list, tuple)):
        for i, x in enumerate(value):
            if isinstance(x, Tensor):
                yield f"{name}[{i}]", functools.partial(_inside, get, i), x
    elif deep and isinstance(value, dict):
        for key, x in list(value.items()):
            if isinstance(x, Tensor):
                yield f"{name}[{key!r}]", functools.partial(_inside, get, key), x


def _names(code: CodeType) -> Iterator[str]:
    """Those that may be globals, also of the functions and comprehensions inside."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


GONE = (LookupError, AttributeError, ValueError)  # raised for what is no longer where it was; the last by empty cells


def _now(get: Callable[[], Any]) -> Any:
    try:
        return get()
    except GONE:
        return None


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _itself(x: Any) -> Any:
    return x


def _inside(get: Callable[[], Any], key: Any) -> Any:
    return get()[key]
