"""Diagrams of context parallelism: whose keys are where in which step of the ring, and who computes which scores."""

from course_lib.figures.diagrams.base import Diagram
from course_lib.figures.diagrams.collectives import SENT, check_ranks
from course_lib.figures.diagrams.marks import MARGIN, SMALL, WIDTH, tint
from course_lib.figures.style import COLOURS, SERIES
from course_lib.parallel.sequence_layout import SequenceLayout

WORK = COLOURS["activations"]


def keys_on_the_ring(ranks: int = 3) -> Diagram:
    """Keys and values on each rank in each step of a causal ring with contiguous parts, and what the rank does.

    Args:
        ranks: 2 to 4.
    Raises:
        ConfigError: another number of ranks.
    Source: Liu et al., *Ring Attention* (arXiv 2310.01889), section 3.
    """
    check_ranks(ranks, most=4)
    idle = ranks * (ranks - 1) // 2
    diagram = Diagram(
        f"The keys go round, the queries stay; in {idle} of {ranks * ranks} boxes a rank has nothing to compute",
        f"One row for each of {ranks} ranks, one column for each of {ranks} steps. A box says whose keys and values "
        "the rank has. Step 0: its own. After every step but the last each rank hands its block to the next. A "
        "strong colour means that all of the block's keys are seen, a pale one half of them, because they are the "
        "rank's own, and grey none, because they come later in the sequence.",
    )
    left, top, high = 82.0, diagram.head + 38, 40.0
    pitch = (WIDTH - MARGIN - left) / ranks
    wide = pitch - 62
    for step in range(ranks):
        diagram.text(left + step * pitch + wide / 2, top - 16, f"step {step}", bold=True)
    for rank in range(ranks):
        y = top + rank * (high + 26)
        diagram.text(left - 12, y + high / 2, f"queries\nof rank {rank}", anchor="end", bold=True)
        for step in range(ranks):
            owner = (rank - step) % ranks
            fill = COLOURS["idle"] if owner > rank else tint(WORK, 0.4 if owner == rank else 0.9)
            x = left + step * pitch
            diagram.box(x, y, wide, high, f"k, v of rank {owner}", fill=fill, means=(rank, step, owner))
            if step + 1 < ranks:
                lower = top + (rank + 1) % ranks * (high + 26) + high / 2
                ends = (x + wide + 3, y + high / 2), (x + pitch - 3, lower)
                diagram.arrow(*ends, colour=SENT, means=(step, rank, (rank + 1) % ranks))
    bottom = top + ranks * (high + 26) + 6
    key = {
        "all keys are seen": tint(WORK, 0.9),
        "half: its own": tint(WORK, 0.4),
        "none: they come later": COLOURS["idle"],
    }
    for place, (text, fill) in enumerate(key.items()):
        diagram.box(left + place * 190, bottom - 8, 16, 16, fill=fill)
        diagram.note(left + place * 190 + 24, bottom, text)
    return diagram


def who_computes_which_scores(ranks: int = 2) -> Diagram:
    """The causal scores in chunks, coloured by the rank that computes them: contiguous parts beside zigzag.

    Args:
        ranks: 2 to 4.
    Raises:
        ConfigError: another number of ranks.
    Source: Llama Team, *The Llama 3 Herd of Models* (arXiv 2407.21783), section 3.3.2.
    """
    check_ranks(ranks, most=4)
    chunks = 2 * ranks
    size = 224.0 / chunks
    diagram = Diagram(
        "Contiguous parts give the last rank most of the scores; zigzag gives all ranks the same",
        f"Two triangles of {chunks} rows and columns, chunks of queries downwards and of keys to the right, coloured "
        "by the rank that has the queries. To the left each rank has two neighbouring rows, the last rank the longest. "
        "To the right rank r has row r and its mirror image, a long one with a short one. Chunks on the diagonal count "
        "half.",
    )
    top = diagram.head + 40
    for place, zigzag in enumerate((False, True)):
        layout, left = SequenceLayout(chunks, ranks, zigzag), 96.0 + place * 350
        holder = {int(chunk): rank for rank in range(ranks) for chunk in layout.positions(rank)}
        diagram.text(left + 112, top - 22, "zigzag" if zigzag else "contiguous", bold=True)
        work = [0.0] * ranks
        for query in range(chunks):
            rank = holder[query]
            y = top + query * size
            diagram.text(left - 8, y + size / 2, f"rank {rank}", SMALL, "end", SERIES[rank])
            for key in range(query + 1):
                half = key == query
                work[rank] += 0.5 if half else 1
                fill = tint(SERIES[rank], 0.4 if half else 0.85)
                diagram.box(left + key * size, y, size, size, fill=fill, means=(zigzag, query, key, rank))
        for rank, blocks in enumerate(work):
            said, y = f"rank {rank}: {blocks:g} blocks of scores", top + 246 + 17 * rank
            diagram.text(left + 112, y, said, colour=SERIES[rank], bold=True)
    return diagram
