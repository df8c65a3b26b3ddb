"""FlashInfer's ragged prefill; a dense batch is a ragged one of equal lengths. The plan is made outside the clock."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from flashkernels.attention.cases import Case
from flashkernels.bench.peers import require
from flashkernels.bench.timing import Call

HEAD_DIMS = ((64, 64), (128, 128), (256, 256), (192, 128))  # others give an illegal access or wrong output


def prepare(case: Case, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    p = case.problem
    left, right = p.band
    require((p.head_dim, p.head_dim_v) in HEAD_DIMS, f"takes (head_dim, head_dim_v) of {HEAD_DIMS}")
    require(p.dtype in ("fp16", "bf16"), "takes fp16 and bf16")
    require(not p.sinks and not p.mask and not p.alibi, "sinks, masks and ALiBi are not compared")
    require(left < 0 or p.causal, "has a window on the left only, with causal")
    require(right < 0 or p.causal, "has no window on the right")

    q, k, v = args[:3]
    if p.varlen:
        ends_q, ends_k = args[3:5]
    else:
        ends_q = torch.arange(p.batch + 1, device=q.device, dtype=torch.int32) * p.seq_q
        ends_k = torch.arange(p.batch + 1, device=q.device, dtype=torch.int32) * p.seq_k
    rows_q, rows_k, rows_v = (x.reshape(-1, *x.shape[-2:]) for x in (q, k, v))
    workspace = torch.empty(128 * 1024**2, dtype=torch.uint8, device=q.device)
    wrapper = importlib.import_module("flashinfer").BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    wrapper.plan(
        ends_q,
        ends_k,
        p.heads,
        p.kv_heads,
        p.head_dim,
        head_dim_vo=p.head_dim_v,
        causal=p.causal,
        window_left=left,
        logits_soft_cap=case.softcap,
        q_data_type=q.dtype,
    )
    shape = (*q.shape[:-1], p.head_dim_v)
    return Call(lambda: wrapper.run(rows_q, rows_k, rows_v).view(shape))
