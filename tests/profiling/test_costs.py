"""Costs: torch's ops against hand-made counts and torch's own FLOP counter, ours against their problems."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import flashkernels as fk
from flashkernels import kvcache
from flashkernels.attention.problem import AttentionProblem, BackwardProblem
from flashkernels.decode.problem import DecodeProblem
from flashkernels.moe.problem import GemmProblem, RouteProblem
from flashkernels.profiling.costs import FORMULAS, OURS, Cost, cost_of
from flashkernels.profiling.trace import Op

FP16, FP32 = "c10::Half", "float"


def op(name: str, dims: list[Any], types: list[str], values: list[str] | None = None) -> Op:
    return Op(f"aten::{name}", 0, 1, dims=tuple(dims), types=tuple(types), values=tuple(values or [""] * len(dims)))


@pytest.mark.parametrize(
    ("call", "cost"),
    [
        pytest.param(op("mm", [[3, 5], [5, 7]], 2 * [FP16]), Cost(210, 2 * (15 + 35 + 21), "fp16"), id="mm"),
        pytest.param(op("addmm", [[7], [3, 5], [5, 7]], 3 * [FP32]), Cost(210, 4 * (7 + 71), "fp32"), id="addmm"),
        pytest.param(op("bmm", [[2, 3, 5], [2, 5, 7]], 2 * [FP16]), Cost(420, 4 * (15 + 35 + 21), "fp16"), id="bmm"),
        pytest.param(op("linear", [[2, 3, 5], [7, 5], [7]], 3 * [FP32]), Cost(420, 4 * (30 + 84), "fp32"), id="linear"),
        pytest.param(op("native_layer_norm", [[4, 8]], [FP16]), Cost(256, 2 * 2 * 32, "fp32"), id="layer_norm"),
        pytest.param(op("_softmax", [[4, 8]], [FP32]), Cost(160, 2 * 4 * 32, "fp32"), id="softmax"),
        pytest.param(op("add", [[4, 8], [8], []], [FP32, FP32, "Scalar"]), Cost(32, 4 * 72, "fp32"), id="add"),
        pytest.param(op("mul_", [[4, 8], [4, 8]], 2 * [FP16]), Cost(32, 2 * 64, "fp32"), id="in-place"),
        pytest.param(op("copy_", [[4, 8], [4, 8]], [FP16, FP32]), Cost(0, 32 * 6, "fp32"), id="copy"),
        pytest.param(op("sum", [[4, 8]], [FP32]), Cost(32, 128, "fp32"), id="sum"),
        pytest.param(op("embedding", [[100, 8], [5]], [FP16, "long int"]), Cost(0, 5 * 40, "fp32"), id="embedding"),
    ],
)
def test_a_formula_gives_what_a_hand_counts(call: Op, cost: Cost) -> None:
    assert cost_of(call) == cost


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(op("view", [[4, 8]], [FP32]), id="no-formula"),
        pytest.param(op("mm", [], []), id="no-shapes"),
        pytest.param(op("mm", [[3, 5], [6, 7]], [FP16] * 2), id="shapes-that-do-not-fit"),
        pytest.param(op("add", [[], []], ["Scalar", "Scalar"]), id="no-tensors"),
    ],
)
def test_what_is_not_known_has_no_cost(call: Op) -> None:
    assert cost_of(call) is None


def recorded(run: Callable[[], object], name: str) -> Op:
    """The op called `name` as torch's profiler records it."""
    with fk.profile() as session:
        run()
    return next(op for op in session.profile.trace.ops if op.name == name)


def conv(x: Tensor, w: Tensor, **settings: Any) -> Callable[[], Tensor]:
    return lambda: F.conv2d(x, w, **settings)


X, W = torch.randn(2, 4, 9, 8), torch.randn(6, 4, 3, 3)
Q, K = torch.randn(2, 3, 10, 16), torch.randn(2, 3, 12, 16)


@pytest.mark.parametrize(
    ("run", "name"),
    [
        pytest.param(lambda: Q[0, 0] @ K[0, 0].T, "aten::mm", id="mm"),
        pytest.param(lambda: F.linear(Q[0, 0], K[0, 0], torch.randn(12)), "aten::addmm", id="linear"),
        pytest.param(lambda: torch.bmm(Q[0], K[0].mT), "aten::bmm", id="bmm"),
        pytest.param(conv(X, W), "aten::convolution", id="conv"),
        pytest.param(conv(X, W, stride=2, padding=1, dilation=2), "aten::convolution", id="conv-strided"),
        pytest.param(conv(X, torch.randn(6, 2, 3, 3), groups=2), "aten::convolution", id="conv-groups"),
        pytest.param(
            lambda: F.conv_transpose2d(X, torch.randn(4, 6, 3, 3), stride=2, output_padding=1), "aten::convolution",
            id="conv-transposed",
        ),
    ],
)  # fmt: skip
def test_flops_are_those_of_torchs_own_counter(run: Callable[[], object], name: str) -> None:
    with FlopCounterMode(display=False) as counter:
        run()
    cost = cost_of(recorded(run, name))
    assert cost is not None and cost.flops == counter.get_total_flops()


@pytest.mark.parametrize("name", [name for name in FORMULAS if "scaled_dot_product" in name])
def test_the_formulas_of_sdpa_read_the_right_arguments(name: str) -> None:
    arguments = [a.name for a in getattr(torch.ops.aten, name.removeprefix("aten::")).default._schema.arguments]
    dims: list[Any] = [[] for _ in arguments]
    values = ["" for _ in arguments]
    for tensor, size in (("query", 10), ("key", 7), ("value", 7)):
        dims[arguments.index(tensor)] = [1, 2, size, 8]
    flops = []
    for causal in ("False", "True"):
        values[arguments.index("is_causal")] = causal
        cost = cost_of(op(name.removeprefix("aten::"), dims, [FP16 if d else "" for d in dims], list(values)))
        assert cost is not None
        flops.append(cost.flops)
    assert flops[1] / flops[0] == sum(min(i + 1, 7) for i in range(10)) / 70


def test_a_convolutions_gradients_have_the_flops_of_torchs_own_counter() -> None:
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    with FlopCounterMode(display=False) as counter:
        out = F.conv2d(x, w, padding=1)
        forward = counter.get_total_flops()
        out.sum().backward()
    found = cost_of(recorded(lambda: F.conv2d(x, w, padding=1).sum().backward(), "aten::convolution_backward"))
    assert found is not None and found.flops == counter.get_total_flops() - forward


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("sq", "sk"), [(10, 10), (7, 12), (12, 7)])
def test_sdpa_counts_the_pairs_that_are_seen(sq: int, sk: int, causal: bool) -> None:
    q, k, values = [1, 2, sq, 8], [1, 2, sk, 8], ["", "", "", "0.", str(causal)]
    call = op("_scaled_dot_product_flash_attention", [q, k, k, [], []], [*3 * [FP16], *2 * ["Scalar"]], values)
    pairs = sum(j <= i or not causal for i, j in itertools.product(range(sq), range(sk)))  # aligned top-left
    cost = cost_of(call)
    assert cost is not None and cost.flops == 2 * 2 * pairs * 16


def test_attention_costs_what_its_problem_says() -> None:
    q, kv = torch.randn(2, 5, 4, 24), torch.randn(2, 7, 2, 24)
    found = cost_of(recorded(lambda: fk.attention(q, kv, kv, causal=True, window=(3, 0)), "flashkernels::attention"))
    problem = AttentionProblem(
        batch=2, seq_q=5, seq_k=7, heads=4, kv_heads=2, head_dim=24, causal=True, window=(3, 0), dtype="fp32"
    )
    assert found == Cost(problem.flops(), problem.bytes(), "fp32")


def test_ragged_attention_costs_what_its_problem_says() -> None:
    q, ends = torch.randn(9, 2, 16), torch.tensor([0, 4, 9], dtype=torch.int32)
    found = cost_of(recorded(lambda: fk.attention_varlen(q, q, q, ends, ends, 5, 5), "flashkernels::attention"))
    problem = AttentionProblem(
        batch=2, seq_q=5, seq_k=5, heads=2, kv_heads=2, head_dim=16, dtype="fp32", varlen=True, total_q=9, total_k=9
    )
    assert found == Cost(problem.flops(), problem.bytes(), "fp32")


def test_the_backward_of_attention_has_five_products() -> None:
    q = torch.randn(1, 6, 2, 8, requires_grad=True)
    found = cost_of(recorded(lambda: fk.attention(q, q, q).sum().backward(), "flashkernels::attention_backward"))
    call = AttentionProblem(batch=1, seq_q=6, seq_k=6, heads=2, kv_heads=2, head_dim=8, dtype="fp32")
    rows = 2 * 6  # of each of q, k, v, the output, and the gradients of the four
    assert found == Cost(BackwardProblem(call, ("q", "k", "v")).flops(), 8 * rows * 8 * 4 + 4 * rows, "fp32")


def test_decode_costs_what_its_problem_says_at_full_length() -> None:
    pages, table = torch.randn(8, 16, 2, 64), torch.tensor([[3, 1], [0, 7]], dtype=torch.int32)
    cache = kvcache.PagedCache(pages, pages.clone(), table, torch.tensor([20, 5], dtype=torch.int32))
    found = cost_of(recorded(lambda: fk.decode(torch.randn(2, 1, 8, 64), cache), "flashkernels::decode"))
    problem = DecodeProblem(
        batch=2, tokens=1, heads=8, kv_heads=2, head_dim=64, context=32, page_size=16, row_bits=2 * 64 * 32,
        dtype="fp32", format="fp32",
    )  # fmt: skip
    assert found == Cost(problem.flops(), problem.bytes(), "fp32")


def test_latent_values_of_decode_are_read_with_the_keys() -> None:
    pages, table = torch.randn(4, 16, 1, 96), torch.zeros(1, 1, dtype=torch.int32)
    cache = kvcache.PagedCache(pages, pages[..., :64], table, torch.tensor([3], dtype=torch.int32))
    found = cost_of(recorded(lambda: fk.decode(torch.randn(1, 1, 4, 96), cache), "flashkernels::decode"))
    assert found is not None and found.bytes == 16 * 96 * 4 + 4 * (96 + 64) * 4


@pytest.mark.parametrize(
    ("run", "name", "streams"),
    [
        pytest.param(lambda x: fk.rms_norm(x, torch.ones(32)), "norm", 2, id="norm"),
        pytest.param(lambda x: fk.rms_norm(x, torch.ones(32), residual=x), "norm", 4, id="norm-residual"),
        pytest.param(lambda x: fk.swiglu(x), "activation", 1.5, id="swiglu"),
        pytest.param(lambda x: fk.softmax(x), "softmax", 2, id="softmax"),
    ],
)
def test_row_wise_ops_move_each_tensor_once(run: Callable[[Tensor], object], name: str, streams: float) -> None:
    found = cost_of(recorded(lambda: run(torch.randn(4, 32)), f"flashkernels::{name}"))
    assert found is not None and found.bytes == streams * 4 * 32 * 4


def test_routing_costs_what_its_problem_says() -> None:
    found = cost_of(recorded(lambda: fk.moe.route(torch.randn(12, 8), 2), "flashkernels::moe_route"))
    assert found is not None and found.bytes == RouteProblem(12, 8, 2, "fp32", "cpu").bytes()


def test_a_grouped_product_costs_what_its_problem_says() -> None:
    plan = fk.moe.route(torch.randn(5, 4), 2).plan
    x, w = torch.randn(5, 16), torch.randn(4, 24, 16)
    found = cost_of(recorded(lambda: fk.moe.grouped_gemm(x, w, plan), "flashkernels::moe_gemm"))
    problem = GemmProblem(plan.permutation.shape[0], 4, 24, 16, "fp32", "cpu")
    assert found == Cost(problem.flops(), problem.bytes(), "fp32")


def test_rotary_embedding_reads_and_writes_q_and_k() -> None:
    cos, sin = fk.rope_tables(16, 64)
    q, k = torch.randn(2, 5, 8, 64), torch.randn(2, 5, 2, 64)
    found = cost_of(recorded(lambda: fk.rope(q, k, cos, sin), "flashkernels::rope"))
    assert found is not None and found.bytes == 2 * 4 * (q.numel() + k.numel())


@pytest.mark.parametrize("name", sorted(OURS))
def test_every_op_of_ours_with_a_formula_is_registered(name: str) -> None:
    importlib.import_module(f"flashkernels.{OURS[name][0]}")
    assert hasattr(torch.ops.flashkernels, name)
