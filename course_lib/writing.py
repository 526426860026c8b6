"""Writes files that are never half there, parts of pages, and logs of JSON lines."""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO


@contextlib.contextmanager
def written_beside(path: str | Path) -> Iterator[TextIO]:
    """A UTF-8 file to write, beside ``path``; flushed to disk and renamed at the end: it is never half there."""
    with _beside(path, "w", "utf-8") as out:
        yield out


@contextlib.contextmanager
def _beside(path: str | Path, mode: str, encoding: str | None = None) -> Iterator[Any]:
    path = Path(path)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, mode, encoding=encoding) as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_text(path: str | Path, text: str) -> None:
    """Write a file beside its place, flush it to disk and rename it."""
    with written_beside(path) as out:
        out.write(text)


def write_bytes(path: str | Path, content: bytes) -> None:
    """The same for bytes."""
    with _beside(path, "wb") as out:
        out.write(content)


def write_part(path: Path, begin: str, end: str, part: str) -> None:
    """Put text between two marks of a page, and leave the rest as it is.

    Args:
        path: of the page.
        begin: the mark before it, which the page has once.
        end: the mark after it, likewise.
        part: to stand there, on lines of its own.

    Raises:
        ValueError: a mark is missing, or stands there twice; the page stays as it was.
    """
    page = path.read_text(encoding="utf-8")
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(end) < page.index(begin):
        raise ValueError(f"{path.name} needs one {begin} and, after it, one {end}")
    before, _, rest = page.partition(begin)
    write_text(path, f"{before}{begin}\n{part}\n{end}{rest.partition(end)[2]}")


class JsonLines:
    """A log of one JSON object a line, each with the ``step`` that it belongs to, or with none.

    A line is with the system when :meth:`append` returns, so that a process that is killed loses none; it is not
    flushed to the disk, and of a machine that goes down the last lines may be missing, or one half there.

    Args:
        path: in a folder that exists.
    """

    def __init__(self, path: Path):
        self.path = path

    def append(self, entry: Mapping[str, Any]) -> None:
        """Write a line at the end."""
        with self.path.open("a", encoding="utf-8") as out:
            out.write(json.dumps(entry, ensure_ascii=False) + "\n")

    def cut(self, step: int) -> None:
        """Drop what belongs to later steps, or is half there, before a run goes on from this one."""
        if self.path.exists():
            kept = [
                line
                for line in self.path.read_text(encoding="utf-8").splitlines(keepends=True)
                if line.endswith("\n") and (json.loads(line).get("step") or 0) <= step
            ]
            write_text(self.path, "".join(kept))
