"""Forks this process into N ranks that run a command, passes signals on to them, and tells how they ended.

For a command line: ranks have no labels, no return values and no time limit, but exit codes, and time to save when they
are asked to stop. `course_lib.launching.launch` is for functions of a notebook or a script.
"""

import atexit
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import FrameType

import torch
from torch.distributed import TCPStore

from course_lib.launching import openmp
from course_lib.launching.launch_environment import check_loopback
from course_lib.launching.rank_process import be_rank, leave_caller

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
"""What is passed on to the ranks."""
OTHERS_END = 30.0
"""Seconds between a rank's failure, when the others get SIGTERM, and SIGKILL."""


@dataclass
class RanksEnded:
    """End of a command's ranks.

    Attributes:
        signal: the first that this process got and passed on, else None.
        code: exit code of the first rank that failed, -N where signal N ended it; 0 where none did.
    """

    signal: int | None = None
    code: int = 0


@dataclass
class _Launcher:
    ranks: list[BaseProcess]
    grace: float
    ended: RanksEnded = field(default_factory=RanksEnded)
    deadline: float | None = None
    early: list[int] | None = field(default_factory=list)
    """Signals that came before all ranks were there; None from then on."""

    def pass_on(self, number: int, frame: FrameType | None) -> None:
        self.ended.signal = self.ended.signal or number
        if self.early is None:
            self._tell(number, self.grace)
        else:
            self.early.append(number)

    def all_are_there(self) -> None:
        """From now on signals are passed on at once; those that came before, now."""
        early, self.early = self.early or [], None
        for number in early:
            self._tell(number, self.grace)

    def wait(self) -> RanksEnded:
        """Wait for all; the first failure, or the signal that was passed on, gives the others some time."""
        alive = {rank.sentinel: rank for rank in self.ranks}
        while alive:
            ended = wait(list(alive), self._seconds_left())
            for rank in [alive.pop(sentinel) for sentinel in list(alive) if sentinel in ended]:
                rank.join()
                if rank.exitcode and not self.ended.code:
                    self.ended.code = rank.exitcode
                    if self.ended.signal is None:
                        self._tell(signal.SIGTERM, OTHERS_END)
            if alive and self._seconds_left() == 0:
                self._tell(signal.SIGKILL, self.grace)
        return self.ended

    def _seconds_left(self) -> float | None:
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def _tell(self, number: int, seconds: float) -> None:
        if self.deadline is None or number == signal.SIGKILL:
            self.deadline = time.monotonic() + seconds
        for rank in self.ranks:
            if rank.pid is not None and rank.exitcode is None:
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(rank.pid, number)


def run_forked(main: Callable[[], int], num_processes: int, *, threads: int | None, grace: float) -> RanksEnded:
    """Call ``main()`` in ranks that are forked from here, with the environment of a process group over this machine.

    What they need is best imported before: they share it. Call it in the main thread.

    Args:
        main: gives a rank's exit code.
        num_processes: ranks.
        threads: of each rank's torch; None to leave them.
        grace: seconds between a signal that is passed on and SIGKILL.
    """
    # A signal that comes before a rank has handlers of its own waits until it has. The store's thread inherits that:
    # else it would take the signal in this one's place, amid the start of a rank that could not be told yet.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        return _run_forked(main, num_processes, threads, grace)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _run_forked(main: Callable[[], int], num_processes: int, threads: int | None, grace: float) -> RanksEnded:
    check_loopback()
    # Here, so that its port is the system's choice and no rank is its host.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    openmp.end_threads()
    context = multiprocessing.get_context("fork")
    ranks: list[BaseProcess] = [
        context.Process(target=_rank, args=(main, rank, num_processes, store.port, threads))
        for rank in range(num_processes)
    ]
    launcher = _Launcher(ranks, grace)
    before = {number: signal.signal(number, launcher.pass_on) for number in SIGNALS}
    try:
        for rank in ranks:
            rank.start()
        launcher.all_are_there()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        return launcher.wait()
    finally:
        _restore(before.items())


def _restore(handlers: Iterable[tuple[int, object]]) -> None:
    for number, handler in handlers:
        signal.signal(number, handler or signal.SIG_DFL)  # type: ignore[arg-type]  # None: it was not Python's


def _rank(main: Callable[[], int], rank: int, num_processes: int, port: int, threads: int | None) -> None:
    """What a forked rank does, as a new interpreter would: its own signals, exit functions and exit code."""
    be_rank(rank, num_processes, port)
    leave_caller()
    _restore((number, signal.SIG_DFL) for number in SIGNALS if number != signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    if threads and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    try:
        code = main()
    except Exception:  # as Python ends; here multiprocessing would write it, with the keys that the hook hides
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    finally:
        atexit._run_exitfuncs()
    sys.exit(code)
