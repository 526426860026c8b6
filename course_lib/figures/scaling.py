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
        per_process = first["samples_per_second"] / first["processes"]
        grey, blue = COLOURS["neutral"], COLOURS["right"]
        rate.plot(counts, per_process * counts, "--", color=grey, linewidth=1.2, label="perfect")
        rate.plot(counts, points["samples_per_second"], "o-", color=blue, label="measured")
        for _, point in points.iterrows():
            at = point["processes"], point["samples_per_second"]
            label_beside(rate, at, (0, -13), f"{point['efficiency']:.0%}", ha="center", color=blue)
        end = last["processes"], per_process * last["processes"]
        label_beside(rate, end, (-4, 0), "perfect", ha="right", color=grey)
        rate.set(ylabel="samples per second", ylim=(0, None))
        time.plot(counts, points["step_ms"], "o-", color=blue, label="measured")
        time.set(ylabel="ms per step", ylim=(0, None))
        for panel in (rate, time):
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_locator(FixedLocator(list(counts)))
            panel.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
            panel.xaxis.set_minor_locator(NullLocator())
            panel.margins(x=0.12, y=0.15)
            panel.set(xlabel="processes")
    return figure
