"""Reads answers from what learners handed in: notebooks, .py files, zips, folders.

Nothing is executed, extracted to disk or followed: a file is opened once, must be an ordinary one, and is read up to a
limit; a zip is looked through before a byte of it is unpacked. What cannot be read is a problem of its learner, told in
the report, and stops nobody else.
"""

import hashlib
import io
import json
import os
import re
import stat
import struct
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from course_lib.errors import CourseError
from course_lib.grading.cells import Cell, python_of
from course_lib.grading.task import Task
from course_lib.grading.verdict import printable

MAX_NOTEBOOK = 10 << 20  # bytes; parsed, JSON takes up to forty times its length
MAX_SCRIPT = 1 << 20
MAX_ZIP = 50 << 20
MAX_UNPACKED = 100 << 20  # bytes of all members
MAX_MEMBERS = 2000
MAX_DIRECTORY = 1 << 20  # bytes of a zip's table of contents
MAX_FILES = 100_000
KINDS = (".ipynb", ".py", ".zip")
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


@dataclass(frozen=True)
class _File:
    """A file of a submission: whose, where, and its bytes on demand."""

    learner: str
    where: str
    lesson: str
    data: bytes | None
    problem: str = ""


def read_submissions(paths: Sequence[Path], tasks: Mapping[str, Task]) -> list[Submission]:
    """Everybody's answers, by learner.

    A file directly in a given folder is its learner's name, unless it is named as a lesson is: then the folder is. In
    folders below, the first folder's name is the learner's, as in nbgrader's ``submitted/LEARNER/LESSON/x.ipynb``. A
    zip is one learner's, unless it is given by itself and holds a folder (or a file) per learner.

    Raises:
        CourseError: a path that does not exist, or nothing to grade in any.
    """
    lessons = {task.lesson for task in tasks.values()}
    by_learner: dict[str, Submission] = {}
    for path in paths:
        if not path.exists():
            raise CourseError(f"no submission {path}", "give a notebook, a .py file, a zip or a folder of them")
        for file in _files(path, lessons):
            submission = by_learner.setdefault(file.learner, Submission(file.learner))
            if file.problem:
                submission.problems.append(printable(f"{file.where}: {file.problem}"))
            elif file.data is not None:
                _take(submission, file, tasks)
    if not by_learner:
        raise CourseError(f"nothing to grade in {', '.join(map(str, paths))}", f"looked for {', '.join(KINDS)}")
    return [by_learner[learner] for learner in sorted(by_learner)]


def _take(submission: Submission, file: _File, tasks: Mapping[str, Task]) -> None:
    assert file.data is not None
    if file.where.endswith("timestamp.txt"):
        submission.stamps[file.lesson] = printable(file.data.decode(errors="replace").strip()[:40])
        return
    try:
        answers, skipped = answers_in(file.where, file.data, tasks)
    except Unreadable as error:
        submission.problems.append(printable(f"{file.where}: {error}"))
        return
    submission.problems += [printable(f"{file.where}: {said}") for said in skipped]
    for name, source in answers.items():
        if name in submission.answers:
            counts = submission.files[name]
            submission.problems.append(printable(f"{file.where}: {name} is in {counts} too, which counts"))
        else:
            submission.answers[name], submission.files[name] = source, file.where


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


def _files(path: Path, lessons: set[str]) -> Iterator[_File]:
    """The files under a given path, each with its learner."""
    if not path.is_dir():
        yield from _open(
            path,
            learner_id(path.stem if path.stem not in lessons else path.resolve().parent.name),
            path.name,
            path.stem,
            lessons,
            alone=True,
        )
        return
    for count, file in enumerate(_walk(path)):
        if count > MAX_FILES:
            raise CourseError(f"more than {MAX_FILES} files in {path}", "give the folder of the submissions alone")
        parts = file.relative_to(path).parts
        learner, lesson = _owner(parts, path.resolve().name, lessons)
        yield from _open(file, learner, "/".join(parts), lesson, lessons)


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
            if name.endswith(KINDS) or name == "timestamp.txt":
                yield Path(root, name)


def _open(file: Path, learner: str, where: str, lesson: str, lessons: set[str], alone: bool = False) -> Iterator[_File]:
    """A file as it is, or the members of a zip."""
    if file.suffix not in KINDS and file.name != "timestamp.txt":
        yield _File(learner, where, lesson, None, f"is none of {', '.join(KINDS)}")
        return
    try:
        data = _read(file, {".zip": MAX_ZIP, ".ipynb": MAX_NOTEBOOK}.get(file.suffix, MAX_SCRIPT))
        if file.suffix != ".zip":
            yield _File(learner, where, lesson, data)
            return
        members = unpacked(data)
    except Unreadable as error:
        yield _File(learner, where, lesson, None, str(error))
        return
    shared = _of_several([name for name, _ in members], lessons) if alone else False
    for name, content in members:
        whose, lesson = _owner(name.split("/"), learner, lessons)
        yield _File(whose if shared else learner, f"{where}/{name}", lesson, content)


def _of_several(names: Sequence[str], lessons: set[str]) -> bool:
    """Whether a zip is of a class, not of one learner: several folders, or several files that no lesson is named as."""
    folders = {name.split("/")[0] for name in names if "/" in name}
    files = {PurePosixPath(name).stem for name in names if "/" not in name}
    if folders == {"submitted"}:
        return True
    return (len(folders) > 1 and not files) or (len(files) > 1 and not folders and not files & lessons)


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


def unpacked(data: bytes) -> list[tuple[str, bytes]]:
    """The notebooks and scripts in a zip, after all of it has been looked through.

    Raises:
        Unreadable: no zip, or one with a path that leaves it, a link, or more than it should hold.
    """
    end = data.rfind(b"PK\5\6")
    if end < 0 or end + 22 > len(data) or struct.unpack_from("<I", data, end + 12)[0] > MAX_DIRECTORY:
        raise Unreadable("is not a zip, or has too long a table of contents")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
            _look_through(members)
            return [
                (member.filename, _member(archive, member))
                for member in members
                if not member.is_dir() and _wanted(member.filename)
            ]
    except Unreadable:
        raise
    except Exception as error:  # zipfile and the decompressors raise a dozen kinds
        raise Unreadable(f"is a damaged zip ({type(error).__name__})") from None


def _wanted(name: str) -> bool:
    path = PurePosixPath(name)
    return path.suffix in (".ipynb", ".py") and not any(part.startswith((".", "__")) for part in path.parts)


def _look_through(members: Sequence[Any]) -> None:
    if len(members) > MAX_MEMBERS:
        raise Unreadable(f"has {len(members)} members, the limit is {MAX_MEMBERS}")
    if sum(member.file_size for member in members) > MAX_UNPACKED:
        raise Unreadable(f"unpacks to more than {MAX_UNPACKED >> 20} MiB")
    for member in members:
        path = PurePosixPath(member.filename)
        if path.is_absolute() or ".." in path.parts or "\\" in member.filename or ":" in member.filename:
            raise Unreadable("has a member outside its own folder")
        if stat.S_ISLNK(member.external_attr >> 16):
            raise Unreadable("has a link in it")
        if member.flag_bits & 1:
            raise Unreadable("is encrypted")


def _member(archive: Any, member: Any) -> bytes:
    most = MAX_NOTEBOOK if member.filename.endswith(".ipynb") else MAX_SCRIPT
    with archive.open(member) as opened:
        data = opened.read(most + 1)
    if len(data) > most:
        raise Unreadable(f"has a member of more than {most >> 20} MiB")
    return data
