"""One way to wait for what other processes do: as long as they live and get on, however slow the machine is."""

import contextlib
import os
import time
from pathlib import Path

import psutil

from course_lib.launching.own_time import OwnTime

PATIENCE = 60.0
"""Seconds without a CPU-second or a line in a file; those in which a process waits for a core are left out."""
LOOK_SECONDS = 0.02


def until(condition, *processes, what="it", files=(), told=str):
    """Wait for a condition, and return its value; fail when a process ends, or when nothing moves for a minute.

    Args:
        condition: a function without arguments.
        processes: that work towards it and have to live until then: ``Popen``, ``multiprocessing.Process`` or
            ``psutil.Process``. With all below them they have to get on; without any, all below this process.
        what: is waited for.
        files: that grow as they get on.
        told: a function that gives more to say of a failure.
    """
    clock, moved, moved_at = OwnTime(), None, 0.0
    while not (value := condition()):
        ended = [process for process in processes if has_ended(process)]
        if ended and not (value := condition()):  # which may have been its last act
            raise AssertionError(f"{ended[0]} ended before {what}\n{told()}")
        if value:
            break
        below = [each for process in processes or [psutil.Process()] for each in tree(process)][not processes :]
        now = sum(map(cpu_seconds, below)) + sum(map(size, files))
        if moved is None or not moved <= now < moved + 1:
            moved, moved_at = now, clock.seconds
        waited = clock.look([os.getpid(), *(each.pid for each in below)]) - moved_at
        assert waited < PATIENCE, f"nothing moved for {PATIENCE:.0f} s, waiting for {what}\n{told()}"
        time.sleep(LOOK_SECONDS)
    return value


def has_lines(path, count):
    """A condition: that a file has so many lines."""
    return lambda: path.exists() and len(path.read_text().splitlines()) >= count


def has_ended(process):
    if hasattr(process, "poll"):
        return process.poll() is not None
    if hasattr(process, "is_alive"):
        return not process.is_alive()
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def tree(process):
    """A process and all below it that live."""
    with contextlib.suppress(psutil.NoSuchProcess):
        top = psutil.Process(process.pid)
        return [top, *top.children(recursive=True)]
    return []


def cpu_seconds(process):
    """Of a process and the children that it has waited for; 0 once it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return sum(process.cpu_times()[:4])
    return 0.0


def size(file):
    return Path(file).stat().st_size if Path(file).exists() else 0
