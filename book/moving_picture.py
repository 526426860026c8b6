"""The front page's picture: two pipeline schedules, drawn as the ranks would run them, from the simulator's times."""

from html import escape

from course_lib.parallel.pipeline.schedules import make
from course_lib.parallel.pipeline.simulation import Timeline, simulate

SCHEDULES = {"1f1b": "1F1B", "zbv": "ZB-V"}
MEANINGS = {
    "F": "forward",
    "I": "backward; in ZB-V its half for the inputs",
    "W": "the half for the weights",
    "lane": "idle",
}
"""What the colours of the blocks mean, by the kind of their action."""
RANKS, MICROBATCHES = 4, 8
WIDTH, LANE, LABEL, HEAD = 760, 22, 56, 26
"""Units of the drawing: its width, a rank's lane, the room for a rank's name and for a panel's title."""


def drawing() -> str:
    """HTML of the picture: an SVG whose blocks appear in their order, once, and a button that shows them again."""
    lines = {name: simulate(make(name, RANKS, MICROBATCHES)) for name in SCHEDULES}
    # a block of a schedule with several stages per rank is as much shorter
    spans = {name: line.makespan / (len(line.schedule.stage_ranks) // RANKS) for name, line in lines.items()}
    unit = (WIDTH - LABEL) / max(spans.values())
    body, top = [], 0
    for name, line in lines.items():
        body += _panel(
            SCHEDULES[name],
            line,
            top,
            float(unit * spans[name] / line.makespan),
            float(spans[name] / max(spans.values())),
        )
        top += HEAD + RANKS * LANE + 8
    first, last = lines.values()
    said = (
        f"{RANKS} ranks train {MICROBATCHES} micro-batches: with 1F1B they wait {float(first.bubble):.0%} of the "
        f"time, with ZB-V {float(last.bubble):.0%}, and end earlier"
    )
    swatch = "<svg viewBox='0 0 12 12' aria-hidden='true'><rect width='12' height='12'/></svg>"
    legend = "".join(f"<span class='run-{kind}'>{swatch}{meaning}</span>" for kind, meaning in MEANINGS.items())
    return (
        f"<div class='run' id='run'><svg viewBox='0 0 {WIDTH} {top}' role='img' aria-label='{escape(said)}'>"
        f"{''.join(body)}</svg><p class='run-legend'>{legend}<span>the number: which micro-batch</span></p>"
        f"<p class='run-says'>{escape(said)}. "
        "<button type='button' id='run-again'>Show again</button></p></div>"
    )


def _panel(title: str, line: Timeline, top: int, unit: float, share: float) -> list[str]:
    """The lanes of one schedule; a block appears at its share of the longer run's time."""
    drawn = [f"<text class='run-title' x='0' y='{top + 15}'>{title}: {float(line.bubble):.0%} idle</text>"]
    for rank, row in enumerate(line.rows):
        y = top + HEAD + rank * LANE
        whole = float(line.makespan) * unit
        drawn.append(
            f"<text x='0' y='{y + 14}'><tspan class='run-word'>rank </tspan>{rank}</text>"
            f"<rect class='run-lane' x='{LABEL}' y='{y}' width='{whole:.1f}' height='{LANE - 4}'/>"
        )
        for action, start, end in row:
            x, width = LABEL + float(start) * unit, float(end - start) * unit
            at = share * float(end / line.makespan)
            drawn.append(
                f"<g class='run-{action.kind}' style='--t:{at:.3f}'><rect x='{x:.1f}' y='{y}' "
                f"width='{width - 0.6:.1f}' height='{LANE - 4}'/><text x='{x + width / 2:.1f}' y='{y + 13}'>"
                f"{action.microbatch}</text></g>"
            )
    return drawn
