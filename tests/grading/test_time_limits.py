"""Limits of what a learner's code takes: CPU time, and looks at which no rank computed; never the time on the wall."""

import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

from course_lib.grading import check as checking
from course_lib.grading import time_limits
from course_lib.grading.own_code import registered
from course_lib.grading.task import Case
from course_lib.grading.tasks import TASKS
from tests.waiting import until

ON_A_RANK = """
import time
import torch.distributed as dist
def ring_all_reduce(tensor):
    {}
    dist.all_reduce(tensor)
"""
SLOW_BUT_RIGHT = ON_A_RANK.format(
    "end = time.process_time() + 1.5 * (dist.get_rank() == 0)\n    while time.process_time() < end: pass"
)
LOOP = ON_A_RANK.format("while dist.get_rank() == 1: pass")
SLEEP = ON_A_RANK.format("if dist.get_rank() == 1: time.sleep(1000)")
GROUP = ON_A_RANK.format("if dist.get_rank() == 0: dist.new_group([0, 1])")
NO_END = "def learning_rate(step, peak, warmup, total):\n    while True: pass\n"


def report_of(name, source, number_of_cases=1):
    scope = {"__name__": "answer"}
    exec(compile(source, registered(f"answer {name}", source), "exec"), scope)
    cases = [
        case for case in TASKS[name].cases(random.Random(0)) if case.world_size == 2 or not TASKS[name].needs_ranks
    ]
    return checking.examine(TASKS[name], scope[TASKS[name].function], cases[:number_of_cases])


def test_who_computes_is_interrupted_by_cpu_time_and_who_sleeps_is_not():
    with time_limits.computing(0.2):
        time.sleep(0.5)
    with pytest.raises(TimeoutError, match="still computing"), time_limits.computing(0.2):
        while True:
            pass


def test_an_interruption_that_comes_after_the_function_has_failed_does_nothing():
    def late():
        signal.raise_signal(signal.SIGALRM)

    before = signal.getsignal(signal.SIGALRM)
    with (
        pytest.raises(ValueError, match="its own"),
        time_limits._interrupted_by(signal.SIGALRM, time_limits.WAITS, late),
    ):
        raise ValueError("its own")
    assert signal.getsignal(signal.SIGALRM) == before


def test_a_rank_computes_if_a_thread_of_it_runs_but_not_its_watch():
    burner = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
    sleeper = subprocess.Popen(
        [sys.executable, "-S", "-c", "import time; print(flush=True); time.sleep(600)"], stdout=subprocess.PIPE
    )
    try:
        sleeper.stdout.readline()
        assert until(lambda: time_limits.computes([(burner.pid, 0)]), burner)
        assert until(lambda: not time_limits.computes([(sleeper.pid, 0)]), sleeper)
        assert not time_limits.computes([(burner.pid, burner.pid)]), "that thread is the watch"
    finally:
        burner.kill(), sleeper.kill()


@pytest.fixture
def looks(monkeypatch):
    """A function: how many looks an idle watch of twenty took at what is seen in turn, and what ended its wait."""

    def count(*seen):
        answers = iter(seen)
        monkeypatch.setattr(time_limits, "LOOK_SECONDS", 0.001)
        monkeypatch.setattr(time_limits, "computes", lambda ranks: next(answers))
        watch = time_limits.IdleWatch(0.02, time_limits.sockets())
        watch.start()
        try:
            with watch.watching([(os.getpid(), watch.native_id)]):
                watch.join()
                time.sleep(0.01)
        except TimeoutError as interrupted:
            return len(seen) - len(list(answers)), str(interrupted)

    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    return count


def test_waits_end_after_so_many_looks_at_which_hardly_anybody_computed(looks):
    idle, waking, busy = [False] * 20, [False] * 9 + [True], [True]
    assert looks(*idle, *busy) == (20, time_limits.WAITS)
    assert looks(*waking, *waking, *busy) == (20, time_limits.WAITS)
    assert looks(*busy * 50, *idle, *busy) == (68, time_limits.WAITS)
    assert looks(*[*waking[:5], *busy] * 10, *idle) == (68, time_limits.WAITS)


def test_a_rank_that_others_wait_for_may_compute_for_longer_than_a_hang_takes_to_be_found(monkeypatch):
    monkeypatch.setattr(checking, "SECONDS_PER_CASE", 0.5)
    report = report_of("ddp.ring", SLOW_BUT_RIGHT)
    assert "sum" not in report.failed and not any("error" in finding.found for finding in report.findings)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (LOOP, ["still computing", "(in line 5 of yours, `while dist.get_rank() == 1: pass`"]),
        (SLEEP, ["a hang: rank 1 is not in a collective (in line 5 of yours", "rank 0 waits for it in all_reduce"]),
        (GROUP, ["a hang: ", "rank 1"]),
    ],
    ids=["loop", "sleep", "new_group on one rank"],
)
def test_who_never_returns_is_told_and_the_launch_is_not_ended_for_it(source, said, monkeypatch):
    monkeypatch.setattr(checking, "SECONDS_PER_CASE", 1.0)
    monkeypatch.setattr(checking, "SECONDS_OF_CPU", 1.0)
    report = report_of("ddp.ring", source, number_of_cases=2)
    assert report.points == 0 and {finding.case[:12] for finding in report.findings} == {"case 1 of 2:"}
    for part in said:
        assert part in report.findings[0].found


def test_a_loop_without_ranks_is_told_with_its_line(monkeypatch):
    monkeypatch.setattr(checking, "SECONDS_OF_CPU", 0.5)
    found = {finding.found for finding in report_of("loop.warmup", NO_END, 3).findings}
    assert len(found) == 1 and "still computing" in (said := found.pop()) and "of yours" in said


def test_case_is_a_copy_of_what_a_check_hands_over():
    given = checking.case("ddp.ring", 2)
    assert isinstance(Case(2, given).inputs["tensors"], list) and given is not checking.case("ddp.ring", 2)
