"""Marks where a program waits for the GPU: `.item()`, `.cpu()` and their kin, each with its file and line.

torch's profiler knows the function around a call but not the line, and asking it for stacks slows the whole run. So the
few methods that wait are wrapped while a session records.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

METHODS = ("item", "tolist", "cpu", "to", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")
LIBRARIES = tuple(str(Path(module.__file__ or "").parent) for module in (torch, sys.modules["flashkernels"]))


@contextmanager
def marked(waits: Callable[[torch.Tensor], bool] = lambda tensor: tensor.is_cuda) -> Iterator[None]:
    """Inside, each of METHODS on a tensor that `waits` is a mark named `fk:sync .item() file:line` in the trace."""
    own = {name: vars(torch.Tensor)[name] for name in METHODS if name in vars(torch.Tensor)}
    for name in METHODS:
        setattr(torch.Tensor, name, _wrapped(name, getattr(torch.Tensor, name), waits))
    try:
        yield
    finally:
        for name in METHODS:
            if name in own:
                setattr(torch.Tensor, name, own[name])
            else:
                delattr(torch.Tensor, name)


def _wrapped(name: str, method: Callable[..., Any], waits: Callable[[torch.Tensor], bool]) -> Callable[..., Any]:
    word = f"{name.strip('_')}()" if name.startswith("__") else f".{name}()"

    def wrapper(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not waits(self) or (name == "to" and not _to_cpu(args, kwargs)):
            return method(self, *args, **kwargs)
        with torch.profiler.record_function(f"fk:sync {word} {caller()}"):
            return method(self, *args, **kwargs)

    wrapper.__name__ = name
    wrapper.__doc__ = method.__doc__
    return wrapper


def _to_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the arguments of `.to` name the CPU; to another dtype or GPU it does not wait."""
    named = (getattr(x, "device", x) for x in (*args, *kwargs.values()))
    return any(isinstance(x, (str, torch.device)) and torch.device(x).type == "cpu" for x in named)


def caller() -> str:
    """file:line of the nearest frame that is neither torch's nor ours; short in the working directory."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((*LIBRARIES, "<frozen")):
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    if path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    return f"{path}:{frame.f_lineno}"
