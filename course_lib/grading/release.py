"""The learners' bundle: the course without the folder solutions/, its exercises made anew from the masters."""

import shutil
import tempfile
from pathlib import Path

from course_lib.errors import ConfigError, DataError
from course_lib.grading import masters

BUNDLED = (
    "course_lib",
    "notebooks",
    "configs",
    "docs",
    "requirements",
    "tools/bootstrap.py",
    "README.md",
    "pyproject.toml",
    "constraints.txt",
    "environment.yml",
    "Makefile",
    "LICENSE",
    "NOTICE",
    "exercises/README.md",
)
"""What learners get besides the exercises, from the course's own folder."""
SECRET = ("### BEGIN SOLUTION", "### BEGIN HIDDEN TESTS")


def bundle(course: Path, out: Path) -> list[Path]:
    """Write the learners' bundle, all of it or nothing.

    Args:
        course: folder of the course, with solutions/.
        out: to be made; may be there if it is empty.
    Returns:
        The exercises written.
    Raises:
        ConfigError: ``out`` is in use, or lies within the course.
        DataError: a part of the course is missing.
    """
    out, course = out.resolve(), course.resolve()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is in use", "name a new folder")
    if out.is_relative_to(course / "course_lib") or out.is_relative_to(course / "notebooks"):
        raise ConfigError(f"{out} lies within what is to be copied", "name a folder outside the course")
    missing = [name for name in BUNDLED if not (course / name).exists()]
    if missing:
        raise DataError(f"{course} has no {', '.join(missing)}", "run it in a clone of the course")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
        inside = Path(folder) / out.name
        for name in BUNDLED:
            _copy(course / name, inside / name)
        written = masters.release(course / "solutions", inside / "exercises")
        for path in written:
            if any(mark in path.read_text(encoding="utf-8") for mark in SECRET):
                raise DataError(f"{path.name} would give a solution or a hidden check away", "look at its marks")
        if out.exists():
            out.rmdir()
        inside.rename(out)
    return [out / "exercises" / path.name for path in written]


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints", "*.pyc"))
    else:
        shutil.copy2(source, target)
