"""FlashAttention 4 (CuTe DSL), the `flash-attn-4` package. Written for 4.0.0b36.

It compiles each new kind of call for a second or two; the check that precedes timing pays for that.
"""

from __future__ import annotations

import importlib
from typing import Any

from flashkernels.attention.cases import Case
from flashkernels.bench.peers import require
from flashkernels.bench.timing import Call


def prepare(case: Case, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    p = case.problem
    require(not p.alibi, "has no ALiBi")
    require(not p.mask, "takes no mask tensor")
    require(p.dtype in ("fp16", "bf16"), "takes fp16 and bf16")
    dims = (p.head_dim, p.head_dim_v)
    require(all(8 <= d <= 256 and d % 8 == 0 for d in dims), "takes multiples of 8 up to 256 as head_dim")
    rival = importlib.import_module("flash_attn.cute")
    # An open side of the window is None, and causal closes the right one. Causal is aligned bottom-right, as ours is.
    # A sink may be fp16, bf16 or fp32.
    options: dict[str, Any] = {
        "causal": p.causal,
        "window_size": tuple(None if side < 0 else side for side in p.window),
        "softcap": case.softcap,
        "learnable_sink": kwargs.get("sinks"),
    }
    if p.varlen:
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        options.update(zip(names, args[3:], strict=True))
    attend = rival.flash_attn_varlen_func if p.varlen else rival.flash_attn_func
    return Call(lambda: attend(*args[:3], **options)[0])  # (out, lse), where lse is None unless it is asked for
