"""An activation for triton_kernels, in Triton: a module of its own, as importing triton must stay optional."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def swiglu(x):
    """silu(gate) * up, of columns in which gate and up alternate."""
    gate, up = tl.split(x.reshape(x.shape[0], x.shape[1] // 2, 2))
    return gate / (1 + tl.exp(-gate)) * up
