"""Figures of FSDP: when weights are resident, and when a rank waits for them."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from course_lib.figures import numbers
from course_lib.figures.style import COLOURS, Look, canvas, curve, label_beside, name_rows, stack
from course_lib.lessons.fsdp.lab import WatchedSharding
from course_lib.lessons.fsdp.overlap import Overlap, TraceEvent
from course_lib.lessons.slow_link import Waits

MB = 1e6


def sawtooth(runs: Mapping[str, WatchedSharding], predicted: Mapping[str, float], whole: int) -> Figure:
    """Resident parameters through one step: a panel for each run, its predicted peak as a broken line.

    Args:
        runs: by the panel's title.
        predicted: bytes at the peak, for each run.
        whole: bytes of the whole parameters.
    """
    *others, last = dict.fromkeys(f"{max(size for _, size in run.trace) / MB:.2f}" for run in runs.values())
    peaks = f"{', '.join(others)} or {last}" if others else last
    steady = next(iter(runs.values())).steady
    top = 1.22 * max(whole, *predicted.values()) / MB
    title = f"{steady / MB:.2f} MB of weights at rest; {peaks} MB while blocks come and go"
    with canvas(title, ncols=len(runs), sharey=True) as (figure, panels):
        for axes, (name, run) in zip(panels, runs.items(), strict=True):
            _teeth(axes, run)
            axes.axhline(predicted[name] / MB, color="black", linestyle="--", linewidth=1)
            axes.axhline(whole / MB, color=COLOURS["neutral"], linestyle=":", linewidth=1)
            axes.set_title(name, fontsize=10, fontweight="normal")
            axes.set_ylim(0, top)
        panels[0].set_ylabel("MB of parameters on rank 0")
        _above(panels[0], predicted[next(iter(runs))] / MB, "predicted peak", "black")
        _above(panels[0], whole / MB, "the whole model", COLOURS["neutral"])
        centred = {"ha": "center", "va": "center", "transform": panels[0].get_yaxis_transform()}
        panels[0].text(0.5, steady / MB / 2, "this rank's shards", color="white", fontsize=8, **centred)
        figure.supxlabel("one step, gather by gather and free by free", fontsize=9)
    caption = f"MB of parameters on rank 0, of {_in_mb(whole)} in all"
    columns = ["run", "at rest", "forward, at most", "backward, at most", "predicted peak"]
    rows = [
        (name, *map(_in_mb, (run.steady, _most(run, "forward"), _most(run, "backward"), predicted[name])))
        for name, run in runs.items()
    ]
    numbers.tell(figure, caption, columns, rows)
    return figure


def _most(run: WatchedSharding, which: str) -> int:
    return max(size for phase, size in run.trace if phase == which)


def _in_mb(size: float) -> str:
    return f"{size / MB:.2f}"


def _above(axes: Axes, height: float, text: str, colour: str) -> None:
    """Name a horizontal line at its left end."""
    label_beside(axes, (0, height), (4, 3), text, fontsize=8, color=colour)


def _teeth(axes: Axes, run: WatchedSharding) -> None:
    """The shards below, what is gathered above them, and where the backward begins."""
    heights = [run.steady / MB, *(size / MB for _, size in run.trace)]
    places = list(range(len(heights)))
    axes.fill_between(places, heights, step="post", color=COLOURS["forward"], linewidth=0)
    axes.fill_between(places, run.steady / MB, color=COLOURS["parameters"], linewidth=0)
    axes.step(places, heights, where="post", color=COLOURS["parameters"], linewidth=1.2)
    turn = [phase for phase, _ in run.trace].index("backward") + 0.5
    axes.axvline(turn, color=COLOURS["neutral"], linewidth=0.8)
    for middle, name in ((turn / 2, "forward"), ((turn + places[-1]) / 2, "backward")):
        look: Look = {"fontsize": 8, "color": COLOURS["neutral"], "transform": axes.get_xaxis_transform()}
        axes.text(middle, 0.995, name, ha="center", va="top", **look)
    axes.set_xlim(0, places[-1])
    axes.xaxis.set_major_locator(NullLocator())


def waiting(runs: Mapping[str, Waits]) -> Figure:
    """One step of each run over the time: where the rank computed, and where it stood still for the link."""
    lost = " and ".join(f"{1e3 * run.waited:.0f} ms {name}" for name, run in runs.items())
    with canvas(f"Waited for the slow link: {lost}", height=2.0) as (figure, axes):
        for row, run in enumerate(runs.values()):
            axes.barh(row, 1e3 * run.step, height=0.6, color=COLOURS["idle"], label="the step")
            axes.broken_barh(
                [(1e3 * start, 1e3 * (end - start)) for start, end in run.spans],
                (row - 0.3, 0.6),
                color=COLOURS["communication"],
                label="waiting",
            )
            waits = f" {len(run.spans)} waits"
            axes.text(1e3 * run.step, row, waits, va="center", fontsize=9, color=COLOURS["communication"])
        name_rows(axes, runs, "ms since the step began (orange: waiting for weights)", grid=False)
        axes.set_xlim(0, 1.13 * max(1e3 * run.step for run in runs.values()))
    return figure


def overlap(measured: Sequence[Overlap]) -> Figure:
    """Seconds of a step over a slow link against the rows per rank, with and without prefetch: every try, and on paper.

    Args:
        measured: by rising number of rows.
    """
    best = max(measured, key=lambda one: one.gain)
    title = f"Prefetch over a slow link: {best.gain:.2f} times as fast at {best.rows} rows per rank"
    with canvas(title, height=3.2) as (figure, axes):
        rows = [one.rows for one in measured]
        for prefetch, name, colour in (
            (False, "without prefetch", COLOURS["communication"]),
            (True, "with prefetch", COLOURS["forward"]),
        ):
            for one in measured:
                dots = {"color": colour, "markersize": 5, "label": f"{name}, every try"}
                axes.plot([one.rows] * len(one.steps[prefetch]), one.steps[prefetch], "o", **dots)
            predicted = {one.rows: one.predicted[prefetch] for one in measured}
            curve(axes, predicted, "--", color=colour, linewidth=1.3, label=f"{name}, predicted")
            beside = rows[-1], measured[-1].medians[prefetch]
            label_beside(axes, beside, (9, -7 if prefetch else 7), name, color=colour, va="center", fontweight="bold")
        axes.set_xscale("log", base=2)
        axes.set_xticks(rows, [f"{one.rows}\n{one.forward / one.gather:.2g}" for one in measured])
        axes.set(
            xlim=(0.8 * rows[0], 3.2 * rows[-1]),
            ylim=(0, None),
            ylabel="seconds per step",
            xlabel="rows per rank; below, a block's forward over its gather\n(dots: every try; dashed: the step "
            "without the link plus the waits on paper)",
        )
    return figure


def trace(events: Sequence[TraceEvent]) -> Figure:
    """The engine's own events in a profiler's trace, over the blocks' computation.

    Args:
        events: in the order of their beginnings.
    """
    lanes = {
        "compute": COLOURS["forward"],
        "all-gather": COLOURS["communication"],
        "reduce-scatter": COLOURS["gradients"],
    }
    early = sum(event.early for event in events if event.lane == "all-gather")
    gathers = sum(event.lane == "all-gather" and event.block is not None for event in events)
    title = f"{early} of {gathers} gathers of blocks begin while the block before still has work"
    with canvas(title, height=2.2) as (figure, axes):
        for row, (lane, colour) in enumerate(lanes.items()):
            spans = [event for event in events if event.lane == lane]
            for event in spans:
                axes.broken_barh(
                    [(event.begin, event.end - event.begin)],
                    (row - 0.35, 0.7),
                    facecolors=colour,
                    edgecolors="white",
                    linewidth=0.6,
                    label="outside of blocks" if event.block is None else f"block #{event.block}",
                )
                if event.block is not None and event.end - event.begin > 0.02 * events[-1].end:
                    middle = (event.begin + event.end) / 2
                    axes.text(middle, row, str(event.block), ha="center", va="center", fontsize=8)
        name_rows(axes, lanes, "ms since the forward began, as rank 0's processor called them", grid=False)
    return figure


def stays_and_passes(ranks: Sequence[int], stays: Sequence[float], passes: float) -> Figure:
    """Predicted bytes per GPU against the number of GPUs: the states that stay, and the blocks that pass through.

    Args:
        ranks: numbers of GPUs.
        stays: bytes of model states per GPU, for each of them.
        passes: bytes of whole parameters in flight at the peak.
    """
    overtaken = next((n for n, size in zip(ranks, stays, strict=True) if size < passes), None)
    title = (
        f"From {overtaken} GPUs on, the weights passing through are more than all that stays"
        if overtaken
        else "What stays is more than what passes through"
    )
    with canvas(title, height=2.8) as (figure, axes):
        places = range(len(ranks))
        gigabytes = [size / 1e9 for size in stays]
        colours = {"model states": COLOURS["optimizer states"], "whole weights in flight": COLOURS["parameters"]}
        for place, size in enumerate(gigabytes):
            parts = {"model states": size, "whole weights in flight": passes / 1e9}
            top = stack(axes, place, parts, colours, size=0.55, predicted=True)
            axes.text(place, top, f"{top:.2f}", ha="center", va="bottom")
        axes.set_xticks(places, [str(n) for n in ranks])
        axes.set(xlabel="GPUs", ylabel="GB per GPU, by the formula", ylim=(0, 1.18 * (gigabytes[0] + passes / 1e9)))
        last = len(ranks) - 0.65
        for x, y, name in (
            (last, passes / 2e9 + gigabytes[-1], " whole weights\n in flight"),
            (0.33, 0.8 * gigabytes[0], "model states"),
        ):
            colour = colours[" ".join(name.split())]
            axes.text(x, y, name, va="center", color=colour, fontweight="bold", fontsize=9)
        axes.set_xlim(-0.5, len(ranks) + 0.5)
    return figure
