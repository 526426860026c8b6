"""Points in time on the CPU and on a GPU's stream, brought to one clock; seconds by phase, and of whole steps."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

Stamp = float | torch.cuda.Event


class Clock:
    """Stamps on ``time.perf_counter``'s clock, in seconds.

    On a GPU a stamp is an event in the current stream: it is reached when the work queued before it is done.

    Args:
        device: where the measured work runs.
    """

    def __init__(self, device: torch.device):
        self.device = device
        if device.type == "cuda":
            if device.index is None:  # which on another thread would mean another GPU
                self.device = device = torch.device("cuda", torch.cuda.current_device())
            torch.cuda.synchronize(device)
            self._first = self._event()
            self._first.synchronize()
        self._began = time.perf_counter()

    def stamp(self, device: torch.device | None = None) -> Stamp:
        """Now, on ``device`` or on the clock's own; on any thread, in that thread's current stream of the GPU."""
        return self._event() if self.device.type == (device or self.device).type == "cuda" else time.perf_counter()

    def seconds(self, stamp: Stamp) -> float:
        """A stamp as seconds; a GPU's have to be reached."""
        if isinstance(stamp, float):
            return stamp
        return self._began + self._first.elapsed_time(stamp) / 1e3

    def settle(self) -> None:
        """Wait until all stamps have been reached."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _event(self) -> torch.cuda.Event:
        """One on the clock's own GPU: times between events of two GPUs don't exist.

        A thread's current device is GPU 0 until it is told otherwise, the backend's threads' and autograd's too, so the
        stream is named: `record` would take the current device's.
        """
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event


class Phases:
    """Adds up the seconds spent in named stretches of code.

    On a CPU, seconds of this process. On a GPU, whose kernels run on after the code that launched them, seconds of the
    device: from when it has done what was queued before the block to when it has done what the block queued; if it
    runs dry meanwhile, its wait for the host counts. Phases that follow each other without a gap add up to the wall
    clock; what lies between them is in none.

    Args:
        clock: of the device that the work runs on; None for a CPU.

    Attributes:
        seconds: by phase, up to the last :meth:`settle`.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.clock = clock
        self._passed: list[tuple[str, Stamp, Stamp]] = []

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """A context whose time counts towards ``name``; nobody waits for the device."""
        return Phase(self, name)

    def passed(self, name: str, start: Stamp, end: Stamp) -> None:
        """Note a block that has ended, for :meth:`settle`."""
        self._passed.append((name, start, end))

    def settle(self) -> None:
        """Count the blocks that have ended; the device has to have done their work."""
        for name, start, end in self._passed:
            self.seconds[name] += between(start, end)
        self._passed.clear()

    def stamp(self) -> Stamp:
        """Now; on a GPU when it has done what is queued."""
        return self.clock.stamp() if self.clock else time.perf_counter()


class Phase(AbstractContextManager):
    """A stretch of code that is timed."""

    def __init__(self, phases: Phases, name: str):
        self.phases, self.name = phases, name

    def __enter__(self) -> None:
        self.start = self.phases.stamp()

    def __exit__(self, *error: Any) -> None:
        self.phases.passed(self.name, self.start, self.phases.stamp())


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
