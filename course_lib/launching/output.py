"""Shows what ranks print, line by line, each line labelled with its rank."""

import codecs
import multiprocessing
import os
import re
import sys
import threading
import time
from collections import deque
from multiprocessing.connection import Connection

# Escape codes that move the cursor or clear: they make no sense once lines of several ranks are mixed. Colours stay.
_CURSOR = re.compile(r"\x1b\[[0-9;?]*[A-HJKSTfhl]")

_REDRAW_SECONDS = 1.0


class LabelledOutput:
    """Turns each rank's raw output into lines such as `[rank 1] loss 0.42` on this process's sys.stdout.

    A line that carriage returns rewrite (a progress bar) is shown in its last state. Before it is finished it is
    redrawn in place at most once a second, on a terminal and in a Jupyter notebook only.

    Args:
        num_processes: number of ranks.
        show: False reads the output and drops it.

    Attributes:
        dropped: by rank, the last five lines of those that were not shown.
    """

    def __init__(self, num_processes: int, show: bool = True):
        self._show = show
        self.dropped: list[deque[str]] = [deque(maxlen=5) for _ in range(num_processes)]
        self._decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in range(num_processes)]
        self._unfinished = [""] * num_processes
        self._last_redraw = time.monotonic()
        self._drawn = 0  # columns that an unfinished line takes on the screen

    def feed(self, rank: int, data: bytes) -> None:
        """Take the next bytes of a rank; show the lines that they finish."""
        text = _CURSOR.sub("", self._unfinished[rank] + self._decoders[rank].decode(data))
        *lines, rest = text.split("\n")
        # Of a line under rewriting only the last state matters; the mark says that it is one.
        self._unfinished[rank] = "\r" + _last_state(rest) if "\r" in rest else rest
        for line in lines:
            self._write(rank, line, end="\n")
        if "\r" in rest and self._show and _is_live() and time.monotonic() - self._last_redraw >= _REDRAW_SECONDS:
            self._write(rank, rest, end="")
            self._last_redraw = time.monotonic()

    def finish(self) -> None:
        """Show the lines that never ended."""
        for rank, rest in enumerate(self._unfinished):
            if rest.strip():
                self._write(rank, rest, end="\n")
        self._unfinished = [""] * len(self._unfinished)

    def _write(self, rank: int, line: str, end: str) -> None:
        if not self._show:
            self.dropped[rank].append(_last_state(line))
            return
        text = f"[rank {rank}] {_last_state(line)}".rstrip()
        over = "\r" if self._drawn or not end else ""
        sys.stdout.write(over + text.ljust(self._drawn) + end)
        sys.stdout.flush()
        self._drawn = 0 if end else len(text)


class PassedOn:
    """A pipe for a process that does not share the caller's sys.stdout; what it writes there is shown on it.

    Leave the block when that process has ended. Processes that it left running may hold the pipe open: they are not
    waited for, and what they write later is not shown.
    """

    END = b"\0"

    def __enter__(self) -> Connection:
        self._ending = False
        self._reader, self._writer = multiprocessing.Pipe(duplex=False)
        self._thread = threading.Thread(target=self._pass_on, daemon=True, name="course-output")
        self._thread.start()
        return self._writer

    def __exit__(self, *_: object) -> None:
        self._ending = True
        os.write(self._writer.fileno(), self.END)
        self._thread.join()
        self._writer.close()
        self._reader.close()

    def _pass_on(self) -> None:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        data = b""
        while not (self._ending and data.endswith(self.END)):
            data = os.read(self._reader.fileno(), 65536)
            sys.stdout.write(decoder.decode(data.removesuffix(self.END)))
            sys.stdout.flush()


def _last_state(line: str) -> str:
    """What is left of a line after its carriage returns."""
    return next((state for state in reversed(line.split("\r")) if state), "")


def _is_live() -> bool:
    """True where a carriage return on sys.stdout redraws the line, rather than fill a file."""
    return sys.stdout.isatty() or type(sys.stdout).__module__.startswith("ipykernel")
