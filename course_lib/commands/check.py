"""``course check``: what the answers in a notebook or a .py file do, property by property, in a terminal."""

import argparse
import ast
import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from course_lib.errors import EXIT_FAILED, ConfigError, DataError, nearest

if TYPE_CHECKING:
    from course_lib.grading.report import Report
    from course_lib.grading.task import Task

NAME = "check"
HELP = "check your answers to exercises: which property holds, which doesn't, on which rank"


def register(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "file",
        nargs="?",
        type=Path,
        metavar="FILE",
        help="exercise notebook, or a .py file with the functions; without one, list the exercises",
    )
    parser.add_argument(
        "--tasks", metavar="NAMES", help="exercises or functions to check, with commas between [all in the file]"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the points as one JSON object, as my_results.json "
        'holds them and the book\'s "My progress" reads them; the reports go to standard error',
    )


def run(args: argparse.Namespace) -> int:
    """Check what was found, or list what there is."""
    if not args.json:
        return _run(args, {})
    if args.file is None:
        raise ConfigError("--json prints results, and no FILE is given", "name the notebook or .py file to check")
    results: dict[str, dict[str, object]] = {}
    with contextlib.redirect_stdout(sys.stderr):
        code = _run(args, results)
    print(json.dumps(results, indent=1))
    return code


def _run(args: argparse.Namespace, results: dict[str, dict[str, object]]) -> int:
    """Check or list; the results of exercises that were run are put into ``results``."""
    from course_lib.grading.check import result
    from course_lib.grading.tasks import TASKS

    if args.file is None:
        for task in TASKS.values():
            print(
                f"{task.name:24} {task.function:22} difficulty {task.difficulty}, {task.minutes} minutes, "
                f"lesson {task.lesson[:2]}: {task.title}"
            )
        return 0
    wanted = [_named(name.strip(), TASKS) for name in args.tasks.split(",")] if args.tasks else []
    sources = _sources(args.file, {name: TASKS[name] for name in wanted or TASKS})
    if not (wanted or sources):
        raise DataError(
            f"{args.file} has no answer to any exercise",
            "give it an exercise notebook, or a .py file that defines an exercise's function",
        )
    reports = [_check(TASKS[name], sources.get(name), args.file) for name in wanted or sources]
    results |= {report.task.name: result(report) for report in reports if report}
    return 0 if all(report and not report.failed for report in reports) else EXIT_FAILED


def _named(word: str, tasks: "dict[str, Task]") -> str:
    from course_lib.grading.task import name_of

    if (name := name_of(word, tasks)) is None:
        raise ConfigError(f"no exercise `{word}`", nearest(word, [*tasks, *(task.function for task in tasks.values())]))
    return name


def _sources(path: Path, tasks: "dict[str, Task]") -> dict[str, str]:
    """The text of each answer in a file, by task, as Python; what of them is not run is printed.

    Raises:
        DataError: a file that cannot be read, or a script that is not Python.
    """
    from course_lib.grading.cells import python_of
    from course_lib.grading.submissions import Unreadable, answers_in

    is_script = path.suffix == ".py"
    try:
        data = path.read_bytes()
        sources, skipped = answers_in(path.name, data, tasks)
        if is_script:
            ast.parse(python_of(data.decode("utf-8-sig")).text, str(path))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    except SyntaxError as error:
        raise DataError(_not_python(str(path), error)) from None
    except Unreadable as error:
        raise DataError(f"{path} {error}") from None
    for said in skipped:
        print(f"{path}: {said}" if is_script else said, flush=True)
    return sources


def _not_python(where: str, error: SyntaxError) -> str:
    shown = f", `{error.text.strip()[:80]}`" if error.text and error.text.strip() else ""
    return f"{where}: line {error.lineno} is not Python ({error.msg}){shown}"


def _check(task: "Task", source: str | None, path: Path) -> "Report | None":
    """Run one answer and print its report; None where there is nothing to run, which is printed, too."""
    from course_lib.grading import own_code
    from course_lib.grading.check import check

    if source is None:
        print(f"{task.name}: {path} has no answer to it")
        return None
    file = own_code.registered(f"answer {task.name}", source)
    try:
        scope = own_code.run(source, file)  # the learner's own, on their own machine
    except SyntaxError as error:
        print(_not_python(task.name, error))
        return None
    except Exception as error:  # whatever the learner's code raises is for them to read
        print(f"{task.name}: the cell raised {own_code.told(error, file)}")
        return None
    function = scope.get(task.function)
    if not callable(function):
        print(f"{task.name}: the answer defines no function {task.function}")
        return None
    return check(task.name, function, folder=path.parent)
