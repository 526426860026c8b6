"""A link that is slow, simulated: what ranks send takes longer, one message after the other, and computation goes on.

The link is described in two numbers, its latency and its rate. :func:`timeline` says what a step of FSDP over it comes
to on paper; :class:`OverSlowLink` lets a real one wait for it.
"""

import math
import time
from dataclasses import dataclass, field

from course_lib.parallel.fsdp import FlatParamGroup, FullyShardedDataParallel
from course_lib.parallel.sharded_unit import Reduction


@dataclass(frozen=True)
class Link:
    """A simulated link that a rank sends over.

    Attributes:
        latency: seconds of a collective before its first byte.
        rate: bytes/s of a rank.
    """

    latency: float
    rate: float = math.inf

    def seconds(self, size: float) -> float:
        """Of a collective in which a rank sends so many bytes."""
        return self.latency + size / self.rate


# --- On paper ---


@dataclass(frozen=True)
class LinkTimeline:
    """A step of FSDP on two lanes; spans are (what, block, begin, end), in seconds from the beginning of the step.

    Attributes:
        link: ``gather`` and ``reduce``; block -1 is the root.
        compute: ``forward`` and ``backward``.
        end: of the step.
    """

    link: list[tuple[str, int, float, float]]
    compute: list[tuple[str, int, float, float]]
    end: float

    @property
    def waited(self) -> float:
        """Seconds in which nothing was computed."""
        return self.end - sum(end - begin for _, _, begin, end in self.compute)


def timeline(
    blocks: int, forward: float, gather: float, reduce: float, prefetch: bool, root: float = 0.0
) -> LinkTimeline:
    """Time line of a step if a block's backward computes twice as long as its forward, and the root not at all.

    The order is that of :class:`course_lib.parallel.sharded_module.ShardedModule`: with prefetch, a gather begins when
    the block before it does; one reduce-scatter runs while the next block computes.

    Args:
        blocks: alike, one after the other.
        forward: seconds that a block computes.
        gather: seconds that the link is busy with a block's all-gather.
        reduce: seconds that it is busy with a block's reduce-scatter.
        prefetch: gather a block while the one before it computes.
        root: the same for the root's all-gather, at the beginning, and reduce-scatter, at the end.
    """
    link: list[tuple[str, int, float, float]] = []
    compute: list[tuple[str, int, float, float]] = []
    clock, reduced = 0.0, 0.0
    arrives: dict[int, float] = {}

    def send(what: str, block: int, seconds: float) -> float:
        begin = max(clock, link[-1][3] if link else 0.0)
        link.append((what, block, begin, begin + seconds))
        return begin + seconds

    clock = send("gather", -1, root)
    order = list(range(blocks))
    if prefetch:
        arrives[0] = send("gather", 0, gather)
    for what, blocks_in_turn, seconds in (("forward", order, forward), ("backward", order[::-1], 2 * forward)):
        for turn, block in enumerate(blocks_in_turn):
            clock = max(clock, arrives.pop(block) if block in arrives else send("gather", block, gather))
            if prefetch and turn + 1 < blocks:
                arrives[blocks_in_turn[turn + 1]] = send("gather", blocks_in_turn[turn + 1], gather)
            compute.append((what, block, clock, clock + seconds))
            clock += seconds
            if what == "backward":
                clock = max(clock, reduced)
                reduced = send("reduce", block, reduce)
    clock = max(clock, reduced)
    return LinkTimeline(link, compute, send("reduce", -1, root))


# --- In a step ---


@dataclass(frozen=True)
class Waits:
    """One step over a slow link.

    Attributes:
        link: seconds that a block's all-gather takes.
        step: seconds of the forward and backward.
        spans: when this rank stood still for the link, in seconds from the beginning of the step.
        of_all: seconds waited in each of the steps that this one is the median of.
    """

    link: float
    step: float
    spans: list[tuple[float, float]]
    of_all: tuple[float, ...] = ()

    @property
    def waited(self) -> float:
        return sum(end - start for start, end in self.spans)


@dataclass
class Lane:
    """The link of one rank: messages queue. Times are of ``time.perf_counter``."""

    link: Link = Link(0.0)
    reductions: bool = False
    free_at: float = 0.0
    spans: list[tuple[float, float]] = field(default_factory=list)

    def send(self, size: float) -> float:
        """Time at which a message that is asked for now will be there."""
        self.free_at = max(time.perf_counter(), self.free_at) + self.link.seconds(size)
        return self.free_at

    def wait(self, until: float | None) -> None:
        begin = time.perf_counter()
        if until is not None and until > begin:
            time.sleep(until - begin)
            self.spans.append((begin, until))


class _SlowGroup(FlatParamGroup):
    """Parameters that arrive no earlier than the link lets them, and whose gradients leave no earlier."""

    lane = Lane()
    """One for all groups of a model, from :meth:`OverSlowLink.slow_down` on."""
    ready: float | None = None

    def gather(self) -> None:
        super().gather()
        if self.work is not None and self.ready is None:
            self.ready = self.lane.send(self.flat.nbytes * (self.world - 1) / self.world)

    def wait(self) -> None:
        until, self.ready = self.ready, None
        self.lane.wait(until)
        super().wait()

    def reduce_scatter(self) -> Reduction:
        begun = super().reduce_scatter()
        if not self.lane.reductions:
            return begun
        until = self.lane.send(begun.whole.nbytes * (self.world - 1) / self.world)
        return _SlowReduction(self.lane, until, begun)


class _SlowReduction(Reduction):
    def __init__(self, lane: Lane, until: float, begun: Reduction):
        super().__init__(begun.unit, begun.whole, begun.local, begun.work)
        self.lane, self.until = lane, until

    def finish(self) -> None:
        self.lane.wait(self.until)
        super().finish()


class OverSlowLink(FullyShardedDataParallel):
    """FSDP, whose collectives :meth:`slow_down` can lengthen."""

    unit_type = _SlowGroup

    def slow_down(self, link: Link, reductions: bool = False) -> list[tuple[float, float]]:
        """Let all-gathers from now on take as long as this link takes; reduce-scatters too, if asked.

        Returns:
            A list that fills with begin and end of each wait for that, in seconds of ``time.perf_counter``.
        """
        lane = Lane(link, reductions)
        for unit in self.units:
            assert isinstance(unit, _SlowGroup)
            unit.lane = lane
        return lane.spans
