"""Text report of ``course schedule``."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from course_lib.parallel.pipeline.actions import B, F, I, W
from course_lib.parallel.pipeline.fitted.search import ScheduleCandidate
from course_lib.parallel.pipeline.formulas import bubble_time
from course_lib.parallel.pipeline.simulation import Costs, Number, Span, Timeline

STYLES = {F: "black on #56B4E9", B: "white on #0072B2", I: "white on #0072B2", W: "black on #F0E442"}
MESSAGE = "#D55E00"
IDLE = "bright_black"
PRINTED = 500
"""Actions beyond which the table is not printed: it would be longer than a screen."""
LANES = 96
"""Most lines of a time line that is cut into bands under each other, so that its blocks have room for numbers."""
INDENT = 8
"""Characters of a rank's name before its line."""


def show(console: Console, timeline: Timeline, costs: Costs, in_flight: Sequence[int], limit: Number | None) -> None:
    """The table, the time line, and the figures of one schedule."""
    schedule = timeline.schedule
    actions = sum(map(len, schedule.rows))
    if actions <= PRINTED:
        for rank, row in enumerate(schedule.rows):
            cells = Text(" ").join(Text(str(action), STYLES.get(action.kind, MESSAGE)) for action in row)
            for i, line in enumerate(cells.wrap(console, console.width - INDENT)):
                line.rstrip()
                console.print(Text.assemble((f"rank {rank}".ljust(INDENT) if i == 0 else " " * INDENT, "bold"), line))
        console.print()
    else:
        console.print(f"The table has {actions} actions; write it with --csv FILE.\n")
    lanes = lanes_of(timeline, console.width - INDENT)
    for band in range(len(lanes[0])):
        if len(lanes[0]) > 1:
            ends = (_plain(timeline.makespan * part / len(lanes[0])) for part in (band, band + 1))
            console.print(Text("from {} to {}".format(*ends), "dim"))
        for rank, lane in enumerate(lanes):
            console.print(Text.assemble((f"rank {rank:>2} ", "bold"), lane[band]), no_wrap=True, overflow="crop")
    console.print()
    facts = Table(show_header=False, box=None, pad_edge=False)
    for name, value in _facts(timeline, costs, in_flight, limit):
        facts.add_row(Text(name, "bold"), Text(value))
    console.print(facts)


def lanes_of(timeline: Timeline, width: int) -> list[list[Text]]:
    """Each rank's time line in characters, cut into bands of ``width`` where the numbers would not fit into one."""
    needed = max(
        (
            (len(str(span.action.microbatch)) + 1) / float(span.end - span.start)
            for spans in timeline.rows
            for span in spans
            if span.end > span.start
        ),
        default=0.0,
    )
    bands = max(1, math.ceil(needed * float(timeline.makespan) / width))
    if bands * len(timeline.rows) > LANES:
        bands = 1
    return [_lane(spans, timeline, width, bands) for spans in timeline.rows]


def _lane(spans: Sequence[Span], timeline: Timeline, width: int, bands: int) -> list[Text]:
    """One rank's time line; a block says its action, or its micro-batch, or its kind in each of its characters."""
    lane, at = Text(), 0
    scale = width * bands / timeline.makespan if timeline.makespan else 0
    for span in spans:
        begin, end = max(at, round(span.start * scale)), round(span.end * scale)
        lane.append("·" * (begin - at), IDLE)
        borders = [begin, *(border for border in range(0, width * bands, width) if begin < border < end), end]
        pieces = [upper - lower for lower, upper in itertools.pairwise(borders)] if end > begin else []
        widest = pieces.index(max(pieces)) if pieces else 0
        for i, room in enumerate(pieces):
            names = (str(span.action), str(span.action.microbatch)) if i == widest else ()
            label = next((text for text in names if len(text) < room), span.action.kind * room)
            lane.append(label.center(room), STYLES[span.action.kind])
        at = max(begin, end)
    lane.append("·" * (width * bands - at), IDLE)
    return list(lane.divide(range(width, width * bands, width)))


def as_json(timeline: Timeline, in_flight: Sequence[int]) -> dict[str, Any]:
    """One schedule with its times and memory, as numbers in the units of the costs that were given; activations are
    micro-batches of one stage where no --bytes are."""
    schedule = timeline.schedule
    return {
        "schedule": schedule.name,
        "ranks": schedule.ranks,
        "stages": schedule.stages,
        "microbatches": schedule.microbatches,
        "makespan": float(timeline.makespan),
        "bubble": float(timeline.bubble),
        "stage_bubble": float(timeline.stage_bubble),
        "peak_activations": [float(peak) for peak in timeline.peak_activations],
        "in_flight": list(in_flight),
        "rows": [
            [{"action": str(span.action), "start": float(span.start), "end": float(span.end)} for span in spans]
            for spans in timeline.rows
        ],
    }


def candidates_json(candidates: Sequence[ScheduleCandidate]) -> list[dict[str, Any]]:
    """All candidates, best first; those that cannot be taken with the reason."""
    rows = []
    for candidate in candidates:
        row: dict[str, Any] = {
            "schedule": candidate.name,
            "stages_per_rank": candidate.stages_per_rank,
            "microbatches": candidate.microbatches,
            "problem": candidate.problem or None,
        }
        if candidate.timeline is not None:
            row |= {
                "time_per_microbatch": float(candidate.sample_time),
                "bubble": float(candidate.timeline.bubble),
                "peak_activations": float(max(candidate.timeline.peak_activations)),
            }
        rows.append(row)
    return rows


def _facts(
    timeline: Timeline,
    costs: Costs,
    in_flight: Sequence[int],
    limit: Number | None,
) -> Iterator[tuple[str, str]]:
    schedule = timeline.schedule
    yield "table", f"{schedule.ranks} ranks, {schedule.stages} stages, {schedule.microbatches} micro-batches"
    yield "proved", "complete, in order, and free of deadlock even where sends block"
    yield "step", f"{_plain(timeline.makespan)} from the first start to the last end"
    yield "bubble", f"{float(timeline.bubble):.2%} of all ranks' time ({timeline.bubble})"
    if timeline.stage_bubble != timeline.bubble:
        yield (
            "",
            (
                f"{float(timeline.stage_bubble):.2%} between a rank's own first and last action, "
                "which is what is lost where steps follow without a barrier"
            ),
        )
    wait = None if costs.latency else bubble_time(schedule.name, schedule.ranks, schedule.microbatches, costs)
    if wait is not None:
        yield "formula", f"a rank waits {_plain(wait)} in a step"
    peaks = ", ".join(_plain(peak) for peak in timeline.peak_activations)
    yield "held at most", f"{peaks} by rank; {', '.join(map(str, in_flight))} micro-batches, counted for each stage"
    if limit is not None:
        over = [rank for rank, peak in enumerate(timeline.peak_activations) if peak > limit]
        yield "limit", f"{_plain(limit)}: " + (f"rank {over[0]} holds more" if over else "every rank fits")


def verdict(candidates: Sequence[ScheduleCandidate]) -> str:
    """Best candidate, in one line."""
    best = candidates[0]
    if best.problem:
        return "No schedule fits"
    return f"Best of those that fit: {best.name} with {best.microbatches} micro-batches"


def compare(console: Console, candidates: Sequence[ScheduleCandidate], limit: Number | None) -> None:
    """All candidates, best first, and why the others cannot be taken."""
    table = Table(box=None, title=verdict(candidates) + (f" (limit {_plain(limit)})" if limit is not None else ""))
    for column in ("", "schedule", "V", "M", "time/M", "idle", "held"):
        table.add_column(column, justify="left" if column == "schedule" else "right", no_wrap=True)
    table.add_column("")
    for place, candidate in enumerate(candidates, start=1):
        row = ["", candidate.name, str(candidate.stages_per_rank), str(candidate.microbatches)]
        if candidate.timeline is None:
            row += [""] * 3
        else:
            peak = max(candidate.timeline.peak_activations)
            row += [_plain(candidate.sample_time), f"{float(candidate.timeline.bubble):.1%}", _plain(peak)]
        row[0] = "" if candidate.problem else str(place)
        table.add_row(
            *row,
            Text(candidate.problem or "fits", "red" if candidate.problem else "green"),
            style="dim" if candidate.problem else "bold" if place == 1 else "",
        )
    console.print(table)
    console.print(
        "V stages per rank, M micro-batches, time of a step by micro-batch, idle share, most held by a rank.",
        style="dim",
    )


def _plain(value: Number) -> str:
    """A number as one would write it."""
    return f"{float(value):.6g}"
