"""Copies of tensors with rows of another width: filled up with zeros, or cut."""

from __future__ import annotations

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from flashkernels.attention.tensors import alignment, empty_output, strides_of
from flashkernels.jit.launch import Launcher, compile_options

ELEMENTS = 4096  # that one program copies


@triton.jit(do_not_specialize=["rows", "heads", "blocks"])
def copy_kernel(
    x_ptr, y_ptr, stride_xb: tl.int64, stride_xs: tl.int64, stride_xh: tl.int64, stride_xd,
    stride_yb: tl.int64, stride_ys: tl.int64, stride_yh: tl.int64, rows, heads, blocks,
    DIM: tl.constexpr, DIM_Y: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK rows of one batch, of which there are `rows`, all heads of a token after one another."""
    pid = tl.program_id(0)
    batch = pid // blocks
    row = (pid - batch * blocks) * BLOCK + tl.arange(0, BLOCK)
    token = row // heads
    head = row - token * heads
    column = tl.arange(0, WIDTH)[None, :]
    inside = (row < rows)[:, None]
    from_x = x_ptr + batch * stride_xb + (token * stride_xs + head * stride_xh)[:, None]
    to_y = y_ptr + batch * stride_yb + (token * stride_ys + head * stride_yh)[:, None]
    x = tl.load(from_x + column.to(tl.int64) * stride_xd, mask=inside & (column < DIM), other=0.0)
    tl.store(to_y + column, x, mask=inside & (column < DIM_Y))


def copier(x: Tensor, width: int, device: int | None, layout: str = "bshd") -> Callable[[Tensor], Tensor]:
    """What makes tensors like x, (B, S, H, D) or (total, H, D), such ones with `width` columns, contiguous in the order
    of `layout`: missing columns are zeros. What has that width and can be read 16 bytes at a time stays.

    x may be on the meta device; the calls come with tensors of `device`, None for the CPU.
    """
    if x.shape[-1] == width and alignment(x) > 1:
        return lambda x: x
    y = empty_output(x.to("meta"), width, layout)
    batch, (seq, heads, dim) = (1 if x.dim() == 3 else x.shape[0]), x.shape[-3:]
    columns = max(16, triton.next_power_of_2(max(dim, width)))
    constants = {"DIM": dim, "DIM_Y": width, "WIDTH": columns, "BLOCK": max(1, ELEMENTS // columns)}
    blocks = -(-seq * heads // constants["BLOCK"])
    launcher = Launcher(copy_kernel, constants, compile_options(4, 1, 0), device)
    numbers = (*strides_of(x), *strides_of(y)[:3], seq * heads, heads, blocks)

    def copy(x: Tensor) -> Tensor:
        y = empty_output(x, width, layout)
        launcher(batch * blocks, (x, y), numbers)
        return y

    return copy
