"""``course grade``: points for what learners handed in, each answer in a sandbox of its own."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from course_lib.errors import ConfigError, nearest

if TYPE_CHECKING:
    from course_lib.grading.task import Task

NAME = "grade"
HELP = "grade submissions by behaviour, each answer in a sandbox of its own"


def register(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "submissions",
        nargs="*",
        type=Path,
        metavar="SUBMISSION",
        help="notebook, .py file, or a folder of them, as nbgrader lays it out too",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="where verdicts and reports go; a stopped run goes on")
    parser.add_argument("--tasks", default="", metavar="NAMES", help="tasks or lessons, with commas between [all]")
    parser.add_argument("--jobs", type=int, metavar="N", help="answers graded at a time [one per core]")
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="time for a task of a learner [60]")
    parser.add_argument("--memory_gib", type=float, default=4.0, metavar="G", help="memory for one [4]")
    parser.add_argument("--seed", type=int, metavar="N", help="draws the hidden cases [that of --out, or a new one]")
    parser.add_argument(
        "--solutions",
        type=Path,
        metavar="DIR",
        help="the instructor's folder, for hidden cases [that beside the course]",
    )
    parser.add_argument(
        "--no_sandbox", action="store_true", help="run answers as ordinary processes, which can do all that you can"
    )
    parser.add_argument(
        "--self_test", action="store_true", help="grade stubs, solutions and planted wrong answers, and print the table"
    )


def run(args: argparse.Namespace) -> int:
    """Grade and write the reports, or test the checks themselves.

    Raises:
        ConfigError: options that do not fit.
    """
    from course_lib.grading.tasks import TASKS
    from course_lib.launching.cores import usable_cores

    tasks = chosen(TASKS, args.tasks)
    if args.self_test:
        return self_test(tasks)
    if not args.submissions:
        raise ConfigError("no submissions", "course grade SUBMISSIONS... --out DIR")
    if args.out is None:
        raise ConfigError("no --out", "say where verdicts and reports go: --out DIR")
    jobs = usable_cores() if args.jobs is None else args.jobs
    if jobs < 1 or args.seconds <= 0 or args.memory_gib <= 0:
        raise ConfigError("--jobs, --seconds and --memory_gib have to be above 0")

    from course_lib.grading import reports
    from course_lib.grading.batch_grading import Grading
    from course_lib.grading.hidden import solutions_folder
    from course_lib.grading.sandbox import Limits, Sandbox
    from course_lib.grading.submissions import read_submissions

    solutions = args.solutions or solutions_folder()
    limits = Limits(seconds=args.seconds, memory=int(args.memory_gib * 2**30))
    submissions = read_submissions(args.submissions, tasks)
    grading = Grading(tasks, solutions, args.out, Sandbox(isolated=not args.no_sandbox), limits, jobs, args.seed)
    grades = grading.grade(submissions)
    reports.write_all(args.out, grades, tasks, submissions, isolated=not args.no_sandbox)
    if args.no_sandbox:
        print(reports.UNSAFE)
    unread = [problem for submission in submissions for problem in submission.problems]
    for problem in unread:
        print(f"not read: {problem}")
    print(f"{len(grades)} learners, {len(tasks)} tasks: {args.out / 'class.html'}, {args.out / 'grades.csv'}")
    return 0


def chosen(tasks: "dict[str, Task]", names: str) -> "dict[str, Task]":
    """The tasks named by their own name or their function's, or those of the named lessons; all where none is named.

    Raises:
        ConfigError: a name that is neither.
    """
    from course_lib.grading.task import name_of

    wanted = [name_of(name.strip(), tasks) or name.strip() for name in names.split(",") if name.strip()]
    known = [*tasks, *{task.lesson: None for task in tasks.values()}]
    for name in wanted:
        if name not in known:
            raise ConfigError(f"no task or lesson `{name}`", nearest(name, known))
    return {name: task for name, task in tasks.items() if not wanted or name in wanted or task.lesson in wanted}


def self_test(tasks: "dict[str, Task]") -> int:
    """Print what became of stubs, solutions and planted wrong answers; 0 where each went as it should."""
    from rich.console import Console
    from rich.table import Table

    from course_lib.grading.selftest import table

    rows = table(tasks)
    shown = Table("task", "answer", "points", "properties that failed", "")
    for row in rows:
        shown.add_row(
            row.task, row.answer, f"{row.points}/{row.maximum}", ", ".join(row.failed), "" if row.holds else "WRONG"
        )
    Console().print(shown)
    wrong = sum(not row.holds for row in rows)
    print(f"{len(rows)} answers, {wrong} not graded as they should be")
    return 1 if wrong else 0
