"""The checker of one task for programs (:mod:`course_lib.grading.task_bundle`): from an answer's text to a score."""

import argparse
import json
import random
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from course_lib.errors import CourseError, DataError
from course_lib.grading.cells import python_of
from course_lib.grading.hidden import hidden_cases
from course_lib.grading.runner import grade_source
from course_lib.grading.sandbox import Limits, Sandbox
from course_lib.grading.tasks import TASKS
from course_lib.writing import write_text

MOST_BYTES = 1 << 20


def main(folder: Path, arguments: Sequence[str] | None = None) -> int:
    """Grade an answer to the task in a folder, and print the result as JSON.

    Returns:
        0 at full points, 1 below, 2 where nothing could be graded.
    """
    parser = argparse.ArgumentParser(prog="check.py", description=f"grade an answer to {folder.name}")
    parser.add_argument("answer", type=Path, help="text of Python")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result there too")
    parser.add_argument("--seed", type=int, metavar="N", help="draws the hidden cases [a new one]")
    args = parser.parse_args(arguments)
    try:
        outcome = result(folder, args.answer, secrets.randbits(63) if args.seed is None else args.seed)
        if args.out:
            write_text(args.out, json.dumps(outcome, indent=1) + "\n")
    except (CourseError, OSError) as error:
        print(f"check.py: {error}", file=sys.stderr)
        return 2
    print(json.dumps(outcome, indent=1))
    return 0 if outcome["points"] == outcome["maximum"] else 1


def result(folder: Path, answer: Path, seed: int) -> dict[str, Any]:
    """Result of an answer: points by property, their sum, and their share of the maximum as ``score``.

    Args:
        folder: the task's, with task.json.
        answer: text of Python.
        seed: draws the hidden cases.
    Raises:
        DataError: no such task, or no readable answer.
        SandboxError: no sandbox here.
    """
    about = json.loads((folder / "task.json").read_text(encoding="utf-8"))
    if about["name"] not in TASKS:
        raise DataError(
            f"no task {about['name']} in this grader", "write the tasks anew: course release --format tasks"
        )
    if not answer.is_file() or answer.stat().st_size > MOST_BYTES:
        raise DataError(f"{answer} is no file of at most 1 MiB", "give the text of an answer")
    task, sandbox = TASKS[about["name"]], Sandbox()
    sandbox.require()
    limits = Limits(seconds=about["seconds"], memory=int(about["memory_gib"] * 2**30))
    source = python_of(answer.read_text(encoding="utf-8", errors="replace")).text
    verdict = grade_source(
        task, source, limits=limits, sandbox=sandbox, hidden=hidden_cases(task, random.Random(f"{seed} {task.name}"))
    )
    return {
        "format": about["format"],
        "id": about["id"],
        "seed": seed,
        "score": round(verdict.points / verdict.maximum, 4),
        **verdict.to_json(),
    }
