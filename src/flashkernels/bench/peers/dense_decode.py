"""cuDNN's attention over a dense copy of the cache: no pages, one length. The yardstick of decoding."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from flashkernels.bench.peers import Unsupported
from flashkernels.bench.timing import Call
from flashkernels.decode.cases import Case
from flashkernels.kvcache import gather


def prepare(case: Case, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    q, cache = args
    if cache.format.quantised:
        raise Unsupported(f"takes no {cache.format.name} keys")
    if cache.shared or len(set(case.lengths)) > 1:
        raise Unsupported("takes no latent heads and no ragged lengths")
    k, v = (x.transpose(1, 2).contiguous() for x in gather(cache, case.lengths[0]))
    query = q.transpose(1, 2)

    def run() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(query, k, v, enable_gqa=True).transpose(1, 2)

    return Call(run)
