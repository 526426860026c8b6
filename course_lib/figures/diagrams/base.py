"""Drawing kit of the diagrams: boxes, labels and arrows on a page of 720 pixels, as SVG.

A diagram is a list of these three. So it can be asked what it shows (tests compare its arrows with what the library
sends), its SVG stays small, and its text stays text.
"""

import html
import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from course_lib.figures.diagrams.marks import (
    EMPTY,
    FONTS,
    GREY,
    INK,
    MARGIN,
    SMALL,
    TEXT,
    TITLE,
    WIDTH,
    Arrow,
    Box,
    Label,
    Point,
    ink_on,
    letters,
    text_width,
)
from course_lib.figures.style import COLOURS


class Diagram:
    """A page of boxes, with arrows over them and labels over both.

    Jupyter shows it as ``image/svg+xml``, and its words where it cannot.

    Args:
        title: the finding, in words.
        description: what is to be seen, for whoever cannot see it.
        width: pixels.
    """

    def __init__(self, title: str, description: str, width: float = WIDTH):
        self.title, self.description, self.width = title, description, width
        self.boxes: list[Box] = []
        self.labels: list[Label] = []
        self.arrows: list[Arrow] = []
        lines = _wrapped(title, width - 2 * MARGIN)
        self.head = 12.0 + 19 * len(lines)
        for number, line in enumerate(lines):
            self.text(MARGIN, 17 + 19 * number, line, TITLE, "start", bold=True)

    def box(  # noqa: PLR0913 -- how a rectangle looks
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        text: str = "",
        *,
        fill: str = EMPTY,
        stroke: str = INK,
        dashed: bool = False,
        radius: float = 0,
        size: float = TEXT,
        bold: bool = False,
        means: Any = None,
    ) -> Box:
        """A rectangle, with lines of text in its middle."""
        drawn = Box(x, y, width, height, fill, stroke, dashed, radius, means)
        self.boxes.append(drawn)
        if text:
            self.text(*drawn.centre, text, size, colour=ink_on(fill), bold=bold)
        return drawn

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: float = TEXT,
        anchor: str = "middle",
        colour: str = INK,
        bold: bool = False,
        ground: bool = False,
    ) -> None:
        """Lines of text around (x, y); a colour too pale for letters is darkened."""
        lines = text.split("\n")
        for number, line in enumerate(lines):
            middle = y + 1.3 * size * (number - (len(lines) - 1) / 2)
            colour = colour if colour == EMPTY else letters(colour)
            self.labels.append(Label(x, middle, line, size, anchor, colour, bold, ground))

    def note(self, x: float, y: float, text: str, colour: str = GREY) -> None:
        """Small lines of text that begin at x."""
        self.text(x, y, text, SMALL, "start", colour)

    def arrow(
        self,
        *points: Point,
        colour: str = INK,
        width: float = 1.6,
        head: bool = True,
        dashed: bool = False,
        means: Any = None,
    ) -> Arrow:
        """An arrow through points; a line where ``head`` is False."""
        drawn = Arrow(points, colour, width, head, dashed, means)
        self.arrows.append(drawn)
        return drawn

    def lane(self, y: float, name: str, left: float, right: float, height: float) -> Box:
        """The grey lane of a time line, with its name to the left."""
        self.text(left - 8, y + height / 2, name, anchor="end")
        return self.box(left, y, right - left, height, fill=COLOURS["idle"], stroke="none", means=("lane", name))

    def time_axis(self, left: float, right: float, y: float) -> None:
        """An arrow to the right with "time" at its end."""
        self.arrow((left, y), (right, y), colour=GREY, width=1.2)
        self.text(right, y + 12, "time", SMALL, "end", GREY)

    @property
    def height(self) -> float:
        """Pixels down to the lowest thing drawn, and a margin."""
        ends = [box.bottom for box in self.boxes] + [label.extent[3] + 3 for label in self.labels]
        ends += [y for arrow in self.arrows for _, y in arrow.points]
        return math.ceil(max(ends) + 10)

    def svg(self) -> str:
        """The diagram as one SVG element, with title and description for screen readers."""
        title, description = html.escape(self.title), html.escape(self.description)
        size = f"{self.width:g} {self.height:g}"
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" width="{self.width:g}" '
                f'height="{self.height:g}" role="img" aria-label="{title}" font-family="{FONTS}" fill="none" '
                'style="max-width:100%;height:auto">',
                f"<title>{title}</title>",
                f"<desc>{description}</desc>",
                '<rect width="100%" height="100%" fill="#fff"/>',
                _svg_boxes(self.boxes),
                *map(_svg_arrow, self.arrows),
                _svg_boxes(self._grounds()),
                _svg_labels(self.labels),
                "</svg>",
            ]
        )

    def _grounds(self) -> list[Box]:
        """White boxes under the labels that lie over lines."""
        extents = [label.extent for label in self.labels if label.ground]
        return [
            Box(left - 3, top - 2, right - left + 6, bottom - top + 4, stroke="none")
            for left, top, right, bottom in extents
        ]

    def _repr_svg_(self) -> str:
        return self.svg()

    def __repr__(self) -> str:
        return f"{self.title}. {self.description}"


def _wrapped(text: str, width: float) -> list[str]:
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if text_width(longer, TITLE, True) <= width:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def _number(value: float) -> str:
    return f"{round(value, 1):g}"


def _points(points: Sequence[Point]) -> list[str]:
    return [f"{_number(x)} {_number(y)}" for x, y in points]


def _svg_boxes(boxes: Sequence[Box]) -> str:
    """Neighbours of one look share their attributes; a box with square corners is a path of 5 letters."""
    lines = []
    for (fill, stroke, dashed, radius), alike in groupby(boxes, lambda b: (b.fill, b.stroke, b.dashed, b.radius)):
        look = f'fill="{_short(fill)}" stroke="{_short(stroke)}"' + ' stroke-dasharray="4 3"' * dashed
        sizes = [tuple(map(_number, (box.x, box.y, box.width, box.height))) for box in alike]
        if radius:
            lines += [
                f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="{radius:g}" {look}/>' for x, y, w, h in sizes
            ]
        else:
            path = "".join(f"M{x} {y}h{w}v{h}h-{w}z" for x, y, w, h in sizes)
            lines.append(f'<path d="{path}" {look}/>')
    return "\n".join(lines)


def _svg_labels(labels: Sequence[Label]) -> str:
    lines = []
    for (size, anchor, colour, bold), alike in groupby(labels, lambda x: (x.size, x.anchor, x.colour, x.bold)):
        look = f'font-size="{size:g}" fill="{_short(colour)}" text-anchor="{anchor}"' + ' font-weight="bold"' * bold
        lines.append(f"<g {look}>")
        lines += [
            f'<text x="{_number(label.x)}" y="{_number(label.y + 0.35 * label.size)}">'
            f"{html.escape(label.text, quote=False)}</text>"
            for label in alike
        ]
        lines.append("</g>")
    return "\n".join(lines)


def _svg_arrow(arrow: Arrow) -> str:
    first, *others = _points(arrow.shaft)
    route = f"M{first}L" + " ".join(others)
    line = f'<path d="{route}" stroke="{_short(arrow.colour)}" stroke-width="{arrow.width:g}"'
    line += ' stroke-dasharray="5 3"' * arrow.dashed + "/>"
    tip = f'<path d="M{" ".join(_points(arrow.tip))}z" fill="{_short(arrow.colour)}"/>'
    return line + tip * arrow.head


def _short(colour: str) -> str:
    """#222222 as #222."""
    return f"#{colour[1]}{colour[3]}{colour[5]}" if colour[1::2] == colour[2::2] and colour[0] == "#" else colour
