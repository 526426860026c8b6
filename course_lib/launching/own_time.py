"""A clock for the time limits of other processes, which a busy machine does not run out."""

import os
import time
from collections.abc import Iterable
from pathlib import Path

from course_lib.launching.cores import usable_cores

TICKS = os.sysconf("SC_CLK_TCK")


class OwnTime:
    """Seconds that some processes had, from the first look on: time in which one of them waits for a core is left out.

    They pass as on the wall where nobody else computes, and where the processes wait for each other, as in a hang. They
    are at least what the processes together used of all cores: to fill the queue oneself gains nothing.
    Without /proc, as on macOS, they always pass as on the wall.

    Attributes:
        seconds: up to the last look.
    """

    def __init__(self) -> None:
        self.seconds, self._at, self._cores = 0.0, time.monotonic(), usable_cores()
        self._unqueued = 0.0  # which may fall: the kernel tells of a wait when it is over
        self._used = 0.0
        self._accounts: dict[int, tuple[float, float]] = {}

    def look(self, pids: Iterable[int]) -> float:
        """Take the time since the last look into account; called a few times per second.

        Args:
            pids: of the processes that live now.
        Returns:
            :attr:`seconds`.
        """
        at, before = time.monotonic(), self._accounts
        self._accounts = {pid: account for pid in pids if (account := queued_and_used(pid)) is not None}
        since = [
            (queued - before[pid][0], used - before[pid][1])
            for pid, (queued, used) in self._accounts.items()
            if pid in before
        ]
        waited, used = max((queued for queued, _ in since), default=0.0), sum(used for _, used in since)
        self._unqueued += at - self._at - waited
        self._used += used / self._cores
        self.seconds, self._at = max(self.seconds, self._unqueued, self._used), at
        return self.seconds


def queued_and_used(pid: int) -> tuple[float, float] | None:
    """Seconds in which a process's main thread could run and waited for a core, and CPU-seconds of all its threads and
    of the children that it waited for; None where nobody can tell."""
    try:
        queued = int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
        used = sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15])) / TICKS
    except (OSError, IndexError):  # it has ended, or the system keeps no such account
        return None
    return queued, used
