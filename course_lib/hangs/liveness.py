"""State of a process: running, stopped or dead, and whether it works although its Python does not advance."""

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

from course_lib.hangs.network_bytes import Peers, Traffic

BUSY_SHARE = 0.05
"""Of the time, that a process has to run, or wait for a core, to count as busy."""
BUSY_BYTES = 1 << 20
"""A second, that a process has to read and write to count as busy."""
SPIN_SHARE = 0.5
"""Of the time, that a thread has to run, or wait for a core, to count as one that spins."""
QUEUE_FACTOR = 10
"""A thread that works gets a turn of this part of its time in the queue, however full the machine."""
SCHEDSTAT = Path("/proc/self/schedstat")  # Linux: the only account of the time in which a thread waits for a core

Times = dict[int, tuple[float, float]]
"""Seconds on a core and in the queue for one, by thread."""


def start_ticks(pid: int) -> int:
    """Start of a process, in clock ticks since the boot: with its number, one process only. 0 without /proc.

    Raises:
        ProcessLookupError: there is none.
    """
    return int(_stat(pid)[19]) if Path("/proc/self/stat").exists() else 0


def process_state(pid: int, started: int) -> Literal["running", "stopped", "dead"]:
    """State of a process of this machine by the kernel.

    ``started`` is its `start_ticks`: another process may have got its ``pid``.
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


def machine() -> str:
    """The same for processes that can ask the kernel for each other: a boot, and a namespace of processes; or empty."""
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    return boot.read_text().strip() + os.readlink(namespace) if boot.exists() and namespace.is_symlink() else ""


class Activity:
    """Activity of this process and its children: compilers, data loader's workers, a checkpoint's writer, a download.

    Args:
        watchers: threads whose own work doesn't count: in the queue for a core they would look busy, too.
        peers: the other ranks, with whom bytes that are exchanged don't count.
    Attributes:
        main_spins: whether the main thread had something to do nearly all the time between the last two measurements.
    """

    def __init__(self, watchers: Iterable[threading.Thread] = (), peers: Callable[[], Peers] = Peers):
        self._watchers, self.main_spins = tuple(watchers), False
        self._traffic, self._below = Traffic(peers), [os.getpid()]
        self._before = self._measure()

    def is_busy(self, spins: bool) -> bool:
        """Whether it has worked since the last call, or since the beginning.

        Args:
            spins: leave out this process's own time on a core: a thread that waits for a GPU spins.
        """
        (at, own, others, moved), self._before = self._before, self._measure()
        now, own_now, others_now, moved_now = self._before
        main = os.getpid()  # Linux: its number, too
        self.main_spins = _worked(own, {main: own_now[main]} if main in own_now else {}) > SPIN_SHARE * (now - at)
        worked = _worked(others, others_now) + (0.0 if spins else _worked(own, own_now))
        exchanges = self._traffic.is_busy(self._below)  # asked each time, for it counts from one to the next
        return (
            exchanges
            or worked > BUSY_SHARE * (now - at)
            or moved_now - moved > BUSY_BYTES * (now - at)
            or self._main_state() in ("D" if spins else "DR")
        )

    def _main_state(self) -> str:
        """What the kernel says of the main thread, as seen from another: D in wait for a disk, R with a core or in the
        queue for one, which no account of finished turns shows; S and others, also where nobody can tell."""
        watchers = {threading.current_thread(), *self._watchers}
        with contextlib.suppress(ProcessLookupError):
            return "S" if threading.main_thread() in watchers else _stat(os.getpid())[0]
        return "S"

    def _measure(self) -> tuple[float, Times, Times, int]:
        """Seconds now, the times of this process's threads and of its children's, bytes moved."""
        processes = _processes()
        below = [os.getpid()]
        for pid in below:  # which grows
            below += [child for child, (parent, _) in processes.items() if parent == pid]
        self._below = below
        own, *others = (_times(pid, processes) for pid in below)
        watching = {thread.native_id for thread in self._watchers}
        own = {task: times for task, times in own.items() if task not in watching}
        return time.monotonic(), own, {task: times for child in others for task, times in child.items()}, _bytes_moved()


def _processes() -> dict[int, tuple[int, float]]:
    """Of every process of this machine its parent, and the seconds that it has run."""
    processes: dict[int, tuple[int, float]] = {}
    if Path("/proc/self/stat").exists():
        ticks = os.sysconf("SC_CLK_TCK")
        for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                fields = _stat(pid)
                processes[pid] = int(fields[1]), (int(fields[11]) + int(fields[12])) / ticks
    else:  # macOS
        for line in subprocess.check_output(["ps", "-axo", "pid=,ppid=,time="], text=True).splitlines():
            number, parent, ran = line.split()
            processes[int(number)] = int(parent), _seconds(ran)
    return processes


def _seconds(shown: str) -> float:
    """What ``ps`` shows as a time: [[days-]hours:]minutes:seconds."""
    days, _, clock = shown.rpartition("-")
    seconds = 0.0
    for part in clock.split(":"):
        seconds = 60 * seconds + float(part)
    return seconds + 86400 * int(days or 0)


def _bytes_moved() -> int:
    """That this process has read and written, in files and pipes; 0 where the system does not tell."""
    account = Path("/proc/self/io")
    if not account.exists() or not os.access(account, os.R_OK):
        return 0
    counters = dict(line.split(": ") for line in account.read_text().splitlines())
    return int(counters["rchar"]) + int(counters["wchar"])


def _times(pid: int, processes: dict[int, tuple[int, float]]) -> Times:
    """Of each living thread of a process; empty where it has just ended."""
    times: Times = {}
    if not SCHEDSTAT.exists():
        return {pid: (processes[pid][1], 0.0)} if pid in processes else {}
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):  # the thread has just ended
                ran, waited, _ = Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()
                times[int(task)] = int(ran) / 1e9, int(waited) / 1e9
    return times


def _worked(before: Times, after: Times) -> float:
    """Seconds that threads ran or waited for a core.

    One that only looks whether there is something to do, as gloo's does, waits long for each of its short turns.
    """
    total = 0.0
    for task, (ran, waited) in after.items():
        ran_before, waited_before = before.get(task, (0.0, 0.0))
        total += ran - ran_before + min(waited - waited_before, QUEUE_FACTOR * (ran - ran_before))
    return total
