"""A learner's answers and solved exercises: two small JSON files, beside the notebooks and beside the exercises.

``notebooks/my_answers.json`` holds ``{lesson: {question: {"value", "when", "measured", "close", ...}}}``, and
``exercises/my_results.json`` holds ``{exercise: {"points", "of", "when"}}``.
"""

import contextlib
import datetime
import fcntl
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from course_lib.errors import DataError
from course_lib.writing import write_text


class LearnerFile:
    """A JSON file of objects in objects, changed as a whole and never half written.

    Args:
        path: it need not exist.
        depth: how many objects lie inside each other: 3 for answers (lessons, questions, an answer), 2 for results.
    """

    def __init__(self, path: Path, depth: int):
        self.path, self.depth = path, depth

    def read(self) -> dict[str, Any]:
        """Content of the file; empty where there is no file.

        Raises:
            DataError: the file cannot be read, or holds something else.
        """
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise DataError(f"cannot read {self.path}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise DataError(f"{self.path} is damaged: it is not UTF-8", "mend it, or move it away") from None
        except json.JSONDecodeError as error:
            raise DataError(
                f"{self.path} is damaged: {error.msg} in line {error.lineno}", "mend it, or move it away"
            ) from None
        if not _is_nested(content, self.depth):
            raise DataError(
                f"{self.path} is damaged: it is JSON, but not what this course writes", "mend it, or move it away"
            )
        return content

    def change(self, edit: Callable[[dict[str, Any]], None]) -> str:
        """Read, edit and write the file, while no other notebook does.

        Returns:
            Where a damaged file was kept aside, as a line for the learner; else empty.
        Raises:
            DataError: the file cannot be read or written.
        """
        try:
            with _locked(self.path.parent):
                aside = self.set_aside()
                content = self.read()
                edit(content)
                write_text(self.path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        except OSError as error:
            raise DataError(f"cannot write {self.path}: {error.strerror}") from None
        return aside

    def set_aside(self) -> str:
        """Rename the file if it is damaged, so that nothing overwrites it; gives a line that says so, or nothing."""
        try:
            self.read()
        except DataError as error:
            if "damaged" not in error.what:
                raise
            kept = next(
                path
                for number in range(1, 1000)
                if not (path := self.path.with_name(f"{self.path.stem}.damaged-{number}.json")).exists()
            )
            os.replace(self.path, kept)
            return f"{error.what}; it was kept as {kept.name}, and a new file begins"
        return ""


def _is_nested(content: Any, depth: int) -> bool:
    return isinstance(content, dict) and (depth == 1 or all(_is_nested(inner, depth - 1) for inner in content.values()))


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems know no locks; one notebook at a time needs none
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def answers_file(folder: Path | None = None) -> LearnerFile:
    """The learner's answers: ``$COURSE_ANSWERS``, or ``my_answers.json`` in a folder, or beside this notebook."""
    return LearnerFile(_path("COURSE_ANSWERS", "my_answers.json", folder), depth=3)


def results_file(folder: Path | None = None) -> LearnerFile:
    """Last results of checks: ``$COURSE_RESULTS``, or ``my_results.json`` in a folder, or beside this notebook."""
    return LearnerFile(_path("COURSE_RESULTS", "my_results.json", folder), depth=2)


def _path(variable: str, name: str, folder: Path | None) -> Path:
    if given := os.environ.get(variable):
        return Path(given)
    return (folder or notebook_folder()) / name


def notebook_path() -> Path | None:
    """The notebook that runs, as its server or VS Code tells the kernel; None where nobody does, as under papermill."""
    if name := os.environ.get("JPY_SESSION_NAME"):
        return Path(name)
    name = getattr(_shell(), "user_ns", {}).get("__vsc_ipynb_file__")
    return Path(name) if name else None


def notebook_folder() -> Path:
    """The folder of the notebook that runs, which is the kernel's working directory where nobody names it."""
    path = notebook_path()
    return path.parent if path and path.is_absolute() and path.parent.is_dir() else Path.cwd()


def lesson_name() -> str | None:
    """The lesson that runs: ``$COURSE_LESSON``, or the notebook's name without its ending."""
    path = notebook_path()
    return os.environ.get("COURSE_LESSON") or (path.stem if path else None)


def is_live() -> bool:
    """Whether a person sits before this kernel: nbclient (papermill, nbconvert) asks for cells without any input."""
    return bool(getattr(getattr(_shell(), "kernel", None), "_allow_stdin", False))


def _shell() -> Any:
    """IPython's shell, where IPython is what runs us."""
    shell = sys.modules.get("IPython.core.interactiveshell")
    return shell.InteractiveShell._instance if shell else None


def now() -> str:
    """The time to the second, with its zone."""
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")
