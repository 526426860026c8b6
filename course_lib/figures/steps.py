"""Figures of one training step: what it holds, where its time goes, what is padding, and whether it can be resumed."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from course_lib.figures.style import COLOURS, PREDICTED, canvas, end_label
from course_lib.training.anatomy import Moment, padding_share

MB = 1e6


def memory_over_steps(moments: Sequence[Moment]) -> Figure:
    """Bytes by kind, stacked, over the time of the steps that were watched."""
    seconds = np.array([moment.seconds for moment in moments])
    kinds = ("parameters", "optimizer states", "gradients", "activations")
    held = {kind: np.array([moment.held[kind] for moment in moments]) / MB for kind in kinds}
    total = sum(held.values())
    peak = int(np.argmax(total))
    first = next(i for i in range(1, len(moments)) if moments[i - 1].phase == "optimizer" != moments[i].phase)
    title = f"Step 1 peaks at {total[:first].max():.0f} MB, step 2 at {total[first:].max():.0f} MB"
    with canvas(title) as (figure, axes):
        axes.stackplot(seconds, *held.values(), colors=[COLOURS[kind] for kind in kinds], step="post", linewidth=0)
        axes.set(xlabel="seconds", ylabel="MB held", xlim=(0, seconds[-1]), ylim=(0, total.max() * 1.22))
        base = np.zeros(len(moments))
        for kind in kinds:
            _name_area(axes, seconds, base, held[kind], kind, total.max())
            base += held[kind]
        starts = [0] + [i for i in range(1, len(moments)) if moments[i].phase != moments[i - 1].phase]
        for start, end in zip(starts, [*starts[1:], len(moments) - 1], strict=True):
            if seconds[end] - seconds[start] > 0.08 * seconds[-1]:
                axes.text((seconds[start] + seconds[end]) / 2, total.max() * 1.19, moments[start].phase, ha="center",
                          va="top", color=COLOURS["neutral"], fontsize=9)
            axes.axvline(seconds[start], color="white" if start else "none", linewidth=1)
            axes.axvline(seconds[start], ymin=0.9, color=COLOURS["neutral"] if start else "none", linewidth=0.6)
        axes.plot(seconds[peak], total[peak], "o", color="black", markersize=4)
        axes.annotate("peak", (seconds[peak], total[peak]), xytext=(-6, 2), textcoords="offset points", ha="right")
    return figure


def _name_area(axes, seconds: np.ndarray, base: np.ndarray, height: np.ndarray, name: str, top: float) -> None:
    """Write an area's name where it is tallest."""
    if height.max() > 0.06 * top:
        at = np.flatnonzero(height >= 0.85 * height.max())
        widest = max(np.split(at, np.flatnonzero(np.diff(at) > 1) + 1), key=lambda run: seconds[run[-1]] - seconds[run[0]])
        middle = (seconds[widest[0]] + seconds[widest[-1]]) / 2
        where = widest[int(np.argmin(abs(seconds[widest] - middle)))]
        axes.text(middle, base[where] + height[where] / 2, name, ha="center", va="center", color="white",
                  fontweight="bold", fontsize=9)
