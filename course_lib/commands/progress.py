"""``course progress``: a learner's answers and exercises by lesson, read from the files that they are kept in."""

import argparse
import ast
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from course_lib import learner_files
from course_lib.errors import ConfigError, DataError, nearest

if TYPE_CHECKING:
    from course_lib.grading.task import Task

NAME = "progress"
HELP = "show which questions of the lessons you have answered, how close, and which exercises you have solved"
RULE = "close: within 10 % of the value that the lesson found, or the right choice"


@dataclass
class Lesson:
    """A learner's progress in one lesson.

    Attributes:
        lesson: its notebook's name, without the ending.
        asked: questions in the notebook's cells.
        answered: of these.
        seen: answers whose result the lesson has shown.
        close: answers close to it.
        exercises: that belong to the lesson.
        solved: with all points in the last check.
        points: earned in the last checks.
        points_of: that can be earned.
    """

    lesson: str
    asked: int = 0
    answered: int = 0
    seen: int = 0
    close: int = 0
    exercises: int = 0
    solved: int = 0
    points: int = 0
    points_of: int = 0


def register(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        metavar="FOLDER",
        help="the course's folder, which holds notebooks/ and exercises/ [found from here upwards]",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--forget", metavar="LESSON", help="drop your answers of this lesson, to answer anew")


def run(args: argparse.Namespace) -> int:
    """Print the table, or forget a lesson's answers."""
    notebooks = _notebooks(args.folder)
    answers_file = learner_files.answers_file(notebooks)
    if args.forget:
        return _forget(args.forget, answers_file)
    answers = answers_file.read()
    results_file = learner_files.results_file(notebooks.parent / "exercises")
    results = results_file.read()
    from course_lib.commands.options import importing

    with importing():
        from course_lib.grading.tasks import TASKS
    paths = sorted(notebooks.glob("[0-9]*.ipynb"))
    lessons = {path.stem: Lesson(path.stem) for path in paths}
    for path in paths:
        _count_answers(lessons[path.stem], *questions_of(path), answers.get(path.stem, {}), answers_file.path)
    for task in TASKS.values():
        _count_exercise(
            lessons.setdefault(task.lesson, Lesson(task.lesson)), task, results.get(task.name), results_file.path
        )
    strangers = sorted(set(answers) - set(lessons))
    if args.json:
        print(
            json.dumps(
                {
                    "lessons": [asdict(lesson) for lesson in lessons.values()],
                    "total": asdict(_total(lessons)),
                    "other_lessons": strangers,
                    "close_means": RULE,
                },
                indent=1,
            )
        )
        return 0
    print(table([*lessons.values(), _total(lessons)]))
    print(f"\n{RULE}")
    if strangers:
        print(f"answers to lessons that are not here: {', '.join(strangers)}")
    return 0


def _notebooks(folder: Path | None) -> Path:
    """The folder of the lessons.

    Raises:
        ConfigError: there is none.
    """
    start = (folder or Path.cwd()).resolve()
    for place in [start] if folder else [start, *start.parents]:
        for candidate in (place / "notebooks", place):
            if next(candidate.glob("[0-9][0-9]_*.ipynb"), None) and candidate.name != "exercises":
                return candidate
    raise ConfigError(f"no lessons in {start}", "name the course's folder, which holds notebooks/")


def _forget(lesson: str, file: learner_files.LearnerFile) -> int:
    answers = file.read()
    if lesson not in answers:
        raise ConfigError(
            f"no answers to a lesson `{lesson}` in {file.path}", nearest(lesson, answers) if answers else ""
        )
    file.change(lambda content: content.pop(lesson))
    print(f"{lesson}: {len(answers[lesson])} answers dropped from {file.path}")
    return 0


def questions_of(path: Path) -> tuple[set[str], int]:
    """Names of a notebook's questions, and the number of those whose names are made while it runs.

    Raises:
        DataError: the file is not a notebook.
    """
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise DataError(f"{path} is not a notebook", "fetch it anew") from None
    names: set[str] = set()
    unnamed = 0
    for call in (call for source in sources for call in _questions(source)):
        if call.args and isinstance(call.args[0], ast.Constant):
            names.add(str(call.args[0].value))
        else:
            unnamed += 1
    return names, unnamed


def _questions(source: str) -> Iterator[ast.Call]:
    """Calls of `predict` with `ask` in a cell; a cell that is not Python yet, as while somebody edits it, has none."""
    from course_lib.grading.cells import python_of

    try:
        tree = ast.parse(python_of(source).text)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and getattr(node.func, "attr", getattr(node.func, "id", None)) == "predict"
            and any(keyword.arg == "ask" for keyword in node.keywords)
        ):
            yield node


def _count_answers(lesson: Lesson, names: set[str], unnamed: int, answers: dict[str, Any], path: Path) -> None:
    kept = {name: entry for name, entry in answers.items() if "value" in entry}
    for name, entry in kept.items():
        if not isinstance(entry.get("close", False), bool):
            raise DataError(
                f"{path} is damaged: `close` of {lesson.lesson}, {name} is neither true nor false",
                "mend it, or move it away",
            )
    others = sorted(kept.keys() - names)[:unnamed]  # an answer to a question that has left the notebook counts no more
    counted = [kept[name] for name in [*(kept.keys() & names), *others]]
    lesson.asked, lesson.answered = len(names) + unnamed, len(counted)
    lesson.seen = sum("measured" in entry for entry in counted)
    lesson.close = sum(entry.get("close", False) for entry in counted)


def _count_exercise(lesson: Lesson, task: "Task", result: dict[str, Any] | None, path: Path) -> None:
    possible = sum(task.points.values())
    earned = result.get("points") if result is not None else 0
    if type(earned) is not int:
        raise DataError(f"{path} is damaged: `points` of {task.name} is no whole number", "mend it, or move it away")
    lesson.exercises += 1
    lesson.solved += earned >= possible
    lesson.points += min(earned, possible)
    lesson.points_of += possible


def _total(lessons: dict[str, Lesson]) -> Lesson:
    fields = [name for name in vars(Lesson("")) if name != "lesson"]
    return Lesson("in all", **{name: sum(getattr(lesson, name) for lesson in lessons.values()) for name in fields})


def table(lessons: list[Lesson]) -> str:
    """Lines of at most 80 columns: a lesson each, the last one their sum."""
    rows = [("lesson", "answered", "close", "solved", "points")] + [
        (
            lesson.lesson.replace("_", " "),
            _of(lesson.answered, lesson.asked),
            _of(lesson.close, lesson.seen),
            _of(lesson.solved, lesson.exercises),
            _of(lesson.points, lesson.points_of),
        )
        for lesson in lessons
    ]
    width = min(28, max(len(row[0]) for row in rows))
    lines = [f"{row[0][:width]:{width}}" + "".join(f"{cell:>13}" for cell in row[1:]) for row in rows]
    return "\n".join([lines[0], *lines[1:-1], "-" * len(lines[0]), lines[-1]])


def _of(part: int, whole: int) -> str:
    return f"{part} of {whole}" if whole else "-"
