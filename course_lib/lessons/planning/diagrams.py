"""A diagram of what is in a rank's memory when, over one training step."""

from course_lib.errors import ConfigError
from course_lib.figures.diagrams.base import Diagram
from course_lib.figures.diagrams.marks import GREY, INK, MARGIN, SMALL, WIDTH
from course_lib.figures.style import COLOURS
from course_lib.planning.memory import Memory

KIND_COLOURS = {
    "parameters": COLOURS["parameters"],
    "optimizer": COLOURS["optimizer states"],
    "gradients": COLOURS["gradients"],
    "activations": COLOURS["activations"],
    "logits": "#8C4D76",
    "buffers": COLOURS["communication"],
}
HEIGHT = 190
"""Pixels of the highest column."""


def held_over_a_step(held: Memory, groups: int) -> list[tuple[str, str, dict[str, float]]]:
    """(phase, what has just run, bytes by kind) for each point of a step, from the formula's kinds.

    Args:
        held: of one rank; its total is what the point `loss` holds, or the last one of the backward pass.
        groups: equal parts that the blocks run in.
    """
    kept = {kind: getattr(held, kind) for kind in KIND_COLOURS}
    waiting = held.gradients if held.gradients_wait else 0.0

    def point(activations: float, gradients: float, logits: float = 0.0) -> dict[str, float]:
        return kept | {"activations": held.activations * activations, "gradients": gradients, "logits": logits}

    points = [("forward", f"{part}/{groups}", point(part / groups, waiting)) for part in range(1, groups + 1)]
    points.append(("loss", "", point(1.0, waiting, held.logits)))
    for part in range(groups - 1, -1, -1):
        made = held.gradients if held.gradients_wait else held.gradients * (groups - part) / groups
        points.append(("backward", f"{part}/{groups}", point(part / groups, made)))
    return [*points, ("update", "", point(0.0, held.gradients) | {"buffers": 0.0})]


def step_memory(held: Memory, groups: int = 4) -> Diagram:
    """Memory of a rank at each point of a step, as high as its bytes.

    Args:
        held: of one rank, by formula.
        groups: equal parts that the blocks are drawn in, 2 to 6.
    Raises:
        ConfigError: too few or too many groups.
    """
    if not 2 <= groups <= 6:
        raise ConfigError(f"a diagram of {groups} groups of blocks", "take 2 to 6")
    points = held_over_a_step(held, groups)
    totals = [sum(kinds.values()) for *_, kinds in points]
    most = max(totals)
    phase = points[totals.index(most)][0]
    where = {"loss": "where the backward pass begins", "backward": "at the end of the backward pass"}
    diagram = Diagram(
        f"A rank holds most {where.get(phase, f'in the {phase}')}: {most / 2**30:.1f} GiB, "
        f"{(held.activations + held.logits) / most:.0%} of them activations and logits",
        f"{len(points)} columns over one step: {groups} parts of the forward pass, the loss, {groups} parts of the "
        "backward pass, the update. A column is a stack of parameters, optimizer, gradients, activations, logits and "
        "buffers, as high as its bytes. Activations pile up in the forward pass and go in the backward pass; "
        + ("gradients are there all the time." if held.gradients_wait else "gradients come in their place."),
    )
    top = diagram.head + 6
    for number, (kind, colour) in enumerate(KIND_COLOURS.items()):
        x, y = MARGIN + 4.0 + number % 3 * 230, top + number // 3 * 20
        diagram.box(x, y, 12, 12, fill=colour, stroke="none", means=("key", kind))
        diagram.text(x + 18, y + 6, f"{kind} {getattr(held, kind) / 2**30:.2f} GiB", SMALL, "start")
    left, base = MARGIN + 4, top + 62 + HEIGHT
    pitch = (WIDTH - MARGIN - left) / len(points)
    for number, ((name, part, kinds), total) in enumerate(zip(points, totals, strict=True)):
        x, y = left + number * pitch, base
        for kind, size in kinds.items():
            if size:
                height = HEIGHT * size / most
                y -= height
                fill, means = KIND_COLOURS[kind], (number, name, kind, size)
                diagram.box(x, y, pitch - 8, height, fill=fill, stroke="none", means=means)
        middle = x + (pitch - 8) / 2
        diagram.text(middle, y - 9, f"{total / 2**30:.1f}", SMALL, colour=INK, bold=total == most)
        diagram.text(middle, base + 11, part or name, SMALL, colour=GREY)
    for name, first in (("forward: blocks done", 0), ("backward: blocks left", groups + 1)):
        start, end = left + first * pitch, left + (first + groups) * pitch - 8
        diagram.arrow((start, base + 23), (end, base + 23), colour=GREY, width=1.2)
        diagram.text((start + end) / 2, base + 36, name, SMALL, colour=GREY)
    return diagram
