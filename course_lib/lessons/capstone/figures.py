"""Figures of the capstone: a run that was killed and went on, and two arms of a comparison."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from course_lib.figures.style import COLOURS, SERIES, canvas, curve, hollow
from course_lib.lessons.capstone.decisions import Here
from course_lib.lessons.capstone.rehearsal import Broken, Resumed, Tracked, table

ARMS = {"chosen": SERIES[0], "other": SERIES[1]}


def recovery(undisturbed: Mapping[int, float], broken: Broken, resumed: Resumed) -> Figure:
    """Training loss of a run that was killed and of its second part, over the undisturbed run's.

    Args:
        undisturbed: loss in nats by step.
        broken: the first part.
        resumed: the whole record after the second; only steps after the checkpoint are drawn.
    """
    start = broken.step - broken.lost
    title = (
        f"Killed at step {broken.step}, resumed from step {start}: {resumed.differing:,} of {resumed.bytes:,} "
        "bytes differ at the end"
        if not resumed.problem
        else f"Killed at step {broken.step}, and not resumed"
    )
    with canvas(title) as (figure, axes):
        curve(axes, undisturbed, color=COLOURS["idle"], linewidth=9, label="undisturbed")
        until = {"color": SERIES[1], "markersize": 10, "fillstyle": "none", "label": "until it was killed"}
        curve(axes, broken.losses, "o", **until)
        if broken.killed:
            axes.plot(broken.step, undisturbed[broken.step], "X", color=COLOURS["wrong"], markersize=13, label="killed")
        again = {step: loss for step, loss in resumed.record if step > start}
        curve(axes, again, "o", color=SERIES[0], markersize=5, label="resumed")
        axes.set(xlabel="optimizer step", ylabel="training loss (nats)")
        axes.legend(ncols=4, loc="lower left", bbox_to_anchor=(0, 1))
    return figure


def comparison(runs: Sequence[Tracked], planned: Mapping[str, Here], title: str) -> Figure:
    """Both arms: model states and bytes sent with what was planned, rows per second, and the loss of every run.

    Args:
        runs: the compared ones.
        planned: the plan by arm.
        title: the finding.
    """
    rows = table(runs)
    panels = {
        "model states (MiB per rank)": ("states_MiB", {arm: here.states / 2**20 for arm, here in planned.items()}),
        "sent (MB per rank and step)": ("sent_MB", {arm: here.sent / 1e6 for arm, here in planned.items()}),
        "rows per second": ("samples_per_second", {}),
    }
    with canvas(title, width=9.6, height=3.2, ncols=4) as (figure, (*bars, losses)):
        for axes, (name, (column, plan)) in zip(bars, panels.items(), strict=True):
            for place, (arm, colour) in enumerate(ARMS.items()):
                if arm in plan:
                    axes.bar(place - 0.2, plan[arm], width=0.4, **hollow(colour))
                axes.bar(place + 0.2 * bool(plan), rows.loc[arm, column], width=0.4, color=colour, label="measured")
            axes.set(xlabel=f"{name}\n(hatched: predicted)" if plan else name)
        for place, (arm, colour) in enumerate(ARMS.items()):
            points = [run.loss for run in runs if run.arm == arm]
            losses.plot([place] * len(points), points, "o", color=colour, alpha=0.7, label="every run")
            losses.plot([place - 0.2, place + 0.2], [rows.loc[arm, "loss"]] * 2, color=colour, label="mean")
        losses.set(xlabel="test loss of each run (nats)", xlim=(-0.6, 1.6))
        for axes in (*bars, losses):
            axes.set_xticks(range(len(ARMS)), list(ARMS))
    return figure
