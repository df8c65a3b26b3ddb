"""The backends of torch's `scaled_dot_product_attention`, each on its own."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flashkernels.attention.cases import Case
from flashkernels.bench.peers import Unsupported, require
from flashkernels.bench.peers.naive import score_bias
from flashkernels.bench.timing import Call


def _prepare(backend: SDPBackend, case: Case, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    p = case.problem
    require(p.dtype != "fp8", "has no FP8")
    require(not p.varlen, "takes dense batches only (nested tensors are not tried)")
    require(not p.softcap, "has no softcap")
    require(not p.sinks, "has no sinks")
    require(p.window == (-1, -1), "has no window (a mask would cost the work of the whole score matrix)")
    on_cpu = args[0].device.type == "cpu"

    q, k, v = (x.transpose(1, 2) for x in args[:3])
    # is_causal aligns top-left, ours bottom-right: the same only for square scores. The rest becomes an explicit mask.
    is_causal = p.band == (-1, 0) and p.seq_q == p.seq_k and not p.alibi and not p.mask
    bias = None if is_causal else score_bias(p.seq_q, p.seq_k, args[0], kwargs)
    if bias is not None:
        require(backend != SDPBackend.FLASH_ATTENTION or on_cpu, "takes no mask")
        bias = bias[(None,) * (4 - bias.dim())]

    def run() -> torch.Tensor:
        return scaled_dot_product_attention(
            q, k, v, attn_mask=bias, is_causal=is_causal, enable_gqa=p.heads != p.kv_heads
        ).transpose(1, 2)

    call = Call(run, scope=partial(sdpa_kernel, backend))
    with warnings.catch_warnings(record=True) as caught, call.scope():
        warnings.simplefilter("always")
        try:
            run()
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise
            raise Unsupported(_why(caught) or str(error)) from error
    return call


def _why(caught: list[warnings.WarningMessage]) -> str:
    """Torch explains a refusal in warnings: "... kernel not used because:" and then the reasons, for each backend."""
    texts = [str(warning.message).partition(" (Triggered internally")[0].strip() for warning in caught]
    reasons = [text for text in texts if not text.endswith("because:") and "runtime disabled" not in text]
    return "; ".join(dict.fromkeys(reasons))


flash = partial(_prepare, SDPBackend.FLASH_ATTENTION)
cudnn = partial(_prepare, SDPBackend.CUDNN_ATTENTION)
efficient = partial(_prepare, SDPBackend.EFFICIENT_ATTENTION)
math = partial(_prepare, SDPBackend.MATH)
