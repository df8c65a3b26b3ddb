"""Device functions of the decode: pages of a cache as numbers, which keys a row sees, and what is written."""

from __future__ import annotations

import triton
import triton.language as tl

from flashkernels.attention.triton.parts import has_nan, logits, scores, visible_poison
from flashkernels.decode.triton.convert import of_byte, phases

CAREFUL = tl.constexpr(16)  # keys and columns at a time where V holds NaN or Inf


@triton.constexpr_function
def before(chunks, i):
    """Columns before chunk i."""
    return sum(chunks[:i])


@triton.jit
def load_queries(rows, inside, stride_qd, DIM: tl.constexpr, CHUNKS: tl.constexpr, PACKED: tl.constexpr):
    """The chunks of Q; where K has two numbers in a byte, first the even columns, then the odd ones."""
    found = ()
    for odd in tl.static_range(PACKED):
        for i in tl.static_range(len(CHUNKS)):
            cols = (before(CHUNKS, i) + tl.arange(0, tl.constexpr(CHUNKS[i]))) * PACKED + odd
            at = rows[:, None] + cols[None, :] * stride_qd
            found = found + (tl.load(at, mask=inside[:, None] & (cols < DIM)[None, :], other=0.0),)
    return found


@triton.jit
def load_chunks(ptr, rows, inside, STORED: tl.constexpr, CHUNKS: tl.constexpr):
    """The chunks of stored rows, zeros outside (None: all rows may be read)."""
    found = ()
    for i in tl.static_range(len(CHUNKS)):
        cols = before(CHUNKS, i) + tl.arange(0, tl.constexpr(CHUNKS[i]))
        at = ptr + rows[:, None] + cols[None, :]
        if before(CHUNKS, i + 1) > STORED:
            if inside is None:
                tile = tl.load(at, mask=(cols < STORED)[None, :], other=0)
            else:
                tile = tl.load(at, mask=inside[:, None] & (cols < STORED)[None, :], other=0)
        elif inside is None:
            tile = tl.load(at)
        else:
            tile = tl.load(at, mask=inside[:, None], other=0)
        found = found + (tile,)  # [BLOCK_N, CHUNKS[i]]
    return found


@triton.jit
def roughly_log2(x):
    """To a tenth, of |x|; 16 of NaN, -24 of 0. The running maximum need not be exact, only the same for all."""
    bits = tl.abs(x).to(tl.int32, bitcast=True).to(tl.float32)
    return tl.maximum(tl.minimum(bits * (2.0**-23) - 127.0, 16.0), -24.0)


@triton.jit
def group_scales(
    scale_ptr, rows, inside, FIRST: tl.constexpr, WIDTH: tl.constexpr, EACH: tl.constexpr, GROUPS: tl.constexpr,
    CLEAN: tl.constexpr,
):  # fmt: skip
    """Scales of INT4 for WIDTH elements from FIRST on: one for each EACH of them, next to each."""
    at = FIRST // EACH + tl.arange(0, WIDTH // EACH)
    scale = tl.load(
        scale_ptr + rows[:, None] + at[None, :], mask=inside[:, None] & (at < GROUPS)[None, :], other=0.0
    )  # fmt: skip
    if CLEAN:  # a broken row is then told by its logits: here its NaN would reach those who do not see it
        scale = tl.where(scale == scale, scale, 0.0)
    spread = tl.broadcast_to(scale[:, :, None], (rows.shape[0], WIDTH // EACH, EACH))
    return tl.reshape(spread, (rows.shape[0], WIDTH))


@triton.jit
def numbers(
    stored, scale_ptr, scale_rows, inside, CHUNKS: tl.constexpr, PACKED: tl.constexpr, KIND: tl.constexpr,
    DTYPE: tl.constexpr, PAIRS: tl.constexpr, GROUPED: tl.constexpr, GROUPS: tl.constexpr, CLEAN: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """What is multiplied: stored chunks as numbers. First the first phase of all chunks, then the second."""
    each = ()
    for i in tl.static_range(len(CHUNKS)):
        tiles = phases(stored[i], KIND, PAIRS, DTYPE, NATIVE)
        if GROUPED:
            scale = group_scales(
                scale_ptr, scale_rows, inside, before(CHUNKS, i), CHUNKS[i], 32 // PACKED, GROUPS, CLEAN
            )
            scaled = ()
            for j in tl.static_range(PACKED):
                scaled = scaled + (tiles[j] * scale.to(DTYPE),)
            tiles = scaled
        each = each + (tiles,)
    found = ()
    for j in tl.static_range(PACKED):
        for i in tl.static_range(len(CHUNKS)):
            found = found + (each[i][j],)
    return found


@triton.jit
def first_chunks(k, CHUNKS: tl.constexpr, CHUNKS_V: tl.constexpr, PACKED: tl.constexpr):
    """Values that are the first columns of the keys."""
    found = ()
    for odd in tl.static_range(PACKED):
        for i in tl.static_range(CHUNKS_V):
            found = found + (k[odd * CHUNKS + i],)
    return found


@triton.jit
def see(
    pos, offs_n, inside, token, length, count, left, right, tree_ptr, stride_treet, stride_treek,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """Which keys each row sees, [BLOCK_M, BLOCK_N]."""
    seen = tl.broadcast_to(inside[None, :], (pos.shape[0], offs_n.shape[0]))
    if RIGHT:
        seen = seen & (offs_n[None, :] <= (pos + right)[:, None])
    if LEFT:
        seen = seen & (offs_n[None, :] >= (pos - left)[:, None])
    if TREE:
        newest = offs_n - (length - count)  # of the `count` newest keys
        asked = seen & (newest >= 0)[None, :] & (token < count)[:, None]
        shown = tl.load(tree_ptr + token[:, None] * stride_treet + newest[None, :] * stride_treek, mask=asked, other=1)
        seen = seen & (shown != 0)
    return seen


@triton.jit
def pages_of(table_ptr, n, last, BLOCK_N: tl.constexpr, PAGE: tl.constexpr, ONE_PAGE: tl.constexpr):
    """The pages of BLOCK_N keys from n on, and the slots there. `n` is a multiple of BLOCK_N; keys past the page `last`
    take its rows, so that what is read may always be read."""
    step = tl.arange(0, BLOCK_N)
    if ONE_PAGE:
        page = tl.load(table_ptr) + tl.zeros_like(step)
        slot = tl.minimum(n + step, PAGE - 1).to(tl.int64)
    elif BLOCK_N % PAGE == 0:
        page = tl.load(table_ptr + tl.minimum(n // PAGE + step // PAGE, last))
        slot = (step % PAGE).to(tl.int64)
    else:
        page = tl.load(table_ptr + tl.minimum((n + step) // PAGE, last))
        slot = ((n + step) % PAGE).to(tl.int64)
    return page.to(tl.int64), slot


@triton.jit
def token_scales(scale_ptr, rows, head, inside, HEAD: tl.constexpr, WORDS: tl.constexpr):
    """The scales of keys or values, fp32, 1 outside. A copy that runs ahead takes 32 bits at least: where heads lie
    next to each other, a scale is read with its neighbour."""
    if WORDS:
        words = scale_ptr.to(tl.pointer_type(tl.int32))
        both = tl.load(words + rows // 2 + head // 2, mask=inside, other=0x3C003C00)  # twice 1.0
        scale = (both >> (16 * (head % 2)).to(tl.int32)).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        scale = tl.load(scale_ptr + rows + head * HEAD, mask=inside, other=1.0)
    return scale.to(tl.float32)


@triton.jit
def store_chunks(
    rows, acc, factor, inside, DIM_V: tl.constexpr, CHUNKS: tl.constexpr, PACKED: tl.constexpr
):  # fmt: skip
    """Writes the accumulator times a factor for each row; `rows` are pointers."""
    for odd in tl.static_range(PACKED):
        for i in tl.static_range(len(CHUNKS)):
            cols = (before(CHUNKS, i) + tl.arange(0, tl.constexpr(CHUNKS[i]))) * PACKED + odd
            value = acc[odd * len(CHUNKS) + i] * factor[:, None]
            at = rows[:, None] + cols[None, :]
            tl.store(at, value.to(rows.dtype.element_ty), mask=inside[:, None] & (cols < DIM_V)[None, :])


@triton.jit
def clear_empty(
    out_ptr, lse_ptr, sinks_ptr, length_ptr, cu_ptr, batch, tokens, heads, programs,
    stride_ob, stride_ot, stride_oh, stride_lb, stride_lh, stride_sh,
    DIM_V: tl.constexpr,
):  # fmt: skip
    """Sequences without keys are in nobody's range: their output is 0, their log-sum-exp that of the sink alone."""
    for b in tl.range(tl.program_id(0), batch, programs):
        if tl.load(length_ptr + b) <= 0:
            first = tl.zeros((), tl.int32)
            count = tokens
            if cu_ptr is not None:
                first = tl.load(cu_ptr + b)
                count = tl.load(cu_ptr + b + 1) - first
            own = tl.zeros((), tl.int64) + b
            if cu_ptr is not None:
                own = own * 0
            for row in tl.range(0, count * heads, 16):
                at = row + tl.arange(0, 16)
                there = at < count * heads
                token = (first + at // heads).to(tl.int64)
                head = at % heads
                for col in tl.range(0, DIM_V, 64):
                    cols = col + tl.arange(0, 64)
                    to = out_ptr + (own * stride_ob + token * stride_ot + head * stride_oh)[:, None] + cols[None, :]
                    zero = tl.zeros((16, 64), out_ptr.dtype.element_ty)
                    tl.store(to, zero, mask=there[:, None] & (cols < DIM_V)[None, :])
                if lse_ptr is not None:
                    value = tl.full((16,), float("-inf"), tl.float32)
                    if sinks_ptr is not None:
                        value = tl.load(sinks_ptr + head * stride_sh, mask=there, other=0.0).to(tl.float32)
                    tl.store(lse_ptr + own * stride_lb + head * stride_lh + token, value, mask=there)


@triton.jit
def careful(
    rows, q, m, factor, inside_m, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, start, end, first, length, count,
    left, right, by_row, softcap, slope, pos, token, head, tree_ptr, stride_treet, stride_treek,
    DIM_V: tl.constexpr, STORED: tl.constexpr, CHUNKS: tl.constexpr, PACKED: tl.constexpr, KIND: tl.constexpr,
    DTYPE: tl.constexpr, PAIRS: tl.constexpr, NATIVE: tl.constexpr, BY_TOKEN: tl.constexpr, SCALE_WORDS: tl.constexpr,
    PAGE: tl.constexpr, ONE_PAGE: tl.constexpr, K_PAGE: tl.constexpr, K_SLOT: tl.constexpr, V_PAGE: tl.constexpr,
    V_SLOT: tl.constexpr, A_PAGE: tl.constexpr, A_SLOT: tl.constexpr, A_HEAD: tl.constexpr, B_PAGE: tl.constexpr,
    B_SLOT: tl.constexpr, B_HEAD: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, TREE: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The accumulator where V holds NaN or Inf: these only for the rows that see them. Rare, so in small blocks; FP8 by
    bytes, whatever they are read by elsewhere."""
    m_safe = tl.where(m == float("-inf"), 0.0, m)
    for d in tl.range(0, DIM_V, CAREFUL):
        cols = d + tl.arange(0, CAREFUL)
        out = tl.zeros((pos.shape[0], CAREFUL), tl.float32)
        for n in tl.range(start, end, CAREFUL, num_stages=1):
            offs_n = n + tl.arange(0, CAREFUL)
            inside = (offs_n < end) & (offs_n >= first)
            page, slot = pages_of(table_ptr, n, (length - 1) // PAGE, CAREFUL, PAGE, ONE_PAGE)
            stored = load_chunks(k_ptr, page * K_PAGE + slot * K_SLOT, inside, STORED, CHUNKS)
            k = numbers(stored, k_scale_ptr, slot, inside, CHUNKS, PACKED, KIND, DTYPE, PAIRS, False, 0, False, NATIVE)
            s = scores(q, k, PRECISION) * by_row
            if BY_TOKEN:
                a_rows = page * A_PAGE + slot * A_SLOT
                s = s * token_scales(k_scale_ptr, a_rows, head, inside, A_HEAD, SCALE_WORDS)[None, :]
            s = logits(s, 1.0, softcap, slope, pos, offs_n, 0, SOFTCAP, ALIBI)
            seen = see(pos, offs_n, inside, token, length, count, left, right, tree_ptr, stride_treet, stride_treek,
                       LEFT, RIGHT, TREE)  # fmt: skip
            p = tl.exp2(tl.where(seen, s, float("-inf")) - m_safe[:, None])
            there = inside[:, None] & (cols < DIM_V)[None, :]
            at = page * V_PAGE + slot * V_SLOT
            if KIND == "plain":
                v = tl.load(v_ptr + at[:, None] + cols[None, :], mask=there, other=0.0)
            else:
                first_byte = v_ptr.to(tl.pointer_type(tl.uint8))
                at = at * (2 if PAIRS else 1)
                v = of_byte(
                    tl.load(first_byte + at[:, None] + cols[None, :], mask=there, other=0).to(tl.int16), KIND, DTYPE
                )
            if BY_TOKEN:
                b_rows = page * B_PAGE + slot * B_SLOT
                v_factor = token_scales(v_scale_ptr, b_rows, head, inside, B_HEAD, SCALE_WORDS)
                p = tl.where(seen, p * v_factor[None, :], 0.0)
            out = tl.dot(p.to(v.dtype), tl.where(v - v == 0, v, 0.0).to(v.dtype), out, input_precision=PRECISION)
            out += visible_poison(seen, v)
        value = (out * factor[:, None]).to(rows.dtype.element_ty)
        tl.store(rows[:, None] + cols[None, :], value, mask=inside_m[:, None] & (cols < DIM_V)[None, :])


@triton.jit
def finish(
    rows, acc, q, m, factor, inside_m, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, start, end, first, length,
    count, left, right, by_row, softcap, slope, pos, token, head, tree_ptr, stride_treet, stride_treek,
    DIM_V: tl.constexpr, STORED: tl.constexpr, CHUNKS: tl.constexpr, CHUNKS_V: tl.constexpr, PACKED: tl.constexpr,
    KIND: tl.constexpr, DTYPE: tl.constexpr, PAIRS: tl.constexpr, NATIVE: tl.constexpr, BY_TOKEN: tl.constexpr,
    SCALE_WORDS: tl.constexpr, PAGE: tl.constexpr, ONE_PAGE: tl.constexpr, K_PAGE: tl.constexpr, K_SLOT: tl.constexpr,
    V_PAGE: tl.constexpr, V_SLOT: tl.constexpr, A_PAGE: tl.constexpr, A_SLOT: tl.constexpr, A_HEAD: tl.constexpr,
    B_PAGE: tl.constexpr, B_SLOT: tl.constexpr, B_HEAD: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    TREE: tl.constexpr, MIXED: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes the accumulator. A hidden key has weight 0, but 0 * Inf is NaN: where rows do not all see the same keys
    and a NaN shows, it is made again with care."""
    if MIXED:
        if has_nan(acc):
            careful(rows, q, m, factor, inside_m, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, start, end, first,
                    length, count, left, right, by_row, softcap, slope, pos, token, head, tree_ptr, stride_treet,
                    stride_treek, DIM_V, STORED, CHUNKS, PACKED, KIND, DTYPE, PAIRS, NATIVE, BY_TOKEN, SCALE_WORDS,
                    PAGE, ONE_PAGE, K_PAGE, K_SLOT, V_PAGE, V_SLOT, A_PAGE, A_SLOT, A_HEAD, B_PAGE, B_SLOT, B_HEAD,
                    LEFT, RIGHT, TREE, SOFTCAP, ALIBI, PRECISION)  # fmt: skip
        else:
            store_chunks(rows, acc, factor, inside_m, DIM_V, CHUNKS_V, PACKED)
    else:
        store_chunks(rows, acc, factor, inside_m, DIM_V, CHUNKS_V, PACKED)
