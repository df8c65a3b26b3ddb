"""Rows, bounds and latency of a profile."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flashkernels.hardware import GPUS
from flashkernels.profiling import trace
from flashkernels.profiling.bounds import bound_of, gaps
from flashkernels.profiling.costs import Cost
from flashkernels.profiling.latency import latency_of
from flashkernels.profiling.profile import Profile, profile_of
from flashkernels.profiling.profiled import read_profile
from flashkernels.profiling.roofs import Roofs, roofs_of

from .timeline import BF16, FP32, GEMM, TF32GEMM, Timeline, launch_gaps, matmul

H200 = GPUS["h200"]


def profile(line: Timeline) -> Profile:
    return profile_of(trace.parse(line.data()))


def test_a_row_joins_time_share_and_roofs() -> None:
    line = Timeline()
    for _ in range(3):
        matmul(line, us=200.0)
    line.op("aten::add", [[4096, 4096], [4096, 4096]], [BF16, BF16], [("add", 25.0)])
    row, add = profile(line).rows
    assert (row.name, row.op, row.count, row.time) == (GEMM, "aten::mm", 3, 600.0)
    assert row.share == pytest.approx(600 / 625)
    assert row.compute == pytest.approx(2 * 4096**3 / 200e-6 / H200.peak["bf16"])
    assert (row.bound, add.bound) == ("compute", "memory")
    assert add.memory == pytest.approx(3 * 4096**2 * 2 / 25e-6 / H200.bandwidth)


def test_a_run_without_work_says_so() -> None:
    assert str(profile_of(trace.parse({"traceEvents": []}))) == "nothing was recorded: no op of torch ran"


def test_the_kernels_of_one_op_share_its_cost_by_time() -> None:
    line = Timeline()
    line.op("aten::mm", [[512, 512], [512, 512]], [BF16, BF16], [("split_k", 30.0), ("reduce", 10.0)])
    flops = {row.name: row.cost.flops for row in profile(line).rows if row.cost}
    assert flops == {"split_k": pytest.approx(0.75 * 2 * 512**3), "reduce": pytest.approx(0.25 * 2 * 512**3)}


def test_each_replay_of_a_graph_costs_what_its_ops_do() -> None:
    (row,) = profile(launch_gaps(False)).rows
    assert row.count == 180 and row.graph
    assert row.cost is not None and row.cost.flops == pytest.approx(180 * 2 * 16 * 512 * 512)


def test_products_on_tensor_cores_have_the_roof_of_tf32() -> None:
    line = Timeline()
    line.op("aten::mm", [[4096, 4096], [4096, 4096]], [FP32, FP32], [(TF32GEMM, 400.0)])
    (row,) = profile(line).rows
    assert row.cost is not None and row.cost.dtype == "tf32"
    assert row.compute == pytest.approx(2 * 4096**3 / 400e-6 / H200.peak["tf32"])


def test_ours_own_the_kernels_inside_them() -> None:
    line = Timeline()
    start = line.host
    line.host += 2
    line.op("aten::add", [[8], [8]], [FP32, FP32], [("add", 25.0)])
    q = [1, 64, 4, 128]
    scalars = ["0", "0", "False", "0.25", "-1", "-1", "0.", "", "False", "", "", "0.", "False"]
    args = {
        "External id": 999, "Input Dims": [q, q, q, *22 * [[]]],
        "Input type": [BF16, BF16, BF16, *9 * [""], *13 * ["Scalar"]], "Concrete Inputs": [*12 * [""], *scalars],
    }  # fmt: skip
    line.event("cpu_op", "flashkernels::attention", start, line.host, {"pid": 4321, "tid": 4321}, **args)
    (row,) = profile(line).rows
    assert row.op == "flashkernels::attention" and row.cost is not None and row.cost.flops == 4 * 4 * 64 * 64 * 128


@pytest.mark.parametrize(
    ("roofs", "idle", "counters", "bound"),
    [
        pytest.param(Roofs(60, 10), {}, None, "compute", id="compute"),
        pytest.param(Roofs(10, 60), {}, None, "memory", id="memory"),
        pytest.param(Roofs(10, 20), {}, None, "latency", id="latency"),
        pytest.param(Roofs(60, 10), {"launch": 150.0}, None, "launch", id="launch"),
        pytest.param(Roofs(60, 10), {"launch": 20.0, "host": 900.0}, None, "host", id="host"),
        pytest.param(Roofs(60, 10), {"launch": 50.0}, None, "compute", id="short-gaps"),
        pytest.param(Roofs(60, 10), {}, {"dram": 80.0, "sm": 30.0}, "memory", id="counted-memory"),
        pytest.param(None, {}, {"dram": 8.0, "sm": 30.0, "tensor": 70.0}, "compute", id="counted-compute"),
        pytest.param(Roofs(60, 10), {}, {"dram": 8.0, "sm": 30.0}, "latency", id="counted-latency"),
        pytest.param(None, {}, None, None, id="unknown"),
    ],
)
def test_what_bounds_a_kernel(roofs: Roofs, idle: dict[str, float], counters: dict[str, float], bound: str) -> None:
    assert bound_of(100.0, roofs, idle, counters) == bound


def test_roofs_are_the_datasheets() -> None:
    roofs = roofs_of(Cost(H200.peak["fp8"], H200.bandwidth / 2, "fp8"), H200)
    assert roofs is not None and (roofs.compute, roofs.memory) == pytest.approx((1e6, 5e5))
    assert roofs_of(Cost(1, 1, "int32"), H200) is None and roofs_of(Cost(1, 1, "bf16"), None) is None


def test_short_gaps_are_launches_and_long_ones_the_hosts() -> None:
    line = Timeline()
    matmul(line, us=5.0)
    matmul(line, us=5.0)
    line.host += 300
    matmul(line, us=5.0)
    assert [gap.cause for gap in gaps(trace.parse(line.data()))] == ["launch", "host"]


def test_a_kernel_that_was_queued_in_time_waited_for_its_launch() -> None:
    line = Timeline()
    matmul(line, us=100.0)
    line.gpu += 200  # the GPU's own pause, say for an event of another stream
    matmul(line, us=100.0)
    (gap,) = gaps(trace.parse(line.data()))
    assert gap.length > 200 and gap.cause == "launch"


def test_steps_last_until_the_gpu_is_done() -> None:
    line = Timeline()
    for name, items, us in (("prefill", 512, 900.0), ("decode", 8, 50.0), ("decode", 8, 100.0)):
        start = line.host
        matmul(line, us=us)
        line.mark(f"fk:step {name} x{items}", start)
        line.host = line.gpu + 10
    prefill, decode = latency_of(trace.parse(line.data())).steps
    assert (prefill.name, prefill.items, len(decode.times), decode.items) == ("prefill", 512, 2, 16)
    # an op launches its kernel after 1 µs, and it starts 3 µs later; the first waits for nothing else
    assert prefill.times == pytest.approx((904.0,))
    assert decode.percentile(50) == pytest.approx((54 + 104) / 2)
    assert decode.throughput == pytest.approx(1e6 * 16 / decode.span)


def test_prefill_and_decode_are_set_against_each_other() -> None:
    line = Timeline()
    for name in ("prefill", "decode", "decode"):
        start = line.host
        matmul(line, us=96.0)
        line.mark(name, start)
        line.host = line.gpu + 10
    split = latency_of(trace.parse(line.data())).split()
    assert split == {"prefill": pytest.approx(1 / 3), "decode": pytest.approx(2 / 3)}


def test_a_starved_gpu_is_cpu_bound_and_a_fed_one_is_not() -> None:
    starved, fed = latency_of(trace.parse(launch_gaps(True).data())), Timeline()
    for _ in range(5):
        matmul(fed, us=200.0)
    assert starved.bound == "CPU-bound" and starved.busy is not None and starved.busy < 0.4
    assert latency_of(trace.parse(fed.data())).bound == "GPU-bound"


def test_the_text_has_the_run_the_table_and_the_diagnosis() -> None:
    text = str(profile(launch_gaps(True)))
    for part in ("on NVIDIA H200, GPU busy", "CPU-bound", "aten::mm", "launch", "diagnosis:", "next: capture a CUDA"):
        assert part in text


def test_the_json_has_rows_findings_and_steps(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile(launch_gaps(True)).as_dict()))
    data = json.loads(path.read_text())
    assert read_profile(path).kernels == data["kernels"]  # as the report reads it
    assert data["meta"]["gpu"] == "NVIDIA H200" and data["kernels"][0]["count"] == 60
    assert data["findings"][0]["rule"] == "launch-gaps" and data["findings"][0]["speedup"] > 1
