"""Figures of faults: where ranks hang, which errors follow from which cause, which steps are slow."""

import statistics
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from course_lib.figures import numbers
from course_lib.figures.style import COLOURS, canvas, label_right, stack
from course_lib.hangs.watchdog import ReportedRank
from course_lib.lessons.faults.lab import SCENARIOS, Trial

GUILTY, INNOCENT = COLOURS["wrong"], COLOURS["right"]


def last_collectives(hangs: Mapping[str, Sequence[ReportedRank]], guilty: Mapping[str, set[int]]) -> Figure:
    """Progress of each rank: a panel for each hang, a line for each rank, filled points for what ended.

    Args:
        hangs: by the panel's title, each rank's state as a report of the watchdog has it.
        guilty: the ranks at fault, for each panel; they are drawn in the colour of what is wrong.
    """
    lines = [len(states) + 1 for states in hangs.values()]
    shape = {"nrows": len(hangs), "squeeze": False, "height_ratios": lines, "sharex": True}
    title = "The ranks in blue wait for the one in orange"
    with canvas(title, width=7.0, height=0.7 + 0.42 * sum(lines), **shape) as (figure, panels):
        furthest = max(state.sequence or 0 for states in hangs.values() for state in states)
        for axes, (name, states) in zip(panels[:, 0], hangs.items(), strict=True):
            for state in states:
                _one_rank(axes, state, state.rank in guilty[name])
            axes.set_title(name, fontsize=10, fontweight="normal")
            axes.set_yticks([state.rank for state in states], [f"rank {state.rank}" for state in states])
            axes.set(xlim=(-0.2, 1.6 * furthest + 1.2), ylim=(len(states) - 0.5, -0.5))
            axes.grid(visible=False)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        panels[-1, 0].set_xlabel("sequence number of the collective (filled: over; hollow: issued, waits)")
        panels[-1, 0].set_xticks(range(1, furthest + 1))
    rows = []
    for name, states in hangs.items():
        for state in states:
            number, how = str(state.sequence or 0), "is over" if state.ended else "waits"
            at_fault = "yes" if state.rank in guilty[name] else "no"
            rows.append((name, str(state.rank), number, how, _last_call(state), at_fault))
    columns = ["hang", "rank", "its number", "it", "last call", "at fault"]
    numbers.tell(figure, "Last collective of each rank", columns, rows)
    return figure


def _one_rank(axes: Axes, state: ReportedRank, is_guilty: bool) -> None:
    colour, mark = (GUILTY, "  ◀ culprit") if is_guilty else (INNOCENT, "")
    last = state.sequence or 0
    over = last if state.ended or not last else last - 1
    axes.plot([0, last], [state.rank] * 2, color=colour, linewidth=1.2)
    axes.plot(range(1, over + 1), [state.rank] * over, "o", color=colour)
    if over < last:
        axes.plot(last, state.rank, "o", markerfacecolor="white", markeredgecolor=colour, markersize=8)
    said = f"{_last_call(state)}{mark}"
    label_right(axes, last, state.rank, said, 10, fontsize=9, color=colour, annotation_clip=False)


def _last_call(state: ReportedRank) -> str:
    where = f" at {state.file.rsplit('/', 1)[-1]}:{state.line}" if state.file else ""
    return f"{state.collective or 'none yet'}{where}{'' if state.alive else ', gone'}"


def who_spoke(trials: Mapping[str, Trial], world_size: int) -> Figure:
    """Every scenario and every rank: who was at fault, and in which order ranks raised an error.

    Args:
        trials: by the scenario's name.
        world_size: ranks in each.
    """
    first = sum(bool(SCENARIOS[name].culprits & set(trial.broken.reporters[:1])) for name, trial in trials.items())
    title = f"The first error came from the culprit in {first} of {len(trials)} cases"
    with canvas(title, width=6.4, height=0.9 + 0.3 * len(trials)) as (figure, axes):
        for row, (name, trial) in enumerate(trials.items()):
            for rank in SCENARIOS[name].culprits:
                axes.plot(rank, row, "s", color=GUILTY, markersize=15, alpha=0.35, markeredgewidth=0, label="at fault")
            for place, rank in enumerate(trial.broken.reporters, start=1):
                axes.text(rank, row, str(place), ha="center", va="center", fontweight="bold")
                axes.plot(rank, row, linestyle="None", label=f"error {place}")  # unseen: for the figure's table
            if not trial.broken.reporters:
                look = {"va": "center", "fontsize": 8, "color": COLOURS["neutral"]}
                axes.text(world_size - 0.45, row, "no rank raised anything", **look)
        axes.set_yticks(range(len(trials)), list(trials))
        axes.set_xticks(range(world_size), [f"rank {rank}" for rank in range(world_size)])
        axes.xaxis.tick_top()
        axes.tick_params(length=0)
        axes.set(xlim=(-0.5, world_size + 0.9), ylim=(len(trials) - 0.5, -0.5))
        axes.grid(visible=False)
        axes.set_xlabel("coloured: at fault; 1, 2, 3: the order in which ranks raised an error")
    return figure


def step_times(runs: Mapping[str, Sequence[Sequence[tuple[float, float]]]]) -> Figure:
    """Time of a step on each rank: computing, then waiting for the others.

    Args:
        runs: by the panel's title, for each rank the seconds of computing and of waiting, step by step.
    """
    medians = {
        name: [[1e3 * statistics.median(step[part] for step in steps) for part in (0, 1)] for steps in ranks]
        for name, ranks in runs.items()
    }
    steps = {name: max(sum(rank) for rank in ranks) for name, ranks in medians.items()}
    colours = {"computing": COLOURS["forward"], "waiting": COLOURS["idle"]}
    title = "A step takes as long as its slowest rank computes"
    with canvas(title, width=7.2, height=2.5, ncols=len(runs), sharey=True, sharex=True) as (figure, panels):
        for axes, (name, ranks) in zip(panels, medians.items(), strict=True):
            for rank, parts in enumerate(ranks):
                stack(axes, rank, dict(zip(colours, parts, strict=True)), colours, size=0.8, lies=True)
            axes.set_title(f"{name}: {steps[name]:.0f} ms", fontsize=10, fontweight="normal")
            axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in range(len(ranks))])
            axes.grid(axis="y", visible=False)
        panels[0].invert_yaxis()
        figure.supxlabel("ms of a step, median (blue: computing, grey: waiting)", fontsize=9)
    return figure
