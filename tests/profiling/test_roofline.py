"""The roofline: its arithmetic, the points in it, and labels that never cover one another."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from flashkernels.bench.results import Results, ResultsError, joined, read
from flashkernels.hardware import lookup
from flashkernels.profiling import ceilings as module, drawing, report, roofline
from flashkernels.profiling.ceilings import Ceilings
from flashkernels.profiling.drawing import Dot, Scene, Text, text_size
from flashkernels.profiling.labels import Box, Label, place

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200"
H200 = lookup("h200")
CEILINGS = Ceilings("NVIDIA H200", "2026-11-15", "2.11", {"copy": 4.25e12, "read": 4.6e12, "l2": 7e12},
                    {"bf16": 679e12, "fp8": 1279e12}, {"int8": "not here"})  # fmt: skip


def committed() -> list[roofline.Point]:
    return roofline.points_of(results("attention-*"))


def results(files: str) -> Results:
    return joined([(path, read(path)) for path in sorted(RESULTS.glob(f"{files}.json"))])


def test_the_roof_is_the_lower_of_memory_and_compute() -> None:
    roof = roofline.datasheet(H200, ["bf16", "fp8", "int4"])
    assert set(roof.compute) == {"bf16", "fp8"}  # the datasheet has no int4
    assert roof.ridge("bf16") == pytest.approx(989.4e12 / 4.8e12)
    for intensity in (1.0, 100.0, 206.0, 207.0, 1e5):
        assert roof.at(intensity, "bf16") == min(4.8e12 * intensity, 989.4e12)


def test_measured_roofs_take_the_fastest_traffic_past_the_caches() -> None:
    roof = roofline.measured(CEILINGS, ["bf16", "fp16"])
    assert (roof.memory, roof.compute, roof.others) == (4.6e12, {"bf16": 679e12}, (("l2", 7e12),))


def test_a_point_has_the_intensity_of_its_problem() -> None:
    points = {point.case: point for point in committed() if point.impl == "hopper"}
    point = points["attention headdims d128-full"]
    flops, moved = 4 * 4 * 16 * 4096**2 * 128, 4 * 4 * 4096 * 16 * 128 * 2 + 4 * 4 * 4096 * 16
    assert point.intensity == pytest.approx(flops / moved, rel=1e-3)  # five digits in the file
    assert point.rate == pytest.approx(flops / point.seconds, rel=1e-3)


def test_the_study_is_where_it_was_measured() -> None:
    fused = [point for point in roofline.study() if point.case.endswith("fused")]
    assert len(fused) == 13
    assert 33e12 < max(point.rate for point in fused) < 36e12
    assert 110e9 < max(point.rate / point.intensity for point in fused) < 125e9  # bytes/s at best


def test_no_committed_point_is_over_the_datasheet() -> None:
    roof = roofline.datasheet(H200, ["bf16", "fp16", "fp8"])
    cold = [point for point in committed() if "scaling" not in point.case]  # warm: the L2 serves them
    assert cold and all(point.rate <= roof.at(point.intensity, point.dtype) for point in cold)


def boxes(scene: Scene) -> list[Box]:
    found = []
    for mark in scene.marks:
        if isinstance(mark, Text) and mark.upright and mark.anchor == "start":
            width, height = text_size(mark.text, mark.size)
            bottom = mark.y + 0.25 * mark.size
            found.append(Box(mark.x, bottom - height, mark.x + width, bottom))
    return found


@pytest.mark.parametrize("measured", [None, CEILINGS], ids=["datasheet", "measured"])
def test_the_labels_of_the_committed_results_do_not_overlap(measured: Ceilings | None) -> None:
    scene = roofline.draw(roofline.roofs_for("NVIDIA H200", measured, ["bf16", "fp16", "fp8"]), committed())
    found = boxes(scene)
    assert len(found) >= 10
    assert not any(a.overlaps(b) for i, a in enumerate(found) for b in found[:i])
    assert all(box.inside(roofline.FRAME) for box in found)
    dots = [mark for mark in scene.marks if isinstance(mark, Dot)]
    assert not any(box.left < d.x < box.right and box.top < d.y < box.bottom for box in found for d in dots)
    labelled = {mark.group for mark in scene.marks if isinstance(mark, Text)}
    assert {"hopper", "triton", "fa4", "sdpa-cudnn", roofline.STUDY} <= labelled


labels = st.lists(
    st.builds(Label, st.floats(0, 500), st.floats(0, 300), st.floats(5, 120), st.floats(8, 16)), max_size=40
)


@given(labels)
def test_placed_labels_never_overlap_nor_leave_the_picture(wanted: list[Label]) -> None:
    bounds, taken = Box(0, 0, 500, 300), [Box(100, 100, 140, 120), Box(300, 20, 310, 280)]
    placed = place(wanted, taken, bounds)
    assert len(placed) == len(wanted)
    found = [box for box in placed if box]
    assert all(box.inside(bounds) for box in found)
    assert not any(a.overlaps(b) for i, a in enumerate(found) for b in [*taken, *found[:i]])


def test_a_label_that_fits_nowhere_has_no_place() -> None:
    assert place([Label(5, 5, 50, 10)], [], Box(0, 0, 20, 20)) == [None]


def test_the_svg_escapes_and_the_png_is_a_picture(tmp_path: Path) -> None:
    point = roofline.Point(100.0, 1e14, "a<b>", "suite x&y", False, "bf16", 1e-3)
    scene = roofline.draw([roofline.datasheet(H200, ["bf16"])], [point])
    assert "a<b>" not in drawing.svg(scene, "picture") and "a&lt;b&gt;" in drawing.svg(scene, "picture")
    drawing.png(scene, tmp_path / "new" / "roof.png")
    assert (tmp_path / "new" / "roof.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_picture_without_a_page_has_a_title_and_all_colours() -> None:
    points = committed()
    scene = roofline.draw(roofline.roofs_for("NVIDIA H200", None, ["bf16"]), points)
    whole = roofline.with_legend(scene, points, "Roofline of NVIDIA H200")
    below = [mark for mark in whole.marks if isinstance(mark, Text) and mark.y > scene.height]
    assert {mark.text for mark in below} == {point.impl for point in points} | {roofline.STUDY}
    assert all(mark.x + text_size(mark.text)[0] <= whole.width and mark.y < whole.height for mark in below)
    assert "Roofline of NVIDIA H200" in [mark.text for mark in whole.marks if isinstance(mark, Text)]
    assert len(set(roofline.styles_of([*points, *roofline.study()]).values())) == len(below)


def test_no_two_contestants_of_the_committed_results_look_alike() -> None:
    every = results("*")
    styles = roofline.styles_of([*roofline.points_of(every), *roofline.study()])
    assert len(styles) >= 13 and len(set(styles.values())) == len(styles)
    assert {style.shape for style in styles.values()} == {"circle"}
    assert len(every.impls()) <= drawing.COLOURS  # curves have colours only


def test_more_contestants_than_colours_have_other_shapes(tmp_path: Path) -> None:
    points = [roofline.Point(100.0 + i, 1e14, f"impl{i}", "suite x", i > 2, "bf16", 1e-3) for i in range(32)]
    styles = roofline.styles_of([*points, *roofline.study()])
    assert len(set(styles.values())) == 33 and {style.shape for style in styles.values()} == set(drawing.SHAPES)
    roofs = [roofline.datasheet(H200, ["bf16"])]
    scene = roofline.draw(roofs, points)
    shapes = {mark.group: mark.shape for mark in scene.marks if isinstance(mark, Dot)}
    assert shapes == {impl: style.shape for impl, style in styles.items()}
    text = drawing.svg(scene, "picture")
    assert text.count("<rect ") == text.count("</rect>") == 15 and text.count("<polygon ") == 2
    whole = roofline.with_legend(scene, points, "Roofline")
    below = [mark for mark in whole.marks if isinstance(mark, Dot) and mark.y > scene.height]
    assert [(mark.colour, mark.shape) for mark in below] == list(styles.values())
    drawing.png(whole, tmp_path / "roof.png")
    page = report.render_roofline(roofs, points, "Roofline")
    assert page.count('data-shape="square"') == 15 and page.count('data-shape="diamond"') == 2


def linear(colour: str) -> list[float]:
    shares = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in shares]


def contrast(one: str, other: str) -> float:
    """By WCAG 2, from 1 to 21."""
    low, high = sorted(sum(w * x for w, x in zip((0.2126, 0.7152, 0.0722), linear(c), strict=True))
                       for c in (one, other))  # fmt: skip
    return (high + 0.05) / (low + 0.05)


def oklab(colour: str) -> tuple[float, float, float]:
    """A space in which equal distances look alike; black and white are 1 apart."""
    r, g, b = linear(colour)
    long = (0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b) ** (1 / 3)
    middle = (0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b) ** (1 / 3)
    short = (0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b) ** (1 / 3)
    return (
        0.2104542553 * long + 0.7936177850 * middle - 0.0040720468 * short,
        1.9779984951 * long - 2.4285922050 * middle + 0.4505937099 * short,
        0.0259040371 * long + 0.7827717662 * middle - 0.8086757660 * short,
    )


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_colours_are_told_from_the_page_and_from_each_other(dark: bool) -> None:
    style = (Path(drawing.__file__).parent / "page" / "style.css").read_text()
    found = dict(re.findall(r"--(\w+): (#\w{6})", style.split("@media")[1 if dark else 0]))
    names = [f"c{i:x}" for i in range(drawing.COLOURS)]
    assert all(contrast(found[name], found["card"]) >= 3 for name in names)
    near = {(a, b): math.dist(oklab(found[a]), oklab(found[b])) for a, b in itertools.combinations(names, 2)}
    assert min(near.values()) > 0.07, min(near, key=lambda pair: near[pair])
    if not dark:
        assert {name: found[name] for name in drawing.PALETTE} == drawing.PALETTE


@pytest.mark.parametrize("measured", [None, CEILINGS], ids=["datasheet", "measured"])
def test_every_roof_of_the_committed_results_has_its_name(measured: Ceilings | None) -> None:
    roofs = roofline.roofs_for("NVIDIA H200", measured, ["bf16", "fp16", "fp8"])
    texts = [mark.text for mark in roofline.draw(roofs, committed()).marks if isinstance(mark, Text)]
    for roof in roofs:
        assert any("fp8" in text and text.endswith(roof.short) for text in texts), roof.name
        assert any("bf16" in text and text.endswith(roof.short) for text in texts), roof.name


def test_no_line_from_a_label_to_its_point_crosses_a_text() -> None:
    label, wall = Label(100, 100, 40, 10), Box(60, 80, 140, 90)
    around = [Box(104, 85, 150, 115), Box(50, 85, 96, 115), Box(80, 104, 120, 118)]  # right, left and below are taken
    assert place([label], [*around, wall], Box(0, 0, 200, 110)) == [Box(80, 68, 120, 78)]  # over the wall
    assert place([label], around, Box(0, 0, 200, 110), walls=[wall]) == [None]


def test_an_empty_roofline_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a roof or a point"):
        roofline.draw([], [])


def test_ceilings_survive_their_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHKERNELS_CACHE", str(tmp_path))
    assert module.kept("NVIDIA H200") is None
    path = module.keep(CEILINGS)
    assert path == tmp_path / "ceilings" / "nvidia-h200.json"
    assert module.kept("NVIDIA H200") == CEILINGS
    path.write_text('{"device": 1}')
    with pytest.raises(ResultsError, match=r"nvidia-h200.json: not a file of ceilings"):
        module.kept("NVIDIA H200")


def test_a_sealed_cache_takes_no_ceilings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHKERNELS_CACHE", str(tmp_path))
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(OSError, match="flashkernels compile"):
        module.keep(CEILINGS)


def test_the_ceilings_of_this_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may be as slow as it likes: the rates are those of the times that were taken."""
    monkeypatch.setattr(module, "CPU_COPY_BYTES", 1 << 22)
    monkeypatch.setattr(module, "CPU_SIDE", 128)
    times: list[float] = []

    def timed(*arguments: Any) -> float:
        times.append(seconds(*arguments))
        return times[-1]

    seconds = module._seconds
    monkeypatch.setattr(module, "_seconds", timed)
    found = module.measure("cpu")
    assert all(0 < time < 10 for time in times) and not found.missing
    assert found.bandwidth == {"copy": 2 * (1 << 22) / times[0]} and found.compute == {"fp32": 2 * 128**3 / times[1]}


@pytest.mark.gpu
def test_the_ceilings_of_this_gpu() -> None:
    from flashkernels.hardware import detect

    gpu, found = detect(), module.measure("cuda")
    assert gpu
    assert set(found.bandwidth) == {"copy", "read", "l2"}
    assert {*found.compute, *found.missing} == set(module.COMPUTE)
    for kind in ("copy", "read"):
        assert 0.5 < found.bandwidth[kind] / gpu.bandwidth < 1.02
    assert found.bandwidth["l2"] > found.bandwidth["copy"]
    for dtype, rate in found.compute.items():
        assert 0.3 < rate / gpu.peak[dtype] < 1.02, dtype
    if gpu.has_fp8:
        assert not found.missing
