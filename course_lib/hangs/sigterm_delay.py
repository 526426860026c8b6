"""A moment between SIGTERM and the end, in which a rank can say what it saw.

A launcher that sees one rank die ends the others within a tenth of a second. Python runs a handler only between two
instructions of the main thread, which may hang in a collective; so a thread asks whether a signal has come.
"""

import contextlib
import os
import signal
import threading
import time
from types import FrameType

_active: "SigtermDelay | None" = None


class SigtermDelay:
    """Holds SIGTERM back while it is in force; where something else handles the signal, it leaves it alone.

    That may also begin to handle it later: a script that saves a checkpoint then.
    """

    def __init__(self) -> None:
        self._came_at: float | None = None
        self._reader = -1

    def start(self) -> None:
        """Called on the main thread; on another, nothing is held back."""
        global _active
        if (
            threading.current_thread() is not threading.main_thread()
            or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        ):
            return
        self._reader, self._writer = os.pipe()
        for end in (self._reader, self._writer):
            os.set_blocking(end, False)
        self._before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, _wait)
        _active = self

    def stop(self) -> None:
        """Let SIGTERM end the process again; at once, if it has come."""
        global _active
        if self._reader < 0:
            return
        self.seconds()
        if signal.getsignal(signal.SIGTERM) is _wait:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(self._before)
        os.close(self._reader)
        os.close(self._writer)
        self._reader, _active = -1, None
        if self._came_at is not None:
            os.kill(os.getpid(), signal.SIGTERM)

    def seconds(self) -> float:
        """Since SIGTERM came; 0 where it has not, or is for another handler."""
        if signal.getsignal(signal.SIGTERM) is not _wait:
            return 0.0
        with contextlib.suppress(BlockingIOError):
            if self._reader >= 0 and signal.SIGTERM in os.read(self._reader, 4096) and self._came_at is None:
                self._came_at = time.monotonic()
        return 0.0 if self._came_at is None else time.monotonic() - self._came_at


def _wait(number: int, frame: FrameType | None) -> None:
    """The handler: whoever holds the delay ends the process."""


def _in_child() -> None:
    """A data loader's worker ends at SIGTERM, and must not tell its parent."""
    if _active is not None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_in_child)
