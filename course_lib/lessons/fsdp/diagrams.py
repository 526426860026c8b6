"""Diagrams of what is sharded: who holds what from DDP to ZeRO-3, FSDP's cuts and prefetch, and the grid of HSDP."""

import itertools
from collections.abc import Mapping

from course_lib.figures.diagrams.base import Diagram
from course_lib.figures.diagrams.collectives import SENT, check_ranks
from course_lib.figures.diagrams.marks import GREY, MARGIN, SMALL, WIDTH, tint
from course_lib.figures.style import COLOURS
from course_lib.lessons.slow_link import timeline
from course_lib.parallel.sharding import overlap, padded

NAMES = {"parameters": "weights", "gradients": "gradients", "optimizer states": "optimizer states"}
PALE = "#BBBBBB"


def cut_from(kind: str) -> int:
    """The ZeRO stage from which a kind is cut over the ranks (arXiv 1910.02054, section 5)."""
    return {"optimizer states": 1, "gradients": 2, "parameters": 3}[kind]


def who_holds_what(ranks: int = 4) -> Diagram:
    """Weights, gradients and Adam's states of each rank under DDP and ZeRO-1 to -3 in fp32, as high as their bytes.

    Args:
        ranks: N, 2 to 4.
    Raises:
        ConfigError: another number of ranks.
    Source: Rajbhandari et al., *ZeRO* (arXiv 1910.02054), figure 1.
    """
    check_ranks(ranks, most=4)
    sizes = {"parameters": 4, "gradients": 4, "optimizer states": 8}
    held = [sum(size / (ranks if stage >= cut_from(kind) else 1) for kind, size in sizes.items()) for stage in range(4)]
    diagram = Diagram(
        f"Each stage of ZeRO cuts one thing more over {ranks} ranks: from {held[0]:g} bytes per parameter to "
        f"{held[3]:.3g}",
        f"Four groups of {ranks} columns, one column per rank: DDP, ZeRO-1, ZeRO-2 and ZeRO-3. A column has boxes for "
        "weights, gradients and optimizer states, as high as their bytes; of what is cut, a rank fills the shard that "
        "is its own. DDP fills everything; ZeRO-1 cuts the optimizer states, ZeRO-2 the gradients too, ZeRO-3 the "
        "weights too.",
    )
    left, top = 96.0, diagram.head + 34
    group = (WIDTH - MARGIN - left) / 4
    column = (group - 18) / ranks
    heights = {kind: 200 * size / sum(sizes.values()) for kind, size in sizes.items()}
    starts = dict(
        zip(sizes, itertools.accumulate((height + 8 for height in heights.values()), initial=top), strict=False)
    )
    for kind, size in sizes.items():
        said = f"{NAMES[kind]} {size} bytes".replace(" ", "\n", NAMES[kind].count(" ") + 1)
        diagram.text(left - 8, starts[kind] + heights[kind] / 2, said, SMALL, "end", COLOURS[kind], bold=True)
    for stage in range(4):
        x = left + stage * group
        diagram.text(x + (group - 18) / 2, top - 26, f"ZeRO-{stage}" if stage else "DDP", bold=True)
        for rank in range(ranks):
            diagram.text(x + (rank + 0.5) * column, top - 9, f"{rank}", SMALL, colour=GREY)
            for kind in sizes:
                parts = ranks if stage >= cut_from(kind) else 1
                whole = (x + rank * column, starts[kind], column - 4, heights[kind])
                if parts > 1:
                    diagram.box(*whole, stroke=PALE, dashed=True)
                    shard = heights[kind] / parts
                    whole = (whole[0], starts[kind] + rank * shard, whole[2], shard)
                diagram.box(*whole, fill=COLOURS[kind], stroke="none", means=(stage, rank, kind, 1 / parts))
        bottom = max(starts[kind] + heights[kind] for kind in sizes)
        diagram.text(x + (group - 18) / 2, bottom + 16, f"{held[stage]:.3g} bytes", bold=True)
    diagram.text(left - 8, top - 9, "rank", SMALL, "end", GREY)
    diagram.text(left - 8, bottom + 16, "per parameter", SMALL, "end", GREY)
    return diagram


def fsdp_cuts(ranks: int = 2) -> Diagram:
    """One unit's parameters as FSDP 1 cuts them, end to end in one flat buffer, and as FSDP 2 does, each by its rows.

    Args:
        ranks: N, 2 to 4.
    Raises:
        ConfigError: another number of ranks.
    Source: Zhao et al., *PyTorch FSDP* (arXiv 2304.11277), section 3.2.1; the DTensors of ``fully_shard``.
    """
    check_ranks(ranks, most=4)
    shapes = {"a": (3, 3), "b": (4, 2), "c": (3, 1)}  # (rows, columns)
    numels = {name: rows * columns for name, (rows, columns) in shapes.items()}
    total = padded(sum(numels.values()), ranks)
    starts = dict(zip(numels, itertools.accumulate(numels.values(), initial=0), strict=False))
    run = total // ranks
    cut = [
        name
        for name in numels
        if sum(overlap(starts[name], numels[name], rank * run, run)[1] > 0 for rank in range(ranks)) > 1
    ]
    diagram = Diagram(
        "FSDP 1 cuts where the bytes say, in the middle of a matrix too; FSDP 2 cuts every parameter between rows",
        f"Above: the parameters {', '.join(shapes)} end to end in one flat buffer of {total} elements, padding "
        f"included, that is cut into {ranks} equal runs; the cut goes through {', '.join(cut) or 'none'}. Below: each "
        f"parameter as a matrix whose rows are dealt to {ranks} ranks, padded where they do not divide.",
    )
    top = diagram.head + 12
    _flat_buffer(diagram, top, numels, total, ranks)
    _by_rows(diagram, top + 108, shapes, ranks)
    return diagram


def _element(
    diagram: Diagram, box: tuple[float, float, float, float], kind: str, rank: int, name: str, place: int
) -> None:
    """One element of a parameter, or of padding, which has no name, in its rank's shade."""
    fill = tint(COLOURS["parameters"], (0.95, 0.2, 0.55, 0.1)[rank])
    diagram.box(*box, name or "–", fill=fill, size=SMALL, dashed=not name, means=(kind, rank, name, place))


def _flat_buffer(diagram: Diagram, top: float, numels: Mapping[str, int], total: int, ranks: int) -> None:
    """Parameters of so many elements end to end, padded to the total, with a line where a rank's run ends."""
    left, cell = float(MARGIN), min(26.0, (WIDTH - 2 * MARGIN) / total)
    diagram.text(left, top, "FSDP 1: one flat buffer", anchor="start", bold=True)
    owners = [(name, place) for name, numel in numels.items() for place in range(numel)]
    owners += [("", place) for place in range(len(owners), total)]
    for number, (name, place) in enumerate(owners):
        _element(diagram, (left + number * cell, top + 42, cell, 26), "flat", number * ranks // total, name, place)
    for rank in range(ranks):
        x = left + rank * total // ranks * cell
        diagram.text(x + total / ranks * cell / 2, top + 26, f"rank {rank}", bold=True, colour=COLOURS["parameters"])
        if rank:
            diagram.arrow((x, top + 18), (x, top + 78), head=False, width=3)


def _by_rows(diagram: Diagram, top: float, shapes: Mapping[str, tuple[int, int]], ranks: int) -> None:
    """Parameters as matrices, side by side; a rank's rows stand below those of the rank before it."""
    x = MARGIN + 8.0
    diagram.text(x - 8, top, "FSDP 2: each parameter by its rows", anchor="start", bold=True)
    deepest = max(padded(rows, ranks) // ranks for rows, _ in shapes.values())
    tops = [top + 38 + rank * (deepest * 24 + 10) for rank in range(ranks)]
    for name, (rows, columns) in shapes.items():
        wide = max(columns * 26, 34)
        diagram.text(x + wide / 2, top + 24, f"{name}: {rows} x {columns}", SMALL, colour=GREY)
        share = padded(rows, ranks) // ranks
        for row, column in itertools.product(range(share * ranks), range(columns)):
            rank, place = divmod(row, share)
            box = x + column * 26, tops[rank] + place * 24, 26, 24
            _element(diagram, box, "rows", rank, name if row < rows else "", row * columns + column)
        x += wide + 44
    for rank, y in enumerate(tops):
        diagram.text(x - 12, y + deepest * 12, f"rank {rank}", anchor="start", bold=True, colour=COLOURS["parameters"])
    if any(box.dashed for box in diagram.boxes):
        diagram.note(x + 60, top + 60, "–  padding, so that all ranks send equally much")


def hybrid(replicas: int = 2, shards: int = 4) -> Diagram:
    """Hybrid sharding: the model is cut over the ranks of a machine, and copied from machine to machine.

    Args:
        replicas: machines, 2 to 3.
        shards: ranks per machine, 2 to 8.
    Raises:
        ConfigError: other sizes.
    Source: Zhao et al., *PyTorch FSDP* (arXiv 2304.11277), section 3.2.2.
    """
    check_ranks(replicas, most=3)
    check_ranks(shards, most=8)
    diagram = Diagram(
        f"Hybrid sharding gathers weights inside a machine; between machines only 1/{shards} of the gradients travels",
        f"{replicas} machines, drawn as rows of {shards} ranks. Along a row each rank holds another shard of the "
        "weights, and all-gathers and reduce-scatters stay in the row. In a column all ranks hold the same shard; "
        "they all-reduce its gradient.",
    )
    left, top = 156.0, diagram.head + 40
    pitch = (WIDTH - MARGIN - left) / shards
    width = min(84.0, pitch - 14)
    height = 92.0
    inside = "inside a machine: all-gather of weights, reduce-scatter of gradients (fast links)"
    diagram.text(left + (shards * pitch) / 2, top - 24, inside, colour=SENT, bold=True)
    for machine in range(replicas):
        y = top + machine * height
        diagram.box(left - 8, y - 10, shards * pitch + 6, 62, fill="#F6F6F6", stroke=PALE, radius=6)
        diagram.text(left - 18, y + 21, f"machine {machine}", anchor="end", bold=True)
        for shard in range(shards):
            x = left + shard * pitch + (pitch - width) / 2 - 5
            rank = machine * shards + shard
            text = f"rank {rank}\nshard {shard}" if width > 52 else f"{rank}\n{shard}"
            fill = tint(COLOURS["parameters"], 0.15 + 0.45 * shard / (shards - 1))
            middle = diagram.box(x, y, width, 42, text, fill=fill, size=SMALL, means=(rank, shard)).centre[0]
            if shard:
                ends = (x - pitch + width, y + 21), (x, y + 21)
                diagram.arrow(*ends, colour=SENT, head=False, width=3, means=(rank - 1, rank))
            if machine:
                ends = (middle, y - height + 42), (middle, y)
                diagram.arrow(*ends, colour=COLOURS["gradients"], head=False, means=(rank - shards, rank))
    between, colour = "between machines:\nall-reduce of a\nshard's gradient", COLOURS["gradients"]
    diagram.text(left - 18, top + height - 24, between, SMALL, "end", colour, bold=True)
    return diagram


def prefetch(blocks: int = 3, gather: float = 0.8) -> Diagram:
    """A step of FSDP on the link and on the processor, without and with prefetch.

    Args:
        blocks: 2 to 4.
        gather: time of a block's all-gather, and of its reduce-scatter, in units of its forward; its backward takes 2.
    Raises:
        ConfigError: another number of blocks.
    Source: Zhao et al., *PyTorch FSDP* (arXiv 2304.11277), section 3.3; the times are those of
    :func:`course_lib.lessons.slow_link.timeline`.
    """
    check_ranks(blocks, most=4)
    steps = {
        "each gather when it is needed": timeline(blocks, 1.0, gather, gather, False),
        "prefetch: the next gather while this block computes": timeline(blocks, 1.0, gather, gather, True),
    }
    longest = max(step.end for step in steps.values())
    without, with_it = (step.waited for step in steps.values())
    diagram = Diagram(
        f"Prefetch moves a gather to where the block before it computes: {without:.1f} units of waiting become "
        f"{with_it:.1f}",
        f"Two time lines of one step with {blocks} blocks, each with a lane for the link and one for the processor. "
        "Above, each all-gather begins when its block is needed, and the processor waits for it, and for each "
        "reduce-scatter. Below, the all-gather of the next block runs while a block computes, and reduce-scatters "
        "while the next block's backward does: only the first gather of the forward, that of the backward and the last "
        "reduce-scatter are waited for.",
    )
    left, top = 84.0, diagram.head + 16
    scale = (WIDTH - MARGIN - left) / longest
    fills = {
        "gather": tint(SENT, 0.9),
        "reduce": COLOURS["gradients"],
        "forward": COLOURS["forward"],
        "backward": COLOURS["backward"],
    }
    for row, (name, step) in enumerate(steps.items()):
        y = top + row * 128
        diagram.text(left, y, name, anchor="start", bold=True)
        for lane, spans, down in (("link", step.link, 16), ("computes", step.compute, 56)):
            diagram.lane(y + down, lane, left, left + step.end * scale, 32)
            for what, number, begin, end in spans:
                if end > begin:
                    block = left + begin * scale, y + down, (end - begin) * scale, 32
                    text = f"{what[0].upper()}{number}"
                    diagram.box(*block, text, fill=fills[what], size=SMALL, means=(row, what, number, begin, end))
    bottom = top + 2 * 128 - 18
    diagram.note(left, bottom, "G all-gather, R reduce-scatter, F forward, B backward of a block; grey is waiting")
    diagram.time_axis(left, WIDTH - MARGIN, bottom + 16)
    return diagram
