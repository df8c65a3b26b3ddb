"""FlashAttention 2, the `flash-attn` package."""

from __future__ import annotations

import importlib
from typing import Any

from flashkernels.attention.cases import Case
from flashkernels.bench.peers import require
from flashkernels.bench.timing import Call


def prepare(case: Case, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    rival = importlib.import_module("flash_attn.flash_attn_interface")
    p = case.problem
    require(not p.sinks, "has no sinks")
    require(not p.mask, "takes no mask")
    require(p.head_dim == p.head_dim_v, "needs the same head_dim for v")
    require(p.head_dim <= 256, "takes head_dim up to 256")
    require(p.dtype in ("fp16", "bf16"), "takes fp16 and bf16")
    options = {
        "causal": p.causal,
        "window_size": p.window,
        "softcap": case.softcap,
        "alibi_slopes": kwargs.get("alibi_slopes"),
    }
    attend = rival.flash_attn_varlen_func if p.varlen else rival.flash_attn_func
    return Call(lambda: attend(*args, **options))
