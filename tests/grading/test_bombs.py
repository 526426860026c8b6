"""Answers that take all that they can get: each is ended for the limit that it breaks, and nothing is left of it.

Those that break a limit before their time is over have four minutes, which none of them takes, so that no busy machine
turns one verdict into another; those that go on for ever have three seconds. The forks stop at 128 processes: a test
must not take down the machine that it runs on, and without a cgroup the kernel allows root any number.
"""

from dataclasses import replace

import psutil
import pytest

from course_lib.grading.runner import grade_source
from course_lib.grading.watch import Limits
from tests.grading.hostile import BOMBS
from tests.grading.toys import toy_tasks

LIMITS = Limits(seconds=240.0, memory=600 << 20, processes=24, file_size=32 << 20, disk=32 << 20, output=4 << 20)


def graded_bomb(source, sandbox, limits=LIMITS):
    """Its verdict; nothing of it is left."""
    before = set(psutil.Process().children(recursive=True))
    verdict = grade_source(toy_tasks.TOTAL, source, hidden=None, limits=limits, sandbox=sandbox)
    assert set(psutil.Process().children(recursive=True)) <= before  # of those some may have ended meanwhile
    return verdict


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_ended_for_what_it_takes_and_leaves_nothing(name, sandbox):
    """None ends by itself within the test's time."""
    source, error = BOMBS[name]["source"], BOMBS[name]["ended for"]
    verdict = graded_bomb(source, sandbox, replace(LIMITS, seconds=3.0) if error == "timeout" else LIMITS)
    assert verdict.points == 0
    assert error in verdict.error
