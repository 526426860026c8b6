"""Diagrams of data parallelism: when buckets leave, and what no_sync saves."""

from collections.abc import Mapping

import torch

from course_lib.errors import ConfigError
from course_lib.figures.diagrams.base import Diagram
from course_lib.figures.diagrams.collectives import SENT
from course_lib.figures.diagrams.marks import GREY, MARGIN, SMALL, WIDTH
from course_lib.figures.style import COLOURS
from course_lib.parallel.ddp import in_buckets

LAYERS = {"embedding": 3, "block 0": 2, "block 1": 2, "block 2": 2, "head": 1}


def buckets(layers: Mapping[str, int] | None = None, bucket_size: int = 3, first_bucket: int = 1,
            send_per_unit: float = 0.8) -> Diagram:
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
    names = list(reversed(sizes))
    # One byte per unit of size, so that the library's own rule cuts the buckets.
    gradients = {name: torch.empty(sizes[name], dtype=torch.uint8, device="meta") for name in names}
    cut = in_buckets(gradients.values(), first_bucket, bucket_size)
    of = {name: number for number, bucket in enumerate(cut) for name, gradient in gradients.items()
          if any(gradient is one for one in bucket)}
    total = sum(sizes.values())
    ready, clock = [0.0] * len(cut), 0.0
    for name in names:
        clock += sizes[name]
        ready[of[name]] = clock
    spans: list[tuple[float, float]] = []
    for number, bucket in enumerate(cut):
        start = max(ready[number], spans[-1][1] if spans else 0.0)
        spans.append((start, start + send_per_unit * sum(gradient.numel() for gradient in bucket)))
    end = spans[-1][1]
    hidden = sum(min(stop, total) - min(start, total) for start, stop in spans)
    share = hidden / sum(stop - start for start, stop in spans)
    diagram = Diagram(
        f"A bucket leaves as soon as it is full: {share:.0%} of the all-reduce runs while backward still computes",
        f"Two lanes over time. The upper one is the backward, layer by layer from {names[0]} to {names[-1]}; the lower "
        f"one the all-reduces of {len(cut)} buckets, each of which starts when its last gradient is there "
        "and the all-reduce before it has ended. The last one starts only after the backward.")
    left, top = 92.0, diagram.head + 12
    scale = (WIDTH - MARGIN - 8 - left) / max(end, total)
    lower = top + 96
    diagram.lane(top, "backward", left, left + max(end, total) * scale, 36)
    diagram.lane(lower, "all-reduce", left, left + max(end, total) * scale, 36)
    clock = 0.0
    for name in names:
        width = sizes[name] * scale
        diagram.box(left + clock * scale, top, width, 36, name.replace(" ", "\n") if width < 62 else name, size=SMALL,
                    fill=COLOURS["backward"], means=("backward", name, of[name]))
        clock += sizes[name]
        if clock == ready[of[name]]:
            x = left + clock * scale
            start = left + spans[of[name]][0] * scale
            diagram.arrow((x, top + 38), (start + 1, lower - 2), colour=SENT, means=("full", of[name]))
    for number, (start, stop) in enumerate(spans):
        width = (stop - start) * scale
        diagram.box(left + start * scale, lower, width, 36, f"bucket {number}" if width > 56 else str(number),
                    fill=SENT, size=SMALL, means=("all-reduce", number, start, stop))
    finish = left + total * scale
    diagram.arrow((finish, top - 8), (finish, lower + 44), head=False, dashed=True, colour=GREY, width=1.2)
    diagram.text(finish, lower + 52, "backward ends", SMALL, colour=GREY)
    diagram.text(left + 4, (top + 36 + lower) / 2, "full", SMALL, "start", SENT)
    diagram.time_axis(left, left + max(end, total) * scale, lower + 68)
    return diagram
