"""A grader without any defence, as one writes it in an afternoon: the answer runs in the checker's own process.

    python naive.py ANSWER.py HIDDEN.json [--unpickle]

Run to show that an attack works; prints PASS or FAIL.
"""

import json
import pickle
import subprocess
import sys
from pathlib import Path

PUBLIC = [[3, 1, 4], [1, 5, 9, 2]]


def expected(values):
    return sum((i + 1) * value for i, value in enumerate(values))


def check(function):
    for values in [*PUBLIC, *json.loads(Path(sys.argv[2]).read_text())["hidden"]]:
        wanted = expected(values)
        assert function(list(values)) == wanted


def main():
    scope = {"__name__": "answer"}
    exec(Path(sys.argv[1]).read_text(), scope)
    try:
        check(scope["total"])
    except Exception:
        print("FAIL")
    else:
        print("PASS")


def unpickle():
    """In a process of its own, but believes what that says: a pickled list of results."""
    child = (
        "import pickle, sys; s = {}; exec(open(sys.argv[1]).read(), s); "
        "sys.stdout.buffer.write(pickle.dumps([s['total']([1, 2])]))"
    )
    result = pickle.loads(subprocess.run([sys.executable, "-c", child, sys.argv[1]], stdout=subprocess.PIPE).stdout)
    print("PASS" if result == [5] else "FAIL")


if __name__ == "__main__":
    unpickle() if "--unpickle" in sys.argv else main()
