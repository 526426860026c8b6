"""A link that is slow, simulated: the ranks' all-gathers take longer, and computation goes on meanwhile."""

import time
from dataclasses import dataclass

from course_lib.parallel.fsdp import FlatParamGroup, FullyShardedDataParallel


@dataclass(frozen=True)
class Waits:
    """One step over a slow link.

    Attributes:
        link: seconds that an all-gather takes.
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


class _SlowGroup(FlatParamGroup):
    """Parameters that take ``link`` seconds at least to arrive, counted from where they are asked for."""

    link = 0.0
    ready: float | None = None
    spans: list[tuple[float, float]]
    """When this rank stood still for the link; one list for all groups of a model."""

    def gather(self) -> None:
        super().gather()
        if self.work is not None and self.ready is None:
            self.ready = time.perf_counter() + self.link

    def wait(self) -> None:
        begin, until, self.ready = time.perf_counter(), self.ready, None
        if until is not None and until > begin:
            time.sleep(until - begin)
            self.spans.append((begin, until))
        super().wait()


class OverSlowLink(FullyShardedDataParallel):
    """FSDP, any of whose all-gathers :meth:`slow_down` can lengthen."""

    unit_type = _SlowGroup

    def slow_down(self, link: float) -> list[tuple[float, float]]:
        """Let no all-gather from now on end within ``link`` seconds of its beginning.

        Returns:
            A list that fills with begin and end of each wait for that, in seconds of ``time.perf_counter``.
        """
        spans: list[tuple[float, float]] = []
        for unit in self.units:
            assert isinstance(unit, _SlowGroup)
            unit.link, unit.spans = link, spans
        return spans
