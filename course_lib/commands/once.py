"""A mistake that every rank of a launch makes is said by one of them."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from course_lib.replacing import environment

SAID = "COURSE_SAID"
"""Environment variable of ranks that the course starts: a file that the first to speak makes."""


@contextlib.contextmanager
def said_once() -> Iterator[None]:
    """Of the ranks that are started within it one speaks up."""
    with tempfile.TemporaryDirectory(prefix="course-") as folder, environment({SAID: str(Path(folder) / "said")}):
        yield


def is_first() -> bool:
    """Whether no other rank has asked before; always where the launcher is another."""
    path = os.environ.get(SAID)
    try:
        if path:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
