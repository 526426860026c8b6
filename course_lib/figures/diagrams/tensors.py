"""Diagram of tensor parallelism: a matrix cut by columns, then one cut by rows."""

from course_lib.figures.diagrams.base import Diagram
from course_lib.figures.diagrams.collectives import SENT, check_ranks
from course_lib.figures.diagrams.marks import GREY, SMALL, tint
from course_lib.figures.style import COLOURS


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
