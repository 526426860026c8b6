"""Whether a process lives, is stopped or is dead, and whether it works although its Python stands still."""

import contextlib
import os
import threading
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Literal

import psutil

BUSY_SHARE = 0.05
"""Of the time, that a process has to run, or wait for a core, to count as busy."""
BUSY_BYTES = 1 << 20
"""A second, that a process has to read and write to count as busy."""
SCHEDSTAT = Path("/proc/self/schedstat")  # Linux: the only account of the time in which a thread waits for a core


def start_ticks(pid: int) -> int:
    """When a process began, in clock ticks since the boot: with its number, one process only. 0 without /proc.

    Raises:
        ProcessLookupError: there is none.
    """
    return int(_stat(pid)[19]) if Path("/proc/self/stat").exists() else 0


def process_state(pid: int, started: int) -> Literal["running", "stopped", "dead"]:
    """What the kernel says of a process of this machine.

    Args:
        started: its `start_ticks`; another process may have got its number.
    """
    try:
        fields = _stat(pid)
    except ProcessLookupError:
        return "dead"
    if int(fields[19]) != started or fields[0] in "ZX":
        return "dead"
    return "stopped" if fields[0] in "Tt" else "running"


def _stat(pid: int) -> list[str]:
    """/proc/PID/stat from its third field on: state is [0], start time [19] (proc(5))."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError as error:
        raise ProcessLookupError(pid) from error


class Activity:
    """How busy this process is, with its children: compilers, data loader's workers, a checkpoint's writer.

    Args:
        watchers: threads whose own work doesn't count: in the queue for a core they would look busy, too.
    """

    def __init__(self, watchers: Iterable[threading.Thread] = ()):
        self._watchers = tuple(watchers)
        self._before = self._measure()

    def is_busy(self, spins: bool) -> bool:
        """Whether it has worked since the last call, or since the beginning.

        Args:
            spins: leave out this process's own time on a core: a thread that waits for a GPU spins.
        """
        now = self._measure()
        seconds, own, others, moved = (after - before for after, before in zip(now, self._before, strict=True))
        self._before = now
        worked = max(0.0, others) + (0.0 if spins else own)
        return worked > BUSY_SHARE * seconds or moved > BUSY_BYTES * seconds or _in_disk_sleep()

    def _measure(self) -> tuple[float, float, float, float]:
        """Seconds now, seconds of this process and of its children on a core or waiting for one, bytes moved."""
        process = psutil.Process()
        children = []
        with contextlib.suppress(psutil.Error):
            children = [child.pid for child in process.children(recursive=True)]
        own = _runnable(os.getpid(), {thread.native_id for thread in self._watchers})
        moved = 0
        if hasattr(process, "io_counters"):
            counters = process.io_counters()
            moved = counters.read_chars + counters.write_chars
        return time.monotonic(), own, sum(map(_runnable, children)), moved


def _runnable(pid: int, left_out: Collection[int | None] = ()) -> float:
    """Seconds that a process's living threads ran or waited for a core; 0 where it has just ended."""
    total = 0.0
    with contextlib.suppress(psutil.Error, OSError):
        if not SCHEDSTAT.exists():
            return sum(psutil.Process(pid).cpu_times()[:2])
        for task in os.listdir(f"/proc/{pid}/task"):
            if int(task) not in left_out:
                with contextlib.suppress(OSError):  # the thread has just ended
                    ran, waited, _ = Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()
                    total += (int(ran) + int(waited)) / 1e9
    return total


def _in_disk_sleep() -> bool:
    """Whether the main thread waits for a disk."""
    with contextlib.suppress(ProcessLookupError):
        return _stat(os.getpid())[0] == "D"
    return False
