"""``course check``: what the answers in a notebook or a .py file do, property by property, in a terminal."""

import argparse
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
    cells = _parsed(args.file, args.tasks) if args.file is not None else None
    if cells is not None and not any(cells.values()):
        return EXIT_FAILED  # none of them is Python: said already, without the seconds that torch's import takes
    from course_lib.grading.check import result
    from course_lib.grading.tasks import TASKS

    if args.file is None:
        for task in TASKS.values():
            print(
                f"{task.name:24} {task.function:22} difficulty {task.difficulty}, {task.minutes} minutes, "
                f"lesson {task.lesson[:2]}: {task.title}"
            )
        return 0
    wanted = [_named(name.strip(), TASKS) for name in args.tasks.split(",")] if args.tasks else None
    sources = _sources(args.file, TASKS)
    broken = {name for name in TASKS if (cells or {}).get(TASKS[name].grade_id) is False}
    chosen = [name for name in wanted or list(sources) if name not in broken]
    if not chosen:
        raise DataError(
            f"{args.file} has no answer to any exercise",
            "give it an exercise notebook, or a .py file that defines an exercise's function",
        )
    reports = [_check(TASKS[name], sources.get(name), args.file) for name in chosen]
    results |= {report.task.name: result(report) for report in reports if report}
    return 0 if all(report and not report.failed for report in reports) and not broken else EXIT_FAILED


def _named(word: str, tasks: "dict[str, Task]") -> str:
    from course_lib.grading.task import name_of

    if (name := name_of(word, tasks)) is None:
        raise ConfigError(f"no exercise `{word}`", nearest(word, [*tasks, *(task.function for task in tasks.values())]))
    return name


def _parsed(path: Path, tasks: str | None) -> dict[str, bool] | None:
    """By grade_id, whether a notebook's answer cells are Python; what is wrong, and what is not run, is printed.

    ``tasks`` has names, or their functions', with commas between: the others' cells are not looked at.

    Returns:
        None: not a notebook, or one that `_sources` refuses.
    Raises:
        DataError: a script that is not Python.
    """
    import ast
    import re

    from course_lib.grading.cells import python_of

    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".py":
            script = python_of(text)
            print(*(f"{path}: {said}\n" for said in script.skipped), sep="", end="", flush=True)
            ast.parse(script.text, str(path))
            return None
        cells = json.loads(text)["cells"]
        answers = {
            cell["metadata"]["nbgrader"]["grade_id"]: "".join(cell["source"])
            for cell in cells
            if cell.get("metadata", {}).get("nbgrader", {}).get("solution")
        }
    except SyntaxError as error:
        raise DataError(_not_python(str(path), error)) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    words = [word.strip() for word in tasks.split(",")] if tasks else []
    parsed: dict[str, bool] = {}
    for name, source in answers.items():
        if words and not any(
            word.replace(".", "-") == name or re.search(rf"\b(def|class) +{re.escape(word)}\b", source)
            for word in words
        ):
            continue
        cell, named = python_of(source), name.replace("-", ".", 1)
        print(*(f"{named}: {said}\n" for said in cell.skipped), sep="", end="", flush=True)
        try:
            ast.parse(cell.text)
            parsed[name] = True
        except SyntaxError as error:
            parsed[name] = False
            print(_not_python(named, error), flush=True)
    return parsed or None


def _not_python(where: str, error: SyntaxError) -> str:
    shown = f", `{error.text.strip()[:80]}`" if error.text and error.text.strip() else ""
    return f"{where}: line {error.lineno} is not Python ({error.msg}){shown}"


def _sources(path: Path, tasks: "dict[str, Task]") -> dict[str, str]:
    """The text of each answer in a file, by task, as Python."""
    import ast

    from course_lib.grading.cells import python_of

    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DataError(f"{path} is not UTF-8", "save it as UTF-8") from None
    if path.suffix == ".py":
        text = python_of(text).text
        tree = ast.parse(text, str(path))
        defined = {
            node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        }
        return {name: text for name, task in tasks.items() if task.function in defined}
    from nbformat.reader import NotJSONError

    from course_lib.grading.masters import answers_of

    try:
        return {name: source for name, source in answers_of(text).items() if name in tasks}
    except (NotJSONError, AttributeError, KeyError, TypeError):
        raise DataError(f"{path} is not a notebook", "give a .ipynb or a .py file") from None


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
    except Exception as error:  # whatever the learner's code raises is for them to read
        print(f"{task.name}: the cell raised {own_code.told(error, file)}")
        return None
    function = scope.get(task.function)
    if not callable(function):
        print(f"{task.name}: the answer defines no function {task.function}")
        return None
    return check(task.name, function, folder=path.parent)
