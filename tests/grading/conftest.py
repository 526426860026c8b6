"""A hall of learners with the toy exercises, and what grades them."""

import functools
from pathlib import Path

import numpy as np
import pytest

from course_lib.grading.runner import grade_source
from course_lib.grading.sandbox import Limits, Sandbox
from tests.grading.toys import toy_tasks

RIGHT = "def total(values):\n    return sum((i + 1) * x for i, x in enumerate(values))\n"
SPOILS = (
    "def total(values):\n    result = sum((i + 1) * x for i, x in enumerate(values))\n    values.clear()\n"
    "    return result\n"
)
WRONG = "def total(values):\n    return 0\n"
TELLS = "def total(values):\n    raise ValueError(f'<script>alert(1)</script> \\x07 \\x1b[31m \\ud800 {values}')\n"
TASKS = {task.name: task for task in (toy_tasks.TOTAL, toy_tasks.KEPT)}
HIDDEN = (
    'from course_lib.grading.task import Case\n\nDRAW = {name: lambda rng: [Case(1, {"values": [271828, '
    'rng.randrange(10**6, 10**7), 314159]})]\n        for name in ("toy.total", "toy.kept", "toy.mean")}\n'
)


def same(left, right):
    """Equal plain data of the same types, arrays with NaN included."""
    if isinstance(left, np.ndarray):
        alike = isinstance(right, np.ndarray) and left.dtype == right.dtype
        return alike and np.array_equal(left, right, equal_nan=left.dtype.kind == "f")
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and left == right


def points(task, source, may_raise=False):
    """By property, of an answer to one of the course's exercises."""
    verdict = grade_source(task, source, hidden=None, limits=Limits(), sandbox=Sandbox())
    assert may_raise or verdict.error is None or "failed in" in verdict.error, verdict
    return {name: score.points for name, score in verdict.scores.items()}


@pytest.fixture(scope="session")
def sandbox():
    return Sandbox(tasks="toy_tasks", folders=(Path(toy_tasks.__file__).parent,))


@pytest.fixture
def limits():
    """For answers that end by themselves, however busy the machine."""
    return Limits(seconds=200.0)


@pytest.fixture
def graded(sandbox, limits):
    """A function (source, **options): the verdict on an answer to the exercise in plain Python."""
    return functools.partial(grade_source, toy_tasks.TOTAL, hidden=None, limits=limits, sandbox=sandbox)


@pytest.fixture
def hall(tmp_path):
    """Submissions of seven learners, and an instructor's folder beside them."""
    hall = tmp_path / "hall"
    hall.mkdir()
    for name, source in {"anna": RIGHT, "berta": SPOILS, "carl": WRONG, "dora": TELLS, "=frieda": RIGHT}.items():
        (hall / f"{name}.py").write_text(source)
    (hall / "emil.ipynb").write_text("not a notebook")
    (hall / "nina" / "90_toys").mkdir(parents=True)
    (hall / "nina" / "90_toys" / "90_toys.py").write_text(RIGHT)
    (hall / "nina" / "90_toys" / "timestamp.txt").write_text("=HYPERLINK(1)")
    (tmp_path / "solutions" / "hidden").mkdir(parents=True)
    (tmp_path / "solutions" / "hidden" / "90_toys.py").write_text(HIDDEN)
    return hall
