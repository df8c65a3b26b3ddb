"""FlashAttention 4 (CuTe DSL), the `flash-attn-4` package."""

from __future__ import annotations

import importlib
from typing import Any

from flashkernels.attention.cases import Case
from flashkernels.bench.peers import require
from flashkernels.bench.timing import Call


def prepare(case: Case, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    rival = importlib.import_module("flash_attn.cute")
    p = case.problem
    require(not p.alibi, "has no ALiBi")
    require(not p.mask, "takes no mask tensor")
    require(p.head_dim <= 256, "takes head_dim up to 256")
    require(p.dtype in ("fp16", "bf16"), "takes fp16 and bf16")
    left, right = (None if side < 0 else side for side in p.window)
    options: dict[str, Any] = {
        "causal": p.causal,
        "window_size": (left, right),
        "softcap": case.softcap,
        "learnable_sink": kwargs.get("sinks"),
    }
    if p.varlen:
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        options.update(zip(names, args[3:], strict=True))
    attend = rival.flash_attn_varlen_func if p.varlen else rival.flash_attn_func

    def run() -> Any:
        result = attend(*args[:3], **options)
        return result[0] if isinstance(result, tuple) else result  # (out, lse), in some releases the output alone

    return Call(run)
