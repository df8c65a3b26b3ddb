"""What the Hopper plan writes into its parameters and launches, with a driver that only takes notes."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import flashkernels as fk
from flashkernels.attention.hopper import backward, forward
from flashkernels.attention.hopper.forward import Params
from flashkernels.attention.problem import BackwardProblem
from flashkernels.attention.tensors import Given, Tensors
from flashkernels.attention.validation import described
from flashkernels.hardware import GPUS

H200 = GPUS["h200"]
COUNTERS, STREAM = 0x1000, 7


class Driver:
    """Kernels that note their launches with a copy of the parameters; tensor maps that say what they were made of."""

    def __init__(self) -> None:
        self.launches: list[tuple[str, int, int, Params]] = []
        self.maps: list[tuple[Any, ...]] = []

    def kernel(self, name: str, shared: int) -> Any:
        note = self.launches.append

        class Kernel:
            def starter(self, block: int, parameters: list[int]) -> Any:
                (address,) = parameters
                assert address % 64 == 0

                def start(grid: int, stream: int) -> None:
                    assert stream == STREAM
                    params = Params.from_buffer_copy(ctypes.string_at(address, ctypes.sizeof(Params)))
                    note((name, grid, block, params))

                return start

        return Kernel()

    def tensor_map(self, *arguments: Any) -> bytes:
        self.maps.append(arguments)
        return len(self.maps).to_bytes(128, "little")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    fake = Driver()
    monkeypatch.setattr(forward, "library", lambda variant: None)
    monkeypatch.setattr(forward.driver, "Kernel", lambda code, name, shared: fake.kernel(name, shared))
    monkeypatch.setattr(forward.driver, "tensor_map", fake.tensor_map)
    monkeypatch.setattr(forward, "counters", lambda device, stream: COUNTERS)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)
    return fake


def planned(driver: Driver, tensors: Tensors, lengths: tuple[int, int] = (0, 0), **features: Any) -> tuple[Params, Any]:
    """The parameters of the forward launch, and what the call returned."""
    settings: dict[str, Any] = {"causal": False, "softmax_scale": None, "window": (-1, -1), "softcap": 0.0} | features
    named = tensors._asdict()
    q, k, v, _ = (named.pop(name) for name in ("q", "k", "v", "dropout_seed"))
    settings |= {"max_seqlen_q": lengths[0], "max_seqlen_k": lengths[1], "need_lse": True}
    problem = described(q, k, v, **named, **settings)
    run = forward.plan(problem, H200, tensors)
    result = run(tensors, 0.5, settings["softcap"])
    name, _, _, params = driver.launches[-1]
    assert name == "forward"
    return params, result


def inputs(batch: int, seq: int, heads: int, dim: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    return tuple(torch.randn(batch, seq, heads, dim).to(dtype) for _ in range(3))


def test_a_plain_call_has_its_pointers_maps_and_scale(driver: Driver) -> None:
    q, k, v = inputs(2, 4096, 32, 72)
    params, (out, lse) = planned(driver, Tensors(q, k, v), causal=True)
    assert (params.out, params.lse, params.counters) == (out.data_ptr(), lse.data_ptr(), COUNTERS)
    assert (params.q_data, params.k_data, params.v_data) == (q.data_ptr(), k.data_ptr(), v.data_ptr())
    assert [params.slopes, params.sinks, params.order, params.pages, params.partial, params.values] == [None] * 6
    assert params.scale == pytest.approx(0.5 * 1.4426950408889634)
    assert [m[0] for m in driver.maps] == [x.data_ptr() for x in (q, q, k, k, v, out)]
    assert [m[0] for m in (params.q, params.q_rest, params.k, params.k_rest, params.v, params.o)] == [1, 2, 3, 4, 5, 6]
    assert list(params.out_strides) == list(out.stride()[:3]) and params.lse_head == 4096


def test_a_second_call_with_other_tensors_gets_other_maps(driver: Driver) -> None:
    first, second = (Tensors(*inputs(2, 300, 4, 64)) for _ in range(2))
    problem = described(*first[:3], causal=False, softmax_scale=None, window=(-1, -1), softcap=0.0, alibi_slopes=None,
                        sinks=None)  # fmt: skip
    run = forward.plan(problem, H200, first)
    own, others = (1, 2, 3), (4, 5, 6)
    for tensors, made, maps in ((first, 3, own), (first, 3, own), (second, 6, others), (first, 6, own)):
        run(tensors, 1.0, 0.0)
        assert len(driver.maps) == made
        params = driver.launches[-1][3]
        assert params.q_data == tensors.q.data_ptr() and (params.q[0], params.k[0], params.v[0]) == maps


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_blocks_of_several_tiles_have_a_map_of_each_output(driver: Driver, dtype: torch.dtype, layout: str) -> None:
    """In boxes of 64 columns and a warp's 16 rows; one for each address, whatever the inputs' are."""
    tensors = Tensors(*inputs(2, 1000, 100, 64, dtype))
    problem = described(*tensors[:3], causal=False, softmax_scale=None, window=(-1, -1), softcap=0.0, alibi_slopes=None,
                        sinks=None, layout=layout)  # fmt: skip
    run = forward.plan(problem, H200, tensors)
    outs = [run(tensors, 1.0, 0.0)[0] for _ in range(3)]
    kind = "fp16" if dtype == torch.float16 else "bf16"
    for out in outs:  # (V transposed, of FP8, is gone after its call, and an output may come to lie where it was.)
        (made,) = [m for m in driver.maps if m[0] == out.data_ptr() and m[1] != "fp8"]
        steps = tuple(2 * out.stride(i) for i in (1, 2, 0))
        assert made[1:] == (kind, (64, 1000, 100, 2), steps, (64, 16, 1, 1), 128)
    again = [params.o[0] for *_, params in driver.launches if params.o[0]]
    assert len({*again}) == 3


def test_features_have_their_pointers(driver: Driver) -> None:
    q, k, v = inputs(2, 300, 4, 64)
    slopes, sinks = torch.rand(2, 4), torch.rand(4)
    params, _ = planned(driver, Tensors(q, k, v, slopes, sinks), softcap=20.0)
    assert (params.slopes, params.sinks, params.slope_batch) == (slopes.data_ptr(), sinks.data_ptr(), 4)
    assert params.scale == pytest.approx(0.5 / 20) and params.softcap == pytest.approx(20 * 1.4426950408889634)


def test_a_ragged_paged_batch_is_ordered_first(driver: Driver) -> None:
    q = torch.randn(70, 4, 64).bfloat16()
    pages = torch.randn(9, 64, 2, 64).bfloat16()
    ends = torch.tensor([0, 30, 70], dtype=torch.int32)
    table = torch.zeros(2, 3, dtype=torch.int32)
    tensors = Tensors(q, pages, pages, None, None, None, ends, ends.clone(), table)
    params, _ = planned(driver, tensors, (40, 40), causal=True)
    assert [name for name, *_ in driver.launches] == ["order", "forward"]
    assert (params.cu_q, params.cu_k) == (ends.data_ptr(), tensors.cu_seqlens_k.data_ptr())
    assert (params.pages, params.page_size, params.max_pages) == (table.data_ptr(), 64, 3)
    assert params.order is not None and params.batch == 2


def test_fp8_has_scales_and_turns_v_first(driver: Driver) -> None:
    x = fk.quantise_qkv(*inputs(2, 300, 4, 128), per_block=True)
    params, (out, _) = planned(driver, Tensors(*x[:3], **x.scales))
    assert [name for name, *_ in driver.launches] == ["values", "forward"]
    assert driver.launches[0][1:3] == (2 * 4 * 2 * 3, 128)  # batch, heads, halves of 128 columns, blocks of 128 keys
    assert (params.q_scale, params.k_scale, params.v_scale) == tuple(s.data_ptr() for s in x[3:])
    assert (params.q_blocks, params.k_blocks, params.values_row) == (3, 3, 384)
    assert params.v_data == x.v.data_ptr() and params.values == driver.maps[2][0] != x.v.data_ptr()
    assert out.dtype == torch.bfloat16
    plain, _ = planned(driver, Tensors(*x[:3]))
    assert plain.q_scale and plain.k_scale and plain.v_scale and plain.q_blocks == 0


def test_keys_in_parts_have_room_for_them(driver: Driver) -> None:
    q, k, v = torch.randn(1, 1, 8, 64).half(), *(torch.randn(1, 20000, 8, 64).half() for _ in range(2))
    params, _ = planned(driver, Tensors(q, k, v))
    assert (params.whole, params.cut) == (0, 8) and params.partial
    assert driver.launches[-1][1] == params.tiles == params.shares > 8


@pytest.fixture
def launched(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> list[backward.Params]:
    """The parameters of the backward's launches."""
    seen: list[backward.Params] = []

    def launch(grid: int, block: int, stream: int, address: int) -> None:
        seen.append(backward.Params.from_buffer_copy(ctypes.string_at(address, ctypes.sizeof(backward.Params))))

    def kernel(code: None, name: str, shared: int, early: bool) -> SimpleNamespace:
        assert early  # every kernel of the backward waits for the one ahead
        return SimpleNamespace(launch=launch)

    monkeypatch.setattr(backward, "library", lambda variant: None)
    monkeypatch.setattr(backward.driver, "Kernel", kernel)
    monkeypatch.setattr(backward, "counters", lambda device, stream: COUNTERS)
    return seen


def differentiated(
    tensors: Tensors, wanted: tuple[str, ...] = ("q", "k", "v"), deterministic: bool = False, **features: Any
) -> tuple[Any, Given]:
    """What makes the gradients of such tensors, and what it is given beside them."""
    settings: dict[str, Any] = {"causal": False, "softmax_scale": None, "window": (-1, -1), "softcap": 0.0} | features
    call = described(*tensors[:3], alibi_slopes=tensors.alibi_slopes, sinks=None, **settings)
    batch, seq, heads, _ = tensors.q.shape
    out = torch.randn(*tensors.q.shape[:3], tensors.v.shape[-1]).bfloat16()
    given = Given(torch.randn_like(out), None, out, torch.zeros(batch, heads, seq))
    problem = BackwardProblem(call, wanted, "auto", saved=True, deterministic=deterministic)
    return backward.plan(problem, H200, tensors, given), given


def test_the_backward_keeps_the_maps_of_each_set_of_tensors(driver: Driver, launched: list[backward.Params]) -> None:
    first, second = (Tensors(*inputs(1, 256, 2, 64)) for _ in range(2))
    run, given = differentiated(first)
    own, others = (1, 2, 3, 4), (5, 6, 7, 8)
    for tensors, made, maps in ((first, 4, own), (second, 8, others), (first, 8, own)):
        run(tensors, given, 1.0, 0.0)
        params = launched[-1]
        assert len(driver.maps) == made and params.k_data == tensors.k.data_ptr()
        assert (params.q[0], params.k[0], params.v[0], params.grad_out[0]) == maps
    assert [m[0] for m in driver.maps[:4]] == [x.data_ptr() for x in (*first[:3], given.grad_out)]


@pytest.mark.parametrize("wanted", [("q", "k", "v"), ("q", "k"), ("v",)], ids="".join)
def test_gradients_that_the_copy_engine_writes_have_maps(
    driver: Driver, launched: list[backward.Params], wanted: tuple[str, ...]
) -> None:
    """In boxes of a warp's 16 keys; one for each address."""
    tensors = Tensors(*inputs(2, 256, 3, 96))
    run, given = differentiated(tensors, wanted)
    kept = [run(tensors, given, 1.0, 0.0) for _ in range(2)]  # both are alive: two addresses
    kept.append(run(tensors, given, 1.0, 0.0))
    seen = launched[1::3] if "q" in wanted else launched[1::2]  # rows, backward, and queries where dQ is wanted
    for params, (_, dk, dv, *_) in zip(seen, kept, strict=True):
        for at, x in ((params.dk_rows[0], dk), (params.dv_rows[0], dv)):
            if x is None:
                assert at == 0
            else:
                assert driver.maps[at - 1] == (
                    x.data_ptr(), "bf16", (96, 256, 3, 2), (576, 192, 147456), (64, 16, 1, 1), 128
                )  # fmt: skip


@pytest.mark.parametrize("seq", [1, 16, 65, 300, 1000])
@pytest.mark.parametrize("dim", [16, 64, 72, 104, 128, 256])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("wanted", [("q", "k", "v"), ("q",), ("k",)], ids="".join)
def test_statistics_lie_in_dq_where_it_is_written_last(
    wanted: tuple[str, ...], deterministic: bool, dim: int, seq: int, launched: list[backward.Params]
) -> None:
    """Level, delta and notes of all blocks fit there, start at multiples of 16 bytes, and overlap nothing."""
    tensors = Tensors(*inputs(2, seq, 2, dim))
    run, given = differentiated(tensors, wanted, deterministic, causal=True)
    dq = run(tensors, given, 1.0, 0.0)[0]
    params, size = launched[-1], backward.tiles.by_dimension(dim, dim, right=True, deterministic=deterministic).queries
    blocks = 2 * 2 * -(-seq // size)
    assert params.delta - params.level == 4 * blocks * size and params.poisoned - params.delta == 4 * blocks * size
    assert params.level % 16 == params.delta % 16 == 0
    added = "q" in wanted and not deterministic and dim <= 128
    assert (params.sums is not None) == added
    inside = dq is not None and dq.data_ptr() <= params.level < dq.data_ptr() + dq.nbytes
    assert inside == (added and 4 * blocks * (2 * size + 1) <= dq.nbytes)
    assert not inside or params.level == dq.data_ptr()


def test_a_window_without_a_right_end_has_a_far_one(launched: list[backward.Params]) -> None:
    tensors = Tensors(*inputs(1, 256, 2, 64), alibi_slopes=torch.ones(2))
    run, given = differentiated(tensors, window=(30, -1))
    run(tensors, given, 1.0, 0.0)
    assert (launched[-1].left, launched[-1].right) == (30, forward.FAR)
