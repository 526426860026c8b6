"""Diagrams of tensor parallelism: matrices cut by columns and rows, a cut sequence, and the grid of all three axes."""

import itertools

from course_lib.errors import ConfigError
from course_lib.figures.diagrams.base import Diagram
from course_lib.figures.diagrams.collectives import SENT, check_ranks
from course_lib.figures.diagrams.marks import GREY, MARGIN, SMALL, TITLE, WIDTH, Box, tint
from course_lib.figures.style import COLOURS, SERIES
from course_lib.parallel.topology import RankGrid

PALE = "#BBBBBB"


def columns_then_rows(ranks: int = 2) -> Diagram:
    """An MLP's two matrices cut over the ranks, in a colour for each, with f and g, Megatron-LM's conjugate operators.

    Args:
        ranks: 2 to 4.
    Raises:
        ConfigError: another number of ranks.
    Source: Shoeybi et al., *Megatron-LM* (arXiv 1909.08053), section 3.
    """
    check_ranks(ranks, most=4)
    diagram = Diagram(
        "Columns, then rows: parts meet, and only the sum at the end needs other ranks",
        f"From left to right: X, rows of width h, whole on every rank; f; A, h by 4h, in {ranks} blocks of columns, a "
        "colour for each rank; phi, which works on each number alone; Y, whose columns have the colours of A's; B, 4h "
        "by h, in as many blocks of rows; a partial sum of the size of Z on each rank; g, which adds them up; and Z, "
        "whole on every rank. f does nothing forward and all-reduces backward; g all-reduces forward and does nothing "
        "backward.",
    )
    wide, narrow, high = 112.0, 46.0, 40.0
    middle = diagram.head + 34 + max(wide, ranks * 50) / 2
    x = diagram.box(MARGIN, middle - high / 2, narrow, high, "X", fill=COLOURS["idle"], bold=True)
    f = diagram.box(84, middle - 15, 30, 30, "f", fill=SENT, bold=True, radius=15)
    g = diagram.box(606, middle - 15, 30, 30, "g", fill=SENT, bold=True, radius=15)
    z = diagram.box(WIDTH - MARGIN - narrow, middle - high / 2, narrow, high, "Z", fill=COLOURS["idle"], bold=True)
    for start, end in ((x, f), (g, z)):
        diagram.arrow(start.edge("right"), end.edge("left"))
    piece = wide / ranks
    for rank in range(ranks):
        a = _block(diagram, "A", rank, 140 + rank * piece, middle - narrow / 2, piece, narrow)
        _block(diagram, "Y", rank, 306 + rank * piece, middle - high / 2, piece, high)
        b = _block(diagram, "B", rank, 444, middle - wide / 2 + rank * piece, narrow, piece)
        summand = _block(diagram, "Z", rank, 534, middle + (rank - ranks / 2) * 50 + 5, narrow, high)
        diagram.arrow(b.edge("right"), summand.edge("left"), colour=GREY)
        diagram.arrow(summand.edge("right"), g.edge("left"))
        if rank == 0:
            diagram.arrow(f.edge("right"), a.edge("left"))
    diagram.arrow((140 + wide, middle), (306, middle))
    diagram.arrow((306 + wide, middle), (444, middle))
    diagram.text(279, middle - 16, "φ", TITLE, bold=True)
    diagram.text(279, middle + 24, "each\nnumber\nby itself", SMALL, colour=GREY)
    for place, size in (
        (35, "rows × h"),
        (140 + wide / 2, "h × 4h"),
        (306 + wide / 2, "rows × 4h"),
        (444 + narrow / 2, "4h × h"),
        (534 + narrow / 2, "rows × h"),
        (z.centre[0], "rows × h"),
    ):
        diagram.text(place, diagram.head + 12, size, SMALL, colour=GREY)
    bottom = middle + max(wide, ranks * 50) / 2 + 28
    diagram.note(MARGIN, bottom, "f forward: nothing\nbackward: all-reduce", SENT)
    meet = "a colour is a rank: the columns of Yᵣ meet\nthe rows of Bᵣ, and nothing is sent between"
    diagram.text(306 + wide / 2, bottom, meet, SMALL, colour=GREY)
    diagram.text(WIDTH - MARGIN, bottom, "g forward: all-reduce\nbackward: nothing", SMALL, "end", colour=SENT)
    return diagram


def _block(diagram: Diagram, name: str, rank: int, x: float, y: float, width: float, height: float) -> Box:
    """A rank's block of a matrix, in the rank's colour."""
    return diagram.box(x, y, width, height, f"{name}{rank}", fill=tint(SERIES[rank], 0.6), means=(name, rank))


SLICE, WHOLE, COLUMNS, SUMMAND = "a slice of the tokens", "all tokens", "some columns", "a summand"
PLACES = (
    ("x", SLICE),
    ("norm", SLICE),
    ("entered", WHOLE),
    ("split\nwork", COLUMNS),
    ("partial\nsum", SUMMAND),
    ("z", SLICE),
)
"""Tensors of a region of split work under sequence parallelism, in their order, and what a rank has of each."""


def sequence_parallel(ranks: int = 2) -> Diagram:
    """Tensors of each rank through one region of a block under sequence parallelism.

    Args:
        ranks: 2 to 4.
    Raises:
        ConfigError: another number of ranks.
    Source: Korthikanti et al., *Reducing Activation Recomputation* (arXiv 2205.05198), section 4.2.2 and figure 5.
    """
    check_ranks(ranks, most=4)
    diagram = Diagram(
        "Sequence parallelism: between the regions a rank has 1/"
        f"{ranks} of the tokens, inside one 1/{ranks} of the columns",
        f"One row for each of {ranks} ranks and six tensors in a row, each a matrix of tokens by columns of which the "
        "rank's part is filled. x and its norm: a slice of the tokens. An all-gather makes it all tokens. The split "
        "work has some of the columns, the partial sum is whole in size. A reduce-scatter leaves a slice of the tokens "
        "again. Backward the same is run from right to left with the two exchanges in each other's place.",
    )
    left, high, wide = 74.0, 56.0, 56.0
    pitch = (WIDTH - MARGIN - left - wide) / (len(PLACES) - 1)
    top = diagram.head + 52
    for place, (name, has) in enumerate(PLACES):
        middle = left + place * pitch + wide / 2
        diagram.text(middle, top - 30, name, bold=True)
        for rank in range(ranks):
            x, y = left + place * pitch, top + rank * (high + 14)
            diagram.box(x, y, wide, high, stroke=PALE, dashed=True)
            part = {
                SLICE: (x, y + rank * high / ranks, wide, high / ranks),
                COLUMNS: (x + rank * wide / ranks, y, wide / ranks, high),
            }.get(has, (x, y, wide, high))
            fill = tint(COLOURS["activations"], 0.35 if has == SUMMAND else 0.9)
            diagram.box(*part, fill=fill, stroke="none", means=(place, rank, has))
            if place:
                sends = {"entered": "all_gather", "z": "reduce_scatter"}.get(name)
                ends = (x - pitch + wide + 4, y + high / 2), (x - 4, y + high / 2)
                if sends:
                    diagram.arrow(*ends, colour=SENT, width=2.4, means=(sends, rank))
                else:
                    diagram.arrow(*ends, colour=GREY, width=1.4)
    for rank in range(ranks):
        diagram.text(left - 12, top + rank * (high + 14) + high / 2, f"rank {rank}", anchor="end", bold=True)
    bottom = top + ranks * (high + 14) + 12
    for place, text in ((2, "all-gather\n(backward: reduce-scatter)"), (5, "reduce-scatter\n(backward: all-gather)")):
        x = left + (place - 0.5) * pitch + wide / 2 - (30 if place == 5 else 0)
        diagram.text(x, bottom, text, SMALL, colour=SENT, bold=True)
    diagram.note(left, bottom + 36, "split work: heads in attention, columns of the hidden layer in the MLP")
    diagram.text(left, bottom, "down: tokens\nright: columns", SMALL, colour=GREY)
    return diagram


def rank_grid(grid: RankGrid) -> Diagram:
    """Ranks in a box of copies, stages and parts of a stage, with the links of each axis.

    Args:
        grid: up to 16 ranks per copy, and 4 copies.
    Raises:
        ConfigError: a larger one.
    Source: Narayanan et al., *Efficient Large-Scale Language Model Training* (arXiv 2104.04473), section 3.
    """
    if grid.pp * grid.tp > 16 or grid.dp > 4:
        raise ConfigError(f"a diagram of a {grid.dp} x {grid.pp} x {grid.tp} grid", "take 16 ranks per copy, 4 copies")
    diagram = Diagram(
        f"{grid.dp} x {grid.pp} x {grid.tp} ranks: copies of the model, stages of a copy, ranks that share a stage",
        f"{grid.dp} rows, one per copy of the model. In a row {grid.pp} boxes, the stages of its pipeline, and in each "
        f"box {grid.tp} ranks that share the matrices of the stage. Ranks in one box are linked along tp, neighbouring "
        "boxes along pp, and boxes in one column along dp.",
    )
    left, top, gap, height = 78.0, diagram.head + 44, 34.0, 104.0
    stage_width = (WIDTH - MARGIN - left - (grid.pp - 1) * gap) / grid.pp
    pitch = (stage_width - 16) / grid.tp
    where = {}
    fill, inset = tint(COLOURS["parameters"], 0.3), min(9.0, 0.16 * pitch)
    for copy, stage, part in itertools.product(range(grid.dp), range(grid.pp), range(grid.tp)):
        rank = int(grid.ranks[copy, stage, part])
        x, y = left + stage * (stage_width + gap), top + copy * height
        if part == 0:
            diagram.box(x, y, stage_width, 60, fill="#F6F6F6", stroke=PALE, radius=6)
            if copy == 0:
                diagram.text(x + stage_width / 2, y - 16, f"stage {stage}", bold=True)
        begin, wide = x + 8 + part * pitch + inset, pitch - 2 * inset
        text, means = f"rank {rank}" if pitch > 74 else f"{rank}", (copy, stage, part)
        where[rank] = diagram.box(begin, y + 12, wide, 36, text, fill=fill, radius=4, means=means)
    for copy in range(grid.dp):
        diagram.text(left - 12, top + copy * height + 30, f"copy {copy}", anchor="end", bold=True)
    colours = {"tp": SENT, "pp": COLOURS["activations"], "dp": COLOURS["gradients"]}
    for axis, colour in colours.items():
        for line in grid.lines(axis):
            for here, there in itertools.pairwise(line):
                a, b = where[here], where[there]
                if axis == "dp":
                    ends = (a.centre[0], a.bottom), (b.centre[0], b.y)
                elif axis == "tp":
                    ends = (a.right, a.centre[1]), (b.x, b.centre[1])
                else:  # all tp ranks hand over side by side: one arrow below the other, from box to box
                    y = a.y + 36 * (0.5 + grid.coordinates(here).tp) / grid.tp
                    start = left + grid.coordinates(here).pp * (stage_width + gap) + stage_width
                    ends = (start, y), (start + gap, y)
                diagram.arrow(*ends, colour=colour, width=2.4, head=axis == "pp", means=(axis, here, there))
    bottom = top + grid.dp * height - 24
    carries = {"tp": "sums of hidden states", "pp": "hidden states", "dp": "gradients"}
    for number, (axis, text) in enumerate(carries.items()):
        diagram.text(left + number * 220, bottom, f"{axis}: {text}", SMALL, "start", colours[axis], bold=True)
    return diagram
