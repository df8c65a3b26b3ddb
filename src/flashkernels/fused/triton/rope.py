"""Rotary embedding in Triton: a program turns some heads of q and k of one token, by angles that it reads once."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

from flashkernels.fused.rope import Rope
from flashkernels.fused.rows import RowProblem
from flashkernels.fused.triton.blocks import ELEMENTS, PER_THREAD, Launch
from flashkernels.hardware import Gpu
from flashkernels.jit.eager import Run, room


@triton.jit
def turn(
    x_ptr, out_ptr, cos, sin, heads, head, DIM: tl.constexpr, TURNED: tl.constexpr, HALF: tl.constexpr,
    REST: tl.constexpr, INTERLEAVED: tl.constexpr, x_step, out_step,
):  # fmt: skip
    """HEADS heads of one token; `x_ptr` and `out_ptr` are at it, `cos` and `sin` are (1, HALF)."""
    x_rows = x_ptr + head[:, None] * x_step
    out_rows = out_ptr + head[:, None] * out_step
    here = (head < heads)[:, None]
    if INTERLEAVED:
        cols = tl.arange(0, 2 * HALF)[None, :]
        inside = here & (cols < TURNED)
        x = tl.load(x_rows + cols, mask=inside, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(x, (head.shape[0], HALF, 2)))
        y = tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), (head.shape[0], 2 * HALF))
        tl.store(out_rows + cols, y.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        cols = tl.arange(0, HALF)[None, :]
        inside = here & (cols < TURNED // 2)
        a = tl.load(x_rows + cols, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(x_rows + TURNED // 2 + cols, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_rows + cols, (a * cos - b * sin).to(out_ptr.dtype.element_ty), mask=inside)
        tl.store(out_rows + TURNED // 2 + cols, (b * cos + a * sin).to(out_ptr.dtype.element_ty), mask=inside)
    if REST:
        cols = TURNED + tl.arange(0, REST)[None, :]
        inside = here & (cols < DIM)
        tl.store(out_rows + cols, tl.load(x_rows + cols, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["seq", "positions", "blocks", "q_heads", "k_heads"])
def rope_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, position_ptr, q_out_ptr, k_out_ptr,
    seq: tl.int64, positions: tl.int64, blocks: tl.int64, q_heads, k_heads,
    stride_qb: tl.int64, stride_qs: tl.int64, stride_qh: tl.int64,
    stride_kb: tl.int64, stride_ks: tl.int64, stride_kh: tl.int64,
    stride_qob: tl.int64, stride_qos: tl.int64, stride_qoh: tl.int64,
    stride_kob: tl.int64, stride_kos: tl.int64, stride_koh: tl.int64,
    stride_c: tl.int64, stride_s: tl.int64, stride_pb: tl.int64, stride_ps: tl.int64,
    HEADS: tl.constexpr, DIM: tl.constexpr, TURNED: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    INTERLEAVED: tl.constexpr, CONJUGATE: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0).to(tl.int64)
    token = pid // blocks
    first = (pid % blocks * HEADS).to(tl.int32)
    batch = token // seq
    row = token % seq
    head = first + tl.arange(0, HEADS)

    position = row
    if position_ptr is not None:
        position = tl.load(position_ptr + batch * stride_pb + row * stride_ps).to(tl.int64)
    pairs = tl.arange(0, HALF)
    known = (pairs < TURNED // 2) & (position >= 0) & (position < positions)
    cos = tl.load(cos_ptr + position * stride_c + pairs, mask=known, other=float("nan")).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + position * stride_s + pairs, mask=known, other=float("nan")).to(tl.float32)[None, :]
    if CONJUGATE:
        sin = -sin
    if first < q_heads:
        turn(q_ptr + batch * stride_qb + row * stride_qs, q_out_ptr + batch * stride_qob + row * stride_qos, cos, sin,
             q_heads, head, DIM, TURNED, HALF, REST, INTERLEAVED, stride_qh, stride_qoh)  # fmt: skip
    if first < k_heads:
        turn(k_ptr + batch * stride_kb + row * stride_ks, k_out_ptr + batch * stride_kob + row * stride_kos, cos, sin,
             k_heads, head, DIM, TURNED, HALF, REST, INTERLEAVED, stride_kh, stride_koh)  # fmt: skip


def constants(heads: int, dim: int, call: Rope) -> dict[str, Any]:
    """Compile-time values of the kernel, in its order; `heads` is the larger number of q and k."""
    turned = call.rotary_dim or 0
    half = triton.next_power_of_2(max(1, turned // 2))
    rest = 0 if call.inplace or turned == dim else triton.next_power_of_2(dim - turned)
    return {
        "HEADS": max(1, min(triton.next_power_of_2(heads), ELEMENTS // max(half, rest))), "DIM": dim,
        "TURNED": turned, "HALF": half, "REST": rest, "INTERLEAVED": call.interleaved,
        "CONJUGATE": call.conjugate,
    }  # fmt: skip


def warps(fixed: dict[str, Any]) -> int:
    return min(8, max(1, fixed["HEADS"] * max(fixed["HALF"], fixed["REST"]) // (32 * PER_THREAD)))


def plan(problem: RowProblem, gpu: Gpu | None, tensors: tuple[Any, ...], call: Rope) -> Run:
    q, k, cos, sin, position_ids = tensors
    batch, seq, q_heads, dim = q.shape
    k_heads = k.shape[2]
    fixed = constants(max(q_heads, k_heads, 1), dim, call)
    blocks = -(-max(q_heads, k_heads) // fixed["HEADS"])
    grid = batch * seq * blocks if dim else 0
    launch = Launch(rope_kernel, fixed, warps(fixed), q.device)
    outs = [x if call.inplace else x.new_empty(x.shape) for x in (q, k)]
    q_room, k_room = (room(x.shape, x.dtype, x.device) for x in (q, k))
    ids = (0, 0) if position_ids is None else position_ids.expand(batch, seq).stride()
    views = [dense(x) for x in (q, k, cos, sin)]
    as_they_are = all(view is x for view, x in zip(views, (q, k, cos, sin), strict=True))
    numbers = (
        seq, cos.shape[0], blocks, q_heads, k_heads, *views[0].stride()[:3], *views[1].stride()[:3],
        *(step for x in (views if call.inplace else outs)[:2] for step in x.stride()[:3]),
        views[2].stride(0), views[3].stride(0), *ids,
    )  # fmt: skip

    def run(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        q_in, k_in = q, k
        if not as_they_are:
            q_in, k_in, cos, sin = dense(q), dense(k), dense(cos), dense(sin)
        q_out, k_out = (q_in, k_in) if call.inplace else (q_room(), k_room())
        if grid:
            launch(grid, (q_in, k_in, cos, sin, position_ids, q_out, k_out), numbers)
        if call.inplace:
            for x, y in ((q, q_out), (k, k_out)):
                if x is not y:  # its last dimension is not contiguous
                    x.copy_(y)
            increment_version((q, k))  # autograd must hear of it: it may have saved them for another op
            return q, k
        return q_out, k_out

    return run


def dense(x: Tensor) -> Tensor:
    """x, with a contiguous last dimension."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()
