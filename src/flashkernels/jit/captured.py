"""The tensors that a function uses without taking them as arguments: those a CUDA graph has the addresses of."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Held:
    """One tensor, where it is found again, and what it was like when it was captured."""

    name: str
    get: Callable[[], Any]
    tensor: Tensor  # kept: its memory must not go to another
    address: int

    def moved(self) -> str:
        """How it is another tensor now, or nothing."""
        now = self.get()
        if not isinstance(now, Tensor):
            return f"{self.name} is no tensor any more, but {type(now).__name__}"
        if now.data_ptr() != self.address:
            return f"{self.name} was at {self.address:#x} and is at {now.data_ptr():#x}"
        return ""


def held(function: Any) -> list[Held]:
    """The tensors that `function` reaches through its closure, globals, defaults, partial arguments or object; of a
    module, its parameters and buffers. What it reaches through anything else is not found."""
    found = {id(tensor): (name, get, tensor) for name, get, tensor in _walk(function, "")}
    return [Held(name, get, tensor, tensor.data_ptr()) for name, get, tensor in found.values()]


Found = tuple[str, Callable[[], Any], Tensor]


def _walk(x: Any, name: str) -> Iterator[Found]:
    if isinstance(x, torch.nn.Module):
        for prefix, module in x.named_modules(prefix=name):
            for place in (module._parameters, module._buffers):
                yield from _items(place, f"{prefix}." if prefix else "", deep=False)
    elif isinstance(x, functools.partial):
        yield from _walk(x.func, name)
        yield from _items(dict(enumerate(x.args)), name)
        yield from _items(x.keywords, name)
    elif isinstance(x, MethodType):
        yield from _object(x.__self__, name)
    elif isinstance(x, FunctionType):
        function = inspect.unwrap(x)
        assert isinstance(function, FunctionType)
        for cell_name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            yield from _place(f"{name}{cell_name}", functools.partial(getattr, cell, "cell_contents", None))
        used = {key for key in function.__code__.co_names if key in function.__globals__}
        yield from _items(function.__globals__, name, only=used)
        yield from _items(dict(enumerate(function.__defaults__ or ())), f"{name}default ")
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


def _inside(get: Callable[[], Any], key: Any) -> Any:
    return get()[key]
