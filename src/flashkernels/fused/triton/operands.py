"""What products of rows and weights have in common: how a tile of them is loaded, and what lies beside its sums."""

import triton
import triton.language as tl


@triton.jit
def load_part(at, inside):
    """A masked load, 0 outside; of FP8 by its bits, as Triton's interpreter cannot make an FP8 zero."""
    if at.dtype.element_ty == tl.float8e4nv:
        x = tl.load(at.to(tl.pointer_type(tl.uint8), bitcast=True), mask=inside, other=0)
        x = x.to(tl.float8e4nv, bitcast=True)
    else:
        x = tl.load(at, mask=inside, other=0)
    return x


@triton.jit
def load_rows(x_desc, x_rows, m0, k0, depth, K: tl.constexpr, EVEN: tl.constexpr):
    """[BLOCK_M, K] of x."""
    if x_desc is not None:
        x = x_desc.load([m0, k0])
    else:
        offs_k = k0 + tl.arange(0, K)
        at = x_rows[:, None] + offs_k[None, :]
        x = tl.load(at) if EVEN else load_part(at, (offs_k < depth)[None, :])
    return x


@triton.jit
def across(row_values, column_values, SWAP: tl.constexpr):
    """The two vectors as they lie beside an accumulator."""
    down = row_values[None, :] if SWAP else row_values[:, None]
    right = column_values[:, None] if SWAP else column_values[None, :]
    return down, right
