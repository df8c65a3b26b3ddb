"""A stable counting sort of expert ids in two kernels: experts are few, so count them instead of comparing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import lesson  # before triton: it decides whether kernels are compiled or interpreted
import triton
import triton.language as tl
from plain import EXPERTS, FLOOR, TOKENS, K, Routed, logits, verify

ROWS = lesson.pick(128, 32)  # items of a program


@triton.jit
def count_kernel(ids_ptr, ranks_ptr, table_ptr, items, E: tl.constexpr, ROWS: tl.constexpr):
    """How many items of this program each expert has, and which of them each item is."""
    item = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.load(ids_ptr + item, mask=item < items, other=E)
    chosen = (expert[:, None] == tl.arange(0, E)[None, :]).to(tl.int32)  # [ROWS, E], one 1 a row
    before = tl.cumsum(chosen, 0) - chosen  # of the same expert, in the rows above
    tl.store(ranks_ptr + item, tl.sum(before * chosen, 1), mask=item < items)
    tl.store(table_ptr + tl.program_id(0) * E + tl.arange(0, E), tl.sum(chosen, 0))


@triton.jit
def place_kernel(ids_ptr, ranks_ptr, first_ptr, permutation_ptr, items, E: tl.constexpr, ROWS: tl.constexpr):
    """Puts every item where its program's items of its expert begin, plus its rank."""
    item = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = item < items
    expert = tl.load(ids_ptr + item, mask=here, other=0)
    first = tl.load(first_ptr + tl.program_id(0) * E + expert, mask=here, other=0)
    rank = tl.load(ranks_ptr + item, mask=here, other=0)
    tl.store(permutation_ptr + first + rank, item, mask=here)


def regroup(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    items = ids.numel()
    programs = triton.cdiv(items, ROWS)
    ranks, permutation = ids.new_empty(items, dtype=torch.int32), ids.new_empty(items, dtype=torch.int32)
    table = ids.new_empty(programs, EXPERTS, dtype=torch.int32)
    count_kernel[programs,](ids, ranks, table, items, E=EXPERTS, ROWS=ROWS)
    offsets = torch.nn.functional.pad(table.sum(0).cumsum(0), (1, 0))
    first = (table.cumsum(0) - table + offsets[:-1]).to(torch.int32)  # of each program's items of each expert
    place_kernel[programs,](ids, ranks, first, permutation, items, E=EXPERTS, ROWS=ROWS)
    return permutation, offsets


def choose(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scores, ids = x.softmax(-1).topk(K)
    return scores / scores.sum(-1, keepdim=True), ids.to(torch.int32)


def cases() -> Iterator[lesson.Case]:
    x = logits()
    weights, ids = choose(x)
    want = verify(Routed(weights, ids, *regroup(ids)), x)
    items, table = TOKENS * K, 4 * EXPERTS * triton.cdiv(TOKENS * K, ROWS)
    scores = 4 * TOKENS * EXPERTS
    sorting = 8 * items + table + 12 * items + table + 6 * table  # the two kernels, and torch's scans of the table
    chosen = 3 * scores + 12 * items + 4 * (items + TOKENS) + 4 * (2 * items + TOKENS) + 12 * items

    def truth(dtype: torch.dtype) -> torch.Tensor:
        return want.permutation.to(lesson.DEVICE, dtype)

    yield lesson.Case(
        "choose and regroup", lambda: regroup(choose(x)[1])[0], truth, flops=0, floor=FLOOR, moved=chosen + sorting,
        dtype="fp32", plain=torch.float32,
    )  # fmt: skip
    yield lesson.Case(
        "regroup alone", lambda: regroup(ids)[0], truth, flops=0, floor=8 * items, moved=sorting, dtype="fp32",
        plain=torch.float32,
    )  # fmt: skip


if __name__ == "__main__":
    lesson.main(__file__, cases)
