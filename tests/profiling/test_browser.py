"""The pages in a real browser: they render, complain about nothing, ask the network for nothing, and react."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flashkernels.bench.results import joined, read
from flashkernels.profiling import report, roofline
from flashkernels.profiling.drawing import text_size

from . import browser as chromium

pytestmark = pytest.mark.skipif(
    chromium.found() is None, reason=f"no browser here: none of {', '.join(chromium.NAMES)}"
)
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    results = joined([(path, read(path)) for path in sorted(RESULTS.glob("*.json"))])
    (folder / "report.html").write_text(report.render(results), encoding="utf-8")
    points = roofline.points_of(results)
    roofs = roofline.roofs_for("NVIDIA H200", None, ["bf16", "fp16", "fp8"])
    (folder / "roofline.html").write_text(report.render_roofline(roofs, points, "Roofline"), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Browser]:
    one = chromium.Browser(tmp_path_factory.mktemp("profile"))
    yield one
    one.close()


def shades(path: Path) -> dict[Any, int]:
    from PIL import Image

    with Image.open(path) as image:
        small = image.convert("RGB").resize((200, 150))
        return {colour: count for count, colour in small.getcolors(200 * 150) or []}


@pytest.mark.parametrize("name", ["report.html", "roofline.html"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1200, 390], ids=["desk", "phone"])
def test_a_page_renders(name: str, dark: bool, width: int, page: chromium.Browser, pages: Path, tmp_path: Path) -> None:
    page.errors.clear()
    page.requests.clear()
    page.open(pages / name, width=width, dark=dark)
    assert page.evaluate("document.documentElement.scrollWidth") <= width  # wide tables scroll inside their boxes
    assert page.evaluate("document.querySelectorAll('svg').length") >= 1
    page.screenshot(tmp_path / "page.png")
    found = shades(tmp_path / "page.png")
    assert len(found) > 50, "the screenshot is blank"
    background = max(found, key=lambda colour: found[colour])
    assert (sum(background) < 3 * 60) == dark
    assert not page.errors
    assert page.requests == [(pages / name).resolve().as_uri()]


def column(page: chromium.Browser, i: int) -> list[str]:
    rows = f"[...document.querySelector('#calibration tbody').rows].map(row => row.cells[{i}].textContent)"
    found: list[str] = page.evaluate(rows)
    return found


def test_a_click_on_a_heading_sorts(page: chromium.Browser, pages: Path) -> None:
    page.open(pages / "report.html")
    click = "document.querySelectorAll('#calibration th button')[4].click()"  # the worst error: signs and per cents
    before = sorted(float(text.rstrip("%")) for text in column(page, 4))
    page.evaluate(click)
    assert [float(text.rstrip("%")) for text in column(page, 4)] == before
    page.evaluate(click)
    assert [float(text.rstrip("%")) for text in column(page, 4)] == before[::-1]
    order = "document.querySelectorAll('#calibration th')[4].getAttribute('aria-sort')"
    assert page.evaluate(order) == "descending"
    page.evaluate("document.querySelectorAll('#calibration th button')[0].click()")
    assert column(page, 0) == sorted(column(page, 0))


def test_a_button_hides_a_contestant(page: chromium.Browser, pages: Path) -> None:
    page.open(pages / "roofline.html")
    dots = "[...document.querySelectorAll('circle[data-group=fa4]')]"
    shown = f"{dots}.filter(dot => dot.getBoundingClientRect().width).length"
    every = page.evaluate(f"{dots}.length")
    assert every > 40 and page.evaluate(shown) == every
    page.evaluate("document.querySelector('[data-show=fa4]').click()")
    assert page.evaluate(shown) == 0
    assert page.evaluate("document.querySelector('[data-show=fa4]').getAttribute('aria-pressed')") == "false"
    page.evaluate("document.querySelector('[data-show=fa4]').click()")
    assert page.evaluate(shown) == every


def test_pointing_at_a_dot_tells_its_figures(page: chromium.Browser, pages: Path) -> None:
    page.open(pages / "roofline.html")
    assert page.evaluate("document.getElementById('tip').hidden")
    page.evaluate("document.querySelector('circle[data-group=hopper]').dispatchEvent(new PointerEvent('pointerenter'))")
    assert not page.evaluate("document.getElementById('tip').hidden")
    told = page.evaluate("document.getElementById('tip').textContent")
    assert told.startswith("hopper: ") and "TFLOPS" in told and "of the roof" in told


def test_letters_are_no_wider_than_labels_assume(page: chromium.Browser, pages: Path) -> None:
    """Else labels that do not overlap by our arithmetic would overlap on the screen."""
    page.open(pages / "roofline.html")
    figures = "[t.textContent, t.getBBox().width, +t.getAttribute('font-size')]"
    script = f"[...document.querySelectorAll('svg text')].map(t => {figures})"
    for text, width, size in page.evaluate(script):
        assert width <= text_size(text, size)[0] * 1.02 + 2, text
