"""`fk.explain("attention_backward", ...)`: who makes the gradients of a call, on which tile, and in what time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import flashkernels as fk
from flashkernels.attention.hopper import backward_cost, backward_tiles
from flashkernels.attention.hopper.backward_source import BackwardVariant
from flashkernels.attention.problem import AttentionProblem, BackwardProblem
from flashkernels.hardware import GPUS, lookup

H200 = lookup("h200")
CALL = AttentionProblem(batch=4, seq_q=4096, seq_k=4096, heads=28, kv_heads=28, head_dim=72, causal=True)
WANTED = ("q", "k", "v")


def why(call: AttentionProblem = CALL, wanted: tuple[str, ...] = WANTED, gpu: str = "h200", **options: Any) -> Any:
    return fk.explain("attention_backward", problem=BackwardProblem(call, wanted, **options), gpu=gpu)


def tensors(**options: Any) -> list[torch.Tensor]:
    return [torch.zeros(2, 64, 4, 64, dtype=torch.bfloat16, **options) for _ in range(3)]


def test_the_text_says_it_all() -> None:
    found = why()
    lines = str(found).splitlines()
    assert lines[0] == "gradients of q, k, v: attention bf16 B=4 S=4096, 28 heads, head_dim 72, causal on NVIDIA H200"
    assert lines[2] == "implementation: hopper"
    assert f"tile: {backward_tiles.choose(found.problem).tile.name}" in lines
    assert "  dQ added by the copy engine" in lines
    assert any(line.startswith("  columns: 80 for 72 in Q·Kᵀ, 80 for 72 in dO·Vᵀ") for line in lines)
    assert any("vary from run to run" in line for line in lines)
    assert "share their loads" not in str(found)
    assert f"work: {found.problem.flops() / 1e9:.4g} GFLOP" in str(found)
    rate = found.problem.flops() / found.predicted / 1e12
    assert f"predicted: {found.predicted * 1e6:.1f} µs, {rate:.0f} TFLOPS" in lines[-1]


@pytest.mark.parametrize(
    ("change", "wanted", "reason"),
    [
        ({"mask": "float"}, (*WANTED, "mask"), "takes no mask tensor"),
        ({"dropout_p": 0.1}, WANTED, "has no dropout"),
        ({"dtype": "fp32"}, WANTED, "has no fp32 kernel"),
        ({"alibi": True}, (*WANTED, "alibi_slopes"), "has no gradient of the ALiBi slopes"),
    ],
)
def test_what_hopper_declines_goes_to_triton_and_says_why(
    change: dict[str, Any], wanted: tuple[str, ...], reason: str
) -> None:
    call = replace(CALL, **{"head_dim_v": change.get("head_dim", 72), **change})
    found = why(call, wanted)
    assert found.impl == "triton" and found.triton and found.hopper is None
    assert f"  not hopper: {reason}" in str(found)
    assert found.predicted is None and "predicted" not in str(found)
    assert ("  mask: " in str(found)) == ("mask" in wanted)


def test_deterministic_gradients_have_a_kernel_of_their_own_for_dq() -> None:
    usual, fixed = why(), why(deterministic=True)
    assert (usual.repeatable, fixed.repeatable) == (False, True)
    assert "7 products for 5" in str(fixed) and "same bits in every run" in str(fixed)
    assert "vary from run" not in str(fixed) and fixed.predicted > usual.predicted


def test_neighbours_that_share_their_loads_are_named() -> None:
    text = str(why(replace(CALL, head_dim=96, head_dim_v=96, causal=False)))
    assert "two blocks share their loads" in text and "pairs of tiles" in text


@pytest.mark.parametrize("wanted", [WANTED, ("k",), ("q", "v")], ids=",".join)
def test_wide_heads_have_a_kernel_for_each_gradient(wanted: tuple[str, ...]) -> None:
    call = replace(CALL, head_dim=512, head_dim_v=320)
    found = why(call, wanted)
    text, products = str(found), {"q": 3, "k": 3, "v": 2}
    assert found.impl == "hopper" and found.repeatable and "tile: wide-cluster2" in text
    assert f"products of each: {', '.join(f'd{x.upper()} {products[x]}' for x in wanted)}, for 5" in text
    assert "two blocks share their loads" in text and "320 for 320 in dO·Vᵀ" in text
    assert found.predicted > sum(products[x] for x in wanted) / 5 * found.floor
    full = why(replace(call, causal=False), wanted)
    assert 1.6 < full.predicted / found.predicted < 2


def test_the_portable_backward_in_one_pass_and_in_two() -> None:
    one, two = why(impl="triton"), why(impl="triton", deterministic=True)
    assert "  not hopper: impl='triton' was asked for" in str(one)
    assert (one.repeatable, two.repeatable) == (False, True)
    assert "  one pass: " in str(one) and "  dK and dV: " in str(two) and "  dQ: " in str(two)
    assert one.predicted and two.predicted is None
    wide = why(replace(CALL, head_dim=256, head_dim_v=256), impl="triton")
    assert "  dK and dQ: " in str(wide) and "  dV: " in str(wide) and not wide.repeatable


@pytest.mark.parametrize("gpu", sorted(set(GPUS) - {name for name, gpu in GPUS.items() if gpu.has_wgmma}))
def test_other_gpus_take_two_passes(gpu: str) -> None:
    found = why(gpu=gpu)
    assert found.impl == "triton" and found.repeatable and found.predicted is None
    assert found.floor and f"on {GPUS[gpu].name}" in str(found)


def test_a_call_with_its_tensors() -> None:
    q, k, v = tensors()
    found = fk.explain("attention_backward", q, k, v, causal=True, gpu="h200")
    assert found.impl == "hopper" and found.problem.wanted == WANTED and found.problem.call.causal
    q.requires_grad_()
    sinks = torch.zeros(4, requires_grad=True)
    found = fk.explain("attention_backward", q, k, v, sinks=sinks, gpu="h200")
    assert found.problem.wanted == ("q", "sinks") and not found.hopper.want_k and "no dQ" not in str(found)
    found = fk.explain("attention_backward", q, k, v, wanted=("k",), deterministic=True, gpu="h200")
    assert found.problem.wanted == ("k",) and found.problem.deterministic and "  no dQ" in str(found)
    assert fk.explain("attention_backward", q, k, v).impl == "torch"  # here, on the CPU


def test_errors_are_those_of_the_call() -> None:
    q, k, v = tensors()
    with pytest.raises(ValueError, match=r"impl='fast' is not one of"):
        fk.explain("attention_backward", q, k, v, impl="fast", gpu="h200")
    with pytest.raises(fk.UnsupportedError, match="needs compute capability 9"):
        fk.explain("attention_backward", q, k, v, impl="hopper", gpu="a100")
    with pytest.raises(ValueError, match=r"wanted=\('mask',\): the call has no mask"):
        fk.explain("attention_backward", q, k, v, wanted=("mask",), gpu="h200")
    with pytest.raises(ValueError, match="either tensors with their arguments or a problem"):
        fk.explain("attention_backward", q, k, v, problem=BackwardProblem(CALL, WANTED))
    with pytest.raises(TypeError, match="must be a BackwardProblem"):
        fk.explain("attention_backward", problem=CALL)
    for call in (replace(CALL, dtype="fp8"), replace(CALL, page_size=64)):
        with pytest.raises(fk.UnsupportedError, match="no gradients"):
            why(call)


# The prediction counts what the kernel walks


@pytest.mark.parametrize(("seq_q", "seq_k"), [(64, 64), (300, 420), (420, 300), (1, 500), (1024, 1024)])
@pytest.mark.parametrize("band", [(-1, -1), (-1, 0), (100, 0), (60, 90), (0, -1)])
@pytest.mark.parametrize("dim", [64, 72, 128, 192])
def test_blocks_are_those_that_see_some_key(seq_q: int, seq_k: int, band: tuple[int, int], dim: int) -> None:
    call = AttentionProblem(batch=1, seq_q=seq_q, seq_k=seq_k, heads=1, kv_heads=1, head_dim=dim, window=band)
    variant = backward_tiles.choose(BackwardProblem(call, WANTED))
    size, keys = variant.tile.queries, variant.tile.keys
    for tile, count in enumerate(backward_cost.query_blocks(call, variant)):
        seen = {
            i
            for i in range(seq_q)
            for j in range(tile * keys, min(seq_k, tile * keys + keys))
            if (band[0] < 0 or j >= i + seq_k - seq_q - band[0]) and (band[1] < 0 or j <= i + seq_k - seq_q + band[1])
        }
        # from the first row that sees one, at a multiple of 16, unless the band has no such end
        rows = max(seen) + 1 - (min(seen) // 16 * 16 if band[1] >= 0 else 0) if seen else 1
        assert count == -(-rows // size)


def test_more_work_takes_longer() -> None:
    def seconds(**change: Any) -> float:
        problem = BackwardProblem(replace(CALL, **change), WANTED)
        return backward_cost.seconds(problem, backward_tiles.choose(problem), H200)

    assert seconds(causal=False) > 1.6 * seconds()
    assert seconds(seq_q=8192, seq_k=8192) > 3.5 * seconds()
    assert seconds(batch=8) == pytest.approx(2 * seconds(), rel=0.05)
    assert seconds(varlen=True, total_q=4 * 4096, total_k=4 * 4096) == pytest.approx(seconds(), rel=0.25)


def test_what_nobody_wants_is_not_counted() -> None:
    problem = BackwardProblem(CALL, WANTED)
    variant = backward_tiles.choose(problem)
    some: BackwardVariant = replace(variant, want_q=False)
    assert backward_cost.seconds(problem, some, H200) < backward_cost.seconds(problem, variant, H200)
