"""One look for every figure: the same colour for the same thing, readable at the size it is shown.

The colours are the Okabe-Ito palette (jfly.uni-koeln.de/color), which colour-blind readers can
tell apart. What is predicted is hollow and hatched, what is measured is solid.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from course_lib.figures import numbers

COLOURS = {
    "parameters": "#0072B2",
    "gradients": "#E69F00",
    "optimizer states": "#009E73",
    "activations": "#CC79A7",
    "communication": "#D55E00",
    "data": "#999999",
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "backward-input": "#0072B2",
    "backward-weight": "#F0E442",
    "optimizer": "#009E73",
    "idle": "#E6E6E6",
    "right": "#0072B2",
    "wrong": "#D55E00",
    "neutral": "#555555",
}
SERIES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
Look: TypeAlias = dict[str, Any]
"""Keywords of matplotlib's functions."""
PREDICTED: Look = {"fill": False, "hatch": "////", "linewidth": 1.2}

_RC = {
    "figure.dpi": 110,
    "savefig.dpi": 110,
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#e3e3e3",
    "axes.axisbelow": True,
    "lines.linewidth": 2,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "course",
}


class Titled(Figure):
    """A figure whose title is its alternative text too, and its numbers tables, for readers who cannot see it."""

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """No picture of its own, which Jupyter draws, but what is said beside it in the notebook."""
        return {}, {"image/png": picture_metadata(self)}


def picture_metadata(figure: Figure) -> dict[str, Any]:
    """A figure's alternative text and its numbers as tables: the metadata of its picture in a notebook."""
    return {"alt": alternative(figure), "numbers": numbers.tables(figure)}


def alternative(figure: Figure) -> str:
    """The alternative text of a figure: its title, in one line."""
    return " ".join(figure.get_suptitle().split())


@contextmanager
def canvas(title: str, width: float = 7.0, height: float = 3.4, **subplots: Any) -> Iterator[tuple[Figure, Any]]:
    """A figure in the course's style, whose title says the finding; its layout is closed at the end.

    Args:
        title: the finding, in a few words.
        width: inches.
        height: inches.
        **subplots: passed to ``plt.subplots``.
    """
    with mpl.rc_context(_RC):
        figure, axes = plt.subplots(figsize=(width, height), FigureClass=Titled, layout="constrained", **subplots)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        yield figure, axes
        plt.close(figure)  # the notebook shows the returned figure; pyplot must not show it again


def label_beside(axes: Axes, point: tuple[float, float], shift: tuple[float, float], text: str, **look: Any) -> None:
    """Write beside a point: (right, up) from it, in units of 1/72 inch; ``look`` is passed to ``annotate``."""
    axes.annotate(text, point, xytext=shift, textcoords="offset points", **look)


def label_right(axes: Axes, x: float, y: float, text: str, gap: float = 5, **look: Any) -> None:
    """Write to the right of a point, as behind the end of a bar that lies."""
    label_beside(axes, (x, y), (gap, 0), text, **{"va": "center"} | look)


def label_above(axes: Axes, x: float, y: float, text: str, gap: float = 3, **look: Any) -> None:
    """Write above a point, as on a bar that stands."""
    label_beside(axes, (x, y), (0, gap), text, **{"ha": "center"} | look)


def end_label(axes: Axes, x: float, y: float, text: str, colour: str, **look: Any) -> None:
    """Name a line at its right end rather than in a legend."""
    label_right(axes, x, y, text, 6, color=colour, fontweight="bold", annotation_clip=False, **look)


def spread_out(heights: Sequence[float], gap: float) -> list[float]:
    """Heights of labels in the order given, moved up where two would be closer than a gap."""
    moved, below = list(heights), float("-inf")
    for place in sorted(range(len(heights)), key=heights.__getitem__):
        below = moved[place] = max(heights[place], below + gap)
    return moved


def name_rows(
    axes: Axes, names: Iterable[str], xlabel: str = "", *, room: float | None = None, grid: bool = True, **look: Any
) -> None:
    """Name lying bars, the first of which is at the top; lines of the grid stand.

    Args:
        axes: with the bars at 0, 1, 2 …
        names: of the rows.
        xlabel: what the bars are of.
        room: to leave free beside the longest bar, as a share of the axis.
        grid: draw its lines.
        **look: of the names.
    """
    names = list(names)
    axes.set_yticks(range(len(names)), names, **look)
    axes.invert_yaxis()
    upright_grid(axes, grid)
    axes.set_xlabel(xlabel)
    if room is not None:
        axes.margins(x=room)


def upright_grid(axes: Axes, visible: bool = True) -> None:
    """Lines of the grid that stand, and none that lie."""
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", visible=visible)


def hollow(colour: str, label: str = "predicted") -> Look:
    """Look of a bar for what was predicted."""
    return {**PREDICTED, "edgecolor": colour, "label": label}


def stack(
    axes: Axes,
    place: float,
    parts: Mapping[str, float],
    colours: Mapping[str, str],
    *,
    size: float = 0.6,
    lies: bool = False,
    predicted: bool = False,
    **look: Any,
) -> float:
    """Bars of several parts, each of which begins where the one before it ends.

    Args:
        axes: to draw on.
        place: of the row or column.
        parts: sizes by name.
        colours: by name.
        size: of the row or column across.
        lies: to the right, else upwards.
        predicted: hollow.
        **look: of the bars.
    Returns:
        Where the last one ends.
    """
    end = 0.0
    for name, part in parts.items():
        look |= hollow(colours[name], name) if predicted else {"color": colours[name], "label": name}
        if lies:
            axes.barh(place, part, left=end, height=size, **look)
        else:
            axes.bar(place, part, bottom=end, width=size, **look)
        end += part
    return end


def curve(axes: Axes, values: Mapping[Any, float] | Sequence[float], *line: str, **look: Any) -> None:
    """A line over the keys of a mapping, or of a sequence over the steps 1, 2, 3 …; ``look`` is passed to ``plot``."""
    points = values if isinstance(values, Mapping) else dict(enumerate(values, start=1))
    axes.plot(list(points), list(points.values()), *line, **look)


def dots(axes: Axes, tries: Sequence[float], row: float, label: str = "every try", **look: Any) -> None:
    """A dot for each try of a row."""
    axes.plot(tries, [row] * len(tries), "o", label=label, **look)


def key(target: Axes | Figure, colours: Mapping[str, str], **look: Any) -> None:
    """A legend of what colours stand for; ``look`` is passed to ``legend``."""
    target.legend(handles=[Patch(color=colour, label=name) for name, colour in colours.items()], **look)
