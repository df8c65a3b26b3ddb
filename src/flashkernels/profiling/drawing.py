"""Pictures as lists of lines, dots and texts in pixels, y downwards: the same one becomes SVG for a page, or a PNG.

Colours have names. On a page they are its CSS variables, which follow light and dark; a PNG is light.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

PALETTE = {
    "ink": "#1d2129", "quiet": "#626b78", "grid": "#e3e5e8", "card": "#ffffff", "c0": "#1f5fd6", "c1": "#d9480f",
    "c2": "#0c8599", "c3": "#6741d9", "c4": "#c2255c", "c5": "#5c940d", "c6": "#a87400", "c7": "#495057",
    "c8": "#087f5b", "c9": "#9c36b5", "ca": "#862e2e", "cb": "#2b3a67",
    "cc": "#d000d0", "cd": "#006400", "ce": "#000000", "cf": "#2a0b00",
}  # fmt: skip
COLOURS = 16  # c0 to cf, all that one letter counts
SHAPES = {"circle": "o", "square": "s", "diamond": "D"}  # of dots, with matplotlib's names
FONT = 12.0  # pixels
DPI = 150


@dataclass(frozen=True)
class Line:
    points: tuple[tuple[float, float], ...]
    colour: str
    width: float = 1.0
    dash: str = ""  # as in SVG: "4 3"
    group: str = ""


@dataclass(frozen=True)
class Dot:
    x: float
    y: float
    colour: str
    title: str  # what a reader sees who points at it
    radius: float = 3.5
    group: str = ""
    shape: str = "circle"  # one of SHAPES


@dataclass(frozen=True)
class Text:
    x: float
    y: float  # of the baseline
    text: str
    colour: str = "ink"
    size: float = FONT
    anchor: str = "start"  # start, middle or end
    group: str = ""
    upright: bool = True  # False: along the left edge, read from the bottom up


@dataclass
class Scene:
    """A picture. A `group` is what a reader can show and hide together."""

    width: float
    height: float
    marks: list[Line | Dot | Text] = field(default_factory=list)

    def add(self, *marks: Line | Dot | Text) -> None:
        self.marks += marks


def text_size(text: str, size: float = FONT) -> tuple[float, float]:
    """Width and height that a text takes at most, in a font whose average letter is 0.62 of its size wide.

    >>> text_size("hopper", 10)
    (37.2, 12.0)
    """
    return round(0.62 * size * len(text), 1), 1.2 * size


def svg(scene: Scene, label: str) -> str:
    """The picture as an <svg> element that scales with the page."""
    parts = [
        f'<svg viewBox="0 0 {scene.width:g} {scene.height:g}" role="img" aria-label="{escape(label)}"'
        ' xmlns="http://www.w3.org/2000/svg">'
    ]
    parts += [_element(mark) for mark in scene.marks]
    return "\n".join([*parts, "</svg>"])


def _element(mark: Line | Dot | Text) -> str:
    group = f' data-group="{escape(mark.group)}"' if mark.group else ""
    colour = f"var(--{mark.colour})"
    if isinstance(mark, Line):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in mark.points)
        dash = f' stroke-dasharray="{mark.dash}"' if mark.dash else ""
        return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{mark.width:g}"{dash}{group}/>'
    if isinstance(mark, Dot):
        title = escape(mark.title)
        tag, place = _outline(mark)
        return f'<{tag} {place} fill="{colour}" data-tip="{title}"{group}><title>{title}</title></{tag}>'
    turn = "" if mark.upright else f' transform="rotate(-90 {mark.x:.1f} {mark.y:.1f})"'
    place = f'x="{mark.x:.1f}" y="{mark.y:.1f}" font-size="{mark.size:g}" text-anchor="{mark.anchor}"'
    return f'<text {place} fill="{colour}"{turn}{group}>{escape(mark.text)}</text>'


def _outline(dot: Dot) -> tuple[str, str]:
    """The element of a dot and its place; all shapes are as wide as the circle."""
    x, y, r = dot.x, dot.y, dot.radius
    if dot.shape == "circle":
        return "circle", f'cx="{x:.1f}" cy="{y:.1f}" r="{r:g}"'
    if dot.shape == "square":
        return "rect", f'x="{x - r:.1f}" y="{y - r:.1f}" width="{2 * r:g}" height="{2 * r:g}"'
    return "polygon", f'points="{x:.1f},{y - r:.1f} {x + r:.1f},{y:.1f} {x:.1f},{y + r:.1f} {x - r:.1f},{y:.1f}"'


def png(scene: Scene, path: Path) -> None:
    """Draws the picture with matplotlib; its directory is made."""
    from matplotlib.figure import Figure
    from matplotlib.patheffects import withStroke

    figure = Figure(figsize=(scene.width / 100, scene.height / 100), facecolor=PALETTE["card"])
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, scene.width)
    axes.set_ylim(scene.height, 0)
    axes.set_axis_off()
    halo = [withStroke(linewidth=2.5, foreground=PALETTE["card"])]
    points = 0.72  # of a pixel, at 100 pixels an inch
    for mark in scene.marks:
        colour = PALETTE[mark.colour]
        if isinstance(mark, Line):
            xs, ys = zip(*mark.points, strict=True)
            style = (0, tuple(float(n) for n in mark.dash.split())) if mark.dash else "solid"
            axes.plot(xs, ys, color=colour, linewidth=points * mark.width, linestyle=style)
        elif isinstance(mark, Dot):
            size = 2 * points * mark.radius
            axes.plot(mark.x, mark.y, SHAPES[mark.shape], color=colour, markersize=size, markeredgewidth=0)
        else:
            align = {"start": "left", "middle": "center", "end": "right"}[mark.anchor]
            turn = 0 if mark.upright else 90
            axes.text(
                mark.x, mark.y, mark.text, color=colour, fontsize=points * mark.size, ha=align, va="baseline",
                rotation=turn, rotation_mode="anchor", path_effects=halo,
            )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=DPI)


def ticks(low: float, high: float) -> Sequence[float]:
    """Powers of ten between two positive numbers; where there are fewer than three, their 2- and 5-fold too.

    >>> ticks(0.5, 200), ticks(0.4, 6)
    ([1.0, 10.0, 100.0], [0.5, 1.0, 2.0, 5.0])
    """
    fine = [float(f"{m}e{n}") for n in range(-12, 19) for m in (1, 2, 5) if low <= float(f"{m}e{n}") <= high]
    coarse = [value for value in fine if f"{value:e}".startswith("1.0")]
    return coarse if len(coarse) > 2 else fine
