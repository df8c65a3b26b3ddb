"""The HTML report stands alone and shows what was measured."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from flashkernels.attention.cases import suite
from flashkernels.bench.results import Results, ResultsError, Row
from flashkernels.bench.runner import _params
from flashkernels.bench.suites import suite as load
from flashkernels.profiling import report
from flashkernels.profiling.ceilings import Ceilings
from flashkernels.profiling.diagnosis import Finding
from flashkernels.profiling.heat import heats
from flashkernels.profiling.plots import plots
from flashkernels.profiling.profile import Row as Kernels
from flashkernels.profiling.profiled import FINDING, KERNEL, read_profile

META = {
    "gpu": "NVIDIA H200", "driver": "580", "torch": "2.11.0", "triton": "3.6.0", "flashkernels": "0.1.0",
    "commit": "abc", "date": "2026-11-15T00:00:00+00:00", "launch_us": 18.0,
}  # fmt: skip


def measured(name: str, gpu: str | None = "NVIDIA H200") -> Results:
    """Made-up times: ours is 1.2 times as fast as the peer."""
    rows = []
    for case in suite(name, quick=True):
        for impl, peer, tflops in (("triton", False, 360.0), ("sdpa-cudnn", True, 300.0)):
            ms = case.flops() / tflops / 1e9
            figures = {
                "ms_p50": ms,
                "ms_p99": ms,
                "tflops": tflops,
                "tbps": 0.5,
                "error": 0.001,
                "reference_error": 0.002,
            }
            params = _params(case, load("attention", name))
            rows.append(
                Row("attention", name, case.name, params, impl, peer, roofline=tflops / 989, bound="compute", **figures)
            )
        rows.append(Row("attention", name, case.name, params, "fa4", True, ok=False, reason="has no <b>sinks</b>"))
    return Results(META | {"gpu": gpu}, rows)


class Balanced(HTMLParser):
    """Fails on tags that are not closed in order."""

    void = ("meta", "br", "link")  # an SVG's empty elements close themselves: handle_startendtag

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in self.void:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("name", ["headdims", "scaling", "seqlens", "features", "shapes", "fp8", "odd"])
def test_the_page_has_every_case_and_is_well_formed(name: str) -> None:
    results = measured(name)
    page = report.render(results)
    for _, case in results.cases():
        assert f"<td>{case}</td>" in page
    parser = Balanced()
    parser.feed(page)
    assert not parser.open


def test_the_page_needs_nothing_from_the_network() -> None:
    page = report.render(measured("headdims"))
    addresses = set(re.findall(r"""(?:src|href)=["']?([^"'\s>]+)|url\(([^)]*)\)|@import""", page))
    assert {a or b for a, b in addresses} <= {a or b for a, b in addresses if (a or b).startswith("#")}


def test_the_plots_follow_the_colours_of_the_page() -> None:
    page = report.render(measured("headdims"))
    assert page.count("<svg") == 4  # roofline, full, causal, against the best peer
    assert "var(--c0)" in page and "var(--ink)" in page
    assert not re.search(r"#0000(a|f)[0-9a]", page)


def test_the_headline_counts_the_cases_won() -> None:
    assert report.headline(measured("headdims")) == "As fast as the best rival or faster in 8 of 8 cases on NVIDIA H200"


def test_hopper_stands_beside_triton() -> None:
    results = measured("headdims")
    results.rows += [replace(row, impl="hopper", tflops=600.0) for row in results.rows if row.impl == "triton"]
    results.meta |= {"launch_us_by_impl": {"hopper": 12.0, "triton": 18.0}}
    page = report.render(results)
    assert all(f"<button>{impl}</button>" in page for impl in ("hopper", "triton", "sdpa-cudnn"))
    assert all(plot.impls[:2] == ("triton", "hopper") for plot in plots(results) if plot.impls)
    assert "one small call (hopper 12, triton 18)" in page


def test_the_errors_of_fp8_are_a_table() -> None:
    results = measured("fp8")
    assert "Error of FP8" not in report.render(results)
    errors = {"uniform": {"bf16": 0.0023, "fp8": 0.028}, "outliers": {"bf16": 0.0016, "fp8": 0.089}}
    results.meta |= {"error_to_exact": errors}
    page = report.render(results)
    assert "<tr><th>inputs</th><th>bf16</th><th>fp8</th></tr>" in page
    assert "<tr><td>outliers</td><td>0.0016</td><td>0.089</td></tr>" in page
    assert "error_to_exact" not in page  # nor in the list of what it was measured with


def test_older_rows_name_their_commit() -> None:
    results = measured("headdims")
    results.rows[0] = replace(results.rows[0], commit="def", date="2026-11-14T00:00:00+00:00")
    assert "<dt>older rows</dt><dd>commit def</dd>" in report.render(results)
    assert "older rows" not in report.render(measured("headdims"))


def test_a_failed_check_is_the_headline() -> None:
    results = measured("headdims")
    results.rows[0] = replace(results.rows[0], ok=False, ms_p50=None, reason="error 0.3 is over 0.002")
    assert report.headline(results) == "1 of 8 checks failed on NVIDIA H200"
    assert "error 0.3 is over 0.002" in report.render(results)


def test_on_the_cpu_the_page_says_that_speed_is_not_the_point() -> None:
    page = report.render(measured("headdims", gpu=None))
    assert "say little about speed" in page
    assert "vs best peer" not in page


def test_reasons_are_escaped() -> None:
    assert "<b>sinks</b>" not in report.render(measured("features"))


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'flashkernels\[report\]'"):
        report.render(measured("headdims"))


def test_the_sections_stand_in_their_order() -> None:
    results = measured("headdims")
    slower = [replace(row, ms_p50=1.1 * row.ms_p50) if row.ms_p50 else row for row in results.rows]
    page = report.render(results, against=(Path("old.json"), Results(results.meta, slower)))
    sections = ["<h1>", 'id="changes"', 'class="heatmap"', 'id="roofline"', "by head dimension", "Every case",
                'id="calibration"', "left out because", "Measured with"]  # fmt: skip
    places = [page.index(text) for text in sections]
    assert places == sorted(places)


def test_a_heat_map_has_a_cell_for_each_size_and_peer() -> None:
    (heat,) = heats(measured("headdims"))
    assert heat.axis == "head_dim"
    assert heat.groups == (("sdpa-cudnn", ("full", "causal")),)  # fa4 was not timed
    assert [line for line, _ in heat.lines] == ["64", "72", "96", "128"]
    assert all(cell and cell.ratio == pytest.approx(1.2) for _, cells in heat.lines for cell in cells)
    (lengths,) = heats(measured("seqlens"))
    assert lengths.groups == (("sdpa-cudnn", ("1024", "4096", "16384")),)
    assert [line for line, _ in lengths.lines] == ["72"]


def test_head_dimensions_grow_whatever_the_order_of_the_file() -> None:
    """As in a file of which a later run with --update measured more."""
    results = measured("headdims")
    late = [row for row in results.rows if row.case in ("d64-causal", "d72-full", "d72-causal")][::-1]
    early = [row for row in results.rows if row not in late]
    shuffled = Results(results.meta, [*measured("shapes").rows[::-1], *early, *late])
    other = [case for _, case in measured("shapes").cases()][::-1]
    ordered = report.in_order(shuffled)
    assert [case for _, case in ordered.cases()] == [*other, *(case for _, case in results.cases())]
    page = report.render(shuffled)
    heat = page.split("Our speed over each peer's: attention headdims")[1].split("</table>")[0]
    assert re.findall(r"<tr><td>(\d+)</td>", heat) == ["64", "72", "96", "128"]
    bars = page.split("Against the best peer: attention headdims")[2].split("</figure>")[0]
    assert list(dict.fromkeys(re.findall(r"d\d+-(?:full|causal)", bars))) == [case for _, case in results.cases()]


def test_the_same_case_of_two_ops_is_two_cases() -> None:
    """attention and attention_backward have suites of the same names."""
    results = measured("headdims")
    slower = [replace(row, op="attention_backward", ms_p50=3 * row.ms_p50) for row in results.rows if row.ms_p50]
    both = Results(results.meta, [*results.rows, *slower])
    assert len(both.cases()) == 2 * len(results.cases())
    assert "in 16 of 16 cases" in report.headline(both)
    assert [heat.suite for heat in heats(both)] == ["attention headdims", "attention_backward headdims"]
    titles = [plot.title for plot in plots(both)]
    assert "Full attention by head dimension" in titles and "Full attention by head dimension, gradients" in titles
    assert report.render(both).count("<h2>Every case: ") == 2


def test_a_table_has_the_unit_that_tells_most_and_those_who_ran() -> None:
    results = measured("headdims")
    memory = [replace(row, op="decode", suite="formats", case="bf16", impl="hopper") for row in results.rows[:1]]
    page = report.render(Results(results.meta, [*results.rows, *memory]))
    first, second = page.split("<h2>Every case: ")[1:]
    first = first.split("</table>")[0]
    assert first.startswith("attention headdims, TFLOPS") and "<button>hopper</button>" not in first
    assert second.startswith("decode formats, TB/s") and '<td class="best">0.50</td>' in second


def test_changes_tell_ours_from_the_machine() -> None:
    results = measured("headdims")
    old = [
        replace(row, ms_p50=row.ms_p50 * (0.8 if not row.peer else 1)) if row.ms_p50 else row for row in results.rows
    ]
    page = report.render(results, against=(Path("old.json"), Results(results.meta | {"commit": "fedcba9876543"}, old)))
    assert "Of 8 rows of ours, 8 became slower and 0 faster than fedcba9876 (2026-11-15) by more than 3%." in page
    assert "The peers run at 1.00x of theirs" in page
    assert page.count('<td class="bad">0.800x</td>') == 8


def test_fp8_is_drawn_beside_bf16() -> None:
    results = measured("fp8")
    page = report.render(results)
    assert "Fewer bits: speed and error" in page and '<td>d128-full</td><td class="text">fp8</td>' in page
    assert "Fewer bits" not in report.render(measured("headdims"))


def test_measured_ceilings_are_roofs_too() -> None:
    found = Ceilings("NVIDIA H200", "2026-11-15", "2.11", {"copy": 4.25e12, "l2": 7e12}, {"bf16": 679e12})
    page = report.render(measured("headdims"), ceilings=found)
    assert "Roofs: NVIDIA H200, datasheet; NVIDIA H200, measured" in page
    assert "679 TFLOPS bf16 measured" in page and "4.25 TB/s measured" in page


def test_nothing_to_report_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing to report"):
        report.render(Results(META, []))


PROFILE = {
    "meta": {"gpu": "NVIDIA H200", "wall_us": 1500.0, "busy": 0.39, "bound": "CPU-bound"},
    "steps": [{"name": "decode", "count": 4, "us_p50": 300.0, "us_p90": 310.0, "us_p99": 330.0}],
    "kernels": [{"name": "gemm<128>", "op": "aten::mm", "count": 3, "us": 585.0, "share": 1.0, "compute": 0.5,
                 "memory": None, "bound": "compute"}],
    "findings": [{"words": "61% of wall time is gaps", "step": "capture a CUDA graph", "share": 0.61, "speedup": 2.3}],
}  # fmt: skip


def written(tmp_path: Path, data: object) -> Path:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(data))
    return path


def test_a_profile_is_reported_alone_and_beside_results(tmp_path: Path) -> None:
    one = read_profile(written(tmp_path, PROFILE))
    alone = report.render(Results({"gpu": None, "date": "", "commit": None}), profiles=[one])
    beside = report.render(measured("headdims"), profiles=[one])
    for page in (alone, beside):
        assert "gemm&lt;128&gt;" in page and "capture a CUDA graph" in page and "p99 330.0 µs" in page
        parser = Balanced()
        parser.feed(page)
        assert not parser.open
    assert "<h1>61% of wall time is gaps: mended, 2.30x as fast</h1>" in alone
    assert "Every case" in beside and "Every case" not in alone


@pytest.mark.parametrize(
    ("change", "message"),
    [({"kernels": [{}]}, "kernels 0 has no 'name'"), ({"findings": 3}, "'findings' is missing or not a list"),
     ({"meta": {}}, "meta has no 'wall_us'")],
    ids=["kernel", "findings", "meta"],
)  # fmt: skip
def test_a_broken_profile_is_refused_with_the_place(change: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ResultsError, match=rf"profile\.json: {message}"):
        read_profile(written(tmp_path, PROFILE | change))


def test_the_counters_of_nsight_stand_in_the_profile(tmp_path: Path) -> None:
    kernel = PROFILE["kernels"][0] | {"counters": {"dram": 88.1, "bank_conflicts": 0.3}}
    one = read_profile(written(tmp_path, PROFILE | {"kernels": [kernel]}))
    columns = one.columns()
    assert (columns["DRAM %"], columns["bank conflicts"]) == (["88"], ["30%"])
    assert "L2 hit %" not in columns and "% of bandwidth" not in columns and columns["op"] == ["aten::mm"]
    page = report.render(Results({"gpu": None, "date": "", "commit": None}), profiles=[one])
    assert "<button>DRAM %</button>" in page and "<td>88</td>" in page


def test_a_profile_of_a_cpu_shows_rates(tmp_path: Path) -> None:
    op = {"name": "aten::mm", "op": "aten::mm", "count": 1, "us": 100.0, "share": 1.0, "compute": None, "memory": None,
          "bound": None, "flops": 5e6, "bytes": 1e5}  # fmt: skip
    data = PROFILE | {"kernels": [op], "split": {"prefill": 0.25, "decode": 0.75}}
    one = read_profile(written(tmp_path, data | {"meta": {"gpu": None, "wall_us": 100.0}}))
    assert list(one.columns()) == ["calls", "µs", "share", "GFLOP/s", "GB/s"]
    assert (one.columns()["GFLOP/s"], one.columns()["GB/s"]) == (["50"], ["1"])
    page = report.render(Results({"gpu": None, "date": "", "commit": None}), profiles=[one])
    assert "the CPU, 0.10 ms of wall time" in page and "Split: prefill 25%, decode 75%." in page


def test_a_real_profile_has_the_format() -> None:
    """What `flashkernels profile` writes is what this reads."""
    names = {field.name for field in fields(Finding)} | {"speedup"}
    assert set(FINDING) <= names
    row = Kernels("gemm", "aten::mm", "kernel", 1, 1.0, 1.0, None, None, None, 0.0, False)
    assert set(KERNEL) <= row.as_dict().keys()
