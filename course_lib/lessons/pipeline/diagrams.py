"""Diagrams of pipelines, drawn from the schedules' own tables: who waits for whom, and the V."""

from course_lib.errors import ConfigError
from course_lib.figures.diagrams.base import Diagram
from course_lib.figures.diagrams.collectives import SENT, check_ranks
from course_lib.figures.diagrams.marks import MARGIN, SMALL, WIDTH, tint
from course_lib.figures.style import COLOURS
from course_lib.parallel.pipeline.actions import B, F, I, W, v_shape
from course_lib.parallel.pipeline.schedules import make
from course_lib.parallel.pipeline.simulation import simulate

FILLS = {F: COLOURS["forward"], B: COLOURS["backward"], I: COLOURS["backward-input"], W: COLOURS["backward-weight"]}


def who_waits(name: str = "1f1b", ranks: int = 3, microbatches: int = 4) -> Diagram:
    """A schedule over time, and the messages of micro-batch 0, for which the ranks wait.

    Args:
        name: a schedule of one stage per rank, such as gpipe, 1f1b, zb_h1.
        ranks: 2 to 4.
        microbatches: up to 6.
    Raises:
        ConfigError: other sizes, or no such schedule.
    """
    check_ranks(ranks, most=4)
    if microbatches > 6:
        raise ConfigError(f"a diagram of {microbatches} micro-batches", "take at most 6")
    timeline = simulate(make(name, ranks, microbatches, 1))
    diagram = Diagram(
        f"{name}: the ranks are idle for {float(timeline.bubble):.0%} of the time",
        f"{ranks} lanes over time, one per rank, with the forwards F and backwards of {microbatches} micro-batches in "
        "the order of the schedule's table. Arrows are the messages of micro-batch 0: activations down to the next "
        "rank, gradients up again. Grey is idle.",
    )
    left, top = 72.0, diagram.head + 10
    scale = (WIDTH - MARGIN - left) / float(timeline.makespan)
    ends: dict[tuple[int, str], tuple[float, float]] = {}
    for rank, row in enumerate(timeline.rows):
        y = top + rank * 58
        diagram.lane(y, f"rank {rank}", left, WIDTH - MARGIN, 32)
        for span in row:
            start, end = left + float(span.start) * scale, left + float(span.end) * scale
            text = f"{span.action.kind}{span.action.microbatch}"
            diagram.box(start, y, end - start, 32, text, fill=FILLS[span.action.kind], size=SMALL, means=span)
            if span.action.microbatch == 0 and span.action.kind != W:
                ends[rank, "F" if span.action.kind == F else "B"] = (start, end)
    for rank in range(ranks - 1):
        y = top + rank * 58
        down = (ends[rank, "F"][1], y + 32), (ends[rank + 1, "F"][0] + 4, y + 58)
        up = (ends[rank + 1, "B"][1], y + 58), (ends[rank, "B"][0] + 4, y + 32)
        diagram.arrow(*down, colour=SENT, means=(rank, rank + 1))
        diagram.arrow(*up, colour=SENT, means=(rank + 1, rank))
    diagram.time_axis(left, WIDTH - MARGIN, top + ranks * 58 - 12)
    return diagram


def the_v(ranks: int = 4) -> Diagram:
    """Places of the stages in ZB-V and DualPipeV: down the ranks and up again, from :func:`v_shape`.

    Args:
        ranks: 2 to 5.
    Raises:
        ConfigError: another number.
    """
    check_ranks(ranks)
    places = v_shape(ranks, 2)
    diagram = Diagram(
        f"In a V, rank 0 holds the first stage and the last: stages 0 and {2 * ranks - 1}",
        f"{ranks} rows, one per rank, with two stages each. Activations go down the left column from rank 0 to the "
        "last rank, which passes them to its own second stage, and up the right column to rank 0, which has the loss.",
    )
    top = diagram.head + 12
    boxes = []
    for stage, rank in enumerate(places):
        x, share = (170.0, 0.35) if stage < ranks else (430.0, 0.9)
        block, fill = (x, top + rank * 52, 130, 32), tint(COLOURS["forward"], share)
        boxes.append(diagram.box(*block, f"stage {stage}", fill=fill, means=(stage, rank)))
        if stage < ranks:
            diagram.text(150, top + rank * 52 + 16, f"rank {rank}", anchor="end", bold=True)
    for before, after in zip(boxes, boxes[1:], strict=False):
        inside = before.y == after.y
        start, end = ("right", "left") if inside else (("bottom", "top") if after.y > before.y else ("top", "bottom"))
        colour, means = COLOURS["neutral"] if inside else SENT, (before.means[0], after.means[0])
        diagram.arrow(before.edge(start), after.edge(end), colour=colour, width=2, means=means)
    diagram.text(580, top + 16, "loss", anchor="start", bold=True)
    diagram.text(580, top + (ranks - 1) * 52 + 16, "no message:\nthe same rank", SMALL, "start")
    return diagram


def who_needs_what() -> Diagram:
    """F, I and W of one stage: what each of them takes and gives.

    Source: Qi et al., *Zero Bubble Pipeline Parallelism* (arXiv 2401.10241), section 2.
    """
    diagram = Diagram(
        "The stage before waits for I alone; no rank waits for W, so it can fill a bubble",
        "Three boxes for one stage: F, the forward, I, the gradient of the input, and W, the gradient of the weights. "
        "F gives activations to the next stage, I takes the gradient from the next stage and gives one to the stage "
        "before. W takes what F and I leave, and gives its result only to the optimizer.",
    )
    top = diagram.head + 14
    before = diagram.box(14, top, 110, 150, "stage\nbefore", fill="#F6F6F6", radius=6)
    after = diagram.box(596, top, 110, 150, "next\nstage", fill="#F6F6F6", radius=6)
    forward = diagram.box(270, top, 180, 40, "F  forward", fill=FILLS[F], means=F)
    inputs = diagram.box(270, top + 105, 180, 40, "I  gradient of input", fill=FILLS[I], means=I)
    weights = diagram.box(270, top + 200, 180, 40, "W  gradient of weights", fill=FILLS[W], means=W)
    optimizer = diagram.box(596, top + 200, 110, 40, "optimizer", fill=COLOURS["optimizer"])
    for start, end, y, text in (
        (before.right, forward.x, 20, "activations"),
        (forward.right, after.x, 20, "activations"),
        (after.x, inputs.right, 125, "gradient"),
        (inputs.x, before.right, 125, "gradient"),
    ):
        diagram.arrow((start, top + y), (end, top + y), colour=SENT, width=2, means=(start, end))
        diagram.text((start + end) / 2, top + y - 11, text, SMALL, colour=SENT)
    diagram.arrow(forward.edge("bottom"), inputs.edge("top"))
    diagram.text(370, top + 72, "kept activations", SMALL, "start")
    diagram.arrow(inputs.edge("bottom"), weights.edge("top"))
    diagram.text(370, top + 172, "activations and gradients", SMALL, "start")
    diagram.arrow(weights.edge("right"), optimizer.edge("left"))
    return diagram
