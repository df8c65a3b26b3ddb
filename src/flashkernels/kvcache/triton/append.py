"""Append in Triton: a program turns the keys of some heads of one token, quantises, and writes keys and values."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashkernels.formats import SMALLEST_SCALE, Format, lookup
from flashkernels.fused.rows import RowProblem
from flashkernels.fused.triton.blocks import ELEMENTS, PER_THREAD, Launch
from flashkernels.hardware import Gpu
from flashkernels.jit.eager import Run
from flashkernels.kvcache.append import Append
from flashkernels.kvcache.cache import DTYPES

ROUND = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it leaves no bits for a fraction, so fp32 rounds to even
ROUND_BITS = tl.constexpr(0x4B400000)  # its bits, to which a whole number was added
SMALLEST = tl.constexpr(SMALLEST_SCALE)
HUGE = tl.constexpr(3e38)
SEARCH = 1024  # sequences looked at together


@triton.jit
def sequence_of(row, cu_ptr, batch, SEARCH: tl.constexpr):
    """The sequence that a ragged row belongs to: how many end before it."""
    found = tl.zeros((), tl.int32)
    for first in tl.range(0, batch, SEARCH):
        at = first + tl.arange(0, SEARCH)
        ends = tl.load(cu_ptr + 1 + at, mask=at < batch, other=2147483647)
        found += tl.sum((ends <= row).to(tl.int32))
    return found


@triton.jit
def turned(rows, cols, inside, cos_ptr, sin_ptr, position, positions, stride_c, stride_s,
           TURNED: tl.constexpr, INTERLEAVED: tl.constexpr):  # fmt: skip
    """Heads (HEADS, WIDTH) in fp32, their first TURNED columns turned by the angles of `position`."""
    x = tl.load(rows + cols, mask=inside, other=0.0).to(tl.float32)
    if TURNED > 0:
        turns = cols < TURNED
        if INTERLEAVED:
            pair = cols // 2
            first = cols % 2 == 0
            partner = tl.where(first, cols + 1, cols - 1)
        else:
            first = cols < TURNED // 2
            pair = tl.where(first, cols, cols - TURNED // 2)
            partner = tl.where(first, cols + TURNED // 2, cols - TURNED // 2)
        y = tl.load(rows + partner, mask=inside & turns, other=0.0).to(tl.float32)
        known = turns & (position >= 0) & (position < positions)
        cos = tl.load(cos_ptr + position * stride_c + pair, mask=known, other=float("nan")).to(tl.float32)
        sin = tl.load(sin_ptr + position * stride_s + pair, mask=known, other=float("nan")).to(tl.float32)
        # Rounded one by one, as torch does: a product and a sum in one would move codes that lie on an edge.
        x = tl.where(turns, tl.fma(x, cos, 0.0) + tl.fma(tl.where(first, -y, y), sin, 0.0), x)
    return x


@triton.jit
def scale_up(largest, AIM: tl.constexpr, TOP: tl.constexpr):
    """The fp16 scale, rounded up, by which the largest number of rows or groups becomes AIM."""
    wide = tl.minimum(tl.maximum(tl.div_rn(largest, tl.full(largest.shape, AIM, tl.float32)), SMALLEST), TOP)
    scale = wide.to(tl.float16)
    above = (scale.to(tl.int16, bitcast=True) + 1).to(tl.float16, bitcast=True)
    return tl.where(scale.to(tl.float32) < wide, above, scale)


@triton.jit
def left_over(x, scale, MOST: tl.constexpr, FRACTION: tl.constexpr, UNIT: tl.constexpr):
    """The squared error of rows or groups x (..., N) under scales (...), counted in whole units: see formats.py."""
    wide = scale.to(tl.float32)
    y = x * tl.expand_dims(tl.div_rn(tl.full(wide.shape, 1.0, tl.float32), wide), -1)
    y = tl.minimum(y, HUGE)  # changes nothing, but keeps the compiler from fusing the product with the difference below
    if FRACTION > 0:
        DROPPED: tl.constexpr = 23 - FRACTION
        near = (y.to(tl.int32, bitcast=True) + (1 << (DROPPED - 1)) & -(1 << DROPPED)).to(tl.float32, bitcast=True)
    else:
        near = tl.minimum(tl.maximum(y, -MOST), MOST) + ROUND - ROUND
    units = ((y - near) * (1 / UNIT) + ROUND).to(tl.int32, bitcast=True) - ROUND_BITS
    return tl.sum(units * units, len(x.shape) - 1).to(tl.float32) * (wide * wide)


@triton.jit
def scale_of(
    x, broken, MOST: tl.constexpr, TOP: tl.constexpr, AIMS: tl.constexpr, FRACTION: tl.constexpr, UNIT: tl.constexpr
):  # fmt: skip
    """The fp16 scales (...) of rows or groups x (..., N): of the format's aims the one that leaves the least error; NaN
    where they are broken."""
    largest = tl.max(tl.abs(x), len(x.shape) - 1)
    best = scale_up(largest, AIMS[0], TOP)
    if len(AIMS) > 1:
        least = left_over(x, best, MOST, FRACTION, UNIT)
        for i in tl.static_range(1, len(AIMS)):
            scale = scale_up(largest, AIMS[i], TOP)
            error = left_over(x, scale, MOST, FRACTION, UNIT)
            best = tl.where(error < least, scale, best)
            least = tl.minimum(error, least)
    return tl.where(broken, float("nan"), best).to(tl.float16)


@triton.jit
def small(x, scale, MOST: tl.constexpr):
    """x / scale, clipped; 0 where that is NaN."""
    y = tl.div_rn(x, tl.broadcast_to(scale.to(tl.float32), x.shape))
    return tl.where(y == y, tl.minimum(tl.maximum(y, -MOST), MOST), 0.0)  # a GPU's maximum of NaN and x is x


@triton.jit
def put(
    x, inside, head, heads, rows_ptr, scale_ptr, scale_rows, stride_h,
    DIM: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr, MOST: tl.constexpr, TOP: tl.constexpr,
    AIMS: tl.constexpr, FRACTION: tl.constexpr, UNIT: tl.constexpr, STATIC: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Stores heads x (HEADS, WIDTH) at `rows_ptr`, which is at their token, with their scales."""
    HEADS: tl.constexpr = x.shape[0]
    here = head < heads
    if KIND == "plain":
        cols = tl.arange(0, WIDTH)[None, :]
        tl.store(rows_ptr + head[:, None] * stride_h + cols, x.to(rows_ptr.dtype.element_ty), mask=inside)
    else:
        x = tl.where(inside, x, 0.0)
        broken = tl.max((x - x != 0).to(tl.int32), 1) > 0  # (HEADS,)
        if KIND == "int4":
            groups = tl.reshape(x, (HEADS, WIDTH // 32, 32))
            if STATIC:
                scale = tl.load(scale_ptr + head, mask=here, other=1.0)[:, None, None]
            else:
                each = scale_of(groups, broken[:, None], MOST, TOP, AIMS, FRACTION, UNIT)
                at = tl.arange(0, WIDTH // 32)[None, :]
                tl.store(scale_rows + at, each, mask=here[:, None] & (at < GROUPS))
                scale = each[:, :, None]
            whole = (small(groups, scale, MOST) + ROUND - ROUND).to(tl.int32)
            even, odd = tl.split(tl.reshape(whole, (HEADS, WIDTH // 2, 2)))
            cols = tl.arange(0, WIDTH // 2)[None, :]
            byte = ((even & 15) | ((odd & 15) << 4)).to(tl.uint8)
            tl.store(rows_ptr + head[:, None] * stride_h + cols, byte, mask=here[:, None] & (cols < DIM // 2))
        else:
            if STATIC:
                scale = tl.load(scale_ptr + head, mask=here, other=1.0)
            else:
                scale = scale_of(x, broken, MOST, TOP, AIMS, FRACTION, UNIT)
                tl.store(scale_rows, scale[:, None], mask=here[:, None])
            y = small(x, scale[:, None], MOST)
            if KIND == "int8":
                value = (y + ROUND - ROUND).to(tl.int8)
            elif KIND == "fp8":
                value = y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
            else:
                value = y.to(tl.float8e5).to(tl.uint8, bitcast=True)
            cols = tl.arange(0, WIDTH)[None, :]
            tl.store(rows_ptr + head[:, None] * stride_h + cols, value, mask=inside)


@triton.jit(do_not_specialize=["tokens", "batch", "positions", "blocks", "heads", "capacity", "page_size"])
def append_kernel(
    k_ptr, v_ptr, k_pages_ptr, v_pages_ptr, k_scale_ptr, v_scale_ptr, table_ptr, length_ptr, cos_ptr, sin_ptr,
    position_ptr, cu_ptr,
    stride_kb: tl.int64, stride_kt: tl.int64, stride_kh: tl.int64,
    stride_vb: tl.int64, stride_vt: tl.int64, stride_vh: tl.int64,
    stride_kp: tl.int64, stride_ks: tl.int64, stride_kph: tl.int64,
    stride_vp: tl.int64, stride_vs: tl.int64, stride_vph: tl.int64,
    stride_ap: tl.int64, stride_as: tl.int64, stride_ah: tl.int64,
    stride_bp: tl.int64, stride_bs: tl.int64, stride_bh: tl.int64,
    stride_tb: tl.int64, stride_c: tl.int64, stride_s: tl.int64, stride_pb: tl.int64, stride_pt: tl.int64,
    tokens: tl.int64, batch, positions: tl.int64, blocks: tl.int64, heads, capacity, page_size,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr,
    KIND: tl.constexpr, MOST: tl.constexpr, TOP: tl.constexpr, AIMS: tl.constexpr, FRACTION: tl.constexpr,
    UNIT: tl.constexpr, STATIC: tl.constexpr, GROUPS: tl.constexpr, GROUPS_V: tl.constexpr, TURNED: tl.constexpr,
    INTERLEAVED: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    row = pid // blocks
    head = (pid % blocks * HEADS).to(tl.int32) + tl.arange(0, HEADS)
    if cu_ptr is not None:  # ragged: rows of all sequences, one after the other
        b = sequence_of(row, cu_ptr, batch, SEARCH).to(tl.int64)
        if b >= batch:
            return
        token = row
        place = tl.load(length_ptr + b) - (tl.load(cu_ptr + b + 1) - row).to(tl.int32)
        batch_row = tl.zeros((), tl.int64)
    else:
        b = row // tokens
        token = row % tokens
        place = tl.load(length_ptr + b) - (tokens - token).to(tl.int32)
        batch_row = b
    if (place < 0) | (place >= capacity):
        return
    page = tl.load(table_ptr + b * stride_tb + place // page_size).to(tl.int64)
    slot = (place % page_size).to(tl.int64)
    position = place.to(tl.int64)
    if position_ptr is not None:
        position = tl.load(position_ptr + batch_row * stride_pb + token * stride_pt).to(tl.int64)

    here = (head < heads)[:, None]
    cols = tl.arange(0, WIDTH)[None, :]
    inside = here & (cols < DIM)
    x_rows = k_ptr + batch_row * stride_kb + token * stride_kt + head.to(tl.int64)[:, None] * stride_kh
    x = turned(x_rows, cols, inside, cos_ptr, sin_ptr, position, positions, stride_c, stride_s, TURNED, INTERLEAVED)
    scale_rows = k_scale_ptr
    if KIND != "plain" and not STATIC:
        scale_rows = k_scale_ptr + page * stride_ap + slot * stride_as + head.to(tl.int64)[:, None] * stride_ah
    put(x, inside, head, heads, k_pages_ptr + page * stride_kp + slot * stride_ks, k_scale_ptr, scale_rows, stride_kph,
        DIM, WIDTH, KIND, MOST, TOP, AIMS, FRACTION, UNIT, STATIC, GROUPS)  # fmt: skip
    if v_ptr is not None:
        cols = tl.arange(0, WIDTH_V)[None, :]
        inside = here & (cols < DIM_V)
        x_rows = v_ptr + batch_row * stride_vb + token * stride_vt + head.to(tl.int64)[:, None] * stride_vh
        x = tl.load(x_rows + cols, mask=inside, other=0.0).to(tl.float32)
        scale_rows = v_scale_ptr
        if KIND != "plain" and not STATIC:
            scale_rows = v_scale_ptr + page * stride_bp + slot * stride_bs + head.to(tl.int64)[:, None] * stride_bh
        put(x, inside, head, heads, v_pages_ptr + page * stride_vp + slot * stride_vs, v_scale_ptr, scale_rows,
            stride_vph, DIM_V, WIDTH_V, KIND, MOST, TOP, AIMS, FRACTION, UNIT, STATIC, GROUPS_V)  # fmt: skip


def constants(form: Format, heads: int, dim: int, dim_v: int, static: bool, call: Append) -> dict[str, Any]:
    """Compile-time values of the kernel, in its order."""
    least = 32 if form.group else 16
    width, width_v = (max(least, triton.next_power_of_2(n)) for n in (dim, dim_v))
    kind = form.name if form.quantised else "plain"
    return {
        "HEADS": max(1, min(triton.next_power_of_2(heads), ELEMENTS // max(width, width_v))), "DIM": dim,
        "DIM_V": dim_v, "WIDTH": width, "WIDTH_V": width_v, "KIND": kind, "MOST": float(form.most),
        "TOP": form.largest_scale if form.quantised else 0.0, "AIMS": tuple(map(float, form.aims)),
        "FRACTION": form.fraction, "UNIT": form.unit, "STATIC": static, "GROUPS": form.groups(dim),
        "GROUPS_V": form.groups(dim_v), "TURNED": call.rotary_dim, "INTERLEAVED": call.interleaved, "SEARCH": SEARCH,
    }  # fmt: skip


def warps(fixed: dict[str, Any]) -> int:
    return min(8, max(1, fixed["HEADS"] * max(fixed["WIDTH"], fixed["WIDTH_V"]) // (32 * PER_THREAD)))


def plan(problem: RowProblem, gpu: Gpu | None, tensors: tuple[Any, ...], call: Append) -> Run:
    k_pages, v_pages, k_scale, v_scale, table, _, k, v, cos, sin, position_ids, _ = tensors
    form = lookup(DTYPES[k_pages.dtype])
    heads, dim = k.shape[-2:]
    static = k_scale is not None and k_scale.dim() == 1
    fixed = constants(form, heads, dim, dim if v is None else v.shape[-1], static, call)
    blocks = -(-heads // fixed["HEADS"])
    tokens = k.shape[:-2].numel()
    launch = Launch(append_kernel, fixed, warps(fixed), k.device)

    def steps(x: Tensor | None, ragged: bool = False) -> tuple[int, ...]:
        """Strides of (batch, token, head) or (page, slot, head); a ragged tensor has no batch."""
        if x is None or x.dim() == 1:
            return (0, 0, 0)
        return ((0, *x.stride()) if ragged else x.stride())[:3]

    ids = (0, 0) if position_ids is None else (0, *position_ids.stride())[-2:]
    tables = (0, 0) if cos is None else (_dense(cos).stride(0), _dense(sin).stride(0))
    numbers = (
        *steps(_dense(k), k.dim() == 3), *steps(_dense(v), k.dim() == 3), *steps(k_pages),
        *steps(v_pages), *steps(k_scale), *steps(v_scale), table.stride(0), *tables, *ids,
        k.shape[1] if k.dim() == 4 else tokens, table.shape[0], 0 if cos is None else cos.shape[0], blocks, heads,
        table.shape[1] * k_pages.shape[1], k_pages.shape[1],
    )  # fmt: skip

    def run(
        k_pages: Tensor, v_pages: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None, table: Tensor,
        lengths: Tensor, k: Tensor, v: Tensor | None, cos: Tensor | None, sin: Tensor | None,
        position_ids: Tensor | None, cu_seqlens: Tensor | None,
    ) -> None:  # fmt: skip
        arguments = (
            _dense(k), _dense(v), as_bytes(k_pages), as_bytes(v_pages), k_scale, v_scale, table, lengths, _dense(cos),
            _dense(sin), position_ids, cu_seqlens,
        )  # fmt: skip
        if tokens:
            launch(tokens * blocks, arguments, numbers)

    return run


def as_bytes(pages: Any) -> Any:
    """FP8 as plain bytes: kernels convert them by their own means. None stays None."""
    fp8 = pages is not None and pages.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    return pages.view(torch.uint8) if fp8 else pages


def _dense(x: Any) -> Any:
    """x, with a contiguous last dimension. None stays None."""
    return x if x is None or x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()
