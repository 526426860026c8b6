"""Figures of less communication: what a step waits on a link, and the loss over seconds at three links."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from course_lib.figures.style import COLOURS, SERIES, canvas, label_right, name_rows, spread_out, stack


def bill(compute: float, waits: Mapping[str, float]) -> Figure:
    """Seconds of one step of data parallelism: what it computes, and what its all-reduce takes on a link.

    Args:
        compute: seconds.
        waits: by link.
    """
    slowest = max(waits, key=lambda link: waits[link])
    share = waits[slowest] / (compute + waits[slowest])
    with canvas(f"At {slowest} a step waits {share:.0%} of its time", height=2.3) as (figure, axes):
        colours = {"computing": COLOURS["forward"], "all-reduce": COLOURS["communication"]}
        for row, wait in enumerate(waits.values()):
            parts = {"computing": 1000 * compute, "all-reduce": 1000 * wait}
            end = stack(axes, row, parts, colours, lies=True)
            label_right(axes, end, row, f"{end:.0f}")
        name_rows(axes, waits, "milliseconds per step (blue: computing, orange: all-reduce)", room=0.1)
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
            look = {"color": colours[first[way]], "fontweight": "bold", "fontsize": 9, "annotation_clip": False}
            panels[-1].annotate(name, (1.03, place), xycoords="axes fraction", va="center", **look)
    return figure


def apart(values: Mapping[str, float], gap: float, limits: tuple[float, float]) -> dict[str, float]:
    """Heights of labels, as shares of an axis with these limits, in the order given: at least a gap between any two."""
    low, high = limits
    heights = [(value - low) / (high - low) for value in values.values()]
    return dict(zip(values, spread_out(heights, gap), strict=True))
