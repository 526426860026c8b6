"""Proof that the checks check: a stub earns nothing, the solution all, a planted answer loses what it should.

Planted answers live in ``solutions/planted/*.py``, one table `PLANTED` per lesson: the solution with one thing wrong.
"""

import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from course_lib.errors import DataError
from course_lib.grading import masters, own_code
from course_lib.grading.check import SECONDS_OF_CPU, SECONDS_PER_CASE, CheckJob, Report, observe
from course_lib.grading.hidden import hidden_cases, load, solutions_folder
from course_lib.grading.task import Case, Observation, Task
from course_lib.grading.tasks import TASKS
from course_lib.launching.launch import RankError, RanksHung

PATIENCE = 1.0
"""Seconds without a rank that computes, in a wrong answer: most of those that wait do so in vain."""
MOST = 10.0
"""CPU seconds that a wrong answer may take for a case."""
PATIENT = (SECONDS_PER_CASE, SECONDS_OF_CPU)
"""Both, of a right one."""


@dataclass(frozen=True)
class Planted:
    """A wrong answer.

    Attributes:
        task: name of the task.
        name: what is wrong with it.
        loses: the property that shows it.
        old: text of the solution; empty where the whole of it is another.
        new: what stands in its place.
    """

    task: str
    name: str
    loses: str
    old: str
    new: str

    def source(self, solution: str) -> str:
        """The wrong answer's source.

        Raises:
            DataError: the solution does not hold the text just once.
        """
        if not self.old:
            return self.new
        if solution.count(self.old) != 1:
            raise DataError(
                f"planted answer `{self.name}` of {self.task}: its text stands "
                f"{solution.count(self.old)} times in the solution",
                "give a longer piece of it",
            )
        return solution.replace(self.old, self.new)


@dataclass(frozen=True)
class Row:
    """Outcome of one answer.

    Attributes:
        task: name of the task.
        answer: ``stub``, ``does nothing``, ``solution``, or the planted answer's name.
        points: that it earned.
        maximum: that there were.
        failed: properties that did not hold.
        loses: the property that had to fail; empty for those that are not planted.
        holds: whether it went as it should.
    """

    task: str
    answer: str
    points: int
    maximum: int
    failed: tuple[str, ...]
    loses: str
    holds: bool


def planted(folder: Path) -> list[Planted]:
    """All planted answers of a solutions folder."""
    return [answer for path in sorted((folder / "planted").glob("*.py")) for answer in load(path).PLANTED]


def function_of(task: Task, source: str) -> Callable[..., Any]:
    """The function that an answer cell of our own defines. Learners' sources are never run like this."""
    return own_code.run(source, own_code.registered(f"answer {task.name}", source))[task.function]


def table(tasks: Mapping[str, Task] | Iterable[Task] = TASKS, folder: Path | None = None, seed: int = 1) -> list[Row]:
    """Grade stubs, solutions and planted answers of some tasks, on public cases and on hidden ones drawn by ``seed``.

    Raises:
        DataError: a file of the instructor's is missing or does not fit.
    """
    folder = folder or solutions_folder()
    chosen = list(tasks.values() if isinstance(tasks, Mapping) else tasks)
    rows = []
    for task, answers in _answers(folder, chosen):
        cases = [*task.cases(random.Random(0)), *hidden_cases(task, random.Random(seed), folder)]
        limited = [
            (function_of(task, source), *(PATIENT if answer == "solution" else (PATIENCE, MOST)))
            for answer, _, source in answers
        ]
        judged = zip(answers, reports(task, limited, cases), strict=True)
        rows += [_row(report, answer, loses) for (answer, loses, _), report in judged]
    return rows


def reports(
    task: Task, answers: Sequence[tuple[Callable[..., Any], float, float]], cases: Sequence[Case]
) -> list[Report]:
    """Reports of a check on several answers, each with its `CheckJob.seconds` and `CheckJob.most`."""
    jobs = [
        [CheckJob(task, function, case, number, seconds, most) for case in cases]
        for number, (function, seconds, most) in enumerate(answers)
    ]
    return [
        Report(task, tuple(itertools.chain.from_iterable(map(task.judge, cases, observed))))
        for observed in _observed(jobs)
    ]


def _observed(answers: Sequence[Sequence[CheckJob]]) -> list[list[list[Observation]]]:
    """Observations of several answers, by answer, case and rank, in as few launches as may be.

    Where a launch ends badly its answers are launched anew in two halves, until the one that ends it is alone: then
    its error is what is observed.
    """
    if not answers:
        return []
    try:
        observed = iter(observe([job for jobs in answers for job in jobs]))
    except (RankError, RanksHung) as error:
        if len(answers) == 1:
            return [[[{"error": str(error).splitlines()[0]}] for _ in answers[0]]]
        half = len(answers) // 2
        return _observed(answers[:half]) + _observed(answers[half:])
    return [[next(observed) for _ in jobs] for jobs in answers]


def _answers(folder: Path, tasks: list[Task]) -> Iterable[tuple[Task, list[tuple[str, str, str]]]]:
    """For each task its answers: name, the property that has to fail, source."""
    wrong = planted(folder)
    for task in tasks:
        path = folder / f"{task.lesson}.ipynb"
        full = masters.answers(path)
        if task.name not in full:
            raise DataError(f"{path} has no answer cell for {task.name}", f"give one the grade_id {task.grade_id}")
        yield (
            task,
            [
                ("stub", "", masters.answers_of(masters.released(path))[task.name]),
                ("does nothing", "", f"def {task.function}(*args, **options):\n    return None\n"),
                ("solution", "", full[task.name]),
                *(
                    (answer.name, answer.loses, answer.source(full[task.name]))
                    for answer in wrong
                    if answer.task == task.name
                ),
            ],
        )


def _row(report: Report, answer: str, loses: str) -> Row:
    maximum = sum(report.task.points.values())
    if answer == "solution":
        holds = report.points == maximum
    elif not loses:
        holds = report.points == 0
    else:
        holds = loses in report.failed
    return Row(report.task.name, answer, report.points, maximum, report.failed, loses, holds)
