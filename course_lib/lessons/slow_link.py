"""A link that is slow, simulated: the ranks' all-gathers take longer, and computation goes on meanwhile."""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from course_lib.parallel.fsdp import FlatParamGroup
from course_lib.replacing import replaced


@dataclass(frozen=True)
class Waits:
    """One step over a slow link.

    Attributes:
        link: seconds that an all-gather takes.
        step: seconds of the forward and backward.
        spans: when this rank stood still for the link, in seconds from the beginning of the step.
    """

    link: float
    step: float
    spans: list[tuple[float, float]]

    @property
    def waited(self) -> float:
        return sum(end - start for start, end in self.spans)


@contextlib.contextmanager
def slow_gathers(seconds: float) -> Iterator[list[tuple[float, float]]]:
    """Lets no all-gather end earlier than so many seconds after its beginning; yields when a rank waited for that."""
    spans: list[tuple[float, float]] = []
    ready: dict[FlatParamGroup, float] = {}
    gather, wait = FlatParamGroup.gather, FlatParamGroup.wait

    def slow_gather(unit: FlatParamGroup) -> None:
        gather(unit)
        if unit.work is not None:
            ready.setdefault(unit, time.perf_counter() + seconds)

    def slow_wait(unit: FlatParamGroup) -> None:
        begin, until = time.perf_counter(), ready.pop(unit, 0.0)
        if until > begin:
            time.sleep(until - begin)
            spans.append((begin, until))
        wait(unit)

    with replaced(FlatParamGroup, "gather", slow_gather), replaced(FlatParamGroup, "wait", slow_wait):
        yield spans
