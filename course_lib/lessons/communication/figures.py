"""Figures of less communication: what a step waits on a link, and the loss over seconds at three links."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from course_lib.figures.style import COLOURS, SERIES, canvas, label_beside


def bill(compute: float, waits: Mapping[str, float]) -> Figure:
    """Seconds of one step of data parallelism: what it computes, and what its all-reduce takes on a link.

    Args:
        compute: seconds.
        waits: by link.
    """
    slowest = max(waits, key=lambda link: waits[link])
    share = waits[slowest] / (compute + waits[slowest])
    with canvas(f"At {slowest} a step waits {share:.0%} of its time", height=2.3) as (figure, axes):
        for row, (_, wait) in enumerate(waits.items()):
            axes.barh(row, 1000 * compute, height=0.6, color=COLOURS["forward"], label="computing")
            axes.barh(
                row, 1000 * wait, left=1000 * compute, height=0.6, color=COLOURS["communication"], label="all-reduce"
            )
            label_beside(axes, (1000 * (compute + wait), row), (5, 0), f"{1000 * (compute + wait):.0f}", va="center")
        axes.set_yticks(range(len(waits)), list(waits))
        axes.invert_yaxis()
        axes.margins(x=0.1)
        axes.grid(axis="y", visible=False)
        axes.grid(axis="x")
        axes.set_xlabel("milliseconds per step (blue: computing, orange: all-reduce)")
    return figure


def loss_over_seconds(curves: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]], title: str) -> Figure:
    """Validation loss over the seconds that a link lets a training take, a panel per link.

    A way whose name begins with an earlier one's has its colour, and a broken line.

    Args:
        curves: by link, by way: (seconds, nats per byte) of each evaluation.
        title: the finding.
    """
    ways = list(next(iter(curves.values())))
    first = {way: next(other for other in ways if way.startswith(other)) for way in ways}
    colours = dict(zip(dict.fromkeys(first.values()), SERIES, strict=False))
    with canvas(title, width=9.5, height=3.4, ncols=len(curves), sharey=True) as (figure, panels):
        for axes, (link, by_way) in zip(panels, curves.items(), strict=True):
            for way, points in by_way.items():
                axes.plot(
                    *zip(*points, strict=True),
                    color=colours[first[way]],
                    marker="o",
                    markersize=3,
                    linestyle="-" if first[way] == way else "--",
                    label=way,
                )
            axes.set_title(link, fontsize=10)
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
            axes.xaxis.set_minor_formatter(NullFormatter())
            axes.set_xlabel("seconds (logarithmic)")
        panels[0].set_ylabel("validation loss, nats per byte")
        last = {way: points[-1][1] for way, points in next(iter(curves.values())).items()}
        for way, place in apart(last, 0.075, panels[-1].get_ylim()).items():
            name = way if first[way] == way else f"{way} (dashed)"
            panels[-1].annotate(
                name,
                (1.03, place),
                xycoords="axes fraction",
                va="center",
                color=colours[first[way]],
                fontweight="bold",
                fontsize=9,
                annotation_clip=False,
            )
    return figure


def apart(values: Mapping[str, float], gap: float, limits: tuple[float, float]) -> dict[str, float]:
    """Heights of labels, as shares of an axis with these limits, in the order given: at least a gap between any two."""
    low, high = limits
    below, placed = float("-inf"), {}
    for name in sorted(values, key=lambda name: values[name]):
        below = placed[name] = max((values[name] - low) / (high - low), below + gap)
    return {name: placed[name] for name in values}
