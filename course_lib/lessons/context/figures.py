"""Figures of context parallelism: what each way sends, and how long each step of a causal ring lasts."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from course_lib.figures.style import COLOURS, PREDICTED, SERIES, canvas, label_above, label_right, upright_grid

OUTLINE = {**PREDICTED, "hatch": None, "edgecolor": "black", "linestyle": "--"}
KB = 1e3


def sent(counted: Mapping[str, Mapping[str, int]], predicted: Mapping[str, Mapping[str, int]]) -> Figure:
    """Bytes that a rank sends in one attention, forward and backward together.

    Args:
        counted: bytes by way, by kind of heads.
        predicted: the same by formula.
    """
    kinds = list(counted)
    more = [of["ulysses"] / of["ring"] for of in counted.values()]
    title = f"Ulysses sends {more[0]:.2f} times the ring's bytes with {kinds[0]}, {more[1]:.2f} with {kinds[1]}"
    with canvas(title, ncols=2, height=2.7, sharey=True) as (figure, both):
        for axes, kind in zip(both, kinds, strict=True):
            for row, (way, value) in enumerate(counted[kind].items()):
                axes.barh(row, value / KB, height=0.5, color=COLOURS["communication"], label="counted")
                axes.barh(row, predicted[kind][way] / KB, height=0.72, **OUTLINE, label="predicted")
                label_right(axes, value / KB, row, f"{value / KB:.0f}", 6)
            axes.set_title(kind, fontsize=10)
            axes.margins(x=0.18)
            upright_grid(axes)
            axes.set_xlabel("kB sent by a rank\n(broken line: predicted)")
        both[0].set_yticks(range(len(counted[kinds[0]])), list(counted[kinds[0]]))
        both[0].invert_yaxis()
    return figure


def balance(work: Mapping[str, Sequence[Sequence[int]]]) -> Figure:
    """Scores that each rank computes in each step of the ring; a step lasts as long as its busiest rank.

    Args:
        work: by layout, by step, by rank: pairs of query and key.
    """
    lasts = {layout: sum(map(max, steps)) for layout, steps in work.items()}
    first, second = work
    title = f"By the count a {first} ring lasts {lasts[first] / lasts[second]:.2f} times as long as in {second}"
    with canvas(title, ncols=2, height=2.9, sharey=True) as (figure, both):
        for axes, (layout, steps) in zip(both, work.items(), strict=True):
            ranks = len(steps[0])
            for rank in range(ranks):
                at = np.arange(len(steps)) + (rank - (ranks - 1) / 2) * 0.8 / ranks
                axes.bar(
                    at, [step[rank] for step in steps], width=0.74 / ranks, color=SERIES[rank], label=f"rank {rank}"
                )
                label_above(axes, at[0], steps[0][rank], f"rank {rank}", fontsize=8, color=SERIES[rank])
            for place, step in enumerate(steps):
                level = {"color": "black", "linestyle": "--", "linewidth": 1.2, "label": "the step lasts"}
                axes.plot([place - 0.45, place + 0.45], [max(step)] * 2, **level)
            axes.set_title(f"{layout}: the steps last {lasts[layout]:,}", fontsize=10)
            axes.set_xticks(range(len(steps)), [f"step {number}" for number in range(len(steps))])
            axes.margins(y=0.14)
        both[0].set_ylabel("pairs of query and key\n(broken line: the step lasts)")
    return figure
