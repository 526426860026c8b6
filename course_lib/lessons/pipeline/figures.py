"""Figures of pipeline runs: predicted time lines beside measured ones, every try, and the number of micro-batches."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median

from matplotlib.figure import Figure

from course_lib.figures.style import COLOURS, SERIES, canvas, dots, end_label, label_beside, upright_grid
from course_lib.figures.timelines import Panel, Rows, draw
from course_lib.parallel.pipeline.fitted.search import ScheduleCandidate
from course_lib.parallel.pipeline.simulation import Timeline


def predicted_and_measured(
    predicted: Timeline, measured: Rows, title: str, unit: str = "", how: str = "measured"
) -> Figure:
    """A predicted time line, hatched, above the measured one, solid, on one time axis.

    Args:
        predicted: what the simulator says, in the unit of the measurement.
        measured: for each rank, what ran from when to when; time 0 is the first start.
        title: the finding.
        unit: of the times, for the axis.
        how: what the lower panel says of itself, for example which try it shows.
    """
    return draw(title, _pair("", predicted, measured, how), unit)


def schedule_after_schedule(
    runs: Mapping[str, tuple[Timeline, Rows | None]], title: str, unit: str = "", how: str = "measured"
) -> Figure:
    """Several of :func:`predicted_and_measured` under one another, all on one time axis, by the name of the schedule.

    Args:
        runs: what the simulator says, and for each rank what ran from when to when, or None for the prediction alone.
        title: the finding.
        unit: of the times, for the axis.
        how: what each lower panel says of itself.
    """
    return draw(title, [panel for name, run in runs.items() for panel in _pair(f"{name}, ", *run, how)], unit)


def _pair(name: str, predicted: Timeline, measured: Rows | None, how: str) -> list[Panel]:
    """Either both panels have an action's number or none: what a block happened to take does not decide it."""
    schedule, sizes = predicted.schedule, predicted.rows
    panels = [Panel(f"{name}predicted: {float(predicted.bubble):.1%} idle", schedule, sizes, True, sizes)]
    if measured is not None:
        panels.append(Panel(f"{name}{how}: {idle_share(measured):.1%} idle", schedule, measured, False, sizes))
    return panels


def every_try(predicted: Mapping[str, float], measured: Mapping[str, Sequence[float]], title: str) -> Figure:
    """The bubble of each try of several schedules: a dot per try, a line at the median, the prediction hollow.

    Args:
        predicted: share of all ranks' time, by the name of the row.
        measured: the shares of all tries, by the same names.
        title: the finding.
    """
    with canvas(title, width=7.0, height=1.1 + 0.32 * len(measured)) as (figure, axes):
        for row, (name, shares) in enumerate(measured.items()):
            percent = [100 * share for share in shares]
            axes.plot([min(percent), max(percent)], [row, row], color=SERIES[0], linewidth=1)
            dots(axes, percent, row, "a try", color=SERIES[0], alpha=0.6, markersize=5)
            axes.plot(median(percent), row, "|", color="black", markersize=14, markeredgewidth=2, label="median")
            empty = {"markerfacecolor": "none", "markeredgecolor": COLOURS["neutral"], "markersize": 9}
            axes.plot(100 * predicted[name], row, "D", label="predicted", **empty)
        axes.set_yticks(range(len(measured)), list(measured), fontsize=9)
        axes.set(xlabel="idle (% of all ranks' time)", xlim=(0, None), ylim=(len(measured) - 0.5, -0.5))
        upright_grid(axes)
        first = [line for line in axes.get_lines() if not str(line.get_label()).startswith("_")][:3]
        figure.legend(handles=first, loc="outside lower center", ncols=3, fontsize=9)
    return figure


def idle_share(rows: Rows) -> float:
    """The share of all ranks' time, from the first start to the last end, in which they do not compute."""
    begin, end = min(row[0].start for row in rows), max(row[-1].end for row in rows)
    idle = 0.0
    for row in rows:
        gaps = (float(after.start - before.end) for before, after in pairwise(row))
        idle += float(row[0].start - begin) + sum(max(0.0, gap) for gap in gaps) + float(end - row[-1].end)
    return idle / (float(end - begin) * len(rows))


def step_times(candidates: Sequence[ScheduleCandidate]) -> Figure:
    """Time of a step against the number of micro-batches that the batch is cut into, and how much of it is idle.

    Args:
        candidates: one schedule with several numbers of micro-batches, in any order; those without a time line are
            left out.
    """
    points = sorted(
        (candidate.microbatches, float(candidate.timeline.makespan), float(candidate.timeline.bubble))
        for candidate in candidates
        if candidate.timeline
    )
    counts, steps, idle = map(list, zip(*points, strict=True))
    best = steps.index(min(steps))
    title = f"The step is shortest with {counts[best]} micro-batches; the bubble goes on shrinking"
    with canvas(title, height=3.0) as (figure, axes):
        lost = [step * share for step, share in zip(steps, idle, strict=True)]
        for values, name, colour in ((steps, "step", SERIES[0]), (lost, "idle part of it", COLOURS["neutral"])):
            axes.plot(counts, values, "o--", color=colour, markerfacecolor="white", label=name)
            end_label(axes, counts[-1], values[-1], name, colour)
        label_beside(axes, (counts[best], steps[best]), (0, -16), "shortest", ha="center", fontsize=9, color=SERIES[0])
        axes.set(xlabel="micro-batches that the same batch is cut into", ylabel="time (units of work)", ylim=(0, None))
        axes.margins(x=0.08)
    return figure
