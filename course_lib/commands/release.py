"""``course release``: what learners get: the course with its exercises, without solutions and hidden checks.

With ``--format tasks`` the exercises are written for programs: a folder each, with prompt, files and checker.
"""

import argparse
from pathlib import Path

NAME = "release"
HELP = "write the learners' bundle: the course and its exercises, without solutions and hidden checks"


def register(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to make")
    parser.add_argument(
        "--format",
        choices=("course", "tasks"),
        default="course",
        help="course: for learners; tasks: each exercise with prompt, files, checker and time limit, "
        "to ask whether a program can write distributed training [course]",
    )
    parser.add_argument(
        "--tasks",
        default="",
        metavar="NAMES",
        help="with --format tasks: exercises or lessons, with commas between [all]",
    )


def run(args: argparse.Namespace) -> int:
    """Write the bundle and say what is in it.

    Raises:
        ConfigError: ``--tasks`` without ``--format tasks``.
    """
    from course_lib.errors import ConfigError
    from course_lib.grading.hidden import solutions_folder
    from course_lib.grading.masters import answers
    from course_lib.grading.release import bundle

    course = solutions_folder().parent
    if args.format == "tasks":
        from course_lib.commands.grade import chosen
        from course_lib.grading import task_bundle
        from course_lib.grading.tasks import TASKS

        folders = task_bundle.bundle(course, args.out, chosen(TASKS, args.tasks))
        print(f"{args.out}: {len(folders)} tasks; give a program prompt.md and workspace/ of one, and nothing else")
        return 0
    if args.tasks:
        raise ConfigError("--tasks goes with --format tasks", "learners get all exercises")
    written = bundle(course, args.out)
    count = sum(len(answers(path)) for path in written)
    print(f"{args.out}: {count} exercises in {len(written)} notebooks, {args.out / 'exercises'}")
    return 0
