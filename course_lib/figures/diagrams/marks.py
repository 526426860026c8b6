"""The marks of which diagrams consist, boxes, labels and arrows, and the look of their letters."""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

from matplotlib.colors import to_hex, to_rgb
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path

WIDTH, MARGIN = 720, 12
"""Pixels of the page, and of what stays free at its edges."""
SMALL, TEXT, TITLE = 11, 12, 15
"""Pixels of the letters: the least, the usual, the title's."""
HEAD = 7
"""Pixels of an arrow's head."""
INK, GREY, EMPTY = "#222222", "#666666", "#FFFFFF"
FONTS = "Helvetica, Arial, 'DejaVu Sans', sans-serif"
Point = tuple[float, float]


@dataclass(frozen=True)
class Box:
    """A rectangle. ``means`` says what it stands for, for whoever asks the diagram."""

    x: float
    y: float
    width: float
    height: float
    fill: str = EMPTY
    stroke: str = INK
    dashed: bool = False
    radius: float = 0
    means: Any = None

    @property
    def right(self) -> float:
        return self.x + self.width

    @property
    def bottom(self) -> float:
        return self.y + self.height

    @property
    def centre(self) -> Point:
        return self.x + self.width / 2, self.y + self.height / 2

    def edge(self, side: str, share: float = 0.5) -> Point:
        """A point on the side "left", "right", "top" or "bottom", so far along it."""
        if side in ("left", "right"):
            return (self.x if side == "left" else self.right), self.y + share * self.height
        return self.x + share * self.width, (self.y if side == "top" else self.bottom)


@dataclass(frozen=True)
class Label:
    """One line of text; ``y`` is the middle of its letters. ``ground`` is white, and hides lines below it."""

    x: float
    y: float
    text: str
    size: float = TEXT
    anchor: str = "middle"
    colour: str = INK
    bold: bool = False
    ground: bool = False

    @property
    def extent(self) -> tuple[float, float, float, float]:
        """Left, top, right, bottom, by the metrics of a wide font; in Helvetica or Arial it is narrower."""
        width = text_width(self.text, self.size, self.bold)
        left = self.x - {"start": 0.0, "middle": width / 2, "end": width}[self.anchor]
        return left, self.y - 0.5 * self.size, left + width, self.y + 0.5 * self.size


@dataclass(frozen=True)
class Arrow:
    """A line through points, with a head at its end or without."""

    points: tuple[Point, ...]
    colour: str = INK
    width: float = 1.6
    head: bool = True
    dashed: bool = False
    means: Any = None

    @property
    def tip(self) -> tuple[Point, Point, Point]:
        """The corners of the head."""
        (x0, y0), (x1, y1) = self.points[-2:]
        length = math.hypot(x1 - x0, y1 - y0) or 1.0
        dx, dy = HEAD * (x1 - x0) / length, HEAD * (y1 - y0) / length
        return (x1, y1), (x1 - dx + 0.5 * dy, y1 - dy - 0.5 * dx), (x1 - dx - 0.5 * dy, y1 - dy + 0.5 * dx)

    @property
    def shaft(self) -> tuple[Point, ...]:
        """The points of the line, that ends inside the head."""
        if not self.head:
            return self.points
        _, (x0, y0), (x1, y1) = self.tip
        return (*self.points[:-1], ((x0 + x1) / 2, (y0 + y1) / 2))


def tint(colour: str, share: float) -> str:
    """A colour mixed with white; ``share`` 1 is the colour itself."""
    return to_hex([1 - share * (1 - channel) for channel in to_rgb(colour)])


@cache
def contrast(colour: str, other: str) -> float:
    """Ratio of luminances, WCAG 2.2 section 1.4.3, which asks for 4.5 for text."""
    light, dark = sorted((_luminance(colour), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def ink_on(fill: str) -> str:
    """Black or white, whichever is easier to read on a colour."""
    return max("#000000", "#FFFFFF", key=lambda ink: contrast(ink, fill))


@cache
def letters(colour: str) -> str:
    """A colour dark enough for letters on white."""
    dark: tuple[float, ...] = to_rgb(colour)
    while contrast(to_hex(dark), "#FFFFFF") < 4.5:
        dark = tuple(0.95 * channel for channel in dark)
    return to_hex(dark)


@cache
def text_width(text: str, size: float, bold: bool = False) -> float:
    """Pixels, in DejaVu Sans."""
    font = FontProperties(family="DejaVu Sans", size=size, weight="bold" if bold else "normal")
    return text_to_path.get_text_width_height_descent(text, font, False)[0]
