"""Answers that take all that they can get: each is ended for the limit that it breaks, and nothing is left of it.

Those that break a limit before their time is over have a minute, which none of them takes, so that no busy machine
turns one verdict into another; those that go on for ever have three seconds.

The forks stop at 128 processes, below what the kernel allows an ordinary user here, and at 1,024 where a cgroup holds
them. A test must not take down the machine that it runs on, and without a cgroup the kernel allows root any number.
"""

import contextlib
from dataclasses import replace
from unittest import mock

import psutil
import pytest

from course_lib.grading import sandbox as sandbox_module
from course_lib.grading.cgroup import Cgroup, processes_limited
from course_lib.grading.runner import grade_source
from course_lib.grading.supervisor import THREADS
from course_lib.grading.watch import Limits
from tests.grading.toys import toy_tasks

LIMITS = Limits(seconds=240.0, memory=600 << 20, processes=24, file_size=32 << 20, disk=32 << 20, output=4 << 20)
BOMBS = {
    "forks": ("import os, time\nfor i in range(7): os.fork()\ntime.sleep(100)\n", "too many processes"),
    "forks that spin, in sessions of their own": (
        "import os, time\nend = time.monotonic() + 100\nfor i in range(7):\n    if os.fork() == 0: os.setsid()\n"
        "while time.monotonic() < end: pass\n",
        "too many processes",
    ),
    "memory": (
        "held = []\nwhile True:\n    try: held.append(b'x' * (8 << 20))\n    except MemoryError: pass\n",
        "timeout",
    ),
    "memory of many": (
        "import os, time\nfor i in range(4): os.fork()\nheld = b'x' * (60 << 20)\ntime.sleep(100)\n",
        "too much memory",
    ),
    "disk": (
        "i = 0\nwhile True:\n    i += 1\n    try: open(str(i), 'wb').write(bytes(1 << 20))\n    except OSError: pass\n",
        "timeout",
    ),
    "output": (
        "import os\nwhile True:\n    for fd in range(1, 20):\n        try: os.write(fd, b'x' * 65536)\n"
        "        except OSError: pass\n",
        "more output than is allowed",
    ),
}


THOUSAND = (
    "import os, time\nend = time.monotonic() + 100\nfor i in range(10):\n    try: os.fork()\n"
    "    except BlockingIOError: pass\nwhile time.monotonic() < end: pass\n"
)


def processes(cgroup):
    return int((cgroup.folder / "pids.current").read_text())


def graded_bomb(source, sandbox, limits=LIMITS):
    """Its verdict; nothing of it is left."""
    before = set(psutil.Process().children(recursive=True))
    verdict = grade_source(toy_tasks.TOTAL, source, hidden=None, limits=limits, sandbox=sandbox)
    assert set(psutil.Process().children(recursive=True)) <= before  # of those some may have ended meanwhile
    return verdict


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_ended_for_what_it_takes_and_leaves_nothing(name, sandbox):
    """None ends by itself within the test's time."""
    source, error = BOMBS[name]
    verdict = graded_bomb(source, sandbox, replace(LIMITS, seconds=3.0) if error == "timeout" else LIMITS)
    assert verdict.points == 0
    assert error in verdict.error


def test_a_thousand_spinning_forks_are_ended_where_a_cgroup_holds_them(sandbox):
    kernel, peaks, hit = [], [], Cgroup.hit
    with processes_limited(9) as possible:
        if possible is None:
            pytest.skip("no cgroup can be made here: not root, or no hierarchy with pids that can be written")

    @contextlib.contextmanager
    def noted(limit):
        with processes_limited(limit) as cgroup:
            kernel.append(int((cgroup.folder / "pids.max").read_text()))
            assert kernel[0] == limit < 256  # before any of it runs
            with mock.patch.object(Cgroup, "hit", lambda self: peaks.append(processes(self)) or hit(self)):
                yield cgroup

    with mock.patch.object(sandbox_module, "processes_limited", noted):
        verdict = graded_bomb(THOUSAND, sandbox)
    assert verdict.error == "too many processes"
    assert 1 < max(peaks) <= kernel[0] == THREADS * LIMITS.processes
