"""Time lines of pipeline schedules: who computes what, when, and who waits; and what memory buys."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from course_lib.figures.style import COLOURS, Look, canvas, hollow, label_right, upright_grid
from course_lib.parallel.pipeline.actions import B, F, I, Schedule, W
from course_lib.parallel.pipeline.simulation import Span, Timeline

KINDS = {F: "forward", B: "backward", I: "backward-input", W: "backward-weight"}
INK = {F: "black", B: "white", I: "white", W: "black"}
Rows = Sequence[Sequence[Span]]

LANE = 0.82
"""Height of a rank's lane, of 1."""
NUMBERED = 0.065
"""Inches that a block needs to hold a digit of its micro-batch."""


class Panel(NamedTuple):
    """A panel's title, table and blocks; ``sizes`` are the blocks that decide whether an action has its number."""

    name: str
    schedule: Schedule
    rows: Rows
    hatched: bool
    sizes: Rows


def gantt(timelines: Mapping[str, Timeline], title: str, unit: str = "") -> Figure:
    """Predicted time lines under one another, on one time axis; hatched, with the micro-batch in each block.

    Args:
        timelines: what the simulator says, by the name of the panel.
        title: the finding.
        unit: of the times, for the axis.
    """
    panels = []
    for name, timeline in timelines.items():
        said = f"{name}: {float(timeline.bubble):.1%} idle" if name else ""
        panels.append(Panel(said, timeline.schedule, timeline.rows, True, timeline.rows))
    return draw(title, panels, unit)


def draw(title: str, panels: Sequence[Panel], unit: str) -> Figure:
    """Panels under one another, on one time axis in ``unit``."""
    ranks = sum(len(panel.rows) for panel in panels)
    end = max(float(row[-1].end) for panel in panels for row in panel.rows)
    heights = [len(panel.rows) + 0.6 for panel in panels]
    height = min(11.0, 0.95 + max(0.13, 0.3 - 0.0025 * ranks) * sum(heights) + 0.15 * len(panels))
    with canvas(
        title, width=7.2, height=height, nrows=len(panels), sharex=True, squeeze=False, height_ratios=heights
    ) as (figure, grid):
        for axes, panel in zip(grid[:, 0], panels, strict=True):
            _panel(axes, panel, end)
            axes.set_title(panel.name, fontsize=10)
        grid[-1, 0].set_xlabel(f"time ({unit})" if unit else "time")
        key = _key(panels)
        columns = 6 if len(key) < 6 else 3
        look = {"fontsize": 9, "handlelength": 1.2, "columnspacing": 1.2}
        figure.legend(handles=key, loc="outside lower center", ncols=columns, **look)
    return figure


def _key(panels: Sequence[Panel]) -> list[Patch]:
    drawn = {span.action.kind for panel in panels for row in panel.rows for span in row}
    names = dict(KINDS)
    if drawn >= {B, I}:
        names[B] = "backward, whole or of the input"
        drawn.remove(I)
    pale = all(panel.hatched for panel in panels)
    handles = [
        Patch(facecolor=_tint(colour) if pale else colour, edgecolor="black", linewidth=0.6, label=name)
        for kind, name in names.items()
        if kind in drawn
        for colour in [COLOURS[KINDS[kind]]]
    ]
    if not pale and any(panel.hatched for panel in panels):
        handles.append(Patch(facecolor="white", edgecolor="black", linewidth=0.6, label="pale: predicted"))
    handles.append(Patch(facecolor=COLOURS["idle"], label="idle"))
    if any(panel.schedule.stages > panel.schedule.ranks for panel in panels):
        handles.append(Patch(facecolor="black", label="foot: the rank's second stage"))
    return handles


def _panel(axes: Axes, panel: Panel, end: float) -> None:
    """Lanes of one table, the first rank at the top; actions that overlap share the lane's height."""
    inch = 6.1 / end
    schedule, rows, hatched = panel.schedule, panel.rows, panel.hatched
    numbered = {
        span.action
        for row in panel.sizes
        for span in row
        if float(span.end - span.start) * inch > NUMBERED * len(str(span.action.microbatch)) + 0.015
    }
    last = max(float(span.end) for row in rows for span in row)
    for rank, row in enumerate(rows):
        axes.add_patch(Rectangle((0, rank - LANE / 2), last, LANE, facecolor=COLOURS["idle"], linewidth=0))
        laps = {stage: lap for lap, stage in enumerate(schedule.stages_of(rank))}
        for before, span, after in zip((None, *row), row, (*row[1:], None), strict=False):
            shared = span.action in schedule.overlapped and after is not None and after.start < span.end
            sharing = before is not None and before.action in schedule.overlapped and span.start < before.end
            height = LANE / 2 if shared or sharing else LANE
            top = rank - LANE / 2 + (LANE / 2 if sharing else 0)
            label = str(span.action.microbatch) if span.action in numbered else ""
            _block(axes, span, top, height, laps[span.action.stage], hatched, inch, label)
    step = max(1, len(rows) // 8)
    axes.set_yticks(range(0, len(rows), step), [f"rank {rank}" for rank in range(0, len(rows), step)], fontsize=8)
    axes.set(xlim=(-0.003 * end, 1.003 * end), ylim=(len(rows) - 0.5, -0.5))
    axes.grid(visible=False)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _block(axes: Axes, span: Span, top: float, height: float, lap: int, hatched: bool, inch: float, label: str) -> None:
    """One action; its foot is as high as the lap of its stage, its number the micro-batch.

    A predicted block is tinted, and hatched where no number would be behind the lines.
    """
    start, width = float(span.start), float(span.end - span.start)
    kind = span.action.kind
    colour = COLOURS[KINDS[kind]]
    wide = width * inch > 0.03
    block = Rectangle(
        (start, top),
        width,
        height,
        facecolor=_tint(colour) if hatched else colour,
        edgecolor="black" if wide else "none",
        linewidth=0.6 if wide else 0.0,
        label=f"{KINDS[kind]}{f', stage {lap + 1} of the rank' if lap else ''} #{span.action.microbatch}",
    )
    if hatched and wide and not label:
        block.set(hatch="////", hatchcolor=colour, hatch_linewidth=0.7)
    axes.add_patch(block)
    if lap:
        foot = 0.12 * lap * height
        axes.add_patch(Rectangle((start, top + height - foot), width, foot, facecolor="black", edgecolor="none"))
    if label:
        look: Look = {"fontsize": 7.5 if height == LANE else 6, "color": "black" if hatched else INK[kind]}
        axes.text(start + width / 2, top + 0.47 * height, label, ha="center", va="center_baseline", **look)


def _tint(colour: str) -> tuple[float, ...]:
    return tuple(0.55 + 0.45 * channel for channel in to_rgb(colour))


def bubble_beside_memory(
    timelines: Mapping[str, Timeline], title: str, limit: Fraction | float | None = None, unit: str = "activations"
) -> Figure:
    """Idle share and peak memory of several schedules as predicted bars, in the order given; grey is over the limit.

    Args:
        timelines: what the simulator says, by the name of the row.
        title: the finding.
        limit: bytes that a rank may hold, drawn as a line.
        unit: of the bytes, for the axis.
    """
    height = 1.2 + 0.26 * len(timelines)
    with canvas(title, width=7.0, height=height, ncols=2, sharey=True) as (figure, (idle_axes, held_axes)):
        for row, timeline in enumerate(timelines.values()):
            held, idle = float(max(timeline.peak_activations)), 100 * float(timeline.bubble)
            fits = limit is None or held <= limit
            for axes, value, kind in ((idle_axes, idle, "neutral"), (held_axes, held, "activations")):
                look = hollow(COLOURS[kind] if fits else "#b5b5b5", "")
                axes.barh(row, value, height=0.62, **look)
                ground = {"facecolor": "white", "edgecolor": "none", "pad": 0.3}
                ink = "black" if fits else "#777777"
                label_right(axes, value, row, f"{value:.3g}", fontsize=9, color=ink, bbox=ground)
        if limit is not None:
            held_axes.axvline(float(limit), color=COLOURS["wrong"], linewidth=1.4, label="limit")
            look = {"color": COLOURS["wrong"], "fontweight": "bold", "fontsize": 9}
            held_axes.text(float(limit), -0.7, "limit", ha="center", va="bottom", **look)
        idle_axes.set_yticks(range(len(timelines)), list(timelines), fontsize=9)
        idle_axes.set(xlabel="idle (% of all ranks' time)", ylim=(len(timelines) - 0.5, -0.7))
        held_axes.set(xlabel=f"held at most by a rank ({unit})")
        for axes in (idle_axes, held_axes):
            axes.margins(x=0.14)
            upright_grid(axes)
    return figure
