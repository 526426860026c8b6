"""Measurements of lesson 02: buckets over a slow link, how early they leave, and what each message costs.

The functions run on ranks (:func:`course_lib.launching.launch.launch`) and return plain numbers.
"""

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from accelerate import Accelerator

from course_lib.lessons.data_parallel.lab import gpt2, share, tokens
from course_lib.lessons.slow_link import Lane, Link
from course_lib.lessons.turns import in_turns
from course_lib.parallel.clock import Clock
from course_lib.parallel.ddp import Bucket, DataParallel, ReductionHandle, sum_gradients
from course_lib.parallel.tp_collectives import gathered

LATENCY, BUSY = 0.02, 0.8
"""Of the link, as shares of a backward: the latency of a message, and how long all gradients take on it."""


@dataclass(frozen=True)
class Sent:
    """A bucket.

    Attributes:
        ready: seconds from the beginning of the backward until its last gradient was there.
        size: bytes that a rank sends of it.
    """

    ready: float
    size: float


@dataclass(frozen=True)
class OverLink:
    """Backwards over a slow link with one way to fill buckets.

    Attributes:
        buckets: as they left in a step over no link.
        backward: seconds of that step.
        link: that the all-reduces go over.
        steps: seconds from the beginning of the backward until all gradients are averaged, in each try.
    """

    buckets: list[Sent]
    backward: float
    link: Link
    steps: list[float]

    @property
    def seconds(self) -> float:
        """The median of the tries."""
        return statistics.median(self.steps)

    @property
    def on_paper(self) -> float:
        return on_paper(self.buckets, self.backward, self.link)


def on_paper(buckets: Iterable[Sent], backward: float, link: Link) -> float:
    """Seconds until all gradients are averaged: a bucket leaves when it is full and the one before it has arrived."""
    free = 0.0
    for bucket in buckets:
        free = max(bucket.ready, free) + link.seconds(bucket.size)
    return max(backward, free)


def buckets_over_link(
    ways: Mapping[str, int],
    layers: int,
    width: int,
    rows: int,
    tries: int,
) -> dict[str, OverLink]:
    """Backwards of a small GPT-2 over one link, for several sizes of buckets that take turns; on the CPU.

    The link is described by ``LATENCY`` and ``BUSY``, and by the backward of the last of the ways.

    Args:
        ways: bytes at which a bucket is closed, by name.
        layers: blocks of the GPT-2.
        width: of its hidden state.
        rows: of a step, over all ranks.
        tries: an odd number.
    """
    engines = {name: _Backward(size, layers, width) for name, size in ways.items()}
    ids = share(tokens(1, rows))

    def steps(link: Link, tries: int, warm_up: int = 0) -> dict[str, list[tuple[float, list[Sent]]]]:
        return in_turns({name: partial(engine.step, ids, link) for name, engine in engines.items()}, tries, warm_up)

    free = steps(Link(0.0), tries, warm_up=1)
    quiet = {name: sorted(measured, key=lambda one: one[0])[tries // 2] for name, measured in free.items()}
    backward, buckets = quiet[list(ways)[-1]]
    backward = statistics.mean(gathered(torch.tensor([backward]), None, 0).tolist())  # one link for all ranks
    link = Link(LATENCY * backward, sum(bucket.size for bucket in buckets) / (BUSY * backward))
    seconds = {name: [step for step, _ in measured] for name, measured in steps(link, tries).items()}
    return {name: OverLink(quiet[name][1], quiet[name][0], link, seconds[name]) for name in ways}


class _Backward:
    """A model whose all-reduces go over a link."""

    def __init__(self, bucket_bytes: int, layers: int, width: int):
        self.lane, self.began = Lane(), 0.0
        self.sent: list[Sent] = []
        self.engine = DataParallel(
            gpt2(layers, width),
            bucket_bytes=bucket_bytes,
            first_bucket_bytes=bucket_bytes,
            communication_hook=self.send,
        )

    def send(self, bucket: Bucket) -> ReductionHandle:
        ranks = dist.get_world_size()
        size = 2 * (ranks - 1) / ranks * bucket.flat.nbytes
        self.sent.append(Sent(time.perf_counter() - self.began, size))
        return _Handle(self.lane, self.lane.send(size), sum_gradients(bucket))

    def step(self, ids: torch.Tensor, link: Link) -> tuple[float, list[Sent]]:
        """Seconds of a backward, and its buckets."""
        self.lane, self.sent = Lane(link), []
        loss = self.engine(input_ids=ids, labels=ids).loss
        dist.barrier()
        self.began = time.perf_counter()
        loss.backward()
        seconds = time.perf_counter() - self.began
        self.engine.zero_grad()
        return seconds, self.sent


@dataclass
class _Handle:
    """An all-reduce that has ended when it really has, and when the link has carried it."""

    lane: Lane
    until: float
    work: ReductionHandle = field(repr=False)

    def wait(self) -> None:
        self.work.wait()
        self.lane.wait(self.until)


def all_reduce_seconds(sizes: Sequence[int], tries: int) -> dict[int, list[float]]:
    """On one rank: seconds of torch's all-reduce of fp32 tensors of so many bytes, every try; the sizes take turns."""
    device = Accelerator().device
    clock = Clock(device)

    def all_reduced(tensor: torch.Tensor) -> float:
        dist.barrier()
        clock.settle()
        begin = time.perf_counter()
        dist.all_reduce(tensor)
        clock.settle()
        return time.perf_counter() - begin

    tensors = {size: torch.zeros(size // 4, device=device) for size in sizes}
    return in_turns({size: partial(all_reduced, tensor) for size, tensor in tensors.items()}, tries, warm_up=1)
