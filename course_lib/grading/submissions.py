"""Reads answers from what learners handed in: notebooks, .py files, folders of them.

Nothing is executed or followed: a file is opened once, must be an ordinary one, and is read up to a limit. What cannot
be read is a problem of its learner, told in the report, and stops nobody else.
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from course_lib.errors import CourseError
from course_lib.grading.cells import Cell, python_of
from course_lib.grading.task import Task
from course_lib.grading.verdict import printable

MAX_NOTEBOOK = 10 << 20  # bytes; parsed, JSON takes up to forty times its length
MAX_SCRIPT = 1 << 20
MAX_FILES = 100_000
KINDS = (".ipynb", ".py")
STAMP = "timestamp.txt"
"""What nbgrader leaves beside a submission."""
_BAD_ID = re.compile(r"[^\w @.+-]+")


@dataclass
class Submission:
    """Submission of one learner.

    Attributes:
        learner: from the file's or the folder's name.
        answers: text of the answer by task.
        files: where each answer was found.
        problems: what was not read, and why.
        stamps: by lesson, the line in nbgrader's timestamp.txt.
    """

    learner: str
    answers: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    stamps: dict[str, str] = field(default_factory=dict)


class Unreadable(Exception):
    """A file of a submission that is not read, and why."""


def read_submissions(paths: Sequence[Path], tasks: Mapping[str, Task]) -> list[Submission]:
    """Everybody's answers, by learner.

    A file directly in a given folder is its learner's name, unless it is named as a lesson is: then the folder is. In
    folders below, the first folder's name is the learner's, as in nbgrader's ``submitted/LEARNER/LESSON/x.ipynb``.

    Raises:
        CourseError: a path that does not exist, or nothing to grade in any.
    """
    lessons = {task.lesson for task in tasks.values()}
    by_learner: dict[str, Submission] = {}
    for path in paths:
        if not path.exists():
            raise CourseError(f"no submission {path}", "give a notebook, a .py file or a folder of them")
        for file, learner, lesson in _files(path, lessons):
            submission = by_learner.setdefault(learner, Submission(learner))
            where = file.relative_to(path).as_posix() if path.is_dir() else file.name
            try:
                _take(submission, file, where, lesson, tasks)
            except Unreadable as error:
                submission.problems.append(printable(f"{where}: {error}"))
    if not by_learner:
        raise CourseError(f"nothing to grade in {', '.join(map(str, paths))}", f"looked for {', '.join(KINDS)}")
    return [by_learner[learner] for learner in sorted(by_learner)]


def _take(submission: Submission, file: Path, where: str, lesson: str, tasks: Mapping[str, Task]) -> None:
    """Add what one file holds."""
    if file.suffix == ".zip":
        raise Unreadable("is a zip: unpack it first")
    if file.suffix not in KINDS and file.name != STAMP:
        raise Unreadable(f"is none of {', '.join(KINDS)}")
    data = _read(file, MAX_NOTEBOOK if file.suffix == ".ipynb" else MAX_SCRIPT)
    if file.name == STAMP:
        submission.stamps[lesson] = printable(data.decode(errors="replace").strip()[:40])
        return
    answers, skipped = answers_in(where, data, tasks)
    submission.problems += [printable(f"{where}: {said}") for said in skipped]
    for name, source in answers.items():
        if name in submission.answers:
            counts = submission.files[name]
            submission.problems.append(printable(f"{where}: {name} is in {counts} too, which counts"))
        else:
            submission.answers[name], submission.files[name] = source, where


def answers_in(name: str, data: bytes, tasks: Mapping[str, Task]) -> tuple[dict[str, str], list[str]]:
    """The texts of the answers in one notebook or script, by task, as Python; and what of them is IPython's alone.

    Of a notebook, the cells that nbgrader marks as a task's solution, in their order; of a script, all of it for each
    task whose function it defines.

    Raises:
        Unreadable: it is neither.
    """
    if name.endswith(".py"):
        script = python_of(_text(data))
        return {
            task.name: _functions_of(script.text)
            for task in tasks.values()
            if re.search(rf"^(class|def|async def) {task.function}\b", script.text, re.MULTILINE)
            or re.search(rf"^{task.function}\s*=", script.text, re.MULTILINE)
        }, list(script.skipped)
    try:
        cells = json.loads(_text(data))["cells"]
        names = {task.grade_id: task.name for task in tasks.values()}
        by_task: dict[str, list[Cell]] = {}
        for cell in cells:
            marks = cell.get("metadata", {}).get("nbgrader", {})
            if cell.get("cell_type") == "code" and marks.get("solution") and marks.get("grade_id") in names:
                source = cell.get("source", "")
                by_task.setdefault(names[marks["grade_id"]], []).append(
                    python_of(source if isinstance(source, str) else "".join(source))
                )
    except RecursionError:
        raise Unreadable("is nested too deeply for a notebook") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Unreadable("is not a notebook of format 4: open it in Jupyter and save it again") from None
    return (
        {name: "\n\n".join(cell.text for cell in cells) for name, cells in by_task.items()},
        [f"{name}: {said}" for name, cells in by_task.items() for cell in cells for said in cell.skipped],
    )


def _functions_of(text: str) -> str:
    """A script's text without its last lines, from ``if __name__ == "__main__"`` on, which are not for the grader."""
    return re.split(r"^if __name__ *== *[\"']__main__[\"'] *:", text, maxsplit=1, flags=re.MULTILINE)[0]


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unreadable(f"is not UTF-8 (byte {error.start}): save it as UTF-8") from None


def _files(path: Path, lessons: set[str]) -> Iterator[tuple[Path, str, str]]:
    """The files under a given path, each with its learner and its lesson."""
    if not path.is_dir():
        yield path, learner_id(path.stem if path.stem not in lessons else path.resolve().parent.name), path.stem
        return
    for count, file in enumerate(_walk(path)):
        if count > MAX_FILES:
            raise CourseError(f"more than {MAX_FILES} files in {path}", "give the folder of the submissions alone")
        yield file, *_owner(file.relative_to(path).parts, path.resolve().name, lessons)


def _owner(parts: Sequence[str], root: str, lessons: set[str]) -> tuple[str, str]:
    """The learner and the lesson of a file, by its path below the folder ``root``."""
    if parts[0] == "submitted" and len(parts) > 1:
        parts = parts[1:]
    stem = PurePosixPath(parts[-1]).stem
    lesson = next((part for part in (*parts[:-1], stem) if part in lessons), stem)
    if len(parts) > 1 and parts[0] not in lessons:
        return learner_id(parts[0]), lesson
    return learner_id(root if len(parts) > 1 or stem in lessons else stem), lesson


def learner_id(name: str) -> str:
    """A name that is safe as part of a file's name, in a table and on a page."""
    safe = _BAD_ID.sub("_", name).lstrip(" .+-@").strip()[:80]
    if safe and safe == name:
        return name
    return f"{safe or 'unnamed'}-{hashlib.sha256(name.encode(errors='replace')).hexdigest()[:6]}"


def _walk(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder, followlinks=False):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__")))
        for name in sorted(names):
            if name.endswith((*KINDS, ".zip")) or name == STAMP:
                yield Path(root, name)


def _read(file: Path, most: int) -> bytes:
    """An ordinary file's bytes.

    Raises:
        Unreadable: a link, a pipe, or too large.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        reason = "is a link, which is not followed" if file.is_symlink() else f"cannot be read ({error.strerror})"
        raise Unreadable(reason) from None
    with os.fdopen(descriptor, "rb") as opened:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise Unreadable("is not an ordinary file")
        if about.st_size > most:
            raise Unreadable(f"has {about.st_size >> 20} MiB, the limit is {most >> 20}: clear its outputs")
        return opened.read(most)
