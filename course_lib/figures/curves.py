"""Loss curves that should be one curve, and how far apart they are."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from course_lib.figures.style import COLOURS, SERIES, canvas, end_label

WIDTHS = (7.0, 3.5, 1.2)
"""Points; each curve is thinner than the one below it, so that all show where they coincide."""


def same_global_batch(curves: Mapping[int, Sequence[float]], other: Sequence[float], other_name: str) -> Figure:
    """Training loss by step at several world sizes with one global batch, beside a run with another.

    Args:
        curves: loss of each step by world size, the smallest first: the one the others are compared with.
        other: loss of each step of the run with another global batch.
        other_name: what to call that run.
    """
    first, *rest = curves
    ranks = ", ".join(str(n) for n in rest[:-1]) + " and " if rest[:-1] else ""
    title = (f"{ranks}{rest[-1]} ranks follow {first} rank to within {worst_difference(curves):.0e}: "
             f"one global batch, one curve")
    with canvas(title, ncols=2, width_ratios=(1.5, 1)) as (figure, (losses, gaps)):
        _draw_losses(losses, curves, other, other_name)
        _draw_differences(gaps, curves, other, other_name)
    return figure


def worst_difference(curves: Mapping[int, Sequence[float]]) -> float:
    """The largest difference, in nats, between the first curve and any other at any step."""
    first, *rest = (np.asarray(curve) for curve in curves.values())
    return max(float(np.abs(curve - first).max()) for curve in rest)


def _draw_losses(axes: Axes, curves: Mapping[int, Sequence[float]], other: Sequence[float], other_name: str) -> None:
    axes.plot(range(1, len(other) + 1), other, color=COLOURS["wrong"], linewidth=1.5)
    end_label(axes, len(other), other[-1], other_name, COLOURS["wrong"])
    lines = zip(curves.items(), SERIES, WIDTHS, strict=False)
    for (ranks, curve), colour, width in lines:
        axes.plot(range(1, len(curve) + 1), curve, color=colour, linewidth=width, solid_capstyle="round")
    axes.set(xlabel="optimizer step", ylabel="training loss (nats)")


def _draw_differences(axes: Axes, curves: Mapping[int, Sequence[float]], other: Sequence[float],
                      other_name: str) -> None:
    pass
