"""Device functions of our attention kernels in Triton: blocks of rows by parts of the head dimension, scores, masks and
accumulators. The forward, the backward and decode call them."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_block(at, offs_n, offs_d, rows, DIM: tl.constexpr, RAGGED: tl.constexpr):
    """Loads a block with zeros past `rows` (None: all are there) and, where RAGGED, past the head dimension."""
    if rows is not None:
        return tl.load(at, mask=(offs_n < rows)[:, None] & (offs_d < DIM)[None, :], other=0.0)
    if RAGGED:
        return tl.load(at, mask=(offs_d < DIM)[None, :], other=0.0)
    return tl.load(at)


@triton.jit
def steps_of(row0, rows, table, stride_page, stride_s, BLOCK: tl.constexpr, PAGE: tl.constexpr):
    """How far BLOCK keys from `row0` on, of which there are `rows` (None: all), are from the first row of all pages."""
    keys = row0 + tl.arange(0, BLOCK)
    if rows is None:
        page = tl.load(table + keys // PAGE)
    else:
        page = tl.load(table + keys // PAGE, mask=tl.arange(0, BLOCK) < rows, other=0)
    return page.to(tl.int64) * stride_page + keys % PAGE * stride_s


@triton.jit
def start_of(ptr, n, stride_s, PAGE: tl.constexpr):
    """The row of key `n`; with pages, the first one of all."""
    return ptr if PAGE else ptr + n * stride_s


@triton.jit
def load_parts(
    ptr, descs, batch, row0, head, rows, stride_s, stride_d,
    DIM: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, TMA: tl.constexpr,
    table=None, stride_page=0, PAGE: tl.constexpr = 0,
):  # fmt: skip
    """The parts of BLOCK rows from `row0` on. Without TMA, `ptr` is `start_of` it and `rows` are read (None: all)."""
    tiles = ()
    if PAGE:
        steps = steps_of(row0, rows, table, stride_page, stride_s, BLOCK, PAGE)
    start: tl.constexpr = 0
    for i in tl.static_range(len(PARTS)):
        if TMA:
            tile = descs[i].load([batch, row0, head, start]).reshape(BLOCK, tl.constexpr(PARTS[i]))
        else:
            offs_n = tl.arange(0, BLOCK)
            offs_d = start + tl.arange(0, tl.constexpr(PARTS[i]))
            if PAGE:
                at = ptr + steps[:, None] + offs_d.to(tl.int64)[None, :] * stride_d
            else:
                at = ptr + offs_n[:, None] * stride_s + offs_d.to(tl.int64)[None, :] * stride_d
            tile = load_block(at, offs_n, offs_d, rows, DIM, start + PARTS[i] > DIM)
        tiles = tiles + (tile,)  # [BLOCK, PARTS[i]]
        start = start + PARTS[i]
    return tiles


@triton.jit
def scores(q, k, PRECISION: tl.constexpr):
    """Q·Kᵀ in fp32, summed over the parts of the head dimension."""
    s = tl.dot(q[0], k[0].T, input_precision=PRECISION)
    for i in tl.static_range(1, len(q)):
        if q[0].dtype == tl.float32:
            # Sums of few terms, then added: one long chain rounds worse than torch does. Triton would fold a plain
            # addition back into a chain; it leaves a multiplication by 1 with addition alone.
            s = tl.fma(tl.dot(q[i], k[i].T, input_precision=PRECISION), 1.0, s)
        else:
            s = tl.dot(q[i], k[i].T, s, input_precision=PRECISION)
    return s  # [BLOCK_M, BLOCK_N]


@triton.jit
def logits(s, scale, softcap, slope, offs_m, offs_n, shift, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr):
    """Scores in units of log2: scale, softcap, ALiBi. `scale` already carries log2(e)."""
    s = s * scale
    if SOFTCAP:  # softcap * tanh(s / softcap), both in log2 units
        x = s / softcap
        wide = 1 - 2 / (1 + tl.exp2(x * (2 * LOG2E)))
        x2 = x * x  # near 0 the line above cancels; its series does not
        narrow = x * (1 + x2 * (-1 / 3 + x2 * (2 / 15 + x2 * (-17 / 315 + x2 * (62 / 2835)))))
        s = softcap * tl.where(x2 < 0.09, narrow, wide)
    if ALIBI:
        s -= slope * tl.abs(offs_m[:, None] + shift - offs_n[None, :]).to(tl.float32)
    return s


@triton.jit
def hide(
    s, offs_m, offs_n, seq_q, seq_k, shift, left, right, mask_ptr, stride_mm, stride_mn,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Adds a float mask to the logits and puts -inf where a row may not look; also says where it may."""
    last = tl.zeros_like(offs_m) + (seq_k - 1)
    if RIGHT:
        last = tl.minimum(last, offs_m + (shift + right))
    seen = offs_n[None, :] <= last[:, None]
    if LEFT:
        seen = seen & (offs_n[None, :] >= (offs_m + (shift - left))[:, None])
    if MASK != "none":
        inside = (offs_m < seq_q)[:, None] & (offs_n < seq_k)[None, :]
        at = mask_ptr + offs_m[:, None] * stride_mm + offs_n.to(tl.int64)[None, :] * stride_mn
        value = tl.load(at, mask=inside, other=0)
        if MASK == "bool":
            seen = seen & (value != 0)
        else:
            bias = value.to(tl.float32)
            seen = seen & (bias != float("-inf"))
            # finfo.min is a common "hidden"; it must stay finite in units of log2
            s += tl.maximum(bias, -1e38) * LOG2E
    return tl.where(seen, s, float("-inf")), seen


@triton.jit
def rescale(acc, alpha):
    out = ()
    for i in tl.static_range(len(acc)):
        out = out + (acc[i] * alpha[:, None],)
    return out


@triton.jit
def accumulate(acc, p, v, PRECISION: tl.constexpr, APART: tl.constexpr = False):
    """P·V of each part added to `acc`. APART: in fp32 it is summed by itself first, as in `scores`. Gradients are over
    their tolerance without; the forward is not, and would take 252 registers for 128 (sm_80, D=64)."""
    out = ()
    for i in tl.static_range(len(acc)):
        if APART and v[i].dtype == tl.float32:
            out = out + (tl.fma(tl.dot(p, v[i], input_precision=PRECISION), 1.0, acc[i]),)
        else:
            out = out + (tl.dot(p.to(v[i].dtype), v[i], acc[i], input_precision=PRECISION),)
    return out


@triton.jit
def keep_rows(tiles, rows):
    out = ()
    for i in tl.static_range(len(tiles)):
        out = out + (tl.where(rows[:, None], tiles[i], 0.0).to(tiles[i].dtype),)
    return out


@triton.jit
def has_nan(acc):
    found = 0
    for i in tl.static_range(len(acc)):
        found = tl.maximum(found, tl.max((acc[i] != acc[i]).to(tl.int32)))
    return found > 0


@triton.jit
def visible_poison(seen, v):
    """What the Inf and NaN of V add to the rows that see them: +Inf, -Inf, or NaN where both or a NaN meet; else 0."""
    rows = seen.to(tl.float16)
    up = tl.dot(rows, ((v != v) | (v == float("inf"))).to(tl.float16))
    down = tl.dot(rows, ((v != v) | (v == float("-inf"))).to(tl.float16))
    return tl.where(up > 0, float("inf"), 0.0) + tl.where(down > 0, float("-inf"), 0.0)


@triton.jit
def store_parts(o_rows, acc, inverse, inside, DIM_V: tl.constexpr, PARTS_V: tl.constexpr):
    start: tl.constexpr = 0
    for i in tl.static_range(len(PARTS_V)):
        offs_d = start + tl.arange(0, tl.constexpr(PARTS_V[i]))
        value = (acc[i] * inverse[:, None]).to(o_rows.dtype.element_ty)
        tl.store(o_rows + offs_d[None, :], value, mask=inside[:, None] & (offs_d < DIM_V)[None, :])
        start = start + PARTS_V[i]


@triton.jit
def visible_keys(
    row0, seq_q, seq_k, shift, left, right,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, MASK: tl.constexpr,
    LAST: tl.constexpr = False,
):  # fmt: skip
    """Of BLOCK_M rows from `row0` on: [start, full) and [edge, end) hide keys from some row, [full, edge) from none.

    With LAST, the last key that a row sees is always in [edge, end).
    """
    start = tl.zeros((), tl.int32)
    full = tl.zeros((), tl.int32)
    end = seq_k
    edge = (tl.maximum(1, seq_k) - 1 if LAST else seq_k) // BLOCK_N * BLOCK_N
    if RIGHT:
        end = tl.minimum(seq_k, tl.maximum(0, tl.minimum(row0 + BLOCK_M, seq_q) + (shift + right)))
        edge = tl.minimum(edge, tl.maximum(0, row0 + shift + right + 1 - LAST) // BLOCK_N * BLOCK_N)
    if LEFT:
        start = tl.maximum(0, row0 + shift - left) // BLOCK_N * BLOCK_N
        full = (tl.maximum(0, row0 + BLOCK_M - 1 + shift - left) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    if MASK != "none":
        edge = start
    end = tl.maximum(end, start)
    edge = tl.maximum(edge, start)
    full = tl.minimum(tl.maximum(full, start), edge)
    return start, full, edge, end


@triton.jit
def split_block(i, edge, edge_blocks, start, BLOCK_N: tl.constexpr):
    """Block i of the masked blocks: those from `edge` on come first, then those from `start` on."""
    return tl.where(i < edge_blocks, edge + i * BLOCK_N, start + (i - edge_blocks) * BLOCK_N)
