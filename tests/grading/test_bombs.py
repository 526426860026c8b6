"""Answers that take all that they can get: each is over within its limit and two seconds, and nothing is left of it.

The forks stop at 256 processes, below what the kernel allows an ordinary user here. It allows root any number, and a
test must not take down the machine that it runs on where the grader's own count should fail.
"""

from unittest import mock

import psutil
import pytest

from course_lib.grading.runner import grade_source
from course_lib.grading.sandbox import Sandbox
from course_lib.grading.watch import Limits
from tests.grading.toys import toy_tasks

LIMITS = Limits(seconds=3.0, memory=600 << 20, processes=24, file_size=32 << 20, disk=32 << 20, output=4 << 20)
BOMBS = {
    "forks": ("import os, time\nfor i in range(8): os.fork()\ntime.sleep(60)\n", "too many processes"),
    "forks that spin, in sessions of their own": (
        "import os, time\nend = time.monotonic() + 20\nfor i in range(8):\n    if os.fork() == 0: os.setsid()\n"
        "while time.monotonic() < end: pass\n", "too many processes"),
    "memory": ("held = []\nwhile True:\n    try: held.append(b'x' * (8 << 20))\n    except MemoryError: pass\n",
               "timeout"),
    "memory of many": ("import os, time\nfor i in range(4): os.fork()\nheld = b'x' * (60 << 20)\ntime.sleep(9)\n",
                       "too much memory"),
    "disk": ("i = 0\nwhile True:\n    i += 1\n    try: open(str(i), 'wb').write(bytes(1 << 20))\n"
             "    except OSError: pass\n", "timeout"),
    "output": ("import os\nwhile True:\n    for fd in range(1, 20):\n        try: os.write(fd, b'x' * 65536)\n"
               "        except OSError: pass\n", "more output than is allowed"),
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_over_within_its_limit_and_two_seconds(name, sandbox):
    source, error = BOMBS[name]
    ends, run = [], Sandbox.run
    before = set(psutil.Process().children(recursive=True))
    with mock.patch.object(Sandbox, "run", lambda *args: ends.append(run(*args)) or ends[-1]):
        verdict = grade_source(toy_tasks.TOTAL, source, hidden=None, limits=LIMITS, sandbox=sandbox)
    assert verdict.points == 0
    assert error in verdict.error
    assert 0 < ends[0].seconds <= LIMITS.seconds + 2
    assert set(psutil.Process().children(recursive=True)) == before
