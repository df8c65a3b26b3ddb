"""The HTML report stands alone and shows what was measured."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from flashkernels.attention.cases import suite
from flashkernels.bench import report
from flashkernels.bench.results import Results, Row
from flashkernels.bench.runner import _params
from flashkernels.bench.suites import suite as load

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
            )  # type: ignore[arg-type]
        rows.append(Row("attention", name, case.name, params, "fa4", True, ok=False, reason="has no <b>sinks</b>"))
    return Results(META | {"gpu": gpu}, rows)


class Balanced(HTMLParser):
    """Fails on tags that are not closed in order."""

    void = ("meta", "br", "link")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("name", ["headdims", "scaling", "seqlens", "features", "shapes", "fp8"])
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
    assert page.count("<svg") == 3  # full, causal, against the best peer
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
    assert all(plot.impls[:2] == ("triton", "hopper") for plot in report.plots(results) if plot.impls)
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
