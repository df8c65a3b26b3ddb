"""Places labels beside their points so that none covers another, a point, or the edge of the picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

GAP = 2.0  # pixels between a label and anything else
DIRECTIONS = ((1, 0), (0, -1), (-1, 0), (0, 1), (1, -1), (-1, -1), (1, 1), (-1, 1))  # the side of the point, best first
REACH = (0, 8, 18, 30, 44, 60, 80, 104)  # pixels from the point; beyond the first a line leads to it


class Box(NamedTuple):
    """A rectangle in pixels, y downwards."""

    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: Box, gap: float = 0.0) -> bool:
        return (
            self.left < other.right + gap
            and other.left < self.right + gap
            and self.top < other.bottom + gap
            and other.top < self.bottom + gap
        )

    def inside(self, other: Box) -> bool:
        return (
            self.left >= other.left
            and self.top >= other.top
            and self.right <= other.right
            and self.bottom <= other.bottom
        )


class Label(NamedTuple):
    """A text of this size, in pixels, that belongs to a point."""

    x: float
    y: float
    width: float
    height: float


def place(
    labels: Sequence[Label], taken: Sequence[Box], bounds: Box, radius: float = 4.0, walls: Sequence[Box] = ()
) -> list[Box | None]:
    """A place for each label, the most important first; None for one that fits nowhere near its point.

    `taken` are boxes that stay free, such as points; `walls` too, such as text that is there already, and no line from
    a label to its point crosses them.

    >>> place([Label(50, 50, 30, 10), Label(52, 50, 30, 10)], [], Box(0, 0, 100, 100))
    [Box(left=54.0, top=45.0, right=84.0, bottom=55.0), Box(left=18.0, top=45.0, right=48.0, bottom=55.0)]
    """
    full, apart = [*taken, *walls], list(walls)
    placed: list[Box | None] = []
    for label in labels:
        free = (box for box in _candidates(label, radius) if _free(box, full, bounds))
        found = next((box for box in free if not _crosses(label, box, apart)), None)
        placed.append(found)
        if found:
            full.append(found)
            apart.append(found)
    return placed


def _candidates(label: Label, radius: float) -> list[Box]:
    boxes = []
    for reach in REACH:
        for across, down in DIRECTIONS:
            x = label.x + across * (radius + reach + label.width / 2)
            y = label.y + down * (radius + reach + label.height / 2)
            left, top = x - label.width / 2, y - label.height / 2
            boxes.append(Box(left, top, left + label.width, top + label.height))
    return boxes


def leader(label: Label, box: Box) -> tuple[float, float]:
    """Where the line from a label to its point starts: the nearest place of its box."""
    return min(max(label.x, box.left), box.right), min(max(label.y, box.top), box.bottom)


def _crosses(label: Label, box: Box, walls: Sequence[Box]) -> bool:
    """Whether the line from the box to the point meets a wall; a wall that the point itself touches does not count."""
    x, y = leader(label, box)
    steps = 1 + int(max(abs(x - label.x), abs(y - label.y)) / 2)
    path = [(x + (label.x - x) * i / steps, y + (label.y - y) * i / steps) for i in range(steps)]
    near = Box(label.x - 6, label.y - 6, label.x + 6, label.y + 6)
    return any(Box(px, py, px, py).overlaps(wall) for wall in walls if not wall.overlaps(near) for px, py in path)


def _free(box: Box, full: Sequence[Box], bounds: Box) -> bool:
    return box.inside(bounds) and not any(box.overlaps(other, GAP) for other in full)
