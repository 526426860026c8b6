"""Exercises without ranks, checked by their own checker: what `check` prints, as JSON for the page.

It runs in the browser, by Pyodide, and in the tests, by Python.
"""

import contextlib
import io
import json
import random
from collections.abc import Callable
from typing import Any

from course_lib.grading import own_code
from course_lib.grading.report import Report, of_case
from course_lib.grading.task import Case, Observation, Task
from course_lib.grading.tasks import tasks_of

TASKS = {**tasks_of("pipeline"), **tasks_of("planning"), **tasks_of("planner")}
MOST_PRINTED = 10_000
"""Characters of what an answer prints that are shown, from the end."""


def names() -> str:
    """JSON of the tasks' names."""
    return json.dumps(list(TASKS))


def checked(name: str, source: str) -> str:
    """JSON of a check of an answer by the public cases: its points, the report, and what the answer printed.

    Args:
        name: of the task.
        source: text of Python that defines the task's function.
    """
    task, file = TASKS[name], own_code.registered("<your answer>", source)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            function = own_code.run(source, file).get(task.function)
        except (Exception, SystemExit) as error:
            said = own_code.told(error, file)
            if isinstance(error, SyntaxError) and error.lineno:
                said = f"{type(error).__name__}: {error.msg} (in {own_code.of_line(error.lineno, file)})"
            return json.dumps({"error": said})
        if not callable(function):
            return json.dumps({"error": f"the answer defines no `{task.function}`: keep that name"})
        cases = task.cases(random.Random(0))
        findings = [
            finding
            for number, case in enumerate(cases, 1)
            for finding in of_case(task, case, [_observed(task, function, case)], f"case {number} of {len(cases)}")
        ]
    report = Report(task, tuple(findings))
    return json.dumps(
        {
            "report": str(report),
            "points": report.points,
            "of": sum(task.points.values()),
            "printed": printed.getvalue()[-MOST_PRINTED:],
        }
    )


def _observed(task: Task, function: Callable[..., Any], case: Case) -> Observation:
    """What is observed of the function; what it raises is an error text."""
    try:
        return task.observe(function, case, 0)
    except (Exception, SystemExit) as error:
        return {"error": own_code.told(error, own_code.file_of(function))}
