"""Triton's interpreter without work that changes nothing: about two thirds of its time.

It makes the names of its language ready for a launch, and then again at each call of a device function. It does sums
and products of integers once more in 64 bits, for an assertion that only its debug option asks for. And it builds a
table of all number formats whenever it needs one of them. A version of Triton that has other names for this runs as it
comes.

And products of fp32 do not depend on the machine: numpy's own round as its BLAS happens to on this CPU, on some twice
as badly as torch's, of which tolerances are derived.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

try:
    from triton.runtime import interpreter
except ImportError:  # no Triton here
    interpreter = None

_NAMES = ("GridExecutor", "_LangPatchScope", "_get_np_dtype", "_patch_lang", "interpreter_builder")


def hasten() -> None:
    if all(hasattr(interpreter, name) for name in _NAMES):
        _prepare_once_a_launch(interpreter)
        _leave_unread_assertions_out(interpreter.interpreter_builder)
        _look_formats_up(interpreter)
        _round_products_once(interpreter.interpreter_builder)


def _prepare_once_a_launch(module: Any) -> None:
    launch, prepare, scope = module.GridExecutor.__call__, module._patch_lang, module._LangPatchScope
    ready: set[int] | None = None  # namespaces of functions that this launch has called; None outside a launch

    def launched(self: Any, *arguments: Any, **keywords: Any) -> None:
        nonlocal ready
        outer, ready = ready, set()
        try:
            launch(self, *arguments, **keywords)
        finally:
            ready = outer

    def prepared(function: Any) -> Any:
        namespace = id(function.__globals__)
        if ready is None:
            return prepare(function)
        if namespace in ready:
            return scope()  # nothing to undo
        ready.add(namespace)
        return prepare(function)

    module.GridExecutor.__call__, module._patch_lang = launched, prepared


def _leave_unread_assertions_out(builder: Any) -> None:
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def _look_formats_up(module: Any) -> None:
    find, found = module._get_np_dtype, {}

    def format_of(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in found:
            found[name] = find(kind)
        return found[name]

    module._get_np_dtype = format_of


def _round_products_once(builder: Any) -> None:
    """Sums of products of fp32 are made in fp64, and rounded."""
    dot = builder.create_dot

    def exact(a: Any, b: Any, d: Any, *rest: Any) -> Any:
        if a.data.dtype != np.float32 or b.data.dtype != np.float32 or d.data.dtype != np.float32:
            return dot(a, b, d, *rest)
        total = np.matmul(a.data, b.data, dtype=np.float64) + d.data
        return interpreter.TensorHandle(total.astype(np.float32), d.dtype.scalar)

    builder.create_dot = exact
