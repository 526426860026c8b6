"""Figures of lesson 17: operators under the roofs, shares of a step, changes in turns, attention, 8 bits."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from course_lib.figures import numbers
from course_lib.figures.style import (
    COLOURS,
    SERIES,
    Look,
    canvas,
    curve,
    end_label,
    label_beside,
    label_right,
    name_rows,
    spread_out,
    upright_grid,
)
from course_lib.metering.intervals import united
from course_lib.metering.roofline import Operator, Peaks

KINDS = {
    "matmul": COLOURS["backward"],
    "attention": COLOURS["forward"],
    "pointwise": COLOURS["gradients"],
    "reduction": COLOURS["activations"],
    "optimizer": COLOURS["optimizer"],
    "move": COLOURS["data"],
}
"""Colour of each kind of operator; those of the optimizer are one."""


def roofs(operators: Mapping[str, Operator], peaks: Peaks, title: str) -> Figure:
    """Operators by FLOPs per byte and FLOP/s, under the roofs of memory and of matrix products; both logarithmic.

    Args:
        operators: timed, by the label that each gets; the area of a point is its seconds.
        peaks: of the machine.
        title: the finding.
    """
    peak, memory = max(peaks.flops.values()) / 1e9, peaks.memory / 1e9
    longest = max(row.seconds for row in operators.values())
    with canvas(title, width=8, height=4.4) as (figure, axes):
        intensity = np.geomspace(0.03, 400, 200)
        axes.plot(intensity, np.minimum(peak, memory * intensity), color=COLOURS["neutral"])
        axes.axvline(peaks.ridge, color=COLOURS["neutral"], linewidth=0.8, linestyle=":")
        for text, point, shift, look in (
            (f"ridge: {peaks.ridge:.0f} FLOPs per byte", (peaks.ridge, 0.45), (4, 0), {}),
            (f"memory, {memory:.0f} GB/s", (0.04, 0.04 * memory), (-2, 12), {"rotation": 37}),
            (f"matrix products, {peak:.0f} GFLOP/s", (400, peak), (0, 5), {"ha": "right"}),
        ):
            label_beside(axes, point, shift, text, fontsize=9, color=COLOURS["neutral"], **look)
        for name, row in operators.items():
            axes.scatter(
                row.intensity,
                row.rate / 1e9,
                s=30 + 400 * row.seconds / longest,
                color=_colour(row),
                alpha=0.75,
                edgecolor="white",
                label=f"{name}, {1e3 * row.seconds:.3g} ms",
            )
        by_rate = sorted(operators, key=lambda label: operators[label].rate)
        by_memory = [label for label in by_rate if operators[label].intensity < peaks.ridge]
        _callouts(axes, operators, by_memory, 0.5, "left")
        _callouts(axes, operators, [label for label in reversed(by_rate) if label not in by_memory], 32, "right")
        axes.set(
            xscale="log",
            yscale="log",
            xlim=(0.03, 450),
            ylim=(0.3, 2 * peak),
            xlabel="FLOPs per byte",
            ylabel="GFLOP/s (larger points: they take longer)",
        )
        axes.grid(axis="x")
    numbers.tell(
        figure,
        "The machine",
        ["memory, GB/s", "matrix products, GFLOP/s", "ridge, FLOPs per byte"],
        [(memory, peak, peaks.ridge)],
    )
    return figure


def _colour(row: Operator) -> str:
    return KINDS["optimizer" if row.phase == "optimizer" else row.kind or "pointwise"]


def _callouts(axes: Axes, operators: Mapping[str, Operator], labels: Sequence[str], place: float, side: str) -> None:
    """Names in a column beside their points, each at its point's height or next to the name before it."""
    step, height = (1.6, 0.0) if side == "left" else (1 / 1.6, float("inf"))
    for label in labels:
        row = operators[label]
        rate = row.rate / 1e9
        height = max(rate, step * height) if side == "left" else min(rate, step * height)
        colour, relpos = _colour(row), (0 if side == "left" else 1, 0.5)
        line = {"arrowstyle": "-", "color": colour, "linewidth": 0.7, "shrinkB": 4, "relpos": relpos}
        look: Look = {"fontsize": 9, "color": colour, "fontweight": "bold", "arrowprops": line}
        axes.annotate(label, (row.intensity, rate), xytext=(place, height), ha=side, va="center", **look)


def shares(by_kind: Mapping[str, Mapping[str, float]], title: str) -> Figure:
    """Shares of a step's FLOPs, bytes and seconds by kind of operator, a bar for each.

    Args:
        by_kind: by what is shared (``FLOPs`` …), by kind: the share, summing to 1.
        title: the finding.
    """
    with canvas(title, width=8, height=2.5) as (figure, axes):
        for row, parts in enumerate(by_kind.values()):
            left = 0.0
            for kind, share in parts.items():
                axes.barh(row, 100 * share, left=100 * left, height=0.62, color=KINDS[kind], label=kind)
                if share > 0.06:
                    ink = "white" if kind in ("matmul", "optimizer") else "black"
                    look = {"fontsize": 7 if share < 0.08 else 8, "color": ink}
                    middle = 100 * (left + share / 2), row
                    axes.annotate(f"{kind}\n{share:.0%}", middle, ha="center", va="center", **look)
                left += share
        name_rows(axes, by_kind, grid=False)
        small = {kind for parts in by_kind.values() for kind, share in parts.items() if 0.005 < share <= 0.06}
        key = "\n(grey: move, which only copies)" if "move" in small else ""
        axes.set(xlim=(0, 100), xlabel=f"share of one training step, %{key}")
    return figure


def ladder(seconds: Mapping[str, Sequence[float]], held: Mapping[str, int | None], title: str) -> Figure:
    """Seconds of a step and the most that it holds, for one way after the other; every try is a point.

    Args:
        seconds: by way, of each try.
        held: bytes by way; None where they were not counted.
        title: the finding.
    """
    with canvas(
        title, width=9, height=0.9 + 0.36 * len(seconds), ncols=2, sharey=True, gridspec_kw={"width_ratios": (3, 2)}
    ) as (figure, (left, right)):
        for row, (way, tries) in enumerate(seconds.items()):
            left.barh(row, 1000 * min(tries), height=0.6, color=COLOURS["backward"], alpha=0.85, label="fastest")
            strokes = {"color": "black", "markersize": 7, "markeredgewidth": 1, "label": "every try"}
            left.plot([1000 * value for value in tries], [row] * len(tries), "|", **strokes)
            look = {"color": "white", "fontsize": 9, "fontweight": "bold"}
            left.annotate(f"{1000 * min(tries):.0f}", (3, row), va="center", **look)
            if (size := held[way]) is not None:
                right.barh(row, size / 2**20, height=0.6, color=COLOURS["activations"], label="held")
                label_right(right, size / 2**20, row, f"{size / 2**20:.0f}", 4, fontsize=9)
            else:
                label_right(right, 0, row, "not counted", 4, fontsize=9, color=COLOURS["neutral"])
        name_rows(left, seconds, "ms per step: the fastest; a stroke for each try")
        upright_grid(right)
        right.set_xlabel("most that the step held, MiB")
        right.margins(x=0.15)
    return figure


def by_tokens(panels: Mapping[str, Mapping[str, Mapping[int, float]]], title: str) -> Figure:
    """Growth with the tokens of a row, a panel for each measure; both axes logarithmic.

    Args:
        panels: by what is measured, with its unit, by way, by tokens: the value.
        title: the finding.
    """
    with canvas(title, width=9, height=3.3, ncols=len(panels)) as (figure, axes_):
        for axes, (measure, ways) in zip(axes_, panels.items(), strict=True):
            for colour, (way, points) in zip(SERIES, ways.items(), strict=False):
                curve(axes, points, marker="o", markersize=4, color=colour, label=way)
            tokens = sorted({at for points in ways.values() for at in points})
            axes.set(xscale="log", yscale="log", xlabel="tokens in a row", ylabel=measure)
            axes.set_xticks(tokens, [str(at) for at in tokens])
            axes.minorticks_off()
            _label_ends(axes, {way: points[max(points)] for way, points in ways.items()}, max(tokens))
    return figure


def eight_bits(
    errors: Mapping[str, Mapping[float, float]], losses: Mapping[str, Sequence[float]], title: str
) -> Figure:
    """Errors of rounding beside an outlier, and losses of trainings whose products are rounded so.

    Args:
        errors: by way of rounding, by the factor of the outlier: relative error of all other elements.
        losses: by training, of each step; smoothed here over eight steps.
        title: the finding.
    """
    with canvas(title, width=9.5, height=3.5, ncols=2) as (figure, (left, right)):
        for colour, (way, points) in zip(SERIES, errors.items(), strict=False):
            curve(left, points, marker="o", markersize=3, color=colour, label=way)
        left.set(
            xscale="log",
            yscale="log",
            xlabel="outlier, times as large as the rest",
            ylabel="relative error of the rest",
        )
        _label_ends(
            left, {way: list(points.values())[-1] for way, points in errors.items()}, max(map(max, errors.values()))
        )
        for colour, (way, values) in zip(SERIES, losses.items(), strict=False):
            smooth = np.convolve(values, np.ones(8) / 8, "valid")
            right.plot(np.arange(len(smooth)) + 8, smooth, color=colour, label=way)
        right.set(xlabel="optimizer step", ylabel="loss, mean of 8 steps", ylim=(None, 4.0))
        _label_ends(
            right,
            {way: float(np.mean(values[-8:])) for way, values in losses.items()},
            len(next(iter(losses.values()))),
        )
    return figure


def _label_ends(axes: Axes, ends: Mapping[str, float], x: float) -> None:
    """Name lines at their right ends, at least a line of text apart."""
    to_pixels, back = axes.transData.transform, axes.transData.inverted().transform
    heights = spread_out([to_pixels((x, end))[1] for end in ends.values()], 15)
    for way, height, colour in zip(ends, heights, SERIES, strict=False):
        end_label(axes, x, back((0, height))[1], way, colour, fontsize=9)


OPERATOR = "an operator"
IN_LANES = {
    "data": COLOURS["data"],
    "forward": COLOURS["forward"],
    "backward": COLOURS["backward"],
    "optimizer": COLOURS["optimizer"],
    OPERATOR: COLOURS["neutral"],
}
"""Colours of phases and operators; all else is communication."""
UNSEEN_MS = 0.5
"""Gap between two operators that a lane does not show."""


def lanes(events: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """The second recorded step of a trace, in three lanes per rank: phases, operators, collectives.

    Args:
        events: of a trace that ``course train --profile`` wrote.
        title: the finding.
    """
    spans = [event for event in events if event["ph"] == "X"]
    ranks = sorted({event["pid"] for event in spans})
    _, step, *_ = sorted(
        (event for event in spans if event["cat"] == "step" and event["pid"] == 0), key=lambda event: event["ts"]
    )
    begin, end = step["ts"], step["ts"] + step["dur"]
    lanes_ = {"phase": 0, "host": 1, "collective": 2}
    with canvas(title, width=9.5, height=0.8 + 0.95 * len(ranks)) as (figure, axes):
        for rank in ranks:
            for cat, lane in lanes_.items():
                inside = [e for e in spans if (e["pid"], e["cat"]) == (rank, cat) and begin <= e["ts"] < end]
                drawn = [(e["name"], (e["ts"] - begin) / 1e3, e["dur"] / 1e3) for e in inside]
                if cat == "host":
                    busy = united([(start, start + duration + UNSEEN_MS) for _, start, duration in drawn])
                    drawn = [(OPERATOR, start, stop - UNSEEN_MS - start) for start, stop in busy]
                for name in dict.fromkeys(name for name, *_ in drawn):
                    axes.broken_barh(
                        [span for of, *span in drawn if of == name],
                        (4 * rank + lane, 0.85),
                        label=name,
                        facecolors=IN_LANES.get(name, COLOURS["communication"]),
                    )
                for e in inside:
                    if cat == "phase" and e["dur"] > 0.06 * (end - begin):
                        middle = (e["ts"] - begin + e["dur"] / 2) / 1e3, 4 * rank + 0.45
                        ink = "white" if e["name"] != "forward" else "black"
                        axes.annotate(e["name"], middle, ha="center", va="center", fontsize=8, color=ink)
        axes.set_yticks(
            [4 * rank + lane + 0.45 for rank in ranks for lane in lanes_.values()],
            [f"{name}, rank {rank}" for rank in ranks for name in ("phases", "operators", "collectives")],
        )
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set(
            xlim=(0, (end - begin) / 1e3),
            xlabel="ms from the start of one of the recorded steps, all ranks on "
            "one clock\n(grey phase: data, green: optimizer, dark grey: operators, orange: collectives)",
        )
    return figure
