"""Make exercises/ anew from the masters in solutions/, as they are committed.

python tools/exercises.py
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from course_lib.grading.masters import release  # noqa: E402

if __name__ == "__main__":
    for path in release(ROOT / "solutions", ROOT / "exercises"):
        print(path.relative_to(ROOT))
