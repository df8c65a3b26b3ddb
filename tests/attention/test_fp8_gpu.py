"""FP8 on the Hopper kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import flashkernels as fk
from flashkernels.attention.api import problem_of
from flashkernels.attention.fp8 import Quantised
from flashkernels.attention.hopper import tiles
from flashkernels.hardware import detect

from .cases import EVERYTHING, FEATURES, Shape, keywords, qkv
from .fp8 import ROWS, assert_correct, assert_exact, check, each_scale, head_first, quantised, wide
from .gpu import new_memory_is_nan, on_hopper, syncs_are_errors

IMPL = "hopper"
LARGE = Shape(b=2, sq=333, sk=450, h=6, hkv=2, d=128)
LONG = Shape(b=1, sq=1, sk=20_000, h=8, hkv=1, d=128)


def gpu(test: Any) -> Any:
    return pytest.mark.gpu(on_hopper(test))


def shares(small: Quantised, **features: Any) -> int:
    found = detect()
    assert found is not None
    return tiles.choose(problem_of(*small[:3], **small.scales, **features), found.sms).shares


@gpu
@each_scale
@pytest.mark.parametrize("feature", ["plain", "causal"])
@pytest.mark.parametrize("dim", [16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 208, 224, 256])
def test_head_dimensions(dim: int, feature: str, per_block: bool) -> None:
    shape = LARGE.but(d=dim)
    check(quantised(shape, "cuda", per_block=per_block), IMPL, **keywords(feature, shape, "cuda"))


@gpu
@pytest.mark.parametrize(
    "dims", [(192, 128), (128, 192), (64, 256), (256, 64), (16, 256), (256, 16), (256, 192), (48, 80)], ids=str
)
def test_v_of_another_head_dimension(dims: tuple[int, int]) -> None:
    shape = LARGE.but(d=dims[0], dv=dims[1])
    check(quantised(shape, "cuda", per_block=True), IMPL, causal=True)


@gpu
@each_scale
@pytest.mark.parametrize("feature", [*(name for name in FEATURES if "mask" not in name), "+".join(EVERYTHING)])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_features(dim: int, feature: str, per_block: bool) -> None:
    shape = LARGE.but(d=dim)
    check(quantised(shape, "cuda", per_block=per_block), IMPL, **keywords(feature, shape, "cuda"))


@gpu
@each_scale
@pytest.mark.parametrize("feature", ["plain", "causal", "window", "+".join(EVERYTHING)])
@pytest.mark.parametrize("dim", [16, 32, 48, 64])
def test_four_warpgroups(dim: int, feature: str, per_block: bool) -> None:
    """What calls of few tiles do not choose. Of a tile's 256 rows, some are past the end."""
    shape, tile = LARGE.but(d=dim), tiles.fp8_tile(dim)
    assert tile.groups == 4
    with fk.use_tile(tile=tile):
        check(quantised(shape, "cuda", per_block=per_block), IMPL, **keywords(feature, shape, "cuda"))


@gpu
@pytest.mark.parametrize(
    "sizes",
    [(1, 1), (1, 31), (31, 33), (64, 65), (127, 129), (128, 128), (129, 127), (700, 1), (1000, 1023)],
    ids=str,
)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_lengths(sizes: tuple[int, int], layout: str) -> None:
    shape = LARGE.but(sq=sizes[0], sk=sizes[1], d=64)
    small = quantised(shape, "cuda", per_block=True)
    small = head_first(small) if layout == "bhsd" else small
    with new_memory_is_nan():
        out, lse = fk.attention(*small[:3], **small.scales, causal=True, layout=layout, return_lse=True, impl=IMPL)
    assert_correct(out, lse, small, causal=True, layout=layout)


@gpu
def test_very_many_tiles() -> None:
    shape = Shape(b=4, sq=1500, sk=1500, h=20, hkv=4, d=64)
    small = quantised(shape, "cuda", per_block=True)
    out, lse = fk.attention(*small[:3], **small.scales, causal=True, return_lse=True, impl=IMPL)
    part = Quantised(small.q[3:, :, 15:], small.k[3:, :, 3:], small.v[3:, :, 3:], small.q_scale[3:, 15:],
                     small.k_scale[3:, 3:], small.v_scale[3:, 3:])  # fmt: skip
    assert_correct(out[3:, :, 15:], lse[3:, 15:], part, causal=True)  # the oracle takes one head at a time


@gpu
@pytest.mark.parametrize("heads", [(8, 1), (28, 4), (6, 2), (64, 1), (5, 5)], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_packed_heads(heads: tuple[int, int], rows: int) -> None:
    shape = Shape(b=2, sq=rows, sk=700, h=heads[0], hkv=heads[1], d=96)
    check(quantised(shape, "cuda", per_block=True), IMPL, causal=True)


@gpu
@each_scale
@pytest.mark.parametrize("feature", ["plain", "causal", "softcap", "alibi", "sinks", "left"])
@pytest.mark.parametrize("shape", [LONG, LONG.but(d=64), LONG.but(d=256, hkv=8), LONG.but(sq=33, sk=9000)], ids=str)
def test_keys_in_parts(shape: Shape, feature: str, per_block: bool) -> None:
    small = quantised(shape, "cuda", per_block=per_block)
    assert feature == "left" or shares(small, **keywords(feature, shape, "cuda")) > 1
    check(small, IMPL, **keywords(feature, shape, "cuda"))


@gpu
def test_scales_default_to_1_and_may_be_of_both_kinds() -> None:
    small, blocks = quantised(LARGE, "cuda"), quantised(LARGE, "cuda", per_block=True)
    ones = {name: torch.ones_like(scale) for name, scale in small.scales.items()}
    check(small._replace(**ones), IMPL, softmax_scale=1e-5)
    out = fk.attention(*small[:3], softmax_scale=1e-5, impl=IMPL)
    assert torch.equal(out, fk.attention(*small[:3], **ones, softmax_scale=1e-5, impl=IMPL))
    check(small._replace(k=blocks.k, k_scale=blocks.k_scale), IMPL, causal=True)
    check(blocks._replace(k=small.k, k_scale=small.k_scale), IMPL, causal=True)


@gpu
@pytest.mark.parametrize("feature", ["plain", "causal", "softcap"])
def test_scales_that_differ_widely(feature: str) -> None:
    q, k, v = qkv(LARGE, device="cuda")
    rows_q, rows_k = (torch.arange(n, device="cuda")[:, None, None] // ROWS for n in (LARGE.sq, LARGE.sk))
    small = fk.quantise_qkv(q * 4.0**-rows_q, k * 4.0 ** (rows_k - 2), v * 1e4, per_block=True)
    check(small, IMPL, **keywords(feature, LARGE, "cuda"))


@gpu
@pytest.mark.parametrize("scale", [-0.3, -1e-3, 0.0, 0.5])
def test_scales_of_the_softmax(scale: float) -> None:
    check(quantised(LARGE, "cuda", per_block=True), IMPL, softmax_scale=scale)


def aligned(shape: Shape, logits: Callable[[Tensor], Tensor]) -> Quantised:
    """Inputs whose logits depend on the key's position j alone, but for a little noise: logits(j), with scale 1."""
    q, k, v = qkv(shape, device="cuda", seed=7)
    along = torch.zeros(shape.d, device="cuda")
    along[0] = 1.0
    j = torch.arange(shape.sk, device="cuda", dtype=torch.float32)
    return fk.quantise_qkv(0.05 * q + along, 0.05 * k + logits(j)[None, :, None, None] * along, v, per_block=True)


LOGITS: dict[str, Callable[[Tensor], Tensor]] = {  # up to 100: a sum of FP8 products has about 14 bits
    "constant": lambda j: 0 * j + 3,
    "grow-with-every-tile": lambda j: j / 9,
    "grow-slowly": lambda j: j / 100,
    "fall-with-every-tile": lambda j: -j / 9,
    "fall-slowly": lambda j: -j / 100,
    "one-in-the-first-tile": lambda j: 40.0 * (j == 3),
    "one-in-the-middle": lambda j: 100.0 * (j == 401),
    "one-in-the-last-tile": lambda j: 40.0 * (j == j.max() - 3),
    "low-in-the-last-tile": lambda j: -100.0 * (j > j.max() - 200),
    "low-in-the-first-tile": lambda j: -100.0 * (j < 200),
    "saw": lambda j: (j % 97) / 8 + (j % 2) * 5,
}


@gpu
@pytest.mark.parametrize("feature", ["plain", "causal", "window", "right", "sinks"])
@pytest.mark.parametrize("logits", LOGITS.values(), ids=LOGITS.keys())
def test_logits_by_position(logits: Callable[[Tensor], Tensor], feature: str) -> None:
    for shape in (Shape(b=1, sq=700, sk=900, h=2, hkv=2, d=64), Shape(b=1, sq=900, sk=900, h=2, hkv=1, d=128)):
        check(aligned(shape, logits), IMPL, softmax_scale=1.0, **keywords(feature, shape, "cuda"))


@gpu
def test_rows_that_see_nothing_and_first_tiles_that_are_hidden() -> None:
    shape = Shape(b=1, sq=900, sk=300, h=2, hkv=1, d=64)
    small = quantised(shape, "cuda")
    with new_memory_is_nan():
        out, lse = fk.attention(*small[:3], **small.scales, causal=True, return_lse=True, impl=IMPL)
    assert (out[:, :600] == 0).all() and (lse[:, :, :600] == -torch.inf).all()
    assert_correct(out, lse, small, causal=True)


@gpu
def test_another_v_with_the_same_q_and_k() -> None:
    """V transposed gets the room that the call before has left: its address says nothing about V's."""
    small = quantised(LARGE, "cuda")
    for v in (small.v, small.v.flip(1).clone()):
        check(small._replace(v=v), IMPL, causal=True)


@gpu
def test_heads_of_zeros() -> None:
    q, k, v = qkv(LARGE, device="cuda")
    q[:, :, 1], k[:, :, 1], v[1] = 0, 0, 0
    check(fk.quantise_qkv(q, k, v), IMPL, causal=True)


@gpu
@pytest.mark.parametrize("shape", [Shape(b=1, sq=300, sk=300, h=2, hkv=1, d=64), LONG.but(sq=50, sk=5000)], ids=str)
@each_scale
def test_nan_behind_the_diagonal_reaches_nobody(shape: Shape, per_block: bool) -> None:
    small = quantised(shape, "cuda", per_block=per_block)
    small.v.view(torch.uint8)[:, -20:] = 0x7F  # NaN
    check(small, IMPL, causal=True)


@gpu
def test_nan_in_q_stays_in_its_row() -> None:
    small = quantised(LARGE, "cuda")
    clean = fk.attention(*small[:3], **small.scales, causal=True, impl=IMPL)
    small.q.view(torch.uint8)[:, 200] = 0x7F
    out = fk.attention(*small[:3], **small.scales, causal=True, impl=IMPL)
    others = [i for i in range(LARGE.sq) if i != 200]
    assert out[:, 200].isnan().all() and out[:, others].isfinite().all()
    # Rows of the same warp are made again without rounding their weights: 2^-4 of each, and the largest v.
    largest = wide(small)[2].abs().max().item()
    torch.testing.assert_close(out[:, others], clean[:, others], atol=2**-4 * largest, rtol=0)


def call(name: str) -> Callable[[], tuple[Tensor, ...]]:
    shape = {"dense": Shape(b=2, sq=700, sk=1000, h=24, hkv=4, d=128), "split": LONG}[name]
    small = quantised(shape, "cuda", per_block=True)
    return lambda: fk.attention(*small[:3], **small.scales, causal=True, return_lse=True, impl=IMPL)


each_call = pytest.mark.parametrize("name", ["dense", "split"])


def same(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


@gpu
@each_call
def test_fifty_runs_agree_bit_for_bit_and_never_wait(name: str) -> None:
    run = call(name)
    first = run()
    with syncs_are_errors():
        runs = [run() for _ in range(50)]
    assert all(same(first, again) for again in runs)


@gpu
@each_call
def test_two_streams_at_once(name: str) -> None:
    run = call(name)
    want = run()
    torch.cuda.synchronize()
    streams, results = [torch.cuda.Stream() for _ in range(2)], []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(run())
    torch.cuda.synchronize()
    assert all(same(want, result) for result in results)


@gpu
def test_a_graph_replays_with_other_numbers() -> None:
    small, other = (quantised(LARGE, "cuda", per_block=True, seed=seed) for seed in (0, 1))
    fk.attention(*small[:3], **small.scales, causal=True, impl=IMPL)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = fk.attention(*small[:3], **small.scales, causal=True, return_lse=True, impl=IMPL)
    for old, new in zip(small, other, strict=True):
        old.copy_(new)
    for _ in range(2):
        out.zero_()
        graph.replay()
        assert_correct(out, lse, other, causal=True)


@gpu
def test_the_first_call_of_a_signature_may_be_captured() -> None:
    small = quantised(LARGE.but(sq=211, sk=307, d=160), "cuda")  # of no other test
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = fk.attention(*small[:3], **small.scales, causal=True, return_lse=True, impl=IMPL)
    graph.replay()
    assert_correct(out, lse, small, causal=True)


@gpu
def test_tensors_that_lie_otherwise_are_read_in_place() -> None:
    packed = torch.randn(2, 300, 3, 4, 64, device="cuda")
    small = fk.quantise_qkv(*packed.unbind(2), per_block=True)
    together = torch.stack(small[:3], 2)
    q, k, v = together.unbind(2)
    check(small._replace(q=q, k=k, v=v), IMPL, causal=True)
    part = Quantised(*(x[1:, :256, 2:] for x in (q, k, v)), *(s[1:, 2:].contiguous() for s in small[3:]))
    part = part._replace(q_scale=part.q_scale[..., :2].contiguous(), k_scale=part.k_scale[..., :2].contiguous())
    check(part, IMPL, causal=True)


@gpu
def test_what_tma_cannot_read_goes_to_the_reference() -> None:
    for dim, words in ((72, "head_dim=72 is not a multiple of 16"), (264, "head_dim=264")):
        small = quantised(LARGE.but(d=dim), "cuda")
        with pytest.raises(fk.UnsupportedError, match=words):
            fk.attention(*small[:3], **small.scales, impl=IMPL)
        assert_exact(fk.attention(*small[:3], **small.scales), None, small)


@gpu
def test_compiled_on_a_gpu_gives_the_same() -> None:
    torch._dynamo.reset()
    small = quantised(LARGE, "cuda", per_block=True)
    compiled = torch.compile(lambda **named: fk.attention(**named, causal=True) * 2, fullgraph=True)
    torch.testing.assert_close(compiled(**small._asdict()), fk.attention(**small._asdict(), causal=True, impl=IMPL) * 2)


@gpu
@each_scale
def test_quantising_on_a_gpu_gives_the_same_as_on_the_cpu(per_block: bool) -> None:
    inputs = qkv(Shape(b=2, sq=150, sk=270, h=4, hkv=2, d=64, dv=24), torch.bfloat16)
    for rotate in (False, True):
        here = fk.quantise_qkv(*inputs, per_block=per_block, rotate=rotate)
        there = fk.quantise_qkv(*(x.cuda() for x in inputs), per_block=per_block, rotate=rotate)
        for x, y in zip(here, there, strict=True):
            if not rotate:
                assert torch.equal(x.float(), y.float().cpu())
            torch.testing.assert_close(x.float(), y.float().cpu(), rtol=2**-3, atol=2**-9)
