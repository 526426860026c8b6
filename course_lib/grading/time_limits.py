"""Time limits of a learner's code, counted in its work and not by the wall clock of a busy machine.

Two limits, each in a rank of its own process: `computing` bounds the CPU time that a process takes, and `IdleWatch` the
time in which no rank of a case computes, for then each waits for another.
"""

import contextlib
import os
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType

LOOK_SECONDS = 0.1
HARDLY = 0.1
"""Of the looks, at which a rank that waits may be found busy: gloo's threads look around themselves."""
LOOPS = "timed out: the function was still computing"
WAITS = "timed out: the function was still waiting, when no rank had computed for a while"
CAN_TELL = Path("/proc/self/task").is_dir()
"""Whether the system says what other processes do."""


@contextlib.contextmanager
def computing(seconds: float) -> Iterator[None]:
    """Interrupt the main thread once this process has computed for so long, as in a loop without an end."""
    with _interrupted_by(signal.SIGPROF, LOOPS, lambda: signal.setitimer(signal.ITIMER_PROF, 0)):
        signal.setitimer(signal.ITIMER_PROF, seconds)
        yield


@contextlib.contextmanager
def _interrupted_by(number: signal.Signals, said: str, end: Callable[[], object]) -> Iterator[None]:
    """Let a signal interrupt what runs inside; one that comes after that, before `end` has ended it, does nothing."""
    runs = True

    def late(number: int, frame: FrameType | None) -> None:
        if runs:
            raise TimeoutError(said)

    before = signal.signal(number, late)
    try:
        yield
    finally:
        runs = False
        end()
        signal.signal(number, before)


def sockets() -> set[int]:
    """The descriptors of this process's open sockets."""
    names = set()
    for name in os.listdir("/proc/self/fd") if CAN_TELL else ():
        with contextlib.suppress(OSError):  # the listing's own, closed again
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                names.add(int(name))
    return names


def computes(ranks: Sequence[tuple[int, int]]) -> bool:
    """Whether a thread of these processes runs, waits for a core, or for a disk.

    Args:
        ranks: of each its process, and the thread in it that does not count: its watch.
    """
    for pid, watch in ranks:
        for task in Path(f"/proc/{pid}/task").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended meanwhile
                if int(task.name) != watch and (task / "stat").read_text().rpartition(")")[2].split()[0] in "RD":
                    return True
    return False


class IdleWatch(threading.Thread):
    """Ends this rank's waits when hardly a look of the last so many seconds has found a rank of its case that computes.

    What it waits for in a collective or at a store fails, as the connections are closed; a sleep is interrupted.
    The looks are counted, not the time between them: on a busy machine they come late, as the ranks get on late.

    Args:
        seconds: without a rank that computes.
        theirs: descriptors of sockets that stay open.

    Attributes:
        has_ended_waits: whether it has; then all other sockets are closed.
    """

    def __init__(self, seconds: float, theirs: set[int]):
        super().__init__(daemon=True, name="course-idle-watch")
        self.most, self.theirs = max(1, round(seconds / LOOK_SECONDS)), theirs
        self.ranks: Sequence[tuple[int, int]] = ()
        self.over, self.deciding = threading.Event(), threading.Lock()
        self.has_ended_waits = False

    def run(self) -> None:
        answers: deque[bool] = deque(maxlen=self.most)
        while not self.over.wait(LOOK_SECONDS):
            if self.ranks:
                answers.append(computes(self.ranks))
            if len(answers) == self.most and sum(answers) <= HARDLY * self.most:
                self._end_waits()
                return

    def _end_waits(self) -> None:
        with self.deciding:
            if self.over.is_set():
                return
            self.has_ended_waits = True
            for descriptor in sockets() - self.theirs:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as ours:
                    ours.getpeername()  # not one that listens, whose end would end the process
                    ours.shutdown(socket.SHUT_RDWR)
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, signal.SIGALRM)

    @contextlib.contextmanager
    def watching(self, ranks: Sequence[tuple[int, int]]) -> Iterator[None]:
        """Watch over these processes (with their watches' threads) while this rank's function runs."""
        self.ranks = ranks
        with _interrupted_by(signal.SIGALRM, WAITS, self._end):
            yield

    def _end(self) -> None:
        with self.deciding:
            self.over.set()
