"""Diagrams of states: the life of a sharded unit, of a checkpoint and of a job, and a hang."""

from collections.abc import Sequence

from course_lib.figures.diagrams.base import Diagram
from course_lib.figures.diagrams.collectives import SENT
from course_lib.figures.diagrams.marks import GREY, MARGIN, SMALL, WIDTH, Box, tint
from course_lib.figures.style import COLOURS

State = tuple[str, str, str]
"""Name, colour, and what is said below it."""


def _chain(diagram: Diagram, states: Sequence[State], back: str = "") -> Diagram:
    """States from left to right, and an arrow from the last to the first where there is a way back."""
    pitch = (WIDTH - 2 * MARGIN + 24) / len(states)
    top = diagram.head + 20
    boxes: list[Box] = []
    for number, (name, fill, below) in enumerate(states):
        box = diagram.box(MARGIN + number * pitch, top, pitch - 24, 46, name, fill=fill, radius=8, means=name)
        lines = below.count("\n") + 1
        diagram.text(box.centre[0], top + 58 + 7 * lines, below, SMALL, colour=GREY)
        if boxes:
            diagram.arrow(boxes[-1].edge("right"), box.edge("left"), width=2, means=(boxes[-1].means, name))
        boxes.append(box)
    if back:
        y = top + 124
        start, end = boxes[-1], boxes[0]
        right, left = start.right - 8, end.x + 8
        way = (right, start.bottom), (right, y), (left, y), (left, end.bottom)
        diagram.arrow(*way, width=2, means=(start.means, end.means))
        diagram.text(WIDTH / 2, y, back, bold=True, ground=True)
    return diagram


def unit_life() -> Diagram:
    """The states of an FSDP unit, those of :class:`course_lib.parallel.sharded_unit.ShardedUnit`."""
    colour = COLOURS["parameters"]
    diagram = Diagram(
        "A unit's weights are whole only while its block computes: twice in every step",
        "Three states from left to right: SHARDED, GATHERING, WHOLE. gather() begins the all-gather, "
        "wait() ends it, and free() leads back to SHARDED, once in the forward and once in the backward.",
    )
    return _chain(
        diagram,
        [
            ("SHARDED", tint(colour, 0.15), "1/N of the weights;\ngather() leads on"),
            ("GATHERING", tint(SENT, 0.4), "the all-gather runs;\nwait() leads on"),
            ("WHOLE", colour, "the block computes;\nfree() leads back"),
        ],
        "free(): after the forward, and after the backward",
    )


def job_life() -> Diagram:
    """A job's life on a cluster where it can be interrupted."""
    diagram = Diagram(
        "An interrupted job loses only the steps since its last checkpoint",
        "Four states from left to right: queued, starting, training, interrupted. An arrow leads back: "
        "an interrupted job is queued again, and goes on from its last checkpoint until it is done.",
    )
    return _chain(
        diagram,
        [
            ("queued", tint(COLOURS["data"], 0.3), "waits for\nmachines"),
            ("starting", tint(COLOURS["data"], 0.6), "image, data,\nranks meet"),
            ("training", COLOURS["forward"], "writes\ncheckpoints"),
            ("interrupted", tint(COLOURS["wrong"], 0.5), "SIGTERM: a last\ncheckpoint"),
        ],
        "queued again: goes on from the last checkpoint, until it is done",
    )


def hang(ranks: int = 3, culprit: int = 1) -> Diagram:
    """One rank stops, and the others wait in their next collective.

    Args:
        ranks: 2 to 6.
        culprit: the rank that stops.
    """
    diagram = Diagram(
        f"Rank {culprit} stopped; the ranks that wait are the ones that report an error",
        f"{ranks} lanes over time. All ranks finish all-reduces 1 and 2. Rank {culprit} then stops, and "
        "the others wait in all-reduce 3, which it never calls, until their time is up.",
    )
    left, top = 72.0, diagram.head + 10
    for rank in range(ranks):
        y = top + rank * 44
        diagram.lane(y, f"rank {rank}", left, WIDTH - MARGIN, 30)
        for call in (1, 2):
            x = left + 60 + (call - 1) * 150
            diagram.box(x, y, 90, 30, f"all-reduce {call}", fill=tint(SENT, 0.5), size=SMALL, means=(rank, call))
        if rank == culprit:
            diagram.box(left + 330, y, 90, 30, "stops", fill=COLOURS["wrong"], bold=True, means=(rank, "stops"))
        else:
            text, block = "all-reduce 3: waits until its time is up", (left + 360, y, WIDTH - MARGIN - left - 360, 30)
            diagram.box(*block, text, dashed=True, size=SMALL, means=(rank, 3))
    diagram.time_axis(left, WIDTH - MARGIN, top + ranks * 44 + 2)
    return diagram
