"""Diagrams of tensor parallelism: matrices cut by columns and rows, a cut sequence, and the grid of all three axes."""

import itertools

from course_lib.errors import ConfigError
from course_lib.figures.diagrams.base import Diagram
from course_lib.figures.diagrams.collectives import SENT, check_ranks
from course_lib.figures.diagrams.marks import GREY, MARGIN, SMALL, WIDTH, tint
from course_lib.figures.style import COLOURS
from course_lib.parallel.topology import RankGrid

PALE = "#BBBBBB"


def columns_then_rows(ranks: int = 2) -> Diagram:
    """An MLP's two matrices over the ranks, with f and g, Megatron-LM's conjugate operators.

    Args:
        ranks: 2 to 4.
    Raises:
        ConfigError: another number of ranks.
    Source: Shoeybi et al., *Megatron-LM* (arXiv 1909.08053), section 3.
    """
    check_ranks(ranks, most=4)
    diagram = Diagram(
        "Columns, then rows: one all-reduce in the forward (g), one in the backward (f)",
        f"From left to right: X, whole on every rank; f; on each of {ranks} ranks a block of A's columns, then a block "
        "of B's rows; g; and Z, whole on every rank. f does nothing forward and all-reduces backward; g all-reduces "
        "forward and does nothing backward.")
    top = diagram.head + 14
    height = ranks * 56.0
    middle = top + height / 2 - 8
    whole = tint(COLOURS["activations"], 0.5)
    x = diagram.box(14, middle - 26, 60, 52, "X", fill=whole)
    f = diagram.box(120, middle - 17, 34, 34, "f", fill=SENT, bold=True, radius=17)
    g = diagram.box(560, middle - 17, 34, 34, "g", fill=SENT, bold=True, radius=17)
    z = diagram.box(646, middle - 26, 60, 52, "Z", fill=whole)
    diagram.arrow(x.edge("right"), f.edge("left"))
    diagram.arrow(g.edge("right"), z.edge("left"))
    for rank in range(ranks):
        y = top + rank * 56
        a = diagram.box(230, y, 110, 40, f"columns A{rank}", fill=COLOURS["parameters"], means=("A", rank))
        b = diagram.box(390, y, 110, 40, f"rows B{rank}", fill=COLOURS["parameters"], means=("B", rank))
        diagram.arrow(f.edge("right"), a.edge("left"))
        diagram.arrow(a.edge("right"), b.edge("left"))
        diagram.arrow(b.edge("right"), g.edge("left"))
    bottom = top + height + 20
    diagram.text(140, bottom, "f forward: nothing\nbackward: all-reduce", SMALL, colour=SENT)
    diagram.text(365, bottom, "each row of boxes is one rank;\nnothing is sent between A and B", SMALL, colour=GREY)
    diagram.text(590, bottom, "g forward: all-reduce\nbackward: nothing", SMALL, colour=SENT)
    return diagram


SLICE, WHOLE, COLUMNS, SUMMAND = "a slice of the tokens", "all tokens", "some columns", "a summand"
PLACES = (("x", SLICE), ("norm", SLICE), ("entered", WHOLE), ("split\nwork", COLUMNS), ("partial\nsum", SUMMAND),
          ("z", SLICE))
"""Tensors of a region of split work under sequence parallelism, in their order, and what a rank has of each."""


def sequence_parallel(ranks: int = 2) -> Diagram:
    """What each rank has of the tensors through one region of a block under sequence parallelism.

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
        "again. Backward the same is run from right to left with the two exchanges in each other's place.")
    left, high, wide = 74.0, 56.0, 56.0
    pitch = (WIDTH - MARGIN - left - wide) / (len(PLACES) - 1)
    top = diagram.head + 52
    for place, (name, has) in enumerate(PLACES):
        middle = left + place * pitch + wide / 2
        diagram.text(middle, top - 30, name, bold=True)
        for rank in range(ranks):
            x, y = left + place * pitch, top + rank * (high + 14)
            diagram.box(x, y, wide, high, stroke=PALE, dashed=True)
            part = {SLICE: (x, y + rank * high / ranks, wide, high / ranks),
                    COLUMNS: (x + rank * wide / ranks, y, wide / ranks, high)}.get(has, (x, y, wide, high))
            fill = tint(COLOURS["activations"], 0.35 if has == SUMMAND else 0.9)
            diagram.box(*part, fill=fill, stroke="none", means=(place, rank, has))
            if place:
                sends = {"entered": "all_gather", "z": "reduce_scatter"}.get(name)
                start, end = (x - pitch + wide + 4, y + high / 2), (x - 4, y + high / 2)
                diagram.arrow(start, end, colour=SENT if sends else GREY, width=2.4 if sends else 1.4,
                              means=(sends, rank) if sends else None)
    for rank in range(ranks):
        diagram.text(left - 12, top + rank * (high + 14) + high / 2, f"rank {rank}", anchor="end", bold=True)
    bottom = top + ranks * (high + 14) + 12
    for place, text in ((2, "all-gather\n(backward: reduce-scatter)"), (5, "reduce-scatter\n(backward: all-gather)")):
        diagram.text(left + (place - 0.5) * pitch + wide / 2 - (30 if place == 5 else 0), bottom, text, SMALL,
                     colour=SENT, bold=True)
    diagram.text(left, bottom + 36, "split work: heads in attention, columns of the hidden layer in the MLP", SMALL,
                 "start", GREY)
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
        "boxes along pp, and boxes in one column along dp.")
    left, top, gap, height = 78.0, diagram.head + 44, 34.0, 104.0
    stage_width = (WIDTH - MARGIN - left - (grid.pp - 1) * gap) / grid.pp
    pitch = (stage_width - 16) / grid.tp
    where = {}
    for copy, stage, part in itertools.product(range(grid.dp), range(grid.pp), range(grid.tp)):
        rank = int(grid.ranks[copy, stage, part])
        x, y = left + stage * (stage_width + gap), top + copy * height
        if part == 0:
            diagram.box(x, y, stage_width, 60, fill="#F6F6F6", stroke=PALE, radius=6)
            if copy == 0:
                diagram.text(x + stage_width / 2, y - 16, f"stage {stage}", bold=True)
        inset = min(9.0, 0.16 * pitch)
        where[rank] = diagram.box(x + 8 + part * pitch + inset, y + 12, pitch - 2 * inset, 36,
                                  f"rank {rank}" if pitch > 74 else f"{rank}", fill=tint(COLOURS["parameters"], 0.3),
                                  radius=4, means=(copy, stage, part))
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
