"""``course check``: what the answers in a notebook or a .py file do, property by property, in a terminal."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from course_lib.errors import EXIT_FAILED, ConfigError, DataError, nearest

if TYPE_CHECKING:
    from course_lib.grading.task import Task

NAME = "check"
HELP = "check your answers to exercises: which property holds, which doesn't, on which rank"


def register(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE",
                        help="exercise notebook, or a .py file with the functions; without one, list the exercises")
    parser.add_argument("--tasks", metavar="NAMES", help="exercises to check, with commas between [all in the file]")


def run(args: argparse.Namespace) -> int:
    """Check what was found, or list what there is."""
    from course_lib.grading.tasks import TASKS

    if args.file is None:
        for task in TASKS.values():
            print(f"{task.name:24} {task.function:22} difficulty {task.difficulty}, {task.minutes} minutes, "
                  f"lesson {task.lesson[:2]}: {task.title}")
        return 0
    wanted = [name.strip() for name in args.tasks.split(",")] if args.tasks else None
    for name in wanted or ():
        if name not in TASKS:
            raise ConfigError(f"no exercise `{name}`", nearest(name, TASKS))
    sources = _sources(args.file, TASKS)
    chosen = wanted or list(sources)
    if not chosen:
        raise DataError(f"{args.file} has no answer to any exercise",
                        "give it an exercise notebook, or a .py file that defines an exercise's function")
    held = [_check(TASKS[name], sources.get(name), args.file) for name in chosen]
    return 0 if all(held) else EXIT_FAILED


def _sources(path: Path, tasks: "dict[str, Task]") -> dict[str, str]:
    """The text of each answer in a file, by task."""
    import ast

    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DataError(f"{path} is not UTF-8", "save it as UTF-8") from None
    if path.suffix == ".py":
        try:
            tree = ast.parse(text, str(path))
        except SyntaxError as error:
            raise DataError(f"{path}, line {error.lineno}: {error.msg}") from None
        defined = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
        return {name: text for name, task in tasks.items() if task.function in defined}
    from nbformat.reader import NotJSONError

    from course_lib.grading.masters import answers_of

    try:
        return {name: source for name, source in answers_of(text).items() if name in tasks}
    except (NotJSONError, AttributeError, KeyError, TypeError):
        raise DataError(f"{path} is not a notebook", "give a .ipynb or a .py file") from None


def _check(task: "Task", source: str | None, path: Path) -> bool:
    """Run one answer and print its report; whether it has all points."""
    from course_lib.grading.check import check

    if source is None:
        print(f"{task.name}: {path} has no answer to it")
        return False
    scope: dict[str, Any] = {"__name__": "answer"}
    try:
        exec(compile(source, str(path), "exec", dont_inherit=True), scope)  # the learner's own, on their own machine
    except Exception as error:  # whatever the learner's code raises is for them to read
        print(f"{task.name}: the cell raised {type(error).__name__}: {error}")
        return False
    function = scope.get(task.function)
    if not callable(function):
        print(f"{task.name}: the answer defines no function {task.function}")
        return False
    return not check(task.name, function, folder=path.parent).failed
