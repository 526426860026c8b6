"""Mutants of the exercises' solutions: how many changes of each solution its check rejects.

    python benchmarks/mutants.py            # writes mutants.md; about ten minutes on two cores

Exit code 1 if a mutant was accepted that solutions/equivalent.py does not explain.
"""

import datetime
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from course_lib.grading import mutants  # noqa: E402
from course_lib.writing import write_text  # noqa: E402

HEAD = """# Mutants of the solutions

Made by `python benchmarks/mutants.py` on {date}, with hidden cases drawn by seed 1. A mutant is a solution with one
operator, constant, keyword or line changed. Of {count} mutants the checks reject {rejected}; the other {left} change
nothing that an exercise asks for, each for the reason below.

"""


def main() -> int:
    torch.set_num_threads(1)
    rows = mutants.run()
    rejected = sum(bool(row.failed) for row in rows)
    head = HEAD.format(date=datetime.date.today(), count=len(rows), rejected=rejected, left=len(rows) - rejected)
    write_text(ROOT / "benchmarks" / "mutants.md", head + mutants.table(rows) + "\n")
    return 0 if all(row.holds for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
