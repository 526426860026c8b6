"""What a section found: tables and notes, what failed, what was not run. Written down as it comes."""

import contextlib
import json
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from course_lib.writing import write_text


@dataclass(frozen=True)
class Settings:
    """What a run of ``make gpu`` is to do, the same for all sections."""

    gpus: int
    """GPUs that are used: all that are visible."""
    name: str
    """Of the first of them."""
    memory: int
    """Bytes of the smallest."""
    bf16: bool
    """They multiply bf16 in hardware."""
    full: bool = False
    """Everything, however long it takes."""
    tiny: bool = False
    """As little as shows that a section works."""
    simulated: bool = False
    """The device is tests/gpu_sim's."""
    folder: str = ""
    """For what the sections leave to each other; gone at the end."""

    @property
    def counted(self) -> str:
        """``1 GPU``, ``2 GPUs``."""
        return f"{self.gpus} GPU{'s' if self.gpus > 1 else ''}"

    def room(self, name: str) -> Path:
        """A folder of a section, made where it is missing."""
        path = Path(self.folder) / name
        path.mkdir(parents=True, exist_ok=True)
        return path


class Table:
    """Rows of a Markdown table, in a section's findings."""

    def __init__(self, findings: "Findings", header: tuple[str, ...]):
        self.findings, self.rows = findings, [list(header)]

    def row(self, *cells: Any) -> None:
        """Add a row, as wide as the header."""
        assert len(cells) == len(self.rows[0]), f"{len(cells)} cells under {self.rows[0]}"
        self.rows.append([str(cell) for cell in cells])
        self.findings.write()


class Findings:
    """What a section found. Each addition is on the disk at once: a section that is ended leaves what it has.

    Args:
        path: the JSON file to write.
    """

    def __init__(self, path: Path):
        self.path = path
        self.parts: list[str | Table] = []
        self.failures: list[tuple[str, str]] = []
        self.left_out: list[tuple[str, str]] = []
        self.write()

    def note(self, text: str) -> None:
        """A paragraph."""
        self.parts.append(text)
        self.write()

    def table(self, *header: str) -> Table:
        """A table with these columns, still without rows."""
        table = Table(self, header)
        self.parts.append(table)
        self.write()
        return table

    def fail(self, what: str, why: str) -> None:
        """Something did not do what it should; ``why`` in one line."""
        print(f"FAILED {what}: {why}", flush=True)
        self.failures.append((what, first_line(why)))
        self.write()

    def leave_out(self, what: str, why: str) -> None:
        """Something was not run, and the reason."""
        self.left_out.append((what, why))
        self.write()

    @contextlib.contextmanager
    def trying(self, what: str) -> Iterator["Attempt"]:
        """Run a block; what it raises is a failure in the report, with its traceback in the log."""
        attempt = Attempt()
        print(f"--- {what}", flush=True)
        start = time.perf_counter()
        try:
            yield attempt
            attempt.succeeded = True
        except Exception as error:
            traceback.print_exc()
            self.fail(what, f"{type(error).__name__}: {error}")
        finally:
            attempt.seconds = time.perf_counter() - start

    def write(self) -> None:
        """Put all of it on the disk."""
        parts = [part if isinstance(part, str) else part.rows for part in self.parts]
        write_text(self.path, json.dumps({"parts": parts, "failures": self.failures, "left_out": self.left_out}))


class Attempt:
    """How a block of :meth:`Findings.trying` went."""

    succeeded = False
    seconds = 0.0

    @property
    def word(self) -> str:
        """For a cell of a table."""
        return "ok" if self.succeeded else "FAILED"


def first_line(text: str) -> str:
    """The first line that says something, of at most 300 characters."""
    return next((line.strip()[:300] for line in text.splitlines() if line.strip()), "no message")
