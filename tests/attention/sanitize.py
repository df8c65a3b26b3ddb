"""Small calls that between them take every branch of a GPU kernel, Triton's or the Hopper one, for compute-sanitizer.

    compute-sanitizer --tool memcheck --error-exitcode 1 python -m tests.attention.sanitize
    compute-sanitizer --tool racecheck --error-exitcode 1 python -m tests.attention.sanitize hopper
    compute-sanitizer --tool racecheck --error-exitcode 1 python -m tests.attention.sanitize hopper gradients 2/4

The last has a quarter of the calls: racecheck takes up to a minute for one, and processes may share a set.
Each tensor is an allocation of its own (PYTORCH_NO_CUDA_MEMORY_CACHING=1), so that a read past its end
is out of bounds and not merely inside the allocator's block.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import flashkernels as fk
import flashkernels.attention.api as api
from flashkernels.attention.hopper import backward_tiles, tiles
from flashkernels.attention.hopper.source import HopperTile
from flashkernels.attention.hopper.tiles import by_dimension, four_warpgroups

from . import fp8, gradients, oracle
from .cases import EVERYTHING, Shape, keywords, paged, qkv, ragged
from .gpu import misaligned

CASES = (
    # odd lengths and head dimensions, so that every tile has an end
    ("plain", Shape(b=2, sq=130, sk=131, h=2, hkv=1, d=64), torch.bfloat16),
    ("causal", Shape(b=1, sq=77, sk=201, h=3, hkv=1, d=72), torch.bfloat16),
    ("causal", Shape(b=1, sq=201, sk=77, h=2, hkv=2, d=40), torch.float16),
    ("window", Shape(b=1, sq=150, sk=150, h=2, hkv=1, d=96, dv=33), torch.bfloat16),
    ("left+softcap", Shape(b=1, sq=65, sk=200, h=2, hkv=1, d=7), torch.bfloat16),
    ("alibi2d+sinks", Shape(b=2, sq=65, sk=129, h=2, hkv=1, d=128), torch.bfloat16),
    ("boolmask", Shape(b=2, sq=67, sk=131, h=2, hkv=1, d=112), torch.bfloat16),
    ("floatmask+causal", Shape(b=2, sq=67, sk=131, h=2, hkv=1, d=48), torch.float32),
    ("plain", Shape(b=1, sq=33, sk=97, h=1, hkv=1, d=255), torch.bfloat16),
    ("causal", Shape(b=1, sq=33, sk=97, h=1, hkv=1, d=320), torch.bfloat16),
    ("causal", Shape(b=1, sq=33, sk=97, h=1, hkv=1, d=512), torch.float16),
    ("+".join((*EVERYTHING, "boolmask")), Shape(b=1, sq=90, sk=75, h=3, hkv=1, d=80), torch.bfloat16),
    ("+".join((*EVERYTHING, "floatmask")), Shape(b=1, sq=1, sk=300, h=4, hkv=2, d=160), torch.bfloat16),
)


# Of the Hopper kernel: every flag, few and many warpgroups, packed heads, keys in parts, clusters, all chunk widths.
HOPPER = (
    ("plain", Shape(b=2, sq=130, sk=131, h=2, hkv=2, d=64), torch.bfloat16),
    ("causal", Shape(b=2, sq=77, sk=201, h=3, hkv=1, d=72), torch.bfloat16),
    ("window", Shape(b=1, sq=150, sk=150, h=2, hkv=1, d=96, dv=48), torch.bfloat16),
    ("left+softcap", Shape(b=1, sq=65, sk=200, h=2, hkv=1, d=16), torch.bfloat16),
    ("right+scale", Shape(b=1, sq=65, sk=200, h=2, hkv=1, d=112), torch.bfloat16),
    ("alibi2d+sinks", Shape(b=2, sq=65, sk=129, h=2, hkv=1, d=128), torch.bfloat16),
    ("plain", Shape(b=1, sq=33, sk=97, h=1, hkv=1, d=256), torch.bfloat16),
    ("causal", Shape(b=1, sq=33, sk=97, h=1, hkv=1, d=24, dv=256), torch.float16),
    ("causal", Shape(b=1, sq=1, sk=3000, h=8, hkv=1, d=128), torch.bfloat16),  # packed, in parts
    ("causal+sinks", Shape(b=1, sq=100, sk=2500, h=2, hkv=2, d=64), torch.bfloat16),
    ("causal", Shape(b=1, sq=5, sk=300, h=14, hkv=2, d=80), torch.bfloat16),  # 7 heads: a row of 64 stays empty
    ("+".join(EVERYTHING), Shape(b=1, sq=90, sk=75, h=3, hkv=1, d=80), torch.bfloat16),
    ("+".join(EVERYTHING), Shape(b=1, sq=70, sk=900, h=4, hkv=2, d=160), torch.float16),
    ("causal", Shape(b=1, sq=33, sk=97, h=1, hkv=1, d=320), torch.bfloat16),  # two products for the scores
    ("plain", Shape(b=1, sq=130, sk=97, h=1, hkv=1, d=512), torch.float16),  # and clusters
)
# More tiles than blocks, so that a block takes several, and the slots through which it is handed them come round again.
ROUNDS = (
    ("plain", Shape(b=12, sq=130, sk=131, h=24, hkv=24, d=128), torch.bfloat16),  # clusters
    ("causal", Shape(b=4, sq=450, sk=300, h=40, hkv=40, d=40), torch.float16),  # three warpgroups, rows without keys
    ("causal", Shape(b=4, sq=500, sk=300, h=40, hkv=40, d=248), torch.bfloat16),  # both
)
# What calls of this size would not choose, with one tile a block.
FORCED = (
    ("causal", Shape(b=1, sq=450, sk=300, h=2, hkv=2, d=40), by_dimension(40, 40, True)),  # three warpgroups
    ("plain", Shape(b=1, sq=430, sk=300, h=2, hkv=2, d=128), by_dimension(128, 128, False)),  # clusters
    ("plain", Shape(b=1, sq=430, sk=300, h=2, hkv=2, d=64), by_dimension(64, 64, False)),  # late steps
    ("causal", Shape(b=1, sq=450, sk=500, h=2, hkv=2, d=104), by_dimension(104, 104, True)),
    ("plain", Shape(b=1, sq=430, sk=300, h=2, hkv=2, d=64), four_warpgroups(64, 64, False)),  # in turns
    ("causal", Shape(b=1, sq=450, sk=500, h=2, hkv=2, d=40), four_warpgroups(40, 40, True)),
    *(  # clusters under a mask: warpgroups pass over one key tile, over two, and over more than the ring has stages
        ("causal", Shape(b=1, sq=700, sk=500, h=2, hkv=2, d=dim), by_dimension(dim, dim, True, clusters=True))
        for dim in (128, 64, 256)
    ),
)
# Of the gradients: every kind of tile, with and without a mask; the last column: whether they are deterministic.
GRADIENTS = (
    ("plain", Shape(b=2, sq=230, sk=131, h=2, hkv=2, d=64), False),  # tall
    ("causal", Shape(b=1, sq=200, sk=130, h=4, hkv=2, d=64), False),  # tall, in turns
    ("causal", Shape(b=1, sq=200, sk=130, h=4, hkv=2, d=56), False),  # K and V in registers
    ("causal+sinks", Shape(b=1, sq=130, sk=200, h=3, hkv=1, d=72), False),
    ("plain", Shape(b=1, sq=130, sk=200, h=2, hkv=1, d=96), False),
    ("causal", Shape(b=2, sq=161, sk=200, h=4, hkv=2, d=128), False),  # tall
    ("window", Shape(b=1, sq=230, sk=230, h=2, hkv=1, d=112), False),  # tall, columns past the head's end
    ("left+alibi", Shape(b=1, sq=130, sk=130, h=2, hkv=1, d=128), False),  # halves of dQ
    ("causal", Shape(b=1, sq=130, sk=200, h=2, hkv=1, d=72), True),
    ("softcap", Shape(b=1, sq=130, sk=130, h=2, hkv=1, d=72), False),  # pairs
    ("causal", Shape(b=1, sq=100, sk=130, h=2, hkv=1, d=160), False),
    ("causal", Shape(b=1, sq=100, sk=200, h=2, hkv=1, d=256), False),
    ("plain", Shape(b=1, sq=230, sk=2048, h=2, hkv=1, d=64), False),  # neighbours share their loads; tall
    ("plain", Shape(b=1, sq=230, sk=2048, h=2, hkv=1, d=96), False),  # likewise, in turns
    ("plain", Shape(b=1, sq=150, sk=200, h=2, hkv=1, d=512), False),  # wide
    ("causal+alibi", Shape(b=1, sq=150, sk=200, h=2, hkv=1, d=264, dv=320), False),
)
GRADIENT_ROUNDS = (("plain", Shape(b=2, sq=80, sk=260, h=60, hkv=60, d=64), False),)  # 360 tiles: several a block
RAGGED = ([50, 0, 1, 133], [70, 9, 0, 133])
COPIED = (Shape(b=2, sq=130, sk=131, h=2, hkv=1, d=70, dv=33), Shape(b=1, sq=77, sk=201, h=3, hkv=1, d=72))
POISONED = (Shape(b=1, sq=150, sk=150, h=2, hkv=1, d=72), Shape(b=1, sq=20, sk=2500, h=2, hkv=1, d=64))
EIGHT_BITS = (
    ("causal+sinks", Shape(b=1, sq=150, sk=201, h=2, hkv=1, d=80, dv=48)),
    ("alibi2d", Shape(b=1, sq=3, sk=2500, h=8, hkv=1, d=128)),
)


# One call of the set, its check included.
Call = Callable[[], None]


def done(what: object, features: str, dtype: torch.dtype = torch.bfloat16) -> None:
    print(f"ok  {what}  {features}  {str(dtype).removeprefix('torch.')}", flush=True)


def dense(impl: str, features: str, shape: Shape, dtype: torch.dtype) -> None:
    inputs, named = qkv(shape, dtype, device="cuda"), keywords(features, shape, "cuda")
    out, lse = fk.attention(*inputs, return_lse=True, impl=impl, **named)
    torch.cuda.synchronize()
    oracle.assert_correct(out, lse, *inputs, **named)
    done(shape, features, dtype)


def forced(features: str, shape: Shape, tile: HopperTile) -> None:
    inputs, named = qkv(shape, torch.bfloat16, device="cuda"), keywords(features, shape, "cuda")
    with fk.use_tile(tile=tile):
        out, lse = fk.attention(*inputs, return_lse=True, impl="hopper", **named)
    torch.cuda.synchronize()
    oracle.assert_correct(out, lse, *inputs, **named)
    done(shape, f"{features} {tile.name}")


def varlen(impl: str, dim: int) -> None:
    shape = Shape(b=4, h=3, hkv=1, d=dim)
    batch = ragged(*RAGGED, shape, torch.bfloat16, device="cuda")
    named = keywords(EVERYTHING, shape, "cuda")
    out, lse = fk.attention_varlen(*batch.args, return_lse=True, impl=impl, **named)
    torch.cuda.synchronize()
    oracle.assert_correct_varlen(out, lse, *batch.tensors, **named)
    done(f"varlen d{dim}", "+".join(EVERYTHING))


def copies(shape: Shape) -> None:
    """Rows that are no multiple of 16 bytes, copied to such ones and back; and one element past such a place."""
    q, k, v = map(misaligned, qkv(shape, torch.bfloat16, device="cuda"))
    out, lse = fk.attention(q, k, v, causal=True, return_lse=True, impl="aligned")
    torch.cuda.synchronize()
    oracle.assert_correct(out, lse, q, k, v, causal=True)
    done(shape, "copied")


def pages(features: str) -> None:
    shape = Shape(b=4, h=3, hkv=1, d=72)
    batch = ragged(*RAGGED, shape, torch.bfloat16, device="cuda")
    cache, named = paged(batch, 64, spare=0), keywords(features, shape, "cuda")
    args = (batch.q, cache.k, cache.v, *batch.args[3:])
    out, lse = fk.attention_varlen(*args, block_table=cache.table, return_lse=True, impl="hopper", **named)
    torch.cuda.synchronize()
    oracle.assert_correct_varlen(out, lse, *batch.tensors, **named)
    done("paged d72", features)


def poison(shape: Shape) -> None:
    """NaN behind a mask: the rows are made again by plain loads."""
    q, k, v = qkv(shape, torch.bfloat16, device="cuda")
    v[:, -10:] = float("nan")
    out, lse = fk.attention(q, k, v, causal=True, return_lse=True, impl="hopper")
    torch.cuda.synchronize()
    oracle.assert_correct(out, lse, q, k, v, causal=True)
    done(shape, "NaN in v")


def negative() -> None:
    shape = Shape(b=1, sq=70, sk=140, h=2, hkv=1, d=64)
    inputs = qkv(shape, torch.bfloat16, device="cuda")
    out, lse = fk.attention(*inputs, softmax_scale=-0.3, return_lse=True, impl="hopper")
    torch.cuda.synchronize()
    oracle.assert_correct(out, lse, *inputs, softmax_scale=-0.3)
    done(shape, "scale below 0")


def eight_bits(features: str, shape: Shape) -> None:
    """FP8: V is transposed first, with ends of keys and columns; scales for each block; packed heads, keys in parts."""
    fp8.check(fp8.quantised(shape, "cuda", per_block=True), "hopper", **keywords(features, shape, "cuda"))
    torch.cuda.synchronize()
    done(shape, features, fp8.E4M3)


def gradient(impl: str, features: str, shape: Shape, deterministic: bool) -> None:
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    gradients.check(*qkv(shape, torch.bfloat16, device="cuda"), impl=impl, **keywords(features, shape, "cuda"))
    torch.use_deterministic_algorithms(False)
    done(shape, f"gradients {features}")


def ragged_gradient(impl: str, dim: int) -> None:
    shape = Shape(b=4, h=3, hkv=1, d=dim)
    batch = ragged(*RAGGED, shape, torch.bfloat16, device="cuda")
    gradients.check_varlen(batch, impl=impl, **keywords("causal", shape, "cuda"))
    done(f"varlen d{dim}", "gradients causal")


def calls(impl: str, what: str) -> Iterator[Call]:
    """All calls of a set. The large ones are neighbours, so that parts share them."""
    if what == "gradients":
        yield from (partial(gradient, impl, *case) for case in (*GRADIENTS, *GRADIENT_ROUNDS))
        yield from (partial(ragged_gradient, impl, dim) for dim in (72, 120))
        return
    yield from (partial(dense, impl, *case) for case in (HOPPER if impl == "hopper" else CASES))
    yield from (partial(varlen, impl, dim) for dim in (64, 72))
    yield from (partial(copies, shape) for shape in COPIED)
    if impl == "hopper":
        yield from (partial(pages, features) for features in ("plain", "causal", "+".join(EVERYTHING)))
        yield from (partial(poison, shape) for shape in POISONED)
        yield negative
        yield from (partial(eight_bits, *case) for case in EIGHT_BITS)
        yield from (partial(forced, *case) for case in FORCED)
        yield from (partial(dense, impl, *case) for case in ROUNDS)


def part_of(impl: str, what: str, part: str) -> list[Call]:
    """Those of a part, such as 2/3, the second of three: as many processes share a set."""
    number, parts = map(int, part.split("/"))
    if not 1 <= number <= parts:
        raise ValueError(f"part={part!r} is not one of 1/{parts} to {parts}/{parts}")
    return list(calls(impl, what))[number - 1 :: parts]


def let_every_lane_arrive() -> None:
    """At the barriers. Where one does so for its warp, and ptxas knows the warp to be together, no instruction tells
    racecheck that the others have come so far."""
    backward, forward = backward_tiles.choose, tiles.choose
    backward_tiles.choose = lambda problem: replace(backward(problem), every_lane=True)

    def chosen(*of: Any) -> tiles.Choice:
        choice = forward(*of)
        return replace(choice, variant=replace(choice.variant, every_lane=True))

    tiles.choose = chosen


def expect_from_the_host() -> None:
    """The oracle computes on the CPU: racecheck finds hazards in cuBLAS, and takes its time for each of its kernels."""

    def hosted(function: Callable[..., oracle.Answer]) -> Callable[..., oracle.Answer]:
        def answer(q: Tensor, *tensors: Tensor, **features: Any) -> oracle.Answer:
            there = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in features.items()}
            made = function(q.cpu(), *(x.cpu() for x in tensors), **there)
            return oracle.Answer(*(x.to(q.device) for x in made))

        return answer

    for name in ("attention", "attention_varlen", "naive", "naive_varlen"):
        setattr(oracle, name, hosted(getattr(oracle, name)))


def main(impl: str = "triton", what: str = "outputs", part: str = "1/1") -> None:
    os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")  # read at the first allocation
    torch.set_num_threads(2)  # of the oracle: processes that share a set share the cores, too
    let_every_lane_arrive()
    expect_from_the_host()
    if what == "gradients":  # by this implementation alone
        api.BACKWARD_IMPLS = tuple(row for row in api.BACKWARD_IMPLS if row.name == impl)
    for call in part_of(impl, what, part):
        call()


if __name__ == "__main__":
    main(*sys.argv[1:])
