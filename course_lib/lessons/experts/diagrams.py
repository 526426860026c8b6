"""Diagram of expert parallelism: whose tokens go to whose experts, by one all-to-all there and one back."""

import itertools
from collections.abc import Sequence

from course_lib.figures.diagrams.base import Diagram
from course_lib.figures.diagrams.collectives import SENT, check_ranks
from course_lib.figures.diagrams.marks import GREY, SMALL, Box, tint
from course_lib.figures.style import COLOURS

ROW = 104


def two_all_to_alls(counts: Sequence[Sequence[int]]) -> Diagram:
    """Tokens, experts and outputs of each rank; a line is as wide as the copies that travel along it.

    Args:
        counts: (ranks, experts) copies that the tokens of a rank send to an expert; 2 to 4 ranks that share the
            experts evenly, in order.
    Raises:
        ConfigError: another number of ranks.
    Source: Lepikhin et al., *GShard* (arXiv 2006.16668), section 3.
    """
    ranks, experts = len(counts), len(counts[0])
    check_ranks(ranks, most=4)
    share = experts // ranks
    to = [[sum(row[there * share : (there + 1) * share]) for there in range(ranks)] for row in counts]
    worked = [sum(row[there] for row in to) for there in range(ranks)]
    most = max(range(ranks), key=worked.__getitem__)
    diagram = Diagram(
        f"Every rank brings {sum(to[0])} copies of tokens; rank {most} works on {worked[most]}",
        f"{ranks} rows, one per rank. Left, the copies of its tokens; in the middle, its {share} of {experts} experts "
        "with the copies that each of them gets from all ranks; right, the outputs, back at their tokens. Lines from "
        "every box on the left to every rank's experts are the first all-to-all, those from there to the right the "
        "second, as wide as the copies that travel: "
        + "; ".join(
            f"rank {here} sends {', '.join(f'{number} to rank {there}' for there, number in enumerate(row))}"
            for here, row in enumerate(to)
        )
        + ".",
    )
    top = diagram.head + 34
    widest = max(map(max, to))
    for x, text, colour in (
        (76, "copies of its tokens", COLOURS["activations"]),
        (202, "all-to-all", SENT),
        (360, "experts e, with their copies", COLOURS["parameters"]),
        (518, "all-to-all", SENT),
        (650, "its outputs", COLOURS["activations"]),
    ):
        diagram.text(x, top - 14, text, SMALL, colour=colour, bold=True)
    copies = [sum(column) for column in zip(*counts, strict=True)]
    tokens, homes, outputs = [], [], []
    for rank in range(ranks):
        y = top + rank * ROW
        tokens.append(_tokens(diagram, 20, y, rank, f"{sum(to[rank])} copies", "tokens"))
        homes.append(diagram.box(270, y, 180, 78, fill="#FFFFFF", means=("rank", rank, worked[rank])))
        _experts(diagram, y, range(rank * share, (rank + 1) * share), copies)
        diagram.text(360, y + 61, f"rank {rank}: {worked[rank]} copies", SMALL, bold=True)
        outputs.append(_tokens(diagram, 588, y, rank, f"{sum(to[rank])} outputs", "outputs"))
    for here, there in itertools.product(range(ranks), repeat=2):
        of_here, of_there = (here + 1) / (ranks + 1), (there + 1) / (ranks + 1)
        colour, wide = SENT if here != there else GREY, 0.6 + 7 * to[here][there] / widest
        for way, start, end in (
            (("there", here, there), tokens[here].edge("right", of_there), homes[there].edge("left", of_here)),
            (("back", there, here), homes[there].edge("right", of_here), outputs[here].edge("left", of_there)),
        ):
            diagram.arrow(start, end, colour=colour, width=wide, head=False, means=(*way, to[here][there]))
    diagram.text(360, top + ranks * ROW - 4, "grey lines stay on their rank: nothing is sent", SMALL, colour=GREY)
    return diagram


def _tokens(diagram: Diagram, x: float, y: float, rank: int, text: str, kind: str) -> Box:
    """A rank's tokens, or their outputs."""
    fill = tint(COLOURS["activations"], 0.5)
    return diagram.box(x, y + 18, 112, 42, f"rank {rank}\n{text}", fill=fill, size=SMALL, means=(kind, rank))


def _experts(diagram: Diagram, y: float, own: Sequence[int], copies: Sequence[int]) -> None:
    """The experts of one rank side by side, the darker the more copies they get."""
    width = 172 / len(own)
    for place, expert in enumerate(own):
        number = copies[expert]
        fill = tint(COLOURS["parameters"], 0.75 * number / max(copies))
        means = ("expert", expert, number)
        x = 274 + place * width
        diagram.box(x, y + 4, width - 2, 40, f"e{expert}\n{number}", size=SMALL, fill=fill, means=means)
