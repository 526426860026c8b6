"""One look for every figure: the same colour for the same thing, readable at the size it is shown.

The colours are the Okabe-Ito palette (jfly.uni-koeln.de/color), which colour-blind readers can
tell apart. What is predicted is hollow and hatched, what is measured is solid.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

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
PREDICTED: dict[str, Any] = {"fill": False, "hatch": "////", "linewidth": 1.2}

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


def end_label(axes: Axes, x: float, y: float, text: str, colour: str) -> None:
    """Name a line at its right end rather than in a legend."""
    label_beside(axes, (x, y), (6, 0), text, va="center", color=colour, fontweight="bold", annotation_clip=False)
