"""What ``course schedule`` prints."""

from collections.abc import Iterator, Sequence

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
PRINTED = 4000
"""Actions beyond which the table is not printed."""


def show(console: Console, timeline: Timeline, costs: Costs, in_flight: Sequence[int], limit: Number | None) -> None:
    """The table, the time line, and the figures of one schedule."""
    schedule = timeline.schedule
    actions = sum(map(len, schedule.rows))
    if actions <= PRINTED:
        for rank, row in enumerate(schedule.rows):
            cells = Text.assemble((f"rank {rank}  ", "bold"))
            for action in row:
                cells.append(str(action), STYLES.get(action.kind, MESSAGE)).append(" ")
            console.print(cells, soft_wrap=not console.is_terminal)
        console.print()
    else:
        console.print(f"The table has {actions} actions; write it with --csv FILE.\n")
    for rank, spans in enumerate(timeline.rows):
        lane = _lane(spans, timeline, console.width - 8)
        console.print(Text.assemble((f"rank {rank:>2} ", "bold"), lane), no_wrap=True, overflow="crop")
    console.print()
    facts = Table(show_header=False, box=None, pad_edge=False)
    for name, value in _facts(timeline, costs, in_flight, limit):
        facts.add_row(Text(name, "bold"), Text(value))
    console.print(facts)


def _lane(spans: Sequence[Span], timeline: Timeline, width: int) -> Text:
    """One rank's time line in characters; a block says its action, or its micro-batch, or nothing, as it has room."""
    lane, at = Text(), 0
    scale = width / timeline.makespan if timeline.makespan else 0
    for span in spans:
        begin, end = max(at, round(span.start * scale)), round(span.end * scale)
        lane.append("·" * (begin - at), IDLE)
        label = next((text for text in (str(span.action), str(span.action.microbatch)) if len(text) < end - begin), "")
        lane.append(label.center(max(0, end - begin)), STYLES[span.action.kind])
        at = max(begin, end)
    return lane.append("·" * (width - at), IDLE)


def _facts(timeline: Timeline, costs: Costs, in_flight: Sequence[int], limit: Number | None,
           ) -> Iterator[tuple[str, str]]:
    schedule = timeline.schedule
    yield "table", f"{schedule.ranks} ranks, {schedule.stages} stages, {schedule.microbatches} micro-batches"
    yield "proved", "complete, in order, and free of deadlock even where sends block"
    yield "step", f"{_plain(timeline.makespan)} from the first start to the last end"
    yield "bubble", f"{float(timeline.bubble):.2%} of all ranks' time ({timeline.bubble})"
    if timeline.stage_bubble != timeline.bubble:
        yield "", (f"{float(timeline.stage_bubble):.2%} between a rank's own first and last action, "
                   "which is what is lost where steps follow without a barrier")
    wait = None if costs.latency else bubble_time(schedule.name, schedule.ranks, schedule.microbatches, costs)
    if wait is not None:
        yield "formula", f"a rank waits {_plain(wait)} in a step"
    peaks = ", ".join(_plain(peak) for peak in timeline.peak_bytes)
    yield "held at most", f"{peaks} by rank; {', '.join(map(str, in_flight))} micro-batches, counted for each stage"
    if limit is not None:
        over = [rank for rank, peak in enumerate(timeline.peak_bytes) if peak > limit]
        yield "limit", f"{_plain(limit)}: " + (f"rank {over[0]} holds more" if over else "every rank fits")


def finding(timeline: Timeline) -> str:
    """One line for the figure's title."""
    schedule = timeline.schedule
    return (f"{schedule.name}, {schedule.ranks} ranks, {schedule.microbatches} micro-batches: "
            f"{float(timeline.bubble):.1%} idle, {_plain(max(timeline.peak_bytes))} held at most")


def verdict(candidates: Sequence[ScheduleCandidate]) -> str:
    """Which candidate is best, in one line."""
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
            peak = max(candidate.timeline.peak_bytes)
            row += [_plain(candidate.sample_time), f"{float(candidate.timeline.bubble):.1%}", _plain(peak)]
        row[0] = "" if candidate.problem else str(place)
        table.add_row(*row, Text(candidate.problem or "fits", "red" if candidate.problem else "green"),
                      style="dim" if candidate.problem else "bold" if place == 1 else "")
    console.print(table)
    console.print("V stages per rank, M micro-batches, time of a step by micro-batch, idle share, most held by a rank.",
                  style="dim")


def _plain(value: Number) -> str:
    """A number as one would write it."""
    return f"{float(value):.6g}"
