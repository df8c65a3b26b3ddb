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
    from flashkernels.aot.warm import warmup as warmup
    from flashkernels.attention.api import attention as attention, attention_varlen as attention_varlen
    from flashkernels.attention.fp8 import quantise_qkv as quantise_qkv
    from flashkernels.attention.module import Attention as Attention
    from flashkernels.decode.api import attention_paged as attention_paged, decode as decode
    from flashkernels.decode.merge import cascade_decode as cascade_decode, merge_states as merge_states
    from flashkernels.dispatch import UnsupportedError as UnsupportedError
    from flashkernels.explained import explain as explain
    from flashkernels.fused.activation import (
        geglu as geglu,
        gelu as gelu,
        relu2_glu as relu2_glu,
        swiglu as swiglu,
    )
    from flashkernels.fused.norm import layer_norm as layer_norm, rms_norm as rms_norm
    from flashkernels.fused.rope import rope as rope, rope_tables as rope_tables
    from flashkernels.fused.softmax import log_softmax as log_softmax, softmax as softmax
    from flashkernels.hardware import Gpu as Gpu, detect as detect
    from flashkernels.jit.graph import Graph as Graph, graph as graph
    from flashkernels.jit.prefetch import Prefetcher as Prefetcher
    from flashkernels.jit.strict import CompileStall as CompileStall, strict as strict
    from flashkernels.profiling.session import profile as profile
    from flashkernels.tiling import TilingError as TilingError, use_tile as use_tile

if TYPE_CHECKING:  # packages with public names of their own
    from flashkernels import fused as fused, kvcache as kvcache, moe as moe

__version__ = "0.1.0"

_MODULES = {
    "Attention": "flashkernels.attention.module",
    "CompileStall": "flashkernels.jit.strict",
    "Gpu": "flashkernels.hardware",
    "Graph": "flashkernels.jit.graph",
    "Prefetcher": "flashkernels.jit.prefetch",
    "TilingError": "flashkernels.tiling",
    "UnsupportedError": "flashkernels.dispatch",
    "attention": "flashkernels.attention.api",
    "attention_paged": "flashkernels.decode.api",
    "attention_varlen": "flashkernels.attention.api",
    "cascade_decode": "flashkernels.decode.merge",
    "decode": "flashkernels.decode.api",
    "detect": "flashkernels.hardware",
    "explain": "flashkernels.explained",
    "geglu": "flashkernels.fused.activation",
    "gelu": "flashkernels.fused.activation",
    "graph": "flashkernels.jit.graph",
    "layer_norm": "flashkernels.fused.norm",
    "log_softmax": "flashkernels.fused.softmax",
    "merge_states": "flashkernels.decode.merge",
    "profile": "flashkernels.profiling.session",
    "quantise_qkv": "flashkernels.attention.fp8",
    "relu2_glu": "flashkernels.fused.activation",
    "rms_norm": "flashkernels.fused.norm",
    "rope": "flashkernels.fused.rope",
    "rope_tables": "flashkernels.fused.rope",
    "softmax": "flashkernels.fused.softmax",
    "strict": "flashkernels.jit.strict",
    "swiglu": "flashkernels.fused.activation",
    "use_tile": "flashkernels.tiling",
    "warmup": "flashkernels.aot.warm",
}
__all__ = list(_MODULES)
_PACKAGES = ("fused", "kvcache", "moe")  # fk.moe.route and others


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *_PACKAGES})


@cache
def _function(name: str) -> Any:
    """The function `name`, through which the modules of the package of the same name can be reached too."""
    function = __getattr__(name)
    # Shared, not copied: `import flashkernels.attention.api as api` walks attributes, also to modules loaded later.
    function.__dict__ = vars(sys.modules[f"{__name__}.{name}"])
    return function


class _Package(ModuleType):
    """Keeps `flashkernels.attention` and `flashkernels.decode` the functions: loading the packages of these names would
    put the modules in their place. Making a module callable is no way out, because torch.compile does not trace calls
    of modules."""

    attention = property(lambda self: _function("attention"), lambda self, module: None)
    decode = property(lambda self: _function("decode"), lambda self, module: None)


sys.modules[__name__].__class__ = _Package
