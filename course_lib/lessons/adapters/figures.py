"""Figures of lesson 19: memory and messages by method and strategy, 4-bit levels, what is kept for backward."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from course_lib.figures.style import COLOURS, SERIES, canvas, key, label_above, label_right, name_rows, stack

ByMethod = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Bytes by strategy, method and kind."""


def memory(held: ByMethod, planned: ByMethod, title: str) -> Figure:
    """Bytes of a rank by kind, a panel per strategy and a bar per method; what was planned stands hatched beside.

    Args:
        held: by strategy, method and kind, counted.
        planned: likewise, by formula.
        title: the finding.
    """
    with canvas(title, width=9.5, height=3.5, ncols=len(held), sharey=True) as (figure, panels):
        for axes, (way, methods) in zip(panels, held.items(), strict=True):
            for at, (method, kinds) in enumerate(methods.items()):
                counted = stack(axes, at - 0.2, _megabytes(kinds), COLOURS, size=0.36)
                stack(axes, at + 0.2, _megabytes(planned[way][method]), COLOURS, size=0.36, predicted=True)
                label_above(axes, at - 0.2, counted, f"{counted:.1f}", fontsize=8)
            axes.set_xticks(range(len(methods)), list(methods))
            axes.set_title(way, fontsize=10)
        panels[0].set_ylabel("MB per rank\n(solid: counted, hatched: planned)")
        kinds = next(iter(next(iter(held.values())).values()))
        key(figure, {kind: COLOURS[kind] for kind in kinds}, loc="outside lower center", ncols=4, fontsize=8)
    return figure


def _megabytes(sizes: Mapping[str, float]) -> dict[str, float]:
    return {kind: size / 1e6 for kind, size in sizes.items()}


def losses(by_trained: Mapping[str, tuple[float, float]], before: float, title: str) -> Figure:
    """Validation loss after fine-tuning over the share of the parameters that were trained.

    Args:
        by_trained: by way: (share of the parameters, loss).
        before: loss of the base model.
        title: the finding.
    """
    with canvas(title, width=7, height=3) as (figure, axes):
        axes.axhline(before, color=COLOURS["neutral"], linewidth=1, linestyle=":", label="before")
        axes.annotate("before", (100, before), va="bottom", ha="right", fontsize=9, color=COLOURS["neutral"])
        points = {way: (100 * share, loss) for way, (share, loss) in by_trained.items()}
        axes.plot(*zip(*points.values(), strict=True), color=COLOURS["parameters"])
        for way, point in points.items():
            axes.plot(*point, "o", color=COLOURS["parameters"], label=way)
            label_above(axes, *point, way, 7, fontsize=9, fontweight="bold", color=COLOURS["parameters"])
        axes.set(
            xscale="log", xlabel="share of the parameters that are trained, %", ylabel="validation loss, nats per byte"
        )
        axes.set_xticks([1, 10, 100], ["1", "10", "100"])
        axes.minorticks_off()
        axes.margins(y=0.2)
    return figure


def four_bits(values: Sequence[float], levels: Mapping[str, Sequence[float]], title: str) -> Figure:
    """The weights of a layer, each divided by the largest of its block, and the 16 levels of several formats.

    Args:
        values: from -1 to 1.
        levels: by format.
        title: the finding.
    """
    with canvas(title, width=8, height=2.8) as (figure, axes):
        axes.hist(np.asarray(values), bins=80, color=COLOURS["idle"], density=True)
        for row, (name, places) in enumerate(levels.items()):
            height = -0.22 - 0.25 * row
            axes.plot(
                places, [height] * len(places), "|", color=SERIES[row], markersize=11, markeredgewidth=1.8, label=name
            )
            look = {"va": "center", "color": SERIES[row], "fontweight": "bold", "fontsize": 9}
            axes.annotate(name, (1.04, height), annotation_clip=False, **look)
        axes.set(
            xlabel="weight, divided by the largest magnitude of its block of 64", ylabel="density", xlim=(-1.03, 1.03)
        )
        axes.set_ylim(bottom=-0.25 * len(levels) - 0.2)
        axes.set_yticks([0, 0.5, 1])
        axes.grid(visible=False)
    return figure


def left(kept: Mapping[str, Mapping[str, float]], title: str) -> Figure:
    """Bytes by kind of one fine-tuning, a bar for each thing that is done about the activations.

    Args:
        kept: by way, by kind.
        title: the finding.
    """
    with canvas(title, width=8, height=0.9 + 0.4 * len(kept)) as (figure, axes):
        for row, kinds in enumerate(kept.values()):
            end = stack(axes, row, _megabytes(kinds), COLOURS, lies=True)
            label_right(axes, end, row, f"{end:.1f}", 4, fontsize=9)
        name_rows(axes, kept, "MB on the device", room=0.1)
        key(axes, {kind: COLOURS[kind] for kind in next(iter(kept.values()))}, fontsize=8, ncols=4, loc="lower right")
    return figure
