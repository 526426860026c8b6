"""Diagrams of data parallelism: who gets which rows, when buckets leave, and what no_sync saves."""

import itertools
from collections.abc import Mapping
from typing import Any

import torch

from course_lib.errors import ConfigError
from course_lib.figures.diagrams.base import Diagram
from course_lib.figures.diagrams.collectives import SENT
from course_lib.figures.diagrams.marks import EMPTY, GREY, MARGIN, SMALL, WIDTH, tint
from course_lib.figures.style import COLOURS, SERIES
from course_lib.parallel.ddp import in_buckets

LAYERS = {"embedding": 3, "block 0": 2, "block 1": 2, "block 2": 2, "head": 1}


def buckets(
    layers: Mapping[str, int] | None = None, bucket_size: int = 3, first_bucket: int = 1, send_per_unit: float = 0.8
) -> Diagram:
    """Gradients arrive from the last layer to the first, and a bucket leaves when it is full, while backward goes on.

    Args:
        layers: size of each layer's gradient in the order of the forward; its backward takes as long. 3 to 8 layers.
        bucket_size: a bucket is closed once it holds so much.
        first_bucket: the same for the first.
        send_per_unit: time of the all-reduce of a gradient of size 1, in units of its backward.
    Raises:
        ConfigError: too few or too many layers.
    Source: Li et al., *PyTorch Distributed* (VLDB 2020), section 3.2; the buckets are
    :func:`course_lib.parallel.ddp.in_buckets`'s.
    """
    sizes = dict(layers or LAYERS)
    if not 3 <= len(sizes) <= 8:
        raise ConfigError(f"a diagram of {len(sizes)} layers", "take 3 to 8")
    names, total = list(reversed(sizes)), sum(sizes.values())
    of, ready, spans = _when_sent(sizes, first_bucket, bucket_size, send_per_unit)
    hidden = sum(min(stop, total) - min(start, total) for start, stop in spans)
    share = hidden / sum(stop - start for start, stop in spans)
    diagram = Diagram(
        f"A bucket leaves as soon as it is full: {share:.0%} of the all-reduce runs while backward still computes",
        f"Two lanes over time. The upper one is the backward, layer by layer from {names[0]} to {names[-1]}; the lower "
        f"one the all-reduces of {len(spans)} buckets, each of which starts when its last gradient is there "
        "and the all-reduce before it has ended. The last one starts only after the backward.",
    )
    left, top = 92.0, diagram.head + 12
    end = max(spans[-1][1], total)
    scale = (WIDTH - MARGIN - 8 - left) / end
    right, lower = left + end * scale, top + 96
    diagram.lane(top, "backward", left, right, 36)
    diagram.lane(lower, "all-reduce", left, right, 36)
    clock = 0.0
    for name in names:
        x, width = left + clock * scale, sizes[name] * scale
        text, fill = name.replace(" ", "\n") if width < 62 else name, COLOURS["backward"]
        diagram.box(x, top, width, 36, text, size=SMALL, fill=fill, means=("backward", name, of[name]))
        clock += sizes[name]
        if clock == ready[of[name]]:
            start = left + spans[of[name]][0] * scale
            full = (left + clock * scale, top + 38), (start + 1, lower - 2)
            diagram.arrow(*full, colour=SENT, means=("full", of[name]))
    for number, (start, stop) in enumerate(spans):
        x, width = left + start * scale, (stop - start) * scale
        text, means = f"bucket {number}" if width > 56 else str(number), ("all-reduce", number, start, stop)
        diagram.box(x, lower, width, 36, text, fill=SENT, size=SMALL, means=means)
    finish = left + total * scale
    diagram.arrow((finish, top - 8), (finish, lower + 44), head=False, dashed=True, colour=GREY, width=1.2)
    diagram.text(finish, lower + 52, "backward ends", SMALL, colour=GREY)
    diagram.note(left + 4, (top + 36 + lower) / 2, "full", SENT)
    diagram.time_axis(left, right, lower + 68)
    return diagram


def _when_sent(
    sizes: dict[str, int], first_bucket: int, bucket_size: int, send_per_unit: float
) -> tuple[dict[str, int], list[float], list[tuple[float, float]]]:
    """The bucket of each layer; of each bucket, when it is full, and when its all-reduce begins and ends."""
    # One byte per unit of size, so that the library's own rule cuts the buckets.
    gradients = {name: torch.empty(sizes[name], dtype=torch.uint8, device="meta") for name in reversed(sizes)}
    cut = in_buckets(gradients.values(), first_bucket, bucket_size)
    of = {
        name: number
        for number, bucket in enumerate(cut)
        for name, gradient in gradients.items()
        if any(gradient is one for one in bucket)
    }
    lengths = [float(sum(gradient.numel() for gradient in bucket)) for bucket in cut]
    ready = list(itertools.accumulate(lengths))
    spans: list[tuple[float, float]] = []
    for full, length in zip(ready, lengths, strict=True):
        start = max(full, spans[-1][1] if spans else 0.0)
        spans.append((start, start + send_per_unit * length))
    return of, ready, spans


def dealt_rows(rows: int, batch_size: int, ranks: int) -> list[list[list[int]]]:
    """Row numbers by rank and round, as Accelerate deals the batches of a loader.

    Batch k goes to rank k modulo the ranks. The last round is filled up from the first rows, so that every rank has
    as many whole batches.

    Source: ``accelerate.data_loader.BatchSamplerShard`` with its default ``even_batches``.
    """
    rounds = -(-rows // (batch_size * ranks))
    order = [place % rows for place in range(rounds * ranks * batch_size)]
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    return [batches[rank::ranks] for rank in range(ranks)]


def dealing(rows: int = 10, batch_size: int = 4, ranks: int = 2) -> Diagram:
    """Rows that each rank computes, and rows that are computed twice.

    Args:
        rows: of the data, at most 24.
        batch_size: rows of a batch of the loader, 1 to 6.
        ranks: 1 to 4.
    Raises:
        ConfigError: it does not fit on the page.
    """
    dealt = dealt_rows(rows, batch_size, ranks)
    rounds = len(dealt[0])
    if not (0 < rows <= 24 and 1 <= batch_size <= 6 and 1 <= ranks <= 4 and rounds * batch_size <= 16):
        raise ConfigError(
            f"a diagram of {rows} rows in batches of {batch_size} on {ranks} ranks",
            "take at most 24 rows, batches of 1 to 6, 1 to 4 ranks and 16 rows per rank",
        )
    computed = ranks * rounds * batch_size
    diagram = Diagram(
        f"{ranks} rank{'s' * (ranks > 1)} compute{'s' * (ranks == 1)} {computed} rows of {rows}: "
        + (f"the last round repeats {computed - rows}" if computed > rows else "no row comes twice"),
        f"A lane of {rows} rows, cut into batches of {batch_size}. Below it a lane per rank: in each round a rank "
        "takes the next batch. What is missing in the last round is filled up with the first rows again, drawn dashed; "
        "gather_for_metrics drops those.",
    )
    left, top = 72.0, diagram.head + 12
    size = min(26.0, (WIDTH - MARGIN - left) / rows)
    diagram.text(left - 8, top + 14, "the data", anchor="end")
    for row in range(rows):
        owner = row // batch_size % ranks
        _row(diagram, left + row * size, top, size - 2, row, owner, means=("data", row, owner))
    gap, seen = 40.0, set[int]()
    pitch = batch_size * 26.0 + gap
    for number in range(rounds):
        x = left + number * pitch
        diagram.text(x + batch_size * 13.0, top + 52, f"round {number + 1}", SMALL, colour=GREY)
        for rank in range(ranks):
            y = top + 66 + rank * 38
            if not number:
                diagram.text(left - 8, y + 14, f"rank {rank}", anchor="end")
            for position, row in enumerate(dealt[rank][number]):
                means = ("dealt", rank, number, row, row in seen)
                _row(diagram, x + position * 26, y, 24, row, rank, again=row in seen, means=means)
                seen.add(row)
    if computed > rows:
        said = "dashed: repeated, so that every rank has a whole batch; gather_for_metrics drops these rows"
        diagram.note(left, top + 80 + ranks * 38, said)
    return diagram


def _row(
    diagram: Diagram, x: float, y: float, width: float, row: int, rank: int, *, again: bool = False, means: Any
) -> None:
    """A row of the data in the colour of its rank, or dashed where it comes again."""
    fill, stroke = (EMPTY, GREY) if again else (tint(SERIES[rank], 0.35), "none")
    diagram.box(x, y, width, 28, str(row), fill=fill, stroke=stroke, dashed=again, size=SMALL, means=means)


def no_sync(micro_batches: int = 4) -> Diagram:
    """A step of several micro-batches on one rank, with an all-reduce after each backward pass, and with one.

    Args:
        micro_batches: 2 to 5.
    Raises:
        ConfigError: too few or too many micro-batches.
    """
    if not 2 <= micro_batches <= 5:
        raise ConfigError(f"a diagram of {micro_batches} micro-batches", "take 2 to 5")
    all_reduce = 1.5  # of the whole gradient, in units of a forward pass; a backward pass takes 2
    diagram = Diagram(
        f"With no_sync the gradient travels once per step; without it {micro_batches} times",
        f"Two lanes over time, each with {micro_batches} forward and backward passes. In the upper lane an all-reduce "
        "follows every backward pass; in the lower one only the last, and the step ends earlier.",
    )
    left, top = 92.0, diagram.head + 12
    scale = (WIDTH - MARGIN - left) / (micro_batches * (3 + all_reduce))
    for lane, (name, every) in enumerate((("without", True), ("with no_sync", False))):
        y, clock = top + lane * 62, 0.0
        diagram.lane(y, name, left, WIDTH - MARGIN, 40)
        for number in range(micro_batches):
            parts = [("F", 1.0, COLOURS["forward"]), ("B", 2.0, COLOURS["backward"])]
            if every or number == micro_batches - 1:
                parts.append(("all-reduce", all_reduce, SENT))
            for kind, length, colour in parts:
                label = kind if len(kind) == 1 or length * scale > 66 else "all-\nreduce"
                block = left + clock * scale, y, length * scale, 40
                diagram.box(*block, label, fill=colour, size=SMALL, means=(lane, number, kind))
                clock += length
    diagram.time_axis(left, WIDTH - MARGIN, top + 116)
    return diagram
