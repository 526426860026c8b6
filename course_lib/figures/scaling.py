"""Figure of how a training scales with the number of processes."""

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, StrMethodFormatter

from course_lib.figures.style import COLOURS, canvas, label_beside


def scaling(points: pd.DataFrame) -> Figure:
    """Throughput and time of a step against the number of processes, beside what perfect scaling would give.

    Args:
        points: as ``training.scaling.frame`` gives it.
    """
    counts, first, last = points["processes"], points.iloc[0], points.iloc[-1]
    title = (
        f"{last['processes']:.0f} processes do {last['speed_up']:.2f} times the work of {first['processes']:.0f}: "
        f"{last['efficiency']:.0%} efficient"
    )
    with canvas(title, width=7.6, height=3.2, ncols=2) as (figure, (rate, time)):
        rate.plot(
            counts,
            first["samples_per_second"] * counts / first["processes"],
            "--",
            color=COLOURS["neutral"],
            linewidth=1.2,
            label="perfect",
        )
        rate.plot(counts, points["samples_per_second"], "o-", color=COLOURS["right"], label="measured")
        for _, point in points.iterrows():
            label_beside(
                rate,
                (point["processes"], point["samples_per_second"]),
                (0, -13),
                f"{point['efficiency']:.0%}",
                ha="center",
                color=COLOURS["right"],
            )
        label_beside(
            rate,
            (last["processes"], first["samples_per_second"] * last["processes"] / first["processes"]),
            (-4, 0),
            "perfect",
            ha="right",
            color=COLOURS["neutral"],
        )
        rate.set(ylabel="samples per second", ylim=(0, None))
        time.plot(counts, points["step_ms"], "o-", color=COLOURS["right"], label="measured")
        time.set(ylabel="ms per step", ylim=(0, None))
        for panel in (rate, time):
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_locator(FixedLocator(list(counts)))
            panel.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
            panel.xaxis.set_minor_locator(NullLocator())
            panel.margins(x=0.12, y=0.15)
            panel.set(xlabel="processes")
    return figure
