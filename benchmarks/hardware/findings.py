"""Findings of a hardware section: tables, notes, failures and skipped parts, written as they come."""

import contextlib
import json
import re
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
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
    seconds: float = inf
    """That a section may take."""

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
        seconds: after which the section will be ended.
    """

    def __init__(self, path: Path, seconds: float = inf):
        self.path, self.until = path, time.monotonic() + seconds
        self.longest = 0.0
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

    def is_late(self, what: str) -> bool:
        """Whether there is too little time for one more block like the longest so far; then ``what`` is left out."""
        late = time.monotonic() + 1.2 * self.longest > self.until
        if late:
            self.leave_out(what, "its share of --minutes is over")
        return late

    @contextlib.contextmanager
    def trying(self, what: str) -> Iterator["Attempt"]:
        """Run a block; what it raises is a failure in the report, with its traceback in the log."""
        attempt = Attempt()
        print(f"--- {what}", flush=True)
        start = time.perf_counter()
        try:
            yield attempt
        except Exception as error:
            traceback.print_exc()
            if lacking := missing(error):
                attempt.word = "not run"
                self.leave_out(what, lacking)
            else:
                self.fail(what, f"{type(error).__name__}: {error}")
        else:
            attempt.succeeded, attempt.word = True, "ok"
        finally:
            attempt.seconds = time.perf_counter() - start
            self.longest = max(self.longest, attempt.seconds)

    def write(self) -> None:
        """Put all of it on the disk."""
        parts = [part if isinstance(part, str) else part.rows for part in self.parts]
        write_text(self.path, json.dumps({"parts": parts, "failures": self.failures, "left_out": self.left_out}))


class Attempt:
    """How a block of :meth:`Findings.trying` went."""

    succeeded = False
    seconds = 0.0
    word = "FAILED"
    """For a cell of a table: ``ok``, ``FAILED``, or ``not run`` for want of a package."""


def missing(error: BaseException) -> str:
    """``X is not installed``, where that is the error, or a rank's error behind it; empty for every other error.

    Modules of this checkout are no packages: one that is not found is a defect.
    """
    each: BaseException | None = error
    while each and not isinstance(each, ModuleNotFoundError):
        each = each.__cause__
    package = (each.name or "").partition(".")[0] if each else ""
    return f"{package} is not installed" if package not in ("", "course_lib", "benchmarks", "testing", "tests") else ""


def failed(said: str, why: str) -> Exception:
    """Of a program of ours that ended badly: the package that it found missing, or why else it failed.

    Args:
        said: by the program.
        why: in one line.
    """
    lacking = re.search(r"No module named '?([\w.]+)|needs (\w+), which is not installed", said)
    return ModuleNotFoundError(why, name=lacking[1] or lacking[2]) if lacking else RuntimeError(why)


def first_line(text: str) -> str:
    """The first line that says something, of at most 300 characters."""
    return next((line.strip()[:300] for line in text.splitlines() if line.strip()), "no message")
