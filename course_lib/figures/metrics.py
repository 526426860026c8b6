"""Metrics of one model on one split against the number of ranks: the right figure is a flat line."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from course_lib.figures.style import COLOURS, SERIES, canvas

WRONG = (COLOURS["wrong"], *SERIES[1:4])
"""Colours of the wrong ways, in the order in which they first appear."""
LINE_HEIGHT = 0.062
"""Of a label's line, in heights of the panel."""


@dataclass(frozen=True)
class Way:
    """One way of putting the ranks' figures together."""

    name: str
    """Written at the end of its line; may have line breaks."""
    predicted: Mapping[int, float]
    """Value by number of ranks, computed in one process."""
    measured: Mapping[int, float]
    """Value by number of ranks, found by real ones."""


@dataclass(frozen=True)
class Panel:
    """One metric."""

    metric: str
    """With its unit where it has one."""
    right: Way
    wrong: Sequence[Way]


def against_world_size(panels: Sequence[Panel], number: str = "{:.3f}") -> Figure:
    """Every way's value of each metric by number of ranks: predicted as hollow marks on a line, measured solid.

    Args:
        panels: one a metric; the title tells of the first.
        number: format of the values in the title.
    """
    first = panels[0]
    right = [*first.right.predicted.values(), *first.right.measured.values()]
    wrong = [value for way in first.wrong for value in (*way.predicted.values(), *way.measured.values())]
    assert number.format(min(right)) == number.format(max(right)), "the right figure is to be the same for all"
    title = (f"{first.metric.capitalize()} is {number.format(right[0])} on any number of ranks; the wrong ways say "
             f"{number.format(min(wrong))} to {number.format(max(wrong))}")
    names = dict.fromkeys(way.name for panel in panels for way in panel.wrong)
    colours = dict(zip(names, WRONG, strict=False))
    with canvas(title, height=3.6, ncols=len(panels), squeeze=False) as (figure, axes):
        for place, panel in zip(axes[0], panels, strict=True):
            _draw(place, panel, colours)
        figure.supxlabel("number of ranks (hollow: predicted in one process; solid: measured on so many ranks)",
                         fontsize=9)
    return figure


def _draw(axes: Axes, panel: Panel, colours: Mapping[str, str]) -> None:
    ways = [(way, colours[way.name]) for way in panel.wrong] + [(panel.right, COLOURS["right"])]
    for way, colour in ways:
        axes.plot(list(way.predicted), list(way.predicted.values()), color=colour, linewidth=1.2, marker="o",
                  markersize=6, markerfacecolor="white")
        axes.plot(list(way.measured), list(way.measured.values()), "o", color=colour, markersize=6)
    axes.set(ylabel=panel.metric)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    last = max(panel.right.predicted)
    _label_ends(axes, last, [(way.name, colour, way.predicted[last]) for way, colour in ways])


def _label_ends(axes: Axes, x: float, ends: Sequence[tuple[str, str, float]]) -> None:
    """Name lines at their right ends, pushed apart where they end together."""
    low, high = axes.get_ylim()
    ends = sorted(ends, key=lambda end: end[2])
    heights = [(value - low) / (high - low) for _, _, value in ends]
    needed = [LINE_HEIGHT * (name.count("\n") + 1.2) for name, _, _ in ends]
    upwards = _apart(heights, needed)
    downwards = [-height for height in _apart([-height for height in reversed(heights)], needed[::-1])][::-1]
    for (name, colour, _), up, down in zip(ends, upwards, downwards, strict=True):
        axes.annotate(name, (x, low + (up + down) / 2 * (high - low)), xytext=(8, 0), textcoords="offset points",
                      va="center", color=colour, fontsize=8.5, fontweight="bold", linespacing=1.05,
                      annotation_clip=False)
    axes.set_ylim(low, high)


def _apart(heights: Sequence[float], needed: Sequence[float]) -> list[float]:
    """Ascending centres of labels, each raised until it clears the one before."""
    raised: list[float] = []
    for i, height in enumerate(heights):
        raised.append(max(height, raised[-1] + (needed[i - 1] + needed[i]) / 2) if raised else height)
    return raised
