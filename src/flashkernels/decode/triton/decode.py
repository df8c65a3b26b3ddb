"""The portable decode: one Triton kernel that reads each key and value of a paged cache once, whatever its format.

Query heads that share a KV head, times tokens, are the rows of one matrix product. The head dimension is a sum of
powers of two, as in the attention forward. Work is dealt out by `schedule.py`; what is left in parts is joined by
`combine.py`.

Scales stay out of the products: of a key it multiplies the scores of its column. Of a value it multiplies the
weights, and the running maximum is that of their products: so those are at most 1 before they are rounded to 16 bits,
however small the scales. INT4 has a scale for each 32 columns: there it multiplies the numbers themselves.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from flashkernels.attention.triton.parts import LN2, LOG2E, accumulate, logits, rescale, scores
from flashkernels.decode.problem import DecodeProblem
from flashkernels.decode.tensors import Call, Run, empty_lse, empty_output
from flashkernels.decode.triton import tiles
from flashkernels.decode.triton.combine import Combine
from flashkernels.decode.triton.parts import (
    clear_empty,
    finish,
    first_chunks,
    load_chunks,
    load_queries,
    numbers,
    pages_of,
    roughly_log2,
    see,
    token_scales,
)
from flashkernels.decode.triton.schedule import find, range_start, shape_of, total_items
from flashkernels.formats import FORMATS
from flashkernels.hardware import GPUS, Gpu
from flashkernels.jit.launch import Launcher, compile_options
from flashkernels.kvcache.triton.append import as_bytes
from flashkernels.tiling.tile import LARGEST_PART

FAR = 1 << 30  # a window wider than any sequence; keeps positions inside 32 bits
SEARCH = (128, 1024)  # sequences looked at together


@triton.jit(do_not_specialize=["batch", "tokens", "heads", "group", "kv_heads", "left", "right", "programs"])
def decode_kernel(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, length_ptr, cu_ptr, tree_ptr, slopes_ptr, sinks_ptr,
    out_ptr, lse_ptr, part_ptr, state_ptr,
    stride_qb: tl.int64, stride_qt: tl.int64, stride_qh: tl.int64, stride_qd,
    stride_tb: tl.int64, stride_treeb: tl.int64, stride_treet: tl.int64, stride_treek: tl.int64,
    stride_slb: tl.int64, stride_slh: tl.int64, stride_sh: tl.int64,
    stride_ob: tl.int64, stride_ot: tl.int64, stride_oh: tl.int64, stride_lb: tl.int64, stride_lh: tl.int64,
    batch, tokens, heads, group, kv_heads, left, right, programs, scale, softcap,
    DIM: tl.constexpr, DIM_V: tl.constexpr, STORED: tl.constexpr, STORED_V: tl.constexpr, CHUNKS: tl.constexpr,
    CHUNKS_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GRAIN: tl.constexpr, STAGES: tl.constexpr,
    PAGE: tl.constexpr, ONE_PAGE: tl.constexpr, K_PAGE: tl.constexpr, K_SLOT: tl.constexpr, K_HEAD: tl.constexpr,
    V_PAGE: tl.constexpr, V_SLOT: tl.constexpr, V_HEAD: tl.constexpr, A_PAGE: tl.constexpr, A_SLOT: tl.constexpr,
    A_HEAD: tl.constexpr, B_PAGE: tl.constexpr, B_SLOT: tl.constexpr, B_HEAD: tl.constexpr, KIND: tl.constexpr,
    PAIRS: tl.constexpr, PACKED: tl.constexpr, SCALES: tl.constexpr, SCALE_WORDS: tl.constexpr, GROUPS: tl.constexpr,
    GROUPS_V: tl.constexpr, SHARED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, TREE: tl.constexpr,
    MIXED: tl.constexpr, SEVERAL: tl.constexpr, SOFTCAP: tl.constexpr, INVARIANT: tl.constexpr, NATIVE: tl.constexpr,
    EARLY: tl.constexpr, SEARCH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    RAGGED: tl.constexpr = cu_ptr is not None
    ALIBI: tl.constexpr = slopes_ptr is not None
    GROUPED: tl.constexpr = KIND == "int4" and SCALES == "token"
    BY_TOKEN: tl.constexpr = SCALES == "token" and not GROUPED
    WIDE: tl.constexpr = q_ptr.dtype.element_ty == tl.float32
    # Quantised numbers are exact in fp16, and get there fast.
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty if KIND == "plain" or WIDE else tl.float16
    NORMED: tl.constexpr = q_ptr.dtype.element_ty != DTYPE

    pid = tl.program_id(0)
    total = total_items(batch, length_ptr, cu_ptr, tokens, group, kv_heads, left, BLOCK_M, BLOCK_N, GRAIN, LEFT, SEARCH)
    working = tl.maximum(tl.minimum(programs, total), 1)
    item = range_start(tl.minimum(pid, working), total, working)
    begin = item
    stop = range_start(tl.minimum(pid + 1, working), total, working)
    b, base = find(
        item, batch, length_ptr, cu_ptr, tokens, group, kv_heads, left, BLOCK_M, BLOCK_N, GRAIN, LEFT, SEARCH
    )
    length, count, lowest, blocks, items = shape_of(
        b, b < batch, length_ptr, cu_ptr, tokens, group, left, BLOCK_M, BLOCK_N, GRAIN, LEFT
    )  # fmt: skip

    while item < stop:
        unit = (item - base) // items
        i0 = item - base - unit * items
        i1 = tl.minimum(items, i0 + stop - item)
        if INVARIANT:
            i1 = i0 + 1
        head_k = (unit // blocks).to(tl.int64)
        row0 = unit % blocks * BLOCK_M

        # rows are (token, query head of this KV head)
        row = row0 + tl.arange(0, BLOCK_M)
        inside_m = row < count * group
        token = row // group
        head = head_k * group + row % group
        pos = length - count + token
        wide_b = b.to(tl.int64)
        first_row = tl.zeros((), tl.int64)
        if RAGGED:
            first_row = tl.load(cu_ptr + b).to(tl.int64)
            wide_b = wide_b * 0
        q_rows = q_ptr + wide_b * stride_qb + (first_row + token) * stride_qt + head * stride_qh
        q = load_queries(q_rows, inside_m, stride_qd, DIM, CHUNKS, PACKED)
        factor = tl.full((BLOCK_M,), 1.0, tl.float32) * scale
        if NORMED:  # bf16 as fp16: scaled by a power of two for each row, which loses nothing
            most = tl.zeros((BLOCK_M,), tl.float32)
            for i in tl.static_range(len(q)):
                most = tl.maximum(most, tl.max(tl.abs(q[i].to(tl.float32)), 1))
            power = tl.exp2(tl.floor(tl.log2(tl.maximum(most, 1e-30))))
            turned = ()
            for i in tl.static_range(len(q)):
                turned = turned + ((q[i].to(tl.float32) / power[:, None]).to(DTYPE),)
            q = turned
            factor = factor * power
        if SCALES == "head":
            factor = factor * tl.load(k_scale_ptr + head_k).to(tl.float32)
        by_row = factor[:, None] if SCALES != "" or NORMED else scale
        slope = 0.0
        if ALIBI:
            own_slopes = slopes_ptr + b.to(tl.int64) * stride_slb + head * stride_slh
            slope = (tl.load(own_slopes, mask=inside_m, other=0.0).to(tl.float32) * LOG2E)[:, None]

        # keys of this part, less those that no row of the block sees
        start = lowest + i0 * GRAIN
        end = tl.minimum(lowest + i1 * GRAIN, length)
        first = tl.zeros((), tl.int32)
        if RIGHT:
            last_token = tl.minimum(count - 1, (row0 + BLOCK_M - 1) // group)
            end = tl.minimum(end, length - count + last_token + right + 1)
        if LEFT:
            first = length - count + row0 // group - left
            start = start + tl.maximum(first - start, 0) // BLOCK_N * BLOCK_N

        m = tl.full((BLOCK_M,), float("-inf"), tl.float32)  # running maximum, log2 units
        weight = tl.zeros((BLOCK_M,), tl.float32)  # running sum
        acc = ()
        for i in tl.static_range(PACKED * len(CHUNKS_V)):
            acc = acc + (tl.zeros((BLOCK_M, tl.constexpr(CHUNKS_V[i % len(CHUNKS_V)])), tl.float32),)
        k_head = k_ptr + head_k * K_HEAD
        v_head = v_ptr + head_k * V_HEAD
        table = table_ptr + b.to(tl.int64) * stride_tb
        tree = tree_ptr
        if TREE:
            tree = tree_ptr + b.to(tl.int64) * stride_treeb
        k_scale = k_scale_ptr
        v_scale = v_scale_ptr
        if SCALES == "token":
            k_scale = k_scale_ptr + head_k * A_HEAD
            v_scale = v_scale_ptr + head_k * B_HEAD

        last = (length - 1) // PAGE
        page, slot = pages_of(table, start, last, BLOCK_N, PAGE, ONE_PAGE)
        for n in tl.range(start, end, BLOCK_N, num_stages=STAGES):
            offs_n = n + tl.arange(0, BLOCK_N)
            inside = (offs_n < end) & (offs_n >= first)
            k_rows = page * K_PAGE + slot * K_SLOT
            v_rows = page * V_PAGE + slot * V_SLOT
            a_rows = page * A_PAGE + slot * A_SLOT
            b_rows = page * B_PAGE + slot * B_SLOT
            # Pages are looked up a step ahead: a load before a load would take half of the pipeline's stages.
            page, slot = pages_of(table, n + BLOCK_N, last, BLOCK_N, PAGE, ONE_PAGE)
            # What is hidden in K makes scores that are never used. In V it must be finite, for its weight of 0 to hide
            # it; integers are.
            asked = None if KIND == "int8" or KIND == "int4" else inside
            stored = load_chunks(k_head, k_rows, asked if SHARED else None, STORED, CHUNKS)
            k = numbers(stored, k_scale, a_rows, inside, CHUNKS, PACKED, KIND, DTYPE, PAIRS, GROUPED, GROUPS,
                        SEVERAL and SHARED, NATIVE)  # fmt: skip
            s = scores(q, k, PRECISION) * by_row
            if BY_TOKEN:
                s = s * token_scales(k_scale_ptr, a_rows, head_k, inside, A_HEAD, SCALE_WORDS)[None, :]
            s = logits(s, 1.0, softcap, slope, pos, offs_n, 0, SOFTCAP, ALIBI)
            seen = see(pos, offs_n, inside, token, length, count, left, right, tree, stride_treet, stride_treek,
                       LEFT, RIGHT, TREE)  # fmt: skip
            if GROUPED and SEVERAL:  # a broken row of INT4 has NaN in each of its scales
                broken = tl.load(k_scale + a_rows, mask=inside, other=0.0) + tl.load(
                    v_scale + b_rows, mask=inside, other=0.0
                )
                s = tl.where((broken == broken)[None, :], s, float("nan"))
            s = tl.where(seen, s, float("-inf"))
            top = s
            if BY_TOKEN:
                v_factor = token_scales(v_scale_ptr, b_rows, head_k, inside, B_HEAD, SCALE_WORDS)
                top = s + roughly_log2(v_factor)[None, :]
            m_new = tl.maximum(m, tl.max(top, 1))
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row that has seen no key yet
            alpha = tl.exp2(m - m_safe)
            p = tl.exp2(s - m_safe[:, None])
            weight = weight * alpha + tl.sum(p, 1)
            if BY_TOKEN:
                p = p * v_factor[None, :]
                if SEVERAL:  # the scale of a key that some rows do not see may be NaN
                    p = tl.where(seen, p, 0.0)
            m = m_new
            if SHARED:
                v = first_chunks(k, len(CHUNKS), len(CHUNKS_V), PACKED)
            else:
                v_stored = load_chunks(v_head, v_rows, asked, STORED_V, CHUNKS_V)
                v = numbers(v_stored, v_scale, b_rows, inside, CHUNKS_V, PACKED, KIND, DTYPE, PAIRS, GROUPED, GROUPS_V,
                            SEVERAL, NATIVE)  # fmt: skip
            acc = accumulate(rescale(acc, alpha), p, v, PRECISION)

        whole = (i0 == 0) & (i1 == items)
        value = tl.full((BLOCK_M,), 1.0, tl.float32)
        if SCALES == "head":
            value = value * tl.load(v_scale_ptr + head_k).to(tl.float32)
        if whole:
            top = m
            if sinks_ptr is not None:  # one more logit per head, without a value
                sink = tl.load(sinks_ptr + head * stride_sh, mask=inside_m, other=0.0).to(tl.float32) * LOG2E
                top = tl.maximum(m, sink)
                safe = tl.where(top == float("-inf"), 0.0, top)
                alpha = tl.exp2(m - safe)
                weight = weight * alpha + tl.exp2(sink - safe)
                value = value * alpha
            out_rows = out_ptr + wide_b * stride_ob + (first_row + token) * stride_ot + head * stride_oh
            if lse_ptr is not None:
                lse = tl.where(weight == 0, float("-inf"), (top + tl.log2(weight)) * LN2)
                tl.store(lse_ptr + wide_b * stride_lb + head * stride_lh + first_row + token, lse, mask=inside_m)
            value = value / tl.where(weight == 0, 1.0, weight)
            finish(out_rows, acc, q, m, value, inside_m, k_head, v_head, k_scale_ptr, v_scale_ptr, table, start, end,
                   first, length, count, left, right, by_row, softcap, slope, pos, token, head_k, tree, stride_treet,
                   stride_treek, DIM_V, STORED, CHUNKS, CHUNKS_V, PACKED, KIND, DTYPE, PAIRS, NATIVE, BY_TOKEN,
                   SCALE_WORDS, PAGE, ONE_PAGE, K_PAGE, K_SLOT, V_PAGE, V_SLOT, A_PAGE, A_SLOT, A_HEAD, B_PAGE, B_SLOT,
                   B_HEAD, LEFT, RIGHT, TREE, MIXED, SOFTCAP, ALIBI, PRECISION)  # fmt: skip
        else:
            place = 2 * pid + (item > begin).to(tl.int32)
            if INVARIANT:
                place = item
            at = place.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
            tl.store(state_ptr + 2 * at, m, mask=inside_m)
            tl.store(state_ptr + 2 * at + 1, weight, mask=inside_m)
            part_rows = part_ptr + at * DIM_V
            finish(part_rows, acc, q, m, value, inside_m, k_head, v_head, k_scale_ptr, v_scale_ptr, table, start, end,
                   first, length, count, left, right, by_row, softcap, slope, pos, token, head_k, tree, stride_treet,
                   stride_treek, DIM_V, STORED, CHUNKS, CHUNKS_V, PACKED, KIND, DTYPE, PAIRS, NATIVE, BY_TOKEN,
                   SCALE_WORDS, PAGE, ONE_PAGE, K_PAGE, K_SLOT, V_PAGE, V_SLOT, A_PAGE, A_SLOT, A_HEAD, B_PAGE, B_SLOT,
                   B_HEAD, LEFT, RIGHT, TREE, MIXED, SOFTCAP, ALIBI, PRECISION)  # fmt: skip

        item += i1 - i0
        while (item < stop) & (item - base >= items * blocks * kv_heads):  # on to the next sequence that has keys
            base += items * blocks * kv_heads
            b += 1
            length, count, lowest, blocks, items = shape_of(
                b, b < batch, length_ptr, cu_ptr, tokens, group, left, BLOCK_M, BLOCK_N, GRAIN, LEFT
            )  # fmt: skip

    if EARLY:
        gdc_launch_dependents()  # the programs that join parts may come; they wait for the end of this grid
    clear_empty(out_ptr, lse_ptr, sinks_ptr, length_ptr, cu_ptr, batch, tokens, heads, programs,
                stride_ob, stride_ot, stride_oh, stride_lb, stride_lh, stride_sh, DIM_V)  # fmt: skip


def plan(problem: DecodeProblem, gpu: Gpu | None, call: Call) -> Run:
    """Chooses the tile and lays out all of a launch that the signature decides; returns what is left to run."""
    q, cache = _dense(call.q), call.cache
    tile = tiles.choose(problem, gpu or GPUS["h200"])  # the interpreter takes the tiles of a real GPU
    programs = tiles.programs(tile, gpu)
    k_steps, v_steps = strides_of(cache.k), strides_of(cache.v)
    fixed = constants(
        problem, tile, k_steps, v_steps, strides_of(cache.k_scale), strides_of(cache.v_scale), gpu,
        even=begins_even(cache.k) and begins_even(cache.v),
        words=not any(x is not None and x.data_ptr() % 4 for x in (cache.k_scale, cache.v_scale)),
    )  # fmt: skip
    pairs = fixed["PAIRS"]
    device = q.device.index
    launcher = Launcher(decode_kernel, fixed, compile_options(tile.warps, tile.stages, 0), device)
    combine = Combine(problem, tile, fixed, programs, device)

    out = empty_output(q, problem.head_dim_v)
    lse_strides = (0, q.shape[0]) if problem.ragged else (problem.heads * problem.tokens, problem.tokens)
    left, right = problem.band
    output_strides = (*_three(out), *lse_strides)
    tree, slopes, sinks = call.tree_mask, call.alibi_slopes, call.sinks
    fixed_numbers = (
        *_three(q), q.stride(-1), cache.block_table.stride(0),
        *((0, 0, 0) if tree is None else (0, *tree.stride())[-3:]),
        *((0, 0) if slopes is None else (0, *slopes.stride())[-2:]), 0 if sinks is None else sinks.stride(0),
        *output_strides, problem.batch, problem.tokens, problem.heads, problem.group, problem.kv_heads,
        *(min(max(side, 0), FAR) for side in (left, right)), programs,
    )  # fmt: skip
    combine_numbers = (
        *output_strides, 0 if sinks is None else sinks.stride(0), problem.batch, problem.tokens, problem.group,
        problem.kv_heads, min(max(left, 0), FAR), programs,
    )  # fmt: skip
    empty = problem.batch == 0 or problem.total == 0

    def launch(call: Call, softmax_scale: float, softcap: float) -> tuple[Tensor, Tensor | None]:
        q, cache, tree, slopes, sinks, cu = call
        q = _dense(q)
        out = empty_output(q, problem.head_dim_v)
        lse = empty_lse(q) if problem.need_lse else None
        if empty:
            return out, lse
        part, state = combine.workspace(q)
        launcher(
            programs,
            (q, elements(cache.k, pairs), elements(cache.v, pairs), cache.k_scale, cache.v_scale, cache.block_table,
             cache.lengths, cu,
             tree, slopes, sinks, out, lse, part, state),
            (*fixed_numbers, softmax_scale * LOG2E.value, softcap * LOG2E.value),
        )  # fmt: skip
        combine((part, state, cache.lengths, cu, sinks, out, lse), combine_numbers)
        return out, lse

    def run(call: Call, softmax_scale: float, softcap: float) -> tuple[Tensor, Tensor | None]:
        if device is None or device == torch.cuda.current_device():
            return launch(call, softmax_scale, softcap)
        with torch.cuda.device(device):
            return launch(call, softmax_scale, softcap)

    return run


def constants(
    problem: DecodeProblem, tile: tiles.DecodeTile, k: tuple[int, ...], v: tuple[int, ...], k_scale: tuple[int, ...],
    v_scale: tuple[int, ...], gpu: Gpu | None, *, even: bool = True, words: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """The kernel's compile-time arguments, in its order. The strides of pages are among them: what is known of them
    makes loads wide, and one multiplication serves all tensors of equal strides.

    `even`: pages begin where words of 16 bits may; `words`: scales begin where words of 32 bits may.
    """
    form = FORMATS[problem.format]
    packed = tiles.packed(problem, k, v) if even else form.packed
    pairs = packed > form.packed
    most = tiles.CHAIN if problem.dtype == "fp32" and not form.quantised else LARGEST_PART
    cut = tiles.chunks(problem.head_dim, packed, most=most)
    # where they may be those of K, V has the same chunks
    widest = most if problem.shared else LARGEST_PART
    cut_v = tiles.chunks(problem.head_dim_v, packed, tiles.narrowest(tile.block_m), widest)
    left, right = problem.band
    right_hides = right >= 0 and (problem.ragged or problem.tokens > 1)  # the newest token sees all keys
    several = problem.ragged or problem.tokens > 1 or problem.tree  # rows that do not all see the same keys
    chunk = max(tiles.CHUNK, tile.block_n)
    steps = [step // (2 if pairs else 1) for step in (*k, *v)]
    return {
        "DIM": problem.head_dim, "DIM_V": problem.head_dim_v, "STORED": problem.head_dim // packed,
        "STORED_V": problem.head_dim_v // packed, "CHUNKS": cut, "CHUNKS_V": cut_v, "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n, "GRAIN": chunk if problem.batch_invariant else tile.block_n, "STAGES": tile.stages,
        "PAGE": problem.page_size, "ONE_PAGE": problem.one_page, "K_PAGE": steps[0], "K_SLOT": steps[1],
        "K_HEAD": steps[2], "V_PAGE": steps[3], "V_SLOT": steps[4], "V_HEAD": steps[5], "A_PAGE": k_scale[0],
        "A_SLOT": k_scale[1], "A_HEAD": k_scale[2], "B_PAGE": v_scale[0], "B_SLOT": v_scale[1], "B_HEAD": v_scale[2],
        "KIND": form.name if form.quantised else "plain", "PAIRS": pairs, "PACKED": packed, "SCALES": problem.scales,
        "SCALE_WORDS": words and k_scale[2] == v_scale[2] == 1 and not any(n % 2 for n in (*k_scale[:2], *v_scale[:2])),
        "GROUPS": form.groups(problem.head_dim), "GROUPS_V": form.groups(problem.head_dim_v),
        # one read serves both where the chunks of V are the first ones of K
        "SHARED": problem.shared and cut[: len(cut_v)] == cut_v, "LEFT": left >= 0, "RIGHT": right_hides,
        "TREE": problem.tree,
        # integers are finite, and their scales do not reach those who do not see them
        "MIXED": several and form.name not in ("int8", "int4") and (left >= 0 or right_hides or problem.tree),
        "SEVERAL": several, "SOFTCAP": problem.softcap, "INVARIANT": problem.batch_invariant,
        "NATIVE": gpu is not None, "EARLY": gpu is not None and gpu.capability[0] >= 9,
        "SEARCH": next(n for n in SEARCH if n >= problem.batch or n == SEARCH[-1]), "PRECISION": "ieee",
    }  # fmt: skip


def strides_of(x: Tensor | None) -> tuple[int, ...]:
    """(page, slot, head) strides of pages or of their scales; 0 of scales that belong to heads."""
    return (0, 0, 0) if x is None or x.dim() == 1 else x.stride()[:3]


def begins_even(pages: Tensor) -> bool:
    """Whether its first byte is one at which a word of 16 bits may begin, and torch will view it so."""
    return pages.data_ptr() % 2 == 0 and pages.storage_offset() * pages.element_size() % 2 == 0


def elements(pages: Tensor, pairs: bool) -> Tensor:
    """Pages as the kernel reads them: quantised ones in words, or in bytes where those do not come in pairs."""
    return pages.view(torch.int16) if pairs else as_bytes(pages)


def _three(x: Tensor) -> tuple[int, ...]:
    """(batch, token, head) strides; a ragged tensor has no batch."""
    return x.stride()[:3] if x.dim() == 4 else (0, *x.stride()[:2])


def _dense(q: Tensor) -> Tensor:
    """Queries with a contiguous last dimension; they are few."""
    return q if q.stride(-1) == 1 or q.shape[-1] == 1 else q.contiguous()
