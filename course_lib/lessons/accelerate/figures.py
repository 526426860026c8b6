"""Figures of loss curves that should coincide, and of how far apart they are."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from course_lib.figures.style import COLOURS, SERIES, canvas, curve, end_label, label_beside, spread_out

WIDTHS = (8.0, 4.0, 1.4)
"""Points; each curve is thinner than the one below it, so that all show where they coincide."""


EQUAL = 1e-9
"""Nats at which equal losses are drawn, as a logarithmic axis has no zero."""
BETWEEN = 3e-8
"""Nats at the upper edge of the gap above them: float32 losses from 0.25 on that differ do so by 2**-25 at least."""


def world_sizes(
    curves: Mapping[int, Sequence[float]], predicted: Sequence[float], other: Sequence[float], other_name: str
) -> Figure:
    """Training loss by step at several world sizes with one global batch, beside a run with another.

    Args:
        curves: loss of each step, in nats, by world size; the others are compared with the first. Three at most.
        predicted: difference that was expected at each step, in nats.
        other: loss of each step of the run with another global batch; it may have fewer steps.
        other_name: what to call that run, in a word or two.
    """
    apart = worst_difference(curves)
    title = f"{_listed(list(curves))} ranks on the same global batches: losses within {apart:.2g} nats"
    with canvas(title, ncols=2, width_ratios=(1.35, 1)) as (figure, (losses, gaps)):
        _draw_losses(losses, curves, other, other_name)
        _draw_differences(gaps, curves, predicted, other, other_name)
    return figure


def worst_difference(curves: Mapping[int, Sequence[float]]) -> float:
    """The largest difference, in nats, between the first curve and any other at any step."""
    first, *rest = (np.asarray(curve) for curve in curves.values())
    return max(float(np.abs(curve - first).max()) for curve in rest)


def _draw_losses(axes: Axes, curves: Mapping[int, Sequence[float]], other: Sequence[float], other_name: str) -> None:
    ends = []
    for (ranks, losses), colour, width in zip(curves.items(), SERIES, WIDTHS, strict=False):
        curve(axes, losses, color=colour, linewidth=width, solid_capstyle="round", label=_name(ranks))
        ends.append((_name(ranks), colour, len(losses), losses[-1]))
    look = {"color": COLOURS["wrong"]}
    curve(axes, other, linewidth=1.4, label=other_name, **look)
    label_beside(axes, (len(other), other[-1]), (0, -6), other_name, ha="right", va="top", fontweight="bold", **look)
    axes.set(xlabel="optimizer step", ylabel="training loss (nats)")
    _label_ends(axes, ends)


def _draw_differences(
    axes: Axes,
    curves: Mapping[int, Sequence[float]],
    predicted: Sequence[float],
    other: Sequence[float],
    other_name: str,
) -> None:
    (reference, first), *rest = curves.items()
    drawn = [(other_name, COLOURS["wrong"], 3.0, other)]
    drawn += [
        (_name(ranks), colour, width, losses)
        for (ranks, losses), colour, width in zip(rest, SERIES[1:], WIDTHS, strict=False)
    ]
    ends = [("predicted", COLOURS["neutral"], len(predicted), predicted[-1])]
    for number, (name, colour, size, losses) in enumerate(drawn):
        apart = np.maximum(np.abs(np.asarray(losses) - np.asarray(first)[: len(losses)]), EQUAL).tolist()
        curve(axes, apart, color=colour, linestyle="", marker="o", markersize=size, label=name)
        if number:  # the points of each lie on two levels, so that a name at either would be that level's
            axes.text(
                len(first) + 1.2, BETWEEN / 3**number, f"\u25cf {name}", color=colour, va="center", fontweight="bold"
            )
        else:
            ends.append((name, colour, len(losses), apart[-1]))
    curve(axes, predicted, color=COLOURS["neutral"], linewidth=1.2, linestyle="--", label="predicted")
    axes.set(yscale="log", xlabel="optimizer step", ylabel=f"difference from {_name(reference)} (nats)")
    powers = range(-7, 2, 2)
    axes.set_yticks([EQUAL, *(10.0**power for power in powers)], ["equal", *(f"$10^{{{power}}}$" for power in powers)])
    axes.minorticks_off()
    _label_ends(axes, ends)


def _label_ends(axes: Axes, ends: Sequence[tuple[str, str, int, float]], gap: float = 0.07) -> None:
    """Name lines (name, colour, x, y) at their ends, pushed apart to ``gap`` of the axis's height where they meet."""
    axes.autoscale_view()  # the limits are to be final
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = sorted(ends, key=lambda end: end[3])
    heights = [float(to_axes.transform((x, y))[1]) for _, _, x, y in ends]
    upwards = spread_out(heights, gap)
    downwards = [-height for height in spread_out([-height for height in reversed(heights)], gap)][::-1]
    for (name, colour, x, _), up, down in zip(ends, upwards, downwards, strict=True):
        end_label(axes, x, float(to_axes.inverted().transform((0, (up + down) / 2))[1]), name, colour)


def _name(ranks: int) -> str:
    return f"{ranks} rank" + "s" * (ranks != 1)


def _listed(numbers: Sequence[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}" if most else last
