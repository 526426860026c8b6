"""Figures of a cloud job: what its request is made of, and its phases from start to end."""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from course_lib.figures.style import COLOURS, SERIES, canvas, curve

PHASES = {
    "Downloading": COLOURS["data"],
    "Training": COLOURS["forward"],
    "Uploading": COLOURS["activations"],
    "Interrupted": COLOURS["wrong"],
}


def life(description: Mapping[str, Any], lines: Sequence[str], elsewhere: Mapping[int, float]) -> Figure:
    """The phases of a job over time, and the loss by step of each attempt at it beside that of another run.

    Args:
        description: SageMaker's, with ``SecondaryStatusTransitions`` and ``TrainingEndTime``.
        lines: of its log, which ``metrics: step=…`` is read from; `resumed from` begins an attempt.
        elsewhere: loss by step of the same run, uninterrupted, on this machine.
    """
    attempts = losses_by_attempt(lines)
    title = (
        f"Interrupted after step {max(attempts[0])}, resumed at step {min(attempts[1])}"
        if len(attempts) > 1
        else f"{len(attempts[0])} steps without an interruption"
    )
    with canvas(title, height=4.2, nrows=2, height_ratios=(1, 2)) as (figure, (top, bottom)):
        _phases(top, description)
        there = {"color": COLOURS["idle"], "linewidth": 8, "zorder": 0, "label": "uninterrupted, on this machine"}
        curve(bottom, elsewhere, **there)
        for number, losses in enumerate(attempts):
            curve(bottom, losses, marker="o", markersize=5, color=SERIES[number], label=f"attempt {number + 1}")
        bottom.legend(loc="lower left", ncols=3)
        bottom.set(xlabel="optimizer step", ylabel="training loss (nats)")
        bottom.margins(y=0.3)
    return figure


def losses_by_attempt(lines: Sequence[str]) -> list[dict[int, float]]:
    """Loss by step, from a log's metric lines; `resumed from` begins an attempt."""
    attempts: list[dict[int, float]] = [{}]
    for line in lines:
        if attempts[-1] and "resumed from" in line:
            attempts.append({})
        if match := re.search(r"metrics: step=(\d+) .* loss=(\S+)", line):
            attempts[-1][int(match[1])] = float(match[2])
    return attempts


def _phases(axes: Any, description: Mapping[str, Any]) -> None:
    """A bar for each phase, from its start to that of the next."""
    phases = description["SecondaryStatusTransitions"]
    begin: datetime = phases[0]["StartTime"]
    starts = [(phase["StartTime"] - begin).total_seconds() for phase in phases]
    ends = [*starts[1:], (description["TrainingEndTime"] - begin).total_seconds()]
    for phase, start, end in zip(phases, starts, ends, strict=True):
        axes.barh(0, end - start, left=start, color=PHASES[phase["Status"]], label=phase["Status"])
    interruption = [start for phase, start in zip(phases, starts, strict=True) if phase["Status"] == "Interrupted"]
    (cross,) = axes.plot(interruption, [0] * len(interruption), "X", color=PHASES["Interrupted"], markersize=10)
    axes.set(yticks=[], xlabel="seconds since the job started")
    axes.grid(False)
    seen = {phase["Status"] for phase in phases}
    known = {name: colour for name, colour in PHASES.items() if name in seen}
    handles = [cross if name == "Interrupted" else Patch(color=colour) for name, colour in known.items()]
    axes.legend(handles, list(known), ncols=4, fontsize=8.5, loc="lower left", bbox_to_anchor=(0, 1))
