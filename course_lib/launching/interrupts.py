"""Ctrl-C, SIGTERM and SIGUSR1 as a wish that the training loop grants at the end of a step.

A scheduler sends SIGTERM or SIGUSR1 some time before it takes the machine away. The wish may reach one rank alone, so
the ranks vote with each step, and all save the same one. Whoever asks a second time means now.
"""

import contextlib
import json
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from course_lib.errors import EXIT_INTERRUPTED, EXIT_RESUME
from course_lib.writing import write_text

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
LAUNCHER_DIED = getattr(signal, "SIGRTMIN", None)
"""What the kernel sends when the launcher dies, once for each of its threads, at any distance on a busy machine. So it
has a number of its own, and is never a second wish; None where there is no such signal."""
SAME_WISH = 1.0
"""Seconds in which further signals belong to the first: a launcher that gets Ctrl-C forwards it to ranks that may have
had it too, and a scheduler may signal both."""
PATIENCE = 5.0
"""Seconds that a rank has for its end after the second wish; then it is ended wherever it hangs."""
NOTE = "interrupted.json"
"""In the run's folder from the end of a run that SIGTERM or SIGUSR1 ended to the start of the next. Launchers replace
the ranks' exit code by their own (torchrun: always 1), so this is what tells a scheduler to start the run again."""

_watched = False
_RESUME_VOTE = 1 << 20  # more than there are ranks, so that a sum of votes tells the two kinds apart


class StopRequest:
    """Whether this process was asked to stop, and by which signal first.

    Attributes:
        vote: a number to sum over the ranks and give to :func:`exit_code`; 0 without a request.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self.vote = 0

    def ask(self, number: int) -> None:
        """Note the signal that asks."""
        self.signal, self.vote = number, 1 if number == signal.SIGINT else _RESUME_VOTE

    def __bool__(self) -> bool:
        return self.signal is not None


def exit_code(votes: int) -> int:
    """Exit code of the ranks: 0 where none was asked to end, 130 after Ctrl-C alone, else EXIT_RESUME.

    Args:
        votes: sum of the ranks' :attr:`StopRequest.vote`.
    """
    return 0 if not votes else EXIT_INTERRUPTED if votes < _RESUME_VOTE else EXIT_RESUME


@contextlib.contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Collect SIGINT, SIGTERM and SIGUSR1 while the block runs; a second wish raises KeyboardInterrupt there and
    then, with the signal's number as its argument.

    A rank that waits in a collective runs no Python handler. So a thread of each rank reads the signals too, and ends
    it with 128 + the signal's number where the second wish has not ended it within PATIENCE seconds.
    Outside the main thread, where Python allows no handlers, nothing is collected.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    first_at = float("inf")

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal first_at
        if request.signal is None:
            request.ask(signal.SIGTERM if number == LAUNCHER_DIED else number)
            first_at = time.monotonic()
        elif number != LAUNCHER_DIED and time.monotonic() > first_at + SAME_WISH:
            raise KeyboardInterrupt(number)

    handled = SIGNALS if LAUNCHER_DIED is None else (*SIGNALS, LAUNCHER_DIED)
    before = {number: signal.signal(number, handle) for number in handled}
    try:
        with _ended_where_it_hangs() if "RANK" in os.environ else contextlib.nullcontext():
            yield request
    finally:
        for number, handler in before.items():
            if number == LAUNCHER_DIED and request and not callable(handler):
                handler = signal.SIG_IGN  # the launcher's other threads end later, and this process is about to
            signal.signal(number, handler or signal.SIG_DFL)  # None: it was not Python's


@contextlib.contextmanager
def _ended_where_it_hangs() -> Iterator[None]:
    """Have a thread read this process's signals while the block runs."""
    global _watched
    reader, writer = os.pipe()
    os.set_blocking(writer, False)  # as signal.set_wakeup_fd wants it
    watcher = threading.Thread(target=_end_at_the_second_wish, args=(reader,), name="signals", daemon=True)
    watcher.start()
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    _watched = True
    try:
        yield
    finally:
        _watched = False
        signal.set_wakeup_fd(before)
        os.write(writer, b"\0")  # not its end: a data loader's worker may hold it open
        watcher.join()
        os.close(writer)
        os.close(reader)


def _in_child() -> None:
    """A data loader's worker has the handlers too, so a signal to all leaves it alive; it must not tell its parent."""
    if _watched:
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_in_child)


def _end_at_the_second_wish(reader: int) -> None:
    """Read the numbers of this process's signals until a 0 comes."""
    first_at: float | None = None
    second_at: float | None = None
    number = 0
    while True:
        patience = None if second_at is None else max(0.0, second_at + PATIENCE - time.monotonic())
        if not select.select([reader], [], [], patience)[0]:
            os._exit(128 + number)
        arrived = os.read(reader, 1)[0]
        if not arrived:
            return
        now = time.monotonic()
        if arrived == LAUNCHER_DIED:
            first_at = first_at or now
        elif arrived in SIGNALS and second_at is None:
            number, first_at = arrived, first_at or now
            if now > first_at + SAME_WISH:
                second_at = now


def end_with_launcher() -> None:
    """Have the kernel say when the process that started this one dies: a rank saves as on SIGTERM, and is no orphan.

    A launcher passes on the signals that it knows, and dies of the others: SIGUSR1 kills torchrun and accelerate launch
    unless PET_SIGNALS_TO_HANDLE names it. Linux only; elsewhere nothing is done.
    """
    from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

    if LAUNCHER_DIED is not None:
        _prctl_pr_set_pdeathsig(LAUNCHER_DIED)


def leave_note(folder: Path, step: int) -> None:
    """Say in a run's folder that it was asked to stop, and can go on from the checkpoint of that step."""
    write_text(folder / NOTE, json.dumps({"step": step}) + "\n")


def remove_note(folder: Path) -> None:
    """The run has gone on."""
    (folder / NOTE).unlink(missing_ok=True)
