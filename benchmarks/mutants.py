"""Mutants of the exercises' solutions: how many changes of each solution its check rejects.

    python benchmarks/mutants.py            # writes mutants.md; about ten minutes on two cores
    python benchmarks/mutants.py ddp.ring   # prints the tables of some exercises or lessons

Exit code 1 if a mutant was accepted that solutions/equivalent.py does not explain, or the other way.
"""

import datetime
import sys
from collections.abc import Iterator, Sequence

import torch

from benchmarks.harness import options, publish, table
from course_lib.commands.grade import chosen
from course_lib.grading import mutants
from course_lib.grading.tasks import TASKS


def counts(rows: Sequence[mutants.MutantRow]) -> Iterator[tuple[str, int, int, int]]:
    """By exercise, and of all: mutants, those rejected, and the others."""
    for name in [*dict.fromkeys(row.mutant.task for row in rows), "all"]:
        mine = [row for row in rows if name in (row.mutant.task, "all")]
        rejected = sum(bool(row.failed) for row in mine)
        yield name, len(mine), rejected, len(mine) - rejected


def accepted(rows: Sequence[mutants.MutantRow]) -> Iterator[tuple[str, int, str, str]]:
    """Mutants that are as good as the solution, and those that were not graded as listed: the change, and why."""
    for row in rows:
        if not row.failed or not row.holds:
            why = "LISTED, AND REJECTED" if row.failed else row.equivalent or "NOT LISTED"
            yield row.mutant.task, row.mutant.line, f"`{row.mutant.change}`".replace("||", "or"), why


def main() -> int:
    """Run them, and write the page, or print the tables of some."""
    names = options(__doc__, names={"nargs": "*", "help": "exercises or lessons [all]"}).names
    torch.set_num_threads(1)
    rows = mutants.run(chosen(TASKS, ",".join(names)))
    tables = (
        table("exercise | mutants | rejected | equivalent", counts(rows), right=(1, 2, 3)),
        table("exercise | line | change | why it is as good", accepted(rows), right=(1,)),
    )
    if names:
        print("\n\n".join(tables))
    else:
        rejected = sum(bool(row.failed) for row in rows)
        publish(
            "mutants",
            "Mutants of the solutions",
            (),
            f"Made by `python benchmarks/mutants.py` on {datetime.date.today()}, with hidden cases drawn by seed 1. A "
            "mutant is a solution with one operator, constant, keyword or line changed. Of "
            f"{len(rows)} mutants the checks reject {rejected}; the other {len(rows) - rejected} change nothing that "
            "an exercise asks for, each for the reason below.",
            *tables,
        )
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
