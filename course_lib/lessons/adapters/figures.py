"""Figures of lesson 19: memory and messages by method and strategy, 4-bit levels, what is kept for backward."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from course_lib.figures.style import COLOURS, PREDICTED, SERIES, canvas, label_beside

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
                counted = foreseen = 0.0
                for kind, size in kinds.items():
                    axes.bar(at - 0.2, size / 1e6, bottom=counted / 1e6, width=0.36, color=COLOURS[kind], label=kind)
                    expected = planned[way][method][kind]
                    axes.bar(
                        at + 0.2,
                        expected / 1e6,
                        bottom=foreseen / 1e6,
                        width=0.36,
                        edgecolor=COLOURS[kind],
                        label=kind,
                        **PREDICTED,
                    )
                    counted, foreseen = counted + size, foreseen + expected
                label_beside(axes, (at - 0.2, counted / 1e6), (0, 3), f"{counted / 1e6:.1f}", ha="center", fontsize=8)
            axes.set_xticks(range(len(methods)), list(methods))
            axes.set_title(way, fontsize=10)
        panels[0].set_ylabel("MB per rank\n(solid: counted, hatched: planned)")
        figure.legend(
            handles=[Patch(color=COLOURS[kind], label=kind) for kind in next(iter(next(iter(held.values())).values()))],
            loc="outside lower center",
            ncols=4,
            fontsize=8,
        )
    return figure


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
            label_beside(
                axes, point, (0, 7), way, ha="center", fontsize=9, fontweight="bold", color=COLOURS["parameters"]
            )
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
            axes.annotate(
                name,
                (1.04, height),
                va="center",
                color=SERIES[row],
                fontweight="bold",
                fontsize=9,
                annotation_clip=False,
            )
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
            start = 0.0
            for kind, size in kinds.items():
                axes.barh(row, size / 1e6, left=start / 1e6, height=0.6, color=COLOURS[kind], label=kind)
                start += size
            label_beside(axes, (start / 1e6, row), (4, 0), f"{start / 1e6:.1f}", va="center", fontsize=9)
        axes.set_yticks(range(len(kept)), list(kept))
        axes.invert_yaxis()
        axes.margins(x=0.1)
        axes.grid(axis="y", visible=False)
        axes.grid(axis="x")
        axes.set_xlabel("MB on the device")
        bars = [Patch(color=COLOURS[kind], label=kind) for kind in next(iter(kept.values()))]
        axes.legend(handles=bars, fontsize=8, ncols=4, loc="lower right")
    return figure
