"""Where the time of a step goes, by phase, in seconds on this rank; and a stopwatch for whole steps."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator

from course_lib.parallel.clock import Clock, Stamp


class Phases:
    """Adds up the seconds spent in named stretches of code.

    On a CPU, seconds of this process. On a GPU, whose kernels run on after the code that launched them, seconds of the
    device: from when it has done what was queued before the block to when it has done what the block queued; if it
    runs dry meanwhile, its wait for the host counts. Phases that follow each other without a gap add up to the wall
    clock; what lies between them is in none.

    Args:
        clock: of the device that the work runs on; None for a CPU.

    Attributes:
        seconds: by phase; on a GPU up to the last :meth:`settle`.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.clock = clock
        self._passed: list[tuple[str, Stamp, Stamp]] = []

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Count the block's time towards ``name``; nobody waits for the device."""
        start = self.stamp()
        try:
            yield
        finally:
            self._passed.append((name, start, self.stamp()))
            if self.clock is None or self.clock.device.type != "cuda":
                self.settle()

    def settle(self) -> None:
        """Count the blocks that have ended; the device has to have done their work."""
        for name, start, end in self._passed:
            self.seconds[name] += between(start, end)
        self._passed.clear()

    def stamp(self) -> Stamp:
        """Now; on a GPU when it has done what is queued."""
        return self.clock.stamp() if self.clock else time.perf_counter()


def between(start: Stamp, end: Stamp) -> float:
    """Seconds from one stamp to another of the same kind."""
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float) and isinstance(end, float)
        return end - start
    return start.elapsed_time(end) / 1e3  # not through the clock: events give float32 milliseconds


class Stopwatch:
    """Seconds of wall clock from lap to lap, less what it was stopped for. A GPU has to have been waited for."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap, or since the stopwatch was made."""
        now = time.perf_counter()
        passed, self._begun = now - self._begun, now
        return passed

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Leave the block's time out."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._begun += time.perf_counter() - start
