"""Figures of expert parallelism: what each rank works on, and how remedies even the load."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from course_lib.figures.style import COLOURS, SERIES, canvas, curve, end_label, spread_out, stack

LAST = 10
"""Steps at the end of a training; a title has their mean."""


def worked(copies: Mapping[str, Sequence[int]]) -> Figure:
    """Copies that each rank's experts work on, and how many fewer than the busiest rank's: the rest is waiting.

    Args:
        copies: by rank, by what they were counted in.
    """
    idle = {name: 1 - sum(of) / (len(of) * max(of)) for name, of in copies.items()}
    worst = max(idle, key=lambda name: idle[name])
    colours = {"copies": COLOURS["forward"], "waiting": COLOURS["idle"]}
    title = f"In the {worst} the ranks wait for {idle[worst]:.0%} of the layer, counted in copies"
    with canvas(title, height=2.9, ncols=len(copies), sharex=True) as (figure, axes):
        for side, (name, of) in zip(axes, copies.items(), strict=True):
            for rank, number in enumerate(of):
                stack(side, rank, {"copies": number, "waiting": max(of) - number}, colours, lies=True)
                side.text(number, rank, f" {number}", va="center", fontsize=9)
            side.set_title(name, fontsize=10)
            side.set_yticks(range(len(of)), [f"rank {rank}" for rank in range(len(of))])
            side.tick_params(labelleft=side is axes[0])
            side.invert_yaxis()
            side.margins(x=0.26)
            side.grid(axis="y", visible=False)
            side.set_xlabel("copies (grey: waiting)")
    return figure


def imbalance(curves: Mapping[str, Sequence[float]]) -> Figure:
    """Copies of the busiest expert by the mean, over the steps of a training.

    Args:
        curves: a number per step, by the name of the remedy; the first is without one.
    """
    ends = {name: float(np.mean(values[-LAST:])) for name, values in curves.items()}
    first, best = next(iter(ends)), min(ends, key=ends.__getitem__)
    title = (
        f"In the last {LAST} steps the busiest expert has {ends[first]:.1f} times its share, "
        f"{ends[best]:.1f} with the {best}"
    )
    with canvas(title, height=3.2) as (figure, axes):
        labels = spread_out([values[-1] for values in curves.values()], 0.075 * max(map(max, curves.values())))
        for (name, values), at, colour in zip(curves.items(), labels, SERIES, strict=False):
            curve(axes, values, color=colour, linewidth=1.6, label=name)
            end_label(axes, len(values), at, name, colour)
        axes.axhline(1, color=COLOURS["neutral"], linewidth=1, linestyle="--")
        axes.set(xlabel="step", ylabel="busiest expert, over a fair share\n(dashed line: even)")
        axes.set_ylim(bottom=0)
    return figure
