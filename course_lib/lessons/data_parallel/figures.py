"""Figures of data parallelism: ranks that drift apart, bytes against ranks, and buckets that leave during backward."""

import statistics
from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from course_lib.figures.style import (
    COLOURS,
    Look,
    canvas,
    curve,
    dots,
    end_label,
    label_beside,
    label_right,
    spread_out,
    upright_grid,
)
from course_lib.lessons.data_parallel.buckets import OverLink
from course_lib.lessons.data_parallel.lab import Sending
from course_lib.metering.meter import ring_bytes

SENT = COLOURS["communication"]


def drift(spread: Mapping[str, Sequence[float]], right: str) -> Figure:
    """Spread of the ranks' weights after each step.

    Args:
        spread: by what the ranks do, the largest difference of a weight between ranks, from before step 1.
        right: the one among them that keeps the ranks together.
    """
    wrong = max(spread[name][-1] for name in spread if name != right)
    title = (
        f"After {len(spread[right]) - 1} steps the ranks are {spread[right][-1]:g} apart with {right}, "
        f"else up to {wrong:.2f}"
    )
    top = max(max(values) for values in spread.values())
    colours = dict(
        zip([name for name in spread if name != right], (COLOURS["wrong"], "#E69F00", "#CC79A7"), strict=True)
    )
    with canvas(title, width=6.6, height=2.9) as (figure, axes):
        names = sorted(spread, key=lambda name: spread[name][-1])
        for name, height in zip(names, spread_out([spread[name][-1] for name in names], 0.07 * top), strict=True):
            colour = colours.get(name, COLOURS["right"])
            axes.plot(spread[name], color=colour, marker="o", markersize=3, clip_on=False, label=name)
            end_label(axes, len(spread[name]) - 1, height, name, colour)
        axes.set(
            xlabel="optimizer steps made",
            ylabel="largest difference between\nranks, in any one weight",
            xlim=(0, len(spread[right]) - 1),
            ylim=(0, None),
        )
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def bytes_against_ranks(naive: Mapping[int, float], ring: Mapping[int, float]) -> Figure:
    """Bytes of the busiest rank in one all-reduce: measured points on the formulas' lines.

    Args:
        naive: by number of ranks, what rank 0 sends where everyone sends to it, in sizes of the tensor.
        ring: what a rank sends in a ring, likewise.
    """
    most = max(ring)
    title = f"At {most} ranks rank 0 sends {naive[most]:.3g} times the tensor, a ring's rank {ring[most]:.3g} times"
    up_to = 16
    ranks = range(2, up_to + 1)
    through_one = [n - 1.0 for n in ranks]
    around = [ring_bytes("all_reduce", 10**6, n) / 10**6 for n in ranks]
    with canvas(title, width=6.6, height=2.9) as (figure, axes):
        for name, formula, measured, colour in (
            ("everyone to rank 0", through_one, naive, COLOURS["wrong"]),
            ("ring", around, ring, COLOURS["right"]),
        ):
            axes.plot(ranks, formula, color=colour, linestyle="--", linewidth=1.2, label=f"{name}, by formula")
            curve(axes, measured, "o", color=colour, markersize=7, label=name)
            end_label(axes, up_to, formula[-1], name, colour)
        label_beside(
            axes, (most, naive[most]), (-10, 14), "measured", ha="center", color=COLOURS["neutral"], fontsize=9
        )
        axes.text(up_to * 0.66, up_to * 0.66 - 2.2, "formula", color=COLOURS["neutral"], fontsize=9, va="top")
        axes.set(
            xlabel="number of ranks N", ylabel="sent by the busiest rank\n(in sizes of the tensor)", ylim=(0, None)
        )
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def buckets_leaving(ways: Mapping[str, Sending]) -> Figure:
    """The backward of one rank per panel: compute above, below it a bar for each bucket's all-reduce."""
    early = {name: sum(begin < way.backward for begin, _ in way.sent) for name, way in ways.items()}
    best = max(early, key=early.__getitem__)
    title = f"{early[best]} of {len(ways[best].sent)} buckets leave while backward still runs"
    heights = [3 + 0.6 * max(2, len(way.sent)) for way in ways.values()]
    with canvas(title, height=0.9 + 0.2 * sum(heights), nrows=len(ways), sharex=True, height_ratios=heights) as (
        figure,
        panels,
    ):
        for axes, (name, way) in zip(np.atleast_1d(panels), ways.items(), strict=True):
            _one_backward(axes, way)
            axes.set_title(
                f"{name}: {way.early_bytes / sum(way.buckets):.0%} of the bytes leave early",
                fontsize=9.5,
                fontweight="normal",
            )
        axes.set(xlabel="ms since backward began", xlim=(0, 1.12 * max(way.end for way in ways.values())))
    return figure


def over_link(ways: Mapping[str, OverLink]) -> Figure:
    """Time of each way over a slow link until all gradients are averaged: every try, and on paper.

    Args:
        ways: by name.
    """
    best, *others = sorted(ways, key=lambda name: ways[name].seconds)
    tries = len(ways[best].steps)
    slower = " and ".join(f"{name} takes {ways[name].seconds / ways[best].seconds:.2f} times" for name in others)
    title = f"Over a slow link {slower} as long\nas {best} (medians of {tries} tries)"
    with canvas(title, height=2.9) as (figure, axes):
        for row, way in enumerate(ways.values()):
            axes.barh(row, 1e3 * way.backward, height=0.36, color=COLOURS["backward"], label="backward, no link")
            axes.text(0, row, "  backward, no link", va="center", color="white", fontsize=8.5)
            axes.plot(
                [1e3 * way.on_paper] * 2, [row - 0.3, row + 0.3], "--", color="black", linewidth=1.2, label="computed"
            )
            dots(axes, [1e3 * seconds for seconds in way.steps], row, markersize=5, alpha=0.6, color=SENT)
        last = list(ways.values())[-1]
        label_beside(axes, (1e3 * last.on_paper, row + 0.3), (0, -2), "computed", ha="center", va="top", fontsize=8.5)
        label_right(axes, 1e3 * max(last.steps), row, "every try", 7, fontsize=8.5, color=SENT)
        axes.set_yticks(range(len(ways)), [f"{name} ({len(way.buckets)})" for name, way in ways.items()])
        axes.set_ylim(len(ways) - 0.3, -0.5)
        upright_grid(axes)
        axes.set(xlim=(0, None), xlabel="ms until all gradients are averaged")
    return figure


def seconds_against_bytes(
    seconds: Mapping[int, Sequence[float]], small: int, large: int, latency: float, rate: float
) -> Figure:
    """Time of an all-reduce of two ranks by the size of its tensor: every try, medians, and the ring's formula.

    Args:
        seconds: by bytes, of each try.
        small: bytes of the tensor that the title compares with.
        large: bytes of that which it compares.
        latency: of a message, in seconds.
        rate: of the link, in bytes/s.
    """
    medians = {size: 1e3 * statistics.median(tries) for size, tries in seconds.items()}
    longer = medians[large] / medians[small]
    title = (
        f"{large / 2**20:g} MiB take {longer:.0f} times as long as {small / 2**10:g} KiB, "
        f"{large // small:,} times the bytes"
    )
    with canvas(title, width=6.6, height=3.0) as (figure, axes):
        for size, tries in seconds.items():
            look = {"markersize": 2.5, "alpha": 0.3, "color": SENT, "label": "every try"}
            axes.plot([size] * len(tries), [1e3 * one for one in tries], "o", **look)
        curve(axes, medians, color=SENT, label="median")
        end_label(axes, max(medians), medians[max(medians)], "medians", SENT)
        axes.text(0.02, 0.95, "dots: every try", transform=axes.transAxes, va="top", fontsize=8.5, color=SENT)
        formula = {size: 1e3 * (2 * latency + size / rate) for size in seconds}
        curve(axes, formula, "--", color="black", linewidth=1.2, label="formula")
        label_beside(axes, (large, formula[large]), (8, -10), "formula", fontsize=9)
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="bytes of the tensor (logarithmic)",
            ylabel="ms of an all-reduce\n(logarithmic)",
        )
    return figure


def _one_backward(axes: Axes, way: Sending) -> None:
    """Backward and waiting in one row, and the buckets in rows of their own."""
    axes.barh(0, way.backward, height=1.6, color=COLOURS["backward"], label="backward")
    axes.text(way.backward / 2, 0, "backward", ha="center", va="center", color="white", fontsize=9)
    waits: Look = {"edgecolor": COLOURS["neutral"], "linewidth": 0.6, "hatch": "///", "label": "waiting"}
    axes.barh(0, way.end - way.backward, left=way.backward, height=1.6, color=COLOURS["idle"], **waits)
    axes.text(way.end, 0, f" waits {way.end - way.backward:.0f} ms", va="center", color=COLOURS["neutral"], fontsize=9)
    for row, (begin, end) in enumerate(way.sent):
        axes.barh(1.5 + 0.6 * row, end - begin, left=begin, height=0.5, color=SENT, label=f"all-reduce of bucket {row}")
        axes.text(end, 1.5 + 0.6 * row, f" {row}", va="center", color=COLOURS["neutral"], fontsize=7)
    axes.axvline(way.backward, color="black", linewidth=0.9, linestyle=":")
    # To the left of the last bar, where the others have not begun either.
    look: Look = {"color": SENT, "fontsize": 9, "fontweight": "bold"}
    axes.text(0.005 * way.end, 1.5 + 0.6 * (len(way.sent) - 1), "all-reduces, by bucket", va="center", **look)
    axes.set(yticks=[], ylim=(1.4 + 0.6 * max(2, len(way.sent)), -1.2))
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
