"""The hidden cases, which stand in the instructor's ``solutions/hidden`` alone: one table `DRAW` per lesson."""

import importlib.util
import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from course_lib.errors import DataError
from course_lib.grading.task import Case, Task


def solutions_folder() -> Path:
    """The instructor's folder, beside the package.

    Raises:
        DataError: it is not there, as in a learner's copy.
    """
    folder = Path(__file__).resolve().parents[2] / "solutions"
    if not folder.is_dir():
        raise DataError(f"no folder {folder}", "hidden checks and solutions come with the instructor's copy")
    return folder


def load(path: Path) -> ModuleType:
    """A module of the instructor's, by its file.

    Raises:
        DataError: no such file.
    """
    if not path.is_file():
        raise DataError(f"no file {path}", "hidden checks and solutions come with the instructor's copy")
    spec = importlib.util.spec_from_file_location(f"solutions_{path.parent.name}_{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def hidden_cases(task: Task, rng: random.Random, folder: Path | None = None) -> list[Case]:
    """The hidden cases of ``task``, drawn from ``rng``; the solutions folder is by default the one beside the package.

    Raises:
        DataError: there are none for it.
    """
    path = (folder or solutions_folder()) / "hidden" / f"{task.lesson}.py"
    draw = load(path).DRAW
    if task.name not in draw:
        raise DataError(f"{path} has no hidden cases of {task.name}", "add them to its table DRAW")
    return draw[task.name](rng)


def grade(name: str, function: Callable[..., Any]) -> int:
    """In a hidden cell of a master: a function's points by the public and the hidden cases, the value of the cell."""
    from course_lib.grading.check import examine, task_of

    task = task_of(name)
    cases = [*task.cases(random.Random(0)), *hidden_cases(task, random.SystemRandom())]
    return examine(task, function, cases).points
