"""Figures of seeds beside settings, and a classifier's confusion matrix."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from course_lib.figures.style import COLOURS, SERIES, canvas, end_label, label_right


def compare_seeds(losses: pd.DataFrame, constant: float, name: str) -> Figure:
    """The final loss of every run: a column of points for each setting, their mean, and the loss of a constant.

    Args:
        losses: in nats; a row for each seed, a column for each setting.
        constant: loss of a constant, in nats.
        name: of what the settings set.
    """
    means, spread = losses.mean(), losses.std()
    better = losses.max().max() < constant
    title = (
        f"Settings are {np.ptp(means):.2g} nats apart; seeds spread by {spread.min():.2g} to {spread.max():.2g}, "
        f"and {'all runs beat' if better else 'not all beat'} a constant"
    )
    with canvas(title, width=6.6, height=3.2) as (figure, axes):
        axes.axhline(constant, color=COLOURS["wrong"], linestyle="--", linewidth=1.4, label="a constant")
        for place, (setting, colour) in enumerate(zip(losses, SERIES, strict=False)):
            points = {"color": colour, "alpha": 0.7, "markersize": 7, "label": "every seed"}
            axes.plot([place] * len(losses), losses[setting], "o", **points)
            axes.plot([place - 0.18, place + 0.18], [means[setting]] * 2, color=colour, label="mean")
            label_right(axes, place + 0.18, means[setting], f"mean {means[setting]:.3f}")
        end_label(axes, len(means) - 0.4, constant, "a constant", COLOURS["wrong"])
        axes.set_xticks(range(len(means)), [f"{name} {setting:g}" for setting in losses])
        axes.set(xlim=(-0.5, len(means) - 0.4), ylabel="test loss (nats)")
    return figure


def confusion(labels: Sequence[str], counts: Sequence[Sequence[int]]) -> Figure:
    """A confusion matrix, ``counts[actual][predicted]``, shaded by the share of its row."""
    matrix = np.array(counts)
    shares = matrix / matrix.sum(axis=1, keepdims=True).clip(min=1)
    worst = int(np.diag(shares).argmin())
    title = f"Of {matrix[worst].sum()} texts that are {labels[worst]}, {matrix[worst, worst]} are recognised"
    with canvas(title, width=4.8, height=3.4) as (figure, axes):
        axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
        for (row, column), count in np.ndenumerate(matrix):
            ink = "white" if shares[row, column] > 0.5 else "black"
            axes.text(column, row, str(count), ha="center", va="center", color=ink)
        axes.set_xticks(range(len(labels)), labels)
        axes.set_yticks(range(len(labels)), labels)
        axes.set(xlabel="predicted", ylabel="actual")
        axes.grid(visible=False)
    return figure
