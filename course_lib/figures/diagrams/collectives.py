"""Diagrams of collectives: a ring step by step, and an all-reduce as its two halves."""

from typing import NamedTuple

from course_lib.errors import ConfigError
from course_lib.figures.diagrams.base import Diagram
from course_lib.figures.diagrams.marks import GREY, MARGIN, SMALL, WIDTH, tint
from course_lib.figures.style import COLOURS

SENT = COLOURS["communication"]


class Send(NamedTuple):
    """One message of a ring: in which step, from whom to whom, which part, and whose shares are summed in it."""

    step: int
    source: int
    to: int
    part: int
    shares: frozenset[int]


def check_ranks(ranks: int, least: int = 2, most: int = 5) -> None:
    """Refuse a number of ranks that does not fit on the page.

    Raises:
        ConfigError: with the bounds.
    """
    if not least <= ranks <= most:
        raise ConfigError(f"a diagram for {ranks} ranks", f"take {least} to {most}")


def ring(ranks: int = 4) -> Diagram:
    """A ring all-reduce step by step: N - 1 steps of reduce-scatter, then N - 1 of all-gather.

    Args:
        ranks: N, 2 to 4.
    Raises:
        ConfigError: another number of ranks.
    Source: Patarasuk and Yuan (2009), as in :mod:`course_lib.parallel.collectives`.
    """
    check_ranks(ranks, most=4)
    diagram = Diagram(
        f"{2 * (ranks - 1)} steps, and in each of them a rank sends one part of {ranks} to its neighbour",
        f"Two rows of panels. Each panel shows {ranks} ranks side by side, each with a column of {ranks} parts; a "
        "number says how many ranks' shares are summed in a part, and arrows show what is sent to the next rank. In "
        f"the upper row, the reduce-scatter, sums grow until each rank has one part with {ranks} shares. In the lower "
        "row, the all-gather, these parts go round until every rank has all of them.",
    )
    held = {(rank, part): frozenset({rank}) for rank in range(ranks) for part in range(ranks)}
    top = diagram.head + 14
    panel = (WIDTH - 2 * MARGIN) / ranks
    # The part that a rank sends: in step 1 of the reduce-scatter that of the rank before it, in the all-gather its own.
    for phase, shift, says in (("reduce-scatter", 0, "sums grow"), ("all-gather", 1, "finished parts go round")):
        diagram.text(MARGIN, top, f"{phase}: {says}", anchor="start", bold=True, colour=SENT)
        top += 16
        for step in range(1, ranks + 1):
            left = MARGIN + (step - 1) * panel
            sends = [
                Send(step, rank, (rank + 1) % ranks, part, held[rank, part])
                for rank in range(ranks)
                for part in [(rank - step + shift) % ranks]
                if step < ranks
            ]
            caption = f"step {step}" if sends else ("one sum per rank" if phase == "reduce-scatter" else "all sums")
            _panel(diagram, ranks, left, top, panel, caption, phase, held, sends)
            for send in sends:
                before = held[send.to, send.part] if phase == "reduce-scatter" else frozenset()
                held[send.to, send.part] = send.shares | before
        top += 58 + ranks * 24
    explained = f"number in a part: how many ranks' gradients are summed in it;  solid: the sum of all {ranks}"
    diagram.note(MARGIN, top - 6, explained)
    return diagram


def _panel(
    diagram: Diagram,
    ranks: int,
    left: float,
    top: float,
    width: float,
    caption: str,
    phase: str,
    held: dict[tuple[int, int], frozenset[int]],
    sends: list[Send],
) -> None:
    """All ranks' parts before a step, and what is sent in it; the last rank's message leaves and enters at the edge."""
    pitch = (width - 24) / ranks
    cell = min(22.0, pitch * 0.56)
    start = left + 12 + (pitch - cell) / 2
    diagram.text(left + width / 2, top + 4, caption, SMALL)
    for rank in range(ranks):
        x = start + rank * pitch
        for part in range(ranks):
            shares = held[rank, part]
            whole = len(shares) == ranks
            fill = tint(COLOURS["gradients"], 1.0 if whole else 0.12 + 0.4 * (len(shares) - 1) / ranks)
            block, means = (x, top + 16 + part * 24, cell, 20), (phase, caption, rank, part, shares)
            diagram.box(*block, str(len(shares)), size=SMALL, fill=fill, means=means)
        diagram.text(x + cell / 2, top + 24 + ranks * 24, str(rank), SMALL, colour=GREY)
    diagram.note(left + 4, top + 24 + ranks * 24, "rank" if width > 220 else "")
    for send in sends:
        y = top + 26 + send.part * 24
        x = start + send.source * pitch + cell
        if send.to > send.source:
            diagram.arrow((x + 1, y), (x + pitch - cell - 1, y), colour=SENT, means=send)
        else:
            diagram.arrow((x + 1, y), (x + 11, y), colour=SENT, head=False, means=send)
            diagram.arrow((start - 12, y), (start - 1, y), colour=SENT)


def all_reduce_in_two(ranks: int = 4) -> Diagram:
    """An all-reduce as a reduce-scatter and an all-gather of a bucket that is cut over the ranks.

    Args:
        ranks: N, 2 to 5.
    Raises:
        ConfigError: another number of ranks.
    Source: Rajbhandari et al., *ZeRO* (arXiv 1910.02054), section 7.1.
    """
    check_ranks(ranks)
    diagram = Diagram(
        "An all-reduce is a reduce-scatter and an all-gather; ZeRO puts the optimizer between",
        f"Three grids of {ranks} ranks by {ranks} parts of a bucket. Left: every rank has its own gradient of every "
        "part. Middle, after the reduce-scatter: each rank has the sum of one part. Right, after the all-gather: every "
        f"rank has the sum of every part. Each half sends {ranks - 1}/{ranks} of the bucket per rank.",
    )
    cell, row, gap = 26.0, 30.0, 170.0
    grid = ranks * cell
    left = 70 + (WIDTH - 70 - MARGIN - 3 * grid - 2 * gap) / 2 if ranks < 5 else 70.0
    gap = min(gap, (WIDTH - MARGIN - left - 3 * grid) / 2)
    top = diagram.head + 62
    columns = [left + number * (grid + gap) for number in range(3)]
    for x, name in zip(columns, ("own gradients", "one sum per rank", "all sums"), strict=True):
        diagram.text(x + grid / 2, top - 12, name, bold=True)
    whole = COLOURS["gradients"]
    for rank in range(ranks):
        y = top + rank * row
        diagram.text(left - 8, y + 12, f"rank {rank}", anchor="end")
        for part, letter in enumerate("ABCDE"[:ranks]):
            own, reduced, gathered = (x + part * cell for x in columns)
            diagram.box(own, y, cell, 24, letter.lower(), size=SMALL, fill=tint(whole, 0.25), means=("own", rank, part))
            if part == rank:
                diagram.box(reduced, y, cell, 24, letter, fill=whole, bold=True, means=("reduced", rank, part))
            else:
                diagram.box(reduced, y, cell, 24, stroke="#BBBBBB", dashed=True)
            diagram.box(gathered, y, cell, 24, letter, fill=whole, bold=True, means=("gathered", rank, part))
    middle = top + ranks * row / 2 - 3
    part_sent = f"{ranks - 1}/{ranks} of the bucket"
    sent = f"{part_sent}\nsent per rank" if gap < 165 else f"{part_sent} sent\nper rank"
    for x, name in ((columns[0] + grid, "reduce-scatter"), (columns[1] + grid, "all-gather")):
        diagram.arrow((x + 10, middle), (x + gap - 10, middle), colour=SENT, width=2.4)
        diagram.text(x + gap / 2, middle - 14, name, bold=True, colour=SENT)
        diagram.text(x + gap / 2, middle + 15, sent, SMALL, colour=GREY)
    start, between, end = (x + grid / 2 for x in columns)
    over = diagram.head + 24
    diagram.arrow((start, top - 24), (start, over), (end, over), (end, top - 24), colour=SENT, width=1.4)
    both = f"all-reduce: 2 · {part_sent} sent per rank"
    diagram.text((start + end) / 2, over, both, colour=SENT, bold=True, ground=True)
    bottom, colour = top + ranks * row, COLOURS["optimizer states"]
    diagram.arrow((between, bottom + 16), (between, bottom - 2), colour=colour)
    update = "ZeRO: each rank updates the weights of its own part, and weights are gathered"
    diagram.text(between, bottom + 26, update, colour=colour)
    return diagram
