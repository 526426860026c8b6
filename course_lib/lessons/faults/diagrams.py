"""The keys of the store in which ranks meet, and a rank that never came there."""

from course_lib.figures.diagrams.base import Diagram
from course_lib.figures.diagrams.collectives import SENT
from course_lib.figures.diagrams.marks import GREY, MARGIN, SMALL, WIDTH, tint
from course_lib.figures.style import COLOURS


def written_keys(ranks: int = 3, missing: int = 1) -> Diagram:
    """Every rank writes its address into the store under its number, and waits for those of the others.

    Args:
        ranks: 2 to 6.
        missing: a rank that never reaches the store.
    """
    diagram = Diagram(
        f"Rank {missing} never reached the store: all others wait for its key",
        f"{ranks} ranks on the left, the store with one key per rank in the middle, kept by rank 0 at "
        "MASTER_ADDR and MASTER_PORT, and the connections that follow on the right."
        f" The key of rank {missing} is missing.",
    )
    top, pitch, left, middle = diagram.head + 34, 44.0, MARGIN, 270.0
    height = 2 * 16 + ranks * pitch
    diagram.box(middle, top - 16, 190, height - pitch + 46, fill=tint(COLOURS["data"], 0.15), radius=8, means="store")
    diagram.text(middle + 95, top - 26, "the store, at MASTER_ADDR:MASTER_PORT", SMALL, colour=GREY)
    diagram.text(left + 55, top - 26, "ranks", SMALL, colour=GREY)
    diagram.text(WIDTH - MARGIN - 85, top - 26, "then they connect", SMALL, colour=GREY)
    for rank in range(ranks):
        y = top + rank * pitch
        gone = rank == missing
        fill = tint(COLOURS["wrong" if gone else "forward"], 0.5)
        own = diagram.box(left, y, 110, 30, f"rank {rank}", fill=fill, dashed=gone, means=("rank", rank))
        fill, text = ("#FFFFFF", f"…/{rank}: nothing") if gone else (tint(SENT, 0.35), f"…/{rank}: its address")
        key = diagram.box(middle + 20, y, 150, 30, text, fill=fill, dashed=gone, size=SMALL, means=("key", rank))
        if gone:
            diagram.arrow(own.edge("right"), (middle - 105, own.centre[1]), dashed=True, means=(rank, "elsewhere"))
            diagram.text(middle - 62, own.centre[1], "wrong port", SMALL, colour=COLOURS["wrong"])
        else:
            diagram.arrow(own.edge("right"), key.edge("left"), means=(rank, "store"))
        fill, text = ("#FFFFFF", "") if gone else (COLOURS["idle"], f"wait for …/{missing}")
        x = WIDTH - MARGIN - 170
        diagram.box(x, y, 170, 30, text, dashed=True, size=SMALL, fill=fill, means=("then", rank))
    return diagram
