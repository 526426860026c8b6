"""``course release``: what learners get: the course with its exercises, without solutions and hidden checks."""

import argparse
from pathlib import Path

NAME = "release"
HELP = "write the learners' bundle: the course and its exercises, without solutions and hidden checks"


def register(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to make")


def run(args: argparse.Namespace) -> int:
    """Write the bundle and say what is in it."""
    from course_lib.grading.hidden import solutions_folder
    from course_lib.grading.masters import answers
    from course_lib.grading.release import bundle

    written = bundle(solutions_folder().parent, args.out)
    count = sum(len(answers(path)) for path in written)
    print(f"{args.out}: {count} exercises in {len(written)} notebooks, {args.out / 'exercises'}")
    return 0
