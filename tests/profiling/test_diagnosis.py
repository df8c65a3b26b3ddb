"""Rules: each fires on its case and not on the healthy one, with the words, the share and the estimate it promises."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flashkernels.hardware import GPUS
from flashkernels.profiling import nsight, trace
from flashkernels.profiling.diagnosis import RULES, Finding, diagnose, short
from flashkernels.profiling.profile import Profile, profile_of

from . import timeline
from .timeline import DATA

FOLDERS = sorted(path for path in DATA.iterdir() if path.is_dir())  # synthetic, and a GPU's own where it was recorded
TRACES = [(folder, name) for folder in FOLDERS for name in timeline.RULES if (folder / f"{name}.json.gz").exists()]


def load(folder: Path, name: str) -> Profile:
    return profile_of(trace.read(folder / f"{name}.json.gz"))


def found(profile: Profile, rule: str) -> Finding:
    return next(finding for finding in profile.findings if finding.rule == rule)


@pytest.mark.parametrize(("folder", "rule"), [pytest.param(f, n, id=f"{f.name}-{n}") for f, n in TRACES])
def test_a_rule_fires_on_its_case_and_not_on_the_healthy_one(folder: Path, rule: str) -> None:
    finding = found(load(folder, rule), rule)
    assert 0 < finding.share <= 1 and 0 <= finding.saves <= finding.share and finding.step
    healthy = load(folder, f"{rule}-healthy")
    assert rule not in [finding.rule for finding in healthy.findings]


def test_every_rule_has_a_case() -> None:
    assert {rule.name for rule in RULES} == {*timeline.RULES, "bank-conflicts"}


def test_the_committed_traces_are_those_that_the_script_makes() -> None:
    for name, make in timeline.RULES.items():
        for broken, end in ((True, ""), (False, "-healthy")):
            made, kept = trace.parse(make(broken).data()), trace.read(DATA / "synthetic" / f"{name}{end}.json.gz")
            assert kept == made, f"{name}: run python -m tests.profiling.timeline"


@pytest.mark.parametrize("name", timeline.RULES)
def test_a_healthy_run_has_no_findings_at_all(name: str) -> None:
    assert load(DATA / "synthetic", f"{name}-healthy").findings == []


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("launch-gaps", "of wall time is gaps between 2.1 µs kernels"),
        ("sync-in-loop", "synchronising .item() in train.py:42, 8 times"),
        ("data-loader", "data loader: the GPU waits 26% for the next batch"),
        ("slow-host", "most of it in serve.py:60 (prepare_batch)"),
        ("pageable-copies", "5 copies, 84 MB at 6.5 GB/s"),
        ("sdpa-math", "SDPA math path because head_dim 264"),
        ("tf32-off", "TF32 is off and 90% of time is fp32 matmul"),
        ("tiny-elementwise", "60 elementwise kernels of 3.2 µs, in chains of 6.0"),
        ("few-blocks", "24 blocks for 132 multiprocessors"),
        ("low-occupancy", "my_softmax_kernel keeps 6% of the warps"),
    ],
)
def test_findings_name_the_figures(rule: str, words: str) -> None:
    assert words in found(load(DATA / "synthetic", rule), rule).words


def test_the_share_of_the_gaps_is_the_idle_time_of_the_gpu() -> None:
    profile = load(DATA / "synthetic", "launch-gaps")
    finding = found(profile, "launch-gaps")
    assert finding.share == pytest.approx(1 - 60 * 2.1 / profile.wall)
    assert finding.saves == pytest.approx(finding.share - 59 * 1.0 / profile.wall)
    assert finding.speedup == pytest.approx(1 / (1 - finding.saves))


def test_tf32_is_promised_no_more_than_the_roofs_allow() -> None:
    profile = load(DATA / "synthetic", "tf32-off")
    h200 = GPUS["h200"]
    left = h200.peak["fp32"] / h200.peak["tf32"]  # a product of 4096 stays bound by compute
    assert found(profile, "tf32-off").saves == pytest.approx(6 * 2800 * (1 - left) / profile.wall)


def test_two_waits_in_one_pause_count_it_once() -> None:
    line = timeline.Timeline()
    for _ in range(4):
        timeline.matmul(line)
        line.item("train.py:42")
        line.item("train.py:42")
        line.host += 60
    timeline.matmul(line)
    profile = profile_of(trace.parse(line.data()))
    idle = sum(gap.length for gap in profile.gaps) / profile.wall
    assert found(profile, "sync-in-loop").share == pytest.approx(idle)


def test_without_marks_of_ours_the_function_around_a_wait_is_named() -> None:
    line = timeline.Timeline()
    for _ in range(4):
        start = line.host
        timeline.matmul(line)
        line.item()
        line.host += 60
        line.frame("train.py(8): step", start)
    (finding,) = [f for f in profile_of(trace.parse(line.data())).findings if f.rule == "sync-in-loop"]
    assert "synchronising .item() in train.py:8 (step), 4 times" in finding.words


@pytest.mark.parametrize(
    ("dim", "words"), [(264, "because head_dim 264"), (70, "not a multiple of 8"), (64, "SDPBackend.FLASH_ATTENTION")]
)
def test_the_math_path_is_explained_by_the_head_dimension_where_it_is_the_reason(dim: int, words: str) -> None:
    data = timeline.sdpa_math(True).data()
    for event in data["traceEvents"]:
        if event["name"] == "aten::_scaled_dot_product_attention_math":
            event["args"]["Input Dims"] = 3 * [[2, 8, 2048, dim]]
    assert words in found(profile_of(trace.parse(data)), "sdpa-math").words


def test_a_grid_just_over_a_full_wave_is_a_tail() -> None:
    line = timeline.Timeline()
    launch = {"grid": [140, 1, 1], "block": [1024, 1, 1], "registers": 64}  # one block a multiprocessor
    for _ in range(4):
        line.op("aten::sum", [[140, 1 << 20]], ["float"], [("reduce", 180.0)], **launch)
    (finding,) = [f for f in profile_of(trace.parse(line.data())).findings if f.rule == "few-blocks"]
    assert "1.06 waves" in finding.words and finding.saves == pytest.approx(finding.share * (1 - 140 / 264))


def test_counters_of_nsight_find_bank_conflicts() -> None:
    measured = nsight.read_ncu((DATA / "synthetic" / "ncu-raw.csv").read_text())
    (finding,) = [f for f in diagnose(Profile(measured)) if f.rule == "bank-conflicts"]
    assert finding.words == "30% of the shared memory accesses of softmax_rows are bank conflicts"


@pytest.mark.parametrize("path", [pytest.param(p, id=p.parent.name) for p in sorted(DATA.glob("*/ncu-banks.csv"))])
def test_a_padded_tile_has_no_bank_conflicts_and_an_even_one_has(path: Path) -> None:
    """The transposes of docs/learn/ground/3_banks.py: first 33 words a row, then 32."""
    measured = nsight.read_ncu(path.read_text(encoding="utf-8"))
    padded, even = ([f.rule for f in diagnose(Profile(replace(measured, kernels=(k,))))] for k in measured.kernels)
    assert "bank-conflicts" in even and "bank-conflicts" not in padded


def test_findings_come_in_the_order_of_what_they_save() -> None:
    line = timeline.sync_in_loop(True)
    line.copy("Memcpy HtoD (Pageable -> Device)", 16 << 20, 2600.0, wait=True)
    saves = [finding.saves for finding in profile_of(trace.parse(line.data())).findings]
    assert len(saves) >= 2 and saves == sorted(saves, reverse=True)


def test_an_empty_trace_has_no_findings() -> None:
    assert profile_of(trace.parse({"traceEvents": []})).findings == []


def test_long_names_are_cut() -> None:
    assert short("Memcpy HtoD (Pageable -> Device)") == "Memcpy HtoD (Pageable -> Device)"
    assert len(short("x" * 200)) == 60
