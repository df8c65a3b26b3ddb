"""GPU kernels for transformers, each with a plain CPU implementation and a reason for being chosen.

Public names are loaded when first used: `import flashkernels` needs neither CUDA nor triton, and does not load torch.
"""

from __future__ import annotations

import importlib
import sys
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashkernels.attention.api import attention as attention, attention_varlen as attention_varlen
    from flashkernels.attention.explain import explain as explain
    from flashkernels.attention.module import Attention as Attention
    from flashkernels.dispatch import UnsupportedError as UnsupportedError
    from flashkernels.hardware import Gpu as Gpu, detect as detect
    from flashkernels.tiling import TilingError as TilingError, use_tile as use_tile

__version__ = "0.1.0"

_MODULES = {
    "Attention": "flashkernels.attention.module",
    "Gpu": "flashkernels.hardware",
    "TilingError": "flashkernels.tiling",
    "UnsupportedError": "flashkernels.dispatch",
    "attention": "flashkernels.attention.api",
    "attention_varlen": "flashkernels.attention.api",
    "detect": "flashkernels.hardware",
    "explain": "flashkernels.attention.explain",
    "use_tile": "flashkernels.tiling",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})


@cache
def _attention() -> Any:
    """The function `attention`, through which the modules of the package of the same name can be reached too."""
    function = __getattr__("attention")
    # Shared, not copied: `import flashkernels.attention.api as api` walks attributes, also to modules loaded later.
    function.__dict__ = vars(sys.modules["flashkernels.attention"])
    return function


class _Package(ModuleType):
    """Keeps `flashkernels.attention` the function: loading the package of that name would put the module in its place.
    Making that module callable is no way out, because torch.compile does not trace calls of modules."""

    attention = property(lambda self: _attention(), lambda self, module: None)


sys.modules[__name__].__class__ = _Package
