"""`fk.explain`: which implementation, why not the others, on which tile, and how far from the roofline."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

import flashkernels as fk
from flashkernels.attention import explain as module
from flashkernels.attention.hopper.source import HopperTile
from flashkernels.attention.problem import AttentionProblem
from flashkernels.hardware import GPUS, lookup
from flashkernels.tiling import STRATEGIES, TilingError, waste

H200 = lookup("h200")
PROBLEM = AttentionProblem(batch=4, seq_q=4096, seq_k=4096, heads=28, kv_heads=28, head_dim=72, causal=True)


def tensors(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    return tuple(torch.zeros(shape, dtype=dtype) for _ in range(3))


@pytest.fixture(scope="module")
def why() -> Any:
    """The portable kernel's answer."""
    return fk.explain("attention", problem=PROBLEM, gpu="h200", impl="triton")


@pytest.fixture(scope="module")
def best() -> Any:
    return fk.explain("attention", problem=PROBLEM, gpu="h200")


def test_head_dim_72_in_triton_takes_64_plus_16(why: Any) -> None:
    assert (why.impl, why.gpu, why.problem, why.hopper) == ("triton", H200, PROBLEM, None)
    assert why.chosen.strategy == "exact"
    assert why.chosen.best.tile.parts == why.chosen.best.tile.parts_v == (64, 16)


def test_strategies_are_compared_with_their_waste(why: Any) -> None:
    assert tuple(c.strategy for c in why.choices) == STRATEGIES
    exact, standard, split_d, register = why.choices
    assert waste(72, exact.best.tile.parts) == pytest.approx(0.1)
    assert waste(72, standard.best.tile.parts) == 0.4375
    assert exact.best.cost < standard.best.cost
    assert split_d.reason and register.reason


def test_the_roofline_is_arithmetic_on_the_problem_and_the_gpu(why: Any) -> None:
    pairs = 4 * 4096 * 4097 // 2
    flops, moved = 2 * 28 * pairs * 144, 2 * 4 * 4096 * 28 * 144 * 2 + 4 * 4 * 4096 * 28
    assert (PROBLEM.flops(), PROBLEM.bytes()) == (flops, moved)
    assert why.intensity == pytest.approx(flops / moved)
    assert why.bound == "compute"
    assert why.floor == pytest.approx(flops / 989.4e12)
    assert why.chosen.best.cost > why.floor


def test_the_text_says_it_all(why: Any) -> None:
    text = str(why)
    lines = text.splitlines()
    assert lines[0] == "attention bf16 B=4 S=4096, 28 heads, head_dim 72, causal on NVIDIA H200"
    assert "implementation: triton" in lines
    for verdict in why.verdicts:
        if verdict.name != "triton":
            assert f"  not {verdict.name}: {verdict.reason or 'could serve, but triton was asked for'}" in lines
    assert f"tile: {why.chosen.best.tile.name}" in lines
    (exact,) = (line for line in lines if line.startswith("  > exact"))
    (standard,) = (line for line in lines if line.startswith("    standard"))
    assert "64+16" in exact and "waste 10.00%" in exact and "128 " in standard and "waste 43.75%" in standard
    for line in (exact, standard):
        assert re.search(r"\d+ KiB shared  ~\d+ registers  \d+ blocks/SM  \d+ µs", line)
    assert any(line.startswith("    register  Q resident in registers") for line in lines)
    assert f"work: {PROBLEM.flops() / 1e9:.4g} GFLOP, {PROBLEM.bytes() / 1e6:.4g} MB at least, 1017 FLOP/byte" in lines
    assert f"roofline: compute bound, at least {why.floor * 1e6:.1f} µs" in lines
    assert re.search(r"^predicted: \d+\.\d µs, \d+ TFLOPS, \d+% of the roofline$", text, re.MULTILINE)


# --- the Hopper kernel


def test_head_dim_72_on_an_h200_is_served_by_hopper_at_its_exact_size(best: Any) -> None:
    assert (best.impl, best.gpu, best.chosen) == ("hopper", H200, None)
    assert best.hopper.computed == (80, 72)
    assert best.hopper.waste == pytest.approx(8 / 152)


def test_the_text_says_what_hopper_does(best: Any) -> None:
    launch, lines = best.hopper, str(best).splitlines()
    tile = launch.tile
    assert "implementation: hopper" in lines
    assert "  not triton: could serve, but a better one does" in lines
    at = lines.index(f"tile: {tile.name}")
    shape, heads, columns, size = lines[at + 1 : at + 5]
    assert shape.startswith(f"  {64 * tile.groups} rows x {tile.block_n} keys, {tile.stages} stages")
    assert all((words in shape) == getattr(tile, flag) for flag, words in module.WORDS.items())
    assert heads == "  one query head a row block, no tile cut by keys"
    assert columns == "  columns: 80 for 72 in Q·Kᵀ, 72 for 72 in P·V, waste 5.26%; 64 of 72 written by the copy engine"
    # boxes may not end in the midst of a sequence; and a block stores its last tile by itself
    ragged, few = {"varlen": True, "total_q": 4 * 4096, "total_k": 4 * 4096}, {"batch": 1, "heads": 4, "kv_heads": 4}
    for other in (replace(PROBLEM, **ragged), replace(PROBLEM, **few)):
        assert "written by the copy engine" not in str(fk.explain("attention", problem=other, gpu="h200"))
    tiles = 4 * 28 * -(-4096 // (64 * tile.groups))
    assert size == f"  {launch.variant.shared / 1024:.0f} KiB shared, {tiles} tiles, {tiles / 132:.2f} waves"
    assert f"roofline: compute bound, at least {best.floor * 1e6:.1f} µs" in lines
    assert best.predicted == launch.seconds > best.floor
    (predicted,) = (line for line in lines if line.startswith("predicted: "))
    assert predicted.startswith(f"predicted: {1e6 * launch.seconds:.1f} µs, ") and "% of the roofline" in predicted
    at = lines.index("strategies of the Triton kernel:")
    # none is marked: another kernel serves
    assert [line.split()[0] for line in lines[at + 1 : at + 5]] == list(STRATEGIES)
    assert "waste 10.00%" in lines[at + 1] and "waste 43.75%" in lines[at + 2]


def test_every_setting_of_a_hopper_tile_has_words() -> None:
    assert {f.name for f in fields(HopperTile) if f.type == "bool"} == set(module.WORDS)
    numbers = {f.name for f in fields(HopperTile) if f.type == "int"}
    assert numbers == {"groups", "block_n", "stages", "q_stages", "cluster", "late"}
    with fk.use_tile(tile=HopperTile(2, 64, 2, cluster=2, q_stages=2, late=3)):
        text = str(fk.explain("attention", problem=replace(PROBLEM, causal=False), gpu="h200"))
    words = "  128 rows x 64 keys, 2 stages, Q in 2 stages, 2 blocks share their loads, one set of P for 3 steps"
    assert words in text.splitlines()
    text = str(fk.explain("attention", problem=replace(PROBLEM, head_dim=264, head_dim_v=264), gpu="h200"))
    words = "  64 rows x 128 keys, 5 stages of 128 columns of K or 32 keys of V, 2 blocks share their loads"
    assert words in text.splitlines()


def test_one_query_a_head_packs_heads_and_splits_keys() -> None:
    decode = replace(PROBLEM, batch=1, seq_q=1, seq_k=65536, heads=32, kv_heads=4, head_dim=128, head_dim_v=128)
    why = fk.explain("attention", problem=decode, gpu="h200")
    assert (why.impl, why.hopper.variant.pack) == ("hopper", 8)
    assert why.hopper.cut == why.hopper.tiles == 4 and why.hopper.shares == 4 * 32
    assert "  8 query heads share a row block, all tiles cut by keys for 128 blocks" in str(why).splitlines()


def test_tiles_behind_the_last_full_round_are_cut() -> None:
    problem = AttentionProblem(batch=4, seq_q=4096, seq_k=4096, heads=32, kv_heads=32, head_dim=64)
    why = fk.explain("attention", problem=problem, gpu="h200")
    assert (why.hopper.tiles, why.hopper.cut, why.hopper.shares) == (2816, 44, 132)
    assert "  one query head a row block, the last 44 tiles cut by keys for 132 blocks" in str(why).splitlines()
    causal = fk.explain("attention", problem=replace(problem, causal=True), gpu="h200")
    assert causal.hopper.cut == 0


def test_a_ragged_batch_has_at_most_so_many_tiles() -> None:
    ragged = replace(PROBLEM, varlen=True, total_q=5000, total_k=5000, page_size=64)
    why = fk.explain("attention", problem=ragged, gpu="h200")
    assert why.impl == "hopper"
    assert f"at most {why.hopper.tiles} tiles" in str(why)
    assert str(why).splitlines()[0].endswith("causal, varlen, pages of 64 on NVIDIA H200")


def test_use_tile_is_explained() -> None:
    with fk.use_tile("register"):
        why = fk.explain("attention", problem=PROBLEM, gpu="h200")
        elsewhere = fk.explain("attention", problem=PROBLEM, gpu="a100")
    assert why.impl == "hopper" and why.hopper.tile.q_in_registers and "Q in registers" in str(why)
    assert elsewhere.impl == "triton" and elsewhere.chosen is None
    assert "tile: none, the call would raise" in str(elsewhere)
    with fk.use_tile("standard"):
        why = fk.explain("attention", problem=PROBLEM, gpu="h200")
    assert (why.impl, why.chosen.strategy) == ("triton", "standard")
    assert "not hopper: use_tile asks for standard, which is the Triton kernel's" in str(why)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim": 8, "head_dim_v": 8}, "head_dim=8 is not in 16 to 512"),
        ({"dtype": "fp32"}, "has no fp32 kernel"),
        ({"mask": "bool"}, "takes no mask tensor"),
        ({"unaddressable": "k: its last dimension has stride 2, not 1"}, "TMA cannot read k: its last dimension"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_hopper_leaves_to_triton_has_a_reason(change: dict[str, Any], reason: str) -> None:
    why = fk.explain("attention", problem=replace(PROBLEM, **change), gpu="h200")
    assert why.impl == "triton" and why.chosen and why.hopper is None
    assert f"  not hopper: {reason}" in str(why)


def test_explaining_loads_no_torch_and_no_driver() -> None:
    code = "import sys, flashkernels.attention.explain; print(sorted({'torch', 'triton', 'ctypes'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- the roofline, and other GPUs


def test_a_tiny_problem_is_memory_bound() -> None:
    tiny = replace(PROBLEM, batch=1, seq_q=1, seq_k=64, heads=2, kv_heads=2, causal=False)
    why = fk.explain("attention", problem=tiny, gpu="h200")
    assert why.bound == "memory"
    assert why.floor == pytest.approx(tiny.bytes() / 4.8e12)
    assert "roofline: memory bound" in str(why)


@pytest.mark.parametrize("gpu", GPUS)
def test_every_known_gpu_can_be_asked_about(gpu: str) -> None:
    why = fk.explain("attention", problem=PROBLEM, gpu=gpu)
    portable = fk.explain("attention", problem=PROBLEM, gpu=gpu, impl="triton")
    assert why.impl == ("hopper" if lookup(gpu).capability == (9, 0) else "triton")
    assert portable.chosen.best.tile.parts == (64, 16)
    assert all(lookup(gpu).name in str(answer) for answer in (why, portable))


@pytest.mark.parametrize(("dim", "dim_v", "tma"), [(72, 72, True), (72, 104, True), (33, 72, False), (72, 33, False)])
def test_tma_needs_rows_of_16_bytes_in_k_and_in_v(dim: int, dim_v: int, tma: bool) -> None:
    why = fk.explain("attention", problem=replace(PROBLEM, head_dim=dim, head_dim_v=dim_v), gpu="h200", impl="triton")
    assert why.chosen.best.tile.tma == tma


def test_a_gpu_may_be_given_as_a_value() -> None:
    assert fk.explain("attention", problem=PROBLEM, gpu=replace(H200, name="Mine")).gpu.name == "Mine"


def test_the_title_has_every_feature() -> None:
    problem = replace(
        PROBLEM, seq_q=100, kv_heads=4, head_dim_v=104, dtype="fp16", window=(64, 0), softcap=True, alibi=True,
        sinks=True, mask="bool",
    )  # fmt: skip
    title = str(fk.explain("attention", problem=problem, gpu="rtx5090")).splitlines()[0]
    assert title == (
        "attention fp16 B=4 S=100/4096, 28/4 heads, head_dim 72/104, causal, softcap, alibi, sinks, window (64, 0), "
        "bool mask on NVIDIA GeForce RTX 5090"
    )


# --- tensors


def test_cpu_tensors_are_served_on_the_cpu_without_a_tile() -> None:
    why = fk.explain("attention", *tensors(1, 64, 2, 72), causal=True)
    assert why.impl in ("sdpa", "torch")
    assert (why.problem.device, why.problem.causal, why.problem.head_dim) == ("cpu", True, 72)
    assert (why.gpu, why.chosen, why.floor, why.bound, why.choices) == (None, None, None, None, ())
    text = str(why)
    assert "on the CPU" in text and f"implementation: {why.impl}" in text and "not triton: " in text
    assert "work: " in text and "tile:" not in text and "roofline" not in text


def test_what_is_explained_is_what_is_served() -> None:
    few = fk.explain("attention", *tensors(1, 5, 2, 8))
    assert few.impl == "torch" and "fewer than 16 keys" in str(few)
    q, k, v = tensors(1, 20, 2, 8)
    sinks = torch.zeros(2)
    assert fk.explain("attention", q, k, v).impl == "sdpa"
    assert fk.explain("attention", q, k, v, sinks=sinks).impl == "torch"
    with pytest.raises(fk.UnsupportedError, match="impl='sdpa' cannot serve this call: sdpa: "):
        fk.attention(q, k, v, sinks=sinks, impl="sdpa")
    with pytest.raises(fk.UnsupportedError, match="impl='sdpa' cannot serve this call: sdpa: "):
        fk.explain("attention", q, k, v, sinks=sinks, impl="sdpa")


def test_a_gpu_by_name_is_answered_for_tensors_on_it() -> None:
    why = fk.explain("attention", *tensors(1, 64, 2, 72, dtype=torch.bfloat16), gpu="h200")
    assert (why.impl, why.problem.device) == ("hopper", "cuda")


def test_a_named_implementation_is_explained() -> None:
    why = fk.explain("attention", *tensors(1, 5, 2, 8), impl="torch")
    assert why.impl == "torch"
    assert "implementation: torch" in str(why)
    assert "not sdpa: could serve, but a better one does" not in str(why)  # torch was asked for, it is not better


def test_the_layout_is_understood() -> None:
    q = torch.zeros(2, 3, 50, 40)
    problem = fk.explain("attention", q, q, q, layout="bhsd").problem
    assert (problem.batch, problem.heads, problem.seq_q, problem.head_dim) == (2, 3, 50, 40)


def test_bad_tensors_are_refused_as_the_call_would() -> None:
    q, k, v = tensors(1, 5, 2, 8)
    with pytest.raises(ValueError, match="window"):
        fk.explain("attention", q, k, v, window=(-2, 0))
    with pytest.raises(TypeError):
        fk.explain("attention", q, k)


# --- errors


def test_an_unknown_op_is_refused() -> None:
    with pytest.raises(ValueError, match="op='gemm' is not one of 'attention'"):
        fk.explain("gemm", problem=PROBLEM)


def test_tensors_and_a_problem_contradict_each_other() -> None:
    with pytest.raises(ValueError, match="either tensors with their arguments or a problem"):
        fk.explain("attention", *tensors(1, 5, 2, 8), problem=PROBLEM)
    with pytest.raises(ValueError, match="either tensors with their arguments or a problem"):
        fk.explain("attention", problem=PROBLEM, causal=True)


def test_an_unknown_gpu_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"gpu='h300' is not known; known are a100, "):
        fk.explain("attention", problem=PROBLEM, gpu="h300")


def test_an_unknown_implementation_is_refused_with_the_known_ones() -> None:
    known = "'auto', 'hopper', 'aligned', 'triton', 'sdpa', 'torch'"
    with pytest.raises(ValueError, match=f"impl='wgmma' is not one of {known}"):
        fk.explain("attention", problem=PROBLEM, gpu="h200", impl="wgmma")


def test_hopper_by_name_is_refused_on_another_gpu() -> None:
    with pytest.raises(fk.UnsupportedError, match=r"hopper: needs compute capability 9\.0, .*A100.* has 8\.0"):
        fk.explain("attention", problem=PROBLEM, gpu="a100", impl="hopper")


def test_a_head_dimension_that_triton_rejects_is_explained_with_the_reason() -> None:
    why = fk.explain("attention", problem=replace(PROBLEM, head_dim=600, head_dim_v=600), gpu="h200")
    assert why.impl != "triton" and why.chosen is None
    assert "not triton: head_dim=600 is over 512" in str(why)
    assert not issubclass(TilingError, fk.UnsupportedError)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("window", [(-1, -1), (5, 5), (256, 0)], ids=str)
@pytest.mark.parametrize("seq_q", [1, 4096])
@pytest.mark.parametrize("impl", ["auto", "triton"])
def test_no_prediction_is_below_the_roofline(gpu: str, window: tuple[int, int], seq_q: int, impl: str) -> None:
    for mask in (None, "bool"):
        problem = replace(PROBLEM, seq_q=seq_q, window=window, mask=mask)
        why = fk.explain("attention", problem=problem, gpu=gpu, impl=impl)
        assert why.predicted is None or why.predicted >= why.floor
        for line in str(why).splitlines():
            if found := re.search(r" (\d+) µs$", line):
                assert int(found[1]) >= int(why.floor * 1e6), line


def test_a_ragged_call_is_explained_as_it_is_made() -> None:
    q, k, v = (torch.empty(70, 4, 64, dtype=torch.bfloat16) for _ in range(3))
    ends = torch.tensor([0, 30, 70], dtype=torch.int32)
    why = fk.explain("attention_varlen", q, k, v, ends, ends, 40, 40, causal=True, gpu="h200")
    assert why.impl == "hopper" and why.problem.varlen and why.problem.causal and why.problem.seq_q == 40
    assert "varlen" in str(why)
    with pytest.raises(ValueError, match="max_seqlen_q"):
        fk.explain("attention_varlen", q, k, v, ends, ends, -1, 40, gpu="h200")


def test_columns_of_zeros_change_nothing() -> None:
    q, k, v = (torch.randn(1, 5, 2, 13, generator=torch.Generator().manual_seed(i)) for i in range(3))
    wide = fk.attention(*(torch.nn.functional.pad(x, (0, 3)) for x in (q, k, v)), softmax_scale=13**-0.5)
    torch.testing.assert_close(wide[..., :13], fk.attention(q, k, v))
