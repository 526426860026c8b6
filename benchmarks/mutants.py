"""Mutants of the exercises' solutions: how many changes of each solution its check rejects.

    python benchmarks/mutants.py            # writes mutants.md; about ten minutes on two cores
    python benchmarks/mutants.py ddp.ring   # prints the table of some exercises or lessons

Exit code 1 if a mutant was accepted that solutions/equivalent.py does not explain, or the other way.
"""

import datetime
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from course_lib.commands.grade import chosen  # noqa: E402
from course_lib.grading import mutants  # noqa: E402
from course_lib.grading.tasks import TASKS  # noqa: E402
from course_lib.writing import write_text  # noqa: E402

HEAD = """# Mutants of the solutions

Made by `python benchmarks/mutants.py` on {date}, with hidden cases drawn by seed 1. A mutant is a solution with one
operator, constant, keyword or line changed. Of {count} mutants the checks reject {rejected}; the other {left} change
nothing that an exercise asks for, each for the reason below.

"""


def table(rows: Sequence[mutants.MutantRow]) -> str:
    """A line for each exercise, and then each mutant that was not graded as listed or is as good, in Markdown."""
    lines = ["| exercise | mutants | rejected | equivalent |", "|---|---:|---:|---:|"]
    names = list(dict.fromkeys(row.mutant.task for row in rows))
    for name in [*names, "all"]:
        mine = [row for row in rows if name in (row.mutant.task, "all")]
        rejected = sum(bool(row.failed) for row in mine)
        lines.append(f"| {name} | {len(mine)} | {rejected} | {len(mine) - rejected} |")
    lines += ["", "| exercise | line | change | why it is as good |", "|---|---:|---|---|"]
    for row in rows:
        if not row.failed or not row.holds:
            why = "LISTED, AND REJECTED" if row.failed else row.equivalent or "NOT LISTED"
            lines.append(
                f"| {row.mutant.task} | {row.mutant.line} | `{row.mutant.change}` | {why} |".replace("||", "or")
            )
    return "\n".join(lines)


def main(names: Sequence[str]) -> int:
    torch.set_num_threads(1)
    rows = mutants.run(chosen(TASKS, ",".join(names)))
    if names:
        print(table(rows))
    else:
        rejected = sum(bool(row.failed) for row in rows)
        head = HEAD.format(date=datetime.date.today(), count=len(rows), rejected=rejected, left=len(rows) - rejected)
        write_text(ROOT / "benchmarks" / "mutants.md", head + table(rows) + "\n")
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
