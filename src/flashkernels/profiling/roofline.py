"""The roofline: what a machine allows at each intensity, and where kernels are. Both axes are logarithmic."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from flashkernels.attention.problem import AttentionProblem
from flashkernels.bench.results import Results
from flashkernels.hardware import GPUS, Gpu, lookup
from flashkernels.profiling.ceilings import Ceilings
from flashkernels.profiling.drawing import COLOURS, SHAPES, Dot, Line, Scene, Text, text_size, ticks
from flashkernels.profiling.labels import Box, Label, leader, place

WIDTH, HEIGHT = 1000.0, 620.0
FRAME = Box(70, 24, 980, 570)
STUDY = "RTX 5090 laptop study"
MOST_LABELS = 16


@dataclass(frozen=True)
class Roof:
    """What a machine allows: bytes/s of its memory and of what else has a figure, FLOP/s by dtype."""

    name: str
    memory: float
    compute: dict[str, float]
    others: tuple[tuple[str, float], ...] = ()  # bandwidths that are not the roof: the L2's
    short: str = ""  # how labels call it

    def at(self, intensity: float, dtype: str) -> float:
        """FLOP/s at most, at so many FLOPs a byte.

        >>> h200 = Roof("H200", 4.8e12, {"bf16": 989.4e12})
        >>> h200.at(100, "bf16") / 1e12, h200.at(1000, "bf16") / 1e12
        (480.0, 989.4)
        """
        return min(self.memory * intensity, self.compute[dtype])

    def ridge(self, dtype: str) -> float:
        """FLOPs a byte from which on compute is the bound."""
        return self.compute[dtype] / self.memory


@dataclass(frozen=True)
class Point:
    """One measurement: FLOPs a byte that must move, FLOP/s."""

    intensity: float
    rate: float
    impl: str
    case: str
    peer: bool
    dtype: str
    seconds: float


def datasheet(gpu: Gpu, dtypes: Iterable[str]) -> Roof:
    compute = {dtype: gpu.peak[dtype] for dtype in dtypes if dtype in gpu.peak}
    return Roof(f"{gpu.name}, datasheet", gpu.bandwidth, compute, short="datasheet")


def measured(ceilings: Ceilings, dtypes: Iterable[str]) -> Roof:
    """Of the dtypes wanted those that were measured; all where none of them was."""
    compute = {d: ceilings.compute[d] for d in dtypes if d in ceilings.compute} or ceilings.compute
    others = tuple((kind, rate) for kind, rate in ceilings.bandwidth.items() if kind == "l2")
    return Roof(f"{ceilings.device}, measured", ceilings.memory, compute, others, "measured")


def points_of(results: Results) -> list[Point]:
    """A point for each timed row; rows without traffic or FLOPs have no place."""
    return [
        Point(
            row.tflops / row.tbps, row.tflops * 1e12, row.impl, f"{row.group} {row.case}", row.peer,
            str(row.params.get("dtype", "bf16")), row.seconds,
        )
        for row in results.rows
        if row.ok and row.tflops and row.tbps
    ]  # fmt: skip


@cache
def study() -> tuple[Point, ...]:
    """The operating points of the study this project grew from, on an RTX 5090 laptop."""
    data = json.loads(files("flashkernels.profiling").joinpath("study.json").read_text(encoding="utf-8"))
    found = []
    for row in data["rows"]:
        batch, heads, seq, d = (row[name] for name in ("batch", "heads", "seq", "head_dim"))
        problem = AttentionProblem(batch, seq, seq, heads, heads, d, dtype="fp16")
        for how in ("naive", "fused"):
            seconds = row[how] / 1e3
            intensity, rate = problem.flops() / problem.bytes(), problem.flops() / seconds
            case = f"b{batch}-h{heads}-s{seq}-d{d} {how}"
            found.append(Point(intensity, rate, STUDY, case, True, "fp16", seconds))
    return tuple(found)


def roofs_for(device: str | None, ceilings: Ceilings | None, dtypes: Sequence[str]) -> list[Roof]:
    """The roofs of a device: its datasheet's where the table has it, and the measured ones where there are some."""
    known = next((gpu for gpu in GPUS.values() if device and gpu.name.lower() == device.lower()), None)
    found = [datasheet(known, dtypes)] if known else []
    return [*found, measured(ceilings, dtypes)] if ceilings else found


def draw(
    roofs: Sequence[Roof],
    points: Sequence[Point],
    *,
    with_study: bool = True,
    across: str = "FLOP per byte that must move",
) -> Scene:
    """The picture: roofs, points by contestant, and labels for the best points of each contestant.

    `across` says what the intensity of the points is.
    """
    if not roofs and not points:
        raise ValueError("a roofline needs a roof or a point: measure the ceilings, or give results")
    shown = [*points, *(study() if with_study else ())]
    laptop = [replace(datasheet(lookup("rtx5090-laptop"), ["fp16"]), short="5090 laptop")] if with_study else []
    axes = _Axes([*roofs, *laptop], shown)
    scene = Scene(WIDTH, HEIGHT)
    axes.frame(scene, across)
    styles = styles_of(shown)
    dots = []
    for point in shown:
        x, y = axes.x(point.intensity), axes.y(point.rate)
        figures = f"{_rate(point.rate)}, {point.intensity:.0f} FLOP/byte, {_time(point)}{_share_of_roof(roofs, point)}"
        colour, shape = styles[point.impl]
        radius = 2.6 if point.peer else 3.6
        dots.append(Dot(x, y, colour, f"{point.impl}: {point.case}, {figures}", radius, point.impl, shape))
    spots = [Box(dot.x - 2, dot.y - 2, dot.x + 2, dot.y + 2) for dot in dots]
    edges: list[Box] = []
    names: list[Box] = []
    lines: list[tuple[Line, str]] = []
    for i, roof in enumerate(roofs):
        lines += axes.roof(roof, "ink", 1.2 if i else 1.6, "6 3" if i else "")
    for roof in laptop:
        lines += axes.roof(roof, "quiet", 1.0, "2 3", group=STUDY)
    for line, _ in lines:
        scene.add(line)
        edges += _along(line)
    scene.add(*sorted(dots, key=lambda dot: dot.radius))
    for line, name in lines:  # after all lines, so that no name lies on one
        _write(scene, line, name, edges, names, spots)
    _label(scene, axes, _named(shown), [*spots, *edges], names, styles)
    return scene


def with_legend(scene: Scene, points: Sequence[Point], title: str) -> Scene:
    """The picture for those who have no page around it: with a title, and the contestants' colours below."""
    whole = Scene(scene.width, scene.height, list(scene.marks))
    whole.add(Text(FRAME.left, 16, title, size=13))
    x, y = FRAME.left, scene.height + 6
    for impl, (colour, shape) in styles_of([*points, *study()]).items():
        width = 16 + text_size(impl)[0]
        if x > FRAME.left and x + width > FRAME.right:
            x, y = FRAME.left, y + 20
        whole.add(Dot(x + 4, y - 4, colour, impl, shape=shape), Text(x + 12, y, impl))
        x += width + 8
    whole.height = y + 14
    return whole


class Style(NamedTuple):
    """How dots look."""

    colour: str
    shape: str


def styles_of(points: Sequence[Point]) -> dict[str, Style]:
    """Of each contestant, ours first; the study's colour is its own. After the last colour come other shapes."""
    impls = dict.fromkeys(point.impl for point in sorted(points, key=lambda point: (point.impl == STUDY, point.peer)))
    free = [Style(f"c{i:x}", shape) for shape in SHAPES for i in range(COLOURS) if i != 7]
    return {impl: Style("c7", "circle") if impl == STUDY else free[i % len(free)] for i, impl in enumerate(impls)}


def _named(points: Sequence[Point]) -> list[list[Point]]:
    """What gets a label: each contestant, at its fastest point or, where that is crowded, at the fastest of another
    suite; then the fastest of ours in each suite."""
    best: dict[tuple[str, str], Point] = {}
    for point in sorted(points, key=lambda point: -point.rate):
        best.setdefault((point.impl, point.case.rpartition(" ")[0]), point)
    contestants: dict[str, list[Point]] = {}
    ours: dict[str, Point] = {}
    for (impl, suite), point in best.items():
        contestants.setdefault(impl, []).append(point)
        if not point.peer:
            ours.setdefault(suite, point)
    first = {choices[0] for choices in contestants.values()}
    return [*contestants.values(), *([point] for point in ours.values() if point not in first)][:MOST_LABELS]


def _label(
    scene: Scene, axes: _Axes, named: Sequence[Sequence[Point]], taken: Sequence[Box], names: Sequence[Box],
    styles: dict[str, Style],
) -> None:  # fmt: skip
    size, walls, waiting = 10.0, list(names), list(named)
    while waiting:
        points = [choices[0] for choices in waiting]
        texts = [STUDY if point.impl == STUDY else f"{point.impl} {point.case.split()[-1]}" for point in points]
        labels = [
            Label(axes.x(point.intensity), axes.y(point.rate), *text_size(text, size))
            for point, text in zip(points, texts, strict=True)
        ]
        boxes = place(labels, taken, FRAME, walls=walls)
        for point, text, label, box in zip(points, texts, labels, boxes, strict=True):
            if box is None:
                continue
            walls.append(box)
            nearest = leader(label, box)
            if math.dist(nearest, (label.x, label.y)) > 12:
                scene.add(Line((nearest, (label.x, label.y)), "quiet", 0.6, group=point.impl))
            scene.add(Text(box.left, box.bottom - 0.25 * size, text, styles[point.impl].colour, size, group=point.impl))
        waiting = [choices[1:] for choices, box in zip(waiting, boxes, strict=True) if box is None and choices[1:]]


class _Axes:
    """Where numbers lie in the picture."""

    def __init__(self, roofs: Sequence[Roof], points: Sequence[Point]) -> None:
        ridges = [roof.ridge(dtype) for roof in roofs for dtype in roof.compute]
        rates = [rate for roof in roofs for rate in roof.compute.values()]
        across = [*(point.intensity for point in points), *ridges]
        self.left, self.right = min(across) / 4, max(across) * 2
        self.high = 1.8 * max([*(point.rate for point in points), *rates])
        reach = [roof.memory * self.left for roof in roofs]
        self.low = min([*(point.rate for point in points), *reach]) / 1.5

    def x(self, intensity: float) -> float:
        return FRAME.left + (FRAME.right - FRAME.left) * _share(intensity, self.left, self.right)

    def y(self, rate: float) -> float:
        return FRAME.bottom - (FRAME.bottom - FRAME.top) * _share(rate, self.low, self.high)

    def frame(self, scene: Scene, across: str) -> None:
        """Grid, ticks and titles."""
        for value in ticks(self.left, self.right):
            x = self.x(value)
            scene.add(Line(((x, FRAME.top), (x, FRAME.bottom)), "grid"))
            scene.add(Text(x, FRAME.bottom + 18, f"{value:g}", "quiet", anchor="middle"))
        for value in ticks(self.low, self.high):
            y = self.y(value)
            scene.add(Line(((FRAME.left, y), (FRAME.right, y)), "grid"))
            scene.add(Text(FRAME.left - 8, y + 4, f"{value / 1e12:g}", "quiet", anchor="end"))
        middle = (FRAME.left + FRAME.right) / 2
        scene.add(Text(middle, HEIGHT - 14, across, anchor="middle"))
        scene.add(Text(20, (FRAME.top + FRAME.bottom) / 2, "TFLOPS", anchor="middle", upright=False))

    def roof(self, roof: Roof, colour: str, width: float, dash: str, group: str = "") -> Iterator[tuple[Line, str]]:
        """The slope of memory and a level for each dtype, with their names."""
        top = max(roof.compute.values())
        for kind, bandwidth in (("", roof.memory), *roof.others):
            start, end = max(self.left, self.low / bandwidth), top / bandwidth
            if start < end:
                ends = ((self.x(start), self.y(bandwidth * start)), (self.x(end), self.y(top)))
                line = Line(ends, colour, width, "1 3" if kind else dash, group)
                yield line, f"{_bandwidth(bandwidth)} {kind or roof.short}"
        for rate, dtypes in _levels(roof.compute):
            ends = ((self.x(rate / roof.memory), self.y(rate)), (FRAME.right, self.y(rate)))
            yield Line(ends, colour, width, dash, group), f"{_rate(rate)} {', '.join(dtypes)} {roof.short}"


ROOF_FONT = 11.0


def _levels(compute: dict[str, float]) -> list[tuple[float, list[str]]]:
    """Rates with their dtypes, the highest first; rates that differ by less than 5 % share a line, at the higher one.

    >>> _levels({"bf16": 679e12, "fp16": 690e12, "fp8": 1279e12})
    [(1279000000000000.0, ['fp8']), (690000000000000.0, ['fp16', 'bf16'])]
    """
    levels: list[tuple[float, list[str]]] = []
    for dtype, rate in sorted(compute.items(), key=lambda item: -item[1]):
        if levels and rate > 0.95 * levels[-1][0]:
            levels[-1][1].append(dtype)
        else:
            levels.append((rate, [dtype]))
    return levels


def _beside(line: Line, text: str) -> Iterator[Box]:
    """Places for a name: above the line, then below it, then a little farther away; along a level one from its right
    end, else from the left."""
    (x0, y0), (x1, y1) = line.points
    width, height = text_size(text, ROOF_FONT)
    for away, above, i in itertools.product((4, 9, 14), (True, False), range(1, 20)):
        if y0 == y1:
            left = x1 - 4 - width - (x1 - x0 - width) * (i - 1) / 20
            bottom = y0 - away if above else y0 + away + height
        else:
            x, y = x0 + (x1 - x0) * i / 20, y0 + (y1 - y0) * i / 20
            left, bottom = (x - 4 - away - width, y - away) if above else (x + 4 + away, y + away + height)
        yield Box(left, bottom - height, left + width, bottom)


def _write(scene: Scene, line: Line, text: str, edges: Sequence[Box], names: list[Box], dots: Sequence[Box]) -> None:
    """Writes a line's name at the first place that is free, or else has the fewest dots behind it."""
    taken = [*edges, *names]
    free = [b for b in _beside(line, text) if b.inside(FRAME) and not any(b.overlaps(other, 1) for other in taken)]
    covered = {box: sum(box.overlaps(dot, 1) for dot in dots) for box in free}
    if covered:
        box = min(covered, key=lambda box: covered[box])
        scene.add(Text(box.left, box.bottom - 0.25 * ROOF_FONT, text, line.colour, ROOF_FONT, group=line.group))
        names.append(box)


def _along(line: Line) -> list[Box]:
    """Small boxes along a line, so that no label lies on it."""
    (x0, y0), (x1, y1) = line.points
    steps = max(1, int(math.dist(*line.points) / 6))
    at = [(x0 + (x1 - x0) * i / steps, y0 + (y1 - y0) * i / steps) for i in range(steps + 1)]
    return [Box(x - 1, y - 1, x + 1, y + 1) for x, y in at]


def _share(value: float, low: float, high: float) -> float:
    return math.log(value / low) / math.log(high / low)


def _share_of_roof(roofs: Sequence[Roof], point: Point) -> str:
    """In words; nothing for a point of the study, which is not from the machine whose roofs these are."""
    if point.impl == STUDY or not roofs or point.dtype not in roofs[0].compute:
        return ""
    return f", {point.rate / roofs[0].at(point.intensity, point.dtype):.0%} of the roof"


def _rate(rate: float) -> str:
    """
    >>> _rate(1978.9e12), _rate(38.44e9)
    ('1979 TFLOPS', '38.4 GFLOPS')
    """
    value, unit = (rate / 1e12, "TFLOPS") if rate >= 1e12 else (rate / 1e9, "GFLOPS")
    return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def _time(point: Point) -> str:
    return f"{point.seconds * 1e3:.3g} ms" if point.seconds >= 1e-3 else f"{point.seconds * 1e6:.3g} µs"


def _bandwidth(rate: float) -> str:
    return f"{rate / 1e12:.3g} TB/s" if rate >= 1e12 else f"{rate / 1e9:.3g} GB/s"
