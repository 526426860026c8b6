"""Watches from outside what a sandbox takes: its limits, and the end of all that it started."""

import contextlib
import itertools
import os
import resource
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from course_lib.grading.cgroup import Cgroup
from course_lib.launching.own_time import OwnTime

WATCH_SECONDS = 0.1
END_SECONDS = 0.5  # until what was killed is looked for again
MAX_OUTPUT = 256 << 20  # bytes of all observations together
START_SECONDS = 120.0  # for importing torch


@dataclass(frozen=True)
class Limits:
    """Limits of one task's grading.

    Attributes:
        seconds: from when the answer starts until all of it is ended, without those in which it waits for a core.
        memory: bytes, of all its processes together; also of each one's addresses.
        processes: at one time, the ranks and the process that starts them among them.
        file_size: bytes of one file.
        disk: bytes in /tmp, and as many in /dev/shm; both are memory.
        output: bytes of observations of one rank in one case.
    """

    seconds: float = 60.0
    memory: int = 4 << 30
    processes: int = 64
    file_size: int = 64 << 20
    disk: int = 64 << 20
    output: int = 16 << 20


@dataclass(frozen=True)
class Ended:
    """End of a sandbox: exit, limit or kill.

    Attributes:
        output: what its trusted process wrote.
        why: empty if it ended by itself; else the limit that it broke, `timeout`, `memory`, `processes` or `output`;
            `start` if it never began; `stopped` if the grader was.
        code: exit code.
        complaint: the end of what was written on stderr before any answer ran.
        seconds: from when the answer started until nothing of it was left; 0 if it never began.
    """

    output: bytes
    why: str
    code: int
    complaint: str
    seconds: float


class ProcessWatch:
    """Reads what a sandbox writes, and looks what it takes, until it ends or breaks a limit.

    Args:
        cgroup: what it runs in. Where the kernel has refused it a process or a thread, nothing that it says counts.
    """

    def __init__(
        self,
        process: subprocess.Popen,
        limits: Limits,
        started: bytes,
        stop: threading.Event,
        isolated: bool,
        cgroup: Cgroup | None,
    ):
        self.process, self.limits, self.started, self.stop = process, limits, started, stop
        self.isolated, self.cgroup = isolated, cgroup
        self.output, self.complaint = bytearray(), bytearray()
        self.began: float | None = None
        self.clock, self.limit = OwnTime(), START_SECONDS

    def result(self) -> Ended:
        with _urgent():
            why = self._follow()
            if why:
                end(self.process, self.isolated)
        code = self.process.wait()
        seconds = 0.0 if self.began is None else time.monotonic() - self.began
        if self.began is not None and why != "stopped" and self._refused():  # also if it went on, and ended by itself
            why, self.output = "processes", self.output[: len(self.started)]
        return Ended(bytes(self.output), why, code, self.complaint.decode(errors="replace"), seconds)

    def _follow(self) -> str:
        """Why it has to be ended; empty if it ends by itself."""
        look_at = 0.0
        with selectors.DefaultSelector() as selector:
            for pipe in (self.process.stdout, self.process.stderr):
                assert pipe is not None
                selector.register(pipe, selectors.EVENT_READ)
            while selector.get_map():
                for key, _ in selector.select(WATCH_SECONDS):
                    data = os.read(key.fd, 1 << 16)
                    if not data:
                        selector.unregister(key.fileobj)
                    elif key.fileobj is self.process.stdout:
                        self.output += data
                        if len(self.output) > MAX_OUTPUT:
                            return "output"
                    else:
                        self.complaint = (self.complaint + data)[-4000:]
                now = time.monotonic()
                if self.began is None and self.output.startswith(self.started):
                    self.began, self.limit = now, self.clock.seconds + self.limits.seconds
                if self.stop.is_set():
                    return "stopped"
                if now > look_at:
                    look_at = now + WATCH_SECONDS
                    # without looking at the thousands that there may be
                    below = list(itertools.islice(_below(self.process.pid), self.limits.processes + 1))
                    if self.clock.look(below) > self.limit:
                        return "start" if self.began is None else "timeout"
                    broken = "" if self.began is None else self._broken(below)
                    if broken:
                        return broken
        return ""

    def _broken(self, below: list[int]) -> str:
        """The limit that all its processes together exceed."""
        if self._refused() or len(below) > self.limits.processes:
            return "processes"
        resident = 0
        for pid in below:
            resident += _resident(pid)
            if resident > self.limits.memory:
                return "memory"
        return ""

    def _refused(self) -> bool:
        return self.cgroup is not None and self.cgroup.hit()


@contextlib.contextmanager
def _urgent() -> Iterator[None]:
    """This thread before all others, where it may be: where there is no cgroup root may fork without limit, and
    thousands of processes must not keep the one who counts them from the processor. An ordinary user's are limited by
    the kernel itself."""
    if not sys.platform.startswith("linux"):  # no sandbox there either, only --no-sandbox
        yield
        return
    kept = os.sched_getscheduler(0), os.sched_getparam(0)
    with contextlib.suppress(PermissionError):  # an ordinary user, or a container that may not
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))  # not what it starts
    try:
        yield
    finally:
        os.sched_setscheduler(0, *kept)


def _below(pid: int) -> Iterator[int]:
    """All that it started, and what they started, while one looks."""
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # ended meanwhile
            for thread in os.listdir(f"/proc/{parent}/task"):
                for child in map(int, Path(f"/proc/{parent}/task/{thread}/children").read_text().split()):
                    yield child
                    waiting.append(child)


def _resident(pid: int) -> int:
    """Bytes of memory that a process has; 0 once it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    return 0


def end(process: subprocess.Popen, isolated: bool) -> None:
    """Kill all that it started, and return when all of it is gone."""
    while process.poll() is None:
        # Bubblewrap's first child is the namespace's process 1: with it dies all the rest, and bubblewrap after it.
        below = list(itertools.islice(_below(process.pid), 1 if isolated else None))
        for pid in below or [process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
    for pipe in (process.stdout, process.stderr):
        if pipe:
            pipe.close()
